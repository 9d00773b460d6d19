"""Where output goes: a stream, or a file that is whole or not there; and progress beside it.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

to_file = click.option(
    "--output",
    "-o",
    "path",
    metavar="FILE",
    help="Write there, the whole of it or nothing; else to standard output.",
)


@contextmanager
def writing(name: str | None) -> Iterator[IO[str]]:
    """What to write to; a file has its name only when all is written.

    Args:
        name: of a file; None or `-`: standard output.

    Raises:
        ClickException: it cannot be written there.

    """
    if name is None or name == "-":
        yield sys.stdout
        return
    path = Path(name)
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        kind = stat.S_IFREG
    except (OSError, ValueError) as error:
        raise _unwritable(name, error) from error
    if stat.S_ISDIR(kind):
        raise click.ClickException(f"--output {name}: that is a folder")
    if not stat.S_ISREG(kind):  # a pipe, a device: there is nothing to put in its place
        with _opened(name, path, "w") as file:
            yield file
        return
    path = path.resolve()  # a link stays one
    ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _end) if ours else None  # so that no half file is left
    half = path.with_name(f".{path.name[:100]}.{os.urandom(4).hex()}.tmp")
    try:
        with _opened(name, half, "x") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            half.chmod(stat.S_IMODE(path.stat().st_mode))
        half.replace(path)
    except OSError as error:
        raise _unwritable(name, error) from error
    finally:
        half.unlink(missing_ok=True)
        if ours:
            signal.signal(signal.SIGTERM, before)


def _end(*_: object) -> None:
    raise SystemExit(143)  # as an unhandled SIGTERM tells it


def _opened(name: str, path: Path, mode: str) -> Any:
    try:
        return path.open(mode, encoding="utf-8", errors="backslashreplace", newline="")
    except OSError as error:
        raise _unwritable(name, error) from error


def _unwritable(name: str, error: Exception) -> click.ClickException:
    why = getattr(error, "strerror", None) or str(error)
    return click.ClickException(f"--output {name}: cannot be written: {why.lower()}")


@contextmanager
def busy(what: str, *, beside: IO[str] | None = None) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error, if that is a terminal; it is gone afterwards.

    Args:
        what: is under way.
        beside: what is written to meanwhile, thing by thing; where it is a terminal there is no
            bar. Else nothing is counted.

    Returns:
        What is to be called after each thing of which the bar shows how many there were.

    """
    shown = sys.stderr is not None and sys.stderr.isatty()
    if not shown or (beside is not None and beside.isatty()):
        yield lambda: None
        return
    from rich.progress import (  # noqa: PLC0415 - loaded when needed
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    from idemguard.report.paper import Paper  # noqa: PLC0415 - loaded when needed

    number = (TextColumn("{task.completed:,.0f}", markup=False),) if beside is not None else ()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        *number,
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=Paper(err=True), transient=True)
    with progress:
        task = progress.add_task(what, total=None)
        yield lambda: progress.advance(task)

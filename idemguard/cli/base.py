"""What the commands share: how they end, and whose ledger they read.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import sys
import threading
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TextIO

import click

from idemguard import config
from idemguard.errors import ConfigurationError, IdemguardError, StoreError
from idemguard.ledger import ExecutionLedger
from idemguard.report.words import brief, harmless
from idemguard.stores import without_password
from idemguard.stores.memory import MemoryStore
from idemguard.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from idemguard.report.paper import Paper
    from idemguard.stores import Store

FINE = 0
NOTHING = 1  # what was asked for is not there
ERROR = 2
INTERRUPTED = 130
LONGEST = 1_500  # characters of a line; names in it are cut, or left out, far sooner
STREAMS = ("demo", "export", "tail")  # they stop when nobody reads; the others do all they are to
CALM = ("tail",)  # Ctrl-C is how they end
_STORE, _NAMESPACE = "idemguard.store", "idemguard.namespace"
_KEPT_OUT = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)


class Program(click.Group):
    """A group of commands that end with a code, and whose every error is one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run it.

        Returns:
            The exit code; in standalone mode the process ends with it.

        """
        for stream in (sys.stdout, sys.stderr):
            if reconfigure := getattr(stream, "reconfigure", None):
                reconfigure(errors="backslashreplace")  # a file's name may hold anything
        with _onward():
            code = self._coded(args, prog_name, complete_var, extra)
        if standalone_mode:
            sys.exit(code)
        return code

    def _coded(
        self,
        args: Sequence[str] | None,
        prog_name: str | None,
        complete_var: str | None,
        extra: dict[str, Any],
    ) -> int:
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except (click.Abort, KeyboardInterrupt):
            no_more_interrupts()
            return _told("interrupted", INTERRUPTED)
        except click.UsageError as error:
            where = "idemguard" if error.ctx is None else error.ctx.command_path
            return _told(f"{error.format_message()} ({where} --help)", program=where)
        except click.ClickException as error:
            return _told(error.format_message())
        except (IdemguardError, OSError) as error:
            return _told(str(error))
        return code if isinstance(code, int) else FINE

    def invoke(self, context: click.Context) -> Any:
        """Run the command that was named; that nobody reads its output is no error.

        Nor is Ctrl-C, where a command ends by it: from here on, with all that it has yet to load.
        """
        try:
            code = super().invoke(context)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            _to_nobody(sys.stdout)
            return FINE
        except KeyboardInterrupt:
            if context.invoked_subcommand not in CALM:
                raise
            no_more_interrupts()
            return FINE
        return code


def no_more_interrupts() -> None:
    """Ctrl-C does nothing from now on: the process is about to end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _onward() -> Iterator[None]:
    there: Any = sys.stdout
    if there is None:
        yield
        return
    stands_for: Any = _Onward(there)
    with redirect_stdout(stands_for):
        yield


class _Onward:
    """Standard output that goes nowhere once nobody reads it, so that a command comes to its code.

    Args:
        stream: what it stands for, or the bytes beneath.

    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> _Onward:
        """For who writes bytes."""
        return _Onward(self._stream.buffer)

    def write(self, text: Any) -> int:
        """Write it, or lose it."""
        with self._patient():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is left, or lose it."""
        with self._patient():
            self._stream.flush()

    @contextmanager
    def _patient(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            context = click.get_current_context(silent=True)
            if context is not None and context.command.name in STREAMS:
                raise
            _to_nobody(self._stream)


def say(text: str, *, program: str = "idemguard") -> None:
    """One line on standard error, no longer than can be read; that nobody reads it changes nothing."""
    try:
        click.echo(f"{program}: {brief(harmless(' '.join(text.split())), LONGEST)}", err=True)
    except BrokenPipeError:
        _to_nobody(sys.stderr)


def _told(text: str, code: int = ERROR, *, program: str = "idemguard") -> int:
    say(text, program=program)
    return code


def _to_nobody(stream: Any) -> None:
    """What is still to be written there, at the very end too, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def standard_input() -> TextIO:
    """What is piped in.

    Raises:
        ClickException: it was closed before we began.

    """
    if sys.stdin is None:
        raise click.ClickException("standard input is closed")
    return sys.stdin


def paper(file: IO[str] | None = None) -> Paper:
    """What to draw on; what draws is loaded now, so that completion need not wait for it."""
    from idemguard.report.paper import Paper  # noqa: PLC0415 - loaded when needed

    return Paper(file)


def absent(text: str) -> int:
    """Say that what was asked for is not there.

    Returns:
        The exit code for it.

    """
    return _told(text, NOTHING)


# --- whose ledger ----------------------------------------------------------------------------------


def _noted(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.meta[f"idemguard.{parameter.name}"] = value


def where(function: Any) -> Any:
    """Gives a command the options `--store` and `--namespace`; the later of two counts."""
    for option in (
        click.option(
            "--namespace", metavar="NAME", expose_value=False, callback=_noted,
            help="Whose ledger; else IDEMGUARD_NAMESPACE, else default.",
        ),
        click.option(
            "--store", metavar="URL", expose_value=False, callback=_noted,
            help="Where it is, as sqlite:///agents.db or redis://host:6379/0; else "
            "IDEMGUARD_STORE, else the project's own file.",
        ),
    ):  # fmt: skip
        function = option(function)
    return function


def shown_store() -> str | None:
    """The same, for commands that are shown; None also where it holds a password."""
    store = given_store()
    return None if store is None or without_password(store) != store else store


def given_store() -> str | None:
    """The store that the command line names, or None."""
    found: str | None = click.get_current_context().meta.get(_STORE)
    return found


def given_namespace() -> str | None:
    """The namespace that the command line names, or None."""
    found: str | None = click.get_current_context().meta.get(_NAMESPACE)
    return found


@dataclass(frozen=True)
class Place:
    """Where the ledger is.

    Attributes:
        store: open for the command.
        ledger: of the namespace.

    """

    store: Store
    ledger: ExecutionLedger

    @property
    def namespace(self) -> str:
        """Whose ledger."""
        return self.ledger.namespace


def _masked(text: str, url: str) -> str:
    """A sentence about a URL, which may hold a password wherever it is wrong."""
    if user := url.rpartition("@")[0].rpartition("://")[2]:
        text = text.replace(user, "***")
    return re.sub(r"(password=)[^&\s'\"]+", r"\1***", text)


@contextmanager
def opened(*, begun: bool = False, writes: bool = False) -> Iterator[Place]:
    """The ledger that the options, the environment or the project name.

    A file is not made, and one that holds nothing is left so: it is read as an empty ledger.

    Args:
        begun: one that holds nothing yet is an error too.
        writes: the command changes it; else an error of rights is told as to a reader.

    Raises:
        ConfigurationError: it cannot be read from here, or there is none yet.
        StoreError: the store says so.

    """
    named = given_store() or os.environ.get("IDEMGUARD_STORE")
    try:
        settings = config.settings({"store": given_store(), "namespace": given_namespace()})
        store = config.store(settings)
    except ConfigurationError as error:
        raise click.ClickException(_masked(str(error), named or "")) from error
    if isinstance(store, MemoryStore):
        raise ConfigurationError(
            "memory:// is of one process alone, and this command is another: "
            "name a file or a server that both use"
        )
    if isinstance(store, SqliteStore):
        there = store.path.exists()
        if there and not store.path.is_file():
            raise ConfigurationError(f"{store.path} is no file, and no ledger")
        empty = there and not store.path.stat().st_size
        if not there or (empty and begun):
            raise ConfigurationError(
                f"there is no ledger yet: {'an empty' if there else 'no'} file {store.path}"
                + ("" if named else "; where is the store? (--store, IDEMGUARD_STORE)")
            )
        store = MemoryStore() if empty else store
    with closing(store):
        try:
            yield Place(store, ExecutionLedger(store, namespace=config.namespace(settings)))
        except StoreError as error:
            if writes or not isinstance(store, SqliteStore) or not _kept_out(error):
                raise
            raise StoreError(
                f"{store.path}: {error.__cause__}; who reads a SQLite ledger writes to the file and "
                "its folder too (WAL): give this user the right to, or read a copy (--store)"
            ) from error


def _kept_out(error: StoreError) -> bool:
    """Whether a file, or its folder, may not be written to."""
    code = getattr(error.__cause__, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _KEPT_OUT


def answer(choices: Sequence[str]) -> Callable[[Any], Any]:
    """Gives a command the option `--format`; the first choice counts where it is not given."""
    return click.option(
        "--format", "form", type=click.Choice(choices), default=choices[0], show_default=True,
    )  # fmt: skip

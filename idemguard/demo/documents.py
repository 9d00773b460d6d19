"""Which files of a folder can be read as text, and why the others cannot.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import stat
import time
import unicodedata
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from idemguard.demo.plan import WORKERS
from idemguard.demo.tasks import CHEAP, COSTLY, QUICK, words

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGEST = 200_000  # bytes of a file
MOST_TEXT = 1_000_000  # bytes of all of them
MOST_FILES = 60
MOST_LOOKS = 2_000  # entries of folders
DEEPEST = 20  # folders in folders
PATIENCE = 8.0  # seconds of looking
PASS = 10.0  # seconds that one pass may take by the delays alone

_OTHERS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnusableError(Exception):
    """A file or folder that cannot be used; the message says why."""


@dataclass
class Found:
    """What a folder holds.

    Attributes:
        folder: which.
        documents: the names of the files that can be used, relative to it.
        skipped: the others by name, each with the reason.

    """

    folder: Path
    documents: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def look_through(folder: Path, delay: float) -> Found:
    """Find the documents of a folder and of those inside it, in the order of their names.

    Args:
        folder: where to look.
        delay: seconds that a large model takes; with long ones there is time for few documents.

    Raises:
        UnusableError: there is no such folder, or nothing in it that can be used.

    """
    found = Found(folder)
    most, size = _room(delay), 0
    known: set[str] = set()
    until = time.monotonic() + PATIENCE
    for looked, (name, path) in enumerate(_entries(folder, found)):
        if looked >= MOST_LOOKS or time.monotonic() > until:
            found.skipped[name] = f"and all behind it: {looked:,} entries are enough"
            break
        if path is None:
            continue
        if len(found.documents) >= most:
            found.skipped[name] = f"left out, so that it ends soon: {most} documents are enough"
            continue
        try:
            size += _check(name, path, known, MOST_TEXT - size)
        except UnusableError as error:
            found.skipped[name] = str(error)
        else:
            found.documents.append(name)
    if not found.documents:
        why = f": all {len(found.skipped)} entries were skipped" if found.skipped else ""
        first = next((f", {shown(n)} as {r}" for n, r in found.skipped.items()), "")
        raise UnusableError(f"{shown(str(folder))} holds no text that could be read{why}{first}")
    return found


def read(path: Path) -> str:
    """The text of a file; never waits for a writer.

    Raises:
        UnusableError: it is no file, no text, or cannot be read.

    """
    try:
        data = _data(path)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError) and path.is_symlink()
        raise UnusableError("a link to nothing" if gone else _reason(error)) from error
    if not data.strip():
        raise UnusableError("empty")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnusableError("not UTF-8 text (UTF-16)")
    if b"\0" in data:
        raise UnusableError("binary")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        control = sum(byte < 9 or 13 < byte < 32 for byte in data[:1000])  # noqa: PLR2004 - ASCII
        raise UnusableError("binary" if control else "not UTF-8 text") from None
    if not words(text):
        raise UnusableError("no words in it")
    return text


def shown(name: str) -> str:
    """A name as it can be printed on one line."""
    safe = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)
    return safe if len(safe) <= 80 else f"{safe[:50]}…{safe[-29:]}"  # noqa: PLR2004 - a line's length


def _room(delay: float) -> int:
    """How many documents there is time for."""
    waiting = (2 * len(COSTLY) + QUICK * len(CHEAP)) * delay / WORKERS
    return MOST_FILES if waiting <= 0 else max(1, min(MOST_FILES, int(PASS / waiting)))


def _entries(folder: Path, found: Found, inside: str = "") -> Iterator[tuple[str, Path | None]]:
    """All that is below a folder: files with their path, and the rest, which is noted, without."""
    try:
        with os.scandir(folder / inside) as entries:
            there = sorted(islice(entries, 10 * MOST_LOOKS), key=lambda entry: entry.name)
    except OSError as error:
        if not inside:
            raise UnusableError(_no_folder(folder, error)) from error
        found.skipped[inside + "/"] = f"a folder: {_reason(error)}"
        return
    if inside and not there:
        found.skipped[inside + "/"] = "an empty folder"
    for entry in there:
        name = f"{inside}/{entry.name}" if inside else entry.name
        if entry.name.startswith("."):
            found.skipped[name] = "hidden"
            yield name, None
        elif not entry.is_dir(follow_symlinks=False):
            yield name, folder / name
        elif name.count("/") < DEEPEST:
            yield name, None
            yield from _entries(folder, found, name)
        else:
            found.skipped[name + "/"] = f"a folder more than {DEEPEST} deep"
            yield name, None


def _check(name: str, path: Path, known: set[str], room: int) -> int:
    """The size of a file that can be used."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnusableError("its name is no valid Unicode") from None
    normal = unicodedata.normalize("NFC", name)
    if normal in known:
        raise UnusableError("its name is that of another file, written with other code points")
    size = len(read(path).encode())
    if size > room:
        raise UnusableError(f"left out, so that it ends soon: {MOST_TEXT:,} bytes are enough")
    known.add(normal)
    return size


def _data(path: Path) -> bytes:
    there = path.stat()  # before it is opened: to open a device can have an effect
    _check_kind(there)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:  # noqa: PTH123 - a pipe must not be waited for
        _check_kind(os.fstat(file.fileno()))
        data = file.read(LARGEST + 1) or b""
    if len(data) > LARGEST:
        raise UnusableError(f"larger than {LARGEST // 1000} kB")
    return data


def _check_kind(there: os.stat_result) -> None:
    if stat.S_ISDIR(there.st_mode):
        raise UnusableError("a link to a folder")
    if not stat.S_ISREG(there.st_mode):
        raise UnusableError(_OTHERS.get(stat.S_IFMT(there.st_mode), "no regular file"))
    if not there.st_size:
        raise UnusableError("empty")
    if there.st_size > LARGEST:
        raise UnusableError(f"larger than {LARGEST // 1000} kB")


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is gone"
    if isinstance(error, PermissionError):
        return "may not be read"
    return (error.strerror or str(error)).lower()


def _no_folder(folder: Path, error: OSError) -> str:
    name = shown(str(folder))
    if isinstance(error, FileNotFoundError):
        return f"there is no folder {name}"
    if isinstance(error, NotADirectoryError):
        return f"{name} is a file, and a folder of text files is needed"
    return f"the folder {name} cannot be opened: {_reason(error)}"

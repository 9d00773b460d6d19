"""What other processes of a test run have written down: children, and workers that crashed.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pytest_idemguard.kept import Kept
from pytest_idemguard.place import NOTHING, ROOM

if TYPE_CHECKING:
    from pytest_idemguard.place import Place


class Journals:
    """The files of one folder, read as they grow.

    Args:
        folder: that they are in.
        place: what tells that there is a new one; None: they are looked for each time, and what
            this very process has written is read, too.

    """

    def __init__(self, folder: str, place: Place | None) -> None:
        self.folder = folder
        self._place = place
        self._read: dict[str, int] = {}  # how far
        self._done: set[str] = set()

    def quiet(self) -> bool:
        """Whether there can be nothing new."""
        place = self._place
        return place is not None and place.shared[ROOM] == NOTHING and not self._read

    def news(self) -> list[dict[str, Any]]:
        """The events that were not read yet; half-written ones are left."""
        if self._place is None or self._place.shared[ROOM] != NOTHING:
            self._list()
        found: list[dict[str, Any]] = []
        for name, place in list(self._read.items()):
            dead = not alive(int(name.partition("-")[0]))  # looked at first: then all is written
            try:
                data = _bytes(f"{self.folder}{os.sep}{name}", place)
            except OSError:
                data = b""
            whole = data[: data.rfind(b"\n") + 1]
            self._read[name] = place + len(whole)
            found += _parsed(whole)
            if dead:
                del self._read[name]
                self._done.add(name)
        return found

    def _list(self) -> None:
        if self._place is not None:
            self._place.unmark()  # before it is looked: who comes in between marks it anew
        try:
            names = Kept.listdir(self.folder)
        except OSError:
            return
        mine = None if self._place is None else f"{Kept.getpid()}-"
        for name in names:
            if not name.endswith(".jsonl") or name in self._done or name in self._read:
                continue
            if mine is None or not name.startswith(mine):
                self._read[name] = 0


def _bytes(path: str, start: int) -> bytes:
    """What stands in a file from there on."""
    file = Kept.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    try:
        if start:
            Kept.seek(file, start, os.SEEK_SET)
        found = []
        while data := Kept.read(file, 1 << 20):
            found.append(data)
        return b"".join(found)
    finally:
        Kept.close(file)


def _parsed(lines: bytes) -> list[dict[str, Any]]:
    found = []
    for line in lines.splitlines():
        try:
            found.append(Kept.loads(line))
        except ValueError:
            continue  # the disk was full
    return found


def outermost(namespace: str) -> str:
    """The one of the session that a namespace lies in."""
    return namespace.partition("/")[0].partition("%2F")[0]


def alive(pid: int) -> bool:
    """Whether a process goes on: one that has ended and is not yet waited for does not."""
    if pid == Kept.getpid() or os.name == "nt":  # there, asking a process would end it
        return True
    try:
        Kept.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is somebody else's
    try:
        told = _bytes(f"/proc/{pid}/stat", 0)
        return told.rpartition(b")")[2].split()[0] not in b"ZX"
    except (OSError, IndexError):
        return True

"""What other processes of a test run have written down: children, and workers that crashed.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

SETTLED = 50_000_000  # ns after which a folder's time can be trusted: it ticks coarsely


class Journals:
    """The files of one folder, read as they grow.

    Args:
        folder: that they are in.
        own: whether to read what this very process writes, too.

    """

    def __init__(self, folder: str, *, own: bool = False) -> None:
        self.folder = folder
        self._own = own
        self._read: dict[str, int] = {}  # how far
        self._done: set[str] = set()
        self._looked = -1  # the folder's time when it was last listed

    def quiet(self) -> bool:
        """Whether there can be nothing new; one look at the folder."""
        if self._read:
            return False
        try:
            return os.stat(self.folder).st_mtime_ns == self._looked  # noqa: PTH116 - on every test
        except OSError:
            return True

    def news(self) -> list[dict[str, Any]]:
        """The events that were not read yet; half-written ones are left."""
        self._list()
        found: list[dict[str, Any]] = []
        for name, place in list(self._read.items()):
            dead = not alive(int(name.partition("-")[0]))  # looked at first: then all is written
            try:
                data = Path(self.folder, name).read_bytes()[place:]
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
        try:
            changed = os.stat(self.folder).st_mtime_ns  # noqa: PTH116 - as above
            if changed == self._looked:
                return
            names = os.listdir(self.folder)  # noqa: PTH208 - names are all that is wanted
        except OSError:
            return
        self._looked = changed if time.time_ns() - changed > SETTLED else -1
        mine = f"{os.getpid()}-"
        for name in names:
            if not name.endswith(".jsonl") or name in self._done or name in self._read:
                continue
            if self._own or not name.startswith(mine):
                self._read[name] = 0


def _parsed(lines: bytes) -> list[dict[str, Any]]:
    import json

    found = []
    for line in lines.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the disk was full
    return found


def alive(pid: int) -> bool:
    """Whether a process goes on: one that has ended and is not yet waited for does not."""
    if pid == os.getpid() or os.name == "nt":  # there, asking a process would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is somebody else's
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return True

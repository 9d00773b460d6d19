"""Which stores the conformance suite knows, and the clock that it gives them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from idemguard.stores import Store
from idemguard.stores.memory import MemoryStore
from idemguard.stores.redis import RedisStore
from idemguard.stores.sqlite import SqliteStore

NOON = 1_790_000_000_000 - 1_790_000_000_000 % 86_400_000 + 43_200_000  # ms


class Clock:
    """A clock that stands still until it is told, and is one for all processes that know its file.

    Args:
        path: of eight bytes that hold the time; made where there are none.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(NOON.to_bytes(8, "little"))
        with path.open("r+b") as file:
            self._time = mmap.mmap(file.fileno(), 8)

    def __call__(self) -> int:
        """The time, ms."""
        return int.from_bytes(self._time[:8], "little")

    def advance(self, ms: int) -> None:
        """Let so much time pass."""
        self._time[:8] = (self() + ms).to_bytes(8, "little")

    def __reduce__(self):
        return Clock, (self.path,)


class RealClock:
    """For a store that goes by a clock of its own: time passes by waiting."""

    def __call__(self) -> int:
        """The time, ms."""
        return time.time_ns() // 1_000_000

    def advance(self, ms: int) -> None:
        """Wait so long."""
        time.sleep(ms / 1000)


@dataclass(frozen=True)
class Kind:
    """One kind of store, as the suite must know it.

    Attributes:
        name: what its tests are called by.
        make: a new store object on the data of a folder (which is fresh for every test), by a
            clock of the test, or its own where that is None. Two objects of one folder are one
            store. A function of a module, so that another process can call it.
        shared: whether objects in several processes are one store, too.
        steerable: whether it goes by the clock that it is given. Where it does not, tests in
            which hours pass are left out.

    """

    name: str
    make: Callable[[Path, Clock | None], Store]
    shared: bool
    steerable: bool = True


_in_memory: dict[Path, MemoryStore] = {}


def _memory(folder: Path, clock: Clock | None) -> Store:
    if folder not in _in_memory:
        _in_memory.clear()
        _in_memory[folder] = MemoryStore(clock)
    return _in_memory[folder]


def _sqlite(folder: Path, clock: Clock | None) -> Store:
    return SqliteStore(folder / "store.db", clock=clock)


def _redis(folder: Path, clock: Clock | None) -> Store:
    return RedisStore((folder.parent / "redis-url").read_text(), clock=clock)


MEMORY = Kind("memory", _memory, shared=False)
SQLITE = Kind("sqlite", _sqlite, shared=True)
REDIS = Kind("redis", _redis, shared=True)  # its URL stands in a file beside the tests' folders

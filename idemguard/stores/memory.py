"""A store in the memory of one process.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

from idemguard.claim import aged, transition, waits, wakes
from idemguard.digests import keyed
from idemguard.forks import on_fork
from idemguard.record import Record, Status
from idemguard.stores.bridge import Direct
from idemguard.stores.room import Waiter, WaitingRoom
from idemguard.windows import HOUR, SPAN, Window, entries, rolled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemguard.claim import Answer, Command
    from idemguard.record import Address, Execution
    from idemguard.stores import Unpark
    from idemguard.windows import Counts, Key


class MemoryStore:
    """Records in a dictionary under a lock; shared by the threads and loops of one process.

    A signal handler, or a finaliser that garbage collection calls, may come in between, in the
    same thread and in the middle of a step: so that step looks whether anybody has, and the
    dictionaries are only iterated over in copies.

    Args:
        clock: tells ms; the wall clock where none is given.

    """

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock or _wall
        self._reset()
        on_fork(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._turn = 0  # how many commands were performed
        self._room = WaitingRoom()
        self._records: dict[Address, Record] = {}
        self._windows: dict[tuple[str, int, Key], Counts] = {}
        self._secrets: dict[str, bytes] = {}

    def forked(self) -> None:
        """Begin empty."""
        # a child has a memory of its own: what the parent holds is no longer seen here
        self._reset()

    @property
    def aio(self) -> Direct:
        """The store for calls on an event loop."""
        return Direct(self)

    def perform(self, command: Command) -> Answer:
        """One command, under the lock."""
        address = command.address
        command = keyed(command, lambda: self.secret(address.namespace))
        with self._lock:
            while True:
                turn, now = self._turn, self._clock()
                before = aged(self._records.get(address, Record()), now)
                after, answer = transition(before, command, now)
                booked: dict[tuple[str, int, Key], Counts] = {}
                for key, counts in entries(before, after, command, answer, now).items():
                    where = (address.namespace, SPAN, key)
                    booked[where] = Counter(self._windows.get(where))
                    booked[where].update(counts)
                whom = wakes(before, after, command, now)
                if turn == self._turn:  # and nobody comes in between from here on
                    self._turn += 1
                    if after is not before:
                        self._records[address] = after
                    self._windows.update(booked)
                    break
        self._room.call(address, whom)
        return answer

    def park(self, address: Address, holder: str | None, wake: Callable[[], None]) -> Unpark:
        """Wait in the room, unless what is waited for is over."""
        waiter = Waiter(holder, wake)
        self._room.enter(address, waiter)
        record, now = self.look(address)
        if not waits(record, holder, now) and self._room.leave(address, waiter):
            wake()
        return self._room.unpark(address, waiter)

    def look(self, address: Address) -> tuple[Record, int]:
        """The record as time has left it, and the clock."""
        with self._lock:
            now = self._clock()
            return aged(self._records.get(address, Record()), now), now

    def addresses(self, namespace: str, prefix: str) -> list[Address]:
        """Where there are records whose fingerprint starts so."""
        with self._lock:
            now = self._clock()
            return [
                address
                for address, record in self._records.copy().items()
                if address.namespace == namespace
                and address.fingerprint.startswith(prefix)
                and record.kept_until > now
            ]

    def overdue(self, namespace: str) -> list[Address]:
        """Where executions stand open whose lease is past."""
        with self._lock:
            now = self._clock()
            return [
                address
                for address, record in self._records.copy().items()
                if address.namespace == namespace
                and any(line.status is Status.OPEN and not line.lives(now) for line in record.lines)
            ]

    def lines(self, namespace: str, since: int, until: int) -> Iterator[Execution]:
        """The executions that started in this time, oldest first."""
        with self._lock:
            found = [
                line
                for address, record in self._records.copy().items()
                if address.namespace == namespace
                for line in record.lines
                if since <= line.claim.started < until
            ]
        return iter(sorted(found, key=lambda line: (line.claim.started, line.claim.token)))

    def windows(self, namespace: str, since: int, until: int) -> list[Window]:
        """The windows that overlap this time."""
        with self._lock:
            return [
                Window(key, span, dict(counts))
                for (name, span, key), counts in self._windows.copy().items()
                if name == namespace and key.start < until and since < key.start + span
            ]

    def secret(self, namespace: str) -> bytes:
        """The namespace's secret."""
        with self._lock:
            return self._secrets.setdefault(namespace, secrets.token_bytes(32))

    def tend(self, window_retention: int | None) -> None:
        """Remove what is over, roll windows up."""
        with self._lock:
            self._tend(self._clock(), window_retention)

    def _tend(self, now: int, window_retention: int | None) -> None:
        for address, record in self._records.copy().items():
            if record.kept_until <= now and self._records.get(address) is record:
                del self._records[address]
        by_namespace: dict[str, list[Window]] = {}
        for (name, span, key), counts in self._windows.copy().items():
            by_namespace.setdefault(name, []).append(Window(key, span, counts))
        for namespace, mine in by_namespace.items():
            drop, put = rolled(mine, now)
            if window_retention is not None:
                drop += [w for w in mine if w.key.start + w.span + window_retention <= now]
                put = [w for w in put if w.key.start + w.span + window_retention > now]
            for window in drop:
                self._windows.pop((namespace, window.span, window.key), None)
            for window in put:
                where = (namespace, HOUR, window.key)
                self._windows.setdefault(where, Counter()).update(window.counts)

    def close(self) -> None:
        """Nothing is held open."""


def _wall() -> int:
    return time.time_ns() // 1_000_000


@cache
def process_store() -> MemoryStore:
    """The one store that `memory://` names in this process."""
    return MemoryStore()

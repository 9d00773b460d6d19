"""How soon a waiter learns of what another process commits, and what waiting costs meanwhile.

Run `python benchmarks/wake.py`. Prints the delay from the leader's commit to the wake-up of a
waiter in another process, and the share of a core that a process with parked waiters takes, on a
quiet file and on one that a third process writes to all the time: where the system tells of
changes, and where it does not.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from idemguard.claim import Begin, Claimed, Complete
from idemguard.codec import Value
from idemguard.record import Address, Caller, Claim
from idemguard.stores import watch
from idemguard.stores.notice import Silence
from idemguard.stores.sqlite import SqliteStore

ROUNDS = 150
WATCHED = 3.0  # seconds
BUSY = 300  # commands a second on a busy file, at most
WAITERS = 1, 50
WAYS = "told", "polling"
CALLER = Caller("work", "w")
KEPT = Value("json", b"1")
processes = multiprocessing.get_context("spawn")


def claim(store: SqliteStore, number: int) -> Claim:
    """The claim on a task of its own."""
    begin = Begin(Address("default", f"{number:064x}"), f"n{number}", CALLER, 900_000)
    answer = store.perform(begin)
    assert isinstance(answer, Claimed)
    return answer.claim


def go(way: str) -> None:
    """Wait in this way, in this process."""
    if way == "polling":
        vars(watch)["listen"] = lambda _: Silence()


def used() -> float:
    """CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def wait(path: Path, way: str, waiters: int, pipe: Any) -> None:
    """Park on each claim that comes, beside others, and send the moment at which it is woken."""
    go(way)
    store = SqliteStore(path)
    for number in range(1, waiters):
        held = claim(store, 10**6 + number)
        store.park(held.address, held.id, lambda: None)
    while (held := pipe.recv()) is not None:
        woken: list[float] = []
        rang = threading.Event()

        def wake(woken: list[float] = woken, rang: threading.Event = rang) -> None:
            woken.append(time.monotonic())
            rang.set()

        store.park(held.address, held.id, wake)
        pipe.send(None)
        rang.wait(30)
        pipe.send(woken[0])


def write(path: Path, pipe: Any) -> None:
    """Claim task after task."""
    store = SqliteStore(path)
    for number in range(10**7, 10**8):
        claim(store, number)
        if pipe.poll(1 / BUSY):
            return


class Beside:
    """A process that writes to the file all the time."""

    def __init__(self, path: Path, *, busy: bool) -> None:
        self._ours, theirs = processes.Pipe()
        self._process = processes.Process(target=write, args=(path, theirs)) if busy else None

    def __enter__(self) -> None:
        if self._process is not None:
            self._process.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._ours.send(None)
            self._process.join()


def latency(path: Path, way: str, waiters: int) -> list[float]:
    """Seconds from the commit, as the leader's process knows it, to the wake-up."""
    ours, theirs = processes.Pipe()
    waiter = processes.Process(target=wait, args=(path, way, waiters, theirs), daemon=True)
    waiter.start()
    store, taken = SqliteStore(path), []
    for number in range(ROUNDS):
        held = claim(store, number)
        ours.send(held)
        ours.recv()  # it has parked
        time.sleep(random.uniform(0.03, 0.15))
        store.perform(Complete(held, KEPT, 900_000, 30_000))
        committed = time.monotonic()
        taken.append(max(0.0, ours.recv() - committed))
    ours.send(None)
    waiter.join()
    store.close()
    return sorted(taken)


def idle(path: Path, way: str, waiters: int, pipe: Any) -> None:
    """Send the share of a core that this process takes while so many wait on different tasks."""
    go(way)
    store = SqliteStore(path)
    for number in range(waiters):
        held = claim(store, number)
        store.park(held.address, held.id, lambda: None)
    threading.Event().wait(0.5)
    before, started = used(), time.monotonic()
    threading.Event().wait(WATCHED)
    pipe.send((used() - before) / (time.monotonic() - started))


def share(path: Path, way: str, waiters: int) -> float:
    """The same, from a process of its own."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=idle, args=(path, way, waiters, theirs), daemon=True)
    process.start()
    taken: float = ours.recv()
    process.join()
    return taken


def main() -> None:
    """Print the figures."""
    print("way      file   waiters    median       p99     worst   share of a core")
    with tempfile.TemporaryDirectory() as name:
        for busy in (False, True):
            for way in WAYS:
                for waiters in WAITERS:
                    path = Path(name) / f"{way}-{waiters}-{busy}.db"
                    with Beside(path, busy=busy):
                        taken = latency(path, way, waiters)
                    path = Path(name) / f"{way}-{waiters}-{busy}-share.db"
                    with Beside(path, busy=busy):
                        cost = share(path, way, waiters)
                    figures = statistics.median(taken), taken[int(0.99 * len(taken))], taken[-1]
                    print(f"{way:8} {'busy' if busy else 'quiet':6} {waiters:7} ",
                          *(f"{figure * 1000:6.1f} ms" for figure in figures),
                          f"{cost:15.2%}")  # fmt: skip


if __name__ == "__main__":
    main()

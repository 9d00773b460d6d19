"""How soon a waiter learns of what another process commits, and what waiting costs meanwhile.

Run `python benchmarks/wake.py`. Prints the delay from the leader's commit to the wake-up of a
waiter in another process, and the share of a core that a process with parked waiters takes.
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
from idemguard.stores.sqlite import SqliteStore

ROUNDS = 200
WATCHED = 2.0  # seconds
CALLER = Caller("work", "w")
KEPT = Value("json", b"1")


def claim(store: SqliteStore, number: int) -> Claim:
    """The claim on a task of its own."""
    begin = Begin(Address("default", f"{number:064x}"), f"n{number}", CALLER, 30_000)
    answer = store.perform(begin)
    assert isinstance(answer, Claimed)
    return answer.claim


def wait(path: Path, pipe: Any) -> None:
    """Park on each claim that comes, and send the moment at which it is woken."""
    store = SqliteStore(path)
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


def latency(folder: Path) -> list[float]:
    """Seconds from the commit, as the leader's process knows it, to the wake-up."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    path = folder / "wake.db"
    waiter = context.Process(target=wait, args=(path, theirs), daemon=True)
    waiter.start()
    store, taken = SqliteStore(path), []
    for number in range(ROUNDS):
        held = claim(store, number)
        ours.send(held)
        ours.recv()  # it has parked
        time.sleep(random.uniform(0.005, 0.03))
        store.perform(Complete(held, KEPT, 900_000, 30_000))
        committed = time.monotonic()
        taken.append(max(0.0, ours.recv() - committed))
    ours.send(None)
    waiter.join()
    return taken


def idle(path: Path, waiters: int, pipe: Any) -> None:
    """Send the share of a core that this process takes while so many wait on different tasks."""
    store = SqliteStore(path)
    for number in range(waiters):
        held = claim(store, number)
        store.park(held.address, held.id, lambda: None)

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    threading.Event().wait(0.1)
    before, started = used(), time.monotonic()
    threading.Event().wait(WATCHED)
    pipe.send((used() - before) / (time.monotonic() - started))


def share(folder: Path, waiters: int) -> float:
    """The same, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    path = folder / f"idle-{waiters}.db"
    process = context.Process(target=idle, args=(path, waiters, theirs), daemon=True)
    process.start()
    taken: float = ours.recv()
    process.join()
    return taken


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        taken = sorted(latency(folder))
        p95 = taken[int(0.95 * len(taken))]
        print(f"woken in another process: median {statistics.median(taken) * 1000:.1f} ms, "
              f"p95 {p95 * 1000:.1f} ms, worst {taken[-1] * 1000:.1f} ms")  # fmt: skip
        for waiters in (0, 1, 50):
            print(f"{waiters} parked: {share(folder, waiters):.2%} of a core")


if __name__ == "__main__":
    main()

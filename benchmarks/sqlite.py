"""What a command costs on the SQLite store, beside the bare pair of statements.

Run `python benchmarks/sqlite.py`. The contestants take turns in one process, in short batches,
so that a ratio holds though single times wander; the figures are medians over the batches.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import statistics
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from idemguard.claim import Begin, Claimed, Complete
from idemguard.codec import Value
from idemguard.record import Address, Caller
from idemguard.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS, BATCH = 400, 5
CALLER = Caller("work", "w")
KEPT = Value("json", b'{"idemguard":1,"value":1}\n')
numbers = itertools.count()


def fresh() -> str:
    """A fingerprint that was never seen."""
    return sha256(os.urandom(8)).hexdigest()


def bare(folder: Path) -> Callable[[], None]:
    """What can be had by hand: a claim, and its end."""
    connection = sqlite3.connect(folder / "bare.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("CREATE TABLE task (key TEXT PRIMARY KEY, state TEXT, result TEXT)")

    def pair() -> None:
        key = fresh()
        connection.execute("INSERT OR IGNORE INTO task VALUES (?, 'held', NULL)", (key,))
        connection.execute("UPDATE task SET state = 'kept', result = '1' WHERE key = ?", (key,))

    return pair


def ours(folder: Path) -> dict[str, Callable[[], None]]:
    """An execution, and a reuse."""
    store = SqliteStore(folder / "ours.db")
    known = Address("default", fresh())

    def executed(address: Address | None = None) -> None:
        address = address or Address("default", fresh())
        answer = store.perform(Begin(address, f"n{next(numbers)}", CALLER, 30_000))
        assert isinstance(answer, Claimed)
        store.perform(Complete(answer.claim, KEPT, 900_000, 30_000))

    def reused() -> None:
        store.perform(Begin(known, f"n{next(numbers)}", CALLER, 30_000))

    executed(known)
    return {"executed": executed, "reused": reused}


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contestants = {"pair": bare(folder), **ours(folder)}
        taken: dict[str, list[float]] = {who: [] for who in contestants}
        for _ in range(ROUNDS):
            for who, act in contestants.items():
                started = time.perf_counter()
                for _ in range(BATCH):
                    act()
                taken[who].append((time.perf_counter() - started) / BATCH)
        pair = statistics.median(taken["pair"])
        print(f"pair      {pair * 1e6:6.1f} µs")
        for who in ("executed", "reused"):
            # of batches that stand beside each other, so that both met the same machine
            ratio = statistics.median(
                mine / theirs for mine, theirs in zip(taken[who], taken["pair"], strict=True)
            )
            print(f"{who:9} {statistics.median(taken[who]) * 1e6:6.1f} µs  {ratio:5.2f} times")


if __name__ == "__main__":
    main()

"""What a guarded call costs, beside the bare pair of statements and the library exactly-once.

Run `uv run --with exactly-once benchmarks/calls.py`. All contestants take turns in one
process, so that a ratio holds though single times wander; the figures are medians of rounds.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from idemguard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS, CALLS = 40, 50
numbers = itertools.count()


def bare(folder: Path) -> Callable[[], None]:
    """What can be had by hand: a claim, and its end."""
    connection = sqlite3.connect(folder / "bare.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("CREATE TABLE task (key TEXT PRIMARY KEY, state TEXT, result TEXT)")

    def pair() -> None:
        key = f"key-{next(numbers)}"
        connection.execute("INSERT OR IGNORE INTO task VALUES (?, 'held', NULL)", (key,))
        connection.execute("UPDATE task SET state = 'kept', result = '1' WHERE key = ?", (key,))

    return pair


def ours(url: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """An executed and a reused call."""
    guard = Guard(store=url)

    @guard.idempotent(task_type="work")
    def work(doc_id: str, lang: str = "en") -> dict[str, str]:
        return {"doc": doc_id, "lang": lang}

    work("known")
    return lambda: void(work(f"doc-{next(numbers)}")), lambda: void(work("known"))


def ours_async(url: str) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """The same as coroutines; each takes how many, and returns the seconds."""
    guard = Guard(store=url)

    @guard.idempotent(task_type="awork")
    async def work(doc_id: str, lang: str = "en") -> dict[str, str]:
        return {"doc": doc_id, "lang": lang}

    async def many(count: int, *, fresh: bool) -> float:
        await work("known")
        started = time.perf_counter()
        for _ in range(count):
            await work(f"doc-{next(numbers)}" if fresh else "known")
        return time.perf_counter() - started

    return (
        lambda count: asyncio.run(many(count, fresh=True)),
        lambda count: asyncio.run(many(count, fresh=False)),
    )


def exactly_once(folder: Path) -> dict[str, Callable[[], None]]:
    """The nearest library, where it is installed."""
    try:
        from exactly_once import Store, once  # noqa: PLC0415 - it need not be installed
    except ImportError:
        return {}
    found: dict[str, Callable[[], None]] = {}
    stores = {"sqlite": Store.sqlite(str(folder / "exactly.db")), "memory": Store.memory()}
    for name, store in stores.items():

        @once(store=store, key=lambda doc_id, lang="en": f"work:{doc_id}:{lang}")
        def work(doc_id: str, lang: str = "en") -> dict[str, str]:
            return {"doc": doc_id, "lang": lang}

        work("known")
        found[f"exactly-once {name} executed"] = lambda w=work: void(w(f"doc-{next(numbers)}"))
        found[f"exactly-once {name} reused"] = lambda w=work: void(w("known"))
    return found


def void(_: object) -> None:
    """Drop a value."""


def main() -> None:
    """Take turns, and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        acts: dict[str, Callable[[], None]] = {"bare pair": bare(there)}
        acts["idemguard sqlite executed"], acts["idemguard sqlite reused"] = ours(
            f"sqlite:///{there / 'ours.db'}"
        )
        acts["idemguard memory executed"], acts["idemguard memory reused"] = ours("memory://")
        acts |= exactly_once(there)
        spent: dict[str, list[float]] = {name: [] for name in acts}
        aexecuted, areused = ours_async(f"sqlite:///{there / 'async.db'}")
        spent |= {"idemguard sqlite executed, async": [], "idemguard sqlite reused, async": []}
        gc.disable()
        for _ in range(ROUNDS):
            for name, act in acts.items():
                started = time.perf_counter()
                for _ in range(CALLS):
                    act()
                spent[name].append((time.perf_counter() - started) / CALLS)
            spent["idemguard sqlite executed, async"].append(aexecuted(CALLS) / CALLS)
            spent["idemguard sqlite reused, async"].append(areused(CALLS) / CALLS)
            gc.collect()
        base = statistics.median(spent["bare pair"])
        print(f"{'':36} {'µs':>8} {'ratio to the pair':>18}")
        for name, times in spent.items():
            middle = statistics.median(times)
            print(f"{name:36} {middle * 1e6:8.1f} {middle / base:18.2f}")
    if not any(name.startswith("exactly") for name in acts):
        print("exactly-once is not installed: uv run --with exactly-once ...", file=sys.stderr)


if __name__ == "__main__":
    main()

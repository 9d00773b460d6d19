"""What a fingerprint costs, as a ratio to `json.dumps(sort_keys=True)` and SHA-256.

Run it: `python benchmarks/fingerprint.py`. Single times wander on a shared machine, so both
sides take turns and the medians of many short rounds are compared. `payload` is
`task_fingerprint`, `call` is an identified call, binding included. It ends with status 1 where a
payload costs more than 1.4 times the bare pair; text beyond ASCII is shown and not held to that,
since the bare pair escapes it where a fingerprint has to look for its normal form.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from idemguard.fingerprint import Identity, task_fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 1.4
SIZES = (1_000, 10_000, 100_000)
ROUNDS = 200


def records(count: int) -> dict[str, Any]:
    """Rows of a table, as a tool call carries them."""
    row = {
        "name": "Ada Lovelace",
        "tags": ["alpha", "beta"],
        "price": 12.37,
        "ok": True,
        "meta": {"lang": "en", "note": None},
        "text": "lorem ipsum dolor sit amet " * 2,
    }
    return {"doc_id": "a-17", "lang": "en", "rows": [{"id": i, **row} for i in range(count)]}


def messages(count: int) -> dict[str, Any]:
    """A conversation with a model."""
    turn = {"role": "user", "content": "Why did two agents run the same task? " * 8}
    return {"model": "m-1", "temperature": 0.2, "messages": [dict(turn) for _ in range(count)]}


def japanese(count: int) -> dict[str, Any]:
    """The same, half of it in Japanese."""
    text = "並列エージェントが同じタスクを二度実行した。" + "Why? " * 40
    turn = {"role": "user", "content": text}
    return {"model": "m-1", "temperature": 0.2, "messages": [dict(turn) for _ in range(count)]}


def embedding(count: int) -> dict[str, Any]:
    """A vector."""
    return {"doc_id": "a-17", "vector": [1 / (i + 3) for i in range(count)]}


def words(count: int) -> dict[str, Any]:
    """Nothing but short strings: the looking costs most beside them."""
    return {"doc_id": "a-17", "words": [f"w{i}" for i in range(count)]}


def numbers(count: int) -> dict[str, Any]:
    """Nothing but small integers."""
    return {"doc_id": "a-17", "ids": list(range(count))}


def of_size(make: Callable[[int], dict[str, Any]], size: int) -> dict[str, Any]:
    each = (len(json.dumps(make(101))) - len(json.dumps(make(1)))) / 100
    return make(max(1, round(size / each)))


def bare(payload: object) -> str:
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()


def ratios(payload: dict[str, Any], size: int) -> tuple[float, float, float]:
    identity = Identity(
        inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in payload]),
        task_type="benchmark",
    )
    sides: tuple[Callable[[], object], ...] = (
        lambda: bare(payload),
        lambda: task_fingerprint("benchmark", payload),
        lambda: identity.identify((), payload),
    )
    repeats = max(1, 20_000 // size)
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(ROUNDS):
        for side, taken in zip(sides, times, strict=True):
            start = time.perf_counter()
            for _ in range(repeats):
                side()
            taken.append((time.perf_counter() - start) / repeats)
    base, payload_time, call_time = map(statistics.median, times)
    return base * 1e6, payload_time / base, call_time / base


def main() -> int:
    worst = 0.0
    print(f"{'payload':<10} {'bytes':>7} {'bare pair':>11} {'payload':>8} {'call':>6}")
    for make in (records, messages, embedding, words, numbers, japanese):
        for size in SIZES:
            base, of_payload, of_call = ratios(of_size(make, size), size)
            if make is not japanese:
                worst = max(worst, of_payload)
            print(
                f"{make.__name__:<10} {size:>7} {base:>8.1f} µs {of_payload:>8.2f} {of_call:>6.2f}"
            )
    print(f"worst {worst:.2f}, limit {LIMIT}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())

"""A small ledger in which everything that a report tells of has happened once."""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

from idemguard import Guard, OutOfScope, agent, record_usage, worker

PRICES = {"m": {"input": "3", "output": "15"}}  # dollars per million tokens
HOSTILE = "bad\x1b[31m[red]\n:smile: " + "x" * 60  # a task type that means ill


def spends(input_tokens, output_tokens, model="m"):
    """A body that reports this."""

    def body(payload):
        record_usage(input_tokens=input_tokens, output_tokens=output_tokens, model=model)
        return {"done": payload}

    return body


def quiet(_):
    """A body that reports nothing."""


def hands_back(_):
    """A body that finds its task out of scope."""
    raise OutOfScope


def fails(_):
    """A body that fails."""
    raise ValueError


def tell(store, namespace="default", broken="translate-all"):
    """Have it all happen, in a store or at its URL; `broken` is the task type that fails."""
    observed = Guard(store=store, namespace=namespace, pricer=PRICES, mode="observe")
    enforced = Guard(store=store, namespace=namespace, pricer=PRICES)
    with agent("writer"):
        for number, name in ((0, "w-0"), (1, "w-1"), (2, "w-2"), (3, "w-0"), (0, "w-1")):
            with worker(name):
                observed.run_task("summarise", {"doc": number}, spends(1000, 100))
    with worker("w-2"), agent("reader"):
        for number in (0, 1, 0, 1, 0, 1):
            enforced.run_task("extract", {"doc": number}, spends(500, 0))
    with worker("w-3"):
        enforced.run_task("language", {"doc": 1}, spends(10, 1, "unheard-of"))
        enforced.run_task("date", {"doc": 1}, quiet)
        with suppress(ValueError):
            enforced.run_task(broken, 1, fails)
    for kind, name in (
        ("review", "w-1"), ("review", "w-2"), ("translate", "w-1"), ("translate", "w-1"),
    ):  # fmt: skip
        with worker(name), suppress(OutOfScope):
            enforced.run_task(kind, {"doc": 7}, hands_back)
    with worker("w-2"):
        enforced.run_task("translate", {"doc": 7}, spends(10, 0))
    with worker("w-1"):
        for number in range(8):
            payload = {"doc": 5, "run_id": "r-1", "x7": str(UUID(int=number * 7**40))}
            enforced.run_task("draft", payload, spends(100, 0))
        _nested(enforced)
    observed.close()
    enforced.close()


def _nested(guard):
    @guard.idempotent(task_type="inner")
    def inner(number):
        record_usage(input_tokens=500, output_tokens=0, model="m")

    @guard.idempotent(task_type="outer")
    def outer(number):
        record_usage(input_tokens=100, output_tokens=0, model="m")
        inner(number)
        inner(number + 1)

    outer(1)


def change(earlier, now, namespace):
    """More tasks, bigger ones, and two twice: in one store, by two clocks."""
    for store, numbers, tokens in ((earlier, range(8), 1000), (now, [*range(8, 20), 8, 9], 1500)):
        guard = Guard(store=store, namespace=namespace, pricer=PRICES, mode="observe")
        for number in numbers:
            with worker("w-0"):
                guard.run_task("summarise", {"doc": number}, spends(tokens, 100))
                if number % 2:
                    guard.run_task("extract", {"doc": number}, spends(500, 0))
        guard.close()

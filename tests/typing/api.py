"""What type checkers know of the public names: checked by mypy and pyright, never run."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any, assert_type

from idemguard import (
    ExecutionLedger,
    Guard,
    Outcome,
    Task,
    Usage,
    agent,
    bypass,
    capture,
    configure,
    cumulative_input_tokens,
    current,
    idempotent,
    record_usage,
    run_task,
    scope,
    task_fingerprint,
    worker,
)
from idemguard.errors import IdemguardError
from idemguard.stores.memory import MemoryStore

guard = Guard(store="memory://", lease=5, ttl=timedelta(minutes=1), namespace="n")


# --- decorators keep what they decorate ------------------------------------------------------------


@idempotent
def bare(doc_id: str, lang: str = "en") -> dict[str, int]:
    return {doc_id: 1, lang: 2}


@idempotent()
def empty(doc_id: str) -> int:
    return len(doc_id)


@idempotent(task_type="t", key=("doc_id",), lease=5.0, wait_timeout=timedelta(seconds=1))
def named(doc_id: str, *, lang: str = "en") -> list[str]:
    return [doc_id, lang]


@idempotent(max_run="auto", key=lambda bound: bound["doc_id"], mode="observe", guard=guard)
async def coroutine(doc_id: str) -> bytes:
    return doc_id.encode()


@guard.idempotent
def guards_bare(n: int) -> float:
    return n / 2


@guard.idempotent(task_type="t", usage=lambda result: Usage(input_tokens=result))
async def guards_named(n: int) -> int:
    return n


def decorated() -> None:
    assert_type(bare("a"), dict[str, int])
    assert_type(bare(doc_id="a", lang="de"), dict[str, int])
    assert_type(empty("a"), int)
    assert_type(named("a", lang="de"), list[str])
    assert_type(guards_bare(1), float)
    call: Callable[[str], int] = empty
    call("a")

    bare(1)  # type: ignore[arg-type]
    bare("a", "b", "c")  # type: ignore[call-arg]
    bare("a", language="de")  # type: ignore[call-arg]
    named("a", "de")  # type: ignore[call-arg]
    named(lang="de")  # type: ignore[call-arg]
    guards_bare("a")  # type: ignore[arg-type]


async def awaited() -> None:
    assert_type(await coroutine("a"), bytes)
    assert_type(await guards_named(1), int)
    pending: Coroutine[Any, Any, bytes] = coroutine("a")
    await pending

    await coroutine(1)  # type: ignore[arg-type]
    await guards_named()  # type: ignore[call-arg]


@idempotent
def stream(n: int) -> Iterator[str]:
    yield str(n)


@guard.idempotent(task_type="t")
async def astream(n: int) -> AsyncIterator[bytes]:
    yield bytes(n)


def streamed() -> None:
    assert_type(stream(1), Iterator[str])
    assert_type(list(stream(n=1)), list[str])

    stream("a")  # type: ignore[arg-type]
    stream()  # type: ignore[call-arg]


async def streamed_on_a_loop() -> None:
    assert_type(astream(1), AsyncIterator[bytes])
    async for chunk in astream(n=1):
        assert_type(chunk, bytes)

    astream("a")  # type: ignore[arg-type]
    astream(1, 2)  # type: ignore[call-arg]


class Methods:
    @idempotent
    def bare(self, n: int) -> str:
        return str(n)

    @guard.idempotent(keep=("self",))
    async def named(self, n: int) -> str:
        return str(n)

    @idempotent(volatile="self")
    def stream(self, n: int) -> Iterator[str]:
        yield str(n)

    @idempotent(volatile="self")
    async def astream(self, n: int) -> AsyncIterator[str]:
        yield str(n)

    @classmethod
    @idempotent
    def of_class(cls, n: int) -> str:
        return str(n)

    @staticmethod
    @idempotent(task_type="t")
    def of_nobody(n: int) -> str:
        return str(n)

    @idempotent
    @classmethod
    def over_class(cls, n: int) -> str:
        return str(n)

    @guard.idempotent(task_type="t")
    @staticmethod
    def over_nobody(n: int) -> str:
        return str(n)

    @idempotent(keep=("self",))
    def __call__(self, n: int) -> float:
        return n / 2


class Overriding(Methods):
    @idempotent(volatile=("self",))
    def bare(self, n: int) -> str:
        return super().bare(n)


def of_methods(methods: Methods) -> None:
    assert_type(methods.bare(1), str)
    assert_type(Methods.bare(methods, n=1), str)
    assert_type(Overriding().bare(1), str)
    assert_type(methods.stream(1), Iterator[str])
    assert_type(methods.astream(1), AsyncIterator[str])
    assert_type(Methods.of_class(1), str)
    assert_type(methods.of_class(n=1), str)
    assert_type(Methods.of_nobody(1), str)
    assert_type(methods.of_nobody(n=1), str)
    assert_type(Methods.over_class(1), str)
    assert_type(methods.over_class(n=1), str)
    assert_type(Methods.over_nobody(1), str)
    assert_type(methods.over_nobody(n=1), str)
    assert_type(methods(1), float)

    methods.bare("a")  # type: ignore[arg-type]
    methods.bare()  # type: ignore[call-arg]
    methods.stream("a")  # type: ignore[arg-type]
    methods.astream("a")  # type: ignore[arg-type]
    Methods.of_class("a")  # type: ignore[arg-type]
    Methods.of_nobody("a")  # type: ignore[arg-type]
    Methods.over_class("a")  # type: ignore[arg-type]
    Methods.over_nobody("a")  # type: ignore[arg-type]
    methods("a")  # type: ignore[arg-type]


async def of_methods_on_a_loop(methods: Methods) -> None:
    assert_type(await methods.named(1), str)
    await methods.named("a")  # type: ignore[arg-type]


class Doubler:
    def __call__(self, n: int) -> int:
        return 2 * n


def other_callables() -> None:
    assert_type(idempotent(Doubler())(1), int)
    assert_type(idempotent(task_type="t")(Doubler())(1), int)
    assert_type(idempotent(Doubler().__call__)(1), int)
    assert_type(guard.idempotent(functools.partial(pow, 2))(3), int)

    idempotent(Doubler())("a")  # type: ignore[arg-type]
    idempotent(5)  # type: ignore[call-overload]
    idempotent(task_type="t")(5)  # type: ignore[arg-type]


idempotent(lese=5)  # type: ignore[call-overload]
idempotent(lease="long")  # type: ignore[call-overload]
guard.idempotent(lese=5)  # type: ignore[call-overload]
guard.idempotent(ttl=[])  # type: ignore[call-overload]


# --- tasks by function -----------------------------------------------------------------------------


def count(payload: list[str]) -> int:
    return len(payload)


async def count_slowly(payload: list[str]) -> int:
    return len(payload)


async def tasks() -> None:
    assert_type(run_task("t", ["a"], count), Outcome[int])
    assert_type(run_task("t", ["a"], count, worker_id="w", lease=5).result, int)
    assert_type(run_task("t", ["a"], count_slowly), Awaitable[Outcome[int]])
    assert_type(await run_task("t", ["a"], count_slowly), Outcome[int])
    assert_type(guard.run_task("t", ["a"], count), Outcome[int])
    assert_type(await guard.run_task("t", ["a"], count_slowly, on_lost="raise"), Outcome[int])

    run_task(1, ["a"], count)  # type: ignore[call-overload]
    run_task("t", ["a"])  # type: ignore[call-overload]
    run_task("t", ["a"], count, key="n")  # type: ignore[call-overload]
    run_task("t", ["a"], count, lease="long")  # type: ignore[call-overload]
    guard.run_task("t", ["a"], count, lese=5)  # type: ignore[call-overload]


# --- settings --------------------------------------------------------------------------------------


assert_type(configure(store=MemoryStore(), pricer={"m": {"input": "3", "output": 15}}), Guard)
configure(pricer=lambda usage: Decimal(usage.input_tokens or 0), window_retention=None)
configure(lease="long")  # type: ignore[arg-type]
configure(lese=5)  # type: ignore[call-arg]
Guard(store=5)  # type: ignore[arg-type]
Guard(lese=5)  # type: ignore[call-arg]


# --- the rest --------------------------------------------------------------------------------------


def context() -> None:
    with worker("w"), agent("a"), scope("s"), bypass(), capture() as calls:
        assert_type(calls, list[Outcome[Any]])
    for outcome in calls:
        assert_type(outcome.source, str)
        assert_type(outcome.usage, Usage | None)
        assert_type(outcome.cost, Decimal | None)
        assert_type(outcome.execution_id, str | None)
        assert_type(outcome.runs, int | None)
        assert_type(outcome.leader, tuple[str, str] | None)
        assert_type(outcome.waited, float)
        assert_type(outcome.error, BaseException | None)
        outcome.result = 5  # type: ignore[misc]
    execution = current()
    if execution is not None:
        assert_type(execution.idempotency_key, str)
        assert_type(execution.token, int)
        assert_type(execution.lost, bool)
        execution.check()
        execution.record_usage(input_tokens=5)
    record_usage(Usage(input_tokens=5, model="m"))
    worker(5)  # type: ignore[arg-type]
    Usage(5)  # type: ignore[call-arg]


def by_hand() -> None:
    task = Task.of("t", {"n": 1}, volatile=("ts",))
    assert_type(task, Task)
    assert_type(guard.task_of(bare, "a"), Task)
    claim = guard.claim(task, worker_id="w")
    if claim is not None:
        assert_type(claim.renew(), float)
        assert_type(claim.complete({"n": 1}, usage=Usage(input_tokens=5)), bool)
        assert_type(claim.release(), bool)
    assert_type(guard.peek(task), Outcome[Any] | None)
    assert_type(guard.wait_result(task, 0.5), Outcome[Any] | None)
    guard.forget(task)
    guard.resolve(task, 5)
    guard.close()
    guard.claim("t")  # type: ignore[arg-type]


async def by_hand_on_a_loop() -> None:
    task = Task.of("t", {"n": 1})
    claim = await guard.aio.claim(task)
    if claim is not None:
        assert_type(await claim.renew(), float)
        assert_type(await claim.complete(5), bool)
        assert_type(await claim.release(), bool)
    assert_type(await guard.aio.peek(task), Outcome[Any] | None)
    assert_type(await guard.aio.wait_result(task, 0.5), Outcome[Any] | None)
    await guard.aio.forget(task)
    await guard.aio.resolve(task, 5)
    await guard.aio.ledger.runs(task.fingerprint)
    await guard.aio.close()


def ledgers() -> None:
    ledger = ExecutionLedger()
    fingerprint = task_fingerprint("t", {"n": 1})
    assert_type(fingerprint, str)
    assert_type(ledger.record(fingerprint, "w"), int)
    assert_type(ledger.runs(fingerprint), int)
    assert_type(ledger.workers(fingerprint), list[str])
    for line in guard.ledger.executions(fingerprint):
        assert_type(line.worker, str)
        assert_type(line.usage, Usage | None)
    assert_type(ledger.duplication_rate(since=timedelta(hours=1)), float)
    assert_type(ledger.doubled_share(), float)
    assert_type(ledger.task_type_summary("t"), dict[str, Any])
    assert_type(ledger.agent_summary("a"), dict[str, Any])
    assert_type(cumulative_input_tokens(5), int)
    ledger.duplication_rate(since=60)  # type: ignore[arg-type]


def errors_have_their_task(error: IdemguardError) -> tuple[str | None, str | None]:
    return error.task_type, error.fingerprint

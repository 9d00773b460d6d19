"""A call that is interrupted or cancelled at whatever moment leaves no claim behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from workers.lab import PATIENCE, Lab, Worker, found_a_claim, until
from workers.stores import Watched

from idemguard import Guard, Task
from idemguard.claim import Begin, Complete, Release, Withdraw
from idemguard.errors import StoreUnavailableError

if TYPE_CHECKING:
    from idemguard.claim import Command
    from idemguard.stores import Store

INTERRUPTS = 200
LEASE = 600.0
AT_ONCE = 20.0  # seconds; a claim that was left behind would hold others up for the lease
LONG = 150.0  # and what hundreds of calls may take under load


@pytest.fixture
def real(store: Store) -> Store:
    return store


# --- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.timeout(3 * LONG)
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("lab", ["memory", "sqlite", "redis"], indirect=True)
def test_an_interrupt_at_a_random_moment_leaves_no_claim(lab: Lab, kind: str) -> None:
    worker = lab.worker()
    given: dict[str, Any] = {"url": lab.url, "log": str(lab.log)}
    told = worker.begin(
        "interrupted",
        prefix="hit",
        rounds=INTERRUPTS,
        seed=f"{lab.url[:6]} {kind}",
        kind=kind,
        lease=LEASE,
        **given,
    ).end(LONG)
    assert {said["raised"] for said in told} <= {"KeyboardInterrupt", None}
    assert sum(said["raised"] is not None for said in told) > INTERRUPTS / 4
    nothing_left_behind(lab, worker, told)


@pytest.mark.timeout(3 * LONG)
@pytest.mark.parametrize("lab", ["memory", "sqlite", "redis"], indirect=True)
def test_an_interrupt_wherever_there_can_be_one_leaves_no_claim(lab: Lab) -> None:
    worker = lab.worker()
    given: dict[str, Any] = {"url": lab.url, "log": str(lab.log)}
    told = worker.begin("interrupted_everywhere", prefix="hit", lease=LEASE, **given).end(LONG)
    assert len(told) > 300
    nothing_left_behind(lab, worker, told)


def nothing_left_behind(lab: Lab, worker: Worker, told: list[dict[str, Any]]) -> None:
    """Whoever calls next gets on at once, and the ledger knows of every body that ran."""
    other = lab.worker() if lab.shared else worker  # memory:// is each process's own
    keys = [said["key"] for said in told]
    ran = Counter(start["key"] for start in lab.starts())
    before = other.do("ledger", url=lab.url)
    lines = Counter(line["fingerprint"] for line in before["lines"])
    assert {line["status"] for line in before["lines"]} <= {"ok", "failed"}
    for key in keys:
        assert ran[key] <= lines[lab.fingerprint(key)] <= 1, key
    after = other.begin(
        "quick", url=lab.url, log=str(lab.log), keys=keys, patience=AT_ONCE
    ).end(LONG)  # fmt: skip
    for said, found in zip(told, after, strict=True):
        assert found["source"] in ("executed", "reused"), f"{said}\n{found['text']}"
        assert found["took"] < AT_ONCE
        if said.get("source") == "executed":  # what was paid for is kept, whoever was hit
            assert found["source"] == "reused", said
    end = other.do("ledger", url=lab.url)
    odd = [line for line in end["lines"] if line["status"] not in ("ok", "failed")]
    figures = end["totals"]["lost"], end["totals"]["duplicates"]
    assert (figures, odd) == ((0, 0), [])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_interrupted_body_is_taken_over_at_once(lab: Lab, kind: str) -> None:
    leader, waiter = lab.workers(2)
    lab.call(leader, "task", kind=kind, steps=[("gate", lab.gate("never"))], lease=LEASE)
    lab.started("task")
    lab.call(waiter, "task", lease=LEASE)
    until(lambda: found_a_claim(lab.store) == 1, what="the other waits")
    interrupted = time.time()
    os.kill(leader.pid, signal.SIGINT)
    assert leader.end()["raised"] == "KeyboardInterrupt"
    assert waiter.end()["cause"] == "retry"
    assert lab.starts("task")[1]["at"] - interrupted < AT_ONCE
    assert [line.status for line in lab.lines("task")] == ["failed", "ok"]
    assert lab.ledger.totals()["duplicates"] == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_interrupted_waiter_disturbs_nobody(lab: Lab, kind: str) -> None:
    leader, gone, stays = lab.workers(3)
    lab.call(leader, "task", steps=[("gate", lab.gate("end"))], lease=LEASE)
    lab.started("task")
    for number, waiter in enumerate((gone, stays)):
        lab.call(waiter, "task", kind=kind, lease=LEASE)
        until(lambda n=number: found_a_claim(lab.store) == n + 1, what="it waits")
    os.kill(gone.pid, signal.SIGINT)
    told = gone.end()
    assert told["raised"] == "KeyboardInterrupt"
    assert told["took"] < LEASE
    lab.open("end")
    assert leader.end()["source"] == "executed"
    assert stays.end()["source"] == "reused"
    assert len(lab.starts("task")) == 1
    # calls that were answered without the store are booked together, a moment later
    until(lambda: lab.ledger.totals()["reused"], what="all are booked")
    totals = lab.ledger.totals()
    assert (totals["executed"], totals["reused"], totals["failed"]) == (1, 1, 1)


class Hit:
    """Sends this process a SIGINT once, before or after a store performs such a command."""

    def __init__(self, kind: type[Command]) -> None:
        self._kind = kind
        self.sent = 0

    def __call__(self, command: Command) -> bool:
        if isinstance(command, self._kind) and not self.sent:
            self.sent += 1
            signal.raise_signal(signal.SIGINT)
        return False


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("during", "status"), [(Begin, None), (Complete, "ok"), (Release, "failed")]
)
def test_an_interrupt_during_a_step_of_the_store(
    real: Store, during: type[Command], status: str | None, when: str
) -> None:
    hit = Hit(during)
    store = Watched(real, fails=hit) if when == "before" else Watched(real, after=hit)
    guard, started = Guard(store=store, lease=LEASE), []

    def body(_: Any) -> str:
        started.append(1)
        if during is Release:
            raise KeyError
        return "value"

    with pytest.raises(KeyboardInterrupt):
        guard.run_task("work", 1, body)
    assert hit.sent == 1
    assert [line.status for line in guard.ledger.lines()] == ([] if status is None else [status])
    assert len(started) == (0 if status is None else 1)
    again = guard.run_task("work", 1, lambda _: "again", wait_timeout=AT_ONCE, on_timeout="raise")
    cause = {None: "first", "ok": "first", "failed": "retry"}[status]
    assert (again.source, again.cause) == ("reused" if status == "ok" else "executed", cause)
    if status == "ok":
        assert again.result == "value"


def test_an_interrupt_while_a_claim_by_hand_is_taken(real: Store) -> None:
    hit = Hit(Begin)
    guard = Guard(store=Watched(real, after=hit), lease=LEASE)
    task = Task.of("work", 1)
    with pytest.raises(KeyboardInterrupt):
        guard.claim(task)
    assert list(guard.ledger.lines()) == []
    claim = guard.claim(task)
    assert claim is not None
    assert claim.release() is False


# --- cancelled before the body started -----------------------------------------------------------


class Held:
    """A store that has performed the first Begin, and answers it only when it is let go."""

    def __init__(self, real: Store) -> None:
        self.begun, self._go = threading.Event(), threading.Event()
        self.store = Watched(real, after=self._after)

    def _after(self, command: Command) -> None:
        if isinstance(command, Begin) and not self.begun.is_set():
            self.begun.set()
            assert self._go.wait(PATIENCE)

    async def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel it while the answer is on its way."""
        assert await asyncio.to_thread(self.begun.wait, PATIENCE)
        task.cancel()
        for _ in range(5):  # the cancellation has long arrived when the answer does
            await asyncio.sleep(0)
        self._go.set()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_claim_whose_caller_was_cancelled_is_given_back(real: Store) -> None:
    held, started = Held(real), []
    guard = Guard(store=held.store, lease=LEASE)

    async def body(_: Any) -> str:
        started.append(1)
        return "value"

    async def main() -> Any:
        task = asyncio.ensure_future(guard.run_task("work", 1, body))
        await held.cancel(task)
        assert started == []
        assert list(guard.ledger.lines()) == []
        totals = guard.ledger.totals()
        assert (totals["executions"], totals["tasks"], totals["calls"]) == (0, 0, 1)
        async with asyncio.timeout(AT_ONCE):
            return await guard.run_task("work", 1, body)

    again = asyncio.run(main())
    assert (again.source, again.cause, again.runs) == ("executed", "first", 1)
    assert started == [1]
    assert guard.ledger.totals()["executions"] == 1


def test_a_claim_given_back_goes_to_who_waits_for_it(real: Store) -> None:
    held, started = Held(real), []
    guard, others = Guard(store=held.store, lease=LEASE), Guard(store=real, lease=LEASE)

    async def body(name: str) -> str:
        started.append(name)
        return name

    async def main() -> Any:
        leaving = asyncio.ensure_future(guard.run_task("work", 1, lambda_of(body, "leaving")))
        assert await asyncio.to_thread(held.begun.wait, PATIENCE)
        waiting = asyncio.ensure_future(others.run_task("work", 1, lambda_of(body, "waiting")))
        await asyncio.to_thread(until, lambda: found_a_claim(real) == 1)
        await held.cancel(leaving)
        async with asyncio.timeout(AT_ONCE):
            return await waiting

    served = asyncio.run(main())
    assert (served.result, served.cause, served.runs) == ("waiting", "first", 1)
    assert started == ["waiting"]
    assert others.ledger.totals()["duplicates"] == 0


def lambda_of(body: Any, name: str) -> Any:
    async def call(_: Any) -> str:
        return await body(name)

    return call


def test_a_claim_by_hand_whose_caller_was_cancelled_is_given_back(real: Store) -> None:
    held = Held(real)
    guard, task = Guard(store=held.store, lease=LEASE), Task.of("work", 1)

    async def main() -> None:
        await held.cancel(asyncio.ensure_future(guard.aio.claim(task)))
        assert list(guard.ledger.lines()) == []
        claim = await guard.aio.claim(task)
        assert claim is not None
        assert await claim.complete("value") is True

    asyncio.run(main())
    found = guard.peek(task)
    assert found is not None
    assert found.result == "value"


def test_a_coroutine_that_never_began_asked_for_nothing(real: Store) -> None:
    store = Watched(real)
    guard = Guard(store=store)

    async def body(_: Any) -> int:
        return 1

    async def main() -> None:
        task = asyncio.ensure_future(guard.run_task("work", 1, body))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert store.names() == []


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_claim_whose_answer_was_lost_is_given_back(real: Store, kind: str) -> None:
    def breaks(command: Command) -> None:
        if isinstance(command, Begin) and not store.down:
            store.down = True
            raise StoreUnavailableError("the answer is lost")

    store: Watched = Watched(real, after=breaks)
    guard, others = Guard(store=store, lease=LEASE), Guard(store=real, lease=LEASE)

    async def abody(_: Any) -> int:
        raise AssertionError

    async def acall() -> None:
        await guard.run_task("work", 1, abody)

    def body(_: Any) -> int:
        raise AssertionError

    with pytest.raises(StoreUnavailableError):
        asyncio.run(acall()) if kind == "async" else guard.run_task("work", 1, body)
    assert [line.status for line in others.ledger.lines()] == ["open"]  # nobody can know better
    store.down = False
    until(lambda: Withdraw in map(type, store.seen) and not list(others.ledger.lines()))
    again = others.run_task("work", 1, lambda _: 2, wait_timeout=AT_ONCE, on_timeout="raise")
    assert (again.source, again.cause) == ("executed", "first")

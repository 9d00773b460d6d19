"""Ends that nobody plans: dropped coroutines, hostile values, hints meant for another, a busy neighbour."""

from __future__ import annotations

import asyncio
import gc
import shutil
import sqlite3
import threading

import pytest

from idemguard import Guard, Task, current, errors, record_usage
from idemguard.claim import Complete
from idemguard.stores.memory import MemoryStore

SOON = 60.0  # seconds; a machine under load is slow, but what takes longer hangs


# a loop that nobody wound up leaves the connections of its calls to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is:ResourceWarning")
def test_a_dropped_coroutine_is_an_execution_that_failed(guard, until):
    """Its loop is gone and nobody awaits it: what it has spent stays in the ledger."""

    inside = asyncio.Event()

    @guard.idempotent(task_type="t")
    async def task(n):
        record_usage(input_tokens=100, output_tokens=5)
        inside.set()
        await asyncio.sleep(100)

    async def begin():
        started = asyncio.get_running_loop().create_task(task(1))
        await inside.wait()
        return started.get_coro()

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it says that a task was pending, as it should
    coroutine = loop.run_until_complete(begin())
    coroutine.close()
    del coroutine
    loop.close()
    gc.collect()
    (line,) = until(lambda: [line for line in guard.ledger.lines() if line.ended is not None])
    assert (line.status, line.usage.input_tokens) == ("failed", 100)
    assert guard.run_task("t", {"n": 1}, lambda _: "anew").cause == "retry"
    del loop
    guard.close()
    gc.collect()


def test_a_hint_that_finds_an_onlooker_goes_on_to_a_waiter(guard_of, tapped, crew, until):
    guard = guard_of(store=tapped, lease=60)
    started, go_on, times = threading.Event(), threading.Event(), []

    @guard.idempotent(task_type="t")
    def task(n):
        times.append(n)
        if len(times) == 1:
            started.set()
            assert go_on.wait(SOON)
            raise ValueError("the leader's own")
        return "value"

    leader = crew.start(task, 1)
    assert started.wait(SOON)
    onlooker = crew.start(guard.wait_result, guard.task_of(task, 1), SOON)
    until(lambda: tapped.parked == 1)
    waiter = crew.start(task, 1)
    until(lambda: tapped.parked == 2)
    go_on.set()
    with pytest.raises(ValueError, match="own"):
        leader.result(SOON)
    assert waiter.result(SOON) == "value"
    assert onlooker.result(SOON).result == "value"


class _Meta(type):
    def __getattribute__(cls, name):
        if name == "__next__":
            raise RuntimeError(name)
        return super().__getattribute__(name)


class _Metaclassed(metaclass=_Meta):
    pass


class _Leaving:
    @property
    def status(self):
        raise SystemExit(3)


class _Unbound:
    @property
    def __class__(self):
        raise RuntimeError("outside of its context")


class _Text(str):
    __slots__ = ()

    def __len__(self):
        raise RuntimeError("no length")


@pytest.mark.parametrize(
    "make",
    [
        lambda: "[" * 2000 + '"out_of_scope"',
        _Leaving,
        _Unbound,
        lambda: _Text("out_of_scope"),
        _Metaclassed,
    ],
    ids=["deep", "leaving", "unbound", "text", "metaclass"],
)
def test_a_value_that_is_hostile_reaches_its_caller(guard, shape, make):
    value = make()
    task = shape.guarded(guard, lambda: value, task_type="t")
    same = task() is value
    assert same


def test_another_store_with_the_same_names_is_another_task(guard):
    other = Guard(store=MemoryStore())

    @other.idempotent(task_type="t")
    def inner(n):
        return ["inner", n]

    @guard.idempotent(task_type="t")
    def outer(n):
        return ["outer", inner(n)]

    assert outer(1) == ["outer", ["inner", 1]]


def test_a_busy_file_holds_up_no_other_stores_renewals(tmp_path, crew, until):
    """One thread renews all claims of a process: a file that is locked must not stop it."""
    busy = Guard(store=f"sqlite:///{tmp_path / 'busy.db'}", lease=0.6)
    other = Guard(store=MemoryStore(), lease=1.5)
    ends, inside = threading.Event(), threading.Semaphore(0)

    def body(n):
        inside.release()
        assert ends.wait(2 * SOON)
        return n

    slow, task = busy.idempotent(body, task_type="b"), other.idempotent(body, task_type="o")
    held = crew.start(slow, 1)
    assert inside.acquire(timeout=SOON)
    lock = sqlite3.connect(tmp_path / "busy.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    leader = crew.start(task, 1)
    assert inside.acquire(timeout=SOON)
    waiter = crew.start(task, 1)
    assert not inside.acquire(timeout=4)  # two leases and more: nobody takes over
    lock.execute("ROLLBACK")
    lock.close()
    ends.set()
    assert (leader.result(SOON), waiter.result(SOON), held.result(SOON)) == (1, 1, 1)
    assert other.ledger.totals()["executions"] == 1
    busy.close()


def test_an_end_that_a_full_disk_refuses_is_told_later(guard_of, tapped, until):
    guard = guard_of(store=tapped)
    full = errors.StoreError("database or disk is full")
    tapped.fails = lambda command: full if isinstance(command, Complete) else None
    assert guard.run_task("t", 1, lambda n: n).source == "executed"
    until(lambda: sum(isinstance(command, Complete) for command in tapped.seen) >= 3)
    tapped.up()
    assert until(lambda: guard.peek(Task.of("t", 1))).result == 1


def test_what_is_closed_stays_closed(tmp_path):
    guard = Guard(store=f"sqlite:///{tmp_path / 'project' / 'guard.db'}")
    guard.run_task("t", 1, lambda n: n)
    guard.close()
    shutil.rmtree(tmp_path / "project")
    threading.Event().wait(0.6)  # the upkeep was due in between
    assert not (tmp_path / "project").exists()


def test_a_body_finds_what_it_asks_for_though_nothing_is_guarded(guard_of, shape):
    guard = guard_of(mode="off")
    keys = []

    def body(n):
        execution = current()
        execution.check()
        record_usage(input_tokens=1)
        keys.append(execution.idempotency_key)
        return execution.task_type

    task = shape.guarded(guard, body, task_type="t")
    assert [task(1), task(1)] == ["t", "t"]
    assert shape.run_task(guard, "t", {"n": 1}, body).result == "t"
    assert len(set(keys)) == 3  # as if nobody guarded it: each call its own
    assert guard.ledger.totals()["calls"] == 0


def test_a_call_that_gets_no_result_is_refused_and_saves_nothing(guard, shape):
    def body(n):
        record_usage(input_tokens=1000)
        return object()

    task = shape.guarded(guard, body, task_type="t")
    task(1)
    for _ in range(2):
        with pytest.raises(errors.ResultUnavailableError):
            task(1)
    totals = guard.ledger.totals()
    assert (totals["executed"], totals["reused"], totals["refused"]) == (1, 0, 2)
    assert totals["saved_tokens"] == 0


def test_a_claim_on_a_loop_that_was_closed_ends_with_its_lease():
    guard, begun = Guard(store=MemoryStore(), namespace="stranded"), []

    @guard.idempotent(task_type="stranded", lease=0.6)
    async def work(n):
        begun.append(n)
        if len(begun) == 1:
            await asyncio.Event().wait()
        return n

    loop = asyncio.new_event_loop()
    task = loop.create_task(work(1))

    async def until_it_has_begun():
        while not begun:  # noqa: ASYNC110 - an event is of one loop
            await asyncio.sleep(0)

    loop.run_until_complete(until_it_has_begun())
    loop.close()

    async def again():
        async with asyncio.timeout(20):
            return await work(1)

    assert asyncio.run(again()) == 1
    assert begun == [1, 1]
    assert not task.done()
    task._log_destroy_pending = False  # nobody can end it any longer
    coroutine = task.get_coro()
    del task
    coroutine.close()

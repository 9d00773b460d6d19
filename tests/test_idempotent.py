"""A guarded callable is executed once for each task; what a call came to is told in full."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import itertools
import os
import socket
import threading
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal

import pytest
import trio

from idemguard import (
    Outcome,
    OutOfScope,
    Usage,
    agent,
    bypass,
    capture,
    configure,
    current,
    errors,
    idempotent,
    record_usage,
    run_task,
    scope,
    task_fingerprint,
    worker,
)

SOON = 60  # seconds within which what happens at once has happened


def listed(doc_id: str, lang: str = "en") -> dict:
    """A function that has a name of its own."""
    return {"id": doc_id, "lang": lang}


@dataclass
class Report:
    title: str
    pages: int


class Counted:
    """A body that counts how often it runs, and does what it was told to do next."""

    def __init__(self, *ends) -> None:
        self.runs = 0
        self._ends = iter(ends)

    def __call__(self, *_args):
        self.runs += 1
        end = next(self._ends, self.runs)
        if isinstance(end, BaseException):
            raise end
        return end() if callable(end) else end


def body_of(counted):
    """A function of one argument that does what `counted` does."""

    def body(n=0):
        return counted()

    return body


def only(calls):
    """The one outcome that there is."""
    (outcome,) = calls
    return outcome


# --- one execution ---------------------------------------------------------------------------------


def test_a_second_call_gets_the_result_of_the_first(guard, shape):
    counted = Counted()
    task = shape.guarded(guard, body_of(counted), task_type="t")
    assert [task(1), task(1), task(n=1)] == [1, 1, 1]
    assert task(2) == 2
    assert counted.runs == 2


def test_bare_decoration_and_decoration_with_arguments_give_the_same(guard):
    configure(store=guard.settings.store)
    bare, called = idempotent(listed), idempotent()(listed)
    assert bare("a") == called("a") == {"id": "a", "lang": "en"}
    assert guard.ledger.runs(guard.task_of(bare, "a").fingerprint) == 1


def test_every_spelling_of_one_call_is_one_task(guard):
    task = guard.idempotent(listed)
    with capture() as calls:
        task("a")
        task("a", "en")
        task(lang="en", doc_id="a")
    assert [c.source for c in calls] == ["executed", "reused", "reused"]


def test_a_guarded_function_looks_like_the_plain_one(guard):
    async def coroutine(n: int) -> int:
        return n

    guarded = guard.idempotent(listed)
    assert inspect.signature(guarded) == inspect.signature(listed)
    assert typing.get_type_hints(guarded) == typing.get_type_hints(listed)
    assert (guarded.__name__, guarded.__doc__) == ("listed", listed.__doc__)
    assert guarded.__module__ == listed.__module__
    assert inspect.isfunction(guarded)
    assert not inspect.iscoroutinefunction(guarded)
    assert vars(listed) == {}
    assert inspect.iscoroutinefunction(guard.idempotent(coroutine, task_type="t"))


def test_the_arguments_must_fit(guard, shape):
    task = shape.guarded(guard, body_of(Counted()), task_type="t")
    with pytest.raises(TypeError, match="argument"):
        task(1, 2)


def test_the_task_is_told_at_the_call_whatever_becomes_of_the_arguments(guard):
    seen = []

    @guard.idempotent(task_type="t")
    async def task(doc):
        seen.append(dict(doc))
        return len(seen)

    async def main():
        doc = {"id": 1}
        first = task(doc)
        doc["id"] = 2
        assert await first == 1
        return await task({"id": 1})

    assert asyncio.run(main()) == 1
    assert seen == [{"id": 2}]


def test_a_coroutine_that_is_never_awaited_claims_nothing(guard):
    @guard.idempotent(task_type="t")
    async def task(n):
        return n

    coroutine = task(1)
    coroutine.close()
    assert guard.ledger.runs(guard.task_of(task, 1).fingerprint) == 0
    assert asyncio.run(task(1)) == 1


def test_one_function_serves_two_loops_and_plain_code_around_them(guard, shape):
    """`asyncio.run` twice with one decorated function."""
    counted = Counted()
    task = shape.guarded(guard, body_of(counted), task_type="t")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(task, [1, 1, 1, 1])) == [1, 1, 1, 1]
    assert task(1) == 1


def test_a_plain_and_an_async_function_of_one_task_type_share_its_tasks(guard):
    counted = Counted()
    plain = guard.idempotent(body_of(counted), task_type="t")

    @guard.idempotent(task_type="t")
    async def coroutine(n=0):
        return counted()

    assert plain(1) == asyncio.run(coroutine(1)) == 1
    assert asyncio.run(coroutine(2)) == plain(2) == 2


# --- what a task is --------------------------------------------------------------------------------


def test_the_default_task_type_is_module_and_qualified_name(guard):
    assert guard.task_of(guard.idempotent(listed), "a").task_type == f"{__name__}.listed"


def test_a_task_type_makes_one_task_of_two_functions(guard, shape):
    first = shape.guarded(guard, body_of(Counted("a")), task_type="t")
    second = shape.guarded(guard, body_of(Counted("b")), task_type="t")
    other = shape.guarded(guard, body_of(Counted("c")), task_type="u")
    assert [first(1), second(1), other(1)] == ["a", "a", "c"]


def test_the_fingerprint_is_that_of_the_bound_arguments(guard):
    task = guard.task_of(guard.idempotent(listed, task_type="t"), "a")
    assert task.fingerprint == task_fingerprint("t", {"doc_id": "a", "lang": "en"})


@pytest.mark.parametrize(
    "key", ["to", ("to", "amount"), lambda bound: [bound["to"], bound["amount"]]]
)
def test_key_says_which_arguments_count(guard, shape, key):
    counted = Counted()

    def pay(to, amount, note=""):
        return counted()

    task = shape.guarded(guard, pay, task_type="t", key=key)
    assert task("a", 1) == task("a", 1, note="again") == 1
    assert task("b", 1) == 2


def test_a_string_from_key_is_an_explicit_key_for_one_payload(guard, shape):
    def pay(to, amount, request_id=""):
        return amount

    task = shape.guarded(guard, pay, task_type="pay", key=lambda bound: f"k-{bound['to']}")
    assert task("a", 1) == task("a", 1, request_id="r-2") == 1
    with capture() as calls, pytest.raises(errors.KeyConflictError) as caught:
        task("a", 2)
    fingerprint = task_fingerprint("pay", {"idempotency_key": "k-a"})
    assert (caught.value.task_type, caught.value.fingerprint) == ("pay", fingerprint)
    assert f"pay [{fingerprint[:16]}]" in str(caught.value)
    assert only(calls).source == "refused"
    assert only(calls).error is caught.value
    assert only(calls).runs == 1


def test_a_conflict_is_told_while_the_first_call_is_executing(guard, shape, crew):
    started, go_on = threading.Event(), threading.Event()

    def pay(to, amount):
        started.set()
        assert go_on.wait(SOON)
        return amount

    task = shape.guarded(guard, pay, task_type="pay", key=lambda bound: bound["to"])
    first = crew.start(task, "a", 1)
    assert started.wait(SOON)
    with pytest.raises(errors.KeyConflictError):
        task("a", 2)
    go_on.set()
    assert first.result(SOON) == 1


def test_volatile_and_keep_say_what_does_not_count(guard, shape):
    counted = Counted()

    def body(doc, run, timestamp):
        return counted()

    task = shape.guarded(
        guard, body, task_type="t", volatile=("run", "doc.meta.seen", "**.ts"), keep=("timestamp",)
    )
    same = [({"id": 1, "meta": {"seen": n}, "deep": [{"ts": n}]}, n, "noon") for n in (1, 2)]
    assert [task(*args) for args in same] == [1, 1]
    assert task({"id": 1, "meta": {}, "deep": [{}]}, 3, "noon") == 1
    assert task({"id": 1, "meta": {}, "deep": [{}]}, 3, "night") == 2


def test_a_guards_volatile_names_count_nowhere(guard_of, shape):
    counted = Counted()

    def body(n, tenant=""):
        return counted()

    task = shape.guarded(guard_of(volatile=["tenant"]), body, task_type="t")
    assert task(1, "a") == task(1, "b") == 1


def test_an_argument_without_an_identity_is_an_error_that_names_it(guard, shape):
    counted = Counted()
    task = shape.guarded(guard, body_of(counted), task_type="t")
    with capture() as calls, pytest.raises(errors.FingerprintError) as caught:
        task({"client": object()})
    assert (caught.value.parameter, caught.value.path) == ("n", "n.client")
    assert counted.runs == 0
    assert (only(calls).source, only(calls).error) == ("refused", caught.value)


def test_another_version_makes_old_results_stale(guard, shape):
    counted = Counted()
    tasks = [
        shape.guarded(guard, body_of(counted), task_type="t", version=version)
        for version in (None, "1", "2")
    ]
    assert [task(1) for task in tasks * 2] == [1, 2, 3, 1, 2, 3]
    fingerprint = task_fingerprint("t", {"n": 1})
    assert guard.ledger.runs(fingerprint) == 3
    assert guard.ledger.runs(fingerprint, version="2") == 1


# --- how long a result is kept ---------------------------------------------------------------------


def test_a_result_is_reused_for_its_ttl_and_then_no_more(guard, shape, clock):
    counted = Counted()
    task = shape.guarded(guard, body_of(counted), task_type="t", ttl=60, lease=1)
    assert task(1) == 1
    clock.advance(59.999)
    assert task(1) == 1
    clock.advance(0.001)
    with capture() as calls:
        assert task(1) == 2
    assert (only(calls).cause, only(calls).runs) == ("expired", 2)


def test_the_default_ttl_is_a_quarter_of_an_hour(guard, shape, clock):
    task = shape.guarded(guard, body_of(Counted()), task_type="t")
    assert task(1) == 1
    clock.advance(899.999)
    assert task(1) == 1
    clock.advance(0.001)
    assert task(1) == 2


def test_the_ttl_of_the_executing_call_counts(guard, shape, clock):
    counted = Counted()
    brief = shape.guarded(guard, body_of(counted), task_type="t", ttl=10, lease=1)
    long = shape.guarded(guard, body_of(counted), task_type="t", ttl=1000, lease=1)
    assert brief(1) == 1
    clock.advance(11)
    assert long(1) == 2
    clock.advance(11)
    assert brief(1) == 2


def test_with_no_ttl_only_calls_that_overlap_share(guard, tapped, shape, crew, until):
    started, go_on = threading.Event(), threading.Event()
    counted = Counted()

    def body(n):
        counted()
        started.set()
        assert go_on.wait(SOON)
        return counted.runs

    guard = type(guard)(store=tapped)
    task = shape.guarded(guard, body, task_type="t", ttl=0)
    leader = crew.start(task, 1)
    assert started.wait(SOON)
    waiter = crew.start(task, 1)
    until(lambda: tapped.parked == 1)
    go_on.set()
    assert (leader.result(SOON), waiter.result(SOON)) == (1, 1)
    assert task(1) == 2


# --- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, "", [], False, {}, 0.0], ids=repr)
def test_a_falsy_result_is_a_result(guard, shape, value):
    counted = Counted(value)
    task = shape.guarded(guard, body_of(counted), task_type="t")
    with capture() as calls:
        found = [task(1), task(1)]
    assert found == [value, value]
    assert [type(v) for v in found] == [type(value)] * 2
    assert [c.source for c in calls] == ["executed", "reused"]
    assert counted.runs == 1


def test_a_result_is_restored_to_the_annotated_type(guard, shape):
    def write(n: int) -> Report:
        return Report("a", n)

    task = shape.guarded(guard, write, task_type="t")
    assert task(1) == task(1) == Report("a", 1)
    assert task(1) is not task(1)


def test_result_outranks_the_annotation(guard, shape):
    def write(n: int) -> object:
        return Report("a", n)

    task = shape.guarded(guard, write, task_type="t", result=Report)
    assert task(1) == task(1) == Report("a", 1)


def test_what_cannot_be_stored_is_returned_once_and_told(guard, shape, warned):
    def write(n):
        runs.append(n)
        return Report("a", n)

    runs = []
    task = shape.guarded(guard, write, task_type="write")
    assert task(1) == Report("a", 1)
    for _ in range(2):
        with capture() as calls, pytest.raises(errors.ResultUnavailableError) as caught:
            task(1)
        assert only(calls).source == "refused"
    assert runs == [1]
    assert len(warned()) == 1
    told = warned()[0]
    fingerprint = task_fingerprint("write", {"n": 1})
    assert "Report" in told
    assert "result=" in told
    for text in (told, str(caught.value)):
        assert f"write [{fingerprint[:16]}]" in text
    assert "forget()" in str(caught.value)
    assert caught.value.worker == guard.ledger.workers(fingerprint)[0]
    assert caught.value.execution_id == guard.ledger.executions(fingerprint)[0].execution_id


def test_a_result_over_the_limit_is_returned_and_not_kept(guard_of, shape, warned):
    guard = guard_of(max_result_bytes=100)
    counted = Counted("x" * 200)
    task = shape.guarded(guard, body_of(counted), task_type="t")
    assert task(1) == "x" * 200
    with pytest.raises(errors.ResultUnavailableError, match="max_result_bytes"):
        task(1)
    assert counted.runs == 1
    assert len(warned()) == 1


def test_an_unstorable_result_is_forgotten_like_any_other(guard, shape):
    counted = Counted(object(), "fine")
    task = shape.guarded(guard, body_of(counted), task_type="t")
    task(1)
    guard.forget(guard.task_of(getattr(task, "guarded", task), 1))
    assert task(1) == task(1) == "fine"


# --- bodies that end otherwise ---------------------------------------------------------------------


class Stop(BaseException):
    """As a framework's control flow, and Ctrl-C, raise."""


@pytest.mark.parametrize("error", [ValueError("no"), Stop("stop"), KeyboardInterrupt()], ids=repr)
def test_a_body_that_raises_lets_the_next_call_execute_at_once(guard, shape, error):
    counted = Counted(error)
    task = shape.guarded(guard, body_of(counted), task_type="t")
    with capture() as calls:
        with pytest.raises(type(error)) as caught:
            task(1)
        assert task(1) == 2
    assert caught.value is error
    failed, executed = calls
    assert (failed.source, failed.error, failed.result) == ("failed", error, None)
    assert (failed.cause, failed.runs) == ("first", 1)
    assert (executed.source, executed.cause, executed.runs) == ("executed", "retry", 2)
    lines = guard.ledger.executions(failed.fingerprint)
    assert [line.status for line in lines] == ["failed", "ok"]


class Answer:
    status = "out_of_scope"


HANDED_BACK = [
    {"status": "out_of_scope", "why": "not mine"},
    '{"status": "out_of_scope"}',
    Answer(),
]


@pytest.mark.parametrize("value", HANDED_BACK, ids=["mapping", "text", "object"])
def test_a_value_that_hands_the_task_back_is_the_callers_alone(guard, shape, value):
    counted = Counted(value)
    task = shape.guarded(guard, body_of(counted), task_type="t")
    with capture() as calls:
        assert task(1) is value
        assert task(1) == 2
    declined, executed = calls
    assert (declined.source, declined.result, declined.error) == ("declined", value, None)
    assert (executed.source, executed.cause) == ("executed", "declined")
    lines = guard.ledger.executions(declined.fingerprint)
    assert [line.status for line in lines] == ["declined", "ok"]
    assert not lines[0].kept


def test_out_of_scope_hands_the_task_back_and_reaches_the_caller(guard, shape):
    mine = OutOfScope("not mine")
    counted = Counted(mine)
    task = shape.guarded(guard, body_of(counted), task_type="t")
    with capture() as calls, pytest.raises(OutOfScope) as caught:
        task(1)
    assert caught.value is mine
    assert (only(calls).source, only(calls).error) == ("declined", mine)
    assert task(1) == 2


@pytest.mark.parametrize(
    "value", [{"status": "done"}, "out_of_scope", '"out_of_scope"', {"state": "out_of_scope"}]
)
def test_other_values_are_results(guard, shape, value):
    counted = Counted(value)
    task = shape.guarded(guard, body_of(counted), task_type="t")
    assert task(1) == task(1) == value
    assert counted.runs == 1


def test_a_body_that_does_not_know_its_effect_counts_as_lost(guard, shape):
    mine = errors.UnknownOutcomeError("sent, and no answer came")
    counted = Counted(mine)
    task = shape.guarded(guard, body_of(counted), task_type="t", on_lost="raise")
    with capture() as calls, pytest.raises(errors.UnknownOutcomeError) as caught:
        task(1)
    assert caught.value is mine
    assert only(calls).source == "failed"
    (line,) = guard.ledger.executions(only(calls).fingerprint)
    assert line.status == "lost"
    with worker("w-2"), pytest.raises(errors.UnknownOutcomeError) as refused:
        task(1)
    assert refused.value.execution_id == line.execution_id
    assert refused.value.worker == line.worker
    assert counted.runs == 1
    rerun = shape.guarded(guard, body_of(counted), task_type="t")
    with capture() as calls:
        assert rerun(1) == 2
    assert only(calls).cause == "lost"


# --- outcomes --------------------------------------------------------------------------------------


PRICES = {"m": {"input": "3", "output": "15"}}


def test_the_outcome_of_an_execution_and_of_its_reuse(guard_of, shape):
    guard = guard_of(pricer=PRICES)

    def body(payload):
        record_usage(input_tokens=1000, output_tokens=100, model="m")
        return payload["n"]

    first, again = (
        shape.run_task(guard, "t", {"n": 7}, body, worker_id=name) for name in ("w-1", "w-2")
    )
    fingerprint = task_fingerprint("t", {"n": 7})
    (line,) = guard.ledger.executions(fingerprint)
    assert first == Outcome(
        source="executed",
        result=7,
        task_type="t",
        fingerprint=fingerprint,
        execution_id=line.execution_id,
        worker="w-1",
        usage=Usage(input_tokens=1000, output_tokens=100, model="m"),
        cost=Decimal("0.0045"),
        waited=0.0,
        runs=1,
        cause="first",
        lost=False,
        leader=None,
        error=None,
    )
    assert dataclasses.replace(first, source="reused") == again
    assert first.usage.total_tokens == 1100
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.result = 8


def test_the_outcome_of_a_wait_tells_how_long_it_was(guard_of, tapped, shape, crew, until):
    guard = guard_of(store=tapped)
    started, go_on = threading.Event(), threading.Event()

    def body(payload):
        started.set()
        assert go_on.wait(SOON)
        return payload

    leader = crew.start(lambda: shape.run_task(guard, "t", {"n": 1}, body, worker_id="w-1"))
    assert started.wait(SOON)
    waiter = crew.start(lambda: shape.run_task(guard, "t", {"n": 1}, body, worker_id="w-2"))
    until(lambda: tapped.parked == 1)
    threading.Event().wait(0.05)  # so that there is a time to be told
    go_on.set()
    led, waited = leader.result(SOON), waiter.result(SOON)
    assert (led.source, led.waited) == ("executed", 0)
    assert (waited.source, waited.worker) == ("reused", "w-1")
    assert 0.05 <= waited.waited < SOON


def test_the_outcome_of_a_failed_execution_has_what_it_spent(guard, shape):
    def body(n):
        record_usage(input_tokens=10)
        raise ValueError(n)

    task = shape.guarded(guard, body, task_type="t")
    with capture() as calls, pytest.raises(ValueError, match="1"):
        task(1)
    failed = only(calls)
    assert failed.usage == Usage(input_tokens=10)
    assert (failed.worker, failed.runs, failed.cost) == (
        guard.ledger.workers(failed.fingerprint)[0],
        1,
        None,
    )


def test_run_task_raises_what_its_function_raises(guard, shape):
    def body(payload):
        raise ValueError(payload)

    with capture() as calls, pytest.raises(ValueError, match="7"):
        shape.run_task(guard, "t", 7, body)
    assert only(calls).source == "failed"


def test_run_task_calls_its_function_once_for_a_payload(guard, shape):
    counted = Counted()
    payload = {"n": 1, "request_id": "a", "ts": 1}
    same = {"n": 1, "request_id": "b", "ts": 2}
    first = shape.run_task(guard, "t", payload, counted_of(counted), volatile=("ts",))
    again = shape.run_task(guard, "t", same, counted_of(counted), volatile=("ts",))
    assert (first.result, again.result) == (1, 1)
    assert (first.source, again.source) == ("executed", "reused")


def counted_of(counted):
    """A function of a payload that does what `counted` does."""

    def body(payload):
        return counted()

    return body


def test_run_task_by_the_configured_guard(guard):
    configure(store=guard.settings.store, namespace="n")
    assert run_task("t", 1, lambda payload: payload + 1).result == 2

    async def main():
        async def body(payload):
            return payload + 1

        return await run_task("t", 1, body)

    assert asyncio.run(main()).source == "reused"


def test_run_task_and_a_decorated_function_share_a_task(guard):
    task = guard.idempotent(listed, task_type="t")
    outcome = guard.run_task("t", {"doc_id": "a", "lang": "en"}, lambda payload: payload)
    assert task("a") == outcome.result == {"doc_id": "a", "lang": "en"}


# --- capture ---------------------------------------------------------------------------------------


def test_capture_collects_what_ends_in_tasks_and_threads_that_inherit_the_context(guard):
    @guard.idempotent(task_type="t")
    def plain(n):
        return n

    @guard.idempotent(task_type="u")
    async def coroutine(n):
        return n

    async def main():
        with capture() as calls:
            await asyncio.gather(coroutine(1), coroutine(2), asyncio.to_thread(plain, 3))
        await coroutine(4)
        return calls

    calls = asyncio.run(main())
    assert sorted((c.task_type, c.result) for c in calls) == [("t", 3), ("u", 1), ("u", 2)]


def test_capture_is_blind_to_other_contexts(guard, crew):
    task = guard.idempotent(listed)
    with capture() as calls:
        crew.start(task, "a").result(SOON)
        context = contextvars.copy_context()
        crew.start(context.run, task, "b").result(SOON)
    assert [c.result["id"] for c in calls] == ["b"]


def test_captures_nest_and_end(guard):
    task = guard.idempotent(listed)
    with capture() as outer:
        task("a")
        with capture() as inner:
            task("b")
        task("c")
    task("d")
    assert [c.result["id"] for c in outer] == ["a", "b", "c"]
    assert [c.result["id"] for c in inner] == ["b"]


def test_capture_sees_a_call_inside_a_body_before_the_one_around_it(guard):
    @guard.idempotent(task_type="inner")
    def inner(n):
        return n

    @guard.idempotent(task_type="outer")
    def outer(n):
        return inner(n)

    with capture() as calls:
        outer(1)
    assert [c.task_type for c in calls] == ["inner", "outer"]


# --- current ---------------------------------------------------------------------------------------


def test_there_is_no_current_execution_outside_a_body(guard):
    assert current() is None
    guard.idempotent(listed)("a")
    assert current() is None
    record_usage(input_tokens=5)
    record_usage("what nobody could read")


def test_current_is_the_execution_of_the_body(guard, shape):
    seen = []

    def body(n):
        seen.append(current())
        return {"key": current().idempotency_key, "id": current().execution_id}

    task = shape.guarded(guard, body, task_type="t")
    with worker("w-1"), capture() as calls:
        found = task(1)
    (execution,) = seen
    outcome = only(calls)
    assert (execution.task_type, execution.fingerprint) == ("t", outcome.fingerprint)
    assert found == {"key": execution.idempotency_key, "id": outcome.execution_id}
    assert (execution.worker, execution.cause, execution.lost) == ("w-1", "first", False)
    assert outcome.execution_id.startswith(f"{execution.token}-")


def test_the_current_execution_reaches_its_tasks_and_threads(guard):
    @guard.idempotent(task_type="t")
    async def task(n):
        async def inner():
            return current().execution_id

        record_usage(input_tokens=1)
        await asyncio.to_thread(record_usage, input_tokens=2)
        here = current().execution_id
        return [here] == list({here, *await asyncio.gather(inner(), inner())})

    with capture() as calls:
        assert asyncio.run(task(1))
    assert only(calls).usage.input_tokens == 3


def test_a_task_that_outlives_its_body_is_inside_no_execution(guard):
    async def main():
        ended = asyncio.Event()
        late = []

        async def afterwards():
            await ended.wait()
            record_usage(input_tokens=100)
            return current()

        @guard.idempotent(task_type="t")
        async def task(n):
            late.append(asyncio.create_task(afterwards()))
            return n

        with capture() as calls:
            await task(1)
        ended.set()
        assert await late[0] is None
        return only(calls)

    assert asyncio.run(main()).usage is None


def test_a_task_that_outlives_an_inner_body_is_still_inside_the_outer_one(guard):
    async def main():
        ended = asyncio.Event()
        late = []

        async def afterwards():
            await ended.wait()
            record_usage(input_tokens=100)
            return current().task_type

        @guard.idempotent(task_type="inner")
        async def inner(n):
            late.append(asyncio.create_task(afterwards()))
            return n

        @guard.idempotent(task_type="outer")
        async def outer(n):
            await inner(n)
            ended.set()
            return await late[0]

        with capture() as calls:
            assert await outer(1) == "outer"
        return {c.task_type: c.usage for c in calls}

    assert asyncio.run(main()) == {"inner": None, "outer": Usage(input_tokens=100)}


def test_check_passes_while_the_claim_is_held_and_raises_when_it_is_not(guard, shape, clock):
    def body(n):
        execution = current()
        execution.check()
        guard.forget(guard.task_of(named, n))
        # as if no renewal had come for longer than the lease
        execution.renewed -= 31
        with pytest.raises(errors.LeaseLostError) as caught:
            execution.check()
        assert caught.value.execution_id == execution.execution_id
        assert execution.lost
        return n

    task = shape.guarded(guard, body, task_type="t")
    named = getattr(task, "guarded", task)
    with capture() as calls:
        assert task(1) == 1
    assert only(calls).source == "executed"
    assert guard.peek(guard.task_of(named, 1)) is None


def test_check_asks_nobody_while_the_lease_is_fresh(guard_of, tapped, shape):
    def body(n):
        before = len(tapped.seen)
        current().check()
        return len(tapped.seen) - before

    assert shape.guarded(guard_of(store=tapped), body, task_type="t")(1) == 0


def test_a_check_that_cannot_ask_does_not_pass(guard_of, tapped, shape):
    def body(n):
        tapped.down()
        current().renewed -= 31
        with pytest.raises(errors.LeaseLostError):
            current().check()
        tapped.up()
        return n

    assert shape.guarded(guard_of(store=tapped), body, task_type="t")(1) == 1


def test_the_idempotency_key_lasts_until_a_result_is_kept(guard, shape, clock):
    keys = []

    def body(n):
        keys.append(current().idempotency_key)
        if len(keys) in {1, 4}:
            raise ValueError("no")
        return n

    task = shape.guarded(guard, body, task_type="t", ttl=10, lease=1)
    for name in ("w-1", "w-2"):
        try:
            with worker(name):
                task(1)
        except ValueError:
            pass
    clock.advance(11)
    task(1)
    guard.forget(guard.task_of(getattr(task, "guarded", task), 1))
    with pytest.raises(ValueError, match="no"):
        task(1)
    task(1)
    with bypass():
        task(1)
    first, taken_over, expired, forgotten, again, bypassed = keys
    assert first == taken_over
    assert forgotten == again
    assert len({first, expired, forgotten, bypassed}) == 4


def test_the_idempotency_key_is_of_the_address(guard, shape):
    def body(n):
        return current().idempotency_key

    task = shape.guarded(guard, body, task_type="t")
    versioned = shape.guarded(guard, body, task_type="t", version="2")
    with scope("run"):
        scoped = task(1)
    assert len({task(1), task(2), scoped, versioned(1)}) == 4


# --- usage -----------------------------------------------------------------------------------------


def test_usage_reads_the_tokens_off_a_result(guard, shape):
    def body(n):
        return {"text": "a", "tokens": 12}

    task = shape.guarded(
        guard, body, task_type="t", usage=lambda result: Usage(output_tokens=result["tokens"])
    )
    with capture() as calls:
        task(1)
        task(1)
    assert [c.usage for c in calls] == [Usage(output_tokens=12)] * 2


def test_usage_that_fails_costs_no_result(guard, shape, warned):
    def body(n):
        return "text"

    task = shape.guarded(guard, body, task_type="t", usage=lambda result: result["tokens"])
    assert task(1) == task(1) == "text"
    assert "usage=" in only(warned())


def test_usage_that_cannot_be_read_is_told_and_costs_no_result(guard, shape, warned):
    def body(n):
        record_usage(input_tokens=-1)
        record_usage({"nothing": "known"})
        record_usage(input_tokens=5)
        return "text"

    with capture() as calls:
        assert shape.guarded(guard, body, task_type="t")(1) == "text"
    assert only(calls).usage == Usage(input_tokens=5)
    assert "usage" in only(warned())


# --- who calls -------------------------------------------------------------------------------------


def test_the_agent_of_the_decorator_outranks_the_contexts(guard, shape):
    named = shape.guarded(guard, body_of(Counted()), task_type="t", agent="writer")
    plain = shape.guarded(guard, body_of(Counted()), task_type="u")
    with agent("researcher"):
        named(1)
        plain(1)
    assert guard.ledger.agent_summary("writer")["runs"] == 1
    assert guard.ledger.agent_summary("researcher")["runs"] == 1


def test_who_calls_is_told_by_the_innermost(guard, shape):
    task = shape.guarded(guard, body_of(Counted()), task_type="t")
    with worker("w-1"), capture() as calls:
        with worker("w-2"):
            task(1)
        task(2)
    assert [c.worker for c in calls] == ["w-2", "w-1"]


def test_a_worker_has_a_name_though_nobody_gave_it_one(guard, shape):
    with capture() as calls:
        shape.guarded(guard, body_of(Counted()), task_type="t")(1)
    assert only(calls).worker == f"{socket.gethostname()}-{os.getpid()}"


def test_the_environment_names_the_worker(guard, shape, monkeypatch):
    monkeypatch.setenv("IDEMGUARD_WORKER", "w-env")
    task = shape.guarded(guard, body_of(Counted()), task_type="t")
    with capture() as calls:
        task(1)
        with worker("w-1"):
            task(2)
    assert [c.worker for c in calls] == ["w-env", "w-1"]


def test_another_scope_is_another_record_of_the_same_task(guard, shape):
    counted = Counted()
    task = shape.guarded(guard, body_of(counted), task_type="t")
    with capture() as calls:
        for name in ("run-1", "run-2", "run-1"):
            with scope(name):
                task(1)
        task(1)
    assert [c.result for c in calls] == [1, 2, 1, 3]
    assert len({c.fingerprint for c in calls}) == 1
    assert guard.ledger.runs(calls[0].fingerprint, scope="run-1") == 1
    assert guard.ledger.runs(calls[0].fingerprint) == 3


def test_nested_scopes_join_and_a_slash_in_a_name_does_not(guard, shape):
    task = shape.guarded(guard, body_of(Counted()), task_type="t")
    paths = [("a", "b"), ("a/b",), ("a%2Fb",), ("a",), ("b", "a"), ("a", "b")]
    found = []
    for path in paths:
        with scope(path[0]):
            if len(path) == 2:
                with scope(path[1]):
                    found.append(task(1))
            else:
                found.append(task(1))
    assert found == [1, 2, 3, 4, 5, 1]


def test_bypass_executes_and_leaves_the_kept_result_alone(guard, shape):
    counted = Counted()
    task = shape.guarded(guard, body_of(counted), task_type="t")
    with capture() as calls:
        task(1)
        with bypass():
            task(1)
        task(1)
    assert [(c.source, c.result, c.cause) for c in calls] == [
        ("executed", 1, "first"),
        ("executed", 2, "forced"),
        ("reused", 1, "first"),
    ]
    assert guard.ledger.duplication_rate() == 0.0


def test_a_bypass_waits_for_nobody(guard, shape, crew):
    started, go_on = threading.Event(), threading.Event()
    counted = Counted()

    def body(n):
        if counted() == 1:
            started.set()
            assert go_on.wait(SOON)
        return counted.runs

    task = shape.guarded(guard, body, task_type="t")
    leader = crew.start(task, 1)
    assert started.wait(SOON)
    with bypass():
        assert task(1) == 2
    go_on.set()
    assert leader.result(SOON) == task(1)


def test_after_forget_the_next_call_is_forced(guard, shape):
    task = shape.guarded(guard, body_of(Counted()), task_type="t")
    task(1)
    guard.forget(guard.task_of(getattr(task, "guarded", task), 1))
    with capture() as calls:
        assert task(1) == 2
    assert only(calls).cause == "forced"
    assert guard.ledger.duplication_rate() == 0.0


@pytest.mark.parametrize("say", [worker, agent, scope])
@pytest.mark.parametrize("name", ["", None, 5, b"w", "\ud800"], ids=repr)
def test_a_name_is_a_text(say, name):
    with pytest.raises(errors.ConfigurationError, match=say.__name__):
        say(name)


# --- calls inside calls ----------------------------------------------------------------------------


def test_an_execution_knows_the_one_around_it(guard):
    @guard.idempotent(task_type="inner")
    async def inner(n):
        record_usage(input_tokens=5)
        return n

    @guard.idempotent(task_type="outer")
    async def outer(n):
        record_usage(input_tokens=1)
        return sum(await asyncio.gather(inner(n), inner(n + 1)))

    with capture() as calls:
        assert asyncio.run(outer(1)) == 3
    ids = {c.task_type: c for c in calls}
    parents = {line.task_type: line.parent for line in guard.ledger.lines()}
    assert parents == {"outer": None, "inner": ids["outer"].execution_id}
    assert ids["outer"].usage.input_tokens == 1


def calls_itself(guard, how):
    """A coroutine that calls itself with its own arguments, in some way."""

    @guard.idempotent(task_type="t")
    async def task(n):
        return await how(task, n)

    return task


async def _gathered(task, n):
    (error,) = await asyncio.gather(task(n), return_exceptions=True)
    raise error


async def _in_a_thread(task, n):
    return await asyncio.to_thread(lambda: asyncio.run(task(n)))


async def _in_a_copied_context(task, n):
    return await asyncio.create_task(task(n), context=contextvars.copy_context())


async def _through_another(task, n):
    @idempotent(task_type="other", guard=task._self_spec.source)
    async def other(n):
        return await task(n)

    return await other(n)


async def _directly(task, n):
    return await task(n)


@pytest.mark.parametrize(
    "how",
    [_directly, _gathered, _in_a_thread, _in_a_copied_context, _through_another],
    ids=lambda how: how.__name__.strip("_"),
)
def test_a_coroutine_that_would_wait_for_itself_is_told_so_at_once(guard, crew, how):
    task = calls_itself(guard, how)
    with pytest.raises(errors.ReentrantCallError) as caught:
        crew.start(asyncio.run, task(1)).result(SOON)
    fingerprint = task_fingerprint("t", {"n": 1})
    assert (caught.value.task_type, caught.value.fingerprint) == ("t", fingerprint)
    assert f"t [{fingerprint[:16]}]" in str(caught.value)


def _sync_directly(task, n):
    return task(n)


def _sync_in_a_copied_context(task, n):
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, task, n).result(SOON)


def _sync_through_another(task, n):
    @idempotent(task_type="other", guard=task._self_spec.source)
    def other(n):
        return task(n)

    return other(n)


@pytest.mark.parametrize(
    "how",
    [_sync_directly, _sync_in_a_copied_context, _sync_through_another],
    ids=lambda how: how.__name__.strip("_"),
)
def test_a_function_that_would_wait_for_itself_is_told_so_at_once(guard, crew, how):
    @guard.idempotent(task_type="t")
    def task(n):
        return how(task, n)

    with capture() as calls, pytest.raises(errors.ReentrantCallError):
        crew.start(contextvars.copy_context().run, task, 1).result(SOON)
    assert (calls[0].source, calls[-1].source) == ("refused", "failed")


def test_a_task_whose_inner_body_has_ended_still_knows_what_is_above_it(guard, crew):
    @guard.idempotent(task_type="inner")
    async def inner(n, go_on, late):
        async def afterwards():
            await go_on.wait()
            return await outer(n)

        late.append(asyncio.create_task(afterwards()))
        return n

    @guard.idempotent(task_type="outer")
    async def outer(n):
        go_on, late = asyncio.Event(), []
        await inner(n, go_on, late)
        go_on.set()
        return await late[0]

    inner = guard.idempotent(inner.__wrapped__, task_type="inner", key="n")
    with pytest.raises(errors.ReentrantCallError):
        crew.start(lambda: asyncio.run(outer(1))).result(SOON)


def test_a_body_may_call_itself_with_other_arguments(guard, shape):
    def body(n):
        return n if n == 0 else n + named(n - 1)

    named = guard.idempotent(body, task_type="t")
    assert named(3) == 6
    assert len(list(guard.ledger.lines())) == 4


def test_a_body_may_call_itself_in_another_scope(guard):
    depth = itertools.count()

    @guard.idempotent(task_type="t")
    def task(n):
        if next(depth):
            return "inner"
        with scope("inner"):
            return task(n)

    assert task(1) == "inner"


def test_equal_calls_in_one_loop_are_one_execution(guard):
    counted = Counted()

    @guard.idempotent(task_type="inner")
    async def inner(n):
        await asyncio.sleep(0)
        return counted()

    @guard.idempotent(task_type="outer")
    async def outer(n):
        return await asyncio.gather(*(inner(n) for _ in range(20)))

    async def main():
        return await asyncio.gather(*(inner(1) for _ in range(20)))

    assert asyncio.run(main()) == [1] * 20
    assert asyncio.run(outer(2)) == [2] * 20
    assert counted.runs == 2


@pytest.mark.parametrize("turns", range(12))
def test_a_plain_call_that_would_block_the_loop_of_its_leader_is_told_so(guard, crew, turns):
    """However far the leader has come: before its body, within it, or when it is being told."""

    async def main():
        @guard.idempotent(task_type="t")
        async def leader(n):
            await asyncio.sleep(0)
            return "led"

        waiter = guard.idempotent(lambda n: "ran", task_type="t")
        leading = asyncio.create_task(leader(1))
        for _ in range(turns):
            await asyncio.sleep(0)
        try:
            found = waiter(1)
        except errors.ReentrantCallError as error:
            found = ("told", error.fingerprint)
        return found, await leading

    found, led = crew.start(asyncio.run, main()).result(SOON)
    fingerprint = task_fingerprint("t", {"n": 1})
    assert (found, led) in {(("told", fingerprint), "led"), ("led", "led"), ("ran", "ran")}
    assert guard.ledger.runs(fingerprint) == 1


# --- trio ------------------------------------------------------------------------------------------


def test_a_guarded_coroutine_says_that_it_needs_asyncio(guard):
    @guard.idempotent(task_type="t")
    async def task(n):
        return n

    with pytest.raises(errors.ConfigurationError, match="asyncio"):
        trio.run(task, 1)

    async def by_run_task():
        async def body(payload):
            return payload

        await guard.run_task("t", 1, body)

    with pytest.raises(errors.ConfigurationError, match="trio"):
        trio.run(by_run_task)

    async def by_hand():
        await guard.aio.claim(guard.task_of(task, 1))

    with pytest.raises(errors.ConfigurationError, match="trio"):
        trio.run(by_hand)


def test_a_guarded_function_serves_trio(guard):
    task = guard.idempotent(listed)
    assert trio.run(trio.to_thread.run_sync, task, "a") == listed("a")

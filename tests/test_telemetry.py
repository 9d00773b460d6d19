"""The spans of guarded calls: one for each, of every shape, whatever it comes to and however it ends."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from importlib import metadata

import pytest
from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from workers.emitted import FORMS, Emitted, Form, events, ids, seconds
from workers.jobs import Interrupt, in_child

from idemguard import (
    Guard,
    OutOfScope,
    agent,
    bypass,
    capture,
    current,
    errors,
    record_usage,
    telemetry,
    worker,
)
from idemguard.claim import Begin, Renew
from idemguard.stores.memory import MemoryStore
from idemguard.telemetry import FIELDS

LONG = 60.0
SPAN = "idemguard t"
WAIT = "idemguard wait"
PRICES = {"m": {"input": "3", "output": "15"}}


class BoomError(Exception):
    """What a body raises."""


@pytest.fixture(autouse=True)
def nothing_is_detached_elsewhere(caplog):
    """OpenTelemetry logs an error where a context is detached that is not the present one."""
    yield
    told = [r.getMessage() for r in caplog.get_records("call") if r.name == "opentelemetry.context"]
    assert not told


@pytest.fixture
def emitted():
    """What is emitted; every span that was started has ended when the test has."""
    made = Emitted()
    yield made
    if made.open.spans:
        gc.collect()
    left = dict(made.open.spans)
    made.close()
    assert not left


@pytest.fixture(params=FORMS)
def form(request):
    """Every shape of a guarded callable."""
    return Form(request.param)


@pytest.fixture
def store():
    """What is emitted is decided above the stores, so that one kind is enough."""
    return MemoryStore()


@pytest.fixture
def watched(emitted, store):
    """Makes guards that emit."""
    made = []

    def make(**settings):
        made.append(Guard(**{"store": store} | emitted.providers | settings))
        return made[-1]

    yield make
    for guard in made:
        guard.close()


def none_is_current():
    """Whether no span is."""
    return trace.get_current_span() is trace.INVALID_SPAN


def reasons(span):
    """What its events give as their reasons."""
    assert all(set(event.attributes) == {"idemguard.reason"} for event in span.events)
    return {event.name: event.attributes["idemguard.reason"] for event in span.events}


def spends(n):
    """A body that calls a model."""
    record_usage(input_tokens=100, output_tokens=10, cache_read_tokens=40, model="m")
    return n


# --- every shape, every outcome ------------------------------------------------------------------


def test_an_executed_call(watched, emitted, form):
    guard = watched(pricer=PRICES)
    call = form.guarded(guard, spends)
    with worker("w-1"), agent("writer"), capture() as calls:
        assert call(1) == 1
    span = emitted.span(SPAN)
    assert (span.kind, span.status.status_code, span.parent) == (
        SpanKind.INTERNAL,
        StatusCode.UNSET,
        None,
    )
    scope = span.instrumentation_scope
    assert (scope.name, scope.version) == ("idemguard", metadata.version("idemguard"))
    assert dict(span.attributes) == {
        "idemguard.task.type": "t",
        "idemguard.fingerprint": calls[0].fingerprint[:16],
        "idemguard.worker": "w-1",
        "gen_ai.agent.name": "writer",
        "idemguard.outcome": "executed",
        "idemguard.cause": "first",
        "idemguard.execution.id": calls[0].execution_id,
        "idemguard.usage.input_tokens": 100,
        "idemguard.usage.output_tokens": 10,
        "idemguard.usage.total_tokens": 110,
        "idemguard.usage.cache_read_tokens": 40,
        "idemguard.cost.amount": pytest.approx(0.00045),
        "idemguard.cost.currency": "USD",
    }
    assert (span.events, span.links) == ((), ())
    assert type(span.attributes["idemguard.cost.amount"]) is float


def test_a_reused_call(watched, emitted, form):
    guard = watched(pricer=PRICES)
    call = form.guarded(guard, spends)
    call(1)
    with worker("w-2"), capture() as calls:
        assert call(1) == 1
    first, again = emitted.spans(SPAN)
    told = dict(again.attributes)
    assert told == {
        "idemguard.task.type": "t",
        "idemguard.fingerprint": calls[0].fingerprint[:16],
        "idemguard.worker": "w-2",
        "idemguard.outcome": "reused",
        "idemguard.cause": "first",
        "idemguard.execution.id": calls[0].execution_id,
        "idemguard.saved.input_tokens": 100,
        "idemguard.saved.output_tokens": 10,
        "idemguard.saved.total_tokens": 110,
        "idemguard.saved.cache_read_tokens": 40,
        "idemguard.saved.cost.amount": pytest.approx(0.00045),
        "idemguard.saved.cost.currency": "USD",
        "idemguard.leader.trace_id": ids(first)[0],
        "idemguard.leader.span_id": ids(first)[1],
    }
    assert again.status.status_code is StatusCode.UNSET
    assert not events(again)


@pytest.mark.parametrize("outcome", ["executed", "failed", "reused"])
def test_usage_or_saved_but_never_both(watched, emitted, outcome):
    guard = watched(pricer=PRICES)

    @guard.idempotent(task_type="t")
    def task(n):
        spends(n)
        if outcome == "failed":
            raise BoomError
        return n

    if outcome == "failed":
        with pytest.raises(BoomError):
            task(1)
    else:
        task(1)
    if outcome == "reused":
        task(1)
    told = emitted.last(SPAN).attributes
    assert told["idemguard.outcome"] == outcome
    kinds = {name.split(".")[1] for name in told} & {"usage", "saved", "cost"}
    assert kinds == ({"saved"} if outcome == "reused" else {"usage", "cost"})


def test_every_field_of_usage_has_its_attribute(watched, emitted):
    guard = watched()
    given = {
        "input_tokens": 9, "output_tokens": 8, "cache_read_tokens": 3, "cache_write_tokens": 2,
        "reasoning_tokens": 1,
    }  # fmt: skip
    task = guard.idempotent(lambda n: record_usage(**given), task_type="t")
    task(1)
    task(1)
    executed, reused = emitted.spans(SPAN)
    whole = given | {"total_tokens": 17}
    assert set(whole) == set(FIELDS)
    for field, amount in whole.items():
        assert executed.attributes[f"idemguard.usage.{field}"] == amount
        assert reused.attributes[f"idemguard.saved.{field}"] == amount
    assert not [name for name in executed.attributes if ".cost." in name]  # unpriced is not 0


def test_gen_ai_usage_is_repeated_only_where_it_is_wanted(watched, emitted):
    names = {
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 40,
    }
    for wanted in (False, True):
        emitted.exporter.clear()
        guard = watched(gen_ai_usage=wanted, namespace=str(wanted))
        task = guard.idempotent(spends, task_type="t")
        task(1)
        task(1)
        executed, reused = emitted.spans(SPAN)
        told = {k: v for k, v in executed.attributes.items() if k.startswith("gen_ai.usage")}
        assert told == (names if wanted else {})
        assert not [name for name in reused.attributes if name.startswith("gen_ai.usage")]


def test_a_fallback(watched, emitted, form):
    guard = watched(pricer=PRICES)
    call = form.guarded(guard, spends, wait_timeout=0)
    with emitted.tracer.start_as_current_span("by hand") as led:
        claim = guard.claim(guard.task_of(call.guarded, 1))
    assert call(1) == 1
    claim.complete(0)
    span = emitted.span(SPAN)
    told = span.attributes
    assert (told["idemguard.outcome"], told["idemguard.cause"]) == ("fallback", "fallback")
    assert told["idemguard.usage.input_tokens"] == 100
    assert about_leader(span) == ids(led)
    assert reasons(span) == {"idemguard.fallback": "its leader took longer than wait_timeout"}
    assert span.status.status_code is StatusCode.UNSET


def test_declined_by_an_exception(watched, emitted, form):
    def body(n):
        spends(n)
        raise OutOfScope("SECRET")

    call = form.guarded(watched(), body)
    with pytest.raises(OutOfScope):
        call(1)
    span = emitted.span(SPAN)
    assert span.attributes["idemguard.outcome"] == "declined"
    assert span.attributes["idemguard.usage.input_tokens"] == 100
    assert "error.type" not in span.attributes
    assert span.status.status_code is StatusCode.UNSET
    assert reasons(span) == {"idemguard.declined": "it raised OutOfScope"}


@pytest.mark.parametrize("name", ["sync", "async"])
def test_declined_by_a_value(watched, emitted, name):
    call = Form(name).guarded(watched(), lambda n: {"status": "out_of_scope"})
    call(1)
    span = emitted.span(SPAN)
    assert span.attributes["idemguard.outcome"] == "declined"
    assert reasons(span) == {"idemguard.declined": "its status is out_of_scope"}
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("recorded", [False, True])
def test_failed(watched, emitted, form, recorded):
    def body(n):
        spends(n)
        raise BoomError("SECRET")

    call = form.guarded(watched(record_exceptions=recorded), body)
    with pytest.raises(BoomError):
        call(1)
    span = emitted.span(SPAN)
    assert span.attributes["idemguard.outcome"] == "failed"
    assert span.attributes["idemguard.cause"] == "first"
    assert span.attributes["error.type"] == "BoomError"
    assert span.attributes["idemguard.usage.input_tokens"] == 100
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
    assert events(span) == (["exception"] if recorded else [])
    if recorded:
        assert span.events[0].attributes["exception.message"] == "SECRET"


def test_an_exception_whose_text_cannot_be_had_costs_nothing_else(watched, emitted):
    class MuteError(Exception):
        def __str__(self):
            raise ValueError

    def body(n):
        spends(n)
        raise MuteError

    call = watched(record_exceptions=True).idempotent(body, task_type="t")
    with pytest.raises(MuteError):
        call(1)
    assert emitted.span(SPAN).attributes["idemguard.usage.input_tokens"] == 100
    assert emitted.counted("idemguard.usage.tokens") == 110


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_whatever_ends_a_body_is_named(watched, emitted, error):
    def body(n):
        raise error

    with pytest.raises(error):
        watched().idempotent(body, task_type="t")(1)
    assert emitted.span(SPAN).attributes["error.type"] == error.__name__


def about_leader(span):
    """The leader that its attributes name."""
    told = span.attributes
    return told["idemguard.leader.trace_id"], told["idemguard.leader.span_id"]


def refused(emitted, call, error, *args):
    """A call that is refused with this error, and its span."""
    with pytest.raises(error):
        call(*args)
    span = emitted.last(SPAN)
    assert span.attributes["idemguard.outcome"] == "refused"
    assert span.attributes["error.type"] == error.__name__
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
    assert not [n for n in span.attributes if n.startswith(("idemguard.usage", "idemguard.saved"))]
    return span


def test_refused_by_a_timeout(watched, emitted, form):
    guard = watched()
    call = form.guarded(guard, spends, wait_timeout=0.02, on_timeout="raise")
    with emitted.tracer.start_as_current_span("by hand") as led:
        claim = guard.claim(guard.task_of(call.guarded, 1))
    span = refused(emitted, call, errors.WaitTimeoutError, 1)
    claim.release()
    told = span.attributes
    assert about_leader(span) == ids(led)
    assert told["idemguard.wait.duration"] >= 0.02
    assert "idemguard.execution.id" not in told
    assert not events(span)


def test_refused_by_a_conflict(watched, emitted, form):
    amount = {"of": 1}
    call = form.guarded(watched(), lambda n: n, key=lambda bound: "order-7")
    call(amount["of"])
    span = refused(emitted, call, errors.KeyConflictError, 2)
    assert "idemguard.leader.trace_id" not in span.attributes


def test_refused_as_unknown(emitted, form, clock):
    guard = Guard(store=MemoryStore(clock), lease=30, **emitted.providers)
    call = form.guarded(guard, lambda n: n, on_lost="raise")
    guard.claim(guard.task_of(call.guarded, 1))
    clock.advance(31)
    refused(emitted, call, errors.UnknownOutcomeError, 1)


def test_refused_for_want_of_an_identity(watched, emitted, form):
    call = form.guarded(watched(), lambda n: n)
    span = refused(emitted, call, errors.FingerprintError, object())
    assert "idemguard.fingerprint" not in span.attributes


def test_refused_as_its_own_execution(watched, emitted):
    guard = watched()

    @guard.idempotent(task_type="t")
    def task(n):
        return task(n)

    with pytest.raises(errors.ReentrantCallError):
        task(1)
    inner, outer = (
        s.attributes["idemguard.outcome"] for s in emitted.exporter.get_finished_spans()
    )
    assert (inner, outer) == ("refused", "failed")


def test_a_result_that_cannot_be_had(watched, emitted):
    def body(n):
        spends(n)
        return object()

    task = watched().idempotent(body, task_type="t")
    task(1)
    span = refused(emitted, task, errors.ResultUnavailableError, 1)
    assert about_leader(span) == ids(emitted.spans(SPAN)[0])  # there it is to be looked for
    assert emitted.counted("idemguard.saved.tokens") == 0
    assert emitted.counted("idemguard.usage.tokens") == 110


def test_observed_and_bypassing_calls(watched, emitted, form):
    guard = watched()
    observed = form.guarded(guard, lambda n: n, mode="observe")
    observed(1)
    observed(1)
    with bypass():
        observed(1)
    told = [
        (s.attributes["idemguard.outcome"], s.attributes["idemguard.cause"])
        for s in emitted.spans(SPAN)
    ]
    assert told == [("executed", "first"), ("executed", "observed"), ("executed", "forced")]


def test_an_observed_call_whose_task_cannot_be_told(watched, emitted, form):
    call = form.guarded(watched(mode="observe"), lambda n: 1)
    call(object())
    span = emitted.span(SPAN)
    assert span.attributes["idemguard.outcome"] == "unguarded"
    assert not events(span)  # its store has not failed


def test_run_task(watched, emitted):
    guard = watched()
    guard.run_task("t", {"n": 1}, lambda _: 1, worker_id="w-9")
    asyncio.run(_awaited(guard.run_task("t", {"n": 1}, _one)))
    first, again = emitted.spans(SPAN)
    assert first.attributes["idemguard.worker"] == "w-9"
    assert again.attributes["idemguard.outcome"] == "reused"


async def _one(_):
    return 1


async def _awaited(made):
    return await made


@pytest.mark.parametrize("how", ["argument", "guard", "environment"])
def test_off_emits_nothing(watched, emitted, form, how, monkeypatch):
    guard = watched(mode="off" if how == "guard" else None)
    if how == "environment":
        monkeypatch.setenv("IDEMGUARD_MODE", "off")
    call = form.guarded(guard, spends, mode="off" if how == "argument" else None)
    call(1)
    if how != "argument":
        task = guard.task_of(call.guarded, 1)
        guard.claim(task).complete(1)
        guard.run_task("t", 1, lambda _: 1)
    assert emitted.spans() == []
    assert emitted.metrics() == {}


# --- a store that fails --------------------------------------------------------------------------


@pytest.fixture
def failing(tapped, emitted):
    """A guard that emits, on a store that can fail."""
    guard = Guard(store=tapped, pricer=PRICES, **emitted.providers)
    yield guard
    guard.engine.backlog._owed.clear()


def test_a_store_that_is_down_before(failing, tapped, emitted, form):
    closed = form.guarded(failing, spends)
    tapped.down("SECRET")
    span = refused(emitted, closed, errors.StoreUnavailableError, 1)
    assert reasons(span) == {"idemguard.store_failed": "no claim could be had"}


def test_a_store_that_is_down_before_and_a_call_that_runs_all_the_same(
    failing, tapped, emitted, form
):
    call = form.guarded(failing, spends, on_store_error="run")
    tapped.down("SECRET")
    assert call(1) == 1
    span = emitted.span(SPAN)
    assert reasons(span) == {"idemguard.store_failed": "no claim could be had"}
    told = span.attributes
    assert (told["idemguard.outcome"], told["idemguard.cause"]) == ("unguarded", "unguarded")
    assert told["idemguard.usage.input_tokens"] == 100
    assert span.status.status_code is StatusCode.UNSET


def test_a_store_that_goes_away_while_the_body_runs(failing, tapped, emitted, form):
    def body(n):
        tapped.down("SECRET")
        return spends(n)

    assert form.guarded(failing, body)(1) == 1
    span = emitted.span(SPAN)
    assert reasons(span) == {"idemguard.store_failed": "the end of its execution is told later"}
    assert span.attributes["idemguard.outcome"] == "executed"
    assert span.status.status_code is StatusCode.UNSET


# --- a lease that runs out -----------------------------------------------------------------------


def test_a_lease_that_ran_out_unseen_is_told_at_the_end(failing, tapped, emitted, form, crew):
    """Nothing is renewed, a successor takes over, and the end tells it."""
    tapped.down_for(Renew)
    begun, go_on = threading.Event(), threading.Event()

    def body(n):
        if begun.is_set():
            return "successor"
        begun.set()
        assert go_on.wait(LONG)
        return "late"

    call = form.guarded(failing, body, lease=0.05)
    leader = crew.start(call, 1)
    assert begun.wait(LONG)
    assert call(1) == "successor"  # it waits until the lease has run out
    go_on.set()
    assert leader.result(LONG) == "late"
    late, successor = emitted.spans(SPAN)
    assert successor.attributes["idemguard.cause"] == "lost"
    assert events(successor) == []
    assert reasons(late) == {"idemguard.lost": "its lease ran out"}
    assert late.attributes["idemguard.outcome"] == "executed"


def test_a_loss_that_is_known_is_told_once(failing, tapped, emitted, form, crew, until):
    """A renewal comes back to find a successor, and later the end does."""
    tapped.down_for(Renew)
    begun, up = threading.Event(), threading.Event()

    def body(n):
        if begun.is_set():
            return "successor"
        begun.set()
        assert up.wait(LONG)
        execution = current()
        until(lambda: execution.lost)
        return "late"

    call = form.guarded(failing, body, lease=0.05)
    with capture() as calls:
        leader = crew.start(contextvars.copy_context().run, call, 1)
        assert begun.wait(LONG)
        assert call(1) == "successor"
        tapped.up()
        up.set()
        assert leader.result(LONG) == "late"
    assert [c.lost for c in calls] == [False, True]
    late, _ = emitted.spans(SPAN)
    assert events(late) == ["idemguard.lost"]
    assert reasons(late) == {"idemguard.lost": "its lease ran out"}


def test_a_fallback_that_comes_second_has_lost_nothing(watched, emitted, form, crew, until):
    """Its result is not kept, which a renewal tells it; but no lease ran out."""
    begun, done = threading.Event(), threading.Event()

    def body(n):
        if not begun.is_set():
            begun.set()
            assert done.wait(LONG)
            return "leader"
        done.set()
        execution = current()
        until(lambda: execution.lost)
        return "fallback"

    call = form.guarded(watched(), body, lease=0.09, wait_timeout=0)
    leader = crew.start(call, 1)
    assert begun.wait(LONG)
    assert call(1) == "fallback"
    assert leader.result(LONG) == "leader"
    first, second = emitted.spans(SPAN)
    assert second.attributes["idemguard.outcome"] == "fallback"
    assert (events(first), events(second)) == ([], ["idemguard.fallback"])


def test_a_claim_that_was_taken_away_is_told_by_the_next_renewal(watched, emitted, form, until):
    guard = watched()
    told = []

    def body(n):
        guard.forget(guard.task_of(call.guarded, n))
        execution = current()
        until(lambda: execution.lost)
        told.append(time.time_ns())
        return n

    call = form.guarded(guard, body, lease=0.09)
    call(1)
    span = emitted.span(SPAN)
    assert reasons(span) == {
        "idemguard.lost": "its task was forgotten, or its fallback's result was kept before its own"
    }
    assert span.events[0].timestamp <= told[0]  # while the body ran
    assert events(span) == ["idemguard.lost"]  # and not once more at the end


# --- what happens inside -------------------------------------------------------------------------


def test_a_bodys_own_spans_are_children(watched, emitted, form):
    guard = watched()
    inner = guard.idempotent(lambda n: n, task_type="inner")

    def body(n):
        with emitted.tracer.start_as_current_span("chat"):
            return inner(n)

    call = form.guarded(guard, body)
    with emitted.tracer.start_as_current_span("request") as request:
        call(1)
        assert trace.get_current_span() is request
    assert none_is_current()
    own, chat, nested = (emitted.span(n) for n in (SPAN, "chat", "idemguard inner"))
    assert own.parent.span_id == request.get_span_context().span_id
    assert chat.parent.span_id == own.context.span_id
    assert nested.parent.span_id == chat.context.span_id
    assert own.start_time <= chat.start_time <= chat.end_time <= own.end_time


def test_work_that_a_body_hands_on_to_threads_and_tasks_is_inside(watched, emitted):
    def chat(name):
        with emitted.tracer.start_as_current_span(name):
            pass

    async def achat(name):
        chat(name)

    @watched().idempotent(task_type="t")
    async def task(n):
        await asyncio.to_thread(chat, "thread")
        await asyncio.gather(achat("a"), achat("b"))

    asyncio.run(task(1))
    own = emitted.span(SPAN).context.span_id
    assert {emitted.span(name).parent.span_id for name in ("thread", "a", "b")} == {own}


def test_calls_at_once_each_have_their_own(watched, emitted, crew):
    guard, all_in = watched(), threading.Barrier(4)

    @guard.idempotent(task_type="t")
    def task(n):
        all_in.wait(LONG)
        with emitted.tracer.start_as_current_span(f"chat {n}"):
            all_in.wait(LONG)
        return n

    for future in [crew.start(task, n) for n in range(4)]:
        future.result(LONG)
    parents = {emitted.span(f"chat {n}").parent.span_id for n in range(4)}
    assert parents == {span.context.span_id for span in emitted.spans(SPAN)}
    assert len(parents) == 4
    assert len({span.context.trace_id for span in emitted.spans(SPAN)}) == 4


def test_tasks_at_once_each_have_their_own(watched, emitted):
    @watched().idempotent(task_type="t")
    async def task(n):
        await all_in.wait()
        with emitted.tracer.start_as_current_span(f"chat {n}"):
            await all_in.wait()

    async def main():
        nonlocal all_in
        all_in = asyncio.Barrier(4)
        await asyncio.gather(*map(task, range(4)))
        assert none_is_current()

    all_in = None
    asyncio.run(main())
    assert len({emitted.span(f"chat {n}").parent.span_id for n in range(4)}) == 4


# --- streams: current in their steps alone -------------------------------------------------------


def test_nothing_of_a_stream_is_current_at_its_consumer(watched, emitted):
    @watched().idempotent(task_type="t")
    def flow(n):
        for chunk in range(n):
            with emitted.tracer.start_as_current_span("chat"):
                pass
            yield chunk

    stream = flow(3)
    assert none_is_current()
    for chunk in stream:
        assert none_is_current()
        with emitted.tracer.start_as_current_span(f"consumer {chunk}"):
            pass
    assert none_is_current()
    own = emitted.span(SPAN)
    assert [span.parent.span_id for span in emitted.spans("chat")] == [own.context.span_id] * 3
    assert [emitted.span(f"consumer {n}").parent for n in range(3)] == [None] * 3


def test_nothing_of_an_async_stream_is_current_at_its_consumer(watched, emitted):
    @watched().idempotent(task_type="t")
    async def flow(n):
        for chunk in range(n):
            with emitted.tracer.start_as_current_span("chat"):
                await asyncio.sleep(0)
            yield chunk

    async def main():
        with emitted.tracer.start_as_current_span("request") as request:
            async for _ in flow(3):
                assert trace.get_current_span() is request
            assert trace.get_current_span() is request

    asyncio.run(main())
    own = emitted.span(SPAN)
    assert own.parent.span_id == emitted.span("request").context.span_id
    assert [span.parent.span_id for span in emitted.spans("chat")] == [own.context.span_id] * 3


def test_streams_that_are_read_in_turns(watched, emitted):
    @watched().idempotent(task_type="t")
    def flow(n):
        for _ in range(3):
            with emitted.tracer.start_as_current_span(f"chat {n}"):
                pass
            yield n

    for _ in zip(flow(1), flow(2), strict=False):
        assert none_is_current()
    gc.collect()
    own = {s.attributes["idemguard.fingerprint"]: s.context.span_id for s in emitted.spans(SPAN)}
    parents = [{s.parent.span_id for s in emitted.spans(f"chat {n}")} for n in (1, 2)]
    assert [len(spans) for spans in parents] == [1, 1]
    assert set.union(*parents) == set(own.values())
    assert parents[0] != parents[1]


def test_a_streams_span_is_open_from_its_first_step_to_its_last(watched, emitted):
    @watched().idempotent(task_type="t")
    def stream(n):
        yield from range(n)

    made = stream(2)
    assert emitted.open.spans == {}
    assert next(made) == 0
    assert list(emitted.open.spans.values()) == [SPAN]
    assert list(made) == [1]
    assert emitted.open.spans == {}


@pytest.mark.parametrize("end", ["consumed", "left", "collected"])
def test_a_replayed_streams_span_is_open_until_its_consumer_is_done(watched, emitted, end):
    @watched().idempotent(task_type="t")
    def flow(n):
        spends(n)
        yield from range(n)

    list(flow(3))
    stream = flow(3)
    assert next(stream) == 0
    assert list(emitted.open.spans.values()) == [SPAN]
    if end == "consumed":
        assert list(stream) == [1, 2]
    elif end == "left":
        stream.close()
    else:
        del stream
        gc.collect()
    assert emitted.open.spans == {}
    span = emitted.last(SPAN)
    assert span.attributes["idemguard.outcome"] == "reused"
    assert span.attributes["idemguard.saved.input_tokens"] == 100
    assert "error.type" not in span.attributes
    assert emitted.counted("idemguard.calls", idemguard_outcome="reused") == 1


def test_a_replayed_async_stream_likewise(watched, emitted):
    @watched().idempotent(task_type="t")
    async def flow(n):
        for chunk in range(n):
            yield chunk

    async def main():
        assert [chunk async for chunk in flow(3)] == [0, 1, 2]
        stream = flow(3)
        assert await anext(stream) == 0
        assert list(emitted.open.spans.values()) == [SPAN]
        assert [chunk async for chunk in stream] == [1, 2]
        assert emitted.open.spans == {}

    asyncio.run(main())


def left(emitted, error="LeftError"):
    """The span of a stream that was left has ended."""
    span = emitted.span(SPAN)
    assert span.attributes["idemguard.outcome"] == "failed"
    assert span.attributes["error.type"] == error
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["idemguard.usage.input_tokens"] == 100
    assert emitted.counted("idemguard.calls", idemguard_outcome="failed") == 1
    assert emitted.counted("idemguard.calls") == emitted.counted("idemguard.executions") == 1
    assert emitted.counted("idemguard.usage.tokens") == 110


def begun(watched, emitted):
    """A stream after its first step."""

    @watched().idempotent(task_type="t")
    def flow(n):
        with emitted.tracer.start_as_current_span("chat"):
            spends(n)
        yield 0
        yield 1

    stream = flow(2)
    next(stream)
    return stream


def test_a_stream_that_is_left(watched, emitted):
    begun(watched, emitted).close()
    left(emitted)


def test_a_stream_that_is_left_in_another_thread(watched, emitted, crew):
    stream = begun(watched, emitted)
    crew.start(stream.close).result(LONG)
    left(emitted)


def test_a_stream_that_is_consumed_by_many_threads(watched, emitted, crew):
    stream = begun(watched, emitted)
    assert crew.start(next, stream).result(LONG) == 1
    assert crew.start(next, stream, "over").result(LONG) == "over"
    assert emitted.span(SPAN).attributes["idemguard.outcome"] == "executed"


def test_a_stream_that_is_collected(watched, emitted, until):
    stream = begun(watched, emitted)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()
    until(lambda: emitted.spans(SPAN))
    left(emitted)


def test_a_stream_that_something_is_thrown_into(watched, emitted):
    stream = begun(watched, emitted)
    with pytest.raises(BoomError):
        stream.throw(BoomError())
    span = emitted.span(SPAN)
    assert span.attributes["error.type"] == "BoomError"
    assert none_is_current()


def abegun(watched, emitted):
    """An async stream, made by a loop that it is then begun on."""

    @watched().idempotent(task_type="t")
    async def flow(n):
        with emitted.tracer.start_as_current_span("chat"):
            spends(n)
            await asyncio.sleep(0)
        yield 0
        await asyncio.sleep(0)
        yield 1

    return flow(2)


@pytest.mark.parametrize("how", ["closed", "in another task", "collected", "with its loop"])
def test_an_async_stream_that_is_left(watched, emitted, until, how):
    async def main():
        stream = abegun(watched, emitted)
        await anext(stream)
        assert none_is_current()
        if how == "closed":
            await stream.aclose()
        elif how == "in another task":
            await asyncio.create_task(stream.aclose())
        elif how == "collected":
            cycle = [stream]
            cycle.append(cycle)
            del stream, cycle
            await asyncio.create_task(collected())
            async with asyncio.timeout(LONG):
                while not emitted.spans(SPAN):  # noqa: ASYNC110 - its loop closes it in a task
                    await asyncio.sleep(0)
        assert none_is_current()

    asyncio.run(main())
    left(emitted, "CancelledError" if how == "with its loop" else "LeftError")


async def collected():
    gc.collect()


# a loop that nobody wound up leaves what it has open to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is:ResourceWarning")
def test_an_async_stream_that_outlives_its_loop(watched, emitted, until):
    kept = []

    async def main():
        kept.append(abegun(watched, emitted))
        await anext(kept[0])

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()  # nobody shut its async generators down
    kept.clear()
    gc.collect()
    until(lambda: emitted.spans(SPAN))
    left(emitted)


def test_an_async_stream_that_is_left_while_it_awaits(watched, emitted, until):
    """The chunk that it is about to give never comes."""
    entered = asyncio.Event()

    @watched().idempotent(task_type="t")
    async def flow(n):
        spends(n)
        entered.set()
        await asyncio.Event().wait()
        yield 0

    async def main():
        stepping = asyncio.ensure_future(anext(flow(1)))
        await entered.wait()
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping

    asyncio.run(main())
    span = emitted.span(SPAN)
    assert span.attributes["error.type"] == "CancelledError"


def test_an_async_stream_that_something_is_thrown_into(watched, emitted):
    async def main():
        stream = abegun(watched, emitted)
        await anext(stream)
        with pytest.raises(BoomError):
            await stream.athrow(BoomError())
        assert none_is_current()

    asyncio.run(main())
    assert emitted.span(SPAN).attributes["error.type"] == "BoomError"


# --- coroutines that are not awaited to their end ------------------------------------------------


def test_the_check_of_detaching_can_fail(caplog):
    token = contextvars.copy_context().run(otel.attach, otel.get_current())
    otel.detach(token)
    told = [r for r in caplog.records if r.name == "opentelemetry.context"]
    assert [record.levelname for record in told] == ["ERROR"]
    caplog.clear()


# a loop that nobody wound up leaves what it has open to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is:ResourceWarning")
@pytest.mark.parametrize("where", ["here", "another thread", "another context", "after its loop"])
def test_a_coroutine_that_is_closed(watched, emitted, crew, until, where):
    inside = asyncio.Event()

    @watched().idempotent(task_type="t")
    async def task(n):
        with emitted.tracer.start_as_current_span("request"):
            spends(n)
        inside.set()
        await asyncio.Event().wait()

    async def begin():
        made = asyncio.get_running_loop().create_task(task(1))
        await inside.wait()
        return made.get_coro()

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it says that a task was pending, as it should
    coroutine = loop.run_until_complete(begin())
    if where == "here":
        coroutine.close()
    elif where == "another thread":
        crew.start(coroutine.close).result(LONG)
    elif where == "another context":
        contextvars.copy_context().run(coroutine.close)
    loop.close()
    del coroutine
    gc.collect()
    until(lambda: emitted.spans(SPAN))
    span = emitted.span(SPAN)
    assert span.attributes["idemguard.outcome"] == "failed"
    assert span.attributes["error.type"] == "GeneratorExit"
    assert span.attributes["idemguard.usage.input_tokens"] == 100
    assert emitted.counted("idemguard.calls", idemguard_outcome="failed") == 1
    assert none_is_current()


def test_a_coroutine_that_is_never_begun_is_no_call(watched, emitted):
    @watched().idempotent(task_type="t")
    async def task(n):
        return n

    task(1).close()
    assert emitted.spans() == []
    assert emitted.points("idemguard.calls") == {}


@pytest.mark.parametrize("name", ["async", "async generator"])
def test_cancelled_at_each_await(watched, emitted, name):
    """After one turn of the loop, after two, and so on, until it gets to its end."""
    guard = watched()

    async def task(n):
        for _ in range(3):
            with emitted.tracer.start_as_current_span("chat"):
                await asyncio.sleep(0)
        return n

    async def flow(n):
        for chunk in range(3):
            with emitted.tracer.start_as_current_span("chat"):
                await asyncio.sleep(0)
            yield chunk

    call = guard.idempotent(task if name == "async" else flow, task_type="t")

    async def consume(n):
        if name == "async":
            return await call(n)
        return [chunk async for chunk in call(n)]

    async def cancelled(turns):
        running = asyncio.create_task(consume(turns))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            return True
        return False

    async def main():
        turns = 1
        while await cancelled(turns):
            turns += 1
            assert none_is_current()
        return turns

    turns = asyncio.run(main())
    assert turns > 5
    gc.collect()
    assert emitted.open.spans == {}
    told = [
        (s.attributes["idemguard.outcome"], s.attributes.get("error.type"))
        for s in emitted.spans(SPAN)
    ]
    assert told[-1] == ("executed", None)
    # the last of them come while the end is told, which is told all the same
    sources = [source for source, _ in told[:-1]]
    assert {error for _, error in told[:-1]} == {"CancelledError"}
    assert set(sources) == {"failed", "executed"}
    assert sources == sorted(sources, reverse=True)
    assert len(told) >= turns - 1  # the first may be cancelled before it began
    summary = guard.ledger.task_type_summary("t")
    assert emitted.counted("idemguard.executions") == summary["executions"]
    for outcome in ("failed", "executed"):
        told_so = emitted.counted("idemguard.calls", idemguard_outcome=outcome)
        assert told_so == summary[outcome] == [source for source, _ in told].count(outcome)


class Interrupted(Interrupt):
    """As that one, but for the resumption of generators: what a profiler raises there kills them."""

    def __call__(self, frame, event, _):
        if event != "call" or not frame.f_code.co_flags & inspect.CO_GENERATOR:
            super().__call__(frame, event, _)


def test_an_interrupt_wherever_there_can_be_one_ends_the_span(watched, emitted):
    task = watched().idempotent(lambda n: n, task_type="t")
    task("warm")
    for number in range(1, 3000, 7):
        interrupt = Interrupted(number)
        sys.setprofile(interrupt)
        try:
            task(number)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if interrupt.at is None:
            break
        assert none_is_current(), interrupt.at
    told = [s.attributes.get("error.type") for s in emitted.spans(SPAN)]
    assert set(told) <= {None, "KeyboardInterrupt"}
    assert told.count("KeyboardInterrupt") > 5
    emitted.open.spans.clear()  # one that was hit in the midst of the SDK's own start or end


# --- waiting -------------------------------------------------------------------------------------


def test_waiting_is_a_span_of_its_own(tapped, emitted, crew, until, form):
    guard = Guard(store=tapped, **emitted.providers)
    call = form.guarded(guard, lambda n: n)
    task = guard.task_of(call.guarded, 1)
    with emitted.tracer.start_as_current_span("by hand") as led:
        claim = guard.claim(task)
    with capture() as calls:
        waiter = crew.start(contextvars.copy_context().run, call, 1)
        until(lambda: tapped.parked)
        since = time.monotonic()
        threading.Event().wait(0.05)
        passed = time.monotonic() - since
        claim.release()
        assert waiter.result(LONG) == 1
    own, wait = emitted.span(SPAN), emitted.span(WAIT)
    assert wait.parent.span_id == own.context.span_id
    assert seconds(wait) >= passed * 0.98  # one is measured by the wall's clock
    assert own.start_time <= wait.start_time <= wait.end_time <= own.end_time
    assert own.attributes["idemguard.wait.duration"] == calls[0].waited >= passed
    assert dict(wait.attributes) == {
        "idemguard.task.type": "t",
        "idemguard.fingerprint": task.fingerprint[:16],
    }
    (link,) = wait.links
    assert link.context.span_id == led.get_span_context().span_id
    assert dict(link.attributes) == {"idemguard.link.type": "leader"}


def test_one_span_for_each_leader_that_is_waited_for(tapped, emitted, crew, until):
    guard = Guard(store=tapped, **emitted.providers)
    call = guard.idempotent(lambda n: n, task_type="t")
    task = guard.task_of(call, 1)
    tracer = emitted.tracer
    with tracer.start_as_current_span("first"):
        first = guard.claim(task)
    waiter = crew.start(call, 1)
    until(lambda: tapped.parked == 1)
    # a forgotten claim frees the way for another leader before the waiter asks again
    real, taken = tapped.perform, []

    def perform(command):
        if isinstance(command, Begin) and not taken:
            taken.append(None)
            with tracer.start_as_current_span("second"):
                taken[0] = guard.claim(task)
        return real(command)

    tapped.perform = perform
    first.release()
    until(lambda: tapped.parked == 2)
    tapped.perform = real
    taken[0].complete(7)
    assert waiter.result(LONG) == 7
    one, two = emitted.spans(WAIT)
    leaders = [emitted.span("first"), emitted.span("second")]
    assert [s.links[0].context.span_id for s in (one, two)] == [s.context.span_id for s in leaders]
    assert one.end_time <= two.start_time
    own = emitted.span(SPAN)
    assert [link.context.span_id for link in own.links] == [s.context.span_id for s in leaders]
    assert own.attributes["idemguard.leader.span_id"] == ids(leaders[1])[1]


def test_a_hint_that_brings_nothing_does_not_end_a_wait(tapped, emitted, crew, until):
    guard = Guard(store=tapped, **emitted.providers)
    call = guard.idempotent(lambda n: n, task_type="t", wait_timeout=0.05, on_timeout="fallback")
    task = guard.task_of(call, 1)
    claim = guard.claim(task)
    beside, go_on = threading.Event(), threading.Event()

    @guard.idempotent(task_type="t", wait_timeout=0)
    def fallback(n):
        beside.set()
        assert go_on.wait(LONG)
        return n

    other = crew.start(fallback, 1)
    assert beside.wait(LONG)
    waiter = crew.start(call, 1)
    # it asked again when its patience was over, and waits on
    until(lambda: sum(isinstance(c, Begin) for c in tapped.seen) >= 5)
    go_on.set()
    assert other.result(LONG) == waiter.result(LONG) == 1
    claim.release()
    assert len([s for s in emitted.spans(WAIT) if seconds(s) >= 0.045]) == 1


@pytest.mark.parametrize("how", ["cancelled", "store", "timeout"])
def test_a_wait_ends_whatever_happens(tapped, emitted, until, how):
    guard = Guard(store=tapped, lease=5, **emitted.providers)
    patience = {"wait_timeout": 0.03, "on_timeout": "raise"} if how == "timeout" else {}

    @guard.idempotent(task_type="t", **patience)
    async def call(n):
        return n

    claim = guard.claim(guard.task_of(call, 1))

    async def main():
        waiter = asyncio.create_task(call(1))
        if how != "timeout":
            async with asyncio.timeout(LONG):
                while not tapped.parked:  # noqa: ASYNC110 - what it waits for is in a thread
                    await asyncio.sleep(0.001)
        match how:
            case "cancelled":
                waiter.cancel()
            case "store":
                tapped.fails = errors.StoreError("SECRET")  # no outage, so it does not wait
                await asyncio.to_thread(_wake, tapped, claim)
        return (await asyncio.gather(waiter, return_exceptions=True))[0]

    error = asyncio.run(main())
    tapped.up()
    own, wait = emitted.span(SPAN), emitted.span(WAIT)
    assert wait.end_time <= own.end_time
    assert own.attributes["error.type"] == type(error).__name__
    assert own.attributes["idemguard.outcome"] == (
        "refused" if how in ("store", "timeout") else "failed"
    )
    assert 0 < own.attributes["idemguard.wait.duration"] <= seconds(wait) + 0.005
    found = emitted.counted("idemguard.wait.duration")
    assert found == 1
    guard.engine.backlog._owed.clear()


def _wake(tapped, claim):
    """Tell the real store of an end, so that the waiter asks again."""
    real = claim._engine.store.store
    real.perform(claim._releasing())


# a loop that nobody wound up leaves what it has open to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is:ResourceWarning")
def test_a_wait_ends_with_its_coroutine(tapped, emitted):
    guard = Guard(store=tapped, **emitted.providers)

    @guard.idempotent(task_type="t")
    async def call(n):
        return n

    claim = guard.claim(guard.task_of(call, 1))

    async def begin():
        waiter = asyncio.create_task(call(1))
        async with asyncio.timeout(LONG):
            while not tapped.parked:  # noqa: ASYNC110 - what it waits for is in a thread
                await asyncio.sleep(0.001)
        return waiter.get_coro()

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it says that a task was pending, as it should
    coroutine = loop.run_until_complete(begin())
    coroutine.close()
    loop.close()
    claim.release()
    own, wait = emitted.span(SPAN), emitted.span(WAIT)
    assert own.attributes["error.type"] == "GeneratorExit"
    assert 0 < own.attributes["idemguard.wait.duration"] <= seconds(wait) + 0.005
    assert emitted.counted("idemguard.wait.duration", idemguard_outcome="failed") == 1
    del coroutine
    gc.collect()


def test_a_wait_ends_with_ctrl_c(tapped, emitted):
    guard = Guard(store=tapped, **emitted.providers)
    call = guard.idempotent(lambda n: n, task_type="t")
    claim = guard.claim(guard.task_of(call, 1))

    def interrupt(*_):
        raise KeyboardInterrupt

    tapped.park = interrupt
    with pytest.raises(KeyboardInterrupt):
        call(1)
    claim.release()
    own, wait = emitted.span(SPAN), emitted.span(WAIT)
    assert wait.end_time <= own.end_time
    assert own.attributes["error.type"] == "KeyboardInterrupt"


def test_a_call_that_finds_a_result_at_once_does_not_wait(watched, emitted):
    task = watched().idempotent(lambda n: n, task_type="t")
    task(1)
    task(1)
    assert emitted.spans(WAIT) == []
    assert all("idemguard.wait.duration" not in s.attributes for s in emitted.spans(SPAN))
    assert emitted.points("idemguard.wait.duration") == {}


# --- how long ------------------------------------------------------------------------------------


def test_an_async_body_of_a_third_of_a_second_has_a_span_of_that(watched, emitted):
    took = []

    @watched().idempotent(task_type="t")
    async def task(n):
        since = time.monotonic()
        await asyncio.sleep(0.3)  # the model's latency
        took.append(time.monotonic() - since)

    asyncio.run(task(1))
    assert seconds(emitted.span(SPAN)) >= took[0] * 0.98 >= 0.29


@pytest.mark.parametrize("which", ["executed", "replayed"])
def test_a_stream_lasts_as_long_as_its_consumer_takes(watched, emitted, which):
    @watched().idempotent(task_type="t")
    def flow(n):
        yield from range(n)

    if which == "replayed":
        list(flow(4))
    since = took = None
    for _ in flow(4):
        since = time.monotonic() if since is None else since
        threading.Event().wait(0.03)  # what the consumer does with it
        took = time.monotonic() - since
    assert seconds(emitted.last(SPAN)) >= took * 0.98 >= 0.11


# --- forks ---------------------------------------------------------------------------------------


def told_in_child(emitted):
    """What a child has emitted, beside what it was born with."""
    return [(s.name, s.parent and f"{s.parent.span_id:016x}") for s in emitted.spans()]


def test_a_child_that_is_forked_inside_a_body(watched, emitted, form):
    guard, found = watched(), []
    inner = guard.idempotent(lambda n: n, task_type="inner")

    def child():
        inner(1)
        return told_in_child(emitted)

    def body(n):
        found.append(in_child(child))
        return n

    form.guarded(guard, body)(1)
    own = emitted.span(SPAN)
    assert found == [[["idemguard inner", ids(own)[1]]]]  # and nothing of the parent's
    assert [s.name for s in emitted.spans()] == [SPAN]


def test_a_child_does_not_end_what_its_parent_began(watched, emitted):
    stream = begun(watched, emitted)

    def child():
        with pytest.raises(errors.ConfigurationError):
            next(stream)
        stream.close()
        gc.collect()
        return [told_in_child(emitted), emitted.counted("idemguard.calls")]

    assert in_child(child) == [[["chat", ids(emitted.span("chat")) and _parent(emitted)]], 0]
    assert list(stream) == [1]
    assert emitted.span(SPAN).attributes["idemguard.outcome"] == "executed"


def _parent(emitted):
    return f"{emitted.span('chat').parent.span_id:016x}"


class ChildError(Exception):
    """Takes a child back to where its parent's call came from."""


def test_a_child_that_leaves_its_parents_call_does_not_end_it(watched, emitted):
    """Its frames are the parent's, and what it raises goes up through the guarded call."""
    out, into = os.pipe()

    @watched().idempotent(task_type="t")
    def call(n):
        if not (pid := os.fork()):
            raise ChildError
        assert os.waitpid(pid, 0)[1] == 0
        return n

    parent = os.getpid()
    try:
        assert call(1) == 1
    except ChildError:
        told = [told_in_child(emitted), emitted.counted("idemguard.calls")]
        os.write(into, json.dumps(told).encode())
    finally:
        if os.getpid() != parent:  # whatever has happened there, a child goes no further
            os._exit(0)
    os.close(into)
    assert json.loads(os.read(out, 999)) == [[], 0]
    os.close(out)
    assert emitted.span(SPAN).attributes["idemguard.outcome"] == "executed"


def test_a_child_does_not_end_what_waits_in_its_parent(tapped, emitted):
    guard = Guard(store=tapped, **emitted.providers)

    @guard.idempotent(task_type="t")
    async def call(n):
        return n

    claim = guard.claim(guard.task_of(call, 1))

    async def main():
        waiter = asyncio.create_task(call(1))
        async with asyncio.timeout(LONG):
            while not tapped.parked:  # noqa: ASYNC110 - what it waits for is in a thread
                await asyncio.sleep(0.001)

        def child():
            waiter.get_coro().close()
            return told_in_child(emitted)

        assert in_child(child) == []
        claim.release()
        assert await waiter == 1

    asyncio.run(main())
    assert len(emitted.spans(WAIT)) == 1


def test_a_child_that_is_forked_while_another_thread_holds_the_lock(watched, emitted):
    task = watched().idempotent(lambda n: n, task_type="t")
    with agent("a"):
        task(0)
    held, let_go = threading.Event(), threading.Event()

    def hold():
        with telemetry._naming:
            held.set()
            assert let_go.wait(LONG)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LONG)

    def child():
        with agent("b"):
            return task(1)

    try:
        assert in_child(child) == 1
    finally:
        let_go.set()
        thread.join(LONG)


# --- what else may happen ------------------------------------------------------------------------


AT_EXIT = """
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from idemguard import Guard

provider = TracerProvider()
told = ConsoleSpanExporter(formatter=lambda s: s.attributes["idemguard.outcome"] + " ")
provider.add_span_processor(BatchSpanProcessor(told))

@Guard(store="memory://", tracer_provider=provider).idempotent(task_type="t")
def flow(n):
    yield n
    yield n

list(flow(1))
left = flow(2)
next(left)
"""


def test_a_stream_ends_its_span_with_its_process():
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (b"executed failed ", b"")


def test_importing_loads_no_sdk():
    code = "import sys, idemguard.telemetry; print('opentelemetry.sdk' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout == b"False\n"


@pytest.mark.parametrize("which", ["tracer_provider", "meter_provider"])
def test_one_provider_without_the_other(store, emitted, which):
    guard = Guard(store=store, **{which: emitted.providers[which]})
    task = guard.idempotent(spends, task_type="t")
    with capture() as calls:
        task(1)
        task(1)
    seen = which == "tracer_provider"
    assert len(emitted.spans(SPAN)) == (2 if seen else 0)
    assert emitted.counted("idemguard.calls") == (0 if seen else 2)
    assert (calls[1].leader is not None) is seen
    guard.close()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("tracer_provider", object()),
        ("tracer_provider", "otlp"),
        ("meter_provider", object()),
        ("meter_provider", trace.NoOpTracerProvider()),
        ("record_exceptions", "yes"),
        ("gen_ai_usage", 2),
    ],
)
def test_a_provider_that_is_none_is_told(name, given):
    with pytest.raises(errors.ConfigurationError, match=name):
        Guard(**{name: given})

"""The links between calls: to the leader that was waited for or reused, to the execution that was lost."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import sampling
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from workers.emitted import Emitted, events, ids, links

from idemguard import Guard, capture, current, errors
from idemguard.claim import Begin, Complete
from idemguard.codec import Codec
from idemguard.usage import NOTHING

LONG = 30.0
SPAN = "idemguard t"
WAIT = "idemguard wait"
TESTS = Path(__file__).parent


@pytest.fixture
def emitted():
    """What is emitted."""
    made = Emitted()
    yield made
    made.close()
    assert made.open.spans == {}


@pytest.fixture
def guard(guard_of, emitted):
    """A guard that emits, on a store of each kind."""
    return guard_of(**emitted.providers)


@pytest.fixture
def task(guard):
    """A guarded function."""
    return guard.idempotent(lambda n: n, task_type="t")


def about_leader(span):
    """The leader that its attributes name."""
    told = span.attributes
    return told.get("idemguard.leader.trace_id"), told.get("idemguard.leader.span_id")


NOBODY = (None, None)


# --- over two processes --------------------------------------------------------------------------


class Other:
    """Another process, which leads."""

    def __init__(self, folder, url) -> None:
        self.url = url
        self._gate = folder / "gate"
        self._started = folder / "started"
        self._process = None

    def begin(self, how="always", *, waits=True, **options):
        """Have it call the task."""
        given = {
            "url": self.url,
            "how": how,
            "started": str(self._started),
            "gate": str(self._gate) if waits else "",
            **options,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "workers.linked", json.dumps(given)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
        )
        return self

    def inside(self, until):
        """The ids of the span that its body sees, once it runs."""
        until(self._started.exists, LONG)
        return tuple(json.loads(self._started.read_text("utf-8")))

    def end(self):
        """Let it go on, and wait until it has exited; the ids of the span that it exported."""
        self._gate.touch()
        out, err = self._process.communicate(timeout=LONG)
        assert self._process.returncode == 0, err.decode()
        told = json.loads(out)
        assert told["source"] == "executed"
        return [tuple(span[1:]) for span in told["spans"] if span[0] == SPAN]

    def kill(self):
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture(params=["sqlite", "redis"])
def other(request, tmp_path):
    """Another process around a store that is shared."""
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
    else:
        url = f"sqlite:///{tmp_path / 'shared.db'}"
    made = Other(tmp_path, url)
    yield made
    made.kill()


@pytest.fixture
def mine(other, emitted):
    """A guard of this process on the same store."""
    made = Guard(store=other.url, **emitted.providers)
    yield made
    made.close()


def test_reusing_what_a_process_left_that_has_exited(other, mine, emitted):
    (leader,) = other.begin(waits=False).end()
    task = mine.idempotent(lambda n: n, task_type="t")
    with capture() as calls:
        assert task(1) == 1
    span = emitted.span(SPAN)
    assert links(span) == [("leader", leader)]
    (link,) = span.links
    assert (link.context.is_remote, link.context.trace_flags.sampled) == (True, True)
    assert about_leader(span) == calls[0].leader == leader
    assert span.context.trace_id != link.context.trace_id
    (line,) = mine.ledger.executions(calls[0].fingerprint)
    assert (line.trace_id, line.span_id) == leader


def test_waiting_for_another_process(other, mine, emitted, crew, until):
    inside = other.begin().inside(until)
    task = mine.idempotent(lambda n: n, task_type="t")
    waiter = crew.start(task, 1)
    until(lambda: WAIT in emitted.open.spans.values())
    (leader,) = other.end()
    assert waiter.result(LONG) == 1
    assert leader == inside
    own, wait = emitted.span(SPAN), emitted.span(WAIT)
    assert links(own) == links(wait) == [("leader", leader)]  # once, though it waited and reused
    assert about_leader(own) == leader


def test_falling_back_beside_another_process(other, mine, emitted, until):
    other.begin().inside(until)
    task = mine.idempotent(lambda n: n, task_type="t", wait_timeout=0.01)
    with capture() as calls:
        assert task(1) == 1
    (leader,) = other.end()
    own = emitted.span(SPAN)
    assert links(own) == links(emitted.span(WAIT)) == [("leader", leader)]
    assert about_leader(own) == leader
    assert events(own) == ["idemguard.fallback"]
    assert calls[0].leader == ids(own)  # whose result it is: its own


def test_giving_up_on_another_process(other, mine, emitted, until):
    other.begin().inside(until)
    task = mine.idempotent(lambda n: n, task_type="t", wait_timeout=0.01, on_timeout="raise")
    with pytest.raises(errors.WaitTimeoutError):
        task(1)
    (leader,) = other.end()
    assert links(emitted.span(SPAN)) == [("leader", leader)]
    assert about_leader(emitted.span(SPAN)) == leader


def test_taking_over_from_a_process_that_was_killed(other, mine, emitted, until):
    lost = other.begin(lease=1).inside(until)
    other.kill()
    task = mine.idempotent(lambda n: n, task_type="t")
    with capture() as calls:
        assert task(1) == 1
    own = emitted.span(SPAN)
    assert own.attributes["idemguard.cause"] == "lost"
    assert links(own) == [("leader", lost), ("lost", lost)]
    assert about_leader(own) == NOBODY  # it reused nothing
    first, second = mine.ledger.executions(calls[0].fingerprint)
    assert [(first.trace_id, first.span_id), (second.trace_id, second.span_id)] == [lost, ids(own)]


@pytest.mark.parametrize("how", ["never", "as its parent"])
def test_a_leader_that_is_not_sampled(other, mine, emitted, until, how):
    other.begin(how, waits=False)
    inside = other.inside(until)
    assert other.end() == []
    mine.idempotent(lambda n: n, task_type="t")(1)
    span = emitted.span(SPAN)
    assert links(span) == [("leader", inside)]
    assert not span.links[0].context.trace_flags.sampled
    assert about_leader(span) == inside


def test_a_leader_without_an_sdk(other, mine, emitted, until):
    other.begin("no SDK")
    other.inside(until)
    task = mine.idempotent(lambda n: n, task_type="t", wait_timeout=0.01, on_timeout="raise")
    with pytest.raises(errors.WaitTimeoutError):
        task(1)
    assert other.end() == []
    with capture() as calls:
        assert task(1) == 1
    assert calls[0].leader is None
    for span in (*emitted.spans(SPAN), emitted.span(WAIT)):
        assert span.links == ()
        assert about_leader(span) == NOBODY
    (line,) = mine.ledger.executions(calls[0].fingerprint)
    assert (line.trace_id, line.span_id) == NOBODY


# --- what is kept of a leader is no id -----------------------------------------------------------

TRACE, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GARBAGE = {
    "short": (TRACE[1:], SPAN_ID),
    "short span": (TRACE, SPAN_ID[1:]),
    "long": (TRACE + "0", SPAN_ID),
    "upper case": (TRACE.upper(), SPAN_ID),
    "zeros": ("0" * 32, SPAN_ID),
    "zero span": (TRACE, "0" * 16),
    "no hex": ("x" * 32, SPAN_ID),
    "an int's underscore": ("4_" * 16, SPAN_ID),
    "white space": (" " + TRACE[2:] + "\n", SPAN_ID),
    "other digits": ("٤" * 32, SPAN_ID),
    "half": (TRACE, None),
    "other half": (None, SPAN_ID),
    "empty": ("", ""),
    "no text": (7, [1]),
}


def held(guard, task, **caller):
    """A claim whose caller has told this of itself."""
    ask = guard._desk.ask(task, "other")
    answer = guard.engine.store.perform(
        Begin(ask.address, "0123456789abcdef", ask.caller._replace(**caller), 30_000, ask.digest)
    )
    return answer.claim


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_nobody(guard, emitted, what):
    trace_id, span_id = GARBAGE[what]
    call = guard.idempotent(lambda n: n, task_type="t", wait_timeout=0.005, on_timeout="raise")
    claim = held(guard, guard.task_of(call, 1), trace_id=trace_id, span_id=span_id, trace_flags=1)
    with pytest.raises(errors.WaitTimeoutError):
        call(1)
    ended = Complete(claim, Codec().dump(7, limit=99), 900_000, 30_000, NOTHING, 86_400_000)
    guard.engine.store.perform(ended)
    with capture() as calls:
        assert call(1) == 7
    assert calls[0].leader is None
    assert len(emitted.spans()) == 3
    for span in emitted.spans():
        assert span.links == ()
        assert about_leader(span) == NOBODY


@pytest.mark.parametrize(
    ("flags", "told"), [(None, 0), (0, 0), (1, 1), (3, 3), (257, 1), (-1, 255), ("01", 0)]
)
def test_flags_are_one_byte(guard, emitted, flags, told):
    call = guard.idempotent(lambda n: n, task_type="t", wait_timeout=0.005, on_timeout="raise")
    held(guard, guard.task_of(call, 1), trace_id=TRACE, span_id=SPAN_ID, trace_flags=flags)
    with pytest.raises(errors.WaitTimeoutError):
        call(1)
    (link,) = emitted.span(SPAN).links
    assert (link.context.trace_flags, links(emitted.span(SPAN))) == (
        told,
        [("leader", (TRACE, SPAN_ID))],
    )


# --- claims that are held by hand ----------------------------------------------------------------


def test_a_claim_by_hand_carries_the_present_span(guard, task, emitted):
    todo = guard.task_of(task, 1)
    with emitted.tracer.start_as_current_span("by hand") as present:
        guard.claim(todo).complete(7)
    with capture() as calls:
        assert task(1) == 7
    assert links(emitted.span(SPAN)) == [("leader", ids(present))]
    assert calls[0].leader == ids(present)
    assert guard.peek(todo).leader == ids(present)
    (line,) = guard.ledger.executions(todo.fingerprint)
    assert (line.trace_id, line.span_id) == ids(present)
    assert [span.name for span in emitted.spans()] == ["by hand", SPAN]  # none of its own


def test_a_claim_by_hand_inside_an_execution_carries_that_ones_span(guard, task, emitted):
    @guard.idempotent(task_type="outer")
    def outer(n):
        guard.claim(guard.task_of(task, n)).complete(7)

    outer(1)
    task(1)
    assert links(emitted.span(SPAN)) == [("leader", ids(emitted.span("idemguard outer")))]


def test_a_claim_by_hand_where_no_span_is(guard, task, emitted):
    guard.claim(guard.task_of(task, 1)).complete(7)
    task(1)
    assert emitted.span(SPAN).links == ()


def test_a_claim_by_hand_within_a_span_that_is_not_sampled(guard_of, emitted):
    unsampled = Emitted(sampling.ALWAYS_OFF)
    guard = guard_of(**emitted.providers)
    task = guard.idempotent(lambda n: n, task_type="t")
    with unsampled.tracer.start_as_current_span("by hand") as present:
        guard.claim(guard.task_of(task, 1)).complete(7)
    unsampled.close()
    task(1)
    (link,) = emitted.span(SPAN).links
    assert links(emitted.span(SPAN)) == [("leader", ids_of(present))]
    assert link.context.trace_flags == present.get_span_context().trace_flags
    assert not link.context.trace_flags.sampled


def ids_of(span):
    """The ids of a span that records nothing."""
    there = span.get_span_context()
    return f"{there.trace_id:032x}", f"{there.span_id:016x}"


@pytest.mark.parametrize("measures", [False, True])
def test_a_request_that_came_from_elsewhere_does_not_execute(guard_of, emitted, measures):
    """Without an SDK its span, which is another service's, is the present one all the same."""
    blind = guard_of(meter_provider=emitted.meters if measures else None)
    task = blind.idempotent(lambda n: n, task_type="t")
    request = SpanContext(int(TRACE, 16), int(SPAN_ID, 16), True, TraceFlags(1))
    with trace.use_span(NonRecordingSpan(request)):
        task(1)
        blind.claim(blind.task_of(task, 2)).complete(2)
    for n in (1, 2):
        (line,) = blind.ledger.executions(blind.task_of(task, n).fingerprint)
        assert (line.trace_id, line.span_id) == NOBODY
    guard_of(**emitted.providers).idempotent(lambda n: n, task_type="t")(1)
    assert emitted.span(SPAN).links == ()


# --- what a line and an outcome tell -------------------------------------------------------------


def test_outcome_and_line_name_the_span_of_their_execution(guard, task, emitted):
    with capture() as calls:
        task(1)
        task(1)
        guard.run_task("t", 2, lambda _: current().execution_id)
    first, again, other = emitted.spans(SPAN)
    assert calls[0].leader == calls[1].leader == ids(first) != ids(again)
    assert calls[2].leader == ids(other)
    for call in calls:
        (line,) = guard.ledger.executions(call.fingerprint)
        assert (line.trace_id, line.span_id) == call.leader
    assert guard.wait_result(guard.task_of(task, 1), 0).leader == ids(first)


def test_a_call_that_was_refused_has_no_leader(guard, emitted):
    task = guard.idempotent(lambda n: n, task_type="t")
    with capture() as calls, pytest.raises(errors.FingerprintError):
        task(object())
    assert calls[0].leader is None
    assert emitted.span(SPAN).links == ()


def test_an_async_claim_by_hand(guard, task, emitted):
    async def main():
        with emitted.tracer.start_as_current_span("by hand"):
            claim = await guard.aio.claim(guard.task_of(task, 1))
            await claim.complete(7)
        await guard.aio.close()

    asyncio.run(main())
    task(1)
    assert links(emitted.span(SPAN)) == [("leader", ids(emitted.span("by hand")))]


# --- the execution that was lost -----------------------------------------------------------------


@pytest.fixture
def lose(tapped, emitted, clock):
    """A task on a store that is tapped, and an execution of it that was lost: its span's ids."""
    guard = Guard(store=tapped, lease=30, **emitted.providers)
    task = guard.idempotent(lambda n: n, task_type="t")
    with emitted.tracer.start_as_current_span("lost") as span:
        guard.claim(guard.task_of(task, 1))
    clock.advance(31)
    tapped.looked = 0
    real = tapped.look

    def look(address):
        tapped.looked += 1
        return real(address)

    tapped.look = look
    yield guard, task, ids(span)
    guard.close()


def test_a_retaker_links_to_what_was_lost(lose, emitted, clock):
    _, task, lost = lose
    task(1)
    assert links(emitted.span(SPAN)) == [("lost", lost)]
    clock.advance(1000)  # its result's time is over
    task(1)
    assert emitted.last(SPAN).links == ()  # what was lost once is not lost for the next one


def test_the_newest_that_was_lost(lose, emitted, clock):
    guard, task, _ = lose
    with emitted.tracer.start_as_current_span("lost again") as again:
        assert guard.claim(guard.task_of(task, 1)).cause == "lost"
    clock.advance(31)
    task(1)
    assert links(emitted.span(SPAN)) == [("lost", ids(again))]


def test_a_retaker_asks_the_store_for_nothing_more(lose, emitted, tapped):
    _, task, lost = lose
    task(1)
    assert links(emitted.span(SPAN)) == [("lost", lost)]
    assert tapped.looked == 0


# --- together ------------------------------------------------------------------------------------


def test_many_waiters_all_link_to_the_one(guard, emitted, crew, until):
    begun, go_on = threading.Event(), threading.Event()

    @guard.idempotent(task_type="t")
    def task(n):
        begun.set()
        assert go_on.wait(LONG)
        return n

    leader = crew.start(task, 1)
    assert begun.wait(LONG)
    waiters = [crew.start(task, 1) for _ in range(8)]
    until(lambda: list(emitted.open.spans.values()).count(WAIT) == 8)
    go_on.set()
    assert {future.result(LONG) for future in [leader, *waiters]} == {1}
    led = next(s for s in emitted.spans(SPAN) if s.attributes["idemguard.outcome"] == "executed")
    others = [s for s in emitted.spans(SPAN) if s is not led]
    assert led.links == ()
    assert {s.attributes["idemguard.outcome"] for s in others} == {"reused"}
    assert {tuple(links(s)) for s in (*others, *emitted.spans(WAIT))} == {(("leader", ids(led)),)}
    assert len({s.context.trace_id for s in others}) == 8

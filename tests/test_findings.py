"""What lines tell beside sums: drops, loops, missed duplicates, carried history."""

from __future__ import annotations

import datetime as dt
import inspect
import io
import random
import re
import secrets
import sys
import threading
import time
import uuid
from contextlib import suppress
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemguard import (
    OutOfScope,
    cumulative_input_tokens,
    errors,
    record_usage,
    task_fingerprint,
    worker,
)
from idemguard.claim import Begin, Complete, Resolve
from idemguard.codec import Value
from idemguard.digests import DROPPED, MOST, REST, UNMATCHED, keyed, raw_digests
from idemguard.findings import Loop, Missed, advice, by_task, explanation, growth, loops, missed
from idemguard.fingerprint import identify_payload
from idemguard.generated import looks_generated
from idemguard.record import Address, Caller, Cause, Claim, Execution, Status
from idemguard.report import details, plain
from idemguard.report.paper import Paper
from idemguard.usage import Spent, Usage

SOON = 60  # seconds within which what happens at once has happened
NOON = 1_800_000_000_000
SECRET = b"s" * 32


def digested(payload, volatile=()):
    """The digests of a payload, as a line keeps them."""
    found = identify_payload("t", payload, volatile=volatile)
    caller = Caller("t", "w", digests=raw_digests(found))
    begin = Begin(Address("n", found.fingerprint), "n", caller, 1)
    return keyed(begin, lambda: SECRET).caller.digests


def line(number=0, payload=None, *, by="w-1", cause=Cause.FIRST, at=None, volatile=(), **more):
    """A line of the ledger."""
    spent = more.pop("spent", Spent(1, more.pop("usage", None), cost=more.pop("cost", None)))
    digests = () if payload is None else digested(payload, volatile)
    caller = Caller(more.pop("task_type", "t"), by, digests=digests)
    started = NOON + number * 1000 if at is None else at
    claim = Claim(
        Address("n", f"{more.pop('task', number):064x}"), number + 1, f"n{number}", cause,
        number + 1, started, holds=True, caller=caller,
    )  # fmt: skip
    status = more.pop("status", Status.OK)
    assert not more
    return Execution(claim, started + 10, status, started + 10, spent=spent)


def lines_of(payloads, **more):
    """A line for each payload, one a second."""
    return [line(number, payload, **more) for number, payload in enumerate(payloads)]


def suspects(payloads, **more):
    """What is suspected: the names, and the finding."""
    found = missed(lines_of(payloads, **more))
    if not found:
        return (), None
    (one,) = found
    return tuple(suspect.field for suspect in one.suspects), one


# --- drops and loops -----------------------------------------------------------------------------------


def ending(end):
    """A body that comes to this."""

    def body(n):
        if isinstance(end, Exception):
            raise end
        return end

    return body


@pytest.fixture
def desk(guard_of, clock):
    """Calls a task that its workers do, fail at, or hand back, as they are told."""

    class Desk:
        guard = guard_of(lease=30, ttl=60)
        ledger = guard.ledger

        def call(self, *ends, by="w-1", n=1, version=None):
            for end in ends:
                clock.advance(1)
                with worker(by), suppress(ValueError, OutOfScope, errors.UnknownOutcomeError):
                    self.guard.idempotent(ending(end), task_type="t", version=version)(n)

        def claim(self, n=1):
            clock.advance(1)
            body = self.guard.idempotent(lambda n: n, task_type="t")
            return self.guard.claim(self.guard.task_of(body, n), "w-9")

    return Desk()


NO = {"status": "out_of_scope"}


def test_a_task_that_all_hand_back_is_a_drop(desk, clock):
    start = clock()
    desk.call(NO, by="w-1")
    desk.call(OutOfScope(), by="w-2")
    desk.call("done", n=2)
    (drop,) = desk.ledger.drops()
    assert (drop.task_type, drop.fingerprint) == ("t", task_fingerprint("t", {"n": 1}))
    assert (drop.scope, drop.version) == ("", None)
    assert (drop.times, drop.workers) == (2, ("w-1", "w-2"))
    assert (drop.first, drop.last) == (start + 1000, start + 2000)
    assert desk.ledger.loops() == []


def test_a_task_that_is_done_in_the_end_is_no_drop(desk):
    desk.call(NO, "done")
    assert desk.ledger.drops() == []


def test_a_task_that_failed_in_between_is_a_drop_all_the_same(desk):
    desk.call(NO, ValueError(), NO)
    (drop,) = desk.ledger.drops()
    assert drop.times == 2
    (loop,) = desk.ledger.loops()
    assert (loop.times, loop.workers) == (2, ("w-1",))


def test_a_task_that_only_failed_is_no_drop(desk):
    desk.call(ValueError(), ValueError(), ValueError())
    assert desk.ledger.drops() == desk.ledger.loops() == []


def test_a_task_that_somebody_is_at_is_no_drop(desk):
    desk.call(NO)
    claim = desk.claim()
    assert desk.ledger.drops() == []
    claim.release()
    assert len(desk.ledger.drops()) == 1


def test_a_task_of_which_one_execution_is_lost_is_no_drop(desk, clock):
    desk.call(NO)
    desk.claim()
    clock.advance(31)
    assert desk.ledger.drops() == []


def test_a_task_that_was_settled_by_hand_is_no_drop(desk):
    desk.call(NO)
    body = desk.guard.idempotent(lambda n: n, task_type="t")
    desk.guard.resolve(desk.guard.task_of(body, 1), "done by hand")
    assert desk.ledger.drops() == []


def test_a_task_that_was_done_before_this_time_is_no_drop(desk, clock):
    desk.call("done")
    clock.advance(3600)
    desk.call(NO)
    span = clock() - 60_000, clock() + 1
    assert desk.ledger.drops(span=span) == []
    desk.call(NO, n=2)
    clock.advance(3600)
    assert len(desk.ledger.drops()) == 1
    assert desk.ledger.drops(span=(clock() - 60_000, clock())) == []


def test_two_versions_are_two_tasks(desk):
    desk.call(NO, version="1")
    desk.call("done", version="2")
    (drop,) = desk.ledger.drops()
    assert drop.version == "1"


def test_a_task_handed_back_more_than_twice_is_a_loop(desk, clock):
    for by in ("w-1", "w-2"):
        desk.call(NO, by=by)
    assert desk.ledger.loops() == []
    desk.call(NO, by="w-3")
    (loop,) = desk.ledger.loops()
    assert isinstance(loop, Loop)
    assert (loop.times, loop.workers) == (3, ("w-1", "w-2", "w-3"))
    assert loop.last == clock()


def test_twice_by_one_worker_is_a_loop(desk):
    desk.call(NO, by="w-1")
    desk.call("done", by="w-2", n=2)
    desk.call(NO, by="w-1", n=3)
    assert desk.ledger.loops() == []
    desk.call(NO, by="w-1")
    (loop,) = desk.ledger.loops()
    assert (loop.times, loop.workers) == (2, ("w-1",))


def test_a_loop_that_was_ended_is_told_as_a_loop_and_no_drop(desk):
    desk.call(NO, NO, NO, "done")
    assert desk.ledger.drops() == []
    assert len(desk.ledger.loops()) == 1


def test_the_most_often_declined_come_first(desk):
    for n in (1, 2, 3):
        desk.call(*[NO] * (n + 2), n=n)
    assert [drop.times for drop in desk.ledger.drops()] == [5, 4, 3]
    assert [loop.times for loop in desk.ledger.loops()] == [5, 4, 3]


def test_lines_by_their_tasks():
    one, two, again = line(0, task=1), line(1, task=2), line(2, task=1)
    assert list(by_task([one, two, again]).values()) == [[one, again], [two]]
    assert loops([[one], [two]]) == []


# --- missed duplicates -----------------------------------------------------------------------------------

DOCUMENTS = [f"document {number}: " + "word " * number for number in range(40)]
rng = random.Random(7)
VOLATILE = {
    "uuid": lambda n: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    "hex": lambda n: f"{rng.getrandbits(64):016x}",
    "time": lambda n: 1_790_000_000.25 + n * 1.5,
    "iso time": lambda n: (dt.datetime(2026, 11, 30, tzinfo=dt.UTC) + dt.timedelta(0, n)).isoformat(),
    "random float": lambda n: rng.random(),
    "counter": lambda n: n,
    "attempt's name": lambda n: f"try {n}",
}  # fmt: skip


def repeated(make, times=430, tasks=40):
    """Calls of a few tasks, again and again, in an order of no rule."""
    which = random.Random(1)
    for number in range(times):
        document = DOCUMENTS[which.randrange(tasks)]
        yield {"doc": document, "lang": "en", "run_id": "run-17", "x7": make(number)}


@pytest.mark.parametrize("what", VOLATILE)
def test_a_field_that_is_new_each_time_is_suspected(what):
    names, found = suspects(repeated(VOLATILE[what]))
    assert names == ("x7",)
    assert (found.task_type, found.executions, found.looked_at) == ("t", 390, 430)
    (suspect,) = found.suspects
    assert (suspect.differs, suspect.pairs) == (390, 390)
    assert str(suspect) == "`x7` differs in 390 of 390 otherwise equal pairs: volatile?"


@pytest.mark.parametrize("what", ["uuid", "time", "random float"])
def test_a_field_that_looks_made_is_suspected_where_there_are_few_tasks(what):
    assert suspects(repeated(VOLATILE[what], 12, tasks=1))[0] == ("x7",)
    assert suspects(repeated(VOLATILE[what], 12, tasks=3))[0] == ("x7",)
    assert suspects(repeated(VOLATILE["counter"], 12, tasks=3))[0] == ()
    few = [{"doc": f"doc-{n % 4}", "x7": n} for n in range(12)]
    assert suspects(few)[0] == ()
    assert suspects([*few, *({"doc": f"doc-{n}", "x7": n} for n in range(12, 15))])[0] == ("x7",)


def test_nearly_all_that_looks_made_is_enough():
    values = [secrets.token_urlsafe(32) for _ in range(38)] + ["short", "none"]
    assert suspects({"doc": "one", "x7": value} for value in values)[0] == ("x7",)


def test_two_fields_that_are_new_each_time_are_suspected_together():
    payloads = [
        {**payload, "x8": VOLATILE["time"](number)}
        for number, payload in enumerate(repeated(VOLATILE["uuid"]))
    ]
    names, found = suspects(payloads)
    assert sorted(names) == ["x7", "x8"]
    assert {(suspect.differs, suspect.pairs) for suspect in found.suspects} == {(390, 390)}
    assert found.executions == 390


def test_the_fields_of_the_only_argument_are_looked_at():
    names, _ = suspects({"payload": payload} for payload in repeated(VOLATILE["uuid"]))
    assert names == ("payload.x7",)


def test_a_workers_name_in_the_payload_is_suspected():
    lines = [
        line(number, {"doc": document, "by": f"w-{number % 3}"}, by=f"w-{number % 3}")
        for number, document in enumerate(d for d in DOCUMENTS[:20] for _ in range(3))
    ]
    (found,) = missed(lines)
    assert [suspect.field for suspect in found.suspects] == ["by"]
    assert found.executions == 40


def test_what_repetitions_cost_is_told():
    lines = [
        line(n, payload, usage=Usage(input_tokens=100, output_tokens=5), cost=10**9)
        for n, payload in enumerate(repeated(VOLATILE["uuid"]))
    ]
    (found,) = missed(lines)
    assert (found.tokens, found.charged) == (390 * 105, Decimal("0.39"))
    assert suspects(repeated(VOLATILE["uuid"]))[1].charged is None


def test_the_dearest_come_first():
    lines = [
        line(n, payload, task_type=name, cost=cost, task=n)
        for name, cost in (("cheap", 1), ("dear", 5), ("unpriced", None))
        for n, payload in enumerate(repeated(VOLATILE["uuid"]))
    ]
    assert [found.task_type for found in missed(lines)] == ["dear", "cheap", "unpriced"]


HEALTHY = {
    "documents": [{"doc": f"doc-{n}", "lang": "en"} for n in range(400)],
    "whole documents": [{"text": document} for document in DOCUMENTS * 1],
    "random ids alone": [{"doc_id": str(uuid.uuid4())} for _ in range(200)],
    "documents of a few languages": [
        {"doc": f"doc-{n}", "lang": ["en", "de", "fr", "it", "es", "pt"][n % 6], "style": "plain"}
        for n in range(300)
    ],
    "documents by languages": [
        {"doc": f"doc-{n}", "lang": lang} for n in range(40) for lang in ("en", "de", "fr")
    ],
    "languages by documents": [
        {"doc": f"doc-{n}", "lang": lang} for lang in ("en", "de", "fr") for n in range(40)
    ],
    "pages": [{"doc": f"doc-{n}", "page": page} for n in range(20) for page in range(15)],
    "pages of one": [{"doc": "doc-1", "page": page} for page in range(200)],
    "three": [{"doc": f"doc-{n}", "lang": "en"} for n in range(3)],
    "two with random ids": [{"doc": str(uuid.uuid4()), "lang": "en"} for _ in range(2)],
    "days": [{"day": f"2026-{1 + n // 28:02}-{1 + n % 28:02}", "shop": "a"} for n in range(300)],
    "models": [{"prompt": "one", "model": f"{m}-{n}b"} for m in "abc" for n in (3, 7, 70)],
    "numbers": [{"a": n, "b": n * n} for n in range(200)],
    "nothing": [{} for _ in range(10)],
}


@pytest.mark.parametrize("what", HEALTHY)
def test_healthy_tasks_are_not_suspected(what):
    assert suspects(HEALTHY[what]) == ((), None)


def test_where_the_input_differs_it_is_no_repetition():
    lines = [
        line(n, {"doc_id": str(uuid.uuid4()), "lang": "en"}, usage=Usage(input_tokens=size))
        for n, size in enumerate(rng.sample(range(200, 5000), 40))
    ]
    assert missed(lines) == []
    lines = [
        line(n, {"doc_id": str(uuid.uuid4()), "lang": "en"}, usage=Usage(input_tokens=1000 + n % 7))
        for n in range(20)
    ]
    assert len(missed(lines)) == 1


def test_far_apart_is_no_repetition():
    payloads = list(repeated(VOLATILE["uuid"], 20, tasks=5))
    far = [line(n, payload, at=NOON + n * 2 * 3_600_000) for n, payload in enumerate(payloads)]
    assert missed(far) == []


@pytest.mark.parametrize("cause", sorted(set(Cause) - {Cause.FIRST, Cause.EXPIRED}))
def test_what_is_known_to_be_a_repetition_was_not_missed(cause):
    assert suspects(repeated(VOLATILE["uuid"]), cause=cause)[0] == ()


def test_other_scopes_and_versions_are_other_tasks():
    lines = [
        one._replace(claim=one.claim._replace(address=one.claim.address._replace(scope=f"s{n}")))
        for n, one in enumerate(lines_of(repeated(VOLATILE["uuid"])))
    ]
    assert missed(lines) == []


def test_fields_for_which_there_is_no_room_tell_tasks_apart():
    def wide(n):
        options = {f"option_{number:02}": number for number in range(MOST)}
        return {**options, "a_run": VOLATILE["uuid"](n)}

    assert suspects(wide(n) for n in range(20))[0] == ("a_run",)
    assert suspects({**wide(n), "the_doc": f"doc {n}"} for n in range(20))[0] == ()
    assert suspects({**wide(n), "x" * 200: f"doc {n}"} for n in range(20))[0] == ()
    full = [{**wide(0), "a_run": f"doc-{n % 10}", "the_run": n} for n in range(30)]
    assert suspects(full)[0] == ()  # it has no name to be told by
    names = [name for name, _ in digested({**wide(1), "the_doc": "doc"})]
    assert len(names) == MOST + 1
    assert names[-1] == REST


def test_a_payload_however_deep_costs_no_call():
    def near_the_limit(left):
        return raw_digests(found) if left == 0 else near_the_limit(left - 1)

    deep = [7]
    for _ in range(150):
        deep = [deep]
    found = identify_payload("t", {"deep": deep})
    left = sys.getrecursionlimit() - len(inspect.stack(0))
    told = [len(near_the_limit(left - room)) for room in range(20, left, 10)]
    assert told == sorted(told)
    assert set(told) == {0, 1}


def test_thousands_of_lines_are_looked_at_in_no_time():
    lines = lines_of(
        {**payload, **{f"f{n}": number % 10 for n in range(6)}, "x8": secrets.token_hex(16)}
        for number, payload in enumerate(repeated(VOLATILE["uuid"], 5_000))
    )
    start = time.monotonic()
    missed(lines)
    assert time.monotonic() - start < SOON


def test_the_ledger_finds_what_was_missed(guard, shape):
    task = shape.guarded(
        guard, lambda doc, run_id, x7: doc, task_type="t", volatile=("run_at", "request_id")
    )
    other = shape.guarded(guard, lambda doc, run_id, x7: doc, task_type="other")
    for number in range(30):
        task(f"doc-{number % 10}", "run-17", secrets.token_hex(16))
        other(f"doc-{number % 10}", "run-17", "constant")
    (found,) = guard.ledger.missed()
    assert (found.task_type, found.executions, found.looked_at) == ("t", 20, 30)
    assert [suspect.field for suspect in found.suspects] == ["x7"]
    assert guard.ledger.missed(task_type="t") == [found]
    assert guard.ledger.missed(task_type="other") == []
    explained = guard.ledger.explain("t")
    assert (explained.task_type, explained.executions) == ("t", 30)
    assert explained.causes == {"first": 30}
    assert explained.missed == found
    assert (explained.dropped, explained.unmatched) == ({}, ("request_id", "run_at"))
    assert sum(explained.workers.values()) == 30
    assert explained.duplicates_by == {}


def test_digests_can_be_switched_off(guard_of):
    guard = guard_of(field_digests=False)
    task = guard.idempotent(lambda doc, x7: doc, task_type="t")
    for number in range(30):
        task(f"doc-{number % 10}", secrets.token_hex(16))
    assert guard.ledger.missed() == []
    assert {line.claim.caller.digests for line in guard.ledger.lines()} == {()}


def test_no_value_is_in_a_line(guard):
    task = guard.idempotent(lambda doc, key: doc, task_type="t")
    task("doc-1", "hunter2")
    claim = guard.claim(guard.task_of(task, "doc-2", "hunter2"))
    claim.complete("value")
    one, two = (dict(line.claim.caller.digests) for line in guard.ledger.lines())
    assert set(one) == {"doc", "key"}
    assert {len(digest) for digest in (*one.values(), *two.values())} == {8}
    assert one["key"] == two["key"]
    assert one["doc"] != two["doc"]


# --- one task type -------------------------------------------------------------------------------------


def test_what_was_dropped_and_what_never_matched():
    volatile = ("request_id", "meta.run_id", "trace", "**.ts")
    payloads = [
        {"doc": n, "request_id": n, "meta": {"run_id": n, "ts": 5}, "more": {"ts": n}}
        for n in range(4)
    ]
    payloads.append({"doc": 5, "attempt": 2, "meta": {}})
    found = explanation("t", lines_of(payloads, volatile=volatile))
    assert found.dropped == {"**.ts": 4, "meta.run_id": 4, "request_id": 4, "attempt": 1}
    assert found.unmatched == ("trace",)
    marks = dict(digested(payloads[0], volatile))
    assert (marks["request_id"], marks["trace"]) == (DROPPED, UNMATCHED)


def test_whose_executions_and_duplicates_they_are():
    lines = [
        line(0, by="w-1"),
        line(1, by="w-2", cause=Cause.LOST),
        line(2, by="w-2", cause=Cause.OBSERVED),
        line(3, by="w-2", cause=Cause.RETRY),
    ]
    found = explanation("t", lines)
    assert found.causes == {"first": 1, "lost": 1, "observed": 1, "retry": 1}
    assert found.workers == {"w-2": 3, "w-1": 1}
    assert found.duplicates_by == {"w-2": 2}
    assert explanation("t", []).executions == 0
    assert [(str(one.cause), one.duplicates) for one in found.advice] == [
        ("observed", True), ("lost", True), ("retry", False),
    ]  # fmt: skip


def test_each_cause_but_the_first_has_advice_in_one_line():
    causes = {str(cause): number for number, cause in enumerate(Cause)}
    told = [str(one) for one in advice({**causes, "from a later release": 1})]
    assert len(told) == len(Cause) - 1
    assert not any("\n" in line or "Likely cause of 0 " in line for line in told)
    assert [re.match(r"Likely cause of \d (\w+)( \(no duplicates\))?: ", one)[1] for one in told] == [
        "unguarded", "observed", "fallback", "lost", "forced", "declined", "expired", "retry",
    ]  # fmt: skip
    assert advice({"first": 1}) == advice({}) == []


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("observed", 'mode="enforce"'),
        ("fallback", "wait_timeout= longer"),
        ("lost", "lease= longer"),
        ("lost", "resolve() it"),
        ("unguarded", 'on_store_error="raise"'),
        ("unguarded", "no observe mode, which runs in any case"),
        ("expired", "ttl= longer"),
    ],
)
def test_advice_names_the_setting(cause, remedy):
    (one,) = advice({cause: 3, "first": 9})
    assert (one.cause, one.executions) == (cause, 3)
    assert f"Likely cause of 3 {cause}" in str(one)
    assert remedy in one.remedy


def test_what_was_lost_is_told_by_its_reasons():
    def told(**known):
        return [(one.executions, one.why, one.remedy) for one in advice({"lost": 6}, **known)]

    ((six, why, remedy),) = told()
    assert (six, "the lease ran out" in why, "UnknownOutcomeError" in why) == (6, True, True)
    assert "lease= longer" in remedy
    assert 'on_lost="raise"' in remedy
    ((six, why, remedy),) = told(raised=6)
    assert (six, "lease" in why + remedy, "UnknownOutcomeError" in why) == (6, False, True)
    assert 'on_lost="raise"' in remedy
    ((six, why, remedy),) = told(ran_out=6)
    assert (six, "UnknownOutcomeError" in why, "on_lost" in remedy) == (6, False, False)
    assert [number for number, *_ in told(raised=3, ran_out=2)] == [3, 2, 1]
    assert all(one.cause is Cause.LOST for one in advice({"lost": 6}, raised=3))


@pytest.mark.idemguard(max_runs=2)
def test_lines_tell_a_body_that_said_so_from_a_lease_that_ran_out(desk, clock):
    def counted(*, since=0):
        found = desk.ledger.explain("t", span=(since, clock.now + 1))
        return found.causes.get("lost", 0), found.raised, found.ran_out

    unknown = errors.UnknownOutcomeError("nobody knows")
    desk.call(unknown)
    assert counted() == (0, 0, 0)
    desk.call(unknown, unknown, "done")
    assert counted() == (3, 3, 0)
    clock.advance(600)
    start = clock.now
    desk.claim(2)
    clock.advance(31)
    desk.call(ValueError(), n=2)  # it stays unknown what the first did, and this one says nothing
    assert counted(since=start) == (1, 0, 1)
    claim = desk.claim(3)
    clock.advance(31)
    desk.call("done", n=3)
    claim.complete("too late")
    assert counted(since=start) == (2, 0, 2)
    assert counted() == (5, 3, 2)
    # what was lost before this time has no line in it
    desk.call(unknown, n=4)
    clock.advance(600)
    start = clock.now
    desk.call("done", n=4)
    assert counted(since=start) == (1, 0, 0)


def test_advice_is_drawn_and_told_to_programs():
    found = explanation("t", [line(0), line(1, cause=Cause.OBSERVED), line(2, cause=Cause.EXPIRED)])
    page = io.StringIO()
    details.explanation(Paper(page), found, ())
    lines = page.getvalue().splitlines()
    assert [one for one in lines if one.startswith("Likely cause")] == list(map(str, found.advice))
    assert plain.explanation(found, ())["advice"] == [
        {
            "cause": str(one.cause),
            "executions": 1,
            "duplicates": one.cause == "observed",
            "why": one.why,
            "remedy": one.remedy,
        }
        for one in found.advice
    ]


# --- growing input -----------------------------------------------------------------------------------


def steps(*inputs, number=0, task_type="t"):
    return line(number, task_type=task_type, spent=Spent(len(inputs), Usage(), inputs))


def test_carried_history_is_found_with_what_would_be_saved():
    (found,) = growth([steps(*range(1000, 11000, 1000))])
    assert (found.task_type, found.executions, found.steps) == ("t", 1, 10)
    assert (found.tokens, found.per_step) == (cumulative_input_tokens(10), 1000)
    # at half the steps it has sent 15,000 of 55,000
    assert found.capped == 55_000 - 15_000
    # five steps (15,000), then five with a summary, one step long, in place of the first five:
    # 2,000 to 6,000
    assert found.every == 5
    assert found.summarised == 55_000 - 15_000 - 20_000


def test_the_figures_of_several_executions_add_up():
    runs = [steps(*range(1000, 11000, 1000)), steps(500, 1500, 2500, 3500, number=1)]
    (found,) = growth(runs)
    assert (found.executions, found.steps, found.tokens) == (2, 7, 55_000 + 8_000)
    assert found.per_step == 1000
    assert found.capped == 40_000 + 6_000
    assert found.summarised == 20_000


@pytest.mark.parametrize(
    "inputs",
    [
        (1000,) * 10,
        (1000, 2000, 3000),  # too few to tell
        (1000, 1010, 1020, 1030, 1040),  # hardly any
        (1000, 5000, 1000, 5000, 1000, 5000),
        (5000, 4000, 3000, 2000, 1000),
        (0, 0, 0, 0),
        (),
    ],
)
def test_steady_input_is_not_found(inputs):
    assert growth([steps(*inputs)]) == []


def test_most_of_a_task_types_executions_must_grow():
    growing, steady = steps(*range(1000, 6000, 1000)), steps(1000, 1000, 1000, 1000)
    assert len(growth([growing] * 4 + [steady])) == 1
    assert growth([growing] * 3 + [steady]) == []
    # those that are too short say nothing of it
    assert len(growth([growing] + [steps(1000)] * 9)) == 1


def test_those_that_spend_most_on_it_come_first():
    runs = [steps(*range(n, 10 * n, n), task_type=f"t{n}") for n in (10, 1000, 100)]
    assert [found.task_type for found in growth(runs)] == ["t1000", "t100", "t10"]


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=12), max_size=4))
def test_nothing_saves_more_than_there_is(runs):
    for found in growth(steps(*inputs) for inputs in runs):
        assert 0 <= found.capped <= found.tokens
        assert 0 <= found.summarised <= found.tokens
        assert found.per_step > 0 or found.tokens == 0


def test_the_ledger_finds_growth(guard):
    @guard.idempotent(task_type="t")
    def task(n):
        for step in range(1, 6):
            record_usage(input_tokens=step * 1000, output_tokens=10)
        return n

    task(1)
    (found,) = guard.ledger.growth()
    assert (found.tokens, found.steps) == (15_000, 5)


# --- what looks generated ------------------------------------------------------------------------------

MADE = [
    "2026-11-30T08:42:03Z", "2026-11-30 08:42:03.123456+01:00", "2026-11-30T08:42", "20261130T084203Z",
    "08:42:03", 1_790_000_000, 1_790_000_000.5, 1_790_000_000_123, 1_790_000_000_123_456_789,
    "1790000000.123", "{6F9619FF-8B86-D011-B42D-00CF4FC964FF}", "6f9619ff8b86d011b42d00cf4fc964ff",
    "run_6f9619ff8b86d011b42d00cf4fc964ff", "req-9f86d081884c7d65", "0x9f86d081884c7d659a2feaa0c55ad015",
    "chatcmpl-9mQ2rT8vXw4LkZp1Bn6Yc3", "01ARZ3NDEKTSV4RRFFQ69G5FAV", 0.8444218515250481,
    [1_790_000_000, "08:42:03"], {"at": 1_790_000_000}, "  2026-11-30T08:42:03Z  ",
]  # fmt: skip
PLAIN = [
    None, True, False, "", " ", 0, 1, -1, 7, 42, 1000, 65535, 0.7, 19.99, 52.520008, 1e-9, 3.0, 1e300,
    "a", "word", "several words of text", "doc-17", "chapter_12", "user@example.org", "Müller", "北京",
    "2026-11-30", "2026", "2026-W48", "20261130", "v1.2.3", "1.2.3-rc.1", "10.0.0.1", "::1", "en-GB",
    "+49 171 1234567", "2025550123", 2025550123, "+12025550123", "01711234567", "030/1234567",
    "4006381333931", "978-3-16-148410-0", "4111111111111111", "DE89370400440532013000", "B00ABCDEFG",
    "gpt-4.1-mini-2025-04-14", "claude-sonnet-4-20250514", "Meta-Llama-3-70B-Instruct",
    "Qwen2-72B-Instruct-GPTQ-Int4", "Mixtral-8x7B-Instruct-v0", "DeepSeek-R1-Distill-Qwen-32B",
    "anthropic.claude-3-5-sonnet-20240620-v1:0", "InvoiceNumber20240001", "QuarterlyReport2024Final",
    "how-to-write-a-slug-in-2024", "https://example.org/a/b?c=1", "/var/data/report-2024.pdf",
    "aaaaaaaaaaaaaaaaaaaaaaaa", "0000000000000000", "1111111122222222", "deadbeef", "cafe", "face" * 2,
    "the quick brown fox jumps over the lazy dog", "x" * 5000, [], {}, [1, 2, 3], {"a": 1},
    [1_790_000_000, "word"], {"at": 1_790_000_000, "doc": "a"}, float("inf"), float("nan"),
]  # fmt: skip


@pytest.mark.parametrize("value", MADE, ids=repr)
def test_what_looks_generated(value):
    assert looks_generated(value)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:40])
def test_what_does_not(value):
    assert not looks_generated(value)


@given(st.uuids(version=4))
def test_random_uuids_look_generated(value):
    assert looks_generated(str(value))
    assert looks_generated(value.hex)
    assert looks_generated(f"run-{value}")


@pytest.mark.parametrize(("size", "share"), [(10, 0.97), (16, 0.999), (32, 1.0)])
def test_random_hex_looks_generated(size, share):
    chance = random.Random(size)
    found = [looks_generated(chance.randbytes(size).hex()) for _ in range(2_000)]
    assert sum(found) >= share * len(found)


@given(st.datetimes(), st.sampled_from(["", "Z", "+00:00", "-0830"]))
def test_times_look_generated(moment, zone):
    assert looks_generated(moment.isoformat() + zone)
    assert looks_generated(moment.isoformat(" ", "seconds") + zone)


@given(st.floats(1.5e9, 1.9e9), st.sampled_from([1, 10**3, 10**6, 10**9]))
def test_seconds_since_1970_look_generated(seconds, scale):
    assert looks_generated(int(seconds * scale))
    assert looks_generated(str(int(seconds * scale)))
    assert looks_generated(seconds)


@pytest.mark.parametrize(("size", "share"), [(16, 0.9), (24, 0.97), (32, 0.99)])
def test_nearly_all_random_text_looks_generated(size, share):
    tokens = [secrets.token_urlsafe(size) for _ in range(2000)]
    assert sum(map(looks_generated, tokens)) >= share * len(tokens)


words = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=9)


@given(words, st.lists(words, max_size=6), st.sampled_from(["-", "_", " ", ".", "/"]))
def test_words_names_and_slugs_never_do(first, rest, between):
    text = between.join([first, *rest])
    for spelling in (text, text.title(), text.upper(), f"{text}{between}17"):
        assert not looks_generated(spelling)


@given(st.integers(-(10**9), 10**9))
def test_small_numbers_never_do(number):
    assert not looks_generated(number)
    assert not looks_generated(str(number))
    assert not looks_generated(number / 4)


@given(st.dates())
def test_days_never_do(day):
    assert not looks_generated(day.isoformat())
    assert not looks_generated(day.strftime("%d.%m.%Y"))


@given(
    st.lists(st.integers(0, 999), min_size=2, max_size=4), st.sampled_from(["", "v", "release-"])
)
def test_versions_never_do(parts, before):
    text = before + ".".join(map(str, parts))
    if not before and len(parts) == 2:
        text = f"v{text}"  # else a number
    assert not looks_generated(text)


@given(st.integers(2_000_000_000, 9_999_999_999), st.sampled_from(["", "+1", "1", "0"]))
def test_numbers_of_telephones_never_do(number, before):
    assert not looks_generated(f"{before}{number}")
    assert not looks_generated(number)


# --- orders by hand ------------------------------------------------------------------------------------


def test_orders_and_ends_of_raw_digests_are_keyed():
    caller = Caller("t", "w", digests=raw_digests(identify_payload("t", {"doc": "a"})))
    address = Address("n", "0" * 64)
    claim = Claim(address, 0, "n", Cause.UNGUARDED, 0, 0, holds=False, caller=caller)
    value = Value("json", b"1")
    resolve = keyed(Resolve(address, "o", caller, value, 1), lambda: SECRET)
    complete = keyed(Complete(claim, value, 1, 1), lambda: SECRET)
    told = resolve.caller.digests
    assert told == complete.claim.caller.digests == digested({"doc": "a"})
    assert keyed(complete, threading.Lock) is complete  # nothing is left to be keyed
    other = keyed(Resolve(address, "o", caller, value, 1), lambda: b"t" * 32)
    assert other.caller.digests != told


def test_a_finding_can_be_compared():
    one = missed(lines_of(repeated(VOLATILE["counter"])))
    assert one == missed(lines_of(repeated(VOLATILE["counter"])))
    assert isinstance(one[0], Missed)

"""The ledger tells what was executed, why, by whom, and what the duplicates had cost."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal

import pytest

from idemguard import (
    ExecutionLedger,
    OutOfScope,
    agent,
    bypass,
    configure,
    cumulative_input_tokens,
    errors,
    record_usage,
    scope,
    task_fingerprint,
    worker,
)
from idemguard.ledger import summary

SOON = 60  # seconds within which what happens at once has happened
MINUTE = timedelta(minutes=1)
PRICES = {"m": {"input": "3", "output": "15"}}
ONE = task_fingerprint("t", {"n": 1})
TWO = task_fingerprint("t", {"n": 2})


@pytest.fixture
def ledger(guard):
    """The ledger of the store."""
    return guard.ledger


def reports(n=0, **usage):
    """A body that spends tokens."""

    def body(n):
        record_usage(**usage)
        return n

    return body


# --- counting alone --------------------------------------------------------------------------------


def test_record_counts_for_code_that_has_no_decorator(ledger):
    assert ledger.runs(ONE) == 0
    assert [ledger.record(ONE, "w-1"), ledger.record(ONE, "w-2"), ledger.record(ONE, "w-1")] == [
        1,
        2,
        3,
    ]
    assert ledger.record(TWO, "w-1") == 1
    assert (ledger.runs(ONE), ledger.runs(TWO)) == (3, 1)
    assert ledger.workers(ONE) == ["w-1", "w-2"]
    assert [line.cause for line in ledger.executions(ONE)] == ["first", "observed", "observed"]
    assert [line.status for line in ledger.executions(ONE)] == ["ok"] * 3
    assert ledger.duplication_rate() == 0.5
    assert ledger.doubled_share() == 0.5


def test_recorded_executions_are_counted_under_a_task_type(ledger):
    ledger.record(ONE, "w-1", task_type="t")
    assert ledger.task_type_summary("t")["runs"] == 1


def test_what_is_recorded_holds_no_guarded_call_back(guard, shape):
    guard.ledger.record(ONE, "w-1")
    task = shape.guarded(guard, lambda n: n, task_type="t")
    assert task(1) == 1
    assert guard.ledger.runs(ONE) == 2
    assert guard.ledger.executions(ONE)[1].cause == "first"


@pytest.mark.parametrize("bad", ["", "abc", 5, None, "g" * 64, ONE.upper(), ONE + "0"])
def test_a_fingerprint_has_64_digits(ledger, bad):
    for ask in (ledger.runs, ledger.workers, ledger.executions, lambda f: ledger.record(f, "w")):
        with pytest.raises(errors.ConfigurationError, match="fingerprint"):
            ask(bad)


def test_a_worker_has_a_name(ledger):
    for bad in ("", None, 5):
        with pytest.raises(errors.ConfigurationError, match="worker_id="):
            ledger.record(ONE, bad)
    with pytest.raises(errors.ConfigurationError, match="task_type="):
        ledger.record(ONE, "w", task_type="")


def test_the_default_ledger_is_the_configured_guards(guard):
    configure(store=guard.settings.store, namespace="n")
    ledger = ExecutionLedger()
    ledger.record(ONE, "w-1")
    assert ledger.namespace == "n"
    assert ExecutionLedger(guard.settings.store, namespace="n").runs(ONE) == 1
    assert ExecutionLedger(guard.settings.store).runs(ONE) == 0


def test_a_ledger_of_a_url_and_of_nothing(tmp_path):
    ledger = ExecutionLedger(f"sqlite:///{tmp_path}/ledger.db")
    assert ledger.record(ONE, "w") == 1
    ledger._store.close()
    with pytest.raises(errors.ConfigurationError, match="store="):
        ExecutionLedger(5)
    with pytest.raises(errors.ConfigurationError, match="store="):
        ExecutionLedger("mongodb://host")


# --- one task --------------------------------------------------------------------------------------


def test_every_execution_is_a_line(guard, shape):
    task = shape.guarded(guard, reports(input_tokens=7, model="m"), task_type="t", version="2")
    with worker("w-1"), agent("writer"), scope("run"):
        task(1)
    (line,) = guard.ledger.executions(ONE)
    assert (line.task_type, line.fingerprint) == ("t", ONE)
    assert (line.worker, line.agent, line.scope, line.version) == ("w-1", "writer", "run", "2")
    assert (line.cause, line.status, line.kept, line.parent) == ("first", "ok", True, None)
    assert (line.usage.input_tokens, line.model, line.cost) == (7, "m", None)
    assert line.started <= line.ended
    assert line.execution_id == line.claim.id
    assert (line.trace_id, line.span_id, line.currency, line.price_version) == (None,) * 4


def test_runs_workers_and_executions_are_of_all_scopes_and_versions_unless_named(guard, shape):
    plain = shape.guarded(guard, lambda n: n, task_type="t")
    versioned = shape.guarded(guard, lambda n: n, task_type="t", version="2")
    for name, task in (("w-1", plain), ("w-2", versioned)):
        with worker(name):
            task(1)
            with scope("run"):
                task(1)
    ledger = guard.ledger
    assert ledger.runs(ONE) == len(ledger.executions(ONE)) == 4
    assert ledger.runs(ONE, scope="run") == 2
    assert ledger.runs(ONE, scope="") == 2
    assert ledger.runs(ONE, version="2") == 2
    assert ledger.runs(ONE, scope="run", version="2") == 1
    assert ledger.workers(ONE) == ["w-1", "w-2"]
    assert ledger.workers(ONE, version="2") == ["w-2"]


def test_workers_are_those_that_executed(guard, shape):
    task = shape.guarded(guard, lambda n: n, task_type="t")
    for name in ("w-1", "w-2", "w-3"):
        with worker(name):
            task(1)
    assert guard.ledger.workers(ONE) == ["w-1"]


def test_every_execution_counts_though_only_the_last_lines_are_kept(guard, shape):
    task = shape.guarded(guard, lambda n: n, task_type="t")
    for number in range(70):
        with worker(f"w-{number}"), bypass():
            task(1)
    ledger = guard.ledger
    assert (ledger.runs(ONE), len(ledger.executions(ONE))) == (70, 64)
    assert ledger.workers(ONE) == [f"w-{number}" for number in range(70)]
    assert ledger.task_type_summary("t")["runs"] == 70


def test_an_open_execution_is_told_lost_when_its_lease_is_past(guard_of, clock):
    guard = guard_of(lease=10)
    claim = guard.claim(guard.task_of(guard.idempotent(lambda n: n, task_type="t"), 1), "w-1")
    ledger = guard.ledger
    assert [line.status for line in ledger.executions(ONE)] == ["open"]
    assert ledger.task_type_summary("t")["lost"] == 0
    clock.advance(11)
    assert [line.status for line in ledger.executions(ONE)] == ["lost"]
    assert [line.status for line in ledger.lines()] == ["lost"]
    assert ledger.task_type_summary("t")["lost"] == 1
    claim.complete("late")
    assert [line.status for line in ledger.executions(ONE)] == ["late"]


# --- causes and duplicates -------------------------------------------------------------------------


@pytest.fixture
def history(guard_of, clock, shape):
    """Executes one task for every cause that one caller can bring about, in this order."""

    class History:
        guard = guard_of(lease=10, ttl=60)
        causes = ()

        def __init__(self) -> None:
            ends = iter([ValueError(), "kept", OutOfScope(), "kept", "kept", "forced", "lost"])

            def body(n):
                record_usage(input_tokens=10)
                end = next(ends)
                if isinstance(end, Exception):
                    raise end
                return end

            self.task = shape.guarded(self.guard, body, task_type="t")
            self.named = self.guard.task_of(getattr(self.task, "guarded", self.task), 1)

        def call(self) -> None:
            with suppress(ValueError, OutOfScope):
                self.task(1)

        def run(self) -> None:
            self.call()  # first
            self.call()  # retry
            clock.advance(61)
            self.call()  # expired
            self.call()  # declined
            self.guard.forget(self.named)
            self.call()  # forced
            with bypass():
                self.call()  # forced
            clock.advance(61)
            assert self.guard.claim(self.named)  # expired
            clock.advance(11)
            self.call()  # lost

    return History()


def test_every_execution_has_its_cause(history):
    history.run()
    lines = history.guard.ledger.executions(ONE)
    assert [(line.cause, line.status) for line in lines] == [
        ("first", "failed"),
        ("retry", "ok"),
        ("expired", "declined"),
        ("declined", "ok"),
        ("forced", "ok"),
        ("forced", "ok"),
        ("expired", "lost"),
        ("lost", "ok"),
    ]


def test_of_these_only_the_run_after_a_lost_one_is_a_duplicate(history):
    history.run()
    summary = history.guard.ledger.task_type_summary("t")
    assert (summary["runs"], summary["executions"], summary["tasks"]) == (8, 8, 1)
    assert (summary["duplicates"], summary["duplication_rate"]) == (1, 1 / 8)
    assert summary["doubled_share"] == 1.0
    assert summary["lost"] == 1
    outcomes = {name: summary[name] for name in ("executed", "failed", "declined", "reused")}
    assert outcomes == {"executed": 5, "failed": 1, "declined": 1, "reused": 0}


def test_a_fallback_is_a_duplicate_and_what_it_spent_is_wasted(guard_of, shape, crew):
    guard = guard_of(pricer=PRICES)
    started, go_on = threading.Event(), threading.Event()

    def slow(n):
        record_usage(input_tokens=1000, output_tokens=0, model="m")
        started.set()
        assert go_on.wait(SOON)

    leader = crew.start(shape.guarded(guard, slow, task_type="t"), 1)
    assert started.wait(SOON)
    quick = reports(input_tokens=500, output_tokens=0, model="m")
    assert shape.guarded(guard, quick, task_type="t", wait_timeout=0)(1) == 1
    go_on.set()
    leader.result(SOON)
    summary = guard.ledger.task_type_summary("t")
    assert (summary["duplicates"], summary["fallback"]) == (1, 1)
    assert (summary["charged"], summary["wasted"]) == (Decimal("0.0045"), Decimal("0.0015"))


def test_rate_and_share_are_fractions_of_what_was_executed(guard_of, shape):
    observed = guard_of(mode="observe")
    task = shape.guarded(observed, lambda n: n, task_type="t")
    ledger = observed.ledger
    assert (ledger.duplication_rate(), ledger.doubled_share()) == (0.0, 0.0)
    for n in (1, 2, 3, 4):
        task(n)
    assert (ledger.duplication_rate(), ledger.doubled_share()) == (0.0, 0.0)
    task(1)
    task(1)
    # six executions of four tasks, of which one was executed more than once
    assert ledger.duplication_rate() == 2 / 6
    assert ledger.doubled_share() == 1 / 4


def test_a_window_counts_what_started_in_it(guard_of, shape, clock):
    guard = guard_of(mode="observe", ttl=timedelta(hours=2))
    task = shape.guarded(guard, lambda n: n, task_type="t")
    task(1)
    clock.advance(3600)
    task(1)
    task(2)
    ledger = guard.ledger
    assert ledger.duplication_rate() == 1 / 3
    assert ledger.duplication_rate(since=10 * MINUTE) == 1 / 2
    assert ledger.duplication_rate(timedelta(hours=2)) == 1 / 3
    assert ledger.task_type_summary("t", since=10 * MINUTE)["runs"] == 2
    assert len(list(ledger.lines(since=10 * MINUTE))) == 2
    clock.advance(3600)
    assert ledger.duplication_rate(since=10 * MINUTE) == 0.0
    # the doubled task counts where its second execution started
    assert ledger.task_type_summary("t", since=timedelta(minutes=70))["doubled_share"] == 1.0


def test_of_a_part_that_has_only_second_executions_no_more_than_all_tasks_are_doubled(
    guard_of, shape, clock
):
    guard = guard_of(mode="observe", ttl=timedelta(hours=2))
    task = shape.guarded(guard, lambda n: n, task_type="t")
    with agent("a"):
        for n in (1, 2, 3):
            task(n)
    clock.advance(3600)
    with agent("b"):
        for n in (1, 2, 3, 4):
            task(n)
    ledger = guard.ledger
    for part in (ledger.agent_summary("b"), ledger.totals(since=10 * MINUTE)):
        assert (part["tasks"], part["doubled"], part["doubled_share"]) == (1, 3, 1.0)
    first = ledger.agent_summary("a")
    assert (first["tasks"], first["doubled"], first["doubled_share"]) == (3, 0, 0.0)
    assert (ledger.totals()["doubled"], ledger.doubled_share()) == (3, 3 / 4)
    # what is kept may begin after the first executions, too
    assert summary(Counter(tasks=0, doubled=2, cause_observed=2))["doubled_share"] == 1.0


@pytest.mark.parametrize("bad", [timedelta(seconds=-1), "1 h", True])
def test_a_span_of_time_is_a_timedelta(ledger, bad):
    for ask in (ledger.duplication_rate, lambda s: list(ledger.lines(s)), ledger.totals):
        with pytest.raises(errors.ConfigurationError, match="since="):
            ask(bad)


# --- sums ------------------------------------------------------------------------------------------


def test_the_summary_of_a_task_type(guard_of, shape):
    guard = guard_of(pricer=PRICES)
    task = shape.guarded(
        guard, reports(input_tokens=1000, output_tokens=100, model="m"), task_type="t"
    )
    other = shape.guarded(guard, reports(input_tokens=1), task_type="u")
    for n in (1, 2, 1, 1):
        task(n)
    other(1)
    assert guard.ledger.task_type_summary("t") == {
        "task_type": "t",
        "calls": 4,
        "executed": 2,
        "reused": 2,
        "fallback": 0,
        "declined": 0,
        "failed": 0,
        "refused": 0,
        "unguarded": 0,
        "runs": 2,
        "executions": 2,
        "tasks": 2,
        "duplicates": 0,
        "doubled": 0,
        "doubled_share": 0.0,
        "duplication_rate": 0.0,
        "lost": 0,
        "avg_input": 1000,
        "input_tokens": 2000,
        "output_tokens": 200,
        "total_tokens": 2200,
        "cache_read_tokens": 0,
        "cache_write_tokens": 0,
        "reasoning_tokens": 0,
        "inclusive_tokens": 2200,
        "wasted_tokens": 0,
        "saved_tokens": 2200,
        "charged": Decimal("0.009"),
        "wasted": Decimal(0),
        "saved": Decimal("0.009"),
        "inclusive": Decimal("0.009"),
        "currency": "USD",
        "unpriced": 0,
        "without_usage": 0,
    }
    assert guard.ledger.totals()["runs"] == 3


def test_the_summary_of_what_never_ran(ledger):
    summary = ledger.task_type_summary("t")
    assert (summary["runs"], summary["avg_input"], summary["charged"]) == (0, None, 0)
    assert ledger.agent_summary("nobody")["runs"] == 0


def test_what_is_saved_is_booked_to_the_agent_that_asked(guard_of, shape):
    guard = guard_of(pricer=PRICES)
    task = shape.guarded(
        guard, reports(input_tokens=1000, output_tokens=0, model="m"), task_type="t"
    )
    with agent("writer"):
        task(1)
    for _ in range(2):
        with agent("reader"):
            task(1)
    writer, reader = (guard.ledger.agent_summary(name) for name in ("writer", "reader"))
    assert (writer["agent"], writer["runs"], writer["charged"]) == ("writer", 1, Decimal("0.003"))
    assert (writer["saved"], writer["saved_tokens"]) == (0, 0)
    assert (reader["runs"], reader["calls"], reader["charged"]) == (0, 2, 0)
    assert (reader["saved"], reader["saved_tokens"]) == (Decimal("0.006"), 2000)


def test_missing_is_unknown_and_an_unpriced_model_costs_nothing_known(guard_of, shape):
    guard = guard_of(pricer=PRICES)
    shape.guarded(guard, lambda n: n, task_type="t")(1)
    shape.guarded(guard, reports(input_tokens=30, output_tokens=0, model="other"), task_type="t")(2)
    summary = guard.ledger.task_type_summary("t")
    assert (summary["without_usage"], summary["unpriced"]) == (1, 1)
    assert (summary["avg_input"], summary["charged"]) == (30, 0)


def test_an_execution_that_has_not_ended_does_not_lower_the_average(guard, shape):
    shape.guarded(guard, reports(input_tokens=30), task_type="t")(1)
    guard.claim(guard.task_of(guard.idempotent(reports(), task_type="t"), 2))
    summary = guard.ledger.task_type_summary("t")
    assert (summary["runs"], summary["avg_input"]) == (2, 30)


def test_an_execution_that_holds_others_is_not_without_usage(guard, shape):
    @guard.idempotent(task_type="inner")
    def inner(n):
        record_usage(input_tokens=5)

    @guard.idempotent(task_type="outer")
    def outer(n):
        return inner(n)

    outer(1)
    assert guard.ledger.task_type_summary("outer")["without_usage"] == 0
    assert guard.ledger.task_type_summary("outer")["input_tokens"] == 0
    assert guard.ledger.totals()["input_tokens"] == 5


def test_failed_executions_are_booked_too(guard_of, shape):
    guard = guard_of(pricer=PRICES)

    def body(n):
        record_usage(input_tokens=1000, output_tokens=0, model="m")
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):  # noqa: PT011 - the body's own
            shape.guarded(guard, body, task_type="t")(1)
    summary = guard.ledger.task_type_summary("t")
    assert (summary["failed"], summary["charged"], summary["wasted"]) == (2, Decimal("0.006"), 0)


def test_a_refused_call_is_counted(guard, shape):
    task = shape.guarded(guard, lambda n, m: n, task_type="t", key=lambda bound: "k")
    task(1, 1)
    with pytest.raises(errors.KeyConflictError):
        task(1, 2)
    summary = guard.ledger.task_type_summary("t")
    assert (summary["calls"], summary["refused"], summary["runs"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("steps", "tokens"), [(0, 0), (1, 1_000), (5, 15_000), (10, 55_000), (20, 210_000)]
)
def test_the_input_of_an_agent_that_sends_all_along(steps, tokens):
    assert cumulative_input_tokens(steps) == tokens
    assert cumulative_input_tokens(steps, avg_per_step=2000) == 2 * tokens
    assert isinstance(cumulative_input_tokens(steps), int)


@pytest.mark.parametrize("bad", [-1, 1.5, True, "5", None])
def test_steps_are_whole_numbers(bad):
    with pytest.raises(errors.ConfigurationError, match="steps"):
        cumulative_input_tokens(bad)
    with pytest.raises(errors.ConfigurationError, match="avg_per_step"):
        cumulative_input_tokens(1, bad)

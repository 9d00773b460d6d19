"""Observing never disturbs a call, and a store that fails never costs a value or an execution."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time

import pytest

from idemguard import Guard, bypass, capture, errors, task_fingerprint
from idemguard.claim import Begin, Complete, Release
from idemguard.stores.sqlite import SqliteStore

SOON = 60  # seconds within which what happens at once has happened


def counted(guard, task_type="t"):
    """What the ledger has of a task type."""
    return guard.ledger.task_type_summary(task_type)


def settled(guard, store):
    """The store is up again, and has been told what was owed to it."""
    store.up()
    assert guard.engine.backlog.settle()
    return counted(guard)


@pytest.fixture
def observing(guard_of, tapped):
    """A guard that observes, on a store that can fail."""
    return guard_of(store=tapped, mode="observe")


def numbers(shape, guard, **options):
    """A guarded function that gives another number at each execution."""
    runs = []

    def body(n, other=None):
        runs.append(n)
        return len(runs)

    return shape.guarded(guard, body, task_type="t", **options)


# --- counted, never held back ----------------------------------------------------------------------


def test_every_observed_call_executes_and_gets_its_own_value(observing, shape):
    task = numbers(shape, observing)
    with capture() as calls:
        assert [task(1), task(1), task(1), task(2)] == [1, 2, 3, 4]
    assert [c.source for c in calls] == ["executed"] * 4
    assert [c.cause for c in calls] == ["first", "observed", "observed", "first"]
    assert [c.runs for c in calls] == [1, 2, 3, 1]
    summary = counted(observing)
    assert (summary["runs"], summary["tasks"], summary["duplicates"]) == (4, 2, 2)
    assert (summary["duplication_rate"], summary["doubled_share"]) == (0.5, 0.5)


def test_an_observed_call_does_not_wait_for_a_leader(guard_of, observing, shape, crew):
    started, go_on = threading.Event(), threading.Event()

    def slow(n, other=None):
        started.set()
        assert go_on.wait(SOON)
        return "slow"

    leader = crew.start(shape.guarded(guard_of(), slow, task_type="t"), 1)
    assert started.wait(SOON)
    with capture() as calls:
        assert numbers(shape, observing)(1) == 1
    assert calls[0].cause == "observed"
    go_on.set()
    assert leader.result(SOON) == "slow"


def test_observing_leaves_a_kept_result_alone(guard_of, observing, shape):
    enforced = shape.guarded(guard_of(), lambda n, other=None: "kept", task_type="t")
    assert enforced(1) == "kept"
    assert numbers(shape, observing)(1) == 1
    assert enforced(1) == "kept"


def test_observed_exceptions_are_the_callers(observing, shape):
    error = ValueError("mine")

    def body(n):
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        shape.guarded(observing, body, task_type="t")(1)
    assert caught.value is error
    assert counted(observing)["failed"] == 1


def test_an_observed_value_is_not_changed(observing, shape, warned):
    value = object()
    task = shape.guarded(observing, lambda n: value, task_type="t")
    assert task(1) is task(1) is value
    assert len(warned()) <= 1


def test_an_observed_body_may_call_itself(observing):
    @observing.idempotent(task_type="t")
    def task(n, depth=0):
        return depth if depth == 3 else task(n, depth + 1)

    keyed = observing.idempotent(task.__wrapped__, task_type="t", key="n")
    assert keyed(1) == 3


# --- whatever an argument does ---------------------------------------------------------------------


def test_an_argument_without_identity_is_warned_of_and_counted(observing, shape, warned):
    task = numbers(shape, observing)
    with capture() as calls:
        assert [task(object()), task(object()), task(1)] == [1, 2, 3]
    assert [c.source for c in calls] == ["unguarded", "unguarded", "executed"]
    (told,) = warned()
    assert "t: " in told
    assert "FingerprintError" in told  # the name would be a caller's key where there are **kwargs
    observing.engine.backlog.settle()
    summary = counted(observing)
    assert (summary["runs"], summary["unguarded"], summary["duplicates"]) == (3, 2, 2)


class Explosive:
    """An argument that does what it should not."""

    def __idempotency_key__(self):
        raise RuntimeError("not today")


def test_whatever_an_argument_raises_an_observed_call_goes_on(observing, shape, warned):
    assert numbers(shape, observing)(Explosive()) == 1
    assert "RuntimeError" in warned()[0]
    assert shape.run_task(observing, "t", Explosive(), lambda payload: "ran").result == "ran"


def test_whatever_a_key_function_raises_an_observed_call_goes_on(observing, shape, warned):
    task = numbers(shape, observing, key=lambda bound: bound["missing"])
    assert task(1) == 1
    assert "KeyError" in warned()[0]


def test_a_payload_without_identity_is_warned_of_and_counted(observing, shape, warned):
    outcome = shape.run_task(observing, "t", {"client": object()}, lambda payload: "ran")
    assert (outcome.source, outcome.result) == ("unguarded", "ran")
    assert "FingerprintError" in warned()[0]


def test_arguments_that_do_not_fit_are_the_callers_own_mistake(observing, shape, warned):
    with pytest.raises(TypeError):
        numbers(shape, observing)(1, 2, 3, 4)
    assert warned() == []
    observing.engine.backlog.settle()
    assert counted(observing)["calls"] == 0


def test_a_conflict_is_warned_of_and_counted(observing, shape, warned):
    task = numbers(shape, observing, key=lambda bound: "one key")
    with capture() as calls:
        assert [task(1), task(2)] == [1, 2]
    assert [c.cause for c in calls] == ["first", "observed"]
    (told,) = warned()
    assert "key" in told
    assert "another payload" in told
    assert counted(observing)["duplicates"] == 1


# --- whatever the store does -----------------------------------------------------------------------


WRONG = [
    errors.StoreUnavailableError("connection refused"),
    errors.StoreError("wrong password"),
    OSError("what a store should not raise"),
]


@pytest.mark.parametrize("error", WRONG, ids=lambda error: type(error).__name__)
def test_an_observed_call_needs_no_store(observing, tapped, shape, warned, error):
    task = numbers(shape, observing)
    tapped.fails = error
    with capture() as calls:
        assert [task(1), task(1)] == [1, 2]
    assert [c.source for c in calls] == ["unguarded"] * 2
    assert [c.cause for c in calls] == ["unguarded"] * 2
    (told,) = warned()
    assert "without a claim" in told
    assert str(error) in told
    if isinstance(error, errors.StoreUnavailableError):
        summary = settled(observing, tapped)
        assert (summary["runs"], summary["unguarded"], summary["duplicates"]) == (2, 2, 2)


def test_an_observed_call_outlives_a_store_that_goes_down_in_it(observing, tapped, shape, warned):
    def body(n):
        tapped.down()
        return "value"

    task = shape.guarded(observing, body, task_type="t")
    with capture() as calls:
        assert task(1) == "value"
    assert calls[0].source == "executed"
    assert "told to the store later" in warned()[0]
    summary = settled(observing, tapped)
    assert (summary["executed"], summary["duplicates"]) == (1, 0)


def test_a_bypass_that_is_observed_needs_no_store_either(observing, tapped, shape):
    task = numbers(shape, observing)
    tapped.down()
    with bypass():
        assert task(1) == 1


def damage(path):
    """Make every record that there is unreadable, but not its address."""
    place = {"namespace", "fingerprint", "scope", "version", "hint"}
    connection = sqlite3.connect(path, isolation_level=None)
    changed = 0
    for table in ("record", "result"):
        for _, column, kind, *_ in connection.execute(f"PRAGMA table_info({table})").fetchall():
            if kind in {"TEXT", "BLOB"} and column not in place:
                changed += connection.execute(f"UPDATE {table} SET {column} = 'x'").rowcount
    connection.close()
    assert changed


@pytest.fixture
def file(tmp_path):
    return tmp_path / "observed.db"


@pytest.fixture
def on_file(file):
    """Makes guards on one file."""
    made = []

    def make(**settings):
        patience = settings.pop("patience", 5.0)
        made.append(Guard(store=SqliteStore(file, patience=patience), **settings))
        return made[-1]

    yield make
    for guard in made:
        guard.close()


def test_a_damaged_row_does_not_disturb_an_observed_call(on_file, file, shape, warned):
    guard = on_file(mode="observe")
    task = numbers(shape, guard)
    assert task(1) == 1
    damage(file)
    assert task(1) == 2
    assert "damaged" in warned()[0]


@pytest.fixture
def locked(file):
    """Locks the file as a process does that forgot to commit."""
    held = []

    def lock():
        connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        connection.execute("BEGIN IMMEDIATE")
        held.append(connection)
        return connection.rollback

    yield lock
    for connection in held:
        connection.close()


def test_a_locked_database_holds_up_no_observed_call(on_file, shape, locked, warned):
    guard = on_file(mode="observe")
    task = numbers(shape, guard)
    assert task(1) == 1
    unlock = locked()
    started = time.monotonic()
    assert task(1) == 2
    assert time.monotonic() - started < 2
    assert "locked" in warned()[0]
    unlock()
    guard.engine.backlog.settle()
    assert counted(guard)["runs"] == 2


def test_a_database_that_is_locked_meanwhile_holds_up_no_observed_call(on_file, shape, locked):
    guard = on_file(mode="observe", patience=2.5)
    unlock = []
    task = shape.guarded(guard, lambda n: unlock.append(locked()) or n, task_type="t")
    started = time.monotonic()
    assert task(1) == 1
    assert time.monotonic() - started < 2
    unlock[0]()
    guard.engine.backlog.settle()
    assert counted(guard)["executed"] == 1


# --- enforced: before the claim --------------------------------------------------------------------


def test_without_a_store_nothing_is_executed(guard_of, tapped, shape):
    task = numbers(shape, guard_of(store=tapped))
    tapped.down("connection refused by 10.0.0.1")
    with capture() as calls, pytest.raises(errors.StoreUnavailableError, match=r"10\.0\.0\.1"):
        task(1)
    assert calls[0].source == "refused"
    tapped.up()
    assert task(1) == 1


def test_with_run_a_call_goes_on_without_a_store_and_is_counted_later(
    guard_of, tapped, shape, warned
):
    guard = guard_of(store=tapped, on_store_error="run")
    task = numbers(shape, guard)
    tapped.down()
    with capture() as calls:
        assert [task(1), task(1)] == [1, 2]
    assert [(c.source, c.cause, c.runs) for c in calls] == [("unguarded", "unguarded", None)] * 2
    assert len({c.execution_id for c in calls}) == 2
    (told,) = warned()
    assert "connection refused" in told
    assert f"t [{calls[0].fingerprint[:16]}]" in told
    summary = settled(guard, tapped)
    assert (summary["runs"], summary["unguarded"], summary["duplicates"]) == (2, 2, 2)
    assert (summary["duplication_rate"], summary["tasks"]) == (1.0, 1)
    lines = guard.ledger.executions(calls[0].fingerprint)
    assert [(line.cause, line.status, line.kept) for line in lines] == [
        ("unguarded", "ok", False)
    ] * 2
    # nobody held the claim yet, so the next one is the first
    with capture() as calls:
        assert task(1) == 3
    assert calls[0].cause == "first"


def test_what_is_owed_is_told_without_being_asked_for(guard_of, tapped, shape, until):
    guard = guard_of(store=tapped, on_store_error="run")
    task = numbers(shape, guard)
    tapped.down_for(Begin)
    assert task(1) == 1
    tapped.up()
    until(lambda: not len(guard.engine.backlog))
    assert counted(guard)["unguarded"] == 1


@pytest.mark.parametrize("error", WRONG[1:], ids=lambda error: type(error).__name__)
def test_a_store_that_answers_wrongly_never_leads_to_an_execution(guard_of, tapped, shape, error):
    task = numbers(shape, guard_of(store=tapped, on_store_error="run"))
    tapped.fails = error
    with pytest.raises(errors.StoreError) as caught:
        task(1)
    assert not isinstance(caught.value, errors.StoreUnavailableError)
    assert str(error) in str(caught.value)
    tapped.up()
    assert task(1) == 1


def test_a_damaged_row_is_a_store_error_until_it_is_forgotten(on_file, file, shape):
    guard = on_file(on_store_error="run")
    task = numbers(shape, guard)
    assert task(1) == 1
    damage(file)
    fingerprint = task_fingerprint("t", {"n": 1, "other": None})
    with pytest.raises(errors.StoreError, match="damaged") as caught:
        task(1)
    assert fingerprint[:16] in str(caught.value)
    assert "forget()" in str(caught.value)
    guard.forget(guard.task_of(getattr(task, "guarded", task), 1))
    assert task(1) == 2


def test_a_locked_database_is_waited_for(on_file, shape, locked, crew):
    guard = on_file()
    task = numbers(shape, guard)
    assert task(1) == 1
    unlock = locked()
    call = crew.start(task, 2)
    with pytest.raises(TimeoutError):
        call.result(0.3)
    unlock()
    assert call.result(SOON) == 2


def test_a_database_that_stays_locked_is_unavailable(on_file, shape, locked):
    guard = on_file(patience=0.2)
    task = numbers(shape, guard)
    assert task(1) == 1
    unlock = locked()
    with pytest.raises(errors.StoreUnavailableError, match="locked"):
        task(2)
    unlock()
    assert task(2) == 2


# --- enforced: while waiting -----------------------------------------------------------------------


@pytest.fixture
def waiting(guard_of, tapped, shape, crew, until):
    """A leader within its body, on a store of its own way in, and a waiter on the one that can fail."""

    class Waiting:
        def __init__(self) -> None:
            self.go_on = threading.Event()
            self.executed = []

        def start(self, **settings):
            started = threading.Event()

            def slow(n):
                started.set()
                assert self.go_on.wait(SOON)
                return "led"

            lease = settings.get("lease", 30)
            self.leader = crew.start(shape.guarded(guard_of(lease=lease), slow, task_type="t"), 1)
            assert started.wait(SOON)
            guard = guard_of(store=tapped, **settings)
            task = shape.guarded(guard, lambda n: self.executed.append(n) or "ran", task_type="t")
            self.waiter = crew.start(task, 1)
            until(lambda: tapped.parked == 1)
            return guard

    made = Waiting()
    yield made
    made.go_on.set()


@pytest.mark.parametrize("policy", ["raise", "run"])
def test_a_store_that_is_away_for_a_moment_does_not_disturb_a_waiter(
    waiting, tapped, until, policy
):
    """It was told of a living leader: only after a lease without a store it must do without."""
    waiting.start(on_store_error=policy)
    asked = len(tapped.seen)
    tapped.down()
    waiting.go_on.set()
    assert waiting.leader.result(SOON) == "led"
    until(lambda: len(tapped.seen) > asked)
    tapped.up()
    assert waiting.waiter.result(SOON) == "led"
    assert waiting.executed == []


def test_a_store_that_stays_away_while_one_waits_is_an_error(waiting, tapped):
    waiting.start(lease=0.5)
    tapped.down()
    with pytest.raises(errors.StoreUnavailableError):
        waiting.waiter.result(SOON)
    assert waiting.executed == []


def test_with_run_a_store_that_stays_away_while_one_waits_is_done_without(waiting, tapped):
    guard = waiting.start(lease=0.5, on_store_error="run")
    tapped.down()
    assert waiting.waiter.result(SOON) == "ran"
    waiting.go_on.set()
    assert waiting.leader.result(SOON) == "led"
    summary = settled(guard, tapped)
    assert (summary["executed"], summary["unguarded"], summary["runs"]) == (1, 1, 2)


def test_a_store_that_answers_wrongly_while_one_waits_is_an_error(waiting, tapped):
    waiting.start(on_store_error="run")
    tapped.fails = errors.StoreError("wrong type")
    waiting.go_on.set()
    with pytest.raises(errors.StoreError, match="wrong type"):
        waiting.waiter.result(SOON)
    assert waiting.executed == []


# --- enforced: after the body ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["raise", "run"])
@pytest.mark.parametrize("error", WRONG, ids=lambda error: type(error).__name__)
def test_a_result_that_was_paid_for_reaches_its_caller(
    guard_of, tapped, shape, warned, policy, error
):
    def body(n):
        tapped.fails = lambda c: error if isinstance(c, Complete) else None
        return "paid for"

    task = shape.guarded(guard_of(store=tapped, on_store_error=policy), body, task_type="t")
    with capture() as calls:
        assert task(1) == "paid for"
    assert (calls[0].source, calls[0].result, calls[0].error) == ("executed", "paid for", None)
    told = warned()[0]
    assert str(error) in told
    assert "later" in told


def test_a_result_that_could_not_be_kept_at_once_is_kept_later(guard_of, tapped, shape):
    guard = guard_of(store=tapped)

    def body(n):
        tapped.down()
        return "paid for"

    task = shape.guarded(guard, body, task_type="t")
    assert task(1) == "paid for"
    summary = settled(guard, tapped)
    assert (summary["executed"], summary["runs"], summary["duplicates"]) == (1, 1, 0)
    with capture() as calls:
        assert task(1) == "paid for"
    assert calls[0].source == "reused"


def test_closing_a_guard_tells_what_is_owed(guard_of, tapped, shape):
    guard = guard_of(store=tapped)
    tapped.down_for(Complete)
    assert shape.guarded(guard, lambda n: n, task_type="t")(1) == 1
    tapped.up()
    guard.close()
    assert counted(guard)["executed"] == 1


def test_the_error_of_a_body_reaches_its_caller_without_a_store(guard_of, tapped, shape, warned):
    mine = ValueError("mine")

    def body(n):
        tapped.down_for(Release)
        raise mine

    guard = guard_of(store=tapped)
    with pytest.raises(ValueError, match="mine") as caught:
        shape.guarded(guard, body, task_type="t")(1)
    assert caught.value is mine
    assert len(warned()) == 1
    assert settled(guard, tapped)["failed"] == 1


def test_a_renewal_that_fails_costs_nothing(guard_of, tapped, shape, until):
    """The store is back before the lease is over."""

    def body(n):
        tapped.down()
        before = len(tapped.seen)
        until(lambda: len(tapped.seen) > before)
        tapped.up()
        return n

    task = shape.guarded(guard_of(store=tapped), body, task_type="t", lease=2)
    with capture() as calls:
        assert task(1) == 1
    assert not calls[0].lost


# --- the kill switch -------------------------------------------------------------------------------


def test_off_calls_straight_through_and_records_nothing(guard_of, tapped, shape):
    guard = guard_of(store=tapped, mode="off")
    tapped.down()
    task = numbers(shape, guard)
    with capture() as calls:
        assert [task(1), task(1), task(object())] == [1, 2, 3]
        outcome = shape.run_task(guard, "t", 1, lambda payload: payload)
    assert calls == []
    assert (outcome.source, outcome.result, outcome.execution_id) == ("unguarded", 1, None)
    assert outcome.fingerprint == task_fingerprint("t", 1)
    assert tapped.seen == []


def test_off_is_blind_to_what_an_argument_does(guard_of, tapped, shape):
    guard = guard_of(store=tapped, mode="off")
    assert numbers(shape, guard)(Explosive()) == 1
    for payload in (Explosive(), object()):
        outcome = shape.run_task(guard, "t", payload, lambda payload: "ran")
        assert (outcome.source, outcome.result) == ("unguarded", "ran")


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_the_environment_switches_everything_off(guard_of, tapped, shape, monkeypatch, mode):
    monkeypatch.setenv("IDEMGUARD_MODE", "off")
    task = numbers(shape, guard_of(store=tapped, mode=mode), mode=mode)
    assert [task(1), task(1)] == [1, 2]
    assert tapped.seen == []


def test_the_environment_outranks_off_as_well(guard_of, tapped, shape, monkeypatch):
    monkeypatch.setenv("IDEMGUARD_MODE", "enforce")
    task = numbers(shape, guard_of(store=tapped, mode="off"), mode="off")
    assert [task(1), task(1)] == [1, 1]


def test_the_environment_makes_an_enforcing_guard_observe(guard_of, shape, monkeypatch):
    monkeypatch.setenv("IDEMGUARD_MODE", "observe")
    guard = guard_of(mode="enforce")
    task = numbers(shape, guard, mode="enforce")
    assert [task(1), task(1)] == [1, 2]
    assert counted(guard)["duplicates"] == 1


def test_trouble_is_warned_of_once_a_minute_and_kind(observing, tapped, shape, warned, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("idemguard.log.time.monotonic", lambda: clock[0])
    task = numbers(shape, observing)
    task(object())
    task(object())
    assert len(warned()) == 1
    clock[0] += 59.9
    task(object())
    assert len(warned()) == 1
    clock[0] += 0.1
    task(object())
    assert len(warned()) == 2


def test_an_observed_coroutine_waits_for_nobody_on_its_loop(observing):
    async def main():
        runs = []

        @observing.idempotent(task_type="t")
        async def task(n):
            runs.append(n)
            while len(runs) < 5:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.001)
            return len(runs)

        return await asyncio.wait_for(asyncio.gather(*(task(1) for _ in range(5))), SOON)

    assert asyncio.run(main()) == [5] * 5

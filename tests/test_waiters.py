"""Whoever waits is served by the first to complete, takes over alone, and disturbs nobody."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import anyio
import pytest

from idemguard import Guard, capture, errors, task_fingerprint, worker
from idemguard.claim import Begin, Withdraw
from idemguard.stores.sqlite import SqliteStore

SOON = 60  # seconds within which what happens at once has happened, under load too
CROWD = 20


class Gate:
    """A body that is inside until it is let go, each time that it is executed."""

    def __init__(self) -> None:
        self.runs = 0
        self.inside = threading.Semaphore(0)
        self._turns = threading.Semaphore(0)
        self._ends = {}

    def let(self, *ends) -> None:
        """Let one execution end for each: with an error, or with a value."""
        for end in ends:
            self._ends[len(self._ends)] = end
            self._turns.release()

    def entered(self) -> bool:
        """Whether one more execution has begun by now, or soon."""
        return self.inside.acquire(timeout=SOON)

    def __call__(self, n=1):
        turn = self.runs
        self.runs += 1
        self.inside.release()
        assert self._turns.acquire(timeout=SOON)
        end = self._ends[turn]
        if isinstance(end, BaseException):
            raise end
        return end


def body_of(gate):
    """A function of one argument that goes through the gate."""

    def body(n):
        return gate(n)

    return body


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def waiting(guard_of, tapped, shape, crew, until, gate):
    """Starts a leader, and waiters that are parked behind it."""

    class Waiting:
        store = tapped

        def guarded(self, **options):
            return shape.guarded(guard_of(store=tapped), body_of(gate), task_type="t", **options)

        def lead(self, **options):
            with worker("w-leader"):
                leader = crew.start(_named, "w-leader", self.guarded(**options), 1)
            assert gate.entered()
            return leader

        def wait(self, count, **options):
            before = tapped.parked
            task = self.guarded(**options)
            waiters = [crew.start(_named, f"w-{n}", task, 1) for n in range(count)]
            until(lambda: tapped.parked >= before + count)
            return waiters

    return Waiting()


def _named(name, task, *args):
    with worker(name), capture() as calls:
        try:
            task(*args)
        except BaseException as error:  # noqa: BLE001 - the outcome has it
            caught = error
        else:
            caught = None
    assert calls[-1].error is caught
    return calls[-1]


def sources(futures):
    """How often calls came to what."""
    return dict(Counter(future.result(SOON).source for future in futures))


# --- served together -------------------------------------------------------------------------------


def test_all_waiters_get_the_leaders_result(waiting, gate, guard):
    leader = waiting.lead()
    waiters = waiting.wait(CROWD)
    gate.let("value")
    assert leader.result(SOON).source == "executed"
    assert sources(waiters) == {"reused": CROWD}
    assert {(w.result().result, w.result().worker) for w in waiters} == {("value", "w-leader")}
    assert gate.runs == 1
    summary = guard.ledger.task_type_summary("t")
    assert (summary["calls"], summary["reused"], summary["runs"]) == (CROWD + 1, CROWD, 1)


def test_of_many_waiters_one_at_a_time_takes_over_from_a_leader_that_raises(waiting, gate, guard):
    leader = waiting.lead()
    waiters = waiting.wait(CROWD)
    gate.let(ValueError("first"))
    assert leader.result(SOON).source == "failed"
    assert gate.entered()
    gate.let(ValueError("second"))
    assert gate.entered()
    assert gate.runs == 3
    assert not gate.inside.acquire(blocking=False)
    gate.let("value")
    assert sources(waiters) == {"failed": 1, "executed": 1, "reused": CROWD - 2}
    # each asked once at first, one more at each failure, and all when there was a result
    asked = sum(isinstance(command, Begin) for command in waiting.store.seen)
    assert 1 + CROWD + 2 + (CROWD - 2) <= asked < 3 * CROWD
    causes = [line.cause for line in guard.ledger.lines()]
    assert causes == ["first", "retry", "retry"]
    assert guard.ledger.duplication_rate() == 0.0


def test_of_many_waiters_one_takes_over_from_a_leader_that_hands_back(waiting, gate):
    leader = waiting.lead()
    waiters = waiting.wait(5)
    gate.let({"status": "out_of_scope"}, "value")
    assert leader.result(SOON).source == "declined"
    assert sources(waiters) == {"executed": 1, "reused": 4}
    assert gate.runs == 2


def _wait_in_process(path, log, fail_first, start, results):
    """In a process of its own: five threads call one task at a time that all have."""
    guard = Guard(store=SqliteStore(path))

    @guard.idempotent(task_type="t")
    def task(n):
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(log.read_text().split()) == 1:
            start.wait(SOON)  # the others are on their way
            threading.Event().wait(0.3)
            if fail_first:
                raise ValueError("the leader's own")
        return fail_first  # falsy in one of the tests

    def call():
        with capture() as calls, suppress(ValueError):
            task(1)
        results.put((calls[0].source, calls[0].result))

    threads = [threading.Thread(target=call) for _ in range(5)]
    for thread in threads:
        thread.start()
    start.wait(SOON)
    for thread in threads:
        thread.join(SOON)
    guard.close()


@pytest.mark.parametrize("fails", [False, True], ids=["value", "raises"])
def test_waiters_of_four_processes(tmp_path, fails):
    spawn = multiprocessing.get_context("spawn")
    results, start = spawn.Queue(), spawn.Barrier(5)
    path, log = tmp_path / "guard.db", tmp_path / "runs"
    arguments = (path, log, fails, start, results)
    processes = [spawn.Process(target=_wait_in_process, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    came = Counter(results.get(timeout=SOON) for _ in range(4 * 5))
    for process in processes:
        process.join(SOON)
        assert process.exitcode == 0
    if fails:
        assert came == {("failed", None): 1, ("executed", True): 1, ("reused", True): 18}
    else:
        assert came == {("executed", False): 1, ("reused", False): 19}
    assert len(log.read_text().split()) == 1 + fails
    results.close()


FALSY = [None, 0, "", [], False, {}, 0.0]


def test_a_falsy_result_of_another_process_is_a_result(tmp_path):
    script = (
        "import sys, idemguard\n"
        "guard = idemguard.Guard(store='sqlite:///guard.db')\n"
        f"for n, value in enumerate({FALSY!r}):\n"
        "    guard.run_task('t', {'n': n}, lambda payload: value)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
    guard = Guard(store=SqliteStore(tmp_path / "guard.db"))
    for n, value in enumerate(FALSY):
        outcome = guard.run_task("t", {"n": n}, lambda payload: "executed anew")
        assert (outcome.source, outcome.result) == ("reused", value)
        assert type(outcome.result) is type(value)
    guard.close()


# --- cancelled -------------------------------------------------------------------------------------


def run(coroutine):
    """Run to the end, which is soon."""

    async def main():
        return await asyncio.wait_for(coroutine, SOON)

    return asyncio.run(main())


class AsyncGate:
    """As `Gate`, on one loop."""

    def __init__(self) -> None:
        self.runs = 0
        self.inside = asyncio.Semaphore(0)
        self.turns = asyncio.Semaphore(0)

    async def __call__(self, n):
        self.runs += 1
        self.inside.release()
        await self.turns.acquire()
        return self.runs


async def _until(condition):
    while not condition():  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.001)


@pytest.fixture
def loop_of(guard_of, tapped):
    """Runs a scenario with a guarded coroutine, its gate, and a way to park waiters."""

    def run_scenario(scenario, **options):
        async def main():
            gate = AsyncGate()

            @guard_of(store=tapped).idempotent(task_type="t", **options)
            async def task(n):
                return await gate(n)

            async def park(count):
                before = tapped.parked
                tasks = [asyncio.create_task(task(1)) for _ in range(count)]
                await _until(lambda: tapped.parked >= before + count)
                return tasks

            return await scenario(task, gate, park)

        return run(main())

    return run_scenario


def test_a_cancelled_leader_is_followed_by_one_and_cancels_nobody_else(loop_of, guard):
    async def scenario(task, gate, park):
        leader = asyncio.create_task(task(1))
        await gate.inside.acquire()
        waiters = await park(CROWD)
        leader.cancel("mine")
        with pytest.raises(asyncio.CancelledError, match="mine"):
            await leader
        await gate.inside.acquire()
        gate.turns.release()
        return await asyncio.gather(*waiters), gate.runs

    assert loop_of(scenario) == ([2] * CROWD, 2)
    assert [line.status for line in guard.ledger.lines()] == ["failed", "ok"]
    assert [line.cause for line in guard.ledger.lines()] == ["first", "retry"]


def test_a_cancelled_waiter_disturbs_nobody(loop_of, guard):
    async def scenario(task, gate, park):
        leader = asyncio.create_task(task(1))
        await gate.inside.acquire()
        waiters = await park(4)
        waiters[0].cancel()
        waiters[2].cancel()
        ended = await asyncio.gather(waiters[0], waiters[2], return_exceptions=True)
        assert [type(error) for error in ended] == [asyncio.CancelledError] * 2
        gate.turns.release()
        return await asyncio.gather(leader, waiters[1], waiters[3]), gate.runs

    assert loop_of(scenario) == ([1, 1, 1], 1)
    assert guard.ledger.task_type_summary("t")["runs"] == 1


@pytest.mark.parametrize("turns", range(6))
def test_a_waiter_that_is_cancelled_as_it_is_woken_passes_the_hint_on(loop_of, turns):
    async def scenario(task, gate, park):
        leader = asyncio.create_task(task(1))
        await gate.inside.acquire()
        waiters = [(await park(1))[0] for _ in range(3)]
        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        for _ in range(turns):
            await asyncio.sleep(0)
        waiters[0].cancel()
        gate.turns.release()
        gate.turns.release()
        await asyncio.wait(waiters)
        return [w.cancelled() or w.result() for w in waiters], gate.runs

    started = time.monotonic()
    found, runs = loop_of(scenario)
    # within less than the lease of 30 s, so it was the hint that woke them
    assert time.monotonic() - started < 20
    if found[0] is True and runs == 2:
        assert found == [True, 2, 2]
    else:  # it had begun to execute when it was cancelled, or had its result already
        assert found[1:] == [runs, runs]
        assert runs in {2, 3}


def test_a_waiter_whose_time_is_limited_from_outside_leaves_alone(loop_of):
    async def scenario(task, gate, park):
        leader = asyncio.create_task(task(1))
        await gate.inside.acquire()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await task(1)
        gate.turns.release()
        return await leader, await task(1), gate.runs

    assert loop_of(scenario) == (1, 1, 1)


@pytest.mark.parametrize("turns", range(8))
def test_a_claim_of_a_caller_that_was_cancelled_before_its_body_is_given_back(
    guard_of, tapped, turns
):
    guard = guard_of(store=tapped)
    started = []

    @guard.idempotent(task_type="t")
    async def task(n):
        started.append(n)
        return len(started)

    async def main():
        cancelled = asyncio.create_task(task(1))
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        return await task(1)

    assert run(main()) == len(started)
    statuses = [line.status for line in guard.ledger.lines()]
    assert statuses in (["ok"], ["failed", "ok"])
    assert len(statuses) == len(started)


def test_scopes_that_cancel_again_and_again_do_no_harm(loop_of, guard):
    """As those of anyio, which deliver a cancellation until it is heeded."""

    async def scenario(task, gate, park):
        with anyio.move_on_after(0.05) as led:
            await task(1)
        with anyio.move_on_after(0.05) as led_again:
            async with asyncio.TaskGroup() as group:
                group.create_task(task(1))
                group.create_task(task(1))
        gate.turns.release()
        return await task(1), led.cancelled_caught, led_again.cancelled_caught

    assert loop_of(scenario)[1:] == (True, True)
    lines = list(guard.ledger.lines())
    assert [line.status for line in lines[:-1]] == ["failed"] * (len(lines) - 1)
    assert (lines[-1].status, guard.ledger.duplication_rate()) == ("ok", 0.0)


def test_the_first_to_come_is_the_first_to_take_over(waiting, gate):
    waiting.lead()
    waiters = [waiting.wait(1)[0] for _ in range(3)]
    gate.let(ValueError("no"))
    assert gate.entered()
    gate.let("value")
    assert [w.result(SOON).source for w in waiters] == ["executed", "reused", "reused"]


def test_who_left_is_not_hinted_at(waiting, gate):
    leader = waiting.lead()
    before = waiting.store.parked
    left = waiting.wait(1, wait_timeout=0.1, on_timeout="raise")[0]
    stays = waiting.wait(1)[0]
    assert waiting.store.parked == before + 2
    assert isinstance(left.result(SOON).error, errors.WaitTimeoutError)
    gate.let(ValueError("no"), "value")
    assert leader.result(SOON).source == "failed"
    assert stays.result(SOON).source == "executed"


# --- patience --------------------------------------------------------------------------------------


def test_without_a_wait_timeout_nobody_doubles_a_living_leader(
    guard_of, tapped, shape, crew, until
):
    """Though it takes several leases."""
    go_on, started = threading.Event(), threading.Event()
    runs = []

    def body(n):
        runs.append(n)
        started.set()
        assert go_on.wait(SOON)
        return len(runs)

    task = shape.guarded(guard_of(store=tapped), body, task_type="t", lease=1.0)
    leader = crew.start(task, 1)
    assert started.wait(SOON)
    waiters = [crew.start(task, 1) for _ in range(5)]
    # each lease that ends without being renewed would wake them to ask again
    until(lambda: sum(isinstance(command, Begin) for command in tapped.seen) >= 6 + 5 * 2)
    assert runs == [1]
    go_on.set()
    assert [f.result(SOON) for f in (leader, *waiters)] == [1] * 6


def test_the_tired_execute_once_beside_a_living_leader(waiting, gate, guard):
    leader = waiting.lead()
    waiters = waiting.wait(CROWD, wait_timeout=0.3)
    assert gate.entered()
    # all of them are tired now, one executes, the others wait on
    assert not gate.inside.acquire(timeout=0.3)
    assert gate.runs == 2
    gate._ends = {1: "from the fallback", 0: "from the leader"}
    gate._turns.release()
    gate._turns.release()
    outcomes = [w.result(SOON) for w in waiters]
    led = leader.result(SOON)
    assert sources(waiters) == {"fallback": 1, "reused": CROWD - 1}
    assert led.source == "executed"
    kept = {o.result for o in outcomes if o.source == "reused"}
    assert len(kept) == 1
    assert kept <= {"from the fallback", "from the leader"}
    (fallback,) = (o for o in outcomes if o.source == "fallback")
    assert (fallback.cause, fallback.runs) == ("fallback", 2)
    assert fallback.waited >= 0.3
    assert guard.ledger.duplication_rate() == 0.5
    assert guard.ledger.task_type_summary("t")["fallback"] == 1


def test_everybody_is_served_by_a_fallback_that_is_first(guard_of, tapped, shape, crew, until):
    """And the leader keeps its own value."""
    inside, go_on = threading.Semaphore(0), threading.Event()
    runs = []

    def body(n):
        runs.append(n)
        mine = len(runs)
        inside.release()
        assert mine > 1 or go_on.wait(SOON)
        return mine

    guard = guard_of(store=tapped)
    led = shape.guarded(guard, body, task_type="t")
    tired = shape.guarded(guard, body, task_type="t", wait_timeout=0.2)
    patient = shape.guarded(guard, body, task_type="t")
    leader = crew.start(_named, "w-1", led, 1)
    assert inside.acquire(timeout=SOON)
    waiters = [crew.start(_named, "w-2", tired, 1), crew.start(_named, "w-3", patient, 1)]
    assert [w.result(SOON).result for w in waiters] == [2, 2]
    assert not leader.done()
    go_on.set()
    own = leader.result(SOON)
    assert (own.source, own.result, own.lost) == ("executed", 1, False)
    lines = {line.worker: line for line in guard.ledger.executions(own.fingerprint)}
    assert (lines["w-1"].status, lines["w-1"].kept) == ("ok", False)
    assert (lines["w-2"].status, lines["w-2"].kept) == ("ok", True)
    assert led(1) == 2


@pytest.fixture
def turns():
    """A body whose executions enter one after another, and end in the order that the test likes."""

    class Turns:
        def __init__(self) -> None:
            self.inside = threading.Semaphore(0)
            self.ends = [threading.Event() for _ in range(3)]
            self.errors = {}
            self.runs = 0

        def body(self, n):
            mine = self.runs
            self.runs += 1
            self.inside.release()
            assert self.ends[mine].wait(SOON)
            if mine in self.errors:
                raise self.errors[mine]
            return mine

    return Turns()


def test_the_place_beside_a_leader_is_free_again_when_a_fallback_fails(
    guard_of, tapped, shape, crew, until, turns
):
    guard = guard_of(store=tapped)
    tired = shape.guarded(guard, turns.body, task_type="t", volatile="self", wait_timeout=0.1)
    leader = crew.start(_named, "w-1", tired, 1)
    assert turns.inside.acquire(timeout=SOON)
    waiters = [crew.start(_named, name, tired, 1) for name in ("w-2", "w-3")]
    assert turns.inside.acquire(timeout=SOON)
    until(lambda: tapped.parked == 3)  # one of them waits again, now for a place
    turns.errors[1] = ValueError("beside")
    turns.ends[1].set()
    assert turns.inside.acquire(timeout=SOON)
    assert not leader.done()
    turns.ends[2].set()
    assert sources(waiters) == {"failed": 1, "fallback": 1}
    turns.ends[0].set()
    assert leader.result(SOON).result == 0
    assert tired(1) == 2


def test_a_fallback_leads_when_its_leader_ends_without_a_value(
    guard_of, tapped, shape, crew, until, turns
):
    guard = guard_of(store=tapped)
    patient = shape.guarded(guard, turns.body, task_type="t", volatile="self")
    tired = shape.guarded(guard, turns.body, task_type="t", volatile="self", wait_timeout=0.1)
    leader = crew.start(_named, "w-1", patient, 1)
    assert turns.inside.acquire(timeout=SOON)
    fallback = crew.start(_named, "w-2", tired, 1)
    assert turns.inside.acquire(timeout=SOON)
    turns.errors[0] = ValueError("the leader's own")
    turns.ends[0].set()
    assert leader.result(SOON).source == "failed"
    before = tapped.parked
    waiter = crew.start(_named, "w-3", patient, 1)
    until(lambda: tapped.parked > before)
    turns.ends[1].set()
    assert (fallback.result(SOON).source, fallback.result().result) == ("fallback", 1)
    assert (waiter.result(SOON).source, waiter.result().worker) == ("reused", "w-2")
    assert turns.runs == 2


def test_patience_starts_anew_with_a_new_leader(waiting, gate, guard):
    waiting.lead()
    waiters = waiting.wait(2, wait_timeout=1.2)
    threading.Event().wait(0.3)
    gate.let(ValueError("no"))  # one of the two leads now
    assert gate.entered()
    assert gate.entered()
    gate.let("value", "value")
    assert sources(waiters) == {"executed": 1, "fallback": 1}
    _, second, beside = guard.ledger.lines()
    assert (second.cause, beside.cause) == ("retry", "fallback")
    assert beside.started - second.started >= 1200  # had its patience gone on, 900


def test_with_raise_the_tired_are_told_who_holds_the_task(waiting, gate, guard):
    leader = waiting.lead()
    started = time.monotonic()
    waiters = waiting.wait(CROWD, wait_timeout=0.3, on_timeout="raise")
    outcomes = [w.result(SOON) for w in waiters]
    assert time.monotonic() - started >= 0.3
    assert not leader.done()
    (line,) = guard.ledger.lines()
    fingerprint = task_fingerprint("t", {"n": 1})
    for outcome in outcomes:
        error = outcome.error
        assert isinstance(error, errors.WaitTimeoutError)
        assert (error.worker, error.execution_id) == ("w-leader", line.execution_id)
        assert (error.task_type, error.fingerprint) == ("t", fingerprint)
        for word in ("'w-leader'", f"t [{fingerprint[:16]}]", "wait_timeout="):
            assert word in str(error)
        assert (outcome.source, outcome.runs) == ("refused", 1)
        assert 0.3 <= outcome.waited < SOON
    gate.let("value")
    assert leader.result(SOON).result == "value"
    summary = guard.ledger.task_type_summary("t")
    assert (summary["refused"], summary["runs"]) == (CROWD, 1)


def test_no_patience_at_all_is_told_at_once(waiting, gate):
    waiting.lead()
    before = waiting.store.parked
    refused = _named("w", waiting.guarded(wait_timeout=0, on_timeout="raise"), 1)
    assert isinstance(refused.error, errors.WaitTimeoutError)
    assert refused.waited == 0
    assert waiting.store.parked == before
    assert any(isinstance(command, Withdraw) for command in waiting.store.seen)
    gate.let("value")


def test_no_patience_at_all_executes_at_once_beside_the_leader(waiting, gate, crew, until):
    leader = waiting.lead()
    impatient = waiting.guarded(wait_timeout=0)
    beside = crew.start(_named, "w-2", impatient, 1)
    assert gate.entered()
    assert waiting.store.parked == 0
    # the place beside the leader is taken: then there is nothing to do but wait
    third = crew.start(_named, "w-3", impatient, 1)
    until(lambda: waiting.store.parked == 1)
    assert gate.runs == 2
    gate.let("value", "value")
    assert leader.result(SOON).source == "executed"
    assert (beside.result(SOON).source, beside.result().waited) == ("fallback", 0)
    assert third.result(SOON).source == "reused"


# --- lost ------------------------------------------------------------------------------------------


def lose(guard, task):
    """An execution by hand whose lease runs out."""
    with worker("w-lost"):
        claim = guard.claim(replace(task, policy=None))  # by the guard's, which reruns
    assert claim is not None
    return claim


@pytest.fixture
def lost(guard_of, clock, shape):
    """A task whose execution was lost, and callers of both policies."""

    class Lost:
        guard = guard_of(lease=10, retention=3600, ttl=60)
        executed = 0

        def __init__(self) -> None:
            def body(n):
                self.executed += 1
                return "anew"

            self.raising = shape.guarded(self.guard, body, task_type="t", on_lost="raise")
            self.rerunning = shape.guarded(self.guard, body, task_type="t")
            self.task = self.guard.task_of(getattr(self.raising, "guarded", self.raising), 1)
            self.claim = lose(self.guard, self.task)
            clock.advance(11)

        def refused(self):
            before = self.executed
            with capture() as calls, pytest.raises(errors.UnknownOutcomeError) as caught:
                self.raising(1)
            assert self.executed == before
            assert calls[0].source == "refused"
            return caught.value

    return Lost()


def test_who_must_know_the_effect_is_refused_until_it_is_known(lost):
    for _ in range(2):
        error = lost.refused()
    assert (error.worker, error.execution_id) == ("w-lost", lost.claim.execution_id)
    assert (error.task_type, error.fingerprint) == ("t", lost.task.fingerprint)
    for word in ("'w-lost'", f"t [{lost.task.fingerprint[:16]}]", "resolve()", "forget()"):
        assert word in str(error)


def test_resolve_ends_the_doubt_with_a_result(lost):
    lost.refused()
    lost.guard.resolve(lost.task, "it happened")
    assert lost.raising(1) == "it happened"
    assert lost.executed == 0


def test_forget_ends_the_doubt_with_an_execution(lost):
    lost.refused()
    lost.guard.forget(lost.task)
    assert lost.raising(1) == "anew"


def test_the_late_completion_ends_the_doubt(lost):
    lost.refused()
    assert lost.claim.complete("late")
    assert lost.raising(1) == "late"
    assert lost.executed == 0


def test_the_late_failure_ends_the_doubt(lost):
    lost.refused()
    lost.claim.release()
    assert lost.raising(1) == "anew"


def test_the_end_of_the_record_ends_the_doubt(lost, clock):
    lost.refused()
    clock.advance(3650)
    assert lost.raising(1) == "anew"


def test_it_stays_unknown_when_a_successor_fails(lost):
    successor = lose(lost.guard, lost.task)
    successor.release()
    assert lost.refused().execution_id == lost.claim.execution_id


def test_the_policy_of_the_caller_counts(lost):
    lost.refused()
    with capture() as calls:
        assert lost.rerunning(1) == "anew"
    assert calls[0].cause == "lost"
    assert lost.raising(1) == "anew"
    assert lost.executed == 1
    assert lost.guard.ledger.duplication_rate() == 0.5


def test_a_leader_that_was_overtaken_gets_its_own_value_and_is_told(
    guard_of, tapped, shape, crew, clock, warned
):
    go_on, started = threading.Event(), threading.Event()

    def first(n):
        started.set()
        assert go_on.wait(SOON)
        return "first"

    guard = guard_of(store=tapped)
    # a lease so long that no renewal comes: what passes is the store's time
    slow = shape.guarded(guard, first, task_type="t", lease=100)
    quick = shape.guarded(guard, lambda n: "second", task_type="t", lease=100)
    leader = crew.start(_named, "w-1", slow, 1)
    assert started.wait(SOON)
    clock.advance(101)
    overtaking = _named("w-2", quick, 1)
    assert (overtaking.result, overtaking.cause) == ("second", "lost")
    go_on.set()
    own = leader.result(SOON)
    assert (own.source, own.result, own.lost) == ("executed", "first", True)
    assert quick(1) == "second"
    lines = guard.ledger.executions(own.fingerprint)
    assert [(line.worker, line.status) for line in lines] == [("w-1", "late"), ("w-2", "ok")]
    (told,) = warned()
    assert f"t [{own.fingerprint[:16]}]" in told
    assert "lease" in told

"""A task can be claimed, completed, waited for, forgotten and resolved by hand, awaited or not."""

from __future__ import annotations

import asyncio
import inspect
import threading
from decimal import Decimal

import pytest

from idemguard import Guard, Task, Usage, agent, capture, errors, scope, task_fingerprint, worker

SOON = 60  # seconds within which what happens at once has happened
ONE = task_fingerprint("t", {"n": 1})


class OnALoop:
    """Calls the methods of `guard.aio`, and of its claims, plainly, on a loop of their own."""

    def __init__(self, hand) -> None:
        self._hand = hand

    def __getattr__(self, name):
        found = getattr(self._hand, name)
        if name == "ledger":
            return OnALoop(found)
        if not callable(found):
            return found

        def call(*args, **kwargs):
            async def wait():
                return await found(*args, **kwargs)

            got = asyncio.run(wait())
            return OnALoop(got) if name == "claim" and got is not None else got

        return call


@pytest.fixture(params=["plain", "awaited"])
def hand_of(request):
    """A guard's methods, plain or awaited."""

    def make(guard):
        return guard if request.param == "plain" else OnALoop(guard.aio)

    return make


@pytest.fixture
def hand(guard, hand_of):
    return hand_of(guard)


@pytest.fixture
def task():
    return Task.of("t", {"n": 1})


# --- tasks -----------------------------------------------------------------------------------------


def test_a_task_is_told_by_its_payload():
    task = Task.of("t", {"n": 1, "request_id": "r", "ts": 5}, volatile=("ts",))
    assert (task.task_type, task.fingerprint) == ("t", ONE)
    assert (task.scope, task.version) == ("", None)
    assert task == Task.of("t", {"n": 1})
    assert Task.of("t", {"n": 1, "request_id": "r"}, keep=("request_id",)) != task
    with pytest.raises(errors.FingerprintError, match="n has no stable identity"):
        Task.of("t", {"n": object()})


def test_a_task_belongs_to_the_scope_that_it_was_made_in(hand, task):
    with scope("run"):
        scoped = Task.of("t", {"n": 1}, version="2")
    assert (scoped.scope, scoped.version) == ("run", "2")
    assert hand.claim(scoped) is not None
    assert hand.claim(task) is not None


def test_the_task_of_a_call_is_what_the_call_would_do(guard, hand, shape):
    executed = shape.guarded(guard, lambda n, m=2: [n, m], task_type="t", version="3")
    guarded = getattr(executed, "guarded", executed)
    with scope("run"):
        task = guard.task_of(guarded, m=2, n=1)
        assert hand.peek(task) is None
        assert executed(1) == [1, 2]
    assert hand.peek(task).result == [1, 2]
    assert (task.version, task.scope) == ("3", "run")
    assert "t" in repr(task)


def test_only_what_is_guarded_has_tasks(guard):
    with pytest.raises(errors.ConfigurationError, match="idempotent"):
        guard.task_of(len, "a")
    with pytest.raises(TypeError):
        guard.task_of(guard.idempotent(lambda n: n, task_type="t"))


# --- claims ----------------------------------------------------------------------------------------


def test_a_claim_is_held_by_one(hand, task):
    claim = hand.claim(task, worker_id="w-1")
    assert claim is not None
    assert hand.claim(task, worker_id="w-2") is None
    assert claim.complete({"a": 1}) is True
    assert hand.claim(task) is None
    found = hand.peek(task)
    assert (found.source, found.result, found.worker) == ("reused", {"a": 1}, "w-1")
    assert (found.execution_id, found.runs, found.cause) == (claim.execution_id, 1, "first")
    assert claim.execution_id.startswith(f"{claim.token}-")
    assert claim.task == task


def test_the_worker_of_a_claim_is_the_contexts_unless_named(guard, hand, task):
    with worker("w-context"), agent("writer"):
        hand.claim(task)
        hand.claim(Task.of("t", {"n": 2}), "w-named")
    assert {(line.worker, line.agent) for line in guard.ledger.lines()} == {
        ("w-context", "writer"),
        ("w-named", "writer"),
    }


@pytest.mark.parametrize("value", [None, 0, "", [], False, {}], ids=repr)
def test_a_falsy_result_is_kept_by_hand(hand, task, value):
    hand.claim(task).complete(value)
    found = hand.peek(task)
    assert found is not None
    assert (found.result, type(found.result)) == (value, type(value))


def test_a_guarded_call_reuses_what_was_completed_by_hand(guard, hand, shape, task):
    hand.claim(task).complete("by hand")
    assert shape.guarded(guard, lambda n: "executed", task_type="t")(1) == "by hand"


def test_a_released_claim_lets_the_next_one_retry(guard, hand, task):
    first = hand.claim(task)
    assert first.release() is False
    second = hand.claim(task)
    assert second.token > first.token
    assert second.idempotency_key == first.idempotency_key
    second.complete("value")
    assert [(line.cause, line.status) for line in guard.ledger.executions(ONE)] == [
        ("first", "failed"),
        ("retry", "ok"),
    ]


def test_a_claim_by_hand_is_renewed_by_hand(guard_of, hand_of, task, clock):
    hand = hand_of(guard_of(lease=10))
    claim = hand.claim(task)
    clock.advance(9)
    assert claim.renew() == 10.0
    clock.advance(9)
    assert hand.claim(task) is None
    clock.advance(2)
    successor = hand.claim(task, "w-2")
    assert successor is not None
    with pytest.raises(errors.LeaseLostError) as caught:
        claim.renew()
    assert (caught.value.execution_id, caught.value.fingerprint) == (claim.execution_id, ONE)
    assert claim.complete("stale") is False
    assert successor.complete("fresh") is True
    assert hand.peek(task).result == "fresh"


def test_a_claim_is_not_renewed_past_its_longest_run(guard_of, hand_of, task, clock):
    hand = hand_of(guard_of(lease=10, max_run=15))
    claim = hand.claim(task)
    clock.advance(9)
    assert claim.renew() == 6.0
    clock.advance(6)
    with pytest.raises(errors.LeaseLostError):
        claim.renew()


def test_a_late_completion_is_kept_where_nobody_took_over(guard_of, hand_of, task, clock):
    guard = guard_of(lease=10)
    claim = hand_of(guard).claim(task)
    clock.advance(11)
    assert claim.complete("late") is True
    assert guard.peek(task).result == "late"


def test_a_completion_has_its_usage_and_its_cost(guard_of, hand_of, task):
    guard = guard_of(pricer={"m": {"input": "3", "output": "15"}})
    hand = hand_of(guard)
    hand.claim(task).complete("a", usage=Usage(input_tokens=1000, output_tokens=0, model="m"))
    found = hand.peek(task)
    assert (found.usage.input_tokens, found.cost) == (1000, Decimal("0.003"))
    other = Task.of("t", {"n": 2})
    hand.claim(other).complete("a", usage={"input_tokens": 5})
    assert guard.ledger.task_type_summary("t")["input_tokens"] == 1005


def test_a_claim_ends_once(guard, hand, task):
    claim = hand.claim(task)
    assert claim.complete("first") is True
    assert claim.complete("second") is False
    assert claim.release() is False
    with pytest.raises(errors.LeaseLostError, match="it has ended"):
        claim.renew()
    assert hand.peek(task).result == "first"
    assert guard.ledger.runs(ONE) == 1


def test_a_result_that_cannot_be_kept_is_told(guard, hand, task, warned):
    claim = hand.claim(task)
    claim.complete(object())
    (told,) = warned()
    assert f"t [{ONE[:16]}]" in told
    assert hand.claim(task) is None
    with pytest.raises(errors.ResultUnavailableError):
        hand.peek(task)


def test_a_completion_that_the_store_cannot_be_told_is_told_later(guard_of, hand_of, tapped, task):
    guard = guard_of(store=tapped)
    claim = hand_of(guard).claim(task)
    tapped.down()
    assert claim.complete("value") is False
    tapped.up()
    assert guard.engine.backlog.settle()
    assert guard.peek(task).result == "value"


def test_there_is_no_claim_without_a_store(guard_of, hand_of, tapped, task):
    for policy in ("raise", "run"):
        hand = hand_of(guard_of(store=tapped, on_store_error=policy))
        tapped.down()
        for ask in (hand.claim, hand.peek, hand.forget):
            with pytest.raises(errors.StoreUnavailableError):
                ask(task)
        with pytest.raises(errors.StoreUnavailableError):
            hand.resolve(task, 1)


def test_a_claim_while_the_effect_is_unknown(guard_of, hand_of, task, clock):
    guard = guard_of(lease=10, on_lost="raise")
    hand = hand_of(guard)
    hand.claim(task, "w-1")
    clock.advance(11)
    with pytest.raises(errors.UnknownOutcomeError, match="w-1"):
        hand.claim(task, "w-2")
    assert guard_of().claim(task) is not None


def test_a_task_of_a_call_with_an_explicit_key_has_its_payload(guard, hand, shape):
    executed = shape.guarded(guard, lambda to, n: n, task_type="t", key=lambda b: b["to"])
    guarded = getattr(executed, "guarded", executed)
    assert hand.claim(guard.task_of(guarded, "a", 1)) is not None
    assert hand.claim(guard.task_of(guarded, "a", 1)) is None
    with pytest.raises(errors.KeyConflictError):
        hand.claim(guard.task_of(guarded, "a", 2))
    with pytest.raises(errors.KeyConflictError):
        executed("a", 2)


def test_a_guarded_call_waits_for_a_claim_by_hand(guard_of, tapped, shape, crew, until, task):
    guard = guard_of(store=tapped)
    claim = guard.claim(task)
    call = crew.start(shape.guarded(guard, lambda n: "executed", task_type="t"), 1)
    until(lambda: tapped.parked == 1)
    claim.complete("by hand")
    assert call.result(SOON) == "by hand"


def test_what_is_no_task_is_refused(guard):
    for ask in (guard.claim, guard.peek, guard.forget, lambda t: guard.resolve(t, 1)):
        for bad in ("t", None, {"n": 1}):
            with pytest.raises(errors.ConfigurationError, match="Task"):
                ask(bad)


# --- results ---------------------------------------------------------------------------------------


def test_peek_counts_nothing(guard, hand, task):
    assert hand.peek(task) is None
    hand.claim(task).complete("a")
    with capture() as calls:
        hand.peek(task)
    assert calls == []
    summary = guard.ledger.task_type_summary("t")
    assert (summary["calls"], summary["reused"]) == (1, 0)


def test_there_is_no_result_in_time(hand, task):
    assert hand.wait_result(task, 0) is None
    assert hand.wait_result(task, 0.05) is None
    hand.claim(task)
    assert hand.wait_result(task, 0.05) is None


def test_a_result_is_waited_for(guard_of, hand_of, tapped, crew, until, task):
    guard = guard_of(store=tapped)
    hand = hand_of(guard)
    waiter = crew.start(hand.wait_result, task, SOON)
    until(lambda: tapped.parked == 1)
    claim = guard.claim(task, "w-1")
    claim.complete("value", usage=Usage(input_tokens=5))
    found = waiter.result(SOON)
    assert (found.source, found.result, found.worker) == ("reused", "value", "w-1")
    assert found.usage == Usage(input_tokens=5)


def test_a_wait_outlasts_a_holder_that_fails(guard_of, hand_of, tapped, crew, until, task):
    guard = guard_of(store=tapped)
    first = guard.claim(task)
    waiter = crew.start(hand_of(guard).wait_result, task, SOON)
    until(lambda: tapped.parked == 1)
    first.release()
    second = guard.claim(task)
    second.complete("second")
    assert waiter.result(SOON).result == "second"


@pytest.mark.parametrize("bad", [-1, "5", True])
def test_a_timeout_is_seconds(hand, task, bad):
    with pytest.raises(errors.ConfigurationError, match="timeout="):
        hand.wait_result(task, bad)


# --- orders ----------------------------------------------------------------------------------------


def test_forget_drops_the_result(guard, hand, task):
    hand.claim(task).complete("a")
    hand.forget(task)
    assert hand.peek(task) is None
    assert hand.claim(task) is not None
    assert [line.cause for line in guard.ledger.executions(ONE)] == ["first", "forced"]


def test_forget_drops_a_claim_and_its_holder_learns_of_it(hand, task):
    first = hand.claim(task)
    hand.forget(task)
    second = hand.claim(task)
    assert second.token > first.token
    assert second.idempotency_key != "" != first.idempotency_key
    with pytest.raises(errors.LeaseLostError):
        first.renew()
    assert first.complete("stale") is False
    assert second.complete("fresh") is True
    assert hand.peek(task).result == "fresh"


def test_forgetting_what_there_is_not_does_nothing(hand, task):
    hand.forget(task)
    assert hand.claim(task) is not None


def test_resolve_keeps_a_result_that_is_known_from_elsewhere(guard, hand, shape, task):
    with worker("w-1"):
        hand.resolve(task, {"from": "elsewhere"})
    found = hand.peek(task)
    assert (found.result, found.worker, found.runs) == ({"from": "elsewhere"}, "w-1", 0)
    assert shape.guarded(guard, lambda n: "executed", task_type="t")(1) == {"from": "elsewhere"}
    assert guard.ledger.runs(ONE) == 0


def test_resolve_is_refused_while_a_fresh_result_is_kept(guard_of, hand_of, task, clock):
    hand = hand_of(guard_of(ttl=60, lease=10))
    hand.claim(task, "w-1").complete("first")
    with pytest.raises(errors.IdemguardError, match="w-1") as caught:
        hand.resolve(task, "other")
    assert "forget()" in str(caught.value)
    assert (caught.value.task_type, caught.value.fingerprint) == ("t", ONE)
    assert hand.peek(task).result == "first"
    clock.advance(61)
    hand.resolve(task, "other")
    assert hand.peek(task).result == "other"


def test_resolve_ends_a_wait(guard_of, hand_of, tapped, shape, crew, until, task):
    guard = guard_of(store=tapped)
    claim = guard.claim(task)
    call = crew.start(shape.guarded(guard, lambda n: "executed", task_type="t"), 1)
    until(lambda: tapped.parked == 1)
    hand_of(guard).resolve(task, "known")
    assert call.result(SOON) == "known"
    assert claim.complete("own") is False


def test_what_cannot_be_stored_resolves_nothing(hand, task):
    with pytest.raises(errors.ConfigurationError, match="object"):
        hand.resolve(task, object())
    assert hand.peek(task) is None


# --- the rest --------------------------------------------------------------------------------------


def test_the_ledger_of_a_guard(guard, hand, task):
    hand.claim(task, "w-1").complete("a")
    ledger = hand.ledger
    assert ledger.runs(ONE) == 1
    assert ledger.workers(ONE) == ["w-1"]
    assert [line.worker for line in ledger.executions(ONE)] == ["w-1"]
    assert [line.worker for line in ledger.lines()] == ["w-1"]
    assert ledger.record(ONE, "w-2") == 1
    assert ledger.task_type_summary("t")["runs"] == 1
    assert (ledger.duplication_rate(), ledger.doubled_share()) == (0.0, 0.0)


def test_a_closed_guard_opens_anew(hand, task):
    hand.claim(task).complete("a")
    hand.close()
    assert hand.peek(task).result == "a"
    hand.close()


def test_everything_by_hand_can_be_awaited():
    names = {"claim", "wait_result", "peek", "forget", "resolve", "ledger", "close"}
    guard = Guard(store="memory://")
    assert names == {name for name in dir(guard.aio) if not name.startswith("_")}
    assert names <= {name for name in dir(guard) if not name.startswith("_")}
    for name in names - {"ledger"}:
        awaited, plain = getattr(guard.aio, name), getattr(guard, name)
        assert inspect.iscoroutinefunction(awaited)
        assert list(inspect.signature(awaited).parameters) == list(
            inspect.signature(plain).parameters
        )


def test_a_claim_of_a_caller_that_is_cancelled_is_given_back(guard_of, tapped, task):
    guard = guard_of(store=tapped)

    async def main(turns):
        claiming = asyncio.create_task(guard.aio.claim(task))
        for _ in range(turns):
            await asyncio.sleep(0)
        claiming.cancel()
        await asyncio.wait([claiming])
        if not claiming.cancelled():
            await claiming.result().release()
        claim = await guard.aio.claim(task)
        assert claim is not None
        await claim.release()

    for turns in range(6):
        asyncio.run(main(turns))


def test_a_wait_that_is_cancelled_disturbs_nobody(guard_of, tapped, task):
    guard = guard_of(store=tapped)

    async def main():
        claim = await guard.aio.claim(task)
        waiters = [asyncio.create_task(guard.aio.wait_result(task, SOON)) for _ in range(3)]
        while tapped.parked < 3:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.001)
        waiters[0].cancel()
        await asyncio.wait([waiters[0]])
        await claim.complete("value")
        return [(await waiter).result for waiter in waiters[1:]]

    assert asyncio.run(main()) == ["value", "value"]


def test_plain_and_awaited_hands_share_the_store(guard, task):
    claim = guard.claim(task)

    async def main():
        assert await guard.aio.claim(task) is None
        waiting = asyncio.create_task(guard.aio.wait_result(task, SOON))
        await asyncio.sleep(0)
        threading.Thread(target=claim.complete, args=("value",)).start()
        return (await waiting).result

    assert asyncio.run(main()) == "value"

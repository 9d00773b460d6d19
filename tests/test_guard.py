"""The life of a call, stepped by hand: what each flow wishes, and what it makes of the answers."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from idemguard.claim import (
    Begin,
    Claimed,
    Complete,
    Conflict,
    Done,
    Ended,
    InFlight,
    Over,
    Release,
    Renew,
    Renewed,
    Replay,
    Unknown,
    Withdraw,
)
from idemguard.codec import Value
from idemguard.errors import (
    KeyConflictError,
    StoreError,
    StoreUnavailableError,
    UnknownOutcomeError,
    WaitTimeoutError,
)
from idemguard.guard import (
    NOT_KEPT,
    Admitted,
    Ask,
    Await,
    Execute,
    Look,
    OutOfScope,
    Owe,
    Pause,
    Policy,
    Ran,
    Refused,
    Reply,
    Rest,
    admit,
    call,
    came_to,
    hold,
    reach,
    settle,
    take,
)
from idemguard.record import Address, Caller, Cause, Claim, Execution, Mode, Record, Result, Status
from idemguard.usage import NOTHING, Spent, Usage

ADDRESS = Address("tests", "0123456789abcdef" * 4)
ME, OTHER = Caller("job", "me"), Caller("job", "other")
SPENT = Spent(1, Usage(input_tokens=5))
DOWN = StoreUnavailableError("down")


def claim(
    nonce: str = "n", cause: Cause = Cause.FIRST, *, token: int = 7, holds: bool = True
) -> Claim:
    return Claim(ADDRESS, token, nonce, cause, token, 1000, holds, ME)


HOLDER = Claim(ADDRESS, 3, "h", Cause.FIRST, 3, 900, holds=True, caller=OTHER)
NEXT = HOLDER._replace(token=4, nonce="i")
RESULT = Result(HOLDER, Value("json", b"1\n"), SPENT, at=1000, until=2000, gone=2000)


def asks(**policy: Any) -> Ask:
    return Ask(ADDRESS, ME, "n", Policy(**policy), "digest")


def begins(flow: Generator[Any, Any, Any]) -> Begin:
    wish = next(flow)
    assert isinstance(wish, Begin)
    return wish


def encode(value: Any) -> Value:
    return Value("json", repr(value).encode())


def calls(ask: Ask) -> Generator[Any, Any, Reply]:
    return call(ask, encode, lambda value: value == "not mine")


def returned(flow: Generator[Any, Any, Any], answer: Any = None) -> Any:
    with pytest.raises(StopIteration) as end:
        flow.send(answer)
    return end.value.value


def in_flight(holder: Claim = HOLDER, left: int = 500, since: int = 1000) -> InFlight:
    return InFlight(holder, left, since, runs=1)


class Interrupted(BaseException):
    pass


# --- call: executed --------------------------------------------------------------------------------------


def executing(ask: Ask, granted: Claim) -> Generator[Any, Any, Reply]:
    """A call whose body runs."""
    flow = calls(ask)
    begins(flow)
    assert flow.send(Claimed(granted, runs=1)) == Execute(granted)
    return flow


def test_a_call_begins_by_its_policy() -> None:
    policy = Policy(lease=9, mode=Mode.OBSERVE, rerun_lost=False, retention=77)
    asked = begins(calls(Ask(ADDRESS, ME, "n", policy, "digest")))
    assert asked == Begin(
        ADDRESS,
        "n",
        ME,
        9,
        "digest",
        Mode.OBSERVE,
        rerun_lost=False,
        retention=77,
        brief=policy.observes,
    )


def test_a_call_executes_and_its_result_is_kept() -> None:
    flow = executing(asks(ttl=5, lease=6, retention=8), claim())
    end = flow.send(Ran("value", spent=SPENT))
    assert end == Complete(claim(), encode("value"), 5, 6, SPENT, 8)
    reply = returned(flow, Ended(kept=True, lost=False, runs=2))
    assert reply == Reply("executed", "value", claim=claim(), spent=SPENT, runs=2)


def test_a_falsy_value_is_a_result() -> None:
    for value in (None, 0, "", [], False):
        flow = executing(asks(), claim())
        end = flow.send(Ran(value))
        assert isinstance(end, Complete)
        assert end.value == encode(value)


def test_a_leader_that_lost_its_lease_gets_its_value() -> None:
    flow = executing(asks(), claim())
    flow.send(Ran("value"))
    reply = returned(flow, Ended(kept=False, lost=True, runs=2))
    assert (reply.source, reply.value, reply.lost) == ("executed", "value", True)


def test_an_execution_beside_a_leader_is_a_fallback() -> None:
    flow = executing(asks(), claim(cause=Cause.FALLBACK))
    flow.send(Ran("value"))
    assert returned(flow, Ended(kept=True, lost=False, runs=2)).source == "fallback"


def test_an_execution_without_the_claim_keeps_no_result() -> None:
    observed = claim(cause=Cause.OBSERVED, holds=False)
    flow = calls(asks(mode=Mode.OBSERVE))
    begins(flow)
    flow.send(Claimed(observed, runs=2, conflict=True))
    end = flow.send(Ran("value"))
    assert end.value == NOT_KEPT
    reply = returned(flow, Ended(kept=False, lost=False, runs=2))
    assert (reply.source, reply.value, reply.conflict) == ("executed", "value", True)


@pytest.mark.parametrize(
    ("error", "source", "status"),
    [
        (ValueError("no"), "failed", Status.FAILED),
        (KeyboardInterrupt(), "failed", Status.FAILED),
        (OutOfScope(), "declined", Status.DECLINED),
        (UnknownOutcomeError("who knows"), "failed", Status.LOST),
    ],
    ids=["error", "interrupt", "out of scope", "unknown"],
)
def test_a_body_that_raises_releases_its_claim(
    error: BaseException, source: str, status: Status
) -> None:
    flow = executing(asks(retention=8), claim())
    assert flow.send(Ran(error=error, spent=SPENT)) == Release(claim(), status, SPENT, 8)
    reply = returned(flow, Ended(kept=False, lost=False, runs=1))
    assert reply.source == source
    assert reply.error is error
    assert reply.spent == SPENT


def test_a_value_that_hands_the_task_back_is_declined() -> None:
    flow = executing(asks(), claim())
    assert flow.send(Ran("not mine")) == Release(claim(), Status.DECLINED)
    reply = returned(flow, Ended(kept=False, lost=False, runs=1))
    assert (reply.source, reply.value) == ("declined", "not mine")


def test_a_store_that_is_down_at_the_end_costs_no_value() -> None:
    flow = executing(asks(), claim())
    end = flow.send(Ran("value"))
    assert flow.throw(DOWN) == Owe(end)
    reply = returned(flow)
    assert (reply.source, reply.value, reply.error) == ("executed", "value", None)
    assert reply.trouble is DOWN
    assert reply.runs is None


def test_an_interruption_of_the_telling_is_raised_when_it_is_told() -> None:
    flow = executing(asks(), claim())
    end = flow.send(Ran("value"))
    stop = Interrupted()
    assert flow.throw(stop) == end  # once more: it may come twice
    reply = returned(flow, Ended(kept=True, lost=False, runs=1))
    assert reply.error is stop
    assert reply.value == "value"


def test_a_body_that_never_started_leaves_the_giving_back_to_the_driver() -> None:
    flow = executing(asks(), claim())
    with pytest.raises(Interrupted):
        flow.throw(Interrupted())


def test_a_dropped_call_wishes_nothing_more() -> None:
    flow = executing(asks(), claim())
    flow.close()  # a RuntimeError if it wished
    flow = calls(asks())
    begins(flow)
    flow.close()
    flow = executing(asks(), claim())
    flow.send(Ran("value"))
    flow.close()
    with pytest.raises(StopIteration):
        next(flow)


# --- call: reused, refused ---------------------------------------------------------------------------------


def test_a_kept_result_is_reused() -> None:
    flow = calls(asks())
    begins(flow)
    reply = returned(flow, Replay(RESULT, runs=1))
    assert reply == Reply("reused", claim=HOLDER, result=RESULT, spent=SPENT, runs=1)


def test_a_refusal_is_told_in_the_reply() -> None:
    flow = calls(asks(rerun_lost=False))
    begins(flow)
    leaving = flow.send(Unknown(HOLDER, runs=3))
    assert leaving == Withdraw(ADDRESS, "n", ME, "refused", Policy().retention)
    reply = returned(flow, Done())
    assert (reply.source, reply.runs) == ("refused", 3)
    assert isinstance(reply.error, UnknownOutcomeError)
    assert (reply.error.worker, reply.error.execution_id) == ("other", "3-h")
    assert "job [0123456789abcdef]" in str(reply.error)


def test_a_key_of_another_payload_is_refused() -> None:
    flow = calls(asks())
    begins(flow)
    flow.send(Conflict(runs=1))
    reply = returned(flow, Done())
    assert isinstance(reply.error, KeyConflictError)
    assert reply.error.fingerprint == ADDRESS.fingerprint


def test_a_cancelled_call_is_told_failed() -> None:
    flow = calls(asks())
    begins(flow)
    assert flow.throw(Interrupted()) == Withdraw(ADDRESS, "n", ME, "failed", Policy().retention)
    with pytest.raises(Interrupted):
        flow.send(Done())


def test_a_call_that_ends_before_its_body_was_refused_or_failed() -> None:
    assert came_to(Interrupted()) == came_to(ValueError()) == "failed"
    assert came_to(DOWN) == came_to(Refused(DOWN, 0, None)) == "refused"


def test_a_call_that_may_not_do_without_the_store_is_refused() -> None:
    flow = calls(asks())
    begins(flow)
    assert flow.throw(DOWN) == Owe(Withdraw(ADDRESS, "n", ME, "refused", Policy().retention))
    reply = returned(flow)
    assert (reply.source, reply.error, reply.trouble) == ("refused", DOWN, DOWN)


# --- call: unguarded ---------------------------------------------------------------------------------------


def test_a_call_runs_unguarded_where_it_may() -> None:
    flow = calls(asks(run_unguarded=True))
    begins(flow)
    owed = flow.throw(DOWN)
    assert owed == Owe(Withdraw(ADDRESS, "n", ME, None, Policy().retention))
    wish = flow.send(None)
    assert isinstance(wish, Execute)
    bare = wish.claim
    assert (bare.token, bare.nonce, bare.cause, bare.holds) == (0, "n.u", Cause.UNGUARDED, False)
    owed = flow.send(Ran("value", spent=SPENT, took=40))
    told = bare._replace(started=-40)  # by the store's clock, when that is known
    assert owed == Owe(Complete(told, NOT_KEPT, Policy().ttl, Policy().lease, SPENT))
    reply = returned(flow)
    assert (reply.source, reply.value, reply.trouble) == ("unguarded", "value", DOWN)
    assert reply.runs is None


def test_an_unguarded_failure_is_told_too() -> None:
    flow = calls(asks(run_unguarded=True))
    begins(flow)
    flow.throw(DOWN)
    flow.send(None)
    owed = flow.send(Ran(error=ValueError("no"), took=40))
    assert isinstance(owed, Owe)
    assert isinstance(owed.command, Release)
    assert owed.command.claim.started == -40
    assert returned(flow).source == "failed"


def test_a_store_that_answers_wrongly_is_no_leave_to_do_without() -> None:
    flow = calls(asks(run_unguarded=True))
    begins(flow)
    wrong = StoreError("wrong password")
    flow.throw(wrong)
    assert returned(flow).error is wrong


def test_observe_does_without_any_store() -> None:
    flow = admit(asks(mode=Mode.OBSERVE, observes=True))
    assert begins(flow).brief
    wrong = StoreError("wrong password")
    assert isinstance(flow.throw(wrong), Owe)
    assert returned(flow) == Admitted(None, 0, wrong)


# --- admit: waiting ----------------------------------------------------------------------------------------


def test_a_waiter_waits_for_the_lease_and_asks_again() -> None:
    flow = admit(asks())
    first = begins(flow)
    assert (first.since, first.beside) == (None, None)
    assert flow.send(in_flight(left=500)) == Await(ADDRESS, "3-h", 500)
    again = flow.send(500)
    assert (again.since, again.beside) == (1000, None)
    assert flow.send(in_flight(left=100, since=1000)) == Await(ADDRESS, "3-h", 100)
    flow.send(60)
    assert returned(flow, Replay(RESULT, 1)) == Admitted(Replay(RESULT, 1), waited=560)


def test_patience_ends_and_falls_back() -> None:
    flow = admit(asks(wait_timeout=300))
    begins(flow)
    assert flow.send(in_flight(left=200)) == Await(ADDRESS, "3-h", 200)  # the lease ends first
    assert flow.send(200).beside is None
    assert flow.send(in_flight(left=500)) == Await(ADDRESS, "3-h", 100)  # what is left of it
    asked = flow.send(100)
    assert asked.beside == "3-h"
    beside = Claimed(claim(cause=Cause.FALLBACK), runs=2)
    assert returned(flow, beside) == Admitted(beside, waited=300)


def test_who_finds_the_place_beside_the_leader_taken_waits() -> None:
    flow = admit(asks(wait_timeout=0))
    begins(flow)
    asked = flow.send(in_flight(left=500))
    assert (asked.beside, asked.since) == ("3-h", 1000)
    assert flow.send(in_flight(left=400)) == Await(ADDRESS, "3-h", 400)
    assert flow.send(400).beside == "3-h"


def test_patience_starts_anew_with_a_new_leader() -> None:
    flow = admit(asks(wait_timeout=300))
    begins(flow)
    flow.send(in_flight())
    assert flow.send(300).beside == "3-h"
    assert flow.send(in_flight(NEXT)) == Await(ADDRESS, "4-i", 300)
    assert flow.send(10).beside is None


def test_patience_ends_and_raises() -> None:
    flow = admit(asks(wait_timeout=300, fall_back=False))
    begins(flow)
    flow.send(in_flight())
    assert flow.send(300).beside is None
    leaving = flow.send(in_flight())
    assert leaving == Withdraw(ADDRESS, "n", ME, "refused", Policy().retention)
    with pytest.raises(Refused) as refused:
        flow.send(Done())
    assert isinstance(refused.value.error, WaitTimeoutError)
    assert (refused.value.waited, refused.value.runs) == (300, 1)
    assert refused.value.error.worker == "other"
    assert "0.3 s" in str(refused.value.error)


def test_a_claim_that_came_too_late_is_asked_for_anew() -> None:
    flow = admit(asks())
    begins(flow)
    flow.send(in_flight())
    flow.send(500)
    assert flow.send(Over()) == Withdraw(ADDRESS, "n", ME, None, Policy().retention)
    again = flow.send(Done())
    assert (again.nonce, again.since) == ("n.1", 1000)
    flow.send(Over())
    assert flow.send(Done()).nonce == "n.2"
    granted = Claimed(claim("n.2"), runs=1)
    assert returned(flow, granted) == Admitted(granted, waited=500)


def test_a_cancelled_waiter_gives_back_what_it_may_have_got() -> None:
    flow = admit(asks())
    begins(flow)
    flow.send(in_flight())
    stop = Interrupted()
    assert flow.throw(stop) == Withdraw(ADDRESS, "n", ME, "failed", Policy().retention)
    with pytest.raises(Interrupted):
        flow.send(Done())


def test_a_waiter_that_leaves_a_store_that_is_down_owes_it() -> None:
    flow = admit(asks())
    begins(flow)
    leaving = flow.throw(Interrupted())
    assert flow.throw(DOWN) == Owe(leaving)
    with pytest.raises(Interrupted):
        flow.send(None)


# --- admit: a store that is away while one waits -----------------------------------------------------------


def away_while_waiting(**policy: Any) -> Generator[Any, Any, Any]:
    """A waiter whose store does not answer any more; it has just looked at the clock: 100."""
    flow = admit(asks(lease=300, **policy))
    begins(flow)
    flow.send(in_flight())
    flow.send(40)
    assert flow.throw(DOWN) == Rest(0)
    assert flow.send(100) == Rest(30)
    return flow


def test_a_waiter_outlasts_a_store_that_is_away_for_less_than_a_lease() -> None:
    flow = away_while_waiting()
    assert isinstance(flow.send(130), Begin)
    assert flow.throw(DOWN) == Rest(30)
    assert isinstance(flow.send(160), Begin)
    assert flow.send(in_flight()) == Await(ADDRESS, "3-h", 500)
    assert isinstance(flow.send(0), Begin)  # it is back, and what it was away counts no more
    assert flow.throw(DOWN) == Rest(0)
    flow.send(1000)
    assert isinstance(flow.send(1030), Begin)
    assert returned(flow, Replay(RESULT, 1)) == Admitted(Replay(RESULT, 1), waited=40)


def test_a_store_that_is_away_for_a_whole_lease_is_down() -> None:
    flow = away_while_waiting()
    assert isinstance(flow.send(399), Begin)
    flow.throw(DOWN)
    assert flow.send(400) == Owe(Withdraw(ADDRESS, "n", ME, "refused", Policy().retention))
    with pytest.raises(StoreUnavailableError):
        flow.send(None)


def test_a_store_that_is_away_longer_than_ones_patience_is_down() -> None:
    flow = away_while_waiting(wait_timeout=140, run_unguarded=True)
    assert isinstance(flow.send(199), Begin)
    flow.throw(DOWN)
    assert isinstance(flow.send(200), Owe)
    assert returned(flow) == Admitted(None, 40, DOWN)


def test_a_store_that_answers_a_waiter_wrongly_is_not_outlasted() -> None:
    flow = admit(asks(run_unguarded=True))
    begins(flow)
    flow.send(in_flight())
    assert isinstance(flow.throw(StoreError("wrong password")), Owe)
    with pytest.raises(StoreError, match="password"):
        flow.send(None)


# --- settle ------------------------------------------------------------------------------------------------


def test_an_end_is_told() -> None:
    end, told = Release(claim()), Ended(kept=False, lost=False, runs=1)
    flow = settle(end)
    assert next(flow) == end
    assert returned(flow, told) == (told, None, None)


def test_an_interrupted_end_that_finds_the_store_down_is_owed() -> None:
    end, stop = Release(claim()), Interrupted()
    flow = settle(end)
    next(flow)
    assert flow.throw(stop) == end
    assert flow.throw(DOWN) == Owe(end)
    assert returned(flow) == (None, DOWN, stop)


def test_the_end_of_an_unguarded_execution_is_owed_at_once() -> None:
    end = Release(claim(cause=Cause.UNGUARDED, holds=False))
    flow = settle(end)
    assert next(flow) == Owe(end)
    assert returned(flow) == (None, None, None)


# --- take --------------------------------------------------------------------------------------------------


def test_a_claim_is_taken_by_hand() -> None:
    flow = take(asks(lease=9))
    assert begins(flow).lease == 9
    assert returned(flow, Claimed(claim(), runs=1)) == Claimed(claim(), runs=1)


@pytest.mark.parametrize("answer", [Replay(RESULT, 1), in_flight()], ids=["result", "leader"])
def test_no_claim_where_there_is_a_result_or_a_leader(answer: object) -> None:
    flow = take(asks())
    begins(flow)
    assert returned(flow, answer) is answer


@pytest.mark.parametrize(
    ("answer", "error"),
    [(Unknown(HOLDER, 1), UnknownOutcomeError), (Conflict(1), KeyConflictError)],
    ids=["unknown", "conflict"],
)
def test_a_claim_by_hand_is_refused_with_an_error(answer: object, error: type) -> None:
    flow = take(asks())
    begins(flow)
    with pytest.raises(error):
        flow.send(answer)


def test_a_claim_by_hand_that_came_too_late_is_asked_for_anew() -> None:
    flow = take(asks())
    begins(flow)
    assert flow.send(Over()) == Withdraw(ADDRESS, "n", ME, None, Policy().retention)
    assert flow.send(Done()).nonce == "n.1"


def test_taking_with_the_store_down_owes_the_withdrawal() -> None:
    flow = take(asks())
    begins(flow)
    assert flow.throw(DOWN) == Owe(Withdraw(ADDRESS, "n", ME, None, Policy().retention))
    with pytest.raises(StoreUnavailableError):
        flow.send(None)


def test_who_is_interrupted_while_taking_gives_back() -> None:
    flow = take(asks())
    begins(flow)
    leaving = flow.throw(Interrupted())
    assert leaving == Withdraw(ADDRESS, "n", ME, None, Policy().retention)
    with pytest.raises(Interrupted):
        flow.send(Done())


def test_who_is_interrupted_while_taking_from_a_store_that_goes_down_owes_it() -> None:
    flow = take(asks())
    begins(flow)
    leaving = flow.throw(Interrupted())
    assert flow.throw(DOWN) == Owe(leaving)
    with pytest.raises(Interrupted):
        flow.send(None)


def test_a_dropped_taking_wishes_nothing_more() -> None:
    flow = take(asks())
    begins(flow)
    flow.close()
    with pytest.raises(StopIteration):
        next(flow)


# --- reach -------------------------------------------------------------------------------------------------


def test_a_result_that_is_there_is_reached_at_once() -> None:
    flow = reach(ADDRESS, 0, ME, "n")
    assert next(flow) == Look(ADDRESS)
    assert returned(flow, (Record(result=RESULT, runs=2), 1500)) == (RESULT, 2)


def test_nothing_is_reached_with_no_time_left() -> None:
    flow = reach(ADDRESS, 0, ME, "n")
    next(flow)
    assert returned(flow, (Record(), 1000)) is None


def test_a_result_is_waited_for_though_nobody_executes_yet() -> None:
    flow = reach(ADDRESS, 100, ME, "n")
    next(flow)
    assert flow.send((Record(), 1000)) == Await(ADDRESS, None, 100)
    assert flow.send(60) == Withdraw(ADDRESS, "n", ME)  # the hint was perhaps another's
    assert flow.send(Done()) == Look(ADDRESS)
    assert flow.send((Record(), 1060)) == Await(ADDRESS, None, 40)
    flow.send(40)
    assert returned(flow, (Record(), 1100)) is None


def test_a_result_is_waited_for_as_long_as_its_leader_has_a_lease() -> None:
    line = Execution(HOLDER, until=1030)
    leading = Record(leader=HOLDER.id, lines=(line,))
    flow = reach(ADDRESS, 100, ME, "n")
    next(flow)
    assert flow.send((leading, 1000)) == Await(ADDRESS, HOLDER.id, 30)
    flow.send(20)
    flow.send(Done())
    stale = RESULT._replace(at=1010, until=1010)  # ttl 0: for those who waited
    assert returned(flow, (Record(result=stale, runs=1), 1020)) == (stale, 1)


def test_a_result_that_was_over_before_one_asked_is_none() -> None:
    flow = reach(ADDRESS, 0, ME, "n")
    next(flow)
    stale = RESULT._replace(until=1000, gone=9000)
    assert returned(flow, (Record(result=stale), 1500)) is None


# --- hold --------------------------------------------------------------------------------------------------


def test_the_heart_beats_at_a_third_of_the_lease() -> None:
    lost: list[str] = []
    flow = hold(claim(), Policy(lease=30, retention=8), 500, lambda: lost.append("lost"))
    assert next(flow) == Pause(10)
    assert flow.send(SPENT) == Renew(claim(), 30, 500, SPENT, 8, brief=True)
    assert flow.send(Renewed(30, owns=True)) == Pause(10)
    assert lost == []


def test_a_hiccup_of_the_store_is_tried_again_soon() -> None:
    flow = hold(claim(), Policy(lease=30), 500, lambda: None)
    next(flow)
    flow.send(NOTHING)
    assert flow.throw(DOWN) == Pause(3)
    flow.send(NOTHING)
    assert flow.send(Renewed(30, owns=True)) == Pause(10)


def test_the_beat_goes_on_for_a_claim_that_was_forgotten() -> None:
    lost: list[str] = []
    flow = hold(claim(), Policy(lease=30), 500, lambda: lost.append("lost"))
    next(flow)
    flow.send(NOTHING)
    assert flow.send(Renewed(30, owns=False)) == Pause(10)
    assert lost == ["lost"]


def test_who_never_held_the_claim_does_not_lose_it() -> None:
    lost: list[str] = []
    bare = claim(cause=Cause.OBSERVED, holds=False)
    flow = hold(bare, Policy(lease=30), 500, lambda: lost.append("lost"))
    next(flow)
    flow.send(NOTHING)
    assert flow.send(Renewed(30, owns=False)) == Pause(10)
    assert lost == []


def test_the_beat_ends_with_the_claim() -> None:
    lost: list[str] = []
    flow = hold(claim(), Policy(lease=30), 500, lambda: lost.append("lost"))
    next(flow)
    flow.send(NOTHING)
    assert returned(flow, Over()) is None
    assert lost == ["lost"]


def test_a_command_of_a_claim_goes_where_the_claim_is() -> None:
    value = Value("json", b"1\n")
    ends = (Complete(claim(), value, 5, 6), Release(claim()))
    assert {command.address for command in (Renew(claim(), 5, 6), *ends)} == {ADDRESS}

"""A claim lives as long as its process runs, no longer than is set, and is never doubled meanwhile."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from workers.lab import PATIENCE, Lab, found_a_claim, until
from workers.stores import Watched

from idemguard import Guard, capture, current, record_usage, task_fingerprint
from idemguard.claim import Begin, Claimed, Complete, InFlight, Renew, Replay
from idemguard.errors import LeaseLostError
from idemguard.record import Caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemguard.stores import Store

SLACK = 10.0  # seconds that a machine under load may be late; less than a lease that nobody set


@pytest.fixture
def real(store: Store) -> Store:
    return store


# --- long bodies ---------------------------------------------------------------------------------

# what is executed, its lease: each for six seconds
LONG = {
    "plain": ("sync", [("sleep", 6)], 2.0),
    "coroutine": ("async", [("pause", 6)], 2.0),
    "blocks its loop": ("async", [("sleep", 6)], 2.0),
    "holds the interpreter": ("sync", [("sleep", 1.4), ("hold", 2), ("sleep", 2.6)], 4.5),
    "holds loop and interpreter": ("async", [("sleep", 1.4), ("hold", 2), ("sleep", 2.6)], 4.5),
}


def asking(lab: Lab, key: str, lease: int, ends: Callable[[], bool]) -> list[int]:
    """Ask for a claim all the time, as other callers do; what was left of the lease each time."""
    left = []
    for number in range(10**6):
        ask = Begin(lab.address(key), f"{key}-{number}", Caller("work", "asks"), lease)
        answer = lab.store.perform(ask)
        assert not isinstance(answer, Claimed), f"{key}: its living leader was doubled"
        if isinstance(answer, Replay) or ends():
            return left
        assert isinstance(answer, InFlight)
        left.append(answer.left)
        time.sleep(0.04)
    raise AssertionError


def test_long_bodies_are_executed_once(lab: Lab) -> None:
    leaders = lab.workers(len(LONG))
    for worker, (key, (kind, steps, lease)) in zip(leaders, LONG.items(), strict=True):
        lab.call(worker, key, kind=kind, steps=steps, lease=lease)
    waiters = lab.workers(len(LONG))
    with ThreadPoolExecutor(len(LONG)) as threads:
        asked = {}
        for waiter, (key, (kind, _, lease)) in zip(waiters, LONG.items(), strict=True):
            lab.started(key)
            lab.call(waiter, key, kind=kind, lease=lease)
            ends = threading.Event()
            asked[key] = threads.submit(asking, lab, key, int(lease * 1000), ends.is_set)
        led = {key: worker.end() for key, worker in zip(LONG, leaders, strict=True)}
        waited = {key: worker.end() for key, worker in zip(LONG, waiters, strict=True)}
    for key, (_, _, lease) in LONG.items():
        assert (led[key]["source"], led[key]["lost"]) == ("executed", False), key
        assert waited[key]["source"] == "reused", key
        assert len(lab.starts(key)) == 1, key
        (line,) = lab.lines(key)
        assert (line.status, line.kept) == ("ok", True), key
        assert line.ended - line.started >= 6000 > 1000 * lease, key
        left = asked[key].result()
        assert len(left) > 20, key
        assert 0 < min(left) <= max(left) <= 1000 * lease, key
    assert lab.ledger.totals()["duplicates"] == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_body_that_never_ends_is_renewed_up_to_max_run(lab: Lab, kind: str) -> None:
    stuck, successor = lab.workers(2)
    steps = [("gate", lab.gate("end")), ("check", "end")]
    lab.call(stuck, "stuck", kind=kind, steps=steps, lease=1.2, max_run=1.5)
    started = lab.started("stuck")["at"]
    taken = lab.call(successor, "stuck", lease=0.6, max_run=1.5).end()
    assert (taken["source"], taken["cause"]) == ("executed", "lost")
    second = lab.starts("stuck")[1]
    claimed, again = lab.lines("stuck")
    assert claimed.until - claimed.started == 1500
    assert claimed.until <= again.started
    assert second["at"] - started < 1.5 + SLACK
    lab.open("end")
    late = stuck.end()
    assert (late["source"], late["lost"]) == ("executed", True)
    assert lab.checks("stuck")["end"]["held"] is False
    assert [line.status for line in lab.lines("stuck")] == ["late", "ok"]
    assert len(lab.starts("stuck")) == 2


# --- the leader is killed ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_one_waiter_takes_over_from_a_killed_leader(lab: Lab, kind: str) -> None:
    lease, leader, waiters = 1.5, lab.worker(), lab.workers(3)
    steps = [("usage", [70, 30]), ("gate", lab.gate("never"))]
    lab.call(leader, "killed", kind=kind, steps=steps, lease=lease)
    lab.started("killed")
    for number, waiter in enumerate(waiters):
        waiter.begin(
            "crowd", url=lab.url, log=str(lab.log), key="killed", count=4, lease=lease,
            kind="async" if number else "sync", steps=[["usage", [20, 5]]],
        )  # fmt: skip
    until(lambda: found_a_claim(lab.store) == 12, what="all wait")
    until(lambda: lab.lines("killed")[0].usage, what="a renewal tells the tokens")
    time_of_death = time.time()
    leader.kill()
    told = [outcome for waiter in waiters for outcome in waiter.end()]
    first, second = lab.starts("killed")
    assert second["at"] - time_of_death < lease + SLACK
    assert second["cause"] == "lost"
    assert sorted(outcome["source"] for outcome in told) == ["executed"] + ["reused"] * 11
    assert {outcome["result"]["token"] for outcome in told} == {second["token"]}
    assert first["token"] < second["token"]
    book = lab.worker().do("ledger", url=lab.url, key="killed")
    assert [line["status"] for line in book["lines"]] == ["lost", "ok"]
    assert [line["tokens"] for line in book["lines"]] == [100, 25]
    totals = book["totals"]
    assert (totals["executions"], totals["lost"], totals["duplicates"]) == (2, 1, 1)
    assert (totals["total_tokens"], totals["tasks"]) == (125, 1)
    assert book["duplication_rate"] == 0.5


def test_a_killed_execution_is_told_lost_though_nobody_calls_again(lab: Lab) -> None:
    leader, reader = lab.workers(2)
    steps = [("usage", [70, 30]), ("gate", lab.gate("never"))]
    lab.call(leader, "alone", steps=steps, lease=1.5)
    until(lambda: lab.lines("alone") and lab.lines("alone")[0].usage, what="a renewal")
    assert reader.do("ledger", url=lab.url)["lines"][0]["status"] == "open"
    leader.kill()
    lab.lapsed("alone")
    book = reader.do("ledger", url=lab.url)
    (line,) = book["lines"]
    assert (line["status"], line["tokens"], line["cause"]) == ("lost", 100, "first")
    totals = book["totals"]
    assert (totals["executions"], totals["lost"], totals["total_tokens"]) == (1, 1, 100)
    assert totals["duplicates"] == 0
    again = reader.do("ledger", url=lab.url)["totals"]
    assert again == totals  # it is counted lost once, however often somebody looks


# --- the leader is frozen ------------------------------------------------------------------------


class Frozen:
    """A leader that stands still with its lease past, and a process that may succeed it."""

    def __init__(self, lab: Lab, kind: str, **policy: Any) -> None:
        self.lab = lab
        self.leader, self.other = lab.workers(2)
        self.policy = {"lease": 0.6, "kind": kind} | policy
        steps = [
            ("check", "before"),
            ("usage", [7, 3]),
            ("gate", lab.gate("thaw")),
            ("check", "after"),
        ]
        lab.call(self.leader, "task", steps=steps, **self.policy)
        until(lambda: "before" in lab.checks("task"), what="the leader's body runs")
        self.leader.freeze()
        self.me = lab.lines("task")[0].worker
        lab.lapsed("task")

    def succeed(self) -> dict[str, Any]:
        """Another process calls."""
        return self.lab.call(self.other, "task", **self.policy).end()

    def thaw(self) -> dict[str, Any]:
        """It goes on, and its call ends."""
        self.lab.open("thaw")
        self.leader.thaw()
        return self.leader.end()

    def workers(self) -> list[str]:
        lab = self.lab
        return lab.ledger.workers(lab.fingerprint("task"))

    def told(self) -> list[tuple[str, str, bool]]:
        return [(line.status, line.cause, line.kept) for line in self.lab.lines("task")]


def own_value(outcome: dict[str, Any], start: dict[str, Any]) -> bool:
    """Whether a call got what its own body made."""
    return bool(outcome["result"]["token"] == start["token"] and outcome["source"] == "executed")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_thawed_leader_leaves_its_successors_result(lab: Lab, kind: str) -> None:
    frozen = Frozen(lab, kind)
    successor = frozen.succeed()
    assert (successor["source"], successor["cause"], successor["lost"]) == (
        "executed",
        "lost",
        False,
    )
    late = frozen.thaw()
    first, second = lab.starts("task")
    assert own_value(late, first)
    assert own_value(successor, second)
    assert late["lost"] is True
    again = frozen.succeed()
    assert (again["source"], again["result"]) == ("reused", successor["result"])
    assert frozen.told() == [("late", "first", False), ("ok", "lost", True)]
    assert frozen.workers() == [late["worker"], successor["worker"]]
    assert late["worker"] != successor["worker"]
    assert first["token"] < second["token"]
    assert first["idempotency_key"] == second["idempotency_key"]
    checks = lab.checks("task")
    assert (checks["before"]["held"], checks["before"]["lost"]) == (True, False)
    assert checks["after"]["held"] is False
    assert checks["after"]["lost"] is True
    assert checks["after"]["names"] is True
    totals = lab.ledger.totals()
    assert (totals["executions"], totals["duplicates"], totals["lost"]) == (2, 1, 1)
    assert totals["total_tokens"] == 10


def test_a_thawed_leader_whom_nobody_succeeded_holds_on(lab: Lab) -> None:
    frozen = Frozen(lab, "sync")
    assert [line.status for line in lab.lines("task")] == ["lost"]
    late = frozen.thaw()
    assert (late["source"], late["lost"]) == ("executed", False)
    assert lab.checks("task")["after"]["held"] is True
    assert frozen.succeed()["source"] == "reused"
    assert frozen.told() == [("ok", "first", True)]
    assert lab.ledger.totals()["duplicates"] == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_thawed_leader_after_its_successors_result_has_expired(lab: Lab, kind: str) -> None:
    frozen = Frozen(lab, kind, ttl=0.1, lease=0.5)
    successor = frozen.succeed()
    until(lambda: lab.record("task").result is None, what="the result has expired")
    late = frozen.thaw()
    assert own_value(late, lab.starts("task")[0])
    assert late["lost"] is True
    assert lab.record("task").result is None  # the stale one is not kept in its place
    assert frozen.told() == [("late", "first", False), ("ok", "lost", True)]
    assert frozen.workers() == [late["worker"], successor["worker"]]
    assert frozen.succeed()["cause"] == "expired"


def test_a_thawed_leader_whose_record_has_expired(lab: Lab) -> None:
    frozen = Frozen(lab, "sync", retention=0.1, ttl=0.1, lease=0.5)
    until(lambda: not lab.record("task").lines, what="the record has expired")
    late = frozen.thaw()  # nobody has held the claim since: it is taken up again, and kept
    assert own_value(late, lab.starts("task")[0])
    assert late["lost"] is False
    assert frozen.told() == [("ok", "first", True)]
    assert frozen.workers() == [frozen.me]


def test_a_thawed_leader_whose_record_expired_with_its_successor(lab: Lab) -> None:
    frozen = Frozen(lab, "sync", retention=0.1, ttl=0.1, lease=0.5)
    until(lambda: not lab.record("task").lines, what="the record has expired")
    del frozen.policy["retention"], frozen.policy["ttl"]
    successor = frozen.succeed()
    assert successor["cause"] == "first"  # since the record began
    late = frozen.thaw()
    assert own_value(late, lab.starts("task")[0])
    assert late["lost"] is True
    again = frozen.succeed()
    assert (again["source"], again["result"]) == ("reused", successor["result"])
    assert sorted(frozen.told()) == [("late", "first", False), ("ok", "first", True)]
    assert sorted(frozen.workers()) == sorted([late["worker"], successor["worker"]])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_thawed_leader_whose_task_was_forgotten(lab: Lab, kind: str) -> None:
    frozen = Frozen(lab, kind)
    frozen.other.do("forget", url=lab.url, key="task")
    successor = frozen.succeed()
    assert successor["cause"] == "forced"
    late = frozen.thaw()
    assert own_value(late, lab.starts("task")[0])
    assert late["lost"] is True
    again = frozen.succeed()
    assert (again["source"], again["result"]) == ("reused", successor["result"])
    assert frozen.told() == [("late", "first", False), ("ok", "forced", True)]
    assert frozen.workers() == [late["worker"], successor["worker"]]
    assert lab.checks("task")["after"]["held"] is False
    first, second = lab.starts("task")
    assert first["token"] < second["token"]


def test_a_thawed_leader_whose_task_was_forgotten_and_not_called_again(lab: Lab) -> None:
    frozen = Frozen(lab, "sync")
    frozen.other.do("forget", url=lab.url, key="task")
    late = frozen.thaw()
    assert own_value(late, lab.starts("task")[0])
    assert late["lost"] is True
    assert frozen.told() == [("late", "first", False)]
    assert lab.lines("task")[0].usage.total_tokens == 10  # its cost is written all the same
    assert frozen.succeed()["cause"] == "forced"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_thawed_leader_whose_store_was_emptied(lab: Lab, kind: str) -> None:
    frozen = Frozen(lab, kind)
    lab.empty()
    successor = frozen.succeed()
    assert successor["cause"] == "first"
    late = frozen.thaw()
    assert own_value(late, lab.starts("task")[0])
    assert late["lost"] is True
    again = frozen.succeed()
    assert (again["source"], again["result"]) == ("reused", successor["result"])
    assert sorted(frozen.told()) == [("late", "first", False), ("ok", "first", True)]
    assert sorted(frozen.workers()) == sorted([late["worker"], successor["worker"]])
    first, second = lab.starts("task")
    assert first["token"] < second["token"]


def test_a_thawed_leader_whose_store_was_emptied_and_not_used_again(lab: Lab) -> None:
    frozen = Frozen(lab, "sync")
    lab.empty()
    late = frozen.thaw()
    assert own_value(late, lab.starts("task")[0])
    assert late["lost"] is False
    assert frozen.told() == [("ok", "first", True)]
    again = frozen.succeed()
    assert (again["source"], again["result"]) == ("reused", late["result"])


# --- the heartbeat -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_call_shorter_than_a_third_of_the_lease_is_not_renewed(real: Store, kind: str) -> None:
    store = Watched(real)
    guard = Guard(store=store, lease=3)

    def body(number: int) -> int:
        time.sleep(0.05)
        return number

    async def abody(number: int) -> int:
        await asyncio.sleep(0.05)
        return number

    async def crowd() -> list[Any]:
        return await asyncio.gather(*(guard.run_task("work", n, abody) for n in range(5)))

    if kind == "sync":
        for number in range(5):
            guard.run_task("work", number, body)
    else:
        asyncio.run(crowd())
    # past a third of the lease: a heap entry that would still renew had its time
    probe = threading.Event()
    guard.run_task("work", "probe", lambda _: probe.wait(0.01))
    guard.run_task("work", "longer", lambda _: until(lambda: "Renew" in store.names()))
    renewed = [c.claim.address for c in store.seen if isinstance(c, Renew)]
    (longer,) = {a.fingerprint for a in renewed}
    assert longer == [c for c in store.seen if isinstance(c, Begin)][-1].address.fingerprint
    short = [c for c in store.seen if c.address.fingerprint != longer]
    assert [type(c) for c in short].count(Begin) == [type(c) for c in short].count(Complete) == 6
    assert len(short) == 12


def test_a_store_has_one_heartbeat_thread(real: Store) -> None:
    # with nothing due meanwhile: where a renewal is late, a second thread helps
    guard, inside, go = Guard(store=real, lease=360), threading.Barrier(301), threading.Event()

    def body(_: int) -> None:
        inside.wait(PATIENCE)
        assert go.wait(PATIENCE)

    def call(number: int) -> None:
        guard.run_task("work", number, body)

    before = set(threading.enumerate())
    with ThreadPoolExecutor(300, thread_name_prefix="caller") as threads:
        running = [threads.submit(call, number) for number in range(300)]
        inside.wait(PATIENCE)
        new = [t.name for t in set(threading.enumerate()) - before]
        go.set()
        for future in running:
            future.result(PATIENCE)
    assert new.count("idemguard-heart") == 1
    assert {name for name in new if not name.startswith("caller")} <= {
        "idemguard-heart",
        "idemguard-upkeep",
    }
    assert guard.ledger.totals()["executions"] == 300


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_failed_renewal_is_tried_again(real: Store, kind: str) -> None:
    tries: list[int] = []

    def fails(command: Any) -> bool:
        if not isinstance(command, Renew):
            return False
        tries.append(len(tries))
        return tries[-1] % 3 != 2  # two fail, then one does not

    store = Watched(real, fails=fails)
    guard, others = Guard(store=store, lease=1.8), Guard(store=real)

    def body(_: Any) -> str:
        until(lambda: len(tries) >= 6)
        return "value"

    async def abody(_: Any) -> str:
        await asyncio.to_thread(until, lambda: len(tries) >= 6)
        return "value"

    def lead() -> Any:
        if kind == "sync":
            return guard.run_task("work", 1, body)

        async def call() -> Any:
            return await guard.run_task("work", 1, abody)

        return asyncio.run(call())

    with ThreadPoolExecutor(2) as threads:
        led = threads.submit(lead)
        until(lambda: "Begin" in store.names())
        until(lambda: list(others.ledger.lines()))
        waiting = threads.submit(others.run_task, "work", 1, lambda _: "another")
        assert led.result(PATIENCE).lost is False
        assert waiting.result(PATIENCE).source == "reused"
    (line,) = others.ledger.lines()
    assert (line.status, line.kept) == ("ok", True)
    assert line.ended - line.started > 1800


def test_a_lease_that_lapsed_is_revived_if_nobody_took_over(real: Store) -> None:
    store = Watched(real, fails=lambda command: isinstance(command, Renew) and away.is_set())
    guard, away = Guard(store=store, lease=0.5), threading.Event()
    away.set()
    said: dict[str, Any] = {}

    def body(_: Any) -> str:
        address = next(c.address for c in store.seen if isinstance(c, Begin))
        execution = current()
        assert execution is not None

        def lives() -> bool:
            record, now = real.look(address)
            return record.lines[0].lives(now)

        until(lambda: not lives())
        said["told"] = [line.status for line in guard.ledger.lines()]
        away.clear()
        until(lives)
        execution.check()
        said["lost"] = execution.lost
        return "value"

    outcome = guard.run_task("work", 1, body)
    assert said == {"told": ["lost"], "lost": False}
    assert (outcome.source, outcome.lost) == ("executed", False)
    assert guard.run_task("work", 1, body).source == "reused"
    (line,) = guard.ledger.lines()
    assert (line.status, line.cause, line.kept) == ("ok", "first", True)
    assert guard.ledger.totals()["lost"] == 0


def held(execution: Any) -> bool:
    try:
        execution.check()
    except LeaseLostError:
        return False
    return True


def test_check_asks_the_store_where_the_lease_may_be_past(real: Store) -> None:
    store = Watched(real, fails=lambda command: isinstance(command, Renew) and away.is_set())
    guard, away = Guard(store=store, lease=0.4), threading.Event()
    assert guard.run_task("work", 0, lambda _: held(current()), lease=60).result is True
    assert "Renew" not in store.names()  # within its lease it need not ask

    def body(_: Any) -> int:
        execution = current()
        assert execution is not None
        away.set()
        until(lambda: not held(execution))  # nobody can say so any longer
        assert "Renew" in store.names()
        assert execution.lost is False
        away.clear()
        execution.check()  # and it is: nobody took over
        return 1

    assert guard.run_task("work", 1, body).source == "executed"


# --- the store is down while a body runs ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("how", ["value", "error"])
def test_an_end_reaches_the_ledger_when_the_store_is_back(
    real: Store, kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Watched(real)
    guard = Guard(store=store, lease=20)
    caplog.set_level(logging.WARNING, logger="idemguard")

    def body(_: Any) -> str:
        record_usage(input_tokens=5, output_tokens=1)
        store.down = True
        if how == "error":
            raise KeyError(how)
        return "value"

    async def abody(_: Any) -> str:
        return body(_)

    async def acall() -> Any:
        return await guard.run_task("work", 1, abody)

    began = time.time()
    with capture() as calls:
        if how == "error":
            with pytest.raises(KeyError):
                guard.run_task("work", 1, body) if kind == "sync" else asyncio.run(acall())
        else:
            found = guard.run_task("work", 1, body) if kind == "sync" else asyncio.run(acall())
            assert (found.source, found.result) == ("executed", "value")
    ended = time.time()
    assert calls[0].source == ("failed" if how == "error" else "executed")
    (line,) = Guard(store=real).ledger.lines()
    assert line.status == "open"
    assert [r.levelname for r in caplog.records] == ["WARNING"]

    until(lambda: time.time() - ended > 0.3)
    up = time.time()
    store.down = False
    until(lambda: next(iter(guard.ledger.lines())).status != "open", what="the end is told")
    (line,) = guard.ledger.lines()
    assert line.status == ("failed" if how == "error" else "ok")
    # when it ended, not when it was told; the store's clock is in ms
    assert began - 0.002 <= line.ended / 1000 < up
    assert line.usage.total_tokens == 6
    again = guard.run_task("work", 1, lambda _: "again")
    assert (again.source, again.cause) == (
        ("executed", "retry") if how == "error" else ("reused", "first")
    )
    assert guard.ledger.totals()["duplicates"] == 0


def test_what_is_owed_is_told_when_the_guard_is_closed(real: Store) -> None:
    store = Watched(real)
    guard = Guard(store=store)

    def body(_: Any) -> int:
        store.down = True
        return 1

    guard.run_task("work", 1, body)
    store.down = False
    guard.close()
    (line,) = Guard(store=real).ledger.lines()
    assert (line.status, line.kept) == ("ok", True)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_unguarded_executions_are_written_later(real: Store, kind: str) -> None:
    store = Watched(real)
    guard = Guard(store=store, on_store_error="run")
    store.down = True
    pause = 0.2

    began, entered, over = list[float](), list[float](), list[float]()

    def body(number: int) -> int:
        entered.append(time.time())
        record_usage(input_tokens=number, output_tokens=0)
        time.sleep(pause)
        if number == 3:
            raise KeyError(number)
        return number

    async def abody(number: int) -> int:
        return body(number)

    async def acall(number: int) -> Any:
        return await guard.run_task("work", number, abody)

    with capture() as calls:
        for number in (1, 2, 3):
            began.append(time.time())
            try:
                guard.run_task("work", number, body) if kind == "sync" else asyncio.run(
                    acall(number)
                )
            except KeyError:
                assert number == 3
            over.append(time.time())
    assert [call.source for call in calls] == ["unguarded", "unguarded", "failed"]
    assert [call.result for call in calls] == [1, 2, None]
    assert list(Guard(store=real).ledger.lines()) == []

    store.down = False
    settling = time.time()
    guard.engine.backlog.settle()
    # the store's clock is in ms, and is read while they are told
    late = time.time() - settling + 0.005
    lines = list(guard.ledger.lines())
    assert [line.cause for line in lines] == ["unguarded"] * 3
    assert [line.status for line in lines] == ["ok", "ok", "failed"]
    assert [line.usage.total_tokens for line in lines] == [1, 2, 3]
    for line, start, inside, end in zip(lines, began, entered, over, strict=True):
        assert start - 0.005 <= line.started / 1000 <= inside + late
        assert pause - late <= (line.ended - line.started) / 1000 <= end - start + late
    totals = guard.ledger.totals()
    assert (totals["executions"], totals["duplicates"], totals["unguarded"]) == (3, 3, 2)
    assert totals["calls"] == 3
    # what was executed without a claim is no result to be reused
    assert guard.run_task("work", 1, lambda _: "now").source == "executed"


def test_1000_unguarded_executions_are_kept_and_of_more_the_oldest_are_dropped(
    real: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store = Watched(real)
    guard = Guard(store=store, on_store_error="run")
    store.down = True
    caplog.set_level(logging.WARNING, logger="idemguard")

    def dropped() -> int:
        return sum("dropped" in record.getMessage() for record in caplog.records)

    for number in range(1000):
        assert guard.run_task("work", number, lambda n: n).source == "unguarded"
    assert dropped() == 0
    for number in range(1000, 1010):
        guard.run_task("work", number, lambda n: n)
    assert dropped() == 1
    store.down = False
    guard.close()
    kept = Guard(store=real).ledger
    totals = kept.totals()
    assert 1000 <= totals["executions"] == totals["unguarded"] < 1010
    (last,) = kept.executions(calls_fingerprint(1009))
    assert last.cause == "unguarded"
    assert kept.executions(calls_fingerprint(0)) == []


def calls_fingerprint(number: int) -> str:
    return task_fingerprint("work", number)

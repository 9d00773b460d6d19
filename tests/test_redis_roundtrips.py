"""What a call on a server costs: requests are counted where they pass, from the first one on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers.traffic import asked
from workers import jobs
from workers.lab import Lab, Pool, found_a_claim

from idemguard import Guard, Task, errors, record_usage
from idemguard.engine import Engine
from idemguard.stores.side import BOOKED

KINDS = ["sync", "async"]
SOON = 30.0  # seconds within which what happens at once has happened, under load too
EXECUTED = Counter(begin=1, complete=1)
REUSED = Counter(begin=1)
# a namespace is one key of its own, which in a cluster no script on a task can touch
REGISTERED = Counter(SADD=1, PEXPIRE=1, secret=1)
PRICES = {"m": {"input": "3", "output": "15"}}


@pytest.fixture(autouse=True)
def no_upkeep(monkeypatch):
    """What is removed beside the calls, once a minute, is not what a call costs."""
    monkeypatch.setattr(Engine, "tend", lambda _: None)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


@pytest.fixture
def lab(tmp_path, pool, standalone):
    """Workers that reach the server with nothing in between."""
    lab = Lab(tmp_path, pool)
    lab.url = standalone.url
    yield lab
    lab.close()
    pool.back()


class Counting:
    """A guard on a server, or on a cluster, and the requests that it makes."""

    def __init__(self, where) -> None:
        self._where = where
        self._told = Counter()
        self.guard = Guard(store=where.url, pricer=PRICES)

    def so_far(self):
        frames = self._where.frames
        return asked(frames() if callable(frames) else frames)

    def since(self):
        """The requests since it was last asked."""
        before, self._told = self._told, self.so_far()
        return self._told - before


@pytest.fixture(params=["proxy", "proxied_cluster"])
def counting(request):
    made = Counting(request.getfixturevalue(request.param))
    made.first = REGISTERED if request.param == "proxied_cluster" else Counter()
    yield made
    made.guard.close()


def run(kind, guard, act, *tasks):
    """The tasks one after another, told of the outcome of each; coroutines in one loop."""

    def body(payload):
        record_usage(model="m", input_tokens=10, output_tokens=2)
        if payload["name"] == "fails":
            raise LookupError
        return payload

    async def abody(payload):
        return body(payload)

    async def loop():
        for payload in tasks:
            try:
                act((await guard.run_task("work", {"name": payload}, abody)).source)
            except LookupError:
                act("failed")

    if kind == "async":
        asyncio.run(loop())
        return
    for payload in tasks:
        try:
            act(guard.run_task("work", {"name": payload}, body).source)
        except LookupError:
            act("failed")


@pytest.mark.parametrize("kind", KINDS)
def test_two_requests_to_execute_and_one_to_reuse_from_the_first_call_on(counting, kind):
    costs = []
    run(
        kind, counting.guard, lambda source: costs.append((source, counting.since())),
        "a", "a", "a", "b", "b", "fails", "fails", "c",
    )  # fmt: skip
    failed = ("failed", Counter(begin=1, release=1))
    assert costs == [
        ("executed", EXECUTED + counting.first),
        *[("reused", REUSED)] * 2,
        ("executed", EXECUTED),
        ("reused", REUSED),
        *[failed] * 2,
        ("executed", EXECUTED),
    ]
    totals = counting.guard.ledger.totals()
    assert (totals["executed"], totals["reused"], totals["failed"]) == (3, 3, 2)
    assert (totals["input_tokens"], totals["saved_tokens"]) == (50, 36)
    assert totals["charged"] > totals["saved"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_guard_pays_no_more(proxy, kind):
    costs = []
    for _ in range(2):  # as two processes after each other: the server knows all by then
        counting = Counting(proxy)
        run(kind, counting.guard, lambda _, c=counting: costs.append(c.since()), "a", "a")
        counting.guard.close()
        proxy.forget()
    assert costs == [EXECUTED, REUSED, REUSED, REUSED]


@pytest.mark.parametrize("kind", KINDS)
def test_a_renewal_is_one_request(counting, kind, crew, until):
    go, inside = threading.Event(), threading.Event()

    def body(_):
        inside.set()
        assert go.wait(SOON)

    async def abody(_):
        inside.set()
        assert await asyncio.to_thread(go.wait, SOON)

    def call():
        if kind == "async":

            async def main():
                return await counting.guard.run_task("work", {"n": 1}, abody, lease=0.45)

            return asyncio.run(main())
        return counting.guard.run_task("work", {"n": 1}, body, lease=0.45)

    started = time.monotonic()
    leader = crew.start(call)
    assert inside.wait(SOON)
    until(lambda: counting.so_far()["renew"] >= 4)
    go.set()
    assert leader.result(SOON).source == "executed"
    passed = time.monotonic() - started
    counts = counting.so_far()
    assert 4 <= counts.pop("renew") <= passed / 0.15
    assert counts == EXECUTED + counting.first


# --- waiting -------------------------------------------------------------------------------------

UPON_ENTRY = 12  # requests of a process that begins to wait, however many of its calls do
CROWDS = [("sync", 1), ("sync", 20), ("sync", 200), ("async", 1), ("async", 20), ("async", 500)]


def bookings(since) -> float:
    """How many there may be since then of what other calls were told: they go by time."""
    return 2 + (time.monotonic() - since) / BOOKED


def never(_):
    raise AssertionError("a waiter executes")


def crowd(kind, guard, count, **policy):
    """So many calls of one task; gives their outcomes."""

    async def anever(_):
        never(_)

    async def all_of_them():
        calls = (guard.run_task("work", {"key": "k"}, anever, **policy) for _ in range(count))
        return await asyncio.gather(*calls)

    if kind == "async":
        return asyncio.run(all_of_them())
    barrier = threading.Barrier(count)

    def one(_):
        barrier.wait(SOON)
        return guard.run_task("work", {"key": "k"}, never, **policy)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


@pytest.mark.parametrize(("kind", "count"), CROWDS)
def test_many_waiters_cost_what_one_costs(lab, proxy, crew, until, waiting, kind, count):
    lease = 1.2  # a renewal may be late by more than half a second before the claim is lost
    leader = lab.worker()
    lab.call(leader, "k", steps=[("gate", lab.gate("go"))], lease=lease)
    lab.started("k")
    counting, started = Counting(proxy), time.monotonic()
    waiters = crew.start(crowd, kind, counting.guard, count)
    until(lambda: found_a_claim(lab.store) == waiting.now == count)
    entry = counting.since()
    assert entry.pop("share", 0) <= bookings(started)
    assert entry["SUBSCRIBE"] == 1
    assert entry.total() <= UPON_ENTRY + waiting.unheard(lease, started)
    # for longer than a lease: the leader's renewals are pushed
    settled, beats = time.monotonic(), len(waiting.beats)
    until(lambda: len(waiting.beats) >= beats + 4)
    assert lab.lines("k")[0].status == "open"
    assert counting.since().total() <= waiting.unheard(lease, settled)
    opened = time.monotonic()
    lab.open("go")
    outcomes = waiters.result(SOON)
    assert {o.source for o in outcomes} == {"reused"}
    assert len(outcomes) == count
    assert leader.end()["source"] == "executed"
    at_the_end = counting.since()
    assert at_the_end.pop("share", 0) <= bookings(opened)
    assert at_the_end.pop("UNSUBSCRIBE", 0) <= 1
    assert at_the_end.total() <= 4 + waiting.unheard(lease, opened)
    totals = counting.guard.ledger.totals()
    assert (totals["reused"], totals["executed"]) == (count, 1)
    counting.guard.close()


@pytest.mark.parametrize("kind", KINDS)
def test_one_fallback_of_many_waiters_and_few_requests(lab, proxy, crew, until, waiting, kind):
    count, patience = 50, 0.4
    leader = lab.worker()
    lab.call(leader, "k", steps=[("gate", lab.gate("go"))], lease=30)
    lab.started("k")
    guard, began = Guard(store=proxy.url), time.monotonic()
    steps = [("gate", lab.gate("beside"))]
    body = jobs.body_of(kind, steps, str(lab.log), "k")

    def one(_):
        return guard.run_task("work", {"key": "k"}, body, wait_timeout=patience)

    async def all_of_them():
        return await asyncio.gather(*map(one, range(count)))

    def all_threads():
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(one, range(count)))

    waiters = crew.start(asyncio.run, all_of_them()) if kind == "async" else crew.start(all_threads)
    assert lab.started("k", 2)["cause"] == "fallback"
    # everybody's patience is at its end: the others wait anew
    until(lambda: waiting.ever >= 2 * count - 1 and waiting.now == count - 1)
    assert len(lab.starts("k")) == 2
    counts = asked(proxy.frames)
    assert counts.pop("share") <= bookings(began)
    assert counts.total() <= 2 * UPON_ENTRY
    lab.open("beside")
    outcomes = waiters.result(SOON)
    assert Counter(o.source for o in outcomes) == {"fallback": 1, "reused": count - 1}
    assert len({o.result["token"] for o in outcomes}) == 1
    lab.open("go")
    assert leader.end()["source"] == "executed"
    totals = guard.ledger.totals()
    assert (totals["fallback"], totals["reused"], totals["duplicates"]) == (1, count - 1, 1)
    assert found_a_claim(lab.store) == count
    guard.close()


@pytest.mark.parametrize("kind", KINDS)
def test_many_who_do_not_want_to_wait_longer_are_told_so(lab, proxy, crew, kind):
    leader = lab.worker()
    lab.call(leader, "k", steps=[("gate", lab.gate("go"))], lease=30)
    lab.started("k")
    guard = Guard(store=proxy.url)

    def call():
        with pytest.raises(errors.WaitTimeoutError):
            crowd(kind, guard, 50, wait_timeout=0.3, on_timeout="raise")

    crew.start(call).result(SOON)
    counts = asked(proxy.frames)
    counts.pop("share", 0)
    left = counts.pop("withdraw")  # each tells that it was refused
    assert left <= 50
    assert counts.total() <= 2 * UPON_ENTRY
    lab.open("go")
    leader.end()
    guard.close()


@pytest.mark.parametrize("kind", KINDS)
def test_who_looks_on_looks_once(proxy, standalone, crew, until, waiting, kind):
    leading, guard, task = Guard(store=standalone.url), Guard(store=proxy.url), Task.of("t", 1)
    claim = leading.claim(task)

    async def onlooker():
        return await guard.aio.wait_result(task, SOON)

    if kind == "async":
        found = crew.start(lambda: asyncio.run(onlooker()))
    else:
        found = crew.start(guard.wait_result, task, SOON)
    until(lambda: waiting.now == 1)
    threading.Event().wait(0.5)  # if it polled, it would have
    assert asked(proxy.frames) == {"look": 2, "SUBSCRIBE": 1}
    assert claim.complete("value")
    assert found.result(SOON).result == "value"
    # it hands on a hint that may have been meant for who would execute
    assert asked(proxy.frames) == {"look": 3, "SUBSCRIBE": 1, "withdraw": 1}
    assert waiting.ever == 1
    leading.close()
    guard.close()

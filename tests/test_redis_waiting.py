"""Waiting on a server: many for one, woken by a push, whatever becomes of connections and messages."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest
import redis
from servers.proxy import MESSAGES, Proxy, read_frame
from servers.server import HOST
from servers.traffic import asked
from workers import jobs
from workers.lab import TESTS, Lab, Pool, found_a_claim

from idemguard import Guard, errors, worker
from idemguard.claim import Begin
from idemguard.record import Address, Caller
from idemguard.stores import ears
from idemguard.stores.redis import RedisStore
from idemguard.stores.sharing import REMEMBERED
from idemguard.stores.side import Books

KINDS = ["sync", "async"]
SOON = 60.0  # seconds within which what happens at once has happened, under load too
AGES = 200.0  # and what 10,000 calls may take
LEASE = 120.0
PUSHED = LEASE / 6  # and what is pushed: who polled would ask after a third of the lease
CONNECTIONS = 4  # of a process that waits, however many of its calls do
THE_TASK = {"key": "k"}


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


@pytest.fixture
def lead(lab):
    """Has a worker execute until the gate `go` is open, and then end as the steps say."""

    def start(*steps, **policy):
        leader = lab.worker()
        policy = {"lease": LEASE} | policy
        lab.call(leader, "k", steps=[("gate", lab.gate("go")), *steps], **policy)
        lab.started("k")
        return leader

    return start


@pytest.fixture
def guard_at():
    """Makes guards that are closed after the test."""
    made = []

    def make(where):
        made.append(Guard(store=where))
        return made[-1]

    yield make
    for guard in made:
        guard.close()


def never(_):
    raise AssertionError("a waiter executes")


async def anever(_):
    raise AssertionError("a waiter executes")


def crowd(kind, guard, count, body=None, **policy):
    """So many calls of the task at the same time; gives their outcomes."""
    policy = {"lease": LEASE} | policy

    def one(_):
        return guard.run_task(
            "work", THE_TASK, body or {"sync": never, "async": anever}[kind], **policy
        )

    async def all_of_them():
        return await asyncio.gather(*map(one, range(count)))

    if kind == "async":
        return asyncio.run(all_of_them())
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def sources(outcomes):
    return Counter(outcome.source for outcome in outcomes)


# --- very many -----------------------------------------------------------------------------------


@pytest.mark.timeout(3 * AGES)
@pytest.mark.parametrize(
    ("kind", "count", "given"),
    [
        ("sync", 300, "url"),
        ("sync", 100, "client"),
        ("async", 10_000, "url"),
        ("async", 1_000, "client"),
    ],
)
def test_a_crowd_waits_with_few_connections(
    standalone, proxy, lab, lead, guard_at, crew, until, waiting, kind, count, given
):
    library = redis.asyncio if kind == "async" else redis
    pool = library.ConnectionPool(
        host=HOST, port=proxy.port, client_name="crowd", max_connections=5
    )
    client = library.Redis(connection_pool=pool)
    guard = guard_at(f"{proxy.url}?client_name=crowd" if given == "url" else RedisStore(client))
    leader, peak = lead(), [0, 0]

    def connections():
        told = standalone.tell("CLIENT", "LIST").decode().splitlines()
        ours = [line for line in told if " name=crowd " in line]
        hearing = [line for line in ours if " sub=0 " not in line]
        peak[:] = max(peak[0], len(ours)), max(peak[1], len(hearing))

    def all_wait():
        connections()
        threading.Event().wait(0.05)  # who looks all the time holds them up
        return waiting.now == count and found_a_claim(lab.store) == count

    async def looped():
        call = lambda: guard.run_task("work", THE_TASK, anever, lease=LEASE)  # noqa: E731
        try:
            return await asyncio.gather(*(call() for _ in range(count)))
        finally:
            await client.aclose()
            await pool.disconnect()

    if kind == "async":
        waiters = crew.start(lambda: asyncio.run(looped()))
    else:
        waiters = crew.start(crowd, kind, guard, count)
    until(all_wait, timeout=AGES)
    while_waiting = asked(proxy.frames)
    opened = time.monotonic()
    lab.open("go")
    outcomes = waiters.result(AGES)
    handed = 1000 * (time.monotonic() - opened) / REMEMBERED  # how often it is asked for anew
    connections()
    assert sources(outcomes) == {"reused": count}
    assert {outcome.result["token"] for outcome in outcomes} == {lab.starts("k")[0]["token"]}
    assert peak[0] <= CONNECTIONS
    assert peak[1] == 1
    assert while_waiting["SUBSCRIBE"] == 1
    for name in ("begin", "look"):  # those that come before the subscription stands ask, too
        assert while_waiting[name] <= 10
        assert asked(proxy.frames)[name] - while_waiting[name] <= 2 + handed
    assert leader.end()["source"] == "executed"
    assert guard.ledger.totals()["reused"] == count
    if kind == "sync":
        guard.close()
        client.close()
        pool.disconnect()


# --- pushed --------------------------------------------------------------------------------------


class Everywhere:
    """Waiters in two threads, in two loops of two threads, and in two other processes.

    Args:
        steps: of their bodies.

    """

    def __init__(self, lab, guard, crew, steps) -> None:
        self.count = 10
        plain = jobs.body_of("sync", steps, str(lab.log), "k")
        looped = jobs.body_of("async", steps, str(lab.log), "k")
        self._here = [crew.start(crowd, "sync", guard, 2, plain)]
        self._here += [crew.start(crowd, "async", guard, 2, looped) for _ in range(2)]
        self._there = lab.workers(2)
        for process, kind in zip(self._there, KINDS, strict=True):
            given = {"key": "k", "count": 2, "kind": kind, "steps": steps, "lease": LEASE}
            process.begin("crowd", url=lab.url, log=str(lab.log), **given)

    def outcomes(self):
        """What each came to, and the token of the execution whose result it has."""
        here = [outcome for future in self._here for outcome in future.result(SOON)]
        told = [(outcome.source, outcome.result["token"]) for outcome in here]
        there = [outcome for process in self._there for outcome in process.end(SOON)]
        return told + [(outcome["source"], outcome["result"]["token"]) for outcome in there]


def cancelled_leader(lab, crew):
    """A leader on a loop of this process, with a store of its own, that is cancelled at the gate."""
    body = jobs.body_of("async", [("gate", lab.gate("never"))], str(lab.log), "k")

    async def main():
        with_store = Guard(store=lab.url)
        call = asyncio.ensure_future(with_store.run_task("work", THE_TASK, body, lease=LEASE))
        await jobs.ado("gate", lab.gate("go"), str(lab.log), "k")
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        with_store.close()

    leader = crew.start(lambda: asyncio.run(main()))
    lab.started("k")
    return leader


@pytest.mark.parametrize("end", ["value", "raises", "cancelled", "killed"])
def test_waiters_everywhere_are_woken_by_the_leaders_end(
    standalone, lab, lead, guard_at, crew, until, end
):
    lease = 1.0 if end == "killed" else LEASE
    if end == "cancelled":
        leader = cancelled_leader(lab, crew)
    else:
        leader = lead(*[("raise", "no")] * (end == "raises"), lease=lease)
    waiters = Everywhere(lab, guard_at(standalone.url), crew, [("gate", lab.gate("second"))])
    until(lambda: found_a_claim(lab.store) == waiters.count)
    ended = time.time()
    if end == "killed":
        leader.kill()
    lab.open("go")
    if end == "value":
        told = waiters.outcomes()
        assert time.time() - ended < PUSHED
        assert told == [("reused", lab.starts("k")[0]["token"])] * waiters.count
        return
    second = lab.started("k", 2)
    assert second["at"] - ended < PUSHED + (lease if end == "killed" else 0)
    assert second["cause"] == ("lost" if end == "killed" else "retry")
    opened = time.time()
    lab.open("second")
    told = waiters.outcomes()
    assert time.time() - opened < PUSHED
    assert {token for _, token in told} == {second["token"]}
    assert Counter(source for source, _ in told) == {"executed": 1, "reused": waiters.count - 1}
    assert len(lab.starts("k")) == 2
    until(lambda: lab.ledger.totals()["reused"] == waiters.count - 1)
    assert lab.ledger.totals()["executions"] == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["value", "raises"])
def test_waiters_on_a_cluster_are_woken_by_the_leaders_end(
    cluster, lab, lead, guard_at, crew, until, kind, end
):
    lab.url = cluster.url
    leader = lead(*[("raise", "no")] * (end == "raises"))
    body = jobs.body_of(kind, [], str(lab.log), "k")
    waiters = crew.start(crowd, kind, guard_at(cluster.url), 5, body)
    until(lambda: found_a_claim(lab.store) == 5)
    ended = time.monotonic()
    lab.open("go")
    outcomes = waiters.result(SOON)
    assert time.monotonic() - ended < PUSHED
    if end == "value":
        assert sources(outcomes) == {"reused": 5}
    else:
        assert sources(outcomes) == {"executed": 1, "reused": 4}
    assert len(lab.starts("k")) == (1 if end == "value" else 2)
    assert leader.end()["raised"] == (None if end == "value" else "BoomError")


def test_one_after_the_other_is_promoted_while_all_fail(
    standalone, lab, lead, guard_at, crew, until
):
    leader, guard = lead(("raise", "no")), guard_at(standalone.url)

    def failing(kind):
        body = jobs.body_of(kind, [("raise", "no")], str(lab.log), "k")

        async def loop():
            calls = (guard.run_task("work", THE_TASK, body, lease=LEASE) for _ in range(2))
            return await asyncio.gather(*calls, return_exceptions=True)

        if kind == "async":
            return asyncio.run(loop())
        try:
            return [guard.run_task("work", THE_TASK, body, lease=LEASE)]
        except jobs.BoomError as error:
            return [error]

    here = [crew.start(failing, kind) for kind in ("sync", "sync", "async", "async")]
    there = lab.workers(2)
    for process, kind in zip(there, KINDS, strict=True):
        lab.call(process, "k", kind=kind, steps=[("raise", "no")], lease=LEASE)
    until(lambda: found_a_claim(lab.store) == 8)
    ended = time.monotonic()
    lab.open("go")
    raised = [type(error).__name__ for future in here for error in future.result(SOON)]
    raised += [process.end()["raised"] for process in (leader, *there)]
    assert time.monotonic() - ended < PUSHED
    assert raised == ["BoomError"] * 9
    lines = lab.lines("k")
    assert [line.cause for line in lines] == ["first"] + ["retry"] * 8
    # one at a time: nobody starts before the one before has ended
    assert all(a.ended <= b.started for a, b in pairwise(lines))


# --- cancelled -----------------------------------------------------------------------------------


def begins(frame):
    return asked([frame]) == {"begin": 1}


def reads(frame):
    return asked([frame]) == {"look": 1}


class Five:
    """Five waiters on one loop, each told apart by its worker; each body waits for `go`."""

    def __init__(self, guard) -> None:
        self.inside: list[int] = []
        self.go = asyncio.Event()
        self.tasks = []
        for number in range(5):
            with worker(f"w-{number}"):
                self.tasks.append(asyncio.ensure_future(self._call(guard, number)))

    async def _call(self, guard, number):
        async def body(_):
            self.inside.append(number)
            await self.go.wait()
            return {"by": number}

        return await guard.run_task("work", THE_TASK, body, lease=LEASE)

    async def cancel(self, number):
        self.tasks[number].cancel()

    def whose(self, frame):
        """Which of them a request is."""
        (found,) = (n for n in range(5) if f'"w-{n}"'.encode() in frame)
        return found

    async def others(self, than):
        """The outcomes of the others, which come at once."""
        rest = [task for number, task in enumerate(self.tasks) if number != than]
        async with asyncio.timeout(PUSHED):
            outcomes = await asyncio.gather(*rest)
        with pytest.raises(asyncio.CancelledError):
            await self.tasks[than]
        return outcomes


async def aloud(condition):
    end = time.monotonic() + SOON
    while not (found := condition()):
        assert time.monotonic() < end, "what the test waits for does not happen"
        await asyncio.sleep(0.005)
    return found


@pytest.mark.parametrize("during", ["begin", "look", "SUBSCRIBE"])
def test_who_asked_for_all_is_cancelled_while_its_request_is_away(
    lab, proxy, lead, guard_at, during
):
    leader, guard = lead(), guard_at(proxy.url)

    async def main():
        trap = proxy.hang({"begin": begins, "look": reads}.get(during, during))
        five = Five(guard)
        await asyncio.to_thread(trap.wait)
        await five.cancel(0)
        lab.open("go")
        assert (await asyncio.to_thread(leader.end))["source"] == "executed"
        trap.release()
        return await five.others(0)

    outcomes = asyncio.run(main())
    assert sources(outcomes) == {"reused": 4}
    assert len(lab.starts("k")) == 1


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_who_is_promoted_is_cancelled_while_it_claims(lab, proxy, lead, guard_at, delay):
    lead(("raise", "no"))
    guard = guard_at(proxy.url)

    async def main():
        five = Five(guard)
        await aloud(lambda: found_a_claim(lab.store) == 5)
        proxy.delay = delay
        trap = proxy.hang(begins)
        lab.open("go")
        promoted = five.whose(await asyncio.to_thread(trap.wait))
        await five.cancel(promoted)
        five.go.set()
        trap.release()
        return promoted, await five.others(promoted), five.inside

    promoted, outcomes, inside = asyncio.run(main())
    assert sources(outcomes) == {"executed": 1, "reused": 3}
    assert len(inside) == 1
    assert promoted not in inside
    # a claim whose body never started is no execution
    assert [line.status for line in lab.lines("k")] == ["failed", "ok"]


def test_who_is_promoted_is_cancelled_while_it_executes(lab, proxy, lead, guard_at):
    lead(("raise", "no"))
    guard = guard_at(proxy.url)

    async def main():
        five = Five(guard)
        await aloud(lambda: found_a_claim(lab.store) == 5)
        lab.open("go")
        await aloud(lambda: five.inside)
        first = five.inside[0]
        await five.cancel(first)
        five.go.set()
        return first, await five.others(first), five.inside

    first, outcomes, inside = asyncio.run(main())
    assert sources(outcomes) == {"executed": 1, "reused": 3}
    assert len(inside) == 2
    assert {outcome.result["by"] for outcome in outcomes} == {inside[1]} != {first}
    assert [line.status for line in lab.lines("k")] == ["failed", "failed", "ok"]


# --- messages that are lost ----------------------------------------------------------------------


class Deaf(Proxy):
    """Passes no message of a subscription on while it is deaf."""

    def __init__(self, server) -> None:
        super().__init__(server)
        self.deaf = False
        self._listening = set()

    async def connect(self):
        server, writer = await super().connect()
        passed = asyncio.StreamReader()

        async def listen():
            try:
                while True:
                    raw, value = await read_frame(server)
                    hint = isinstance(value, list) and value and value[0] in MESSAGES
                    if not (hint and self.deaf):
                        passed.feed_data(raw)
            except (OSError, asyncio.IncompleteReadError):
                passed.feed_eof()

        self._listening.add(asyncio.ensure_future(listen()))
        return passed, writer


@pytest.fixture
def deaf(standalone):
    """A proxy that can be made deaf."""
    with Deaf(standalone) as made:
        yield made


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_never_comes_costs_a_third_of_the_lease(
    lab, deaf, lead, guard_at, crew, until, waiting, kind, count
):
    lease = 4.5
    leader = lead(lease=lease)
    waiters = crew.start(partial(crowd, lease=lease), kind, guard_at(deaf.url), count)
    until(lambda: found_a_claim(lab.store) == waiting.now == count)
    deaf.deaf = True
    lab.open("go")
    assert leader.end()["source"] == "executed"
    ended = time.monotonic()
    assert sources(waiters.result(SOON)) == {"reused": count}
    # the leader has renewed less than a third ago: two thirds are left
    assert time.monotonic() - ended < lease * 2 / 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_subscription_that_is_killed_is_made_anew_and_looks_again(
    standalone, lab, proxy, lead, guard_at, crew, until, waiting, kind
):
    leader = lead()
    waiters = crew.start(crowd, kind, guard_at(proxy.url), 3)
    until(lambda: found_a_claim(lab.store) == waiting.now == 3)
    assert standalone.tell("CLIENT", "KILL", "TYPE", "pubsub") == 1
    lab.open("go")
    ended = time.monotonic()
    assert leader.end()["source"] == "executed"
    assert sources(waiters.result(SOON)) == {"reused": 3}
    assert time.monotonic() - ended < PUSHED


@pytest.mark.parametrize("kind", KINDS)
def test_what_ended_while_the_server_could_not_be_reached_is_known_when_it_can(
    lab, proxy, lead, guard_at, crew, until, waiting, kind
):
    leader = lead()
    waiters = crew.start(crowd, kind, guard_at(proxy.url), 3)
    until(lambda: found_a_claim(lab.store) == waiting.now == 3)
    proxy.refuse()
    proxy.cut_all()
    lab.open("go")
    assert leader.end()["source"] == "executed"
    proxy.accept()
    reached = time.monotonic()
    assert sources(waiters.result(SOON)) == {"reused": 3}
    assert time.monotonic() - reached < PUSHED


@pytest.mark.parametrize("kind", KINDS)
def test_who_may_not_listen_is_told_what_to_permit(
    standalone, lab, lead, guard_at, crew, until, kind
):
    rules = ("on", ">secret", "~*", "+@all", "resetchannels")
    standalone.tell("ACL", "SETUSER", "mute", *rules)
    leader, guard = lead(), guard_at(f"redis://mute:secret@{HOST}:{standalone.port}/0")

    def call():
        with pytest.raises(errors.StoreError) as raised:
            crowd(kind, guard, 1)
        return raised.value

    error = crew.start(call).result(SOON)
    assert not isinstance(error, errors.StoreUnavailableError)
    assert "listening for hints" in str(error)
    assert "channel" in str(error)
    assert "&idemguard:*" in str(error)
    assert "secret" not in str(error)
    lab.open("go")
    assert leader.end()["source"] == "executed"
    until(lambda: lab.ledger.totals()["refused"] == 1)


def test_a_slot_that_moves_as_one_begins_to_listen_refuses_nobody(standalone, monkeypatch):
    def moves(_):
        raise errors.StoreUnavailableError("the slot of a channel has moved")

    monkeypatch.setattr(ears._Ear, "_step", moves)
    store = RedisStore(standalone.url)
    with pytest.raises(errors.StoreUnavailableError, match="has moved"):
        store.park(Address("n", "f" * 64), None, lambda: None)
    store.close()


# --- counted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_shared_answers_are_counted_at_once_here_and_soon_elsewhere(
    standalone, lab, lead, guard_at, crew, until, kind
):
    guard = guard_at(standalone.url)
    leader = lead(("usage", [100, 20]))
    waiters = crew.start(crowd, kind, guard, 50)
    until(lambda: found_a_claim(guard.engine.store) == 50)
    lab.open("go")
    assert sources(waiters.result(SOON)) == {"reused": 50}
    totals = guard.ledger.totals()
    assert (totals["reused"], totals["saved_tokens"]) == (50, 50 * 120)
    assert lab.ledger.totals()["reused"] == 50
    assert found_a_claim(lab.store) == 50
    assert lab.record("k").reused == 50
    assert leader.end()["source"] == "executed"


@pytest.mark.parametrize("kind", KINDS)
def test_shared_answers_are_counted_elsewhere_though_nobody_asks_here(
    standalone, lab, lead, guard_at, crew, until, kind
):
    lead()
    waiters = crew.start(crowd, kind, guard_at(standalone.url), 50)
    until(lambda: found_a_claim(lab.store) == 50)
    lab.open("go")
    assert sources(waiters.result(SOON)) == {"reused": 50}
    until(lambda: lab.ledger.totals()["reused"] == 50)
    assert lab.record("k").reused == 50


LEAVING = """
import asyncio, sys
from idemguard import Guard, log
from idemguard.stores import side

side.BOOKED = 3600.0  # nothing is booked beside the calls: what is, the end of the process does
guard = Guard(store=sys.argv[1])


async def body(_):
    raise AssertionError


async def main():
    calls = (guard.run_task("work", {"key": "k"}, body) for _ in range(40))
    return await asyncio.gather(*calls)


print([outcome.source for outcome in asyncio.run(main())] == ["reused"] * 40, flush=True)
"""


def test_shared_answers_are_counted_when_the_process_ends(lab, lead, until):
    leader = lead()
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", LEAVING, lab.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=TESTS.parent,
    )
    until(lambda: found_a_claim(lab.store) >= 1)  # the one that asked for all
    lab.open("go")
    out, err = process.communicate(timeout=SOON)
    assert (out, err) == ("True\n", "")
    assert process.returncode == 0
    assert leader.end()["source"] == "executed"
    assert lab.ledger.totals()["reused"] == 40
    assert found_a_claim(lab.store) == 40


def test_who_reads_waits_for_counts_that_are_on_their_way(lab, proxy, lead, guard_at, crew, until):
    guard = guard_at(proxy.url)
    lead()
    trap = proxy.hold(lambda frame: asked([frame]) == {"share": 1})
    waiters = crew.start(crowd, "async", guard, 20)
    trap.wait()
    reader = crew.start(found_a_claim, guard.engine.store)
    lab.open("go")
    assert sources(waiters.result(SOON)) == {"reused": 20}
    with pytest.raises(TimeoutError):
        reader.result(0.5)
    trap.release()
    assert reader.result(SOON) == 20
    assert guard.ledger.totals()["reused"] == 20


def test_counts_that_cannot_be_told_are_kept_until_they_can(until):
    told, fails = [], []
    fallen = threading.Event()

    def tell(_, __, shares):
        if fails:
            books.add(ask, reused=True)  # meanwhile there are more of them
            fallen.set()
            raise fails.pop()
        told.append(shares)

    books = Books(tell)
    ask = Begin(Address("n", "f" * 64), "nonce", Caller("t", "w", "a"), 1000)
    for error in (errors.StoreUnavailableError("away"), errors.StoreError("no")):
        told.clear()
        fallen.clear()
        fails.append(error)
        books.add(ask, reused=True)
        books.add(ask, reused=False)
        assert fallen.wait(SOON)
        until(lambda: told)
        (label,) = told[0]
        assert json.loads(label) == ["t", "a"]
        # what the server refuses is dropped; what it did not get is told again, with what came
        assert told[0][label] == ([1, 2] if not fails and "away" in str(error) else [0, 1])

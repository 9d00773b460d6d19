"""Whatever a connection to the server loses or delays, nothing runs twice and nothing is counted twice."""

from __future__ import annotations

import asyncio
import threading
import time
import types
from collections import Counter
from concurrent.futures import Future
from decimal import Decimal
from functools import partial
from typing import get_args

import pytest
from servers.server import until

from idemguard import Guard, Task, errors, record_usage
from idemguard.claim import Command, Sweep
from idemguard.record import Address
from idemguard.stores import ears
from idemguard.stores.redis import RedisStore
from idemguard.stores.scripts import NAMES, script

LONG = 60.0  # seconds; a machine under load is slow, but what takes longer hangs
TIMEOUT = 0.3  # seconds that a client waits for an answer
LATE = 0.01  # seconds by which replies are late where they are
PRICE = Decimal("0.25")  # of an execution
TOKENS = (10, 5)
COMMANDS = {kind.__name__.lower() for kind in get_args(Command)}
FAULTS = ("cut_before", "swallow", "hang", "delay")
KINDS = ("plain", "coroutine")


def nobody_tidies() -> None:
    """What tidies up beside the calls is over; it would open a store anew that was closed."""
    until(
        lambda: all(thread.name != "idemguard-upkeep" for thread in threading.enumerate()),
        LONG,
        "the upkeep is over",
    )


class Lab:
    """A guard on a server, called from plain code or from a loop, whose body can be held.

    Args:
        where: a URL or a store.
        kind: of the body, one of `KINDS`.
        settings: of the guard.

    """

    def __init__(self, where, kind, **settings) -> None:
        self.guard = Guard(store=where, pricer=lambda _: PRICE, **settings)
        self.is_async = kind == "coroutine"
        self.bodies = []  # what they were called with
        self.inside = threading.Semaphore(0)  # bodies that have begun
        self.gate = threading.Event()
        self.gate.set()
        self.fails = None  # what the next body raises
        self.calm = lambda: None  # done before the ledger is read
        self._threads = []
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        if self.is_async:
            self._run(self._living)

    def _run(self, act, *args) -> None:
        thread = threading.Thread(target=act, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _living(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._over.wait())

    def close(self) -> None:
        """Give everything back; nothing that was started hangs."""
        self.gate.set()
        if self.is_async:
            self.submit(self._end()).result(LONG)
        for thread in self._threads:
            thread.join(LONG)
            assert not thread.is_alive(), "a call hangs"
        if not self._loop.is_closed():
            self._loop.close()
        nobody_tidies()
        if self.guard._desk._engine is not None:
            self.guard.engine.backlog._owed.clear()  # a server that is left broken is owed nothing
        self.guard.close()

    async def _end(self) -> None:
        self._over.set()

    # --- the body -----------------------------------------------------------------------------------

    def _body(self, payload):
        self.bodies.append(payload["n"])
        record_usage(input_tokens=TOKENS[0], output_tokens=TOKENS[1], model="m")
        self.inside.release()
        assert self.gate.wait(LONG)
        fails, self.fails = self.fails, None
        if fails is not None:
            raise fails
        return f"value of {payload['n']}"

    async def _abody(self, payload):
        return await asyncio.to_thread(self._body, payload)

    # --- what is done -------------------------------------------------------------------------------

    def submit(self, coroutine) -> Future:
        """Perform it on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def start(self, n=1, **policy) -> Future:
        """A call of task `n`; the future has its outcome or its error."""
        if self.is_async:
            return self.submit(self._acall(n, policy))
        future = Future()

        def run() -> None:
            try:
                future.set_result(self.guard.run_task("t", {"n": n}, self._body, **policy))
            except BaseException as error:  # noqa: BLE001 - told where it is asked for
                future.set_exception(error)

        self._run(run)
        return future

    async def _acall(self, n, policy):
        return await self.guard.run_task("t", {"n": n}, self._abody, **policy)

    def call(self, n=1, **policy):
        """The outcome of a call of task `n`."""
        return self.start(n, **policy).result(LONG)

    def lead(self, n=1, **policy) -> Future:
        """A call whose body is inside when this returns, until `gate` is set."""
        self.gate.clear()
        while self.inside.acquire(blocking=False):
            pass  # bodies of earlier calls
        leader = self.start(n, **policy)
        assert self.inside.acquire(timeout=LONG)
        return leader

    def hand(self, name, *args):
        """Something of the guard's, by hand."""
        if self.is_async:
            return self.submit(getattr(self.guard.aio, name)(*args)).result(LONG)
        return getattr(self.guard, name)(*args)

    @property
    def store(self) -> RedisStore:
        return self.guard.engine.store

    @property
    def ledger(self):
        return self.guard.ledger

    def task(self, n=1) -> Task:
        return Task.of("t", {"n": n})

    def address(self, n=1) -> Address:
        return Address("default", self.task(n).fingerprint)

    def perform(self, command):
        """A command on the store itself."""
        if self.is_async:
            return self.submit(self.store.aio.perform(command)).result(LONG)
        return self.store.perform(command)

    # --- what the ledger says -----------------------------------------------------------------------

    def told(self):
        """The backlog is empty: the server knows what it was owed."""
        until(self.guard.engine.backlog.settle, LONG, "what is owed is told")

    def account(self, *, lost=0, unbooked=0):
        """Everything was booked, and once; gives the totals.

        Args:
            lost: executions that had no body and no end.
            unbooked: executions whose lines a flushed server has lost.

        """
        self.calm()
        self.told()
        lines, totals = list(self.ledger.lines()), self.ledger.totals()
        ran = len(self.bodies) - unbooked
        assert len(lines) == len({line.execution_id for line in lines}) == ran + lost
        assert totals["executions"] == totals["runs"] == ran + lost
        assert Counter(line.status for line in lines)["open"] == 0
        assert [line.spent.reports for line in lines if line.status != "lost"] == [1] * ran
        assert sum(line.cost or 0 for line in lines) == ran * PRICE
        assert totals["charged"] == ran * PRICE
        assert totals["input_tokens"] == ran * TOKENS[0]
        assert totals["output_tokens"] == ran * TOKENS[1]
        return totals


def of(name):
    """Matches a request that runs this script."""
    lua = script(name)
    texts = {lua.text.encode(), lua.sha.encode()}
    return lambda frame: frame[0] in (b"EVAL", b"EVALSHA") and frame[1] in texts


# --- A fault at every step -------------------------------------------------------------------------


class Bench:
    """A lab behind the proxy, a server without one, and the fault that is to happen."""

    def __init__(self, proxy, standalone, kind, fault) -> None:
        self.proxy, self.server, self.fault = proxy, standalone, fault
        self.url = f"{proxy.url}?socket_timeout={TIMEOUT}"
        self.lab = Lab(self.url, kind)
        self.lab.calm = self._calm
        self.others = []
        self.traps = []

    def other(self, kind="plain", where=None, **settings) -> Lab:
        """Another lab; on the server itself, if nothing else is said."""
        self.others.append(Lab(where or self.server.url, kind, **settings))
        return self.others[-1]

    def break_at(self, name):
        """The next request of this script, or command, meets the fault."""
        match = of(name) if name in NAMES else name
        if self.fault == "delay":
            self.proxy.delay = LATE
            before = self.seen(match)
            return lambda: until(lambda: self.seen(match) > before, LONG, f"{name} is sent")
        trap = getattr(self.proxy, self.fault)(match)
        self.traps.append(trap)
        return lambda: trap.wait(LONG)

    def seen(self, match) -> int:
        """How many requests of a script, or command, came by so far."""
        if isinstance(match, str):
            match = partial(_is_named, match.encode())
        return sum(match(noted.frame) for noted in self.proxy.noted())

    def _calm(self) -> None:
        self.proxy.delay = 0.0

    @property
    def repeats(self) -> int:
        """How often a step was performed that nobody heard of."""
        return 1 if self.fault in ("swallow", "hang") else 0

    def close(self) -> None:
        for trap in self.traps:
            trap.cancel()
        self.proxy.delay = 0.0
        for lab in (*self.others, self.lab):
            lab.close()


def _is_named(name, frame) -> bool:
    return frame[0].upper() == name


def case_begin(bench, lab):
    met = bench.break_at("begin")
    assert lab.call().source == "executed"
    met()
    assert lab.account()["reused"] == 0


def case_begin_reusing(bench, lab):
    assert lab.call().source == "executed"
    met = bench.break_at("begin")
    assert lab.call().result == "value of 1"
    met()
    assert 1 <= lab.account()["reused"] <= 1 + bench.repeats


def case_begin_waiting(bench, lab):
    other = bench.other()
    leader = other.lead()
    met = bench.break_at("begin")
    waiter = lab.start()
    met()
    until(lambda: _listeners(bench, lab) == 1, LONG, "the waiter listens")
    other.gate.set()
    assert leader.result(LONG).source == "executed"
    assert waiter.result(LONG).source == "reused"
    assert lab.bodies == []
    lab.bodies += other.bodies
    assert lab.account()["reused"] == 1


def case_renew(bench, lab):
    leader = lab.lead(lease=1.2)
    met = bench.break_at("renew")
    met()
    until(lambda: bench.seen(of("renew")) >= 2, LONG, "it renews again")
    lab.gate.set()
    outcome = leader.result(LONG)
    assert (outcome.source, outcome.lost) == ("executed", False)
    assert lab.account()["lost"] == 0


def case_complete(bench, lab):
    met = bench.break_at("complete")
    outcome = lab.call()
    assert (outcome.source, outcome.result, outcome.lost) == ("executed", "value of 1", False)
    met()
    assert lab.account()["executed"] == 1


def case_release(bench, lab):
    lab.fails = ValueError("no")
    met = bench.break_at("release")
    with pytest.raises(ValueError, match=r"^no$"):
        lab.call()
    met()
    assert lab.call().cause == "retry"
    totals = lab.account()
    assert (totals["failed"], totals["executed"]) == (1, 1)


def case_withdraw(bench, lab):
    other = bench.other()
    leader = other.lead()
    met = bench.break_at("withdraw")
    with pytest.raises(errors.WaitTimeoutError):
        lab.call(wait_timeout=0.05, on_timeout="raise")
    met()
    other.gate.set()
    assert leader.result(LONG).source == "executed"
    lab.bodies += other.bodies
    totals = lab.account()
    assert 1 <= totals["refused"] <= 1 + bench.repeats


def case_forget(bench, lab):
    lab.call()
    met = bench.break_at("forget")
    lab.hand("forget", lab.task())
    met()
    assert lab.call().cause == "forced"
    assert lab.account()["duplicates"] == 0


def case_resolve(bench, lab):
    met = bench.break_at("resolve")
    lab.hand("resolve", lab.task(), "known")
    met()
    assert lab.call().result == "known"
    assert lab.bodies == []
    assert lab.account()["executions"] == 0


def case_sweep(bench, lab):
    short = bench.other(lease=0.05)
    assert short.guard.claim(short.task()) is not None
    until(lambda: lab.store.overdue("default"), LONG, "the lease is past")
    met = bench.break_at("sweep")
    lab.perform(Sweep(lab.address()))
    met()
    totals = lab.account(lost=1)
    assert totals["lost"] == 1
    assert lab.call().cause == "lost"
    assert lab.account(lost=1)["duplicates"] == 1
    assert lab.ledger.totals()["lost"] == 1


def case_share(bench, lab):
    other = bench.other()
    leader = other.lead()
    waiters = [lab.start()]
    until(lambda: _listeners(bench, lab) == 1, LONG, "one waiter listens")
    met = bench.break_at("share")
    waiters += [lab.start() for _ in range(4)]
    met()  # that they found the claim is booked
    other.gate.set()
    assert leader.result(LONG).source == "executed"
    assert {waiter.result(LONG).source for waiter in waiters} == {"reused"}
    lab.bodies += other.bodies
    assert lab.account()["reused"] == 5


def case_share_reusing(bench, lab):
    other = bench.other()
    leader = other.lead()
    waiters = [lab.start()]
    until(lambda: _listeners(bench, lab) == 1, LONG, "one waiter listens")
    waiters += [lab.start() for _ in range(4)]
    until(lambda: bench.seen(of("share")) >= 1, LONG, "that they found the claim is booked")
    met = bench.break_at("share")
    other.gate.set()
    assert leader.result(LONG).source == "executed"
    assert {waiter.result(LONG).source for waiter in waiters} == {"reused"}
    met()
    lab.bodies += other.bodies
    assert 5 <= lab.account()["reused"] <= 5 + 5 * bench.repeats


def case_subscribe(bench, lab):
    other = bench.other()
    leader = other.lead()
    met = bench.break_at("SUBSCRIBE")
    waiter = lab.start()
    met()
    until(lambda: _listeners(bench, lab) == 1, LONG, "the waiter listens")
    other.gate.set()
    assert leader.result(LONG).source == "executed"
    assert waiter.result(LONG).source == "reused"
    lab.bodies += other.bodies
    assert lab.account()["reused"] == 1


def case_look(bench, lab):
    lab.call()
    met = bench.break_at("look")
    assert lab.hand("peek", lab.task()).result == "value of 1"
    met()
    assert lab.account()["reused"] == 0


def case_read(bench, lab):
    lab.call()
    met = bench.break_at("read")
    assert len(list(lab.ledger.lines())) == 1
    met()
    met = bench.break_at("read")
    assert lab.ledger.runs(lab.task().fingerprint) == 1
    met()
    lab.account()


def case_tallies(bench, lab):
    lab.call()
    met = bench.break_at("tallies")
    assert lab.ledger.totals()["executions"] == 1
    met()
    lab.account()


def case_overdue(bench, lab):
    lab.call()
    met = bench.break_at("overdue")
    assert lab.ledger.sweep() == 0
    met()
    lab.account()


def case_secret(bench, lab):
    met = bench.break_at("secret")
    secret = lab.store.secret("default")
    met()
    assert len(secret) == 32
    assert bench.other().store.secret("default") == secret
    lab.account()


def _tending(bench, name):
    """A lab that lives an hour later, when its upkeep meets the fault."""
    clock = [time.time_ns() // 1_000_000]
    store = RedisStore(bench.url, clock=lambda: clock[0])
    lab = bench.other(where=store, ttl=86_400.0)
    for n in range(3):
        lab.call(n)
    before = lab.account()
    clock[0] += 3_600_000
    met = bench.break_at(name)
    store.tend(8 * 86_400_000)
    met()
    bench.proxy.delay = 0.0
    assert lab.account() == before
    store.tend(8 * 86_400_000)
    assert lab.account() == before
    assert lab.call(1).source == "reused"
    store.close()


def case_pour(bench, _):
    _tending(bench, "pour")


def case_prune(bench, _):
    _tending(bench, "prune")


CASES = {name[5:]: case for name, case in list(globals().items()) if name.startswith("case_")}
# what is done from plain code, wherever it is asked for
PLAIN = {"read", "tallies", "overdue", "secret", "pour", "prune"}


def test_every_command_and_every_script_has_a_case():
    assert set(NAMES) >= COMMANDS
    of_cases = {case.partition("_")[0] for case in CASES}
    assert of_cases == {*NAMES, "subscribe"}


def _listeners(bench, lab) -> int:
    channel = (
        f"idemguard:{{default:{lab.address().fingerprint[0]}}}:task:{lab.address().fingerprint}"
    )
    there = dict(bench.server.own.pubsub_numsub(channel))
    return there[channel.encode()]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in CASES for kind in KINDS if kind == "plain" or case not in PLAIN],
)
def test_a_fault_runs_and_counts_nothing_twice(proxy, standalone, monkeypatch, case, kind, fault):
    monkeypatch.setattr(ears, "PATIENCE", 2 * TIMEOUT)
    bench = Bench(proxy, standalone, kind, fault)
    try:
        CASES[case](bench, bench.lab)
        proxy.delay = 0.0
        if case not in ("pour", "prune"):
            before = bench.lab.bodies.copy()
            assert bench.lab.call().source == (
                "executed" if not before and case != "resolve" else "reused"
            )
            if before:
                assert bench.lab.bodies == before
    finally:
        bench.close()


@pytest.mark.parametrize("fault", ["cut_before", "swallow"])
@pytest.mark.parametrize("case", ["begin", "complete", "release", "forget", "resolve"])
def test_two_faults_in_a_row_run_and_count_nothing_twice(proxy, standalone, case, fault):
    bench = Bench(proxy, standalone, "plain", fault)
    try:
        again = getattr(proxy, fault)(of(case), nth=2)  # the case itself breaks the first
        CASES[case](bench, bench.lab)
        assert again.sprung
    finally:
        bench.close()


# --- a cancellation at every await, on a slow line ------------------------------------------------------

SLOW = 0.2  # seconds by which each reply is late
MANY = 40  # more awaits than a call has


@types.coroutine
def stepped(inner, number, act):
    """As `inner`; when it awaits for the `number`-th time, `act` is called. Gives the number of awaits."""
    steps = inner.__await__()
    awaits, sent, raised = 0, None, None
    while True:
        try:
            future = steps.send(sent) if raised is None else steps.throw(raised)
        except StopIteration:
            return awaits
        awaits += 1
        if awaits == number:
            act()
        sent = raised = None
        try:
            sent = yield future
        except BaseException as error:  # noqa: BLE001 - it belongs to the inner one
            raised = error


async def _cut_short(call, number, later):
    """Cancel a call at its n-th await, at once or while its reply is on its way; the awaits it had."""
    loop = asyncio.get_running_loop()

    async def run():
        me = asyncio.current_task()
        return await stepped(call, number, lambda: loop.call_later(later, me.cancel))

    task = asyncio.ensure_future(run())
    try:
        return await task
    except asyncio.CancelledError:
        return None


def _keys_end(server):
    """Every key has an expiry."""
    keys = server.tell("KEYS", "idemguard:*")
    assert keys
    assert [key for key in keys if server.tell("PTTL", key) < 0] == []


@pytest.mark.parametrize("later", [0.0, SLOW / 2, SLOW * 1.5], ids=["at once", "amid", "later"])
def test_a_call_is_cancelled_at_each_of_its_awaits_in_turn(proxy, standalone, later):
    begun, ended = Counter(), Counter()
    guard = Guard(store=proxy.url, pricer=lambda _: PRICE, lease=30.0)
    proxy.delay = SLOW

    async def body(payload):
        begun[payload["n"]] += 1
        record_usage(input_tokens=TOKENS[0], output_tokens=TOKENS[1], model="m")
        await asyncio.sleep(0.01)
        ended[payload["n"]] += 1
        return f"value of {payload['n']}"

    async def cancel_each():
        # on a loop whose client has been made, and on one whose has not
        awaits = await _cut_short(guard.run_task("t", {"n": 0}, body), MANY, 0)
        assert awaits is not None
        assert awaits >= 3
        calls = [guard.run_task("t", {"n": n}, body) for n in range(1, awaits + 1)]
        cut = await asyncio.gather(*(_cut_short(call, n, later) for n, call in enumerate(calls, 1)))
        if not later:
            assert cut == [None] * awaits
        return awaits

    awaits = asyncio.run(cancel_each())
    proxy.delay = 0.0
    until(guard.engine.backlog.settle, LONG, "what is owed is told")
    _keys_end(standalone)
    assert [line for line in guard.ledger.lines() if line.status == "open"] == []
    assert sum(begun.values()) >= 2

    async def after():
        started = time.monotonic()
        outcomes = [await guard.run_task("t", {"n": n}, body) for n in range(awaits + 1)]
        assert time.monotonic() - started < 20.0  # nobody waits for a lease
        return outcomes

    finished, before = ended.copy(), begun.copy()
    for n, outcome in enumerate(asyncio.run(after())):
        assert outcome.result == f"value of {n}"
        assert outcome.source == ("reused" if finished[n] else "executed")
        assert outcome.cause == ("first" if not before[n] or finished[n] else "retry")
    totals = guard.ledger.totals()
    assert totals["executions"] == sum(begun.values())
    assert totals["charged"] == sum(begun.values()) * PRICE
    assert (totals["lost"], totals["duplicates"]) == (0, 0)
    guard.close()


@pytest.mark.parametrize("later", [0.0, SLOW / 2, SLOW * 1.5], ids=["at once", "amid", "later"])
def test_a_waiter_is_cancelled_at_each_of_its_awaits_in_turn(proxy, standalone, later):
    leading, ran = Guard(store=standalone.url), []
    guard = Guard(store=proxy.url)
    crowd = 12
    claims = [leading.claim(Task.of("t", {"n": n})) for n in range(crowd + 1)]
    proxy.delay = SLOW

    async def body(payload):
        ran.append(payload)

    async def cancel_each():
        calls = [guard.run_task("t", {"n": n}, body) for n in range(1, crowd + 1)]
        done = asyncio.gather(*(_cut_short(call, n, later) for n, call in enumerate(calls, 1)))
        # those that had fewer awaits by now are waiting for their leaders
        await asyncio.wait([done], timeout=5 * SLOW + later)
        for n, claim in enumerate(claims):
            assert claim.complete(f"value of {n}")
        await asyncio.wait_for(done, LONG)

    asyncio.run(cancel_each())
    proxy.delay = 0.0
    assert ran == []
    until(guard.engine.backlog.settle, LONG, "what is owed is told")
    _keys_end(standalone)
    assert Counter(line.status for line in guard.ledger.lines()) == {"ok": crowd + 1}
    for n in range(crowd + 1):
        assert guard.peek(Task.of("t", {"n": n})).result == f"value of {n}"
    assert guard.ledger.totals()["executions"] == crowd + 1
    guard.close()
    leading.close()

"""A store lives among loops, threads, forks, full pools, narrow rights and wrong ports of its process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis
import redis.asyncio
import valkey
import valkey.asyncio
import valkey.asyncio.sentinel
import valkey.sentinel
from servers.server import HOST, Server, until
from test_clients import Front, taken_from
from test_redis_deployments import RIGHTS
from test_redis_faults import KINDS, LONG, Lab, nobody_tidies

import idemguard
from idemguard import Guard
from idemguard.claim import Sweep
from idemguard.errors import ConfigurationError, StoreError, StoreUnavailableError
from idemguard.stores import wire
from idemguard.stores.redis import RedisStore

HOUR = 3_600_000  # ms


@pytest.fixture
def tls(standalone, tmp_path):
    """TLS in front of `standalone`."""
    front = Front(standalone, tmp_path)
    front.start()
    yield front
    front.close()


@pytest.fixture
def lab_of():
    """Makes labs, which are over when the test is."""
    made = []

    def make(where, kind="plain", **settings):
        made.append(Lab(where, kind, **settings))
        return made[-1]

    yield make
    for lab in made:
        lab.close()


def closed(guard):
    """Close it, with nothing beside the calls that would open the store anew."""
    nobody_tidies()
    guard.close()


def with_(url, option):
    """A URL with one more option."""
    return f"{url}{'&' if '?' in url else '?'}{option}"


def named(server, name):
    """How many connections of this name the server has."""
    return sum(client["name"] == name for client in server.own.client_list())


def found_a_claim(store):
    """How many calls have found somebody who executes."""
    return sum(window.counts.get("found", 0) for window in store.windows("default", 0, 2**53))


async def double(n):
    return 2 * n


async def never(_):
    raise AssertionError("somebody executes already")


# --- loops ------------------------------------------------------------------------------------------


def by_run(call):
    return asyncio.run(call)


def by_hand(call):
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(call)
    finally:
        loop.close()


# who closes a loop by hand leaves its transports to the collector
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("run", [by_run, by_hand])
def test_loops_that_are_closed_keep_no_connection(standalone, run):
    guard = Guard(store=RedisStore(with_(standalone.url, "client_name=loops")))
    assert guard.run_task("t", 0, lambda _: "sync").source == "executed"
    assert named(standalone, "loops") == 1

    async def call(n):
        assert (await guard.run_task("t", n, double)).result == 2 * n
        # the one before is let go at the first call of the next
        return until(lambda: named(standalone, "loops") == 2)

    for n in range(1, 11):
        assert run(call(n))
        if run is by_run:
            until(lambda: named(standalone, "loops") == 1)
    closed(guard)
    until(lambda: named(standalone, "loops") == 0)
    gc.collect()  # here, and not where a warning is an error


def test_a_loop_that_was_closed_while_one_waited_keeps_no_subscription(standalone, lab_of):
    lab = lab_of(with_(standalone.url, "client_name=leader"))
    guard = Guard(store=RedisStore(with_(standalone.url, "client_name=loops")))

    async def waits_in_vain():
        waiter = asyncio.ensure_future(guard.run_task("t", {"n": 1}, never))
        await asyncio.to_thread(until, lambda: found_a_claim(lab.store) == 1)
        await asyncio.to_thread(until, lambda: named(standalone, "loops") == 2)
        waiter.cancel()
        await asyncio.wait([waiter])

    lab.lead(1)
    asyncio.run(waits_in_vain())
    until(lambda: named(standalone, "loops") <= 1)  # who asks in its place is of the process
    closed(guard)
    until(lambda: named(standalone, "loops") == 0)


def test_two_loops_in_two_threads_and_plain_calls_share_one_execution(redis_url, crew):
    guard = Guard(store=RedisStore(redis_url))
    ran, go, start = [], threading.Event(), threading.Barrier(4)

    def body(n):
        ran.append(n)
        assert go.wait(LONG)
        return {"n": n}

    async def abody(n):
        return await asyncio.to_thread(body, n)

    def looped():
        async def main():
            start.wait(LONG)
            return await asyncio.gather(*(guard.run_task("t", 7, abody) for _ in range(20)))

        return asyncio.run(main())

    def plain():
        start.wait(LONG)
        return [guard.run_task("t", 7, body)]

    calls = [crew.start(each) for each in (looped, looped, plain, plain)]
    until(lambda: found_a_claim(guard.engine.store) == 41, LONG, "all the others wait")
    go.set()
    outcomes = [outcome for call in calls for outcome in call.result(LONG)]
    assert ran == [7]
    assert [outcome.result for outcome in outcomes] == [{"n": 7}] * 42
    assert sorted(outcome.source for outcome in outcomes) == ["executed", *["reused"] * 41]
    totals = guard.ledger.totals()
    assert (totals["executed"], totals["reused"], totals["duplicates"]) == (1, 41, 0)
    closed(guard)


@pytest.mark.parametrize("does", ["executes", "waits"])
def test_a_loop_that_is_held_up_takes_no_server_for_away(standalone, lab_of, does):
    """As by thousands of calls that begin at once: the time to connect passes, and nobody looks."""
    leading = lab_of(standalone.url)
    guard = Guard(store=with_(standalone.url, "socket_connect_timeout=0.1"))
    tries = itertools.count()

    async def main():
        loop = asyncio.get_running_loop()
        connect = loop.sock_connect

        async def held_up(*where):
            if next(tries) % 2 == 0:
                loop.call_soon(time.sleep, 0.7)
            return await connect(*where)

        loop.sock_connect = held_up
        if does == "executes":
            return await guard.run_task("t", 1, double)
        leading.lead(1)
        call = asyncio.ensure_future(guard.run_task("t", {"n": 1}, never))
        await asyncio.to_thread(until, lambda: found_a_claim(leading.store) == 1)
        leading.gate.set()
        return await call

    assert asyncio.run(main()).source == ("executed" if does == "executes" else "reused")
    assert next(tries) == (2 if does == "executes" else 4)  # each was tried once more
    closed(guard)


# --- forks ------------------------------------------------------------------------------------------

FORK = """
import asyncio, os, sys, threading
from idemguard import Guard

url, kind = sys.argv[1:]
guard = Guard(store=url)


def never(_):
    raise AssertionError("somebody executes already")


def same(payload):
    return payload


def call(task_type, payload, body):
    if kind == "plain":
        return guard.run_task(task_type, payload, body).result

    async def abody(payload):
        return body(payload)

    async def main():
        return (await guard.run_task(task_type, payload, abody)).result

    return asyncio.run(main())


def use(who):
    told = call("t", {"n": 1}, never)
    others = [call("other", f"{who} {n}", same) for n in range(20)]
    assert others == [f"{who} {n}" for n in range(20)], others
    return told


found = []
waiter = threading.Thread(target=lambda: found.append(use("parent")))
waiter.start()
assert sys.stdin.readline() == "fork\\n"
child = os.fork()
if not child:
    code = 1
    try:
        print("child:", use("child"), flush=True)
        guard.close()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
waiter.join()
assert os.waitpid(child, 0)[1] == 0
print("parent:", *found, flush=True)
guard.close()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_forks_while_one_of_its_threads_waits(standalone, lab_of, kind):
    lab = lab_of(standalone.url)
    leader, channel = lab.lead(1), wire.keys(lab.address(1))[0]

    def hearing():
        return standalone.tell("PUBSUB", "NUMSUB", channel)[1]

    forking = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", FORK, standalone.url, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: hearing() == 1, LONG, "the parent waits")
        forking.stdin.write("fork\n")
        forking.stdin.flush()
        until(lambda: hearing() == 2, LONG, "the child waits, too")
        lab.gate.set()
        told, errors = forking.communicate(timeout=LONG)
    finally:
        forking.kill()
        forking.communicate()
    assert errors == ""
    assert sorted(told.splitlines()) == ["child: value of 1", "parent: value of 1"]
    assert leader.result(LONG).source == "executed"
    until(lambda: lab.ledger.totals()["reused"] == 2, LONG, "both are booked")
    totals = lab.ledger.totals()
    assert (totals["executed"], totals["duplicates"]) == (41, 0)


# --- pools ------------------------------------------------------------------------------------------


def many_threads(guard, crew, count):
    start = threading.Barrier(count)

    def call(n):
        start.wait(LONG)
        return guard.run_task("t", n, lambda n: 2 * n)

    calls = [crew.start(call, n) for n in range(count)]
    return [call.result(2 * LONG) for call in calls]


def many_tasks(guard, _, count):
    async def main():
        return await asyncio.gather(*(guard.run_task("t", n, double) for n in range(count)))

    return asyncio.run(main())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("many", "count"), [(many_threads, 300), (many_tasks, 1_000)])
def test_a_crowd_of_different_calls_queues_for_few_connections(standalone, crew, many, count, size):
    url = with_(standalone.url, f"client_name=crowd&max_connections={size}")
    guard, peak, over = Guard(store=url), [0], threading.Event()

    def watch():
        while not over.wait(0.02):
            peak[0] = max(peak[0], named(standalone, "crowd"))

    watcher = crew.start(watch)
    try:
        outcomes = many(guard, crew, count)
    finally:
        over.set()
    watcher.result(LONG)
    assert [outcome.result for outcome in outcomes] == [2 * n for n in range(count)]
    assert {outcome.source for outcome in outcomes} == {"executed"}
    # of a loop there are as many as it may have, and those of the thread that renews
    assert 1 <= peak[0] <= size * (1 + (many is many_tasks))
    assert guard.ledger.totals()["executed"] == count
    closed(guard)


@pytest.mark.parametrize(("many", "count"), [(many_threads, 100), (many_tasks, 500)])
def test_a_crowd_queues_for_the_connections_to_a_cluster(cluster, crew, many, count):
    guard = Guard(store=with_(cluster.url, "max_connections=1"))
    outcomes = many(guard, crew, count)
    assert [outcome.result for outcome in outcomes] == [2 * n for n in range(count)]
    assert guard.ledger.totals()["executed"] == count
    closed(guard)


@pytest.mark.parametrize("server", ["standalone", "cluster"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_connection_is_enough_although_somebody_waits(request, lab_of, kind, server):
    url = request.getfixturevalue(server).url
    leading, lab = lab_of(url), lab_of(with_(url, "max_connections=1"), kind)
    leader = leading.lead(1)
    waiters = [lab.start(1) for _ in range(3)]
    until(lambda: found_a_claim(leading.store) == 3, LONG, "they wait")
    assert [lab.call(n).source for n in range(2, 12)] == ["executed"] * 10
    leading.gate.set()
    assert leader.result(LONG).source == "executed"
    assert [waiter.result(LONG).source for waiter in waiters] == ["reused"] * 3


def test_who_comes_first_is_served_first_and_a_renewal_before_them(proxy, crew):
    store = RedisStore(with_(proxy.url, "max_connections=1"))
    guard = Guard(store=store)
    claim = guard.claim(idemguard.Task.of("held", 0))
    turns, calls = store._clients.take(LONG), []
    tasks = [idemguard.Task.of("t", n) for n in range(8)]
    proxy.forget()
    for n in range(8):
        calls.append(crew.start(guard.claim, tasks[n]))
        until(lambda n=n: len(turns._waiting) == n + 1, LONG, "it queues")
    calls.append(crew.start(claim.renew))
    until(lambda: len(turns._waiting) == 9, LONG, "it queues, too")
    turns.give()
    for each in calls:
        each.result(LONG)
    came = [frame[3].decode().rpartition(":")[2] for frame in proxy.frames]
    assert came == [task.fingerprint for task in (claim.task, *tasks)]
    for each in (claim, *(call.result() for call in calls[:-1])):
        each.release()
    closed(guard)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_pool_holds_up_for_as_long_as_the_url_says(standalone, lab_of, crew, kind):
    lab = lab_of(with_(standalone.url, "max_connections=1&timeout=0.3&socket_timeout=60"), kind)
    lab.call(0)
    held = (
        lab.store._clients.take(LONG) if kind == "plain" else lab.submit(place_of(lab)).result(LONG)
    )
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError) as caught:
        lab.call(1)
    assert 0.2 < time.monotonic() - began < 30
    assert re.search(
        r"t \[\w{16}\].*all connections of its pool are in use at redis://.*0\.3 s.*max_connections",
        str(caught.value),
    )
    began = time.monotonic()
    assert lab.call(2, mode="observe").source == "unguarded"  # and who must not wait waits less
    assert time.monotonic() - began < 30
    if kind == "plain":
        held.give()
    else:
        lab.submit(back(held)).result(LONG)
    assert lab.call(3).source == "executed"


async def place_of(lab):
    """Take the loop's one connection."""
    places = (await lab.store.here())._places
    await places.acquire()
    return places


async def back(places):
    places.release()


@pytest.mark.parametrize("pool", ["ConnectionPool", "BlockingConnectionPool"])
def test_who_shares_a_pool_with_somebody_else_waits_for_its_connections(standalone, crew, pool):
    options = {"timeout": 0.1} if pool == "BlockingConnectionPool" else {}
    shared = getattr(redis, pool)(host=HOST, port=standalone.port, max_connections=2, **options)
    guard = Guard(store=RedisStore(redis.Redis(connection_pool=shared)))
    guard.run_task("t", 0, lambda n: n)
    held = [taken_from(shared) for _ in range(2)]
    call = crew.start(lambda: guard.run_task("t", 1, lambda n: n))
    with pytest.raises(TimeoutError):  # longer than an outage is waited for
        call.result(0.8)
    for each in held:
        shared.release(each)
    assert call.result(LONG).source == "executed"
    closed(guard)
    shared.disconnect()


@pytest.mark.parametrize("pool", ["ConnectionPool", "BlockingConnectionPool"])
def test_who_shares_a_pool_of_a_loop_waits_for_its_connections(standalone, pool):
    options = {"timeout": 0.1} if pool == "BlockingConnectionPool" else {}

    async def main():
        shared = getattr(redis.asyncio, pool)(
            host=HOST, port=standalone.port, max_connections=2, **options
        )
        guard = Guard(store=RedisStore(redis.asyncio.Redis(connection_pool=shared)))
        await guard.run_task("t", 0, double)
        held = [await taken_from(shared) for _ in range(2)]
        call = asyncio.ensure_future(guard.run_task("t", 1, double))
        done, _ = await asyncio.wait([call], timeout=0.8)
        assert not done
        for each in held:
            await shared.release(each)
        assert (await asyncio.wait_for(call, LONG)).source == "executed"
        await asyncio.to_thread(closed, guard)
        await shared.disconnect()

    asyncio.run(main())


# --- clients in the place of stores -----------------------------------------------------------------


@pytest.mark.parametrize("library", [redis, valkey])
@pytest.mark.parametrize("way", ["Guard", "configure", "idempotent"])
def test_a_client_is_a_store(standalone, library, way):
    client = getattr(library, library.__name__.title())(host=HOST, port=standalone.port)
    if way == "configure":
        idemguard.configure(store=client)
        outcomes = [idemguard.run_task("t", 21, lambda n: 2 * n) for _ in range(2)]
        guard = idemguard.engine.source()
    else:
        guard = Guard(store=client)
        if way == "idempotent":
            act = guard.idempotent(lambda n: 2 * n, task_type="t")
            with idemguard.capture() as outcomes:
                assert [act(21), act(21)] == [42, 42]
        else:
            outcomes = [guard.run_task("t", 21, lambda n: 2 * n) for _ in range(2)]
    assert [(one.source, one.result) for one in outcomes] == [("executed", 42), ("reused", 42)]
    assert guard.ledger.totals()["reused"] == 1
    closed(guard)
    assert client.ping()  # it is still its owner's
    client.close()


@pytest.mark.parametrize("library", [redis.asyncio, valkey.asyncio])
def test_an_asyncio_client_is_a_store(standalone, library):
    kind = library.__name__.partition(".")[0].title()

    async def main():
        client = getattr(library, kind)(host=HOST, port=standalone.port)
        guard = Guard(store=client)
        outcomes = [await guard.run_task("t", 21, double) for _ in range(2)]
        assert [(one.source, one.result) for one in outcomes] == [("executed", 42), ("reused", 42)]
        await asyncio.to_thread(closed, guard)
        assert await client.ping()
        await client.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (redis.Redis, "is a class"),
        (redis.ConnectionPool(), "connection_pool=pool"),
        (object(), "object is none of these"),
        (RedisStore, "none of these"),
    ],
)
@pytest.mark.parametrize("take", [Guard, idemguard.configure])
def test_what_is_no_store_is_refused_with_what_to_give(take, thing, words):
    with pytest.raises(ConfigurationError, match=words):
        take(store=thing)


# --- wrong ports ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tls_on_a_port_that_speaks_none_is_told_so(standalone, lab_of, kind):
    lab = lab_of(
        f"rediss://{HOST}:{standalone.port}?socket_connect_timeout=0.4&socket_timeout=60", kind
    )
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"at rediss://.*TLS.*redis://"):
        lab.call()
    assert time.monotonic() - began < 30  # and not as long as an answer may take


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", [2, 3])
def test_no_tls_on_a_port_that_speaks_it_is_told_so(tls, lab_of, kind, protocol):
    lab = lab_of(f"redis://{HOST}:{tls.port}?protocol={protocol}&socket_timeout=60", kind)
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"at redis://.*TLS.*rediss://"):
        lab.call()
    assert time.monotonic() - began < 30
    assert lab.bodies == []


def test_the_demo_shows_no_password(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"What {name} says is soon read.\n")
    with Server(password="s3cr3t") as server:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "idemguard", "demo", str(tmp_path)),
                *("--delay", "0.01", "--store", server.url),
            ],
            capture_output=True,
            text=True,
            timeout=2 * LONG,
            cwd=tmp_path,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    told = " ".join(done.stdout.split())
    assert f"The ledger stays in redis://***@{HOST}:{server.port}/0" in told
    assert "s3cr3t" not in told


# --- rights -----------------------------------------------------------------------------------------


@pytest.fixture
def limited(standalone):
    """The URL of a user who may what the documentation asks for, and no more."""
    standalone.tell("ACL", "SETUSER", "agent", "on", ">pw", *RIGHTS)
    standalone.tell("ACL", "LOG", "RESET")
    yield f"redis://agent:pw@{HOST}:{standalone.port}/0"
    assert standalone.tell("ACL", "LOG") == []  # nothing was denied


def test_the_documented_rights_are_those_that_are_tested():
    documented = (Path(__file__).parent.parent / "docs" / "redis.md").read_text()
    rule = documented.partition("What an ACL user needs:\n\n```text\n")[2].partition("```")[0]
    assert tuple(rule.split()) == RIGHTS


def test_upkeep_and_forgetting_need_no_more_rights(limited, standalone, clock):
    store = RedisStore(limited, clock=clock)
    guard = Guard(store=store)
    for n in range(5):
        guard.run_task("t", n, lambda n: n)
    guard.forget(idemguard.Task.of("t", 0))
    assert guard.run_task("t", 0, lambda n: n).cause == "forced"
    assert guard.ledger.totals()["executed"] == 6
    clock.advance(30 * 3600)
    store.tend(8 * 24 * HOUR)  # now counts are poured together
    names = [key.decode() for key in standalone.own.scan_iter("*:window:h*")]
    assert names
    store.overdue("default")
    store.perform(Sweep(idemguard.record.Address("default", "0" * 64)))
    clock.advance(10 * 24 * 3600)
    store.tend(8 * 24 * HOUR)  # and now they are over, as are the records
    assert store.windows("default", 0, 2**53) == []
    assert list(store.lines("default", 0, 2**53)) == []
    closed(guard)


def test_upkeep_by_the_servers_clock_needs_no_more_rights(limited, standalone):
    store = RedisStore(limited)
    store.secret("default")
    store.tend(None)
    assert standalone.tell("EXISTS", "idemguard:{default:0}:tended") == 0  # nothing to be tended
    guard = Guard(store=store)
    guard.run_task("t", 1, lambda n: n)
    store.tend(None)
    assert standalone.tell("EXISTS", "idemguard:{default:0}:tended") == 1
    closed(guard)


@pytest.mark.parametrize("kind", KINDS)
def test_a_user_who_may_not_see_a_clusters_slots_is_told_which_right_is_missing(
    cluster, lab_of, kind
):
    for node in cluster.nodes:
        node.tell("ACL", "SETUSER", "agent", "on", ">pw", *RIGHTS)
    url = cluster.url.replace("://", "://agent:pw@")
    with pytest.raises(StoreError) as caught:
        lab_of(url, kind).call()
    assert type(caught.value) is StoreError
    assert "NOPERM" in str(caught.value)
    assert "permit +cluster|slots, +command and +asking" in str(caught.value)
    assert "pw" not in str(caught.value)
    for node in cluster.nodes:
        node.tell("ACL", "SETUSER", "agent", "+cluster|slots", "+command", "+asking")
    assert lab_of(url, kind).call().source == "executed"


# --- valkey-py --------------------------------------------------------------------------------------


def valkey_client(server, kind, request):
    """valkey-py through Sentinel, or through TLS."""
    package = valkey.asyncio if kind == "coroutine" else valkey
    if server == "sentinel":
        watchers = [(HOST, each.port) for each in request.getfixturevalue("sentinel").watchers]
        return package.sentinel.Sentinel(watchers).master_for("mymaster")
    front = request.getfixturevalue("tls")
    return package.Valkey(host=HOST, port=front.port, ssl=True, ssl_ca_certs=front.ca)


@pytest.mark.parametrize("server", ["sentinel", "tls"])
@pytest.mark.parametrize("kind", KINDS)
def test_valkey_py_reaches_it_through(server, kind, request, crew):
    client, ran = valkey_client(server, kind, request), []
    inside, go = threading.Event(), threading.Event()

    def body(n):
        ran.append(n)
        inside.set()
        assert go.wait(LONG)
        return [n]

    async def abody(n):
        return await asyncio.to_thread(body, n)

    def plain():
        guard = Guard(store=client)
        calls = [crew.start(lambda: guard.run_task("t", 5, body)) for _ in range(3)]
        until(lambda: found_a_claim(guard.engine.store) == 2, LONG, "two wait")
        go.set()
        outcomes = [call.result(LONG) for call in calls]
        outcomes.append(guard.run_task("t", 5, body))
        closed(guard)
        client.close()
        return outcomes

    async def looped():
        guard = Guard(store=client)
        calls = [asyncio.ensure_future(guard.run_task("t", 5, abody)) for _ in range(3)]
        await asyncio.to_thread(until, lambda: found_a_claim(guard.engine.store) == 2, LONG)
        go.set()
        outcomes = [*await asyncio.gather(*calls), await guard.run_task("t", 5, abody)]
        await asyncio.to_thread(closed, guard)
        await client.aclose()
        return outcomes

    outcomes = plain() if kind == "plain" else asyncio.run(looped())
    assert [outcome.result for outcome in outcomes] == [[5]] * 4
    assert ran == [5]
    assert sorted(outcome.source for outcome in outcomes) == ["executed", *["reused"] * 3]


# --- what an error tells ----------------------------------------------------------------------------


def of_another_kind(server, lab):
    key = wire.keys(lab.address())[0]
    server.tell("DEL", key)
    server.tell("RPUSH", key, "x")
    return "WRONGTYPE", "another program writes"


def damaged(server, lab):
    server.tell("SET", wire.keys(lab.address())[0], b"\x80\x04K\x01.")
    return "DAMAGED|damaged", r"forget\(\)"


def full(server, _):
    server.tell("CONFIG", "SET", "maxmemory", 1)
    return "OOM", "maxmemory"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trouble", [of_another_kind, damaged, full])
def test_an_error_tells_of_which_task_it_is(standalone, lab_of, kind, trouble):
    lab = lab_of(standalone.url, kind)
    what, todo = trouble(standalone, lab)
    with pytest.raises(StoreError) as caught:
        lab.call()
    tells_of(lab, caught.value)
    assert re.search(f"({what}).*{todo}", str(caught.value))


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_a_server_that_is_away_tells_of_which_task_it_is(proxy, lab_of, kind):
    lab = lab_of(proxy.url, kind)
    proxy.refuse()
    with pytest.raises(StoreUnavailableError, match="does not answer") as caught:
        lab.call()
    tells_of(lab, caught.value)


def test_a_renewal_and_a_resolution_tell_of_which_task_they_are(standalone, lab_of):
    lab = lab_of(standalone.url)
    claim = lab.guard.claim(lab.task())
    of_another_kind(standalone, lab)
    for act in (claim.renew, lambda: lab.guard.resolve(lab.task(), 1)):
        with pytest.raises(StoreError, match="WRONGTYPE") as caught:
            act()
        tells_of(lab, caught.value)
    with pytest.raises(StoreError, match="WRONGTYPE") as caught:
        lab.guard.forget(lab.task())  # this command knows no more than the fingerprint
    assert lab.task().fingerprint[:16] in str(caught.value)
    assert caught.value.fingerprint == lab.task().fingerprint


def tells_of(lab, error):
    fingerprint = lab.task().fingerprint
    assert f"t [{fingerprint[:16]}]" in str(error)
    assert (error.task_type, error.fingerprint) == ("t", fingerprint)

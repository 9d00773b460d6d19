"""Each way to run a server, each client of it, and each shape of callable, in pairs; what moves and fails over."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from itertools import combinations, product

import fakeredis
import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
import valkey
import valkey.asyncio
import valkey.asyncio.cluster
import valkey.cluster
from redis.asyncio.cluster import RedisCluster as AsyncCluster
from redis.cluster import RedisCluster
from servers.server import HOST, until
from test_clients import Front
from test_redis_faults import KINDS, LONG, Lab

from idemguard import Guard
from idemguard.claim import Sweep
from idemguard.errors import StoreError
from idemguard.stores import patience, wire
from idemguard.stores.redis import RedisStore

# what an ACL user needs, as the documentation says
RIGHTS = (
    "~idemguard:*", "&idemguard:*", "-@all", "+eval", "+evalsha", "+time", "+get", "+set", "+del",
    "+exists", "+pttl", "+pexpire", "+persist", "+hget", "+hmget", "+hset", "+hdel", "+hkeys",
    "+hgetall", "+hincrby", "+zadd", "+zrem", "+zrange", "+zrangebyscore", "+zrangebylex",
    "+zscan", "+sadd", "+smembers", "+publish", "+spublish", "+subscribe",
    "+unsubscribe", "+ssubscribe", "+sunsubscribe", "+hello", "+client|setinfo", "+select",
    "+ping",
)  # fmt: skip


@pytest.fixture
def tls(standalone, tmp_path):
    """TLS in front of `standalone`."""
    front = Front(standalone, tmp_path)
    front.start()
    yield front
    front.close()


# --- pairs -----------------------------------------------------------------------------------------

SERVERS = ("tcp", "unix", "tls", "acl", "sentinel", "cluster")
CLIENTS = ("url", "sync", "asyncio", "valkey", "valkey asyncio")
OPTIONS = ("resp2", "resp3", "resp2 decoded", "resp3 decoded")
SHAPES = ("plain", "coroutine", "generator", "async generator")


def possible(server, client, options, shape) -> bool:
    """Whether there is such a thing: a URL decodes nothing, and valkey-py is tried where it differs."""
    if client == "url" and options.endswith("decoded"):
        return False
    return not (client.startswith("valkey") and server in ("sentinel", "tls"))


def pairs():
    """Few enough cases that every two values that can meet do, found greedily."""
    every = [case for case in product(SERVERS, CLIENTS, OPTIONS, SHAPES) if possible(*case)]
    of = {case: set(combinations(enumerate(case), 2)) for case in every}
    left, chosen = set().union(*of.values()), []
    while left:
        best = max(every, key=lambda case: len(of[case] & left))
        chosen.append(best)
        left -= of[best]
    return chosen


@contextmanager
def made(server, client, options, request):
    """A URL or a client, and how the client is closed."""
    settings = {"protocol": 3 if options.startswith("resp3") else 2}
    if options.endswith("decoded"):
        settings["decode_responses"] = True
    here = request.getfixturevalue(
        {"sentinel": "sentinel", "cluster": "cluster", "tls": "tls"}.get(server, "standalone")
    )
    if server == "acl":
        user = redis.Redis(host=HOST, port=here.port)
        user.execute_command("ACL", "SETUSER", "agent", "on", ">pw", *RIGHTS)
        user.close()
        settings |= {"username": "agent", "password": "pw"}
    if client == "url":
        yield _url(server, here, settings["protocol"])
        return
    library = valkey if client.startswith("valkey") else redis
    library = library.asyncio if client.endswith("asyncio") else library
    if server == "cluster":
        kind = (AsyncCluster if client == "asyncio" else RedisCluster) if library in (
            redis, redis.asyncio) else library.cluster.ValkeyCluster  # fmt: skip
        node = library.cluster.ClusterNode
        each = kind(startup_nodes=[node(HOST, port) for port in here.ports], **settings)
    elif server == "sentinel":
        watcher = [(HOST, each.port) for each in here.watchers]
        finder = (redis.asyncio.sentinel if client == "asyncio" else redis.sentinel).Sentinel(
            watcher
        )
        each = finder.master_for("mymaster", **settings)
    else:
        kind = library.Valkey if library in (valkey, valkey.asyncio) else library.Redis
        where = {"host": HOST, "port": here.port}
        if server == "unix":
            where = {"unix_socket_path": here.unix}
        elif server == "tls":
            where |= {"ssl": True, "ssl_ca_certs": str(here.ca)}
        each = kind(**where, **settings)
    try:
        yield each
    finally:
        if not client.endswith("asyncio"):
            each.close()


def _url(server, here, protocol):
    if server == "unix":
        return f"{here.unix_url}{'&' if '?' in here.unix_url else '?'}protocol={protocol}"
    if server == "tls":
        return f"{here.url}&protocol={protocol}"
    if server == "acl":
        return f"redis://agent:pw@{HOST}:{here.port}?protocol={protocol}"
    return f"{here.url}?protocol={protocol}"


@pytest.mark.parametrize("case", pairs(), ids=", ".join)
def test_each_is_executed_once_and_then_reused(case, request):
    server, client, options, shape = case
    with made(server, client, options, request) as where:
        guard, inside, go = Guard(store=RedisStore(where)), threading.Event(), threading.Event()
        ran = []

        def begin(n):
            ran.append(n)
            inside.set()

        @guard.idempotent(task_type="plain")
        def plain(n):
            begin(n)
            assert go.wait(LONG)
            return [n, n + 1]

        @guard.idempotent(task_type="coroutine")
        async def coroutine(n):
            begin(n)
            assert await asyncio.to_thread(go.wait, LONG)
            return [n, n + 1]

        @guard.idempotent(task_type="generator")
        def generator(n):
            begin(n)
            yield n
            assert go.wait(LONG)
            yield n + 1

        @guard.idempotent(task_type="async generator")
        async def async_generator(n):
            begin(n)
            yield n
            assert await asyncio.to_thread(go.wait, LONG)
            yield n + 1

        async def call():
            if shape == "coroutine":
                return await coroutine(5)
            if shape == "async generator":
                return [chunk async for chunk in async_generator(5)]
            act = plain if shape == "plain" else lambda n: list(generator(n))
            return await asyncio.to_thread(act, 5)

        async def main():
            leader = asyncio.create_task(call())
            await asyncio.to_thread(inside.wait, LONG)
            waiter = asyncio.create_task(call())
            ledger = guard.aio.ledger
            while not (await ledger.totals())["reused"] and not waiter.done():
                counts = guard.engine.store.windows("default", 0, 2**53)
                if sum(window.counts.get("found", 0) for window in counts):
                    break
                await asyncio.sleep(0.005)
            go.set()
            values = await asyncio.gather(leader, waiter)
            values.append(await call())
            if client.endswith("asyncio"):
                await where.aclose()
            return values

        assert asyncio.run(main()) == [[5, 6]] * 3
        assert ran == [5]
        totals = guard.ledger.totals()
        assert (totals["executed"], totals["reused"], totals["duplicates"]) == (1, 2, 0)
        guard.close()


def test_a_server_in_the_process_says_what_it_lacks():
    """fakeredis runs scripts with no cmsgpack, which every real server has."""
    guard = Guard(store=RedisStore(fakeredis.FakeRedis()))
    with pytest.raises(StoreError, match="cmsgpack"):
        guard.run_task("fake", 1, lambda n: n)
    guard.engine.backlog._owed.clear()
    guard.close()


# --- what fails over -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["failover", "kill_primary"])
def test_a_call_lives_through_a_failover_of_the_primary(sentinel, kind, how):
    lab = Lab(sentinel.url, kind, on_store_error="raise", lease=20)
    try:
        assert lab.call(1).source == "executed"
        leader, waiter = _lead(lab, 2), lab.start(2)
        until(lambda: _found(lab) == 1, LONG, "it waits")
        old = sentinel.primary
        _copied(old)
        getattr(sentinel, how)()
        if how == "kill_primary":
            sentinel.followed(old)
        else:  # what it is told until then is lost: the tests below
            _follows(old)
        lab.gate.set()
        assert leader.result(LONG).result == "value of 2"
        served = waiter.result(LONG)
        assert (served.source, served.result) == ("reused", "value of 2")
        lab.told()
        again = lab.call(2)
        assert (again.source, again.result) == ("reused", "value of 2")
        assert lab.call(3).source == "executed"
        assert lab.bodies == [1, 2, 3]
    finally:
        lab.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_lives_through_a_node_that_is_killed(own_cluster, kind):
    lab = Lab(own_cluster.url, kind, lease=20)
    try:
        lab.call(1)
        leader, waiter = _lead(lab, 2), lab.start(2)
        until(lambda: _found(lab) == 1, LONG, "it waits")
        node = own_cluster.owner(own_cluster.slot(wire.keys(lab.address(2))[0]))
        replica = own_cluster.replica_of(node)
        node.kill()
        until(lambda: b"master" in replica.tell("ROLE")[0], LONG, "the replica leads")
        lab.gate.set()
        assert leader.result(LONG).result == "value of 2"
        served = waiter.result(LONG)
        assert (served.source, served.result) == ("reused", "value of 2")
        lab.told()
        until(lambda: lab.call(2).source == "reused", LONG, "the result is there")
        assert lab.bodies == [1, 2]
    finally:
        lab.close()


# --- what a failover loses -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_that_was_not_copied_is_lost_with_its_primary(sentinel, kind):
    first, second = Lab(sentinel.url, kind, lease=20), Lab(sentinel.url, kind, lease=20)
    try:
        _cut(sentinel)
        leader = _lead(first, 1)
        old, new = sentinel.primary, sentinel.replica
        assert (_kept(old, first), _kept(new, first)) == (1, 0)
        sentinel.kill_primary()
        assert sentinel.followed(old) is new
        assert second.call(1).source == "executed"  # nobody there knows of the leader
        first.gate.set()
        outcome = leader.result(LONG)
        assert (outcome.source, outcome.result, outcome.lost) == ("executed", "value of 1", True)
        assert first.call(1).source == "reused"
        assert (first.bodies, second.bodies) == ([1], [1])
        _told_as(second, [("late", "first"), ("ok", "first")])
        assert (second.ledger.doubled_share(), second.ledger.duplication_rate()) == (1.0, 0.0)
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("by", ["renewal", "completion"])
def test_a_claim_that_was_lost_with_its_primary_is_taken_up_again(sentinel, by):
    lease = {"renewal": 3, "completion": 20}[by]
    first, second = (Lab(sentinel.url, "plain", lease=lease) for _ in range(2))
    try:
        _cut(sentinel)
        leader = _lead(first, 1)
        old, new = sentinel.primary, sentinel.replica
        sentinel.kill_primary()
        sentinel.followed(old)
        if by == "renewal":
            until(lambda: _kept(new, first), LONG, "it is renewed")
            waiter = second.start(1)
            until(lambda: _found(second) == 1, LONG, "it waits")
        assert (by == "renewal") == _kept(new, first)
        first.gate.set()
        outcome = leader.result(LONG)
        assert (outcome.source, outcome.lost) == ("executed", False)
        if by == "renewal":
            assert waiter.result(LONG).source == "reused"
        assert second.call(1).source == "reused"
        assert (first.bodies, second.bodies) == ([1], [])
        _told_as(second, [("ok", "first")])
    finally:
        first.close()
        second.close()


def test_what_an_old_primary_is_told_after_its_successor_leads_is_lost(sentinel):
    """A failover by command leaves the old one a primary for some time, with its connections."""
    first, second = (Lab(sentinel.url, kind, lease=2.4) for kind in KINDS)
    try:
        leader = _lead(first, 1)
        old = sentinel.primary
        _copied(old)
        sentinel.watchers[0].tell("SENTINEL", "DEBUG", "publish-period", 60_000)
        sentinel.failover()  # and for four such periods the old one is not told
        first.gate.set()
        outcome = leader.result(LONG)
        assert (outcome.source, outcome.lost) == ("executed", False)
        assert old.tell("ROLE")[0] == b"master"
        again = second.call(1)  # of the new one: there it was renewed no longer
        assert (again.source, again.cause) == ("executed", "lost")
        sentinel.watchers[0].tell("SENTINEL", "DEBUG", "publish-period", 100)
        _follows(old)
        assert first.call(1).source == "reused"
        assert (first.bodies, second.bodies) == ([1], [1])
        _told_as(first, [("lost", "first"), ("ok", "lost")])
        assert (first.ledger.doubled_share(), first.ledger.duplication_rate()) == (1.0, 0.5)
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("sentinel", [{"args": ("--min-replicas-to-write", 1)}], indirect=True)
def test_a_primary_that_wants_a_replica_takes_nothing_alone(sentinel, monkeypatch):
    first, second = (Lab(sentinel.url, kind, lease=20) for kind in KINDS)
    try:
        leader = _lead(first, 1)
        old = sentinel.primary
        _copied(old)
        new = sentinel.failover()
        first.gate.set()  # the old one refuses it, and so does the new one until it has a replica
        outcome = leader.result(LONG)
        assert (outcome.source, outcome.lost) == ("executed", False)
        _follows(old)
        first.told()
        assert second.call(1).source == "reused"
        old.kill()
        until(lambda: _replicas(new) == 0, LONG, "it is alone")
        monkeypatch.setattr(patience, "PATIENCE", 0.2)
        with pytest.raises(StoreError, match="NOREPLICAS"):
            second.call(2)
        assert (first.bodies, second.bodies) == ([1], [])
        old.start()
        until(lambda: _replicas(new) == 1, LONG, "it has a replica")
        assert second.call(2).source == "executed"
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(
    "sentinel", [{"replicas": 2, "args": ("--min-replicas-to-write", 1)}], indirect=True
)
def test_who_is_refused_by_an_old_primary_finds_the_new_one(sentinel, monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE", 30.0)
    first, second = (Lab(sentinel.url, kind, lease=20) for kind in KINDS)
    try:
        assert (first.call(1).source, second.call(2).source) == ("executed", "executed")
        leader, old = _lead(first, 3), sentinel.primary
        assert old.tell("WAIT", 2, 5000) == 2
        sentinel.watchers[0].tell("SENTINEL", "DEBUG", "publish-period", 60_000)
        new = sentinel.failover()
        until(lambda: _replicas(new) == 1, LONG, "the other replica follows the new one")
        began = time.monotonic()
        first.gate.set()
        assert leader.result(LONG).source == "executed"
        assert second.call(4).source == "executed"
        assert time.monotonic() - began < patience.PATIENCE / 2
        assert old.tell("ROLE")[0] == b"master"
        assert second.call(3).source == "reused"
        first.told()
        assert (first.bodies, second.bodies) == ([1, 3], [2, 4])
    finally:
        first.close()
        second.close()


def test_a_coordinated_failover_loses_nothing(sentinel):
    old, watcher = sentinel.primary, sentinel.watchers[0]
    if int(old.own.info("server").get("valkey_version", "0").split(".")[0]) < 9:
        pytest.skip("came with Valkey 9")
    first, second = (Lab(sentinel.url, kind, lease=20) for kind in KINDS)
    try:
        leader = _lead(first, 1)
        watcher.tell("SENTINEL", "DEBUG", "publish-period", 60_000)
        watcher.tell("SENTINEL", "FAILOVER", "mymaster", "COORDINATED")
        sentinel.followed(old)
        first.gate.set()
        outcome = leader.result(LONG)
        assert (outcome.source, outcome.lost) == ("executed", False)
        assert second.call(1).source == "reused"
        assert (first.bodies, second.bodies) == ([1], [])
        _told_as(second, [("ok", "first")])
    finally:
        first.close()
        second.close()


def _lead(lab, n):
    """A call of task `n` that is inside, whichever bodies were before."""
    leader = lab.lead(n)
    until(lambda: n in lab.bodies, LONG, "it leads")
    return leader


def _copied(primary):
    """What a primary was told has come to its replica."""
    assert primary.tell("WAIT", 1, 5000) == 1


def _follows(old):
    """A primary that was has become a replica."""
    until(lambda: old.tell("ROLE")[0] == b"slave", LONG, "the old one follows")


def _cut(sentinel):
    """The primary's writes come to its replica no longer."""
    primary, replica = sentinel.primary, sentinel.replica
    primary.tell("ACL", "SETUSER", "default", "-psync", "-sync")
    primary.tell("CLIENT", "KILL", "TYPE", "replica")
    link = "master_link_status"
    until(lambda: replica.own.info("replication")[link] == "down", LONG, "it is cut off")


def _replicas(primary):
    """How many it counts that are there, where it wants some."""
    return primary.own.info("replication")["min_slaves_good_slaves"]


def _kept(server, lab):
    """Whether a server has the record of task 1."""
    return server.tell("EXISTS", wire.keys(lab.address(1))[0])


def _told_as(lab, lines):
    """What the ledger says of task 1: each execution's status and cause, sorted."""
    told = lab.ledger.executions(lab.task(1).fingerprint)
    assert sorted((str(line.status), str(line.cause)) for line in told) == lines


# --- what moves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_calls_go_on_while_their_slot_moves(cluster, kind):
    lab = Lab(cluster.url, kind, lease=20)
    try:
        first = next(n for n in range(1, 999) if _tag(lab, n) == _tag(lab, 0))
        second = next(n for n in range(first + 1, 999) if _tag(lab, n) == _tag(lab, 0))
        slot = cluster.slot(wire.keys(lab.address(0))[0])
        lab.call(first)
        leader = _lead(lab, 0)
        move = cluster.moving(slot, cluster.other(cluster.owner(slot)))
        move.begin()
        windows = wire.shard_keys("default", wire.digit(lab.address(0).fingerprint))[0]
        move.carry(windows.encode())  # the counts are there, the records still here
        lab.gate.set()
        assert leader.result(LONG).result == "value of 0"  # a completion after its windows moved
        assert lab.call(0).source == "reused"
        assert lab.call(second).source == "executed"  # a new task in the moving slot
        assert lab.call(first).source == "reused"
        move.carry()
        assert lab.call(second).source == "reused"
        move.end()
        for n in (0, first, second):
            assert lab.call(n).source == "reused"
            lab.perform(Sweep(lab.address(n)))  # the next step books what is owed
        assert sorted(lab.bodies) == sorted([0, first, second])
        totals = lab.account()
        assert (totals["executed"], totals["reused"]) == (3, 6)
    finally:
        lab.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_waiter_is_served_although_the_slot_moves(cluster, kind):
    leading, lab = Lab(cluster.url, "plain", lease=20), Lab(cluster.url, kind, lease=20)
    try:
        leader = leading.lead(0)
        waiter = lab.start(0)
        until(lambda: leading.ledger.totals() and _found(leading), LONG, "it waits")
        slot = cluster.slot(wire.keys(lab.address(0))[0])
        cluster.move(slot, cluster.other(cluster.owner(slot)))
        leading.gate.set()
        assert leader.result(LONG).source == "executed"
        assert waiter.result(LONG).source == "reused"
        assert lab.bodies == []
    finally:
        leading.close()
        lab.close()


def _tag(lab, n):
    return wire.digit(lab.address(n).fingerprint)


def _found(lab):
    return sum(w.counts.get("found", 0) for w in lab.store.windows("default", 0, 2**53))


def test_a_lost_claim_shows_in_the_new_ledger(own_server):
    """The server comes back empty while a body runs, as after a failover that lost the claim."""
    first, second = Lab(own_server.url, "plain", lease=20), Lab(own_server.url, "plain", lease=20)
    try:
        leader = first.lead(1)
        own_server.kill()
        own_server.start(empty=True)
        assert second.call(1).source == "executed"  # nobody there knows of the leader
        first.gate.set()
        assert leader.result(LONG).lost
        lines = second.ledger.executions(first.task(1).fingerprint)
        assert sorted(str(line.status) for line in lines) == ["late", "ok"]
        assert [line.cause for line in lines] == ["first", "first"]
    finally:
        first.close()
        second.close()

"""The servers and the proxy that other tests stand on do what they say."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis as AsyncRedis
from redis.backoff import NoBackoff
from redis.exceptions import AskError, ConnectionError, TimeoutError  # noqa: A004
from redis.retry import Retry
from servers.proxy import Proxy
from servers.server import Server, find_server, until

PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3])


def once():
    """No second try: a fault is seen."""
    return Retry(NoBackoff(), 0)


def runs(pid):
    """Whether a process does; one that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def of_set(frame):
    return frame[0] == b"SET"


# --- one server ----------------------------------------------------------------------------------


def test_without_a_server_the_tests_fail(monkeypatch, tmp_path):
    monkeypatch.setenv("IDEMGUARD_TEST_SERVER", str(tmp_path / "none"))
    with pytest.raises(RuntimeError, match="IDEMGUARD_TEST_SERVER"):
        find_server.__wrapped__()


def test_a_server_is_reached_by_port_socket_and_urls(standalone):
    standalone.client().set("k", "v")
    assert standalone.client(unix_socket_path=standalone.unix).get("k") == b"v"
    for url in (standalone.url, standalone.unix_url):
        with redis.Redis.from_url(url) as client:
            assert client.get("k") == b"v"


def test_a_shared_server_is_as_at_first_for_the_next_test(standalone):
    client = standalone.client()
    client.set("k", "v")
    sha = client.script_load("return 1")
    client.config_set("maxmemory", "100mb")
    client.acl_setuser("alice", enabled=True, nopass=True)
    client.execute_command("ACL", "SETUSER", "default", "-flushdb")
    standalone.freeze()
    standalone.reset()
    assert client.dbsize() == 0
    assert client.script_exists(sha) == [False]
    assert client.config_get("maxmemory") == {"maxmemory": "0"}
    assert client.acl_users() == ["default"]
    assert client.flushdb()
    standalone.kill()
    standalone.reset()
    assert client.ping()


def test_what_was_written_outlives_a_kill(own_server):
    client = own_server.client(retry=once())
    client.set("k", "v")
    own_server.kill()
    with pytest.raises(ConnectionError):
        client.get("k")
    own_server.start()
    assert client.get("k") == b"v"
    own_server.kill()
    own_server.start(empty=True)
    assert client.get("k") is None


def test_a_frozen_server_answers_when_it_is_thawed(own_server):
    client = own_server.client(retry=once(), socket_timeout=0.1)
    client.ping()
    own_server.freeze()
    with pytest.raises(TimeoutError):
        client.incr("n")
    own_server.thaw()
    assert until(lambda: own_server.client().get("n")) == b"1"


def test_a_server_asks_for_its_password_and_knows_its_users():
    args = "--user", "alice", "on", ">secret", "~a:*", "+@all"
    with Server(*args, password="open sesame\\") as server:
        assert server.client().ping()
        with pytest.raises(redis.AuthenticationError):
            server.client(password=None, retry=once()).ping()
        alice = server.client(username="alice", password="secret")
        assert alice.set("a:1", "v")
        with pytest.raises(redis.exceptions.NoPermissionError):
            alice.set("b:1", "v")


def test_a_server_whose_port_was_taken_takes_another(standalone):
    server = Server()
    server.port = standalone.port
    with server:
        assert server.port != standalone.port
        server.client().set("k", "v")
        assert standalone.client().get("k") is None


def test_a_server_that_cannot_start_says_why():
    with pytest.raises(RuntimeError, match="no-such-option"), Server("--no-such-option", 1):
        pass


def test_servers_end_with_the_process_that_started_them():
    code = (
        "import os, sys; from servers.server import Server; s = Server().start();"
        "print(s.pid, s.folder, flush=True); sys.stdin.read()"
    )
    tests = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": tests},
        text=True,
    ) as process:
        pid, folder = process.stdout.readline().split()
        os.kill(int(pid), 0)
        process.send_signal(signal.SIGKILL)
    until(lambda: not Path(folder).exists())
    until(lambda: not runs(int(pid)))


# --- the proxy -----------------------------------------------------------------------------------


@PROTOCOLS
def test_requests_are_counted_without_set_up(proxy, protocol):
    client = proxy.client(protocol=protocol, db=1, client_name="me")
    client.ping()
    client.hset("h", mapping={"a": b"\r\n*1\r\n", "b": b""})
    assert client.hgetall("h") == {b"a": b"\r\n*1\r\n", b"b": b""}
    assert client.execute_command("config get maxmemory*")
    with client.pipeline(transaction=True) as pipeline:
        pipeline.set("k", "v").get("k").eval("return {1, {2, false}}", 0)
        assert pipeline.execute() == [True, b"v", [1, [2, None]]]
    names = ["HSET", "HGETALL", "CONFIG", "MULTI", "SET", "GET", "EVAL", "EXEC"]
    assert [frame[0].decode().upper() for frame in proxy.frames] == names
    assert proxy.frames[0] == [b"HSET", b"h", b"a", b"\r\n*1\r\n", b"b", b""]
    assert proxy.counts == dict.fromkeys(names, 1)
    assert proxy.trips == 4
    assert any(noted.setup for noted in proxy.noted())
    proxy.forget()
    assert (proxy.frames, proxy.trips) == ([], 0)


@PROTOCOLS
def test_messages_and_replies_are_told_apart(proxy, standalone, protocol):
    pubsub = proxy.client(protocol=protocol).pubsub()
    pubsub.subscribe("one", "two")
    pubsub.psubscribe("t*")
    said = [pubsub.get_message(timeout=10) for _ in range(3)]
    assert [m["type"] for m in said] == ["subscribe", "subscribe", "psubscribe"]
    held = proxy.hang("UNSUBSCRIBE")
    standalone.client().publish("two", "x")
    pubsub.unsubscribe("one", "two")
    held.wait()
    standalone.client().publish("two", "y")
    assert {pubsub.get_message(timeout=10)["type"] for _ in range(2)} == {"message", "pmessage"}
    assert pubsub.get_message(timeout=0.05) is None  # all that comes later waits behind it
    held.release()
    said = [pubsub.get_message(timeout=10) for _ in range(3)]
    assert [m["type"] for m in said] == ["unsubscribe", "unsubscribe", "pmessage"]
    pubsub.close()


def test_pushes_between_replies_answer_nothing(proxy, standalone):
    async def main():
        async with AsyncRedis(port=proxy.port, protocol=3) as client:
            tracked = await client.connection_pool.get_connection()
            await tracked.send_command("CLIENT", "TRACKING", "ON")
            await tracked.read_response()
            await tracked.send_command("GET", "k")
            await tracked.read_response()
            trap = proxy.swallow("INCR")
            await tracked.send_command("SET", "k", "v")  # its own key: a push comes with the reply
            assert await tracked.read_response() == b"OK"
            await tracked.send_command("INCR", "n")
            with pytest.raises(ConnectionError):
                await tracked.read_response()
            assert trap.wait() == [b"INCR", b"n"]
            await tracked.disconnect()
            await client.connection_pool.release(tracked)

    asyncio.run(main())
    assert standalone.client().get("n") == b"1"


def test_a_big_value_passes(proxy):
    value = os.urandom(9 << 20)
    client = proxy.client()
    client.set("k", value)
    assert client.get("k") == value


def test_a_request_is_cut_off_before_the_server_gets_it(proxy, standalone):
    client = proxy.client(retry=once())
    trap = proxy.cut_before(of_set, nth=2)
    client.set("a", 1)
    client.get("a")
    with pytest.raises(ConnectionError):
        client.set("b", 2)
    assert trap.wait() == [b"SET", b"b", b"2"]
    assert standalone.client().keys() == [b"a"]
    assert client.set("b", 3)


def test_a_request_is_applied_and_its_reply_is_lost(proxy, standalone):
    client = proxy.client(retry=once())
    trap = proxy.swallow()
    with pytest.raises(ConnectionError):
        client.incr("n")
    assert trap.sprung
    assert standalone.client().get("n") == b"1"
    assert client.incr("n") == 2


def test_a_retried_request_is_applied_twice(proxy):
    proxy.swallow("INCRBY")
    assert proxy.client().incr("n") == 2


def test_a_reply_is_held_back_until_it_is_released(proxy, standalone, crew):
    trap = proxy.hang(of_set)
    client = proxy.client()
    call = crew.start(client.set, "k", "v")
    trap.wait()
    assert standalone.client().get("k") == b"v"
    assert proxy.client().get("k") == b"v"  # another connection goes on
    assert not call.done()
    trap.release()
    assert call.result(10)


def test_a_reply_is_held_back_for_ever(proxy):
    trap = proxy.hang()
    with pytest.raises(TimeoutError):
        proxy.client(retry=once(), socket_timeout=0.1).set("k", "v")
    assert trap.sprung
    until(lambda: proxy.connections == 0)


def test_a_request_is_held_back(proxy, standalone, crew):
    trap = proxy.hold(of_set)
    call = crew.start(lambda: proxy.client().set("k", "late", nx=True))
    trap.wait()
    assert proxy.client().set("k", "first", nx=True)
    trap.release()
    assert call.result(10) is None


def test_a_trap_that_is_cancelled_catches_nothing(proxy):
    trap = proxy.cut_before()
    trap.cancel()
    assert proxy.client(retry=once()).set("k", "v")
    assert not trap.sprung


def test_each_reply_is_delayed_and_connections_do_not_wait_for_each_other(proxy, crew):
    clients = [proxy.client() for _ in range(10)]
    for client in clients:
        client.ping()
    proxy.delay = 0.1
    begun = time.monotonic()
    calls = [crew.start(client.incr, "n") for client in clients]
    assert sorted(call.result(10) for call in calls) == list(range(1, 11))
    assert 0.1 <= time.monotonic() - begun < 0.6
    begun = time.monotonic()
    with clients[0].pipeline(transaction=False) as pipeline:
        for _ in range(20):
            pipeline.incr("n")
        assert pipeline.execute() == list(range(11, 31))
    assert 0.1 <= time.monotonic() - begun < 1


def test_all_connections_are_cut(proxy, crew):
    calls = [crew.start(proxy.client(retry=once()).blpop, "queue") for _ in range(3)]
    until(lambda: proxy.counts["BLPOP"] == 3)
    assert proxy.connections == 3
    proxy.cut_all()
    assert proxy.connections == 0
    for call in calls:
        with pytest.raises(ConnectionError):
            call.result(10)


def test_new_connections_are_refused(proxy):
    old = proxy.client(retry=once())
    old.ping()
    proxy.refuse()
    with pytest.raises(ConnectionError, match="refused"):
        proxy.client(retry=once()).ping()
    assert old.ping()
    proxy.accept()
    assert proxy.client(retry=once()).ping()


def test_nothing_comes_out_of_a_black_hole(proxy, standalone):
    old = proxy.client(retry=once(), socket_timeout=0.1)
    old.ping()
    proxy.blackhole()
    for client in (old, proxy.client(retry=once(), socket_timeout=0.1)):
        with pytest.raises(TimeoutError):
            client.set("k", "v")
    assert standalone.client().get("k") is None
    proxy.accept()
    assert old.set("k", "v")


def test_a_proxy_speaks_tls(tls_proxy):
    trap = tls_proxy.swallow("INCRBY")
    with redis.Redis.from_url(tls_proxy.url) as client:  # which never tries again
        assert client.set("k", "v")
        with pytest.raises(ConnectionError):
            client.incr("n")
        assert trap.sprung
        assert client.get("n") == b"1"
    assert tls_proxy.client().get("k") == b"v"
    with pytest.raises(ConnectionError, match="certificate"):
        tls_proxy.client(ssl_ca_certs=None, retry=once()).ping()


def test_a_proxy_in_front_of_a_dead_server_hangs_up(own_server):
    with Proxy(own_server) as proxy:
        client = proxy.client(retry=once())
        client.set("k", "v")
        own_server.kill()
        for _ in range(2):
            with pytest.raises(ConnectionError):
                client.get("k")
        own_server.start()
        assert client.get("k") == b"v"


# --- a cluster -----------------------------------------------------------------------------------


def test_a_slot_moves_step_by_step(cluster):
    client = cluster.client()
    client.mset({"{x}a": 1, "{x}b": 2})
    slot = cluster.slot("{x}a")
    source = cluster.owner(slot)
    to = cluster.other(source)
    move = cluster.moving(slot, to)
    move.begin()
    move.carry("{x}a")
    assert move.keys() == [b"{x}b"]
    with pytest.raises(AskError):
        source.tell("GET", "{x}a")
    with pytest.raises(redis.exceptions.TryAgainError):
        source.tell("MGET", "{x}a", "{x}b")
    assert [client.get("{x}a"), client.get("{x}b")] == [b"1", b"2"]
    move.carry()
    move.end()
    assert cluster.owner(slot) is to
    cluster.settle()
    with pytest.raises(redis.exceptions.MovedError):
        source.tell("GET", "{x}a")
    assert client.mget("{x}a", "{x}b") == [b"1", b"2"]


def test_a_shared_cluster_is_as_at_first_for_the_next_test(cluster):
    slot, half_way = cluster.slot("a"), cluster.slot("b")
    home, source = cluster.owner(slot), cluster.owner(half_way)
    client = cluster.client()
    client.set("a", 1)
    client.set("b", 2)
    cluster.move(slot, cluster.other(home))
    move = cluster.moving(half_way, cluster.other(source))
    move.begin()
    move.carry()
    cluster.reset()
    assert (cluster.owner(slot), cluster.owner(half_way)) == (home, source)
    assert all(node.own.dbsize() == 0 for node in cluster.nodes)
    assert not any(seen.moving for node in cluster.nodes for seen in node.sees())
    assert client.set("a", 1)
    assert client.set("b", 1)


def test_clients_of_a_cluster_go_through_its_proxies(proxied_cluster):
    client = proxied_cluster.client()
    keys = [f"k{n}" for n in range(30)]
    for key in keys:
        client.set(key, key)
    assert [frame[1].decode() for frame in proxied_cluster.frames()] == keys
    assert all(proxy.counts["SET"] for proxy in proxied_cluster.proxies)
    node = proxied_cluster.owner(proxied_cluster.slot("k0"))
    trap = node.proxy.swallow("INCRBY")
    client.delete("k0")
    assert client.incr("k0") == 2
    assert trap.sprung


@pytest.mark.parametrize(
    "own_cluster", [{"replicas": 1}, {"replicas": 1, "announce_proxies": True}], indirect=True
)
def test_a_killed_primary_is_replaced(own_cluster):
    slot = own_cluster.slot("k")
    old = own_cluster.owner(slot)
    replica = own_cluster.replica_of(old)
    client = own_cluster.client()
    client.set("k", "v")
    old.tell("WAIT", 1, 5000)
    old.kill()
    until(lambda: own_cluster.owner(slot) is replica)
    assert until(lambda: client.get("k")) == b"v"
    old.start()
    own_cluster.settle()
    assert own_cluster.replica_of(replica) is old


# --- sentinels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sentinel", [{}, {"sentinels": 3, "replicas": 2}], indirect=True)
def test_a_replica_takes_over(sentinel):
    first = sentinel.primary
    client = sentinel.client(retry=Retry(NoBackoff(), 3))
    client.set("k", 1)
    sentinel.settle()
    new = sentinel.failover()
    assert new is not first
    sentinel.settle()  # until then a client may still write to the old one
    assert until(lambda: client.set("k", 2))
    new.tell("WAIT", 1, 5000)
    old = sentinel.kill_primary()
    assert old is new
    newest = sentinel.followed(old)
    assert newest is not old
    assert until(lambda: client.get("k")) == b"2"
    old.start()
    sentinel.settle()
    assert sentinel.primary is newest

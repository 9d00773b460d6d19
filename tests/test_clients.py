"""Clients of real servers: made from URLs or beside what was handed over, and their errors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import select
import socket
import ssl
import subprocess
import sys
import threading

import fakeredis
import pytest
import redis
import redis.asyncio
import redis.sentinel
import trustme
import valkey
import valkey.asyncio
from servers.proxy import Proxy
from servers.server import HOST, Server, free_port
from servers.server import until as wait_until

from idemguard.errors import ConfigurationError, StoreError, StoreUnavailableError
from idemguard.stores.clients import (
    Clients,
    Meaning,
    Turns,
    close_async,
    connecting,
    meaning,
    spoken,
)

pytest_plugins = ["servers.fixtures"]

SECRET = "s3cr3t-word"
APIS = ["redis", "redis.asyncio", "valkey", "valkey.asyncio"]


@pytest.fixture
def listener():
    """A port that accepts, says nothing, and can tell whether anybody came."""
    with socket.create_server((HOST, 0)) as made:
        yield made


class Front:
    """Speaks TLS before a server, and passes on what it hears."""

    def __init__(self, server, folder) -> None:
        self._server = server
        authority = trustme.CA()
        self.ca = str(folder / "ca.pem")
        authority.cert_pem.write_to_path(self.ca)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(HOST).configure_cert(self._context)
        self._up = threading.Event()
        self._tasks = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    @property
    def url(self) -> str:
        return f"rediss://{HOST}:{self.port}/0?ssl_ca_certs={self.ca}"

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(20)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)

    async def _main(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        serving = await asyncio.start_server(self._serve, HOST, 0, ssl=self._context)
        self.port = serving.sockets[0].getsockname()[1]
        self._up.set()
        await self._over.wait()
        serving.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer) -> None:
        self._tasks.add(task := asyncio.current_task())
        onward, back = await asyncio.open_connection(HOST, self._server.port)
        try:
            pumps = [self._pump(reader, back), self._pump(onward, writer)]
            await asyncio.wait(
                [asyncio.create_task(pump) for pump in pumps], return_when="FIRST_COMPLETED"
            )
        finally:
            for each in (writer, back):
                each.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader, writer) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)


@pytest.fixture
def tls(standalone, tmp_path):
    """TLS in front of `standalone`."""
    front = Front(standalone, tmp_path)
    front.start()
    yield front
    front.close()


def came(listener) -> bool:
    return bool(select.select([listener], [], [], 0)[0])


def port_of(listener) -> int:
    return listener.getsockname()[1]


def one(client) -> dict:
    return client.connection_pool.connection_kwargs


def raw(client, *words):
    """The answer to a command, as bytes."""
    return client.execute_command(*words, NEVER_DECODE=True)


def called(clients, act):
    """What `act` gives for a client on a loop of its own."""

    async def main():
        client = clients.on_loop()
        try:
            return await act(client)
        finally:
            if clients.owns(client):
                await close_async(client)

    return asyncio.run(main())


def both_work(clients) -> None:
    """The plain client writes, the one on a loop reads."""
    assert raw(clients.plain(), "SET", "k", b"\xff")
    assert called(clients, lambda client: raw(client, "GET", "k")) == b"\xff"


# --- URLs -------------------------------------------------------------------------------------

NAMES = {
    "redis://db.example": "redis://db.example:6379/0",
    "redis://db.example:6380/3": "redis://db.example:6380/3",
    "redis://db.example/?db=4": "redis://db.example:6379/4",
    f"redis://:{SECRET}@db.example:6380": "redis://db.example:6380/0",
    f"rediss://me:{SECRET}@db.example:6380/1": "rediss://db.example:6380/1",
    f"redis://me:{SECRET}%40%2F%3F@db.example": "redis://db.example:6379/0",
    f"redis://db.example/0?username=me&password={SECRET}": "redis://db.example:6379/0",
    "redis://[::1]:6380/0": "redis://[::1]:6380/0",
    "redis://[fe80::1%25eth0]": "redis://[fe80::1%eth0]:6379/0",
    "valkey://db.example": "valkey://db.example:6379/0",
    "valkeys://db.example": "valkeys://db.example:6379/0",
    "unix:///run/r.sock": "unix:///run/r.sock",
    f"unix://me:{SECRET}@/run/r%20s.sock?db=2": "unix:///run/r s.sock?db=2",
    "redis+cluster://a:7000,b,[::1]:7002": "redis+cluster://a:7000,b:6379,[::1]:7002",
    f"rediss+cluster://me:{SECRET}@a:7000/0": "rediss+cluster://a:7000",
    "valkey+cluster://a": "valkey+cluster://a:6379",
    "redis+sentinel://h/mymaster": "redis+sentinel://h:26379/mymaster",
    f"redis+sentinel://me:{SECRET}@h:1,i:2/mymaster/3": "redis+sentinel://h:1,i:2/mymaster/3",
    f"redis+sentinel://h/m?sentinel_username=s&sentinel_password={SECRET}&ssl=true": (
        "rediss+sentinel://h:26379/m"
    ),
    "redis://h?ssl=true&ssl_cert_reqs=none": "rediss://h:6379/0",
    "redis://h?decode_responses=true&encoding=latin-1&retry_on_timeout=1": "redis://h:6379/0",
}


@pytest.mark.parametrize(("url", "name"), NAMES.items())
def test_a_url_is_named_without_its_secrets(url, name):
    clients = Clients.from_url(url)
    assert clients.name == name
    assert clients.cluster == ("+cluster" in url)


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("http://h", "no kind of server"),
        ("redis", "no kind of server"),
        ("unix+cluster:///run/r.sock", "no kind of server"),
        ("redis://", "no host"),
        ("redis:///0", "no host"),
        ("redis://:6379/0", "no host"),
        (f"redis://me:{SECRET}@/0", "no host"),
        ("redis+cluster://a:1,,b:2", "no host"),
        ("redis://h:0", "port"),
        ("redis://h:", "port"),
        ("redis://h:65536", "port"),
        ("redis://h:six", "port"),
        ("redis://::1", "in brackets"),
        ("redis://h:1,i:2", "redis+cluster://"),
        ("redis://h/zero", "database"),
        ("redis://h/-1", "database"),
        ("redis://h/0/1", "database"),
        ("redis://h?db=x", "db takes a number"),
        ("redis+cluster://h/1", "database 0"),
        ("redis+cluster://h?db=1", "database 0"),
        ("redis+cluster://h/x", "database"),
        ("redis+sentinel://h", "no master"),
        ("redis+sentinel://h/", "no master"),
        ("redis+sentinel://h//0", "no master"),
        ("redis+sentinel://h/m/x", "database"),
        ("unix://run/r.sock", "unix:///"),
        ("unix://", "unix:///"),
        ("redis://h?socket_timeout=soon", "socket_timeout takes seconds"),
        ("redis://h?socket_timeout=0", "socket_timeout takes seconds"),
        ("redis://h?socket_timeout=nan", "socket_timeout takes seconds"),
        ("redis://h?socket_timeout=", "socket_timeout is empty"),
        ("redis://h?socket_timeout=1&socket_timeout=2", "socket_timeout is given twice"),
        ("redis://h?socket_keepalive=perhaps", "socket_keepalive takes true or false"),
        ("redis://h?max_connections=0", "max_connections"),
        ("redis://h?protocol=4", "protocol takes 2 or 3"),
        ("redis://h?colour=blue", "colour"),
        ("redis://h?retry=3", "retry"),
        ("redis://h?ssl_cert_reqs=none", "ssl_cert_reqs needs rediss://"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs takes none"),
        ("rediss://h?ssl_ca_certs=/no/such/file", "ssl_ca_certs takes a file"),
        ("rediss://h?ssl_ca_path=/no/such/folder", "ssl_ca_path takes a directory"),
        ("rediss://h?ssl_min_version=1", "ssl_min_version"),
        ("rediss://h?ssl_include_verify_flags=STRICT", "ssl_include_verify_flags"),
        ("rediss://h?ssl=false", "ssl says otherwise"),
        ("unix:///r.sock?ssl=true", "ssl says otherwise"),
        ("unix:///r.sock?socket_keepalive=true", "socket_keepalive"),
        ("redis://h?sentinel_password=x", "sentinel_password needs"),
        ("redis+cluster://h?health_check_interval=5", "health_check_interval"),
    ],
)
def test_a_url_that_cannot_be_is_refused_by_part(url, part):
    with pytest.raises(ConfigurationError) as caught:
        Clients.from_url(url)
    assert part in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        # a / or a ? that should have been escaped cuts the password in two
        f"redis://me:{SECRET}/{SECRET}@h:6379/0",
        f"redis://me:{SECRET}?{SECRET}@h:6379/0",
        f"redis://me:{SECRET}?{SECRET}={SECRET}@h:6379/0",
        f"redis://me:{SECRET}:x@h:six",
        f"redis+sentinel://me:{SECRET}@h",
        f"redis://h?password=a{SECRET}&{SECRET.replace('-', '').replace('3', '')}=1",
        f"unix://me:{SECRET}/x@/run/r.sock",
        f"redis+cluster://me:{SECRET}@h/1",
        f"ftp://me:{SECRET}@h",
        f"me:{SECRET}@h",
        f"rediss://h?ssl_password={SECRET}&ssl_keyfile=/no/{SECRET}",
    ],
)
def test_no_piece_of_a_password_is_shown(url):
    with pytest.raises(ConfigurationError) as caught:
        Clients.from_url(url)
    told = str(caught.value)
    assert SECRET not in told
    assert SECRET.replace("-", "").replace("3", "") not in told
    assert caught.value.__cause__ is None


def test_a_bare_slash_in_a_password_is_explained():
    with pytest.raises(ConfigurationError, match="%2F"):
        Clients.from_url("redis://me:pass/word@h:6379/0")


@pytest.mark.parametrize(
    "url",
    [
        "redis://{}:{}/0",
        "rediss://{}:{}/0",
        "redis+cluster://{}:{}",
        "redis+sentinel://{}:{}/mymaster",
    ],
)
def test_nothing_connects_before_the_first_use(url, listener):
    clients = Clients.from_url(url.format(HOST, port_of(listener)) + "?socket_timeout=0.05")
    assert not came(listener)

    async def make():
        await close_async(clients.on_loop())

    asyncio.run(make())
    assert not came(listener)
    with pytest.raises((redis.RedisError, redis.exceptions.RedisClusterException)) as caught:
        clients.plain().ping()
    assert meaning(caught.value) is Meaning.AWAY
    assert came(listener)
    clients.close()


def test_without_a_word_of_it_in_the_url_a_client_waits_for_little_and_repeats_nothing():
    clients = Clients.from_url("redis://db.example")
    client = clients.plain()
    pool = client.connection_pool
    assert isinstance(pool, redis.BlockingConnectionPool)
    assert (pool.max_connections, pool.timeout) == (50, 300)
    assert one(client)["socket_connect_timeout"] == 2
    assert one(client)["socket_timeout"] == 5
    assert one(client)["retry"]._retries == 0
    assert not one(client).get("decode_responses")
    clients.close()


def test_the_urls_own_options_count():
    url = (
        f"redis://me:{SECRET}@h:1/3?socket_timeout=1.5&socket_connect_timeout=0.5&timeout=9"
        "&max_connections=7&protocol=2&client_name=x&health_check_interval=11&socket_keepalive=no"
    )
    client = Clients.from_url(url).plain()
    wanted = {
        "username": "me", "password": SECRET, "host": "h", "port": 1, "db": 3,
        "socket_timeout": 1.5, "socket_connect_timeout": 0.5, "protocol": 2, "client_name": "x",
        "health_check_interval": 11, "socket_keepalive": False,
    }  # fmt: skip
    assert one(client).items() >= wanted.items()
    assert (client.connection_pool.max_connections, client.connection_pool.timeout) == (7, 9)

    def check(client):
        assert one(client).items() >= wanted.items()
        assert (client.connection_pool.max_connections, client.connection_pool.timeout) == (7, 9)

    async def main():
        clients = Clients.from_url(url)
        client = clients.on_loop()
        check(client)
        await close_async(client)

    asyncio.run(main())


def test_a_connection_begins_with_nothing_but_a_greeting(proxy):
    both_work(Clients.from_url(proxy.url))
    noted = [note.frame[0] for note in proxy.noted()]
    greeting = [b"HELLO"] * (noted[0] == b"HELLO")  # none where RESP2 is what redis-py begins with
    assert noted == [*greeting, b"SET", *greeting, b"GET"]


def test_each_kind_of_url_reaches_its_server(standalone, tls, cluster, sentinel):
    standalone.tell("ACL", "SETUSER", "me", "on", f">{SECRET}", "~*", "&*", "+@all")
    urls = [
        standalone.url,
        standalone.url.replace("redis://", "valkey://") + "?protocol=2",
        standalone.unix_url,
        f"redis://me:{SECRET}@{HOST}:{standalone.port}/2",
        f"unix://me:{SECRET}@{standalone.unix}",
        tls.url,
        f"redis://{HOST}:{tls.port}?ssl=true&ssl_cert_reqs=none",
        cluster.url,
        cluster.url + "?protocol=2",
        sentinel.url,
        sentinel.url + "?protocol=2",
    ]
    for url in urls:
        clients = Clients.from_url(url)
        both_work(clients)
        clients.close()
        both_work(clients)  # anew
        clients.close()
    assert standalone.tell("EXISTS", "k") == 1


def test_threads_share_one_client_and_wait_for_its_connections(standalone, crew):
    clients = Clients.from_url(standalone.url + "?max_connections=2")
    start = threading.Barrier(8)

    def use():
        start.wait()
        client = clients.plain()
        for _ in range(20):
            client.incr("n")
        return client

    made = {id(future.result()) for future in [crew.start(use) for _ in range(8)]}
    assert len(made) == 1
    assert standalone.tell("GET", "n") == b"160"
    clients.close()


def test_turns_are_given_in_the_order_of_coming(crew):
    turns, order = Turns(2), []

    def use(n, first):
        assert turns.take(20, first=first)
        order.append(n)
        turns.give()

    assert [turns.take(0), turns.take(0)] == [True, True]
    assert turns.take(0.01) is False  # and it is not left a place among those who wait
    calls = []
    for n in range(5):
        calls.append(crew.start(use, n, n == 4))
        wait_until(lambda n=n: len(turns._waiting) == n + 1)
    turns.give()
    for call in calls:
        call.result(20)
    assert order == [4, 0, 1, 2, 3]
    assert turns.take(0) is True
    assert turns.take(0) is False


def test_who_waits_for_a_turn_goes_on_with_the_next_client(standalone, crew):
    clients = Clients.from_url(standalone.url + "?max_connections=1")
    held, spoilt = clients.take(20), clients.plain()
    calls = [crew.start(clients.take, 20) for _ in range(2)]
    wait_until(lambda: len(held._waiting) == 2)
    clients.spoilt(spoilt)  # as an interrupt does, which may have cost a turn
    wait_until(lambda: any(call.done() for call in calls))
    assert clients.plain() is not spoilt
    turns = next(call for call in calls if call.done()).result()
    assert turns is not held
    turns.give()
    assert {call.result(20) for call in calls} == {turns}
    with pytest.raises(StoreUnavailableError, match=r"are in use at redis://.*0\.01 s"):
        clients.take(0.01)
    turns.give()
    held.give()  # late, to those that nobody uses any longer
    clients.close()
    handed = Clients.of(standalone.own)
    assert handed.take(0) is None  # its pool has other users


def test_sentinels_new_primary_is_found(sentinel):
    clients = Clients.from_url(sentinel.url)
    both_work(clients)
    old = sentinel.kill_primary()
    sentinel.followed(old)

    def works():
        both_work(clients)
        return True

    wait_until(works)
    clients.close()


def test_a_wrong_password_for_the_sentinels_is_refused_at_once(sentinel):
    sentinel.watchers[0].tell("ACL", "SETUSER", "default", f">{SECRET}", "resetpass", f">{SECRET}")
    sentinel.watchers[0].own.connection_pool.connection_kwargs["password"] = SECRET
    sentinel._sentinel.sentinels[0].connection_pool.connection_kwargs["password"] = SECRET
    clients = Clients.from_url(f"{sentinel.url}?sentinel_password={SECRET}")
    both_work(clients)
    clients.close()
    wrong = Clients.from_url(f"{sentinel.url}?sentinel_password={SECRET}x")
    with pytest.raises(redis.RedisError) as caught:
        wrong.plain().ping()
    assert meaning(caught.value) is Meaning.REFUSED
    assert SECRET not in str(spoken(caught.value, wrong.name, "asking"))
    wrong.close()


# --- what was handed over ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "thing",
    [
        "redis://h",
        7,
        None,
        object(),
        redis.Redis,
        redis.Redis().pipeline(),
        redis.Redis().pubsub(),
        redis.ConnectionPool(),
        redis.sentinel.Sentinel([("h", 1)]),
        redis.sentinel.Sentinel([("h", 1)]).slave_for("m"),
        redis.asyncio.Redis().pipeline(),
        redis.asyncio.Redis().pubsub(),
        valkey.Valkey().pipeline(),
        valkey.asyncio.ConnectionPool(),
    ],
    ids=lambda thing: type(thing).__module__ + "." + type(thing).__name__,
)
def test_what_is_no_client_is_refused_with_what_to_give(thing):
    with pytest.raises(ConfigurationError, match=r"give .*"):
        Clients.of(thing)


def test_an_asyncio_client_of_unknown_connections_has_no_twin():
    class Tunnel(redis.asyncio.Connection):
        pass

    pool = redis.asyncio.ConnectionPool(connection_class=Tunnel)
    with pytest.raises(ConfigurationError, match="give a URL or a sync client"):
        Clients.of(redis.asyncio.Redis(connection_pool=pool))


@pytest.mark.parametrize("package", [redis, valkey])
def test_a_sync_client_is_used_as_it_is(package, standalone):
    with package.Redis(host=HOST, port=standalone.port, db=2, decode_responses=True) as client:
        clients = Clients.of(client)
        assert clients.name == f"{package.__name__}://{HOST}:{standalone.port}/2"
        assert clients.plain() is client
        assert clients.on_loop() is None
        assert not clients.owns(client)
        clients.close()
        assert raw(client, "SET", "k", b"\xff")
        assert raw(client, "GET", "k") == b"\xff"


def test_a_subclass_and_a_fake_are_clients():
    class Mine(redis.Redis):
        pass

    client = Mine(host="h")
    assert Clients.of(client).name == "redis://h:6379/0"
    with fakeredis.FakeRedis() as fake:
        assert Clients.of(fake).plain() is fake
    server = fakeredis.FakeServer()
    both_work(Clients.of(fakeredis.FakeAsyncRedis(server=server)))
    assert fakeredis.FakeRedis(server=server).get("k") == b"\xff"


class Provider(redis.CredentialProvider):
    def get_credentials(self):
        return "me", SECRET


def asyncio_clients(package, standalone, tls, cluster, sentinel):
    """Every kind of asyncio client that a package has, by name."""
    aio = importlib.import_module(f"{package}.asyncio")
    nodes = importlib.import_module(f"{package}.asyncio.cluster")
    sentinels = importlib.import_module(f"{package}.asyncio.sentinel")
    here = {"host": HOST, "port": standalone.port}
    me = {"username": "me", "password": SECRET}
    first, *_ = cluster.ports
    yield "tcp", aio.Redis(**here)
    yield "decoding", aio.Redis(**here, decode_responses=True)
    yield "RESP2", aio.Redis(**here, protocol=2)
    yield "RESP3", aio.Redis(**here, protocol=3)
    yield "another database", aio.Redis(**here, db=3)
    yield "a user", aio.Redis(**here, **me)
    yield "a pool", aio.Redis(connection_pool=aio.BlockingConnectionPool(**here, **me))
    yield "URL", aio.from_url(f"redis://me:{SECRET}@{HOST}:{standalone.port}/1")
    yield "unix", aio.Redis(unix_socket_path=str(standalone.unix), **me)
    yield "TLS", aio.Redis(host=HOST, port=tls.port, ssl=True, ssl_ca_certs=tls.ca)
    if package == "redis":
        yield "provider", aio.Redis(**here, credential_provider=Provider())
    yield "cluster", aio.RedisCluster(host=HOST, port=first)
    yield (
        "cluster's node",
        aio.RedisCluster(startup_nodes=[nodes.ClusterNode(HOST, first)], decode_responses=True),
    )
    manager = sentinels.Sentinel([(HOST, w.port) for w in sentinel.watchers])
    yield "sentinel", manager.master_for("mymaster", decode_responses=True)


@pytest.mark.parametrize("package", ["redis", "valkey"])
def test_every_kind_of_asyncio_client_has_twins(package, standalone, tls, cluster, sentinel):
    standalone.tell("ACL", "SETUSER", "me", "on", f">{SECRET}", "~*", "&*", "+@all")
    made = []
    for what, client in asyncio_clients(package, standalone, tls, cluster, sentinel):
        clients = Clients.of(client)
        assert SECRET not in clients.name
        twin = clients.plain()
        assert twin is clients.plain()
        assert clients.owns(twin)
        assert not clients.owns(client)
        assert type(twin).__module__.startswith(package), what

        async def own(clients=clients, client=client):
            assert clients.on_loop() is client
            assert await raw(client, "SET", "k", b"\xff")

        async def other(clients=clients, client=client):
            mine = clients.on_loop()
            assert mine is not client
            assert clients.owns(mine)
            assert await raw(mine, "GET", "k") == b"\xff"
            await close_async(mine)

        async def round_trip(clients=clients, client=client, what=what):
            await own()
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, asyncio.run, other())
            assert raw(clients.plain(), "GET", "k") == b"\xff", what
            await own()
            await close_async(client)
            if not clients.cluster:
                await client.connection_pool.disconnect()  # a pool of its own is not its to close

        asyncio.run(round_trip())
        clients.close()
        made.append(what)
    assert len(made) >= 13


def test_a_twin_never_waits_for_ever():
    # valkey-py waits without an end where it was not told otherwise
    clients = Clients.of(valkey.asyncio.Valkey(host="h"))
    assert one(clients.plain())["socket_timeout"] == 5
    assert one(clients.plain())["socket_connect_timeout"] == 2


def test_a_client_that_was_used_on_another_loop_is_left_to_it(standalone):
    client = redis.asyncio.Redis(host=HOST, port=standalone.port)
    clients = Clients.of(client)

    async def elsewhere():
        mine = clients.on_loop()
        assert mine is not client
        await mine.ping()
        await close_async(mine)

    async def main():
        await client.ping()
        await asyncio.get_running_loop().run_in_executor(None, asyncio.run, elsewhere())
        assert clients.on_loop() is client
        await client.aclose()

    asyncio.run(main())


def test_each_loop_has_a_client_one_after_the_other(standalone):
    clients = Clients.from_url(standalone.url)
    for _ in range(3):
        assert called(clients, lambda client: client.ping())
    handed = redis.asyncio.Redis(host=HOST, port=standalone.port)
    clients = Clients.of(handed)

    async def first():
        assert clients.on_loop() is handed
        await handed.ping()
        await handed.aclose()

    asyncio.run(first())
    gc.collect()  # the loop may be gone; its client is still not for another one
    for _ in range(3):

        async def later():
            client = clients.on_loop()
            assert client is not handed
            await client.ping()
            await close_async(client)

        asyncio.run(later())


def test_where_a_key_lives(cluster, standalone):
    clients = Clients.from_url(cluster.url)
    plain = clients.plain()
    places = set()
    for number in range(12):
        key = f"{{t{number}}}"
        node, home = clients.home(plain, key)
        assert home.execute_command("CLUSTER", "KEYSLOT", key) == cluster.slot(key)
        assert home.set(key, number)  # MOVED where it is not at home
        places.add(node)
        pubsub = home.pubsub()
        pubsub.ssubscribe(key)
        assert pubsub.get_sharded_message(timeout=5)["type"] == "ssubscribe"
        pubsub.close()
    assert len(places) == 3

    async def on_loop(client):
        for number in range(3):
            key = f"{{t{number}}}"
            node, home = await clients.ahome(client, key)
            assert node in places
            assert clients.owns(home)
            assert await home.get(key) == str(number).encode()
            await close_async(home)

    called(clients, on_loop)
    clients.close()


def test_who_listens_takes_up_no_connection_of_those_who_call(standalone):
    before = len(standalone.own.client_list())  # of earlier tests, too
    clients = Clients.from_url(standalone.url + "?max_connections=1&timeout=0.05")
    plain = clients.plain()
    node, home = clients.home(plain, "k")
    assert (node, clients.home(plain, "k")[1]) == ("", home)
    pubsub = home.pubsub()
    pubsub.subscribe("k")
    assert plain.publish("k", "v") == 1
    pubsub.close()

    async def on_loop(client):
        node, home = await clients.ahome(client, "k")
        assert node == ""
        assert clients.owns(home)
        pubsub = home.pubsub()
        await pubsub.subscribe("k")
        assert await client.publish("k", "v") == 1
        await pubsub.aclose()
        await close_async(home)
        await close_async((await clients.ahome(client, "k"))[1])  # one that was never used

    called(clients, on_loop)
    clients.close()
    until_gone(standalone, before)


def test_a_client_that_was_handed_over_listens_itself(standalone):
    handed = standalone.client()
    assert Clients.of(handed).home(handed, "k") == ("", handed)

    async def on_loop():
        handed = redis.asyncio.Redis(host=HOST, port=standalone.port)
        clients = Clients.of(handed)
        assert clients.on_loop() is handed
        assert await clients.ahome(handed, "k") == ("", handed)
        await handed.aclose()

    asyncio.run(on_loop())


def until_gone(server, number):
    """Wait until the server has no more connections than the test's own."""
    wait_until(lambda: len(server.own.client_list()) <= number)


def at_one(library, kind, standalone):
    pool = getattr(library, kind)(host=HOST, port=standalone.port, max_connections=1)
    return library.Redis(connection_pool=pool)


@pytest.mark.parametrize("kind", ["ConnectionPool", "BlockingConnectionPool"])
def test_a_client_with_one_connection_is_refused(api, kind, standalone):
    client = at_one(importlib.import_module(api), kind, standalone)
    with pytest.raises(ConfigurationError, match=r"max_connections=2.*or give a URL"):
        Clients.of(client)


def test_a_cluster_client_with_one_connection_to_a_node_is_refused(cluster):
    client = redis.RedisCluster(host=HOST, port=cluster.ports[0], max_connections=1)
    with pytest.raises(ConfigurationError, match="max_connections=2"):
        Clients.of(client)
    client.close()


def test_the_home_of_an_asyncio_clusters_key_takes_over_its_user(own_cluster_with_users):
    cluster = own_cluster_with_users
    client = redis.asyncio.RedisCluster(
        host=HOST, port=cluster.ports[0], username="me", password=SECRET, protocol=2
    )
    clients = Clients.of(client)

    async def main():
        assert clients.on_loop() is client
        _, home = await clients.ahome(client, "k")
        assert await home.execute_command("ACL", "WHOAMI") == b"me"
        await close_async(home)
        await close_async(client)

    asyncio.run(main())
    assert clients.plain().set("k", 1)
    clients.close()


@pytest.fixture
def own_cluster_with_users(cluster):
    for node in cluster.nodes:
        node.tell("ACL", "SETUSER", "me", "on", f">{SECRET}", "~*", "&*", "+@all")
    return cluster


# --- fork -------------------------------------------------------------------------------------

FORK = """
import asyncio, gc, os, sys
import redis.asyncio
from idemguard.stores.clients import Clients, close_async

url, kind = sys.argv[1:]
clients = Clients.from_url(url)
handed = None
if kind == "asyncio":
    pool = redis.asyncio.ConnectionPool.from_url(url)
    handed = redis.asyncio.Redis.from_pool(pool)
    clients = Clients.of(handed)


def number(client):
    return client.client_id() if not clients.cluster else client.incr("n")


async def on_loop():
    client = clients.on_loop()
    try:
        await client.set("k", "child")
    finally:
        await close_async(client)


async def main():
    mine = clients.on_loop()
    await mine.set("k", "parent")
    before = number(clients.plain())
    child = os.fork()
    if not child:
        try:
            clients.forked()
            del mine
            globals()["handed"] = None
            gc.collect()
            assert number(clients.plain()) != before
            asyncio._set_running_loop(None)
            asyncio.run(on_loop())
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(3):
        assert await asyncio.wait_for(mine.get("k"), 5) == b"child"
    if not clients.cluster:
        assert number(clients.plain()) == before, "the parent's connection is gone"
    await close_async(mine)
    clients.close()


asyncio.run(main())
print("done")
"""


@pytest.mark.parametrize("kind", ["url", "asyncio", "cluster"])
def test_a_forked_child_has_clients_of_its_own(kind, standalone, request):
    url = request.getfixturevalue("cluster").url if kind == "cluster" else standalone.url
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, url, kind],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


# --- errors -----------------------------------------------------------------------------------


def answer(api, words, **options):
    """The error that a client of this kind meets; it repeats nothing."""
    library = importlib.import_module(api)
    root = api.partition(".")[0]
    retry = importlib.import_module(f"{api}.retry").Retry(
        importlib.import_module(f"{root}.backoff").NoBackoff(), 0
    )
    made = {"host": HOST, "retry": retry, "socket_connect_timeout": 2, "socket_timeout": 5}
    client = library.Redis(**(made | options))
    if api == root:
        try:
            client.execute_command(*words)
        except Exception as error:  # noqa: BLE001 - it is what the test is about
            return error
        finally:
            client.close()
    else:

        async def ask():
            try:
                await client.execute_command(*words)
            except Exception as error:  # noqa: BLE001 - as above
                return error
            finally:
                await client.aclose()

        if error := asyncio.run(ask()):
            return error
    pytest.fail(f"{words} met no error")


def check(error, wanted, *, words="", doing="claiming a task"):
    """It means this, and is told in words that hold no secret."""
    assert meaning(error) is wanted, repr(error)
    told = spoken(error, f"redis://me:{SECRET}@{HOST}:1/0", doing)
    assert isinstance(told, StoreUnavailableError) == (wanted is not Meaning.REFUSED)
    assert isinstance(told, StoreError)
    text = str(told)
    assert doing in text
    assert f"redis://{HOST}:1/0" in text
    assert SECRET not in text
    assert words in text, text


@pytest.fixture(params=APIS)
def api(request):
    return request.param


REFUSED = {
    "NOPERM": (("SET", "k", "v"), {"username": "reader", "password": SECRET}, "ACL"),
    "WRONGPASS": (("PING",), {"username": "reader", "password": "x" + SECRET}, "password"),
    "WRONGTYPE": (("INCR", "list"), {}, "WRONGTYPE"),
    "script": (("EVAL", "return redis.call('INCR', KEYS[1])", 1, "list"), {}, "WRONGTYPE"),
    "unknown command": (("HELO", SECRET), {}, "unknown command"),
    "wrong arguments": (("GET",), {}, "wrong number of arguments"),
    "no database": (("PING",), {"db": 99_999}, "out of range"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_server_refuses(case, api, standalone):
    standalone.tell("ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+get")
    standalone.tell("ACL", "SETUSER", "reader", "+ping", "+hello", "+client")
    standalone.tell("RPUSH", "list", "x")
    words, options, told = REFUSED[case]
    check(answer(api, words, port=standalone.port, **options), Meaning.REFUSED, words=told)


@pytest.mark.parametrize("script", [False, True])
def test_a_full_server_and_one_that_wants_replicas(api, script, standalone):
    body = "return redis.call('SET', KEYS[1], 'v')"
    words = ("EVAL", body, 1, "k") if script else ("SET", "k", "v")
    standalone.tell("CONFIG", "SET", "maxmemory", 1)
    check(answer(api, words, port=standalone.port), Meaning.REFUSED, words="OOM")
    standalone.tell("CONFIG", "SET", "maxmemory", 0)
    standalone.tell("CONFIG", "SET", "min-replicas-to-write", 1)
    check(answer(api, words, port=standalone.port), Meaning.SOON, words="NOREPLICAS")
    standalone.tell("CONFIG", "SET", "min-replicas-to-write", 0)


@pytest.fixture(scope="module")
def guarded_server():
    with Server(password=SECRET) as server:
        yield server


def test_a_server_that_wants_a_password(api, guarded_server):
    error = answer(api, ("PING",), port=guarded_server.port)
    check(error, Meaning.REFUSED, words="password")
    error = answer(api, ("PING",), port=guarded_server.port, password="wrong")
    check(error, Meaning.REFUSED, words="password")


@pytest.fixture(scope="module")
def orphan():
    """A replica whose primary is not there."""
    with Server("--replicaof", HOST, free_port()) as server:
        yield server


def test_a_replica(api, orphan):
    orphan.tell("CONFIG", "SET", "replica-serve-stale-data", "yes")
    body = "return redis.call('SET', KEYS[1], 'v')"
    for words in [("SET", "k", "v"), ("EVAL", body, 1, "k")]:
        check(answer(api, words, port=orphan.port), Meaning.REFUSED, words="redis+sentinel://")
    orphan.tell("CONFIG", "SET", "replica-serve-stale-data", "no")
    check(answer(api, ("GET", "k"), port=orphan.port), Meaning.SOON, words="MASTERDOWN")


def test_a_script_that_is_not_there(api, standalone):
    error = answer(api, ("EVALSHA", "0" * 40, 0), port=standalone.port)
    check(error, Meaning.COLD, words="NOSCRIPT")


def test_a_server_that_runs_a_long_script(api, own_server, crew):
    own_server.tell("CONFIG", "SET", "busy-reply-threshold", 1)
    client = own_server.client(socket_timeout=None)
    crew.start(client.eval, "while true do end", 0)
    try:

        def busy():
            error = None
            with contextlib.suppress(AssertionError, pytest.fail.Exception):
                error = answer(api, ("GET", "k"), port=own_server.port)
            return error

        check(wait_until(busy), Meaning.SOON, words="BUSY")
    finally:
        own_server.tell("SCRIPT", "KILL")


def test_a_server_that_loads_its_data(api):
    options = ["--key-load-delay", 20_000, "--loading-process-events-interval-bytes", 1024]
    with Server(*options) as server:
        for number in range(600):
            server.tell("SET", f"k{number}", "v" * 100)
        server.tell("CONFIG", "SET", "rdbcompression", "no")
        server.tell("SAVE")
        server.kill()
        server.launch()

        def loading():
            error = answer(api, ("GET", "k"), port=server.port)
            return None if connecting(error) else error

        check(wait_until(loading), Meaning.SOON, words="LOADING")


def test_a_server_without_room_for_clients(api, own_server):
    held = own_server.client()
    held.ping()
    own_server.tell(
        "CONFIG", "SET", "maxclients", len(own_server.tell("CLIENT", "LIST").split(b"\n")) - 1
    )
    error = answer(api, ("PING",), port=own_server.port)
    assert meaning(error) in (Meaning.SOON, Meaning.AWAY)  # it may hang up before it is read
    assert SECRET not in str(spoken(error, "redis://h", "asking"))


def test_a_node_of_a_cluster_and_no_cluster(api, cluster, standalone):
    slot = cluster.slot("k")
    stranger = cluster.other(cluster.owner(slot))
    error = answer(api, ("GET", "k"), port=stranger.port)
    check(error, Meaning.REFUSED, words="redis+cluster://")
    error = answer(api, ("MGET", "k", "l"), port=stranger.port)
    check(error, Meaning.REFUSED, words="CROSSSLOT")
    library = importlib.import_module(api)
    if api in ("redis", "valkey"):
        with pytest.raises(Exception, match="luster") as caught:
            library.RedisCluster(host=HOST, port=standalone.port)
        check(caught.value, Meaning.REFUSED)


def test_a_cluster_that_is_none_yet(api):
    with Server("--cluster-enabled", "yes", "--cluster-port", free_port()) as server:
        error = answer(api, ("GET", "k"), port=server.port)
        check(error, Meaning.SOON, words="CLUSTERDOWN")


@pytest.mark.parametrize("package", ["redis", "valkey"])
def test_a_slot_on_its_way(package, cluster):
    move = cluster.moving(cluster.slot("{t}"), cluster.other(cluster.owner(cluster.slot("{t}"))))
    cluster.nodes[0].tell("PING")
    with importlib.import_module(package).RedisCluster(host=HOST, port=cluster.ports[0]) as client:
        client.set("{t}a", 1)
        client.set("{t}b", 1)
        move.begin()
        move.carry("{t}a")
        with pytest.raises(Exception, match="TTL") as caught:
            client.mget("{t}a", "{t}b")
        check(caught.value, Meaning.MOVING)
        assert client.get("{t}a") == b"1"
    error = answer(package, ("MGET", "{t}a", "{t}b"), port=move.source.port)
    check(error, Meaning.MOVING, words="TRYAGAIN")
    move.carry()
    move.end()


def test_a_primary_that_sentinel_has_put_down_is_away(sentinel):
    clients = Clients.from_url(sentinel.url)
    clients.plain().set("k", 1)
    sentinel.primary.tell("REPLICAOF", HOST, free_port())
    with pytest.raises(redis.RedisError) as caught:
        clients.plain().set("k", 2)
    check(caught.value, Meaning.AWAY)
    clients.close()


def test_a_master_name_that_no_sentinel_knows_is_away(sentinel):
    clients = Clients.from_url(sentinel.url.replace("mymaster", "yours"))
    with pytest.raises(redis.RedisError, match="yours") as caught:
        clients.plain().ping()
    check(caught.value, Meaning.AWAY)
    assert connecting(caught.value)
    clients.close()


def test_nobody_there(api):
    error = answer(api, ("PING",), port=free_port())
    check(error, Meaning.AWAY)
    assert connecting(error)
    error = answer(api, ("PING",), host="no.such.host.invalid", port=1)
    check(error, Meaning.AWAY)
    assert connecting(error)
    library = importlib.import_module(api)
    error = answer(api, ("PING",), unix_socket_path="/no/such/socket", host=None)
    check(error, Meaning.AWAY)
    assert connecting(error)
    assert library


@pytest.mark.parametrize("package", ["redis", "valkey"])
def test_a_cluster_that_is_not_there(package):
    library = importlib.import_module(package)
    with pytest.raises(Exception, match="onnect") as caught:
        library.RedisCluster(host=HOST, port=free_port())
    check(caught.value, Meaning.AWAY)
    assert connecting(caught.value)
    clients = Clients.from_url(f"redis+cluster://{HOST}:{free_port()}")

    async def ask(client):
        with pytest.raises(Exception, match="onnect") as caught:
            await client.ping()
        check(caught.value, Meaning.AWAY)
        assert connecting(caught.value)

    called(clients, ask)


def test_nobody_answers(api, listener):
    with contextlib.ExitStack() as stack:
        # a backlog that is full swallows the attempts that come later
        full = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex((HOST, port_of(full)))
        error = answer(api, ("PING",), port=port_of(full), socket_connect_timeout=0.2)
    check(error, Meaning.AWAY)
    assert connecting(error)
    error = answer(api, ("PING",), port=port_of(listener), socket_timeout=0.1, protocol=2)
    check(error, Meaning.AWAY)
    assert not connecting(error)


def test_a_server_that_dies_while_it_is_asked(api, own_server, crew):
    asked = crew.start(answer, api, ("BLPOP", "nothing", 0))  # fails: no port
    assert asked.exception() is not None or asked.result() is not None
    port = own_server.port
    future = crew.start(lambda: answer(api, ("BLPOP", "nothing", 0), port=port))
    wait_until(lambda: own_server.own.info("clients")["blocked_clients"])
    own_server.kill()
    error = future.result()
    check(error, Meaning.AWAY)
    assert not connecting(error)


def test_a_connection_that_is_cut_is_away(api, standalone):
    with Proxy(standalone) as proxy:
        proxy.cut_before()
        error = answer(api, ("GET", "k"), port=proxy.port)
        check(error, Meaning.AWAY)
        assert not connecting(error)


def test_a_certificate_that_nobody_vouches_for(api, tls):
    error = answer(api, ("PING",), port=tls.port, ssl=True, socket_connect_timeout=5)
    check(error, Meaning.REFUSED, words="ssl_ca_certs")


def test_tls_with_a_server_that_speaks_none(api, standalone):
    error = answer(api, ("PING",), port=standalone.port, ssl=True)
    check(error, meaning(error))
    assert meaning(error) in (Meaning.REFUSED, Meaning.AWAY)


def taken_from(pool):
    """A connection of a pool, which some versions give for a command alone."""
    try:
        return pool.get_connection()
    except TypeError:
        return pool.get_connection("PING")


@pytest.mark.parametrize("pool", ["ConnectionPool", "BlockingConnectionPool"])
def test_a_pool_that_is_used_up(api, pool, standalone):
    library = importlib.import_module(api)
    options = {"timeout": 0.05} if pool == "BlockingConnectionPool" else {}

    async def take(pool):
        taken = taken_from(pool)
        return await taken if asyncio.iscoroutine(taken) else taken

    async def main():
        full = getattr(library, pool)(host=HOST, port=standalone.port, max_connections=1, **options)
        client = library.Redis(connection_pool=full)
        held = await take(full)
        with pytest.raises(Exception, match="onnection") as caught:
            await client.ping() if "asyncio" in api else client.ping()
        check(caught.value, Meaning.BUSY, words="max_connections")
        released = full.release(held)
        if "asyncio" in api:
            await released
            await full.disconnect()
        else:
            full.disconnect()

    asyncio.run(main())


def test_a_clusters_pool_that_is_used_up_is_no_broken_node(cluster):
    clients = Clients.from_url(cluster.url + "?max_connections=1&timeout=0.05")
    plain = clients.plain()
    node = plain.get_redis_connection(plain.get_node_from_key("k"))
    held = taken_from(node.connection_pool)
    cluster.forget()
    with pytest.raises(redis.RedisError) as caught:
        plain.get("k")
    check(caught.value, Meaning.BUSY)
    node.connection_pool.release(held)
    assert plain.get("k") is None
    assert all(b"CLUSTER" not in note.frame for p in cluster.proxies for note in p.noted())
    clients.close()


def test_a_closed_loop_is_away_and_a_bug_is_no_error_of_a_client():
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError) as caught:
        loop.call_soon(print)
    assert meaning(caught.value) is Meaning.AWAY
    for other in (KeyError("k"), TypeError(), RuntimeError("no"), KeyboardInterrupt()):
        assert meaning(other) is None
    assert meaning(asyncio.CancelledError()) is None
    assert meaning(TimeoutError()) is Meaning.AWAY
    assert meaning(ConnectionResetError()) is Meaning.AWAY
    assert meaning(asyncio.IncompleteReadError(b"", 1)) is Meaning.AWAY


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # what servers before 7 made of a script's command
        ("Error running script (call to f_0): @user_script:1: -OOM command not", Meaning.REFUSED),
        ("Error running script (call to f_0): @user_script:1: -LOADING Redis is", Meaning.SOON),
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL", Meaning.SOON),
        ("BUSYGROUP Consumer Group name already exists", Meaning.REFUSED),
        ("MISCONF Redis is configured to save RDB snapshots, but it", Meaning.REFUSED),
        ("max number of clients + cluster connections reached", Meaning.SOON),
    ],
)
def test_what_only_the_text_tells(text, wanted):
    check(redis.ResponseError(text), wanted)
    check(valkey.ResponseError(text), wanted)


@pytest.mark.parametrize(
    "text",
    [
        # what a server that does not know HELLO says to it
        f"unknown command `HELLO`, with args beginning with: `3`, `AUTH`, `me`, `{SECRET}`, ",
        f"cannot do AUTH me {SECRET}",
        f"AUTH {SECRET}: no",
        f"Redis(host=h,password={SECRET},db=0) is away",
        f"'password': '{SECRET}'",
        f"no answer from redis://me:{SECRET}@h:1",
    ],
)
def test_a_servers_words_are_told_without_what_it_was_told(text):
    assert SECRET not in str(spoken(redis.ResponseError(text), "redis://h", "asking"))
    assert SECRET not in str(spoken(redis.ConnectionError(text), "redis://h", "asking"))


def test_the_module_loads_no_client():
    code = (
        "import sys, idemguard.stores.clients\n"
        "print([m for m in ('redis', 'valkey') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

"""Which client reaches a Redis or Valkey server, and what its errors mean.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from queue import Empty, Full, SimpleQueue
from typing import Any, NoReturn
from urllib.parse import parse_qsl, unquote
from weakref import WeakKeyDictionary, ref

from idemguard.errors import ConfigurationError, StoreError, StoreUnavailableError

CONNECT_TIMEOUT = 2.0  # seconds
TIMEOUT = 5.0  # seconds for an answer
QUEUE = 300.0  # and for a free connection, which is no outage
CONNECTIONS = 50  # at most, per client

_parked: list[Any] = []  # a parent's clients: closing one would end its connections in the parent


class Clients:
    """The clients of one server, cluster or Sentinel-managed primary.

    Attributes:
        name: which one, for messages; without user and password.
        cluster: whether it is a cluster.

    """

    def __init__(self, name: str, target: _Target | None, handed: Any = None) -> None:
        self.name = name
        self.cluster = _is_cluster(handed) if target is None else target.kind == "cluster"
        self._target = target
        self._handed = handed
        self._asyncio = handed is not None and _is_async(handed)
        self._lock = threading.Lock()
        self._plain: Any = None
        self._turns = self._new_turns()
        self._hearing: dict[str, Any] = {}  # clients that listen, by node
        self._made: WeakKeyDictionary[Any, ref[asyncio.AbstractEventLoop]] = WeakKeyDictionary()
        self._loop: ref[asyncio.AbstractEventLoop] | None = None  # of the client handed over
        self._inherited = False

    @classmethod
    def from_url(cls, url: str) -> Clients:
        """The clients that a URL names; nothing connects yet.

        Args:
            url: `redis://`, `rediss://` (TLS), `unix://`, `redis+cluster://host:port,host:port`,
                `redis+sentinel://host:port,host:port/master-name`, each also with `rediss`,
                `valkey`, `valkeys`. Its query holds options of redis-py, times in seconds, and
                for Sentinel `sentinel_username`, `sentinel_password`. `decode_responses`,
                `encoding`, `retry_on_timeout` and `legacy_responses` change nothing here.

        Raises:
            ConfigurationError: it cannot be used; the message names the part, never a value.

        """
        target = _parse(url)
        _check(target)
        return cls(target.name(), target)

    @classmethod
    def of(cls, client: object) -> Clients:
        """The clients beside one that is handed over: redis-py's or valkey-py's, sync or asyncio.

        Raises:
            ConfigurationError: it is no client, or no sync twin can be made of an asyncio one.

        """
        _refuse_others(client)
        _refuse_one_place(client)
        if _is_async(client):
            target = _target_of(client)
            return cls(target.name(), target, client)
        try:
            name = _target_of(client).name()
        except (ConfigurationError, AttributeError, KeyError, TypeError):
            name = type(client).__name__
        return cls(name, None, client)

    def _new_turns(self) -> Turns | None:
        # the pool of a client that was handed over has users that are not known here
        return None if self._target is None else Turns(self._target.size)

    def take(self, seconds: float, *, first: bool = False) -> Turns | None:
        """Wait until a connection of the sync client is free; the caller gives it back.

        Args:
            seconds: how long at most.
            first: whether before all who wait already.

        Returns:
            What to `give()` it back to; None where it is not known when one is free.

        Raises:
            StoreUnavailableError: none was free in time.

        """
        while True:
            turns = self._turns
            if turns is None:
                return None
            mine = turns.take(seconds, first=first)
            if mine:
                return turns
            if mine is not None:
                raise self.crowded(seconds)

    def places(self, client: Any) -> asyncio.Semaphore | None:
        """What those wait for who share a loop's client; None where that knows of others, too."""
        if self._target is None or not self.owns(client):
            return None
        return asyncio.Semaphore(self._target.size)

    @property
    def patience(self) -> float:
        """How long a free connection of ours is waited for, s."""
        return QUEUE if self._target is None else self._target.wait

    def crowded(self, seconds: float) -> StoreUnavailableError:
        """The error where no connection was free in time."""
        return StoreUnavailableError(
            f"all connections of its pool are in use at {self.name}, and none became free within "
            f"{seconds:g} s; max_connections says how many there are"
        )

    def plain(self) -> Any:
        """The sync client of this process, made at the first call; a cluster's connects then."""
        if self._handed is not None and not self._asyncio:
            return self._handed
        made = self._plain
        if made is None:
            with self._lock:
                if self._plain is None:
                    assert self._target is not None
                    self._plain = _build(self._target, loop=False)
                made = self._plain
        return made

    def on_loop(self) -> Any | None:
        """An asyncio client for the running loop, or None where there are only sync ones.

        A new one at each call, which the caller keeps and closes; but the asyncio client that
        was handed over, on the loop that it belongs to.
        """
        if self._target is None:
            return None
        if self._asyncio and self._belongs(asyncio.get_running_loop()):
            return self._handed
        if not _takes_all(self._target):
            return None
        return self._on_this_loop(self._target)

    def _on_this_loop(self, target: _Target) -> Any:
        client = _build(target, loop=True)
        self._made[client] = ref(asyncio.get_running_loop())
        return client

    def owns(self, client: Any) -> bool:
        """Whether it may be closed: it is not the one that was handed over."""
        return client is not self._handed

    def forked(self) -> None:
        """In a child process: make new clients, touch none of the parent's."""
        _parked.extend([self._plain, self._handed, self._hearing, *self._made])
        self._lock = threading.Lock()
        self._plain = None
        self._turns = self._new_turns()
        self._hearing = {}
        self._made = WeakKeyDictionary()
        self._loop = None
        self._inherited = True

    def spoilt(self, client: Any) -> None:
        """An interrupt has hit a sync client, which may hold half an exchange: use it no longer.

        One that was handed over stays in use.
        """
        with self._lock:
            turns, self._turns = self._turns, self._new_turns()
        if turns is not None:
            turns.end()  # one may have been taken and never given back
        with self._lock:
            if client is None or self._plain is not client:
                return
            self._plain = None  # and others end what they do with it
        places = getattr(getattr(client, "connection_pool", None), "pool", None)
        if isinstance(places, Places):
            places.clear()

    def close(self) -> None:
        """Close the sync client if it is ours; the next use makes a new one."""
        with self._lock:
            made = [self._plain, *self._hearing.values()]
            self._plain, self._hearing = None, {}
        for each in made:
            if each is not None:
                _close(each)

    def home(self, client: Any, key: str) -> tuple[str, Any]:
        """Where a channel of the key's slot is served: the node's name, and a sync client of it.

        Outside a cluster the name is empty. A client of ours that listens is no other, so that
        listening takes up none of the connections that calls use. Raises what the client raises.
        """
        node = client.get_node_from_key(key) if _is_cluster(client) else None
        name = "" if node is None else node.name
        if node is not None:
            of_node = f"get_{_root(client)}_connection"  # as redis-py and valkey-py call it
            client = getattr(client, of_node)(node)
        if self._target is None:
            return name, client
        with self._lock:
            if name not in self._hearing:
                pool = client.connection_pool
                target = self._target
                if node is not None:
                    target = _of_node(node, target.root, pool.connection_class, pool)
                self._hearing[name] = _build(replace(target, size=CONNECTIONS), loop=False)
            return name, self._hearing[name]

    async def ahome(self, client: Any, key: str) -> tuple[str, Any]:
        """As `home`, for an asyncio client; a client of ours is a new one, which the caller closes."""
        if not _is_cluster(client):
            if self._target is None or not self.owns(client):
                return "", client
            target = replace(self._target, size=CONNECTIONS)
            return "", _Later(partial(self._on_this_loop, target))
        await client.initialize()  # does nothing where the slots are known
        node = client.get_node_from_key(key)
        target = _of_node(node, _root(client), node.connection_class, node)
        return node.name, _Later(partial(self._on_this_loop, target))

    def let_go(self) -> None:
        """End the connections of loops that are closed; nothing can close them as it should."""
        for client, loop in list(self._made.items()):
            there = loop()
            if there is None or there.is_closed():
                self._made.pop(client, None)
                for connection in _held(client):
                    writer: Any = getattr(connection, "_writer", None)
                    with suppress(Exception):  # it is gone already
                        writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def _belongs(self, loop: asyncio.AbstractEventLoop) -> bool:
        with self._lock:
            if self._loop is None:
                if self._inherited or _used_elsewhere(self._handed, loop):
                    return False
                self._loop = ref(loop)
            return self._loop() is loop


class Turns:
    """The connections of a pool: who finds none free is served in the order of coming.

    Args:
        size: how many there are.

    """

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._free = size
        self._waiting: deque[SimpleQueue[bool | None]] = deque()
        self._over = False

    def take(self, seconds: float, *, first: bool = False) -> bool | None:
        """Wait for one.

        Args:
            seconds: how long at most.
            first: whether before all who wait already.

        Returns:
            Whether it may be used; None where there are others in place of these.

        """
        with self._lock:
            if self._over:
                return None
            if self._free:
                self._free -= 1
                return True
            mine: SimpleQueue[bool | None] = SimpleQueue()
            (self._waiting.appendleft if first else self._waiting.append)(mine)
        try:
            return mine.get(timeout=seconds)
        except Empty:
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                    return False
            return mine.get()  # it came at the last moment

    def give(self) -> None:
        """Give one back."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().put(True)
            else:
                self._free += 1

    def end(self) -> None:
        """There are others in place of these; whoever waits is told so."""
        with self._lock:
            self._over = True
            waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            each.put(None)


class _Later:
    """An asyncio client that is made when it is used."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.made: Any = None

    def __getattr__(self, name: str) -> Any:
        if self.made is None:
            self.made = self._make()
        return getattr(self.made, name)


async def close_async(client: Any) -> None:
    """Close an asyncio client and all its connections, whatever state they are in."""
    if isinstance(client, _Later):
        if client.made is None:
            return
        client = client.made
    pool = getattr(client, "connection_pool", None)
    manager = getattr(pool, "sentinel_manager", None)
    for each in [client, *getattr(manager, "sentinels", ())]:
        with suppress(Exception):  # a closed loop, a broken connection: it is gone either way
            await each.aclose()


def _close(client: Any) -> None:
    pool = getattr(client, "connection_pool", None)
    manager = getattr(pool, "sentinel_manager", None)
    for each in [client, *getattr(manager, "sentinels", ())]:
        with suppress(Exception):  # as in close_async
            each.close()


# --- what is reached, and by which client -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    root: str  # the package whose clients are made
    kind: str  # "server", "cluster", "sentinel", "fake"
    nodes: tuple[tuple[str, int], ...] = ()
    path: str = ""  # of a unix socket
    service: str = ""  # Sentinel's name for the primary
    tls: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of a connection
    sentinel: dict[str, Any] = field(default_factory=dict)  # of a connection to a sentinel
    extra: dict[str, Any] = field(default_factory=dict)  # of the cluster client, or of Sentinel
    size: int = CONNECTIONS
    wait: float = QUEUE  # seconds for a free connection
    scheme: str = ""  # as the user wrote it

    def name(self) -> str:
        db = self.options.get("db") or 0
        if self.kind == "fake":
            return f"fakeredis/{db}"
        if self.path:
            return f"unix://{self.path}" + (f"?db={db}" if db else "")
        hosts = ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.nodes
        )
        base = self.scheme.partition("+")[0].replace("rediss", "redis").replace("valkeys", "valkey")
        scheme = (base or self.root) + "s" * self.tls
        if self.kind == "cluster":
            return f"{scheme}+cluster://{hosts}"
        if self.kind == "sentinel":
            return f"{scheme}+sentinel://{hosts}/{self.service}" + (f"/{db}" if db else "")
        return f"{scheme}://{hosts}/{db}"


def _build(target: _Target, *, loop: bool) -> Any:
    """A client of ours; of the asyncio kind for a `loop`. Only a sync cluster client connects."""
    home = f"{target.root}.asyncio" if loop else target.root
    library = import_module(home)
    if target.kind == "fake":
        fake = import_module("fakeredis")
        return (fake.FakeAsyncRedis if loop else fake.FakeRedis)(**target.options)
    if target.kind == "cluster":
        return _build_cluster(target, library, loop=loop)
    if target.kind == "sentinel":
        module = import_module(f"{home}.sentinel")
        sentinel = module.Sentinel(
            list(target.nodes),
            sentinel_kwargs={
                **_only(target.sentinel, library.Redis),
                **_calm(library.Redis, home),
            },
            **_only(target.extra, module.Sentinel),
        )
        pool = _blocking(module.SentinelConnectionPool, library.BlockingConnectionPool)
        connection = module.SentinelManagedConnection
        if target.tls:
            connection = module.SentinelManagedSSLConnection
            connection = connection if loop else _prompt(connection)
        connection = _following(
            connection, import_module(f"{target.root}.exceptions").ResponseError
        )
        return library.Redis.from_pool(
            pool(target.service, sentinel, **_settings(target, pool, connection, home))
        )
    connection = _connection_class(target, home)
    pool = library.BlockingConnectionPool
    where = (
        {"path": target.path}
        if target.path
        else {"host": target.nodes[0][0], "port": target.nodes[0][1]}
    )
    return library.Redis.from_pool(pool(**where, **_settings(target, pool, connection, home)))


def _connection_class(target: _Target, home: str) -> Any:
    module = import_module(f"{home}.connection")
    if target.path:
        return module.UnixDomainSocketConnection
    if not target.tls:
        return module.Connection
    connection = module.SSLConnection
    return connection if home.endswith(".asyncio") else _prompt(connection)


@cache
def _prompt(connection: Any) -> Any:
    """With a handshake that takes no longer than a connection may; else it could take an answer's time."""

    class PromptSSLConnection(connection):  # type: ignore[misc]
        def _wrap_socket_with_ssl(self, sock: Any) -> Any:
            sock.settimeout(self.socket_connect_timeout)
            wrapped = super()._wrap_socket_with_ssl(sock)
            wrapped.settimeout(self.socket_timeout)
            return wrapped

    return PromptSSLConnection


def _settings(target: _Target, pool: Any, connection: Any, home: str) -> dict[str, Any]:
    return {
        "connection_class": connection,
        "max_connections": target.size,
        "timeout": target.wait,
        **({} if home.endswith(".asyncio") else {"queue_class": Places}),
        **_only(target.options, connection),
        **_calm(connection, home, pool),
    }


def _build_cluster(target: _Target, library: Any, *, loop: bool) -> Any:
    home = library.__name__
    kind = library.RedisCluster
    module = import_module(f"{home}.cluster")
    settings: dict[str, Any] = {
        "require_full_coverage": False,  # a slot that nobody serves is the concern of its keys
        "max_connections": target.size,
        **target.extra,
    }
    retry = _no_retries(home)
    if target.root == "redis" and int(import_module("redis").__version__.split(".")[0]) >= 6:  # noqa: PLR2004
        settings["retry"] = retry
    else:
        settings |= {"cluster_error_retry_attempts": 0, "retry": retry}
        if "connection_error_retry_attempts" in _parameters(kind):
            settings["connection_error_retry_attempts"] = 0
    if loop:
        nodes = [module.ClusterNode(host, port) for host, port in target.nodes]
        calm = _calm(kind, home)
        return kind(
            startup_nodes=nodes,
            ssl=target.tls,
            **{**_only(target.options, kind), **calm, **settings},
        )
    (host, port), *others = target.nodes
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    allowed = _cluster_options(target.root)
    connection = _connection_class(target, home)
    calm = _calm(connection, home, library.BlockingConnectionPool)
    return kind(
        # only what comes by URL may have a pool of another kind
        url=f"{target.root}{'s' * target.tls}://{where}",
        startup_nodes=[module.ClusterNode(*other) for other in others],
        connection_pool_class=_node_pool(
            library.BlockingConnectionPool, import_module(f"{home}.exceptions").MaxConnectionsError
        ),
        timeout=target.wait,
        **{
            **{key: value for key, value in (target.options | calm).items() if key in allowed},
            **settings,
        },
    )


def _cluster_options(root: str) -> frozenset[str]:
    module = import_module(f"{root}.cluster")
    return frozenset(getattr(module, f"{root.upper()}_ALLOWED_KEYS"))


def _no_retries(home: str) -> Any:
    """None of its own: the store repeats, and knows how long."""
    backoff = import_module(f"{home.partition('.')[0]}.backoff")
    return import_module(f"{home}.retry").Retry(backoff.NoBackoff(), 0)


def _calm(taker: Any, home: str, pool: Any = None) -> dict[str, Any]:
    """What keeps a client to the commands that it is given, as far as `taker` can be told."""
    names = _parameters(taker)
    calm: dict[str, Any] = {}
    if "retry" in names:
        calm["retry"] = _no_retries(home)
    if "driver_info" in names and names["driver_info"].default is not None:
        calm["driver_info"] = None
    elif "lib_name" in names:
        calm |= {"lib_name": None, "lib_version": None}
    if "maint_notifications_config" in _parameters(pool or taker):
        module = import_module(f"{home.partition('.')[0]}.maint_notifications")
        calm["maint_notifications_config"] = module.MaintNotificationsConfig(enabled=False)
    return calm


@cache
def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """What a class and those above it can be given by name."""
    names: dict[str, inspect.Parameter] = {}
    for each in kind.__mro__:
        if "__init__" in vars(each) and each is not object:
            for name, parameter in inspect.signature(vars(each)["__init__"]).parameters.items():
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                    names.setdefault(name, parameter)
    return names


def _only(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    names = _parameters(kind)
    return {name: value for name, value in options.items() if name in names}


def _takes_all(target: _Target) -> bool:
    """Whether asyncio connections can be told all that the sync ones are told."""
    if target.kind == "fake":
        return True
    if target.kind == "cluster":
        kind = import_module(f"{target.root}.asyncio").RedisCluster
    else:
        kind = _connection_class(target, f"{target.root}.asyncio")
    return target.options.keys() <= _parameters(kind).keys()


@cache
def _blocking(managed: Any, blocking: Any) -> Any:
    """Sentinel's pool, but where no connection is free it waits."""

    class BlockingSentinelPool(managed, blocking):  # type: ignore[misc]
        if not inspect.iscoroutinefunction(blocking.disconnect):
            # some versions of the blocking pool cannot be told to spare those in use
            def disconnect(self, inuse_connections: bool = True) -> None:
                self._checkpid()
                for each in self._connections if inuse_connections else list(self.pool.queue):
                    if each is not None:
                        each.disconnect()

    return BlockingSentinelPool


@cache
def _following(managed: Any, refusal: type[Exception]) -> Any:
    """Sentinel's connection, but where its primary lacks replicas it asks anew who the primary is.

    After a failover by command that is how one learns of it: the old one goes on for a while.
    """

    class Following(managed):  # type: ignore[misc]
        if inspect.iscoroutinefunction(managed.read_response):

            async def read_response(self, *args: Any, **options: Any) -> Any:
                try:
                    return await super().read_response(*args, **options)
                except refusal as error:
                    if _code(error) == "NOREPLICAS":
                        await self.disconnect()
                    raise

        else:

            def read_response(self, *args: Any, **options: Any) -> Any:  # type: ignore[misc]
                try:
                    return super().read_response(*args, **options)
                except refusal as error:
                    if _code(error) == "NOREPLICAS":
                        self.disconnect()
                    raise

    return Following


class Places:
    """The places of a pool; no interrupt can leave a lock of theirs behind, as a LifoQueue's.

    Args:
        size: how many there are.

    Attributes:
        queue: connections that are free.

    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: SimpleQueue[None] = SimpleQueue()
        self.queue: list[Any] = []

    def put_nowait(self, connection: Any) -> None:
        """Free a place, with a connection or with none."""
        if self._free.qsize() >= self._size:
            raise Full
        if connection is not None:
            self.queue.append(connection)
        self._free.put(None)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take a place, and the connection that was used last, if any is free; else None."""
        self._free.get(block, timeout)
        return self._pop()

    def clear(self) -> None:
        """Close the connections that are free."""
        while (connection := self._pop()) is not None:
            with suppress(Exception):  # as in close_async
                connection.disconnect()

    def _pop(self) -> Any:
        try:
            return self.queue.pop()
        except IndexError:
            return None


@cache
def _node_pool(blocking: Any, exhausted: type[Exception]) -> Any:
    class BlockingNodePool(blocking):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"queue_class": Places} | options)

        def get_connection(self, *args: Any, **options: Any) -> Any:
            try:
                return super().get_connection(*args, **options)
            except Exception as error:
                if _NO_CONNECTION in str(error):
                    # by this name the cluster client does not take the node for a broken one
                    raise exhausted(str(error)) from error
                raise

    return BlockingNodePool


# --- a client that was handed over ------------------------------------------------------------

_CLIENT_HINT = (
    "give a URL, or a client: redis.Redis, redis.asyncio.Redis, RedisCluster, "
    "Sentinel.master_for(name), or valkey-py's"
)

_TAKEN = frozenset(
    {
        "db", "username", "password", "credential_provider", "client_name", "protocol",
        "socket_timeout", "socket_connect_timeout", "socket_keepalive",
        "socket_keepalive_options", "socket_type", "socket_read_size", "health_check_interval",
    }
)  # fmt: skip


def _is_async(client: Any) -> bool:
    return inspect.iscoroutinefunction(client.execute_command)


def _is_cluster(client: Any) -> bool:
    return hasattr(client, "nodes_manager")


def _root(client: Any) -> str:
    for kind in type(client).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in ("redis", "valkey"):
            return root
    raise ConfigurationError(f"store={type(client).__name__}: {_CLIENT_HINT}")


def _refuse_others(client: Any) -> None:
    kind = client if isinstance(client, type) else type(client)
    what = f"store={kind.__module__}.{kind.__qualname__}"
    if isinstance(client, type):
        raise ConfigurationError(f"{what} is a class: give a client made of it")
    if hasattr(client, "discover_master"):
        raise ConfigurationError(f"{what} is no client: give its master_for(name)")
    if any("Pipeline" in each.__name__ for each in kind.__mro__):
        raise ConfigurationError(f"{what} is a pipeline: give the client that it is of")
    if hasattr(client, "get_connection") and hasattr(client, "connection_class"):
        raise ConfigurationError(f"{what} is a pool: give Redis(connection_pool=pool)")
    if not (
        callable(getattr(client, "execute_command", None))
        and (
            _is_cluster(client)
            # a PubSub has a pool as well, but none of its kind
            or (hasattr(client, "connection_pool") and hasattr(client, "pubsub"))
        )
    ):
        raise ConfigurationError(f"{what} is no client that idemguard knows: {_CLIENT_HINT}")
    _root(client)
    if getattr(getattr(client, "connection_pool", None), "is_master", True) is False:
        raise ConfigurationError(f"{what} reads from replicas: give Sentinel's master_for(name)")


def _refuse_one_place(client: Any) -> None:
    """While somebody waits, one connection listens; another one must be left for calls."""
    if not _is_cluster(client):
        size = getattr(client.connection_pool, "max_connections", None)
    elif _is_async(client):
        return  # beside it, a client of ours listens
    else:
        size = client.nodes_manager.connection_kwargs.get("max_connections")
    if size == 1:
        raise ConfigurationError(
            f"store={type(client).__name__} has a pool of one connection, which listens while "
            "somebody waits, so that none is left for calls: make it with max_connections=2 or "
            "more, or give a URL"
        )


def _target_of(client: Any) -> _Target:
    root = _root(client)
    if _is_cluster(client):
        manager = client.nodes_manager
        connection = client.get_connection_kwargs()
        remap = getattr(manager, "address_remap", None)
        return _Target(
            root=root,
            kind="cluster",
            nodes=tuple((node.host, int(node.port)) for node in manager.startup_nodes.values()),
            tls=_is_tls(connection.get("connection_class")) or bool(connection.get("ssl")),
            options={key: value for key, value in _taken(connection).items() if key != "db"},
            extra={"address_remap": remap} if remap else {},
        )
    pool = client.connection_pool
    kind, options = pool.connection_class, pool.connection_kwargs
    if kind.__module__.partition(".")[0] == "fakeredis":
        wanted = ("server", "version", "server_type", "lua_modules", "db")
        return _Target(
            root=root,
            kind="fake",
            options={key: options[key] for key in wanted if options.get(key) is not None},
        )
    if kind.__module__.partition(".")[0] != root:
        raise ConfigurationError(
            f"store={type(client).__name__} with connections of the class {kind.__qualname__}: "
            "no sync client can be made like it, which renewing a claim needs; "
            "give a URL or a sync client"
        )
    if hasattr(pool, "sentinel_manager"):
        manager = pool.sentinel_manager
        sentinels = [each.connection_pool.connection_kwargs for each in manager.sentinels]
        extra = {"min_other_sentinels": manager.min_other_sentinels}
        if getattr(manager, "_force_master_ip", None):
            extra["force_master_ip"] = manager._force_master_ip  # noqa: SLF001 - it has no other name
        return _Target(
            root=root,
            kind="sentinel",
            nodes=tuple((each["host"], int(each["port"])) for each in sentinels),
            service=pool.service_name,
            tls=_is_tls(kind),
            options=_taken(options),
            sentinel=_taken(manager.sentinel_kwargs)
            | ({"ssl": True} if manager.sentinel_kwargs.get("ssl") else {}),
            extra=extra,
        )
    if "path" in options:
        return _Target(root, "server", path=str(options["path"]), options=_taken(options))
    return _Target(
        root,
        "server",
        nodes=((options.get("host") or "localhost", int(options.get("port") or 6379)),),
        tls=_is_tls(kind),
        options=_taken(options),
    )


def _taken(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a client of ours takes over: who it is and how it connects, not how it repeats."""
    taken = {
        name: value
        for name, value in options.items()
        if (name in _TAKEN or name.startswith("ssl_")) and value is not None
    }
    if "ssl_cert_reqs" in options and options["ssl_cert_reqs"] is None:
        taken["ssl_cert_reqs"] = "none"
    if not isinstance(taken.get("socket_keepalive_options", {}), Mapping):
        del taken["socket_keepalive_options"]  # stands for the library's own
    # without them, one lost packet would hold a renewal for ever
    taken.setdefault("socket_timeout", TIMEOUT)
    taken.setdefault("socket_connect_timeout", CONNECT_TIMEOUT)
    return taken


def _is_tls(connection_class: Any) -> bool:
    return any("SSL" in each.__name__ for each in getattr(connection_class, "__mro__", ()))


def _of_node(node: Any, root: str, connection: Any, told: Any) -> _Target:
    """One node of a cluster, reached as `told` says."""
    return _Target(
        root=root,
        kind="server",
        nodes=((node.host, int(node.port)),),
        tls=_is_tls(connection),
        options=_taken(told.connection_kwargs),
    )


def _held(client: Any) -> Iterator[Any]:
    """The connections of an asyncio client; nobody else tells."""
    if _is_cluster(client):
        for node in client.nodes_manager.nodes_cache.values():
            yield from node._connections  # noqa: SLF001 - as above
        return
    pool = client.connection_pool
    manager = getattr(pool, "sentinel_manager", None)
    for each in [pool, *(one.connection_pool for one in getattr(manager, "sentinels", ()))]:
        yield from getattr(each, "_available_connections", ())
        yield from getattr(each, "_in_use_connections", ())


def _used_elsewhere(client: Any, loop: asyncio.AbstractEventLoop) -> bool:
    """Whether it holds a connection of another loop."""
    readers = (getattr(each, "_reader", None) for each in _held(client))
    loops = (getattr(reader, "_loop", None) for reader in readers)
    return any(each is not None and each is not loop for each in loops)


# --- URLs -------------------------------------------------------------------------------------

_SCHEMES = re.compile(r"(?P<base>rediss?|valkeys?|unix)(?:\+(?P<kind>cluster|sentinel))?")
_KNOWN = (
    "redis://host:6379/0, rediss:// (TLS), unix:///path, redis+cluster://host:port,host:port, "
    "redis+sentinel://host:port,host:port/master-name"
)
_IGNORED = frozenset(
    {"decode_responses", "encoding", "encoding_errors", "retry_on_timeout", "legacy_responses"}
)


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "t", "yes", "y", "on"):
        return True
    if text.lower() in ("0", "false", "f", "no", "n", "off"):
        return False
    raise ValueError


def _number(least: float, *, above: bool = False) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value < least or (above and value == least):
            raise ValueError
        return value

    return read


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return read


def _protocol(text: str) -> int:
    return int(_one_of("2", "3")(text))


def _file(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError
    return text


def _folder(text: str) -> str:
    if not Path(text).is_dir():
        raise ValueError
    return text


def _flags(text: str) -> list[ssl.VerifyFlags]:
    try:
        return [ssl.VerifyFlags[each.strip()] for each in text.strip("[]").split(",")]
    except KeyError:
        raise ValueError from None


def _tls_version(text: str) -> ssl.TLSVersion:
    return ssl.TLSVersion(int(text))


_seconds = _number(0, above=True)

_OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "db": (_whole(0), "a number from 0"),
    "username": (str, ""),
    "password": (str, ""),
    "client_name": (str, ""),
    "protocol": (_protocol, "2 or 3"),
    "socket_timeout": (_seconds, "seconds above 0"),
    "socket_connect_timeout": (_seconds, "seconds above 0"),
    "socket_keepalive": (_boolean, "true or false"),
    "socket_read_size": (_whole(1), "a number of bytes"),
    "health_check_interval": (_whole(0), "whole seconds"),
    "max_connections": (_whole(1), "a number from 1"),
    "timeout": (_number(0), "seconds"),
    "ssl": (_boolean, "true or false"),
    "ssl_keyfile": (_file, "a file that is there"),
    "ssl_certfile": (_file, "a file that is there"),
    "ssl_ca_certs": (_file, "a file that is there"),
    "ssl_ca_path": (_folder, "a directory that is there"),
    "ssl_ca_data": (str, ""),
    "ssl_password": (str, ""),
    "ssl_ciphers": (str, ""),
    "ssl_cert_reqs": (_one_of("none", "optional", "required"), "none, optional or required"),
    "ssl_check_hostname": (_boolean, "true or false"),
    "ssl_validate_ocsp": (_boolean, "true or false"),
    "ssl_validate_ocsp_stapled": (_boolean, "true or false"),
    "ssl_ocsp_expected_cert": (str, ""),
    "ssl_min_version": (_tls_version, "one of Python's ssl.TLSVersion, as a number"),
    "ssl_include_verify_flags": (_flags, "names of Python's ssl.VerifyFlags"),
    "ssl_exclude_verify_flags": (_flags, "names of Python's ssl.VerifyFlags"),
    "sentinel_username": (str, ""),
    "sentinel_password": (str, ""),
}


def _parse(url: str) -> _Target:
    scheme, separator, rest = url.partition("://")
    match = _SCHEMES.fullmatch(scheme) if separator else None
    if match is None or (match["base"] == "unix" and match["kind"]):
        raise ConfigurationError(f"store= names no kind of server that idemguard knows: {_KNOWN}")

    def bad(what: str) -> NoReturn:
        # no value is shown: it might be a piece of a password with a bare / or ? in it
        raise ConfigurationError(f"store={scheme}://...: {what}") from None

    kind = match["kind"] or "server"
    body, _, query = rest.partition("?")
    place, _, path = body.partition("/")
    who, at, hosts = place.rpartition("@")
    user, _, password = who.partition(":")
    options = _options(query, bad)
    if user:
        options.setdefault("username", unquote(user))
    if password:
        options.setdefault("password", unquote(password))
    tls = _tls(match["base"], kind, options, bad)
    nodes: tuple[tuple[str, int], ...] = ()
    service = ""
    if match["base"] == "unix":
        if hosts or not path:
            bad("the socket's path must be absolute: unix:///run/redis.sock")
        path = unquote(f"/{path}")
    else:
        lost = "@" in rest and not at
        hint = "; in a password / is written %2F and ? is written %3F" * lost
        nodes = _hosts(hosts, kind, lambda what: bad(what + hint))
        if kind == "sentinel":
            service, _, path = path.partition("/")
            service = unquote(service)
            if not service:
                bad("it names no master: redis+sentinel://host:26379/master-name")
        _database(path, kind, options, bad)
        path = ""
    size, wait = options.pop("max_connections", CONNECTIONS), options.pop("timeout", None)
    options.setdefault("socket_timeout", TIMEOUT)
    options.setdefault("socket_connect_timeout", CONNECT_TIMEOUT)
    return _Target(
        root="redis",
        kind=kind,
        nodes=nodes,
        path=path,
        service=service,
        tls=tls,
        sentinel=_sentinel_options(options, tls=tls) if kind == "sentinel" else {},
        options=options,
        size=size,
        wait=QUEUE if wait is None else wait,
        scheme=scheme,
    )


def _tls(base: str, kind: str, options: dict[str, Any], bad: Callable[[str], NoReturn]) -> bool:
    tls = base in ("rediss", "valkeys")
    if options.pop("ssl", tls) != tls:
        if tls or base == "unix":
            bad("ssl says otherwise than the scheme")
        tls = True
    for name in options:
        if name.startswith("ssl_") and not tls:
            bad(f"{name} needs rediss:// or ssl=true")
        if name.startswith("sentinel_") and kind != "sentinel":
            bad(f"{name} needs redis+sentinel://")
    if options.get("ssl_cert_reqs") == "none":
        options.setdefault("ssl_check_hostname", False)
    return tls


def _database(
    path: str, kind: str, options: dict[str, Any], bad: Callable[[str], NoReturn]
) -> None:
    if path.strip("/"):
        try:
            options.setdefault("db", _whole(0)(unquote(path).strip("/")))
        except ValueError:
            bad("the database, behind the last /, is no number")
    if kind == "cluster" and options.pop("db", 0):
        bad("a cluster has only database 0")


def _sentinel_options(options: dict[str, Any], *, tls: bool) -> dict[str, Any]:
    shared = ("socket_", "ssl_", "protocol", "health_")
    told = {name: value for name, value in options.items() if name.startswith(shared)}
    for name in ("username", "password"):
        if f"sentinel_{name}" in options:
            told[name] = options.pop(f"sentinel_{name}")
    return told | {"ssl": tls}


def _options(query: str, bad: Callable[[str], NoReturn]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in _IGNORED:
            continue
        if name not in _OPTIONS:
            shown = name if re.fullmatch(r"[a-z][a-z_]{1,40}", name) else ""
            hidden = not shown or "password" in query or "@" in query
            bad("its query holds an option that is not known" + (f": {shown}" * (not hidden)))
        if name in options:
            bad(f"{name} is given twice")
        if not text:
            bad(f"{name} is empty")
        read, wanted = _OPTIONS[name]
        try:
            options[name] = read(text)
        except (ValueError, OSError):
            bad(f"{name} takes {wanted}")
    return options


_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>.*))?")


def _hosts(text: str, kind: str, bad: Callable[[str], NoReturn]) -> tuple[tuple[str, int], ...]:
    nodes = []
    for each in text.split(","):
        match = _HOST.fullmatch(each)
        if match is None:
            if re.fullmatch(r"(:\d*)?", each):
                bad("it names no host")
            bad("hosts are written host:port, an IPv6 address in brackets: [::1]:6379")
        number = match["port"] or ("" if match["port"] == "" else _PORTS[kind])
        if not (re.fullmatch(r"[0-9]{1,5}", number) and 0 < int(number) < 65536):  # noqa: PLR2004
            bad("the port is no number from 1 to 65535")
        nodes.append((unquote(match["v6"] or match["host"]), int(number)))
    if len(nodes) > 1 and kind == "server":
        bad("several hosts are a cluster or sentinels: redis+cluster://, redis+sentinel://")
    return tuple(nodes)


_PORTS = {"server": "6379", "cluster": "6379", "sentinel": "26379"}


def _check(target: _Target) -> None:
    """Raise for an option that the installed client does not know."""
    import redis  # noqa: PLC0415 - loaded when a URL of it is used

    if target.kind == "cluster":
        known = _cluster_options("redis")
    else:
        known = frozenset(_parameters(_connection_class(target, "redis")))
    defaults = {"socket_timeout", "socket_connect_timeout"}
    for name in target.options.keys() - known - defaults:
        raise ConfigurationError(
            f"store={target.name()}: redis-py {redis.__version__} takes no {name} here"
        )


# --- errors -----------------------------------------------------------------------------------

_NO_CONNECTION = "No connection available"


class Meaning(Enum):
    """What an error of a client says."""

    AWAY = auto()  # nobody answers, or the connection broke
    BUSY = auto()  # all connections of the pool are in use
    SOON = auto()  # the server is there and says: ask again
    MOVING = auto()  # the slot is on its way to another node
    COLD = auto()  # the server does not know the script
    REFUSED = auto()  # the server says no, and would say so again


_BY_CLASS = {
    "MaxConnectionsError": Meaning.BUSY,
    "AuthenticationWrongNumberOfArgsError": Meaning.REFUSED,
    "AuthenticationError": Meaning.REFUSED,
    "AuthorizationError": Meaning.REFUSED,
    "ExternalAuthProviderError": Meaning.SOON,
    "BusyLoadingError": Meaning.SOON,
    "ClusterDownError": Meaning.SOON,  # MasterDownError is one
    "TryAgainError": Meaning.MOVING,
    "NoScriptError": Meaning.COLD,
    "SlotNotCoveredError": Meaning.AWAY,
    "ChildDeadlockedError": Meaning.AWAY,
    "TimeoutError": Meaning.AWAY,
}

_BY_CODE = {
    "LOADING": Meaning.SOON,
    "CLUSTERDOWN": Meaning.SOON,
    "MASTERDOWN": Meaning.SOON,
    "NOREPLICAS": Meaning.SOON,
    "BUSY": Meaning.SOON,
    "TRYAGAIN": Meaning.MOVING,
    "NOSCRIPT": Meaning.COLD,
}

_CODES = {  # what the clients cut off from the text
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "NoPermissionError": "NOPERM",
    "NoScriptError": "NOSCRIPT",
    "BusyLoadingError": "LOADING",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "ClusterCrossSlotError": "CROSSSLOT",
    "TryAgainError": "TRYAGAIN",
    "ExecAbortError": "EXECABORT",
    "MovedError": "MOVED",
    "AskError": "ASK",
}

_TLS = re.compile(
    r"certificate verify failed|CERTIFICATE_VERIFY_FAILED|WRONG_VERSION_NUMBER"
    r"|ALERT_[A-Z_]*(?:CERTIFICATE|UNKNOWN_CA|HANDSHAKE_FAILURE|PROTOCOL_VERSION)"
)


def meaning(error: BaseException) -> Meaning | None:
    """What an error of a client says; None where it is no error of a client."""
    if not isinstance(error, Exception):
        return None
    names = _names(error)
    text = str(error)
    if not _of_client(error):
        return _of_the_system(error, text)
    for name in names:
        if name in _BY_CLASS:
            return _BY_CLASS[name]
    if "ClusterError" in names and "TTL exhausted" in text:
        return Meaning.MOVING
    if "max number of clients" in text:
        return Meaning.SOON
    if "ResponseError" in names:
        return _BY_CODE.get(_code(error), Meaning.REFUSED)
    if _TLS.search(text):
        return Meaning.REFUSED
    if "MasterNotFoundError" in names:  # it tells of the sentinels' errors by their names alone
        return Meaning.REFUSED if "AuthenticationError" in text else Meaning.AWAY
    if "ConnectionError" in names:
        full = _NO_CONNECTION in text or "Too many connections" in text
        return Meaning.BUSY if full else Meaning.AWAY
    if names & {"RedisClusterException", "ValkeyClusterException"}:
        behind = None if error.__cause__ is None else meaning(error.__cause__)
        if behind is not None:
            return behind
        lost = "not covered" in text or "cannot be connected" in text
        return Meaning.AWAY if lost else Meaning.REFUSED
    return Meaning.REFUSED


def connecting(error: BaseException) -> bool:
    """Whether the connection could not even be made, as against one that broke in use.

    It speaks of the last try alone, where the client repeats by itself.
    """
    if _of_client(error):
        text = str(error)
        return "MasterNotFoundError" in _names(error) or (
            meaning(error) is Meaning.AWAY
            and ("connecting to" in text or "cannot be connected" in text)
        )
    return isinstance(error, ConnectionRefusedError) or type(error).__name__ == "gaierror"


def time_limit(error: Exception, client: Any) -> float | None:
    """The seconds after which a client gives up with this error; None: no time ran out, or its own.

    Args:
        error: of the client.
        client: of one server.

    """
    if "TimeoutError" not in _names(error):
        return None
    options = getattr(getattr(client, "connection_pool", None), "connection_kwargs", {})
    answer = options.get("socket_timeout")
    reach = options.get("socket_connect_timeout") or answer
    if "connecting" in str(error):
        return reach
    return None if answer is None else answer + reach


def stumbled(error: BaseException | None) -> bool:
    """Whether a script ended at something that it did not expect, as in a damaged record."""
    return error is not None and _code(error) == "ERR" and "user_script:" in str(error)


def spoken(error: BaseException, name: str, doing: str) -> StoreError:
    """The error in words: what was tried and where, what came back, what to do.

    Args:
        error: of a client.
        name: of the server, as `Clients.name`.
        doing: what was tried, as in `"claiming a task"`.

    Returns:
        A `StoreError` where the server refused, else a `StoreUnavailableError`.

    """
    where = re.sub(r"//[^/]*@", "//", name)
    means, error = meaning(error), _missing_right(error) or error
    words = _words(error)
    match means:
        case Meaning.BUSY:
            return StoreUnavailableError(
                f"{doing} at {where} failed: all connections of its pool are in use ({words}); "
                "max_connections says how many there are"
            )
        case Meaning.SOON | Meaning.MOVING | Meaning.COLD:
            return StoreUnavailableError(f"{doing} at {where} failed for now: {words}")
        case Meaning.AWAY:
            return StoreUnavailableError(
                f"{doing} at {where} failed, it does not answer: {words}{_other_speech(where, words)}"
            )
    return StoreError(f"{doing} at {where} was refused: {words}{_advice(error, words)}")


def naming(error: StoreError, command: Any) -> None:
    """Have an error tell, in its words too, which task it is of.

    Args:
        error: of the store.
        command: that failed.

    """
    caller = getattr(command, "caller", None) or getattr(
        getattr(command, "claim", None), "caller", None
    )
    fingerprint = command.address.fingerprint
    error.fingerprint = fingerprint
    if caller is None:
        return
    error.task_type = caller.task_type
    task, text = f"{caller.task_type} [{fingerprint[:16]}]", str(error)
    if task not in text:
        short = f"task {fingerprint[:16]}"
        error.args = (text.replace(short, task) if short in text else f"{task}: {text}",)


def _missing_right(error: BaseException) -> BaseException | None:
    """What a cluster client makes of it, is that this is no cluster."""
    behind: BaseException | None = error
    while behind is not None and _of_client(behind):
        if "NoPermissionError" in _names(behind):
            return behind
        behind = behind.__cause__ or behind.__context__
    return None


def _other_speech(where: str, words: str) -> str:
    """What may be the matter where a server says nothing, or hangs up at the first word."""
    if re.match(r"(?:rediss|valkeys)\b", where):
        silent = "Timeout connecting" in words or "timed out" in words
        return "; if it speaks no TLS, its URL begins with redis://" * silent
    plain = re.match(r"(?:redis|valkey)\b", where) and _HUNG_UP.search(words)
    return "; if it speaks TLS, its URL begins with rediss://" if plain else ""


# which of them it is depends on whether the second word was sent before the first was answered
_HUNG_UP = re.compile(r"closed by server|Broken pipe|reset by peer|Connection lost")


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _of_client(error: BaseException) -> bool:
    return any(
        kind.__module__.partition(".")[0] in ("redis", "valkey") for kind in type(error).__mro__
    )


def _of_the_system(error: Exception, text: str) -> Meaning | None:
    if isinstance(error, ssl.SSLError) and _TLS.search(text):
        return Meaning.REFUSED
    if isinstance(error, (OSError, EOFError)):  # asyncio's timeout and closed streams among them
        return Meaning.AWAY
    if isinstance(error, RuntimeError) and ("loop is closed" in text or "is closed" in text):
        return Meaning.AWAY
    return None


def _code(error: BaseException) -> str:
    """The server's one word for it."""
    told = getattr(error, "status_code", None)
    if told:
        return str(told)
    for kind in type(error).__mro__:
        if kind.__name__ in _CODES:
            return _CODES[kind.__name__]
    text = str(error)
    # older servers put what a script's command said into a text of their own
    match = re.match(r"([A-Z]{2,})\b", text)
    inner = re.search(r"(?:^ERR )?Error running script.*?-([A-Z]{2,}) ", text)
    if inner is not None:
        return inner[1]
    return match[1] if match is not None else ""


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    code = _code(error)
    if code and code not in text:
        text = f"{code} {text}"
    # a server that does not know HELLO or AUTH repeats what it was sent
    text = re.sub(r",? with args beginning with:.*", "", text)
    text = re.sub(r"//[^/\s@]*@", "//", text)
    text = re.sub(r"(?i)((?:password|username)['\"]?\s*[=:]\s*)[^\s,)&]+", r"\1***", text)
    text = re.sub(
        r"\bAUTH\b(?:[\s,'\"`]+(?!<|but\b|being\b|called\b|option\b)[^\s,'\"`]+){1,2}",
        "AUTH ***",
        text,
    )
    return text if len(text) <= 400 else text[:400] + "..."  # noqa: PLR2004


def _advice(error: BaseException, words: str) -> str:
    code = _code(error)
    for sign, what in _ADVICE:
        if code == sign or (" " in sign and sign in words):
            return f"; {what}"
    if "InvalidResponse" in _names(error):
        return "; it speaks something else: if that is TLS, its URL begins with rediss://"
    if _TLS.search(words):
        return "; ssl_ca_certs names the authority, rediss:// is for servers that speak TLS"
    return ""


_ADVICE = (
    ("NOAUTH", "give user and password in the URL"),
    ("Authentication required", "give user and password in the URL"),
    ("WRONGPASS", "check user and password"),
    ("invalid username-password", "check user and password"),
    ("access a channel", "permit its channels in the server's ACL: &idemguard:*"),
    ("one of the channels", "permit its channels in the server's ACL: &idemguard:*"),
    ("run the 'cluster", "permit +cluster|slots, +command and +asking in each node's ACL"),
    ("NOPERM", "give this user the right in the server's ACL"),
    ("OOM", "the server's maxmemory is used up, and nothing there may be evicted"),
    ("READONLY", "it is a replica: name the primary, or its sentinels by redis+sentinel://"),
    ("WRONGTYPE", "another program writes under this namespace"),
    ("MISCONF", "the server cannot write its disk, and was told to take no writes then"),
    ("MOVED", "it is a node of a cluster: redis+cluster://"),
    ("ASK", "it is a node of a cluster: redis+cluster://"),
    ("Cluster mode is not enabled", "it is no cluster: redis://"),
    ("DAMAGED", "forget() the task to drop it"),
    (" on @user_script", "what is kept of the task may be damaged; forget() it to drop that"),
    ("Error running script", "what is kept of the task may be damaged; forget() it to drop that"),
    ("unknown command", "the server is too old, or the command is renamed there"),
)

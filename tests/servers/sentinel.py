"""A primary, its replicas, and sentinels that put one of these in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from redis.sentinel import Sentinel
from servers.server import HOST, Closing, Server, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis

NAME = "mymaster"


class Watcher(Server):
    """A sentinel process.

    Args:
        primary: the port of what it watches.
        quorum: how many sentinels must take it for down.
        down_after: milliseconds of silence after which it does.

    """

    def __init__(self, primary: int, quorum: int, down_after: int) -> None:
        self._watched = [
            f"sentinel monitor {NAME} {HOST} {primary} {quorum}",
            f"sentinel down-after-milliseconds {NAME} {down_after}",
            f"sentinel failover-timeout {NAME} 3000",
        ]
        super().__init__()

    def _lines(self) -> list[str]:
        return [
            *(f"port {self.port}", f"bind {HOST}", f"dir {self.folder}"),
            *(f"unixsocket {self.unix}", *self._watched),
        ]

    def _mode(self) -> list[str]:
        return ["--sentinel"]

    def hasten(self, *, alone: bool) -> None:
        """Look some times a second, not once in one or in ten.

        Args:
            alone: whether it is the only sentinel.

        """
        # while a primary is down they look at its replicas once a second all the same, and choose
        # none that they have not looked at for five ping periods; they turn a new primary back
        # that is not announced within four publishing periods
        periods = {"info": 100, "ping": 300, "ask": 100, "publish": 100 if alone else 500}
        # after a hiccup of the machine's clock it would do nothing for half a minute
        for period, ms in (periods | {"tilt": 500}).items():
            self.tell("SENTINEL", "DEBUG", f"{period}-period", ms)


class Sentinels(Closing):
    """One primary with replicas, watched by sentinels under the name `mymaster`.

    Args:
        replicas: so many.
        sentinels: so many; more than half of them must agree.
        args: further options of each data server.
        down_after: milliseconds of silence after which the primary is taken for down.

    """

    def __init__(
        self,
        replicas: int = 1,
        sentinels: int = 1,
        *,
        args: Sequence[object] = (),
        down_after: int = 500,
    ) -> None:
        self._args = args
        self._sizes = replicas, sentinels
        self._down_after = down_after
        self.servers: list[Server] = []
        self.watchers: list[Watcher] = []
        self._sentinel: Sentinel | None = None

    def start(self) -> Self:
        replicas, sentinels = self._sizes
        first = Server(*self._args)
        self.servers.append(first)
        first.start()
        for _ in range(replicas):
            self.servers.append(Server("--replicaof", HOST, first.port, *self._args))
            self.servers[-1].launch()
        for _ in range(sentinels):
            self.watchers.append(Watcher(first.port, sentinels // 2 + 1, self._down_after))
            self.watchers[-1].launch()
        for server in (*self.servers[1:], *self.watchers):
            server.ready()
        for watcher in self.watchers:
            watcher.hasten(alone=sentinels == 1)
        self._sentinel = Sentinel([(HOST, w.port) for w in self.watchers], socket_timeout=5)
        return self.settle()

    def settle(self) -> Self:
        """Wait until the servers that run are a primary with replicas, and the sentinels know it."""
        until(self._settled, what="the sentinels' servers have settled")
        return self

    def _settled(self) -> bool:
        running = [s for s in self.servers if s.alive and not s.frozen]
        told = {s.port: s.own.info("replication") for s in running}
        primaries = [port for port, info in told.items() if info["role"] == "master"]
        if len(primaries) != 1:
            return False
        (primary,) = primaries
        online = [told[primary][f"slave{i}"] for i in range(told[primary]["connected_slaves"])]
        return (
            {s["port"] for s in online if s["state"] == "online"} == set(told) - {primary}
            and all(
                info["master_link_status"] == "up" and info["master_port"] == primary
                for port, info in told.items()
                if port != primary
            )
            and all(self._knows(watcher, primary, set(told)) for watcher in self.watchers)
        )

    def _knows(self, watcher: Watcher, primary: int, ports: set[int]) -> bool:
        own = watcher.own
        state = own.sentinel_master(NAME)
        fit = {r["port"] for r in own.sentinel_slaves(NAME) if r["master-link-status"] == "ok"}
        return (
            state["port"] == primary
            and not {"s_down", "o_down", "failover_in_progress"} & set(state["flags"].split(","))
            and ports - {primary} <= fit
            and state["num-other-sentinels"] == len(self.watchers) - 1
        )

    # --- who is who --------------------------------------------------------------------------------

    @property
    def primary(self) -> Server:
        """The server that the sentinels name."""
        assert self._sentinel is not None
        _, port = self._sentinel.discover_master(NAME)
        return next(s for s in self.servers if s.port == port)

    @property
    def replica(self) -> Server:
        """A running server that the sentinels do not name."""
        primary = self.primary
        return next(s for s in self.servers if s is not primary and s.alive)

    def failover(self) -> Server:
        """Have the sentinels make a replica the primary, and wait for it; the new primary."""
        old = self.primary
        self.watchers[0].tell("SENTINEL", "FAILOVER", NAME)
        return self.followed(old)

    def kill_primary(self) -> Server:
        """SIGKILL the primary; what was it. `followed` waits for its successor."""
        old = self.primary
        old.kill()
        return old

    def followed(self, old: Server) -> Server:
        """Wait until another server than `old` is named and takes writes; that server."""

        def new() -> Server | None:
            primary = self.primary
            role = primary.tell("ROLE")[0] if primary is not old else b""
            return primary if role == b"master" else None

        return until(new, what="another primary")

    # --- clients -----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        hosts = ",".join(f"{HOST}:{watcher.port}" for watcher in self.watchers)
        return f"redis+sentinel://{hosts}/{NAME}"

    def client(self, **options: Any) -> redis.Redis:
        """A client of redis-py that finds the primary; it is closed with the set."""
        assert self._sentinel is not None
        client = self._sentinel.master_for(NAME, **options)
        self.watchers[0]._clients.append(client)
        return client

    def close(self) -> None:
        if self._sentinel is not None:
            for client in self._sentinel.sentinels:
                client.close()
        for server in (*self.watchers, *self.servers):
            server.close()

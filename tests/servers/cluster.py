"""A real cluster: formed by commands, its slots moved step by step, its nodes killed and replaced."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from servers.proxy import Proxy
from servers.server import HOST, Closing, Server, free_port, until

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOTS = 16384


class Node(Server):
    """A server of a cluster.

    Args:
        args: further options.
        node_timeout: milliseconds of silence after which the others take it for failed.
        announced: whether clients are sent to a proxy in front of it.

    """

    def __init__(self, *args: object, node_timeout: int, announced: bool) -> None:
        self.proxy: Proxy | None = None
        super().__init__(
            *("--cluster-enabled", "yes"),
            *("--cluster-node-timeout", node_timeout),
            *("--cluster-replica-validity-factor", 0),
            *("--cluster-require-full-coverage", "no"),
            *args,
        )
        if announced:
            self.proxy = Proxy(self)

    def pick_ports(self) -> None:
        super().pick_ports()
        self.bus = free_port()

    def _lines(self) -> list[str]:
        lines = [*super()._lines(), f"cluster-port {self.bus}"]
        if self.proxy is not None:
            lines += [f"cluster-announce-ip {HOST}", f"cluster-announce-port {self.proxy.port}"]
            lines += [f"cluster-announce-bus-port {self.bus}"]
        return lines

    @property
    def id(self) -> str:
        """The name that the cluster knows it by."""
        return self.tell("CLUSTER", "MYID").decode()

    def info(self) -> dict[str, str]:
        """CLUSTER INFO."""
        lines = self.tell("CLUSTER", "INFO").decode().split("\r\n")
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def sees(self) -> list[Seen]:
        """CLUSTER NODES: what it knows of itself and of the others."""
        return [Seen.of(line) for line in self.tell("CLUSTER", "NODES").decode().splitlines()]

    def close(self) -> None:
        if self.proxy is not None:
            self.proxy.close()
        super().close()


@dataclass(frozen=True)
class Seen:
    """A node, as one node of the cluster sees it."""

    id: str
    bus: int
    flags: frozenset[str]
    primary: str | None  # the id of the node that it is a replica of
    epoch: int
    linked: bool
    slots: frozenset[int]
    moving: frozenset[int]  # slots on their way to it or from it

    @classmethod
    def of(cls, line: str) -> Seen:
        name, address, flags, primary, _, _, epoch, link, *ranges = line.split()
        slots: set[int] = set()
        for text in ranges:
            if not text.startswith("["):
                first, _, last = text.partition("-")
                slots.update(range(int(first), int(last or first) + 1))
        return cls(
            id=name,
            bus=int(address.split("@")[1].split(",")[0]),
            flags=frozenset(flags.split(",")),
            primary=None if primary == "-" else primary,
            epoch=int(epoch),
            linked=link == "connected",
            slots=frozenset(slots),
            moving=frozenset(int(r[1:].split("-")[0]) for r in ranges if r.startswith("[")),
        )


class Cluster(Closing):
    """Primaries that share the slots evenly, each with so many replicas.

    `nodes` are the primaries first, then the replicas: `nodes[i + n]` begins as one of `nodes[i]`.

    Args:
        nodes: primaries.
        replicas: per primary; with one, a primary that is killed is failed over.
        args: further options of each server.
        node_timeout: milliseconds of silence after which a node is taken for failed.
        announce_proxies: send clients through a proxy in front of each node (`node.proxy`).

    """

    def __init__(
        self,
        nodes: int = 3,
        replicas: int = 0,
        *,
        args: Sequence[object] = (),
        node_timeout: int = 1000,
        announce_proxies: bool = False,
    ) -> None:
        self._primaries = nodes
        self.nodes = [
            Node(*args, node_timeout=node_timeout, announced=announce_proxies)
            for _ in range(nodes * (1 + replicas))
        ]
        self._clients: list[RedisCluster] = []
        edges = [SLOTS * i // nodes for i in range(nodes + 1)]
        self._home = {
            slot: node
            for (first, end), node in zip(pairwise(edges), self.nodes, strict=False)
            for slot in range(first, end)
        }

    def start(self) -> Self:
        """Form the cluster; a server takes two seconds before it calls one fit to be written to."""
        for node in self.nodes:
            node.launch()
        for number, node in enumerate(self.nodes, 1):
            node.ready()
            if node.proxy is not None:
                node.proxy.start()
            mine = [slot for slot, home in self._home.items() if home is node]
            if mine:
                node.tell("CLUSTER", "ADDSLOTSRANGE", mine[0], mine[-1])
            node.tell("CLUSTER", "SET-CONFIG-EPOCH", number)
        first, *others = self.nodes
        for node in others:
            first.tell("CLUSTER", "MEET", HOST, node.port, node.bus)
        until(self._all_know_all, what="every node knows every other")
        for number, node in enumerate(self.nodes[self._primaries :]):
            node.tell("CLUSTER", "REPLICATE", self.nodes[number % self._primaries].id)
        return self.settle()

    def settle(self) -> Self:
        """Wait until all the nodes that run agree, and the replicas have what their primaries have."""
        until(self._settled, what="the cluster has settled")
        return self

    def _all_know_all(self) -> bool:
        everyone = {node.bus for node in self.nodes}
        return all(
            {seen.bus for seen in node.sees() if not seen.flags & {"handshake", "noaddr"}}
            == everyone
            for node in self.nodes
        )

    def _settled(self) -> bool:
        views = []
        for node in self.running:
            info = node.info()
            if info["cluster_state"] != "ok" or info["cluster_slots_ok"] != str(SLOTS):
                return False
            seen = [s for s in node.sees() if not s.flags & {"fail", "fail?", "handshake"}]
            if not all(s.linked for s in seen):
                return False
            views.append({(s.id, s.primary, s.slots) for s in seen})
            replication = node.own.info("replication")
            if replication["role"] == "slave" and replication["master_link_status"] != "up":
                return False
            count = replication["connected_slaves"] if replication["role"] == "master" else 0
            if any(replication[f"slave{i}"]["state"] != "online" for i in range(count)):
                return False
        replicas = {name for view in views for name, primary, _ in view if primary}
        online = sum(node.own.info("replication")["connected_slaves"] for node in self.running)
        return all(view == views[0] for view in views) and online == len(replicas)

    @property
    def running(self) -> list[Node]:
        """The nodes that answer."""
        return [node for node in self.nodes if node.alive and not node.frozen]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        for node in self.nodes:
            node.close()

    # --- clients -----------------------------------------------------------------------------------

    @property
    def ports(self) -> list[int]:
        """Where clients find the nodes: the proxies' ports, where there are proxies."""
        return [(node.proxy or node).port for node in self.nodes]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{HOST}:{port}" for port in self.ports)

    def client(self, **options: Any) -> RedisCluster:
        """A cluster's client of redis-py with these options; it is closed with the cluster."""
        known = [ClusterNode(HOST, port) for port in self.ports]
        self._clients.append(RedisCluster(startup_nodes=known, **options))
        return self._clients[-1]

    @property
    def proxies(self) -> list[Proxy]:
        return [node.proxy for node in self.nodes if node.proxy is not None]

    def frames(self) -> list[list[bytes]]:
        """What clients asked of all proxies, in the order of time."""
        noted = sorted((n for p in self.proxies for n in p.noted()), key=lambda n: n.at)
        return [note.frame for note in noted if not note.setup]

    def forget(self) -> None:
        """Forget the frames so far."""
        for proxy in self.proxies:
            proxy.forget()

    # --- slots -------------------------------------------------------------------------------------

    @staticmethod
    def slot(key: str | bytes) -> int:
        """The slot of a key."""
        return key_slot(key.encode() if isinstance(key, str) else key)

    def owner(self, slot: int) -> Node:
        """The running node that holds a slot; of two that believe so, the newer.

        Raises:
            LookupError: no node that runs holds it.

        """
        found = []
        for node in self.running:
            (mine,) = (seen for seen in node.sees() if "myself" in seen.flags)
            if slot in mine.slots and "master" in mine.flags:
                found.append((mine.epoch, node))
        if not found:
            raise LookupError(f"no node holds slot {slot}")
        return max(found, key=lambda f: f[0])[1]

    def replica_of(self, node: Node) -> Node:
        """A running replica of a node."""
        name = node.id
        buses = {s.bus for s in node.sees() if s.primary == name and "fail" not in s.flags}
        return next(other for other in self.running if other.bus in buses)

    def moving(self, slot: int, to: Node) -> Move:
        """A move of a slot that the test makes step by step."""
        return Move(self, slot, to)

    def move(self, slot: int, to: Node) -> None:
        """Move a slot with all its keys."""
        move = self.moving(slot, to)
        move.begin()
        move.carry()
        move.end()

    def other(self, than: Node) -> Node:
        """A primary that is not this one."""
        for node in self.running:
            (mine,) = (seen for seen in node.sees() if "myself" in seen.flags)
            if node is not than and "master" in mine.flags:
                return node
        raise LookupError("there is no other primary")

    def reset(self) -> None:
        """As it was formed: all nodes run, every slot is at home, no data, no scripts, no options."""
        for node in self.nodes:
            if not node.alive:
                node.start()
            if node.frozen:
                node.thaw()
            if node.proxy is not None:
                node.proxy.reset()
        astray, half_way = set(), set()
        for node in self.nodes:
            (mine,) = (seen for seen in node.sees() if "myself" in seen.flags)
            if "master" in mine.flags:
                node.reset()
            astray |= {slot for slot in mine.slots if self._home[slot] is not node}
            half_way |= mine.moving
        for slot in half_way:
            for node in self.nodes:
                node.tell("CLUSTER", "SETSLOT", slot, "STABLE")
        for slot in astray:
            self.move(slot, self._home[slot])
        self.settle()


class Move:
    """One slot on its way from its owner to another node: `begin`, `carry` as often as wanted, `end`.

    Between `begin` and `end` the owner answers for the keys that it still has and sends clients
    on with ASK for the others; a script on keys of both kinds gets TRYAGAIN.
    """

    def __init__(self, cluster: Cluster, slot: int, to: Node) -> None:
        self._cluster = cluster
        self.slot = slot
        self.source = cluster.owner(slot)
        self.to = to
        assert to is not self.source

    def begin(self) -> None:
        """SETSLOT IMPORTING and MIGRATING."""
        self.to.tell("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.source.id)
        self.source.tell("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.to.id)

    def keys(self) -> list[bytes]:
        """The keys that the source still has."""
        return self.source.tell("CLUSTER", "GETKEYSINSLOT", self.slot, 100_000)

    def carry(self, *keys: str | bytes) -> None:
        """MIGRATE these keys; all that the source still has, when none is named."""
        if wanted := keys or self.keys():
            self.source.tell("MIGRATE", HOST, self.to.port, "", 0, 5000, "KEYS", *wanted)

    def end(self) -> None:
        """SETSLOT NODE, the receiver first; every primary knows it when this returns."""
        name = self.to.id
        rest = [n for n in self._cluster.running if n not in (self.to, self.source)]
        for node in (self.to, self.source, *rest):
            if "master" in next(s.flags for s in node.sees() if "myself" in s.flags):
                node.tell("CLUSTER", "SETSLOT", self.slot, "NODE", name)

    def undo(self) -> None:
        """SETSLOT STABLE: the slot stays where it is; carried keys are not brought back."""
        for node in (self.source, self.to):
            node.tell("CLUSTER", "SETSLOT", self.slot, "STABLE")

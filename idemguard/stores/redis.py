"""A store on a Redis or Valkey server, shared by many machines.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import heapq
import os
import queue
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from idemguard.claim import Begin, Renew
from idemguard.errors import StoreError, StoreUnavailableError
from idemguard.forks import on_fork
from idemguard.record import Mode
from idemguard.stores import wire
from idemguard.stores.bridge import InThread
from idemguard.stores.clients import Clients, meaning, naming, spoken
from idemguard.stores.ears import Ears
from idemguard.stores.loops import LoopSide, queueing
from idemguard.stores.room import Waiter
from idemguard.stores.side import Books, Side
from idemguard.stores.talk import BOOKING, READING, Request, Talk
from idemguard.stores.upkeep import Upkeep, window
from idemguard.windows import HOUR, SPAN, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemguard.claim import Answer, Command
    from idemguard.record import Address, Execution, Record
    from idemguard.stores import AsyncStore, Unpark
    from idemguard.stores.talk import Exchange
    from idemguard.windows import Counts, Key

BATCH = 200  # records read by one script
THREADS = 8  # for calls on a loop where there is a sync client alone
TENDED = 55_000  # ms between two removals of what is over, of all processes together

# who waits for a record that another thread reads
Looking: TypeAlias = "list[queue.SimpleQueue[tuple[Record, int] | StoreError | None]]"


class RedisStore:
    """Records on a Redis or Valkey server, Cluster or Sentinel-managed primary.

    Args:
        where: a URL, or a client of redis-py or valkey-py, sync or asyncio.
        clock: tells ms, for tests; the server's clock where none is given.

    Raises:
        ConfigurationError: it is neither.

    """

    def __init__(self, where: object, *, clock: Callable[[], int] | None = None) -> None:
        self._clients = Clients.from_url(where) if isinstance(where, str) else Clients.of(where)
        self._clock = clock
        self._namespaces: dict[str, bytes | None] = {}
        self._cursors: dict[tuple[str, str], int] = {}
        self._begin()
        on_fork(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._name = os.urandom(6).hex()
        self._talk = Talk(self._clients, self._clock, self._name, self._namespaces)
        self._books = Books(self._share)
        _all.add(self._books)
        self._side = Side(self._name, self._books)
        self._ears = Ears(self._clients, _Hearing(self._side, self.look))
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopSide] = WeakKeyDictionary()
        self._bridge: InThread | None = None
        self._looks: dict[tuple[Address, int], Looking] = {}

    def __repr__(self) -> str:
        return f"RedisStore({self._clients.name!r})"

    def forked(self) -> None:
        """The parent's connections and waiters stay the parent's."""
        _parked.append((self._ears, self._loops, self._side))
        self._clients.forked()
        self._begin()

    def close(self) -> None:
        """Give all connections back that are not the user's own."""
        with suppress(StoreError):
            self._books.settle()
        self._ears.close()
        self._drop_closed()
        self._side.leave_all()
        for loop, side in list(self._loops.items()):
            if loop.is_running():
                with suppress(RuntimeError):  # it has ended meanwhile
                    asyncio.run_coroutine_threadsafe(side.close(), loop)
        self._clients.close()

    # --- commands -------------------------------------------------------------------------------

    def perform(self, command: Command) -> Answer:
        """One command: one script."""
        if isinstance(command, Begin) and command.mode is Mode.ENFORCE:
            return self._ask(command)
        reply, answer = self._perform(command)
        self.told(command, reply, answer)
        return answer

    def _perform(self, command: Command) -> tuple[list[Any], Answer]:
        try:
            reply = self._do(self._talk.perform(command), command)
            return reply, self._talk.answer(command, reply)
        except StoreError as error:
            naming(error, command)
            raise

    def told(self, command: Command, reply: list[Any], answer: Answer) -> None:
        """Have all who wait in this process know what has become of a task."""
        self._side.told(command, reply, answer)
        if self._loops:
            for here in list(self._loops.values()):
                here.side.told(command, reply, answer)

    def _ask(self, ask: Begin) -> Answer:
        try:
            return self._asked(ask)
        except BaseException as error:
            self._side.fail(ask, error)
            raise

    def _asked(self, ask: Begin) -> Answer:
        side = self._side
        while True:
            landed: queue.SimpleQueue[None] = queue.SimpleQueue()
            answer, flight, mine = side.approach(ask, partial(landed.put, None))
            if answer is not None:
                return answer
            if mine:
                break
            landed.get()
            answer = side.joined(ask, flight)
            if answer is not None:
                return answer
        _, answer = self._perform(ask)
        side.land(ask, flight, answer)
        return answer

    def _do(self, exchange: Exchange, command: Command | None = None) -> Any:
        """Drive an exchange with the sync client."""
        clients, client = self._clients, None
        patience = queueing(command, clients)
        try:
            wish = next(exchange)
            while True:
                try:
                    if isinstance(wish, Request):
                        # a renewal that waits behind many calls would come too late
                        turns = clients.take(patience, first=type(command) is Renew)
                        try:
                            client = clients.plain()
                            reply = client.execute_command(*wish.args, NEVER_DECODE=True)
                        finally:
                            if turns is not None:
                                turns.give()
                    else:
                        reply = None
                        time.sleep(wish)
                except Exception as error:  # noqa: BLE001 - what it means is decided in the exchange
                    wish = exchange.throw(error)
                else:
                    wish = exchange.send(reply)
        except StopIteration as end:
            return end.value
        except BaseException as error:
            if not isinstance(error, Exception):
                clients.spoilt(client)
            raise

    def _drop_closed(self) -> None:
        """Loops that nobody wound up leave their connections to the garbage collector."""
        for loop in list(self._loops):
            if loop.is_closed():
                del self._loops[loop]
        self._clients.let_go()

    # --- on event loops -------------------------------------------------------------------------

    @property
    def aio(self) -> AsyncStore:
        """The store for calls on an event loop."""
        return _OnLoops(self)

    def known_here(self, command: Command) -> Answer | None:
        """What the running loop's calls know already."""
        if not isinstance(command, Begin):
            return None
        here = self._loops.get(asyncio.get_running_loop())
        return None if here is None else here.side.known(command)

    async def here(self) -> AsyncStore:
        """The part of the running loop, made at its first call."""
        loop = asyncio.get_running_loop()
        here = self._loops.get(loop)
        if here is not None:
            return self._threads() if here.over else here
        self._drop_closed()
        client = self._clients.on_loop()
        if client is None:  # short steps in threads; a waiter takes up none
            return self._threads()
        talk = Talk(self._clients, self._clock, self._name, self._namespaces)
        side = Side(self._name, self._books)
        here = self._loops[loop] = LoopSide(self._clients, client, talk, side, self.told)
        await here.open()
        return here

    def _threads(self) -> InThread:
        with self._lock:
            self._bridge = self._bridge or InThread(self, THREADS)
        return self._bridge

    # --- waiting --------------------------------------------------------------------------------

    def park(self, address: Address, holder: str | None, wake: Callable[[], None]) -> Unpark:
        """Wait in the room, whose ears hear the hints of all processes."""
        side, waiter = self._side, Waiter(holder, wake)
        room, channel = side.company.room, side.enter(address, waiter)
        try:
            self._ears.listen(channel)
            over = not side.watched(address, holder) and self._over(address, holder)
        except BaseException as error:
            room.leave(address, waiter)
            if isinstance(error, (StoreError, KeyboardInterrupt)) or meaning(error) is None:
                raise
            raise spoken(error, self._clients.name, "listening for hints") from error
        if over and room.leave(address, waiter):
            wake()
        return room.unpark(address, waiter)

    def _over(self, address: Address, holder: str | None) -> bool:
        record, now = self._look_together(address)
        return self._side.looked(address, holder, record, now)

    def _look_together(self, address: Address) -> tuple[Record, int]:
        """Read a record once for all who begin to wait at the same time."""
        while True:
            about = address, self._side.heard(address)  # as on a loop
            landed: queue.SimpleQueue[tuple[Record, int] | StoreError | None] = queue.SimpleQueue()
            mine: Looking | None = None
            found: tuple[Record, int] | StoreError | None = None
            try:  # an interrupt may come at any moment, and nobody else must wait for it
                with self._lock:
                    others = self._looks.get(about)
                    if others is None:
                        mine = self._looks[about] = []
                    else:
                        others.append(landed)
                if mine is not None:
                    found = self.look(address)
                    return found
            except StoreError as error:
                found = error
                raise
            finally:
                if mine is not None:
                    with self._lock:
                        self._looks.pop(about, None)
                    for other in mine:
                        other.put(found)
            found = landed.get()
            if isinstance(found, StoreError):
                raise copy.copy(found)
            if found is not None:
                return found

    # --- reading --------------------------------------------------------------------------------

    def look(self, address: Address) -> tuple[Record, int]:
        """The record as time has left it, and the server's clock."""
        return self._talk.record(address, self._do(self._talk.look(address)))

    def addresses(self, namespace: str, prefix: str) -> list[Address]:
        """Where there are records whose fingerprint starts so, oldest first."""
        if not set(prefix) <= set(wire.SHARDS):
            return []
        found: list[tuple[int, Address]] = []
        for digit in prefix[:1] or wire.SHARDS:
            tasks = wire.shard_keys(namespace, digit)[1]
            first = f"[{prefix}"
            while names := self._plain(
                tasks, "ZRANGEBYLEX", tasks, first, f"[{prefix}\xff", "LIMIT", 0, BATCH
            ):
                where = [wire.named(namespace, name.decode()) for name in names]
                for address, (head, _) in self._read(where):
                    found.append((wire.made(head), address))
                first = b"(" + names[-1]
        return [address for _, address in sorted(found, key=lambda one: one[0])]

    def _read(self, where: list[Address]) -> list[tuple[Address, tuple[list[Any], list[Any]]]]:
        """Heads and lines of the records that there are."""
        keys = tuple(wire.keys(address)[0] for address in where)
        told = self._do(self._talk.run("read", keys, (self._talk.now(),), READING))
        found = []
        for address, one in zip(where, told, strict=True):
            if one == b"DAMAGED":
                raise self._talk.damaged(address)
            if one:
                found.append((address, (one[0], one[1])))
        return found

    def _plain(self, key: str, *args: Any) -> Any:
        return self._do(self._talk.plain(args, key, READING))

    def overdue(self, namespace: str) -> list[Address]:
        """Where executions stand open whose lease is past."""
        found: list[Address] = []
        for digit in wire.SHARDS:
            key = wire.shard_keys(namespace, digit)[3]
            _, names = self._do(self._talk.run("overdue", (key,), (self._talk.now(),), READING))
            found += [wire.named(namespace, name.decode()) for name in names]
        return found

    def lines(self, namespace: str, since: int, until: int) -> Iterator[Execution]:
        """The executions that started in this time, oldest first; read in batches.

        Each that stands there from the first to the last comes once, whatever is written meanwhile.
        """
        shards = [self._lines(namespace, digit, since, until) for digit in wire.SHARDS]
        return heapq.merge(*shards, key=lambda line: line.started)

    def _lines(self, namespace: str, digit: str, since: int, until: int) -> Iterator[Execution]:
        key = wire.shard_keys(namespace, digit)[2]
        last, seen = since, set[bytes]()  # those of the last ms, which is read again
        while True:
            # never by places, which others shift
            count = len(seen) + BATCH
            told = self._plain(
                key, "ZRANGEBYSCORE", key, last, f"({until}", "WITHSCORES", "LIMIT", 0, count
            )
            found = list(_scored(told))
            fresh = [member for member, _ in found if member not in seen]
            if fresh:
                yield from self._named(namespace, fresh)
            if len(found) < count:
                return
            if found[-1][1] > last:
                last = found[-1][1]
                seen.clear()
            seen.update(member for member, start in found if start == last)

    def _named(self, namespace: str, members: list[bytes]) -> Iterator[Execution]:
        """The lines that these members of an index name, as far as they are there."""
        names = [member.decode().partition(" ")[::2] for member in members]
        where = list({name: wire.named(namespace, name) for name, _ in names}.values())
        lines: dict[tuple[str, str], Execution] = {}
        for address, (_, told) in self._read(where):
            for one in told:
                line = self._talk.execution(address, one)
                lines[wire.name(address), line.execution_id] = line
        for named in names:
            line_there = lines.get(named)
            if line_there is not None:
                yield line_there

    def windows(self, namespace: str, since: int, until: int) -> list[Window]:
        """The windows that overlap this time."""
        with suppress(StoreUnavailableError):  # told when they can be
            self._books.settle()
        found: dict[tuple[int, Key], Counts] = {}
        for digit in wire.SHARDS:
            for span, key, counts in self._tallies(namespace, digit, since - HOUR, until):
                if key.start < until and since < key.start + span:
                    if (span, key) in found:
                        found[span, key].update(counts)
                    else:
                        found[span, key] = counts
        return [Window(key, span, counts) for (span, key), counts in sorted(
            found.items(), key=lambda one: one[0][1].start)]  # fmt: skip

    def _tallies(
        self, namespace: str, digit: str, since: int, until: int
    ) -> Iterator[tuple[int, Key, Counts]]:
        prefix, names = wire.shard(namespace, digit), list[str]()
        bounds = (max(since, 0), until - 1)
        while True:
            keys = (
                f"{prefix}windows",
                f"{prefix}window-names",
                *(f"{prefix}window:{name}" for name in names),
            )
            hot, there, *counted = self._do(
                self._talk.run("tallies", keys, (*bounds, *names), READING)
            )
            there = [name.decode() for name in there]
            if there == names:
                break
            names = there
        for written in wire.written(hot).values():
            for key, counts in written.items():
                yield SPAN, key, counts
        for name, fields in zip(names, counted, strict=True):
            start, span = window(name)
            for key, counts in wire.counted(start, fields).items():
                yield span, key, counts

    def secret(self, namespace: str) -> bytes:
        """The namespace's secret."""
        return bytes(self._do(self._talk.secret(namespace)))

    # --- upkeep ---------------------------------------------------------------------------------

    def tend(self, window_retention: int | None) -> None:
        """Remove what is over, pour old windows together, where no process did so a minute ago."""
        told = self._plain(wire.NAMESPACES, "SMEMBERS", wire.NAMESPACES)
        there = {wire.from_registry(name.decode()) for name in told}
        for namespace in sorted(there | self._namespaces.keys()):
            mine = f"{wire.shard(namespace, '0')}tended"
            if self._clock is None and not self._plain(
                mine, "SET", mine, self._name, "NX", "PX", TENDED
            ):
                continue
            for digit in wire.SHARDS:
                upkeep = Upkeep(self._do, self._talk, namespace, digit, self._cursors)
                upkeep.tend(window_retention)

    def _share(self, address: Address, retention: int, shares: dict[str, list[int]]) -> None:
        self._do(self._talk.step(wire.share(address, retention, shares), BOOKING))


def _scored(told: list[Any]) -> Iterator[tuple[bytes, int]]:
    """Members and scores, which come in turn, or by RESP3 in pairs."""
    each = iter(told)
    pairs = zip(each, each, strict=True) if told and isinstance(told[0], bytes) else each
    return ((member, int(float(score))) for member, score in pairs)


class _Hearing:
    """What the ears of a process do with what they hear."""

    def __init__(self, side: Side, look: Callable[[Address], tuple[Record, int]]) -> None:
        self._side = side
        self._look = look
        self.stands, self.broken, self.idle = side.stands, side.broken, side.idle

    def heard(self, channel: str, hint: str) -> None:
        """A hint: where many wait for a result, it is read once for all."""
        found = self._side.hint(channel, hint)
        if found is None:
            return
        address, whom = found
        if whom == "all" and self._side.many(address):
            with suppress(StoreError):  # then they ask themselves
                self._side.looked(address, None, *self._look(address))
        self._side.call(address, whom)


class _OnLoops:
    """The store for calls on event loops: each loop has a client and waiters of its own."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    def known(self, command: Command) -> Answer | None:
        """The answer, where it needs no server."""
        return self._store.known_here(command)

    async def perform(self, command: Command) -> Answer:
        """As the store does."""
        return await asyncio.shield(asyncio.ensure_future(self._perform(command)))

    async def _perform(self, command: Command) -> Answer:
        return await (await self._store.here()).perform(command)

    async def park(self, address: Address, holder: str | None, wake: Callable[[], None]) -> Unpark:
        """As the store does."""
        return await (await self._store.here()).park(address, holder, wake)

    async def look(self, address: Address) -> tuple[Record, int]:
        """As the store does."""
        return await (await self._store.here()).look(address)


_parked: list[Any] = []  # a parent's, in a forked child: to end them would disturb the parent
_all: WeakSet[Books] = WeakSet()


def _settle_all() -> None:
    for books in list(_all):
        with suppress(StoreError):
            books.settle()


atexit.register(_settle_all)

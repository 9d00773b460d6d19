"""Hearing hints: one subscription per node of the server, for a process or for an event loop.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import asyncio
import copy
import queue
import selectors
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from idemguard.errors import StoreUnavailableError
from idemguard.stores.clients import close_async, spoken, time_limit
from idemguard.stores.patience import TRIES, late

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from idemguard.stores.clients import Clients

TICK = 1.0  # seconds between two looks whether anybody still waits
IDLE = 10  # ticks with nobody waiting, and the connection is given back
PATIENCE = 5.0  # seconds that a subscription may take
FIRST, LONGEST = 0.02, 1.0  # seconds until a broken one is made anew
POLL = 0.01  # seconds, where a connection cannot be waited for


class Listener(Protocol):
    """Who is told what is heard."""

    def stands(self, channel: str, *, anew: bool) -> None:
        """Hints arrive from now on; `anew`: they did before, and some may have been lost."""
        ...

    def broken(self, channels: Iterable[str]) -> None:
        """Hints do not arrive until further notice."""
        ...

    def idle(self) -> Iterable[str]:
        """The channels that nobody needs any longer; asked every second."""
        ...


class SyncListener(Listener, Protocol):
    """Who is told from a thread."""

    def heard(self, channel: str, hint: str) -> None:
        """A hint has come."""
        ...


class AsyncListener(Listener, Protocol):
    """Who is told on a loop."""

    async def heard(self, channel: str, hint: str) -> None:
        """A hint has come."""
        ...


class Subscription:
    """What one connection is to hear, and what it does hear."""

    def __init__(self) -> None:
        self.wanted: dict[str, None] = {}
        self.sent: set[str] = set()
        self.stood: set[str] = set()  # heard at some time since it was wanted
        self.standing: set[str] = set()
        self._dropped: Counter[str] = Counter()  # whose end was asked for and not confirmed yet

    def hears(self, channel: str) -> bool:
        """Whether its hints arrive, and will go on to."""
        return channel in self.standing and channel in self.wanted

    def changes(self) -> tuple[list[str], list[str]]:
        """What is to be subscribed to, and what no longer."""
        add = [channel for channel in self.wanted if channel not in self.sent]
        drop = [channel for channel in self.sent if channel not in self.wanted]
        self.sent.update(add)
        self.sent.difference_update(drop)
        self.standing.difference_update(drop)
        self.stood.difference_update(drop)
        self._dropped.update(drop)
        return add, drop

    def confirmed(self, channel: str) -> bool:
        """It stands; whether it did before."""
        anew = channel in self.stood
        self.stood.add(channel)
        self.standing.add(channel)
        return anew

    def ended(self, channel: str) -> bool:
        """It is heard no longer; False: by the server's own doing, though it is wanted."""
        if self._dropped[channel]:
            self._dropped[channel] -= 1  # it may be wanted anew by now: that was asked for later
            return True
        self.sent.discard(channel)
        self.standing.discard(channel)
        return channel not in self.wanted

    def lost(self) -> list[str]:
        """Nothing is heard any longer."""
        self.sent.clear()
        self._dropped.clear()
        standing = list(self.standing)
        self.standing.clear()
        return standing


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _words(pubsub: Any, word: str, *, cluster: bool) -> Callable[..., Any]:
    """What subscribes, or ends a subscription; in a cluster of the shard that a channel is of."""
    name = f"s{word}" if cluster else word
    # valkey-py's asyncio PubSub has no method for shards
    return getattr(pubsub, name, None) or partial(pubsub.execute_command, name.upper())


# select() knows no descriptor above 1023, which a busy server has
_Selector: Any = getattr(selectors, "PollSelector", selectors.SelectSelector)


def _readable(seconds: float, *sockets: socket.socket) -> list[Any]:
    """Those that there is something to read from, as soon as there is, or after so many seconds."""
    with _Selector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def _kind(message: dict[str, Any]) -> str:
    return _text(message["type"])


# --- in a thread -------------------------------------------------------------------------------------


class Ears:
    """The subscriptions of one process, each with a thread while anybody waits.

    Args:
        clients: of the server.
        listener: is told, from those threads.

    """

    def __init__(self, clients: Clients, listener: SyncListener) -> None:
        self._clients = clients
        self._listener = listener
        self._lock = threading.RLock()
        self._ears: dict[str, _Ear] = {}

    def listen(self, channel: str) -> None:
        """Hear hints of this channel from now on; returns when the subscription stands.

        Raises:
            StoreError, StoreUnavailableError: it could not be made.

        """
        if any(ear.subscription.hears(channel) for ear in self._ears.copy().values()):
            return
        node, client = self._clients.home(self._clients.plain(), channel)
        ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        with self._lock:
            ear = self._ears.get(node)
            if ear is None or not ear.want(channel, ready):
                ear = self._ears[node] = _Ear(self, client, cluster=self._clients.cluster)
                ear.want(channel, ready)
        try:
            error = ready.get(timeout=PATIENCE)
        except queue.Empty:
            error = TimeoutError("the subscription was not confirmed")
        if isinstance(error, StoreUnavailableError):  # in words already
            raise copy.copy(error)
        if error is not None:
            raise spoken(error, self._clients.name, "listening for hints")

    def close(self) -> None:
        """End all threads, and give their connections back."""
        with self._lock:
            ears, self._ears = list(self._ears.values()), {}
        for ear in ears:
            ear.end()

    # --- what the ears tell --------------------------------------------------------------------------

    def tidy(self) -> None:
        """Hear no longer what nobody waits for."""
        ears, idle = list(self._ears.copy().values()), set(self._listener.idle())
        unwanted = [(ear, channel) for ear in ears for channel in idle if ear.unwant(channel)]
        if not unwanted:
            return
        still = set(self._listener.idle())  # who came meanwhile may have found it standing
        for ear, channel in unwanted:
            if channel not in still:
                ear.want(channel, None)

    @property
    def listener(self) -> SyncListener:
        """Who is told."""
        return self._listener

    def moved(self, ear: _Ear, channels: list[str]) -> None:
        """A node no longer serves these: listen where they are served now."""
        try:
            client = self._clients.plain()
            for channel in channels:
                client.execute_command("EXISTS", channel)  # has the client learn the slots anew
                node, home = self._clients.home(client, channel)
                with self._lock:
                    if self._ears.get(node) is ear:
                        continue
                    ear.unwant(channel)
                    other = self._ears.get(node)
                    if other is None or not other.want(channel, None):
                        other = self._ears[node] = _Ear(self, home, cluster=True)
                        other.want(channel, None)
                    other.subscription.stood.add(channel)
        except Exception:  # noqa: BLE001 - it is tried again when the ear fails again
            return


class _Ear:
    """One connection that hears, and the thread that reads it."""

    def __init__(self, ears: Ears, client: Any, *, cluster: bool) -> None:
        self.subscription = Subscription()
        self._ears = ears
        self._client = client
        self._cluster = cluster
        self._ready: dict[str, list[queue.SimpleQueue[BaseException | None]]] = {}
        self._lock = threading.RLock()
        self._mine, self._theirs = socket.socketpair()
        self._mine.setblocking(False)
        self._over = False
        self._pubsub: Any = None
        self._thread = threading.Thread(target=self._run, name="idemguard-ear", daemon=True)
        self._thread.start()

    def want(self, channel: str, ready: queue.SimpleQueue[BaseException | None] | None) -> bool:
        """Hear this too; False: it hears nothing any longer."""
        with self._lock:
            if self._over:
                return False
            self.subscription.wanted[channel] = None
            if channel in self.subscription.standing:
                if ready is not None:
                    ready.put(None)
                return True
            if ready is not None:
                self._ready.setdefault(channel, []).append(ready)
        self._nudge()
        return True

    def unwant(self, channel: str) -> bool:
        """Hear this no longer; whether it was wanted."""
        with self._lock:
            if channel not in self.subscription.wanted:
                return False
            del self.subscription.wanted[channel]
            return True

    def end(self) -> None:
        """Hear nothing any longer."""
        with self._lock:
            self._over = True
            self.subscription.wanted.clear()
        self._nudge()
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE)

    def _nudge(self) -> None:
        with suppress(OSError):  # it has ended
            self._theirs.send(b"!")

    def _run(self) -> None:
        pause, idle, tick = FIRST, 0, time.monotonic() + TICK
        try:
            while not self._over:
                try:
                    heard = self._step()
                except Exception as error:  # noqa: BLE001 - whatever it is, hints are lost
                    self._broken(error)
                    self._rest(pause)
                    pause = min(2 * pause, LONGEST)
                    continue
                if heard:
                    pause = FIRST
                if time.monotonic() >= tick:
                    tick = time.monotonic() + TICK
                    self._ears.tidy()
                    with self._lock:
                        idle = 0 if self.subscription.wanted else idle + 1
                        self._over = self._over or idle > IDLE
        finally:
            with self._lock:
                self._over = True
            self._shut()
            self._mine.close()
            self._theirs.close()

    def _step(self) -> bool:
        """Send what there is to send, and take one message, or wait for one."""
        if self._pubsub is None:
            self._pubsub = self._client.pubsub()
        with self._lock:
            add, drop = self.subscription.changes()
        if add:
            _words(self._pubsub, "subscribe", cluster=self._cluster)(*add)
        if drop:
            _words(self._pubsub, "unsubscribe", cluster=self._cluster)(*drop)
        connection = self._pubsub.connection
        if connection is None:
            self._rest(TICK)
            return False
        message = self._pubsub.get_message(timeout=0.0)
        if message is None:
            if not connection.can_read(timeout=0):
                self._await(connection)
            return False
        self._handle(message)
        return True

    def _await(self, connection: Any) -> None:
        hearing = getattr(connection, "_sock", None)
        if isinstance(hearing, socket.socket) and hearing.fileno() >= 0:
            self._drain(self._mine in _readable(TICK, hearing, self._mine))
        else:
            self._rest(POLL)

    def _rest(self, seconds: float) -> None:
        self._drain(bool(_readable(seconds, self._mine)))

    def _drain(self, nudged: bool) -> None:
        if nudged:
            with suppress(BlockingIOError):
                self._mine.recv(4096)

    def _handle(self, message: dict[str, Any]) -> None:
        kind, channel = _kind(message), _text(message["channel"])
        if kind in ("message", "smessage"):
            self._ears.listener.heard(channel, _text(message["data"]))
        elif kind in ("subscribe", "ssubscribe"):
            with self._lock:
                anew = self.subscription.confirmed(channel)
                waiting = self._ready.pop(channel, [])
            self._ears.listener.stands(channel, anew=anew)
            for ready in waiting:
                ready.put(None)
        elif not self.subscription.ended(channel):  # the server has given its slot away
            raise StoreUnavailableError("the slot of a channel has moved")

    def _broken(self, error: BaseException) -> None:
        with self._lock:
            lost = self.subscription.lost()
            waiting, self._ready = self._ready, {}
            wanted = list(self.subscription.wanted)
            for channel in waiting:
                if channel not in self.subscription.stood:
                    self.subscription.wanted.pop(channel, None)  # its caller is told, and asks anew
        self._ears.listener.broken(lost)
        for each in waiting.values():
            for ready in each:
                ready.put(error)
        self._shut()
        if self._cluster:
            self._ears.moved(self, wanted)

    def _shut(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            with suppress(Exception):  # it is broken, or its server gone
                pubsub.close()


# --- on a loop -----------------------------------------------------------------------------------------


class LoopEars:
    """The subscriptions of one event loop.

    Args:
        clients: of the server.
        client: of this loop.
        listener: is told, on the loop.

    """

    def __init__(self, clients: Clients, client: Any, listener: AsyncListener) -> None:
        self.clients = clients
        self.client = client
        self.listener = listener
        self._ears: dict[str, _LoopEar] = {}

    async def listen(self, channel: str) -> None:
        """Hear hints of this channel from now on; returns when the subscription stands.

        Raises:
            StoreError, StoreUnavailableError: it could not be made.

        """
        if any(ear.subscription.hears(channel) for ear in self._ears.values()):
            return
        tries = 1
        while True:
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            began = time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE):
                    await self.hear(channel, ready)
                    await ready
            except StoreUnavailableError:
                raise
            except Exception as error:
                ran_out = type(error) is TimeoutError
                if ran_out and tries < TRIES and late(time.monotonic() - began, PATIENCE):
                    tries += 1
                    continue
                raise spoken(error, self.clients.name, "listening for hints") from error
            return

    async def hear(
        self, channel: str, ready: asyncio.Future[None] | None, *, but: _LoopEar | None = None
    ) -> None:
        """Have the ear of the right node hear it.

        Args:
            channel: what to hear.
            ready: is told when it does.
            but: the ear that has just failed; nothing is done where it is still the right one.

        """
        node, client = await self.clients.ahome(self.client, channel)
        ear = self._ears.get(node)
        if ear is not None and ear is but:
            if client is not self.client:
                await close_async(client)
            return
        if ear is None or ear.over:
            ear = self._ears[node] = _LoopEar(self, client, own=client is not self.client)
        elif client is not self.client:
            await close_async(client)
        if but is not None:
            ear.subscription.stood.add(channel)
        await ear.want(channel, ready)

    def tidy(self) -> None:
        """Hear no longer what nobody waits for."""
        for channel in self.listener.idle():
            for ear in self._ears.values():
                ear.subscription.wanted.pop(channel, None)

    def wants(self, channel: str, *, but: _LoopEar) -> bool:
        """Whether another ear hears this, or tries to."""
        return any(
            channel in ear.subscription.wanted for ear in self._ears.values() if ear is not but
        )

    async def close(self) -> None:
        """Hear nothing any longer, and give the connections back."""
        while self._ears:  # one that is cancelled here is ended by the next
            node, ear = next(iter(self._ears.items()))
            await ear.end()
            if self._ears.get(node) is ear:
                del self._ears[node]


class _LoopEar:
    """One connection that hears, and the task that reads it."""

    def __init__(self, ears: LoopEars, client: Any, *, own: bool) -> None:
        self.subscription = Subscription()
        self.over = False
        self._ears = ears
        self._client = client
        self._own = own
        self._ready: dict[str, list[asyncio.Future[None]]] = {}
        self._pubsub: Any = None
        self._sending = asyncio.Lock()
        self._idle = 0
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._ticking = loop.call_later(TICK, self._tick, loop)

    async def want(self, channel: str, ready: asyncio.Future[None] | None) -> None:
        """Hear this too."""
        self.subscription.wanted[channel] = None
        if ready is not None:
            if channel in self.subscription.standing:
                ready.set_result(None)
            else:
                self._ready.setdefault(channel, []).append(ready)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        elif self._pubsub is not None:
            with suppress(Exception):  # the task that reads finds it broken, too
                await self._send(self._pubsub)

    async def end(self) -> None:
        """Hear nothing any longer."""
        self.over = True
        self._ticking.cancel()
        task = self._task
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
        self._task = None
        await self._shut()
        if self._own:
            await close_async(self._client)

    async def _send(self, pubsub: Any) -> None:
        async with self._sending:
            add, drop = self.subscription.changes()
            cluster = self._ears.clients.cluster
            if add:
                await _words(pubsub, "subscribe", cluster=cluster)(*add)
            if drop:
                await _words(pubsub, "unsubscribe", cluster=cluster)(*drop)

    async def _run(self) -> None:
        pause, tries, began = FIRST, 1, 0.0
        try:
            while not self.over and self.subscription.wanted:
                try:
                    if self._pubsub is None:
                        began = time.monotonic()
                        pubsub = self._client.pubsub()
                        try:
                            await self._send(pubsub)
                        except BaseException:
                            with suppress(Exception):  # nobody else knows its connection
                                await pubsub.aclose()
                            raise
                        self._pubsub, tries = pubsub, 1
                    await self._send(self._pubsub)  # what came meanwhile
                    message = await self._pubsub.get_message(timeout=None)
                    if message is not None:
                        pause = FIRST
                        await self._handle(message)
                except Exception as error:  # noqa: BLE001 - whatever it is, hints are lost
                    if self._pubsub is None and tries < TRIES:
                        tries += 1
                        if late(time.monotonic() - began, time_limit(error, self._client)):
                            self.subscription.lost()  # it was never sent
                            continue
                    await self._broken(error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST)
        finally:
            self._ears.listener.broken(self.subscription.lost())

    async def _handle(self, message: dict[str, Any]) -> None:
        kind, channel = _kind(message), _text(message["channel"])
        if kind in ("message", "smessage"):
            await self._ears.listener.heard(channel, _text(message["data"]))
        elif kind in ("subscribe", "ssubscribe"):
            anew = self.subscription.confirmed(channel)
            self._ears.listener.stands(channel, anew=anew)
            for ready in self._ready.pop(channel, []):
                if not ready.done():
                    ready.set_result(None)
        elif not self.subscription.ended(channel):  # the server has given its slot away
            raise StoreUnavailableError("the slot of a channel has moved")

    async def _broken(self, error: Exception) -> None:
        lost = self.subscription.lost()
        waiting, self._ready = self._ready, {}
        for channel, futures in waiting.items():
            if channel not in self.subscription.stood:
                self.subscription.wanted.pop(channel, None)  # its caller is told, and asks anew
            for ready in futures:
                if not ready.done():
                    ready.set_exception(error)
        self._ears.listener.broken(lost)
        await self._shut()
        if self._ears.clients.cluster:
            for channel in list(self.subscription.wanted):
                with suppress(Exception):  # it is tried again when this fails again
                    await self._ears.client.execute_command("EXISTS", channel)
                    await self._ears.hear(channel, None, but=self)
                    if self._ears.wants(channel, but=self):
                        self.subscription.wanted.pop(channel, None)

    async def _shut(self) -> None:
        pubsub = self._pubsub
        if pubsub is not None:
            with suppress(Exception):  # it is broken, or its server gone
                await pubsub.aclose()
            if self._pubsub is pubsub:
                self._pubsub = None

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.over:
            return
        self._ears.tidy()
        self._idle = 0 if self.subscription.wanted else self._idle + 1
        if self._idle > IDLE:
            self.over = True
            asyncio.ensure_future(self.end())  # noqa: RUF006 - the loop holds it while it runs
            return
        if self._pubsub is not None and self.subscription.sent - self.subscription.wanted.keys():
            asyncio.ensure_future(self._tidy(self._pubsub))  # noqa: RUF006 - as above
        self._ticking = loop.call_later(TICK, self._tick, loop)

    async def _tidy(self, pubsub: Any) -> None:
        with suppress(Exception):  # the task that reads finds it broken, too
            await self._send(pubsub)

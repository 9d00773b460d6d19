"""A server's store on one event loop: a client, waiters and ears of its own.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from idemguard.claim import Begin, Renew
from idemguard.errors import StoreError
from idemguard.record import Mode
from idemguard.stores.clients import close_async, naming, time_limit
from idemguard.stores.ears import LoopEars
from idemguard.stores.patience import BRIEF, TRIES, late
from idemguard.stores.room import Waiter
from idemguard.stores.talk import Request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from idemguard.claim import Answer, Command
    from idemguard.record import Address, Record
    from idemguard.stores import Unpark
    from idemguard.stores.clients import Clients
    from idemguard.stores.side import Side
    from idemguard.stores.talk import Exchange, Talk


def queueing(command: Command | None, clients: Clients) -> float:
    """How long a step waits for a free connection, s: not long where its caller is not to wait."""
    brief = getattr(command, "brief", False) and type(command) is not Renew
    return min(BRIEF, clients.patience) if brief else clients.patience


class LoopSide:
    """One event loop's client, waiters and ears; everything here is done on the loop.

    Args:
        clients: of the server.
        client: of this loop.
        talk: makes what is sent.
        side: who waits here.
        told: has all who wait in this process know what was answered.

    """

    def __init__(
        self,
        clients: Clients,
        client: Any,
        talk: Talk,
        side: Side,
        told: Callable[[Command, list[Any], Answer], None],
    ) -> None:
        self.side = side
        self._clients = clients
        self._client = client
        self._talk = talk
        self._told = told
        self._places = clients.places(client)
        self._ears = LoopEars(clients, client, self)
        self._life: AsyncGenerator[None, None] | None = None
        self.over = False  # the loop is about to be closed
        self._looks: dict[tuple[Address, int], asyncio.Future[tuple[Record, int]]] = {}

    async def open(self) -> None:
        """Be closed when the loop is."""
        self._life = self._living()
        await anext(self._life)

    async def _living(self) -> AsyncGenerator[None, None]:
        # asyncio.run() ends the async generators of its loop before it closes it
        try:
            yield
        finally:
            self.over = True
            await self._shut()

    async def close(self) -> None:
        """Give the connections back; they are opened anew when they are used again."""
        await self._shut()

    async def _shut(self) -> None:
        await self._ears.close()
        self.side.leave_all()
        if self._clients.owns(self._client):
            await close_async(self._client)

    async def perform(self, command: Command) -> Answer:
        """One command: one script."""
        if isinstance(command, Begin) and command.mode is Mode.ENFORCE:
            return await self._ask(command)
        reply, answer = await self._perform(command)
        self._told(command, reply, answer)
        return answer

    async def _perform(self, command: Command) -> tuple[list[Any], Answer]:
        try:
            reply = await self._do(self._talk.perform(command), command)
            return reply, self._talk.answer(command, reply)
        except StoreError as error:
            naming(error, command)
            raise

    async def _ask(self, ask: Begin) -> Answer:
        side, loop = self.side, asyncio.get_running_loop()
        while True:
            landed: asyncio.Future[None] = loop.create_future()
            answer, flight, mine = side.approach(ask, partial(_tell, landed))
            if answer is not None:
                return answer
            if mine:
                break
            await landed
            answer = side.joined(ask, flight)
            if answer is not None:
                return answer
        try:
            _, answer = await self._perform(ask)
        except BaseException as error:
            side.fail(ask, error)
            raise
        side.land(ask, flight, answer)
        return answer

    async def _do(self, exchange: Exchange, command: Command | None = None) -> Any:
        """Drive an exchange with this loop's client."""
        try:
            wish = next(exchange)
            while True:
                try:
                    if isinstance(wish, Request):
                        reply = await self._send(wish, command)
                    else:
                        reply = None
                        await asyncio.sleep(wish)
                except Exception as error:  # noqa: BLE001 - what it means is decided in the exchange
                    wish = exchange.throw(error)
                else:
                    wish = exchange.send(reply)
        except StopIteration as end:
            return end.value

    async def _send(self, wish: Request, command: Command | None) -> Any:
        """Send it when a connection is free."""
        places = self._places
        if places is None:
            return await self._sent(wish)
        if places.locked():
            patience = queueing(command, self._clients)
            try:
                async with asyncio.timeout(patience):
                    await places.acquire()
            except TimeoutError:
                raise self._clients.crowded(patience) from None
        else:
            await places.acquire()
        try:
            return await self._sent(wish)
        finally:
            places.release()

    async def _sent(self, wish: Request) -> Any:
        if self._clients.cluster:  # before, it would send plain commands anywhere
            await self._client.initialize()
        tries = 1
        while True:
            began = time.monotonic()
            try:
                return await self._client.execute_command(*wish.args, NEVER_DECODE=True)
            except Exception as error:
                passed = time.monotonic() - began
                if tries == TRIES or not late(passed, time_limit(error, self._client)):
                    raise
            tries += 1

    async def park(self, address: Address, holder: str | None, wake: Callable[[], None]) -> Unpark:
        """Wait in the room, whose ears hear the hints of all processes."""
        side, waiter = self.side, Waiter(holder, wake)
        room, channel = side.company.room, side.enter(address, waiter)
        try:
            await self._ears.listen(channel)
            over = False
            if not side.watched(address, holder):
                record, now = await self._look_together(address)
                over = side.looked(address, holder, record, now)
        except BaseException:
            room.leave(address, waiter)
            raise
        if over and room.leave(address, waiter):
            wake()
        return room.unpark(address, waiter)

    async def _look_together(self, address: Address) -> tuple[Record, int]:
        """Read a record once for all who begin to wait at the same time."""
        # what was read before the last hint need not show what it hinted at
        about = address, self.side.heard(address)
        look = self._looks.get(about)
        if look is None:
            look = self._looks[about] = asyncio.ensure_future(self.look(address))
            look.add_done_callback(lambda _: self._looks.pop(about, None))
        return await asyncio.shield(look)

    async def look(self, address: Address) -> tuple[Record, int]:
        """The record as time has left it, and the server's clock."""
        return self._talk.record(address, await self._do(self._talk.look(address)))

    # --- what the ears tell -----------------------------------------------------------------------

    def stands(self, channel: str, *, anew: bool) -> None:
        """Hints arrive."""
        self.side.stands(channel, anew=anew)

    def broken(self, channels: Iterable[str]) -> None:
        """Hints arrive no longer."""
        self.side.broken(channels)

    def idle(self) -> list[str]:
        """The channels that nobody waits at."""
        return self.side.idle()

    async def heard(self, channel: str, hint: str) -> None:
        """A hint: where many wait for a result, it is read once for all."""
        found = self.side.hint(channel, hint)
        if found is None:
            return
        address, whom = found
        if whom == "all" and self.side.many(address):
            with suppress(StoreError):  # then they ask themselves
                self.side.looked(address, None, *await self.look(address))
        self.side.call(address, whom)


def _tell(landed: asyncio.Future[None]) -> None:
    if not landed.done():
        landed.set_result(None)

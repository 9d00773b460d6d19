"""Who calls a store in the conformance suite: from plain code or a loop, here or in another process."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from conformance.kinds import Clock, Kind

from idemguard.claim import Answer, Command
from idemguard.drive import adrive, drive
from idemguard.guard import Await, Look, Wish
from idemguard.record import Address, Record
from idemguard.stores import Store
from idemguard.stores.bridge import InThread

LONG = 30.0  # seconds that a test waits for what must come; it never takes so long


def _one(wish: Wish):
    return (yield wish)


class Party:
    """Performs wishes on a store, by one of the two drivers.

    Args:
        store: which.
        driver: `"drive"` or `"adrive"`.

    """

    def __init__(self, store: Store, driver: str) -> None:
        self.store = store
        self._waits: list[tuple[Future[int], int]] = []
        self._loop = asyncio.new_event_loop() if driver == "adrive" else None
        if self._loop is not None:
            self._aio = getattr(store, "aio", None) or InThread(store)
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._thread.start()

    def perform(self, command: Command) -> Answer:
        """One command."""
        return self._do(command).result(LONG)

    def look(self, address: Address) -> tuple[Record, int]:
        """The record, and the store's clock."""
        return self._do(Look(address)).result(LONG)

    def call(self, method: str, *args: Any) -> Any:
        """Another method of the store; of an iterator, the list."""
        found = getattr(self.store, method)(*args)
        return list(found) if method == "lines" else found

    def wait(self, address: Address, holder: str | None, timeout: float = LONG) -> int:
        """Begin to wait as a call does; answered with the number of this wait."""
        parked = threading.Event()
        wish = Await(address, holder, round(timeout * 1000))
        self._waits.append((self._do(wish, parked), wish.timeout))
        assert parked.wait(LONG)
        return len(self._waits) - 1

    def woken(self, number: int, timeout: float = LONG) -> bool:
        """Whether this wait is over within so many seconds, and before its own time."""
        wait, limit = self._waits[number]
        try:
            return wait.result(timeout) < limit
        except TimeoutError:
            return False

    def _do(self, wish: Wish, parked: threading.Event | None = None) -> Future[Any]:
        if self._loop is not None:
            aio = self._aio if parked is None else _AsyncWatched(self._aio, parked)
            return asyncio.run_coroutine_threadsafe(adrive(_one(wish), aio, None, None), self._loop)
        future: Future[Any] = Future()
        if parked is None:
            _into(future, wish, self.store)
        else:
            arguments = (future, wish, _Watched(self.store, parked))
            threading.Thread(target=_into, args=arguments, daemon=True).start()
        return future

    def close(self) -> None:
        """Give all back."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_wind_up(), self._loop).result(LONG)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LONG)
            self._loop.close()
        self.store.close()


async def _wind_up() -> None:
    """What `asyncio.run` does before it closes a loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _into(future: Future[Any], wish: Wish, store: Any) -> None:
    try:
        future.set_result(drive(_one(wish), store, None, None))
    except BaseException as error:  # noqa: BLE001 - raised where it is asked for
        future.set_exception(error)


class _Watched:
    """A store that tells when somebody has parked."""

    def __init__(self, store: Store, parked: threading.Event) -> None:
        self._store = store
        self._parked = parked

    def park(self, *args: Any) -> Any:
        try:
            return self._store.park(*args)
        finally:
            self._parked.set()


class _AsyncWatched(_Watched):
    async def park(self, *args: Any) -> Any:
        try:
            return await self._store.park(*args)
        finally:
            self._parked.set()


class Elsewhere:
    """Another process, in which parties are made; used by one test after the other."""

    def __init__(self) -> None:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe = ours

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def open(self, kind: Kind, folder: Path, clock: Clock | None, driver: str) -> Remote:
        """A party there."""
        self.ask("open", kind.make, folder, clock, driver)
        return Remote(self)

    def ask(self, name: str, *args: Any) -> Any:
        """One method of the party there."""
        self._pipe.send((name, args))
        assert self._pipe.poll(2 * LONG), "the other process does not answer"
        answer, error = self._pipe.recv()
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(LONG)


class Remote:
    """A party in another process."""

    def __init__(self, where: Elsewhere) -> None:
        self._where = where

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._where.ask(name, *args)


def _serve(pipe: Any) -> None:
    party: Party | None = None
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            if name == "open":
                make, folder, clock, driver = args
                party, answer = Party(make(folder, clock), driver), None
            else:
                answer = getattr(party, name)(*args)
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            pipe.send((None, error))
        else:
            pipe.send((answer, None))

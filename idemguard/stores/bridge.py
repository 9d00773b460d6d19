"""How calls on an event loop use a store that blocks."""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from idemguard.forks import on_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemguard.claim import Answer, Command
    from idemguard.record import Address, Record
    from idemguard.stores import Store, Unpark

T = TypeVar("T")


class Direct:
    """For a store whose steps take no time to speak of: they are done on the loop."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def perform(self, command: Command) -> Answer:
        """As the store does."""
        return self._store.perform(command)

    async def park(self, address: Address, holder: str | None, wake: Callable[[], None]) -> Unpark:
        """As the store does."""
        return self._store.park(address, holder, wake)

    async def look(self, address: Address) -> tuple[Record, int]:
        """As the store does."""
        return self._store.look(address)


class InThread:
    """For a store that may block: its steps are done by one thread, in the order of the calls.

    A step that has begun goes on to its end although its awaiter is cancelled. The thread
    is the bridge's own, so that a full executor of the application cannot starve it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running = False
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        on_fork(self)

    def forked(self) -> None:
        """Start a thread of this process's own when there is work."""
        self._lock = threading.Lock()
        self._running = False

    async def perform(self, command: Command) -> Answer:
        """As the store does, in the thread."""
        return await self._do(self._store.perform, command)

    async def park(self, address: Address, holder: str | None, wake: Callable[[], None]) -> Unpark:
        """As the store does, in the thread; a waiter takes up no thread while it waits."""
        return await self._do(self._store.park, address, holder, wake)

    async def look(self, address: Address) -> tuple[Record, int]:
        """As the store does, in the thread."""
        return await self._do(self._store.look, address)

    def _do(self, step: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(answer: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)

        def job() -> None:
            answer, failed = None, None
            try:
                answer = step(*args)
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                failed = error
            with suppress(RuntimeError):  # the loop is closed: nobody is there to be told
                loop.call_soon_threadsafe(tell, answer, failed)

        self._started().put(job)
        return future

    def _started(self) -> queue.SimpleQueue[Callable[[], None]]:
        with self._lock:
            if not self._running:
                self._jobs = queue.SimpleQueue()
                name, jobs = "idemguard-store", (self._jobs,)
                threading.Thread(target=_work, args=jobs, name=name, daemon=True).start()
                self._running = True
            return self._jobs


def _work(jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()

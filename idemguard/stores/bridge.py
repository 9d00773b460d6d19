"""How calls on an event loop use a store that blocks.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from idemguard.forks import on_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemguard.claim import Answer, Command
    from idemguard.record import Address, Record
    from idemguard.stores import Store, Unpark

T = TypeVar("T")

IDLE = 5.0  # seconds without work, and the thread ends


class _Call(threading.local):
    came: float | None = None


_call = _Call()


def called() -> float:
    """When the step that this thread does was asked for, by the monotonic clock."""
    return time.monotonic() if _call.came is None else _call.came


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
    """For a store that may block: its steps are done by a thread, in the order of the calls.

    A step that has begun goes on to its end although its awaiter is cancelled. The thread
    is the bridge's own, so that a full executor of the application cannot starve it. It ends
    when there was no work for a while, and does not keep the store alive.

    Args:
        store: which.
        threads: how many there may be; steps of several begin in the order of the calls.

    """

    def __init__(self, store: Store, threads: int = 1) -> None:
        self._store = store
        self._threads = threads
        self._worker = _Worker(threads)
        on_fork(self)

    def forked(self) -> None:
        """Start threads of this process's own when there is work."""
        self._worker = _Worker(self._threads)

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
        came = time.monotonic()

        def tell(answer: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)

        def job() -> None:
            answer, failed = None, None
            _call.came = came
            try:
                answer = step(*args)
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                failed = error
            finally:
                _call.came = None
            with suppress(RuntimeError):  # the loop is closed: nobody is there to be told
                loop.call_soon_threadsafe(tell, answer, failed)

        self._worker.put(job)
        return future


class _Worker:
    """Threads while there is work; they know nothing but the jobs that are still to be done."""

    def __init__(self, threads: int) -> None:
        self._lock = threading.Lock()
        self._threads = threads
        self._running = self._idle = 0
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def put(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.put(job)
            if self._idle < self._jobs.qsize() and self._running < self._threads:
                threading.Thread(target=self._work, name="idemguard-store", daemon=True).start()
                self._running += 1

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                job = self._jobs.get(timeout=IDLE)
            except queue.Empty:
                job = None
            with self._lock:
                self._idle -= 1
                if job is None and self._jobs.empty():
                    self._running -= 1
                    return
            if job is not None:
                job()
                del job  # which holds the store

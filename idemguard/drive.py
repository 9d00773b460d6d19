"""How flows are performed: the two drivers, the one place where sync and async differ.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import asyncio
import os
import queue
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from idemguard import context
from idemguard.claim import Begin, Claimed, Release, Withdraw
from idemguard.errors import ConfigurationError, IdemguardError, ReentrantCallError, StoreError
from idemguard.guard import Await, Execute, Look, Owe, Ran, Rest, Wish
from idemguard.record import Status

if TYPE_CHECKING:
    from idemguard.claim import Answer, Command
    from idemguard.record import Claim
    from idemguard.stores import AsyncStore, Store

R = TypeVar("R")

LONGEST = 3600.0  # seconds; whoever waits without a limit asks again after this


class Later(Protocol):
    """Where commands go that the store must be told as soon as it can be told."""

    def put(self, command: Command) -> None:
        """Keep it until then."""
        ...


class Net:
    """What is left to tell when a flow is torn down at a moment that it could not foresee.

    Ctrl-C may hit between any two steps of Python; the claim must not outlive it. In a child that was
    forked in the midst of it, there is nothing to tell: the claim is the parent's, where the flow goes on.
    """

    __slots__ = ("asked", "claim", "pid", "ran")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.asked = 0.0  # when the last Begin was sent, by the process's own clock
        self.claim: Claim | None = None  # held, as far as is known
        self.ran: Ran | None = None  # what its body came to

    def note(self, command: Command, answer: Answer) -> None:
        """A command was performed."""
        if isinstance(answer, Claimed):
            self.claim = answer.claim
        elif not isinstance(command, Begin):
            self.claim = None

    def copied(self) -> bool:
        """Whether this is a forked child of the process that the flow belongs to."""
        return os.getpid() != self.pid

    def left(self) -> Command | None:
        """The command that gives back what is held, if anything is."""
        claim = self.claim
        if claim is None or self.copied():
            return None
        if self.ran is None:
            return Withdraw(claim.address, claim.nonce, claim.caller, "failed")
        return Release(claim, Status.FAILED, self.ran.spent)

    def give_back(self, store: Store, later: Later) -> None:
        """Give back what is held."""
        if (left := self.left()) is not None:
            try:
                store.perform(left)
            except Exception:  # noqa: BLE001 - what tore the flow down is what the caller is told
                later.put(left)
            self.claim = None

    def owe(self, later: Later) -> None:
        """Have what is held given back."""
        if (left := self.left()) is not None:
            later.put(left)
            self.claim = None


def drive(
    flow: Generator[Wish, Any, R],
    store: Store,
    later: Later,
    body: Callable[[Claim, float], Ran],
    net: Net | None = None,
) -> R:
    """Perform a flow from plain code.

    Args:
        flow: what to perform.
        store: on which.
        later: where it owes commands.
        body: executes what is guarded, by a claim that was asked for at that time of
            `time.monotonic()`; what it raises is in what it returns.
        net: told what is held, where more than this one flow belongs to a call.

    Returns:
        What the flow returns.

    """
    net = Net() if net is None else net
    try:
        wish = next(flow)
        while True:
            try:
                match wish:
                    case Await():
                        answer: Any = _wait(store, wish)
                    case Execute(claim=claim):
                        answer = net.ran = body(claim, net.asked)
                    case Owe(command=command):
                        later.put(command)
                        answer = net.claim = None
                    case Look(address=address):
                        answer = store.look(address)
                    case Rest(time=rest):
                        time.sleep(rest / 1000)
                        answer = _clock()
                    case _:
                        net.asked = time.monotonic()
                        answer = store.perform(wish)  # type: ignore[arg-type]
                        net.note(wish, answer)  # type: ignore[arg-type]
            except BaseException as error:
                if net.copied():
                    flow.close()
                    raise
                wish = flow.throw(_spoken(error))
            else:
                wish = flow.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except BaseException:
        net.give_back(store, later)
        raise


async def adrive(
    flow: Generator[Wish, Any, R],
    store: AsyncStore,
    later: Later,
    body: Callable[[Claim, float], Awaitable[Ran]],
    net: Net | None = None,
) -> R:
    """Perform a flow from a coroutine: as `drive`, with `await`."""
    net = Net() if net is None else net
    known = getattr(store, "known", _unknown)
    try:
        wish = next(flow)
        while True:
            try:
                match wish:
                    case Await():
                        answer: Any = await _await(store, wish)
                    case Execute(claim=claim):
                        answer = net.ran = await body(claim, net.asked)
                    case Owe(command=command):
                        later.put(command)
                        answer = net.claim = None
                    case Look(address=address):
                        answer = await store.look(address)
                    case Rest(time=rest):
                        await asyncio.sleep(rest / 1000)
                        answer = _clock()
                    case _:
                        net.asked = time.monotonic()
                        answer = known(wish)
                        if answer is None:
                            answer = await shielded(store.perform(wish))  # type: ignore[arg-type]
                        net.note(wish, answer)  # type: ignore[arg-type]
            except BaseException as error:
                if isinstance(error, GeneratorExit) or net.copied():
                    flow.close()
                    raise
                wish = flow.throw(_spoken(error))
            else:
                wish = flow.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except BaseException:
        net.owe(later)  # a coroutine that is dropped can await nothing more
        raise


def _unknown(_: Wish) -> None:
    """For a store that knows nothing without asking."""


def _spoken(error: BaseException) -> BaseException:
    """An error that a store should not have raised, as one of a store."""
    if isinstance(error, Exception) and not isinstance(error, IdemguardError):
        spoken = StoreError(f"the store failed: {type(error).__name__}: {error}")
        spoken.__cause__ = error
        return spoken
    return error


# --- waiting -----------------------------------------------------------------------------------------


def _wait(store: Store, wish: Await) -> int:
    if context.coroutines.consumed_here(wish.holder, whole_thread=True):
        raise _never_to_come(wish)
    _not_for_itself(wish)
    # a queue in C: the lock inside an Event stays locked where Ctrl-C hits who sets it
    hint: queue.SimpleQueue[None] = queue.SimpleQueue()
    started = time.monotonic()
    unpark = store.park(wish.address, wish.holder, lambda: hint.put(None))
    try:
        hint.get(timeout=LONGEST if wish.timeout is None else wish.timeout / 1000)
    except queue.Empty:
        pass
    finally:
        unpark()
    return _since(started)


async def _await(store: AsyncStore, wish: Await) -> int:
    if context.coroutines.consumed_here(wish.holder):
        raise _never_to_come(wish)
    loop, started = asyncio.get_running_loop(), time.monotonic()
    hint = asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(hint.set)

    parking = asyncio.ensure_future(store.park(wish.address, wish.holder, wake))
    try:
        unpark = await shielded(parking)
    except asyncio.CancelledError:
        if parking.done() and not parking.cancelled() and parking.exception() is None:
            parking.result()()
        raise
    try:
        async with asyncio.timeout(LONGEST if wish.timeout is None else wish.timeout / 1000):
            await hint.wait()
    except TimeoutError:
        pass
    finally:
        unpark()
    return _since(started)


def _clock() -> int:
    return time.monotonic_ns() // 1_000_000


def _since(started: float) -> int:
    # rounded up: who has waited its time out must not be told that a rest of it is left
    return -int((started - time.monotonic()) * 1000 // 1)


def _never_to_come(wish: Await) -> ReentrantCallError:
    return ReentrantCallError(
        f"a stream of task {wish.address.fingerprint[:16]} would wait for another one of it, which "
        "this very thread or task consumes: neither could go on. Consume the first to its end, "
        "close it, or keep its chunks.",
        fingerprint=wish.address.fingerprint,
    )


def _not_for_itself(wish: Await) -> None:
    """What would never come, since only the one who waits could bring it about."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if not context.coroutines.need(loop, wish.holder):
        return
    raise ReentrantCallError(
        f"a plain call on an event loop would wait for task {wish.address.fingerprint[:16]}, which "
        "a coroutine of this very loop is executing: neither could go on. Call it from a coroutine with await, or through "
        "asyncio.to_thread().",
        fingerprint=wish.address.fingerprint,
    )


async def shielded(awaitable: Awaitable[R]) -> R:
    """Await to the end; a cancellation that arrives meanwhile is raised after it."""
    future = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            if future.cancelled():
                raise
            cancelled = error
        except BaseException:  # noqa: BLE001 - raised by `result` below, or dropped for the cancellation
            break
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # it was looked at, so that nobody warns of it
        raise cancelled
    return future.result()


def need_asyncio() -> asyncio.AbstractEventLoop:
    """The running loop.

    Raises:
        ConfigurationError: there is none of asyncio's.

    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            "a guarded coroutine needs asyncio's event loop; under trio, call a guarded plain "
            "function through trio.to_thread.run_sync() instead"
        ) from None

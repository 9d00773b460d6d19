"""Who waits in this process, and how they are hinted at."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemguard.record import Address


class Waiter:
    """One call that waits; it is woken once, and then waits no longer."""

    __slots__ = ("holder", "wake")

    def __init__(self, holder: str | None, wake: Callable[[], None]) -> None:
        self.holder = holder
        self.wake = wake


class WaitingRoom:
    """The waiters of one process, by address, in the order in which they came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[Address, dict[Waiter, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def enter(self, address: Address, waiter: Waiter) -> None:
        """Wait from now on."""
        with self._lock:
            self._waiters.setdefault(address, {})[waiter] = None

    def unpark(self, address: Address, waiter: Waiter) -> Callable[[], None]:
        """What ends the waiting of one waiter."""

        def leave() -> None:
            self.leave(address, waiter)

        return leave

    def leave(self, address: Address, waiter: Waiter) -> bool:
        """Wait no longer; whether it was still waiting."""
        with self._lock:
            here = self._waiters.get(address)
            if here is None or waiter not in here:
                return False
            del here[waiter]
            if not here:
                del self._waiters[address]
            return True

    def waiting(self) -> dict[Address, set[str | None]]:
        """What is waited for: by address, the executions."""
        with self._lock:
            return {
                address: {waiter.holder for waiter in here}
                for address, here in self._waiters.items()
            }

    def call(self, address: Address, whom: str | None) -> None:
        """Hint at "all" who wait there, at the "one" who came first, or at nobody."""
        if whom is None or address not in self._waiters:
            return
        with self._lock:
            here = self._waiters.get(address, {})
            called = list(here) if whom == "all" else list(here)[:1]
            for waiter in called:
                del here[waiter]
            if not here:
                self._waiters.pop(address, None)
        for waiter in called:
            waiter.wake()

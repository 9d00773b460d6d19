"""Who waits in this process, and how they are hinted at.

PYTEST_DONT_REWRITE
"""

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
    """The waiters of one process, by address, in the order in which they came.

    A signal handler, or a finaliser, may come in between in the same thread, at any moment.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiters: dict[Address, dict[Waiter, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def enter(self, address: Address, waiter: Waiter) -> None:
        """Wait from now on."""
        with self._lock:
            here = None
            while here is None or self._waiters.get(address) is not here:
                here = self._waiters.setdefault(address, {})
                here[waiter] = None

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
            self._tidy(address)
            return True

    def waiting(self) -> dict[Address, set[str | None]]:
        """What is waited for: by address, the executions."""
        with self._lock:
            return {
                address: {waiter.holder for waiter in here.copy()}
                for address, here in self._waiters.copy().items()
            }

    def number(self, address: Address) -> int:
        """How many wait there."""
        return len(self._waiters.get(address, ()))

    def call(self, address: Address, whom: str | None) -> None:
        """Hint at "all" who wait there, at the "one" who came first, or at nobody."""
        if whom is None or address not in self._waiters:
            return
        with self._lock:
            here = self._waiters.get(address, {})
            called = []
            for waiter in here.copy():
                if here.pop(waiter, waiter) is None:
                    called.append(waiter)
                    if whom == "one":
                        break
            self._tidy(address)
        for waiter in called:
            waiter.wake()

    def _tidy(self, address: Address) -> None:
        if not self._waiters.get(address, True):
            del self._waiters[address]

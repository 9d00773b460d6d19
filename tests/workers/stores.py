"""A store that hands everything on to a real one, counts it, and can be made to fail."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from idemguard.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemguard.claim import Answer, Command
    from idemguard.record import Address, Execution, Record
    from idemguard.stores import Store, Unpark
    from idemguard.windows import Window


class Watched:
    """Counts commands; fails while it is `down`, or where `fails` says so.

    Args:
        store: the real one.
        fails: whether this command is not performed.
        after: called with every command that was performed, before its answer is given.

    """

    def __init__(
        self,
        store: Store,
        *,
        fails: Callable[[Command], bool] = lambda _: False,
        after: Callable[[Command], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._fails = fails
        self._after = after
        self._lock = threading.Lock()
        self.seen: list[Command] = []
        self.down = False

    def names(self) -> list[str]:
        """The kinds of the commands, in their order."""
        return [type(command).__name__ for command in self.seen]

    def perform(self, command: Command) -> Answer:
        with self._lock:
            self.seen.append(command)
        if self.down or self._fails(command):
            raise StoreUnavailableError("out of order")
        answer = self._store.perform(command)
        self._after(command)
        return answer

    def park(self, address: Address, holder: str | None, wake: Callable[[], None]) -> Unpark:
        return self._up().park(address, holder, wake)

    def look(self, address: Address) -> tuple[Record, int]:
        return self._up().look(address)

    def addresses(self, namespace: str, prefix: str) -> list[Address]:
        return self._up().addresses(namespace, prefix)

    def overdue(self, namespace: str) -> list[Address]:
        return self._up().overdue(namespace)

    def lines(self, namespace: str, since: int, until: int) -> Iterator[Execution]:
        return self._up().lines(namespace, since, until)

    def windows(self, namespace: str, since: int, until: int) -> list[Window]:
        return self._up().windows(namespace, since, until)

    def secret(self, namespace: str) -> bytes:
        return self._up().secret(namespace)

    def tend(self, window_retention: int | None) -> None:
        self._up().tend(window_retention)

    def close(self) -> None:
        self._store.close()

    def _up(self) -> Any:
        if self.down:
            raise StoreUnavailableError("out of order")
        return self._store

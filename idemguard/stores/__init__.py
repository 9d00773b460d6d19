"""What a store is, and which one a URL names.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from idemguard.errors import ConfigurationError

if TYPE_CHECKING:
    from idemguard.claim import Answer, Command
    from idemguard.record import Address, Execution, Record
    from idemguard.windows import Window

Unpark: TypeAlias = Callable[[], None]

_SERVERS = (
    "redis", "rediss", "unix", "valkey", "valkeys",
    *(f"{name}+{kind}" for kind in ("cluster", "sentinel")
      for name in ("redis", "rediss", "valkey", "valkeys")),
)  # fmt: skip


@runtime_checkable
class Store(Protocol):
    """Performs one command on one record, atomically; everything else reads.

    A store of your own implements these methods, passes `tests/conformance`, and is given
    to `configure(store=...)`. Every method may raise `StoreError` (the store answers wrongly)
    or `StoreUnavailableError` (it does not answer), and nothing else. Times are ms of the
    store's own clock.
    """

    def perform(self, command: Command) -> Answer:
        """Do in one atomic step: read the record, apply `transition` to it and book its
        `entries` in the windows, write both; then hint at those who `wakes` names.
        """
        ...

    def park(self, address: Address, holder: str | None, wake: Callable[[], None]) -> Unpark:
        """Call `wake` once when it may be worth while to ask again; at once where `waits` is false.

        Args:
            address: whose record.
            holder: id of the execution that is waited for; None where nobody executes.
            wake: called from any thread; must not block.

        Returns:
            A function that ends the waiting, before or after the call of `wake`.

        """
        ...

    def look(self, address: Address) -> tuple[Record, int]:
        """The record as time has left it, and the store's clock."""
        ...

    def addresses(self, namespace: str, prefix: str) -> list[Address]:
        """Where there are records whose fingerprint starts so, oldest first."""
        ...

    def overdue(self, namespace: str) -> list[Address]:
        """Where executions stand open whose lease is past."""
        ...

    def lines(self, namespace: str, since: int, until: int) -> Iterator[Execution]:
        """The executions that started from `since` to before `until`, oldest first."""
        ...

    def windows(self, namespace: str, since: int, until: int) -> list[Window]:
        """The windows that overlap the time from `since` to before `until`."""
        ...

    def secret(self, namespace: str) -> bytes:
        """The namespace's secret for digests, made at the first call and never changed."""
        ...

    def tend(self, window_retention: int | None) -> None:
        """Remove what is over, roll windows up to hours; None keeps windows for ever.

        A store need not do it more often than once a minute.
        """
        ...

    def close(self) -> None:
        """Give back what the store holds open; it opens anew when it is used again."""
        ...


class Client(Protocol):
    """A client of a server: redis-py's or valkey-py's, sync or asyncio."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command."""
        ...


class AsyncStore(Protocol):
    """The part of a store that calls on an event loop use.

    It may have a method `known(command) -> Answer | None` besides: the answer where it needs
    no I/O, so that of many calls that wait for one task each is answered at once.
    """

    def perform(self, command: Command) -> Awaitable[Answer]:
        """As `Store.perform`; goes on to its end although its awaiter is cancelled."""
        ...

    def park(
        self, address: Address, holder: str | None, wake: Callable[[], None]
    ) -> Awaitable[Unpark]:
        """As `Store.park`."""
        ...

    def look(self, address: Address) -> Awaitable[tuple[Record, int]]:
        """As `Store.look`."""
        ...


def as_store(given: object) -> Store:
    """The store that somebody means.

    Args:
        given: a store, the URL of one, or a client of a server.

    Raises:
        ConfigurationError: it is none of these, or one that cannot be used.

    """
    if isinstance(given, str):
        return open_store(given)
    if isinstance(given, Store) and not isinstance(given, type):
        return given
    kinds = (given if isinstance(given, type) else type(given)).__mro__
    if any(kind.__module__.partition(".")[0] in ("redis", "valkey") for kind in kinds):
        from idemguard.stores.redis import RedisStore  # noqa: PLC0415 - loaded when needed

        return RedisStore(given)
    raise ConfigurationError(
        "store= takes a URL, a store, or a client of redis-py or valkey-py, and "
        f"{type(given).__name__} is none of these"
    )


def open_store(url: str) -> Store:
    """The store that a URL names.

    Args:
        url: `memory://` (one per process), `sqlite:///relative.db`, `sqlite:////absolute.db`,
            `redis://`, `rediss://`, `unix://`, `valkey://`, `valkeys://`,
            `redis+cluster://host:port,host:port`,
            `redis+sentinel://host:port,host:port/master-name`.

    Raises:
        ConfigurationError: no such kind of store, or a path that cannot be used.

    """
    if not isinstance(url, str):
        raise ConfigurationError(f"store= takes a URL or a store, not {type(url).__name__}")
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "memory":
        if rest:
            raise ConfigurationError(f"store={url!r}: memory:// takes nothing behind it")
        from idemguard.stores.memory import process_store  # noqa: PLC0415 - loaded when needed

        return process_store()
    if separator and scheme == "sqlite":
        from idemguard.stores.sqlite import SqliteStore  # noqa: PLC0415 - loaded when needed

        return SqliteStore.from_url(url)
    if separator and scheme in _SERVERS:
        from idemguard.stores.redis import RedisStore  # noqa: PLC0415 - loaded when needed

        return RedisStore(url)
    raise ConfigurationError(
        f"store={without_password(url)!r} is no store that idemguard knows: "
        "memory://, sqlite:///relative.db or sqlite:////absolute.db, or a server's: "
        f"{', '.join(f'{name}://' for name in _SERVERS)}"
    )


def without_password(url: str) -> str:
    """A URL as it may be shown."""
    head, at, tail = url.rpartition("@")
    scheme, separator, _ = head.partition("://")
    shown = f"{scheme}://***@{tail}" if at and separator else url
    return re.sub(r"((?:^|[?&])\w*password=)[^&#\s]+", r"\1***", shown)

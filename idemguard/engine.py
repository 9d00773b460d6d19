"""A store that is in use, and all that belongs to it: opened at the first call, not before.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from idemguard import config
from idemguard.claim import Sweep
from idemguard.context import placed
from idemguard.errors import StoreError
from idemguard.forks import on_fork
from idemguard.heart import Backlog, heart_of
from idemguard.record import Address, Status
from idemguard.stores.bridge import InThread
from idemguard.windows import executions, percentile, total

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemguard.config import Settings
    from idemguard.stores import AsyncStore, Store

TEND = 60.0  # seconds between two removals of what is over
KNOWN = 20  # executions before `max_run="auto"` goes by them
LONG = 3_600_000  # ms: the longest run before that
LATE = 3_600_000  # ms after its lease, nobody expects a frozen execution back
SPAN = 86_400_000  # ms of run times that it goes by


class Engine:
    """What a guard works with.

    Args:
        settings: checked.

    Raises:
        ConfigurationError: there is no store to use.

    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store: Store = config.store(settings)
        self.own_namespace = config.namespace(settings)
        self.price = config.price(settings)
        self.limit = config.limit(settings)
        self.digests = settings.field_digests is not False
        self.backlog = Backlog(self.store)
        from idemguard.telemetry import Telemetry  # noqa: PLC0415 - the first call loads the API

        self.telemetry = Telemetry(settings, priced=self.price is not None)
        self._aio: AsyncStore | None = None
        self._tending = self._closed = False
        self._lock = threading.Lock()
        self._usual: dict[str, tuple[float, int]] = {}
        on_fork(self)

    def forked(self) -> None:
        """A child tends anew."""
        self._lock = threading.Lock()
        self._tending = False

    @property
    def namespace(self) -> str:
        """Where its records lie now: a test session puts each test's apart."""
        return placed(self.own_namespace)

    @property
    def aio(self) -> AsyncStore:
        """The store for calls on an event loop."""
        if self._aio is None:
            with self._lock:
                if self._aio is None:
                    self._aio = getattr(self.store, "aio", None) or InThread(self.store)
        return self._aio

    def tend(self) -> None:
        """Have what is over removed from now on, beside the calls."""
        if self._tending:
            return
        self._tending, self._closed = True, False
        kept = self.settings.window_retention
        retention = None if kept is None else config.milliseconds("window_retention", kept, least=1)
        heart_of(self.store).after(0.2, _tend(weakref.ref(self), retention))

    def close(self) -> None:
        """Tell the store what is owed to it, and close it; it opens anew at the next call."""
        self._closed, self._tending = True, False
        self.backlog.settle()
        self.store.close()

    @property
    def closed(self) -> bool:
        """Whether it is not in use, so that nothing may open it again by itself."""
        return self._closed

    def usual_run(self, task_type: str) -> int:
        """How long executions of a task type may take: 3 times the p95 of the last day, ms."""
        known = self._usual.get(task_type)
        if known is not None and time.monotonic() - known[0] < TEND:
            return known[1]
        longest = LONG
        try:
            now = self.store.look(Address(self.namespace, ""))[1]
            windows = self.store.windows(self.namespace, now - SPAN, now + 1)
            counts = total(w for w in windows if w.key.task_type == task_type)
            if executions(counts) >= KNOWN and (usual := percentile(counts, 0.95)) is not None:
                longest = 3 * usual
        except StoreError:
            pass  # then the default holds
        self._usual[task_type] = (time.monotonic(), longest)
        return longest


class Source(Protocol):
    """Where settings and a store come from: a guard."""

    @property
    def settings(self) -> Settings:
        """What is set."""
        ...

    @property
    def engine(self) -> Engine:
        """The store in use."""
        ...


class _Defaults:
    """What counts where nobody has configured anything."""

    def __init__(self) -> None:
        self.settings = config.settings({})
        self._lock = threading.Lock()
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        with self._lock:
            if self._engine is None:
                self._engine = Engine(self.settings)
        return self._engine


_default: list[Source] = []
_first = threading.Lock()


def use(source: Source) -> None:
    """From now on, this counts where no guard is named."""
    _default[:] = [source]


def source() -> Source:
    """The configured guard; with nothing configured, one of defaults."""
    if not _default:
        with _first:
            if not _default:
                use(_Defaults())
    return _default[0]


def _settle(store: Store, address: Address) -> None:
    """What is lost is told so before its record ends, but not while it may still come back."""
    record, now = store.look(address)
    if any(line.status is Status.OPEN and line.until + LATE <= now for line in record.lines):
        store.perform(Sweep(address))


def _tend(engine: weakref.ref[Engine], retention: int | None) -> Callable[[], float | None]:
    def upkeep(store: Store, namespace: str) -> None:
        with suppress(StoreError):  # a store that is down is told of by the calls
            for address in store.overdue(namespace):
                _settle(store, address)
            store.tend(retention)

    def tend() -> float | None:
        there = engine()
        if there is None or there.closed:
            return None
        # not on the thread that renews: it may take long, and renewals must not wait for it
        arguments = (there.store, there.namespace)
        threading.Thread(
            target=upkeep, args=arguments, name="idemguard-upkeep", daemon=True
        ).start()
        return TEND

    return tend

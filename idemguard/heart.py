"""What goes on beside the calls: renewals, commands that are owed, upkeep.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from idemguard import log
from idemguard.claim import Complete, Release, Renewed, Withdraw
from idemguard.context import coroutines
from idemguard.errors import StoreError, StoreUnavailableError
from idemguard.forks import on_fork
from idemguard.guard import Pause, hold
from idemguard.record import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from idemguard.claim import Command
    from idemguard.context import Current
    from idemguard.guard import Policy, Wish
    from idemguard.stores import Store

THREADS = 8  # of one heart, at most
LATE = 0.05  # seconds that a step may be late before another thread helps
SPARE = 5.0  # seconds with nothing to do, and one ends that is not needed
MANY = 1000  # entries with nothing to do are worth a removal
OWED = 2000  # commands kept for a store that is down: an unguarded execution owes two
PATIENT = 6  # times that a step may be refused before it is dropped: half a minute
FIRST, LONGEST = 0.5, 30.0  # seconds until they are tried (again)


class Heart:
    """A heap of what is due and a daemon thread; started with the first entry, anew after a fork.

    Where a step takes so long that the next is late (a server far away, or one that hangs), a
    few more threads help until nothing is due.
    """

    def __init__(self) -> None:
        self._begin()
        on_fork(self)

    def _begin(self) -> None:
        self._due: list[tuple[float, int, Callable[[], float | None]]] = []
        self._numbers = itertools.count()
        # callers take the bare lock: a Condition's stays locked where Ctrl-C hits who takes it;
        # one that lets its own thread in again, since a finaliser may run right inside
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._threads = 0
        self.dead = 0  # entries that will have nothing to do

    def forked(self) -> None:
        """The parent's claims are the parent's to renew."""
        self._begin()

    def after(self, seconds: float, act: Callable[[], float | None]) -> None:
        """Call `act` after so many seconds, and again after as many as it returns; None: no more."""
        with self._lock:
            due = time.monotonic() + seconds
            first = not self._due or due < self._due[0][0]
            heapq.heappush(self._due, (due, next(self._numbers), act))
            if self.dead > MANY and 2 * self.dead > len(self._due):
                self._due = [
                    entry for entry in self._due if not getattr(entry[2], "stopped", False)
                ]
                heapq.heapify(self._due)
                self.dead = 0
            if not self._threads:
                self._start()
            elif first:
                self._changed.notify()

    def _start(self) -> None:
        threading.Thread(target=self._run, name="idemguard-heart", daemon=True).start()
        self._threads += 1

    def _run(self) -> None:
        while (act := self._next()) is not None:
            self._act(act)

    def _next(self) -> Callable[[], float | None] | None:
        with self._changed:
            since = time.monotonic()
            while not self._due or self._due[0][0] > time.monotonic():
                wait = min(self._due[0][0] - time.monotonic(), SPARE) if self._due else SPARE
                if time.monotonic() - since > SPARE and (self._threads > 1 or not self._due):
                    self._threads -= 1
                    return None
                self._changed.wait(wait)
            act = heapq.heappop(self._due)[2]
            late = self._due and self._due[0][0] < time.monotonic() - LATE
            if late and self._threads < THREADS:
                self._start()
            return act

    def _act(self, act: Callable[[], float | None]) -> None:
        try:
            again = act()
            if again is not None:
                self.after(again, act)
        except BaseException as error:  # noqa: BLE001 - one entry's trouble is not the others'
            log.logger.error("a step beside the calls failed: %s", log.place(error))


heart = Heart()  # for what belongs to no store
_hearts: WeakKeyDictionary[Store, Heart] = WeakKeyDictionary()
_making = threading.Lock()


def heart_of(store: Store) -> Heart:
    """The heart of one store, so that none that hangs holds up the renewals of another."""
    try:
        if (found := _hearts.get(store)) is not None:
            return found
        with _making:
            return _hearts.setdefault(store, Heart())
    except TypeError:  # a store that cannot be referred to weakly, or compares by value
        return heart


def _forked() -> None:
    global _making  # noqa: PLW0603 - a thread of the parent may have held it
    _making = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Beat:
    """Renews one claim while its body runs.

    Args:
        execution: whose; its spending so far goes with every renewal.
        policy: lease and longest run.
        store: where.
        max_run: tells the longest run where the policy leaves it to what is known, ms.

    """

    __slots__ = ("_execution", "_flow", "_max_run", "_policy", "_store", "stopped")

    def __init__(
        self, execution: Current, policy: Policy, store: Store, max_run: Callable[[], int]
    ) -> None:
        # weakly: where Ctrl-C hits before its body has begun, nobody is there to stop this
        self._execution: Callable[[], Current | None] = weakref.ref(execution)
        self._policy = policy
        self._store = store
        self._max_run = max_run
        self._flow: Generator[Wish, Any, None] | None = None
        self.stopped = False

    def start(self) -> None:
        """The first renewal is due at a third of the lease."""
        heart_of(self._store).after(self._policy.lease / 3000, self)

    def __call__(self) -> float | None:
        """Renew; the seconds until the next renewal, None when there is none to come."""
        execution = self._execution()
        if self.stopped or execution is None or coroutines.stranded(execution.execution_id):
            return None
        if self._flow is None:
            self._flow = hold(execution.claim, self._policy, self._max_run(), self._lost)
            next(self._flow)
        try:
            wish = self._flow.send(execution.spent())
            while not isinstance(wish, Pause):
                wish = self._tell(execution, wish)
        except StopIteration:
            return None
        return wish.time / 1000

    def stop(self) -> None:
        """The body has ended."""
        self.stopped = True
        heart_of(self._store).dead += 1

    def _lost(self) -> None:
        if (execution := self._execution()) is not None:
            execution.lose()

    def _tell(self, execution: Current, wish: Wish) -> Wish:
        assert self._flow is not None
        asked = time.monotonic()
        try:
            answer = self._store.perform(wish)  # type: ignore[arg-type]
        except StoreError as error:
            return self._flow.throw(error)
        except Exception as error:  # noqa: BLE001 - of a store that raises what it should not
            return self._flow.throw(StoreError(str(error)))
        if isinstance(answer, Renewed):
            # less than a lease is left where max_run ends sooner
            execution.renewed = asked - (self._policy.lease - answer.left) / 1000
        return self._flow.send(answer)


class Backlog:
    """Commands that a store could not be told; told when it is back, in their order.

    Args:
        store: which.

    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._owed: deque[tuple[Command, float]] = deque()
        self._lock = threading.RLock()
        self._trying = False
        self._refused = 0  # how often the first step that is owed was
        self._pause = FIRST
        on_fork(self)

    def forked(self) -> None:
        """What the parent owes is the parent's to tell."""
        self._lock = threading.RLock()
        self._owed = deque()
        self._trying = False

    def __len__(self) -> int:
        return len(self._owed)

    def put(self, command: Command) -> None:
        """Keep a command; of more than `OWED`, the oldest is dropped with a warning."""
        with self._lock:
            if len(self._owed) == OWED:
                self._owed.popleft()
                log.warn("owed", "the store is down for long: over %d steps are owed to it, the "
                         "oldest are dropped from the ledger", OWED)  # fmt: skip
            self._owed.append((command, time.monotonic()))
            if self._trying:
                return
            self._trying, self._pause = True, FIRST
        heart_of(self._store).after(self._pause, self._try)
        _at_exit(self)

    def _try(self) -> float | None:
        if self.settle():
            return None
        self._pause = min(2 * self._pause, LONGEST)
        return self._pause

    def settle(self) -> bool:
        """Tell the store what is owed; whether all was told."""
        while True:
            with self._lock:
                if not self._owed:
                    self._trying = False
                    return True
                owed = self._owed[0]
            try:
                self._store.perform(self._late(*owed))
            except StoreUnavailableError:
                return False
            except Exception as error:  # noqa: BLE001 - a full disk, or it will never be taken
                self._refused += 1
                if self._refused < PATIENT:
                    return False
                log.warn("owed", "the store does not take a step that is owed to it: %s",
                         log.words(error))  # fmt: skip
            self._refused = 0
            with self._lock:
                if self._owed and self._owed[0] is owed:
                    self._owed.popleft()

    def _late(self, command: Command, since: float) -> Command:
        """An end that is told late says how late, and an unguarded one when it had started."""
        if not isinstance(command, (Complete, Release)):
            return replace(command, brief=True) if isinstance(command, Withdraw) else command
        ago = round((time.monotonic() - since) * 1000)
        claim = command.claim
        if claim.cause is Cause.UNGUARDED:
            now = self._store.look(claim.address)[1]
            claim = claim._replace(started=now - ago + claim.started)
        return replace(command, claim=claim, ago=ago, brief=True)


_backlogs: dict[int, Backlog] = {}


def _at_exit(backlog: Backlog) -> None:
    if not _backlogs:
        atexit.register(_settle_all)
    _backlogs[id(backlog)] = backlog


def _settle_all() -> None:
    for backlog in list(_backlogs.values()):
        backlog.settle()

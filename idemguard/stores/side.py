"""Who waits in a process or on an event loop, and what they are told by calls and by hints.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from idemguard.claim import Complete, Renew, Renewed, waits
from idemguard.errors import StoreError, StoreUnavailableError
from idemguard.heart import heart
from idemguard.stores import wire
from idemguard.stores.sharing import Company

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from idemguard.claim import Answer, Begin, Command
    from idemguard.record import Address, Record
    from idemguard.stores.room import Waiter
    from idemguard.stores.sharing import Flight, Shares

LEAST = 50  # ms between two looks whether the leader was heard
BOOKED = 0.05  # seconds until the calls that others spoke for are booked


class Books:
    """Calls that were answered without the server, until they are booked there together.

    Args:
        tell: books what several calls of one task came to.

    """

    def __init__(self, tell: Callable[[Address, int, Shares], None]) -> None:
        self._lock = threading.RLock()
        self._telling = threading.RLock()  # who wants all booked waits for what is on its way
        self._tell = tell
        self._owed: dict[Address, tuple[int, Shares]] = {}
        self._due = False
        self._ends = False  # it is seen to that all is booked when the process ends

    def add(self, ask: Begin, reused: bool) -> None:
        """One call: that it found the claim, or reused the result."""
        name = wire.label(ask.caller.task_type, ask.caller.agent)
        with self._lock:
            self._owe(ask.address, ask.retention, {name: [not reused, reused]})
            if self._due:
                return
            self._due = True
        if not self._ends:
            self._ends = True
            self._see_to_the_end()
        heart.after(BOOKED, self._later)

    def _see_to_the_end(self) -> None:
        # a process that multiprocessing has forked ends without what `atexit` knows
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(self, _settle, args=(ref(self),), exitpriority=10)

    def _owe(self, address: Address, retention: int, shares: Shares) -> None:
        _, there = self._owed.setdefault(address, (retention, {}))
        for name, (found, reused) in shares.items():
            counts = there.setdefault(name, [0, 0])
            counts[0] += found
            counts[1] += reused

    def _later(self) -> float | None:
        pause = BOOKED
        try:
            self.settle()
        except StoreUnavailableError:
            pause = 1.0
        except StoreError:
            pass  # it will not be taken
        with self._lock:
            self._due = bool(self._owed)
            return pause if self._due else None

    def settle(self) -> None:
        """Book all that there is."""
        with self._telling:
            with self._lock:
                owed, self._owed = self._owed, {}
            try:
                while owed:
                    address, (retention, shares) = next(iter(owed.items()))
                    try:
                        self._tell(address, retention, shares)
                    except StoreUnavailableError:
                        raise
                    except StoreError:
                        del owed[address]
                        raise
                    del owed[address]
            finally:
                with self._lock:
                    for address, (retention, shares) in owed.items():
                        self._owe(address, retention, shares)


def _settle(books: ref[Books]) -> None:
    there = books()
    if there is not None:
        with suppress(StoreError):
            there.settle()


def _local() -> int:
    return time.monotonic_ns() // 1_000_000


class Side:
    """What the calls of one process, or of one event loop, share, under one lock.

    Args:
        name: of this process, in hints.
        books: where calls are booked that were answered here.

    """

    def __init__(self, name: str, books: Books) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.company = Company(books.add)
        self._addresses: dict[str, Address] = {}  # by channel

    # --- asking ---------------------------------------------------------------------------------------

    def known(self, ask: Begin) -> Answer | None:
        """The answer where it is known."""
        if ask.address not in self.company.known:
            return None
        with self.lock:
            return self.company.answer(ask, _local())

    def approach(self, ask: Begin, wake: Callable[[], None]) -> tuple[Answer | None, Flight, bool]:
        """The answer where it is known; else a flight, and whether it is the asker's own."""
        with self.lock:
            answer = self.company.answer(ask, _local())
            if answer is not None:
                return answer, None, False  # type: ignore[return-value]
            flight, mine = self.company.flight(ask)
            if not mine:
                flight.joiners.append(wake)
            return None, flight, mine

    def land(self, ask: Begin, flight: Flight, answer: Answer) -> None:
        """The asker's own flight has brought an answer."""
        with self.lock:
            self.company.land(ask, flight, answer, _local())
        self._landed(ask, flight)

    def fail(self, ask: Begin, error: BaseException) -> None:
        """The asker gives up, at whatever moment; nobody goes on waiting for its flight."""
        with self.lock:
            flight = self.company.fail(ask, error)
        if flight is not None:
            self._landed(ask, flight)

    def _landed(self, ask: Begin, flight: Flight) -> None:
        for wake in flight.joiners:
            wake()
        with self.lock:
            self.company.over(ask, flight)

    def joined(self, ask: Begin, flight: Flight) -> Answer | None:
        """What somebody else's flight has brought; None: ask again.

        Raises:
            StoreError: what that one failed with.

        """
        if isinstance(flight.error, StoreError):
            raise copy.copy(flight.error)
        with self.lock:
            return self.company.joined(ask, flight, _local())

    def told(self, command: Command, reply: list[Any], answer: Answer) -> None:
        """A command of this process was answered: hint at those who wait here."""
        address = command.address
        if address not in self.company.known:
            return
        if isinstance(command, Renew):
            if isinstance(answer, Renewed):
                with self.lock:
                    self.company.shared(address).beat(command.claim.id, answer.left, _local())
            return
        whom = wire.hints_at(command, reply)
        if whom is None:
            return
        replay = wire.kept_by(command, reply) if isinstance(command, Complete) else None
        with self.lock:
            shared = self.company.shared(address)
            if replay is None:
                shared.forget()
            else:
                shared.keep(replay, shared.payload, _local())
        self.company.room.call(address, whom)

    # --- waiting --------------------------------------------------------------------------------------

    def enter(self, address: Address, waiter: Waiter) -> str:
        """Wait from now on; the channel to listen to."""
        channel = wire.keys(address)[0]
        with self.lock:
            shared = self.company.shared(address)
            self._addresses[channel] = address
            self.company.room.enter(address, waiter)
            # who only looks on goes by the lease that it reads
            begins = bool(shared.period) and not shared.minded
            shared.minded |= begins
        if begins:
            heart.after(max(shared.period, LEAST) / 1000, partial(self._mind, address))
        return channel

    def _mind(self, address: Address) -> float | None:
        """A hint may be lost on its way: have the waiters ask where no renewal is heard either."""
        with self.lock:
            shared = self.company.known.get(address)
            if shared is None or not self.company.room.number(address):
                if shared is not None:
                    shared.minded = False
                return None
            silence = shared.silence(_local())
        if not silence:
            self.company.room.call(address, "all")
            silence = shared.period
        return max(silence, LEAST) / 1000

    def heard(self, address: Address) -> int:
        """How many hints of a task there were."""
        with self.lock:
            return self.company.shared(address).heard

    def watched(self, address: Address, holder: str | None) -> bool:
        """Whether the end of this execution would be heard."""
        with self.lock:
            shared = self.company.shared(address)
            return shared.watches(holder, _local())

    def looked(self, address: Address, holder: str | None, record: Record, now: int) -> bool:
        """The record was read; whether there is nothing to wait for."""
        with self.lock:
            shared = self.company.shared(address)
            shared.look(record, now, _local())
        return not waits(record, holder, now)

    # --- what is heard --------------------------------------------------------------------------------

    def stands(self, channel: str, *, anew: bool) -> None:
        """Hints arrive from now on."""
        address = self._addresses.get(channel)
        if address is None:
            return
        with self.lock:
            shared = self.company.shared(address)
            shared.listening = True
            if anew:
                shared.forget()
        if anew:
            self.company.room.call(address, "all")

    def broken(self, channels: Iterable[str]) -> None:
        """Hints arrive no longer."""
        with self.lock:
            for channel in channels:
                address = self._addresses.get(channel)
                shared = None if address is None else self.company.known.get(address)
                if shared is not None:
                    shared.listening = shared.watched = False

    def idle(self) -> list[str]:
        """The channels that nobody waits at."""
        with self.lock:
            channels = [wire.keys(address)[0] for address in self.company.idle()]
            for channel in channels:
                self._addresses.pop(channel, None)
            return channels

    def hint(self, channel: str, text: str) -> tuple[Address, str] | None:
        """A hint was heard: at which task, and whom; None: there is nothing to do."""
        address = self._addresses.get(channel)
        what, *about = text.split(" ")
        if address is None or about[-1:] == [self.name]:
            return None
        with self.lock:
            shared = self.company.known.get(address)
            if shared is None:
                return None
            if what == "beat":
                holder, left, _ = text[5:].rsplit(" ", 2)
                shared.beat(holder, int(left), _local())
                return None
            shared.forget()
            return address, what

    def many(self, address: Address) -> bool:
        """Whether it pays to read the record for all who wait there."""
        return self.company.room.number(address) > 1

    def call(self, address: Address, whom: str) -> None:
        """Wake those who wait."""
        self.company.room.call(address, whom)

    def leave_all(self) -> None:
        """Wake everybody: the store is closed, and whoever waits asks again."""
        with self.lock:
            for shared in self.company.known.values():
                shared.listening = False
                shared.forget()
        for address in self.company.room.waiting():
            self.call(address, "all")

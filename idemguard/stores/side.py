"""Who waits in a process or on an event loop, and what they are told by calls and by hints."""

from __future__ import annotations

import copy
import threading
import time
from typing import TYPE_CHECKING, Any

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
    from idemguard.stores.sharing import Flight

BOOKED = 0.05  # seconds until the calls that others spoke for are booked


class Books:
    """Calls that were answered without the server, until they are booked there together.

    Args:
        tell: books what several calls of one task came to.

    """

    def __init__(self, tell: Callable[[Address, int, dict[str, list[int]]], None]) -> None:
        self._lock = threading.RLock()
        self._tell = tell
        self._owed: dict[Address, tuple[int, dict[str, list[int]]]] = {}
        self._due = False

    def add(self, ask: Begin, reused: bool) -> None:
        """One call: that it found the claim, or reused the result."""
        name = wire.label(ask.caller.task_type, ask.caller.agent)
        with self._lock:
            _, shares = self._owed.setdefault(ask.address, (ask.retention, {}))
            shares.setdefault(name, [0, 0])[reused] += 1
            if self._due:
                return
            self._due = True
        heart.after(BOOKED, self._later)

    def _later(self) -> float | None:
        try:
            self.settle()
        except StoreUnavailableError:
            return 1.0
        except StoreError:
            return None  # it will not be taken
        return None

    def settle(self) -> None:
        """Book all."""
        while True:
            with self._lock:
                if not self._owed:
                    self._due = False
                    return
                address, (retention, shares) = self._owed.popitem()
            try:
                self._tell(address, retention, shares)
            except StoreUnavailableError:
                with self._lock:
                    self._owed.setdefault(address, (retention, shares))
                raise


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
        for wake in flight.joiners:
            wake()

    def fail(self, ask: Begin, flight: Flight, error: BaseException) -> None:
        """It has brought none."""
        with self.lock:
            self.company.fail(ask, flight, error)
        for wake in flight.joiners:
            wake()

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
            self.company.shared(address)
            self._addresses[channel] = address
        self.company.room.enter(address, waiter)
        return channel

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

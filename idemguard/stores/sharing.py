"""What the calls of one process, or of one event loop, tell each other of a task that they wait for.

Pure: no I/O, no clock. Of many waiters one asks the server, and the others share what it learns:
that somebody executes, until when, and the result in the end. A claim is never shared. Local times
are ms of the process's own clock; what the server said of its clock stays in the server's.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from idemguard.claim import Claimed, Conflict, InFlight, Replay, Unknown, usable
from idemguard.record import Cause, Mode
from idemguard.stores.room import WaitingRoom

if TYPE_CHECKING:
    from idemguard.claim import Answer, Begin
    from idemguard.record import Address, Claim, Record

LATE = 100  # ms that a renewal may come late before the waiters ask
REMEMBERED = 5_000  # ms that a result is handed to those who waited for it

Shares: TypeAlias = dict[str, list[int]]  # by label: calls that found a claim, and that reused


class Shared:
    """What is known of one task."""

    __slots__ = (
        "doubled",
        "heard",
        "holder",
        "lease_ends",
        "listening",
        "minded",
        "payload",
        "period",
        "quiet_until",
        "replay",
        "replay_over",
        "runs",
        "told",
        "watched",
    )

    def __init__(self) -> None:
        self.listening = False  # hints of this task arrive
        self.heard = 0  # how many hints of it did
        self.holder: Claim | None = None  # who executes it, as far as is known
        self.watched = False  # its end would be heard
        self.lease_ends = self.quiet_until = 0  # local
        self.period = 0  # of renewals, ms; 0: nobody here has asked
        self.minded = False  # it is seen to that renewals are heard
        self.doubled: str | None = None  # id of the leader that has a fallback beside it
        self.payload: str | None = None  # digest of those who were told of the holder
        self.runs = 0
        self.told = (0, 0)  # one moment by the server's clock, and the local one
        self.replay: Replay | None = None
        self.replay_over = 0  # local

    # --- what is learnt -----------------------------------------------------------------------------

    def learn(self, ask: Begin, answer: Answer, now: int) -> None:
        """The server has answered one of the calls."""
        if isinstance(answer, InFlight):
            self._hold(ask, answer.holder, answer.left, now)
            self.runs = answer.runs
            if ask.since is None:
                self.told = (answer.since, now)
            if ask.beside == answer.holder.id:
                self.doubled = ask.beside
        elif isinstance(answer, Claimed):
            self.runs = answer.runs
            if answer.claim.cause is Cause.FALLBACK:
                self.doubled = ask.beside
            elif answer.claim.holds:
                self._hold(ask, answer.claim, ask.lease, now)
                self.told = (answer.claim.started, now)
        elif isinstance(answer, Replay):
            self.keep(answer, ask.digest, now)

    def _hold(self, ask: Begin, holder: Claim, left: int, now: int) -> None:
        self.holder, self.watched, self.payload = holder, self.listening, ask.digest
        self.replay = None
        self.lease_ends = now + left
        self.quiet_until = min(self.lease_ends, now + self.period)

    def keep(self, replay: Replay, payload: str | None, now: int) -> None:
        """There is a result."""
        self.forget()
        self.replay, self.payload = replay, payload
        self.replay_over = now + REMEMBERED

    def look(self, record: Record, store_now: int, now: int) -> None:
        """The record was read, while hints of it arrive."""
        self.told = (store_now, now)
        if record.result is not None:
            self.keep(Replay(record.result, record.runs), record.digest, now)
            return
        living = record.living(store_now)
        if living and self.holder is not None and living[0].claim.id == self.holder.id:
            self.watched = self.listening
            self.lease_ends = now + living[0].until - store_now
            self.quiet_until = min(self.lease_ends, now + self.period)

    def beat(self, holder: str, left: int, now: int) -> None:
        """The leader was heard to renew its lease."""
        if self.holder is not None and self.holder.id == holder:
            self.lease_ends = now + left
            self.quiet_until = min(self.lease_ends, now + self.period)

    def forget(self) -> None:
        """Something has happened: the server must be asked."""
        self.heard += 1
        self.holder, self.watched, self.doubled, self.replay = None, False, None, None

    # --- what is answered ---------------------------------------------------------------------------

    def answer(self, ask: Begin, now: int) -> Answer | None:
        """What the server would say, where that is known; None: it must be asked.

        Args:
            ask: of a call that is to be held back, not of one that observes or bypasses.
            now: local, ms.

        """
        if ask.digest != self.payload:
            return None
        if self.replay is not None and ask.since is not None and now < self.replay_over:
            # it waited when the result came, so that it may have it, whatever has become of it since
            if usable(self.replay.result, ask.since, self._store_time(now)):
                return self.replay
            return None
        holder = self.holder
        if holder is None or not self.watched or now >= self.quiet_until:
            return None
        if ask.beside == holder.id and self.doubled != holder.id:
            return None
        return self.in_flight(ask, now)

    def in_flight(self, ask: Begin, now: int) -> InFlight | None:
        """That somebody executes, as a call is told that need not ask."""
        if self.holder is None or now >= self.quiet_until:
            return None
        since = self._store_time(now) if ask.since is None else ask.since
        return InFlight(self.holder, self.quiet_until - now, since, self.runs)

    def watches(self, holder: str | None, now: int) -> bool:
        """Whether this holder was seen alive while hints of it arrive, and lately."""
        mine = self.holder is not None and self.holder.id == holder
        return mine and self.watched and now < self.quiet_until

    def silence(self, now: int) -> int:
        """How many ms there may be silence; 0: the leader should have been heard by now."""
        if not self.watched:
            return self.period
        return max(0, self.quiet_until - now)

    def _store_time(self, now: int) -> int:
        store, local = self.told
        return store + now - local


class Flight:
    """One call asks the server; those that come meanwhile with the same question wait for its answer."""

    __slots__ = ("answer", "error", "heard", "joiners", "landed", "nonce")

    def __init__(self, nonce: str, heard: int) -> None:
        self.nonce = nonce  # whose it is
        self.heard = heard
        self.landed = False
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self.joiners: list[Callable[[], None]] = []


Question: TypeAlias = "tuple[Address, str | None, bool, str | None]"


def question(ask: Begin) -> Question:
    """What calls must have in common to share an answer."""
    return ask.address, ask.digest, ask.rerun_lost, ask.beside


class Company:
    """The waiters of one process, or of one event loop, and what they know together.

    Its methods decide and keep account; whoever uses it sees to it that one thread at a time does.

    Args:
        book: is told of calls that were answered here: the question, and whether it reused.

    """

    def __init__(self, book: Callable[[Begin, bool], None]) -> None:
        self.room = WaitingRoom()
        self.known: dict[Address, Shared] = {}
        self._flights: dict[Question, Flight] = {}
        self._book = book

    def shared(self, address: Address) -> Shared:
        """What is known of a task, from now on."""
        return self.known.setdefault(address, Shared())

    def answer(self, ask: Begin, now: int) -> Answer | None:
        """What is known already; None: ask."""
        shared = self.known.get(ask.address)
        if shared is None or ask.mode is not Mode.ENFORCE:
            return None
        return self._booked(ask, shared.answer(ask, now))

    def _booked(self, ask: Begin, answer: Answer | None) -> Answer | None:
        if isinstance(answer, Replay):
            self._book(ask, True)
        elif isinstance(answer, InFlight) and ask.since is None:
            self._book(ask, False)
        return answer

    def flight(self, ask: Begin) -> tuple[Flight, bool]:
        """The flight that a call is to wait for, or its own."""
        about = question(ask)
        flight = self._flights.get(about)
        if flight is not None and not flight.landed:
            return flight, False
        shared = self.known.get(ask.address)
        flight = Flight(ask.nonce, 0 if shared is None else shared.heard)
        self._flights[about] = flight
        return flight, True

    def land(self, ask: Begin, flight: Flight, answer: Answer, now: int) -> None:
        """The server has answered a flight."""
        shared = self.known.get(ask.address)
        if shared is None and (flight.joiners or isinstance(answer, InFlight)):
            shared = self.shared(ask.address)
        if shared is not None:
            shared.period = ask.lease // 3 + LATE
            if shared.heard == flight.heard:
                shared.learn(ask, answer, now)
        flight.answer, flight.landed = answer, True

    def fail(self, ask: Begin, error: BaseException) -> Flight | None:
        """The asker gives up: its own flight, if there is one, brings no answer."""
        flight = self._flights.get(question(ask))
        if flight is None or flight.nonce != ask.nonce:
            return None
        if not flight.landed:
            flight.error, flight.landed = error, True
        return flight

    def over(self, ask: Begin, flight: Flight) -> None:
        """All who waited for a flight know what it brought."""
        if self._flights.get(question(ask)) is flight:
            del self._flights[question(ask)]

    def joined(self, ask: Begin, flight: Flight, now: int) -> Answer | None:
        """What a call is told that waited for another's flight; None: it must ask itself."""
        answer = flight.answer
        if isinstance(answer, Claimed):
            shared = self.known.get(ask.address)
            answer = None if shared is None else shared.in_flight(ask, now)
        elif isinstance(answer, InFlight):
            since = answer.since if ask.since is None else ask.since
            answer = InFlight(answer.holder, answer.left, since, answer.runs)
        elif not isinstance(answer, (Replay, Unknown, Conflict)):
            return None
        return self._booked(ask, answer)

    def idle(self) -> list[Address]:
        """Drop what is known of tasks that nobody waits for; their addresses."""
        flying = {about[0] for about in self._flights}
        waiting = self.room.waiting()
        idle = [a for a in self.known if a not in waiting and a not in flying]
        for address in idle:
            del self.known[address]
        return idle

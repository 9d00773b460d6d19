"""The life of one key: what may be asked of a record, and what it answers.

Pure: no I/O, no clock, no chance. Times are whole milliseconds of the store's clock.
An absent record is `Record()`, so that a flushed store needs no case of its own.

    idle --Begin--> held --Complete--> kept --ttl--> idle
                     |---Release-----> idle           (failed, declined, or its effect unknown)
                     |---Withdraw----> as before      (the body never started)
                     '---lease past--> lost, derived  (the next Begin takes over, or is told Unknown)

Every command may arrive twice, and late: token and nonce tell whose it is, and the second
arrival is answered like the first. What happens to a record happens here alone.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

from idemguard.record import (
    Address,
    Caller,
    Cause,
    Claim,
    Execution,
    Mode,
    Record,
    Result,
    Status,
)
from idemguard.usage import NOTHING, Spent

if TYPE_CHECKING:
    from idemguard.codec import Value

LINES = 64  # executions that a record remembers; open and unknown ones are never dropped
LEAVERS = 8  # calls that left: a Begin that arrives after its Withdraw claims nothing
WORKERS = 64  # names remembered of executions whose lines were dropped
DAY = 86_400_000  # milliseconds: how long a record lives where nothing else is said


# --- commands, and below them their answers ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """May this call execute? (Times in ms, here and below.)"""

    address: Address
    nonce: str
    caller: Caller
    lease: int
    digest: str | None = None
    mode: Mode = Mode.ENFORCE
    rerun_lost: bool = True
    since: int | None = None  # when this call first asked, as InFlight told it
    beside: str | None = None  # id of the leader that this call waited out: may it run beside it?
    retention: int = DAY
    brief: bool = False  # the caller must not be held up by a busy store


@dataclass(frozen=True, slots=True)
class Renew:
    """It still executes; this is what it has spent so far."""

    claim: Claim
    lease: int
    max_run: int
    spent: Spent = NOTHING
    retention: int = DAY
    brief: bool = False  # other claims wait for their renewal: a busy store is asked again soon

    @property
    def address(self) -> Address:
        return self.claim.address


@dataclass(frozen=True, slots=True)
class Complete:
    """It ended with a value."""

    claim: Claim
    value: Value
    ttl: int
    lease: int  # a result lives at least so long, for those who wait
    spent: Spent = NOTHING
    retention: int = DAY
    ago: int = 0  # ms since it ended, where the store could not be told at once
    brief: bool = False  # the caller must not be held up by a busy store

    @property
    def address(self) -> Address:
        return self.claim.address


@dataclass(frozen=True, slots=True)
class Release:
    """It ended without a value: FAILED, DECLINED, or LOST where the body cannot tell its effect."""

    claim: Claim
    status: Status = Status.FAILED
    spent: Spent = NOTHING
    retention: int = DAY
    ago: int = 0  # ms since it ended, where the store could not be told at once
    brief: bool = False  # the caller must not be held up by a busy store

    @property
    def address(self) -> Address:
        return self.claim.address


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The call leaves before its body started, whatever its Begin may have got."""

    address: Address
    nonce: str
    caller: Caller
    outcome: str | None = None  # what the call came to; None: it goes on under another nonce
    retention: int = DAY
    brief: bool = False  # as for the others


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the result and every claim; the next call executes."""

    address: Address
    nonce: str
    retention: int = DAY


@dataclass(frozen=True, slots=True)
class Resolve:
    """Keep a result that somebody knows; what was lost is unknown no longer."""

    address: Address
    nonce: str
    caller: Caller
    value: Value
    ttl: int
    retention: int = DAY


@dataclass(frozen=True, slots=True)
class Sweep:
    """Make final what is lost where nobody else comes by."""

    address: Address


@dataclass(frozen=True, slots=True)
class Claimed:
    """Yes: execute."""

    claim: Claim
    runs: int
    conflict: bool = False  # observed: its key stands for another payload
    before: Claim | None = None  # of the execution that was lost, where this one takes over from it


@dataclass(frozen=True, slots=True)
class Replay:
    """No need: here is the result."""

    result: Result
    runs: int


@dataclass(frozen=True, slots=True)
class InFlight:
    """Somebody is at it."""

    holder: Claim
    left: int  # ms of its lease
    since: int  # send it with the next Begin
    runs: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """An execution was lost, and this caller does not want another before its effect is known."""

    lost: Claim
    runs: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """The explicit key stands for another payload."""

    runs: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """Go on."""

    left: int  # ms
    owns: bool  # False: it runs on, but its result will not be kept


@dataclass(frozen=True, slots=True)
class Over:
    """There is no claim under this nonce (any more)."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Noted."""

    kept: bool
    lost: bool
    runs: int


@dataclass(frozen=True, slots=True)
class Done:
    """Noted."""


Command: TypeAlias = Begin | Renew | Complete | Release | Withdraw | Forget | Resolve | Sweep
Answer: TypeAlias = Claimed | Replay | InFlight | Unknown | Conflict | Renewed | Over | Ended | Done
Step: TypeAlias = tuple[Record, Answer]

# --- the rules -----------------------------------------------------------------------------------


def transition(record: Record, command: Command, now: int) -> Step:
    """What becomes of a record by one command, and what the caller is told.

    Args:
        record: as it stands; `Record()` where there is none.
        command: what is asked.
        now: the store's clock, ms.

    Returns:
        The record after it (the same object where nothing changed), and the answer.

    """
    before = aged(record, now)
    after, answer = _apply(before, command, now)
    if after is before or isinstance(command, Sweep):
        return after, answer
    return _extend(after, command, now), answer


def _apply(record: Record, command: Command, now: int) -> Step:
    match command:
        case Begin():
            return _begin(record, command, now)
        case Renew():
            return _renew(record, command, now)
        case Complete():
            return _complete(record, command, now)
        case Release():
            return _release(record, command, now)
        case Withdraw():
            return _withdraw(record, command)
        case Forget():
            return _forget(record, command, now)
        case Resolve():
            return _resolve(record, command, now)
        case Sweep():
            return _tell_lost(record, now), Done()
    assert_never(command)


def aged(record: Record, now: int) -> Record:
    """The record without what time has taken from it."""
    if 0 < record.kept_until <= now:
        return Record()
    if record.result is not None and record.result.gone <= now:
        return record._replace(result=None)
    return record


def wakes(before: Record, after: Record, command: Command, now: int) -> str | None:
    """Whom a store hints at after a command: "all" waiters, "one" of them, or nobody.

    A hint may be lost; the next Begin is the truth.
    """
    if isinstance(command, Begin):
        return None
    if after.result is not None and after.result is not before.result:
        return "all"
    if not after.living(now):
        return "one"
    # a place beside the leader is free again, and only those who ran out of patience want it
    return "all" if before.fallback is not None and after.fallback is None else None


def waits(record: Record, holder: str | None, now: int) -> bool:
    """Whether there is still nothing to do but wait.

    Args:
        record: as it stands.
        holder: id of the execution that is waited for; None where nobody was executing.
        now: the store's clock, ms.

    """
    record = aged(record, now)
    if record.result is not None and now < record.result.until:
        return False
    living = record.living(now)
    return (living[0].claim.id if living else None) == holder


def _begin(record: Record, ask: Begin, now: int) -> Step:
    if ask.nonce in record.leavers:
        return record, Over()
    if mine := next((line for line in record.lines if line.claim.nonce == ask.nonce), None):
        return _begin_again(record, mine, ask, now)
    if ask.mode is Mode.BYPASS:
        return _open(record, ask, Cause.FORCED, now, holds=False)
    result, living = usable(record.result, ask.since, now), record.living(now)
    if result is None and not living:
        lost = record.unknown(now)
        if lost and ask.mode is Mode.ENFORCE and not ask.rerun_lost:
            return record, Unknown(lost.claim, record.runs)
        if record.generation is not None and ask.mode is Mode.ENFORCE and _other(record, ask):
            return record, Conflict(record.runs)  # downstream it would go under one key
        record = _clear_dead(record, now)
        return _open(record, ask, record.cause, now)
    if ask.mode is Mode.OBSERVE:
        return _open(record, ask, Cause.OBSERVED, now, holds=False)
    if _other(record, ask):
        return record, Conflict(record.runs)
    if result is not None:
        reused = record.reused + (1 if result.available else 0)
        return record._replace(reused=reused), Replay(result, record.runs)
    holder = living[0]
    if len(living) == 1 and holder.claim.id == ask.beside:
        return _open(_clear_dead(record, now), ask, Cause.FALLBACK, now)
    since = now if ask.since is None else ask.since
    return record, InFlight(holder.claim, holder.until - now, since, record.runs)


def _begin_again(record: Record, mine: Execution, ask: Begin, now: int) -> Step:
    """Its reply was lost, or it came twice: the same claim, never a second one."""
    claim = mine.claim
    if mine.status is not Status.OPEN or (claim.holds and not record.owns(claim)):
        return record, Over()
    record = _put(record, mine._replace(until=max(mine.until, now + ask.lease)))
    return record, _claimed(record, claim, ask)


def _renew(record: Record, ask: Renew, now: int) -> Step:
    record, line = _find(record, ask.claim, now)
    if line.ended is not None:
        return record, Over()
    line = line._replace(spent=_later(line.spent, ask.spent))
    until = min(now + ask.lease, ask.claim.started + ask.max_run)
    if line.status is Status.LOST or until <= now:
        return _put(record, line), Over()
    line = line._replace(until=max(line.until, until))
    return _put(record, line), Renewed(line.until - now, record.owns(ask.claim))


def _complete(record: Record, ask: Complete, now: int) -> Step:
    record, line = _find(record, ask.claim, now)
    if line.ended is None:
        owns = record.owns(ask.claim)
        line = _ended(line, Status.OK, ask.spent, now - ask.ago, kept=owns)
        record = _put(record, line)
        if owns:
            gone = now + max(ask.ttl, ask.lease)
            result = Result(ask.claim, ask.value, line.spent, now, now + ask.ttl, gone)
            record = _keep(record, result)
    return record, Ended(line.kept, line.status is Status.LATE, record.runs)


def _release(record: Record, ask: Release, now: int) -> Step:
    record, line = _find(record, ask.claim, now)
    if line.ended is None:
        line = _ended(line, ask.status, ask.spent, now - ask.ago)
        record = _put(record, line)
        if record.owns(ask.claim):
            record = _vacate(record, ask.claim)._replace(cause=_NEXT[ask.status])
    return record, Ended(line.kept, line.status is Status.LATE, record.runs)


_NEXT = {
    Status.FAILED: Cause.RETRY,
    Status.DECLINED: Cause.DECLINED,
    Status.LOST: Cause.LOST,
}


def _withdraw(record: Record, ask: Withdraw) -> Step:
    if ask.nonce not in record.leavers:
        record = record._replace(leavers=(*record.leavers, ask.nonce)[-LEAVERS:])
    for mine in record.lines:
        if mine.claim.nonce == ask.nonce and mine.ended is None:
            others = tuple(line for line in record.lines if line is not mine)
            record = _vacate(record, mine.claim)
            record = record._replace(lines=others, runs=record.runs - 1)
    return record, Done()


def _forget(record: Record, ask: Forget, now: int) -> Step:
    if record.ordered != ask.nonce:
        record = _tell_lost(record, now)._replace(
            result=None,
            leader=None,
            fallback=None,
            cause=Cause.FORCED,
            digest=None,
            settled=record.token,
            ordered=ask.nonce,
        )
    return record, Done()


def _resolve(record: Record, ask: Resolve, now: int) -> Step:
    if record.ordered == ask.nonce:
        return record, Done()
    if record.result is not None and now < record.result.until:
        return record, Replay(record.result, record.runs)
    token = max(record.token + 1, now)
    claim = Claim(
        ask.address, token, ask.nonce, Cause.FORCED, token, now, holds=False, caller=ask.caller
    )
    record = _tell_lost(record, now)._replace(token=token, ordered=ask.nonce)
    until = now + ask.ttl
    return _keep(record, Result(claim, ask.value, NOTHING, now, until, until)), Done()


# --- small steps -----------------------------------------------------------------------------------


def usable(result: Result | None, since: int | None, now: int) -> Result | None:
    """Reused while fresh, and by every call that began before it was there."""
    if result is None or now < result.until or (since is not None and since <= result.at):
        return result
    return None


def _open(record: Record, ask: Begin, cause: Cause, now: int, *, holds: bool = True) -> Step:
    token = max(record.token + 1, now)
    generation = record.generation
    if ask.mode is Mode.BYPASS or generation is None:
        generation = token
    claim = Claim(
        ask.address, token, ask.nonce, cause, generation, now, holds=holds, caller=ask.caller
    )
    line = Execution(claim, now + ask.lease)
    if not holds:
        record = _put(record, line, token=token)
    elif cause is Cause.FALLBACK:
        record = _put(
            record, line, token=token, generation=generation, digest=ask.digest, fallback=claim.id
        )
    else:
        record = _put(
            record, line, token=token, generation=generation, digest=ask.digest, leader=claim.id
        )
    return record, _claimed(record, claim, ask)


def _claimed(record: Record, claim: Claim, ask: Begin) -> Claimed:
    conflict = claim.cause is Cause.OBSERVED and _other(record, ask)
    before = _lost_before(record, claim) if claim.cause is Cause.LOST else None
    return Claimed(claim, record.runs, conflict, before)


def _lost_before(record: Record, claim: Claim) -> Claim | None:
    lost = (line.claim for line in record.lines if line.status is Status.LOST)
    earlier = (other for other in lost if other.token < claim.token)
    return max(earlier, key=lambda other: other.token, default=None)


def _other(record: Record, ask: Begin) -> bool:
    """Whether this is another payload than the explicit key has stood for."""
    return record.digest is not None and record.digest != ask.digest


def _find(record: Record, claim: Claim, now: int) -> tuple[Record, Execution]:
    """The claim's line; a flushed store has none: it is told anew, and leads if none held it since."""
    if line := next((line for line in record.lines if line.claim.names(claim)), None):
        return record, line
    virgin = record.cause is Cause.FIRST and record.leader is None
    leads = claim.holds and virgin and claim.nonce not in record.leavers
    line = Execution(claim, now, Status.OPEN if leads or not claim.holds else Status.LOST)
    record = _put(record, line, token=max(record.token, claim.token))
    if leads:
        generation = claim.generation if record.generation is None else record.generation
        record = record._replace(leader=claim.id, generation=generation)
    return record, line


def _put(record: Record, line: Execution, **changes: Any) -> Record:
    """Write a line in its place, or as a new one, for which the oldest that are over make room."""
    claim = line.claim
    if any(other.claim.names(claim) for other in record.lines):
        lines = tuple(line if other.claim.names(claim) else other for other in record.lines)
        return record._replace(lines=lines, **changes)
    spare = len(record.lines) + 1 - LINES
    if spare <= 0:
        return record._replace(lines=(*record.lines, line), runs=record.runs + 1, **changes)
    drop = [other for other in record.lines if _done(record, other)][:spare]
    workers = dict.fromkeys((*record.workers, *(other.claim.caller.worker for other in drop)))
    return record._replace(
        lines=(*(other for other in record.lines if other not in drop), line),
        runs=record.runs + 1,
        workers=tuple(workers)[-WORKERS:],
        **changes,
    )


def _done(record: Record, line: Execution) -> bool:
    """Ended, or lost and unknown no longer."""
    settled = not line.claim.holds or line.claim.token <= record.settled
    return line.ended is not None or (line.status is Status.LOST and settled)


def _later(one: Spent, other: Spent) -> Spent:
    return one if one.reports > other.reports else other


def _ended(
    line: Execution, status: Status, spent: Spent, now: int, *, kept: bool = False
) -> Execution:
    if line.status is Status.LOST and status is not Status.LOST:
        status = Status.LATE
    ended = max(now, line.claim.started)
    return line._replace(status=status, ended=ended, spent=_later(line.spent, spent), kept=kept)


def _keep(record: Record, result: Result) -> Record:
    return record._replace(
        result=result,
        leader=None,
        fallback=None,
        cause=Cause.EXPIRED,
        generation=None,
        settled=record.token,
    )


def _vacate(record: Record, claim: Claim) -> Record:
    """Leave a place; a fallback whose leader leaves leads."""
    if claim.id == record.leader:
        return record._replace(leader=record.fallback, fallback=None)
    return record._replace(fallback=None) if claim.id == record.fallback else record


def _tell_lost(record: Record, now: int) -> Record:
    if all(line.told(now) is line.status for line in record.lines):
        return record
    lines = tuple(line._replace(status=line.told(now)) for line in record.lines)
    return record._replace(lines=lines)


def _clear_dead(record: Record, now: int) -> Record:
    """Before somebody else starts: who holds a place and is dead is lost for good."""
    for line in record.lines:
        if record.owns(line.claim) and not line.lives(now):
            record = _put(record, line._replace(status=Status.LOST))
            record = _vacate(record, line.claim)._replace(cause=Cause.LOST)
    return record


def _extend(
    record: Record,
    command: Begin | Renew | Complete | Release | Withdraw | Forget | Resolve,
    now: int,
) -> Record:
    """A record outlives its last command by its retention, and whatever it still has to tell."""
    last = [now + command.retention, record.kept_until]
    last += [line.until for line in record.lines if line.status is Status.OPEN]
    if record.result is not None:
        last.append(record.result.gone)
    return record._replace(kept_until=max(last))

"""What is kept of one key: its record, its executions, its result.

Times are whole milliseconds of the store's clock. Absent is None, never something falsy.
Named tuples, since they are copied with changes several times a command, and cheaply so.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from idemguard.usage import NOTHING, Spent, Usage

if TYPE_CHECKING:
    from decimal import Decimal

    from idemguard.codec import Value


class Mode(StrEnum):
    """How a call asks: held back, only counted, or without looking."""

    ENFORCE = "enforce"
    OBSERVE = "observe"
    BYPASS = "bypass"


class Cause(StrEnum):
    """Why an execution started."""

    FIRST = "first"
    RETRY = "retry"
    EXPIRED = "expired"
    DECLINED = "declined"
    FORCED = "forced"
    LOST = "lost"
    FALLBACK = "fallback"
    OBSERVED = "observed"
    UNGUARDED = "unguarded"


# started while a result was there, while a leader was alive, or without anybody's knowledge
DUPLICATES = frozenset({Cause.LOST, Cause.FALLBACK, Cause.OBSERVED, Cause.UNGUARDED})


class Status(StrEnum):
    """How an execution stands."""

    OPEN = "open"
    OK = "ok"
    FAILED = "failed"
    DECLINED = "declined"
    LOST = "lost"
    LATE = "late"  # ended after it was told lost


class Address(NamedTuple):
    """Where a task's record stands."""

    namespace: str
    fingerprint: str
    scope: str = ""  # the path of scopes; empty at the root
    version: str | None = None


# as the W3C's trace context has them: lower case, and not all zeros
_TRACE_ID = re.compile("(?!0{32})[0-9a-f]{32}")
_SPAN_ID = re.compile("(?!0{16})[0-9a-f]{16}")


class Caller(NamedTuple):
    """Who asks, and on what occasion; the rules never look at it."""

    task_type: str
    worker: str
    agent: str | None = None
    parent: str | None = None  # id of the execution around it
    trace_id: str | None = None
    span_id: str | None = None
    digests: tuple[tuple[str, str], ...] = ()  # of the payload's fields
    trace_flags: int | None = None  # of its span; 1: it was sampled

    @property
    def trace(self) -> tuple[str, str] | None:
        """Trace and span id of its span; None where it has none, or what is kept is no id."""
        trace_id, span_id = self.trace_id, self.span_id
        if not isinstance(trace_id, str) or not isinstance(span_id, str):
            return None
        if not _TRACE_ID.fullmatch(trace_id) or not _SPAN_ID.fullmatch(span_id):
            return None
        return trace_id, span_id


class Claim(NamedTuple):
    """The right to execute; its holder sends it with every later command."""

    address: Address
    token: int
    nonce: str
    cause: Cause
    generation: int  # what the idempotency key is made of
    started: int
    holds: bool  # False: executes without the claim (observed, bypass, unguarded), keeps no result
    caller: Caller

    @property
    def id(self) -> str:
        """The execution's id: token and nonce together."""
        return f"{self.token}-{self.nonce}"

    def names(self, other: Claim) -> bool:
        """Whether both are of one execution."""
        return self.token == other.token and self.nonce == other.nonce


class Execution(NamedTuple):
    """One execution: a line of the ledger.

    Attributes:
        claim: what it executed by.
        until: when its lease ends, or ended; ms.
        status: how it stands.
        ended: when its end was told, ms; None while it was not.
        kept: whether its result was kept.
        spent: what it has spent.

    """

    claim: Claim
    until: int
    status: Status = Status.OPEN
    ended: int | None = None
    kept: bool = False
    spent: Spent = NOTHING

    def lives(self, now: int) -> bool:
        """Whether it is open within its lease."""
        return self.status is Status.OPEN and now < self.until

    def told(self, now: int) -> Status:
        """Its status as a reader sees it: open with its lease past is lost."""
        return Status.LOST if self.status is Status.OPEN and self.until <= now else self.status

    def __repr__(self) -> str:
        return (
            f"<Execution {self.execution_id} of {self.task_type} [{self.fingerprint[:16]}]: "
            f"{self.status}, {self.cause}, by {self.worker}>"
        )

    @property
    def execution_id(self) -> str:
        """Token and nonce together."""
        return self.claim.id

    @property
    def fingerprint(self) -> str:
        """Of its task, 64 hex digits."""
        return self.claim.address.fingerprint

    @property
    def scope(self) -> str:
        """The path of scopes that it was called in; empty at the root."""
        return self.claim.address.scope

    @property
    def version(self) -> str | None:
        """The version that it was decorated with."""
        return self.claim.address.version

    @property
    def task_type(self) -> str:
        """Of its task."""
        return self.claim.caller.task_type

    @property
    def cause(self) -> Cause:
        """Why it started."""
        return self.claim.cause

    @property
    def started(self) -> int:
        """When it started: ms since 1970 by the store's clock."""
        return self.claim.started

    @property
    def worker(self) -> str:
        """Who executed it."""
        return self.claim.caller.worker

    @property
    def agent(self) -> str | None:
        """Whom it is booked to."""
        return self.claim.caller.agent

    @property
    def parent(self) -> str | None:
        """Id of the execution around it."""
        return self.claim.caller.parent

    @property
    def trace_id(self) -> str | None:
        """Of its span, 32 hex digits."""
        return self.claim.caller.trace_id

    @property
    def span_id(self) -> str | None:
        """Of its span, 16 hex digits."""
        return self.claim.caller.span_id

    @property
    def usage(self) -> Usage | None:
        """The tokens it spent, without those of guarded executions inside; None: unknown."""
        return self.spent.usage

    @property
    def model(self) -> str | None:
        """The last model that it reported."""
        return None if self.spent.usage is None else self.spent.usage.model

    @property
    def cost(self) -> Decimal | None:
        """What these tokens cost; None: unpriced."""
        return self.spent.price

    @property
    def currency(self) -> str | None:
        """Of the cost."""
        return self.spent.currency

    @property
    def price_version(self) -> str | None:
        """Which price table the cost was taken from."""
        return self.spent.price_version


class Result(NamedTuple):
    """What was kept of an execution, for others to reuse."""

    claim: Claim  # of the execution, or the order, that it came from
    value: Value
    spent: Spent
    at: int
    until: int  # fresh so long; a call that began before `at` gets it even later
    gone: int  # and nobody after this

    @property
    def available(self) -> bool:
        """Whether there is a value; else it only says that the task is done."""
        return self.value.codec != "unstorable"


class Record(NamedTuple):
    """All that is known of one address."""

    token: int = 0  # the highest ever given
    leader: str | None = None  # execution ids
    fallback: str | None = None  # runs beside the leader
    cause: Cause = Cause.FIRST  # of the next execution, should one start
    generation: int | None = None  # token of the first claim since a result was kept
    settled: int = 0  # what was lost up to this token is unknown no longer
    digest: str | None = None  # of the payload behind an explicit key
    result: Result | None = None
    lines: tuple[Execution, ...] = ()
    runs: int = 0
    workers: tuple[str, ...] = ()  # of executions whose lines were dropped
    reused: int = 0
    ordered: str | None = None  # nonce of the last Forget or Resolve
    leavers: tuple[str, ...] = ()
    kept_until: int = 0

    def owns(self, claim: Claim) -> bool:
        """Whether the claim holds a place in this record."""
        return claim.holds and claim.id in (self.leader, self.fallback)

    def living(self, now: int) -> list[Execution]:
        """The living leader, the living fallback: those to wait for, in this order."""
        lines = [line for line in self.lines if self.owns(line.claim) and line.lives(now)]
        return sorted(lines, key=lambda line: line.claim.id != self.leader)

    def unknown(self, now: int) -> Execution | None:
        """An execution that may have had its effect, and nobody knows."""
        lost = (line for line in self.lines if line.claim.holds and line.told(now) is Status.LOST)
        return next((line for line in lost if line.claim.token > self.settled), None)

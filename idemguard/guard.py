"""The life of one call: what it may do, as flows that yield wishes and receive answers.

Pure: no I/O, no clock, no sleep, nothing async. A driver performs what a flow yields: a
command of claim.py on the store, `Await` a hint, `Execute` the body, `Owe` what a store that
is down must be told later, `Rest` while it is, `Look` at a record, `Pause` the heartbeat. Errors of the store, and cancellation, are
thrown into the flow, so that what they mean is decided here.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from idemguard.claim import (
    Begin,
    Claimed,
    Complete,
    Conflict,
    Ended,
    InFlight,
    Over,
    Release,
    Renew,
    Renewed,
    Replay,
    Unknown,
    Withdraw,
    usable,
)
from idemguard.codec import Value
from idemguard.errors import (
    IdemguardError,
    KeyConflictError,
    StoreError,
    StoreUnavailableError,
    UnknownOutcomeError,
    WaitTimeoutError,
)
from idemguard.record import Cause, Claim, Mode, Status
from idemguard.usage import NOTHING, Spent

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from idemguard.claim import Answer, Command
    from idemguard.record import Address, Caller, Result

NOT_KEPT = Value("unstorable", b"an execution without the claim keeps no result")


class OutOfScope(Exception):  # noqa: N818 - it is no error: a worker hands a task back
    """Raised by a body to hand its task back: nothing is stored, the claim is released."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How calls of one task type are guarded; times in ms."""

    ttl: int = 900_000
    lease: int = 30_000
    max_run: int | None = 3_600_000  # None: from the run times known
    wait_timeout: int | None = None
    fall_back: bool = True  # on_timeout
    rerun_lost: bool = True  # on_lost
    run_unguarded: bool = False  # on_store_error
    mode: Mode = Mode.ENFORCE
    retention: int = 86_400_000
    observes: bool = False  # whatever the store does, the call is let through, and not held up


@dataclass(frozen=True, slots=True)
class Ask:
    """One call: which task, who asks, by which policy."""

    address: Address
    caller: Caller
    nonce: str  # of the call; each attempt to claim makes its own from it
    policy: Policy
    digest: str | None = None


# --- wishes that are no commands of the store ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Await:
    """Until a hint comes, or so many ms; answered with the ms that it took."""

    address: Address
    holder: str | None
    timeout: int | None


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute the body; answered with `Ran`, whatever it raises."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Owe:
    """To be told to the store as soon as it can be told."""

    command: Command


@dataclass(frozen=True, slots=True)
class Pause:
    """So many ms; answered with what the execution has spent so far."""

    time: int


@dataclass(frozen=True, slots=True)
class Ran:
    """What a body came to."""

    value: Any = None
    error: BaseException | None = None
    spent: Spent = NOTHING
    took: int = 0  # ms
    copied: bool = False  # in a forked child: the claim is its parent's, where it goes on


@dataclass(frozen=True, slots=True)
class Look:
    """Only read; answered with the record and the store's clock."""

    address: Address


@dataclass(frozen=True, slots=True)
class Rest:
    """Do nothing for so many ms; answered with the driver's own clock, ms."""

    time: int


Wish: TypeAlias = "Command | Await | Execute | Look | Owe | Pause | Rest"
Flow: TypeAlias = "Generator[Wish, Any, Any]"


# --- what a call came to -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    """The answer that let a call go on, and how long it had waited (ms); None: unguarded."""

    answer: Claimed | Replay | None
    waited: int = 0
    trouble: StoreError | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """Leave to execute."""

    ask: Ask
    claim: Claim
    waited: int = 0  # ms
    conflict: bool = False
    trouble: StoreError | None = None  # why it is unguarded
    asked: float = 0.0  # when, by the driver; set where the body does not run in the same drive


@dataclass(frozen=True, slots=True)
class Reply:
    """What a call came to, whoever executed it."""

    source: str  # an outcome
    value: Any = None
    error: BaseException | None = None
    claim: Claim | None = None  # of the execution whose result it is
    result: Result | None = None  # kept, where it was reused
    spent: Spent = NOTHING
    waited: int = 0  # ms
    runs: int | None = None
    lost: bool = False
    conflict: bool = False
    trouble: StoreError | None = None  # what the store failed with while the call went on
    copied: bool = False  # of a forked child: its parent tells what there is to be told


class Refused(Exception):  # noqa: N818 - carries an error to `call`, and never leaves it
    """The call is not let in."""

    def __init__(self, error: BaseException, waited: int, runs: int | None) -> None:
        super().__init__(error)
        self.error, self.waited, self.runs = error, waited, runs


# --- flows ---------------------------------------------------------------------------------------------


def call(
    ask: Ask, encode: Callable[[Any], Value], declined: Callable[[Any], bool]
) -> Generator[Wish, Any, Reply]:
    """One call, from the question whether it may execute to what the ledger is told.

    Args:
        ask: which task, who asks, by which policy.
        encode: a result as a store keeps it; never raises.
        declined: whether a value hands the task back; never raises.

    """
    entry = yield from enter(ask)
    if isinstance(entry, Reply):
        return entry
    return (yield from execute(entry, encode, declined))


def enter(ask: Ask) -> Generator[Wish, Any, Entry | Reply]:
    """The first half of `call`: leave to execute, or what the call came to without it."""
    try:
        admitted: Admitted = yield from admit(ask)
    except Refused as refusal:
        return Reply("refused", error=refusal.error, waited=refusal.waited, runs=refusal.runs)
    except StoreError as error:
        return Reply("refused", error=error, trouble=error)
    waited, trouble = admitted.waited, admitted.trouble
    match admitted.answer:
        case Replay(result=result, runs=runs):
            return Reply(
                "reused",
                claim=result.claim,
                result=result,
                spent=result.spent,
                waited=waited,
                runs=runs,
            )
        case Claimed(claim=claim, conflict=conflict):
            return Entry(ask, claim, waited, conflict)
        case None:
            return Entry(ask, unguarded(ask), waited, trouble=trouble)


def unguarded(ask: Ask) -> Claim:
    """What stands for a claim where the store could give none."""
    nonce = f"{ask.nonce}.u"
    return Claim(ask.address, 0, nonce, Cause.UNGUARDED, 0, 0, holds=False, caller=ask.caller)


def admit(ask: Ask) -> Generator[Wish, Any, Admitted]:
    """May this call execute? Claimed: yes. Replay: no need. None: yes, unguarded.

    Raises:
        Refused: with the error that says why not.
        StoreError: there is no store, and no leave to do without.

    """
    policy, turn = ask.policy, _Turn(ask.nonce)
    try:
        while True:
            try:
                admitted = yield from _ask(ask, turn)
            except StoreUnavailableError as error:
                yield from _outlast(ask, turn, error)
            else:
                turn.away = None
                if admitted is not None:
                    return admitted
    except StoreError as error:
        away = isinstance(error, StoreUnavailableError)
        run = policy.observes or (policy.run_unguarded and away)
        outcome = None if run else "refused"  # an unguarded call is counted at its end
        yield Owe(Withdraw(ask.address, turn.nonce, ask.caller, outcome, policy.retention))
        if run:
            return Admitted(None, turn.total, error)
        raise
    except GeneratorExit:
        raise
    except BaseException as error:  # cancelled, or refused: give back what Begin may have got
        yield from _leave(ask, turn.nonce, came_to(error))
        raise


class _Turn:
    """Where a call stands that is not let in yet; times in ms."""

    __slots__ = ("attempt", "away", "leader", "nonce", "since", "total", "tried", "waited")

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce  # of this attempt
        self.attempt = 0
        self.since: int | None = None
        self.leader: str | None = None  # id of the one it was told to wait for
        self.waited = 0  # for that one
        self.total = 0  # for all of them
        self.tried: str | None = None  # id of the leader that it asked to execute beside
        self.away: int | None = None  # since when the store is, by the driver's clock


def _ask(ask: Ask, turn: _Turn) -> Generator[Wish, Any, Admitted | None]:
    """Ask once; None: to no end yet, so ask again."""
    policy = ask.policy
    tired = policy.wait_timeout is not None and turn.waited >= policy.wait_timeout
    turn.tried = turn.leader if tired and policy.fall_back else None
    answer: Answer = yield Begin(
        ask.address, turn.nonce, ask.caller, policy.lease, ask.digest, policy.mode,
        policy.rerun_lost, turn.since, turn.tried, policy.retention, policy.observes,
    )  # fmt: skip
    match answer:
        case Claimed() | Replay():
            return Admitted(answer, turn.total)
        case Over():  # its reply came so late that the claim is gone: ask anew
            yield Withdraw(ask.address, turn.nonce, ask.caller, None, policy.retention)
            turn.attempt += 1
            turn.nonce = f"{ask.nonce}.{turn.attempt}"
        case Unknown() | Conflict():
            raise Refused(_refusal(ask, answer), turn.total, answer.runs)
        case InFlight():
            turn.since = answer.since if turn.since is None else turn.since
            if answer.holder.id != turn.leader:
                turn.leader, turn.waited = answer.holder.id, 0
            passed = yield from _wait(ask, answer, turn)
            turn.waited, turn.total = turn.waited + passed, turn.total + passed
    return None


def _outlast(ask: Ask, turn: _Turn, error: StoreUnavailableError) -> Flow:
    """A store that is away while one waits: for a lease, or one's own patience, no reason to end."""
    if turn.leader is None:
        raise error
    limit = ask.policy.lease
    if ask.policy.wait_timeout is not None:
        limit = min(limit, ask.policy.wait_timeout - turn.waited)
    if turn.away is None:
        turn.away = yield Rest(0)
    now = yield Rest(min(ask.policy.lease // 10, 1000))
    if now - turn.away >= limit:
        raise error


def came_to(error: BaseException) -> str:
    """The outcome of a call that this error ended before its body."""
    return "refused" if isinstance(error, (Refused, IdemguardError)) else "failed"


def _wait(ask: Ask, answer: InFlight, turn: _Turn) -> Generator[Wish, Any, int]:
    limit, holder = ask.policy.wait_timeout, answer.holder.id
    left = answer.left if limit is None else limit - turn.waited
    if left > 0:
        return (yield Await(ask.address, holder, min(left, answer.left)))  # type: ignore[no-any-return]
    if turn.tried == holder:  # somebody else runs beside it, so go on waiting
        return (yield Await(ask.address, holder, answer.left))  # type: ignore[no-any-return]
    if not ask.policy.fall_back:
        raise Refused(_timeout(ask, answer, turn.waited), turn.total, answer.runs)
    return 0


def _leave(ask: Ask, nonce: str, outcome: str | None) -> Flow:
    leaving = Withdraw(ask.address, nonce, ask.caller, outcome, ask.policy.retention)
    try:
        yield leaving
    except StoreError:
        yield Owe(leaving)


def execute(
    entry: Entry, encode: Callable[[Any], Value], declined: Callable[[Any], bool]
) -> Generator[Wish, Any, Reply]:
    """The second half of `call`: execute the body by a claim, and tell its end."""
    ask, claim = entry.ask, entry.claim
    policy = ask.policy
    ran: Ran = yield Execute(claim)
    if claim.cause is Cause.UNGUARDED:  # its start is told from its end, by the store's clock
        claim = claim._replace(started=-ran.took)
    source, status = "executed", Status.OK
    if ran.error is not None:
        source, status = "failed", Status.FAILED
        if isinstance(ran.error, OutOfScope):
            source, status = "declined", Status.DECLINED
        elif isinstance(ran.error, UnknownOutcomeError):
            status = Status.LOST
    elif declined(ran.value):
        source, status = "declined", Status.DECLINED
    elif claim.cause in (Cause.FALLBACK, Cause.UNGUARDED):
        source = str(claim.cause)
    if ran.copied:
        return Reply(
            source, value=ran.value, error=ran.error, claim=claim, spent=ran.spent,
            waited=entry.waited, copied=True,
        )  # fmt: skip
    end: Complete | Release
    if status is Status.OK:
        value = encode(ran.value) if claim.holds else NOT_KEPT
        end = Complete(
            claim, value, policy.ttl, policy.lease, ran.spent, policy.retention,
            brief=policy.observes,
        )  # fmt: skip
    else:
        end = Release(claim, status, ran.spent, policy.retention, brief=policy.observes)
    told, trouble, interrupted = yield from settle(end)
    return Reply(
        source,
        value=ran.value,
        error=ran.error if interrupted is None else interrupted,
        claim=claim,
        spent=ran.spent,
        waited=entry.waited,
        runs=None if told is None else told.runs,
        lost=told is not None and told.lost,
        conflict=entry.conflict,
        trouble=trouble or entry.trouble,
    )


Settled: TypeAlias = "tuple[Ended | None, StoreError | None, BaseException | None]"


def settle(end: Complete | Release) -> Generator[Wish, Any, Settled]:
    """Tell the store how an execution ended; what was paid for is never lost by it.

    Returns:
        What the store said, or None; the error that it failed with, or None; and what
        interrupted the telling (Ctrl-C, a cancellation), or None.

    """
    if end.claim.cause is Cause.UNGUARDED:
        yield Owe(end)
        return None, None, None
    interrupted: BaseException | None = None
    try:
        try:
            told = yield end
        except (GeneratorExit, StoreError):
            raise
        except BaseException as error:  # noqa: BLE001 - the end may come twice, so tell it again
            interrupted = error
            told = yield end
    except StoreError as error:
        yield Owe(end)
        return None, error, interrupted
    return told, None, interrupted


def take(ask: Ask) -> Generator[Wish, Any, Claimed | Replay | InFlight]:
    """A claim to be held by hand, or the result or the living leader that stands in its way.

    Raises:
        UnknownOutcomeError, KeyConflictError: as for a call.
        StoreError: there is no store.

    """
    policy, nonce, attempt = ask.policy, ask.nonce, 0
    while True:
        try:
            answer = yield Begin(
                ask.address, nonce, ask.caller, policy.lease, ask.digest, policy.mode,
                policy.rerun_lost, retention=policy.retention,
            )  # fmt: skip
        except GeneratorExit:
            raise
        except StoreError:
            yield Owe(Withdraw(ask.address, nonce, ask.caller, None, policy.retention))
            raise
        except BaseException:
            yield from _leave(ask, nonce, None)
            raise
        match answer:
            case Claimed() | Replay() | InFlight():
                return answer
            case Unknown() | Conflict():
                raise _refusal(ask, answer)
            case Over():
                yield Withdraw(ask.address, nonce, ask.caller, None, policy.retention)
                attempt += 1
                nonce = f"{ask.nonce}.{attempt}"


def reach(
    address: Address, timeout: int, caller: Caller, nonce: str
) -> Generator[Wish, Any, tuple[Result, int] | None]:
    """The result that is kept, or will be within so many ms, and the executions so far."""
    since: int | None = None
    while True:
        record, now = yield Look(address)
        since = now if since is None else since
        result = usable(record.result, since, now)
        if result is not None:
            return result, record.runs
        if timeout <= 0:
            return None
        living = record.living(now)
        holder, limit = None, timeout
        if living:
            holder, limit = living[0].claim.id, min(timeout, living[0].until - now)
        passed = yield Await(address, holder, limit)
        timeout -= passed
        if passed < limit:  # a hint came, and it may have been meant for one who would execute
            yield Withdraw(address, nonce, caller)


def hold(
    claim: Claim, policy: Policy, max_run: int, lost: Callable[[], None]
) -> Generator[Wish, Any, None]:
    """The heartbeat: renew at a third of the lease, until the claim is over.

    Args:
        claim: what is renewed.
        policy: its lease.
        max_run: how long it is renewed at most, ms.
        lost: called when the result will no longer be kept.

    """
    pause = policy.lease // 3
    while True:
        spent = yield Pause(pause)
        try:
            answer = yield Renew(claim, policy.lease, max_run, spent, policy.retention, brief=True)
        except StoreError:
            pause = policy.lease // 10  # a hiccup: the next beat comes sooner
            continue
        pause = policy.lease // 3
        if isinstance(answer, Over):
            lost()
            return
        if isinstance(answer, Renewed) and not answer.owns and claim.holds:
            lost()  # the beat goes on, so that its line is not told lost


# --- what a refusal says ---------------------------------------------------------------------------------


def task_name(ask: Ask) -> str:
    """A task as people are shown it: its type and the first 16 digits of its fingerprint."""
    return f"{ask.caller.task_type} [{ask.address.fingerprint[:16]}]"


def _refusal(ask: Ask, answer: Unknown | Conflict) -> Exception:
    about = {"task_type": ask.caller.task_type, "fingerprint": ask.address.fingerprint}
    if isinstance(answer, Conflict):
        return KeyConflictError(
            f"{task_name(ask)}: its idempotency key came before with another payload. "
            "Give different work a different key, or change version= to start afresh.",
            **about,
        )
    lost = answer.lost
    return UnknownOutcomeError(
        f"{task_name(ask)}: its execution by worker {lost.caller.worker!r} was lost, and nobody "
        "knows whether its effect happened. Look there, then resolve() the task with its result, "
        "or forget() it to execute it again.",
        worker=lost.caller.worker,
        execution_id=lost.id,
        **about,
    )


def _timeout(ask: Ask, answer: InFlight, waited: int) -> Exception:
    worker = answer.holder.caller.worker
    return WaitTimeoutError(
        f"{task_name(ask)}: still being executed by worker {worker!r} after a wait of "
        f"{waited / 1000:.3g} s. Wait longer (wait_timeout=), or execute beside it "
        '(on_timeout="fallback").',
        worker=worker,
        execution_id=answer.holder.id,
        task_type=ask.caller.task_type,
        fingerprint=ask.address.fingerprint,
    )

"""The guard: everything that a user can ask of one store.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from idemguard import config, context
from idemguard.calls import Job, no_body
from idemguard.claim import (
    Claimed,
    Complete,
    Forget,
    InFlight,
    Over,
    Release,
    Renew,
    Renewed,
    Replay,
    Resolve,
)
from idemguard.codec import Codec
from idemguard.digests import Digests, raw_digests
from idemguard.drive import adrive, drive, need_asyncio, shielded
from idemguard.engine import Engine
from idemguard.errors import ConfigurationError, IdemguardError, LeaseLostError
from idemguard.fingerprint import identify_payload
from idemguard.guard import Ask, Flow, Policy, Reply, reach, settle, take, unguarded
from idemguard.journal import watch
from idemguard.ledger import AsyncLedger, ExecutionLedger
from idemguard.outcome import Outcome, outcome
from idemguard.record import Address, Caller, Mode, Status
from idemguard.usage import Meter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from idemguard import record
    from idemguard.claim import Ended
    from idemguard.config import Settings
    from idemguard.usage import Spent


@dataclass(frozen=True)
class Task:
    """A task type and a payload, by their identity.

    Attributes:
        task_type: the kind of work.
        fingerprint: which piece of it, 64 hex digits.
        scope: the path of scopes that it belongs to; empty at the root.
        version: part of its address, or None.

    """

    task_type: str
    fingerprint: str
    scope: str = ""
    version: str | None = None
    codec: Any = field(default_factory=Codec, compare=False, repr=False)
    digest: str | None = field(default=None, compare=False, repr=False)  # behind an explicit key
    policy: Policy | None = field(default=None, compare=False, repr=False)  # its decorator's
    digests: Digests = field(default=(), compare=False, repr=False)  # of the payload's fields

    @classmethod
    def of(
        cls,
        task_type: str,
        payload: object,
        *,
        volatile: Iterable[str] = (),
        keep: Iterable[str] = (),
        version: str | None = None,
    ) -> Task:
        """The task of a payload, in the present scope.

        Args:
            task_type: the kind of work.
            payload: what is to be done, as JSON has it.
            volatile: names or paths that do not count.
            keep: default-volatile names that do.
            version: part of the address, or None.

        Raises:
            FingerprintError: something in the payload has no stable identity.

        """
        found = identify_payload(task_type, payload, volatile=volatile, keep=keep)
        return cls(
            task_type, found.fingerprint, context.present_scope(), version,
            digests=raw_digests(found),
        )  # fmt: skip


class Claim:
    """A claim that is held by hand: nobody renews it but its holder.

    Attributes:
        task: what may be executed.
        execution_id: of this execution.
        token: larger than every earlier one of this task.
        cause: why it was claimed.
        idempotency_key: to be passed downstream.

    """

    def __init__(self, engine: Engine, job: Job, task: Task, claim: record.Claim) -> None:
        self._engine = engine
        self._job = job
        self._claim = claim
        self.task = task
        self.execution_id = claim.id
        self.token = claim.token
        self.cause = claim.cause
        self._ended = False
        self.idempotency_key = context.idempotency_key(claim)

    def __repr__(self) -> str:
        return f"<Claim {self.execution_id} of {_name(self.task)}>"

    def renew(self) -> float:
        """Hold it for another lease.

        Returns:
            The seconds that are left of it.

        Raises:
            LeaseLostError: it is over, or somebody else holds it.

        """
        return self._renewed(self._engine.store.perform(self._renewal()))

    def complete(self, result: object, usage: object = None) -> bool:
        """Keep the result, and be done.

        Args:
            result: what others will get.
            usage: a `Usage`, a mapping with its fields, or None.

        Returns:
            Whether it was kept; it is not where the claim was lost to somebody else, or had
            ended before.

        """
        return self._settle(self._completion(result, usage))

    def release(self) -> bool:
        """Give it back without a result, as failed."""
        return self._settle(self._releasing())

    def _renewal(self) -> Renew:
        policy = self._job.policy
        return Renew(self._claim, policy.lease, self._job.longest(), retention=policy.retention)

    def _renewed(self, answer: object) -> float:
        if isinstance(answer, Renewed) and answer.owns:
            return answer.left / 1000
        assert isinstance(answer, (Renewed, Over))
        why = "it has ended" if self._ended else "its execution counts as lost"
        raise LeaseLostError(
            f"{_name(self.task)}: this claim is over: {why}.",
            worker=self._claim.caller.worker,
            execution_id=self.execution_id,
            task_type=self.task.task_type,
            fingerprint=self.task.fingerprint,
        )

    def _completion(self, result: object, usage: object) -> Complete:
        policy = self._job.policy
        value = self._job.encode(_name(self.task), result)
        spent = self._spent(usage)
        return Complete(self._claim, value, policy.ttl, policy.lease, spent, policy.retention)

    def _spent(self, usage: object) -> Spent:
        meter = Meter(self._engine.price, "USD")
        if usage is not None:
            for reading in context.reports(usage, {}):
                meter.add(**reading._asdict())
        return meter.spent()

    def _releasing(self) -> Release:
        return Release(self._claim, Status.FAILED, retention=self._job.policy.retention)

    def _settle(self, end: Complete | Release) -> bool:
        if self._ended:
            return False
        self._ended = True
        told, _, interrupted = drive(settle(end), self._engine.store, self._engine.backlog, no_body)
        self._seen(end)
        return _was_kept(told, interrupted)

    def _seen(self, end: Complete | Release) -> None:
        outcome = "executed" if isinstance(end, Complete) else "failed"
        self._engine.telemetry.settled(self._claim, outcome, end.spent)
        if watch.on():
            watch.settled(self._claim, outcome, end.spent)


class FreeClaim(Claim):
    """What stands for a claim in mode `off`: everything may be executed, nothing is recorded."""

    def renew(self) -> float:
        """Nothing to renew."""
        return self._job.policy.lease / 1000

    def complete(self, result: object, usage: object = None) -> bool:  # noqa: ARG002 - as a claim's
        """Nothing is kept."""
        return False

    def release(self) -> bool:
        """Nothing is given back."""
        return False


class AsyncClaim(Claim):
    """A claim that is held by hand from a coroutine; its methods are awaited."""

    async def renew(self) -> float:  # type: ignore[override]
        """As `Claim.renew`."""
        return self._renewed(await shielded(self._engine.aio.perform(self._renewal())))

    async def complete(self, result: object, usage: object = None) -> bool:  # type: ignore[override]
        """As `Claim.complete`."""
        return await self._asettle(self._completion(result, usage))

    async def release(self) -> bool:  # type: ignore[override]
        """As `Claim.release`."""
        return await self._asettle(self._releasing())

    async def _asettle(self, end: Complete | Release) -> bool:
        if self._ended:
            return False
        self._ended = True
        told, _, interrupted = await adrive(
            settle(end), self._engine.aio, self._engine.backlog, no_body
        )
        self._seen(end)
        return _was_kept(told, interrupted)


class AsyncFreeClaim(AsyncClaim):
    """As `FreeClaim`, to be awaited."""

    async def renew(self) -> float:  # type: ignore[override]
        """Nothing to renew."""
        return self._job.policy.lease / 1000

    async def complete(self, result: object, usage: object = None) -> bool:  # type: ignore[override]  # noqa: ARG002 - as a claim's
        """Nothing is kept."""
        return False

    async def release(self) -> bool:  # type: ignore[override]
        """Nothing is given back."""
        return False


def _was_kept(told: Ended | None, interrupted: BaseException | None) -> bool:
    if interrupted is not None:
        raise interrupted
    return told is not None and told.kept


def _name(task: Task) -> str:
    return f"{task.task_type} [{task.fingerprint[:16]}]"


class Desk:
    """What claims by hand, results and orders have in common, sync and async."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._policy = config.policy(settings, {})
        self._lock = threading.Lock()
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The store in use; opened at the first need."""
        if self._engine is None:
            with self._lock:
                if self._engine is None:
                    self._engine = Engine(self._settings)
        return self._engine

    def close(self) -> None:
        """Tell the store what is owed to it, and close it; a store that was never used is not opened."""
        if self._engine is not None:
            self._engine.close()

    def job(self, task: Task) -> Job:
        """How calls of this task are guarded: as its decorator says, else as the guard."""
        _check_task(task)
        policy = self._policy if task.policy is None else task.policy
        chosen = config.mode(self._settings, None)  # by hand as well, the environment outranks code
        observes = chosen == "observe"
        if chosen != "off" and observes is not policy.observes:
            mode = Mode.OBSERVE if observes else Mode.ENFORCE
            policy = replace(policy, mode=mode, observes=observes)
        return Job(self.engine, task.task_type, policy, task.codec, task.version)

    def off(self) -> bool:
        """Whether nothing is guarded, nor recorded."""
        return config.mode(self._settings, None) == "off"

    def free(self, task: Task, worker_id: str | None) -> tuple[Engine, Job, Task, record.Claim]:
        """What a claim is made of in mode `off`."""
        return self.engine, self.job(task), task, unguarded(self.ask(task, worker_id))

    def ask(self, task: Task, worker_id: str | None) -> Ask:
        """The question of one call."""
        job = self.job(task)
        digests = task.digests if self.engine.digests else ()
        ask = job.ask(task.fingerprint, task.digest, worker_id, digests)
        caller = self.engine.telemetry.present(ask.caller)
        return replace(ask, address=self.address(task), caller=caller)

    def taken(self, ask: Ask, answer: Claimed | Replay | InFlight) -> record.Claim | None:
        """The claim, if it is one; whoever looks on is told."""
        telemetry = self.engine.telemetry
        match answer:
            case Claimed(claim=claim):
                telemetry.claimed(claim)
                if watch.on():
                    watch.started(claim, self.engine.store)
                return claim
            case Replay(result=result):
                telemetry.reused(ask.caller, result)
            case InFlight():
                telemetry.waits_not(ask.caller)
        return None

    def address(self, task: Task) -> Address:
        """Where the task's record stands."""
        _check_task(task)
        return Address(self.engine.namespace, task.fingerprint, task.scope, task.version)

    def reaching(self, task: Task, timeout: float) -> Flow:
        """The flow that waits for a result, seconds at most."""
        limit, address = config.milliseconds("timeout", timeout, least=0), self.address(task)
        caller = Caller(task.task_type, context.present_worker(), context.present_agent())
        return reach(address, limit, caller, _nonce())

    def forgetting(self, task: Task) -> Forget:
        """The order."""
        return Forget(self.address(task), _nonce(), self._policy.retention)

    def resolving(self, task: Task, result: object) -> Resolve:
        """The order.

        Raises:
            ConfigurationError: this result cannot be stored.

        """
        address = self.address(task)
        value = task.codec.dump(result, limit=self.engine.limit)
        if value.codec == "unstorable":
            raise ConfigurationError(f"{_name(task)}: {value.data.decode(errors='replace')}")
        caller = Caller(task.task_type, context.present_worker(), context.present_agent())
        return Resolve(address, _nonce(), caller, value, self._policy.ttl, self._policy.retention)

    def resolved(self, task: Task, answer: object) -> None:
        """Raise where a fresh result is kept."""
        if isinstance(answer, Replay):
            raise IdemguardError(
                f"{_name(task)}: a fresh result of worker "
                f"{answer.result.claim.caller.worker!r} is kept, so there is nothing to resolve; "
                "forget() the task first to replace it.",
                task_type=task.task_type,
                fingerprint=task.fingerprint,
            )

    def found(
        self, task: Task, found: tuple[record.Result, int] | None, waited: float = 0.0
    ) -> Outcome[Any] | None:
        """A kept result as people see it."""
        if found is None:
            return None
        result, runs = found
        job = self.job(task)
        value = job.restore(self.ask(task, None), result.value, result.claim)
        reply = Reply(
            "reused", claim=result.claim, result=result, spent=result.spent, runs=runs,
            waited=round(waited * 1000),
        )  # fmt: skip
        return outcome(reply, value, task.task_type, task.fingerprint)


def _check_task(task: object) -> None:
    if not isinstance(task, Task):
        raise ConfigurationError(
            f"a Task is needed (Task.of, or guard.task_of), not {type(task).__name__}"
        )


def _nonce() -> str:
    return os.urandom(8).hex()


class Hand:
    """Claims by hand, results and orders, from plain code."""

    _desk: Desk

    def claim(self, task: Task, worker_id: str | None = None) -> Claim | None:
        """The right to execute a task.

        Args:
            task: which.
            worker_id: who will execute; the context's worker where it is not given.

        Returns:
            The claim, to be renewed, completed or released by hand; None where a result is
            kept or somebody is executing.

        Raises:
            UnknownOutcomeError: an execution was lost, and `on_lost` is `"raise"`.
            StoreError: there is no store.

        """
        desk = self._desk
        if desk.off():
            return FreeClaim(*desk.free(task, worker_id))
        engine = desk.engine
        ask = desk.ask(task, worker_id)
        claim = desk.taken(ask, drive(take(ask), engine.store, engine.backlog, no_body))
        return None if claim is None else Claim(engine, desk.job(task), task, claim)

    def wait_result(self, task: Task, timeout: float) -> Outcome[Any] | None:
        """The result of a task, as soon as it is kept.

        Args:
            task: which.
            timeout: seconds.

        Returns:
            What a reusing call would get; None when there is no result in time.

        """
        desk = self._desk
        flow = desk.reaching(task, timeout)
        return desk.found(task, drive(flow, desk.engine.store, desk.engine.backlog, no_body))

    def peek(self, task: Task) -> Outcome[Any] | None:
        """The result that is kept now, or None; nothing is counted."""
        return self.wait_result(task, 0)

    def forget(self, task: Task) -> None:
        """Drop the result and every claim; the next call executes, forced."""
        self._desk.engine.store.perform(self._desk.forgetting(task))

    def resolve(self, task: Task, result: object) -> None:
        """Keep a result that is known from elsewhere; what was lost is unknown no longer.

        Raises:
            IdemguardError: a fresh result is kept.
            ConfigurationError: this one cannot be stored.

        """
        desk = self._desk
        desk.resolved(task, desk.engine.store.perform(desk.resolving(task, result)))

    @property
    def ledger(self) -> ExecutionLedger:
        """What was executed, in this guard's store and namespace."""
        return ExecutionLedger(self._desk.engine.store, namespace=self._desk.engine.own_namespace)

    def close(self) -> None:
        """Tell the store what is owed to it, and give back what it holds open."""
        self._desk.close()


class AsyncHand:
    """The same, to be awaited."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def claim(self, task: Task, worker_id: str | None = None) -> AsyncClaim | None:
        """As `Guard.claim`."""
        need_asyncio()
        desk = self._desk
        if desk.off():
            return AsyncFreeClaim(*desk.free(task, worker_id))
        engine = desk.engine
        ask = desk.ask(task, worker_id)
        claim = desk.taken(ask, await adrive(take(ask), engine.aio, engine.backlog, no_body))
        return None if claim is None else AsyncClaim(engine, desk.job(task), task, claim)

    async def wait_result(self, task: Task, timeout: float) -> Outcome[Any] | None:  # noqa: ASYNC109 - the contract's name
        """As `Guard.wait_result`."""
        need_asyncio()
        desk = self._desk
        flow = desk.reaching(task, timeout)
        return desk.found(task, await adrive(flow, desk.engine.aio, desk.engine.backlog, no_body))

    async def peek(self, task: Task) -> Outcome[Any] | None:
        """As `Guard.peek`."""
        return await self.wait_result(task, 0)

    async def forget(self, task: Task) -> None:
        """As `Guard.forget`."""
        await shielded(self._desk.engine.aio.perform(self._desk.forgetting(task)))

    async def resolve(self, task: Task, result: object) -> None:
        """As `Guard.resolve`."""
        desk = self._desk
        desk.resolved(task, await shielded(desk.engine.aio.perform(desk.resolving(task, result))))

    @property
    def ledger(self) -> AsyncLedger:
        """The ledger, its methods to be awaited."""
        engine = self._desk.engine
        return AsyncLedger(ExecutionLedger(engine.store, namespace=engine.own_namespace))

    async def close(self) -> None:
        """As `Guard.close`."""
        await asyncio.to_thread(self._desk.close)

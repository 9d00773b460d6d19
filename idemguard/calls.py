"""One guarded call, from the question who asks to the outcome that people see.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import hashlib
import inspect
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from idemguard import context, log
from idemguard.claim import Renew, Renewed
from idemguard.context import Current
from idemguard.digests import Digests, raw_digests
from idemguard.drive import Net, adrive, drive, need_asyncio
from idemguard.errors import (
    ConfigurationError,
    IdemguardError,
    ReentrantCallError,
    ResultUnavailableError,
    StoreError,
)
from idemguard.guard import (
    Ask,
    Entry,
    OutOfScope,
    Ran,
    Reply,
    call,
    came_to,
    enter,
    execute,
    task_name,
    unguarded,
)
from idemguard.heart import Beat
from idemguard.journal import watch
from idemguard.outcome import Outcome, declined, is_flow, outcome
from idemguard.record import Address, Caller, Cause, Claim, Mode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Generator

    from idemguard.codec import Value
    from idemguard.engine import Engine
    from idemguard.fingerprint import Identified
    from idemguard.guard import Policy, Wish
    from idemguard.telemetry import Seen, Unseen


@dataclass(frozen=True, slots=True)
class Job:
    """What all calls of one guarded callable share.

    Attributes:
        engine: the store and all that belongs to it.
        task_type: of the tasks.
        policy: how they are guarded.
        codec: of their results.
        version: part of their address, or None.
        agent: whom they are booked to; None: the context's.
        usage: reads the tokens off a result, or None.
        body: what is executed, where all calls execute the same; or None.

    """

    engine: Engine
    task_type: str
    policy: Policy
    codec: Any  # a Codec, or a StreamCodec
    version: str | None = None
    agent: str | None = None
    usage: Callable[[Any], Any] | None = None
    body: Callable[..., Any] | None = None

    # --- asking ----------------------------------------------------------------------------------

    def ask_for(self, found: Identified, worker: str | None = None) -> Ask:
        """The question of one call whose task was identified."""
        digests = raw_digests(found) if self.engine.digests else ()
        return self.ask(found.fingerprint, found.digest, worker, digests)

    def ask(
        self,
        fingerprint: str,
        digest: str | None = None,
        worker: str | None = None,
        digests: Digests = (),
    ) -> Ask:
        """The question of one call, with all that the context says."""
        policy, around = self.policy, context.current()
        if context.bypassing():
            policy = replace(policy, mode=Mode.BYPASS)
        caller = Caller(
            self.task_type,
            worker or context.present_worker(),
            self.agent or context.present_agent(),
            None if around is None else around.execution_id,
            digests=digests,
        )
        address = Address(self.engine.namespace, fingerprint, context.present_scope(), self.version)
        nonce = os.urandom(8).hex()
        if watch.on():
            watch.asked(nonce, self.body)
        return Ask(address, caller, nonce, policy, digest)

    def run(self, ask: Ask, body: Callable[[], Any]) -> Outcome[Any]:
        """Perform one call from plain code; the outcome has the value or the error."""
        seen = self.engine.telemetry.call(ask)
        try:
            return self.end(seen, self._reentrant(ask) or self._driven(seen, body))
        finally:
            seen.left()

    def _driven(self, seen: Seen | Unseen, body: Callable[[], Any]) -> Reply:
        flow, engine = seen.watch(self._flow(seen.ask)), self.engine
        try:
            return drive(
                flow,
                engine.store,
                engine.backlog,
                lambda claim, asked: self._body(seen, claim, asked, body),
            )
        except BaseException as error:  # noqa: BLE001 - told like any other end
            return Reply(came_to(error), error=error)

    async def arun(self, ask: Ask, body: Callable[[], Awaitable[Any]]) -> Outcome[Any]:
        """As `run`, from a coroutine."""
        loop = need_asyncio()
        seen = self.engine.telemetry.call(ask)
        try:
            return self.end(seen, self._reentrant(ask) or await self._adriven(seen, body, loop))
        finally:
            seen.left()

    async def _adriven(
        self,
        seen: Seen | Unseen,
        body: Callable[[], Awaitable[Any]],
        loop: asyncio.AbstractEventLoop,
    ) -> Reply:
        ask, engine, net = seen.ask, self.engine, Net()
        flow = seen.watch(self._flow(ask))
        context.coroutines.add(ask.nonce, loop)
        try:
            return await adrive(
                flow,
                engine.aio,
                engine.backlog,
                lambda claim, asked: self._abody(seen, claim, asked, body, net),
                net,
            )
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - told like any other end
            return Reply(came_to(error), error=error)
        finally:
            context.coroutines.remove(ask.nonce)

    # --- streams: entered, and told, by themselves ------------------------------------------------

    def enter(self, seen: Seen | Unseen, net: Net) -> Entry | Reply:
        """May this stream execute? Else what the call came to.

        Args:
            seen: the call.
            net: told what is held from now on.

        """
        ask = seen.ask
        if (reply := self._reentrant(ask)) is not None:
            return reply
        asked, engine = time.monotonic(), self.engine
        try:
            flow = seen.watch(self._entering(ask))
            entry = drive(flow, engine.store, engine.backlog, no_body, net)
        except BaseException as error:  # noqa: BLE001 - told like any other end
            return Reply(came_to(error), error=error)
        return replace(entry, asked=asked) if isinstance(entry, Entry) else entry

    async def aenter(self, seen: Seen | Unseen, net: Net) -> Entry | Reply:
        """As `enter`, from an async generator."""
        ask = seen.ask
        if (reply := self._reentrant(ask)) is not None:
            return reply
        asked, loop, engine = time.monotonic(), need_asyncio(), self.engine
        context.coroutines.add(ask.nonce, loop)
        try:
            flow = seen.watch(self._entering(ask))
            entry = await adrive(flow, engine.aio, engine.backlog, no_body, net)
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - told like any other end
            return Reply(came_to(error), error=error)
        return replace(entry, asked=asked) if isinstance(entry, Entry) else entry

    def _entering(self, ask: Ask) -> Generator[Wish, Any, Entry | Reply]:
        if ask.digest is UNSEEN:
            return _at_once(Entry(ask, unguarded(ask)))
        return enter(ask)

    def tell(self, seen: Seen | Unseen, entry: Entry, ran: Ran, net: Net) -> Outcome[Any]:
        """A stream has ended."""
        flow, engine = seen.watch(self._ending(entry)), self.engine
        try:
            reply = drive(flow, engine.store, engine.backlog, lambda *_: ran, net)
        except BaseException as error:  # noqa: BLE001 - told like any other end
            reply = Reply("failed", error=error)
        return self.end(seen, reply)

    async def atell(self, seen: Seen | Unseen, entry: Entry, ran: Ran, net: Net) -> Outcome[Any]:
        """As `tell`, from an async generator."""

        async def body(*_: object) -> Ran:
            return ran

        flow, engine = seen.watch(self._ending(entry)), self.engine
        try:
            reply = await adrive(flow, engine.aio, engine.backlog, body, net)
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - told like any other end
            reply = Reply("failed", error=error)
        return self.end(seen, reply)

    def _ending(self, entry: Entry) -> Generator[Wish, Any, Reply]:
        return execute(entry, self._encoder(entry.ask), _never)

    # --- calls that cannot ask --------------------------------------------------------------------

    def unseen(self, error: Exception) -> Ask:
        """The question of an observed call whose task cannot be told: an address of its own."""
        log.tell("identity", "%s: this execution has no stable identity (%s), so nobody else sees it; "
                 "task_of (of a payload: Task.of) raises the whole error",
                 self.task_type, log.words(error))  # fmt: skip
        ask = self.ask("")
        made_up = hashlib.sha256(f"{self.task_type}:unseen:{ask.nonce}".encode()).hexdigest()
        return replace(ask, address=ask.address._replace(fingerprint=made_up), digest=UNSEEN)

    def refuse(self, error: BaseException) -> None:
        """Tell those who listen of a call that got an error before it could ask."""
        self.end(self.engine.telemetry.call(self.ask("")), Reply("refused", error=error))

    def _flow(self, ask: Ask) -> Generator[Wish, Any, Reply]:
        if ask.digest is UNSEEN:
            return execute(Entry(ask, unguarded(ask)), self._encoder(ask), declined)
        return call(ask, self._encoder(ask), declined)

    def _encoder(self, ask: Ask) -> Callable[[Any], Value]:
        return lambda value: self.encode(task_name(ask), value)

    def _above(self, ask: Ask) -> bool:
        """Whether the present code is part of an execution of this task on this store."""
        execution = context.above(ask.address)
        return execution is not None and execution.store is self.engine.store

    def _reentrant(self, ask: Ask) -> Reply | None:
        if ask.policy.mode is not Mode.ENFORCE or not self._above(ask):
            return None
        error = ReentrantCallError(
            f"{task_name(ask)}: called, directly or through others, from its own execution, and "
            "would wait for itself. Call the plain function, or give the inner call other "
            "arguments.",
            task_type=self.task_type,
            fingerprint=ask.address.fingerprint,
        )
        return Reply("refused", error=error)

    # --- the body --------------------------------------------------------------------------------

    def _body(
        self, seen: Seen | Unseen, claim: Claim, asked: float, body: Callable[[], Any]
    ) -> Ran:
        execution, beat = self.start(seen, claim, asked)
        value, error = None, None
        try:
            with seen.inside(execution):
                value = self._whole(body())
        except BaseException as raised:  # noqa: BLE001 - what it means is decided in the flow
            error = raised
        try:
            return self.stop(execution, beat, value, error)
        except BaseException as hit:  # noqa: BLE001 - Ctrl-C: the body has run all the same
            return self.stop(execution, beat, value, hit)

    async def _abody(
        self,
        seen: Seen | Unseen,
        claim: Claim,
        asked: float,
        body: Callable[[], Awaitable[Any]],
        net: Net,
    ) -> Ran:
        execution, beat = self.start(seen, claim, asked)
        value, error = None, None
        try:
            with seen.inside(execution):
                value = await self._awhole(await body())
        except GeneratorExit as dropped:  # nobody is there to be told, but it has run so far
            net.ran = self.stop(execution, beat, None, dropped)
            raise
        except BaseException as raised:  # noqa: BLE001 - what it means is decided in the flow
            error = raised
        return self.stop(execution, beat, value, error)

    def _whole(self, value: Any) -> Any:
        """A value that can be kept; what is yet to be consumed is nothing that is done."""
        if self.policy.observes or not is_flow(value):
            return value
        closing = _closed(value, "close")
        if inspect.iscoroutine(closing):
            closing.close()  # it wants to be awaited, which plain code cannot
        raise self._not_whole(value)

    async def _awhole(self, value: Any) -> Any:
        if self.policy.observes or not is_flow(value):
            return value
        closing = _closed(value, "aclose" if hasattr(value, "aclose") else "close")
        if inspect.isawaitable(closing):
            with suppress(Exception):  # what is wrong is told below
                await closing
        raise self._not_whole(value)

    def _not_whole(self, value: object) -> ConfigurationError:
        kind = type(value).__qualname__
        return ConfigurationError(
            f"{self.task_type}: returned an object of {kind}, which is yet to be consumed, so that "
            "there is nothing to keep. Make it a generator (`yield from ...`, or `async for chunk "
            "in ...: yield chunk`), await it inside, or return a list.",
            task_type=self.task_type,
        )

    def start(self, seen: Seen | Unseen, claim: Claim, asked: float) -> tuple[Current, Beat | None]:
        """The body is about to start."""
        engine = self.engine
        execution = Current(claim, asked, engine.store, price=engine.price, confirm=self._confirm)
        seen.executes(execution)
        if watch.on():
            watch.started(claim, engine.store)
        if execution.parent is not None:
            execution.parent.holds_others()
        if claim.cause is Cause.UNGUARDED:
            return execution, None
        self.engine.tend()
        beat = Beat(execution, self.policy, self.engine.store, self.longest)
        try:
            beat.start()
        except BaseException:  # Ctrl-C: the claim is given back, and must not be taken up again
            beat.stop()
            raise
        return execution, beat

    def stop(
        self,
        execution: Current,
        beat: Beat | None,
        value: Any,
        error: BaseException | None,
        seen: Any = None,
    ) -> Ran:
        """The body has ended, or is given up.

        Args:
            execution: whose.
            beat: its heartbeat.
            value: what is kept of it.
            error: that ended it, or None.
            seen: what `usage=` is given, where that is not the value.

        """
        if beat is not None:
            beat.stop()
        stopped, execution.ended = execution.ended, True
        execution.told_lost = None
        if execution.copied:
            return Ran(value, error, copied=True)
        if error is None and self.usage is not None:
            self._read_usage(execution, value if seen is None else seen)
        elif error is None:
            execution.returned(value)
        took = round((time.monotonic() - execution.started) * 1000)
        spent = execution.spent()
        if watch.on() and not stopped:
            handed = declined(value) if error is None else isinstance(error, OutOfScope)
            watch.stopped(execution.claim, error, spent, took, declined=handed)
        around = next((e for e in execution.ancestors() if not e.ended), None)
        if around is not None and not stopped:  # an interrupt may have it stopped twice
            around.inside(spent, by=execution)
        execution.parent = around  # of a chain of tasks, each keeps none but those that live
        return Ran(value, error, spent, took)

    def _read_usage(self, execution: Current, value: Any) -> None:
        assert self.usage is not None
        try:
            usage = self.usage(value)
        except Exception as error:  # noqa: BLE001 - counting must not cost the result
            log.warn("usage", "%s: usage= failed on a result: %s", self.task_type, log.words(error))
            return
        if usage is not None:
            execution.record_usage(usage)

    def longest(self) -> int:
        if self.policy.max_run is not None:
            return self.policy.max_run
        return self.engine.usual_run(self.task_type)

    def _confirm(self, execution: Current) -> bool:
        """Whether the claim is held, asked anew where its lease may have run out meanwhile."""
        claim = execution.claim
        if not claim.holds or time.monotonic() - execution.renewed < self.policy.lease / 1000:
            return True
        renewal = Renew(
            claim, self.policy.lease, self.longest(), execution.spent(), self.policy.retention
        )
        asked = time.monotonic()
        try:
            answer = self.engine.store.perform(renewal)
        except StoreError:
            return False  # nobody can say so: then it must count as lost
        if isinstance(answer, Renewed) and answer.owns:
            execution.renewed = asked - (self.policy.lease - answer.left) / 1000
            return True
        execution.lose()
        return False

    def encode(self, name: str, value: Any) -> Value:
        """A result as a store keeps it; one that cannot be kept is told in the log.

        Args:
            name: of the task, as people are shown it.
            value: what its execution came to.

        """
        stored: Value = self.codec.dump(value, limit=self.engine.limit)
        if stored.codec == "unstorable":
            log.warn(
                f"unstorable {self.task_type}",
                "%s: executed, but its result cannot be kept, and later calls get a "
                "ResultUnavailableError: %s",
                name, log.unstorable(stored.data.decode(errors="replace"), self.task_type),
            )  # fmt: skip
        return stored

    # --- the end -----------------------------------------------------------------------------------

    def end(self, seen: Seen | Unseen, reply: Reply, *, hold: bool = False) -> Outcome[Any]:
        """What people see of a call.

        Args:
            seen: the call.
            reply: what it came to.
            hold: its consumer has yet to read its result.

        """
        ask, value = seen.ask, reply.value
        if reply.result is not None:
            if (around := context.current()) is not None:
                around.inside(reply.result.spent)
            try:
                value = self.restore(ask, reply.result.value, reply.result.claim)
            except IdemguardError as error:
                reply = replace(reply, source="refused", error=error)
        self._warn(ask, reply)
        came_to = outcome(
            reply,
            None if reply.error is not None else value,
            self.task_type,
            ask.address.fingerprint,
        )
        if not reply.copied:
            seen.end(reply, hold=hold and reply.error is None)
            if watch.on():
                watch.told(ask, reply)
        context.tell(came_to)
        return came_to

    def restore(self, ask: Ask, value: Value, claim: Claim) -> Any:
        """A kept result as the value that it was.

        Raises:
            ResultUnavailableError: it was executed, but its result could not be kept.
            StoreError: what is kept is damaged.

        """
        if value.codec == "unstorable":
            reason = value.data.decode(errors="replace")
            raise ResultUnavailableError(
                f"{task_name(ask)}: executed by worker {claim.caller.worker!r}, but its result "
                f"could not be kept: {reason}. forget() the task to execute it again.",
                worker=claim.caller.worker,
                execution_id=claim.id,
                task_type=self.task_type,
                fingerprint=ask.address.fingerprint,
            )
        try:
            return self.codec.load(value)
        except StoreError as error:
            raise StoreError(
                f"{task_name(ask)}: {error}",
                task_type=self.task_type,
                fingerprint=ask.address.fingerprint,
            ) from error

    def _warn(self, ask: Ask, reply: Reply) -> None:
        claim, error, trouble = reply.claim, reply.error, reply.trouble
        retaken = claim is not None and claim.cause is Cause.LOST and reply.result is None
        plain = reply.source in ("executed", "reused", "failed")
        if plain and trouble is None and not (reply.lost or reply.conflict or retaken):
            return
        name = task_name(ask) if ask.address.fingerprint else self.task_type
        match reply.source:
            case "refused" if error is not None:
                log.note("%s: refused: %s", name, log.words(error))
            case "unguarded" if trouble is not None:
                log.tell("unguarded", "%s: executed without a claim: %s", name, log.words(trouble))
            case "fallback":
                log.note("%s: fallback: executed beside its leader, which took longer than "
                         "wait_timeout", name)  # fmt: skip
            case "declined":
                log.note("%s: declined: handed back by its worker, nothing is kept", name)
        if trouble is not None and reply.source not in ("refused", "unguarded"):
            log.tell(
                "store", "%s: its end is told to the store later: %s", name, log.words(trouble)
            )
        if retaken:
            log.note("%s: taken over from an execution that was lost", name)
        if reply.lost:
            log.tell("lost", "%s: its lease ran out while it was executed; its caller got its "
                     "value, which is not kept where a successor's is", name)  # fmt: skip
        if reply.conflict:
            log.tell("conflict", "%s: its idempotency key came before with another payload", name)


UNSEEN = "unseen"


def free(task_type: str, namespace: str, fingerprint: str, version: str | None) -> Current:
    """What `current()` is in mode `off`: all that a body may ask for, and recorded nowhere.

    Its idempotency key is its own, as if nobody guarded the call.
    """
    address = Address(namespace, fingerprint, context.present_scope(), version)
    caller = Caller(task_type, context.present_worker(), context.present_agent())
    nonce, generation = os.urandom(8).hex(), int.from_bytes(os.urandom(7))
    claim = Claim(address, 0, nonce, Cause.UNGUARDED, generation, 0, holds=False, caller=caller)
    return Current(claim, time.monotonic(), None, price=None, confirm=lambda _: True)


def no_body(*_: object) -> NoReturn:
    """For flows that execute nothing."""
    raise AssertionError("a flow without a body asked for one")


def _closed(value: object, method: str) -> Any:
    """Close what cannot be kept; what its method gives, which may want to be awaited."""
    try:
        return getattr(value, method)()
    except Exception:  # noqa: BLE001 - it has none, or has trouble: what is wrong is told all the same
        return None


def _at_once(entry: Entry) -> Generator[Wish, Any, Entry | Reply]:
    return entry
    yield  # a flow all the same


def _never(_: object) -> bool:
    return False

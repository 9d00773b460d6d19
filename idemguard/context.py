"""Who is calling: worker, agent, scope; which execution is current; who listens to outcomes.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import threading
import time
import weakref
from collections import deque
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, TypeVar

from idemguard import log
from idemguard.errors import ConfigurationError, LeaseLostError
from idemguard.journal import of_tests, watch
from idemguard.pricing import CURRENCY
from idemguard.providers import Reading, is_response, readings
from idemguard.usage import Meter, Usage, is_own, normal, total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from idemguard.outcome import Outcome
    from idemguard.record import Address, Cause, Claim
    from idemguard.usage import Price, Spent

_T = TypeVar("_T")
RECORDED = 8  # sources of usage that are known again where the body returns them

_worker: ContextVar[str | None] = ContextVar("idemguard_worker", default=None)
_agent: ContextVar[str | None] = ContextVar("idemguard_agent", default=None)
_scope: ContextVar[str] = ContextVar("idemguard_scope", default="")
_namespace: ContextVar[str | None] = ContextVar("idemguard_namespace", default=None)
_bypass: ContextVar[bool] = ContextVar("idemguard_bypass", default=False)
_current: ContextVar[Current | None] = ContextVar("idemguard_current", default=None)
_listeners: ContextVar[tuple[list[Outcome[Any]], ...]] = ContextVar(
    "idemguard_listeners", default=()
)


class Current:
    """The execution whose body is running, as `current()` gives it.

    Attributes:
        task_type: of its task.
        fingerprint: of its task, 64 hex digits.
        execution_id: token and nonce together.
        token: of its claim; larger than every earlier one of this task.
        worker: who executes.
        cause: why it started.
        idempotency_key: to be passed downstream; the same over retries, take-overs and
            workers until a result is kept, and a new one after that.

    """

    __slots__ = (
        "__weakref__",
        "_confirm",
        "_lost",
        "_meter",
        "_pid",
        "_recorded",
        "claim",
        "ended",
        "parent",
        "renewed",
        "started",
        "store",
        "told_lost",
    )

    def __init__(
        self,
        claim: Claim,
        asked: float,
        store: object,
        *,
        price: Price | None,
        confirm: Callable[[Current], bool],
    ) -> None:
        self.claim = claim
        self.store = store
        self.parent = current()
        self.ended = False
        self._lost = False
        self._meter = Meter(price, CURRENCY)
        self._recorded: deque[object] = deque(maxlen=RECORDED)
        self._confirm = confirm
        self._pid = os.getpid()
        self.told_lost: Callable[[], None] | None = None
        self.started = time.monotonic()
        self.renewed = asked  # a lease is counted from when it was asked for

    def __repr__(self) -> str:
        return f"<Current {self.execution_id} of {self.task_type} [{self.fingerprint[:16]}]>"

    @property
    def idempotency_key(self) -> str:
        return idempotency_key(self.claim)

    @property
    def task_type(self) -> str:
        return self.claim.caller.task_type

    @property
    def fingerprint(self) -> str:
        return self.claim.address.fingerprint

    @property
    def execution_id(self) -> str:
        return self.claim.id

    @property
    def token(self) -> int:
        return self.claim.token

    @property
    def worker(self) -> str:
        return self.claim.caller.worker

    @property
    def cause(self) -> Cause:
        return self.claim.cause

    @property
    def copied(self) -> bool:
        """Whether this is a forked child of the process that executes, and holds the claim."""
        return os.getpid() != self._pid

    @property
    def lost(self) -> bool:
        """Whether it is known that the claim is no longer held: the result will not be kept."""
        return self._lost

    def lose(self) -> None:
        """The claim is no longer held."""
        before, self._lost = self._lost, True
        if not before and (told := self.told_lost) is not None:
            told()

    def check(self) -> None:
        """Ask before an effect that must not happen twice whether the claim is still held.

        Asks the store where the lease may have run out since it was last renewed.

        Raises:
            LeaseLostError: it is not.

        """
        if self._lost or not self._confirm(self):
            raise LeaseLostError(
                f"{self.task_type} [{self.fingerprint[:16]}]: worker {self.worker!r} no longer "
                "holds the claim; stop here, another execution may be under way.",
                worker=self.worker,
                execution_id=self.execution_id,
                task_type=self.task_type,
                fingerprint=self.fingerprint,
            )

    def record_usage(
        self, source: object = None, /, *, aggregate: bool = False, **given: Any
    ) -> None:
        """Book tokens to this execution, as `idemguard.record_usage` does.

        What cannot be read is told in the log and counted as unknown; it never raises, since
        the tokens are spent and their result is worth keeping.
        """
        try:
            found = reports(source, given)
        except (ValueError, TypeError) as error:
            log.warn("usage", "%s: usage could not be read (%s), and is not booked; give a provider's "
                     "response, or fields of Usage", self.task_type, log.words(error))  # fmt: skip
            return
        if source is not None:
            self._recorded.append(source)
        if aggregate and len(found) > 1:  # a run: its responses may have been told one by one
            found = [_whole(found)]
        for reading in found:
            self._add(reading, aggregate=aggregate)

    def returned(self, value: object) -> None:
        """Book what a value tells that the body returned, if it has not done so."""
        if any(value is source for source in self._recorded):
            return
        found = readings(value, strict=True)
        for reading in found:
            if reading.usage.response_id is not None:
                self._add(reading, returned=True)
        if any(reading.usage.response_id is None for reading in found):
            # may be a total; of a run's that which its responses leave
            self._add(_whole(found), aggregate=True, returned=True)

    def yielded(self, chunk: object) -> None:
        """Book what a chunk tells that the body yielded, if it has not done so."""
        if any(chunk is source for source in self._recorded):
            return
        for reading in readings(chunk, strict=True):
            self._add(reading, returned=reading.closes or not reading.stream)

    def _add(self, reading: Reading, *, aggregate: bool = False, returned: bool = False) -> None:
        self._meter.add(
            **reading._asdict(), aggregate=aggregate, returned=returned, reader=_reader()
        )

    def inside(self, spent: Spent, *, by: Current | None = None) -> None:
        """A guarded call inside this execution has come to its end.

        Args:
            spent: by its execution.
            by: that execution; None where a result was reused.

        """
        self._meter.inside(spent, reused=by is None, meter=None if by is None else by._meter)  # noqa: SLF001 - of the same kind

    def spent(self) -> Spent:
        """What it has spent so far."""
        return self._meter.spent()

    def holds_others(self) -> None:
        """A guarded execution started inside this one."""
        self._meter.nested = True

    def ancestors(self) -> Iterator[Current]:
        """This execution, the one around it, and so on."""
        execution: Current | None = self
        while execution is not None:
            yield execution
            execution = execution.parent


def idempotency_key(claim: Claim) -> str:
    """A key that is one over retries and take-overs, and new once a result was kept."""
    address = claim.address
    parts = (
        address.namespace, address.scope, address.version, address.fingerprint, claim.generation,
    )  # fmt: skip
    return "ig-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:48]


class Coroutines:
    """The calls of this process that only go on where somebody else lets them.

    A coroutine goes on with its loop, a stream with its consumer: from the question to the
    end told, by nonce.
    """

    def __init__(self) -> None:
        self._loops: dict[str, asyncio.AbstractEventLoop] = {}
        self._consumers: dict[str, tuple[object, object]] = {}

    def add(self, nonce: str, loop: asyncio.AbstractEventLoop) -> None:
        """A call begins."""
        self._loops[nonce] = loop

    def remove(self, nonce: str) -> None:
        """It is over."""
        self._loops.pop(nonce, None)
        self._consumers.pop(nonce, None)

    def stranded(self, holder: str) -> bool:
        """Whether that execution is of a coroutine that will never go on: its loop is closed."""
        loop = self._loops.get(_nonce(holder))
        return loop is not None and loop.is_closed()

    def need(self, loop: asyncio.AbstractEventLoop, holder: str | None) -> bool:
        """Whether that execution is of such a call, and stands still while this loop does."""
        return self._loops.get(_nonce(holder)) is loop

    def consumed(self, nonce: str) -> None:
        """A stream is consumed here."""
        self._consumers[nonce] = _consumer()

    def consumed_here(self, holder: str | None, *, whole_thread: bool = False) -> bool:
        """Whether that execution is of a stream whose consumer is the one that would wait.

        Args:
            holder: id of the execution.
            whole_thread: the one that would wait holds up all tasks of its thread.

        """
        consumer = self._consumers.get(_nonce(holder))
        if consumer is None:
            return False
        here = _consumer()
        return consumer[0] is here[0] and (whole_thread or consumer[1] == here[1])


def _nonce(holder: str | None) -> str:
    """Of a call; without the attempt's number."""
    return "" if holder is None else holder.partition("-")[2].partition(".")[0]


class _Thread(threading.local):
    """Tells threads apart; their idents are used again."""

    def __init__(self) -> None:
        self.mark = object()


_thread = _Thread()


def _consumer() -> tuple[object, object]:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return _thread.mark, None if task is None else weakref.ref(task)


coroutines = Coroutines()


def current() -> Current | None:
    """The execution whose body is running here; None outside of one."""
    execution = _current.get()
    if execution is None or not execution.ended:
        return execution
    # a task that outlived the body which started it is still part of the one around that
    return next((e for e in execution.ancestors() if not e.ended), None)


def above(address: Address) -> Current | None:
    """The execution of this address that the present code is part of."""
    execution = current()
    if execution is None:
        return None
    return next(
        (e for e in execution.ancestors() if not e.ended and e.claim.address == address), None
    )


@contextmanager
def _set(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        with suppress(ValueError):  # a coroutine that is dropped is torn down in another context
            variable.reset(token)


def inside(execution: Current) -> AbstractContextManager[None]:
    """Make an execution the current one."""
    return _set(_current, execution)


def enter(execution: Current) -> Token[Current | None]:
    """As `inside`, from its beginning on; what it gives is for `leave`."""
    return _current.set(execution)


def leave(mark: Token[Current | None]) -> bool:
    """Its end; whether this is where it was entered: what is dropped is torn down elsewhere."""
    try:
        _current.reset(mark)
    except ValueError:
        return False
    return True


def record_usage(source: object = None, /, *, aggregate: bool = False, **given: Any) -> None:
    """Book tokens to the current execution; outside of one it does nothing.

    Args:
        source: a provider's response, its usage part, a chunk of its stream, or a dict of any of
            these; a `Usage`, or a mapping with its fields. One response id counts once, of the
            chunks of one stream the latest value per field.
        aggregate: it is a total that may repeat what was reported before, here or by guarded
            calls inside: only the difference counts.
        given: fields of `Usage` as keywords; they outrank the source's. `response_id=` tells
            streams apart that are read in turns.

    """
    execution = current()
    if execution is not None:
        execution.record_usage(source, aggregate=aggregate, **given)
    elif (ended := _current.get()) is not None:
        log.warn("late usage", "%s: usage was told after its body had ended, and is not booked; "
                 "await what the body starts", ended.task_type)  # fmt: skip


def reports(source: object, given: Mapping[str, Any]) -> list[Reading]:
    """What a source of usage tells, in the normal form.

    Args:
        source: see `record_usage`.
        given: fields that outrank the source's.

    Raises:
        ValueError: there is no usage in it that could be read.

    """
    if source is None or isinstance(source, Usage) or is_own(source):
        return [Reading(normal(source, **given))]
    found = readings(source)
    if found:
        return [
            reading._replace(usage=normal(reading.usage, **given)) if given else reading
            for reading in found
        ]
    if given:
        return [Reading(normal(None, **given))]
    if is_response(source):  # a part of a stream that tells nothing of tokens
        return []
    return [Reading(normal(source))]


def _whole(found: list[Reading]) -> Reading:
    """Several readings as one."""
    if len(found) == 1:
        return found[0]
    usage = total(reading.usage for reading in found)
    assert usage is not None
    return Reading(usage)


def _reader() -> object:
    """Who reads a stream: a task, or a thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return _thread.mark if task is None else task


def _name(what: str, name: str) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{what}() takes a name that is not empty, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{what}() takes valid Unicode, not {name!r}") from None
    return name


def worker(name: str) -> AbstractContextManager[None]:
    """Say who is calling: `with worker("w-3"): ...`."""
    return _set(_worker, _name("worker", name))


def agent(name: str) -> AbstractContextManager[None]:
    """Say whom calls are booked to: `with agent("researcher"): ...`."""
    return _set(_agent, _name("agent", name))


def scope(name: str) -> AbstractContextManager[None]:
    """Widen the address: the same task in another scope is another record; scopes nest."""
    part = _name("scope", name).replace("%", "%25").replace("/", "%2F")
    outer = _scope.get()
    return _set(_scope, f"{outer}/{part}" if outer else part)


def use_namespace(name: str | None) -> AbstractContextManager[None]:
    """Have all namespaces lie in this one: what a message brought from another process.

    In a test that is watched it lies in the test's own, unless it is a test's itself.

    Args:
        name: as `namespace_override` gave it there; None changes nothing.

    """
    if name is None:
        return nullcontext()
    return _set(_namespace, _name("use_namespace", name).replace("/", "%2F"))


def namespace_override() -> str | None:
    """The namespace in which all others lie: the context's, else the process's; None: there is none."""
    own, around = _namespace.get(), watch.within()
    if own is None or around is None:
        return around if own is None else own
    return own if of_tests(own) else f"{around}%2F{own}"


def placed(namespace: str) -> str:
    """A namespace where it lies now."""
    around = namespace_override()
    return namespace if around is None else f"{around}/{namespace}"


def bypass() -> AbstractContextManager[None]:
    """Execute without looking: counted as forced, and the kept result is left alone."""
    return _set(_bypass, True)


@contextmanager
def capture() -> Iterator[list[Outcome[Any]]]:
    """Collect the outcome of every guarded call in this context as it ends.

    `with capture() as calls:` gives a list that grows; tasks and threads that inherit the
    context add to it as well.
    """
    calls: list[Outcome[Any]] = []
    with _set(_listeners, (*_listeners.get(), calls)):
        yield calls


def tell(outcome: Outcome[Any]) -> None:
    """Give an outcome to those who listen."""
    for calls in _listeners.get():
        calls.append(outcome)


def present_agent() -> str | None:
    """The context's agent."""
    return _agent.get()


def present_scope() -> str:
    """The context's path of scopes."""
    return _scope.get()


def bypassing() -> bool:
    """Whether the context asks to execute without looking."""
    return _bypass.get()


_default: tuple[int, str] | None = None


def present_worker() -> str:
    """The context's worker; else `IDEMGUARD_WORKER`, else host name and process id."""
    global _default  # noqa: PLW0603 - computed once in each process
    if (name := _worker.get()) is not None:
        return name
    pid = os.getpid()
    if _default is None or _default[0] != pid:
        name = os.environ.get("IDEMGUARD_WORKER") or f"{socket.gethostname()}-{pid}"
        # what of the environment is no valid Unicode could be neither stored nor exported
        _default = (pid, name.encode(errors="replace").decode())
    return _default[1]

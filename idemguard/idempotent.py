"""`@idempotent` and `run_task`: how a callable comes to be guarded.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from idemguard import config, engine
from idemguard.api import AsyncHand, Desk, Hand, Task
from idemguard.calls import free
from idemguard.context import inside
from idemguard.drive import need_asyncio
from idemguard.errors import ConfigurationError
from idemguard.fingerprint import identify_payload
from idemguard.guarded import BoundGuarded, Guarded, guarded
from idemguard.outcome import Outcome
from idemguard.shapes import Shape, callee
from idemguard.spec import ABSENT, check, codec, job, value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping

    from idemguard.calls import Job
    from idemguard.config import Given
    from idemguard.engine import Engine
    from idemguard.fingerprint import Key
    from idemguard.guard import Ask

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class TaskOptions(config.Policies, total=False):
    """What can be said of one task."""

    volatile: Iterable[str]
    keep: Iterable[str]
    version: str | None
    result: Any
    usage: Callable[[Any], Any] | None
    agent: str | None
    guard: Guard | None


class Options(TaskOptions, total=False):
    """What can be said of one callable."""

    task_type: str | None
    key: Key | None


class Guard(Hand):
    """A store, a namespace and policies of one's own, beside the configured ones.

    Args:
        store: a URL (`memory://`, `sqlite:///file.db`), or a store object; `IDEMGUARD_STORE`,
            else `.idemguard/idemguard.db` at the project's root, where it is not given.
        namespace: keeps records apart; `IDEMGUARD_NAMESPACE`, else "default".
        volatile: more names to drop from every payload.
        ttl: seconds that a result is reused, from its completion (900).
        lease: seconds that a claim lives without a renewal (30).
        max_run: seconds that a claim is renewed at most (3600), or `"auto"`: 3 times the p95 of
            the task type's run time, once 20 runs are known.
        wait_timeout: seconds that one leader may keep a waiter waiting (as long as it lives).
        on_timeout: `"fallback"` or `"raise"`.
        on_lost: `"rerun"` or `"raise"`.
        on_store_error: `"raise"` or `"run"`.
        mode: `"enforce"`, `"observe"` or `"off"`; `IDEMGUARD_MODE` outranks it.
        pricer: a function `Usage -> Decimal | None`, prices per million tokens by model, or
            `"genai-prices"`; `IDEMGUARD_PRICER`, else nothing is priced.
        max_result_bytes: the largest result that is stored (8 MiB).
        retention: seconds that records and lines are kept, at least `ttl` (24 h).
        window_retention: seconds that sums are kept (8 days), or None: for ever.
        field_digests: whether lines keep a short digest of each field of a payload, by which
            `idemguard explain` finds undeclared volatile fields (True).
        tracer_provider: of OpenTelemetry, for the spans (the global one); it stays in its process.
        meter_provider: of OpenTelemetry, for the metrics (the global one); it stays in its process.
        record_exceptions: whether spans get an exception's message and stack, and not its type
            alone (False).
        gen_ai_usage: whether spans repeat the usage as `gen_ai.usage.*` (False), for a backend
            that sees no other span with these tokens.

    Raises:
        ConfigurationError: a value that cannot be; it is named.

    """

    def __init__(self, **settings: Unpack[Given]) -> None:
        self.settings = config.settings(settings)
        self._desk = Desk(self.settings)

    @property
    def engine(self) -> Engine:
        """The store in use."""
        return self._desk.engine

    @property
    def aio(self) -> AsyncHand:
        """`claim`, `wait_result`, `peek`, `forget`, `resolve`, `ledger` and `close`, to be awaited."""
        return AsyncHand(self._desk)

    @overload
    def idempotent(self, fn: Callable[P, R], /) -> Callable[P, R]: ...

    @overload
    def idempotent(
        self, /, **options: Unpack[Options]
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    def idempotent(self, fn: Any = None, /, **options: Any) -> Any:
        """As `idemguard.idempotent`, by this guard."""
        return _decorate(fn, {"guard": self} | options)

    @overload
    def run_task(
        self,
        task_type: str,
        payload: Any,
        fn: Callable[[Any], Coroutine[Any, Any, T]],
        *,
        worker_id: str | None = None,
        **policy: Unpack[TaskOptions],
    ) -> Awaitable[Outcome[T]]: ...

    @overload
    def run_task(
        self,
        task_type: str,
        payload: Any,
        fn: Callable[[Any], T],
        *,
        worker_id: str | None = None,
        **policy: Unpack[TaskOptions],
    ) -> Outcome[T]: ...

    def run_task(
        self,
        task_type: str,
        payload: Any,
        fn: Callable[[Any], Any],
        *,
        worker_id: str | None = None,
        **policy: Any,
    ) -> Any:
        """As `idemguard.run_task`, by this guard."""
        return run_task(task_type, payload, fn, worker_id=worker_id, **{"guard": self} | policy)

    def task_of(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Task:
        """The task that a call of a guarded callable is, without calling it.

        Raises:
            ConfigurationError: the callable is not guarded.
            FingerprintError: an argument has no stable identity.

        """
        receiver, guarded_fn = None, fn
        if isinstance(fn, BoundGuarded):
            receiver, guarded_fn = fn._self_instance, fn._self_parent  # noqa: SLF001 - our own
        if not isinstance(guarded_fn, Guarded):
            raise ConfigurationError(f"{fn!r} is not decorated with @idempotent")
        return guarded_fn._self_spec.task(receiver, args, kwargs, self)  # noqa: SLF001 - our own

    def __reduce__(self) -> tuple[Any, ...]:
        # providers stay here: in another process the global ones count
        return _again, (replace(self.settings, tracer_provider=None, meter_provider=None),)


def _again(settings: config.Settings) -> Guard:
    """A guard that crossed to another process: one for each settings there."""
    for guard in _crossed:
        if guard.settings == settings:
            return guard
    guard = Guard(**vars(settings))
    _crossed.append(guard)
    return guard


_crossed: list[Guard] = []


def configure(**settings: Unpack[Given]) -> Guard:
    """Set the guard that counts wherever none is given; what is not given counts as default.

    Args:
        settings: the keywords of `Guard`.

    Returns:
        The guard that is configured now.

    Raises:
        ConfigurationError: a keyword that there is not, or a value that cannot be; it is named.

    """
    guard = Guard(**settings)
    engine.use(guard)
    return guard


@overload
def idempotent(fn: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def idempotent(**options: Unpack[Options]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def idempotent(fn: Any = None, /, **options: Any) -> Any:
    """Guard a callable: however often a task is called, it is executed once, and all get its result.

    Where an argument is not given, the guard's value counts, then the default in parentheses.

    Args:
        fn: the callable, where the decorator is used bare.
        task_type: the kind of work; its name survives a move when given (module and name).
        key: which arguments count (all): a name, names, or a plain function of the bound
            arguments; a string that it returns is an explicit idempotency key.
        volatile: names or paths that do not count: `"request_id"`, `"doc.meta.run_id"`, `"**.ts"`.
        keep: default-volatile names that count here, as `("timestamp",)`.
        version: part of the address: change it to make old results stale (none).
        ttl: seconds that a result is reused, from its completion (900).
        lease: seconds that a claim lives without a renewal (30).
        max_run: seconds that it is renewed at most (3600), or `"auto"`.
        wait_timeout: seconds that one leader may keep a waiter waiting (as long as it lives).
        on_timeout: `"fallback"`: one waiter executes beside the leader; or `"raise"`.
        on_lost: `"rerun"`, or `"raise"` until it is known whether a lost effect happened.
        on_store_error: `"raise"`, or `"run"` without a claim when the store is down.
        mode: `"enforce"`, `"observe"` (count, never hold back), or `"off"`.
        result: the type that a reused result is restored to (the return annotation).
        usage: a plain function of the result that returns its `Usage` (none).
        agent: whom the call is booked to (the context's).
        guard: a `Guard` (the configured one).

    Returns:
        A callable of the same type; or, without `fn`, a decorator.

    Raises:
        ConfigurationError: an argument that cannot be; it is named.

    """
    return _decorate(fn, options)


def _decorate(fn: Any, options: Mapping[str, Any]) -> Any:
    if unknown := sorted(options.keys() - Options.__optional_keys__):
        known = ", ".join(sorted(Options.__optional_keys__))
        raise ConfigurationError(f"@idempotent takes no {', '.join(unknown)}; it takes {known}")
    _check(options)
    if fn is None:
        return functools.partial(_guarded, options=options)
    return _guarded(fn, options=options)


def _guarded(fn: Any, *, options: Mapping[str, Any]) -> Any:
    return guarded(fn, options)


def _check(options: Mapping[str, Any]) -> None:
    guard = options.get("guard")
    if guard is not None and not isinstance(guard, Guard):
        raise ConfigurationError(f"guard= takes a Guard, not {guard!r}")
    check(options)


@overload
def run_task(
    task_type: str,
    payload: Any,
    fn: Callable[[Any], Coroutine[Any, Any, T]],
    *,
    worker_id: str | None = None,
    **policy: Unpack[TaskOptions],
) -> Awaitable[Outcome[T]]: ...


@overload
def run_task(
    task_type: str,
    payload: Any,
    fn: Callable[[Any], T],
    *,
    worker_id: str | None = None,
    **policy: Unpack[TaskOptions],
) -> Outcome[T]: ...


def run_task(
    task_type: str,
    payload: Any,
    fn: Callable[[Any], Any],
    *,
    worker_id: str | None = None,
    **policy: Any,
) -> Any:
    """Call `fn(payload)` at most once for this task, and say what the call came to.

    Args:
        task_type: the kind of work.
        payload: which piece of it, as JSON has it.
        fn: does it; with an async `fn` an awaitable is returned.
        worker_id: who calls; the context's worker where it is not given.
        policy: the keywords of `idempotent`, without `task_type` and `key`.

    Returns:
        The outcome, with the result; or an awaitable of it.

    Raises:
        ConfigurationError: a keyword that cannot be; it is named.
        FingerprintError: something in the payload has no stable identity.
        Exception: whatever `fn` raises, and the errors of a guarded call.

    """
    if unknown := sorted(policy.keys() - TaskOptions.__optional_keys__):
        raise ConfigurationError(f"run_task takes no {', '.join(unknown)}")
    config.text("task_type", task_type)
    if worker_id is not None:
        config.text("worker_id", worker_id)
    if not callable(fn):
        raise ConfigurationError(f"run_task needs a function of the payload, not {fn!r}")
    _check(policy)
    whole = callee(fn)
    if whole.shape not in (Shape.PLAIN, Shape.COROUTINE):
        raise ConfigurationError(
            f"run_task takes a function that returns its result, not one that gives {whole.shape.value}:"
            " decorate it with @idempotent, or return a list"
        )
    results = codec(whole, policy.get("result", ABSENT), task_type)
    found = job(policy.get("guard") or engine.source(), task_type, results, policy, fn)
    awaited = whole.shape is Shape.COROUTINE
    if found is None:
        return _off(task_type, payload, fn, policy, awaited=awaited)
    ask = _ask(found, payload, policy, worker_id)
    if awaited:
        return _awaited_task(found, ask, lambda: fn(payload))
    outcome = found.run(ask, lambda: fn(payload))
    value(outcome)
    return outcome


def _ask(job: Job, payload: object, policy: Mapping[str, Any], worker_id: str | None) -> Ask:
    try:
        found = identify_payload(
            job.task_type,
            payload,
            volatile=policy.get("volatile", ()),
            keep=policy.get("keep", ()),
            extra_volatile=job.engine.settings.volatile,
        )
    except ConfigurationError:
        raise
    except Exception as error:
        if job.policy.observes:
            return job.unseen(error)
        job.refuse(error)
        raise
    return job.ask_for(found, worker_id)


async def _awaited_task(job: Job, ask: Ask, body: Callable[[], Any]) -> Any:
    need_asyncio()
    outcome = await job.arun(ask, body)
    value(outcome)
    return outcome


def _off(
    task_type: str,
    payload: object,
    fn: Callable[[Any], Any],
    policy: Mapping[str, Any],
    *,
    awaited: bool,
) -> Any:
    try:
        fingerprint = identify_payload(
            task_type, payload, volatile=policy.get("volatile", ()), keep=policy.get("keep", ())
        ).fingerprint
    except Exception:  # noqa: BLE001 - switched off, nothing may stand in the way
        fingerprint = ""
    source = policy.get("guard") or engine.source()
    execution = free(
        task_type, config.namespace(source.settings), fingerprint, policy.get("version")
    )
    if not awaited:
        with inside(execution):
            return Outcome("unguarded", fn(payload), task_type, fingerprint)

    async def call() -> Any:
        with inside(execution):
            return Outcome("unguarded", await fn(payload), task_type, fingerprint)

    return call()

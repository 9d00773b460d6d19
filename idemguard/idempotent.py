"""`@idempotent` and `run_task`: how a callable comes to be guarded."""

from __future__ import annotations

import functools
import inspect
import threading
import typing
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

import wrapt

from idemguard import config, engine
from idemguard.api import AsyncHand, Desk, Hand, Task
from idemguard.calls import Job
from idemguard.codec import Codec
from idemguard.context import present_scope
from idemguard.drive import need_asyncio
from idemguard.errors import ConfigurationError
from idemguard.fingerprint import Identity, identify_payload, task_type_of
from idemguard.record import Mode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping

    from idemguard.config import Given
    from idemguard.engine import Engine
    from idemguard.fingerprint import Key
    from idemguard.guard import Ask
    from idemguard.outcome import Outcome

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_ABSENT: Any = object()


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
        pricer: a function `Usage -> Decimal | None`, or prices per million tokens by model.
        max_result_bytes: the largest result that is stored (8 MiB).
        retention: seconds that records and lines are kept, at least `ttl` (24 h).
        window_retention: seconds that sums are kept (8 days), or None: for ever.

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
        if not isinstance(fn, Guarded):
            raise ConfigurationError(f"{fn!r} is not decorated with @idempotent")
        return fn._self_spec.task(args, kwargs, self.settings)  # noqa: SLF001 - our own wrapper


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
    _configured.append(guard)
    engine.use(lambda: guard.engine)
    del _configured[:-1]
    return guard


_configured: list[Guard] = []
_first = threading.Lock()


def default_guard() -> Guard:
    """The configured guard; with nothing configured, one of defaults."""
    if not _configured:
        with _first:
            if not _configured:
                configure()
    return _configured[-1]


class Spec:
    """What one decorated callable is, and how it is guarded.

    Args:
        fn: the plain callable.
        options: the decorator's arguments that were given.

    Raises:
        ConfigurationError: an argument that cannot be; it is named.

    """

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.fn = fn
        self.options = options
        _check_options(options)
        self.guard: Guard | None = options.get("guard")
        self.is_async = _is_async(fn)
        named = options.get("task_type")
        self.task_type = task_type_of(fn) if named is None else config.text("task_type", named)
        self.identity = Identity(
            inspect.signature(fn),
            task_type=self.task_type,
            key=options.get("key"),
            volatile=options.get("volatile", ()),
            keep=options.get("keep", ()),
            configured=() if self.guard is None else self.guard.settings.volatile,
        )
        self.codec = _codec(fn, options.get("result", _ABSENT), self.task_type)
        self._job: tuple[Guard, Job | None] | None = None

    def job(self) -> Job | None:
        """How calls are guarded by the guard that counts now; None: they are not (mode `off`)."""
        guard = self.guard or default_guard()
        if self._job is None or self._job[0] is not guard:
            self._job = (guard, _job(guard, self.task_type, self.codec, self.options))
        return self._job[1]

    def ask(self, job: Job, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Ask:
        """The question of one call.

        Raises:
            FingerprintError: an argument has no stable identity.
            TypeError: the arguments do not fit.

        """
        try:
            found = self.identity.identify(
                args, kwargs, extra_volatile=job.engine.settings.volatile
            )
        except Exception as error:
            if job.policy.mode is Mode.OBSERVE and not _misfit(self.fn, args, kwargs):
                return job.unseen(error)
            job.refuse(error)
            raise
        return job.ask(found.fingerprint, found.digest)

    def task(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: config.Settings
    ) -> Task:
        """The task that a call is."""
        found = self.identity.identify(args, kwargs, extra_volatile=settings.volatile)
        version = self.options.get("version")
        return Task(
            self.task_type, found.fingerprint, present_scope(), version, self.codec, found.digest
        )

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a plain function."""
        job = self.job()
        if job is None:
            return self.fn(*args, **kwargs)
        return _value(job.run(self.ask(job, args, kwargs), lambda: self.fn(*args, **kwargs)))

    def acall(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        """One call of a coroutine function: its task is told now, its claim comes when awaited."""
        job = self.job()
        if job is None:
            return self.fn(*args, **kwargs)  # type: ignore[no-any-return]
        return self._awaited(job, self.ask(job, args, kwargs), args, kwargs)

    async def _awaited(
        self, job: Job, ask: Ask, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return _value(await job.arun(ask, lambda: self.fn(*args, **kwargs)))


class Guarded(wrapt.FunctionWrapper[Any, Any]):
    """A guarded callable; whoever looks at it sees the plain one."""

    def __init__(self, fn: Callable[..., Any], spec: Spec) -> None:
        call = spec.acall if spec.is_async else spec.call
        super().__init__(fn, lambda _wrapped, _instance, args, kwargs: call(args, kwargs))
        self._self_spec = spec

    def __reduce_ex__(self, protocol: typing.SupportsIndex) -> str:
        # by reference, so that a copy and a worker process have the guarded one as well
        return str(self.__wrapped__.__qualname__)


def _value(outcome: Outcome[Any]) -> Any:
    if outcome.error is not None:
        try:
            raise outcome.error
        finally:
            del outcome  # its traceback would hold this frame, and the frame the outcome
    return outcome.result


def _is_async(fn: Any) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(type(fn), "__call__", None)  # noqa: B004 - its shape is asked for
    )


def _codec(fn: Callable[..., Any], result: Any, task_type: str) -> Codec:
    if result is not _ABSENT:
        return Codec(result, where=task_type)
    return Codec.lazy(
        lambda: typing.get_type_hints(fn, include_extras=True)["return"], where=task_type
    )


def _misfit(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError:
        return True
    return False


def _check_options(options: Mapping[str, Any]) -> None:
    config.policy(config.Settings(), {name: options.get(name) for name in config.POLICIES})
    for name in ("version", "agent"):
        if options.get(name) is not None:
            config.text(name, options[name])
    guard, usage = options.get("guard"), options.get("usage")
    if guard is not None and not isinstance(guard, Guard):
        raise ConfigurationError(f"guard= takes a Guard, not {guard!r}")
    if usage is not None and (not callable(usage) or _is_async(usage)):
        raise ConfigurationError(f"usage= takes a plain function of the result, not {usage!r}")


def _job(guard: Guard, task_type: str, codec: Codec, options: Mapping[str, Any]) -> Job | None:
    chosen = config.mode(guard.settings, options.get("mode"))
    if chosen == "off":
        return None
    given = {name: options.get(name) for name in config.POLICIES} | {"mode": chosen}
    return Job(
        guard.engine,
        task_type,
        config.policy(guard.settings, given),
        codec,
        options.get("version"),
        options.get("agent"),
        options.get("usage"),
    )


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
        raise ConfigurationError(f"@idempotent takes no {', '.join(unknown)}")
    if fn is None:
        return functools.partial(_guarded, options=options)
    return _guarded(fn, options=options)


def _guarded(fn: Any, *, options: Mapping[str, Any]) -> Any:
    if not callable(fn):
        raise ConfigurationError(f"@idempotent decorates a callable, not {fn!r}")
    if isinstance(fn, Guarded):
        raise ConfigurationError(f"{fn.__qualname__} is guarded already: decorate it once")
    return Guarded(fn, Spec(fn, options))


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
    _check_options(policy)
    codec = _codec(fn, policy.get("result", _ABSENT), task_type)
    job = _job(policy.get("guard") or default_guard(), task_type, codec, policy)
    if job is None:
        return _off(task_type, payload, fn, policy)
    ask = _ask(job, payload, policy, worker_id)
    if _is_async(fn):
        return _awaited_task(job, ask, lambda: fn(payload))
    outcome = job.run(ask, lambda: fn(payload))
    _value(outcome)
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
        if job.policy.mode is Mode.OBSERVE:
            return job.unseen(error)
        job.refuse(error)
        raise
    return job.ask(found.fingerprint, None, worker_id)


async def _awaited_task(job: Job, ask: Ask, body: Callable[[], Any]) -> Any:
    need_asyncio()
    outcome = await job.arun(ask, body)
    _value(outcome)
    return outcome


def _off(
    task_type: str, payload: object, fn: Callable[[Any], Any], policy: Mapping[str, Any]
) -> Any:
    from idemguard.outcome import Outcome  # noqa: PLC0415 - the kill switch's own path

    try:
        fingerprint = identify_payload(
            task_type, payload, volatile=policy.get("volatile", ()), keep=policy.get("keep", ())
        ).fingerprint
    except Exception:  # noqa: BLE001 - switched off, nothing may stand in the way
        fingerprint = ""
    if not _is_async(fn):
        return Outcome("unguarded", fn(payload), task_type, fingerprint)

    async def call() -> Any:
        return Outcome("unguarded", await fn(payload), task_type, fingerprint)

    return call()

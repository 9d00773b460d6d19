"""What one decorated callable is, and how its calls are guarded.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from idemguard import config, engine
from idemguard.api import Task
from idemguard.calls import Job, free
from idemguard.codec import Codec
from idemguard.context import inside, present_scope
from idemguard.digests import raw_digests
from idemguard.errors import ConfigurationError
from idemguard.fingerprint import Identity, task_type_of
from idemguard.shapes import Callee, Shape, callee, finally_returned, is_async, returned, yielded
from idemguard.streams import StreamCodec, astream, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from idemguard.context import Current
    from idemguard.engine import Source
    from idemguard.guard import Ask
    from idemguard.outcome import Outcome

ABSENT: Any = object()
_MARKS = {Shape.COROUTINE: "__await__", Shape.STREAM: "__next__", Shape.ASTREAM: "__anext__"}


class _Main:
    __module__ = "__main__"


class Spec:
    """What one decorated callable is, and how it is guarded.

    Args:
        fn: the plain callable, or a `classmethod` or `staticmethod` of one.
        options: the decorator's arguments that were given, checked by `check`.
        home: what `__main__` was where a callable comes from that cloudpickle brought.

    Raises:
        ConfigurationError: an argument that cannot be; it is named.

    """

    def __init__(self, fn: Any, options: Mapping[str, Any], home: str | None = None) -> None:
        self.options = options
        self._home = home
        self.source: Source | None = options.get("guard")
        self.callee = callee(fn)
        named = options.get("task_type")
        self.task_type = (
            task_type_of(self.callee.named) if named is None else config.text("task_type", named)
        )
        self.identity = self._identity()
        self.codec = codec(self.callee, options.get("result", ABSENT), self.task_type)
        self._owned = False
        self._written_in_a_class = self.callee.method_like
        self._job: tuple[Source, Job | None] | None = None
        if self.callee.binding in ("bound", "object"):
            self._receive()

    def _identity(self) -> Identity:
        return Identity(
            self.callee.signature,
            task_type=self.task_type,
            key=self.options.get("key"),
            volatile=self.options.get("volatile", ()),
            keep=self.options.get("keep", ()),
            configured=() if self.source is None else self.source.settings.volatile,
        )

    def carried(self) -> tuple[Mapping[str, Any], str]:
        """What makes it anew in a process whose `__main__` is another: options, and `home`."""
        main = task_type_of(_Main).rpartition(".")[0]
        return {**self.options, "task_type": self.task_type}, self._home or main

    # --- whose it is -----------------------------------------------------------------------------

    def own(self, owner: type) -> None:
        """It was found as a method of a class.

        Raises:
            ConfigurationError: nothing says what identifies an instance.

        """
        if self.callee.binding == "function":
            self.identity.method_of(owner)
        elif self.callee.binding == "class":
            self.identity.class_method()
        self._owned = True

    def _receive(self) -> None:
        """An object is guarded, or a method of one: what identifies it is asked of its class.

        A task type of its own may stand for an object, as it does for a local function.
        """
        whole = self.callee
        is_named = whole.binding == "object" and self.options.get("task_type") is not None
        if whole.receiver is None:
            if not is_named:
                raise ConfigurationError(
                    f"{whole.plain!r} has a name that may stand for many: give it a task type: "
                    '@idempotent(task_type="...")',
                    task_type=self.task_type,
                )
            return
        try:
            self._owned_by(whole.receiver)
        except ConfigurationError as error:
            if not is_named:
                more = ', or name this one: task_type="..."' if whole.binding == "object" else ""
                raise ConfigurationError(f"{error}{more}", task_type=self.task_type) from None
            self.callee = replace(whole, plain=whole.receiver, receiver=None)
            self.identity = self._identity()

    def _owned_by(self, receiver: object) -> None:
        """Found out by what it is called on: no class has told whose method it is."""
        if isinstance(receiver, type):
            self.identity.class_method()
        else:
            self.identity.method_of(type(receiver))
        self._owned = True

    # --- calls -----------------------------------------------------------------------------------

    def job(self) -> Job | None:
        """How calls are guarded by the guard that counts now; None: they are not (mode `off`)."""
        source = self.source or engine.source()
        if self._job is None or self._job[0] is not source:
            self._job = (source, self._new(source))
        return self._job[1]

    def _new(self, source: Source) -> Job | None:
        return job(source, self.task_type, self.codec, self.options, self.callee.plain)

    def ask(
        self, job: Job, receiver: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Ask:
        """The question of one call.

        Raises:
            FingerprintError: an argument has no stable identity.
            TypeError: the arguments do not fit.

        """
        try:
            found = self._identified(receiver, args, kwargs, job.engine.settings)
        except Exception as error:
            if job.policy.observes and not self._misfit(receiver, args, kwargs):
                return job.unseen(error)
            job.refuse(error)
            raise
        return job.ask_for(found)

    def _identified(
        self,
        receiver: object,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        settings: config.Settings,
    ) -> Any:
        may_be_bound = self._written_in_a_class or receiver is not None
        args, kwargs = self._all(receiver, args, kwargs)
        if may_be_bound and not self._owned and args:
            self._owned_by(args[0])
        if may_be_bound and self._home is not None and args:
            args = (self._at_home(args[0]), *args[1:])
        return self.identity.identify(args, kwargs, extra_volatile=settings.volatile)

    def _at_home(self, receiver: Any) -> Any:
        """Its name, for a class that says `__main__` in every process that it was brought to."""
        is_class = isinstance(receiver, type) and receiver.__module__ == "__main__"
        if not is_class or callable(self.options.get("key")):
            return receiver
        return f"{self._home}.{receiver.__qualname__}"

    def _all(
        self, receiver: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """With the receiver, and with what a partial adds."""
        whole = self.callee
        if whole.binding in ("function", "class") and receiver is not None:
            args = (receiver, *args)
        if whole.args or whole.kwargs:
            args, kwargs = (*whole.args, *args), {**whole.kwargs, **kwargs}
        return (args if whole.receiver is None else (whole.receiver, *args)), kwargs

    def _misfit(self, receiver: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        args, kwargs = self._all(receiver, args, kwargs)
        try:
            self.callee.signature.bind(*args, **kwargs)
        except TypeError:
            return True
        return False

    def task(
        self, receiver: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], source: Source
    ) -> Task:
        """The task that a call is."""
        found = self._identified(receiver, args, kwargs, source.settings)
        mine = self._new(source)
        return Task(
            self.task_type,
            found.fingerprint,
            present_scope(),
            self.options.get("version"),
            self.codec,
            found.digest,
            None if mine is None else mine.policy,
            raw_digests(found),
        )

    def call(
        self, fn: Callable[..., Any], receiver: object, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """One call, whatever its shape; its task is told now.

        Args:
            fn: what to execute; bound, where there is a receiver.
            receiver: the instance or class that it is bound to, or None.
            args: of the call.
            kwargs: of the call.

        """
        job = self.job()
        if job is None:
            return self._off(fn, receiver, args, kwargs)
        ask = self.ask(job, receiver, args, kwargs)

        def body() -> Any:
            return self._shaped(fn(*args, **kwargs))

        match self.callee.shape:
            case Shape.PLAIN:
                return value(job.run(ask, lambda: fn(*args, **kwargs)))
            case Shape.COROUTINE:
                return _awaited(job, ask, body)
            case Shape.STREAM:
                return stream(job, ask, body)
            case Shape.ASTREAM:
                return astream(job, ask, body)

    def _off(
        self, fn: Callable[..., Any], receiver: object, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Straight through; a body that asks for `current()` finds it all the same."""
        if self.callee.shape in (Shape.STREAM, Shape.ASTREAM):
            return fn(*args, **kwargs)
        source = self.source or engine.source()
        try:
            fingerprint = self._identified(receiver, args, kwargs, source.settings).fingerprint
        except Exception:  # noqa: BLE001 - switched off, nothing may stand in the way
            fingerprint = ""
        namespace, version = config.namespace(source.settings), self.options.get("version")
        execution = free(self.task_type, namespace, fingerprint, version)
        if self.callee.shape is Shape.COROUTINE:
            return _freely(execution, lambda: fn(*args, **kwargs))
        with inside(execution):
            return fn(*args, **kwargs)

    def _shaped(self, made: Any) -> Any:
        """What a callable gave, if it is what the function that it wraps gives."""
        shape = self.callee.shape
        if hasattr(made, _MARKS[shape]):
            return made
        raise ConfigurationError(
            f"{self.task_type}: wraps a function that gives {shape.value}, and gives an object of "
            f"{type(made).__qualname__}: guard the function beneath its decorator",
            task_type=self.task_type,
        )


async def _awaited(job: Job, ask: Ask, body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return value(await job.arun(ask, body))


async def _freely(execution: Current, body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with inside(execution):
        return await body()


def value(outcome: Outcome[Any]) -> Any:
    """What the caller gets: the result, or its error raised."""
    if outcome.error is not None:
        try:
            raise outcome.error
        finally:
            del outcome  # its traceback would hold this frame, and the frame the outcome
    return outcome.result


def codec(whole: Callee, result: Any, task_type: str) -> Any:
    """Of a callable's results: by `result=`, else by what it is annotated with."""
    plain = whole.plain
    if whole.shape in (Shape.STREAM, Shape.ASTREAM):
        chunk = _codec(lambda: yielded(plain), result, task_type)
        return StreamCodec(chunk, _codec(lambda: finally_returned(plain), ABSENT, task_type))
    return _codec(lambda: returned(plain), result, task_type)


def _codec(annotation: Callable[[], Any], result: Any, task_type: str) -> Codec:
    if result is not ABSENT:
        return Codec(result, where=task_type)
    return Codec.lazy(annotation, where=task_type)


def check(options: Mapping[str, Any]) -> None:
    """Arguments that can be told wrong before anything else is known.

    Raises:
        ConfigurationError: one that is; it is named.

    """
    config.policy(config.Settings(), {name: options.get(name) for name in config.POLICIES})
    for name in ("version", "agent"):
        if options.get(name) is not None:
            config.text(name, options[name])
    usage = options.get("usage")
    if usage is not None and (not callable(usage) or is_async(usage)):
        raise ConfigurationError(f"usage= takes a plain function of the result, not {usage!r}")


def job(
    source: Source,
    task_type: str,
    codec: Any,
    options: Mapping[str, Any],
    body: Callable[..., Any],
) -> Job | None:
    """How calls of a body are guarded; None: they are not (mode `off`)."""
    chosen = config.mode(source.settings, options.get("mode"))
    if chosen == "off":
        return None
    given = {name: options.get(name) for name in config.POLICIES} | {"mode": chosen}
    return Job(
        source.engine,
        task_type,
        config.policy(source.settings, given),
        codec,
        options.get("version"),
        options.get("agent"),
        options.get("usage"),
        body,
    )

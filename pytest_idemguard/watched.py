"""Calls of functions that nobody guards: what identifies one, and what is told of it.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

Payload: TypeAlias = "Callable[[tuple[Any, ...], dict[str, Any]], tuple[str, Any] | None]"

WATCHED = "watched"  # cause, and the namespace of those that no guard has


# --- what identifies a call ------------------------------------------------------------------------


def arguments(fn: Callable[..., Any], task: str, *, skipped: int) -> Payload:
    """A function's call is told by its arguments, the first ones left out."""
    signature = inspect.signature(fn)

    def payload(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any] | None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return None  # it will say so itself
        bound.apply_defaults()
        given = list(bound.arguments.items())[skipped:]
        return task, {name: _stable(value) for name, value in given}

    return payload


def request(package: str) -> Payload:
    """A package's request is told by where it goes and what it asks."""

    def payload(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any] | None:
        options = next(
            (one for one in (*args, *kwargs.values()) if hasattr(one, "json_data")), None
        )
        if options is None or str(options.method).lower() != "post":
            return None  # what is only read may be read again
        body = options.json_data
        fields = body if isinstance(body, dict) else {"body": body}
        where = {"url": str(options.url), "base_url": str(getattr(args[0], "base_url", ""))}
        given = {name: _stable(value) for name, value in {**fields, **where}.items()}
        return f"{package} {options.url}", given

    return payload


def _stable(value: object) -> object:
    """A value that has an identity; what has none is only equal to itself."""
    from idemguard import task_fingerprint

    try:
        task_fingerprint("value", {"value": value})
    except Exception:  # noqa: BLE001 - a foreign object's own trouble
        return {"object": _name(value)}
    return value


_named: dict[int, tuple[weakref.ref[Any], str]] = {}


def _name(value: object) -> str:
    """One name per object, as long as it lives."""
    known = _named.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    name = f"{type(value).__qualname__} {uuid.uuid4()}"
    with suppress(TypeError):  # then it is never the same
        _named[id(value)] = (weakref.ref(value), name)
    return name


# --- counting --------------------------------------------------------------------------------------


class _Run:
    """One call of a watched function."""

    def __init__(self, task: str, payload: Any) -> None:
        from idemguard import context
        from idemguard.digests import raw_digests
        from idemguard.fingerprint import identify_payload
        from idemguard.journal import watch, where

        self._watch = watch
        found = identify_payload(task, payload)
        self._task = {
            "id": uuid.uuid4().hex, "ns": context.placed(WATCHED), "task": task,
            "fp": found.fingerprint,
        }  # fmt: skip
        self._started = time.monotonic()
        watch.emit({
            "kind": "start", **self._task, "cause": WATCHED, "worker": context.present_worker(),
            "parent": None, "store": "none", "thread": threading.current_thread().name,
            "digests": raw_digests(found), "scope": context.present_scope(), "version": None,
            "where": where(),
        })  # fmt: skip

    def end(self, value: object = None, error: BaseException | None = None) -> None:
        """It has returned, or raised."""
        took = round((time.monotonic() - self._started) * 1000)
        tokens, cost = (None, None) if error is not None else _spent(value)
        self._watch.emit({
            "kind": "stop", **self._task, "took": took, "declined": False, "tokens": tokens,
            "error": None if error is None else type(error).__qualname__, "cost": cost,
        })  # fmt: skip
        self._watch.emit({
            "kind": "call", **self._task, "source": "executed" if error is None else "failed",
            "waited": 0, "lost": False, "tokens": None, "cost": None,
        })  # fmt: skip


def _spent(value: object) -> tuple[int | None, str | None]:
    """What a response tells of its usage."""
    from idemguard import config, engine
    from idemguard.pricing import CURRENCY
    from idemguard.providers import readings
    from idemguard.usage import Meter

    try:
        meter = Meter(config.price(engine.source().settings), CURRENCY)
        for reading in readings(value, strict=True):
            meter.add(**reading._asdict())
        spent = meter.spent()
    except Exception:  # noqa: BLE001 - counting must not cost the result
        return None, None
    tokens = None if spent.usage is None else spent.usage.total_tokens
    return tokens, None if spent.price is None else str(spent.price)


def _began(payload: Payload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run | None:
    from idemguard.journal import watch

    if not watch.on():
        return None
    try:
        found = payload(args, kwargs)
        return None if found is None else _Run(*found)
    except Exception:  # noqa: BLE001 - watching must not stand in the way
        return None


def watched(fn: Callable[..., Any], payload: Payload) -> Callable[..., Any]:
    """A function of the same shape whose calls are counted.

    Args:
        fn: the plain function.
        payload: task type and payload of a call, by its arguments; None: it is not counted.

    """
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            run = _began(payload, args, kwargs)
            return await _aended(run, fn(*args, **kwargs))

        return acall
    if inspect.isasyncgenfunction(fn):

        @functools.wraps(fn)
        async def astream(*args: Any, **kwargs: Any) -> Any:
            run = _began(payload, args, kwargs)
            with _Ending(run):
                async for chunk in fn(*args, **kwargs):
                    yield chunk

        return astream
    if inspect.isgeneratorfunction(fn):

        @functools.wraps(fn)
        def stream(*args: Any, **kwargs: Any) -> Any:
            run = _began(payload, args, kwargs)
            with _Ending(run):
                return (yield from fn(*args, **kwargs))

        return stream

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = _began(payload, args, kwargs)
        with _Ending(run) as ending:
            ending.value = fn(*args, **kwargs)
            return ending.value

    return call


async def _aended(run: _Run | None, awaitable: Any) -> Any:
    with _Ending(run) as ending:
        ending.value = await awaitable
        return ending.value


class _Ending:
    """Tells the end of a run, whichever it is."""

    def __init__(self, run: _Run | None) -> None:
        self._run = run
        self.value: Any = None

    def __enter__(self) -> _Ending:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._run is not None:
            self._run.end(self.value, error)

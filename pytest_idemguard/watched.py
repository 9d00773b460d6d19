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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import wrapt

from pytest_idemguard.kept import Kept

Payload: TypeAlias = "Callable[[tuple[Any, ...], dict[str, Any]], tuple[str, Any] | None]"

WATCHED = "watched"  # cause, and the namespace of those that no guard has


# --- what identifies a call ------------------------------------------------------------------------


def arguments(fn: Callable[..., Any], task: str, *, skipped: int) -> Payload:
    """A function's call is told by its arguments, the first ones left out."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # written in C, it may not tell
        return lambda args, kwargs: (
            task,
            {"args": [_stable(value) for value in args[skipped:]], **_stable_all(kwargs)},
        )

    def payload(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any] | None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return None  # it will say so itself
        bound.apply_defaults()
        return task, _stable_all(dict(list(bound.arguments.items())[skipped:]))

    return payload


def _stable_all(given: dict[str, Any]) -> dict[str, Any]:
    return {name: _stable(value) for name, value in given.items()}


BESIDE = ("params", "extra_json", "files", "content")  # what a request sends beside its JSON


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
        beside = {name: sent for name in BESIDE if (sent := getattr(options, name, None))}
        return f"{package} {options.url}", _stable_all({**fields, **where, **beside})

    return payload


def _stable(value: object, depth: int = 0) -> object:
    """A value that has an identity; what has none is only equal to itself."""
    from idemguard import task_fingerprint

    try:
        task_fingerprint("value", {"value": value})
    except Exception:  # noqa: BLE001 - a foreign object's own trouble
        if depth < DEPTH and type(value) in (list, tuple):
            return [_stable(one, depth + 1) for one in value]  # type: ignore[attr-defined]
        if depth < DEPTH and type(value) is dict:
            pairs = [[_stable(key), _stable(one, depth + 1)] for key, one in value.items()]
            return {"pairs": pairs}
        if isinstance(value, str):  # no valid Unicode
            return {"text": value.encode(errors="backslashreplace").decode()}
        return {"object": _name(value)}
    return value


DEPTH = 5  # of lists and dicts in which objects are told apart
KEPT = 4096  # objects that are known though nothing tells of their end
_named: dict[int, tuple[Callable[[], Any], str]] = {}
_kept: deque[object] = deque()


def _name(value: object) -> str:
    """One name per object, as long as it lives."""
    known = _named.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    name = f"{type(value).__qualname__} {uuid.uuid4()}"
    held: Callable[[], Any]
    try:
        held = weakref.ref(value)
    except TypeError:
        held = functools.partial(_same, value)
        _kept.append(value)
        if len(_kept) > KEPT:
            _named.pop(id(_kept.popleft()), None)
    _named[id(value)] = held, name
    return name


def _same(value: object) -> object:
    return value


# --- counting --------------------------------------------------------------------------------------


class _Thread(threading.local):
    counting = False  # what is watched may be used for it, too, and is then no run


_thread = _Thread()


@contextmanager
def _counting() -> Iterator[None]:
    before, _thread.counting = _thread.counting, True
    try:
        yield
    finally:
        _thread.counting = before


class Run:
    """One call of a watched function.

    Args:
        task: its task type.
        payload: what identifies it.

    """

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
        self._pid, self._ended, self._meter = Kept.getpid(), False, _meter()
        self.stepping = False  # the next chunk of its stream is under way
        self._started = time.monotonic()
        watch.emit({
            "kind": "start", **self._task, "cause": WATCHED, "worker": context.present_worker(),
            "parent": None, "store": "none", "thread": threading.current_thread().name,
            "digests": raw_digests(found), "scope": context.present_scope(), "version": None,
            "where": where(),
        })  # fmt: skip

    def read(self, value: object) -> None:
        """Book what an answer, or a chunk of it, tells of its usage."""
        from idemguard.providers import readings

        with _counting(), suppress(Exception):  # it must not cost the result
            for reading in readings(value, strict=True):
                again = reading.closes or not reading.stream  # it may tell what chunks have told
                self._meter.add(**reading._asdict(), returned=again)

    def end(self, value: object = None, error: BaseException | None = None) -> None:
        """It has returned, or raised; what comes after that is no news."""
        if self._ended or Kept.getpid() != self._pid:  # of a forked copy the parent tells
            return
        self._ended = True
        with _counting():
            self._tell_end(value, error)

    def _tell_end(self, value: object, error: BaseException | None) -> None:
        took = round((time.monotonic() - self._started) * 1000)
        self.read(value)
        spent = self._meter.spent()
        self._watch.emit({
            "kind": "stop", **self._task, "took": took, "declined": False,
            "error": None if error is None else type(error).__qualname__,
            "tokens": None if spent.usage is None else spent.usage.total_tokens,
            "cost": None if spent.price is None else str(spent.price),
            "responses": spent.responses,
        })  # fmt: skip
        self._watch.emit({
            "kind": "call", **self._task, "source": "executed" if error is None else "failed",
            "waited": 0, "lost": False, "tokens": None, "cost": None,
        })  # fmt: skip


def _meter() -> Any:
    from idemguard import config, engine
    from idemguard.pricing import CURRENCY
    from idemguard.usage import Meter

    try:
        return Meter(config.price(engine.source().settings), CURRENCY)
    except Exception:  # noqa: BLE001 - without prices it counts all the same
        return Meter()


class Request(Run):
    """One request of an LLM package: it ends when its answer was read, closed, or collected."""

    def end(self, value: object = None, error: BaseException | None = None) -> None:
        """It has returned, maybe an answer that is still to be read, or raised."""
        answer = None if error is not None else _http(value)
        if answer is None:
            super().end(value, error)
        elif answer.is_closed and not _told_by_parts(answer):
            super().end(_json(answer))  # read whole, and told as the bytes that it is
        elif not self._follows(answer):
            super().end()

    def _follows(self, answer: Any) -> bool:
        try:
            if not answer.is_closed:  # else a stand-in for a server has made it at once
                answer.stream = _Bytes(answer, self)
            _unread[answer] = self
            weakref.finalize(answer, super().end)
        except Exception:  # noqa: BLE001 - watching must not stand in the way
            return False
        return True


_unread: weakref.WeakKeyDictionary[Any, Run] = weakref.WeakKeyDictionary()


def _http(value: object) -> Any:
    """The HTTP response beneath a stream, or a raw response; None: there is none to be seen."""
    with suppress(Exception):  # a foreign object's own trouble
        for found in (
            value, getattr(value, "http_response", None), getattr(value, "response", None),
        ):  # fmt: skip
            if all(hasattr(found, name) for name in ("is_closed", "stream", "headers")):
                return found
    return None


def _told_by_parts(answer: Any) -> bool:
    return "event-stream" in answer.headers.get("content-type", "")


def _json(answer: Any) -> Any:
    with suppress(Exception):
        return answer.json()
    return None


class _Bytes(wrapt.ObjectProxy[Any]):
    """The bytes of an answer: seen as they are read, for who reads them past the package's parser.

    Args:
        answer: that they are of; it holds this, and must not be held by it.
        run: of its request.

    """

    def __init__(self, answer: Any, run: Request) -> None:
        super().__init__(answer.stream)
        self._self_run = run
        whole = "json" in answer.headers.get("content-type", "")
        self._self_parts: list[bytes] | None = [] if whole else None
        kind: Callable[..., Any] = type(answer)
        self._self_again = functools.partial(kind, answer.status_code, headers=answer.headers)

    def __iter__(self) -> Any:
        with self._self_failing():
            for part in self.__wrapped__:
                self._self_seen(part)
                yield part

    async def __aiter__(self) -> Any:
        with self._self_failing():
            async for part in self.__wrapped__:
                self._self_seen(part)
                yield part

    def close(self) -> None:
        try:
            self.__wrapped__.close()
        finally:
            self._self_closed()

    async def aclose(self) -> None:
        try:
            await self.__wrapped__.aclose()
        finally:
            self._self_closed()

    def _self_seen(self, part: bytes) -> None:
        if self._self_parts is not None:
            self._self_parts.append(part)

    @contextmanager
    def _self_failing(self) -> Iterator[None]:
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            if not self._self_run.stepping:  # else the package says what it makes of it
                self._self_run.end(error=error)
            raise

    def _self_closed(self) -> None:
        if self._self_run.stepping:
            return
        if self._self_parts:
            with suppress(Exception):  # it was left before its end
                answer = self._self_again(content=b"".join(self._self_parts))
                self._self_run.read(answer.json())
        self._self_run.end()


# --- functions that count --------------------------------------------------------------------------


def _began(
    payload: Payload, kind: type[Run], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Run | None:
    if _thread.counting:
        return None
    with _counting():
        try:
            from idemguard.journal import watch

            found = payload(args, kwargs) if watch.on() else None
            return None if found is None else kind(*found)
        except Exception:  # noqa: BLE001 - watching must not stand in the way
            return None


Begin: TypeAlias = "Callable[[tuple[Any, ...], dict[str, Any]], Run | None]"


def watched(fn: Any, payload: Payload, kind: type[Run] = Run) -> Callable[..., Any]:
    """A function of the same shape whose calls are counted.

    Args:
        fn: the plain callable.
        payload: task type and payload of a call, by its arguments; None: it is not counted.
        kind: of its runs.

    """
    begin = functools.partial(_began, payload, kind)
    # an object is what its class's `__call__` is
    shapes = fn, getattr(type(fn), "__call__", None)  # noqa: B004 - the function itself is asked
    if any(map(inspect.iscoroutinefunction, shapes)):

        @functools.wraps(fn)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            run = begin(args, kwargs)
            return await _aended(run, fn(*args, **kwargs))

        return acall
    if any(map(inspect.isasyncgenfunction, shapes)):
        return _astream(fn, begin)
    if any(map(inspect.isgeneratorfunction, shapes)):
        return _stream(fn, begin)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = begin(args, kwargs)
        with _Ending(run) as ending:
            value = fn(*args, **kwargs)
            if inspect.iscoroutine(value):  # of a coroutine function beneath a plain decorator
                ending.run = None
                return _aended(run, value)
            ending.value = value
            return value

    return call


def chunks(plain: Any) -> Callable[..., Any]:
    """The method by which a package's stream gives its chunks, seen by the run of its request."""

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:  # noqa: ARG001 - as others
        return _unread.get(getattr(args[0], "response", None))

    return (_astream if inspect.isasyncgenfunction(plain) else _stream)(plain, begin)


async def _aended(run: Run | None, awaitable: Any) -> Any:
    with _Ending(run) as ending:
        ending.value = await awaitable
        return ending.value


def _stream(fn: Any, begin: Begin) -> Callable[..., Any]:
    @functools.wraps(fn)
    def stream(*args: Any, **kwargs: Any) -> Any:
        with _Ending(begin(args, kwargs)) as ending:
            inner = fn(*args, **kwargs)
            act, given = inner.send, None
            while True:
                ending.step()
                try:
                    chunk = act(given)
                except StopIteration as end:
                    ending.value = end.value
                    return end.value
                ending.stepped(chunk)
                try:
                    act, given = inner.send, (yield chunk)
                except GeneratorExit:
                    inner.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - it is the inner one's
                    act, given = inner.throw, error

    return stream


def _astream(fn: Any, begin: Begin) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def astream(*args: Any, **kwargs: Any) -> Any:
        with _Ending(begin(args, kwargs)) as ending:
            inner = fn(*args, **kwargs)
            act, given = inner.asend, None
            try:
                while True:
                    ending.step()
                    try:
                        chunk = await act(given)
                    except StopAsyncIteration:
                        return
                    ending.stepped(chunk)
                    try:
                        act, given = inner.asend, (yield chunk)
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001 - it is the inner one's
                        act, given = inner.athrow, error
            finally:
                await inner.aclose()

    return astream


class _Ending:
    """Tells the end of a run, whichever it is."""

    def __init__(self, run: Run | None) -> None:
        self.run = run
        self.value: Any = None

    def __enter__(self) -> _Ending:
        return self

    def step(self) -> None:
        """The next chunk is asked for."""
        if self.run is not None:
            self.run.stepping = True

    def stepped(self, chunk: object) -> None:
        """And is there."""
        if self.run is not None:
            self.run.stepping = False
            self.run.read(chunk)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.run is not None:
            self.run.end(self.value, error)


class Stand(wrapt.ObjectProxy[Any]):
    """Stands for a callable object, and is it in all but its calls.

    Args:
        found: the object.
        made: called in its place.

    """

    def __init__(self, found: Any, made: Callable[..., Any]) -> None:
        super().__init__(found)
        self._self_made = made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._self_made(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)

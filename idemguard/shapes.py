"""What kind of callable it is: which shape its calls have, and what it is bound to."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
)
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from idemguard.errors import ConfigurationError

_FLOWS = {Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator}


class Shape(Enum):
    """What a call of it gives."""

    PLAIN = "a value"
    COROUTINE = "an awaitable"
    STREAM = "a generator"
    ASTREAM = "an async generator"


@dataclass(frozen=True, slots=True)
class Callee:
    """A callable taken apart.

    Attributes:
        plain: the function, without `classmethod`, `staticmethod` and `functools.partial`.
        shape: what a call gives.
        binding: "class" or "static" under these decorators; "function" for all else.
        args: that a partial puts before those of a call.
        kwargs: that a partial adds to those of a call.

    """

    plain: Callable[..., Any]
    shape: Shape
    binding: str = "function"
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def signature(self) -> inspect.Signature:
        """Of the plain function; `self` or `cls` included.

        Raises:
            ConfigurationError: it has none.

        """
        try:
            return inspect.signature(self.plain)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{self.plain!r} tells no signature ({error}): guard a function that calls it"
            ) from error

    @property
    def method_like(self) -> bool:
        """Whether it was written in a class, with `self` or `cls` first."""
        if self.binding == "class":
            return True
        owner = getattr(self.plain, "__qualname__", "").rpartition(".")[0]
        if self.binding == "static" or not owner or owner.endswith("<locals>"):
            return False
        first = next(iter(self.signature.parameters), None)
        return first in ("self", "cls")


def callee(fn: Any) -> Callee:
    """Take a callable apart.

    Raises:
        ConfigurationError: it is nothing that can be guarded.

    """
    if isinstance(fn, (classmethod, staticmethod)):
        binding = "class" if isinstance(fn, classmethod) else "static"
        return Callee(fn.__func__, _shape(fn.__func__), binding)
    if isinstance(fn, type):
        raise ConfigurationError(f"@idempotent guards calls, not the class {fn.__qualname__}")
    if not callable(fn):
        raise ConfigurationError(f"@idempotent decorates a callable, not {fn!r}")
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    plain = fn
    while isinstance(plain, functools.partial):
        args, kwargs = (*plain.args, *args), {**plain.keywords, **kwargs}
        plain = plain.func
    return Callee(plain, _shape(fn), "function", args, kwargs)


def _shape(fn: Any) -> Shape:
    """By itself; else, where it wraps another, by what it wraps: it hands on what that gives."""
    for candidate in (fn, inspect.unwrap(fn)):
        while isinstance(candidate, functools.partial):
            candidate = candidate.func  # noqa: PLW2901 - the innermost counts
        for function in (candidate, getattr(type(candidate), "__call__", None)):  # noqa: B004
            if inspect.isasyncgenfunction(function):
                return Shape.ASTREAM
            if inspect.isgeneratorfunction(function):
                return Shape.STREAM
            if inspect.iscoroutinefunction(function):
                return Shape.COROUTINE
    return Shape.PLAIN


def is_async(fn: Any) -> bool:
    """Whether a call gives a coroutine."""
    return _shape(fn) is Shape.COROUTINE


def returned(fn: Callable[..., Any]) -> Any:
    """What a function is annotated to return; its names are those of its own module.

    Raises:
        KeyError: it is not annotated.
        NameError: a name in the annotation is not known.

    """
    target: Any = inspect.unwrap(fn)
    if not inspect.isroutine(target):
        target = type(target).__call__
    return typing.get_type_hints(target, include_extras=True)["return"]


def yielded(fn: Callable[..., Any]) -> Any:
    """What a generator function is annotated to yield.

    Raises:
        KeyError: it is not annotated.
        NameError: a name in the annotation is not known.

    """
    return _part(returned(fn), 0)


def finally_returned(fn: Callable[..., Any]) -> Any:
    """What a generator function is annotated to return at its end.

    Raises:
        KeyError: it is not annotated.
        NameError: a name in the annotation is not known.

    """
    return _part(returned(fn), 2)


def _part(annotation: Any, number: int) -> Any:
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) not in _FLOWS or len(arguments) <= number:
        raise KeyError(number)
    return arguments[number]

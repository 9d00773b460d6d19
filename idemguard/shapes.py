"""What kind of callable it is: which shape its calls have, and what it is bound to.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from idemguard.errors import ConfigurationError

_FLOWS = {Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator}
_C_METHODS = (
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
# What these make looks like the generator function beneath it, and gives something else.
_MANAGERS = {
    contextlib.contextmanager(iter).__code__,
    contextlib.asynccontextmanager(aiter).__code__,
}


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
        plain: the function, without `classmethod`, `staticmethod`, `functools.partial`, or the
            object that it is bound to.
        shape: what a call gives.
        binding: "class" or "static" under these decorators; "bound" for the method of an object
            or a class; "object" for what is called by its `__call__`; "function" for all else.
        args: that a partial puts before those of a call.
        kwargs: that a partial adds to those of a call.
        receiver: what "bound" is bound to; the object, where its `__call__` is written in Python.

    """

    plain: Callable[..., Any]
    shape: Shape
    binding: str = "function"
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    receiver: Any = None

    @property
    def named(self) -> Any:
        """What its task type is named after."""
        if self.binding != "object":
            return self.plain
        return type(self.plain if self.receiver is None else self.receiver)

    @property
    def signature(self) -> inspect.Signature:
        """Of the plain function; `self` or `cls` included.

        Raises:
            ConfigurationError: it has none.

        """
        try:
            return inspect.signature(self.plain)
        except (ValueError, TypeError) as error:
            found = _of_class(self.plain)
            if found is not None:
                return found
            raise ConfigurationError(
                f"{self.plain!r} tells no signature ({error}): guard a function that calls it"
            ) from error

    @property
    def method_like(self) -> bool:
        """Whether it was written in a class, with `self` or `cls` first."""
        if self.binding == "class":
            return True
        owner = getattr(self.plain, "__qualname__", "").rpartition(".")[0]
        if self.binding != "function" or not owner or owner.endswith("<locals>"):
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
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    plain = fn
    while isinstance(plain, functools.partial):
        args, kwargs = (*plain.args, *args), {**plain.keywords, **kwargs}
        plain = plain.func
    _refuse(plain)
    shape = _shape(fn)
    if inspect.ismethod(plain):
        return Callee(plain.__func__, shape, "bound", args, kwargs, plain.__self__)
    if hasattr(plain, "__qualname__"):
        return Callee(plain, shape, "function", args, kwargs)
    if inspect.isfunction(call := type(plain).__call__):
        return Callee(call, shape, "object", args, kwargs, plain)
    return Callee(plain, shape, "object", args, kwargs)


def _refuse(fn: Any) -> None:
    """Raise a `ConfigurationError` for what cannot be guarded, whatever else is said of it."""
    if isinstance(fn, type):
        raise ConfigurationError(
            f"@idempotent guards calls, not the class {fn.__qualname__}: decorate a method of it, "
            "or a function that makes one"
        )
    if not callable(fn):
        beneath = ": decorate the function beneath it" if hasattr(fn, "__get__") else ""
        raise ConfigurationError(f"@idempotent decorates a callable, not {fn!r}{beneath}")
    owner = getattr(fn, "__self__", None)
    bound = inspect.isbuiltin(fn) and owner is not None and not inspect.ismodule(owner)
    if bound or isinstance(fn, _C_METHODS):
        raise ConfigurationError(
            f"{fn!r} is a method written in C, and its object has no name: guard a function that "
            "calls it"
        )
    while fn is not None:
        if getattr(fn, "__code__", None) in _MANAGERS:
            raise ConfigurationError(
                f"{fn.__qualname__} gives a context manager, which is no result: guard a function "
                "that is called inside it"
            )
        fn = getattr(fn, "__wrapped__", None)


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


def _of_class(plain: Any) -> inspect.Signature | None:
    """What its class says where the object itself confuses `inspect` (a mock of older Pythons)."""
    call = getattr(type(plain), "__call__", None)  # noqa: B004 - the function itself is asked
    if not inspect.isfunction(call):
        return None
    whole = inspect.signature(call)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


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
    # Alone: what only a type checker knows of its parameters stands in nobody's way.
    alone = types.SimpleNamespace(
        __annotations__={"return": _annotations(target)["return"]},
        __globals__=getattr(target, "__globals__", {}),
        __module__=getattr(target, "__module__", None),
        __type_params__=getattr(target, "__type_params__", ()),
    )
    return typing.get_type_hints(alone, include_extras=True)["return"]


def _annotations(function: Any) -> Mapping[str, Any]:
    if sys.version_info >= (3, 14):  # where they are made when they are asked for, all at once
        import annotationlib  # noqa: PLC0415

        return annotationlib.get_annotations(function, format=annotationlib.Format.FORWARDREF)
    return getattr(function, "__annotations__", {})


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

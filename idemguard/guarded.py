"""The guarded callable: whoever looks at it sees the plain one; copies of it are guarded too.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import TYPE_CHECKING, Any

import wrapt

from idemguard.errors import ConfigurationError
from idemguard.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import SupportsIndex


class BoundGuarded(wrapt.BoundFunctionWrapper[Any, Any]):
    """A guarded method of one instance, or of a class."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _class_of(self, BoundGuarded, sys._getframe(1))  # noqa: SLF001

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        receiver = self._self_receiver()
        owner = self._self_owner if receiver is None else receiver
        return getattr, (owner, self.__wrapped__.__name__)

    def __repr__(self) -> str:
        return f"<guarded {self.__wrapped__!r}>"

    def __copy__(self) -> BoundGuarded:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        receiver = self._self_receiver()
        if receiver is None or isinstance(receiver, type):
            return self
        return self._self_parent.__get__(copy.deepcopy(receiver, memo), self._self_owner)

    def _self_receiver(self) -> Any:
        return getattr(self.__wrapped__, "__self__", None)


class Guarded(wrapt.FunctionWrapper[Any, Any]):
    """A guarded callable.

    Args:
        fn: the plain one, or a `classmethod` or `staticmethod` of one.
        spec: how it is guarded.

    """

    __bound_function_wrapper__ = BoundGuarded

    def __init__(self, fn: Any, spec: Spec) -> None:
        super().__init__(fn, spec.call)
        self._self_spec = spec

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _class_of(self, Guarded, sys._getframe(1))  # noqa: SLF001

    def __set_name__(self, owner: type, name: str) -> None:
        kind: Any = type(self.__wrapped__)
        if hasattr(kind, "__get__"):
            self._self_spec.own(owner)
        if hasattr(kind, "__set_name__"):
            kind.__set_name__(self.__wrapped__, owner, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        spec = self._self_spec
        name = getattr(spec.callee.plain, "__qualname__", "")
        if _found(spec.callee.plain, name) is self and not _by_value(spec.callee.plain):
            return str(name)  # by reference: what is imported there is guarded as well
        # In two steps: the function may hold itself, and is whole only when all else is.
        return _blank, (), (self.__wrapped__, *spec.carried()), None, None, _guard_anew

    def __repr__(self) -> str:
        return f"<guarded {self.__wrapped__!r}>"

    def __copy__(self) -> Guarded:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Guarded:
        return self


def _blank() -> Guarded:
    return Guarded.__new__(Guarded)


def _guard_anew(blank: Guarded, state: tuple[Any, Mapping[str, Any], str]) -> None:
    fn, options, home = state
    blank.__init__(fn, Spec(fn, options, home))  # type: ignore[misc]


def _found(plain: Any, name: str) -> Any:
    """What is imported by the name of a function; None: nothing."""
    found = sys.modules.get(getattr(plain, "__module__", None) or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


# --- cloudpickle: it takes what looks like a function for one, and carries its code alone ---------


def _class_of(proxy: Any, own: type, asking: Any) -> Any:
    """The class of the plain callable; to cloudpickle, which would pickle that, the own one."""
    return own if _is_cloudpickle(asking) else proxy.__wrapped__.__class__


def _by_value(plain: Any) -> bool:
    """Whether it is asked by cloudpickle, which takes this function along."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - there is no other way to tell who asks
    while frame is not None and not _is_cloudpickle(frame):
        frame = frame.f_back
    if frame is None:
        return False
    by_value = frame.f_globals.get("list_registry_pickle_by_value", set)() | {"__main__"}
    return any(package in by_value for package in _packages(plain.__module__))


def _is_cloudpickle(frame: Any) -> bool:
    # joblib, Ray and Spark have one of their own inside them
    return "cloudpickle" in frame.f_globals.get("__name__", "").split(".")


def _packages(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]


def guarded(fn: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Guard a callable.

    Raises:
        ConfigurationError: it cannot be guarded, or an argument that cannot be.

    """
    if type(fn) in _GUARDED:
        raise _refused(fn)
    spec = Spec(fn, options)
    for inner in _beneath(fn):
        if type(inner) in _GUARDED and inner._self_spec.task_type == spec.task_type:  # noqa: SLF001 - our own
            raise _refused(fn)
    return Guarded(fn, spec)


_GUARDED = (Guarded, BoundGuarded)


def _beneath(fn: Any) -> Iterator[Any]:
    while fn is not None:
        yield fn
        if isinstance(fn, functools.partial):
            fn = fn.func
        else:
            fn = getattr(fn, "__func__", None) or getattr(fn, "__wrapped__", None)


def _refused(fn: Any) -> ConfigurationError:
    name = getattr(fn, "__qualname__", None) or repr(fn)
    return ConfigurationError(f"{name} is guarded already: decorate it once")

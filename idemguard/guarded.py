"""The guarded callable: whoever looks at it sees the plain one; copies of it are guarded too."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import wrapt

from idemguard.errors import ConfigurationError
from idemguard.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import SupportsIndex


class BoundGuarded(wrapt.BoundFunctionWrapper[Any, Any]):
    """A guarded method of one instance, or of a class."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        owner = self._self_instance
        if owner is None:
            owner = _owner(self.__wrapped__)
        return getattr, (owner, self.__wrapped__.__name__)

    def __copy__(self) -> BoundGuarded:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy  # noqa: PLC0415 - whoever calls this has loaded it

        owner = self._self_instance
        if owner is None or isinstance(owner, type):
            return self
        return getattr(copy.deepcopy(owner, memo), self.__wrapped__.__name__)


def _owner(function: Any) -> Any:
    found: Any = sys.modules[function.__module__]
    for name in function.__qualname__.split(".")[:-1]:
        found = getattr(found, name)
    return found


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

    def __set_name__(self, owner: type, name: str) -> None:
        self._self_spec.own(owner)
        named = getattr(type(self.__wrapped__), "__set_name__", None)
        if named is not None:
            named(self.__wrapped__, owner, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        plain = self._self_spec.callee.plain
        name = getattr(plain, "__qualname__", None)
        if name is not None and not _by_value(plain, name):
            return str(name)  # by reference: what is imported there is guarded as well
        return _guard_anew, (self.__wrapped__, dict(self._self_spec.options))

    def __copy__(self) -> Guarded:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Guarded:
        return self


def _by_value(plain: Any, name: str) -> bool:
    """Whether cloudpickle takes a function along that the other side could not import."""
    if not _for_cloudpickle():
        return False
    module = plain.__module__
    if module == "__main__" or "<locals>" in name:
        return True
    try:
        importlib.import_module(module)
    except ImportError:
        return True
    return module in getattr(sys.modules["cloudpickle"], "list_registry_pickle_by_value", set)()


def _for_cloudpickle() -> bool:
    # pickle and cloudpickle ask in the same words, and only the latter can carry code
    if "cloudpickle" not in sys.modules:
        return False
    frame: Any = sys._getframe(1)  # noqa: SLF001 - there is no other way to tell who asks
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "cloudpickle":
            return True
        frame = frame.f_back
    return False


def _guard_anew(fn: Any, options: Mapping[str, Any]) -> Guarded:
    return Guarded(fn, Spec(fn, options))


def guarded(fn: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Guard a callable.

    Raises:
        ConfigurationError: it cannot be guarded, or an argument that cannot be.

    """
    if isinstance(fn, (Guarded, BoundGuarded)):
        raise ConfigurationError(f"{fn.__qualname__} is guarded already: decorate it once")
    return Guarded(fn, Spec(fn, options))

"""Where functions are watched that nobody guards: by name, in LLM packages, in modules that are loaded later.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_idemguard.watched import arguments, request, watched

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PACKAGES = ("openai", "anthropic")
CLIENTS = ("SyncAPIClient", "AsyncAPIClient")


def install(targets: Iterable[str], *, llm: bool) -> Callable[[], None]:
    """Watch from now on, modules that are loaded later too.

    Args:
        targets: `MODULE:QUALNAME` each.
        llm: whether to watch the LLM packages.

    Returns:
        What ends it.

    Raises:
        pytest.UsageError: a target that names no function.

    """
    patches: dict[str, list[Callable[[ModuleType], None]]] = {}
    undo: list[Callable[[], None]] = []
    for target in targets:
        name, _, qualname = target.strip().partition(":")
        if not name or not qualname:
            raise pytest.UsageError(f"idemguard_watch: {target!r} is not MODULE:QUALNAME")
        patches.setdefault(name, []).append(functools.partial(_patch, qualname, undo))
    if llm:
        for package in PACKAGES:
            patch = functools.partial(_patch_client, package, undo)
            patches.setdefault(f"{package}._base_client", []).append(patch)
    for name in patches.keys() & sys.modules.keys():
        for each in patches.pop(name):
            each(sys.modules[name])
    finder = _Finder(patches)
    sys.meta_path.insert(0, finder)

    def end() -> None:
        sys.meta_path.remove(finder)
        for step in reversed(undo):
            step()

    return end


def _patch(qualname: str, undo: list[Callable[[], None]], module: ModuleType) -> None:
    *outer, name = qualname.split(".")
    owner: Any = module
    try:
        for part in outer:
            owner = getattr(owner, part)
        found = inspect.getattr_static(owner, name)
    except AttributeError:
        raise pytest.UsageError(
            f"idemguard_watch: module {module.__name__!r} has no {qualname!r}"
        ) from None
    plain = getattr(found, "__func__", found)
    if not callable(plain):
        raise pytest.UsageError(f"idemguard_watch: {module.__name__}:{qualname} is no function")
    bound = bool(outer) and not isinstance(found, staticmethod)
    task = f"{module.__name__}:{qualname}"
    made: Any = watched(plain, arguments(plain, task, skipped=int(bound)))
    if isinstance(found, (staticmethod, classmethod)):
        made = type(found)(made)
    _set(owner, name, found, made, undo)
    if not outer:  # who has imported it by name has it as well
        for other in list(sys.modules.values()):
            names = [key for key, value in _names(other) if value is found]
            for key in names:
                _set(other, key, found, made, undo)


def _names(module: object) -> list[tuple[str, object]]:
    try:
        return list(vars(module).items())
    except TypeError:
        return []


def _set(owner: Any, name: str, old: Any, new: Any, undo: list[Callable[[], None]]) -> None:
    setattr(owner, name, new)
    undo.append(lambda: setattr(owner, name, old))


def _patch_client(package: str, undo: list[Callable[[], None]], module: ModuleType) -> None:
    for name in CLIENTS:
        client = getattr(module, name)
        # the method that tries again by itself: one request is one run
        plain = inspect.getattr_static(client, "request")
        _set(client, "request", plain, watched(plain, request(package)), undo)


# --- modules that are loaded later -----------------------------------------------------------------


class _Finder:
    """Patches modules as soon as they are loaded.

    Args:
        patches: by name of the module.

    """

    def __init__(self, patches: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As other finders have it, with a loader that patches."""
        if name not in self._patches:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self._patches[name])  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    def __init__(self, real: Any, patches: list[Callable[[ModuleType], None]]) -> None:
        self._real, self._patches = real, patches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the real one."""
        made: ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As the real one, and then the patches."""
        self._real.exec_module(module)
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        for patch in self._patches:
            patch(module)

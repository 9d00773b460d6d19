"""Where functions are watched that nobody guards: by name, in LLM packages, in modules that are loaded later.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from pytest_idemguard.plugin import asked
from pytest_idemguard.watched import Request, Stand, arguments, chunks, request, watched

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

Patch: TypeAlias = "Callable[[ModuleType], None]"
Loaded: TypeAlias = "Callable[[str, ModuleType], None]"

PACKAGES = ("openai", "anthropic")
CLIENTS = ("SyncAPIClient", "AsyncAPIClient")
STREAMS = ("Stream", "AsyncStream")
UNSEEN = "idemguard_unseen"  # in what a worker of pytest-xdist hands over


def install(
    targets: Iterable[str], *, llm: bool, config: pytest.Config | None = None
) -> Callable[[], None]:
    """Watch from now on, modules that are loaded later too.

    Args:
        targets: `MODULE:QUALNAME` each.
        llm: whether to watch the LLM packages.
        config: of the run, which tells at its end what was never imported; None: nobody tells.

    Returns:
        What ends it.

    Raises:
        pytest.UsageError: a target that names no function.

    """
    watching = Watching(targets, llm=llm)
    watching.begin()
    if config is not None:
        config.pluginmanager.register(watching, "idemguard-watching")
    return watching.end


class Watching:
    """The functions that are watched, and the hooks that tell which of them are not.

    Args:
        targets: `MODULE:QUALNAME` each.
        llm: whether to watch the LLM packages.

    Raises:
        pytest.UsageError: a target that is not written so.

    """

    def __init__(self, targets: Iterable[str], *, llm: bool) -> None:
        self._patches: dict[str, list[Patch]] = {}
        self._names: dict[str, str] = {}  # the modules of targets
        self._loaded: set[str] = set()
        self._unseen: list[dict[str, str]] = []  # what each worker has not seen
        self._made: dict[int, tuple[Any, Any]] = {}  # what stands for what
        self._undo: list[Callable[[], None]] = []
        self._told: dict[str, str] = {}
        for target in map(str.strip, targets):
            name, _, qualname = target.partition(":")
            if not name or not qualname:
                raise pytest.UsageError(f"idemguard_watch: {target!r} is not MODULE:QUALNAME")
            self._names[target] = name
            patch = functools.partial(self._patch, target, qualname)
            self._patches.setdefault(name, []).append(patch)
        for package in PACKAGES if llm else ():
            patch = functools.partial(self._patch_client, package)
            self._patches.setdefault(f"{package}._base_client", []).append(patch)
        self._finder = _Finder(self._patches.keys(), self.loaded)

    def begin(self) -> None:
        """Watch what is loaded, and what will be.

        Raises:
            pytest.UsageError: a target that names no function.

        """
        sys.meta_path.insert(0, self._finder)
        try:
            self._look()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Have everything as it was."""
        with suppress(ValueError):
            sys.meta_path.remove(self._finder)
        for step in reversed(self._undo):
            step()
        stands = {id(made): found for made, found in self._made.values()}
        for module, key, value in _globals():  # it was imported by name meanwhile
            if id(value) in stands:
                setattr(module, key, stands[id(value)])

    def loaded(self, name: str, module: ModuleType) -> None:
        """A module is there.

        Raises:
            pytest.UsageError: it has no such function.

        """
        for patch in self._patches[name]:
            patch(module)
        self._loaded.add(name)

    def _look(self) -> None:
        for name in self._patches.keys() - self._loaded:
            if (module := sys.modules.get(name)) is not None:
                self.loaded(name, module)

    # --- what to watch -----------------------------------------------------------------------------

    def _patch(self, task: str, qualname: str, module: ModuleType) -> None:
        *outer, name = qualname.split(".")
        owner: Any = module
        try:
            for part in outer:
                owner = getattr(owner, part)
            found = _attribute(owner, name)
        except AttributeError:
            raise pytest.UsageError(
                f"idemguard_watch: module {module.__name__!r} has no {qualname!r}"
            ) from None
        if id(found) in self._made or _is_guarded(found):
            return  # it is counted already
        made = _watched(found, task, in_class=isinstance(owner, type))
        try:
            self._set(owner, name, found, made)
        except (AttributeError, TypeError):
            raise pytest.UsageError(
                f"idemguard_watch: {task} cannot be watched: nothing else can be put in its place"
            ) from None
        self._made[id(made)] = made, found
        if owner is module:  # who has imported it by name has it as well
            for other, key, value in _globals():
                if value is found:
                    self._set(other, key, found, made)

    def _patch_client(self, package: str, module: ModuleType) -> None:
        # the method that tries again by itself: one request is one run
        made = functools.partial(watched, payload=request(package), kind=Request)
        try:
            for kind in CLIENTS:
                self._replace(getattr(module, kind), "request", made)
            for kind in STREAMS:
                self._replace(getattr(module, kind), "__stream__", chunks)
        except AttributeError as error:
            raise pytest.UsageError(
                f"idemguard_watch_llm: this version of {package} cannot be watched: {error}"
            ) from None

    def _replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        plain = inspect.getattr_static(owner, name)
        self._set(owner, name, plain, make(plain))

    def _set(self, owner: Any, name: str, old: Any, new: Any) -> None:
        own = name in getattr(owner, "__dict__", {})  # what a class inherits is not its own

        def undo() -> None:
            if getattr(owner, "__dict__", {}).get(name) is not new:
                return  # somebody else has set it since
            if own:
                setattr(owner, name, old)
            else:
                delattr(owner, name)

        setattr(owner, name, new)
        self._undo.append(undo)

    # --- what was not seen -------------------------------------------------------------------------

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """A module that there is not is told before the first test; now all test folders are known."""
        self._look()  # put there by hand, or by a loader of an old kind
        if hasattr(session.config, "workerinput"):
            return
        for target, why in self._not_seen().items():
            if why == MISSING:
                raise pytest.UsageError(
                    f"idemguard_watch: {target}: {why.format(self._names[target])}"
                )

    def _not_seen(self) -> dict[str, str]:
        """Why nothing was watched, by target."""
        return {
            target: NEVER if _exists(name) else MISSING
            for target, name in self._names.items()
            if name not in self._loaded
        }

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended; what one that crashed has seen nobody knows."""
        self._unseen.append(getattr(node, "workeroutput", {}).get(UNSEEN, {}))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Workers hand over what they have not seen; what nobody has is told."""
        unseen, config = self._not_seen(), session.config
        if hasattr(config, "workerinput"):
            config.workeroutput[UNSEEN] = unseen  # type: ignore[attr-defined]
            return
        for worker in self._unseen:
            unseen = {target: worker[target] for target in unseen if target in worker}
        if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return  # not all that was asked for has run
        if asked(config).mode == "off":  # nothing was to be counted
            unseen = {target: why for target, why in unseen.items() if why == MISSING}
        self._told = unseen
        if MISSING in unseen.values():
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The targets of which nothing was counted."""
        config = terminalreporter.config
        if not self._told or config.option.no_summary:
            return
        terminalreporter.section("idemguard: not watched")
        for target, why in self._told.items():
            said = f"idemguard_watch: {target}: {why.format(self._names[target])}"
            terminalreporter.write_line(said, red=why == MISSING, yellow=why == NEVER)


MISSING = "there is no module {!r}"
NEVER = "nothing was counted, the module {!r} was never imported"


def _exists(name: str) -> bool:
    """Whether a module can be found; nothing is imported for it."""
    whole, path = "", None
    for part in name.split("."):
        if whole and path is None:
            return False  # of no package
        whole = f"{whole}.{part}".lstrip(".")
        if (module := sys.modules.get(whole)) is not None:
            path = getattr(module, "__path__", None)
            continue
        try:
            found = (one.find_spec(whole, path) for one in sys.meta_path)
            spec: ModuleSpec | None = next(filter(None, found), None)
        except Exception:  # noqa: BLE001 - a finder of an old kind, which may know it
            return True
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


# --- one function ------------------------------------------------------------------------------------


def _attribute(owner: Any, name: str) -> Any:
    if not isinstance(owner, (type, ModuleType)):  # an object: its method as it is bound
        return getattr(owner, name)
    try:
        return inspect.getattr_static(owner, name)
    except AttributeError:
        return getattr(owner, name)  # a module may make it when it is asked for


def _is_guarded(found: Any) -> bool:
    """Whether a guard beneath it counts its runs."""
    guarded = sys.modules.get("idemguard.guarded")
    if guarded is None:
        return False
    kinds = guarded.Guarded, guarded.BoundGuarded
    return any(type(one) in kinds for one in guarded._beneath(found))  # noqa: SLF001 - our own


def _watched(found: Any, task: str, *, in_class: bool) -> Any:
    plain = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    if isinstance(plain, type):
        raise pytest.UsageError(
            f"idemguard_watch: {task} is a class; name a method of it, {task}.__init__ for what it makes"
        )
    if not callable(plain):
        raise pytest.UsageError(f"idemguard_watch: {task} is no function or method")
    first = int(in_class and hasattr(found, "__get__") and not isinstance(found, staticmethod))
    if isinstance(plain, functools._lru_cache_wrapper):  # noqa: SLF001 - it has no other name
        beneath = plain.__wrapped__  # what was kept is no run
        counted = watched(beneath, arguments(beneath, task, skipped=first))
        made: Any = functools.lru_cache(**plain.cache_parameters())(counted)
    else:
        made = watched(plain, arguments(plain, task, skipped=first))
        if not inspect.isfunction(plain) and not first:
            made = Stand(plain, made)
    return made if plain is found else type(found)(made)


_namespace = vars(ModuleType)["__dict__"].__get__  # past what a lazy module makes of it


def _globals() -> Iterator[tuple[ModuleType, str, object]]:
    """All names of all modules, but for those that are everybody's."""
    for module in list(sys.modules.values()):
        a_module = issubclass(type(module), ModuleType)  # and does not only say so
        if a_module and module is not builtins:
            for key, value in list(_namespace(module).items()):
                yield module, key, value


# --- modules that are loaded later -----------------------------------------------------------------


class _Finder:
    """Tells of modules as soon as they are loaded.

    Args:
        names: of the modules.
        loaded: is told.

    """

    def __init__(self, names: Container[str], loaded: Loaded) -> None:
        self._names, self._loaded = names, loaded

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As other finders have it, with a loader that tells."""
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None and spec.loader is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, name, self._loaded)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    def __init__(self, real: Any, name: str, loaded: Loaded) -> None:
        self._real, self._name, self._loaded = real, name, loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the real one."""
        made: ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As the real one, and then it is told."""
        self._real.exec_module(module)
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._loaded(self._name, module)

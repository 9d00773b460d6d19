"""A task's identity: which arguments count, and the SHA-256 of their JSON form.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from typing import Any, TypeAlias

from idemguard import forms
from idemguard.errors import ConfigurationError, FingerprintError
from idemguard.forms import ANY_DEPTH, NOBODY, Drop, NoFormError, Path

DEFAULT_VOLATILE = frozenset({"request_id", "timestamp", "attempt", "trace_id"})
# A declared parameter of these names may be the point of the task; the other two never are.
AMBIGUOUS = frozenset({"timestamp", "attempt"})
RECEIVERS = ("self", "cls")
# What an annotation says when its argument can hold no keys, as a type or as postponed text.
KEYLESS = frozenset({"str", "int", "float", "bool", "bytes", "None", "NoneType"})

Names: TypeAlias = Iterable[str]
Key: TypeAlias = str | Iterable[str] | Callable[[dict[str, Any]], object]


@dataclass(frozen=True, slots=True)
class Identified:
    """What one call, or one payload, is.

    Attributes:
        fingerprint: 64 hex digits.
        canonical: the JSON text that was hashed, in UTF-8, without the task type.
        digest: SHA-256, as hex digits, of all arguments that are not volatile and have a
            JSON form, where `key` gave an explicit idempotency key; else None.
        matched: the volatile names and paths that left something out.
        declared: the volatile names and paths that somebody wrote down for it.

    """

    fingerprint: str
    canonical: bytes
    digest: str | None = None
    matched: frozenset[str] = NOBODY
    declared: tuple[str, ...] = ()

    @property
    def payload(self) -> Any:
        """The JSON form that was hashed; a fresh copy, whatever became of the arguments."""
        return json.loads(self.canonical)


def task_fingerprint(
    task_type: str, payload: object, *, volatile: Names = (), keep: Names = ()
) -> str:
    """The identity of a task.

    Args:
        task_type: what kind of work it is.
        payload: a value with a JSON form; mostly a mapping or a model.
        volatile: names among the payload's own keys that do not count, beside `request_id`,
            `timestamp`, `attempt` and `trace_id`; or paths to something deeper:
            `"doc.meta.run_id"`, `"**.ts"` (at any depth). A path goes through lists.
        keep: names that are volatile by default and count here.

    Returns:
        64 hex digits: SHA-256 of the task type, a colon and the payload's JSON text.

    Raises:
        FingerprintError: something in it has no JSON form; the error names the path.
        ConfigurationError: `volatile` or `keep` cannot be read.

    """
    named, canonical, _ = _read_payload(task_type, payload, volatile, keep, ())
    return _digest(named, canonical)


def identify_payload(
    task_type: str,
    payload: object,
    *,
    volatile: Names = (),
    keep: Names = (),
    extra_volatile: Names = (),
) -> Identified:
    """As `task_fingerprint`, with all that was found out.

    Args:
        task_type: see there.
        payload: see there.
        volatile: see there.
        keep: see there; names of `extra_volatile` too.
        extra_volatile: the guard's own additions to the default names.

    """
    named, canonical, matched = _read_payload(task_type, payload, volatile, keep, extra_volatile)
    declared = _names("volatile", volatile) if volatile else ()
    return Identified(_digest(named, canonical), canonical, None, matched, declared)


def _read_payload(
    task_type: str, payload: object, volatile: Names, keep: Names, extra: Names
) -> tuple[str, bytes, frozenset[str]]:
    drop = _PAYLOAD_DROP
    if volatile or keep or extra:
        drop = _payload_drop(
            _names("volatile", volatile), _names("keep", keep), _names("volatile", extra)
        )
    if (named := _type_text(task_type)) is None:
        raise FingerprintError(
            "the task type must be a string of valid Unicode",
            parameter="task_type",
            path="task_type",
        )
    try:
        return named, *forms.canonical(payload, drop)
    except NoFormError as error:
        raise _no_identity(named, error, in_call=False) from None


def task_type_of(fn: Any) -> str:
    """The task type of a callable that was given none: its module and qualified name.

    `__main__` is resolved to the module's real name, so that a worker process that imports
    it agrees; where there is none (an interactive session, `python -c`) it stays `__main__`.

    Args:
        fn: a function, a class, a `functools.partial`, or an object with `__call__`.

    Raises:
        ConfigurationError: a lambda or a local function, whose names may stand for many.

    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    qualified: str = named.__qualname__
    if "<locals>" in qualified or "<lambda>" in qualified:
        kind = "lambda" if "<lambda>" in qualified else "local function"
        raise ConfigurationError(
            f"{qualified} is a {kind}: its name does not say which one. "
            'Give it a task type: @idempotent(task_type="...")'
        )
    return f"{_module_of(named)}.{qualified}"


def _module_of(named: Any) -> str:
    module: str = named.__module__
    if module not in ("__main__", "__mp_main__"):
        return module
    # A function that cloudpickle brought here still knows the file that it came from.
    names = getattr(inspect.unwrap(named), "__globals__", {})
    if names.get("__name__") != module:
        names = getattr(sys.modules.get(module), "__dict__", {})
    spec, file = names.get("__spec__"), names.get("__file__")
    if spec is not None and spec.name != "__main__":
        return str(spec.name)
    if not file:
        return "__main__"
    path = PurePath(file)
    return path.parent.stem if path.stem == "__main__" else path.stem


class Identity:
    """What tells one callable's tasks apart, compiled once, at decoration.

    Args:
        signature: of the plain function, `self` or `cls` included.
        task_type: of its tasks; also its name in messages.
        key: a parameter's name, names, or a plain function of the bound arguments.
        volatile: names and paths that do not count, beside the default ones.
        keep: names that are volatile by default and count here.
        configured: what the guard adds to the default names, as far as that is known: a name
            of them may stand in `keep`. `identify` is told anew.

    Raises:
        ConfigurationError: an option cannot be used with this signature; with the line to write.

    """

    __slots__ = (
        "_apart",
        "_configured",
        "_count",
        "_defaults",
        "_drops",
        "_function",
        "_keep",
        "_keywords",
        "_named",
        "_options",
        "_positional",
        "_receiver",
        "_signature",
        "_simple",
        "_star",
        "_task_type",
        "_volatile",
    )

    def __init__(
        self,
        signature: inspect.Signature,
        *,
        task_type: str,
        key: Key | None = None,
        volatile: Names = (),
        keep: Names = (),
        configured: Names = (),
    ) -> None:
        if not (named := _type_text(task_type)):
            raise ConfigurationError("task_type must be a string of valid Unicode, and not empty")
        self._task_type = named
        self._volatile = _names("volatile", volatile)
        self._keep = _names("keep", keep)
        self._configured = _names("volatile", configured)
        self._read_signature(signature)
        self._read_key(key)
        self._check_names()
        # Where `**kwargs` as a whole is volatile, or is the key, it stays a mapping.
        self._apart = self._options in self._volatile or self._options in (self._named or ())
        self._drops: dict[frozenset[str], Drop] = {NOBODY: self._compile(())}
        if self._configured:
            self._compile(self._configured)

    def _read_signature(self, signature: inspect.Signature) -> None:
        kinds = inspect.Parameter
        self._signature = signature
        self._star: str | None = None
        self._options: str | None = None
        self._receiver: str | None = None
        positional, keywords = [], []
        for parameter in signature.parameters.values():
            if parameter.kind is kinds.VAR_POSITIONAL:
                self._star = parameter.name
            elif parameter.kind is kinds.VAR_KEYWORD:
                self._options = parameter.name
            else:
                if parameter.kind is not kinds.KEYWORD_ONLY:
                    positional.append(parameter.name)
                if parameter.kind is not kinds.POSITIONAL_ONLY:
                    keywords.append(parameter.name)
        if positional and positional[0] in RECEIVERS:
            self._receiver = positional[0]
        self._simple = self._star is None and self._options is None
        self._count = len(signature.parameters)
        self._positional = tuple(positional)
        self._keywords = frozenset(keywords)
        self._defaults = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if parameter.default is not kinds.empty
        }

    def _read_key(self, key: Key | None) -> None:
        self._named: tuple[str, ...] | None = None
        self._function: Callable[[dict[str, Any]], object] | None = None
        if callable(key):
            if _is_async(key):
                raise self._refused("key must be a plain function: it is called before any await")
            if not _takes_one(key):
                raise self._refused(
                    "key must be a function of one dict, the arguments by name: "
                    'key=lambda arguments: {"q": arguments["q"].lower()}'
                )
            self._function = key
        elif key is not None:
            self._named = _names("key", key)
            if not self._named:
                raise self._refused("key names no parameter: all calls would be one task")

    def _check_names(self) -> None:
        parameters = self._signature.parameters
        listed = ", ".join(parameters) or "it has none"
        for name in self._named or ():
            if name not in parameters and self._options is None:
                raise self._refused(f"key names {name!r}, which is no parameter ({listed})")
        for source in self._volatile:
            first, *rest = source.split(".")
            if rest and first not in (ANY_DEPTH, *parameters) and self._options is None:
                raise self._refused(f"the path {source!r} begins with no parameter ({listed})")
            if first == self._options and ANY_DEPTH in rest[:1]:
                raise self._refused(f'write "{".".join(rest)}" for {source!r}')
        usual = DEFAULT_VOLATILE.union(self._configured)
        for name in self._keep:
            if name in self._volatile:
                raise self._refused(f"{name!r} stands in volatile and in keep")
            possible = name in parameters or (name in usual and self._holds_keys())
            if not possible and (self._options is None or "." in name):
                raise self._refused(f"keep names {name!r}, which nothing here can be called")
        for name in sorted(AMBIGUOUS.intersection(parameters)):
            # A key that names parameters has decided about all of them.
            decided = self._named is not None or name in self._keep
            if not decided and not _is_whole(name, self._volatile):
                raise self._refused(
                    f'it declares {name!r}: write keep=("{name}",) if two values are two tasks, '
                    f'or volatile=("{name}",) if they are one'
                )

    def _holds_keys(self) -> bool:
        """Whether an argument may be a mapping or a model, by all that annotations say."""
        kinds = [parameter.annotation for parameter in self._signature.parameters.values()]
        names = [kind if isinstance(kind, str) else getattr(kind, "__name__", "") for kind in kinds]
        return not KEYLESS.issuperset(names)

    def _compile(self, extra: Iterable[str]) -> Drop:
        drop = _drop(DEFAULT_VOLATILE.union(self._volatile, _names("volatile", extra)), self._keep)
        # "options.ts" is how a reader sees `**options`; there it is "ts", merged beside the rest.
        merged = [
            Path(path.source, path.parts[1:])
            for path in drop.paths
            if path.parts[0] == self._options and path.parts[1] not in self._signature.parameters
        ]
        paths = (*drop.paths, *merged)
        below = drop.own.difference({self._receiver})
        if self._named is not None:
            return Drop(NOBODY, below, tuple(_inside(paths, self._named)))
        names = self._signature.parameters.keys() - {self._receiver}
        dropped = (*drop.own, *(path.source for path in paths))
        if names and self._function is None and all(_is_whole(name, dropped) for name in names):
            raise self._refused(
                f"every parameter is volatile ({', '.join(sorted(names))}): all calls would be "
                "one task. Keep one with keep=(...), or say with key=... what counts"
            )
        return Drop(drop.own, below, paths)

    def class_method(self) -> None:
        """Take the callable for a class method: its class counts by its qualified name."""
        if self._positional:
            self._receiver = self._positional[0]

    def method_of(self, owner: type) -> None:
        """Take the callable for an instance method of `owner`.

        Args:
            owner: the class that it was found on.

        Raises:
            ConfigurationError: nothing says what identifies an instance.

        """
        if not self._positional:
            return
        self._receiver = receiver = self._positional[0]
        decided = (
            self._named is not None
            or self._function is not None
            or receiver in self._keep
            or _is_whole(receiver, self._volatile)
            or getattr(owner, "__idempotency_key__", None) is not None
        )
        if not decided:
            raise self._refused(
                f"it is a method of {owner.__qualname__}, and nothing says what identifies an "
                f'instance: write volatile=("{receiver}",) if all instances do the same work, '
                f'keep=("{receiver}",) if its fields count (dataclass, pydantic, attrs), '
                f"key=..., or give {owner.__qualname__} a method __idempotency_key__"
            )

    def identify(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        extra_volatile: Collection[str] = (),
    ) -> Identified:
        """Tell which task a call is.

        Args:
            args: its positional arguments, the instance or class of a method included.
            kwargs: its keyword arguments.
            extra_volatile: what the guard adds to the default-volatile names.

        Raises:
            FingerprintError: an argument that counts has no stable identity.
            TypeError: the arguments do not fit the signature.
            ConfigurationError: `extra_volatile` makes every parameter volatile.

        """
        extra = frozenset(extra_volatile) if extra_volatile else NOBODY
        drop = self._drops.get(extra)
        if drop is None:
            drop = self._drops[extra] = self._compile(extra)
        bound = self._bind(args, kwargs)
        try:
            if self._function is not None:
                return self._by_function(self._function, bound, drop)
            self._name_class(bound)
            if self._named is not None:
                bound = self._select(bound, self._named)
            return self._identified(*forms.canonical(bound, drop))
        except NoFormError as error:
            raise _no_identity(self._task_type, error, in_call=True) from None

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name; `inspect` takes the calls that are not plainly right."""
        if self._simple and len(args) <= len(self._positional):
            bound = dict(zip(self._positional, args, strict=False))
            if not kwargs or (kwargs.keys() <= self._keywords and bound.keys().isdisjoint(kwargs)):
                bound.update(kwargs)
                if len(bound) < self._count:
                    bound = self._defaults | bound
                if len(bound) == self._count:
                    return bound
        found = self._signature.bind(*args, **kwargs)
        found.apply_defaults()
        bound = dict(found.arguments)
        if self._star is not None:
            bound[self._star] = list(bound[self._star])
        if self._options is not None:
            options = bound.pop(self._options)
            # Its own name collides as well: else f(kwargs={...}) could pass for a collision.
            if self._apart or not self._signature.parameters.keys().isdisjoint(options):
                bound[self._options] = options
            else:
                bound.update(options)
        return bound

    def _name_class(self, bound: dict[str, Any]) -> None:
        if self._receiver is not None and isinstance(cls := bound[self._receiver], type):
            bound[self._receiver] = f"{_module_of(cls)}.{cls.__qualname__}"

    def _select(self, bound: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        for name in names:
            if name not in bound:
                raise FingerprintError(
                    f"{self._task_type}: key names {name!r}, which this call was not given",
                    parameter=name,
                    path=name,
                    task_type=self._task_type,
                )
        return {name: bound[name] for name in names}

    def _by_function(
        self, function: Callable[[dict[str, Any]], object], bound: dict[str, Any], drop: Drop
    ) -> Identified:
        key = function(dict(bound))
        explicit = isinstance(key, str)
        try:
            canonical, _ = forms.canonical({"idempotency_key": key} if explicit else key)
        except NoFormError as error:
            place = error.path[1:] if explicit else error.path
            raise _no_identity(
                self._task_type, NoFormError(("key()", *place), error.reason), in_call=False
            ) from None
        if not explicit:
            return self._identified(canonical, NOBODY)
        self._name_class(bound)
        digest, matched = self._compared(bound, drop)
        return self._identified(canonical, matched, digest)

    def _compared(self, bound: dict[str, Any], drop: Drop) -> tuple[str, frozenset[str]]:
        """The digest of the arguments; one without a form cannot be compared and is left out."""
        try:
            data, matched = forms.canonical(bound, drop)
        except NoFormError as error:
            if not error.path:
                raise
            rest = {name: value for name, value in bound.items() if name != error.path[0]}
            return self._compared(rest, drop)
        return hashlib.sha256(data).hexdigest(), matched

    def _identified(
        self, canonical: bytes, matched: frozenset[str], digest: str | None = None
    ) -> Identified:
        named = _digest(self._task_type, canonical)
        return Identified(named, canonical, digest, matched, self._volatile)

    def _refused(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self._task_type}: {what}", task_type=self._task_type)


def _digest(task_type: str, canonical: bytes) -> str:
    return hashlib.sha256(f"{task_type}:".encode() + canonical).hexdigest()


def _type_text(task_type: object) -> str | None:
    """A task type in NFC, also of an enumeration's member; None if it has no valid text."""
    if type(task_type) is str and task_type.isascii():
        return task_type
    if isinstance(task_type, Enum):
        task_type = task_type.value
    if not isinstance(task_type, str) or not forms.is_text(task_type):
        return None
    return unicodedata.normalize("NFC", str.__str__(task_type))


def _is_async(function: Any) -> bool:
    kinds = (
        inspect.iscoroutinefunction,
        inspect.isasyncgenfunction,
        inspect.isgeneratorfunction,
    )
    call = getattr(type(function), "__call__", None)  # noqa: B004 # an object's may be async
    return any(is_kind(function) or is_kind(call) for is_kind in kinds)


def _takes_one(function: Any) -> bool:
    try:
        inspect.signature(function).bind({})
    except TypeError:
        return False
    except ValueError:  # written in C, and silent about what it takes
        return True
    return True


def _names(argument: str, value: object) -> tuple[str, ...]:
    """Names in NFC; a bare string is one name."""
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigurationError(
            f'{argument} takes names, as in {argument}=("name",), not a {type(value).__name__}'
        )
    names = []
    for name in value:
        if not isinstance(name, str) or not name or not forms.is_text(name):
            raise ConfigurationError(f"{argument} takes names, and {name!r} is none")
        names.append(unicodedata.normalize("NFC", name))
    return tuple(names)


def _drop(volatile: Iterable[str], keep: Collection[str]) -> Drop:
    names, paths = set(), []
    for source in volatile:
        parts = source.split(".")
        if "" in parts or "*" in parts or parts[-1] == ANY_DEPTH:
            raise ConfigurationError(
                f"volatile: {source!r} is neither a name nor a path "
                'like "doc.meta.run_id" or "**.ts"'
            )
        if len(parts) == 1:
            names.add(source)
        else:
            paths.append(Path(source, tuple(parts)))
    return Drop(frozenset(names.difference(keep)), NOBODY, tuple(paths))


_PAYLOAD_DROP = _drop(DEFAULT_VOLATILE, ())


@lru_cache(maxsize=256)
def _payload_drop(volatile: tuple[str, ...], keep: tuple[str, ...], extra: tuple[str, ...]) -> Drop:
    for name in keep:
        if name in volatile:
            raise ConfigurationError(f"{name!r} stands in volatile and in keep")
        if name not in DEFAULT_VOLATILE and name not in extra:
            raise ConfigurationError(f"keep names {name!r}, which is not volatile by default")
    return _drop(DEFAULT_VOLATILE.union(volatile, extra), keep)


def _is_whole(name: str, volatile: Iterable[str]) -> bool:
    """Whether a parameter of this name is dropped as a whole."""
    return any(source in (name, f"{ANY_DEPTH}.{name}") for source in volatile)


def _inside(paths: Iterable[Path], names: Iterable[str]) -> Iterable[Path]:
    """The paths that reach into parameters, none that drops a whole one: the key named it."""
    for path in paths:
        if path.parts[0] != ANY_DEPTH:
            yield path
        else:
            yield from (Path(path.source, (name, *path.parts)) for name in names)


def _no_identity(task_type: str, error: NoFormError, *, in_call: bool) -> FingerprintError:
    path = "".join(map(_segment, error.path)).removeprefix(".")
    shown = path if len(path) <= 200 else f"{path[:120]} ... {path[-60:]}"  # noqa: PLR2004 # a line
    keys = [part for part in error.path if isinstance(part, str)]
    parameter = keys[0] if in_call and keys else None
    way = "convert it to something that JSON knows, or give its class __idempotency_key__()"
    if keys and keys[0] != "key()":
        hint = f'volatile=("{".".join(keys)}",)' if len(".".join(keys)) <= 100 else "volatile=..."  # noqa: PLR2004
        way = f"leave it out with {hint}, " + ("say what counts with key=..., or " * in_call) + way
    return FingerprintError(
        f"{task_type}: {shown or 'the payload'} has no stable identity: it {error.reason}. "
        f"What to do: {way}.",
        parameter=parameter,
        path=path,
        task_type=task_type,
    )


def _segment(part: str | int | None) -> str:
    if part is None:
        return "{}"
    if isinstance(part, int):
        return f"[{part}]"
    if part.isidentifier() or part == "key()":
        return f".{part}"
    return f"[{json.dumps(part, ensure_ascii=False)}]"


__all__ = [
    "DEFAULT_VOLATILE",
    "Identified",
    "Identity",
    "identify_payload",
    "task_fingerprint",
    "task_type_of",
]

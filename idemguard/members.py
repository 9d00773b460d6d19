"""The classes that an annotation names: how an instance is taken apart, and made anew from its parts.

A name that comes out of a store only selects among these classes; nothing is ever imported by it.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from enum import Enum, Flag
from functools import cache, cached_property, lru_cache
from pathlib import Path, PurePath
from typing import Any

from idemguard.hints import NAMELESS, classes_in, field_hints, field_names, is_model
from idemguard.tagged import UnreadableError, UnstorableError

_PRIVATE, _SET, _EXTRA = "$private", "$set", "$extra"  # beside a model's fields


class Members:
    """The classes that one annotation names, each under a name of its own.

    Args:
        annotation: any type form.
        problem: why it is not the one that counts.

    Attributes:
        problem: what of the annotation could not be resolved, or an empty text.

    """

    def __init__(self, annotation: object, problem: str = "") -> None:
        classes, problems = classes_in(annotation)
        by_name: defaultdict[str, list[type]] = defaultdict(list)
        for cls in classes:
            by_name[cls.__qualname__].append(cls)
        for name, namesakes in list(by_name.items()):
            if len(namesakes) > 1:
                del by_name[name]
                for cls in namesakes:
                    by_name[f"{cls.__module__}.{name}"].append(cls)
        self._classes = {name: same[0] for name, same in by_name.items() if len(same) == 1}
        self._names = {cls: name for name, cls in self._classes.items()}
        for cls in {Path, PurePath} & self._names.keys():
            self._names[type(cls())] = self._names[cls]  # what it makes depends on the system
        problems += [f"two classes are {name}" for name, same in by_name.items() if len(same) > 1]
        self.problem = problem or ", ".join(problems)

    def __bool__(self) -> bool:
        return bool(self._classes)

    def apart(self, value: object) -> tuple[str, object, dict[str, object]]:
        """The name of an instance's class, its parts, and what it holds beside them.

        Raises:
            UnstorableError: the class is not one of these, or has no parts that would make it anew.

        """
        name = self._names.get(type(value))
        if name is None:
            raise UnstorableError(self._stranger(type(value)))
        return name, *_apart(value, self._classes[name])

    def together(self, name: Any, parts: Any, *, loose: bool = False) -> object:
        """The instance that `apart` was given.

        Args:
            name: of its class.
            parts: which become its own.
            loose: whether a field may hold what its annotation does not allow, as Python
                itself permits; models have rules of their own.

        Raises:
            Exception: of any kind, when name and parts are not what `apart` answers.

        """
        if name not in self._classes:
            raise UnreadableError(f"the annotation names no class {name!r}")
        return _together(self._classes[name], parts, loose=loose)

    def _stranger(self, cls: type) -> str:
        name = _full_name(cls)
        if self.problem:
            return (
                f"{name} is unknown, for the annotation is unclear ({self.problem}); use result=…"
            )
        if issubclass(cls, Iterator):
            return f"{name} is used up by reading it; return a list"
        bases = [base for base in cls.__mro__[1:] if base in self._names]
        if bases:
            both = f"{bases[0].__qualname__} | {cls.__qualname__}"
            return f"{name} would come back as its base; name it: result={both}"
        if cls.__module__ in NAMELESS:
            return f"{name} has no stored form; return plain values, or a class named by result=…"
        return f"{name} is not named by the return annotation; name it there, or with result=…"


def _full_name(cls: type) -> str:
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def _apart(value: Any, cls: type) -> tuple[object, dict[str, object]]:
    if isinstance(value, Flag):
        return value.value, {}
    if isinstance(value, Enum):
        if cls.__members__.get(value.name) is not value:  # type: ignore[attr-defined]
            raise UnstorableError(f"{value!r} is no member of {_full_name(cls)}")
        return value.name, {}
    if is_model(cls):
        return _model_apart(value, cls), {}
    names = field_names(cls)
    if names is None:
        return _leaf_apart(value, cls), {}
    for base in cls.__mro__:
        if base.__module__ == "builtins" and base not in {object, tuple}:
            raise UnstorableError(
                f"{_full_name(cls)} is a {base.__name__} beside its fields; return plain values"
            )
    parts = {name: getattr(value, name) for name in names if hasattr(value, name)}
    beside = {name: held for name, held in _state(value, cls) if name not in names}
    return parts, {
        name: held
        for name, held in beside.items()
        # what is computed again, and typing's note of a generic class
        if not isinstance(inspect.getattr_static(cls, name, None), cached_property)
        and name != "__orig_class__"
    }


def _state(value: object, cls: type) -> Iterator[tuple[str, object]]:
    yield from getattr(value, "__dict__", {}).items()
    for base in cls.__mro__:
        for name, slot in vars(base).items():
            if inspect.ismemberdescriptor(slot):
                try:
                    yield name, slot.__get__(value, cls)
                except AttributeError:
                    continue


def _together(cls: Any, parts: Any, *, loose: bool) -> object:
    if issubclass(cls, Flag):
        if type(parts) is not int:
            raise UnreadableError("a flag is no number")
        return cls(parts)
    if issubclass(cls, Enum):
        return cls.__members__[parts]
    names = field_names(cls)
    if names is None and not is_model(cls):
        return _leaf_together(cls, parts)
    if type(parts) is not dict:
        raise UnreadableError(f"{cls.__qualname__} is without fields")
    if names is None:
        return _model_together(cls, parts)
    if strange := parts.keys() - names.keys():
        raise UnreadableError(f"{cls.__qualname__} has no field {min(strange)!r}")
    if not loose:
        for name, check in _checks(cls).items():
            if name in parts:
                check.validate_python([parts[name]])
    if issubclass(cls, tuple):
        return cls._make(parts[name] for name in names)
    made = cls(**{alias: parts[name] for name, alias in names.items() if alias and name in parts})
    for name, part in parts.items():
        # not all fields stand in the constructor, and it may change what it is given
        object.__setattr__(made, name, part)
    return made


@lru_cache(maxsize=256)
def _checks(cls: type) -> dict[str, Any]:
    checks: dict[str, Any] = {}
    hints = field_hints(cls)
    for name in hints.keys() & (field_names(cls) or {}).keys():
        with suppress(Exception):  # pydantic may not know the type
            hint: Any = hints[name]
            # in a list, as it takes no configuration for a model alone
            checks[name] = _adapter(list[hint])
    return checks


def _model_apart(model: Any, cls: Any) -> dict[str, object]:
    held = vars(model)
    parts = {name: held[name] for name in cls.model_fields if name in held}
    extra = model.__pydantic_extra__ or {}
    if model.__pydantic_fields_set__ != parts.keys() | extra.keys():
        parts[_SET] = sorted(model.__pydantic_fields_set__)
    if extra:
        parts[_EXTRA] = extra
    if model.__pydantic_private__:
        parts[_PRIVATE] = model.__pydantic_private__
    return parts


def _model_together(cls: Any, parts: dict[str, Any]) -> object:
    private, extra = parts.pop(_PRIVATE, {}), parts.pop(_EXTRA, {})
    given = parts.pop(_SET, None)
    if strange := (parts.keys() - cls.model_fields.keys()) | (
        private.keys() - cls.__private_attributes__.keys()
    ):
        raise UnreadableError(f"{cls.__qualname__} has no field {min(strange)!r}")
    source = parts["root"] if cls.__pydantic_root_model__ else {**parts, **extra}
    model = cls.model_validate(source, **_by_name())
    fields_set = parts.keys() | extra.keys() if given is None else set(given)
    object.__setattr__(model, "__pydantic_fields_set__", fields_set)
    if private or model.__pydantic_private__:
        object.__setattr__(model, "__pydantic_private__", private)
    return model


@cache
def _by_name() -> dict[str, bool]:
    from pydantic.version import version_short  # noqa: PLC0415 - only a model needs it

    major, minor = map(int, version_short().split(".")[:2])
    return {"by_alias": False, "by_name": True} if (major, minor) >= (2, 11) else {}


@lru_cache(maxsize=256)
def _adapter(cls: type) -> Any:
    from pydantic import ConfigDict, TypeAdapter  # noqa: PLC0415 - loaded on first need

    config = ConfigDict(
        ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings"
    )
    return TypeAdapter(cls, config=config)


def _leaf_apart(value: Any, cls: type) -> object:
    """What pydantic writes for a class without fields, if it restores the same from it."""
    if hasattr(cls, "get_secret_value"):
        raise UnstorableError(
            f"{_full_name(cls)} is a secret, which no store is given; leave it out"
        )
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        # equality says nothing of the types inside
        raise UnstorableError(f"{_full_name(cls)} is a container of its own; return a plain one")
    try:
        text: str = _adapter(cls).dump_json(value).decode()
        restored = _leaf_together(cls, text)
    except Exception as error:
        raise UnstorableError(
            f"{_full_name(cls)} is no class that pydantic can restore"
            f" ({type(error).__name__}); return plain values or a model"
        ) from error
    if type(restored) is not type(value) or restored != value or repr(restored) != repr(value):
        raise UnstorableError(
            f"{_full_name(cls)} comes back changed; return plain values or a model"
        )
    return text


def _leaf_together(cls: type, text: Any) -> object:
    return _adapter(cls).validate_json(text)

"""Which classes an annotation names, at whatever depth, and which fields they have.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from contextlib import suppress
from types import SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    get_args,
    get_origin,
    get_type_hints,
)

# their instances are containers, or need no name
NAMELESS = frozenset({"builtins", "collections", "collections.abc", "inspect", "typing"})
_PLAIN = frozenset({"datetime", "decimal", "uuid"})


def classes_in(annotation: object) -> tuple[list[type], list[str]]:
    """The classes whose instances an annotation expects at any depth, and what is unclear in it."""
    classes: list[type] = []
    problems: list[str] = []
    seen: dict[int, object] = {}  # by id, for not every type form has a hash; kept alive
    waiting = [annotation]
    while waiting:
        hint = waiting.pop()
        if id(hint) in seen:
            continue
        seen[id(hint)] = hint
        origin = get_origin(hint)
        if isinstance(hint, list | tuple):
            waiting += hint
        elif isinstance(hint, str | ForwardRef):
            problems.append(f"cannot resolve {getattr(hint, '__forward_arg__', hint)!r}")
        elif origin is Literal:
            waiting += [type(arg) for arg in get_args(hint)]
        elif origin is Annotated:
            waiting.append(get_args(hint)[0])
        elif origin is not None:
            waiting += [*get_args(hint), *([] if origin is UnionType else [origin])]
        elif not isinstance(hint, type):
            # a type variable, a NewType, an alias made by `type`
            waiting.append(getattr(hint, "__constraints__", ()))
            waiting += [
                inner
                for name in ("__bound__", "__supertype__", "__value__")
                if (inner := getattr(hint, name, None)) is not None
            ]
        elif hint.__module__ not in NAMELESS and hint.__module__ not in _PLAIN:
            if not _is_typed_dict(hint):  # the values are plain mappings
                classes.append(hint)
            try:
                waiting += field_hints(hint).values()
            except Exception as error:  # noqa: BLE001 - whatever a class does to be looked at
                problems.append(f"{hint.__qualname__}: {type(error).__name__}")
    return classes, problems


def is_model(cls: type) -> bool:
    """Whether it is a pydantic model; this loads nothing."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not issubclass(cls, pydantic.BaseModel):
        return False
    return cls is not pydantic.BaseModel


def field_names(cls: type) -> dict[str, str | None] | None:
    """The fields of a class, each with its name in the constructor if it stands there."""
    if issubclass(cls, tuple):
        return {name: name for name in cls._fields} if hasattr(cls, "_fields") else None
    if dataclasses.is_dataclass(cls):
        return {field.name: field.name if field.init else None for field in dataclasses.fields(cls)}
    attributes = getattr(cls, "__attrs_attrs__", None)
    if attributes is None:
        return None
    return {field.name: field.alias if field.init else None for field in attributes}


def field_hints(cls: Any) -> dict[str, object]:
    """The annotations of a class that has fields, as far as they can be resolved."""
    if field_names(cls) is None and not is_model(cls) and not _is_typed_dict(cls):
        return {}
    hints: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base.__module__ not in NAMELESS and not base.__module__.startswith("pydantic."):
            hints |= _own_hints(base)
    if is_model(cls):  # it has resolved its fields by itself, with names of a function too
        if not cls.__pydantic_complete__:
            cls.model_rebuild(raise_errors=False)
        hints = {name: hint for name, hint in hints.items() if not isinstance(hint, str)}
        hints |= {name: field.annotation for name, field in cls.model_fields.items()}
    return hints


def _own_hints(cls: type) -> dict[str, object]:
    module = sys.modules.get(cls.__module__)
    scope = {
        **vars(cls),
        **{parameter.__name__: parameter for parameter in getattr(cls, "__type_params__", ())},
        **(vars(module) if module else {}),
    }
    hints = inspect.get_annotations(cls)
    for name, hint in hints.items():
        one = SimpleNamespace(__annotations__={name: hint})
        with suppress(Exception):  # whatever stands in an annotation
            hints[name] = get_type_hints(one, scope, include_extras=True)[name]
    return hints


def _is_typed_dict(cls: type) -> bool:
    return issubclass(cls, dict) and hasattr(cls, "__total__")

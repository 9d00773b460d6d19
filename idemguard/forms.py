"""The JSON form of a Python value: two arguments are the same when their forms are.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import unicodedata
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

MAX_DEPTH = 200
WORTH_A_LOOK = 1_000_000  # values; a larger payload, or a cycle, takes the careful way
SURELY_PRINTED = 2000  # bits; Python's limit cannot be set lower
ANY_DEPTH = "**"
BOXES = frozenset({dict, list, tuple})
NOBODY: frozenset[str] = frozenset()
_UNSET = object()

# Cycles never reach it: both ways to a text rule them out first.
encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True).encode


class NoFormError(Exception):
    """A value has no JSON form.

    Attributes:
        path: the keys (str), indexes (int) and set elements (None) that lead to it.
        reason: a clause that says what it is.

    """

    def __init__(self, path: Iterable[str | int | None], reason: str) -> None:
        super().__init__(reason)
        self.path = tuple(path)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Path:
    """A place below a payload: its keys, of which `**` stands for any number, also none."""

    source: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """What is left out of a payload.

    Attributes:
        own: names among its own keys.
        below: names among the keys of its mapping- or model-valued members.
        paths: places anywhere.

    """

    own: frozenset[str] = NOBODY
    below: frozenset[str] = NOBODY
    paths: tuple[Path, ...] = ()


DROP_NOTHING = Drop()


def canonical(value: object, drop: Drop = DROP_NOTHING) -> tuple[bytes, frozenset[str]]:
    """The one JSON text of a value, in UTF-8.

    Args:
        value: a payload.
        drop: what is left out of it; never looked at.

    Returns:
        The text, and the names and paths that left something out.

    Raises:
        NoFormError: it, or something in it, has no JSON form.

    """
    if not drop.paths and (found := _quick(value, drop)) is not None:
        return found
    walk = _Walk()
    try:
        form = walk.form(value, drop.paths, drop.own, drop.below)
        return encode(form).encode(), frozenset(walk.matched)
    except RecursionError:
        raise NoFormError(walk.path, "is nested too deeply for this call stack") from None


def is_text(value: str) -> bool:
    """Whether it is valid Unicode: a lone surrogate has no UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _quick(value: object, drop: Drop) -> tuple[bytes, frozenset[str]] | None:
    """The text of a payload that is JSON already, or None: then the walk must tell."""
    matched: list[str] = []
    if type(value) is dict:
        value = _without(value, drop.own, matched)
        if drop.below:
            for key, member in value.items():
                if type(member) is dict:
                    less = _without(member, drop.below, matched)
                    if less is not member:
                        value = {**value, key: less}
    if not _is_plain(value if type(value) in BOXES else (value,)):
        return None
    try:
        text = encode(value)
        data = text.encode()
    except (ValueError, RecursionError):  # what cannot be printed; a stack nearly used up
        return None
    # Whatever JSON escapes composes with nothing, so a normal text holds normal strings only.
    if not text.isascii() and unicodedata.normalize("NFC", text) != text:
        return None
    return data, frozenset(matched) if matched else NOBODY


def _without(box: dict[Any, Any], names: frozenset[str], matched: list[str]) -> dict[Any, Any]:
    if box.keys().isdisjoint(names):
        return box
    matched += names & box.keys()
    return {key: value for key, value in box.items() if key not in names}


def _is_plain(root: Any) -> bool:
    """Whether a payload is made of exact JSON types with string keys, and of bounded depth.

    Level by level, so that it costs little beside the encoder; the count ends a cycle.
    """
    level: list[Any] = [root]
    left = WORTH_A_LOOK
    last: type = str  # most values are of the kind of the one before
    for _ in range(MAX_DEPTH):
        inner = []
        for box in level:
            left -= len(box)
            if left < 0:
                return False
            if type(box) is dict:
                for key in box:
                    if type(key) is not str:
                        return False
                box = box.values()  # noqa: PLW2901 # a second name costs a tenth of the time
            for value in box:
                kind = type(value)
                if kind is last:
                    continue
                if kind is str or kind is int or kind is float or value is None or kind is bool:
                    last = kind
                elif kind is dict or kind is list or kind is tuple:
                    inner.append(value)
                else:
                    return False
        if not inner:
            return True
        level = inner
    return False


def _step(paths: tuple[Path, ...], name: str) -> tuple[str | None, tuple[Path, ...]]:
    """The path that ends at this key, if one does; the paths that go on below it."""
    rest = []
    for path in paths:
        parts = path.parts
        if parts[0] == ANY_DEPTH:
            rest.append(path)
            parts = parts[1:]
        if parts[0] == name:
            if len(parts) == 1:
                return path.source, ()
            rest.append(Path(path.source, parts[1:]))
    return None, tuple(rest)


class _Walk:
    """Builds one form; `path` stays where it failed."""

    __slots__ = ("inside", "matched", "path")

    def __init__(self) -> None:
        self.path: list[str | int | None] = []
        self.inside: set[int] = set()
        self.matched: set[str] = set()

    def form(
        self,
        value: Any,
        paths: tuple[Path, ...] = (),
        own: frozenset[str] = NOBODY,
        below: frozenset[str] = NOBODY,
    ) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if kind is str:
            return self.text(value)
        if kind is int:
            return self.integer(value)
        if id(value) in self.inside:
            raise self.none("contains itself")
        if len(self.inside) >= MAX_DEPTH:
            raise self.none(f"is nested more than {MAX_DEPTH} levels deep")
        self.inside.add(id(value))
        if getattr(kind, "__idempotency_key__", None) is not None:
            found = self.form(value.__idempotency_key__())
        elif issubclass(kind, Enum):
            found = self.form(value.value)
        elif kind is list or kind is tuple:
            found = self.elements(value, paths)
        elif (members := _members(value, kind)) is not None:
            found = self.members(members, paths, own, below)
        elif issubclass(kind, (list, tuple)):
            found = self.elements(value, paths)
        elif issubclass(kind, (set, frozenset)):
            found = sorted((self.at(None, element, paths) for element in value), key=encode)
        else:
            found = self.leaf(value, kind)
        self.inside.discard(id(value))
        return found

    def at(self, place: str | int | None, value: object, *rules: Any) -> Any:
        self.path.append(place)
        found = self.form(value, *rules)
        self.path.pop()
        return found

    def elements(self, values: Iterable[object], paths: tuple[Path, ...] = ()) -> list[Any]:
        return [self.at(index, value, paths) for index, value in enumerate(values)]

    def members(
        self,
        members: Iterable[tuple[object, object]],
        paths: tuple[Path, ...],
        own: frozenset[str],
        below: frozenset[str],
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in members:
            name = self.key(key)
            if name in own:
                self.matched.add(name)
                continue
            ended, rest = _step(paths, name) if paths else (None, ())
            if ended is not None:
                self.matched.add(ended)
            elif name in found:
                raise self.none(f"has two keys of one text, {encode(name)}")
            elif value is _UNSET:
                raise NoFormError([*self.path, name], "is a field that was never set")
            else:
                found[name] = self.at(name, value, rest, below)
        return found

    def key(self, key: Any) -> str:
        if type(key) is str:
            return self.text(key)
        depth = len(self.path)
        try:
            form = self.form(key)
        except NoFormError:
            form = _UNSET
            del self.path[depth:]
        if isinstance(form, str):
            return form
        if form is None or isinstance(form, (int, float)):
            return encode(form)
        raise self.none(f"has a key that is a {name_of(type(key))}, which has no text")

    def leaf(self, value: Any, kind: type) -> Any:
        if issubclass(kind, str):
            return self.text(str.__str__(value))
        if issubclass(kind, int):
            return self.integer(int.__index__(value))
        if issubclass(kind, float):
            return float.__float__(value)
        if issubclass(kind, (datetime, date, time)):
            return self.text(value.isoformat())
        if issubclass(kind, timedelta):
            return value.total_seconds()
        if issubclass(kind, Decimal):
            return str(value).replace("e", "E")  # the decimal context chooses the letter
        if issubclass(kind, (UUID, PurePath)):
            return self.text(str(value))
        if issubclass(kind, (bytes, bytearray, memoryview)):
            return b64encode(value).decode()
        if (numpy := sys.modules.get("numpy")) is not None:
            return self.numpy(value, kind, numpy)
        raise self.none(f"is a {name_of(kind)}")

    def numpy(self, value: Any, kind: type, numpy: Any) -> Any:
        if issubclass(kind, (numpy.longdouble, numpy.clongdouble)):
            raise self.none(f"is a {name_of(kind)}")  # its padding is whatever was in memory
        if issubclass(kind, numpy.generic):
            if issubclass(kind, (numpy.bool_, numpy.integer, numpy.floating)) and not issubclass(
                kind, numpy.timedelta64
            ):
                return value.item()
            value = numpy.asarray(value)
        elif kind is not numpy.ndarray and kind is not numpy.memmap:
            raise self.none(f"is a {name_of(kind)}")  # a subclass may hold more: a mask, a unit
        dtype = value.dtype
        content: Any
        if dtype.kind in "biufcmM" and dtype.char not in "gG":
            content = hashlib.sha256(value.tobytes()).hexdigest()
        else:
            content = self.form(value.tolist())  # bytes would be addresses, or padding
        kinds = dtype.str if dtype.names is None else self.form(dtype.descr)
        return {"dtype": kinds, "shape": list(value.shape), "content": content}

    def text(self, value: str) -> str:
        if value.isascii():
            return value
        if not is_text(value):
            raise self.none("holds text that is not valid Unicode")
        return unicodedata.normalize("NFC", value)

    def integer(self, value: int) -> int:
        if value.bit_length() > SURELY_PRINTED:
            try:
                int.__repr__(value)
            except ValueError:
                raise self.none("is an integer with more digits than Python prints") from None
        return value

    def none(self, reason: str) -> NoFormError:
        return NoFormError(self.path, reason)


def _members(value: Any, kind: type) -> Iterable[tuple[object, object]] | None:
    """Keys and values of a mapping or a model, None of anything else."""
    names: list[str]
    if kind is dict:
        return value.items()  # type: ignore[no-any-return] # as dict has it
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif (attributes := getattr(kind, "__attrs_attrs__", None)) is not None:
        names = [attribute.name for attribute in attributes]
    elif (fields := getattr(kind, "__pydantic_fields__", None)) is not None:
        names = [*fields, *(getattr(value, "__pydantic_extra__", None) or ())]
    elif issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        names = list(kind._fields)  # type: ignore[attr-defined] # just seen
    elif issubclass(kind, Mapping):
        return value.items()  # type: ignore[no-any-return] # as Mapping has it
    else:
        return None
    return [(name, getattr(value, name, _UNSET)) for name in names]


def name_of(kind: type) -> str:
    """A type's name for a message: `int`, `httpx.Client`."""
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"

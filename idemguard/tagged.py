"""A value as tagged JSON and back: plain JSON, and the standard library's value types inside it.

A tag is an object of one key that begins with `$`: `{"$tuple": [1, 2]}`.
A mapping that looks like one, or whose keys are no plain texts, is written as `{"$dict": [[key, value], ...]}`.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID
from zoneinfo import ZoneInfo

if TYPE_CHECKING:
    from collections.abc import Callable

DEPTH = 100  # both directions recurse; a stack has room for this much wherever a call is made
WIDEST = 1 << 2000  # the decimal digits that an interpreter reads can be limited to 640
SHOWN = 10  # steps of a path, before its middle is left out
_MICROSECOND = timedelta(microseconds=1)
_ZONE_NAME = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_IDENTIFIER = re.compile(r"[^\W\d]\w{0,40}")


class UnstorableError(Exception):
    """A value has no faithful stored form.

    Attributes:
        problem: what stands in the way, and what to do about it.
        path: where in the value; collected from the inside out while the error rises.

    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []

    def __str__(self) -> str:
        parts = self.path[::-1]
        if len(parts) > SHOWN:
            parts = [*parts[: SHOWN // 2], "…", *parts[-SHOWN // 2 :]]
        return f"result{''.join(parts)}: {self.problem}"


class TooLargeError(UnstorableError):
    """A value is larger than what a store may be given."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"larger than the {limit} bytes of max_result_bytes; raise it, or return less"
        )


class UnreadableError(Exception):
    """Stored bytes are not what this version writes."""


_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Encoder:
    """Writes one value as a tree of plain JSON.

    Args:
        limit: how many bytes the value may need.
        apart: takes an instance of a known class apart: the class's name, its parts, and
            what it holds beside them; it raises `UnstorableError` for everything else.
        verify: is shown the tree of every instance, inner ones first, and what it and
            those inside hold beside their parts; it may raise `UnstorableError`.

    Attributes:
        instances: whether there was an instance of a known class.
        beside: what instances hold beside their parts, as far as it can be compared.

    """

    def __init__(
        self,
        limit: int,
        apart: Callable[[object], tuple[str, object, dict[str, object]]],
        verify: Callable[[object, list[object]], None] | None = None,
    ) -> None:
        self._limit = limit
        self._left = limit + 2
        self._apart = apart
        self._verify = verify
        self.instances = False
        self.beside: list[object] = []

    def tree(self, value: object, depth: int = 0) -> object:
        """The value as plain JSON with tags.

        Raises:
            UnstorableError: somewhere in it is something that has no faithful stored form.

        """
        kind = type(value)
        if kind in _WRITERS:
            return _WRITERS[kind](self, value, depth)
        start = len(self.beside)
        name, parts, beside = self._apart(value)
        for attribute, other in beside.items():
            try:
                self.beside.append((attribute, self.tree(other, depth + 1)))
            except UnstorableError:
                self.beside.append((attribute, type(other)))
        # parts that are a mapping are no level of their own
        tree = {"$of": [name, self.tree(parts, depth)]}
        self.instances = True
        if self._verify:
            self._verify(tree, self.beside[start:])
        return tree

    def _inside(self, step: object, value: object, depth: int) -> object:
        try:
            return self.tree(value, depth + 1)
        except UnstorableError as error:
            error.path.append(_path(step))
            raise

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise TooLargeError(self._limit)

    def _enter(self, value: Any, depth: int) -> None:
        self._spend(2 * len(value))
        if depth > DEPTH:
            raise UnstorableError(
                f"nested deeper than {DEPTH} levels, or holds itself; return a flatter value"
            )

    def text(self, value: str, _: int = 0) -> object:
        self._spend(len(value))
        if _valid(value):
            return value
        return {"$str": _base64(value.encode("utf-8", "surrogatepass"))}

    def integer(self, value: int, _: int) -> object:
        if -WIDEST < value < WIDEST:
            return value
        self._spend(value.bit_length() // 4)
        return {"$int": hex(value)}

    def octets(self, value: bytes | bytearray, _: int) -> object:
        self._spend(len(value))
        return {f"${type(value).__name__}": _base64(value)}

    def sequence(self, value: Any, depth: int) -> list[object]:
        self._enter(value, depth)
        return [self._inside(index, item, depth) for index, item in enumerate(value)]

    def unordered(self, value: Any, depth: int) -> list[object]:
        self._enter(value, depth)
        # in one order, so that two equal sets are written alike
        return sorted((self._inside(None, item, depth) for item in value), key=_compact)

    def mapping(self, value: dict[Any, Any], depth: int) -> object:
        self._enter(value, depth)
        if all(type(key) is str and _valid(key) for key in value) and not _looks_tagged(value):
            self._spend(sum(map(len, value)))
            return {key: self._inside(key, item, depth) for key, item in value.items()}
        return {
            "$dict": [
                [self._inside(None, key, depth), self._inside(key, item, depth)]
                for key, item in value.items()
            ]
        }


_WRITERS: dict[type, Callable[[Encoder, Any, int], object]] = {
    type(None): lambda _, value, __: value,
    bool: lambda _, value, __: value,
    int: Encoder.integer,
    float: lambda _, value, __: value if value - value == 0 else {"$float": repr(value)},
    str: Encoder.text,
    list: Encoder.sequence,
    dict: Encoder.mapping,
    tuple: lambda encoder, value, depth: {"$tuple": encoder.sequence(value, depth)},
    set: lambda encoder, value, depth: {"$set": encoder.unordered(value, depth)},
    frozenset: lambda encoder, value, depth: {"$frozenset": encoder.unordered(value, depth)},
    bytes: Encoder.octets,
    bytearray: Encoder.octets,
    complex: lambda _, value, __: {"$complex": [repr(value.real), repr(value.imag)]},
    datetime: lambda _, value, __: {"$datetime": _moment(value)},
    date: lambda _, value, __: {"$date": value.isoformat()},
    time: lambda _, value, __: {"$time": _moment(value)},
    timedelta: lambda _, value, __: {"$timedelta": value // _MICROSECOND},
    Decimal: lambda _, value, __: {"$decimal": str(value)},
    UUID: lambda _, value, __: {"$uuid": str(value)},
}

_READERS: dict[str, Callable[[Any], object]] = {
    "$str": lambda body: b64decode(body, validate=True).decode("utf-8", "surrogatepass"),
    "$int": lambda body: int(body, 16),
    "$float": float,
    "$bytes": lambda body: b64decode(body, validate=True),
    "$bytearray": lambda body: bytearray(b64decode(body, validate=True)),
    "$complex": lambda body: complex(*map(float, body)),
    "$datetime": lambda body: _set_zone(datetime.fromisoformat(body[0]), body),
    "$date": date.fromisoformat,
    "$time": lambda body: _set_zone(time.fromisoformat(body[0]), body),
    "$timedelta": lambda body: body * _MICROSECOND,
    "$decimal": Decimal,
    "$uuid": UUID,
}

_CONTAINERS: dict[str, Callable[[list[Any]], object]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
}


def decode(tree: Any, together: Callable[[Any, Any], object]) -> Any:
    """The value that an `Encoder` made a tree of.

    Args:
        tree: the parsed JSON.
        together: makes an instance of a known class from its name and its parts.

    Raises:
        Exception: of any kind, when the tree is not what an `Encoder` writes.

    """
    if type(tree) is list:
        return [decode(item, together) for item in tree]
    if type(tree) is not dict:
        return tree
    if len(tree) == 1:
        ((tag, body),) = tree.items()
        if tag.startswith("$"):
            return _untag(tag, body, together)
    return {key: decode(item, together) for key, item in tree.items()}


def _untag(tag: str, body: Any, together: Callable[[Any, Any], object]) -> object:
    if tag in _READERS:
        return _READERS[tag](body)
    if type(body) is not list:
        raise UnreadableError(f"the tag {tag!r} is unknown or damaged")
    if tag == "$of":
        name, parts = body
        return together(name, decode(parts, together))
    if tag == "$dict":
        mapping = {decode(key, together): decode(item, together) for key, item in body}
        if len(mapping) != len(body):
            raise UnreadableError("a mapping has a key twice")
        return mapping
    if tag not in _CONTAINERS:
        raise UnreadableError(f"the tag {tag!r} is unknown")
    return _CONTAINERS[tag]([decode(item, together) for item in body])


def _base64(data: bytes | bytearray) -> str:
    return b64encode(data).decode("ascii")


def _looks_tagged(mapping: dict[str, Any]) -> bool:
    return len(mapping) == 1 and next(iter(mapping)).startswith("$")


def _valid(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _path(step: object) -> str:
    if type(step) is str:
        return f".{step}" if _IDENTIFIER.fullmatch(step) else f"[{step[:40]!a}]"
    if type(step) is int and -WIDEST < step < WIDEST:
        return f"[{step}]"
    return "[…]"


def _moment(value: datetime | time) -> list[object]:
    zone = _zone(value.tzinfo, value)
    return [value.replace(tzinfo=None).isoformat(), value.fold, zone]


def _zone(zone: tzinfo | None, value: datetime | time) -> list[object] | None:
    if zone is None:
        return None
    if type(zone) is timezone:
        offset = zone.utcoffset(None)
        name = zone.tzname(None)
        return [offset // _MICROSECOND, None if timezone(offset).tzname(None) == name else name]
    if type(zone) is ZoneInfo and zone.key and _ZONE_NAME.fullmatch(zone.key):
        try:
            known = value.replace(tzinfo=ZoneInfo(zone.key)).utcoffset() == value.utcoffset()
        except (OSError, ValueError, KeyError):
            known = False
        if known:
            return [zone.key]
    raise UnstorableError(
        f"{type(zone).__module__}.{type(zone).__qualname__} is a time zone that cannot be restored;"
        " use datetime.timezone or a zoneinfo.ZoneInfo of the time zone database"
    )


def _set_zone(value: Any, body: Any) -> Any:
    _, fold, zone = body
    return value.replace(fold=fold, tzinfo=None if zone is None else _unzone(zone))


def _unzone(body: list[Any]) -> tzinfo:
    if len(body) == 1:
        if not _ZONE_NAME.fullmatch(body[0]):  # it becomes part of a file's path
            raise UnreadableError("a time zone has no valid name")
        return ZoneInfo(body[0])
    offset, name = body
    delta = offset * _MICROSECOND
    return timezone(delta) if name is None else timezone(delta, name)

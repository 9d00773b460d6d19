"""Results and streams of every kind, asked for in this process and in others."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import gc
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import attrs
from pydantic import BaseModel
from workers.jobs import append, guard_of, in_child, wait_for

from idemguard import capture
from idemguard.errors import ConfigurationError

# --- types -----------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"
    NUMBER = 7


class Level(IntEnum):
    LOW = 1


class Word(StrEnum):
    YES = "yes"


@dataclass
class Cat:
    name: str
    lives: int = 9


@dataclass
class Dog:
    name: str
    lives: int = 1


@dataclass(frozen=True)
class Basket:
    pets: list[Cat | Dog]
    sizes: tuple[int, float] = (1, 1.0)
    tags: frozenset[str] = field(default_factory=frozenset)


class Pet(BaseModel):
    name: str
    price: Decimal | None = None


class Toy(BaseModel):
    name: str
    price: Decimal | None = None


class Shop(BaseModel):
    items: list[Pet | Toy]
    opened: datetime
    photo: bytes = b""


class Film(TypedDict):
    title: str
    seen: date


class Point(NamedTuple):
    x: int
    y: float


class Line(NamedTuple):
    start: Point
    end: Point | None = None


@attrs.define
class Crate:
    inside: list[Point]


def same(one: object, other: object) -> bool:
    """Whether two values are equal, and of the same types at every depth."""
    if type(one) is not type(other):
        return False
    inner: Callable[[Any], Any]
    if isinstance(one, dict) and isinstance(other, dict):
        return one == other and same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        assert isinstance(other, (list, tuple))
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        kinds = [sorted(f"{type(x).__name__} {x!r}" for x in each) for each in (one, other)]
        return one == other and kinds[0] == kinds[1]
    if isinstance(one, BaseModel):
        inner = dict
    elif attrs.has(type(one)):
        inner = lambda it: attrs.asdict(it, recurse=False)  # noqa: E731
    elif dataclasses.is_dataclass(one):
        inner = vars
    else:
        return one == other and repr(one) == repr(other)
    return one == other and same(inner(one), inner(other))


# --- results: what a function is annotated with (None: with nothing), and what it returns ------------

NONE: Any = object()
MOMENT = datetime(2026, 3, 1, 12, 30, 5, 7, tzinfo=timezone(timedelta(hours=2)))
ID = UUID(int=2**100 + 1)
CASES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "nothing": (NONE, lambda: None),
    "falsy": (NONE, lambda: [None, 0, "", [], {}, False, 0.0, -0.0]),
    "numbers": (NONE, lambda: {"a": [1, 1.0, True], "b": [0, False, 10**30, 1e300]}),
    "text": (NONE, lambda: {"": "é\u0000\n", "𝄞": ["1", 1, None, "null"]}),
    "value types": (
        NONE,
        lambda: [
            (1, 1.0, True, ()), {1, 2}, frozenset({"a"}), b"\x00\xff", MOMENT, MOMENT.date(),
            time(1, 2, 3), timedelta(days=-1, microseconds=1), Decimal("1.10"), ID,
            {1: "int", "1": "str"}, {(1, 2): {b"k": {3}}},
        ],
    ),
    "tags of one's own": (NONE, lambda: {"$of": [1], "idemguard": 1, "value": {"$tuple": []}}),
    "datetime": (datetime, lambda: MOMENT),
    "naive": (datetime, lambda: datetime(2026, 1, 1)),  # noqa: DTZ001
    "decimal": (Decimal, lambda: Decimal("0.10")),
    "uuid": (UUID, lambda: ID),
    "bytes": (bytes, lambda: b"\xff\x00"),
    "set": (set[int], lambda: {3, 1}),
    "tuple": (tuple[int, ...], lambda: (1, 2, 3)),
    "tuple in lists": (list[list[tuple[str, int]]], lambda: [[("a", 1)], []]),
    "enum": (Colour, lambda: Colour.NUMBER),
    "enums": (list[Colour | Level | Word], lambda: [Colour.RED, Level.LOW, Word.YES]),
    "enum or plain": (list[Level | int | Word | str], lambda: [1, Level.LOW, "yes", Word.YES]),
    "dataclass": (Cat, lambda: Cat("Tom")),
    "look-alike dataclasses": (list[Cat | Dog], lambda: [Dog("a", 1), Cat("a", 1)]),
    "nested dataclass": (
        dict[str, Basket | None],
        lambda: {"a": Basket([Dog("x"), Cat("y")], (1, 2.0), frozenset({"t"})), "b": None},
    ),
    "model": (Pet, lambda: Pet(name="a", price=Decimal("1.20"))),
    "look-alike models": (list[Pet | Toy], lambda: [Toy(name="a"), Pet(name="a")]),
    "nested model": (
        Shop | None,
        lambda: Shop(items=[Toy(name="b"), Pet(name="b")], opened=MOMENT, photo=b"\xfe"),
    ),
    "model or dict": (list[Pet | dict[str, Any]], lambda: [{"name": "a"}, Pet(name="a")]),
    "typed dict": (Film, lambda: {"title": "M", "seen": date(1931, 5, 11)}),
    "named tuple": (Point, lambda: Point(1, 2.0)),
    "nested named tuple": (list[Line], lambda: [Line(Point(1, 2.5), None), Line(Point(0, 0.5))]),
    "named tuple or tuple": (list[Point | tuple[int, float]], lambda: [(1, 2.0), Point(1, 2.0)]),
    "attrs": (Crate, lambda: Crate([Point(1, 1.5)])),
    "path": (list[PurePosixPath | str], lambda: ["/a", PurePosixPath("/a")]),
    "int or text": (int | str, lambda: "12"),
    "number or number": (list[int | float | bool], lambda: [1, 1.0, True, 0, False]),
    "date or text": (list[date | datetime | str], lambda: ["2026-01-01", date(2026, 1, 1), MOMENT]),
    "literal": (Literal["a", 1], lambda: 1),
    "utc": (datetime, lambda: datetime(2026, 1, 1, tzinfo=UTC)),
}  # fmt: skip


def result_of(url: str, name: str, kind: str, gate: str | None, log: str) -> Callable[[], Any]:
    """A call of a function, or coroutine function, with that result."""
    annotation, make = CASES[name]

    def body(name: str) -> Any:
        append(log, {"name": name, "pid": os.getpid()})
        if gate is not None:
            wait_for(gate)
        return make()

    async def abody(name: str) -> Any:
        return await asyncio.to_thread(body, name)

    chosen: Any = body if kind == "sync" else abody
    chosen.__annotations__["return"] = Any
    if annotation is NONE:
        del chosen.__annotations__["return"]
    else:
        chosen.__annotations__["return"] = annotation
    guarded = guard_of(url).idempotent(chosen, task_type=f"{kind} result")
    return (lambda: guarded(name)) if kind == "sync" else (lambda: asyncio.run(guarded(name)))


def results(url: str, names: list[str], kind: str, log: str) -> list[tuple[Any, str]]:
    """Calls, and how their outcomes came about."""
    found = []
    for name in names:
        with capture() as calls:
            value = result_of(url, name, kind, None, log)()
        found.append((value, calls[0].source))
    return found


# --- streams -----------------------------------------------------------------------------------------


def five() -> list[Any]:
    """The chunks of a stream that has everything."""
    return [0, "", None, [1, 1.0, True, (MOMENT, {b"x"})], {"k": Decimal("1.0")}]


@cache
def streams(url: str) -> dict[str, Any]:
    """Guarded streams on a store, by their kind."""
    guard = guard_of(url)

    @guard.idempotent(task_type="sync stream", key="key")
    def plain(key: str, log: str) -> Generator[Any, None, tuple[str, int]]:
        append(log, {"key": key, "pid": os.getpid()})
        yield from five()
        return "end", 1

    @guard.idempotent(task_type="async stream", key="key")
    async def loops(key: str, log: str) -> AsyncIterator[Any]:
        append(log, {"key": key, "pid": os.getpid()})
        for chunk in five():
            yield chunk

    @guard.idempotent(task_type="typed stream", key="key")
    def typed(key: str, log: str) -> Iterator[Cat | Dog | Pet]:
        append(log, {"key": key, "pid": os.getpid()})
        yield Dog("a", 1)
        yield Cat("a", 1)
        yield Pet(name="a")

    return {"sync": plain, "async": loops, "typed": typed}


async def collected(stream: AsyncIterator[Any]) -> list[Any]:
    """All chunks."""
    return [chunk async for chunk in stream]


def consume(url: str, kind: str, key: str, log: str) -> tuple[list[Any], str]:
    """All chunks, and how the outcome came about."""
    with capture() as calls:
        stream = streams(url)[kind](key, log)
        chunks = asyncio.run(collected(stream)) if kind == "async" else list(stream)
    return chunks, calls[0].source


def linger(url: str, key: str, log: str, lease: float) -> None:
    """Take three chunks, say so, and go no further."""
    guarded = guard_of(url).idempotent(
        streams(url)["sync"].__wrapped__, task_type="sync stream", key="key", lease=lease
    )
    stream = guarded(key, log)
    for _ in range(3):
        next(stream)
    append(log, {"key": key, "half way": True})
    wait_for(f"{log}.never")


def end_half_way(url: str, kind: str, key: str, log: str) -> None:
    """Take a chunk, and end the process with the stream still there."""
    stream = streams(url)[kind](key, log)
    kept.append(stream)
    if kind == "sync":
        next(stream)
        atexit._run_exitfuncs()  # multiprocessing ends without them
        return
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(stream))
    loop.close()
    atexit._run_exitfuncs()


kept: list[Any] = []


def forked(url: str, key: str, log: str) -> dict[str, Any]:
    """Fork with a stream half way, have the child go on, and drop it; then consume the rest."""
    stream = streams(url)["sync"](key, log)
    chunks = [next(stream), next(stream)]

    def child() -> str:
        nonlocal stream
        try:
            next(stream)
        except ConfigurationError as error:
            said = str(error)
        del stream
        gc.collect()
        return said

    said = in_child(child)
    another = in_child(lambda: drop(stream))
    held = [str(line.status) for line in guard_of(url).ledger.lines()]
    return {"chunks": [*chunks, *stream], "said": said, "dropped": another, "held": held}


def drop(stream: Iterator[Any]) -> str:
    """Close a copy of it."""
    stream.close()  # type: ignore[attr-defined]
    return "dropped"


def touch(path: str) -> None:
    """Open a gate."""
    Path(path).touch()

"""A result as bytes and back: the same at every depth, or told to be none."""

import dataclasses
import enum
import importlib.resources
import inspect
import io
import ipaddress
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import typing
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from datetime import UTC, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    Optional,
    TypedDict,
    TypeVar,
)
from uuid import UUID
from zoneinfo import ZoneInfo

import attrs
import numpy as np
import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, RootModel, SecretStr
from pydantic.dataclasses import dataclass as pydantic_dataclass

from idemguard.codec import ABSENT, Codec, Value
from idemguard.errors import ResultUnavailableError, StoreError
from idemguard.tagged import DEPTH

LIMIT = 8 << 20
T = TypeVar("T")


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"
    CRIMSON = 1  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mood(enum.StrEnum):
    GOOD = "good"


class Open(enum.Enum):
    KNOWN = 1

    @classmethod
    def _missing_(cls, value: object) -> "Open":
        made = object.__new__(cls)
        made._name_ = "KNOWN"
        made._value_ = value
        return made


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Cat(BaseModel):
    name: str
    lives: int = 9


class Dog(BaseModel):
    name: str
    lives: int = 9


class Puppy(Dog):
    pass


class Home(BaseModel):
    pets: list[Cat | Dog] = []
    by_name: dict[str, Cat | Dog] = {}
    best: Dog | None = None
    anything: Any = None


class Aliased(BaseModel):
    number: int = Field(alias="theNumber")
    text: str = Field(default="", validation_alias="in", serialization_alias="out")


class Private(BaseModel):
    shown: int
    _hidden: list[int] = PrivateAttr(default_factory=list)
    _late: int = PrivateAttr()


class Extra(BaseModel):
    model_config = ConfigDict(extra="allow")
    known: int


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    number: int


class Computed(BaseModel):
    width: int

    @pydantic.computed_field
    @property
    def area(self) -> int:
        return self.width**2

    @cached_property
    def slow(self) -> int:
        return self.width + 1


class Valued(BaseModel):
    model_config = ConfigDict(use_enum_values=True, arbitrary_types_allowed=True)
    color: Color
    raw: bytes = b"\xff\x00"
    when: datetime = datetime(2024, 1, 1, tzinfo=UTC)
    amount: Decimal = Decimal("1.10")
    either: int | float | bool | str = 1.0
    path: Path = Path("a/b")


class Numbers(RootModel[list[int]]):
    pass


class Box(BaseModel, Generic[T]):
    content: T


class Growing(BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def grow(cls, number: int) -> int:
        return number + 1


class Once(BaseModel):
    text: str

    @pydantic.field_validator("text")
    @classmethod
    def strip(cls, text: str) -> str:
        return text.strip()


class Node(BaseModel):
    value: int
    children: list["Node"] = []


class Secretive(BaseModel):
    token: SecretStr


@dataclass
class Point:
    x: float
    y: float = 0.0
    tags: list[str] = field(default_factory=list)


@dataclass
class Point3(Point):
    z: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    a: int
    b: "Slotted | None" = None


@dataclass
class Derived:
    a: int
    b: int = field(init=False)
    scale: InitVar[int] = 2

    def __post_init__(self, scale: int) -> None:
        self.b = self.a * scale
        self.lock = threading.Lock()
        self.index = {self.a: self.b}


@dataclass
class Changing:
    count: int

    def __post_init__(self) -> None:
        self.count += 1


@dataclass
class Appending:
    items: list[int]

    def __post_init__(self) -> None:
        self.items.append(1)


@dataclass
class Needing:
    a: int
    seed: InitVar[int]


@dataclass
class Sloppy:
    names: list[str] = None  # type: ignore[assignment]


@dataclass
class Chain:
    next: "Chain | None" = None


@dataclass
class Empty:
    pass


@dataclass
class Bag(Generic[T]):
    content: T

    @cached_property
    def slow(self) -> list[T]:
        return [self.content]


def full_bag() -> Bag[int]:
    bag = Bag[int](1)
    assert bag.slow == [1]
    return bag


class Counting(BaseModel):
    count: int = 0

    @pydantic.model_validator(mode="after")
    def more(self) -> "Counting":
        self.count = min(self.count + 1, 3)
        return self


@dataclass
class Listed(list):  # type: ignore[type-arg]
    a: int = 1


@dataclass
class Holder:
    what: Any


@pydantic_dataclass
class Checked:
    number: int


@attrs.define
class Attr:
    _hidden: int
    pet: Cat | Dog
    made: list[int] = attrs.field(init=False, factory=list)


@attrs.frozen(eq=False)
class Lonely:
    a: int


class Pair(NamedTuple):
    left: int
    right: Cat | Dog | None = None


class LoosePair(Pair):
    pass


Old = namedtuple("Old", ["a", "b"])  # noqa: PYI024 - it is what is tested


class Options(TypedDict):
    a: int


class Movie(TypedDict, total=False):
    title: str
    star: Cat | Dog


class Text(str):
    __slots__ = ()


class Plain:
    """A class that nobody knows how to restore."""


UserId = NewType("UserId", int)
Pet = Annotated[Cat | Dog, Field(description="any")]


def later() -> list["Home | Mood"]: ...


def private(shown: int, hidden: list[int]) -> Private:
    made = Private(shown=shown)
    made._hidden = hidden
    return made


def cached(width: int) -> Computed:
    made = Computed(width=width)
    assert made.slow == width + 1
    return made


def derived(a: int, b: int) -> Derived:
    made = Derived(a)
    made.b = b
    return made


def parts(value: Any) -> Any:
    """What a value is made of, each with its type: two values are the same when these are equal."""
    kind = type(value)
    if isinstance(value, BaseModel):
        inner: Any = (
            [(name, parts(vars(value)[name])) for name in kind.model_fields if name in vars(value)],
            parts(value.__pydantic_extra__),
            parts(value.__pydantic_private__),
            value.__pydantic_fields_set__,
        )
    elif isinstance(value, enum.Enum):
        inner = id(value)
    elif dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
        inner = [(name, parts(getattr(value, name))) for name in names]
    elif attrs.has(kind):
        inner = [(a.name, parts(getattr(value, a.name))) for a in attrs.fields(kind)]
    elif isinstance(value, dict):
        inner = [(parts(key), parts(item)) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        inner = [parts(item) for item in value]
    elif isinstance(value, set | frozenset):
        inner = sorted((parts(item) for item in value), key=repr)
    elif kind is float:
        inner = value.hex()
    elif kind is complex:
        inner = (value.real.hex(), value.imag.hex())
    elif kind is Decimal:
        inner = value.as_tuple()
    elif isinstance(value, datetime | time):
        naive = value.replace(tzinfo=None)
        inner = (naive.isoformat(), value.fold, type(value.tzinfo), str(value.tzinfo))
        inner += (value.utcoffset(),)
    else:
        inner = value
    return (kind, inner)


_numbers = itertools.count()


def count(_: object) -> str:
    return str(next(_numbers))


def roundtrip(value: object, annotation: object = ABSENT) -> tuple[Value, Any]:
    stored = Codec(annotation).dump(value, limit=LIMIT)
    assert stored.codec != "unstorable", stored.data.decode()
    # another codec, as in another process
    restored = Codec(annotation).load(stored)
    assert parts(restored) == parts(value)
    return stored, restored


def reason(value: object, annotation: object = ABSENT, limit: int = LIMIT) -> str:
    codec = Codec(annotation)
    stored = codec.dump(value, limit=limit)
    assert stored.codec == "unstorable", stored
    with pytest.raises(ResultUnavailableError) as caught:
        codec.load(stored)
    assert str(caught.value) == stored.data.decode()
    return str(caught.value)


def tagged(value: object) -> Value:
    return Value("tagged", json.dumps({"idemguard": 1, "value": value}).encode() + b"\n")


# ---- plain values and value types ------------------------------------------------------------

texts = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["$tuple", "$of", "$dict", "$", "", "\ud800", "\ud83d\ude00", "\x00", "é"]
)
zones = st.none() | st.sampled_from(
    [
        UTC,
        timezone(timedelta(hours=5, minutes=30)),
        timezone(timedelta(seconds=-1, microseconds=5), "odd"),
        timezone(timedelta(0), "GMT"),
        ZoneInfo("Europe/Berlin"),
        ZoneInfo("America/Argentina/Buenos_Aires"),
    ]
)
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**64, 10**700, -(10**800)])
    | st.floats()
    | texts
)
moments = (
    st.datetimes(timezones=zones, allow_imaginary=True)
    | st.builds(datetime.replace, st.datetimes(timezones=zones), fold=st.sampled_from([0, 1]))
    | st.times(timezones=zones)
    | st.dates()
    | st.timedeltas()
)
keys = (
    atoms
    | moments
    | st.binary(max_size=8)
    | st.complex_numbers()
    | st.decimals(allow_nan=False)
    | st.uuids()
)
hashable = st.recursive(
    keys, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
leaves = (
    hashable
    | st.decimals()
    | st.sampled_from([Decimal("sNaN"), Decimal("-NaN12"), Decimal("-0E+7"), Decimal("1E-900")])
    | st.binary(max_size=8).map(bytearray)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts, inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
        | st.fixed_dictionaries({"$tuple": inner})
    ),
    max_leaves=12,
)
plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # no lone surrogates
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(values)
@example({"b": 1, "a": 2})
@example({"$tuple": {"$dict": [["$of", ("x",)]]}})
@example([-0.0, math.inf, -math.inf, math.nan, 1, 1.0, True, Decimal(1)])
@example({1: "int", "1": "text", None: 0, (1, "a"): 1, "\ud800": 2})
@example([{(1, 2), frozenset({3})}, {True}, {1.0}, {Decimal(1)}])
@example("\ud83d\ude00")
def test_values_and_value_types_come_back_the_same_without_an_annotation(value):
    roundtrip(value)


@settings(max_examples=150, deadline=None)
@given(plain_values)
@example({"$tuple": [1]})
def test_plain_values_are_plain_json(value):
    stored, _ = roundtrip(value)
    assert stored.codec == "json"
    assert parts(json.loads(stored.data)) == parts(value)


@settings(max_examples=80, deadline=None)
@given(values)
def test_an_annotation_with_classes_changes_no_other_value(value):
    roundtrip(value, Cat | dict[Any, Any])


@pytest.mark.parametrize("value", [None, 0, "", [], False, {}, 0.0, ()])
def test_falsy_values_are_results(value):
    roundtrip(value)
    roundtrip(value, Cat | None)


def test_a_fold_and_an_imaginary_time_survive():
    berlin = ZoneInfo("Europe/Berlin")
    twice = [datetime(2024, 10, 27, 2, 30, fold=fold, tzinfo=berlin) for fold in (0, 1)]
    _, restored = roundtrip(twice)
    assert [moment.utcoffset() for moment in restored] == [timedelta(hours=2), timedelta(hours=1)]


def test_integers_of_any_size_survive():
    for number in (10**5000, -(10**5000), 2**2000, 1 - 2**2000):
        stored = Codec().dump([number], limit=LIMIT)
        assert Codec().load(stored) == [number]


def test_an_interpreter_that_reads_few_digits_reads_them_all():
    stored = Codec().dump(10**700, limit=LIMIT)
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert Codec().load(stored) == 10**700
    finally:
        sys.set_int_max_str_digits(before)


def test_equal_sets_are_written_alike():
    one, two = {0, 8}, {8, 0}
    assert list(one) != list(two), "they are to differ in their order"
    assert Codec().dump(one, limit=LIMIT) == Codec().dump(two, limit=LIMIT)


def test_shared_parts_come_back_equal():
    inner = [1]
    _, restored = roundtrip([inner, inner])
    assert restored == [[1], [1]]


# ---- classes that the annotation names -------------------------------------------------------

full_home = Home(
    pets=[Dog(name="a"), Cat(name="a")],
    by_name={"x": Cat(name="x", lives=1)},
    best=Dog(name="b"),
    anything=(Cat(name="c"), {Color.RED: b"\xff"}),
)
TABLE = [
    (Cat, Cat(name="a")),
    (Cat, Cat(name="a", lives=9)),
    (Cat | Dog, Dog(name="a")),
    (Dog | Cat, Cat(name="a")),
    (Dog | Puppy, Puppy(name="a")),
    (Optional[Cat], None),  # noqa: UP045 - the older spelling
    (Pet, Dog(name="a")),
    (list[Cat | Dog], [Cat(name="a"), Dog(name="a")]),
    (dict[str, Cat | None], {"a": Cat(name="a"), "b": None}),
    (tuple[Cat, ...], (Cat(name="a"), Cat(name="b"))),
    (dict[tuple[int, Color], set[Right]], {(1, Color.RED): {Right.READ, Right.READ | Right.WRITE}}),
    (Home | Color, full_home),
    (typing.get_type_hints(later)["return"], [Home(best=Dog(name="q"))]),
    (Home | Frozen, Home(anything=[Frozen(number=1)])),
    (Aliased, Aliased.model_validate({"theNumber": 3, "in": "x"})),
    (Private, private(1, [1, 2])),
    (Extra | Cat, Extra(known=1, other=(1, 2), pet=Cat(name="e"))),
    (Extra, Extra.model_validate({"known": 1, "$set": [1], "": None})),
    (Frozen, Frozen(number=1)),
    (Computed, Computed(width=3)),
    (Computed, cached(3)),
    (Valued, Valued(color=Color.BLUE, either=True)),
    (Valued, Valued(color=Color.RED, either=1)),
    (Numbers, Numbers([1, 2])),
    (Box[int], Box[int](content=1)),
    (Box[Cat | Dog], Box[Cat | Dog](content=Dog(name="a"))),
    (Once, Once(text=" a ")),
    (Node, Node(value=1, children=[Node(value=2, children=[Node(value=3)])])),
    (Color, Color.CRIMSON),
    (Level | int, Level.LOW),
    (list[Level | int], [1, Level.LOW, True]),
    (Mood | str, Mood.GOOD),
    (Right, Right(0)),
    (Literal[Color.BLUE, "blue"], Color.BLUE),
    (Point, Point(1, True, ["a"])),  # type: ignore[arg-type]
    (Point, Point(-0.0, math.nan)),
    (Point | Point3, Point3(1.0, z=2.0)),
    (Slotted, Slotted(a=1, b=Slotted(a=2))),
    (Derived, Derived(2)),
    (Derived, derived(2, -1)),
    (Changing, Changing(3)),
    (Sloppy, Sloppy()),
    (Empty, Empty()),
    (Bag[int], Bag[int](1)),
    (Bag[Cat], Bag(Cat(name="a"))),
    (Bag[int], full_bag()),
    (Holder | Counting, Holder([Counting(count=3)])),
    (Holder | Cat | Color, Holder({"a": (Cat(name="a"), Color.RED)})),
    (Checked, Checked(number=1)),
    (Attr, Attr(1, Dog(name="a"))),
    (Lonely, Lonely(1)),
    (Pair, Pair(1, Dog(name="a"))),
    (Pair, Pair(True)),
    (Old, Old(1, (2,))),
    (Movie, {"title": "a", "star": Dog(name="a")}),
    (list[Movie], [{"star": Cat(name="a")}, {}]),
    (UserId, UserId(3)),
    (Iterator[Cat], [Cat(name="a")]),
    (typing.Callable[[Cat], Dog], [Cat(name="a"), Dog(name="b")]),
    (Path, Path("/tmp/x")),
    (PurePosixPath, PurePosixPath("/tmp/x")),
    (dict[str, ipaddress.IPv4Address], {"a": ipaddress.IPv4Address("10.0.0.1")}),
    (pydantic.AnyUrl, pydantic.AnyUrl("https://example.org/a?b=c")),
    (Cat, {"name": "a plain mapping where a model was promised"}),
    (Cat, ["something", ("else",)]),
]


@pytest.mark.parametrize(("annotation", "value"), TABLE, ids=count)
def test_named_classes_come_back_the_same(annotation, value):
    before = parts(value)
    stored, _ = roundtrip(value, annotation)
    assert parts(value) == before, "the caller's own value was changed"
    assert stored == Codec(annotation).dump(value, limit=LIMIT), "one value, two texts"


def test_equal_means_equal_by_the_class_itself():
    for annotation, value in TABLE:
        if value == value and not isinstance(value, Lonely) and "nan" not in repr(value):  # noqa: PLR0124
            assert roundtrip(value, annotation)[1] == value


def test_every_load_gives_a_fresh_object():
    codec = Codec(dict[str, Home | Point | Color])
    stored = codec.dump({"home": full_home, "point": Point(1.0)}, limit=LIMIT)
    first = codec.load(stored)
    first["home"].pets.clear()
    first["home"].by_name["x"].name = "changed"
    first["point"].tags.append("changed")
    first.clear()
    assert parts(codec.load(stored)) == parts({"home": full_home, "point": Point(1.0)})


def test_what_a_constructor_makes_is_there_again():
    _, restored = roundtrip(Derived(2), Derived)
    assert restored.lock.acquire(blocking=False)
    assert restored.index == {2: 4}


def test_a_type_alias_of_python_312_is_looked_into():
    made = typing.cast("Any", __import__("typing_extensions")).TypeAliasType(
        "Pets", list[Cat | Dog]
    )
    roundtrip([Dog(name="a")], made)


# ---- what cannot be restored -----------------------------------------------------------------


class Shouting(BaseModel):
    text: str

    @pydantic.field_validator("text")
    @classmethod
    def refuse(cls, text: str) -> str:
        if text.isupper():
            raise ValueError("no shouting")
        return text.upper()


class OwnZone(tzinfo):
    def utcoffset(self, moment: datetime | None) -> timedelta:
        return timedelta(hours=1)

    def dst(self, moment: datetime | None) -> timedelta:
        return timedelta(0)

    def tzname(self, moment: datetime | None) -> str:
        return "own"


def noted(point: Point) -> Point:
    point.note = "no field"  # type: ignore[attr-defined]
    return point


def loose() -> LoosePair:
    pair = LoosePair(1)
    pair.note = "no field"  # type: ignore[attr-defined]
    return pair


def tampered() -> Private:
    made = Private(shown=1)
    made._hidden = [Plain()]  # type: ignore[list-item]
    return made


UNSTORABLE = [
    (ABSENT, Cat(name="a"), ["result: ", "test_codec.Cat", "annotation", "result="]),
    (ABSENT, {"a": [1, Color.RED]}, ["result.a[1]: ", "Color", "result="]),
    (ABSENT, {"odd key": (Plain(),)}, ["result['odd key'][0]: ", "Plain"]),
    (ABSENT, {1: {(1, 2): Plain()}}, ["result[1][…]: "]),
    (ABSENT, {Plain}, ["result[…]: ", "type"]),
    (ABSENT, Text("a"), ["Text"]),
    (ABSENT, [Level.LOW], ["result[0]: ", "Level"]),
    (Open, Open(7), ["Open"]),
    (ABSENT, OrderedDict(a=1), ["OrderedDict"]),
    (ABSENT, [defaultdict(int)], ["defaultdict"]),
    (ABSENT, Counter("a"), ["Counter"]),
    (ABSENT, deque([1]), ["deque"]),
    (ABSENT, memoryview(b"a"), ["memoryview"]),
    (ABSENT, range(3), ["range"]),
    (ABSENT, (number for number in [1]), ["generator", "return a list"]),
    (ABSENT, iter([1]), ["list_iterator", "return a list"]),
    (ABSENT, np.float64(1.5), ["float64"]),
    (ABSENT, Path("a"), ["Path", "result="]),
    (ABSENT, len, ["builtin_function_or_method"]),
    (ABSENT, [datetime(2024, 1, 1, tzinfo=OwnZone())], ["result[0]: ", "OwnZone", "zoneinfo"]),
    (ABSENT, time(1, tzinfo=OwnZone()), ["OwnZone"]),
    (Dog, Puppy(name="a"), ["Puppy", "result=Dog | Puppy"]),
    (Point, Point3(1.0), ["Point3", "result=Point | Point3"]),
    (Dog, Cat(name="a"), ["Cat"]),
    (Box[int], Box[str](content="a"), ["Box[str]"]),
    (BaseModel, Cat(name="a"), ["Cat", "result=BaseModel | Cat"]),
    (Holder | Counting, Holder([Counting(count=1)]), ["result.what[0]: ", "Counting"]),
    (Growing, Growing(number=1), ["Growing", "comes back changed", "result="]),
    (dict[str, list[Growing]], {"a": [Growing(number=1)]}, ["result.a[0]: ", "Growing"]),
    (list[Shouting], [Shouting(text="a")], ["result[0]: ", "Shouting", "no shouting"]),
    (Cat, Cat.model_construct(name=1), ["Cat", "cannot be restored"]),
    (Cat, Cat.model_construct(name="a", lives="9"), ["Cat", "changed"]),
    (Cat, Cat.model_construct(lives=1), ["Cat", "cannot be restored"]),
    (Secretive, Secretive(token=SecretStr("s3cret")), ["result.token: ", "SecretStr is a secret"]),
    (Private, tampered(), ["_hidden[0]: ", "Plain"]),
    (Point, noted(Point(1.0)), ["Point", "changed"]),
    (LoosePair, loose(), ["LoosePair", "changed"]),
    (Derived, Derived(2, scale=9), ["Derived", "changed"]),  # its index has the scale in it
    (Appending, Appending([0]), ["Appending", "changed"]),
    (Needing, Needing(1, 2), ["Needing", "seed"]),
    (Listed, Listed(a=2), ["Listed", "list"]),
    (Home, Home(anything=[Plain()]), ["result.anything[0]: ", "Plain"]),
    (Plain, Plain(), ["Plain", "pydantic"]),
    (Text, Text("a"), ["Text"]),
    (OrderedDict[str, int], OrderedDict(a=1), ["OrderedDict"]),
    (np.ndarray, np.zeros(2), ["ndarray"]),
    ("Cat", Cat(name="a"), ["Cat", "unclear", "result="]),
    (list["Nowhere"], [Cat(name="a")], ["'Nowhere'"]),  # type: ignore[name-defined] # noqa: F821
]


@pytest.mark.parametrize(("annotation", "value", "words"), UNSTORABLE, ids=count)
def test_what_cannot_be_restored_is_told(annotation, value, words):
    before = repr(value)
    text = reason(value, annotation)
    for word in words:
        assert word in text
    assert repr(value) == before, "the caller's own value was changed"


def test_a_secret_is_not_in_the_reason():
    assert "s3cret" not in reason(Secretive(token=SecretStr("s3cret")), Secretive)
    assert "a payload" not in reason(Cat.model_construct(name="x", lives="a payload"), Cat)


def test_a_time_zone_under_a_wrong_name_is_told():
    for key in ("Europe/Berlin", "No/Where", "../escape", None):
        zone = ZoneInfo.from_file(zone_file("Asia/Tokyo"), key=key)
        assert "ZoneInfo" in reason(datetime(2024, 1, 1, tzinfo=zone))


def zone_file(key: str) -> io.BytesIO:
    for root in map(Path, zoneinfo.TZPATH):
        if (root / key).is_file():
            return io.BytesIO((root / key).read_bytes())
    return io.BytesIO((importlib.resources.files("tzdata.zoneinfo") / key).read_bytes())


def test_subclasses_of_value_types_are_not_sliced():
    class Moment(datetime):
        pass

    class Money(Decimal):
        pass

    for value in (Moment(2024, 1, 1), Money(1), type("Id", (UUID,), {})(int=1)):
        assert type(value).__name__ in reason([value])


def test_the_limit_is_exact():
    for value, annotation in (({"a": "é" * 9}, ABSENT), ((1, "é"), ABSENT), (Cat(name="é"), Cat)):
        codec = Codec(annotation)
        size = len(codec.dump(value, limit=LIMIT).data)
        assert codec.dump(value, limit=size).codec != "unstorable"
        text = reason(value, annotation, limit=size - 1)
        assert "max_result_bytes" in text
        assert str(size - 1) in text


@pytest.mark.parametrize("annotation", [ABSENT, Cat])
@pytest.mark.parametrize("tag", [list, tuple, lambda pair: dict(enumerate(pair))])
def test_a_value_that_is_endless_as_text_is_too_large_at_once(annotation, tag):
    value: Any = "x"
    for _ in range(60):
        value = tag([value, value])
    assert "max_result_bytes" in reason(value, annotation, limit=10_000)


def test_large_texts_are_measured_before_they_are_written():
    text = "x" * 1000
    assert "max_result_bytes" in reason([text] * 100_000, limit=10_000)
    assert "max_result_bytes" in reason([(), [text] * 100_000], limit=10_000)
    assert "max_result_bytes" in reason({b"": [b"x" * 1000] * 100_000}, limit=10_000)


def wrapped(value: object, layers: int, layer: Any) -> Any:
    for _ in range(layers):
        value = layer(value)
    return value


LAYERS = {
    "list": lambda value: [value],
    "dict": lambda value: {"a": value},
    "tuple": lambda value: (value,),
    "frozenset": lambda value: frozenset({value}),
    "pairs": lambda value: {1: value},
    "dataclass": Chain,
}


@pytest.mark.parametrize("layer", LAYERS)
def test_nesting_is_kept_to_a_depth_and_told_beyond_it(layer):
    annotation = Chain if layer == "dataclass" else ABSENT
    last = None if layer == "dataclass" else 1
    roundtrip(wrapped(last, DEPTH, LAYERS[layer]), annotation)
    for layers in (DEPTH + 2, 2_000):
        deep = wrapped(last, layers, LAYERS[layer])
        assert "nested" in reason(deep, annotation)


def test_a_value_that_holds_itself_is_told():
    endless: list[Any] = []
    endless.append(endless)
    mutual: dict[str, Any] = {"a": (endless, Plain)}
    mutual["a"] = {1: mutual}
    model = Home(anything=[])
    model.anything.append(model)
    for value, annotation in ((endless, ABSENT), (mutual, ABSENT), (model, Home)):
        text = reason(value, annotation)
        assert "holds itself" in text
        assert len(text) < 1_000


class Rude(BaseModel):
    number: int

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def refuse(cls, data: Any, handler: Any) -> Any:
        if isinstance(data, dict) and "quiet" not in data:
            raise UnspeakableError
        return handler({"number": 1})


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nor this")


class Restless(dict):  # type: ignore[type-arg]
    pass


def test_dump_never_raises():
    rude = Rude(number=1, quiet=True)
    assert "UnspeakableError" in reason(rude, Rude)

    class Lying:
        @property
        def __class__(self):
            raise RuntimeError("no class")

        def __getattribute__(self, name):
            raise RuntimeError(name)

    assert "Lying" in reason({"a": Lying()})
    assert "Lying" in reason(Lying(), Lying)
    surrogate = Value("unstorable", Codec(where="\ud800").dump(Plain(), limit=LIMIT).data)
    with pytest.raises(ResultUnavailableError, match=r"\\ud800: result"):
        Codec().load(surrogate)


# ---- annotations -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "annotation", [ABSENT, None, int, Any, inspect.Signature.empty, list[int] | None, Options]
)
def test_an_annotation_without_classes_leaves_plain_json_plain(annotation):
    assert Codec(annotation).dump({"a": 1}, limit=LIMIT) == Value("json", b'{"a":1}\n')


def test_a_lazy_annotation_is_asked_for_at_the_first_use():
    asked = []

    def hints() -> object:
        asked.append(1)
        return Cat

    codec = Codec.lazy(hints)
    assert not asked
    stored = codec.dump(Cat(name="a"), limit=LIMIT)
    assert parts(codec.load(stored)) == parts(Cat(name="a"))
    assert asked == [1]


def test_an_annotation_that_is_not_there_means_none():
    codec = Codec.lazy(lambda: typing.get_type_hints(lambda: 1)["return"])
    assert codec.load(codec.dump((1,), limit=LIMIT)) == (1,)
    assert "named by the return annotation" in codec.dump(Cat(name="a"), limit=LIMIT).data.decode()


def test_an_annotation_that_resolves_later_is_asked_again():
    names: dict[str, object] = {}
    codec = Codec.lazy(lambda: names.get("Cat") or eval("Cat_of_later"))
    assert codec.load(codec.dump({"a": 1}, limit=LIMIT)) == {"a": 1}
    assert "Cat_of_later" in codec.dump(Cat(name="a"), limit=LIMIT).data.decode()
    early = Codec.lazy(lambda: names.get("Cat") or eval("Cat_of_later"))
    early.dump(1, limit=LIMIT)
    names["Cat"] = Cat
    stored = codec.dump(Cat(name="a"), limit=LIMIT)
    assert parts(early.load(stored)) == parts(Cat(name="a"))


def test_a_plain_result_where_the_annotation_was_unclear_stays_plain():
    names: dict[str, object] = {}
    codec = Codec.lazy(lambda: names["later"] if names else eval("Cat_of_later"))
    stored = codec.dump({"name": "a"}, limit=LIMIT)
    names["later"] = Cat
    assert Codec(Cat).load(stored) == {"name": "a"}


def module(name: str, source: str) -> ModuleType:
    made = ModuleType(name)
    sys.modules[name] = made
    exec(textwrap.dedent(source), made.__dict__)
    return made


SOURCE = """
    from __future__ import annotations
    import dataclasses
    from pydantic import BaseModel
    @dataclasses.dataclass
    class Item:
        number: int
        other: Other | None = None
    @dataclasses.dataclass
    class Other:
        number: int
    class Model(BaseModel):
        item: Item
"""


def test_namesakes_of_two_modules_are_told_apart():
    one, two = module("codec_one", SOURCE), module("codec_two", SOURCE)
    roundtrip([one.Item(1), two.Item(1)], list[one.Item | two.Item])
    roundtrip([two.Model(item=two.Item(1))], one.Model | two.Model)


def test_namesakes_that_cannot_be_told_apart_are_told():
    def make() -> type:
        class Twin(BaseModel):
            number: int

        return Twin

    one, two = make(), make()
    assert "Twin" in reason(one(number=1), one | two)
    roundtrip(one(number=1), one)


def test_postponed_annotations_of_fields_are_resolved():
    made = module("codec_three", SOURCE)
    roundtrip(made.Item(1, made.Other(2)), made.Item)


def test_where_stands_in_the_messages():
    codec = Codec(where="pkg.summarise")
    assert codec.dump(Plain(), limit=LIMIT).data.startswith(b"pkg.summarise: result: ")
    with pytest.raises(StoreError, match=r"^pkg\.summarise: "):
        codec.load(Value("json", b"{"))


# ---- bytes that are not ours, or no longer ---------------------------------------------------

STORED = [
    (annotation, stored)
    for annotation, value in [
        (ABSENT, 12345),
        (ABSENT, -1.5e10),
        (ABSENT, {"a": [1, None, "é"]}),
        (ABSENT, (1, {2}, b"abc", Decimal("1.5"), datetime(2024, 1, 1, tzinfo=UTC))),
        (ABSENT, [timedelta(1), UUID(int=7), 10**900, "\ud800", {1: 2}, 1j, math.inf]),
        (Home | Color, full_home),
        (Attr | Pair | Path, [Attr(1, Cat(name="a")), Pair(1), Path("a"), Right.READ][:3]),
    ]
    for stored in [Codec(annotation).dump(value, limit=LIMIT)]
]


@pytest.mark.parametrize(("annotation", "stored"), STORED, ids=count)
def test_cut_bytes_are_refused(annotation, stored):
    codec = Codec(annotation)
    codec.load(stored)
    for end in range(len(stored.data)):
        with pytest.raises(StoreError, match=r"version=.*forget"):
            codec.load(Value(stored.codec, stored.data[:end]))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(STORED), st.data())
def test_damaged_bytes_are_refused_or_harmless(pair, data):
    annotation, stored = pair
    damaged = bytearray(stored.data)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 2))] = data.draw(st.integers(0, 255))
    try:
        Codec(annotation).load(Value(stored.codec, bytes(damaged)))
    except StoreError:
        return


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(["json", "tagged"]), st.sampled_from([ABSENT, Home]))
def test_random_bytes_are_refused(data, codec, annotation):
    with pytest.raises(StoreError):
        Codec(annotation).load(Value(codec, b"\x00" + data + b"\n"))


@settings(max_examples=200, deadline=None)
@given(plain_values)
@example([["a"]])
@example({"idemguard": 1})
@example({"idemguard": 1, "value": 1, "more": 1})
@example({"idemguard": 2, "value": 1})
def test_foreign_json_is_refused_as_tagged(value):
    with pytest.raises(StoreError):
        Codec(Home).load(Value("tagged", json.dumps(value).encode() + b"\n"))


TAGS = ["tuple", "set", "frozenset", "dict", "of", "bytes", "bytearray", "str", "int", "float"]
TAGS += ["complex", "datetime", "date", "time", "timedelta", "decimal", "uuid"]
bodies = st.recursive(
    atoms | st.sampled_from(["Home", "Color", "RED", "Path", "Pair", "UTC", "0x1", "2024-01-01"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$private", "$set", "pets", "left", "x"]), inner)
        | st.sampled_from(TAGS).flatmap(lambda tag: st.fixed_dictionaries({f"${tag}": inner}))
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(TAGS), bodies)
@example("of", ["Home", {"$private": 1}])
@example("of", ["Home", {"$set": 1}])
@example("of", ["Home", {"$extra": 1}])
@example("of", ["Home", {"__class__": 1}])
@example("of", [["Home"], {}])
@example("dict", [[[1], 2]])
@example("dict", [[1, 2], [{"$tuple": []}, 2], [True, 3]])
@example("datetime", ["2024-01-01T00:00:00", 0, ["../../etc/passwd"]])
@example("datetime", ["2024-01-01T00:00:00", 0, ["No/Where"]])
@example("datetime", ["2024-01-01T00:00:00", 7, None])
@example("timedelta", 10**30)
def test_crafted_tags_are_refused_or_harmless(tag, body):
    document = json.dumps({"idemguard": 1, "value": {f"${tag}": body}}).encode() + b"\n"
    try:
        Codec(Home | Color | Path | Pair).load(Value("tagged", document))
    except StoreError:
        return


@pytest.mark.parametrize(
    "body",
    [
        {"$of": ["os.system", "touch {file}"]},
        {"$of": ["test_codec.Plain", {}]},
        {"$of": ["Point", {"x": 1.0}]},
        {"$of": ["Home", {"nope": 1}]},
        {"$of": ["Home", {"$private": {"_nope": 1}}]},
        {"$of": ["Home", {"pets": [{"name": "a", "lives": "many"}]}]},
        {"$of": ["Color", "__class__"]},
        {"$of": ["Color", 1]},
        {"$of": ["Right", "READ"]},
        {"$of": ["Pair", {"left": 1}]},
        {"$of": ["Pair", {"left": 1, "right": None, "__doc__": 1}]},
        {"$of": ["Pair", {"left": "x", "right": None}]},
        {"$of": ["Pair", {"left": 1, "right": [1]}]},
        {"$of": ["Attr", {"_hidden": {"a": 1}, "pet": None, "made": []}]},
        {"$of": ["Path", "1"]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[[], 2]]},
        {"$set": [[1]]},
        {"$tuple": "abc"},
        {"$pickle": "gASV"},
        {"$": 1},
        {"$datetime": ["2024-01-01T00:00:00", 0, ["../../../etc/passwd"]]},
    ],
    ids=repr,
)
def test_crafted_documents_are_refused(body):
    codec = Codec(Home | Color | Right | Pair | Path | Attr)
    with pytest.raises(StoreError, match=r"version=.*forget"):
        codec.load(tagged(body))


@pytest.mark.parametrize("key", ["../escape", "a.b", "", "/etc/passwd", "Europe/../Asia/Tokyo"])
def test_a_time_zone_is_looked_up_by_a_clean_name_only(key, monkeypatch):
    monkeypatch.setattr("idemguard.tagged.ZoneInfo", pytest.fail)
    with pytest.raises(StoreError, match="no valid name"):
        Codec().load(tagged({"$datetime": ["2024-01-01T00:00:00", 0, [key]]}))


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.place,)

    def __init__(self, place: str) -> None:
        self.place = place


@pytest.mark.parametrize("codec", ["json", "tagged", "pickle", "", "JSON", "unknown"])
def test_a_pickle_is_refused_and_not_run(codec, tmp_path):
    place = tmp_path / "executed"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        bomb = pickle.dumps(Bomb(str(place)), protocol)
        for data in (bomb, bomb + b"\n"):
            with pytest.raises(StoreError):
                Codec(Home).load(Value(codec, data))
    assert not place.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"NaN\n",
        b"[Infinity]\n",
        b'"\xff"\n',
        b"\xef\xbb\xbf1\n",
        b"1 2\n",
        b"9" * 5_000 + b"\n",
        b"[" * 100_000 + b"]" * 100_000 + b"\n",
        b'{"a":' * 100_000 + b"\n",
    ],
    ids=count,
)
def test_json_that_we_do_not_write_is_refused(data):
    for codec in ("json", "tagged"):
        with pytest.raises(StoreError):
            Codec().load(Value(codec, data))


def test_a_reason_in_damaged_bytes_is_still_told():
    with pytest.raises(ResultUnavailableError, match=r"no.*thing"):
        Codec().load(Value("unstorable", b"no\xffthing"))


# ---- code that has changed -------------------------------------------------------------------


def evolved(**fields: Any) -> Any:
    return pydantic.create_model("Thing", **fields)


def test_results_of_other_code_are_refused_with_what_to_do():
    thing = evolved(a=(int, ...), b=(int, 1))
    stored = Codec(thing).dump(thing(a=1, b=2), limit=LIMIT)
    for other in (
        evolved(a=(int, ...)),  # a field less
        evolved(a=(int, ...), b=(int, 1), c=(int, ...)),  # a field more
        evolved(a=(list[int], ...), b=(int, 1)),  # another type
        evolved(a=(Annotated[int, Field(gt=5)], ...), b=(int, 1)),  # another rule
        Cat,
        int,
        ABSENT,
    ):
        with pytest.raises(StoreError, match=r"version=.*forget") as caught:
            Codec(other).load(stored)
        assert not isinstance(caught.value, ResultUnavailableError)
    assert Codec(evolved(a=(int, ...), b=(int, 1), c=(int, 7))).load(stored).c == 7


def test_a_dataclass_of_other_code_is_refused():
    def make(**fields: Any) -> Any:
        return dataclasses.make_dataclass("Thing", list(fields.items()))

    thing = make(a=int)
    stored = Codec(thing).dump(thing(1), limit=LIMIT)
    for other in (make(b=int), make(a=list[int]), make(a=Cat), make(a=int, b=int)):
        with pytest.raises(StoreError, match="version="):
            Codec(other).load(stored)
    assert Codec(make(a=float)).load(stored).a == 1


def test_an_error_does_not_repeat_the_payload():
    with pytest.raises(StoreError) as caught:
        Codec(Cat).load(tagged({"$of": ["Cat", {"name": "a", "lives": "a payload"}]}))
    assert "lives" in str(caught.value)
    assert "a payload" not in str(caught.value)


def test_plain_json_from_before_the_annotation_is_fitted_to_it():
    old = Codec(dict[str, Any]).dump({"name": "a", "lives": 3}, limit=LIMIT)
    assert parts(Codec(Cat).load(old)) == parts(Cat(name="a", lives=3))
    assert Codec(Cat | None).load(Codec().dump(None, limit=LIMIT)) is None
    with pytest.raises(StoreError, match="version="):
        Codec(Cat).load(Codec().dump({"nope": 1}, limit=LIMIT))


# ---- what is loaded --------------------------------------------------------------------------


def run(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_results_without_classes_load_no_pydantic():
    out = run(
        """
        import datetime, decimal, enum, sys, uuid
        from idemguard.codec import Codec, Value
        value = {"a": [1, 1.5, True, None, "x"], "b": (1, {2}, b"x", frozenset({3}))}
        value["c"] = [datetime.datetime.now(datetime.UTC), decimal.Decimal(1), uuid.uuid4()]
        class Color(enum.Enum):
            RED = 1
        for annotation, result in [
            (None, value["a"]), (None, value), (dict, value), (dict[str, list[int]], value),
            (Color, Color.RED), (Color | None, None),
        ]:
            codec = Codec(annotation)
            assert codec.load(codec.dump(result, limit=10_000)) == result
        assert Codec().dump(object(), limit=1_000).codec == "unstorable"
        print(sorted(name for name in sys.modules if "pydantic" in name or "attr" in name))
        """
    )
    assert out == "[]"


def test_another_process_restores_what_this_one_stored():
    stored = Codec(list[Cat | Dog]).dump([Dog(name="a"), Cat(name="b")], limit=LIMIT)
    out = run(
        f"""
        from pydantic import BaseModel
        from idemguard.codec import Codec, Value
        class Cat(BaseModel):
            name: str
            lives: int = 9
        class Dog(BaseModel):
            name: str
            lives: int = 9
        print(Codec(list[Dog | Cat]).load(Value({stored.codec!r}, {stored.data!r})))
        """
    )
    assert out == "[Dog(name='a', lives=9), Cat(name='b', lives=9)]"

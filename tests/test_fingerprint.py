"""A task's identity: the same for every spelling of one call, never the same for two."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import hashlib
import inspect
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading
import types
import unicodedata
import uuid
from pathlib import Path
from typing import NamedTuple

import attrs
import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemguard import forms
from idemguard.errors import ConfigurationError, FingerprintError
from idemguard.fingerprint import (
    DEFAULT_VOLATILE,
    Identity,
    identify_payload,
    task_fingerprint,
    task_type_of,
)

DATA = Path(__file__).parent / "data"
VECTORS = json.loads((DATA / "fingerprints.json").read_text("utf-8"))
FORMS = json.loads((DATA / "json_forms.json").read_text("utf-8"))
MODULES = {m.__name__: m for m in (collections, dataclasses, dt, decimal, enum, pathlib)}


def reference(task_type, stable):
    """The definition, word for word, of a value that is JSON already."""
    text = f"{task_type}:{json.dumps(stable, sort_keys=True, ensure_ascii=False)}"
    return hashlib.sha256(text.encode()).hexdigest()


def form(value):
    return json.loads(forms.canonical(value)[0])


def identity(fn, **options):
    return Identity(inspect.signature(fn), task_type="task", **options)


def of(fn, *args, options=types.MappingProxyType({}), **kwargs):
    return identity(fn, **options).identify(args, kwargs).fingerprint


# --- the text that is hashed ---------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_the_pinned_fingerprints(vector):
    found = task_fingerprint(vector["task_type"], vector["payload"])
    assert found == vector["fingerprint"]
    assert found[:16] == vector["fingerprint16"]


@pytest.mark.parametrize("vector", FORMS, ids=range(len(FORMS)))
def test_the_pinned_forms(vector):
    value = eval(vector["python"], {**MODULES, "uuid": uuid})
    assert task_fingerprint("t", value) == task_fingerprint("t", vector["same_as"])
    assert task_fingerprint("t", value) == reference("t", vector["same_as"])


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
atoms = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def normalised(value):
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, list):
        return [normalised(item) for item in value]
    if isinstance(value, dict):
        return {normalised(key): normalised(item) for key, item in value.items()}
    return value


def unambiguous(value):
    """Whether no mapping has two keys of one normal form."""
    if isinstance(value, list):
        return all(map(unambiguous, value))
    if isinstance(value, dict):
        keys = {unicodedata.normalize("NFC", key) for key in value}
        return len(keys) == len(value) and all(map(unambiguous, value.values()))
    return True


@given(texts, values.filter(unambiguous))
def test_it_is_the_reference_definition(task_type, value):
    expected = reference(unicodedata.normalize("NFC", task_type), normalised([value]))
    assert task_fingerprint(task_type, [value]) == expected


@given(values.filter(unambiguous))
def test_the_quick_way_and_the_walk_agree(value):
    """A frozen mapping around it forces the walk, and has the same form."""
    quick = task_fingerprint("t", {"v": value})
    assert quick == task_fingerprint("t", types.MappingProxyType({"v": value}))


@given(values.filter(unambiguous), values.filter(unambiguous))
def test_different_values_never_share_one(one, two):
    same = json.dumps(normalised(one), sort_keys=True) == json.dumps(
        normalised(two), sort_keys=True
    )
    assert (task_fingerprint("t", one) == task_fingerprint("t", two)) is same


@given(st.lists(st.tuples(texts, atoms), max_size=6, unique_by=lambda pair: normalised(pair[0])))
def test_the_order_of_keys_does_not_count(pairs):
    assert task_fingerprint("t", {"p": dict(pairs)}) == task_fingerprint(
        "t", {"p": dict(reversed(pairs))}
    )


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (["a:b", "c"], ["a", "b:c"]),
        ([1, [2]], [1, 2]),
        ("1", 1),
        (None, "None"),
        (None, "null"),
        ({"a": None}, {}),
        (True, 1),
        (False, 0),
        (1, 1.0),
        (0.0, -0.0),
        (float("nan"), "NaN"),
        ([], {}),
        ("", None),
        ([[]], []),
        (b"a", "a"),
        (np.array([0.0]), np.array([-0.0])),
        (np.array([1, 2]), np.array([[1, 2]])),
        (np.array([1], "i4"), np.array([1], "i8")),
        (np.array([1]), [1]),
    ],
    ids=repr,
)
def test_look_alikes_are_told_apart(one, two):
    assert task_fingerprint("t", one) != task_fingerprint("t", two)
    assert task_fingerprint("t", {"v": one}) != task_fingerprint("t", {"v": two})


def test_nan_is_itself():
    assert task_fingerprint("t", float("nan")) == task_fingerprint("t", -float("nan"))
    assert len({task_fingerprint("t", float(x)) for x in ("nan", "inf", "-inf")}) == 3


def test_task_types_count():
    assert task_fingerprint("a", {}) != task_fingerprint("b", {})
    assert task_fingerprint("e\u0301", {}) == task_fingerprint("é", {})
    for odd in ("{}", "a\nb", "a\0b", "", "a:{}"):
        assert task_fingerprint(odd, {"x": 1}) == reference(odd, {"x": 1})


# --- the forms of values -------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Code(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    HI = "hi"


class Odd(str, enum.Enum):  # noqa: UP042 # the text of it is not its value
    A = "text"

    def __new__(cls, text):
        member = str.__new__(cls, text)
        member._value_ = 7
        return member


class Bits(enum.Flag):
    A = 1
    B = 2


class Text(str):
    __slots__ = ()

    def __str__(self):
        return "another"

    def __repr__(self):
        return "another"


class Whole(int):
    def __repr__(self):
        return "another"

    def __int__(self):
        return 99

    def __index__(self):
        return 99


class Real(float):
    def __repr__(self):
        return "another"

    def __float__(self):
        return 99.0


class Point(NamedTuple):
    x: object
    y: object


@dataclasses.dataclass
class Plain:
    b: int
    a: object = None


@attrs.define
class Defined:
    b: int
    a: object = None


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", arbitrary_types_allowed=True)
    b: int
    a: object = None


class Keyed:
    def __init__(self, key):
        self.key = key
        self.lock = threading.Lock()

    def __idempotency_key__(self):
        return self.key


class KeyedText(str):
    __slots__ = ()

    def __idempotency_key__(self):
        return ["keyed", self.upper()]


CASES = [
    (Colour.RED, "red"),
    (Code.ONE, 1),
    (Word.HI, "hi"),
    (Odd.A, 7),
    (Bits.A | Bits.B, 3),
    (Text("x"), "x"),
    (Whole(5), 5),
    (Real(0.5), 0.5),
    (Point(1, 2), {"x": 1, "y": 2}),
    (Plain(1, [Plain(2)]), {"a": [{"a": None, "b": 2}], "b": 1}),
    (Defined(1, {2}), {"a": [2], "b": 1}),
    (Model(b=1, a=(1,), more=b"\xff"), {"a": [1], "b": 1, "more": "/w=="}),
    (Keyed(("t", 1)), ["t", 1]),
    (KeyedText("a"), ["keyed", "A"]),
    (collections.OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
    (type("Row", (list,), {})([1, (2,)]), [1, [2]]),
    (collections.defaultdict(list, a=[1]), {"a": [1]}),
    (collections.ChainMap({"a": 1}, {"b": 2}), {"a": 1, "b": 2}),
    (types.MappingProxyType({"a": 1}), {"a": 1}),
    ({1: "x"}, {"1": "x"}),
    ({10: "x", 9: "y"}, {"10": "x", "9": "y"}),
    ({True: 1, None: 2, 0.5: 3}, {"true": 1, "null": 2, "0.5": 3}),
    ({float("nan"): 1}, {"NaN": 1}),
    ({Colour.RED: 1, Code.ONE: 2}, {"red": 1, "1": 2}),
    ({dt.date(2026, 1, 2): 1}, {"2026-01-02": 1}),
    ({uuid.UUID(int=1): 1}, {"00000000-0000-0000-0000-000000000001": 1}),
    ({"a": {3: {4: 5}}}, {"a": {"3": {"4": 5}}}),
    ([{1, "x", None, 2.5, (1,)}], [["x", 1, 2.5, [1], None]]),
    (frozenset({frozenset({2, 1}), frozenset()}), [[1, 2], []]),
    ({Point(2, 1), Point(1, 2)}, [{"x": 1, "y": 2}, {"x": 2, "y": 1}]),
    (bytearray(b"\xfb\xff"), "+/8="),
    (memoryview(b"\xfb\xff"), "+/8="),
    (pathlib.PurePosixPath("e\u0301"), "é"),
    (dt.timedelta(hours=-1), -3600.0),
    (decimal.Decimal("1E+5"), "1E+5"),
    (decimal.Decimal("sNaN"), "sNaN"),
    (dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC), "2026-01-02T03:04:05.000006+00:00"),
    ("\n\u0303", "\n\u0303"),
    ("\u0338=", "\u0338="),
    (np.float64(0.5), 0.5),
    (np.int8(5), 5),
    (np.bool_(True), True),
    (np.str_("x"), "x"),
    (np.bytes_(b"\xff"), "/w=="),
]


@pytest.mark.parametrize(("value", "expected"), CASES, ids=range(len(CASES)))
def test_a_value_has_the_form(value, expected):
    def exact(found, wanted):
        assert type(found) is type(wanted)
        assert json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)

    exact(form(value), expected)
    exact(form({"v": [value]}), {"v": [expected]})
    assert task_fingerprint("t", [value]) == reference("t", normalised([expected]))


def test_the_decimal_context_does_not_count():
    with decimal.localcontext() as context:
        context.capitals = 0
        assert form(decimal.Decimal("1E+5")) == "1E+5"


def test_text_and_its_decomposed_spelling_are_one():
    assert task_fingerprint("t", {"k": "cafe\u0301"}) == task_fingerprint("t", {"k": "café"})
    assert task_fingerprint("t", {"e\u0301": 1}) == task_fingerprint("t", {"é": 1})


# --- numpy ---------------------------------------------------------------------------------


def test_large_arrays_that_differ_in_the_middle():
    one = np.zeros(1_000_000)
    two = one.copy()
    two[500_000] = 1e-300
    assert task_fingerprint("t", one) != task_fingerprint("t", two)
    assert task_fingerprint("t", one) == task_fingerprint("t", one.copy())


def test_the_layout_in_memory_does_not_count():
    array = np.arange(12).reshape(3, 4)
    assert form(array) == form(np.asfortranarray(array))
    assert form(array[:, ::2]) == form(array[:, ::2].copy())
    assert form(array) != form(array.T.copy())


def test_arrays_of_objects_and_texts_go_by_their_elements():
    assert form(np.array([{"a": 1}, None], dtype=object))["content"] == [{"a": 1}, None]
    assert form(np.array(["e\u0301"]))["content"] == ["é"]
    row = np.array([(1, 2.5)], dtype=[("a", "i8"), ("b", "f8")])
    renamed = np.array([(1, 2.5)], dtype=[("a", "i8"), ("c", "f8")])
    assert form(row)["content"] == [[1, 2.5]]
    assert form(row) != form(renamed)
    with pytest.raises(FingerprintError, match=r"v\[1\]"):
        task_fingerprint("t", {"v": np.array([1, object()], dtype=object)})


def test_padding_between_fields_does_not_count():
    aligned = np.dtype([("a", "i1"), ("b", "i8")], align=True)
    one, two = np.zeros(1, aligned), np.zeros(1, aligned)
    two.view("u1")[1:8] = 255
    assert one.tobytes() != two.tobytes()
    assert form(one) == form(two)


def test_numpy_times_keep_their_unit():
    assert form(np.timedelta64(1, "s")) != form(np.timedelta64(1, "ms"))
    assert form(np.datetime64("2026-01-02")) != form(np.datetime64("2026-01-02", "ns"))
    assert form(np.complex128(1j)) != form(np.complex128(2j))


@pytest.mark.parametrize(
    "value",
    [np.ma.masked_array([1, 2], mask=[0, 1]), np.longdouble(1), np.array([1], "g")],
    ids=["masked", "longdouble", "array of longdouble"],
)
def test_numpy_that_holds_more_than_its_content_is_refused(value):
    if isinstance(value, np.ndarray) and type(value) is np.ndarray:
        value = [value]
    with pytest.raises(FingerprintError, match=r"at_|v"):
        task_fingerprint("t", {"v": value})


# --- what has no form ----------------------------------------------------------------------


class Instance:
    def __repr__(self):
        raise AssertionError("never repr")

    def __hash__(self):
        raise AssertionError("never hash")


def numbers():
    yield 1


UNSET = Model.model_construct()
NO_FORM = {
    "object": object(),
    "instance": Instance(),
    "lock": threading.Lock(),
    "function": numbers,
    "lambda": lambda: 1,
    "generator": numbers(),
    "class": Plain,
    "range": range(3),
    "complex": 1j,
    "file": sys.stdout,
    "deque": collections.deque([1]),
    "module": json,
    "exception": ValueError("x"),
    "ellipsis": ...,
    "tuple key": {(1, 2): 3},
    "object key": {Instance.__new__(type("K", (), {})): 3},
    "frozenset key": {frozenset({1}): 3},
    "two keys of one text": {1: 1, "1": 2},
    "two keys of one normal form": {"e\u0301": 1, "é": 2},
    "true twice": {True: 1, "true": 2},
    "surrogate": "\ud800",
    "surrogate key": {"\udfff": 1},
    "undecodable path": pathlib.PurePosixPath(os.fsdecode(b"\xff")),
    "unset field": UNSET,
    "keyed by an object": Keyed(object()),
}


@pytest.mark.parametrize("value", NO_FORM.values(), ids=NO_FORM.keys())
@pytest.mark.parametrize("wrapper", [dict, types.MappingProxyType], ids=["dict", "mapping"])
def test_it_is_refused_with_its_path(value, wrapper):
    payload = wrapper({"doc": {"meta": [0, {"the client": value}]}})
    with pytest.raises(FingerprintError) as caught:
        task_fingerprint("summarise", payload)
    assert caught.value.path.startswith('doc.meta[1]["the client"]')
    assert caught.value.parameter is None
    assert caught.value.task_type == "summarise"
    message = str(caught.value)
    assert message.startswith('summarise: doc.meta[1]["the client"]')
    assert "volatile=" in message
    assert "__idempotency_key__" in message
    assert "0x" not in message


def test_the_path_of_a_bad_key_is_that_of_its_mapping():
    with pytest.raises(FingerprintError, match="has a key that is a frozenset") as caught:
        task_fingerprint("t", {"v": [{frozenset({Keyed([LOCK])}): 1}]})
    assert caught.value.path == "v[0]"


def test_a_call_names_the_argument_and_the_three_ways_out():
    def summarise(doc, client): ...

    with pytest.raises(FingerprintError) as caught:
        identity(summarise).identify(({"id": 1},), {"client": threading.Lock()})
    assert (caught.value.parameter, caught.value.path) == ("client", "client")
    for way in ('volatile=("client",)', "key=", "__idempotency_key__()"):
        assert way in str(caught.value)
    with pytest.raises(FingerprintError) as caught:
        identity(summarise).identify(({"a": [{"b": object()}]}, 1), {})
    assert (caught.value.parameter, caught.value.path) == ("doc", "doc.a[0].b")
    assert 'volatile=("doc.a.b",)' in str(caught.value)


def test_following_the_advice_helps():
    payload = {"doc": {"a": [{"b": object(), "c": 1}]}}
    assert task_fingerprint("t", payload, volatile=("doc.a.b",)) == task_fingerprint(
        "t", {"doc": {"a": [{"c": 1}]}}
    )


def test_a_stand_in_does_not_pass_for_what_it_claims_to_be():
    class Liar:
        __class__ = dict

    with pytest.raises(FingerprintError, match="Liar"):
        task_fingerprint("t", {"v": Liar()})


def test_a_task_type_that_is_no_text():
    for bad in ("\ud800", 3, None, b"x"):
        with pytest.raises(FingerprintError) as caught:
            task_fingerprint(bad, {})
        assert caught.value.path == "task_type"
    assert task_fingerprint(Word.HI, {}) == task_fingerprint("hi", {})


# --- hostile payloads ----------------------------------------------------------------------


def nested(depth, wrap, core=1):
    for _ in range(depth):
        core = wrap(core)
    return core


@pytest.mark.parametrize(
    "wrap",
    [lambda v: [v], lambda v: {"k": v}, lambda v: (v,), lambda v: frozenset({v}), Keyed, Plain],
    ids=["list", "dict", "tuple", "set", "keyed", "dataclass"],
)
@pytest.mark.parametrize("depth", [1_000, 5_000])
def test_a_thousand_levels_are_refused_with_their_path(wrap, depth):
    try:
        value = nested(depth, wrap)
    except RecursionError:  # the hash of so deep a frozenset: no such value can be made
        value = nested(300, wrap)
    with pytest.raises(FingerprintError, match="nested") as caught:
        task_fingerprint("t", {"v": value})
    assert caught.value.path.startswith("v")
    assert len(str(caught.value)) < 1_000


def test_the_same_depth_is_refused_on_both_ways():
    deepest = forms.MAX_DEPTH - 1
    assert task_fingerprint("t", nested(deepest, lambda v: [v], {"k": 1}))
    assert task_fingerprint("t", nested(deepest, lambda v: [v], types.MappingProxyType({"k": 1})))
    for core in ({"k": 1}, types.MappingProxyType({"k": 1})):
        with pytest.raises(FingerprintError, match="200 levels"):
            task_fingerprint("t", nested(deepest + 1, lambda v: [v], core))


def test_a_cycle_is_refused_with_its_path():
    wide = [0] * 1_000
    wide += [wide, wide]
    ring = {"a": 1}
    ring["self"] = {"b": [ring]}
    model = Plain(1)
    model.a = model
    keyed = Keyed(None)
    keyed.key = keyed
    for value, path in (
        (wide, "v[1000]"),
        (ring, "v.self.b[0]"),
        (model, "v.a"),
        (keyed, "v"),
    ):
        with pytest.raises(FingerprintError, match="contains itself") as caught:
            task_fingerprint("t", {"v": value})
        assert caught.value.path == path


def test_what_is_shared_is_no_cycle():
    shared = {"x": [1]}
    assert form([shared, shared, {"y": shared}]) == [{"x": [1]}, {"x": [1]}, {"y": {"x": [1]}}]
    assert form([{1}, (shared, shared)]) == [[1], [{"x": [1]}, {"x": [1]}]]


def test_a_chain_of_keys_without_end_is_refused():
    class Endless:
        def __idempotency_key__(self):
            return Endless()

    with pytest.raises(FingerprintError, match="nested"):
        task_fingerprint("t", {"v": Endless()})


def test_a_stack_that_is_nearly_used_up_ends_in_an_error_of_ours():
    def down(left):
        try:
            return down(left - 1) if left else task_fingerprint("t", nested(150, Plain))
        except RecursionError:
            return None

    outcomes = set()
    for depth in range(0, sys.getrecursionlimit(), 25):
        try:
            outcomes.add(down(depth))
        except FingerprintError as error:
            assert "nested" in str(error)  # noqa: PT017 # either is right, nothing else is
    assert len(outcomes - {None}) == 1


def test_fifty_megabytes():
    text = "x" * 50_000_000
    assert task_fingerprint("t", {"v": text}) == reference("t", {"v": text})


def test_more_values_than_the_quick_look_counts(monkeypatch):
    monkeypatch.setattr(forms, "WORTH_A_LOOK", 100)
    many = [[i % 7, "x"] for i in range(100)]
    assert task_fingerprint("t", many) == reference("t", many)


def test_integers_of_five_thousand_digits():
    for value in (10**5_000, {"deep": [-(10**5_000)]}, {10**5_000: 1}, Whole(10**5_000)):
        with pytest.raises(FingerprintError) as caught:
            task_fingerprint("t", {"v": value})
        assert caught.value.path.startswith("v")
    assert task_fingerprint("t", {"v": 10**4_000}) == reference("t", {"v": 10**4_000})


def test_nul_braces_and_newlines():
    payload = {"\0{}\n": "\0", "a\nb": "}{:"}
    assert task_fingerprint("{a}\n\0", payload) == reference("{a}\n\0", payload)


# --- what is left out of a payload ---------------------------------------------------------

LOCK = threading.Lock()


@pytest.mark.parametrize("name", sorted(DEFAULT_VOLATILE))
@pytest.mark.parametrize("make", [dict, lambda **v: types.MappingProxyType(v)])
def test_default_names_are_dropped_and_never_looked_at(name, make):
    found = identify_payload("t", make(a=1, **{name: LOCK}))
    assert found.fingerprint == reference("t", {"a": 1})
    assert found.matched == {name}
    with pytest.raises(FingerprintError):
        task_fingerprint("t", make(a=1, **{name: LOCK}), keep=(name,))


def test_a_models_own_fields_are_dropped():
    class Job(pydantic.BaseModel):
        id: int
        timestamp: float

    assert task_fingerprint("t", Job(id=1, timestamp=2.0)) == reference("t", {"id": 1})

    class Attempt(NamedTuple):
        id: int
        attempt: int

    assert task_fingerprint("t", Attempt(1, 2)) == reference("t", {"id": 1})
    assert task_fingerprint("t", [{"timestamp": 1}]) == reference("t", [{"timestamp": 1}])
    assert task_fingerprint("t", {"d": {"timestamp": 1}}) == reference("t", {"d": {"timestamp": 1}})


@pytest.mark.parametrize(
    ("volatile", "left"),
    [
        ("a", {"b": {"a": 2, "c": [{"a": 3, "d": {"a": 4}}]}}),
        ("b.a", {"a": 1, "b": {"c": [{"a": 3, "d": {"a": 4}}]}}),
        ("b.c.a", {"a": 1, "b": {"a": 2, "c": [{"d": {"a": 4}}]}}),
        ("b.c.d.a", {"a": 1, "b": {"a": 2, "c": [{"a": 3, "d": {}}]}}),
        ("**.a", {"b": {"c": [{"d": {}}]}}),
        ("**.d.a", {"a": 1, "b": {"a": 2, "c": [{"a": 3, "d": {}}]}}),
        ("b.**.a", {"a": 1, "b": {"c": [{"d": {}}]}}),
        ("b.c", {"a": 1, "b": {"a": 2}}),
        ("x.y", {"a": 1, "b": {"a": 2, "c": [{"a": 3, "d": {"a": 4}}]}}),
    ],
)
def test_a_path_drops_what_it_names(volatile, left):
    payload = {"a": 1, "b": {"a": 2, "c": [{"a": 3, "d": {"a": 4}}]}}
    found = identify_payload("t", payload, volatile=(volatile,))
    assert found.fingerprint == reference("t", left)
    assert found.matched == (set() if volatile == "x.y" else {volatile})
    assert found.payload == left


def test_paths_reach_into_models_and_sets():
    value = {"m": Model(b=1, a=[Defined(2, LOCK)]), "s": {Point(1, 2), Point(1, 3)}}
    found = identify_payload("t", value, volatile=("m.a.a", "**.y"))
    assert found.payload == {"m": {"a": [{"b": 2}], "b": 1}, "s": [{"x": 1}, {"x": 1}]}
    assert found.matched == {"m.a.a", "**.y"}


def test_names_are_compared_in_their_normal_form():
    for name in ("é", "e\u0301"):
        for key in ("é", "e\u0301"):
            assert task_fingerprint("t", {key: LOCK}, volatile=name) == reference("t", {})
    assert task_fingerprint("t", {1: LOCK, Colour.RED: 1}, volatile=("1",)) == reference(
        "t", {"red": 1}
    )


@pytest.mark.parametrize("argument", ["volatile", "keep"])
@pytest.mark.parametrize("bad", [3, None, {"a": 1}, b"a", ["a", 3], [""], ["\ud800"]], ids=repr)
def test_names_that_are_none_are_refused(argument, bad):
    if not bad:
        bad = [None]
    with pytest.raises(ConfigurationError, match=argument):
        task_fingerprint("t", {}, **{argument: bad})
    with pytest.raises(ConfigurationError, match=argument):
        identity(lambda a: a, **{argument: bad})


@pytest.mark.parametrize("bad", [".", "a.", ".a", "a..b", "**", "a.**", "a.*.b", "*"])
def test_paths_that_cannot_be_read_are_refused(bad):
    with pytest.raises(ConfigurationError, match="volatile"):
        task_fingerprint("t", {}, volatile=(bad,))
    with pytest.raises(ConfigurationError):
        identity(lambda a: a, volatile=(bad,))


def test_contradictions_are_refused():
    with pytest.raises(ConfigurationError, match="in volatile and in keep"):
        task_fingerprint("t", {}, volatile=("timestamp",), keep=("timestamp",))
    with pytest.raises(ConfigurationError, match="'timestmap'"):
        task_fingerprint("t", {}, keep=("timestmap",))
    with pytest.raises(ConfigurationError, match="in volatile and in keep"):
        identity(lambda a: a, volatile=("a",), keep=("a",))


def test_the_guards_names_are_volatile_by_default():
    found = identify_payload("t", {"ts": 1, "a": 2}, extra_volatile=("ts",))
    assert found.payload == {"a": 2}
    kept = identify_payload("t", {"ts": 1, "a": 2}, extra_volatile=("ts",), keep=("ts",))
    assert kept.payload == {"a": 2, "ts": 1}


def test_what_was_hashed_outlives_the_arguments():
    payload = {"a": [1]}
    found = identify_payload("t", payload)
    payload["a"].append(2)
    found.payload["a"].append(3)
    assert found.payload == {"a": [1]}


# --- binding -------------------------------------------------------------------------------


def every(a, /, b, c=3, *rest, d, e=5, **more):
    return {"a": a, "b": b, "c": c, "rest": list(rest), "d": d, "e": e, **more}


def simple(a, b=2, *, c=3):
    return {"a": a, "b": b, "c": c}


names = st.sampled_from(["x", "y", "é", "b2"])


@given(st.data())
def test_every_spelling_of_a_call_is_one_fingerprint(data):
    draw = data.draw
    a, b, c, d, e = (draw(st.integers(0, 9)) for _ in range(5))
    rest = draw(st.lists(st.integers(0, 9), max_size=2))
    more = draw(st.dictionaries(names, st.integers(0, 9), max_size=3))
    args, kwargs = [a], {"d": d, "e": e, **more}
    if rest or draw(st.booleans()):
        args += [b, c, *rest]
    elif draw(st.booleans()):
        args, kwargs = [a, b], {**kwargs, "c": c}
    else:
        kwargs = {**kwargs, "b": b, "c": c}
    if e == 5 and draw(st.booleans()):
        del kwargs["e"]
    shuffled = dict(draw(st.permutations(list(kwargs.items()))))
    found = identity(every).identify(tuple(args), shuffled)
    assert found.payload == normalised(every(*args, **kwargs))
    assert found.fingerprint == reference("task", found.payload)


@given(st.integers(2, 3), st.integers(3, 4))
def test_plain_spellings(b, c):
    expected = reference("task", {"a": 1, "b": b, "c": c})
    spellings = [((1, b), {"c": c}), ((1,), {"c": c, "b": b}), ((), {"c": c, "b": b, "a": 1})]
    if b == 2:
        spellings.append(((1,), {"c": c}))
    if b == 2 and c == 3:
        spellings += [((1,), {}), ((), {"a": 1})]
    compiled = identity(simple)
    for args, kwargs in spellings:
        assert compiled.identify(args, kwargs).fingerprint == expected


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1, 2, 3), {}),
        ((1,), {"a": 1}),
        ((1,), {"z": 1}),
        ((), {"b": 1}),
        ((1,), {"": 1}),
    ],
    ids=repr,
)
def test_a_call_that_does_not_fit_raises_pythons_own_error(args, kwargs):
    with pytest.raises(TypeError) as expected:
        inspect.signature(simple).bind(*args, **kwargs)
    with pytest.raises(TypeError) as caught:
        identity(simple).identify(args, kwargs)
    assert str(caught.value) == str(expected.value)
    with pytest.raises(TypeError):
        simple(*args, **kwargs)


def test_a_positional_only_argument_cannot_come_by_name():
    def only(a, /): ...

    with pytest.raises(TypeError):
        identity(only).identify((), {"a": 1})


def test_options_that_collide_stay_apart():
    def f(a, /, **kw): ...

    merged = identity(f).identify((1,), {"b": 2})
    assert merged.payload == {"a": 1, "b": 2}
    assert identity(f).identify((1,), {"a": 2}).payload == {"a": 1, "kw": {"a": 2}}
    assert identity(f).identify((1,), {"kw": {"a": 2}}).payload == {"a": 1, "kw": {"kw": {"a": 2}}}
    assert of(f, 1, a=2) != identity(f).identify((1,), {"kw": {"a": 2}}).fingerprint

    def g(*args, **kw): ...

    assert of(g, 1) != of(g, args=[1])
    assert of(g) == reference("task", {"args": []})


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("a:b", "c"), ("a", "b:c")),
        ((1, [2]), (1, 2)),
        (("1", 0), (1, 0)),
        ((None, 0), ("None", 0)),
        (({"a": None}, 0), ({}, 0)),
        ((True, 0), (1, 0)),
        ((0.0, 0), (-0.0, 0)),
        ((1, 2), (2, 1)),
    ],
    ids=repr,
)
def test_different_calls_never_share_one(one, two):
    def f(x, y): ...

    def g(*xs): ...

    assert of(f, *one) != of(f, *two)
    assert of(g, *one) != of(g, *two)


def test_two_functions_of_one_name_in_two_modules_differ():
    def made_in(module):
        names = {"__name__": module}
        exec(
            "def f(x): ...\nclass A:\n def f(self, x): ...\nclass B(A):\n def f(self, x): ...",
            names,
        )
        return names

    one, two = made_in("one"), made_in("two")
    types_ = [task_type_of(m[n]) for m in (one, two) for n in ("f",)]
    types_ += [task_type_of(one[n].f) for n in ("A", "B")]
    assert types_ == ["one.f", "two.f", "one.A.f", "one.B.f"]


def test_a_body_that_changes_its_arguments_changes_nothing():
    def f(doc): ...

    doc = {"a": [1]}
    compiled = identity(f)
    found = compiled.identify((doc,), {})
    doc["a"].clear()
    del doc["a"]
    assert found.payload == {"doc": {"a": [1]}}
    assert compiled.identify(({"a": [1]},), {}) == found


def test_a_mutable_default_is_never_touched():
    def f(a, options={"timestamp": 1, "x": 2}, **kw): ...  # noqa: B006 # that is the point

    assert identity(f).identify((1,), {}).payload == {"a": 1, "options": {"x": 2}}
    assert inspect.signature(f).parameters["options"].default == {"timestamp": 1, "x": 2}


# --- volatile arguments of a call ----------------------------------------------------------


def test_volatile_names_in_every_position():
    def f(doc, request_id=LOCK, *, trace_id=None, **more): ...

    expected = reference("task", {"doc": {"id": 1}})
    compiled = identity(f)
    for args, kwargs in (
        (({"id": 1},), {}),
        (({"id": 1}, "positional"), {}),
        (({"id": 1},), {"request_id": LOCK, "trace_id": object()}),
        (({"id": 1},), {"timestamp": LOCK, "attempt": 3}),
        (({"id": 1, "timestamp": LOCK, "trace_id": 3},), {}),
        ((types.MappingProxyType({"id": 1, "attempt": LOCK}),), {}),
    ):
        assert compiled.identify(args, kwargs).fingerprint == expected

    class Doc(pydantic.BaseModel):
        id: int
        timestamp: float = 0.0

    assert compiled.identify((Doc(id=1, timestamp=9.0),), {}).fingerprint == expected
    deeper = {"id": 1, "meta": {"timestamp": 1}, "rows": [{"timestamp": 2, "x": {"attempt": 1}}]}
    assert compiled.identify((deeper,), {}).payload == {"doc": deeper}
    assert compiled.identify((types.MappingProxyType(deeper),), {}).payload == {"doc": deeper}
    assert compiled.identify(([{"timestamp": 2}],), {}).payload == {"doc": [{"timestamp": 2}]}


def test_own_names_and_paths_of_a_call():
    def f(doc, nonce=None, **options): ...

    options = {"volatile": ("nonce", "doc.meta.run_id", "options.ts", "**.noise")}
    compiled = identity(f, **options)
    doc = {"id": 1, "nonce": 2, "meta": {"run_id": LOCK, "x": [{"noise": LOCK}]}}
    found = compiled.identify((doc, LOCK), {"ts": LOCK, "other": 1})
    assert found.payload == {"doc": {"id": 1, "meta": {"x": [{}]}}, "other": 1}
    assert found.matched == {"nonce", "doc.meta.run_id", "options.ts", "**.noise"}

    def g(ts, /, **options): ...

    apart = identity(g, volatile=("options.ts",)).identify((1,), {"ts": LOCK, "x": 2})
    assert apart.payload == {"ts": 1, "options": {"x": 2}}
    assert identity(f, volatile="options").identify((1,), {"a": LOCK}).payload == {
        "doc": 1,
        "nonce": None,
    }
    with pytest.raises(ConfigurationError, match=r"\*\*\.ts"):
        identity(f, volatile="options.**.ts")


def test_every_fields_name_one_level_down_of_a_key_object_counts():
    """What `__idempotency_key__` and a key function say is taken as it is."""
    payload = {"timestamp": 1}
    assert identity(lambda a: a).identify((Keyed(payload),), {}).payload == {"a": payload}
    found = identity(lambda a: a, key=lambda _: payload).identify((1,), {})
    assert found.payload == payload


def test_the_guards_names_count_in_a_call():
    def f(doc, ts=0): ...

    compiled = identity(f)
    assert compiled.identify(({"ts": 1},), {}, extra_volatile=["ts"]).payload == {"doc": {}}
    assert compiled.identify(({"ts": 1},), {}).payload == {"doc": {"ts": 1}, "ts": 0}
    with pytest.raises(ConfigurationError, match="every parameter is volatile"):
        compiled.identify((1,), {}, extra_volatile={"ts", "doc"})
    kept = identity(f, keep="ts", configured=("ts",))
    assert kept.identify((1, 2), {}, extra_volatile=("ts",)).payload == {"doc": 1, "ts": 2}


# --- what is refused at decoration ---------------------------------------------------------


@pytest.mark.parametrize("name", ["timestamp", "attempt"])
def test_a_declared_name_must_be_decided(name):
    fn = eval(f"lambda doc, {name}: 0")
    with pytest.raises(ConfigurationError) as caught:
        identity(fn)
    assert f'keep=("{name}",)' in str(caught.value)
    assert f'volatile=("{name}",)' in str(caught.value)
    assert of(fn, 1, 2, options={"volatile": (name,)}) == reference("task", {"doc": 1})
    assert of(fn, 1, 2, options={"volatile": (f"**.{name}",)}) == reference("task", {"doc": 1})
    assert of(fn, 1, 2, options={"keep": (name,)}) == reference("task", {"doc": 1, name: 2})
    assert of(fn, 1, 2, options={"key": (name,)}) == reference("task", {name: 2})


def test_a_kept_name_is_kept_one_level_down():
    def f(doc): ...

    kept = identity(f, keep=("timestamp",)).identify(({"timestamp": 1, "attempt": 2},), {})
    assert kept.payload == {"doc": {"timestamp": 1}}


def scalar(doc: str, n: int): ...


def options_(doc: str, **more): ...


@pytest.mark.parametrize(
    ("fn", "options", "match"),
    [
        (simple, {"volatile": "d.run_id"}, "no parameter"),
        (simple, {"volatile": ("a.x", "nope.x")}, "no parameter"),
        (simple, {"key": "nope"}, "no parameter"),
        (simple, {"key": ("a", "b.c")}, "no parameter"),
        (simple, {"key": ()}, "names no parameter"),
        (simple, {"keep": "nope"}, "keep names"),
        (scalar, {"keep": "timestamp"}, "keep names"),
        (options_, {"keep": "doc.timestamp"}, "keep names"),
        (simple, {"volatile": ("a", "b", "c")}, "every parameter is volatile"),
        (simple, {"volatile": ("**.a", "b", "c")}, "every parameter is volatile"),
        (lambda request_id: 0, {}, "every parameter is volatile"),
        (simple, {"key": 3}, "key takes names"),
        (simple, {"key": {"a": 1}}, "key takes names"),
        (simple, {"key": [3]}, "key takes names"),
        (simple, {"task_type": ""}, "task_type"),
        (simple, {"task_type": "\ud800"}, "task_type"),
        (simple, {"task_type": 3}, "task_type"),
    ],
    ids=repr,
)
def test_it_is_refused_at_decoration(fn, options, match):
    with pytest.raises(ConfigurationError, match=match):
        Identity(inspect.signature(fn), **{"task_type": "task", **options})


def test_options_may_be_called_anything():
    assert identity(options_, key="tenant", volatile="x.y", keep="anything")


def test_a_function_without_parameters_has_one_task():
    assert of(lambda: 0) == reference("task", {})


def test_an_async_key_is_refused():
    async def later(_): ...

    class Later:
        async def __call__(self, _): ...

    def lazily(_):
        yield 1

    for key in (later, Later(), functools.partial(later), lazily):
        with pytest.raises(ConfigurationError, match="key"):
            identity(simple, key=key)


# --- key -----------------------------------------------------------------------------------


def test_a_key_of_names():
    def pay(to, amount, memo="", request_id=None, timestamp=None): ...

    both = identity(pay, key=("to", "amount"))
    assert both.identify(("a", 1, LOCK), {}).payload == {"to": "a", "amount": 1}
    assert both.identify(("a", 1), {}).digest is None
    volatile = identity(pay, key="request_id", volatile=("timestamp", "**.request_id"))
    assert volatile.identify(("a", 1), {"request_id": 7}).payload == {"request_id": 7}
    inside = volatile.identify((1, 1), {"request_id": {"x": {"request_id": 1}, "timestamp": 2}})
    assert inside.payload == {"request_id": {"x": {}}}


def test_a_key_that_the_call_was_not_given_is_no_task():
    def f(**more): ...

    assert of(f, tenant=1, other=2, options={"key": "tenant"}) == reference("task", {"tenant": 1})
    with pytest.raises(FingerprintError) as caught:
        of(f, other=2, options={"key": "tenant"})
    assert caught.value.parameter == "tenant"
    assert identity(f, key="more").identify((), {"a": 1}).payload == {"more": {"a": 1}}


def test_an_explicit_key_with_the_digest_of_the_rest():
    def pay(to, amount=1, request_id=None, *parts, client=None, **more): ...

    seen = []

    def key(arguments):
        seen.append(arguments)
        return f"k-{arguments['to']}"

    compiled = identity(pay, key=key)
    one = compiled.identify(("a",), {"request_id": 1})
    assert seen == [{"to": "a", "amount": 1, "request_id": 1, "parts": [], "client": None}]
    assert one.payload == {"idempotency_key": "k-a"}
    assert one.fingerprint == reference("task", {"idempotency_key": "k-a"})
    rest = {"to": "a", "amount": 1, "parts": [], "client": None}
    assert one.digest == hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    assert compiled.identify(("a", 1, 2), {}).digest == one.digest
    other = compiled.identify(("a", 2), {})
    assert (other.fingerprint, other.digest) != (one.fingerprint, one.digest)
    assert other.fingerprint == one.fingerprint


def test_the_digest_is_that_of_the_payload():
    found = identity(simple, key=lambda _: "k").identify((1,), {})
    text = json.dumps({"a": 1, "b": 2, "c": 3}, sort_keys=True)
    assert found.digest == hashlib.sha256(text.encode()).hexdigest()


def test_an_explicit_key_is_a_way_out_for_what_cannot_be_compared():
    compiled = identity(simple, key=lambda a: str(a["c"]))
    one = compiled.identify((LOCK, 1), {"c": 3})
    assert one.digest == compiled.identify((object(), 1), {"c": 3}).digest
    assert one.digest != compiled.identify((LOCK, 2), {"c": 3}).digest


def test_names_that_clash_cannot_be_compared_either():
    def f(**more): ...

    with pytest.raises(FingerprintError, match="two keys of one text"):
        identity(f, key=lambda _: "k").identify((), {"\u00e9": 1, "e\u0301": 2})


@pytest.mark.parametrize("value", [None, 0, [], {"a": 1}, (1, 2), 2.5, Point(1, 2)], ids=repr)
def test_whatever_else_a_key_returns_is_the_payload(value):
    found = identity(simple, key=lambda _: value).identify((1,), {})
    assert found.payload == form(value)
    assert found.digest is None


def test_a_key_function_gets_a_dict_of_its_own():
    def greedy(arguments):
        arguments.clear()
        return "k"

    found = identity(simple, key=greedy).identify((1,), {})
    assert found.digest == identity(simple, key=lambda _: "k").identify((1,), {}).digest


def test_what_a_key_function_raises_is_its_own():
    with pytest.raises(KeyError):
        identity(simple, key=lambda a: a["nope"]).identify((1,), {})
    with pytest.raises(FingerprintError, match=r"key\(\)\.x\[0\]") as caught:
        identity(simple, key=lambda _: {"x": [LOCK]}).identify((1,), {})
    assert caught.value.path == "key().x[0]"
    with pytest.raises(FingerprintError, match=r"key\(\)"):
        identity(simple, key=lambda _: "\ud800").identify((1,), {})


# --- methods -------------------------------------------------------------------------------


class Bare:
    def run(self, x): ...

    def alone(self): ...


@dataclasses.dataclass
class Tenant:
    name: str
    request_id: str = ""

    def run(self, x): ...


class Service(Keyed):
    def run(self, x): ...


def test_an_undecided_self_is_refused_with_the_lines_to_write():
    with pytest.raises(ConfigurationError) as caught:
        identity(Bare.run).method_of(Bare)
    for line in ('volatile=("self",)', 'keep=("self",)', "key=", "__idempotency_key__", "Bare"):
        assert line in str(caught.value)
    with pytest.raises(FingerprintError) as caught:
        identity(Bare.run).identify((Bare(), 1), {})
    assert caught.value.parameter == "self"


def test_self_may_be_dropped():
    compiled = identity(Bare.run, volatile=("self",))
    compiled.method_of(Bare)
    assert compiled.identify((Bare(), {"self": "link"}), {}).payload == {"x": {"self": "link"}}
    alone = identity(Bare.alone, volatile=("self",))
    alone.method_of(Bare)
    assert alone.identify((Bare(),), {}).payload == {}


def test_selfs_fields_may_count():
    compiled = identity(Tenant.run, keep=("self",))
    compiled.method_of(Tenant)
    found = compiled.identify((Tenant("a", "r-1"),), {"x": 1})
    assert found.payload == {"self": {"name": "a"}, "x": 1}


def test_self_may_tell_its_key():
    compiled = identity(Service.run)
    compiled.method_of(Service)
    assert compiled.identify((Service("s"), 1), {}).payload == {"self": "s", "x": 1}


def test_a_key_decides_about_self():
    for key in ("x", lambda a: a["x"]):
        identity(Bare.run, key=key).method_of(Bare)
    compiled = identity(Bare.run, key=lambda a: type(a["self"]).__name__)
    assert compiled.identify((Bare(), 1), {}).payload == {"idempotency_key": "Bare"}


def test_an_instance_by_another_name():
    def run(this, x): ...

    with pytest.raises(ConfigurationError, match=r'volatile=\("this",\)'):
        identity(run).method_of(Bare)
    identity(lambda *args: args).method_of(Bare)


def test_cls_counts_by_its_qualified_name():
    def make(cls, x): ...

    one = identity(make).identify((Tenant, 1), {})
    assert one.payload["cls"].endswith("test_fingerprint.Tenant")
    assert one.fingerprint != identity(make).identify((Service, 1), {}).fingerprint

    def under_another_name(kind, x): ...

    compiled = identity(under_another_name, keep="kind")
    compiled.method_of(Tenant)
    assert compiled.identify((Tenant, 1), {}).payload["kind"].endswith("Tenant")


# --- task types ----------------------------------------------------------------------------


def test_a_task_type_is_module_and_qualified_name():
    assert task_type_of(json.dumps) == "json.dumps"
    assert task_type_of(functools.partial(json.dumps, indent=1)) == "json.dumps"
    assert task_type_of(json.JSONEncoder.encode) == "json.encoder.JSONEncoder.encode"
    assert task_type_of(json.JSONEncoder) == "json.encoder.JSONEncoder"
    assert task_type_of(json.JSONEncoder()) == "json.encoder.JSONEncoder"


def test_names_that_may_stand_for_many_are_refused():
    def local(): ...

    for fn in (local, lambda: 0, functools.partial(local)):
        with pytest.raises(ConfigurationError, match=r'task_type="\.\.\."'):
            task_type_of(fn)


MAIN = """
import multiprocessing, sys
from idemguard.fingerprint import task_type_of
def work(): ...
class A:
    def run(self): ...
found = [task_type_of(f) for f in (work, A.run, A)]
def tell(_): return found
if __name__ == "__main__":
    print(found)
    if "spawn" in sys.argv:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(tell, [0])[0])
"""


def lines(*args, cwd, **env):
    done = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_main_is_the_real_module_here_and_in_a_spawned_worker(tmp_path):
    package = tmp_path / "shop"
    package.mkdir()
    for file in (package / "__init__.py", package / "__main__.py", package / "tasks.py"):
        file.write_text("" if file.stem == "__init__" else MAIN)
    (tmp_path / "script.py").write_text(MAIN)

    def all_of(module):
        return str([f"{module}.{name}" for name in ("work", "A.run", "A")])

    assert set(lines("script.py", "spawn", cwd=tmp_path)) == {all_of("script")}
    assert set(lines("-m", "shop.tasks", "spawn", cwd=tmp_path)) == {all_of("shop.tasks")}
    assert lines("-m", "shop", cwd=tmp_path) == [all_of("shop.__main__")]
    assert lines("shop", cwd=tmp_path) == [all_of("shop")]
    assert lines("-c", MAIN, cwd=tmp_path) == [all_of("__main__")]
    imported = "from shop.tasks import found; print(found)"
    assert lines("-c", imported, cwd=tmp_path) == [all_of("shop.tasks")]


# --- other processes -----------------------------------------------------------------------

SCATTERED = """
import enum
from typing import NamedTuple
from idemguard.fingerprint import task_fingerprint
class Point(NamedTuple):
    x: object
    y: object
class Colour(enum.Enum):
    RED = "red"
letters = {f"s{i}" for i in range(50)}
payload = {
    "set": letters | {1, None, 2.5, (1, "x")},
    "nested": frozenset({frozenset({f"n{i}", i}) for i in range(20)}),
    "models": {Point(i, f"p{i}") for i in range(20)},
    "keys": {None: 1, True: 2, 3: 4, 2.5: 6, "x": {Colour.RED: {10: {"b", "a"}, 9: {"c"}}}},
    "in a list": [{"z", "y", "x"}, {b"1", b"2"}],
}
print(task_fingerprint("t", payload), *letters)
"""


def test_ten_interpreters_agree(tmp_path):
    found = [
        lines("-c", SCATTERED, cwd=tmp_path, PYTHONHASHSEED=str(seed))[0].partition(" ")
        for seed in range(10)
    ]
    assert len({fingerprint for fingerprint, _, _ in found}) == 1
    assert len({order for _, _, order in found}) > 1  # else the seeds had no effect


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes_agree(method):
    payload = {"tags": {"a", "b", "c"}, "n": [1, 2.5, None, True], "at": dt.date(2026, 1, 2)}
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(task_fingerprint, ("t", payload)) == task_fingerprint("t", payload)


def test_importing_it_loads_none_of_what_it_recognises():
    code = (
        "import sys\n"
        "from idemguard.fingerprint import task_fingerprint\n"
        "try: task_fingerprint('t', object())\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print([m for m in ('numpy', 'pydantic', 'attr', 'attrs') if m in sys.modules])"
    )
    assert lines("-c", code, cwd=Path(__file__).parent) == ["FingerprintError", "[]"]


def test_a_key_function_takes_one_dict():
    def fn(q, c): ...

    with pytest.raises(ConfigurationError, match="function of one dict, the arguments by name"):
        Identity(inspect.signature(fn), task_type="t", key=lambda q, c: q)

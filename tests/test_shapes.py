"""Whatever can be called can be guarded, looks as it did, or is refused with what to do instead."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import enum
import functools
import inspect
import math
import operator
import sys
import types
import typing
from typing import TYPE_CHECKING
from unittest import mock

import attrs
import pydantic
import pytest
from workers.callables import logged, take

from idemguard.errors import ConfigurationError, FingerprintError, ReentrantCallError

if TYPE_CHECKING:
    from nowhere import Client

UNDECIDED = r'volatile=\("self",\).*keep=\("self",\).*key=.*__idempotency_key__'


class Answer(pydantic.BaseModel):
    """What only this module knows by name."""

    text: str


def plain(n: int, *tags: str, lang: str = "en", **more: int) -> Answer:
    """Answer."""
    return Answer(text=f"{n}{tags}{lang}{more}")


async def coroutine(n: int, lang: str = "en") -> Answer:
    """Answer."""
    return Answer(text=f"{n}{lang}")


def stream(n: int, lang: str = "en") -> typing.Iterator[Answer]:
    """Answer."""
    yield Answer(text=f"{n}{lang}")


async def astream(n: int, lang: str = "en") -> typing.AsyncIterator[Answer]:
    """Answer."""
    yield Answer(text=f"{n}{lang}")


SHAPES = [plain, coroutine, stream, astream]
KINDS = [
    inspect.isfunction,
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
    asyncio.iscoroutinefunction,
    callable,
]


def executed(guard) -> int:
    return guard.ledger.totals()["executions"]


# --- it looks as it did ----------------------------------------------------------------------------


@pytest.mark.parametrize("decorators", [(), (logged,)], ids=["alone", "above another"])
@pytest.mark.parametrize("fn", SHAPES)
def test_who_looks_at_it_sees_the_plain_function(guard, fn, decorators):
    beneath = functools.reduce(lambda made, decorate: decorate(made), decorators, fn)
    guarded = guard.idempotent(beneath)
    for look in (inspect.signature, inspect.getsource, inspect.getdoc, inspect.unwrap, *KINDS):
        assert look(guarded) == look(beneath)
    assert typing.get_type_hints(guarded) == typing.get_type_hints(fn)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__"):
        assert getattr(guarded, name) == getattr(beneath, name)
    assert guarded.__kwdefaults__ == beneath.__kwdefaults__
    assert guarded.__annotations__ == fn.__annotations__
    assert isinstance(guarded, types.FunctionType)


@pytest.mark.parametrize("fn", [*SHAPES, functools.partial(plain, 1)])
def test_nothing_is_hung_on_it(guard, fn):
    assert set(dir(guard.idempotent(fn))) == set(dir(fn))
    assert vars(guard.idempotent(fn)) == vars(fn)


@pytest.mark.parametrize("fn", SHAPES)
def test_its_kind_is_that_of_its_shape(guard, fn):
    guarded = guard.idempotent(fn)
    kinds = [kind for kind in KINDS[1:4] if kind(guarded)]
    assert (
        kinds
        == {
            "plain": [],
            "coroutine": [inspect.iscoroutinefunction],
            "stream": [inspect.isgeneratorfunction],
            "astream": [inspect.isasyncgenfunction],
        }[fn.__name__]
    )


def test_methods_look_as_they_did(guard):
    class Plain:
        async def run(self, n: int) -> Answer:
            """Answer."""
            return Answer(text=str(n))

    class Guarded:
        run = guard.idempotent(Plain.run, volatile="self", task_type="run")

    for one, other in ((Plain().run, Guarded().run), (Plain.run, Guarded.run)):
        for look in (inspect.signature, inspect.getdoc, inspect.ismethod, *KINDS):
            assert look(other) == look(one)
        assert set(dir(other)) == set(dir(one))
    assert isinstance(Guarded().run, types.MethodType)
    same = Guarded()
    assert same.run == same.run
    assert same.run.__self__ is same


@pytest.mark.parametrize("fn", [coroutine, stream, astream])
def test_a_tools_schema_is_that_of_the_plain_function(guard, fn):
    wanted = pydantic.TypeAdapter(fn).json_schema()
    assert wanted["properties"]["n"] == {"title": "N", "type": "integer"}
    assert pydantic.TypeAdapter(guard.idempotent(fn)).json_schema() == wanted


def test_validate_call_serves_on_either_side(guard):
    above = pydantic.validate_call(guard.idempotent(plain))
    beneath = guard.idempotent(pydantic.validate_call(plain), task_type="beneath")
    for call in (above, beneath, above, beneath):
        assert call("1", lang="de") == plain(1, lang="de")
    assert executed(guard) == 2
    again = pydantic.validate_call(guard.idempotent(coroutine))
    assert take(again, "1") == take(again, "1") == Answer(text="1en")
    assert executed(guard) == 3


# --- annotations -----------------------------------------------------------------------------------


def needs_a_client(n: int, client: Client | None = None) -> Answer:
    return Answer(text=str(n))


def test_a_name_for_type_checkers_alone_is_in_nobodys_way(guard):
    fn = guard.idempotent(needs_a_client)
    assert fn(1) == fn(1) == Answer(text="1")
    assert executed(guard) == 1


@pytest.mark.parametrize("fn", SHAPES)
def test_a_reused_result_is_of_the_type_that_only_its_module_knows(guard, fn):
    guarded = guard.idempotent(fn)
    first = take(guarded)
    again = take(guarded)
    assert again == first
    assert isinstance(again[0] if isinstance(again, list) else again, Answer)
    assert executed(guard) == 1


# --- methods ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tenant:
    name: str

    def label(self, kind: str, n: int) -> list[object]:
        return [self.name, kind, n]


def methods(guard):
    """A class with a method of each shape, guarded in each way; its fields count."""

    @dataclasses.dataclass
    class Made(Tenant):
        @guard.idempotent(keep="self", task_type="plain")
        def plain(self, n):
            return self.label("plain", n)

        @guard.idempotent(keep="self", task_type="coroutine")
        async def coroutine(self, n):
            return self.label("coroutine", n)

        @guard.idempotent(keep="self", task_type="stream")
        def stream(self, n):
            yield from self.label("stream", n)

        @guard.idempotent(keep="self", task_type="astream")
        async def astream(self, n):
            for part in self.label("astream", n):
                yield part

        @logged
        @guard.idempotent(keep="self", task_type="beneath")
        def beneath(self, n):
            return self.label("beneath", n)

        @guard.idempotent(keep="self", task_type="above")
        @logged
        async def above(self, n):
            return self.label("above", n)

    return Made


METHODS = ["plain", "coroutine", "stream", "astream", "beneath", "above"]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_by_instance_and_by_class_is_one_task(guard, name):
    made = methods(guard)
    first = take(getattr(made("a"), name), 1)
    assert first == ["a", name, 1]
    by_class = getattr(made, name)
    assert take(functools.partial(by_class, made("a")), 1) == first
    assert take(functools.partial(getattr(made("a"), name)), 1) == first
    assert executed(guard) == 1
    assert take(getattr(made("b"), name), 1) == ["b", name, 1]
    assert executed(guard) == 2


@pytest.mark.parametrize("name", METHODS)
def test_an_inherited_method_is_called_with_the_instance_of_the_subclass(guard, name):
    class Sub(methods(guard)):
        def label(self, kind, n):
            return ["sub", *super().label(kind, n)]

    assert take(getattr(Sub("a"), name), 1) == ["sub", "a", name, 1]


def test_super_reaches_the_guarded_method_that_is_overridden(guard):
    class Sub(methods(guard)):
        @guard.idempotent(keep="self", task_type="sub")
        def plain(self, n):
            return ["sub", *super().plain(n)]

        async def coroutine(self, n):
            return ["sub", *await super().coroutine(n)]

        def stream(self, n):
            yield "sub"
            yield from super().stream(n)

    for name in ("plain", "coroutine", "stream"):
        for _ in range(2):
            assert take(getattr(Sub("a"), name), 1) == ["sub", "a", name, 1]
    assert executed(guard) == 4


def test_an_overridden_method_of_the_same_task_is_told_that_it_calls_itself(guard):
    class Sub(methods(guard)):
        @guard.idempotent(keep="self", task_type="plain")
        def plain(self, n):
            return super().plain(n)

    with pytest.raises(ReentrantCallError):
        Sub("a").plain(1)


def class_methods(guard):
    class Base:
        @guard.idempotent(task_type="over")
        @classmethod
        def over(cls, n):
            return [cls.__name__, n]

        @classmethod
        @guard.idempotent(task_type="under")
        def under(cls, n):
            return [cls.__name__, n]

        @classmethod
        @guard.idempotent(task_type="another name")
        def another_name(kind, n):  # noqa: N804
            return [kind.__name__, n]

        @guard.idempotent(task_type="coroutine")
        @classmethod
        async def coroutine(cls, n):
            return [cls.__name__, n]

        @classmethod
        @guard.idempotent(task_type="stream")
        def stream(cls, n):
            yield from (cls.__name__, n)

        @logged_class_method
        @guard.idempotent(task_type="beneath")
        def beneath(cls, n):  # noqa: N805
            return [cls.__name__, n]

    class Sub(Base):
        @classmethod
        def under(cls, n):
            return super().under(n)

    return Base, Sub


def logged_class_method(fn):
    return classmethod(logged(fn))


@pytest.mark.parametrize(
    "name", ["over", "under", "another_name", "coroutine", "stream", "beneath"]
)
def test_a_class_counts_by_its_name(guard, name):
    base, sub = class_methods(guard)
    for _ in range(2):
        for owner in (base, base(), sub, sub()):
            expected = "Sub" if sub in {owner, type(owner)} else "Base"
            assert take(getattr(owner, name), 1) == [expected, 1]
    assert executed(guard) == 2


def test_a_class_method_that_does_not_bind_what_it_holds(guard):
    # as Python has it from 3.13 on
    base, sub = class_methods(guard)
    held = vars(base)["under"].__func__
    for _ in range(2):
        assert types.MethodType(held, base)(1) == ["Base", 1] == base.under(1)
        assert types.MethodType(held, sub)(1) == ["Sub", 1]
    assert executed(guard) == 2


def test_a_static_method_on_either_side(guard):
    class Made:
        @guard.idempotent(task_type="over")
        @staticmethod
        def over(n):
            return n

        @staticmethod
        @guard.idempotent(task_type="under")
        def under(n):
            return n

        @guard.idempotent(task_type="coroutine")
        @staticmethod
        async def coroutine(n):
            return n

        @staticmethod
        @guard.idempotent(task_type="astream")
        async def astream(n):
            yield n

    for name, expected in (("over", 1), ("under", 1), ("coroutine", 1), ("astream", [1])):
        for owner in (Made, Made(), type("Sub", (Made,), {})):
            assert take(getattr(owner, name), 1) == expected
    assert executed(guard) == 4


# --- what identifies an instance -------------------------------------------------------------------


def undecided(self, n): ...


async def undecided_coroutine(self, n): ...


@pytest.mark.parametrize("fn", [undecided, undecided_coroutine])
def test_an_undecided_self_is_told_when_the_class_is_created(guard, fn):
    with pytest.raises((ConfigurationError, RuntimeError)) as caught:
        type("Made", (), {"run": guard.idempotent(fn)})
    error = caught.value if sys.version_info >= (3, 12) else caught.value.__cause__
    assert isinstance(error, ConfigurationError)
    with pytest.raises(ConfigurationError, match=UNDECIDED):
        raise error


@pytest.mark.parametrize("fn", [undecided, undecided_coroutine])
@pytest.mark.parametrize("instance", [object, functools.partial(Tenant, "a")])
@pytest.mark.parametrize("how", ["under another decorator", "set later", "by the class"])
def test_an_undecided_self_is_told_at_the_first_call(guard, fn, how, instance):
    base = type(instance())
    if how == "under another decorator":
        made = type("Made", (base,), {"run": logged(guard.idempotent(fn))})
        one = made() if base is object else made("a")
        fn.__qualname__, plain_name = "Made.run", fn.__qualname__
        try:
            made.run = logged(guard.idempotent(fn))
        finally:
            fn.__qualname__ = plain_name
        call = functools.partial(one.run)
    else:
        made = type("Made", (base,), {})
        made.run = guard.idempotent(fn)
        one = made() if base is object else made("a")
        call = one.run if how == "set later" else functools.partial(made.run, one)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=UNDECIDED):
            take(call)
    assert executed(guard) == 0


@pydantic.dataclasses.dataclass
class PydanticDataclass:
    name: str


class Model(pydantic.BaseModel):
    name: str


class FrozenModel(pydantic.BaseModel, frozen=True):
    name: str


@attrs.define
class Attrs:
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    name: str


class Named(typing.NamedTuple):
    name: str


class Told:
    __slots__ = ("name",)

    def __init__(self, name):
        self.name = name

    def __idempotency_key__(self):
        return self.name


OWNERS = [Tenant, PydanticDataclass, Model, FrozenModel, Attrs, FrozenSlots, Named, Told]


@pytest.mark.parametrize("base", OWNERS)
def test_an_instance_counts_by_its_fields(guard, base):
    class Made(base):
        @guard.idempotent(task_type="plain", keep="self")
        def run(self, n):
            return [self.name, n]

        @guard.idempotent(task_type="coroutine", keep="self")
        async def slowly(self, n):
            return [self.name, n]

    for name in ("a", "b", "a"):
        made = Made(name=name)
        assert take(made.run, 1) == take(made.slowly, 1) == [name, 1]
    assert executed(guard) == 4


def test_a_key_and_a_method_of_the_class_say_what_counts(guard):
    class Keyed:
        def __init__(self, name):
            self.name = name

        def __idempotency_key__(self):
            return self.name

        @guard.idempotent(task_type="told")
        def told(self, n):
            return n

        @guard.idempotent(task_type="name", key="n")
        def by_name(self, n):
            return n

        @guard.idempotent(task_type="function", key=lambda bound: [bound["self"].name, bound["n"]])
        def by_function(self, n):
            return n

        @guard.idempotent(task_type="dropped", volatile=("self",))
        def dropped(self, n):
            return n

    for name, executions in (("told", 2), ("by_name", 1), ("by_function", 2), ("dropped", 1)):
        before = executed(guard)
        for instance in ("a", "b", "a"):
            assert getattr(Keyed(instance), name)(1) == 1
        assert executed(guard) - before == executions


def written_as(decorate, guard):
    class Made:
        name: str

        @guard.idempotent(keep=("self",), task_type="run")
        def run(self, n: int) -> list[object]:
            return [self.name, n]

        @guard.idempotent(task_type="make")
        @classmethod
        def make(cls, n: int) -> int:
            return n

    return decorate(Made)


@pytest.mark.parametrize(
    "decorate",
    [
        pytest.param(dataclasses.dataclass, id="dataclass"),
        pytest.param(dataclasses.dataclass(frozen=True), id="frozen"),
        pytest.param(dataclasses.dataclass(slots=True), id="slots"),
        pytest.param(attrs.define, id="attrs"),
        pytest.param(attrs.frozen, id="attrs frozen"),
        pytest.param(attrs.define(slots=False), id="attrs without slots"),
        pytest.param(pydantic.dataclasses.dataclass, id="pydantic"),
    ],
)
def test_a_class_decorator_comes_after_the_guard(guard, decorate):
    made = written_as(decorate, guard)
    for name in ("a", "b", "a"):
        assert made(name).run(1) == [name, 1]
    assert made.make(1) == made("a").make(1) == 1
    assert executed(guard) == 3


def test_a_pydantic_model_takes_guarded_methods_for_methods(guard):
    class Made(pydantic.BaseModel):
        n: int

        @guard.idempotent(keep="self", task_type="run")
        def run(self, x: int) -> int:
            return self.n + x

        @guard.idempotent(keep="self", task_type="slowly")
        async def slowly(self, x: int) -> int:
            return self.n + x

        @classmethod
        @guard.idempotent(task_type="make")
        def make(cls, x: int) -> int:
            return x

        @guard.idempotent(task_type="count")
        @staticmethod
        def count(x: int) -> int:
            return x

        @pydantic.field_validator("n")
        @classmethod
        @guard.idempotent(task_type="check")
        def check(cls, n: int) -> int:
            return n + 1

    assert list(Made.model_fields) == ["n"]
    assert Made.__private_attributes__ == {}
    for _ in range(2):
        made = Made(n=1)
        assert made.model_dump() == {"n": 2}
        assert (made.run(1), take(made.slowly, 1), Made.make(3), made.count(4)) == (3, 3, 3, 4)
    assert executed(guard) == 5


def test_an_enums_member_counts_by_its_value(guard):
    class Colour(enum.Enum):
        RED = 1
        BLUE = 2

        @guard.idempotent(keep="self", task_type="mix")
        def mix(self, n):
            return self.value + n

    assert [member.mix(1) for member in (*Colour, *Colour)] == [2, 3, 2, 3]
    assert executed(guard) == 2


def test_abstract_methods_stay_abstract(guard):
    class Base(abc.ABC):
        @guard.idempotent(task_type="over", volatile="self")
        @abc.abstractmethod
        def over(self, n): ...

        @abc.abstractmethod
        @guard.idempotent(task_type="under", volatile="self")
        def under(self, n):
            return ["base", n]

    assert Base.__abstractmethods__ == {"over", "under"}
    with pytest.raises(TypeError, match="abstract"):
        Base()

    class Sub(Base):
        def over(self, n):
            return n

        def under(self, n):
            return super().under(n)

    assert [Sub().under(1), Sub().under(1)] == [["base", 1]] * 2
    assert executed(guard) == 1


def test_a_guarded_method_meets_a_protocol(guard):
    @typing.runtime_checkable
    class Runs(typing.Protocol):
        @guard.idempotent(task_type="protocol", volatile="self")
        def run(self, n: int) -> int: ...

    class Made:
        @guard.idempotent(task_type="run", volatile="self")
        def run(self, n: int) -> int:
            return n

    assert isinstance(Made(), Runs)
    assert not isinstance(object(), Runs)


# --- objects, partials and the rest ----------------------------------------------------------------


@dataclasses.dataclass
class Adder:
    by: int

    def __call__(self, n):
        return self.by + n

    async def slowly(self, n):
        return self.by + n


@dataclasses.dataclass
class AsyncAdder:
    by: int

    async def __call__(self, n):
        return self.by + n


class StreamAdder(Adder):
    def __call__(self, n):
        yield self.by + n


CALLED = [Adder, AsyncAdder, StreamAdder]


@pytest.mark.parametrize("kind", CALLED)
def test_callable_objects_count_by_their_fields_where_they_are_kept(guard, kind):
    for by in (1, 2, 1):
        call = guard.idempotent(kind(by), keep="self")
        assert take(call, 1) == ([by + 1] if kind is StreamAdder else by + 1)
    assert executed(guard) == 2


@pytest.mark.parametrize("kind", CALLED)
def test_a_task_type_may_stand_for_a_callable_object(guard, kind):
    for by in (1, 2, 1):
        take(guard.idempotent(kind(by), task_type=f"add {by}"), 1)
    assert executed(guard) == 2
    assert take(guard.idempotent(kind(5), volatile="self"), 1) == take(
        guard.idempotent(kind(6), volatile="self"), 1
    )


@pytest.mark.parametrize("kind", CALLED)
def test_an_undecided_callable_object_is_told_at_decoration(guard, kind):
    with pytest.raises(ConfigurationError, match=f"{UNDECIDED}.*task_type="):
        guard.idempotent(kind(1))


def test_a_guarded_call_method(guard):
    class Made(Tenant):
        @guard.idempotent(keep="self", task_type="call")
        def __call__(self, n):
            return [self.name, n]

    assert [Made(name)(1) for name in "aba"] == [["a", 1], ["b", 1], ["a", 1]]
    assert executed(guard) == 2


def test_bound_methods(guard):
    for by in (1, 2, 1):
        call = guard.idempotent(Adder(by).slowly, keep="self")
        assert take(call, 1) == by + 1
    assert executed(guard) == 2
    for by in (1, 2):
        assert take(guard.idempotent(Adder(by).slowly, task_type="first", key="n"), 7) == 8
    with pytest.raises(ConfigurationError, match=UNDECIDED):
        guard.idempotent(Adder(1).slowly, task_type="says nothing of self")


def test_bound_class_methods(guard):
    class Base:
        @classmethod
        def make(cls, n):
            return [cls.__name__, n]

    class Sub(Base): ...

    for owner in (Base, Sub, Base):
        assert guard.idempotent(owner.make, task_type="make")(1) == [owner.__name__, 1]
    assert executed(guard) == 2


def test_partials_of_one_function_never_share_what_they_do_not_share(guard):
    def named(a, b=0, *, c=0):
        return [a, b, c]

    calls = [
        functools.partial(named, 1),
        functools.partial(named, 2),
        functools.partial(named, b=3),
        functools.partial(named, c=4),
        functools.partial(functools.partial(named, 1), c=5),
    ]
    guarded = [guard.idempotent(call, task_type="named") for call in calls]
    for _ in range(2):
        for call, plain_call in zip(guarded, calls, strict=True):
            assert call(9) == plain_call(9) if call is not guarded[2] else call(9) == [9, 3, 0]
    assert executed(guard) == 5
    # and spelled otherwise it is the same
    assert guard.idempotent(named, task_type="named")(1, 9, c=5) == [1, 9, 5]
    assert guarded[3](9, c=0) == [9, 0, 0]
    assert executed(guard) == 6


@pytest.mark.parametrize("fn", SHAPES)
def test_partials_of_every_shape(guard, fn):
    for lang in ("de", "fr", "de"):
        found = take(guard.idempotent(functools.partial(fn, lang=lang)), 1)
        assert found == take(functools.partial(fn, lang=lang), 1)
    assert executed(guard) == 2


def test_partials_of_objects_and_their_methods(guard):
    for by in (1, 2, 1):
        call = guard.idempotent(functools.partial(Adder(by).slowly, 1), keep="self")
        assert asyncio.run(call()) == by + 1
        assert guard.idempotent(functools.partial(Adder(by), 1), keep="self")() == by + 1
    assert executed(guard) == 4


def test_a_partial_method_of_a_guarded_one(guard):
    class Made:
        @guard.idempotent(volatile="self", task_type="run")
        def run(self, a, b):
            return [a, b]

        first = functools.partialmethod(run, 1)

    assert Made().first(2) == Made().run(1, 2) == Made().run(b=2, a=1) == [1, 2]
    assert executed(guard) == 1


def test_a_property_above_a_guarded_getter(guard):
    class Made(Tenant):
        @property
        @guard.idempotent(keep="self", task_type="upper")
        def upper(self):
            return self.name.upper()

        @functools.cached_property
        @guard.idempotent(keep="self", task_type="lower")
        def lower(self):
            return self.name.lower()

    assert [Made("a").upper, Made("b").upper, Made("a").upper] == ["A", "B", "A"]
    assert Made("a").lower == "a"
    assert executed(guard) == 3


def test_caches_and_dispatch_on_either_side(guard):
    named = functools.partial(guard.idempotent, task_type="f")
    makes = [
        lambda fn: functools.lru_cache(named(fn)),
        lambda fn: named(functools.lru_cache(fn)),
        lambda fn: functools.singledispatch(named(fn)),
        lambda fn: named(functools.singledispatch(fn)),
    ]
    for make in makes:
        assert make(lambda n: n + 1)(1) == 2
    assert executed(guard) == 1


def test_a_context_manager_around_a_guarded_stream(guard):
    @contextlib.contextmanager
    @guard.idempotent(task_type="opened")
    def opened(n):
        yield n

    for _ in range(2):
        with opened(1) as found:
            assert found == 1
    assert executed(guard) == 1


def test_functions_written_in_c(guard):
    for fn, args, expected in ((len, ([1],), 1), (math.sqrt, (4.0,), 2.0), (abs, (-1,), 1)):
        assert [guard.idempotent(fn)(*args) for _ in range(2)] == [expected] * 2
    assert executed(guard) == 3


def test_mocks(guard):
    sync, asynchronous = mock.Mock(return_value=1), mock.AsyncMock(return_value=2)
    for _ in range(2):
        assert take(guard.idempotent(sync, task_type="sync")) == 1
        assert take(guard.idempotent(asynchronous, task_type="async")) == 2
    assert sync.call_count == asynchronous.await_count == 1
    with pytest.raises(ConfigurationError, match="task_type="):
        guard.idempotent(sync)


# --- what cannot be guarded ------------------------------------------------------------------------


def wrapped_twice(guard):
    once = guard.idempotent(plain, task_type="t")
    return guard.idempotent(logged(once), task_type="t")


REFUSED = {
    "class": (lambda guard: guard.idempotent(Adder), "not the class Adder: decorate a method"),
    "type": (lambda guard: guard.idempotent(task_type="t")(int), "not the class int"),
    "number": (lambda guard: guard.idempotent(5), "a callable, not 5"),
    "property": (lambda guard: guard.idempotent(property(plain)), "the function beneath it"),
    "partialmethod": (
        lambda guard: guard.idempotent(functools.partialmethod(plain, 1)),
        "the function beneath it",
    ),
    "lambda": (lambda guard: guard.idempotent(lambda: 0), 'a lambda.*task_type="...'),
    "no signature": (lambda guard: guard.idempotent(max), "max.*guard a function that calls it"),
    "getter": (
        lambda guard: guard.idempotent(operator.itemgetter(1)),
        "itemgetter.*guard a function that calls it",
    ),
    "bound C": (lambda guard: guard.idempotent(",".join), "join.*written in C.*that calls it"),
    "C": (lambda guard: guard.idempotent(str.upper), "upper.*written in C.*that calls it"),
    "C class method": (lambda guard: guard.idempotent(dict.fromkeys), "fromkeys.*written in C"),
    "slot": (lambda guard: guard.idempotent((1).__add__), "__add__.*written in C"),
    "manager": (
        lambda guard: guard.idempotent(logged(contextlib.contextmanager(stream))),
        "stream gives a context manager.*called inside it",
    ),
    "async manager": (
        lambda guard: guard.idempotent(contextlib.asynccontextmanager(astream)),
        "astream gives a context manager",
    ),
    "twice": (lambda guard: guard.idempotent(guard.idempotent(plain)), "plain is guarded already"),
    "method twice": (
        lambda guard: guard.idempotent(methods(guard)("a").plain, task_type="other"),
        "plain is guarded already",
    ),
    "twice above another": (wrapped_twice, "plain is guarded already"),
    "twice as a partial": (
        lambda guard: guard.idempotent(functools.partial(guard.idempotent(plain), 1)),
        "guarded already",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_at_decoration_with_what_to_do(guard, name):
    decorate, words = REFUSED[name]
    with pytest.raises(ConfigurationError, match=words):
        decorate(guard)


def test_a_context_manager_of_contextlib_as_a_decorator_is_none(guard):
    @contextlib.contextmanager
    def around():
        yield

    fn = guard.idempotent(around()(plain), task_type="around")
    assert fn(1) == fn(1) == plain(1)
    assert executed(guard) == 1


@pytest.mark.parametrize("fn", [coroutine, stream, astream])
def test_a_wrapper_that_gives_something_else_than_it_wraps_is_told_at_the_call(guard, fn):
    @functools.wraps(fn)
    def runner(n):
        return 5

    with pytest.raises(ConfigurationError, match="object of int: guard the function beneath"):
        take(guard.idempotent(runner))


def test_an_instance_without_fields_is_told_at_the_call(guard):
    class Made:
        @guard.idempotent(keep="self", task_type="run")
        def run(self): ...

    with pytest.raises(FingerprintError, match="self has no stable identity"):
        Made().run()

"""Results of every type, end to end: a reused result cannot be told from an executed one."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from workers import jobs, values
from workers.lab import found_a_claim

from idemguard import Guard, capture
from idemguard.errors import ResultUnavailableError, StoreError
from idemguard.stores.sqlite import SqliteStore

LONG = 30.0
NAMES = list(values.CASES)


@pytest.fixture(scope="module")
def other():
    """Another process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def shared(tmp_path):
    """The URL of a store for several processes, and a log of the executions."""
    yield f"sqlite:///{tmp_path / 'shared.db'}", str(tmp_path / "log")
    jobs.close()


@pytest.fixture(params=["sync", "async"])
def kind(request):
    """Functions and coroutine functions."""
    return request.param


def executed(log):
    """What was executed, by name."""
    return [json.loads(line)["name"] for line in Path(log).read_text().splitlines()]


def guarded(guard, kind, body, **options):
    """The body, guarded, as a plain function to call."""
    if kind == "sync":
        return guard.idempotent(body, **{"task_type": "give"} | options)

    async def abody():
        return body()

    abody.__annotations__ = body.__annotations__
    flow = guard.idempotent(abody, **{"task_type": "give"} | options)
    return lambda: asyncio.run(flow())


# --- faithful ------------------------------------------------------------------------------------


def test_the_comparison_sees_every_difference():
    pairs = [
        (1, 1.0), (1, True), (0.0, -0.0), ([1], (1,)), ({1}, frozenset({1})), ({1}, {1.0}),
        ({"a": [1]}, {"a": [True]}), (values.Cat("a", 1), values.Dog("a", 1)),
        (values.Cat("a", 1), values.Cat("a", True)), ("yes", values.Word.YES),
        (values.Point(1, 2.0), (1, 2.0)), (values.Point(1, 2.0), values.Point(1, 2)),
        (values.Pet(name="a"), values.Toy(name="a")), ({1: "a"}, {"1": "a"}),
        (values.Crate([values.Point(1, 1)]), values.Crate([values.Point(1, 1.0)])),
        (values.MOMENT, values.MOMENT.astimezone()),
    ]  # fmt: skip
    for one, another in pairs:
        assert not values.same(one, another)
    assert all(values.same(make(), make()) for _, make in values.CASES.values())


def test_the_leader_and_a_late_call(shared, kind):
    url, log = shared
    for name in NAMES:
        call, expected = values.result_of(url, name, kind, None, log), values.CASES[name][1]()
        assert values.same(call(), expected), name
        reused, again = call(), call()
        assert values.same(reused, expected), name
        assert values.same(again, expected), name
    assert executed(log) == NAMES


def test_a_late_call_in_another_process(shared, kind, other):
    url, log = shared
    for name in NAMES:
        values.result_of(url, name, kind, None, log)()
    found = other.submit(values.results, url, NAMES, kind, log).result(LONG)
    for name, (value, source) in zip(NAMES, found, strict=True):
        assert source == "reused", name
        assert values.same(value, values.CASES[name][1]()), name
    assert executed(log) == NAMES


def test_from_another_process(shared, kind, other):
    url, log = shared
    found = other.submit(values.results, url, NAMES, kind, log).result(LONG)
    assert {source for _, source in found} == {"executed"}
    for name in NAMES:
        assert values.same(
            values.result_of(url, name, kind, None, log)(), values.CASES[name][1]()
        ), name
    assert executed(log) == NAMES


@pytest.mark.parametrize("name", ["value types", "look-alike models", "nested dataclass", "falsy"])
def test_a_waiter_in_another_process(shared, kind, other, crew, until, name):
    url, log = shared
    gate = f"{log}.gate"
    leader = crew.start(values.result_of(url, name, kind, gate, log))
    until(lambda: Path(log).exists())
    waiter = other.submit(values.results, url, [name], kind, log)
    until(lambda: found_a_claim(jobs.guard_of(url).engine.store) == 1)
    values.touch(gate)
    assert values.same(leader.result(LONG), values.CASES[name][1]())
    ((value, source),) = waiter.result(LONG)
    assert source == "reused"
    assert values.same(value, values.CASES[name][1]())
    assert executed(log) == [name]


def test_methods_keep_their_results_apart(guard):
    class Worker:
        __idempotency_key__ = staticmethod(lambda: "w")

        @guard.idempotent(task_type="cat")
        def cat(self) -> values.Cat | values.Dog:
            return values.Cat("a", 1)

        @guard.idempotent(task_type="dog")
        @classmethod
        def dog(cls) -> values.Cat | values.Dog:
            return values.Dog("a", 1)

    for _ in range(2):
        assert values.same(Worker().cat(), values.Cat("a", 1))
        assert values.same(Worker.dog(), values.Dog("a", 1))


# --- result= -------------------------------------------------------------------------------------


def test_result_stands_for_the_annotation(guard, kind, warned):
    calls = []

    def give():
        calls.append(1)
        return [values.Dog("a", 1), values.Cat("a", 1)]

    give = guarded(guard, kind, give, result=list[values.Cat | values.Dog])
    for _ in range(3):
        assert values.same(give(), [values.Dog("a", 1), values.Cat("a", 1)])
    assert calls == [1]
    assert warned() == []


def test_result_outranks_the_annotation(guard, kind):
    def give() -> Any:
        return values.Pet(name="a")

    give = guarded(guard, kind, give, result=values.Pet)
    assert values.same(give(), values.Pet(name="a"))
    assert values.same(give(), values.Pet(name="a"))


def test_result_none_is_an_annotation(guard, kind):
    give = guarded(guard, kind, lambda: None, result=None)
    assert give() is None
    assert give() is None


# --- fresh ---------------------------------------------------------------------------------------


def test_a_reused_result_is_a_fresh_object(guard, kind):
    def give() -> dict[str, list[values.Cat]]:
        return {"a": [values.Cat("a")]}

    give = guarded(guard, kind, give)
    first = give()
    first["a"][0].name = "spoiled"
    first["b"] = []
    second = give()
    assert values.same(second, {"a": [values.Cat("a")]})
    second["a"].clear()
    third = give()
    assert values.same(third, {"a": [values.Cat("a")]})
    assert third["a"][0] is not give()["a"][0]


def test_the_caller_gets_the_very_object(guard, kind):
    made = []

    def give():
        made.append({"a": []})
        return made[-1]

    give = guarded(guard, kind, give)
    assert give() is made[0]
    assert give() is not made[0]


# --- what cannot be kept -------------------------------------------------------------------------


class Client:
    """Nothing that can be stored."""


class Stranger(values.Cat):
    """A class that the annotation does not name."""


class Rounded(int):
    """A number that would come back as another type."""


UNSTORABLE = {
    "object": (None, Client, "Client"),
    "inside": (None, lambda: {"a": [1, Client()]}, "Client"),
    "function": (None, lambda: len, "builtin_function_or_method"),
    "subclass": (values.Cat, lambda: Stranger("a"), "Stranger"),
    "no annotation": (None, lambda: values.Cat("a"), "Cat"),
    "other class": (values.Dog, lambda: [values.Cat("a")], "Cat"),
    "subclass of int": (int, lambda: Rounded(1), "Rounded"),
    "exception": (None, lambda: [ValueError("x")], "ValueError"),
}


@pytest.mark.parametrize("name", UNSTORABLE)
def test_what_cannot_be_restored(guard, kind, warned, name):
    annotation, make, told = UNSTORABLE[name]
    ran = []

    def give():
        ran.append(make())
        return ran[-1]

    if annotation is not None:
        give.__annotations__["return"] = annotation
    give = guarded(guard, kind, give)
    with capture() as calls:
        assert give() is ran[0]
    assert calls[0].source == "executed"
    (said,) = warned()
    assert told in said
    assert "result=" in said
    for _ in range(3):
        with capture() as calls, pytest.raises(ResultUnavailableError) as seen:
            give()
        assert calls[0].source == "refused"
        assert told in str(seen.value)
        assert "forget()" in str(seen.value)
    assert len(ran) == 1
    assert warned() == [said]
    (line,) = guard.ledger.lines()
    assert str(line.status) == "ok"


@pytest.mark.parametrize(
    "make",
    [lambda: "x" * 1000, lambda: [1] * 600, lambda: {"k": b"x" * 900}],
    ids=["text", "list", "bytes"],
)
def test_what_is_too_large(guard_of, kind, warned, make):
    guard, ran = guard_of(max_result_bytes=1000), []

    def give():
        ran.append(1)
        return make()

    give = guarded(guard, kind, give)
    assert give() == make()
    (said,) = warned()
    assert "max_result_bytes" in said
    with pytest.raises(ResultUnavailableError, match="max_result_bytes"):
        give()
    assert ran == [1]


def test_what_fits(guard_of, warned):
    guard, ran = guard_of(max_result_bytes=1000), []

    def give():
        ran.append(1)
        return "x" * 990

    give = guarded(guard, "sync", give)
    assert give() == give() == "x" * 990
    assert ran == [1]
    assert warned() == []


def test_what_cannot_be_kept_runs_again_after_its_time(guard_of, clock, kind):
    guard, ran = guard_of(ttl=60), []

    def give():
        ran.append(Client())
        return ran[-1]

    give = guarded(guard, kind, give)
    give()
    clock.advance(59)
    with pytest.raises(ResultUnavailableError):
        give()
    clock.advance(2)
    assert give() is ran[1]
    assert [str(line.cause) for line in guard.ledger.lines()] == ["first", "expired"]


def test_what_is_nested_too_deeply(guard, kind, warned):
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit() + 100):
        deep = [deep]
    give = guarded(guard, kind, lambda: deep)
    assert give() is deep
    assert "nested deeper" in warned()[0]
    with pytest.raises(ResultUnavailableError):
        give()


def test_what_contains_itself(guard, kind, warned):
    loop: list[Any] = []
    loop.append(loop)
    give = guarded(guard, kind, lambda: loop)
    assert give() is loop
    assert len(warned()) == 1
    with pytest.raises(ResultUnavailableError):
        give()


def test_a_waiter_of_what_cannot_be_kept(guard, crew, until):
    begun, go_on = [], []

    def give():
        begun.append(1)
        until(lambda: go_on)
        return Client()

    give = guarded(guard, "sync", give)
    leader = crew.start(give)
    until(lambda: begun)
    waiter = crew.start(give)
    until(lambda: found_a_claim(guard.engine.store) == 1)
    go_on.append(1)
    assert type(leader.result(LONG)) is Client
    with pytest.raises(ResultUnavailableError):
        waiter.result(LONG)
    assert begun == [1]


# --- what stands in the store --------------------------------------------------------------------

BOOBY_TRAP = "booby-trap-was-here"


class BoobyTrap:
    """A pickle that does something as it is read."""

    def __reduce__(self):
        return Path(BOOBY_TRAP).touch, ()


def tagged(tree):
    return json.dumps({"idemguard": 1, "value": tree}).encode() + b"\n"


HOSTILE = {
    "nothing": ("json", b""),
    "cut off": ("json", b'{"a": [1, 2'),
    "no end": ("json", b'{"a": 1}'),
    "zeros": ("json", b"\x00" * 50),
    "no text": ("json", b"\xff\xfe\n"),
    "deep": ("json", b"[" * 100_000 + b"\n"),
    "no json": ("json", b"NaN\n"),
    "not ours": ("tagged", b'{"a": 1}\n'),
    "a later format": ("tagged", b'{"idemguard": 99, "value": 1}\n'),
    "an unknown tag": ("tagged", tagged({"$nothing": 1})),
    "an unknown class": ("tagged", tagged({"$of": ["os.system", ["true"]]})),
    "a class by path": ("tagged", tagged({"$of": ["workers.values.Cat", {"name": "x"}]})),
    "a bad date": ("tagged", tagged({"$datetime": "yesterday"})),
    "a long number": ("json", b"9" * 10_000 + b"\n"),
    "pickle in json": ("json", pickle.dumps(BoobyTrap())),
    "pickle": ("pickle", pickle.dumps(BoobyTrap())),
    "pickle in tagged": ("tagged", pickle.dumps(BoobyTrap(), protocol=0) + b"\n"),
    "python": ("eval", f"__import__('pathlib').Path({BOOBY_TRAP!r}).touch()".encode()),
    "no codec": ("", b"1\n"),
    "a stream": ("stream", b'[["json", "null\\n"]]'),
}


def rewrite(store, codec, data):
    """Put something else where the result is."""
    changed = store._file.write(
        lambda c: c.execute("UPDATE result SET codec = ?, data = ?", (codec, data)).rowcount
    )
    assert changed == 1


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A guard on a file whose rows can be written to."""
    monkeypatch.chdir(tmp_path)
    guard = Guard(store=SqliteStore(tmp_path / "own.db"))
    yield guard
    guard.close()


def test_the_booby_trap_works(own):
    pickle.loads(pickle.dumps(BoobyTrap()))
    assert Path(BOOBY_TRAP).exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_foreign_and_hostile_bytes(own, kind, name):
    ran = []

    def give() -> dict[str, datetime] | values.Dog:
        ran.append(1)
        return {"a": values.MOMENT}

    give = guarded(own, kind, give)
    give()
    rewrite(own.engine.store, *HOSTILE[name])
    for _ in range(2):
        with capture() as calls, pytest.raises(StoreError) as seen:
            give()
        assert not isinstance(seen.value, ResultUnavailableError)
        assert "give [" in str(seen.value)  # which task
        assert "version=" in str(seen.value) or "forget" in str(seen.value)  # and what to do
        assert [call.source for call in calls] == ["refused"]
    assert ran == [1]
    assert not Path(BOOBY_TRAP).exists()
    assert [str(line.status) for line in own.ledger.lines()] == ["ok"]


@pytest.mark.parametrize("column", ["codec", "data", "source", "at", "until"])
@pytest.mark.parametrize("value", [b"\x80\x04N.", "text", -(2**62), None])
def test_a_row_that_somebody_else_wrote_to(own, column, value):
    ran = []

    def give():
        ran.append(1)
        return [1, 2]

    give = guarded(own, "sync", give)
    give()
    try:
        own.engine.store._file.write(
            lambda c: c.execute(f"UPDATE result SET {column} = ?", (value,))
        )
    except StoreError:
        return  # the file itself refuses it
    if column == "until" and isinstance(value, int):
        assert give() == [1, 2]  # so it is over
        assert ran == [1, 1]
        return
    try:
        assert give() == [1, 2]
    except StoreError as error:
        assert not isinstance(error, ResultUnavailableError)  # noqa: PT017
    assert ran == [1]


def test_forget_drops_what_is_damaged(own):
    @own.idempotent(task_type="give")
    def give():
        return [1]

    give()
    rewrite(own.engine.store, "json", b"{")
    with pytest.raises(StoreError):
        give()
    own.forget(own.task_of(give))
    assert give() == give() == [1]


def test_code_that_has_changed(own):
    def before() -> values.Cat:
        return values.Cat("a")

    def after() -> values.Pet:
        return values.Pet(name="b")

    own.idempotent(before, task_type="give")()
    give = own.idempotent(after, task_type="give")
    with pytest.raises(StoreError, match="version="):
        give()
    renewed = own.idempotent(after, task_type="give", version="2")
    assert values.same(renewed(), values.Pet(name="b"))
    assert values.same(renewed(), values.Pet(name="b"))


def test_nothing_is_pickled(own):
    def give() -> values.Basket:
        return values.Basket([values.Cat("a")])

    guarded(own, "sync", give)()
    rows = own.engine.store._file.read(lambda c: c.execute("SELECT data FROM result").fetchall())
    assert json.loads(rows[0][0])["idemguard"] == 1

"""Guarded generators and async generators: recorded while they are consumed, replayed to others."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import multiprocessing
import signal
import sys
import threading
import weakref
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, closing, suppress
from contextvars import ContextVar
from pathlib import Path

import pytest
from workers import jobs, values
from workers.lab import found_a_claim

from idemguard import Guard, Usage, bypass, capture, current, record_usage
from idemguard.claim import Begin, Complete, Release, Renew, Withdraw
from idemguard.codec import Codec
from idemguard.errors import (
    ConfigurationError,
    ReentrantCallError,
    ResultUnavailableError,
    StoreError,
    StoreUnavailableError,
    WaitTimeoutError,
)
from idemguard.guard import OutOfScope
from idemguard.stores.memory import MemoryStore
from idemguard.stores.sqlite import SqliteStore
from idemguard.streams import Recorder, StreamCodec

LONG = 60.0
SPAWN = multiprocessing.get_context("spawn")


class BoomError(Exception):
    """What a body raises."""


class Kind:
    """Guards generator functions, or the same as async ones; both are consumed by plain code."""

    def __init__(self, name) -> None:
        self.name = name
        self.is_async = name == "async"

    def guarded(self, guard, body, **options):
        """The body, guarded; made an async generator function where that is the kind."""
        made = body
        if self.is_async:

            @functools.wraps(body)
            async def made(*args, **kwargs):
                for chunk in body(*args, **kwargs):
                    await asyncio.sleep(0)
                    yield chunk

        return guard.idempotent(made, **{"task_type": "flow"} | options)

    def all(self, stream):
        """Every chunk."""
        if not self.is_async:
            return list(stream)
        return asyncio.run(values.collected(stream))

    def some(self, stream, count):
        """So many chunks, and then it is left."""
        return asyncio.run(self._asome(stream, count)) if self.is_async else _some(stream, count)

    @staticmethod
    async def _asome(stream, count):
        async with aclosing(stream):
            return [await anext(stream) for _ in range(count)]


def _some(stream, count):
    with closing(stream):
        return [next(stream) for _ in range(count)]


@pytest.fixture(params=["sync", "async"])
def kind(request):
    """Both kinds of stream."""
    return Kind(request.param)


class Body:
    """A generator function of five chunks, that counts how often it began and how far it came."""

    def __init__(self) -> None:
        self.began = 0
        self.chunks = 0
        self.closed = 0

    def __call__(self, key):
        self.began += 1
        try:
            for chunk in values.five():
                self.chunks += 1
                yield chunk
        finally:
            self.closed += 1


def counting():
    """A plain generator function, and what it counted."""
    body = Body()

    def flow(key):
        yield from body(key)

    return flow, body


def lines(guard):
    """Status and cause of every execution."""
    return [(str(line.status), str(line.cause)) for line in guard.ledger.lines()]


def nobody_holds(guard, flow, *args):
    """Whether no execution of the task lives."""
    task = guard.task_of(flow, *args)
    address = guard._desk.address(task)
    record, now = guard.engine.store.look(address)
    return not record.living(now)


def is_five(chunks):
    return values.same(chunks, values.five())


# --- whole ---------------------------------------------------------------------------------------


def test_all_chunks_come_again(guard, kind):
    body, count = counting()
    flow = kind.guarded(guard, body)
    with capture() as calls:
        first, second = kind.all(flow("a")), kind.all(flow("a"))
    assert is_five(first)
    assert is_five(second)
    assert first[3] is not second[3]
    assert count.began == 1
    assert [call.source for call in calls] == ["executed", "reused"]
    assert calls[0].execution_id == calls[1].execution_id
    assert calls[0].result == calls[1].result == values.five()
    assert kind.all(flow("b")) == first
    assert count.began == 2


def test_a_stream_looks_like_the_plain_one(guard):
    @guard.idempotent(task_type="a")
    def plain(key):
        """Say something."""
        yield key

    @guard.idempotent(task_type="b")
    async def loops(key):
        yield key

    assert inspect.isgeneratorfunction(plain)
    assert inspect.isasyncgenfunction(loops)
    assert plain.__doc__ == "Say something."
    assert inspect.isgenerator(plain(1))
    assert inspect.isasyncgen(loops(1))


def test_an_empty_stream_is_a_result(guard, kind):
    began = []

    def flow(key):
        began.append(key)
        yield from ()

    guarded = kind.guarded(guard, flow)
    assert kind.all(guarded(1)) == kind.all(guarded(1)) == []
    assert began == [1]
    assert guard.peek(guard.task_of(guarded, 1)).result == []


def test_what_a_generator_returns_comes_again(guard):
    began = []

    @guard.idempotent(task_type="flow")
    def flow(key):
        began.append(key)
        yield 1
        return (key, {"a": (1, 2.0)})

    def outer():
        found = yield from flow("k")
        yield found

    assert values.same([*outer()], [1, ("k", {"a": (1, 2.0)})])
    assert values.same([*outer()], [1, ("k", {"a": (1, 2.0)})])
    assert began == ["k"]


def test_models_come_again_as_the_annotation_says(guard):
    @guard.idempotent(task_type="flow")
    def flow() -> values.Generator[values.Cat | values.Dog, None, values.Pet]:
        yield values.Dog("a", 1)
        yield values.Cat("a", 1)
        return values.Pet(name="x")

    def whole():
        stream, chunks = flow(), []
        while True:
            try:
                chunks.append(next(stream))
            except StopIteration as end:
                return [*chunks, end.value]

    assert values.same(whole(), [values.Dog("a", 1), values.Cat("a", 1), values.Pet(name="x")])
    assert values.same(whole(), whole())


def test_result_names_the_type_of_the_chunks(guard, kind):
    def flow():
        yield values.Cat("a")

    flow = kind.guarded(guard, flow, result=values.Cat | values.Dog)
    assert values.same(kind.all(flow()), [values.Cat("a")])
    assert values.same(kind.all(flow()), [values.Cat("a")])


def test_creating_a_stream_asks_nothing(tapped, kind):
    guard, (body, count) = Guard(store=tapped), counting()
    flow = kind.guarded(guard, body)
    stream = flow("a")
    del stream
    gc.collect()
    assert tapped.seen == []
    assert count.began == 0
    assert kind.all(flow("a"))


def test_nothing_is_done_before_it_was_consumed(guard):
    body, count = counting()
    flow = guard.idempotent(body, task_type="flow")
    task = guard.task_of(flow, "a")
    stream = flow("a")
    for chunk in values.five():
        assert guard.peek(task) is None
        assert next(stream) == chunk
    assert guard.peek(task) is None  # the last chunk is not the end
    assert lines(guard) == [("open", "first")]
    assert next(stream, "over") == "over"
    assert guard.peek(task).result == values.five()
    assert lines(guard) == [("ok", "first")]
    assert count.began == 1


def test_the_body_goes_no_faster_than_its_consumer(guard, kind):
    body, count = counting()
    flow = kind.guarded(guard, body)
    assert len(kind.some(flow("a"), 2)) == 2
    assert count.chunks == 2


def test_a_chunk_is_kept_as_it_was_yielded(guard, kind):
    def flow():
        for n in range(3):
            yield {"n": n, "all": [(n,)]}

    def spoil(chunk):
        chunk["all"].append(object())
        chunk["n"] = None

    async def aspoiled(stream):
        async for chunk in stream:
            spoil(chunk)

    flow = kind.guarded(guard, flow)
    for _ in range(3):
        asyncio.run(aspoiled(flow())) if kind.is_async else [spoil(chunk) for chunk in flow()]
    assert values.same(kind.all(flow()), [{"n": n, "all": [(n,)]} for n in range(3)])
    assert len(lines(guard)) == 1


def test_one_object_that_is_yielded_again_and_again(guard, kind):
    def flow():
        chunk = {"n": 0}
        for n in range(3):
            chunk["n"] = n
            yield chunk

    flow = kind.guarded(guard, flow)
    kind.all(flow())
    assert kind.all(flow()) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_resolve_takes_the_chunks_as_a_list(guard, kind):
    body, count = counting()
    flow = kind.guarded(guard, body)
    task = guard.task_of(flow, "a")
    guard.resolve(task, values.five())
    assert is_five(kind.all(flow("a")))
    assert count.began == 0
    with pytest.raises(ConfigurationError, match="list of its chunks"):
        guard.resolve(guard.task_of(flow, "b"), "text")


# --- left, failed, cancelled ---------------------------------------------------------------------


def test_left_after_three(guard, kind):
    body, count = counting()
    flow = kind.guarded(guard, body)
    with capture() as calls:
        assert kind.some(flow("a"), 3) == values.five()[:3]
    assert [call.source for call in calls] == ["failed"]
    assert count.closed == 1
    assert nobody_holds(guard, flow, "a")
    assert lines(guard) == [("failed", "first")]
    assert guard.peek(guard.task_of(flow, "a")) is None
    with capture() as calls:
        assert is_five(kind.all(flow("a")))
    assert [(call.source, str(call.cause)) for call in calls] == [("executed", "retry")]
    assert is_five(kind.all(flow("a")))
    assert count.began == 2


def test_broken_out_of(guard):
    body, _ = counting()
    flow = guard.idempotent(body, task_type="flow")
    for _ in flow("a"):
        break
    assert lines(guard) == [("failed", "first")]
    assert nobody_holds(guard, flow, "a")


def test_a_stream_left_before_its_end_is_taken_over_at_once(guard, crew, until):
    body, _ = counting()
    flow = guard.idempotent(body, task_type="flow")
    stream = flow("a")
    next(stream)
    waiter = crew.start(lambda: list(flow("a")))
    until(lambda: found_a_claim(guard.engine.store) == 1)
    stream.close()
    assert is_five(waiter.result(LONG / 2))
    assert lines(guard) == [("failed", "first"), ("ok", "retry")]


def test_raising_in_the_middle(guard, kind):
    raised, turns = BoomError("third"), []

    def flow():
        turns.append(1)
        yield 1
        record_usage(input_tokens=5, output_tokens=2)
        yield 2
        if len(turns) == 1:
            raise raised

    flow = kind.guarded(guard, flow)
    with capture() as calls, pytest.raises(BoomError) as seen:
        kind.all(flow())
    assert seen.value is raised
    assert calls[0].source == "failed"
    assert calls[0].error is raised
    assert calls[0].usage.input_tokens == 5
    assert nobody_holds(guard, flow)
    assert kind.all(flow()) == kind.all(flow()) == [1, 2]
    assert lines(guard) == [("failed", "first"), ("ok", "retry")]


def test_handed_back(guard, kind):
    def flow():
        yield 1
        raise OutOfScope

    flow = kind.guarded(guard, flow)
    with capture() as calls, pytest.raises(OutOfScope):
        kind.all(flow())
    assert calls[0].source == "declined"
    assert lines(guard) == [("declined", "first")]
    assert nobody_holds(guard, flow)


def test_nothing_holds_on_to_what_a_failed_stream_had(guard):
    class Thing:
        pass

    gone = []

    @guard.idempotent(task_type="flow")
    def flow():
        thing = Thing()
        gone.append(weakref.ref(thing))
        yield 1
        raise BoomError

    gc.collect()
    gc.disable()
    try:
        with suppress(BoomError):
            list(flow())
        assert gone[0]() is None
    finally:
        gc.enable()


def test_send_is_refused(guard):
    body, count = counting()
    flow = guard.idempotent(body, task_type="flow")
    stream = flow("a")
    assert next(stream) == 0
    with pytest.raises(ConfigurationError, match="takes no values"):
        stream.send("hello")
    assert nobody_holds(guard, flow, "a")
    assert count.closed == 1
    assert is_five(list(flow("a")))
    replay = flow("a")
    assert replay.send(None) == 0
    with pytest.raises(ConfigurationError, match="takes no values"):
        replay.send("hello")
    assert count.began == 2


def test_throw_ends_it(guard):
    body, count = counting()
    flow = guard.idempotent(body, task_type="flow")
    stream, thrown = flow("a"), BoomError("thrown in")
    next(stream)
    with pytest.raises(BoomError) as seen:
        stream.throw(thrown)
    assert seen.value is thrown
    assert count.closed == 1
    assert lines(guard) == [("failed", "first")]
    assert is_five(list(flow("a")))


def test_asend_and_athrow_end_it(guard):
    async def flow(key):
        try:
            yield 1
            yield 2
        finally:
            closed.append(key)

    closed = []
    flow = guard.idempotent(flow, task_type="flow")

    async def main():
        stream = flow("a")
        assert await anext(stream) == 1
        with pytest.raises(ConfigurationError, match="takes no values"):
            await stream.asend("hello")
        stream, thrown = flow("a"), BoomError("thrown in")
        await anext(stream)
        with pytest.raises(BoomError) as seen:
            await stream.athrow(thrown)
        assert seen.value is thrown
        assert closed == ["a", "a"]
        assert nobody_holds(guard, flow, "a")
        assert await values.collected(flow("a")) == [1, 2]

    asyncio.run(main())
    assert lines(guard) == [("failed", "first"), ("failed", "retry"), ("ok", "retry")]


def test_cancelled_in_the_middle(guard):
    began, cleaned = [], []

    @guard.idempotent(task_type="flow")
    async def flow():
        began.append(1)
        try:
            yield 1
            if len(began) == 1:
                await asyncio.Event().wait()
            yield 2
        finally:
            await asyncio.sleep(0)
            cleaned.append(1)

    async def main():
        taken = asyncio.Event()

        async def consume():
            async for _ in flow():
                taken.set()

        task = asyncio.create_task(consume())
        await taken.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned == [1]
        assert nobody_holds(guard, flow)
        assert await values.collected(flow()) == [1, 2]

    asyncio.run(main())
    assert lines(guard) == [("failed", "first"), ("ok", "retry")]


def test_cancelled_while_it_waits(guard, until):
    @guard.idempotent(task_type="flow")
    async def flow():
        yield 1
        yield 2

    async def main():
        leader = flow()
        await anext(leader)
        waiter = asyncio.create_task(values.collected(flow()))
        await asyncio.to_thread(until, lambda: found_a_claim(guard.engine.store) == 1)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert [chunk async for chunk in leader] == [2]

    asyncio.run(main())
    assert lines(guard) == [("ok", "first")]


def test_aclose_from_another_task(guard):
    @guard.idempotent(task_type="flow")
    async def flow():
        try:
            yield current()
            yield 2
        finally:
            seen.append(current())

    seen = []

    async def main():
        stream = flow()
        execution = await asyncio.create_task(anext(stream))
        await asyncio.create_task(stream.aclose())
        assert seen == [execution]
        assert current() is None
        assert nobody_holds(guard, flow)

    asyncio.run(main())
    assert lines(guard) == [("failed", "first")]


@pytest.mark.parametrize("how", ["kept", "dropped"])
def test_an_async_stream_at_the_end_of_its_loop(guard, how):
    body, count = counting()
    flow = Kind("async").guarded(guard, body)
    kept = []

    async def main():
        stream = flow("a")
        await anext(stream)
        if how == "kept":
            kept.append(stream)

    asyncio.run(main())
    assert count.closed == 1
    assert lines(guard) == [("failed", "first")]
    assert nobody_holds(guard, flow, "a")


def test_the_end_of_its_loop_waits_until_its_body_has_come_to_its_end(guard):
    """The loop closes all streams that it knows at once, in any order: eight, so that one would show it."""
    seen, troubles = [], []

    @guard.idempotent(task_type="flow")
    async def flow(key):
        try:
            yield 1
            yield 2
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            record_usage(input_tokens=5, output_tokens=0)
            seen.append(current())

    kept = [flow(str(key)) for key in range(8)]

    async def main():
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: troubles.append(context)
        )
        for stream in kept:
            await anext(stream)

    asyncio.run(main())
    assert troubles == []
    assert [execution is not None for execution in seen] == [True] * 8
    assert lines(guard) == [("failed", "first")] * 8
    assert guard.ledger.totals()["input_tokens"] == 40


def test_the_end_of_its_loop_closes_what_an_iterator_around_it_began(guard):
    class Around:
        def __init__(self, inner):
            self.inner = inner

        def __aiter__(self):
            return self

        def __anext__(self):
            return self.inner.__anext__()

    closed = []

    async def flow(key):
        try:
            yield 1
            yield 2
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            closed.append(key)

    @guard.idempotent(task_type="flow")
    @functools.wraps(flow)
    def guarded(key):
        return Around(flow(key))

    stream = guarded("a")

    async def main():
        await anext(stream)

    asyncio.run(main())
    assert closed == ["a"]


# a loop that nobody wound up leaves the connections of its calls to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is:ResourceWarning")
def test_an_async_stream_that_outlives_its_loop(guard, until):
    body, _ = counting()
    flow = Kind("async").guarded(guard, body)
    kept = []

    async def main():
        kept.append(flow("a"))
        await anext(kept[0])

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()  # nobody shut its async generators down
    kept.clear()
    gc.collect()
    until(lambda: lines(guard) == [("failed", "first")])
    assert nobody_holds(guard, flow, "a")
    del loop
    guard.close()
    gc.collect()


# a loop that nobody wound up leaves the connections of its calls to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is:ResourceWarning")
def test_an_async_stream_that_is_dropped_while_it_awaits(guard, until):
    reached = []

    @guard.idempotent(task_type="flow")
    async def flow():
        yield 1
        reached[0].set()
        await asyncio.Event().wait()
        yield 2

    async def until_it_awaits():
        reached.append(asyncio.Event())
        tasks.append(asyncio.create_task(coroutine))
        await reached[0].wait()

    tasks, coroutine = [], values.collected(flow())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(until_it_awaits())
    tasks.pop()._log_destroy_pending = False
    loop.close()
    coroutine.close()
    until(lambda: lines(guard) == [("failed", "first")])
    assert nobody_holds(guard, flow)
    del loop
    guard.close()
    gc.collect()


# --- two at once ---------------------------------------------------------------------------------


def test_two_threads_at_once(guard, crew, until):
    body, count = counting()
    flow = guard.idempotent(body, task_type="flow")
    first, at_two, go_on = [], threading.Event(), threading.Event()

    def slowly():
        for chunk in flow("a"):
            first.append(chunk)
            if len(first) == 2:
                at_two.set()
                assert go_on.wait(LONG)
        return first

    leader = crew.start(slowly)
    assert at_two.wait(LONG)
    waiter = crew.start(lambda: [(chunk, len(first)) for chunk in flow("a")])
    until(lambda: found_a_claim(guard.engine.store) == 1)
    assert not waiter.done()
    go_on.set()
    assert is_five(leader.result(LONG))
    found = waiter.result(LONG)
    assert is_five([chunk for chunk, _ in found])
    assert {ahead for _, ahead in found} == {5}  # nothing before the first was through
    assert count.began == 1


def test_two_tasks_at_once(guard):
    body, count = counting()
    flow = Kind("async").guarded(guard, body)

    async def main():
        return await asyncio.gather(*(values.collected(flow("a")) for _ in range(5)))

    found = asyncio.run(main())
    assert all(map(is_five, found))
    assert count.began == 1


def test_zipped_with_itself(guard):
    body, count = counting()
    flow = guard.idempotent(body, task_type="flow")
    with pytest.raises(ReentrantCallError, match="Consume the first to its end") as seen:
        list(zip(flow("a"), flow("a"), strict=True))
    assert seen.value.fingerprint == guard.task_of(flow, "a").fingerprint
    del seen
    gc.collect()
    assert nobody_holds(guard, flow, "a")
    assert count.closed == count.began == 1
    assert is_five(list(flow("a")))
    assert is_five([one for one, _ in zip(flow("a"), flow("a"), strict=True)])


def test_zipped_with_itself_in_one_task(guard):
    body, count = counting()
    flow = Kind("async").guarded(guard, body)

    async def main():
        async with aclosing(flow("a")) as one, aclosing(flow("a")) as other:
            await anext(one)
            with pytest.raises(ReentrantCallError, match="this very thread or task"):
                await anext(other)
        assert nobody_holds(guard, flow, "a")
        return await values.collected(flow("a"))

    assert is_five(asyncio.run(main()))
    assert count.began == 2


def test_two_tasks_that_consume_a_plain_stream_on_one_loop(guard):
    body, _ = counting()
    flow = guard.idempotent(body, task_type="flow")

    async def first():
        with closing(flow("a")) as stream:
            next(stream)
            begun.set()
            await over.wait()
            return [0, *stream]

    async def second():  # it would block the loop that the first goes on with
        await begun.wait()
        try:
            with pytest.raises(ReentrantCallError):
                list(flow("a"))
        finally:
            over.set()

    async def main():
        nonlocal begun, over
        begun, over = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(first(), second())

    begun = over = None
    assert is_five(asyncio.run(main())[0])


def test_a_thread_that_was_another_one_before_is_not_the_consumer(guard, crew, until):
    body, count = counting()
    flow = guard.idempotent(body, task_type="flow")
    stream = flow("a")
    crew.start(lambda: next(stream)).result(LONG)
    crew.join()  # the next thread is given the same ident
    waiter = crew.start(lambda: list(flow("a")))
    until(lambda: found_a_claim(guard.engine.store) == 1)
    assert len(list(stream)) == 4
    assert is_five(waiter.result(LONG))
    assert count.began == 1


def test_its_own_execution_cannot_consume_it(guard):
    @guard.idempotent(task_type="flow")
    def flow(key):
        yield 1
        yield from flow(key)

    @guard.idempotent(task_type="flow")
    async def aflow(key):
        yield 1
        async for chunk in aflow(key):
            yield chunk

    for stream in (lambda: list(flow("a")), lambda: asyncio.run(values.collected(aflow("b")))):
        with pytest.raises(ReentrantCallError, match="would wait for itself"):
            stream()
    assert lines(guard) == [("failed", "first")] * 2


def test_patience_beside_a_slow_stream(guard, crew):
    body, count = counting()
    flow = guard.idempotent(body, task_type="flow", wait_timeout=0.05)
    with capture() as calls:
        slow = flow("a")
        next(slow)
        with capture() as others:
            beside = threading.Thread(target=lambda: results.append(list(flow("a"))))
            results = []
            beside.start()
            beside.join(LONG)
        assert is_five(results[0])
        assert is_five([0, *slow])  # what was paid for reaches its caller
    assert others == []  # a thread has a context of its own
    assert calls[0].source == "executed"
    assert count.began == 2
    assert lines(guard) == [("ok", "first"), ("ok", "fallback")]
    assert is_five(list(flow("a")))
    assert count.began == 2


def test_patience_that_raises(guard, crew):
    body, count = counting()
    flow = guard.idempotent(body, task_type="flow", wait_timeout=0.01, on_timeout="raise")
    with closing(flow("a")) as slow:
        next(slow)
        with pytest.raises(WaitTimeoutError):
            crew.start(lambda: list(flow("a"))).result(LONG)
    assert count.began == 1


def test_a_slow_consumer_keeps_the_claim(tapped, until):
    body, count = counting()
    guard = Guard(store=tapped, lease=0.15)
    flow = guard.idempotent(body, task_type="flow")
    with capture() as calls:
        stream = flow("a")
        next(stream)
        until(lambda: sum(isinstance(command, Renew) for command in tapped.seen) > 4)
        assert is_five([0, *stream])
    assert not calls[0].lost
    assert lines(guard) == [("ok", "first")]
    seen = len(tapped.seen)
    assert is_five(list(flow("a")))
    assert [type(c) for c in tapped.seen[seen:]] == [Begin]
    assert count.began == 1


# --- closed by the garbage collector -------------------------------------------------------------


class Collector:
    """A store's clock, asked for in the midst of its steps, that collects garbage once."""

    def __init__(self) -> None:
        self.armed = False
        self.collected = 0

    def __call__(self):
        if self.armed:
            self.armed = False
            self.collected += 1
            gc.collect()
        return 1_800_000_000_000


@pytest.fixture(params=["memory", "sqlite"])
def collecting(request, tmp_path):
    """A guard, and the collector inside of its store."""
    clock = Collector()
    path = tmp_path / "gc.db"
    store = MemoryStore(clock) if request.param == "memory" else SqliteStore(path, clock=clock)
    guard = Guard(store=store)
    gc.collect()
    gc.disable()
    yield guard, clock
    gc.enable()
    guard.close()


def lose(flow, *args):
    """Begin a stream, and have only the garbage collector find it."""
    stream = flow(*args)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)


@pytest.mark.timeout(120, method="thread")  # a deadlock ends the run, with its stacks
def test_collected_anywhere(tapped):
    guard = Guard(store=tapped)
    body, count = counting()
    flow = guard.idempotent(body, task_type="flow")
    with capture() as calls:
        lose(flow, "a")
        gc.collect()
    assert count.closed == 1
    assert [call.source for call in calls] == ["failed"]
    assert nobody_holds(guard, flow, "a")  # at once: no lock was held
    assert [type(command) for command in tapped.seen] == [Begin, Release]


@pytest.mark.timeout(120, method="thread")
def test_an_async_stream_is_given_back_after_its_cleanup(tapped):
    guard, told = Guard(store=tapped), []

    @guard.idempotent(task_type="flow")
    async def flow():
        try:
            yield 1
        finally:
            told.append([type(command) for command in tapped.seen])

    async def main():
        stream = flow()
        await anext(stream)
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()

    asyncio.run(main())
    assert told == [[Begin]]
    assert [type(command) for command in tapped.seen] == [Begin, Release]


@pytest.mark.timeout(120, method="thread")  # a deadlock ends the run, with its stacks
@pytest.mark.parametrize("key", ["a", "b"])
def test_collected_in_the_midst_of_a_step(collecting, until, key):
    guard, clock = collecting
    body, count = counting()
    flow = guard.idempotent(body, task_type="flow")
    with capture() as calls:
        lose(flow, "a")
        clock.armed = True
        assert is_five(list(flow(key)))  # its Begin is under way when the other one is closed
        until(lambda: len(calls) == 2)
    assert clock.collected == 1
    assert count.began == count.closed == 2
    assert sorted(call.source for call in calls) == ["executed", "failed"]
    assert nobody_holds(guard, flow, "a")
    assert sorted(status for status, _ in lines(guard)) == ["failed", "ok"]
    totals = guard.ledger.totals()
    assert (totals["executions"], totals["executed"], totals["failed"]) == (2, 1, 1)
    assert is_five(list(flow(key)))
    assert count.began == 2


@pytest.mark.timeout(120, method="thread")  # a deadlock ends the run, with its stacks
def test_collected_in_the_midst_of_an_end(collecting, until):
    guard, clock = collecting
    body, _ = counting()
    flow = guard.idempotent(body, task_type="flow")
    lose(flow, "a")
    stream = flow("b")
    assert is_five([next(stream) for _ in range(5)])
    clock.armed = True
    assert next(stream, "over") == "over"
    assert clock.collected == 1
    until(lambda: ("failed", "first") in lines(guard))
    assert sorted(lines(guard)) == [("failed", "first"), ("ok", "first")]
    assert guard.peek(guard.task_of(flow, "b")).result == values.five()


@pytest.mark.timeout(120, method="thread")  # a deadlock ends the run, with its stacks
def test_collected_with_others_inside_of_it(collecting, until):
    guard, clock = collecting
    body, count = counting()
    inner = guard.idempotent(body, task_type="inner")

    @guard.idempotent(task_type="outer")
    def outer(key):
        yield from inner(key)

    lose(outer, "a")
    clock.armed = True
    guard.ledger.totals()
    if not clock.collected:
        guard.peek(guard.task_of(outer, "a"))
    assert clock.collected == 1
    until(lambda: lines(guard) == [("failed", "first")] * 2)
    assert count.closed == 1


@pytest.mark.timeout(120, method="thread")  # a deadlock ends the run, with its stacks
def test_left_inside_a_body_is_told_at_once(guard):
    body, _ = counting()
    flow = guard.idempotent(body, task_type="flow")

    @guard.idempotent(task_type="around")
    def around():
        for _ in flow("a"):
            break
        return nobody_holds(guard, flow, "a")

    assert around() is True


# --- Ctrl-C --------------------------------------------------------------------------------------


class Interrupt(jobs.Interrupt):
    """As that one, but for the resumption of generators: what a profiler raises there kills them."""

    def __call__(self, frame, event, _):
        if event != "call" or not frame.f_code.co_flags & inspect.CO_GENERATOR:
            super().__call__(frame, event, _)


# a client whose connecting is interrupted leaves its socket to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("then", ["consumed", "left"])
def test_an_interrupt_wherever_there_can_be_one(store, then):
    guard, ran = Guard(store=store), set()

    @guard.idempotent(task_type="flow")
    def flow(key):
        ran.add(key)
        yield 1
        yield 2

    def consume(key):
        stream = flow(key)
        try:
            next(stream)
            if then == "consumed":
                list(stream)
        finally:
            stream.close()

    consume("warm")
    keys, points = ["warm"], 0
    for number in range(1, 2000, 1 if isinstance(store, MemoryStore) else 3):
        interrupt = Interrupt(number)
        sys.setprofile(interrupt)
        try:
            consume(f"k{number}")
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if interrupt.at is None:
            break
        points += 1
        keys.append(f"k{number}")
        assert nobody_holds(guard, flow, keys[-1]), interrupt.at
    assert points > (150 if isinstance(store, MemoryStore) else 50)
    told = {line.fingerprint for line in guard.ledger.lines()}
    for key in keys:  # the ledger knows of every body that ran
        if key in ran:
            assert guard.task_of(flow, key).fingerprint in told
    assert {status for status, _ in lines(guard)} <= {"ok", "failed"}
    assert guard.ledger.totals()["duplicates"] == 0
    gc.collect()


def test_an_interrupt_in_the_body_of_an_async_stream(guard):
    turns = []

    @guard.idempotent(task_type="flow")
    async def flow():
        turns.append(1)
        yield 1
        if len(turns) == 1:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(LONG)
        yield 2

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(values.collected(flow()))
    assert nobody_holds(guard, flow)
    assert asyncio.run(values.collected(flow())) == [1, 2]
    assert lines(guard) == [("failed", "first"), ("ok", "retry")]


# --- what cannot be kept -------------------------------------------------------------------------


def test_a_chunk_that_cannot_be_stored(guard, kind, warned):
    thing, began = object(), []

    def flow():
        began.append(1)
        yield 1
        yield thing
        yield 3

    flow = kind.guarded(guard, flow)
    assert kind.all(flow()) == [1, thing, 3]
    (said,) = warned()
    assert "object" in said
    assert "result=" in said
    for _ in range(2):
        with capture() as calls, pytest.raises(ResultUnavailableError, match="could not be kept"):
            kind.all(flow())
        assert calls[0].source == "refused"
    assert began == [1]
    assert warned() == [said]
    guard.forget(guard.task_of(flow))
    assert kind.all(flow()) == [1, thing, 3]


def test_an_end_that_cannot_be_stored(guard, warned):
    @guard.idempotent(task_type="flow")
    def flow():
        yield 1
        return object()

    assert list(flow()) == [1]
    assert "object" in warned()[0]
    with pytest.raises(ResultUnavailableError):
        list(flow())


@pytest.mark.parametrize(("size", "kept"), [(60, True), (400, False)])
def test_a_stream_larger_than_what_is_kept(guard_of, kind, warned, size, kept):
    guard, began = guard_of(max_result_bytes=500), []

    def flow():
        began.append(1)
        for _ in range(5):
            yield "x" * size

    flow = kind.guarded(guard, flow)
    assert kind.all(flow()) == ["x" * size] * 5
    if kept:
        assert kind.all(flow()) == ["x" * size] * 5
        assert warned() == []
    else:
        assert "max_result_bytes" in warned()[0]
        with pytest.raises(ResultUnavailableError, match="max_result_bytes"):
            kind.all(flow())
    assert began == [1]


def test_no_more_than_is_kept_is_remembered():
    recorder = Recorder(StreamCodec(Codec(), Codec()), 100)
    for _ in range(1000):
        recorder.add("x" * 10)
    assert len(recorder.track(None)) == 1


# --- the context ---------------------------------------------------------------------------------


def test_the_execution_is_current_in_its_steps_alone(guard, kind):
    inside, between = [], []

    def flow():
        for _ in range(3):
            inside.append(current())
            yield 1
        inside.append(current())

    flow = kind.guarded(guard, flow)

    @guard.idempotent(task_type="around")
    def around():
        mine = current()
        between.extend(current() for _ in flow())
        between.append(current())
        return mine.execution_id

    @guard.idempotent(task_type="around")
    async def aaround():
        mine = current()
        between.extend([current() async for _ in flow()])
        between.append(current())
        return mine.execution_id

    mine = asyncio.run(aaround()) if kind.is_async else around()
    assert {execution.execution_id for execution in between} == {mine}
    assert len({id(execution) for execution in inside}) == 1
    assert inside[0].task_type == "flow"
    assert inside[0].parent is between[0]
    assert current() is None
    parents = {line.task_type: line.parent for line in guard.ledger.lines()}
    assert parents == {"around": None, "flow": mine}


def test_steps_in_threads_of_their_own(guard, crew):
    seen = []

    @guard.idempotent(task_type="flow")
    def flow():
        for n in range(4):
            seen.append(current().execution_id)
            record_usage(input_tokens=1, output_tokens=1)
            yield n

    stream = flow()
    found = [crew.start(lambda: (next(stream), current())).result(LONG) for _ in range(4)]
    assert found == [(n, None) for n in range(4)]
    with pytest.raises(StopIteration):
        crew.start(lambda: next(stream)).result(LONG)
    assert len(set(seen)) == 1
    (line,) = guard.ledger.lines()
    assert (str(line.status), line.usage.input_tokens) == ("ok", 4)
    assert list(flow()) == [0, 1, 2, 3]


def test_steps_in_tasks_of_their_own(guard):
    seen = []

    @guard.idempotent(task_type="flow")
    async def flow():
        for n in range(4):
            await asyncio.sleep(0)
            seen.append(current().execution_id)
            yield n

    async def step(stream):
        return await anext(stream, "over"), current()

    async def main():
        stream = flow()
        found = [await asyncio.create_task(step(stream)) for _ in range(5)]
        assert found == [(n, None) for n in (0, 1, 2, 3, "over")]
        return await values.collected(flow())

    assert asyncio.run(main()) == [0, 1, 2, 3]
    assert len(set(seen)) == 1


def test_variables_of_the_consumer_stay_its_own(guard, kind):
    mine = ContextVar("mine", default=0)

    def flow():
        for _ in range(3):
            yield mine.get()

    flow = kind.guarded(guard, flow)
    if kind.is_async:

        async def consume():
            found = []
            async for chunk in flow():
                found.append((chunk, mine.get()))
                mine.set(mine.get() + 1)
            return found

        found = asyncio.run(consume())
    else:
        found = []
        for chunk in flow():
            found.append((chunk, mine.get()))
            mine.set(mine.get() + 1)
    assert found == [(0, 0), (1, 1), (2, 2)]


def test_usage_is_booked_to_the_stream(guard, kind):
    def flow():
        record_usage(input_tokens=10, output_tokens=1)
        yield 1
        record_usage(input_tokens=20, output_tokens=2)
        yield 2

    flow = kind.guarded(guard, flow)
    with capture() as calls:
        kind.all(flow())
        record_usage(input_tokens=1000, output_tokens=1000)  # outside of it: to nobody
        kind.all(flow())
    assert [call.usage.input_tokens for call in calls] == [30, 30]
    assert guard.ledger.totals()["input_tokens"] == 30


class Event:
    """What an SDK's stream gives; nothing that can be stored."""

    def __init__(self, tokens) -> None:
        self.tokens = tokens


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_usage_is_read_off_the_chunks(guard, kind, mode):
    def read(chunks):
        return Usage(input_tokens=chunks[-1].tokens, output_tokens=len(chunks))

    def flow():
        yield from (Event(1), Event(2), Event(7))

    flow = kind.guarded(guard, flow, usage=read, mode=mode)
    with capture() as calls:
        kind.all(flow())
        kind.some(flow(), 2) if mode == "observe" else None
    assert (calls[0].usage.input_tokens, calls[0].usage.output_tokens) == (7, 3)


def test_guarded_calls_inside_a_stream(guard, kind):
    ran = []

    @guard.idempotent(task_type="part")
    def part(n):
        ran.append((n, current().parent.task_type))
        record_usage(input_tokens=1, output_tokens=1)
        return n * 10

    pieces = guard.idempotent(lambda n: (yield from range(n)), task_type="pieces")

    def flow():
        for n in (1, 2, 1):
            yield part(n)
        yield from pieces(2)

    flow = kind.guarded(guard, flow)
    assert kind.all(flow()) == kind.all(flow()) == [10, 20, 10, 0, 1]
    assert ran == [(1, "flow"), (2, "flow")]
    by_type = {line.task_type: line for line in guard.ledger.lines()}
    assert by_type["part"].parent == by_type["pieces"].parent
    assert by_type["part"].parent == by_type["flow"].claim.id
    assert guard.ledger.totals()["input_tokens"] == 2


# --- modes, and a store that is down -------------------------------------------------------------


def test_observed_streams_all_execute(guard, kind):
    body, count = counting()
    flow = kind.guarded(guard, body, mode="observe")
    assert is_five(kind.all(flow("a")))
    assert is_five(kind.all(flow("a")))
    assert len(kind.some(flow("a"), 2)) == 2
    assert count.began == 3
    assert lines(guard) == [("ok", "first"), ("ok", "observed"), ("failed", "observed")]


def test_an_observed_stream_holds_nobody_up(guard):
    body, _ = counting()
    flow = guard.idempotent(body, task_type="flow", mode="observe")
    pairs = list(zip(flow("a"), flow("a"), strict=True))
    assert len(pairs) == 5
    assert [cause for _, cause in lines(guard)] == ["first", "observed"]


def test_a_bypassing_stream_leaves_the_result_alone(guard, kind):
    turns = []

    def flow():
        turns.append(1)
        yield len(turns)

    flow = kind.guarded(guard, flow)
    assert kind.all(flow()) == [1]
    with bypass():
        stream = flow()
    assert kind.all(stream) == [2]
    assert kind.all(flow()) == [1]
    assert lines(guard) == [("ok", "first"), ("ok", "forced")]


def test_off(tapped, kind):
    guard, (body, count) = Guard(store=tapped), counting()
    flow = kind.guarded(guard, body, mode="off")
    assert is_five(kind.all(flow("a")))
    assert is_five(kind.all(flow("a")))
    assert count.began == 2
    assert tapped.seen == []


def test_the_store_is_down_before(tapped, kind):
    guard, (body, count) = Guard(store=tapped), counting()
    flow = kind.guarded(guard, body)
    tapped.down()
    with capture() as calls, pytest.raises(StoreUnavailableError):
        kind.all(flow("a"))
    assert [call.source for call in calls] == ["refused"]
    assert count.began == 0
    run = kind.guarded(guard, body, on_store_error="run")
    with capture() as calls:
        assert is_five(kind.all(run("a")))
    assert [call.source for call in calls] == ["unguarded"]
    tapped.up()
    assert guard.engine.backlog.settle()
    assert ("ok", "unguarded") in lines(guard)


def test_the_store_is_down_during(tapped, kind, warned):
    guard, (_, count) = Guard(store=tapped), counting()

    def flow(key):
        yield from count(key)
        tapped.down()

    flow = kind.guarded(guard, flow)
    with capture() as calls:
        assert is_five(kind.all(flow("a")))  # what was paid for reaches its caller
    assert calls[0].source == "executed"
    assert any("told to the store later" in said for said in warned())
    tapped.up()
    assert guard.engine.backlog.settle()
    assert is_five(kind.all(flow("a")))
    assert count.began == 1


def test_the_store_is_down_when_it_is_left(tapped, kind):
    guard, (body, count) = Guard(store=tapped), counting()
    flow = kind.guarded(guard, body)
    tapped.down_for(Release, Withdraw)
    assert len(kind.some(flow("a"), 2)) == 2
    tapped.up()
    assert guard.engine.backlog.settle()
    assert lines(guard) == [("failed", "first")]
    assert is_five(kind.all(flow("a")))
    assert count.began == 2


def test_the_store_is_down_after(tapped, kind):
    guard, (body, count) = Guard(store=tapped), counting()
    flow = kind.guarded(guard, body)
    kind.all(flow("a"))
    tapped.down()
    with pytest.raises(StoreUnavailableError):
        kind.all(flow("a"))
    assert count.began == 1
    guard.engine.backlog._owed.clear()


def test_a_stream_asks_twice(tapped, kind):
    guard, (body, _) = Guard(store=tapped), counting()
    flow = kind.guarded(guard, body)
    kind.all(flow("a"))
    assert [type(command) for command in tapped.seen] == [Begin, Complete]
    kind.all(flow("a"))
    assert [type(command) for command in tapped.seen] == [Begin, Complete, Begin]


def test_it_says_what_it_came_to(guard, kind):
    body, _ = counting()
    flow = kind.guarded(guard, body)
    with capture() as calls:
        stream = flow("a")
        assert calls == []
        chunks = kind.all(stream)
        kind.some(flow("a"), 1)
    executed, reused = calls
    assert (executed.source, reused.source) == ("executed", "reused")
    assert list(executed.result) == chunks
    assert executed.task_type == "flow"
    assert executed.fingerprint == guard.task_of(flow, "a").fingerprint
    assert executed.error is None


# --- other processes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def others():
    """Two other processes."""
    with ProcessPoolExecutor(2, SPAWN) as pool:
        yield pool


@pytest.fixture
def shared(tmp_path):
    """The URL of a store for several processes, and a log."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    yield url, str(tmp_path / "log")
    jobs.close()
    values.streams.cache_clear()


@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_waiter_in_another_process(shared, others, until, name):
    url, log = shared
    guard = jobs.guard_of(url)
    flow = values.streams(url)[name]

    async def aconsume():
        async with aclosing(flow("a", log)) as stream:
            first = await anext(stream)
            waiter = others.submit(values.consume, url, name, "a", log)
            await asyncio.to_thread(until, lambda: found_a_claim(guard.engine.store) == 1)
            return [first, *[chunk async for chunk in stream]], waiter

    if name == "async":
        mine, waiter = asyncio.run(aconsume())
    else:
        stream = flow("a", log)
        mine = [next(stream)]
        waiter = others.submit(values.consume, url, name, "a", log)
        until(lambda: found_a_claim(guard.engine.store) == 1)
        mine += stream
    assert is_five(mine)
    theirs, source = waiter.result(LONG)
    assert is_five(theirs)
    assert source == "reused"
    late, source = others.submit(values.consume, url, name, "a", log).result(LONG)
    assert is_five(late)
    assert source == "reused"
    assert is_five(values.consume(url, name, "a", log)[0])
    assert len(Path(log).read_text().splitlines()) == 1


def test_models_in_another_process(shared, others):
    url, log = shared
    expected = [values.Dog("a", 1), values.Cat("a", 1), values.Pet(name="a")]
    assert values.same(values.consume(url, "typed", "a", log), (expected, "executed"))
    theirs = others.submit(values.consume, url, "typed", "a", log).result(LONG)
    assert values.same(theirs, (expected, "reused"))


def test_killed_half_way(shared, until):
    url, log = shared
    leader = SPAWN.Process(target=values.linger, args=(url, "a", log, 0.5))
    leader.start()
    try:
        until(lambda: Path(log).exists() and "half way" in Path(log).read_text())
    finally:
        leader.kill()
        leader.join(LONG)
        leader.close()
    with capture() as calls:
        chunks, source = values.consume(url, "sync", "a", log)
    assert is_five(chunks)
    assert source == "executed"
    assert str(calls[0].cause) == "lost"
    assert lines(jobs.guard_of(url)) == [("lost", "first"), ("ok", "lost")]


@pytest.mark.parametrize("name", ["sync", "async"])
def test_the_process_ends_half_way(shared, name):
    url, log = shared
    process = SPAWN.Process(target=values.end_half_way, args=(url, name, "a", log))
    process.start()
    process.join(LONG)
    assert process.exitcode == 0
    process.close()
    assert lines(jobs.guard_of(url)) == [("failed", "first")]
    with capture() as calls:
        assert is_five(values.consume(url, name, "a", log)[0])
    assert str(calls[0].cause) == "retry"


def test_half_way_through_a_fork(shared, others):
    url, log = shared
    told = others.submit(values.forked, url, "a", log).result(LONG)
    assert "call it anew" in told["said"]
    assert told["dropped"] == "dropped"
    assert told["held"] == ["open"]  # the child's copies gave nothing back
    assert is_five(told["chunks"])
    assert values.consume(url, "sync", "a", log)[1] == "reused"


# --- what only gives a stream --------------------------------------------------------------------


class SdkStream:
    """What an SDK's call gives."""

    def __init__(self) -> None:
        self.closed = 0

    def __iter__(self):
        return self

    def __next__(self):
        return 1

    def close(self):
        self.closed += 1


class AsyncSdkStream:
    """What an SDK's awaited call gives."""

    def __init__(self, *, fails=False) -> None:
        self.closed = 0
        self.fails = fails

    def __aiter__(self):
        return self

    async def __anext__(self):
        return 1

    async def close(self):
        await asyncio.sleep(0)
        self.closed += 1
        if self.fails:
            raise BoomError


@pytest.mark.parametrize(
    "make",
    [SdkStream, AsyncSdkStream, lambda: iter([1]), lambda: map(int, ())],
    ids=["sdk", "async sdk", "iterator", "map"],
)
def test_a_function_that_returns_a_stream(guard, make):
    made = []

    @guard.idempotent(task_type="give")
    def give():
        made.append(make())
        return made[-1]

    with capture() as calls, pytest.raises(ConfigurationError, match="Make it a generator"):
        give()
    assert calls[0].source == "failed"
    assert nobody_holds(guard, give)
    if make is SdkStream:
        assert made[0].closed == 1
    with pytest.raises(ConfigurationError, match=f"object of {type(made[0]).__name__}"):
        give()
    assert lines(guard) == [("failed", "first"), ("failed", "retry")]


async def _chunks():
    yield 1


@pytest.mark.parametrize(
    "make",
    [
        AsyncSdkStream,
        lambda: AsyncSdkStream(fails=True),
        SdkStream,
        _chunks,
        lambda: asyncio.sleep(0),
    ],
    ids=["async sdk", "failing", "sdk", "async generator", "coroutine"],
)
def test_a_coroutine_that_returns_a_stream(guard, make):
    made = []

    @guard.idempotent(task_type="give")
    async def give():
        made.append(make())
        return made[-1]

    with capture() as calls, pytest.raises(ConfigurationError, match="Make it a generator"):
        asyncio.run(give())
    assert calls[0].source == "failed"
    assert nobody_holds(guard, give)
    assert getattr(made[0], "closed", 1) == 1


def test_a_function_that_returns_a_coroutine_of_its_own(guard):
    async def inner():
        return 1

    give = guard.idempotent(lambda: inner(), task_type="give")  # noqa: PLW0108
    with pytest.raises(ConfigurationError, match="await it inside"):
        give()
    assert nobody_holds(guard, give)


def test_an_observed_function_may_return_a_stream(guard):
    give = guard.idempotent(lambda: iter([1, 2]), task_type="give", mode="observe")
    assert list(give()) == [1, 2]
    assert list(give()) == [1, 2]


# --- what stands in the store --------------------------------------------------------------------

DAMAGED = [
    b"", b"{}", b"[]", b"5", b"null", b"[" * 100_000, b'[["json", 1]]', b'[["json"]]', b"\xff\xfe",
    b'[["json", "1\\n"], ["pickle", "cos\\nsystem\\n"], ["json", "null\\n"]]',
    b'[["json", "1"], ["json", "null\\n"]]',
    b'[[["json"], "1\\n"], ["json", "null\\n"]]',
]  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_stream(tmp_path, kind, data):
    store = SqliteStore(tmp_path / "damaged.db")
    guard, (body, count) = Guard(store=store), counting()
    flow = kind.guarded(guard, body)
    kind.all(flow("a"))
    store._file.write(lambda c: c.execute("UPDATE result SET data = ?", (data,)))
    with pytest.raises(StoreError):
        kind.all(flow("a"))
    assert count.began == 1
    guard.close()


def test_the_result_of_a_function_is_no_stream(guard, kind):
    @guard.idempotent(task_type="flow")
    def before(key):
        return [1, 2]

    before("a")
    body, count = counting()
    flow = kind.guarded(guard, body)
    with pytest.raises(StoreError, match="is no stream"):
        kind.all(flow("a"))
    assert count.began == 0

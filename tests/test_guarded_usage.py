"""Guarded calls book what they spend: unasked, once, whatever becomes of them, nested or not."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from contextvars import copy_context
from copy import deepcopy
from decimal import Decimal
from enum import Enum
from uuid import uuid4

import pytest

from idemguard import Guard, Usage, capture, current, errors, record_usage, task_fingerprint
from idemguard.stores.memory import MemoryStore

SOON = 60  # seconds within which what happens at once has happened
PRICES = {"gpt": {"input": "2", "output": "8"}, "claude": {"input": "3", "output": "15"}}


def chat(number=1, prompt=1000, completion=100) -> dict:
    """A response of OpenAI's chat completions."""
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "model": "gpt",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }


def message(number=1, prompt=1000, completion=100) -> dict:
    """A response of Anthropic's messages."""
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [],
        "usage": {"input_tokens": prompt, "output_tokens": completion},
    }


def converse(prompt=1000, completion=100) -> dict:
    """A response of Bedrock's Converse; it has no id."""
    return {
        "output": {"message": {"role": "assistant", "content": []}},
        "stopReason": "end_turn",
        "usage": {"inputTokens": prompt, "outputTokens": completion},
    }


def generated(prompt=1000, completion=100) -> dict:
    """A response of Google's, as of old: it has no id."""
    return {
        "candidates": [{"content": {"parts": []}, "finishReason": "STOP"}],
        "modelVersion": "gemini",
        "usageMetadata": {"promptTokenCount": prompt, "candidatesTokenCount": completion},
    }


def events(number=1, prompt=1000, completion=100) -> list[dict]:
    """The events of a stream of Anthropic's."""
    start = message(number, prompt, 1)
    return [
        {"type": "message_start", "message": start},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "o"}},
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": completion // 2}},
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": completion}},
        {"type": "message_stop"},
    ]


def chunks(number=1, prompt=1000, completion=100) -> list[dict]:
    """The chunks of a stream of OpenAI's."""
    chunk = {
        "id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "model": "gpt",
        "choices": [], "usage": None,
    }  # fmt: skip
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return [chunk, chunk, {**chunk, "usage": usage}]


RESPONSES = {"openai": chat, "anthropic": message, "bedrock": converse, "google": generated}
STREAMS = {"openai": chunks, "anthropic": events}


class Kind:
    """Guards a body as a function, a coroutine, a generator or an async generator."""

    def __init__(self, name: str) -> None:
        self.streams, self.is_async = "generator" in name, name.startswith("async")

    def guarded(self, guard, body, **options):
        """The body, which is a generator; a function returns what that yields last.

        It is called plainly, and gives all that was yielded.
        """
        if self.streams and self.is_async:

            async def agenerator(n):
                for chunk in body(n):
                    await asyncio.sleep(0)
                    yield chunk

            inner = guard.idempotent(agenerator, task_type="t", **options)

            async def consume(n):
                return [chunk async for chunk in inner(n)]

            return lambda n: asyncio.run(consume(n))
        if self.streams:
            inner = guard.idempotent(body, task_type="t", result=list, **options)
            return lambda n: list(inner(n))

        def last(n):
            *_, value = body(n)
            return value

        if not self.is_async:
            inner = guard.idempotent(last, task_type="t", **options)
            return lambda n: [inner(n)]

        async def coroutine(n):
            await asyncio.sleep(0)
            return last(n)

        inner = guard.idempotent(coroutine, task_type="t", **options)
        return lambda n: [asyncio.run(inner(n))]


@pytest.fixture(params=["function", "async function", "generator", "async generator"])
def kind(request):
    """Every kind of callable."""
    return Kind(request.param)


@pytest.fixture
def stored(guard_of):
    """One that prices, on every store."""
    return guard_of(pricer=PRICES)


@pytest.fixture
def guard():
    """One that prices, in memory."""
    return Guard(store=MemoryStore(), pricer=PRICES)


def line_of(guard, n=1):
    (line,) = guard.ledger.executions(task_fingerprint("t", {"n": n}))
    return line


def booked(guard) -> tuple[int, int]:
    """Tokens of all executions."""
    totals = guard.ledger.totals()
    return totals["input_tokens"], totals["output_tokens"]


# --- nobody needs to call --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_that_is_returned_or_yielded_is_booked(guard, kind, name):
    def body(n):
        yield RESPONSES[name]()

    task = kind.guarded(guard, body)
    assert task(1) == [RESPONSES[name]()]
    assert booked(guard) == (1000, 100)
    line = line_of(guard)
    assert (line.usage.input_tokens, line.spent.inputs) == (1000, (1000,))
    if name in ("openai", "anthropic"):
        assert line.spent.responses == (RESPONSES[name]()["id"],)
        assert line.cost == {"openai": Decimal("0.0028"), "anthropic": Decimal("0.0045")}[name]
    assert guard.ledger.totals()["without_usage"] == 0
    assert task(1) == [RESPONSES[name]()]
    assert booked(guard) == (1000, 100)
    assert guard.ledger.totals()["saved_tokens"] == 1100


@pytest.mark.parametrize("name", STREAMS)
def test_chunks_that_are_yielded_are_booked(stored, kind, name):
    if not kind.streams:
        pytest.skip("it returns no chunks")

    def body(n):
        yield from STREAMS[name](1)
        yield from STREAMS[name](2, 500, 50)

    kind.guarded(stored, body)(1)
    assert booked(stored) == (1500, 150)
    assert line_of(stored).spent.inputs == (1000, 500)
    assert stored.ledger.totals()["unpriced"] == 0


@pytest.mark.parametrize("name", RESPONSES)
def test_every_response_that_is_yielded_is_booked(guard, name):
    @guard.idempotent(task_type="t", result=list)
    def task(n):
        for number in range(3):
            made = (converse, generated)[name == "google"](1000 + number)
            yield made if name in ("bedrock", "google") else RESPONSES[name](number, 1000 + number)

    list(task(1))
    assert booked(guard) == (3003, 300)


def test_what_a_generator_returns_at_its_end_is_booked(guard):
    @guard.idempotent(task_type="t")
    def task(n):
        yield "some text"
        return chat()

    list(task(1))
    assert booked(guard) == (1000, 100)


def test_a_value_that_is_no_response_is_no_usage(guard, kind):
    def body(n):
        yield {"input_tokens": 5, "output_tokens": 5}

    kind.guarded(guard, body)(1)
    assert line_of(guard).usage is None
    assert guard.ledger.totals()["without_usage"] == 1


# --- explicit, and once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESPONSES)
@pytest.mark.parametrize(
    "told", ["itself", "a copy", "its usage", "keywords", "two times"], ids=str
)
def test_what_is_told_and_returned_counts_once(guard, kind, name, told):
    def body(n):
        response = RESPONSES[name]()
        if told == "a copy":
            record_usage(deepcopy(response))
        elif told == "its usage":
            record_usage(response.get("usage") or response["usageMetadata"])
        elif told == "keywords":
            record_usage(input_tokens=1000, output_tokens=100)
        else:
            record_usage(response)
        if told == "two times" and "id" in response:
            record_usage(response)
        yield response

    if told == "a copy" and kind.streams and name in ("bedrock", "google"):
        pytest.skip("two responses without an id look like this")
    kind.guarded(guard, body)(1)
    assert booked(guard) == (1000, 100)
    if name in ("openai", "anthropic"):
        assert guard.ledger.totals()["unpriced"] == 0


def test_chunks_that_are_told_and_yielded_count_once(guard, kind):
    def body(n):
        for event in events():
            record_usage(event)
            yield event

    kind.guarded(guard, body)(1)
    assert booked(guard) == (1000, 100)


def test_what_is_told_beside_what_is_returned_adds_up(guard, kind):
    def body(n):
        record_usage(chat(1, 10, 1))
        record_usage(message(2, 20, 2))
        current().record_usage(Usage(input_tokens=30, output_tokens=3))
        yield chat(3, 40, 4)

    kind.guarded(guard, body)(1)
    assert booked(guard) == (100, 10)
    assert line_of(guard).spent.inputs == (10, 20, 30, 40)


def test_a_total_told_after_its_parts_counts_what_is_left(guard, kind):
    def body(n):
        for number in range(3):
            record_usage(chat(number, 100, 10)["usage"])
        record_usage(input_tokens=350, output_tokens=30, aggregate=True)
        yield n

    kind.guarded(guard, body)(1)
    assert booked(guard) == (350, 30)


def test_usage_of_the_decorator_outranks_what_is_returned(guard, kind):
    def body(n):
        yield chat()

    seen = []

    def usage(value):
        seen.append(value)
        return Usage(input_tokens=7, output_tokens=7, model="claude")

    kind.guarded(guard, body, usage=usage)(1)
    assert booked(guard) == (7, 7)
    assert line_of(guard).model == "claude"
    assert seen == [[chat()] if kind.streams else chat()]


def test_usage_of_the_decorator_that_fails_costs_no_result(guard, kind, warned):
    def body(n):
        yield chat()

    def usage(value):
        raise KeyError("usage")

    assert kind.guarded(guard, body, usage=usage)(1) == [chat()]
    assert line_of(guard).usage is None
    assert any("usage= failed" in told for told in warned())


def test_what_cannot_be_read_is_told_and_costs_no_result(guard, kind, warned):
    def body(n):
        record_usage({"tokens": 5})
        record_usage(input_tokens=-1)
        record_usage(tokens=5)
        yield n

    assert kind.guarded(guard, body)(1) == [1]
    assert line_of(guard).usage is None
    assert any("usage could not be read" in told for told in warned())


# --- nested ------------------------------------------------------------------------------------------------


@pytest.fixture
def nest(stored, shape):
    """An outer task that calls an inner one, and what both report."""

    class Nest:
        calls = 1
        outer_tells = inner_tells = True
        returns = staticmethod(lambda inner: inner)

        def __init__(self) -> None:
            def inner(m):
                return chat(f"inner-{m}", 1000, 100) if self.inner_tells else m

            def outer(n):
                if self.outer_tells:
                    record_usage(message(f"outer-{n}", 10, 1))
                for m in range(self.calls):
                    got = self.inner(m)
                return self.returns(got)

            self.inner = stored.idempotent(inner, task_type="inner")
            self.outer = shape.guarded(stored, outer, task_type="t")

        def sums(self, task_type):
            found = stored.ledger.task_type_summary(task_type)
            return found["total_tokens"], found["inclusive_tokens"]

        def money(self, task_type):
            found = stored.ledger.task_type_summary(task_type)
            return found["charged"], found["inclusive"]

    return Nest()


def test_what_is_spent_inside_is_in_the_inclusive_sum_alone(nest, stored):
    nest.calls, nest.returns = 3, lambda inner: None
    nest.outer(1)
    assert nest.sums("t") == (11, 3311)
    assert nest.sums("inner") == (3300, 3300)
    own, inside = Decimal("0.000045"), 3 * Decimal("0.0028")
    assert nest.money("t") == (own, own + inside)
    assert nest.money("inner") == (inside, inside)
    assert stored.ledger.totals()["total_tokens"] == 3311
    line = line_of(stored)
    assert line.spent.inner == (3000, 300, 8_400_000_000)
    assert {inner.parent for inner in stored.ledger.tree(line)} == {line.execution_id}


def test_returning_what_was_got_inside_spends_nothing_more(nest, stored):
    nest.outer(1)
    assert nest.sums("t") == (11, 1111)
    assert stored.ledger.totals()["total_tokens"] == 1111


def test_what_is_reused_inside_is_charged_to_nobody(nest, stored):
    nest.inner(0)
    nest.outer(1)
    assert nest.sums("t") == (11, 11)
    assert stored.ledger.task_type_summary("inner")["saved_tokens"] == 1100
    assert stored.ledger.totals()["total_tokens"] == 1111


def test_who_tells_nothing_but_holds_others_is_not_without_usage(nest, stored):
    nest.outer_tells = False
    nest.returns = lambda inner: None
    nest.outer(1)
    assert stored.ledger.task_type_summary("t")["without_usage"] == 0
    assert nest.sums("t") == (0, 1100)


def test_who_holds_calls_that_reuse_is_not_without_usage(nest, stored):
    nest.outer_tells = False
    nest.returns = lambda inner: None
    nest.outer(1)
    nest.outer(2)
    assert stored.ledger.task_type_summary("t")["without_usage"] == 0


def test_who_holds_others_that_tell_nothing_leaves_the_gap_to_them(nest, stored):
    nest.outer_tells = nest.inner_tells = False
    nest.outer(1)
    assert stored.ledger.task_type_summary("t")["without_usage"] == 0
    assert stored.ledger.task_type_summary("inner")["without_usage"] == 1


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_that_was_got_inside_is_not_charged(guard, name):
    inner = guard.idempotent(lambda m: RESPONSES[name](), task_type="inner")

    def outer(n):
        return inner(n)

    guard.idempotent(outer, task_type="executed")(1)
    guard.idempotent(outer, task_type="reused")(1)
    sums = {row["task_type"]: row for row in guard.ledger.task_types()}
    assert (sums["executed"]["total_tokens"], sums["executed"]["inclusive_tokens"]) == (0, 1100)
    assert (sums["reused"]["total_tokens"], sums["reused"]["inclusive_tokens"]) == (0, 0)
    assert sums["inner"]["saved_tokens"] == 1100


def test_a_response_that_is_handed_on_to_a_guarded_call_counts_once(guard):
    @guard.idempotent(task_type="inner")
    def with_title(response):
        return {**response, "title": "ok"}

    @guard.idempotent(task_type="t")
    def outer(n):
        response = chat()
        record_usage(response)
        return with_title(response)

    outer(1)
    assert guard.ledger.totals()["total_tokens"] == 1100
    assert guard.ledger.task_type_summary("t")["inclusive_tokens"] == 1100


def test_a_total_of_all_that_was_spent_inside_counts_what_is_left(nest, stored):
    nest.calls = 2
    nest.returns = lambda inner: record_usage(input_tokens=2510, output_tokens=251, aggregate=True)
    nest.outer(1)
    assert nest.sums("t") == (561, 2761)


def test_three_levels_of_guarded_calls(stored):
    @stored.idempotent(task_type="low")
    def low(n):
        record_usage(input_tokens=100, output_tokens=0, model="gpt")

    @stored.idempotent(task_type="middle")
    def middle(n):
        record_usage(input_tokens=10, output_tokens=0, model="gpt")
        low(n)

    @stored.idempotent(task_type="t")
    def high(n):
        record_usage(input_tokens=1, output_tokens=0, model="gpt")
        middle(n)
        low(n)  # reused
        low(n + 1)

    high(1)
    sums = {row["task_type"]: row for row in stored.ledger.task_types()}
    assert {name: row["total_tokens"] for name, row in sums.items()} == {
        "low": 200, "middle": 10, "t": 1,
    }  # fmt: skip
    assert {name: row["inclusive_tokens"] for name, row in sums.items()} == {
        "low": 200, "middle": 110, "t": 211,
    }  # fmt: skip
    assert sums["t"]["inclusive"] == Decimal("0.000422")
    tree = stored.ledger.tree(line_of(stored))
    assert [line.task_type for line in tree] == ["middle", "low", "low"]


def test_a_tree_is_whole_where_all_starts_within_one_millisecond(guard_of, clock):
    guard = guard_of()
    low = guard.idempotent(lambda n: n, task_type="low")
    middle = guard.idempotent(lambda n: low(n), task_type="middle")  # noqa: PLW0108 - another task
    high = guard.idempotent(lambda n: middle(n), task_type="t")  # noqa: PLW0108 - as above
    low(1)  # so that the innermost comes first wherever lines are kept
    middle(1)
    for task in (low, middle):
        guard.forget(guard.task_of(task, 1))
    high(1)
    tree = guard.ledger.tree(line_of(guard))
    assert sorted(line.task_type for line in tree) == ["low", "middle"]


def test_the_inside_of_a_call_that_failed_was_spent(guard):
    @guard.idempotent(task_type="inner")
    def inner(n):
        record_usage(input_tokens=100, output_tokens=0, model="gpt")
        raise ValueError

    @guard.idempotent(task_type="t")
    def outer(n):
        with suppress(ValueError):
            inner(n)

    outer(1)
    assert line_of(guard).spent.inner == (100, 0, 200_000_000)


def test_guarded_streams_inside_are_inside(guard):
    @guard.idempotent(task_type="inner", result=list)
    def inner(m):
        yield from chunks(m)

    @guard.idempotent(task_type="t", result=list)
    def outer(n):
        yield from inner(1)  # and so it yields the same responses
        for chunk in inner(2):
            assert chunk
            break

    list(outer(1))
    assert guard.ledger.task_type_summary("inner")["total_tokens"] == 1100
    assert line_of(guard).spent.inner == (1000, 100, 2_800_000_000)
    assert line_of(guard).usage is None


def test_siblings_in_tasks_and_threads_are_inside(guard):
    @guard.idempotent(task_type="inner")
    async def inner(m):
        await asyncio.sleep(0)
        return chat(m)

    @guard.idempotent(task_type="t")
    async def outer(n):
        await asyncio.gather(*(inner(m) for m in range(5)))
        await asyncio.to_thread(lambda: asyncio.run(inner(5)))

    asyncio.run(outer(1))
    assert line_of(guard).spent.inner == (6000, 600, 6 * 2_800_000_000)


# --- whatever becomes of it ----------------------------------------------------------------------------------


def test_what_a_failed_call_told_is_booked(stored, kind):
    def body(n):
        record_usage(chat())
        if n:
            raise ValueError
        yield

    with pytest.raises(ValueError):  # noqa: PT011 - the body's own
        kind.guarded(stored, body)(1)
    assert booked(stored) == (1000, 100)
    assert (line_of(stored).status, line_of(stored).cost) == ("failed", Decimal("0.0028"))


def test_what_a_stream_yielded_before_it_failed_is_booked(guard, kind):
    if not kind.streams:
        pytest.skip("it yields nothing")

    def body(n):
        yield from events()[:3]
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - the body's own
        kind.guarded(guard, body)(1)
    assert booked(guard) == (1000, 50)


def test_a_stream_that_is_left_early_is_booked(stored):
    @stored.idempotent(task_type="t", result=list)
    def task(n):
        yield from events()

    stream = task(1)
    for _ in range(3):
        next(stream)
    stream.close()
    assert booked(stored) == (1000, 50)
    assert line_of(stored).status == "failed"


def test_an_async_stream_that_is_left_early_is_booked(guard):
    @guard.idempotent(task_type="t", result=list)
    async def task(n):
        for event in events():
            yield event

    async def main():
        stream = task(1)
        for _ in range(3):
            await anext(stream)
        await stream.aclose()

    asyncio.run(main())
    assert booked(guard) == (1000, 50)


def test_what_a_cancelled_call_told_is_booked(guard):
    async def main():
        started = asyncio.Event()

        @guard.idempotent(task_type="t")
        async def task(n):
            record_usage(chat())
            started.set()
            await asyncio.Event().wait()

        running = asyncio.ensure_future(task(1))
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert booked(guard) == (1000, 100)


def test_lost_and_late_executions_are_booked(guard_of, clock, crew):
    guard = guard_of(pricer=PRICES, lease=3600)
    started, go_on = threading.Event(), threading.Event()

    def body(n):
        if not started.is_set():
            started.set()
            assert go_on.wait(SOON)
            return chat(1)
        return chat(2)

    task = guard.idempotent(body, task_type="t")
    late = crew.start(task, 1)
    assert started.wait(SOON)
    clock.advance(3601)
    task(1)
    summary = guard.ledger.task_type_summary("t")
    assert (summary["lost"], summary["duplicates"], summary["total_tokens"]) == (1, 1, 1100)
    assert (summary["wasted_tokens"], summary["without_usage"]) == (1100, 1)
    go_on.set()
    late.result(SOON)
    summary = guard.ledger.task_type_summary("t")
    assert (summary["total_tokens"], summary["without_usage"]) == (2200, 0)
    assert (summary["charged"], summary["wasted"]) == (Decimal("0.0056"), Decimal("0.0028"))
    lines = guard.ledger.executions(task_fingerprint("t", {"n": 1}))
    assert [line.status for line in lines] == ["late", "ok"]


def test_what_was_handed_back_is_booked(guard, kind):
    def body(n):
        record_usage(chat())
        yield {"status": "out_of_scope"}

    if kind.streams:
        pytest.skip("a stream hands nothing back")
    kind.guarded(guard, body)(1)
    assert line_of(guard).status == "declined"
    assert booked(guard) == (1000, 100)


def test_an_unguarded_execution_is_booked_when_the_store_is_back(tapped, guard_of, until):
    guard = guard_of(store=tapped, on_store_error="run", pricer=PRICES)
    task = guard.idempotent(lambda n: chat(), task_type="t")
    task(0)
    tapped.down()
    task(1)
    tapped.up()
    until(guard.engine.backlog.settle)
    summary = guard.ledger.task_type_summary("t")
    assert (summary["total_tokens"], summary["wasted_tokens"]) == (2200, 1100)


# --- what others see -----------------------------------------------------------------------------------------


def test_an_outcome_tells_what_its_execution_spent_also_on_reuse(stored, kind):
    def body(n):
        yield chat()

    task = kind.guarded(stored, body)
    with capture() as calls:
        task(1)
        task(1)
    assert [call.source for call in calls] == ["executed", "reused"]
    for call in calls:
        assert (call.usage.input_tokens, call.usage.output_tokens) == (1000, 100)
        assert call.cost == Decimal("0.0028")


def test_a_claim_by_hand_is_told_what_it_spent(stored):
    for n, usage in enumerate((chat(), events(2), chunks(3), [chat(4), chat(5)])):
        task = stored.task_of(stored.idempotent(lambda n: n, task_type="t"), n)
        stored.claim(task).complete("value", usage=usage)
    lines = stored.ledger.lines()
    assert [line.usage.total_tokens for line in lines] == [1100, 1100, 1100, 2200]
    assert stored.ledger.totals()["unpriced"] == 0


def test_outside_of_an_execution_nothing_is_booked(guard):
    record_usage(chat())
    assert guard.ledger.totals()["total_tokens"] == 0


def test_a_refused_call_books_nothing(guard):
    task = guard.idempotent(lambda n, m: chat(m), task_type="t", key=lambda bound: "k")
    task(1, 1)
    with pytest.raises(errors.KeyConflictError):
        task(1, 2)
    assert booked(guard) == (1000, 100)


def test_threads_that_read_streams_without_ids_one_after_the_other(guard):
    @guard.idempotent(task_type="t")
    def task(n):
        for prompt in (100, 200, 300):  # each in a thread that may have the last one's number
            thread = crowd(prompt)
            thread.join()
        return n

    def crowd(prompt):
        def read():
            for completion in (1, 2, 3):
                chunk = generated(prompt, completion)
                del chunk["candidates"][0]["finishReason"]
                record_usage(chunk)

        context = copy_context()
        thread = threading.Thread(target=context.run, args=(read,))
        thread.start()
        return thread

    task(1)
    assert booked(guard) == (600, 9)


# --- what goes up through several calls ----------------------------------------------------------------


def answered(name):
    return {
        "id": name, "object": "chat.completion", "model": "m", "choices": [],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100},
    }  # fmt: skip


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("ids", [True, False])
def test_a_response_that_is_passed_up_three_calls_is_paid_for_once(again, ids):
    guard = Guard(store="memory://", namespace=uuid4().hex, pricer={"m": {"input": 1, "output": 1}})

    @guard.idempotent(task_type="c")
    def c(x):
        found = answered(x)
        return found if ids else {key: value for key, value in found.items() if key != "id"}

    @guard.idempotent(task_type="b")
    def b(x):
        return c(x)

    @guard.idempotent(task_type="a")
    def a(x):
        return b(x)

    if again:  # then b's result, with c's response in it, is reused
        b("r-1")
    a("r-1")
    assert guard.ledger.totals()["total_tokens"] == 1100
    assert guard.ledger.task_type_summary("a")["inclusive_tokens"] == (0 if again else 1100)


def test_more_responses_than_a_line_remembers_are_known_above():
    guard = Guard(store="memory://", namespace=uuid4().hex)

    @guard.idempotent(task_type="inner")
    def inner(n):
        for number in range(n):
            record_usage(answered(f"r-{number}"))

    @guard.idempotent(task_type="outer")
    def outer(n):
        inner(n)
        for number in range(n):
            record_usage(answered(f"r-{number}"))

    outer(100)
    assert guard.ledger.totals()["total_tokens"] == 100 * 1100


@pytest.mark.parametrize(
    "given",
    [{"model": {}}, {"response_id": ["x"]}, {"model": b"m"}, {"input_tokens": 2**70}],
)
def test_what_is_no_usage_costs_no_result(given):
    guard, ran = Guard(store="memory://", namespace=uuid4().hex), []

    @guard.idempotent(task_type="t")
    def task(n):
        ran.append(n)
        record_usage(**{"input_tokens": 1, "output_tokens": 1} | given)
        return n

    assert task(1) == task(1) == 1
    assert ran == [1]


@pytest.mark.parametrize("name", [uuid4(), 7, "caf\udce9", Enum("Model", {"a": "m"}).a])
def test_names_are_kept_as_text(name, store):
    guard = Guard(store=store, namespace=uuid4().hex)

    @guard.idempotent(task_type="t")
    def task(n):
        record_usage(input_tokens=1, output_tokens=1, model=name, response_id=name)
        return n

    assert task(1) == task(1) == 1
    (line,) = guard.ledger.lines()
    assert (line.status, line.usage.input_tokens) == ("ok", 1)


def test_a_model_that_has_no_price_any_longer_costs_nothing_known():
    prices = iter([Decimal("0.5"), None, None, None])
    guard = Guard(
        store="memory://", namespace=uuid4().hex,
        pricer=lambda usage: next(prices) if usage.model != "x" else None,
    )  # fmt: skip

    @guard.idempotent(task_type="t")
    def task(n):
        record_usage(input_tokens=1, model="m", response_id="r")
        record_usage(input_tokens=2, model="x", response_id="r")
        return n

    task(1)
    (line,) = guard.ledger.lines()
    assert (line.cost, line.spent.unpriced) == (None, 1)


def test_events_of_a_stream_inside_are_theirs_also_without_an_id():
    guard = Guard(store="memory://", namespace=uuid4().hex)
    events = [
        {"type": "message_start", "message": {
            "id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "m",
            "usage": {"input_tokens": 50, "output_tokens": 1}}},
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 20}},
        {"type": "message_stop"},
    ]  # fmt: skip

    @guard.idempotent(task_type="inner")
    def inner(n):
        yield from events

    @guard.idempotent(task_type="outer")
    def outer(n):
        yield from inner(n)
        for event in list(inner(n)):
            record_usage(event)

    list(outer(1))
    assert guard.ledger.totals()["total_tokens"] == 70
    assert guard.ledger.task_type_summary("outer")["total_tokens"] == 0

"""Spans of LLM calls tell the ledger what an execution spent: its own, each call once, unasked."""

from __future__ import annotations

import asyncio
import gc
import importlib
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from itertools import count

import pytest
import wrapt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags
from stub_llm import CHAT, MESSAGE, serving

from idemguard import Guard, Usage, capture, record_usage, span_usage, telemetry
from idemguard.span_usage import UsageSpanProcessor
from idemguard.stores.memory import MemoryStore

fresh = count()  # arguments that nobody had before
SOON = 60  # seconds within which what happens at once has happened
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No span that has ended is remembered."""
    yield
    assert span_usage._open == {}


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(UsageSpanProcessor())
    yield made
    made.shutdown()


@pytest.fixture
def tracer(provider) -> trace.Tracer:
    return provider.get_tracer("app")


@pytest.fixture
def guard(provider) -> Iterator[Guard]:
    made = Guard(store=MemoryStore(), tracer_provider=provider)
    yield made
    made.close()


OPERATION = "gen_ai.operation.name"


def run(guard: Guard, body, task_type="t"):
    """The ledger's line of a body that is executed, and what it returned."""
    guarded = guard.idempotent(lambda n: body(), task_type=task_type)
    with capture() as calls:
        value = guarded(next(fresh))
    [line] = guard.ledger.executions(calls[-1].fingerprint)
    return line, value


def spent(guard: Guard, body) -> Usage | None:
    """What the ledger says that a body spent, but for the response's id."""
    return without_id(run(guard, body)[0].usage)


def without_id(usage: Usage | None) -> Usage | None:
    if usage is None:
        return None
    return Usage(**{n: getattr(usage, n) for n in Usage.__slots__ if n != "response_id"})


def tokens(usage: Usage | None) -> tuple[int | None, int | None] | None:
    return None if usage is None else (usage.input_tokens, usage.output_tokens)


def told(sent=100, came=10, **more) -> dict:
    """The attributes of a span of one request."""
    about = {
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": sent,
        "gen_ai.usage.output_tokens": came,
        **{f"gen_ai.{name.replace('__', '.')}": value for name, value in more.items()},
    }
    return {name: value for name, value in about.items() if value is not None}


def summed(sent, came) -> dict:
    """The attributes of a span of many."""
    return told(sent, came, operation__name="invoke_agent")


def ask(tracer, sent=100, came=10, *, context=None, **more) -> None:
    """A request to a model, as an instrumentation shows it."""
    tracer.start_span("chat", context, attributes=told(sent, came, **more)).end()


@contextmanager
def agent(tracer, sent=None, came=None, operation="invoke_agent", **more) -> Iterator[trace.Span]:
    """A span around requests, which tells a sum at its end."""
    about = {"gen_ai.operation.name": operation}
    with tracer.start_as_current_span("agent", attributes=about) as span:
        yield span
        span.set_attributes(told(sent, came, operation__name=operation, **more))


# --- what attributes tell ----------------------------------------------------------------------------

NAMES = {
    "now": (
        "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens",
        "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_creation.input_tokens",
        "gen_ai.usage.reasoning.output_tokens",
    ),
    "before": (
        "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens",
        "gen_ai.usage.cache_read_input_tokens", "gen_ai.usage.cache_creation_input_tokens",
        "gen_ai.usage.reasoning_tokens",
    ),
    "openllmetry": (
        "llm.usage.prompt_tokens", "llm.usage.completion_tokens",
        "llm.usage.cache_read_input_tokens", "llm.usage.cache_creation_input_tokens",
        "llm.usage.reasoning_tokens",
    ),
    "openinference": (
        "llm.token_count.prompt", "llm.token_count.completion",
        "llm.token_count.prompt_details.cache_read", "llm.token_count.prompt_details.cache_write",
        "llm.token_count.completion_details.reasoning",
    ),
    "pydantic-ai": (
        "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens",
        "gen_ai.usage.details.cache_read_tokens", "gen_ai.usage.details.cache_write_tokens",
        "gen_ai.usage.details.reasoning_tokens",
    ),
    "mixed": (
        "gen_ai.usage.input_tokens", "gen_ai.usage.completion_tokens",
        "gen_ai.usage.cache_read_input_tokens", "gen_ai.usage.cache_write.input_tokens",
        "llm.usage.reasoning_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_every_dialect_tells_the_same(guard, tracer, names):
    about = dict(zip(names, (1000, 200, 300, 400, 50), strict=True))
    usage = spent(guard, lambda: tracer.start_span("llm", attributes=about).end())
    assert usage == Usage(
        input_tokens=1000,
        output_tokens=200,
        cache_read_tokens=300,
        cache_write_tokens=400,
        reasoning_tokens=50,
    )


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"gen_ai.response.model": "m-2", "gen_ai.request.model": "m"}, ("m-2", None)),
        ({"gen_ai.request.model": "m"}, ("m", None)),
        ({"llm.model_name": "m", "llm.system": "openai"}, ("m", "openai")),
        ({"gen_ai.provider.name": "p", "gen_ai.system": "s"}, (None, "p")),
        ({"gen_ai.system": "OpenAI"}, (None, "openai")),
        ({"gen_ai.request.model": "", "gen_ai.system": 3}, (None, None)),
    ],
)
def test_who_answered(guard, tracer, about, expected):
    usage = spent(guard, lambda: tracer.start_span("llm", attributes=told() | about).end())
    assert (usage.model, usage.provider) == expected


READ, WRITE = "gen_ai.usage.cache_read_input_tokens", "gen_ai.usage.cache_creation_input_tokens"
TOTAL = "gen_ai.usage.total_tokens"


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        # as the conventions have it
        (told(1000, 10) | {READ: 300, WRITE: 400}, (1000, 10)),
        (told(1000, 10) | {READ: 300, TOTAL: 1010}, (1000, 10)),
        (told(1000, 10) | {READ: 1000}, (1000, 10)),
        # Anthropic's own number, which leaves the cache out
        (told(3, 550) | {READ: 0, WRITE: 12304}, (12307, 550)),
        (told(3, 550) | {READ: 2304, WRITE: 10000}, (12307, 550)),
        # Bedrock's, whose total gives it away
        (told(1000, 10) | {READ: 300, TOTAL: 1310}, (1300, 10)),
        # embeddings have no output
        (told(8, None) | {TOTAL: 8}, (8, 0)),
        (told(8, None), (8, None)),
        (told(None, 8), (None, 8)),
        # an instrumentation that saw no usage in a stream
        (told(0, 0), None),
        (told(None, None) | {READ: 3}, None),
        (told(None, None), None),
    ],
)
def test_the_cache_is_part_of_the_input(guard, tracer, about, expected):
    assert (
        tokens(spent(guard, lambda: tracer.start_span("llm", attributes=about).end())) == expected
    )


@pytest.mark.parametrize(
    "value", [-1, "100", "", True, float("nan"), float("inf"), 1.5, 2**62 + 1, 10**30, [100]],
    ids=repr,
)  # fmt: skip
def test_garbage_is_ignored_and_told(guard, tracer, warned, value):
    about = {"gen_ai.usage.input_tokens": value, "gen_ai.usage.output_tokens": 10}
    usage = spent(guard, lambda: tracer.start_span("llm", attributes=about).end())
    assert tokens(usage) == (None, 10)
    [message] = warned()
    assert "gen_ai.usage.input_tokens" in message
    assert repr(value) not in message


def test_a_valid_number_under_another_name_serves(guard, tracer):
    about = {"gen_ai.usage.input_tokens": "many", "gen_ai.usage.prompt_tokens": 7.0}
    assert tokens(spent(guard, lambda: tracer.start_span("x", attributes=about).end())) == (7, None)


def test_what_cannot_be_added_up_costs_the_application_nothing(guard, tracer, warned):
    about = told(2**62 - 1) | {WRITE: 2**62}
    assert spent(guard, lambda: tracer.start_span("llm", attributes=about).end()) is None
    assert len(warned()) == 1


# --- each call once ----------------------------------------------------------------------------------


def test_two_requests_add_up(guard, tracer):
    def body():
        ask(tracer, 100, 10)
        ask(tracer, 100, 10)

    assert tokens(spent(guard, body)) == (200, 20)


@pytest.mark.parametrize("operation", ["invoke_agent", "invoke_workflow", "execute_tool", "chat"])
def test_a_sum_of_what_is_beneath_counts_no_second_time(guard, tracer, operation):
    def body():
        with agent(tracer, 300, 30, operation):
            ask(tracer, 100, 10)
            with tracer.start_as_current_span("step"):
                ask(tracer, 200, 20)

    assert tokens(spent(guard, body)) == (300, 30)


@pytest.mark.parametrize(
    "kind",
    [
        {"gen_ai.operation.name": "invoke_agent"},
        {"openinference.span.kind": "AGENT"},
        {"traceloop.span.kind": "workflow"},
    ],
)
def test_a_sum_alone_counts_as_a_total(guard, tracer, kind):
    about = told(300, 30, operation__name=None) | kind

    def body():
        with tracer.start_as_current_span("agent", attributes=about):
            record_usage(input_tokens=100, output_tokens=10)

    assert tokens(spent(guard, body)) == (300, 30)


def test_sums_within_sums(guard, tracer):
    def body():
        with agent(tracer, 300, 30, "invoke_workflow"), agent(tracer, 300, 30):
            pass
        with agent(tracer, 300, 30, "invoke_workflow"):
            pass

    assert tokens(spent(guard, body)) == (600, 60)


def test_what_was_told_before_a_sum_began_is_no_part_of_it(guard, tracer):
    def body():
        ask(tracer, 1000, 100)
        record_usage(input_tokens=5, output_tokens=5)
        inner(1)
        with agent(tracer, 300, 30):
            pass
        with agent(tracer, 200, 20):
            pass

    inner = guard.idempotent(lambda n: ask(tracer, 50, 5), task_type="inner")
    assert tokens(spent(guard, body)) == (1000 + 5 + 300 + 200, 100 + 5 + 30 + 20)


@pytest.mark.parametrize("first", [0, 1])
def test_sums_side_by_side_are_all_counted(guard, tracer, first):
    def body():
        agents = [tracer.start_span("agent", attributes={OPERATION: "invoke_agent"}) for _ in "ab"]
        agents[first].set_attributes(summed(100, 10))
        agents[1 - first].set_attributes(summed(200, 20))
        agents[first].end()
        agents[1 - first].end()

    assert tokens(spent(guard, body)) == (300, 30)


def test_a_request_beside_a_sum_is_no_part_of_it(guard, tracer):
    def body():
        alone = tracer.start_span("agent", attributes=summed(100, 10))
        ask(tracer, 50, 5)
        alone.end()

    assert tokens(spent(guard, body)) == (150, 15)


def test_a_sum_that_tells_its_kind_late(guard, tracer):
    def body():
        ask(tracer)
        with tracer.start_as_current_span("agent") as span:
            span.set_attributes(summed(70, 7))

    assert tokens(spent(guard, body)) == (170, 17)


def test_a_stream_that_holds_a_sum_over_its_chunks(guard, tracer):
    @guard.idempotent(task_type="t")
    def stream(n):
        with tracer.start_as_current_span("agent", attributes={OPERATION: "invoke_agent"}) as span:
            for _ in range(n):
                ask(tracer)
                yield n
            span.set_attributes(summed(100 * n, 10 * n))

    assert list(stream(3)) == [3, 3, 3]
    (line,) = guard.ledger.executions(guard.task_of(stream, 3).fingerprint)
    assert tokens(line.usage) == (300, 30)


def test_a_sum_over_a_guarded_call_is_that_calls(guard, tracer):
    """Whether its spans tell it, or its body alone."""
    inner = guard.idempotent(lambda n: ask(tracer, 50, 5), task_type="inner")
    plain = guard.idempotent(
        lambda n: record_usage(input_tokens=40, output_tokens=4),
        task_type="plain",
    )

    def body():
        with agent(tracer, 50, 5):
            inner(1)
        with agent(tracer, 40, 4):
            plain(1)

    assert spent(guard, body) is None
    by_type = {line.task_type: tokens(line.usage) for line in guard.ledger.lines()}
    assert by_type == {"t": None, "inner": (50, 5), "plain": (40, 4)}


def test_two_instrumentations_one_within_the_other(guard, tracer, provider):
    other = provider.get_tracer("other")

    def body():
        with tracer.start_as_current_span("outer", attributes=told(100, 10, response__id="r")):
            ask(other, 100, 10)

    assert tokens(spent(guard, body)) == (100, 10)


def test_two_instrumentations_side_by_side(guard, tracer, provider):
    other = provider.get_tracer("other")

    def body():
        for one in (tracer, other, tracer):
            ask(one, 100, 10, response__id="r")
        ask(tracer, 100, 10, response__id="s")

    assert tokens(spent(guard, body)) == (200, 20)


def one_after_the_other(first, second, one, other, *, apart=False) -> None:
    """Two spans side by side, the second around the first in time, or after it."""
    first.start_span("first", start_time=20, attributes=one).end(30)
    start, end = (31, 40) if apart else (10, 40)
    second.start_span("second", start_time=start, attributes=other).end(end)


def test_two_instrumentations_of_which_one_tells_no_id(guard, tracer, provider):
    """As OpenInference's spans, and OpenLLMetry's of the Responses API, begun afterwards."""

    other = provider.get_tracer("other")

    def body():
        named = told(100, 10, response__id="chatcmpl-1")
        one_after_the_other(tracer, other, told(100, 10), named)
        one_after_the_other(tracer, other, told(200, 20, response__id="s"), told(200, 20))
        record_usage(response(100, 10))  # the same as the first pair

    assert tokens(spent(guard, body)) == (300, 30)


@pytest.mark.parametrize(
    ("one", "other", "how"),
    [
        (told(100, 10), told(100, 10), {"apart": True}),
        (told(100, 10), told(100, 10), {"scope": "app"}),
        (told(100, 10), told(100, 11), {}),
        (told(100, 10, response__id="r"), told(100, 10, response__id="s"), {}),
        (told(100, 10, response__model="m"), told(100, 10, response__model="n"), {}),
    ],
    ids=["apart", "one-scope", "numbers", "ids", "models"],
)
def test_two_requests_are_two(guard, tracer, provider, one, other, how):
    second = provider.get_tracer(how.pop("scope", "other"))
    usage = spent(guard, lambda: one_after_the_other(tracer, second, one, other, **how))
    assert usage.input_tokens == 200


def test_requests_of_other_executions_and_parents_are_others(guard, tracer, provider):
    other = provider.get_tracer("other")
    inner = guard.idempotent(
        lambda n: tracer.start_span("a", start_time=20, attributes=told()).end(30),
        task_type="inner",
    )

    def body():
        inner(1)
        other.start_span("b", start_time=10, attributes=told()).end(40)
        with agent(tracer):
            tracer.start_span("c", start_time=20, attributes=told()).end(30)

    assert tokens(spent(guard, body)) == (200, 20)


def test_a_request_is_paired_with_one_other(guard, tracer, provider):
    other = provider.get_tracer("other")

    def body():
        one_after_the_other(tracer, other, told(), told(response__id="r"))
        other.start_span("third", start_time=10, attributes=told(response__id="s")).end(40)
        tracer.start_span("fourth", start_time=20, attributes=told()).end(30)
        tracer.start_span("fifth", start_time=20, attributes=told()).end(30)

    assert tokens(spent(guard, body)) == (300, 30)


def test_executions_beneath_one_parent_are_not_paired(guard, tracer, provider):
    other = provider.get_tracer("other")
    far = NonRecordingSpan(SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1)))
    around = trace.set_span_in_context(far, otel.Context())

    def request(one, start, end):
        one.start_span("chat", around, attributes=told(), start_time=start).end(end)

    first, _ = run(guard, lambda: request(tracer, 20, 30))
    second, _ = run(guard, lambda: request(other, 10, 40))
    assert tokens(first.usage) == tokens(second.usage) == (100, 10)


def test_an_inner_span_without_an_id_is_of_the_outer_ones_response(guard, tracer, provider):
    """So that the body may tell of it, too."""
    other = provider.get_tracer("other")

    def body():
        about = told(100, 10, response__id="chatcmpl-1")
        with tracer.start_as_current_span("outer", attributes=about):
            ask(other, 100, 10)
        record_usage(response(100, 10))

    assert tokens(spent(guard, body)) == (100, 10)


def test_an_inner_span_that_ends_after_the_outer_one(guard, tracer):
    """As of a stream that is read after the call that opened it."""

    def body():
        with tracer.start_as_current_span("outer", attributes=told(100, 10)):
            inner = tracer.start_span("inner", attributes=told(100, 10))
            step = tracer.start_span("step")
            innermost = tracer.start_span(
                "innermost", trace.set_span_in_context(step), attributes=told(100, 10)
            )
        step.end()
        inner.end()
        innermost.end()

    assert tokens(spent(guard, body)) == (100, 10)


def test_a_request_that_ends_after_the_sum_that_holds_it(guard, tracer):
    def body():
        with agent(tracer, 300, 30):
            inner = tracer.start_span("inner", attributes=told(100, 10))
        inner.end()

    assert tokens(spent(guard, body)) == (300, 30)


def test_an_outer_span_that_saw_no_numbers(guard, tracer):
    def body():
        with tracer.start_as_current_span("outer", attributes=told(100, 10)):
            ask(tracer, 0, 0)

    assert tokens(spent(guard, body)) == (100, 10)


def response(sent=100, came=10) -> dict:
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": [],
        "usage": {"prompt_tokens": sent, "completion_tokens": came},
    }  # fmt: skip


def test_what_the_body_tells_of_a_response_outranks_its_span(guard, tracer):
    def before():
        record_usage(response())
        ask(tracer, 100, 11, response__id="chatcmpl-1")

    def after():
        ask(tracer, 100, 11, response__id="chatcmpl-1")
        record_usage(response())

    assert tokens(spent(guard, before)) == tokens(spent(guard, after)) == (100, 10)


@pytest.mark.parametrize("name", ["chatcmpl-1", None])
def test_a_body_that_returns_the_response(guard, tracer, name):
    def body():
        ask(tracer, 100, 10, response__id=name)
        return response()

    assert tokens(spent(guard, body)) == (100, 10)


def test_our_own_spans_are_not_read(provider, tracer):
    with_usage = Guard(store=MemoryStore(), tracer_provider=provider, gen_ai_usage=True)
    inner = with_usage.idempotent(
        lambda n: record_usage(input_tokens=40, output_tokens=4),
        task_type="inner",
    )
    assert spent(with_usage, lambda: inner(1)) is None
    with_usage.close()


def test_two_processors_and_two_providers(tracer, provider, guard):
    provider.add_span_processor(UsageSpanProcessor())
    other = TracerProvider(shutdown_on_exit=False)
    other.add_span_processor(UsageSpanProcessor())

    def body():
        ask(tracer, 100, 10)
        with agent(tracer, 200, 20):
            ask(other.get_tracer("other"), 200, 20)

    assert tokens(spent(guard, body)) == (300, 30)
    other.shutdown()


trees = st.recursive(
    st.integers(1, 50),
    lambda children: st.tuples(
        st.sampled_from(["invoke_agent", "invoke_workflow", "chat", None]),
        st.lists(children, min_size=1, max_size=4),
    ),
    max_leaves=12,
)


def grow(tracer, tree) -> int:
    """Spans of this tree: its leaves tell tokens, the others the sum, or nothing."""
    if isinstance(tree, int):
        ask(tracer, tree, tree)
        return tree
    operation, children = tree
    if operation is None:
        with tracer.start_as_current_span("step"):
            return sum(grow(tracer, child) for child in children)
    with tracer.start_as_current_span("sum", attributes=told(operation__name=operation)) as span:
        total = sum(grow(tracer, child) for child in children)
        span.set_attributes(told(total, total, operation__name=operation))
        return total


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(trees)
def test_whatever_tree_they_make_the_leaves_count(guard, tracer, tree):
    line, total = run(guard, lambda: grow(tracer, tree))
    assert tokens(line.usage) == (total, total)


# --- whose ------------------------------------------------------------------------------------------


def test_outside_of_an_execution_nothing_is_booked_or_kept(tracer):
    with agent(tracer, 100, 10):
        ask(tracer)
        assert span_usage._open == {}


def test_the_innermost_execution_gets_it(guard, tracer):
    inner = guard.idempotent(
        lambda n: ask(tracer, 10 * n, n),
        task_type="inner",
    )

    def body():
        with agent(tracer):
            ask(tracer, 100, 10)
            inner(1)
            with agent(tracer):
                inner(2)
                inner(2)  # reused

    assert tokens(spent(guard, body)) == (100, 10)
    assert sorted(
        tokens(line.usage) for line in guard.ledger.lines() if line.task_type == "inner"
    ) == [(10, 1), (20, 2)]


def test_a_span_that_began_outside_is_not_booked(guard, tracer):
    span = tracer.start_span("llm", attributes=told())
    assert spent(guard, span.end) is None


def test_a_span_that_ends_after_the_body_is_told_late(guard, tracer, warned):
    spans = []
    line, _ = run(guard, lambda: spans.append(tracer.start_span("llm", attributes=told())))
    spans.pop().end()
    [after] = guard.ledger.executions(line.fingerprint)
    assert after.usage is None
    assert "after its body had" in warned()[0]


def test_a_span_that_outlives_a_guarded_call_counts_around_it(guard, tracer):
    """As `record_usage` does there."""
    spans = []
    inner = guard.idempotent(
        lambda n: spans.append(tracer.start_span("llm", attributes=told(100, 10))),
        task_type="inner",
    )

    def body():
        inner(1)
        spans.pop().end()

    assert tokens(spent(guard, body)) == (100, 10)


def aside(call) -> None:
    """Call in a thread that inherits nothing."""
    raised = []

    def caught():
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised where it is looked at
            raised.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def test_a_thread_with_opentelemetrys_context_alone(guard, tracer):
    """As opentelemetry-instrumentation-threading hands it on."""

    def body():
        here = otel.get_current()

        def work():
            token = otel.attach(here)
            with agent(tracer):
                ask(tracer, 100, 10)
            otel.detach(token)

        aside(work)

    assert tokens(spent(guard, body)) == (100, 10)


def test_a_thread_with_a_span_of_the_body_alone(guard, tracer):
    def body():
        with agent(tracer) as around:
            aside(lambda: ask(tracer, 100, 10, context=trace.set_span_in_context(around)))

    assert tokens(spent(guard, body)) == (100, 10)


def test_a_thread_with_the_span_of_the_call_alone(guard, tracer):
    def body():
        call = trace.get_current_span()
        aside(lambda: ask(tracer, 100, 10, context=trace.set_span_in_context(call)))

    assert tokens(spent(guard, body)) == (100, 10)


def test_a_thread_with_our_context_alone(guard, tracer):
    def body():
        copied = copy_context()
        aside(partial(copied.run, ask, tracer, 100, 10, context=otel.Context()))

    assert tokens(spent(guard, body)) == (100, 10)


def test_a_thread_with_nothing_is_nobodys(guard, tracer):
    assert spent(guard, lambda: aside(lambda: ask(tracer))) is None


def test_a_parent_around_the_call_leaves_it_with_the_inner_execution(guard, tracer):
    def outer():
        with agent(tracer) as around:
            parent = trace.set_span_in_context(around, otel.Context())
            return run(guard, lambda: ask(tracer, 100, 10, context=parent), "inner")[0]

    line, inner = run(guard, outer)
    assert (tokens(inner.usage), tokens(line.usage)) == ((100, 10), None)


def test_an_explicit_parent_of_an_execution_elsewhere(guard, tracer):
    began, over = threading.Event(), threading.Event()
    parents, lines = [], []

    def one():
        with agent(tracer) as around:
            parents.append(trace.set_span_in_context(around, otel.Context()))
            began.set()
            assert over.wait(SOON)

    def two():
        ask(tracer, 100, 10, context=parents[0])
        ask(tracer, 7, 7)

    thread = threading.Thread(target=lambda: lines.append(run(guard, one, "one")[0]))
    thread.start()
    assert began.wait(SOON)
    line, _ = run(guard, two, "two")
    over.set()
    thread.join(SOON)
    assert tokens(lines[0].usage) == (100, 10)
    assert tokens(line.usage) == (7, 7)


def test_a_parent_elsewhere_and_a_link_change_nothing(guard, tracer):
    far = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1))
    around = trace.set_span_in_context(NonRecordingSpan(far), otel.Context())

    def body():
        ask(tracer, 100, 10, context=around)
        tracer.start_span("llm", links=[Link(far)], attributes=told(100, 10)).end()

    assert tokens(spent(guard, body)) == (200, 20)


def test_a_guarded_handler_in_the_same_process(guard, tracer):
    """Its parent is a span of another execution, that asked over the wire."""
    lines = []

    def caller():
        with agent(tracer) as around:
            here = around.get_span_context()
            there = SpanContext(here.trace_id, here.span_id, True, here.trace_flags)
            far = NonRecordingSpan(there)

            def handle():
                token = otel.attach(trace.set_span_in_context(far, otel.Context()))
                lines.append(run(guard, lambda: ask(tracer, 100, 10), "handler")[0])
                otel.detach(token)

            aside(handle)

    assert spent(guard, caller) is None
    assert tokens(lines[0].usage) == (100, 10)


def test_modes(guard, tracer):
    observed = guard.idempotent(
        lambda n: ask(tracer, 10, 1),
        task_type="observed",
        mode="observe",
    )
    off = guard.idempotent(lambda n: ask(tracer, 20, 2), task_type="off", mode="off")
    observed(1)
    off(1)
    [line] = guard.ledger.lines()
    assert tokens(line.usage) == (10, 1)


def test_streams(guard, tracer):
    """The executions of two streams that are read in turns."""

    def chunks(n):
        with tracer.start_as_current_span("llm", attributes=told(n, n)):
            yield from range(n)

    def left(n):
        ask(tracer, n, n)
        yield n
        yield n

    stream = guard.idempotent(chunks, task_type="chunks", result=list)
    for pair in zip(stream(3), stream(4), strict=False):
        assert pair[0] == pair[1]
    assert list(stream(5)) == list(range(5))
    early = guard.idempotent(left, task_type="left", result=list)(6)
    next(early)
    early.close()
    booked = {tokens(line.usage) for line in guard.ledger.lines() if line.usage is not None}
    assert {(3, 3), (5, 5), (6, 6)} <= booked


def test_async_streams(guard, tracer):
    async def chunks(n):
        with tracer.start_as_current_span("llm", attributes=told(n, n)):
            for number in range(n):
                await asyncio.sleep(0)
                yield number

    stream = guard.idempotent(chunks, task_type="chunks", result=list)

    async def read(n):
        return [chunk async for chunk in stream(n)]

    async def main():
        return await asyncio.gather(*map(read, (3, 4, 5)))

    assert [len(chunks) for chunks in asyncio.run(main())] == [3, 4, 5]
    assert sorted(tokens(line.usage) for line in guard.ledger.lines()) == [
        (3, 3), (4, 4), (5, 5),
    ]  # fmt: skip


def tree_of(tracer, n: int, step) -> Iterator[None]:
    """A tree three deep of which the leaves tell `n` tokens each, in steps."""
    with agent(tracer, 4 * n, 4 * n, "invoke_workflow"):
        for _ in range(2):
            with agent(tracer, 2 * n, 2 * n):
                for _ in range(2):
                    span = tracer.start_span("chat", attributes=told(n, n))
                    step()
                    yield
                    span.end()


def test_threads_at_once_get_their_own(guard, tracer):
    meet = threading.Barrier(4)

    def work(n):
        for _ in tree_of(tracer, n, lambda: meet.wait(SOON)):
            pass

    guarded = guard.idempotent(work, task_type="tree")
    threads = [threading.Thread(target=guarded, args=(n,)) for n in (1, 10, 100, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert sorted(tokens(line.usage) for line in guard.ledger.lines()) == [
        (4 * n, 4 * n) for n in (1, 10, 100, 1000)
    ]


def test_tasks_at_once_get_their_own(guard, tracer):
    async def request(n):
        with tracer.start_as_current_span("chat", attributes=told(n, n)):
            await asyncio.sleep(0)

    async def step(n):
        with agent(tracer, 2 * n, 2 * n):
            await asyncio.gather(request(n), request(n))

    async def work(n):
        with agent(tracer, 4 * n, 4 * n, "invoke_workflow"):
            await asyncio.gather(step(n), step(n))

    guarded = guard.idempotent(work, task_type="tree")

    async def main():
        await asyncio.gather(*(guarded(n) for n in (1, 10, 100, 1000)))

    asyncio.run(main())
    assert sorted(tokens(line.usage) for line in guard.ledger.lines()) == [
        (4 * n, 4 * n) for n in (1, 10, 100, 1000)
    ]


def test_a_sampled_out_span_is_not_seen():
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    provider.add_span_processor(UsageSpanProcessor())
    guard = Guard(store=MemoryStore(), tracer_provider=provider)
    assert spent(guard, lambda: ask(provider.get_tracer("app"))) is None
    guard.close()
    provider.shutdown()


# --- what it costs -----------------------------------------------------------------------------------


def test_spans_that_never_end_are_let_go(guard, tracer, warned, monkeypatch):
    monkeypatch.setattr(span_usage, "LIMIT", 20)

    def body():
        spans = [tracer.start_span("llm", attributes=told(1, 1)) for _ in range(100)]
        assert len(span_usage._open) == 20
        for span in spans:
            span.end()

    assert tokens(spent(guard, body)) == (20, 20)
    assert len(warned()) == 1


def test_a_chain_of_spans_keeps_none_of_them(guard, tracer):
    """Each begins within the one before, which then ends."""
    kept = []

    def body():
        span = tracer.start_span("first")
        for _ in range(50):
            known = span_usage._open[span_usage._key(span.context)]
            kept.append(weakref.ref(known))
            after = tracer.start_span("next", trace.set_span_in_context(span))
            del known
            span.end()
            span = after
        gc.collect()
        alive = sum(ref() is not None for ref in kept)
        span.end()
        return alive

    monkey = type("Weak", (span_usage._Open,), {"__slots__": ("__weakref__",)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_usage, "_Open", monkey)
        _, alive = run(guard, body)
    assert alive <= 2


def test_shutdown_ends_it(guard, tracer, provider):
    processor = UsageSpanProcessor()
    other = TracerProvider(shutdown_on_exit=False)
    other.add_span_processor(processor)
    their = other.get_tracer("other")

    def body():
        known = dict(span_usage._open)
        before = their.start_span("llm", attributes=told())
        assert span_usage._open != known
        ask(tracer, 1, 1)
        assert processor.force_flush(0)
        processor.shutdown()
        assert span_usage._open == known
        before.end()
        their.start_span("llm", attributes=told())
        assert span_usage._open == known
        processor.on_end(before._readable_span())
        processor.shutdown()
        assert processor.force_flush()

    assert tokens(spent(guard, body)) == (1, 1)
    other.shutdown()


def test_it_never_raises(guard, tracer, warned, monkeypatch):
    def fails(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr(span_usage, "_usage", fails)
    assert spent(guard, lambda: ask(tracer)) is None
    monkeypatch.setattr(span_usage, "_innermost", fails)
    assert spent(guard, lambda: ask(tracer)) is None
    [message] = warned()
    assert "RuntimeError" in message
    assert "secret" not in message


FORKED = """
import os, sys
from opentelemetry.sdk.trace import TracerProvider
from idemguard import Guard
from idemguard.telemetry import UsageSpanProcessor

provider = TracerProvider()
provider.add_span_processor(UsageSpanProcessor())
tracer = provider.get_tracer("app")
guard = Guard(store=sys.argv[1], tracer_provider=provider)

def work(n):
    with tracer.start_as_current_span("agent"):
        about = {"gen_ai.usage.input_tokens": n, "gen_ai.usage.output_tokens": n}
        child = os.fork() if n == 1 else None
        if child == 0:
            guarded(2)
            os._exit(0)
        if child:
            assert os.waitpid(child, 0)[1] == 0
        tracer.start_span("chat", attributes=about).end()

guarded = guard.idempotent(work, task_type="t")
guarded(1)
print(sorted((line.usage.input_tokens, str(line.status)) for line in guard.ledger.lines()))
"""


def test_a_forked_child_books_its_own(tmp_path):
    url = f"sqlite:///{tmp_path / 'guard.db'}"
    done = subprocess.run(
        [sys.executable, "-c", FORKED, url], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "[(1, 'ok'), (2, 'ok')]"


def test_telemetry_has_it():
    assert telemetry.UsageSpanProcessor is UsageSpanProcessor


# --- the real thing ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as base:
        yield base


@pytest.fixture
def nobody_else(monkeypatch) -> None:
    """Nothing asks anybody but the stub for anything."""
    resolve = socket.getaddrinfo

    def look_up(host, *args, **kwargs):
        assert host in {"127.0.0.1", b"127.0.0.1"}
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


INSTRUMENTORS = {
    "openllmetry": ("opentelemetry.instrumentation.openai", "OpenAIInstrumentor"),
    "openinference": ("openinference.instrumentation.openai", "OpenAIInstrumentor"),
    "anthropic": ("opentelemetry.instrumentation.anthropic", "AnthropicInstrumentor"),
}


def load(name: str):
    """A package, whatever its own import warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.fixture
def instrument(provider, nobody_else):
    """Switches instrumentations on, until the end of the test."""
    made = []

    def on(*names) -> None:
        for name in names:
            module, kind = INSTRUMENTORS[name]
            instrumentor = getattr(load(module), kind)()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they import what they wrap
                instrumentor.instrument(tracer_provider=provider)
            made.append(instrumentor)

    load("openai")
    load("anthropic")
    yield on
    for instrumentor in reversed(made):
        instrumentor.uninstrument()
    unwrap()


def unwrap() -> None:
    """OpenLLMetry leaves the OpenAI SDK's methods wrapped."""
    modules = [m for n, m in sys.modules.items() if n.startswith("openai.resources.")]
    for kind in {v for m in modules for v in vars(m).values() if isinstance(v, type)}:
        for name, method in list(vars(kind).items()):
            if isinstance(method, wrapt.FunctionWrapper):
                setattr(kind, name, method.__wrapped__)


def without(usage: Usage, **fields) -> Usage:
    return Usage(**{n: getattr(usage, n) for n in Usage.__slots__} | fields)


def chat(client) -> str:
    answer = client.chat.completions.create(model="gpt-4.1", messages=HELLO)
    return answer.choices[0].message.content


def chat_stream(client) -> str:
    with client.chat.completions.create(
        model="gpt-4.1", messages=HELLO, stream=True, stream_options={"include_usage": True}
    ) as stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def chat_response(client) -> str:
    return client.responses.create(model="gpt-4.1", input="Hello").output_text


def response_stream(client) -> int:
    return len(list(client.responses.create(model="gpt-4.1", input="Hello", stream=True)))


def embed(client) -> list:
    answer = client.embeddings.create(model="text-embedding-3-small", input="Hello")
    return answer.data[0].embedding


OPENAI = [chat, chat_stream, chat_response, response_stream, embed]
EMBEDDED = Usage(input_tokens=8, output_tokens=0, model="text-embedding-3-small", provider="openai")


@pytest.mark.parametrize("call", OPENAI)
@pytest.mark.parametrize(
    "names",
    [
        ["openllmetry"],
        ["openinference"],
        ["openllmetry", "openinference"],
        ["openinference", "openllmetry"],
    ],
    ids="-".join,
)
def test_openai(guard, instrument, url, names, call):
    instrument(*names)
    with load("openai").OpenAI(api_key="x", base_url=f"{url}/v1") as client:

        def body():
            call(client)
            return call(client) and None

        line, _ = run(guard, body)
    one = EMBEDDED if call is embed else CHAT
    assert tokens(line.usage) == (2 * one.input_tokens, 2 * one.output_tokens)
    assert (line.usage.model, line.usage.provider) == (one.model, one.provider)
    if call is not embed:
        assert line.usage.cache_read_tokens == 2 * 512
    if call is not embed and (call is not chat_stream or "openinference" in names):
        assert line.usage.reasoning_tokens == 2 * 3  # OpenLLMetry leaves it out of a stream
    assert len(line.spent.inputs) == 2


@pytest.mark.parametrize("names", [["openllmetry"], ["openllmetry", "openinference"]], ids="-".join)
def test_openai_told_in_three_ways(guard, instrument, url, names):
    """By spans, by the body, by what it returns; it is one call."""
    instrument(*names)
    with load("openai").OpenAI(api_key="x", base_url=f"{url}/v1") as client:

        def body():
            answer = client.chat.completions.create(model="gpt-4.1", messages=HELLO)
            record_usage(answer)
            return answer.model_dump()

        line, answer = run(guard, body)
    assert without_id(line.usage) == CHAT
    assert line.spent.responses == (answer["id"],)


@pytest.mark.parametrize(
    "names", [["openllmetry"], ["openinference"], ["openllmetry", "openinference"]], ids="-".join
)
def test_openai_at_once(guard, instrument, url, names):
    instrument(*names)

    async def main():
        async with load("openai").AsyncOpenAI(api_key="x", base_url=f"{url}/v1") as client:

            async def body(n):
                for _ in range(n):
                    await asyncio.gather(
                        client.chat.completions.create(model="gpt-4.1", messages=HELLO),
                        client.responses.create(model="gpt-4.1", input="Hello"),
                        client.responses.create(model="gpt-4.1", input="Hello"),
                    )

            guarded = guard.idempotent(body, task_type="t")
            await asyncio.gather(*map(guarded, (1, 2, 3)))

    asyncio.run(main())
    lines = list(guard.ledger.lines())
    assert sorted(line.usage.input_tokens for line in lines) == [3 * 2255 * n for n in (1, 2, 3)]


def message(client) -> str:
    answer = client.messages.create(model="claude-opus-5-5", max_tokens=100, messages=HELLO)
    return answer.content[0].text


def message_stream(client) -> int:
    ask = {"model": "claude-opus-5-5", "max_tokens": 100, "messages": HELLO}
    return len(list(client.messages.create(**ask, stream=True)))


def message_helper(client) -> str:
    with client.messages.stream(model="claude-opus-5-5", max_tokens=100, messages=HELLO) as stream:
        return "".join(stream.text_stream)


@pytest.mark.parametrize("call", [message, message_stream, message_helper])
def test_anthropic(guard, instrument, url, call):
    instrument("anthropic")
    with load("anthropic").Anthropic(api_key="x", base_url=url) as client:
        line, _ = run(guard, lambda: call(client) and None)
    # it adds the first output number of a stream to the last, though they are of one response
    said = MESSAGE if call is message else without(MESSAGE, output_tokens=551)
    assert without_id(line.usage) == said


def test_anthropic_stream_that_the_body_tells_of(guard, instrument, url):
    instrument("anthropic")
    with load("anthropic").Anthropic(api_key="x", base_url=url) as client:

        def body():
            ask = {"model": "claude-opus-5-5", "max_tokens": 100, "messages": HELLO}
            for event in client.messages.create(**ask, stream=True):
                record_usage(event)

        assert spent(guard, body) == MESSAGE


def test_anthropic_at_once(guard, instrument, url):
    instrument("anthropic")

    async def main():
        async with load("anthropic").AsyncAnthropic(api_key="x", base_url=url) as client:

            async def body(n):
                for _ in range(n):
                    await client.messages.create(
                        model="claude-opus-5-5", max_tokens=100, messages=HELLO
                    )

            guarded = guard.idempotent(body, task_type="t")
            await asyncio.gather(*map(guarded, (1, 2, 3)))

    asyncio.run(main())
    lines = list(guard.ledger.lines())
    assert sorted(line.usage.input_tokens for line in lines) == [12307 * n for n in (1, 2, 3)]


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("names", [[], ["openllmetry"]], ids=["alone", "openllmetry"])
def test_pydantic_ai(guard, instrument, provider, url, sums, names):
    """An agent's span around its requests' spans, around those of the SDK's instrumentation."""
    instrument(*names)
    agents = load("pydantic_ai")
    openai = load("pydantic_ai.models.openai")
    settings = load("pydantic_ai.models.instrumented").InstrumentationSettings(
        tracer_provider=provider, use_aggregated_usage_attribute_names=not sums
    )
    capability = load("pydantic_ai.capabilities").Instrumentation(settings=settings)

    async def body(n):
        async with load("openai").AsyncOpenAI(api_key="x", base_url=f"{url}/v1") as client:
            own = load("pydantic_ai.providers.openai").OpenAIProvider(openai_client=client)
            model = openai.OpenAIChatModel("gpt-4.1", provider=own)
            made = agents.Agent(model, capabilities=[capability])
            for _ in range(n):
                await made.run("Hello")

    asyncio.run(guard.idempotent(body, task_type="t")(2))
    [line] = guard.ledger.lines()
    assert tokens(line.usage) == (2 * 2255, 2 * 5)
    assert (line.usage.cache_read_tokens, line.usage.reasoning_tokens) == (2 * 512, 2 * 3)

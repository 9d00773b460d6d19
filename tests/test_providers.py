"""Usage is read from whatever form a provider gives it, and from nothing that only looks like it."""

from __future__ import annotations

import copy
import json
import timeit
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from stub_llm import (
    ANTHROPIC_USAGE,
    BEDROCK_USAGE,
    GOOGLE_USAGE,
    OPENAI_USAGE,
    RESPONSES_USAGE,
    anthropic_events,
    anthropic_message,
    chat_chunks,
    chat_completion,
    converse,
    converse_events,
    embeddings,
    google_chunks,
    google_content,
    openai_response,
    response_events,
)

from idemguard.providers import Reading, is_response, readings
from idemguard.usage import TOKENS, Usage

CACHED = (2255, 5, 512, None, 3)
CLAUDE = (12307, 550, 0, 12304, None)
LANGCHAIN = {
    "type": "ai",
    "content": "Hello",
    "id": "lc_run--1-0",
    "usage_metadata": {
        "input_tokens": 350,
        "output_tokens": 240,
        "total_tokens": 590,
        "input_token_details": {"audio": 10, "cache_creation": 200, "cache_read": 100},
        "output_token_details": {"audio": 10, "reasoning": 200},
    },
    "response_metadata": {"id": "r1", "model_name": "m", "model_provider": "bedrock_converse"},
}
PYDANTIC_AI = {
    "kind": "response",
    "parts": [{"content": "Hello", "part_kind": "text"}],
    "usage": {
        "input_tokens": 20,
        "cache_write_tokens": 3,
        "cache_read_tokens": 7,
        "output_tokens": 9,
        "input_audio_tokens": 0,
        "details": {"reasoning_tokens": 4},
    },
    "model_name": "gpt-5",
    "provider_name": "azure",
    "provider_response_id": "p1",
}
BEDROCK = {**converse(), "ResponseMetadata": {"RequestId": "b1", "HTTPStatusCode": 200}}
ANSWERS = [
    pytest.param(chat_completion(1), CACHED, "chatcmpl-1", id="chat"),
    pytest.param(openai_response(1), (2255, 5, 512, 0, 3), "resp_1", id="responses"),
    pytest.param(embeddings(1), (8, 0, None, None, None), None, id="embeddings"),
    pytest.param(anthropic_message(1), CLAUDE, "msg_1", id="anthropic"),
    pytest.param(google_content(1), (1000, 100, 300, None, 60), "google-1", id="google"),
    pytest.param(BEDROCK, (12307, 550, 2304, 10000, None), "b1", id="bedrock"),
    pytest.param(LANGCHAIN, (350, 240, 100, 200, 200), "r1", id="langchain"),
    pytest.param(PYDANTIC_AI, (20, 9, 7, 3, 4), "p1", id="pydantic-ai"),
]


def numbers(usage: Usage) -> tuple[int | None, ...]:
    return tuple(getattr(usage, name) for name in TOKENS)


def one(source: object, *, strict: bool = False) -> Usage:
    [reading] = readings(source, strict=strict)
    return reading.usage


def as_objects(value: Any) -> Any:
    """The same fields as attributes."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_objects(inner) for key, inner in value.items()})
    return [as_objects(inner) for inner in value] if isinstance(value, list) else value


# ---- the forms


@pytest.mark.parametrize(("answer", "expected", "response_id"), ANSWERS)
def test_a_plain_dict_is_read_as_the_object_is(answer, expected, response_id):
    for strict in (True, False):
        assert numbers(one(answer, strict=strict)) == expected
        assert one(answer, strict=strict).response_id == response_id
    forms = [UserDict(answer), MappingProxyType(answer), OrderedDict(answer), as_objects(answer)]
    for form in forms:
        assert numbers(one(form)) == expected
        assert one(form).response_id == response_id


@pytest.mark.parametrize(
    ("answer", "model", "provider"),
    [
        (chat_completion(1), "gpt-4.1-2025-04-14", "openai"),
        ({**chat_completion(1), "prompt_filter_results": []}, "gpt-4.1-2025-04-14", "azure"),
        (openai_response(1), "gpt-4.1-2025-04-14", "openai"),
        (anthropic_message(1), "claude-opus-5-5", "anthropic"),
        (google_content(1), "gemini-2.5-flash", "gcp.gen_ai"),
        (BEDROCK, None, "aws.bedrock"),
        (LANGCHAIN, "m", "aws.bedrock"),
        (PYDANTIC_AI, "gpt-5", "azure"),
    ],
)
def test_model_and_provider(answer, model, provider):
    usage = one(answer, strict=True)
    assert usage.model == model
    assert usage.provider == ("azure.ai.openai" if provider == "azure" else provider)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (OPENAI_USAGE, CACHED),
        (RESPONSES_USAGE, (2255, 5, 512, 0, 3)),
        (ANTHROPIC_USAGE, CLAUDE),
        (GOOGLE_USAGE, (1000, 100, 300, None, 60)),
        (BEDROCK_USAGE, (12307, 550, 2304, 10000, None)),
        (LANGCHAIN["usage_metadata"], (350, 240, 100, 200, 200)),
        (PYDANTIC_AI["usage"], (20, 9, 7, 3, 4)),
    ],
    ids=["chat", "responses", "anthropic", "google", "bedrock", "langchain", "pydantic-ai"],
)
def test_the_usage_part_alone(part, expected):
    for form in (part, UserDict(part), as_objects(part), {"usage": part}, [part]):
        assert numbers(one(form)) == expected
    assert readings(part, strict=True) == []


def test_the_worked_cases():
    claude = {
        "input_tokens": 3,
        "cache_creation_input_tokens": 12304,
        "cache_read_input_tokens": 0,
        "output_tokens": 550,
    }
    assert numbers(one(claude)) == CLAUDE
    chat = {
        "prompt_tokens": 2255,
        "prompt_tokens_details": {"cached_tokens": 512},
        "completion_tokens": 5,
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert one(chat).total_tokens == 2260


def test_litellm_counts_the_cache_into_the_prompt():
    usage = one(
        {
            "prompt_tokens": 12307,
            "completion_tokens": 550,
            "cache_creation_input_tokens": 12304,
            "cache_read_input_tokens": 1,
        }
    )
    assert numbers(usage) == (12307, 550, 1, 12304, None)


def test_langchain_tells_what_it_wrote_by_lifetime_and_by_tier():
    details = {"cache_read": 1, "cache_creation": 0, "ephemeral_5m_input_tokens": 30}
    whole = {"input_tokens": 50, "output_tokens": 9, "total_tokens": 59}
    lived = {**whole, "input_token_details": {**details, "ephemeral_1h_input_tokens": 4}}
    assert numbers(one(lived)) == (50, 9, 1, 34, None)
    twice = {**whole, "input_token_details": {**details, "cache_creation": 30}}
    assert one(twice).cache_write_tokens == 30
    tiers = {
        **whole,
        "input_token_details": {"flex_cache_read": 5, "flex": 45},
        "output_token_details": {"flex_reasoning": 2, "flex": 7},
    }
    assert numbers(one(tiers)) == (50, 9, 5, None, 2)


def test_older_messages_of_langchain_tell_it_with_the_rest():
    about = {**LANGCHAIN["response_metadata"], "token_usage": OPENAI_USAGE}
    older = {**LANGCHAIN, "usage_metadata": None, "response_metadata": about}
    assert numbers(one(older, strict=True)) == CACHED
    assert one(older).response_id == "r1"


def test_what_google_leaves_out_is_zero_only_where_the_total_says_so():
    assert numbers(one({"promptTokenCount": 7, "totalTokenCount": 7}))[:2] == (7, 0)
    assert numbers(one({"promptTokenCount": 7, "totalTokenCount": 9}))[:2] == (7, None)
    assert numbers(one({"promptTokenCount": 7, "thoughtsTokenCount": 2}))[:2] == (7, 2)


def test_a_compaction_is_counted_beside_the_message():
    usage = {
        "input_tokens": 100,
        "cache_read_input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "output_tokens": 10,
        "iterations": [
            {
                "type": "compaction",
                "input_tokens": 1000,
                "cache_read_input_tokens": 50,
                "cache_creation_input_tokens": 0,
                "output_tokens": 70,
            },
            {
                "type": "message",
                "input_tokens": 100,
                "cache_read_input_tokens": 5,
                "cache_creation_input_tokens": 0,
                "output_tokens": 10,
            },
        ],
    }
    assert numbers(one({**anthropic_message(1), "usage": usage})) == (1155, 80, 55, 0, None)


# ---- what is not known


@pytest.mark.parametrize(
    "source",
    [
        {**chat_completion(1), "usage": None},
        {name: value for name, value in chat_completion(1).items() if name != "usage"},
        {**anthropic_message(1), "usage": {}},
        {**google_content(1), "usageMetadata": None},
        {"usage": {"total_tokens": 2260}},
        {"total_tokens": 2260},
        {"usageMetadata": {"totalTokenCount": 9}},
        openai_response(1, "in_progress"),
        {**LANGCHAIN, "usage_metadata": None},
        {**PYDANTIC_AI, "usage": {"input_tokens": 0, "output_tokens": 0, "details": {}}},
        {"usage": "2260 tokens"},
        {"usage": [1, 2]},
        {"usage": 7},
        {},
        [],
        None,
        "input_tokens",
        b"",
        7,
        7.0,
        True,
        object(),
        int,
    ],
)
def test_no_usage_is_no_reading(source):
    assert readings(source) == []
    assert readings(source, strict=True) == []


@pytest.mark.parametrize("wrong", [True, False, -1, 1.5, "12", float("nan"), float("inf"), [1], {}])
def test_what_is_no_number_of_tokens_is_unknown(wrong):
    assert numbers(one({"input_tokens": wrong, "output_tokens": 3})) == (None, 3, None, None, None)
    assert readings({"prompt_tokens": wrong, "completion_tokens": wrong}) == []
    assert one({"inputTokens": 1, "cacheReadInputTokens": wrong}).input_tokens == 1


def test_whole_numbers_of_json_and_zero_are_numbers():
    assert numbers(one({"input_tokens": 12.0, "output_tokens": 0}))[:2] == (12, 0)
    assert type(one({"input_tokens": 12.0}).input_tokens) is int


def test_one_part_without_the_other():
    assert numbers(one({"input_tokens": 5}))[:2] == (5, None)
    assert numbers(one({"completion_tokens": 5}))[:2] == (None, 5)
    assert numbers(one({"prompt_tokens": 5, "total_tokens": 5}))[:2] == (5, 0)
    assert numbers(one({"prompt_tokens": 5, "total_tokens": 7}))[:2] == (5, None)
    # without the input the cache says nothing of it
    assert numbers(one({"outputTokens": 5, "cacheReadInputTokens": 9}))[:3] == (None, 5, 9)


# ---- streams


def flags(found: list[Reading]) -> list[tuple[bool, bool, bool, bool]]:
    return [(r.stream, r.adds, r.opens, r.closes) for r in found]


@pytest.mark.parametrize("strict", [True, False])
def test_the_parts_of_streams(strict):
    def read(parts):
        assert all(is_response(part) for part in parts)
        return [reading for part in parts for reading in readings(part, strict=strict)]

    chunks = read(chat_chunks(1))
    assert flags(chunks) == [(True, False, False, False)]
    assert chunks[0].usage.response_id == "chatcmpl-1"
    events = read(response_events(1))
    assert flags(events) == [(True, False, False, True)]
    assert events[0].usage.response_id == "resp_1"
    start, delta, stop = read(anthropic_events(1))
    assert flags([start, delta, stop]) == [
        (True, False, True, False),
        (True, False, False, False),
        (True, False, False, True),
    ]
    assert numbers(start.usage) == (12307, 1, 0, 12304, None)
    assert numbers(delta.usage) == CLAUDE
    assert delta.usage.response_id is None
    assert stop.usage == Usage()
    [whole] = read([{"type": "message_stop", "message": anthropic_message(1)}])
    assert flags([whole]) == [(True, False, False, True)]
    assert numbers(whole.usage) == CLAUDE
    google = read(google_chunks(1))
    assert [reading.usage.output_tokens for reading in google] == [61, 80, 100]
    assert [reading.closes for reading in google] == [False, False, True]
    [last] = read([{name: event} for name, event in converse_events()])
    assert numbers(last.usage) == (12307, 550, 2304, 10000, None)
    assert not last.stream


def test_a_delta_that_does_not_tell_the_cache_does_not_tell_the_input():
    older = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 550}}
    bare = {"type": "message_delta", "usage": {"input_tokens": 3, "output_tokens": 550}}
    for event in (older, bare):
        assert numbers(one(event, strict=True)) == (None, 550, None, None, None)
    cached = {**bare, "usage": {**bare["usage"], "cache_read_input_tokens": 4}}
    assert numbers(one(cached, strict=True)) == (7, 550, 4, None, None)


def test_zeros_at_the_start_of_a_message_are_not_known_yet():
    opening = {**anthropic_message(1), "usage": {"input_tokens": 0, "output_tokens": 0}}
    [reading] = readings({"type": "message_start", "message": opening}, strict=True) or [None]
    assert reading.opens
    assert numbers(reading.usage)[:2] == (None, None)
    assert reading.usage.response_id == "msg_1"


def test_chunks_of_langchain_add_and_one_of_them_names_the_model():
    chunk = {**LANGCHAIN, "type": "AIMessageChunk"}
    [reading] = readings(chunk, strict=True)
    assert (reading.stream, reading.adds) == (True, True)
    assert reading.usage.response_id == "lc_run--1-0"
    [named] = readings({**chunk, "usage_metadata": None}, strict=True)
    assert (named.usage.model, named.usage.total_tokens) == ("m", None)
    assert readings({**chunk, "usage_metadata": None, "response_metadata": {}}, strict=True) == []


# ---- several


def test_a_list_is_as_many_reports_as_it_holds():
    both = [chat_completion(1), anthropic_message(2), [google_content(3)], None, "text"]
    found = readings(both)
    assert [reading.usage.response_id for reading in found] == ["chatcmpl-1", "msg_2", "google-3"]
    assert readings(tuple(both)) == found
    assert readings(both, strict=True) == []
    same = {"input_tokens": 1}
    assert len(readings([same, same])) == 1  # one object is one report
    assert len(readings([same, dict(same)])) == 2


def test_messages_are_read_where_they_are_handed_over():
    state = {"messages": [{"type": "human", "content": "Hi"}, LANGCHAIN]}
    assert one(state).total_tokens == 590
    assert readings(state, strict=True) == []


def test_our_own_form():
    usage = Usage(input_tokens=1, provider="mine", response_id="x")
    assert one(usage) == usage
    given = {"input_tokens": 1, "provider": "mine", "model": "m", "response_id": "x"}
    assert one(given) == Usage(**given)
    assert readings(usage, strict=True) == []


# ---- strictness


class Evil:
    """Looks like everything and counts who looks."""

    touched = 0

    def __getattr__(self, name):
        type(self).touched += 1
        raise RuntimeError(name)


class Property:
    touched = 0

    @property
    def usage(self):
        type(self).touched += 1
        return {"input_tokens": 5, "output_tokens": 5}


class Odd(dict):
    """A mapping that must not be asked."""

    def __getitem__(self, key):
        raise AssertionError(key)

    get = __contains__ = __iter__ = __len__ = __getitem__


@dataclass
class Mine:
    usage: dict = field(default_factory=lambda: dict(OPENAI_USAGE))
    id: str = "chatcmpl-1"
    object: str = "chat.completion"
    choices: list = field(default_factory=list)


class Model(BaseModel):
    usage: dict = ANTHROPIC_USAGE
    id: str = "msg_1"
    type: str = "message"
    role: str = "assistant"
    content: list = []


class Pair(NamedTuple):
    usage: dict
    id: str


@pytest.mark.parametrize(
    "value",
    [
        {"usage": {"input_tokens": 5, "output_tokens": 6}},
        {"usage": OPENAI_USAGE},
        {"usage": OPENAI_USAGE, "model": "m", "id": "x"},
        {"input_tokens": 5, "output_tokens": 6, "total_tokens": 11},
        {"usage_metadata": LANGCHAIN["usage_metadata"]},
        {"usageMetadata": GOOGLE_USAGE},
        {"metadata": {"usage": BEDROCK_USAGE}},
        {"type": "message", "usage": ANTHROPIC_USAGE},
        {"type": "message", "role": "assistant", "usage": ANTHROPIC_USAGE},
        {"type": "message", "role": "assistant", "usage": ANTHROPIC_USAGE, "id": "msg_1"},
        {"type": "message", "role": "assistant", "usage": ANTHROPIC_USAGE, "content": []},
        {"type": "message", "usage": ANTHROPIC_USAGE, "content": [], "id": "msg_1"},
        {"type": "message_start", "message": {"usage": ANTHROPIC_USAGE}},
        {"type": "ai", "usage_metadata": LANGCHAIN["usage_metadata"]},
        {"object": "chat.completion", "usage": OPENAI_USAGE},
        {"object": "list", "usage": OPENAI_USAGE, "data": None},
        {"kind": "response", "usage": PYDANTIC_AI["usage"]},
        {"stopReason": "end_turn", "usage": BEDROCK_USAGE},
        {"result": chat_completion(1)},
        {"messages": [LANGCHAIN]},
        {**chat_completion(1), "usage": Mine()},
        [chat_completion(1)],
        (chat_completion(1),),
        json.dumps(chat_completion(1)),
        UserDict(chat_completion(1)),
        Mine(),
        Model(),
        Pair(OPENAI_USAGE, "x"),
        as_objects(chat_completion(1)),
    ],
)
def test_nothing_is_guessed_of_a_value_that_was_returned(value):
    assert readings(value, strict=True) == []


@pytest.mark.parametrize("value", [Mine(), Model(), Pair(OPENAI_USAGE, "x")])
def test_objects_of_any_kind_are_read_where_they_are_handed_over(value):
    assert one(value).response_id == value.id
    assert one(value).total_tokens in {2260, 12857}


def test_no_code_of_a_returned_value_is_run():
    before = (Evil.touched, Property.touched)
    whole = {**chat_completion(1), "choices": [Evil()], "id": Evil(), "model": Evil()}
    assert numbers(one(whole, strict=True)) == CACHED
    values = [Evil(), Property(), {"usage": Evil()}, {"object": Evil(), "usage": Property()}]
    values += [{**google_content(1), "candidates": [Evil()], "usageMetadata": Property()}]
    values += [{**anthropic_message(1), "usage": Evil()}, {**BEDROCK, "usage": Property()}]
    for value in values:
        assert readings(value, strict=True) == []
    assert (Evil.touched, Property.touched) == before
    # a dict's own methods count, not those of a class made of it
    assert numbers(one(Odd(chat_completion(1)), strict=True)) == CACHED
    assert numbers(one(defaultdict(Evil, chat_completion(1)), strict=True)) == CACHED


def test_a_name_of_an_sdk_is_no_proof():
    fake = type("ChatCompletion", (), {"__module__": "openaix.types", "usage": OPENAI_USAGE})
    assert readings(fake(), strict=True) == []
    odd = type("Odd", (), {"__module__": 7, "usage": OPENAI_USAGE})
    assert readings(odd(), strict=True) == []


@pytest.mark.parametrize(
    "value", ["x" * 1000, 7, None, {"a": 1}, dict.fromkeys(range(100_000)), [1], Property()]
)
def test_an_ordinary_value_costs_next_to_nothing(value):
    runs = 2000
    seconds = min(timeit.repeat(lambda: readings(value, strict=True), number=runs, repeat=5))
    assert seconds / runs < 20e-6  # it is about half a microsecond


# ---- never an error


class Raising(UserDict):
    def __getitem__(self, key):
        raise KeyError(key)

    def get(self, key, default=None):
        raise OSError(key)


class Meta(type):
    def __getattribute__(cls, name):
        raise RuntimeError(name)

    __hash__ = None


class Metal(metaclass=Meta):
    usage = OPENAI_USAGE


def cyclic() -> list[Any]:
    knot: dict[str, Any] = {"type": "message_start"}
    knot |= {"usage": knot, "message": knot, "messages": [knot], "response": knot, "data": knot}
    ring: list[Any] = [knot]
    ring += [ring] * 1000
    return ring


def nested(depth: int) -> list[Any]:
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]
    return deep


ODD = {
    "raising attributes": Evil,
    "raising mapping": Raising,
    "raising class": lambda: Metal(),  # noqa: PLW0108 - nobody can ask the class for its name
    "cycle": cyclic,
    "depth": lambda: nested(100_000),
    "mock": MagicMock,
    "async mock": AsyncMock,
    "mock of a dict": lambda: Mock(spec=dict),
    "mock of a list": lambda: MagicMock(spec=list),
    "mock within": lambda: {"usage": MagicMock(), "choices": [], "object": "chat.completion"},
    "mocks within": lambda: {"generations": MagicMock(), "llm_output": MagicMock()},
    "generator": lambda: (n for n in "abc"),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_odd_objects_hold_nothing(make):
    assert readings(make()) == []
    assert readings(make(), strict=True) == []
    assert is_response(make()) in {True, False}


KEYS = st.sampled_from(
    [
        "type",
        "object",
        "id",
        "model",
        "role",
        "usage",
        "message",
        "response",
        "choices",
        "content",
        "data",
        "parts",
        "kind",
        "metadata",
        "usage_metadata",
        "usageMetadata",
        "candidates",
        "stopReason",
        "output",
        "metrics",
        "iterations",
        "messages",
        "generations",
        "llm_output",
        "response_metadata",
        "input_tokens",
        "output_tokens",
        "prompt_tokens",
        "completion_tokens",
        "prompt_tokens_details",
        "inputTokens",
        "promptTokenCount",
        "details",
    ]
)
WORDS = st.sampled_from(
    [
        "message",
        "assistant",
        "message_start",
        "message_delta",
        "message_stop",
        "chat.completion",
        "list",
        "response",
        "response.completed",
        "ai",
        "AIMessageChunk",
        "compaction",
        "chunk",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | WORDS
TREES = st.recursive(
    LEAVES | st.builds(MagicMock) | st.builds(Evil),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=6)
        | st.dictionaries(KEYS, inner, max_size=6).map(as_objects)
        | st.dictionaries(KEYS, inner, max_size=6).map(UserDict)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(TREES, st.booleans())
def test_it_never_raises(source, strict):
    for reading in readings(source, strict=strict):
        assert isinstance(reading, Reading)
        assert isinstance(reading.usage, Usage)
    assert is_response(source) in {True, False}


COUNTS = st.none() | st.integers(0, 10**12)


@settings(max_examples=200, deadline=None)
@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_anthropic_and_bedrock_sum_up_what_they_know(fresh, read, write, output):
    claude = {
        "input_tokens": fresh,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": write,
        "output_tokens": output,
    }
    amazon = {
        "inputTokens": fresh,
        "cacheReadInputTokens": read,
        "cacheWriteInputTokens": write,
        "outputTokens": output,
    }
    sent = None if fresh is None else fresh + (read or 0) + (write or 0)
    expected = (sent, output, read, write, None)
    found = readings(claude)
    assert [numbers(reading.usage) for reading in found] in ([expected], [])
    assert bool(found) is any(count is not None for count in expected)
    if fresh is not None or output is not None:
        assert numbers(one(amazon)) == expected


@pytest.mark.parametrize(("answer", "expected", "response_id"), ANSWERS)
def test_reading_changes_nothing(answer, expected, response_id):
    before = copy.deepcopy(answer)
    readings(answer)
    readings(answer, strict=True)
    assert answer == before


# ---- answers that tell nothing


def test_what_is_an_answer_though_it_tells_nothing():
    silent = [
        {**chat_completion(1), "usage": None},
        chat_chunks(1)[0],
        {"type": "response.output_text.delta", "delta": "Hello"},
        {"type": "content_block_delta", "index": 0},
        {"type": "ping"},
        {"messageStart": {"role": "assistant"}},
        {"id": "x", "usage": None},
        SimpleNamespace(usage=None),
        {"usage": {"total_tokens": 5}},
    ]
    for source in [*silent, silent, tuple(silent)]:
        assert is_response(source)
        assert readings(source) == []
    for source in ({}, [], None, "text", 7, object(), MagicMock(), {"a": 1}, [{"a": 1}], Usage):
        assert not is_response(source)

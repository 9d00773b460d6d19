"""What the real SDKs parse from a server's bytes is read as what the server said."""

from __future__ import annotations

import asyncio
import gc
import importlib
import socket
import warnings
from collections.abc import Iterator
from contextlib import closing
from functools import reduce
from operator import add

import pytest
from stub_llm import (
    CHAT,
    MESSAGE,
    anthropic_message,
    chat_completion,
    converse,
    google_content,
    openai_response,
    serving,
)

from idemguard.providers import Reading, is_response, readings
from idemguard.usage import Meter, Usage

CONTENT = Usage(
    input_tokens=1000,
    output_tokens=100,
    cache_read_tokens=300,
    reasoning_tokens=60,
    model="gemini-2.5-flash",
    provider="gcp.gen_ai",
)
CONVERSE = Usage(
    input_tokens=12307,
    output_tokens=550,
    cache_read_tokens=2304,
    cache_write_tokens=10000,
    provider="aws.bedrock",
)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as base:
        yield base


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch) -> Iterator[None]:
    """No SDK asks anybody but the stub for anything."""
    asked, resolve = [], socket.getaddrinfo

    def look_up(host, *args, **kwargs):
        if host not in {"127.0.0.1", b"127.0.0.1"}:
            asked.append(host)
            raise OSError(f"no such host here: {host}")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield
    loop = getattr(asyncio.get_event_loop_policy()._local, "_loop", None)
    if loop is not None:  # an SDK made one of its own, and left it open
        loop.close()
        asyncio.set_event_loop(None)
    assert asked == []


def load(name: str):
    """An SDK, whatever its own import warns of."""
    gc.disable()  # a fifth of the time that thousands of new classes take
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    finally:
        gc.enable()


def without_id(usage: Usage) -> Usage:
    assert usage.response_id
    return Usage(**{n: getattr(usage, n) for n in Usage.__slots__ if n != "response_id"})


def whole(answer: object, *, strict: bool = True) -> Usage:
    """The one report of a response, its id checked and taken away."""
    [reading] = readings(answer, strict=strict)
    return without_id(reading.usage)


def dumps(answer) -> list[dict]:
    return [answer.model_dump(), answer.model_dump(mode="json", exclude_none=True)]


def told(parts: list, *, strict: bool = True) -> tuple[Usage, int]:
    """What the parts of one stream come to as an execution counts them, and in how many reports."""
    meter = Meter()
    for part in parts:
        if not (found := readings(part, strict=strict)):
            assert is_response(part)
        for usage, *flags in found:
            names = ("stream", "adds", "opens", "closes")
            meter.add(usage, **dict(zip(names, flags, strict=True)), reader=1)
    spent = meter.spent()
    assert spent.usage is not None
    fields = {n: getattr(spent.usage, n) for n in Usage.__slots__ if n != "response_id"}
    return Usage(**fields), len(spent.inputs)


def test_openai_chat(url):
    openai = load("openai")
    with openai.OpenAI(api_key="x", base_url=f"{url}/v1") as client:
        answer = client.chat.completions.create(model="gpt-4.1", messages=HELLO)
        ask = {"model": "gpt-4.1", "messages": HELLO, "stream_options": {"include_usage": True}}
        with client.chat.completions.create(stream=True, **ask) as stream:
            chunks = list(stream)
        with client.chat.completions.stream(**ask) as helper:
            events = list(helper)
        silent = list(client.chat.completions.create(model="g", messages=HELLO, stream=True))
        vectors = client.embeddings.create(model="text-embedding-3-small", input="Hello")
    assert whole(answer) == CHAT
    assert CHAT.total_tokens == 2260
    assert [whole(dump) for dump in dumps(answer)] == [CHAT, CHAT]
    assert answer.id == readings(answer, strict=True)[0].usage.response_id
    [reading] = [reading for chunk in chunks for reading in readings(chunk, strict=True)]
    assert reading.stream
    assert told(chunks) == told([chunk.model_dump() for chunk in chunks]) == (CHAT, 1)
    assert told(events) == (CHAT, 1)
    assert [readings(chunk) for chunk in silent] == [[]] * len(silent)
    assert readings(vectors, strict=True) == [
        Reading(
            Usage(
                input_tokens=8, output_tokens=0, model="text-embedding-3-small", provider="openai"
            )
        )
    ]
    # the usage part alone is a report where it was handed over, and no answer where it was not
    assert readings(answer.usage)[0].usage.total_tokens == 2260
    assert readings(answer.usage, strict=True) == []
    assert is_response(answer)
    assert not is_response(client)


def test_openai_chat_async(url):
    openai = load("openai")

    async def main():
        async with openai.AsyncOpenAI(api_key="x", base_url=f"{url}/v1") as client:
            ask = {"model": "gpt-4.1", "messages": HELLO}
            answer = await client.chat.completions.create(**ask)
            stream = await client.chat.completions.create(
                **ask, stream=True, stream_options={"include_usage": True}
            )
            return answer, [chunk async for chunk in stream]

    answer, chunks = asyncio.run(main())
    assert whole(answer) == CHAT
    assert told(chunks) == (CHAT, 1)


def test_openai_responses(url):
    openai = load("openai")
    expected = Usage(**{**fields_of(CHAT), "cache_write_tokens": 0})
    with openai.OpenAI(api_key="x", base_url=f"{url}/v1") as client:
        answer = client.responses.create(model="gpt-4.1", input="Hello")
        with client.responses.create(model="gpt-4.1", input="Hello", stream=True) as stream:
            events = list(stream)
        with client.responses.stream(model="gpt-4.1", input="Hello") as helper:
            helped = list(helper)
    assert whole(answer) == expected
    assert [whole(dump) for dump in dumps(answer)] == [expected, expected]
    [last] = [reading for event in events for reading in readings(event, strict=True)]
    assert last.stream
    assert last.closes
    assert told(events) == told([event.model_dump() for event in events]) == (expected, 1)
    assert told(helped) == (expected, 1)


def fields_of(usage: Usage) -> dict:
    return {name: getattr(usage, name) for name in Usage.__slots__}


def test_anthropic(url):
    anthropic = load("anthropic")
    ask = {"model": "claude-opus-5-5", "max_tokens": 1000, "messages": HELLO}
    with anthropic.Anthropic(api_key="x", base_url=url) as client:
        answer = client.messages.create(**ask)
        beta = client.beta.messages.create(**ask)
        with client.messages.create(**ask, stream=True) as stream:
            events = list(stream)
        with client.messages.stream(**ask) as helper:
            helped = list(helper)
            final = helper.get_final_message()
    assert whole(answer) == whole(beta) == whole(final) == MESSAGE
    assert [whole(dump) for dump in dumps(answer)] == [MESSAGE, MESSAGE]
    opening = readings(events[0], strict=True)[0]
    assert opening.opens
    assert opening.usage.output_tokens == 1
    assert opening.usage.response_id
    assert readings(events[-1], strict=True) == [Reading(Usage(), stream=True, closes=True)]
    dumped = [event.model_dump() for event in events]
    assert told(events) == told(dumped) == told(helped) == (MESSAGE, 1)
    # the helper's last event holds the whole message
    [closing] = readings(helped[-1], strict=True)
    assert closing.closes
    assert without_id(closing.usage) == MESSAGE


def test_anthropic_async(url):
    anthropic = load("anthropic")

    async def main():
        async with anthropic.AsyncAnthropic(api_key="x", base_url=url) as client:
            ask = {"model": "claude-opus-5-5", "max_tokens": 1000, "messages": HELLO}
            async with client.messages.stream(**ask) as helper:
                return [event async for event in helper]

    assert told(asyncio.run(main())) == (MESSAGE, 1)


def test_two_streams_one_after_the_other_are_two(url):
    anthropic = load("anthropic")
    with anthropic.Anthropic(api_key="x", base_url=url) as client:
        ask = {"model": "claude-opus-5-5", "max_tokens": 1000, "messages": HELLO, "stream": True}
        events = [*client.messages.create(**ask), *client.messages.create(**ask)]
    usage, reports = told(events)
    assert reports == 2
    assert (usage.input_tokens, usage.output_tokens) == (24614, 1100)


def test_google(url):
    genai = load("google.genai")
    options = genai.types.HttpOptions(base_url=url)
    with genai.Client(api_key="x", http_options=options) as client:
        answer = client.models.generate_content(model="gemini-2.5-flash", contents="Hello")
        stream = client.models.generate_content_stream(model="gemini-2.5-flash", contents="Hello")
        chunks = list(stream)
    assert whole(answer) == CONTENT
    assert [whole(dump) for dump in dumps(answer)] == [CONTENT, CONTENT]
    assert whole(answer.model_dump(mode="json", by_alias=True)) == CONTENT
    assert len(chunks) == 3
    assert told(chunks) == told([chunk.model_dump() for chunk in chunks]) == (CONTENT, 1)
    assert [readings(chunk)[0].closes for chunk in chunks] == [False, False, True]
    assert readings(answer.usage_metadata)[0].usage.total_tokens == 1100
    assert readings(answer.usage_metadata, strict=True) == []


@pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning")  # its own, of aiohttp
def test_google_async(url):
    genai = load("google.genai")

    async def main():
        options = genai.types.HttpOptions(base_url=url)
        with genai.Client(api_key="x", http_options=options) as client:
            async with client.aio as aio:
                stream = await aio.models.generate_content_stream(
                    model="gemini-2.5-flash", contents="Hello"
                )
                return [chunk async for chunk in stream]

    assert told(asyncio.run(main())) == (CONTENT, 1)


def test_bedrock(url):
    boto3 = load("boto3")
    config = load("botocore.config").Config(retries={"max_attempts": 0})
    client = boto3.client(
        "bedrock-runtime",
        region_name="us-east-1",
        endpoint_url=url,
        aws_access_key_id="x",
        aws_secret_access_key="x",
        config=config,
    )
    messages = [{"role": "user", "content": [{"text": "Hello"}]}]
    try:
        answer = client.converse(modelId="amazon.nova-lite-v1:0", messages=messages)
        opened = client.converse_stream(modelId="amazon.nova-lite-v1:0", messages=messages)
        with closing(opened["stream"]) as stream:
            events = list(stream)
    finally:
        client.close()
    assert whole(answer) == CONVERSE
    assert readings(answer)[0].usage.response_id == answer["ResponseMetadata"]["RequestId"]
    assert told(events) == (CONVERSE, 1)
    assert len(events) == 5
    assert readings(answer["usage"])[0].usage == CONVERSE
    assert readings(answer["usage"], strict=True) == []


def langchain_openai(url: str, **given: object):
    return load("langchain_openai").ChatOpenAI(
        model="gpt-4.1", api_key="x", base_url=f"{url}/v1", stream_usage=True, **given
    )


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain_openai(url, responses):
    model = langchain_openai(url, use_responses_api=responses)
    expected = Usage(**{**fields_of(CHAT), "cache_write_tokens": 0 if responses else None})
    answer = model.invoke("Hello")
    chunks = list(model.stream("Hello"))
    assert whole(answer) == whole(answer.model_dump()) == expected
    to_dict = load("langchain_core.messages").message_to_dict
    assert whole(to_dict(answer)) == expected
    assert told(chunks) == told([chunk.model_dump() for chunk in chunks]) == (expected, 1)
    merged = reduce(add, chunks)
    assert merged.usage_metadata["input_tokens"] == 2255
    assert readings(answer.usage_metadata, strict=True) == []
    assert readings(answer.usage_metadata)[0].usage.total_tokens == 2260


def test_langchain_anthropic(url):
    model = load("langchain_anthropic").ChatAnthropic(
        model="claude-opus-5-5", api_key="x", base_url=url
    )

    async def stream():
        return [chunk async for chunk in model.astream("Hello")]

    assert whole(model.invoke("Hello")) == MESSAGE
    assert told(list(model.stream("Hello"))) == (MESSAGE, 1)
    assert told(asyncio.run(stream())) == (MESSAGE, 1)


def test_langchain_adds_its_chunks_up_and_so_do_we():
    chunk = load("langchain_core.messages").AIMessageChunk
    numbers = [(7, 0, 3), (0, 5, 0), (0, 6, 0)]
    chunks = [
        chunk(
            content="",
            id="run-1",
            usage_metadata={
                "input_tokens": sent,
                "output_tokens": came,
                "total_tokens": sent + came,
                "input_token_details": {"cache_read": read},
            },
        )
        for sent, came, read in numbers
    ]
    theirs = reduce(add, chunks).usage_metadata
    ours, reports = told(chunks)
    assert reports == 1
    assert (ours.input_tokens, ours.output_tokens) == (7, 11)
    assert theirs["input_tokens"] == ours.input_tokens
    assert theirs["output_tokens"] == ours.output_tokens
    assert theirs["input_token_details"]["cache_read"] == ours.cache_read_tokens == 3


def test_langchain_results_are_read_where_they_are_handed_over(url):
    human = load("langchain_core.messages").HumanMessage("Hello")
    model = langchain_openai(url)
    outputs = load("langchain_core.outputs")
    pair = [model.generate([[human]]).generations[0] for _ in range(2)]
    result = outputs.LLMResult(generations=pair)
    found = readings(result)
    assert [without_id(reading.usage) for reading in found] == [CHAT, CHAT]
    assert len({reading.usage.response_id for reading in found}) == 2
    one = outputs.ChatResult(generations=result.generations[0])
    answer = result.generations[0][0].message
    state = {"messages": [human, answer]}
    for holder in (one, result.generations[0][0], state, [answer], (human, answer)):
        assert whole(holder, strict=False) == CHAT
    for holder in (result, one, result.generations[0][0], state, [answer]):
        assert readings(holder, strict=True) == []
    # what older models say: no usage on the messages, only beside them
    bare = outputs.LLMResult(
        generations=[[]],
        llm_output={"token_usage": answer.response_metadata["token_usage"], "model_name": "m"},
    )
    [reading] = readings(bare)
    assert reading.usage.model == "m"
    assert reading.usage.total_tokens == 2260


def test_pydantic_ai_over_http(url):
    pydantic_ai = load("pydantic_ai")
    openai_model = load("pydantic_ai.models.openai").OpenAIChatModel
    provider = load("pydantic_ai.providers.openai").OpenAIProvider
    openai = load("openai")

    async def main():
        async with openai.AsyncOpenAI(api_key="x", base_url=f"{url}/v1") as client:
            model = openai_model("gpt-4.1", provider=provider(openai_client=client))
            agent = pydantic_ai.Agent(model)
            result = await agent.run("Hello")
            async with agent.run_stream("Hello") as streamed:
                await streamed.get_output()
            async with agent.run_stream_events("Hello") as stream:
                events = [event async for event in stream]
            return result, streamed, events

    result, streamed, events = asyncio.run(main())
    assert whole(result) == CHAT
    assert told(events) == (CHAT, 1)
    response = result.all_messages()[-1]
    assert whole(response) == CHAT
    adapter = load("pydantic").TypeAdapter(type(response))
    [dumped] = readings(adapter.dump_python(response), strict=True)
    assert dumped.usage.total_tokens == 2260
    assert dumped.usage.model == CHAT.model
    spent = result.usage
    assert type(spent).__name__ == "RunUsage"
    assert readings(spent)[0].usage.total_tokens == 2260
    assert readings(spent, strict=True) == []
    # of an answer that is still on its way nothing is known until somebody says so
    assert readings(streamed, strict=True) == []
    assert readings(streamed)[0].usage.total_tokens == 2260


def test_pydantic_ai_runs_are_their_responses_and_what_is_left(url):
    pydantic_ai = load("pydantic_ai")
    messages = load("pydantic_ai.messages")
    function_model = load("pydantic_ai.models.function").FunctionModel
    usages = load("pydantic_ai.usage")
    steps = iter(range(10))

    def answer(history, info):
        step = next(steps)
        parts = [messages.ToolCallPart("look", {})] if step == 0 else [messages.TextPart("done")]
        return messages.ModelResponse(
            parts=parts,
            usage=usages.RequestUsage(input_tokens=100 + step, output_tokens=10),
            model_name="m",
            provider_response_id=f"r{step}",
        )

    agent = pydantic_ai.Agent(function_model(answer))
    agent.tool_plain(lambda: "seen", name="look")
    result = agent.run_sync("Hello")
    assert [(r.usage.input_tokens, r.usage.response_id) for r in readings(result, strict=True)] == [
        (100, "r0"),
        (101, "r1"),
    ]
    # another agent has spent from the same purse
    shared = usages.RunUsage(input_tokens=1000, output_tokens=7)
    result = agent.run_sync("Hello", usage=shared)
    own, rest = readings(result, strict=True)
    assert own.usage.input_tokens == 102
    assert rest.usage == Usage(input_tokens=1000, output_tokens=7)
    # a purse with less in it than was spent is believed, as nobody knows whose the rest was
    result._state.usage = usages.RunUsage(input_tokens=5, output_tokens=4)
    assert readings(result, strict=True) == [Reading(Usage(input_tokens=5, output_tokens=4))]
    result._state.usage = usages.RunUsage()
    assert readings(result, strict=True) == []


@pytest.fixture
def litellm(monkeypatch):
    """LiteLLM: it fetches nothing, reads no .env, and leaves no variable and no thread behind."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LITELLM_MODE", "PRODUCTION")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    yield load("litellm")
    load("litellm.litellm_core_utils.thread_pool_executor").executor.shutdown()


def test_litellm(url, litellm):
    chat = {"model": "openai/gpt-4.1", "api_base": f"{url}/v1", "messages": HELLO, "api_key": "x"}
    claude = {"model": "anthropic/claude-opus-5-5", "api_base": url, "messages": HELLO}
    claude["api_key"] = "x"
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it lets go of sockets and coroutines as it likes
        answers = [litellm.completion(**ask) for ask in (chat, claude)]
        streams = [list(litellm.completion(**ask, **stream)) for ask in (chat, claude)]
        dumped = answers[1].model_dump()
    assert whole(answers[0]) == CHAT
    # LiteLLM counts the cache into the prompt, and guesses that no reasoning was none
    expected = Usage(**{**fields_of(MESSAGE), "reasoning_tokens": 0})
    assert whole(answers[1]) == expected
    assert readings(dumped, strict=True)[0].usage.input_tokens == 12307
    # its chunks name the model as it was asked for
    assert told(streams[0]) == (Usage(**{**fields_of(CHAT), "model": "gpt-4.1"}), 1)
    usage, reports = told(streams[1])
    assert reports == 1
    assert (usage.input_tokens, usage.output_tokens, usage.provider) == (12307, 550, "anthropic")
    nothing = litellm.ModelResponse(model="m")
    nothing.usage = litellm.Usage()
    assert readings(nothing, strict=True) == []


@pytest.mark.parametrize(
    ("provider", "flavor", "body"),
    [
        ("openai", "chat", chat_completion(1)),
        ("openai", "responses", openai_response(1)),
        ("anthropic", "default", anthropic_message(1)),
        ("google", "default", google_content(1)),
        ("aws", "default", converse()),
    ],
    ids=["chat", "responses", "anthropic", "google", "bedrock"],
)
def test_a_price_table_reads_the_same_numbers(provider, flavor, body):
    extract = load("genai_prices").extract_usage
    theirs = extract(body, provider_id=provider, api_flavor=flavor).usage
    [reading] = readings(body, strict=True)
    for name in ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens"):
        assert (getattr(reading.usage, name) or 0) == getattr(theirs, name)

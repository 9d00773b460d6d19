"""The forms in which providers and their SDKs tell what a request spent, read into the normal one.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MethodType, NoneType
from typing import Any, NamedTuple

from idemguard.usage import TOKENS, Usage

_PLAIN = frozenset({NoneType, bool, bytearray, bytes, complex, float, int, str})
_SDKS = ("openai.", "anthropic.", "google.genai.", "langchain_core.", "pydantic_ai.", "litellm.")
_MARKS = ("usage", "usage_metadata", "usageMetadata")
_TYPES = (
    "message_start",
    "message_stop",
    "response.",
    "ai",
    "AIMessageChunk",
    "chunk",
    "agent_run_result",
)

# gen_ai.provider.name of OpenTelemetry, by what LangChain, pydantic-ai and LiteLLM say
_PROVIDERS = {
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "azure_openai": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "bedrock_converse": "aws.bedrock",
    "gemini": "gcp.gemini",
    "google": "gcp.gen_ai",
    "google-cloud": "gcp.vertex_ai",
    "google-gla": "gcp.gemini",
    "google-vertex": "gcp.vertex_ai",
    "google_genai": "gcp.gemini",
    "google_vertexai": "gcp.vertex_ai",
    "mistral": "mistral_ai",
    "mistralai": "mistral_ai",
    "vertex_ai": "gcp.vertex_ai",
    "watsonx": "ibm.watsonx.ai",
    "xai": "x_ai",
}

_OPENAI_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.done")
_ANTHROPIC_SILENT = ("content_block_start", "content_block_delta", "content_block_stop", "ping")
_BEDROCK_SILENT = (
    "messageStart",
    "contentBlockStart",
    "contentBlockDelta",
    "contentBlockStop",
    "messageStop",
)
_USAGE = ("usage", "usage_metadata", "usageMetadata", "token_usage")


class Reading(NamedTuple):
    """One usage report, as one object told it.

    Attributes:
        usage: what is known; without any number of tokens where a part of a stream tells only
            names, or an end.
        stream: a part of a stream: its numbers are snapshots, and of one response the latest
            known value per field counts.
        adds: a part of a stream whose numbers add to those of the parts before.
        opens: begins a stream that later parts without an id belong to.
        closes: ends it.

    """

    usage: Usage
    stream: bool = False
    adds: bool = False
    opens: bool = False
    closes: bool = False


def readings(source: object, *, strict: bool = False) -> list[Reading]:
    """All usage reports that an object holds; empty where there is none. Never raises.

    Args:
        source: a response of a provider, a part of a stream, or the usage part alone, as the
            object of an SDK, as a mapping, or as any object with the same fields.
        strict: read only what is clearly a provider's response or a part of its stream, and look
            at no attribute of objects that do not come from a known SDK. Otherwise whatever looks
            like usage is read, and a list or tuple is as many reports as it holds.

    """
    try:
        kind = type(source)
        if kind in _PLAIN:
            return []
        if not strict:
            return list(_everything(source, {}))
        if _marked(source) if issubclass(kind, dict) else _from_sdk(kind):
            return _answer(_Fields(source, _own)) or []
    except Exception:  # noqa: BLE001 - whatever a value of the user's does, it costs no result
        return []
    return []


def is_response(source: object) -> bool:
    """Whether it comes from a provider, though it may tell no number of tokens. Never raises.

    Args:
        source: what `readings` finds nothing in: the middle of a stream, or an answer whose
            usage is not told.

    """
    try:
        kind = type(source)
        if issubclass(kind, list | tuple) and not hasattr(kind, "_fields"):
            return bool(source) and all(map(is_response, source))  # type: ignore[call-overload]
        told = hasattr(kind, "model_fields") or hasattr(kind, "__dataclass_fields__")  # no client
        if (told and _from_sdk(kind)) or _answer(_Fields(source, _any)) is not None:
            return True
        if issubclass(kind, Mapping):
            return any(name in source for name in _USAGE)  # type: ignore[operator]
        return any(getattr(source, name, kind) is None for name in _USAGE)
    except Exception:  # noqa: BLE001 - nor does it cost an answer here
        return False


# ---- fields, whatever holds them


def _from_sdk(kind: type) -> bool:
    module = kind.__module__
    return type(module) is str and module.startswith(_SDKS)


def _marked(source: Any) -> bool:
    get = dict.get
    for mark in _MARKS:
        if get(source, mark) is not None:
            return True
    kind = get(source, "type")
    if type(kind) is str and kind.startswith(_TYPES):
        return True
    about = get(source, "metadata")
    return type(about) is dict and "metrics" in about


def _own(source: Any, name: str) -> Any:
    """A field of a dict or of an SDK's object; runs no code of anybody else."""
    if issubclass(type(source), dict):
        return dict.get(source, name)
    return _any(source, name) if _from_sdk(type(source)) else None


def _any(source: Any, name: str) -> Any:
    """A field of whatever the user handed over."""
    try:
        if issubclass(type(source), Mapping):
            return source.get(name)
        return getattr(source, name, None)
    except Exception:  # noqa: BLE001 - a field that cannot be had is a field that is not there
        return None


class _Fields:
    """The fields of one object."""

    __slots__ = ("look", "source")

    def __init__(self, source: object, look: Callable[[Any, str], Any]) -> None:
        self.source = source
        self.look = look

    def __getitem__(self, name: str) -> Any:
        return None if self.source is None else self.look(self.source, name)

    def at(self, *names: str) -> _Fields:
        """The first of the named fields that is there, as fields of its own."""
        found = (value for name in names if (value := self[name]) is not None)
        return _Fields(next(found, None), self.look)

    def count(self, *names: str) -> int | None:
        """The first of the named fields that is a number of tokens."""
        found = (count for name in names if (count := _count(self[name])) is not None)
        return next(found, None)

    def added(self, *names: str) -> int | None:
        """The sum of the named fields that are numbers of tokens."""
        found = [count for name in names if (count := _count(self[name])) is not None]
        return sum(found) if found else None

    def text(self, *names: str) -> str | None:
        """The first of the named fields that is a text with something in it."""
        found = (value for name in names if issubclass(type(value := self[name]), str) and value)
        return next((str.__str__(value) for value in found), None)

    def items(self, name: str) -> Any:
        """The named field where it is a list or a tuple."""
        value = self[name]  # type() and not isinstance(), which asks the value itself
        return value if issubclass(type(value), list | tuple) else None

    def sdk(self, name: str) -> bool:
        """It is an object of the SDK of this name."""
        kind = type(self.source)
        return _from_sdk(kind) and kind.__module__.startswith(f"{name}.")


def _count(value: object) -> int | None:
    if type(value) is float and value.is_integer():  # JSON knows no whole numbers
        value = int(value)
    return value if type(value) is int and value >= 0 else None


# ---- the usage part


def _tokens(part: _Fields, *, partial: bool = False) -> Usage | None:
    """The usage part of a response; None where it tells no number.

    Args:
        part: where the numbers are.
        partial: later parts may tell the rest.

    """
    if part.source is None:
        return None
    if part.sdk("pydantic_ai") and part["input_tokens"] is not None:
        # what was not told stands on the class as 0
        part = _Fields(vars(part.source), part.look)
    for read in (_chat_tokens, _google_tokens, _bedrock_tokens):
        if (usage := read(part)) is not None:
            break
    else:
        usage = _plain_tokens(part, partial=partial)
    return None if all(getattr(usage, name) is None for name in TOKENS) else usage


def _chat_tokens(part: _Fields) -> Usage | None:
    """OpenAI's chat and what follows it, LiteLLM too: the cache is part of the prompt."""
    prompt, completion = part.count("prompt_tokens"), part.count("completion_tokens")
    if prompt is None and completion is None:
        return None
    if completion is None and part.count("total_tokens") == prompt:
        completion = 0  # an embedding
    details = part.at("prompt_tokens_details")
    read = details.count("cached_tokens")
    if read is None:
        read = part.count("cache_read_input_tokens", "prompt_cache_hit_tokens")
    write = details.count("cache_write_tokens", "cache_creation_tokens")
    if write is None:
        write = part.count("cache_creation_input_tokens")
    return Usage(
        input_tokens=prompt,
        output_tokens=completion,
        cache_read_tokens=read,
        cache_write_tokens=write,
        reasoning_tokens=part.at("completion_tokens_details").count("reasoning_tokens"),
        provider="openai" if part.sdk("openai") else None,
    )


def _google_tokens(part: _Fields) -> Usage | None:
    """Google: thoughts are no candidates, results of tools no prompt, zeros are left out."""
    prompt = ("prompt_token_count", "promptTokenCount")
    used = ("tool_use_prompt_token_count", "toolUsePromptTokenCount")
    made = ("candidates_token_count", "candidatesTokenCount")
    spoken = ("response_token_count", "responseTokenCount")
    thought = ("thoughts_token_count", "thoughtsTokenCount")
    total = part.count("total_token_count", "totalTokenCount")
    fed = _sum(part.count(*prompt), part.count(*used))
    came = _sum(part.count(*made, *spoken), part.count(*thought))
    if fed is None and came is None:
        return None
    return Usage(
        input_tokens=fed,
        output_tokens=0 if came is None and total == fed else came,
        cache_read_tokens=part.count("cached_content_token_count", "cachedContentTokenCount"),
        reasoning_tokens=part.count(*thought),
        provider="gcp.gen_ai",
    )


def _bedrock_tokens(part: _Fields) -> Usage | None:
    """Bedrock's Converse: the cache is not part of the input."""
    fresh, output = part.count("inputTokens"), part.count("outputTokens")
    if fresh is None and output is None:
        return None
    read, write = part.count("cacheReadInputTokens"), part.count("cacheWriteInputTokens")
    return Usage(
        input_tokens=None if fresh is None else _sum(fresh, read, write),
        output_tokens=output,
        cache_read_tokens=read,
        cache_write_tokens=write,
        provider="aws.bedrock",
    )


def _plain_tokens(part: _Fields, *, partial: bool) -> Usage:
    """Whoever says input_tokens: Anthropic means without the cache, all others with it."""
    read, write = part.count("cache_read_input_tokens"), part.count("cache_creation_input_tokens")
    if partial or read is not None or write is not None or part.sdk("anthropic"):
        return _anthropic_tokens(part, read, write, partial=partial)
    details = part.at("input_tokens_details", "input_token_details")
    made = part.at("output_tokens_details", "output_token_details")
    read = part.count("cache_read_tokens")
    if read is None:
        read = details.added("cached_tokens", *_tiers("cache_read"))
    write = part.count("cache_write_tokens")
    if write is None:
        write = details.count("cache_write_tokens")
    if write is None:
        # LangChain tells what it wrote by lifetime, in place of the sum or beside it
        sums = details.added(*_tiers("cache_creation"))
        lived = details.added("ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens")
        write = max((n for n in (sums, lived) if n is not None), default=None)
    reasoning = part.count("output_reasoning_tokens", "reasoning_tokens")
    if reasoning is None:
        reasoning = made.added("reasoning_tokens", *_tiers("reasoning"))
    if reasoning is None:
        reasoning = part.at("details").count("reasoning_tokens")
    return Usage(
        input_tokens=part.count("input_tokens"),
        output_tokens=part.count("output_tokens"),
        cache_read_tokens=read,
        cache_write_tokens=write,
        reasoning_tokens=reasoning,
        provider="openai" if part.sdk("openai") else None,
    )


def _anthropic_tokens(
    part: _Fields, read: int | None, write: int | None, *, partial: bool
) -> Usage:
    fresh, output = part.count("input_tokens"), part.count("output_tokens")
    if partial and read is None and write is None:
        fresh = None  # without the cache's numbers it would push out a sum that has them
    for entry in part.items("iterations") or ():
        made = _Fields(entry, part.look)
        if made.text("type") == "compaction":  # the only one that the numbers above leave out
            fresh = None if fresh is None else _sum(fresh, made.count("input_tokens"))
            output = _sum(output, made.count("output_tokens"))
            read = _sum(read, made.count("cache_read_input_tokens"))
            write = _sum(write, made.count("cache_creation_input_tokens"))
    return Usage(
        input_tokens=None if fresh is None else _sum(fresh, read, write),
        output_tokens=output,
        cache_read_tokens=read,
        cache_write_tokens=write,
        reasoning_tokens=part.at("output_tokens_details").count("thinking_tokens"),
        provider="anthropic",
    )


def _tiers(name: str) -> tuple[str, ...]:
    """The names under which LangChain counts it, by the tier of service."""
    return (name, f"flex_{name}", f"priority_{name}")


def _sum(*counts: int | None) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


# ---- responses and parts of streams, each known by a combination of fields


def _answer(source: _Fields) -> list[Reading] | None:
    """The readings of a response or of a part of a stream; None: it is neither."""
    for form in _FORMS:
        if (found := form(source)) is not None:
            return found
    return None


def _named(
    usage: Usage | None,
    *,
    model: str | None,
    provider: str | None,
    response_id: str | None,
    stream: bool = False,
    adds: bool = False,
    opens: bool = False,
    closes: bool = False,
) -> list[Reading]:
    if usage is None:
        return []
    usage = replace(usage, model=model, provider=provider, response_id=response_id)
    return [Reading(usage, stream, adds, opens, closes)]


def _openai(source: _Fields) -> list[Reading] | None:
    """Chat completions, their chunks, embeddings, responses and their events."""
    kind = source.text("type") or ""
    if kind == "chunk":  # an event of the SDK's stream helper
        return _openai(source.at("chunk"))
    if kind.startswith("response."):
        inner = source.at("response")
        if inner.text("object") not in {"response", "realtime.response"}:
            return []
        return _openai_answer(inner, stream=True, closes=kind in _OPENAI_ENDS)
    form, of_list = source.text("object"), source.items("choices") is not None
    if form in {"chat.completion", "text_completion"} and of_list:
        return _openai_answer(source)
    if form == "chat.completion.chunk" and of_list:
        return _openai_answer(source, stream=True)
    if form in {"response", "response.compaction"} and source.text("id"):
        return _openai_answer(source)
    if form == "list" and source.items("data") is not None and source.text("model"):
        return _openai_answer(source)
    return None


def _openai_answer(source: _Fields, *, stream: bool = False, closes: bool = False) -> list[Reading]:
    usage = _tokens(source.at("usage"))
    provider: str | None = "openai"
    hidden = source.at("_hidden_params")
    if source.sdk("litellm") or hidden.source is not None:
        told = hidden.text("custom_llm_provider")
        route = (hidden.text("litellm_model_name") or "").partition("/")
        provider = _provider(told or (route[0] if route[1] else None))
        if usage is not None and not usage.total_tokens:
            return []  # what LiteLLM says where it was told nothing
    elif source["prompt_filter_results"] is not None:
        provider = "azure.ai.openai"
    return _named(
        usage,
        model=source.text("model"),
        provider=provider,
        response_id=source.text("id"),
        stream=stream,
        closes=closes,
    )


def _anthropic(source: _Fields) -> list[Reading] | None:
    """Messages, the events of their streams, and those of the SDK's stream helper."""
    kind, inner = source.text("type"), source.at("message")
    if kind == "message" and _is_message(source):
        return _anthropic_answer(source)
    if kind == "message_start" and _is_message(inner):
        return _anthropic_answer(inner, opens=True)
    if kind == "message_delta":
        usage = _tokens(source.at("usage"), partial=True)
        return [] if usage is None else [Reading(usage, stream=True)]
    if kind == "message_stop":
        told = _anthropic_answer(inner, closes=True) if _is_message(inner) else []
        return told or [Reading(Usage(), stream=True, closes=True)]
    return [] if kind in _ANTHROPIC_SILENT else None


def _is_message(source: _Fields) -> bool:
    return (
        source.text("type") == "message"
        and source.text("role") == "assistant"
        and source.text("id") is not None
        and source.items("content") is not None
    )


def _anthropic_answer(
    source: _Fields, *, opens: bool = False, closes: bool = False
) -> list[Reading]:
    usage = _tokens(source.at("usage"))
    if opens and usage is not None and not usage.input_tokens:
        # others who speak this protocol begin with zeros
        usage = replace(usage, input_tokens=None, output_tokens=usage.output_tokens or None)
    return _named(
        usage,
        model=source.text("model"),
        provider="anthropic",
        response_id=source.text("id"),
        stream=opens or closes,
        opens=opens,
        closes=closes,
    )


def _google(source: _Fields) -> list[Reading] | None:
    """Generated content: a whole answer looks like the last chunk, each the whole so far."""
    usage = _google_tokens(source.at("usage_metadata", "usageMetadata"))
    model = source.text("model_version", "modelVersion")
    response_id = source.text("response_id", "responseId")
    candidates = source.items("candidates")
    named = model is not None or response_id is not None
    if usage is None:
        return [] if candidates is not None and named else None
    if candidates is None and not named:
        return None
    ended = any(
        _Fields(candidate, source.look).at("finish_reason", "finishReason").source is not None
        for candidate in candidates or ()
    )
    return _named(
        usage,
        model=model,
        provider=usage.provider,
        response_id=response_id,
        stream=True,
        closes=ended,
    )


def _langchain(source: _Fields) -> list[Reading] | None:
    """Messages and their chunks, whose numbers LangChain itself adds up."""
    kind = source.text("type")
    if kind not in {"ai", "AIMessageChunk"}:
        return None
    if source["data"] is not None:  # as message_to_dict writes it
        source = source.at("data")
    about = source.at("response_metadata")
    if about.source is None:
        return None
    chunk, message_id = kind == "AIMessageChunk", source.text("id")
    model = about.text("model_name", "model")
    usage = _tokens(source.at("usage_metadata"))
    if usage is None and not chunk:
        usage = _tokens(about.at("token_usage", "usage"))
    if usage is None and chunk and model is not None and message_id is not None:
        usage = Usage()  # the chunk with the numbers does not tell the model
    return _named(
        usage,
        model=model,
        provider=_provider(about.text("model_provider")),
        # parts of one response may differ in the provider's id, copies of it in LangChain's own
        response_id=message_id if chunk else about.text("id") or message_id,
        stream=chunk,
        adds=chunk,
    )


def _pydantic_ai(source: _Fields) -> list[Reading] | None:
    """Responses of models, and results of agents' runs."""
    if source.sdk("pydantic_ai"):
        if source.text("event_kind") == "agent_run_result":
            source = source.at("result")
        if type(source.source).__name__ == "AgentRunResult":
            return _pydantic_run(source)
    if source.text("kind") != "response" or source.items("parts") is None:
        return None
    usage = _tokens(source.at("usage"))
    return _named(
        usage if usage is not None and usage.total_tokens else None,  # 0 is what is not told
        model=source.text("model_name"),
        provider=_provider(source.text("provider_name")),
        response_id=source.text("provider_response_id"),
    )


def _pydantic_run(source: _Fields) -> list[Reading]:
    """A run's responses one by one, and what the run spent beside them, on other agents say."""
    whole = _tokens(_Fields(_value(source["usage"]), source.look))
    if whole is None or not whole.total_tokens:
        return []
    messages = _value(source["new_messages"])
    parts = [
        reading
        for message in (messages if isinstance(messages, list) else ())
        for reading in _pydantic_ai(_Fields(message, source.look)) or ()
    ]
    rest = {
        name: (getattr(whole, name) or 0) - sum(getattr(part.usage, name) or 0 for part in parts)
        for name in TOKENS
    }
    if any(count < 0 for count in rest.values()):
        return [Reading(whole)]
    if any(rest.values()):
        left: dict[str, Any] = {name: count or None for name, count in rest.items()}
        parts.append(Reading(Usage(**left)))
    return parts


def _value(member: Any) -> Any:
    """What was a method in one version of an SDK is a property in the next."""
    return member() if type(member) is MethodType else member


def _bedrock(source: _Fields) -> list[Reading] | None:
    """Converse's answer, and the one event of its stream that has numbers."""
    if source.text("stopReason") and source["output"] is not None:
        usage = _bedrock_tokens(source.at("usage"))
    else:
        about = source.at("metadata")
        usage = None if about["metrics"] is None else _bedrock_tokens(about.at("usage"))
        if usage is None:
            silent = source.at(*_BEDROCK_SILENT).source
            return [] if issubclass(type(silent), Mapping) else None
    return _named(
        usage,
        model=None,
        provider="aws.bedrock",
        response_id=source.at("ResponseMetadata").text("RequestId"),
    )


def _provider(name: str | None) -> str | None:
    return None if name is None else _PROVIDERS.get(name, name)


_FORMS: tuple[Callable[[_Fields], list[Reading] | None], ...] = (
    _openai,
    _anthropic,
    _langchain,
    _pydantic_ai,
    _bedrock,
    _google,
)


# ---- what the user handed over


def _everything(source: object, held: dict[int, object]) -> Iterator[Reading]:
    """All readings of a response, of a usage part, or of whatever holds several."""
    kind = type(source)
    if kind in _PLAIN or id(source) in held:
        return
    held[id(source)] = source  # kept, so that its id stays its own
    if isinstance(source, Usage):
        yield Reading(source)
        return
    if issubclass(kind, list | tuple) and not hasattr(kind, "_fields"):
        yield from _each(source, held)
        return
    fields = _Fields(source, _any)
    found = _answer(fields)
    if found is None:
        found = _answer(fields.at("message"))  # a generation of LangChain's
    if found is None:
        found = [
            reading
            for name in ("generations", "messages")
            for reading in _each(fields.items(name) or (), held)
        ] or _loose(fields)
    yield from found


def _each(sources: Any, held: dict[int, object]) -> Iterator[Reading]:
    items: Iterable[object] = sources
    for item in items:
        yield from _everything(item, held)


def _loose(source: _Fields) -> list[Reading]:
    """Whatever has a usage part, or is one."""
    holder, part = source, source.at(*_USAGE)
    if part.source is None and source["llm_output"] is not None:
        holder = source.at("llm_output")
        part = holder.at("token_usage", "usage")
    if source.sdk("pydantic_ai"):
        part = _Fields(_value(part.source), part.look)
    usage = _tokens(part)
    if usage is None:
        holder, usage = source, _tokens(source)
    if usage is None:
        return []
    request = source.at("ResponseMetadata").text("RequestId")
    return _named(
        usage,
        model=holder.text("model", "model_name", "model_version", "modelVersion"),
        provider=holder.text("provider")
        or _provider(holder.text("provider_name"))
        or usage.provider,
        response_id=request
        or holder.text("response_id", "responseId", "provider_response_id", "id"),
    )

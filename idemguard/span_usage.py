"""Which spans of an application tell what an execution spent, and what they tell, in the normal form.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.sdk.trace import SpanProcessor

from idemguard import context, log
from idemguard.attached import execution_of
from idemguard.providers import Reading
from idemguard.usage import MOST, TOKENS, Usage, total

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span
    from opentelemetry.trace import SpanContext

    from idemguard.context import Current
    from idemguard.usage import Spent

LIMIT = 10_000  # spans inside executions that are open at once; of more, the oldest are let go
OWN = "idemguard"  # the scope of our own spans, whose usage is the ledger's

# of one field, what OpenTelemetry calls it now, what it called it before, and what others do
_FIELDS = {
    "input_tokens": (
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.prompt_tokens",
        "llm.usage.prompt_tokens",
        "llm.token_count.prompt",
    ),
    "output_tokens": (
        "gen_ai.usage.output_tokens",
        "gen_ai.usage.completion_tokens",
        "llm.usage.completion_tokens",
        "llm.token_count.completion",
    ),
    "cache_read_tokens": (
        "gen_ai.usage.cache_read.input_tokens",
        "gen_ai.usage.cache_read_input_tokens",
        "gen_ai.usage.details.cache_read_tokens",
        "llm.usage.cache_read_input_tokens",
        "llm.token_count.prompt_details.cache_read",
    ),
    "cache_write_tokens": (
        "gen_ai.usage.cache_creation.input_tokens",
        "gen_ai.usage.cache_write.input_tokens",
        "gen_ai.usage.cache_creation_input_tokens",
        "gen_ai.usage.cache_write_input_tokens",
        "gen_ai.usage.details.cache_write_tokens",
        "llm.usage.cache_creation_input_tokens",
        "llm.token_count.prompt_details.cache_write",
    ),
    "reasoning_tokens": (
        "gen_ai.usage.reasoning.output_tokens",
        "gen_ai.usage.reasoning_tokens",
        "gen_ai.usage.details.reasoning_tokens",
        "llm.usage.reasoning_tokens",
        "llm.token_count.completion_details.reasoning",
    ),
}
_TOTAL = ("gen_ai.usage.total_tokens", "llm.usage.total_tokens", "llm.token_count.total")
_COUNTS = frozenset(name for names in _FIELDS.values() for name in names)
_MODEL = (
    "gen_ai.response.model",
    "llm.response.model",
    "llm.model_name",
    "embedding.model_name",
    "gen_ai.request.model",
    "llm.request.model",
)
_PROVIDER = ("gen_ai.provider.name", "gen_ai.system", "llm.provider", "llm.system")
_RESPONSE = ("gen_ai.response.id",)

# spans whose usage is a sum of what was spent beneath them, by who says so
_SUMS = {
    "gen_ai.operation.name": frozenset(
        {"create_agent", "execute_tool", "invoke_agent", "invoke_workflow"}
    ),
    "openinference.span.kind": frozenset({"AGENT", "CHAIN", "EVALUATOR", "GUARDRAIL", "TOOL"}),
    "traceloop.span.kind": frozenset({"agent", "task", "tool", "workflow"}),
}


class _Open:
    """A span inside an execution that has not ended."""

    __slots__ = ("before", "counted", "ended", "execution", "owner", "parent", "told")

    def __init__(
        self, owner: UsageSpanProcessor, execution: Current | None, parent: _Open | None
    ) -> None:
        self.owner = owner
        self.execution = execution  # None: of a call, whose execution is still to come
        self.parent = parent
        self.before: Usage | None = (
            None  # what others had told to its execution: no part of its sum
        )
        self.told = False  # a span beneath it has ended with usage
        self.counted = False  # it, or one above, has ended with usage that counts
        self.ended = False

    def above(self) -> Iterator[_Open]:
        """The spans around it."""
        span = self.parent
        while span is not None:
            yield span
            span = span.parent

    def end(self) -> None:
        """It has ended; what is beneath it keeps nothing alive that has ended before it."""
        self.ended = True
        while self.parent is not None and self.parent.ended:
            self.counted = self.counted or self.parent.counted
            self.parent = self.parent.parent


# By trace and span id. One for all processors, so that of two on one provider (a notebook's cell ran
# again) one books. No lock: each step is atomic, also amid a signal, a finaliser or a fork.
_open: dict[tuple[int, int], _Open] = {}


class _Report(NamedTuple):
    """What one span told of one request."""

    key: tuple[int, int]
    parent: tuple[int, int]
    scope: str
    start: int  # ns
    end: int
    execution_id: str
    usage: Usage

    def is_of(self, other: _Report) -> bool:
        """Whether both are of one request, by two instrumentations of which one tells no id.

        One spans the other, or is in time where the other is, and they tell the same.
        """
        return (
            self.parent in {other.parent, other.key}
            and self.scope != other.scope
            and self.execution_id == other.execution_id
            and (
                other.start <= self.start <= self.end <= other.end
                or self.start <= other.start <= other.end <= self.end
            )
            and _agree(self.usage, other.usage)
        )


_latest: deque[_Report] = deque(maxlen=128)  # the last, booked: the twin of a span ends next to it


class UsageSpanProcessor(SpanProcessor):
    """Books what LLM spans tell of tokens to the execution that they are part of, each call once.

    Add it to the application's tracer provider, and any instrumentation that puts
    `gen_ai.usage.*`, `llm.usage.*` or `llm.token_count.*` on its spans tells the ledger what it
    knows:

        provider.add_span_processor(UsageSpanProcessor())

    It reads numbers and names of models, providers and responses, nothing else, and never raises.
    """

    def __init__(self) -> None:
        self._over = False

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """A span starts: the execution that it is part of is known now."""
        if self._over:
            return
        try:
            self._starts(span, parent_context)
        except Exception as error:  # noqa: BLE001 - counting must not cost the application its span
            _trouble(error)

    def on_end(self, span: ReadableSpan) -> None:
        """A span has ended: what it tells is booked, where nothing beneath it told it before."""
        try:
            self._ends(span)
        except Exception as error:  # noqa: BLE001 - as above
            _trouble(error)

    def shutdown(self) -> None:
        """From now on it does nothing, and holds nothing."""
        self._over = True
        for key, span in list(_open.items()):
            if span.owner is self:
                _open.pop(key, None)

    def force_flush(self, timeout_millis: int = 30000) -> bool:  # noqa: ARG002 - the SDK's signature
        """Nothing waits to be booked.

        Returns:
            True.

        """
        return True

    def _starts(self, span: Span, parent_context: Context | None) -> None:
        around = None if span.parent is None else _open.get(_key(span.parent))
        execution, here = None if around is None else around.execution, context.current()
        if execution is None or execution is not here:
            execution = _innermost(execution, execution_of(parent_context), here)
            if execution is None and around is None:
                return
        if _is_own(span):  # what is beneath belongs to the execution that its body gets
            execution = None
        started = _open[_key(span.context)] = _Open(self, execution, around)
        if execution is not None:
            started.before = _told_by(execution.spent())
        if len(_open) > LIMIT:
            _let_go()

    def _ends(self, span: ReadableSpan) -> None:
        ended = _open.pop(_key(span.context), None)
        if ended is None:
            return
        try:
            if ended.execution is not None and not _COUNTS.isdisjoint(span.attributes or ()):
                self._tells(ended, ended.execution, span)
        finally:
            ended.end()

    def _tells(self, ended: _Open, execution: Current, span: ReadableSpan) -> None:
        attributes = dict(span.attributes or {})  # each look at the SDK's own takes its lock
        usage = _usage(attributes)
        if usage is None:
            return
        covered = False
        for around in ended.above():
            around.told = True
            covered = covered or around.counted
        living = next((e for e in execution.ancestors() if not e.ended), None)
        if living is None:
            if not ended.told:
                log.warn("late usage", "%s: a span with usage ended after its body had, and is not "
                         "booked; await what the body starts", execution.task_type)  # fmt: skip
            return
        before = _told_by(living.spent())
        if _is_sum(attributes):
            if not ended.told:
                ended.counted = True
                _add_sum(living, usage, ended.before if living is execution else None)
        else:
            self._books(ended, living, span, usage, covered=covered)
        _lift(ended, living, before)

    def _books(
        self, ended: _Open, living: Current, span: ReadableSpan, usage: Usage, *, covered: bool
    ) -> None:
        """A span of one request: book it, unless it was told of before."""
        report = _Report(
            _key(span.context),
            _key(span.parent),
            "" if span.instrumentation_scope is None else span.instrumentation_scope.name,
            span.start_time or 0,
            span.end_time or 0,
            living.execution_id,
            usage,
        )
        twin = _twin(report)
        ended.counted = ended.counted or not ended.told
        if twin is not None:  # a second span of a request tells its id at most
            if twin.usage.response_id is None and usage.response_id is not None:
                living._add(Reading(usage), returned=True)  # noqa: SLF001 - by size, as of a result
        elif covered and not ended.told:  # what is around it ended before it did, and told of it
            _add_sum(living, usage, None)
        elif not ended.told and not _is_known(living, usage):
            living._add(Reading(usage))  # noqa: SLF001 - a source to know again there is none
            _latest.append(report)


def _key(span: SpanContext | None) -> tuple[int, int]:
    return (0, 0) if span is None else (span.trace_id, span.span_id)


def _innermost(*known: Current | None) -> Current | None:
    """The first that is known, or one of the others that is inside it."""
    found: Current | None = None
    for execution in known:
        if execution is None or execution is found:
            continue
        if found is None or any(around is found for around in execution.ancestors()):
            found = execution
    return found


def _is_own(span: ReadableSpan) -> bool:
    scope = span.instrumentation_scope
    return scope is not None and scope.name == OWN


def _is_sum(attributes: Mapping[str, Any] | None) -> bool:
    if attributes is None or _SUMS.keys().isdisjoint(attributes):
        return False
    return any(
        isinstance(kind := attributes.get(name), str) and kind in kinds
        for name, kinds in _SUMS.items()
    )


def _told_by(spent: Spent) -> Usage | None:
    """All that an execution and those inside it have told."""
    told = [] if spent.usage is None else [spent.usage]
    if spent.inner is not None:
        told.append(Usage(input_tokens=spent.inner[0], output_tokens=spent.inner[1]))
    return total(told)


def _lift(ended: _Open, execution: Current, before: Usage | None) -> None:
    """What was booked just now is no part of the sums of open spans that it is not beneath."""
    now = _told_by(execution.spent())
    if now is None:
        return
    more = {
        name: amount - (getattr(before, name, None) or 0)
        for name in TOKENS
        if (amount := getattr(now, name)) is not None
    }
    above = [ended, *ended.above()]
    for other in list(_open.values()):
        if other.execution is execution and other not in above:
            other.before = total([*([] if other.before is None else [other.before]), Usage(**more)])


def _add_sum(execution: Current, usage: Usage, before: Usage | None) -> None:
    """Book what of a sum was not told since it began."""
    whole = total([usage] if before is None else [before, usage])  # without the last response's id
    assert whole is not None
    execution._add(Reading(whole), aggregate=True)  # noqa: SLF001 - as above


def _is_known(execution: Current, usage: Usage) -> bool:
    """Whether its response was told of: by the body, who had it from the source, or by a span."""
    return usage.response_id is not None and usage.response_id in execution.spent().responses


def _agree(one: Usage, other: Usage) -> bool:
    return (
        (one.input_tokens, one.output_tokens) == (other.input_tokens, other.output_tokens)
        and (one.model is None or other.model is None or one.model == other.model)
        and (one.response_id is None or other.response_id is None)
    )


def _twin(report: _Report) -> _Report | None:
    """What another instrumentation told of the same request; it is nobody else's from now on."""
    for other in tuple(_latest):
        if other.is_of(report):
            try:
                _latest.remove(other)
            except ValueError:  # another thread was here
                continue
            return other
    return None


def _let_go() -> None:
    try:
        oldest = next(iter(_open))
    except (RuntimeError, StopIteration):  # another thread was here; the next span tries again
        return
    _open.pop(oldest, None)
    log.warn("open spans", "more than %d spans inside executions are open; what the oldest tell "
             "is not booked: end each span that is started", LIMIT)  # fmt: skip


def _trouble(error: Exception) -> None:
    log.warn("span usage", "usage could not be read off a span: %s", type(error).__qualname__)


# --- what attributes tell ----------------------------------------------------------------------------


def _usage(attributes: Mapping[str, Any]) -> Usage | None:
    """The usage that a span's attributes tell; None where they tell none."""
    told = {field: _count(attributes, names) for field, names in _FIELDS.items()}
    if not told["input_tokens"] and not told["output_tokens"]:
        return None  # nothing, or the zeros of an instrumentation that saw no numbers
    fresh, output = told["input_tokens"], told["output_tokens"]
    total_tokens = _count(attributes, _TOTAL)
    if fresh is not None:
        if output is None and total_tokens == fresh:
            told["output_tokens"] = 0  # an embedding
        # By the conventions input includes the cache, and OpenLLMetry's and OpenInference's spans
        # of Anthropic do so, too. Who repeats Anthropic's or Bedrock's own number gives himself
        # away by a cache that is larger than the input, or by a total that is larger than the sum.
        cached = (told["cache_read_tokens"] or 0) + (told["cache_write_tokens"] or 0)
        if cached > fresh or (cached and total_tokens == fresh + cached + (output or 0)):
            told["input_tokens"] = fresh + cached
    provider = _text(attributes, _PROVIDER)
    return Usage(
        **{field: told[field] for field in TOKENS},
        model=_text(attributes, _MODEL),
        provider=None if provider is None else provider.lower(),  # it once was `OpenAI`
        response_id=_text(attributes, _RESPONSE),
    )


def _count(attributes: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = attributes.get(name)
        if value is None:
            continue
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int and 0 <= value <= MOST:
            return value
        log.warn("span usage", "%s of a span is no number of tokens, and is not booked", name)
    return None


def _text(attributes: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next(
        (value for name in names if isinstance(value := attributes.get(name), str) and value), None
    )

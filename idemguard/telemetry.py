"""How a call is seen from outside: its span, its links, its metrics; by opentelemetry-api alone.

The ledger is the record, this is a view of it: whatever a tracer or a meter does, no call and no
count changes. Nothing of a payload, a result or an exception's text goes out.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from importlib import metadata
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from opentelemetry import context as otel
from opentelemetry import metrics, trace
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from idemguard import context, log
from idemguard.attached import Attached
from idemguard.claim import Begin, Claimed, Complete, InFlight, Release
from idemguard.collector import collecting
from idemguard.errors import WaitTimeoutError
from idemguard.guard import OutOfScope, Owe
from idemguard.pricing import CURRENCY
from idemguard.record import DUPLICATES, Cause
from idemguard.windows import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager
    from types import FrameType

    from idemguard.config import Settings
    from idemguard.context import Current
    from idemguard.guard import Ask, Reply, Wish
    from idemguard.record import Caller, Claim, Result
    from idemguard.span_usage import UsageSpanProcessor as UsageSpanProcessor  # noqa: PLC0414 - public here
    from idemguard.usage import Spent

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

SCOPE = "idemguard"  # of the tracer and the meter

# --- names: docs/telemetry.md tells each with its type, unit and an example ---------------------------

TASK_TYPE = "idemguard.task.type"
FINGERPRINT = "idemguard.fingerprint"  # the 16 digits that people are shown
WORKER = "idemguard.worker"
AGENT = "gen_ai.agent.name"
OUTCOME = "idemguard.outcome"
CAUSE = "idemguard.cause"
EXECUTION_ID = "idemguard.execution.id"
WAIT_DURATION = "idemguard.wait.duration"  # a span's attribute, and a metric; s
USAGE = "idemguard.usage."  # and a field of `Usage`
COST_AMOUNT = "idemguard.cost.amount"
COST_CURRENCY = "idemguard.cost.currency"
SAVED = "idemguard.saved."  # and a field of `Usage`
SAVED_AMOUNT = "idemguard.saved.cost.amount"
SAVED_CURRENCY = "idemguard.saved.cost.currency"
LEADER_TRACE_ID = "idemguard.leader.trace_id"
LEADER_SPAN_ID = "idemguard.leader.span_id"
LINK_TYPE = "idemguard.link.type"  # leader, or lost
REASON = "idemguard.reason"  # of an event
ERROR_TYPE = "error.type"
TOKEN_TYPE = "gen_ai.token.type"  # noqa: S105 - input or output
# of a call that executed, where `gen_ai_usage` is on: as the semantic conventions name them
GEN_AI = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cache_read_tokens": "gen_ai.usage.cache_read.input_tokens",
    "cache_write_tokens": "gen_ai.usage.cache_creation.input_tokens",
}

SPAN = "idemguard {}"
WAIT_SPAN = "idemguard wait"

LOST = "idemguard.lost"  # events
FALLBACK = "idemguard.fallback"
DECLINED = "idemguard.declined"
STORE_FAILED = "idemguard.store_failed"

CALLS = "idemguard.calls"  # metrics
FOUND = "idemguard.claims.found"
EXECUTIONS = "idemguard.executions"
DUPLICATED = "idemguard.duplicates"
USAGE_TOKENS = "idemguard.usage.tokens"
USAGE_COST = "idemguard.usage.cost"
SAVED_TOKENS = "idemguard.saved.tokens"
SAVED_COST = "idemguard.saved.cost"
CALL_DURATION = "idemguard.call.duration"

FIELDS = (
    "input_tokens", "output_tokens", "total_tokens", "cache_read_tokens", "cache_write_tokens",
    "reasoning_tokens",
)  # fmt: skip
AGENTS = 50  # names that metrics tell apart; the rest is `other`
OTHER = "other"
NAME = 255  # characters of a name that are shown
LARGEST = 2**63 - 1  # that an attribute holds
MOST = 2**40  # tokens of one execution that a counter takes: its sum must stay below that
# s: from a kept result to a run of an hour
DURATIONS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600,
)  # fmt: skip


_API = (trace.__name__, metrics.__name__)  # whose own providers do nothing


def __getattr__(name: str) -> Any:
    """`UsageSpanProcessor`, which alone needs the SDK."""
    if name != "UsageSpanProcessor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from idemguard.span_usage import UsageSpanProcessor  # noqa: PLC0415 - loads the SDK
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ModuleNotFoundError(
            "UsageSpanProcessor needs opentelemetry-sdk: install idemguard[otlp]", name=error.name
        ) from error
    return UsageSpanProcessor


def _harmless(
    method: Callable[Concatenate[S, P], None],
) -> Callable[Concatenate[S, P], None]:
    """The same method; what an exporter or a sampler raises is told in the log, and goes no further."""

    @wraps(method)
    def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a call is not to fail for being watched
            log.warn("telemetry", "telemetry failed: %s", type(error).__qualname__)

    return called


class Telemetry:
    """The spans and metrics of one guard.

    Args:
        settings: name the providers; the global ones count where they name none.
        priced: whether costs are known at all.

    """

    def __init__(self, settings: Settings, *, priced: bool) -> None:
        self._tracers, self._meters = settings.tracer_provider, settings.meter_provider
        self.record_exceptions = settings.record_exceptions is True
        self.gen_ai_usage = settings.gen_ai_usage is True
        self._priced = priced
        self.tracer, meter = self._made(_version())
        count, spread = meter.create_counter, meter.create_histogram
        self.calls = count(CALLS, "{call}", "Calls that ended, by what they came to.")
        self.found = count(FOUND, "{call}", "Calls that ended and had found a living leader.")
        self.executions = count(EXECUTIONS, "{execution}", "Bodies that started, by their cause.")
        self.duplicates = count(
            DUPLICATED, "{execution}", "Executions beside a result or a leader, or unseen."
        )
        self.tokens = count(USAGE_TOKENS, "{token}", "Tokens that executions spent.")
        self.cost = count(USAGE_COST, CURRENCY, "What these tokens cost.")
        self.saved_tokens = count(
            SAVED_TOKENS, "{token}", "Tokens that reused calls did not spend."
        )
        self.saved_cost = count(SAVED_COST, CURRENCY, "What these tokens would have cost.")
        self.duration = spread(
            CALL_DURATION, "s", "How long calls took, waiting and execution included.",
            explicit_bucket_boundaries_advisory=DURATIONS,
        )  # fmt: skip
        self.waits = spread(
            WAIT_DURATION, "s", "How long calls waited that found a living leader.",
            explicit_bucket_boundaries_advisory=DURATIONS,
        )  # fmt: skip
        self._agents: set[str] = set()  # those of the provider's other guards too
        self._begun: set[tuple[str, str | None]] = set()
        self._provider: object = None

    def _made(self, version: str) -> tuple[trace.Tracer, metrics.Meter]:
        try:
            return (
                trace.get_tracer(SCOPE, version, self._tracers),
                metrics.get_meter(SCOPE, version, self._meters),
            )
        except Exception as error:  # noqa: BLE001 - OTEL_PYTHON_TRACER_PROVIDER names what is not there
            log.warn("telemetry", "no spans and no metrics, since a provider of OpenTelemetry failed:"
                     " %s", type(error).__qualname__)  # fmt: skip
            self._tracers, self._meters = trace.NoOpTracerProvider(), metrics.NoOpMeterProvider()
            return self._tracers.get_tracer(SCOPE), self._meters.get_meter(SCOPE)

    # --- calls ---------------------------------------------------------------------------------------

    def call(self, ask: Ask) -> Seen | Unseen:
        """A call begins."""
        if not self._watches():
            return Unseen(ask)
        self.begin(ask.caller)
        seen = Seen(self, ask)
        seen.start()
        return seen

    @property
    def provider(self) -> object:
        """Who makes the spans; None where that cannot be told."""
        try:
            return trace.get_tracer_provider() if self._tracers is None else self._tracers
        except Exception:  # noqa: BLE001 - as when they were made
            return None

    def _watches(self) -> bool:
        """Whether there is anybody to see it: the API alone makes no span and takes no metric."""
        try:
            tracers = trace.get_tracer_provider() if self._tracers is None else self._tracers
            meters = metrics.get_meter_provider() if self._meters is None else self._meters
        except Exception:  # noqa: BLE001 - as when they were made
            return False
        return not (
            type(tracers).__module__.startswith(_API) and type(meters).__module__.startswith(_API)
        )

    def present(self, caller: Caller) -> Caller:
        """Who claims by hand: what executes is the span that is current."""
        try:
            found = trace.get_current_span().get_span_context()
            # without an SDK the present one is a request's, which is another service's
            return _traced(caller, found) if found.is_valid and not found.is_remote else caller
        except Exception:  # noqa: BLE001 - a span of somebody's own
            return caller

    def claimed(self, claim: Claim) -> None:
        """A claim was taken by hand."""
        self.begin(claim.caller)
        self.executes(claim, None)

    def reused(self, caller: Caller, result: Result) -> None:
        """A claim was asked for by hand, and a result is kept."""
        self.begin(caller)
        labels = self.labels(caller)
        self.ended(labels, "reused" if result.available else "refused", None)
        if result.available:
            self.spends(labels, result.spent, None, saved=True)

    def waits_not(self, caller: Caller) -> None:
        """A claim was asked for by hand, and somebody is executing."""
        self.begin(caller)
        self.finds(caller, None)

    def settled(self, claim: Claim, outcome: str, spent: Spent) -> None:
        """A claim that was held by hand has ended."""
        labels = self.labels(claim.caller)
        self.ended(labels, outcome, None)
        self.spends(labels, spent, None)

    # --- metrics -------------------------------------------------------------------------------------

    def labels(self, caller: Caller) -> dict[str, str]:
        """Task type and agent, as counters tell them apart."""
        agent = self._agent(caller.agent)
        return {TASK_TYPE: _short(caller.task_type)} | ({} if agent is None else {AGENT: agent})

    def _agent(self, name: str | None) -> str | None:
        if name is None or name in self._agents:
            return name
        name = _short(name)
        with _naming:
            if len(self._agents) < AGENTS:
                self._agents.add(name)
        return name if name in self._agents else OTHER

    @_harmless
    def begin(self, caller: Caller) -> None:
        """The first call of a task type, and of an agent: every series that it may have is there."""
        provider = metrics.get_meter_provider() if self._meters is None else self._meters
        if provider is not self._provider:  # set late: what was told to none before it is not there
            self._provider, self._begun, self._agents = provider, set(), _names_of(provider)
        agent = self._agent(caller.agent)
        if (caller.task_type, agent) in self._begun:
            return
        self._begun.add((caller.task_type, agent))
        labels = self.labels(caller)
        for outcome in OUTCOMES:
            self.calls.add(0, labels | {OUTCOME: outcome})
        self.found.add(0, labels)
        for cause in Cause:
            self.executions.add(0, labels | {CAUSE: str(cause)})
        for cause in sorted(DUPLICATES):
            self.duplicates.add(0, labels | {CAUSE: str(cause)})
        for kind in ("input", "output"):
            self.tokens.add(0, labels | {TOKEN_TYPE: kind})
            self.saved_tokens.add(0, labels | {TOKEN_TYPE: kind})
        if self._priced:
            self.cost.add(0, labels)
            self.saved_cost.add(0, labels)

    @_harmless
    def executes(self, claim: Claim, within: otel.Context | None) -> None:
        """A body starts."""
        labels = self.labels(claim.caller) | {CAUSE: str(claim.cause)}
        self.executions.add(1, labels, within)
        if claim.cause in DUPLICATES:
            self.duplicates.add(1, labels, within)

    @_harmless
    def finds(self, caller: Caller, within: otel.Context | None) -> None:
        """A call has found a living leader."""
        self.found.add(1, self.labels(caller), within)

    @_harmless
    def ended(self, labels: dict[str, str], outcome: str, within: otel.Context | None) -> None:
        """A call has come to its end."""
        self.calls.add(1, labels | {OUTCOME: outcome}, within)

    @_harmless
    def spends(
        self,
        labels: dict[str, str],
        spent: Spent,
        within: otel.Context | None,
        *,
        saved: bool = False,
    ) -> None:
        """Tokens and money of an execution, or what a reused result saved."""
        tokens, cost = (self.saved_tokens, self.saved_cost) if saved else (self.tokens, self.cost)
        usage = spent.usage
        if usage is not None:
            for kind in ("input", "output"):
                if amount := getattr(usage, f"{kind}_tokens"):
                    tokens.add(min(amount, MOST), labels | {TOKEN_TYPE: kind}, within)
        if spent.price:
            cost.add(float(spent.price), labels, within)


_naming = threading.RLock()  # a stream that is collected may come here while it is held
_names: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


def _names_of(provider: object) -> set[str]:
    """The agents that this provider's metrics tell apart, whichever guards count them."""
    try:
        return _names.setdefault(provider, set())
    except TypeError:  # it cannot be referred to weakly
        return set()


def _forked() -> None:
    global _naming  # noqa: PLW0603 - a thread of the parent may have held it
    _naming = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Unseen:
    """A call that nobody looks at: as `Seen`, and nothing comes of it."""

    __slots__ = ("ask",)

    over = True

    def __init__(self, ask: Ask) -> None:
        self.ask = ask

    def inside(self, execution: Current) -> AbstractContextManager[None]:
        """Make an execution the current one."""
        return context.inside(execution)

    def watch(self, flow: Generator[Wish, Any, R]) -> Generator[Wish, Any, R]:
        """The same flow."""
        return flow

    def executes(self, execution: Current) -> None:
        """Its body starts."""

    def end(self, reply: Reply, *, hold: bool = False) -> None:
        """It has come to this."""

    def left(self, error: BaseException | None = None) -> None:
        """Nobody is there any more."""


class Seen:
    """One call, as it is seen from outside.

    Attributes:
        ask: the call's question; it names the call's span, where there is one.
        over: whether its end was told.

    """

    __slots__ = (
        "_around",
        "_beside",
        "_context",
        "_current",
        "_found",
        "_held",
        "_leaders",
        "_lost_at",
        "_pid",
        "_span",
        "_spent",
        "_started",
        "_telemetry",
        "_waited_for",
        "_waiting",
        "_within",
        "ask",
        "over",
    )

    def __init__(self, telemetry: Telemetry, ask: Ask) -> None:
        self.ask = ask
        self._telemetry = telemetry
        self._started = time.monotonic()
        self._pid = os.getpid()
        self._span: trace.Span = trace.INVALID_SPAN
        self._around: otel.Context | None = None  # of its caller
        self._context: otel.Context | None = None  # with the call's span, where there is one
        self._within: otel.Context | None = None  # with its execution too, as its body left it
        self._current: otel.Context | None = None  # that was attached last
        self._waiting: tuple[str, trace.Span, float] | None = None  # for whom, its span, since when
        self._waited_for = 0.0  # s; counts where a call was not let in, and so tells none
        self._beside: Caller | None = None  # the leader that was waited for last
        self._leaders: set[str] = set()  # ids that are linked to
        self._found = False  # a living leader
        self._lost_at: int | None = None  # ns: when it was noticed that the claim is not held
        self._held = False  # all is said, but a consumer still reads
        self.over = False
        self._spent: Callable[[], Spent] | None = None

    @_harmless
    def start(self) -> None:
        """It begins."""
        telemetry, caller = self._telemetry, self.ask.caller
        around = otel.get_current()
        about = {TASK_TYPE: _short(caller.task_type), WORKER: _short(caller.worker)}
        if self.ask.address.fingerprint:
            about[FINGERPRINT] = self.ask.address.fingerprint[:16]
        if caller.agent is not None:
            about[AGENT] = _short(caller.agent)
        name = SPAN.format(_short(caller.task_type))
        span = telemetry.tracer.start_span(name, around, SpanKind.INTERNAL, about)
        try:
            self._take(span, around)
        finally:
            if self._span is not span and span.is_recording():
                span.end()  # it cannot be told from another one, or Ctrl-C hit

    def _take(self, span: trace.Span, around: otel.Context) -> None:
        own = span.get_span_context()
        if (
            own.is_valid
            and own.span_id != trace.get_current_span(around).get_span_context().span_id
        ):
            self.ask = replace(self.ask, caller=_traced(self.ask.caller, own))
            self._context = trace.set_span_in_context(span, around)
            self._span, self._around = span, around

    # --- while it goes on ------------------------------------------------------------------------------

    def inside(self, execution: Current) -> AbstractContextManager[None]:
        """Make an execution the current one, and its span that of what happens inside."""
        if self._context is None:
            return context.inside(execution)
        if self._within is None:
            self._within = Attached.context(execution, self._context)
        self._current = self._within
        return Attached(execution, self._within, self._leaves)

    def _leaves(self, within: otel.Context) -> None:
        self._within = within  # a stream's next step goes on in what this one has made current

    @_harmless
    def executes(self, execution: Current) -> None:
        """Its body starts."""
        self._waited()
        self._spent = execution.spent
        execution.told_lost = self.lost
        self._telemetry.executes(execution.claim, self._context)

    @_harmless
    def lost(self) -> None:
        """Its claim is no longer held; why, its end knows."""
        self._lost_at = self._lost_at or time.time_ns()

    def watch(self, flow: Generator[Wish, Any, R]) -> Generator[Wish, Any, R]:
        """The same flow; what it asks and is answered is seen."""
        try:
            wish = next(flow)
            while True:
                self._asks(wish)
                try:
                    answer = yield wish
                except GeneratorExit:
                    flow.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - what it means is decided in the flow
                    wish = flow.throw(error)
                else:
                    self._answered(wish, answer)
                    wish = flow.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    @_harmless
    def _asks(self, wish: Wish) -> None:
        if not isinstance(wish, Owe):
            return
        command = wish.command
        if not isinstance(command, (Complete, Release)):
            self._event(STORE_FAILED, "no claim could be had")
        elif command.claim.cause is not Cause.UNGUARDED:  # that one is told in any case later
            self._event(STORE_FAILED, "the end of its execution is told later")

    @_harmless
    def _answered(self, wish: Wish, answer: object) -> None:
        if not isinstance(wish, Begin):
            return
        if isinstance(answer, InFlight):
            self._waits(answer.holder)
            return
        self._waited()
        if not isinstance(answer, Claimed):
            return
        if answer.claim.cause is Cause.FALLBACK:
            self._event(FALLBACK, "its leader took longer than wait_timeout")
        if answer.before is not None:
            _link(self._span, answer.before.caller, "lost")

    def _waits(self, holder: Claim) -> None:
        self._found, self._beside = True, holder.caller
        if self._waiting is not None and self._waiting[0] == holder.id:
            return
        self._waited()
        caller = self.ask.caller
        about = {
            TASK_TYPE: _short(caller.task_type),
            FINGERPRINT: self.ask.address.fingerprint[:16],
        }
        span = self._telemetry.tracer.start_span(WAIT_SPAN, self._context, SpanKind.INTERNAL, about)
        self._waiting = holder.id, span, time.monotonic()
        _link(span, holder.caller, "leader")
        self._links(holder)

    @_harmless
    def _waited(self) -> None:
        if self._waiting is not None:
            (_, span, since), self._waiting = self._waiting, None
            self._waited_for += time.monotonic() - since
            if os.getpid() == self._pid:
                span.end()

    def _links(self, leader: Claim) -> None:
        if leader.id not in self._leaders:
            self._leaders.add(leader.id)
            _link(self._span, leader.caller, "leader")

    def _event(self, name: str, reason: str, at: int | None = None) -> None:
        self._span.add_event(name, {REASON: reason}, at)

    # --- the end ---------------------------------------------------------------------------------------

    def end(self, reply: Reply, *, hold: bool = False) -> None:
        """It has come to this.

        Args:
            reply: what it came to.
            hold: its consumer has yet to read, so that the span is not over before `left`.

        """
        if self.over or self._held or os.getpid() != self._pid:
            return
        self._held, self.over, self._spent = hold, not hold, None
        _unlocked(self._end, reply, hold=hold)

    def _end(self, reply: Reply, *, hold: bool) -> None:
        try:
            self._tell(reply)
        finally:
            if not hold:
                self._close()

    def left(self, error: BaseException | None = None) -> None:
        """Nobody is there any more: it ends now, if it has not.

        Args:
            error: that it was left with, or None.

        """
        if self._current is not None and otel.get_current() is self._current:
            otel.attach(self._around or otel.Context())  # Ctrl-C hit in the midst of its detaching
        if self.over or os.getpid() != self._pid:
            return
        self.over = True
        _unlocked(self._leave, sys.exception() if error is None else error)

    def _leave(self, error: BaseException | None) -> None:
        try:
            if not self._held:
                self._gone(error)
        finally:
            self._spent = None
            self._close()

    @_harmless
    def _close(self) -> None:
        self._waited()
        self._span.end()

    @_harmless
    def _gone(self, error: BaseException | None) -> None:
        self._waited()
        telemetry = self._telemetry
        labels, spent = telemetry.labels(self.ask.caller), self._spent
        telemetry.ended(labels, "failed", self._context)
        self._durations("failed", self._waited_for)
        told = None if spent is None else spent()
        if told is not None:
            telemetry.spends(labels, told, self._context)
        if self._waited_for:
            self._waited_in_all(self._waited_for)
        self._failed("GeneratorExit" if error is None else type(error).__qualname__)
        self._span.set_attribute(OUTCOME, "failed")
        if self._lost_at is not None:
            self._event(LOST, "its claim was no longer held when it was left", self._lost_at)
        if told is not None:
            self._amounts(told)

    @_harmless
    def _tell(self, reply: Reply) -> None:
        self._waited()
        telemetry, source = self._telemetry, reply.source
        labels, spent = telemetry.labels(self.ask.caller), reply.spent
        telemetry.ended(labels, source, self._context)
        timed_out, waited = isinstance(reply.error, WaitTimeoutError), reply.waited / 1000
        if not waited and not timed_out and reply.claim is None:
            waited = self._waited_for
        self._durations(source, waited, timed_out=timed_out)
        if source != "refused":
            telemetry.spends(labels, spent, self._context, saved=source == "reused")
        if waited:
            self._waited_in_all(waited)
        self._describe(reply, timed_out=timed_out)

    @_harmless
    def _waited_in_all(self, waited: float) -> None:
        self._span.set_attribute(WAIT_DURATION, waited)

    @_harmless
    def _describe(self, reply: Reply, *, timed_out: bool) -> None:
        span, source, error = self._span, reply.source, reply.error
        span.set_attribute(OUTCOME, source)
        if reply.claim is not None:
            span.set_attribute(EXECUTION_ID, reply.claim.id)
            span.set_attribute(CAUSE, str(reply.claim.cause))
        leader = None
        if reply.result is not None:
            leader = reply.result.claim.caller
            self._links(reply.result.claim)
        elif source == "fallback" or timed_out:
            leader = self._beside
        if leader is not None and (ids := leader.trace) is not None:
            span.set_attribute(LEADER_TRACE_ID, ids[0])
            span.set_attribute(LEADER_SPAN_ID, ids[1])
        if reply.lost:
            self._event(LOST, "its lease ran out", self._lost_at)
        elif self._lost_at is not None and source != "fallback":
            reason = "its task was forgotten, or its fallback's result was kept before its own"
            self._event(LOST, reason, self._lost_at)
        if source == "declined":
            raised = isinstance(error, OutOfScope)
            self._event(
                DECLINED, "it raised OutOfScope" if raised else "its status is out_of_scope"
            )
        elif error is not None:
            self._failed(type(error).__qualname__)
            if self._telemetry.record_exceptions:
                self._records(error)
        if source == "reused":
            _amounts(span, reply.spent, SAVED)
        elif source != "refused":
            self._amounts(reply.spent)

    def _amounts(self, spent: Spent) -> None:
        _amounts(self._span, spent, USAGE)
        if self._telemetry.gen_ai_usage and spent.usage is not None:
            for field, name in GEN_AI.items():
                if (amount := getattr(spent.usage, field)) is not None:
                    self._span.set_attribute(name, min(amount, LARGEST))

    @_harmless
    def _records(self, error: BaseException) -> None:
        self._span.record_exception(error)  # its text is made by the user's code

    def _failed(self, error_type: str) -> None:
        self._span.set_attribute(ERROR_TYPE, error_type)
        self._span.set_status(Status(StatusCode.ERROR))

    @_harmless
    def _durations(self, source: str, waited: float, *, timed_out: bool = False) -> None:
        telemetry, caller = self._telemetry, self.ask.caller
        labels = {TASK_TYPE: _short(caller.task_type), OUTCOME: source}
        telemetry.duration.record(time.monotonic() - self._started, labels, self._context)
        if self._found or waited or source == "fallback" or timed_out:
            telemetry.waits.record(waited, labels, self._context)
            telemetry.finds(caller, self._context)


def _traced(caller: Caller, span: SpanContext) -> Caller:
    return caller._replace(
        trace_id=trace.format_trace_id(span.trace_id),
        span_id=trace.format_span_id(span.span_id),
        trace_flags=int(span.trace_flags),
    )


def _link(span: trace.Span, to: Caller, kind: str) -> None:
    """Link to another call's span; not where it has none, or what was kept of it is no id."""
    if (found := to.trace) is None:
        return
    trace_id, span_id = found
    flags = to.trace_flags if isinstance(to.trace_flags, int) else 0
    there = SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(flags & 0xFF)
    )
    span.add_link(there, {LINK_TYPE: kind})


def _amounts(span: trace.Span, spent: Spent, prefix: str) -> None:
    usage = spent.usage
    if usage is not None:
        for field in FIELDS:
            if (amount := getattr(usage, field)) is not None:
                span.set_attribute(prefix + field, min(amount, LARGEST))
    if spent.price is not None:
        amount_name, currency_name = (
            (SAVED_AMOUNT, SAVED_CURRENCY) if prefix == SAVED else (COST_AMOUNT, COST_CURRENCY)
        )
        span.set_attribute(amount_name, float(spent.price))
        span.set_attribute(currency_name, spent.currency or CURRENCY)


# --- collected ---------------------------------------------------------------------------------------

_LOCKING = ("opentelemetry.sdk.", "opentelemetry.exporter.")


def _unlocked(act: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Do it now; where this thread may hold a lock that it takes, in a thread of its own.

    The garbage collector, which may run anywhere, closes a coroutine or a stream that nobody has
    any more: amid the SDK's steps, or those of somebody's own processor.
    """
    if not collecting() and not _amid():
        act(*args, **kwargs)
        return
    thread = threading.Thread(
        target=act, args=args, kwargs=kwargs, name="idemguard-left", daemon=True
    )
    with suppress(RuntimeError):  # the interpreter ends
        thread.start()


def _amid() -> bool:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no other way to tell
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_LOCKING):
            return True
        frame = frame.f_back
    return False


def _short(name: str) -> str:
    """A name as telemetry shows it: not longer than people read."""
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"


def _version() -> str:
    try:
        return metadata.version("idemguard")
    except metadata.PackageNotFoundError:  # run from a tree that is not installed
        return ""

"""The metrics: which there are, that their series are bounded and begin at zero, and that the ledger says the same."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest
from opentelemetry import metrics as api
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import (
    AlignedHistogramBucketExemplarReservoir,
    MeterProvider,
    SimpleFixedSizeExemplarReservoir,
)
from opentelemetry.sdk.metrics.export import Histogram, InMemoryMetricReader, Sum
from opentelemetry.sdk.metrics.view import View
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider, sampling
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.trace import NoOpTracerProvider
from workers.emitted import Emitted

from idemguard import (
    Guard,
    OutOfScope,
    agent,
    bypass,
    configure,
    errors,
    idempotent,
    record_usage,
    telemetry,
)
from idemguard.record import DUPLICATES, Cause
from idemguard.stores.memory import MemoryStore
from idemguard.windows import OUTCOMES, total

LONG = 60.0
PRICES = {"m": {"input": "3", "output": "15"}}
TYPE, OUTCOME, CAUSE = "idemguard.task.type", "idemguard.outcome", "idemguard.cause"
TOKEN, AGENT = "gen_ai.token.type", "gen_ai.agent.name"


@pytest.fixture
def emitted():
    """What is emitted."""
    made = Emitted()
    yield made
    made.close()
    assert made.open.spans == {}


@pytest.fixture
def store():
    """What is emitted is decided above the stores, so that one kind is enough for most."""
    return MemoryStore()


@pytest.fixture
def guard(guard_of, emitted):
    """A guard that emits, and prices."""
    return guard_of(pricer=PRICES, **emitted.providers)


def spends(n):
    """A body that calls a model."""
    record_usage(input_tokens=100, output_tokens=10, model="m")
    return n


class BoomError(Exception):
    """What a body raises."""


# --- which there are -----------------------------------------------------------------------------

COUNTERS = {
    "idemguard.calls": ("{call}", {TYPE, OUTCOME, AGENT}),
    "idemguard.claims.found": ("{call}", {TYPE, AGENT}),
    "idemguard.executions": ("{execution}", {TYPE, CAUSE, AGENT}),
    "idemguard.duplicates": ("{execution}", {TYPE, CAUSE, AGENT}),
    "idemguard.usage.tokens": ("{token}", {TYPE, TOKEN, AGENT}),
    "idemguard.usage.cost": ("USD", {TYPE, AGENT}),
    "idemguard.saved.tokens": ("{token}", {TYPE, TOKEN, AGENT}),
    "idemguard.saved.cost": ("USD", {TYPE, AGENT}),
}
HISTOGRAMS = {
    "idemguard.call.duration": ("s", {TYPE, OUTCOME}),
    "idemguard.wait.duration": ("s", {TYPE, OUTCOME}),
}


def waited_out(guard, call, n):
    """A call that finds a living leader, and falls back."""
    claim = guard.claim(guard.task_of(call, n))
    call(n)
    claim.release()


def test_names_units_and_attributes(guard, emitted):
    task = guard.idempotent(spends, task_type="t", wait_timeout=0)
    with agent("writer"):
        task(1)
        task(1)
        waited_out(guard, task, 2)
    metrics = emitted.metrics()
    assert set(metrics) == set(COUNTERS) | set(HISTOGRAMS)
    for name, (unit, attributes) in (COUNTERS | HISTOGRAMS).items():
        metric = metrics[name]
        assert (metric.name, metric.unit) == (name, unit)
        assert metric.description.endswith(".")
        for point in metric.data.data_points:
            assert set(point.attributes) == attributes
            assert all(type(value) is str for value in point.attributes.values())
        if name in COUNTERS:
            assert isinstance(metric.data, Sum)
            assert metric.data.is_monotonic
        else:
            assert isinstance(metric.data, Histogram)
            assert {p.explicit_bounds for p in metric.data.data_points} == {telemetry.DURATIONS}


def test_the_buckets_reach_from_a_kept_result_to_an_hour():
    bounds = telemetry.DURATIONS
    assert list(bounds) == sorted(set(bounds))
    assert (bounds[0], bounds[-1]) == (0.005, 3600)


def test_a_scope_and_its_version(guard, emitted):
    guard.idempotent(spends, task_type="t")(1)
    (resource,) = emitted.reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    (span,) = emitted.spans()
    told = scope.scope.name, scope.scope.version
    assert told == (span.instrumentation_scope.name, span.instrumentation_scope.version)
    assert told[0] == "idemguard"


# --- zero from the start -------------------------------------------------------------------------


def zero_series(*, priced, **labels):
    """Every series of a counter that is to be there for a task type and an agent."""
    tokens = [{TOKEN: "input"}, {TOKEN: "output"}]
    by = {
        "idemguard.calls": [{OUTCOME: outcome} for outcome in OUTCOMES],
        "idemguard.claims.found": [{}],
        "idemguard.executions": [{CAUSE: str(cause)} for cause in Cause],
        "idemguard.duplicates": [{CAUSE: str(cause)} for cause in DUPLICATES],
        "idemguard.usage.tokens": tokens,
        "idemguard.saved.tokens": tokens,
    }
    if priced:
        by |= {"idemguard.usage.cost": [{}], "idemguard.saved.cost": [{}]}
    return {name: {tuple(sorted((labels | s).items())) for s in told} for name, told in by.items()}


def counters(emitted):
    """Every counter's series, and what they came to."""
    return {name: emitted.points(name) for name in emitted.metrics() if name in COUNTERS}


@pytest.mark.parametrize("priced", [False, True])
def test_zero_series_are_there_from_the_first_call_on(guard_of, emitted, priced):
    guard = guard_of(pricer=PRICES if priced else None, **emitted.providers)
    seen = []

    @guard.idempotent(task_type="t")
    def task(n):
        seen.append(counters(emitted))  # while the first call is under way
        spends(n)

    task(1)
    wanted = zero_series(priced=priced, **{TYPE: "t"})
    assert {name: set(points) for name, points in seen[0].items()} == wanted
    assert sum(itertools.chain(*(points.values() for points in seen[0].values()))) == 1  # it runs
    assert {name: set(points) for name, points in counters(emitted).items()} == wanted
    with agent("writer"):
        task(1)
    whole = zero_series(priced=priced, **{TYPE: "t", AGENT: "writer"})
    for name, points in counters(emitted).items():
        assert set(points) == wanted[name] | whole[name]


def test_every_task_type_has_its_own(guard, emitted):
    for name in ("one", "two"):
        guard.idempotent(lambda n: n, task_type=name)(1)
    points = emitted.points("idemguard.calls")
    assert Counter(dict(pairs)[TYPE] for pairs in points) == {"one": 7, "two": 7}


@pytest.mark.parametrize("how", ["by hand", "refused", "stream"])
def test_whatever_comes_first(guard, emitted, how):
    task = guard.idempotent(lambda n: n, task_type="t")
    if how == "by hand":
        guard.claim(guard.task_of(task, 1))
    elif how == "refused":
        with pytest.raises(errors.FingerprintError):
            task(object())
    else:

        @guard.idempotent(task_type="t")
        def flow(n):
            yield n

        list(flow(1))
    wanted = zero_series(priced=True, **{TYPE: "t"})
    assert {name: set(points) for name, points in counters(emitted).items()} == wanted


# --- bounded -------------------------------------------------------------------------------------


def test_series_are_bounded_whatever_the_load(guard, emitted):
    task = guard.idempotent(lambda n: n, task_type="t")
    for n in range(5000):
        with agent(f"agent {n}"):
            task(n)
    agents = 51
    bounds = {
        "idemguard.calls": len(OUTCOMES) * agents,
        "idemguard.claims.found": agents,
        "idemguard.executions": len(Cause) * agents,
        "idemguard.duplicates": len(DUPLICATES) * agents,
        "idemguard.usage.tokens": 2 * agents,
        "idemguard.usage.cost": agents,
        "idemguard.saved.tokens": 2 * agents,
        "idemguard.saved.cost": agents,
        "idemguard.call.duration": 1,
    }
    metrics = emitted.metrics()
    assert {name: len(m.data.data_points) for name, m in metrics.items()} == bounds
    named = {dict(pairs)[AGENT] for pairs in emitted.points("idemguard.calls")}
    assert len(named) == agents
    assert "other" in named
    assert emitted.counted("idemguard.calls", gen_ai_agent_name="other") == 4950
    assert emitted.counted("idemguard.calls", gen_ai_agent_name="agent 0") == 1
    assert emitted.counted("idemguard.calls") == 5000


def test_an_agent_that_had_a_name_keeps_it(guard, emitted, crew):
    """Though many come at once."""
    task = guard.idempotent(lambda n: n, task_type="t")

    def call(number):
        for n in range(20):
            with agent(f"{number}-{n}"):
                task(n)

    for future in [crew.start(call, number) for number in range(8)]:
        future.result(LONG)
    named = {dict(pairs)[AGENT] for pairs in emitted.points("idemguard.calls")}
    assert len(named) == 51
    for name in named - {"other"}:
        assert emitted.counted("idemguard.calls", gen_ai_agent_name=name) == 1
    assert emitted.counted("idemguard.calls") == 160


# --- what is counted -----------------------------------------------------------------------------


def test_reuse_saves_and_spends_nothing(guard, emitted):
    task = guard.idempotent(spends, task_type="t")
    task(1)
    with agent("reader"):
        task(1)
        task(1)
    count = emitted.counted
    assert count("idemguard.usage.tokens", gen_ai_token_type="input") == 100
    assert count("idemguard.usage.tokens", gen_ai_token_type="output") == 10
    assert count("idemguard.usage.tokens", gen_ai_agent_name="reader") == 0
    assert count("idemguard.saved.tokens") == 220  # booked to the agent that asked
    assert count("idemguard.saved.tokens", gen_ai_agent_name="reader") == 220
    assert count("idemguard.usage.cost") == pytest.approx(0.00045)
    assert count("idemguard.saved.cost") == pytest.approx(0.0009)


def test_what_has_no_price_costs_nothing_that_is_known(guard_of, emitted):
    guard_of(**emitted.providers).idempotent(spends, task_type="t")(1)
    assert "idemguard.usage.cost" not in emitted.metrics()
    assert emitted.counted("idemguard.usage.tokens") == 110


def test_durations(guard, emitted):
    took = []

    @guard.idempotent(task_type="t")
    def task(n):
        threading.Event().wait(0.03)
        took.append(n)

    task(1)
    task(1)
    points = {
        p.attributes[OUTCOME]: p
        for p in emitted.metrics()["idemguard.call.duration"].data.data_points
    }
    assert {name: point.count for name, point in points.items()} == {"executed": 1, "reused": 1}
    assert points["executed"].sum >= 0.03
    assert points["reused"].sum > 0
    assert "idemguard.wait.duration" not in emitted.metrics()


@pytest.mark.parametrize("sampler", [sampling.ALWAYS_ON, sampling.ALWAYS_OFF])
def test_every_call_that_found_a_leader_is_counted_once(tapped, until, sampler):
    """Whatever it came to, and whether or not its span was sampled; so that shares can be had."""
    seen = Emitted(sampler)
    guard = Guard(store=tapped, **seen.providers)

    @guard.idempotent(task_type="t")
    async def patient(n):
        return n

    def late(**options):
        return guard.idempotent(lambda n: n, task_type="t", wait_timeout=0.02, **options)

    def found(call, n, *, error=None):
        claim = guard.claim(guard.task_of(call, n))
        with contextlib.suppress(error or BoomError):
            call(n)
        claim.release()

    found(late(), 1)
    found(late(on_timeout="raise"), 2, error=errors.WaitTimeoutError)
    found(guard.idempotent(lambda n: n, task_type="t", wait_timeout=0), 3)

    async def waits(n, then):
        claim, parked = guard.claim(guard.task_of(patient, n)), tapped.parked
        waiter = asyncio.create_task(patient(n))
        async with asyncio.timeout(LONG):
            while tapped.parked == parked:  # noqa: ASYNC110 - what it waits for tells nobody
                await asyncio.sleep(0.001)
        if then == "cancel":
            waiter.cancel()
        elif then == "fail":
            tapped.fails = errors.StoreError("no outage")
            tapped.store.perform(claim._releasing())
        else:
            await asyncio.to_thread(claim.complete, n)
        await asyncio.wait([waiter])
        with contextlib.suppress(asyncio.CancelledError):
            waiter.exception()
        tapped.up()
        claim.release()

    asyncio.run(waits(4, "complete"))
    asyncio.run(waits(5, "cancel"))
    asyncio.run(waits(6, "fail"))
    metric = seen.metrics()["idemguard.wait.duration"]
    told = {p.attributes[OUTCOME]: (p.count, p.sum > 0) for p in metric.data.data_points}
    assert told == {
        "fallback": (2, True),
        "refused": (2, True),
        "reused": (1, True),
        "failed": (1, True),
    }
    assert guard.engine.backlog.settle()
    assert total(guard.ledger.windows())["found"] == 6
    seen.close()


# --- what the ledger says ------------------------------------------------------------------------


class Mix:
    """Calls of every outcome and cause, one after the other.

    Args:
        guard: on a store that is tapped.
        tapped: that store.

    """

    def __init__(self, guard, tapped) -> None:
        self.guard = guard
        self.tapped = tapped

    def run(self):
        """What each call came to: its value, or the error's name."""
        with agent("early"):
            told = [*self._plain(), *self._shared()]
        with agent("late"):
            told += [*self._plain(), *self._streams()]
        return [*told, *self._troubles(), *self._by_hand()]

    def _all(self, *calls):
        return [self._one(*call) for call in calls]

    @staticmethod
    def _one(call, *args):
        try:
            return call(*args)
        except (BoomError, OutOfScope, errors.IdemguardError, asyncio.CancelledError) as error:
            return type(error).__name__

    def _made(self, body, **options):
        return self.guard.idempotent(body, **{"task_type": "plain"} | options)

    def _plain(self):
        def boom(n):
            spends(n)
            raise BoomError

        def out(n):
            spends(n)
            raise OutOfScope

        plain = self._made(spends)
        boom, out = self._made(boom, version="b"), self._made(out, version="o")
        again = self._made(spends, version="e", ttl=0)
        told = self._all(
            (plain, 1), (plain, 1), (plain, 1), (boom, 1), (boom, 1), (out, 1), (out, 1),
            (again, 1), (again, 1),
        )  # fmt: skip
        observed = self._made(spends, version="v", mode="observe")
        told += self._all((observed, 1), (observed, 1))
        with bypass():
            told += self._all((plain, 1))
        self.guard.forget(self.guard.task_of(plain, 1))
        return told + self._all((plain, 1))

    def _shared(self):
        patient = self._made(spends, wait_timeout=0.005)
        strict = self._made(spends, wait_timeout=0.005, on_timeout="raise")
        told = []
        for n, call in enumerate((patient, strict), 10):
            claim = self.guard.claim(self.guard.task_of(call, n))
            told += self._all((call, n))
            claim.release()
        keyed = self._made(spends, key=lambda bound: "order", version="k")
        told += self._all((keyed, 1), (keyed, 2))
        short = self._made(spends, lease=0.01)
        task = self.guard.task_of(short, 12)
        self.guard.claim(task)  # and it is never heard of again
        end = time.monotonic() + LONG
        while self._lives(task):
            assert time.monotonic() < end
        told += self._all((short, 12))
        return told

    def _lives(self, task):
        record, now = self.tapped.look(self.guard._desk.address(task))
        return bool(record.living(now))

    def _streams(self):
        @self.guard.idempotent(task_type="flow")
        def flow(n):
            yield spends(n)
            yield n

        @self.guard.idempotent(task_type="flow")
        async def aflow(n):
            yield spends(n)

        async def consumed(n):
            return [chunk async for chunk in aflow(n)]

        left = flow(9)
        told = [list(flow(2)), list(flow(2)), next(left)]
        left.close()
        return [*told, asyncio.run(consumed(3)), asyncio.run(consumed(3))]

    def _troubles(self):
        def away(n):
            self.tapped.down()
            return spends(n)

        told = self._all((self._made(away), 20))
        told += self._all((self._made(spends, on_store_error="run"), 21))
        told += self._all((self._made(spends), 22))
        self.tapped.up()
        assert self.guard.engine.backlog.settle()
        return told

    def _by_hand(self):
        told = []
        for n in range(3):
            claim = self.guard.claim(self.guard.task_of(self._made(spends), 30 + n))
            usage = {"input_tokens": 7, "output_tokens": 1, "model": "m"}
            told.append(claim.complete(n, usage=usage) if n else claim.release())
        return told


def ledger_counts(guard):
    """What the ledger has, by task type and agent, as the metrics have it."""
    found = {}
    for window in guard.ledger.windows():
        counts = found.setdefault((window.key.task_type, window.key.agent), Counter())
        counts.update(window.counts)
    return found


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
def test_the_counters_say_what_the_ledger_says(request, tmp_path, emitted, kind):
    from conftest import Tapped  # noqa: PLC0415

    from idemguard.stores import open_store  # noqa: PLC0415

    urls = {
        "memory": lambda: None,
        "sqlite": lambda: f"sqlite:///{tmp_path / 'mix.db'}",
        "redis": lambda: request.getfixturevalue("redis_url"),
    }
    url = urls[kind]()
    tapped = Tapped(MemoryStore() if url is None else open_store(url))
    guard = Guard(store=tapped, pricer=PRICES, **emitted.providers)
    assert len(Mix(guard, tapped).run()) > 40
    seen = ledger_counts(guard)
    assert {name for name, _ in seen} == {"plain", "flow"}
    causes = Counter()
    for (task_type, name), counts in seen.items():
        labels = {TYPE: task_type} | ({} if name is None else {AGENT: name})

        def count(metric, more=None, labels=labels):
            return emitted.points(metric).get(tuple(sorted((labels | (more or {})).items())), 0)

        for outcome in OUTCOMES:
            told = count("idemguard.calls", {OUTCOME: outcome})
            assert told == counts[f"call_{outcome}"], (task_type, name, outcome)
        for cause in Cause:
            causes[cause] += counts[f"cause_{cause}"]
            told = count("idemguard.executions", {CAUSE: str(cause)})
            assert told == counts[f"cause_{cause}"], (task_type, name, cause)
        for cause in DUPLICATES:
            told = count("idemguard.duplicates", {CAUSE: str(cause)})
            assert told == counts[f"cause_{cause}"], (task_type, name, cause)
        for token in ("input", "output"):
            assert count("idemguard.usage.tokens", {TOKEN: token}) == counts[token]
            assert count("idemguard.saved.tokens", {TOKEN: token}) == counts[f"saved_{token}"]
        assert count("idemguard.usage.cost") == pytest.approx(counts["cost"] / 1e12)
        assert count("idemguard.saved.cost") == pytest.approx(counts["saved_cost"] / 1e12)
    assert min(causes[cause] for cause in Cause) > 0  # every cause was among them
    for task_type in ("plain", "flow"):
        summary = guard.ledger.task_type_summary(task_type)
        of = {"idemguard_task_type": task_type}
        assert emitted.counted("idemguard.calls", **of) == summary["calls"]
        assert emitted.counted("idemguard.executions", **of) == summary["executions"]
        assert emitted.counted("idemguard.duplicates", **of) == summary["duplicates"]
    assert emitted.counted("idemguard.wait.duration") == total(guard.ledger.windows())["found"]
    guard.close()


# --- whatever a provider does, a call and the ledger are the same --------------------------------


class RaisingSampler(sampling.Sampler):
    """Of somebody who made a mistake."""

    def should_sample(self, *args, **kwargs):
        raise BoomError

    def get_description(self):
        return "raises"


class RaisingProcessor(SpanProcessor):
    """The same, at a span's start or its end."""

    def __init__(self, at) -> None:
        self._at = at

    def on_start(self, span, parent_context=None):
        if self._at == "start":
            raise BoomError

    def on_end(self, span):
        if self._at == "end":
            raise BoomError


class Exporter(SpanExporter):
    """Raises, or waits until it is let go."""

    def __init__(self, *, raises=False) -> None:
        self._raises = raises
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def export(self, spans):
        self.entered.set()
        if self._raises:
            raise BoomError
        assert self.let_go.wait(LONG)
        return SpanExportResult.SUCCESS


class RaisingMeters(api.MeterProvider):
    """Whose instruments raise."""

    def get_meter(self, *args, **kwargs):
        return _RaisingMeter("raises")


class _RaisingMeter(type(NoOpMeterProvider().get_meter("n"))):
    def create_counter(self, *args, **kwargs):
        return _Raising()

    create_histogram = create_counter


class _Raising:
    def add(self, *args, **kwargs):
        raise BoomError

    record = add


def with_processor(processor, sampler=None):
    """A provider with it."""
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def broken(what):
    """Providers of which one is broken in this way, and what is to be ended after the test."""
    match what:
        case "sampler":
            return {"tracer_provider": TracerProvider(RaisingSampler(), shutdown_on_exit=False)}
        case "processor at start" | "processor at end":
            return {"tracer_provider": with_processor(RaisingProcessor(what.split()[-1]))}
        case "exporter":
            return {"tracer_provider": with_processor(SimpleSpanProcessor(Exporter(raises=True)))}
        case "shut down":
            made = Emitted()
            made.close()
            return made.providers
        case "none" | "half":
            rate = 0.0 if what == "none" else 0.5
            return Emitted(sampling.TraceIdRatioBased(rate)).providers
        case "all":
            return Emitted().providers
        case "disabled":
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("OTEL_SDK_DISABLED", "true")
                made = Emitted()
                made.tracers.get_tracer("asked while it is")
                return made.providers
        case "no-op":
            return {"tracer_provider": NoOpTracerProvider(), "meter_provider": NoOpMeterProvider()}
        case _:
            assert what == "meters"
            return {"meter_provider": RaisingMeters()}


BROKEN = (
    "sampler", "processor at start", "processor at end", "exporter", "shut down", "none", "half",
    "all", "disabled", "no-op", "meters",
)  # fmt: skip


@pytest.fixture(scope="module")
def without():
    """What calls and the ledger come to without any SDK."""
    return outcome_of()


def outcome_of(**providers):
    """What the mix came to: the calls, and the ledger."""
    from conftest import Tapped  # noqa: PLC0415

    tapped = Tapped(MemoryStore())
    guard = Guard(store=tapped, pricer=PRICES, **providers)
    told = Mix(guard, tapped).run()
    counts = ledger_counts(guard)
    lines = [(line.task_type, line.cause, line.status, line.kept) for line in guard.ledger.lines()]
    guard.close()
    return told, {key: _steady(c) for key, c in counts.items()}, Counter(lines)


def _steady(counts):
    """Without the run times, which differ."""
    return {name: count for name, count in counts.items() if not name.startswith("run_")}


@pytest.mark.parametrize("what", BROKEN)
def test_calls_and_ledger_are_the_same(without, what):
    providers = broken(what)
    assert outcome_of(**providers) == without
    for provider in providers.values():
        if hasattr(provider, "shutdown") and what != "shut down":
            provider.shutdown()


def test_what_fails_is_told_in_the_log_once(guard_of, warned):
    guard = guard_of(tracer_provider=TracerProvider(RaisingSampler(), shutdown_on_exit=False))
    task = guard.idempotent(lambda n: n, task_type="t")
    assert [task(n) for n in range(3)] == [0, 1, 2]
    assert warned() == ["telemetry failed: BoomError"]


def test_a_sampler_that_raises_leaves_the_metrics(guard_of, emitted):
    broken_one = TracerProvider(RaisingSampler(), shutdown_on_exit=False)
    guard = guard_of(tracer_provider=broken_one, meter_provider=emitted.meters)
    guard.idempotent(spends, task_type="t")(1)
    assert {name: set(points) for name, points in counters(emitted).items()} == zero_series(
        priced=False, **{TYPE: "t"}
    )
    assert emitted.counted("idemguard.calls", idemguard_outcome="executed") == 1
    assert emitted.counted("idemguard.usage.tokens") == 110


def test_meters_that_raise_leave_the_spans(guard_of, emitted):
    guard = guard_of(tracer_provider=emitted.tracers, meter_provider=RaisingMeters(), pricer=PRICES)
    task = guard.idempotent(spends, task_type="t", wait_timeout=0.005)
    waited_out(guard, task, 1)
    told = emitted.span("idemguard t").attributes
    assert told[OUTCOME] == "fallback"
    assert told["idemguard.usage.input_tokens"] == 100
    assert told["idemguard.wait.duration"] >= 0.005


@pytest.mark.parametrize("queue", [2, 2048])
def test_calls_go_on_while_an_exporter_hangs(without, queue):
    """A queue that is full drops spans, not calls."""
    exporter = Exporter()
    batch = BatchSpanProcessor(
        exporter, max_queue_size=queue, max_export_batch_size=1, schedule_delay_millis=1
    )
    provider = with_processor(batch)
    try:
        assert outcome_of(tracer_provider=provider) == without
        assert exporter.entered.wait(LONG)  # and it hangs all the time
    finally:
        exporter.let_go.set()
        provider.shutdown()


class Collecting:
    """A meter's own step, amid its lock, in which the garbage collector happens to run."""

    def __init__(self) -> None:
        self.armed = False
        self.collected = 0

    def __call__(self, aggregation):
        histogram = "Histogram" in aggregation.__name__
        if self.armed and histogram:
            self.armed = False
            self.collected += 1
            gc.collect()
        if histogram:
            return AlignedHistogramBucketExemplarReservoir
        return SimpleFixedSizeExemplarReservoir


@pytest.mark.timeout(120, method="thread")  # a deadlock ends the run, with its stacks
@pytest.mark.parametrize("kind", ["coroutine", "stream"])
# a task that nobody keeps is what asyncio warns of, and what this is about
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_collected_amid_the_sdk_does_not_wait_for_it(guard_of, until, kind):
    collecting = Collecting()
    reader = InMemoryMetricReader()
    view = View(instrument_name="idemguard.*", exemplar_reservoir_factory=collecting)
    meters = MeterProvider([reader], views=[view], shutdown_on_exit=False)
    seen = Emitted()
    guard = guard_of(tracer_provider=seen.tracers, meter_provider=meters)

    @guard.idempotent(task_type="t")
    async def task(n):
        spends(n)
        await asyncio.Event().wait()

    @guard.idempotent(task_type="t")
    def flow(n):
        spends(n)
        yield n
        yield n

    async def begin():
        running = asyncio.create_task(task(1))
        for _ in range(20):
            await asyncio.sleep(0)
        return running.get_coro()

    gc.collect()
    gc.disable()
    try:
        if kind == "stream":
            lost = flow(1)
            next(lost)
        else:
            loop = asyncio.new_event_loop()
            loop.set_exception_handler(lambda *_: None)  # a task was pending, as it should be
            lost = loop.run_until_complete(begin())
            loop.close()
        cycle = [lost]
        cycle.append(cycle)
        lost = cycle = loop = None
        guard.idempotent(lambda n: n, task_type="known")(1)
        collecting.armed = True
        guard.idempotent(lambda n: n, task_type="other")(1)
    finally:
        gc.enable()
    assert collecting.collected == 1
    until(lambda: not seen.open.spans)
    span = next(s for s in seen.spans("idemguard t") if s.attributes[OUTCOME] == "failed")
    assert span.attributes["error.type"] == ("LeftError" if kind == "stream" else "GeneratorExit")
    meters.shutdown()
    seen.close()


# --- providers: where they come from -------------------------------------------------------------


def test_configured_providers(emitted):
    configure(store=MemoryStore(), **emitted.providers)
    task = idempotent(spends, task_type="t")
    assert task(1) == 1
    assert emitted.span("idemguard t").attributes[OUTCOME] == "executed"
    assert emitted.counted("idemguard.calls") == 1


def test_guards_that_share_a_provider_share_its_series(emitted, guard_of):
    for namespace in ("one", "two"):
        guard_of(namespace=namespace, **emitted.providers).idempotent(spends, task_type="t")(1)
    assert emitted.counted("idemguard.calls", idemguard_outcome="executed") == 2
    assert len(emitted.points("idemguard.calls")) == len(OUTCOMES)


def test_providers_stay_behind_when_a_guard_is_pickled(emitted, tmp_path):
    guard = Guard(store=f"sqlite:///{tmp_path / 'there.db'}", ttl=7, **emitted.providers)
    there = pickle.loads(pickle.dumps(guard))
    assert there.settings.ttl == 7
    assert (there.settings.tracer_provider, there.settings.meter_provider) == (None, None)

    @guard.idempotent(task_type="t")
    def local(n):
        return n

    assert local(1) == 1
    again = cloudpickle.loads(cloudpickle.dumps(local))
    assert again(1) == 1
    assert len(emitted.spans()) == 1  # the copy's guard goes by the global providers
    guard.close()
    there.close()


LATE = """
import json
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from idemguard import configure, idempotent

guard = configure(store="memory://")

@idempotent(task_type="t")
def task(n):
    return n

task(1)
task(1)
exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
task(1)
metrics.set_meter_provider(MeterProvider([reader]))
task(1)
task(2)
found = {}
for resource in reader.get_metrics_data().resource_metrics:
    for scope in resource.scope_metrics:
        for metric in scope.metrics:
            for p in metric.data.data_points:
                value = getattr(p, "value", getattr(p, "count", None))
                found.setdefault(metric.name, []).append([dict(p.attributes), value])
bounds = {
    tuple(p.explicit_bounds)
    for resource in reader.get_metrics_data().resource_metrics
    for scope in resource.scope_metrics
    for metric in scope.metrics if metric.name == "idemguard.call.duration"
    for p in metric.data.data_points
}
summary = guard.ledger.task_type_summary("t")
guard.close()
print(json.dumps({
    "metrics": found,
    "bounds": [list(b) for b in bounds],
    "spans": [[s.name, s.attributes["idemguard.outcome"], len(s.links)]
              for s in exporter.get_finished_spans()],
    "calls": summary["calls"],
}))
"""


def test_providers_that_are_set_late(tmp_path):
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LATE],
        capture_output=True,
        cwd=tmp_path,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
    )
    assert done.returncode == 0, done.stderr.decode()
    told = json.loads(done.stdout)
    assert told["calls"] == 5
    # what was reused had a leader that was not seen: there is nothing to link to
    outcomes = ["reused", "reused", "executed"]
    assert told["spans"] == [["idemguard t", outcome, 0] for outcome in outcomes]
    calls = {point[0][OUTCOME]: point[1] for point in told["metrics"]["idemguard.calls"]}
    assert calls == dict.fromkeys(OUTCOMES, 0) | {"reused": 1, "executed": 1}
    causes = {point[0][CAUSE]: point[1] for point in told["metrics"]["idemguard.executions"]}
    assert causes == {str(cause): 0 for cause in Cause} | {"first": 1}
    assert told["bounds"] == [list(telemetry.DURATIONS)]

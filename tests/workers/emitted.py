"""What guards emit, taken up in memory: spans, those that are still open, and the points of metrics."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.sampling import Sampler

FORMS = ("sync", "async", "generator", "async generator")


class Open(SpanProcessor):
    """The spans that were started and not ended."""

    def __init__(self) -> None:
        self.spans: dict[int, str] = {}
        self._lock = threading.Lock()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        with self._lock:
            self.spans[span.context.span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            del self.spans[span.context.span_id]  # an end that comes twice is an error


class Emitted:
    """Providers of a test's own, and all that came to them.

    Args:
        sampler: of the spans; all are taken where there is none.

    """

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.open = Open()
        self.tracers = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.tracers.add_span_processor(self.open)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.tracer = self.tracers.get_tracer("user")
        self.providers = {"tracer_provider": self.tracers, "meter_provider": self.meters}

    def close(self) -> None:
        self.tracers.shutdown()
        self.meters.shutdown()

    # --- spans -------------------------------------------------------------------------------------

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """Those that ended, by their start; of one name, or all."""
        found = [s for s in self.exporter.get_finished_spans() if name in (None, s.name)]
        return sorted(found, key=lambda span: span.start_time)

    def span(self, name: str) -> ReadableSpan:
        """The only one of this name."""
        (found,) = self.spans(name)
        return found

    def last(self, name: str) -> ReadableSpan:
        """The one of this name that ended last."""
        return [s for s in self.exporter.get_finished_spans() if s.name == name][-1]

    # --- metrics -----------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """Every metric by its name."""
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def points(self, name: str) -> dict[tuple[Any, ...], Any]:
        """What a metric came to in each series: the sum of a counter, the count of a histogram."""
        metric = self.metrics().get(name)
        points = [] if metric is None else metric.data.data_points
        return {
            series(p.attributes): getattr(p, "value", getattr(p, "count", None)) for p in points
        }

    def counted(self, name: str, **attributes: Any) -> float:
        """The sum over all series that have these attributes (`_` for `.` in names)."""
        wanted = {key.replace("_", "."): value for key, value in attributes.items()}.items()
        return sum(
            value
            for pairs, value in self.points(name).items()
            if wanted <= {key.replace("_", "."): value for key, value in pairs}.items()
        )


def series(attributes: Any) -> tuple[Any, ...]:
    """Attributes as a key."""
    return tuple(sorted(attributes.items()))


def ids(span: ReadableSpan) -> tuple[str, str]:
    """Trace and span id, as the ledger has them."""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def links(span: ReadableSpan) -> list[tuple[str, tuple[str, str]]]:
    """Kind and target of every link."""
    return [
        (
            link.attributes["idemguard.link.type"],
            (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}"),
        )
        for link in span.links
    ]


def events(span: ReadableSpan) -> list[str]:
    """The names of its events."""
    return [event.name for event in span.events]


def seconds(span: ReadableSpan) -> float:
    """How long it was open."""
    return (span.end_time - span.start_time) / 1e9


class Form:
    """Guards a plain function of one argument as a callable of one shape; all are called plainly.

    Args:
        name: of `FORMS`.

    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.streams = name.endswith("generator")

    def made(self, body: Callable[[Any], Any]) -> Any:
        """The body in this shape; a stream's only chunk is its value."""

        async def coroutine(n):
            await asyncio.sleep(0)
            return body(n)

        def generator(n):
            yield body(n)

        async def agenerator(n):
            await asyncio.sleep(0)
            yield body(n)

        def sync(n):
            return body(n)

        return dict(zip(FORMS, (sync, coroutine, generator, agenerator), strict=True))[self.name]

    def guarded(self, guard: Any, body: Callable[[Any], Any], **options: Any) -> Any:
        """Guarded, to be called plainly; `.guarded` is the guarded callable itself."""
        inner = guard.idempotent(self.made(body), **{"task_type": "t"} | options)

        def call(n):
            return self.whole(inner(n))

        call.guarded = inner
        return call

    def whole(self, made: Any) -> Any:
        """What it comes to; a stream's first chunk."""
        match self.name:
            case "sync":
                return made
            case "async":
                return asyncio.run(_awaited(made))
            case "generator":
                (found,) = made
                return found
            case _:
                return asyncio.run(_only(made))


async def _awaited(made: Any) -> Any:
    return await made


async def _only(made: Any) -> Any:
    (found,) = [chunk async for chunk in made]
    return found

"""The SDK of one worker of the demo: it sends what the worker does, and never holds it up.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from idemguard.demo.export import service

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.trace import ReadableSpan

BOUND = 2.0  # seconds that the last of it has to be sent
LONGEST = 160  # letters of a reason
_ERRNO = re.compile(r"\[Errno -?\d+\] ([\w ]+)")  # at the end of a long chain of causes
_ANSWER = re.compile(r"code: (\d{3}), reason: (.*)")  # of HTTP


class Export:
    """Providers for a guard, which send to where the environment says.

    Args:
        signals: those that are sent, `traces` and `metrics`.

    Attributes:
        tracers: of spans; None where they are not sent.
        meters: the same of metrics.

    """

    def __init__(self, signals: Sequence[str]) -> None:
        self._heard = _Heard()
        # three workers of one name are told apart by their instance
        resource = Resource.create(
            {"service.name": service(), "service.instance.id": str(uuid.uuid4())}
        )
        self.tracers: TracerProvider | None = None
        self.meters: MeterProvider | None = None
        if "traces" in signals:
            self.tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
            self.tracers.add_span_processor(BatchSpanProcessor(_Spans(self._heard)))
        if "metrics" in signals:
            reader = PeriodicExportingMetricReader(_Metrics(self._heard))
            self.meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)

    @property
    def arrived(self) -> set[str]:
        """The signals of which anything has arrived."""
        return set(self._heard.arrived)

    def close(self, bound: float = BOUND) -> dict[str, str]:
        """Send the rest, and stop.

        Args:
            bound: seconds that this may take.

        Returns:
            The signals of which nothing has arrived, each with the reason.

        """
        ends: dict[str, Callable[[], None]] = {}
        if self.tracers is not None:
            ends["traces"] = self.tracers.shutdown
        if self.meters is not None:
            ends["metrics"] = self.meters.shutdown
        # what hangs is left behind with its thread
        threads = [threading.Thread(target=_quiet, args=(e,), daemon=True) for e in ends.values()]
        for thread in threads:
            thread.start()
        until = time.monotonic() + bound
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return {
            signal: self._heard.reasons.get(signal, "no answer in time")
            for signal in ends
            if signal in self._heard.tried - self._heard.arrived
        }


class _Heard(logging.Handler):
    """What came of the exports; the SDK tells why one failed in its log, which goes nowhere else."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.tried: set[str] = set()
        self.arrived: set[str] = set()
        self.reasons: dict[str, str] = {}
        for name in ("opentelemetry", "urllib3"):
            logger = logging.getLogger(name)
            logger.propagate = False
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        for signal, part in (("traces", "trace_exporter"), ("metrics", "metric_exporter")):
            if part in record.name:
                told = record.getMessage()
                if system := _ERRNO.search(told):
                    reason = system[1]
                elif answer := _ANSWER.search(told):
                    reason = f"{answer[1]} {answer[2]}".rstrip()
                else:
                    reason = told.partition("\n")[0]
                self.reasons[signal] = reason[:LONGEST]


class _Spans(OTLPSpanExporter):
    def __init__(self, heard: _Heard) -> None:
        super().__init__()
        self._heard = heard

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._heard.tried.add("traces")
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self._heard.arrived.add("traces")
        return result


class _Metrics(OTLPMetricExporter):
    def __init__(self, heard: _Heard) -> None:
        super().__init__()
        self._heard = heard

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **more: Any
    ) -> MetricExportResult:
        self._heard.tried.add("metrics")
        result = super().export(metrics_data, timeout_millis, **more)
        if result is MetricExportResult.SUCCESS:
            self._heard.arrived.add("metrics")
        return result


def _quiet(end: Callable[[], None]) -> None:
    with suppress(Exception):  # why it did not arrive is in the log
        end()

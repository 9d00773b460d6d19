"""What being watched costs a guarded call: without an SDK, with one, and with a collector that is down.

Run `uv run benchmarks/telemetry.py`. All contestants take turns in one process, each on a store
of its own in memory, so that a ratio holds though single times wander. The first has a telemetry
that does nothing at all, so that what the others take more is what being watched costs.
"""

from __future__ import annotations

import gc
import itertools
import logging
import socket
import statistics
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from idemguard import Guard
from idemguard.stores.memory import MemoryStore
from idemguard.telemetry import Unseen

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS, CALLS = 60, 50
DELAY = 200  # ms between two exports: so often that some happen in every round
numbers = itertools.count()


class Nothing:
    """Telemetry that does nothing."""

    call = Unseen


class Dropped(SpanExporter):
    """Where spans go that nobody wants."""

    def export(self, spans):
        return SpanExportResult.SUCCESS


def with_sdk() -> dict[str, object]:
    """An SDK that batches and aggregates, and sends nothing."""
    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(Dropped()))
    return {
        "tracer_provider": tracers,
        "meter_provider": MeterProvider([InMemoryMetricReader()]),
    }


def with_collector(port: int) -> dict[str, object]:
    """An SDK that sends all of it there."""
    url = f"http://127.0.0.1:{port}/v1"
    tracers = TracerProvider()
    spans = OTLPSpanExporter(f"{url}/traces", timeout=1)
    tracers.add_span_processor(BatchSpanProcessor(spans, schedule_delay_millis=DELAY))
    metrics = OTLPMetricExporter(f"{url}/metrics", timeout=1)
    reader = PeriodicExportingMetricReader(metrics, export_interval_millis=DELAY)
    return {"tracer_provider": tracers, "meter_provider": MeterProvider([reader])}


def calls(guard: Guard) -> tuple[Callable[[], object], Callable[[], object]]:
    """An executed and a reused call."""

    @guard.idempotent(task_type="work")
    def work(doc_id: str, lang: str = "en") -> dict[str, str]:
        return {"doc": doc_id, "lang": lang}

    work("known")
    return lambda: work(f"doc-{next(numbers)}"), lambda: work("known")


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def collect() -> None:
    """Answer everything, in a process of its own; says where."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    print(server.server_port, flush=True)
    server.serve_forever()


def closed_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def measure(port: int) -> None:
    """Take turns, and print the table."""
    nothing = Guard(store=MemoryStore())
    nothing.engine.telemetry = Nothing()
    guards = {
        "no telemetry": nothing,
        "no SDK": Guard(store=MemoryStore()),
        "SDK, sends nothing": Guard(store=MemoryStore(), **with_sdk()),
        "collector answers": Guard(store=MemoryStore(), **with_collector(port)),
        "collector is down": Guard(store=MemoryStore(), **with_collector(closed_port())),
    }
    acts = {
        (name, kind): act
        for name, guard in guards.items()
        for kind, act in zip(("executed", "reused"), calls(guard), strict=True)
    }
    spent: dict[tuple[str, str], list[float]] = {name: [] for name in acts}
    rounds: dict[tuple[str, str], list[float]] = {name: [] for name in acts}
    gc.disable()
    for number in range(ROUNDS):
        turns = list(acts.items())
        for name, act in turns if number % 2 else reversed(turns):
            for _ in range(CALLS):
                started = time.perf_counter()
                act()
                spent[name].append(time.perf_counter() - started)
            rounds[name].append(statistics.median(spent[name][-CALLS:]))
        gc.collect()
    table(spent, rounds)


def table(
    spent: dict[tuple[str, str], list[float]], rounds: dict[tuple[str, str], list[float]]
) -> None:
    """Medians, the ratio of each round's to that of the first contestant, and the slowest calls."""
    print(f"{'':30} {'µs':>8} {'ratio':>8} {'p99, µs':>9} {'max, µs':>9}")
    for (name, kind), times in spent.items():
        base = rounds["no telemetry", kind]
        ratio = statistics.median(a / b for a, b in zip(rounds[name, kind], base, strict=True))
        late = sorted(times)
        print(
            f"{f'{name}, {kind}':30} {statistics.median(times) * 1e6:8.1f} {ratio:8.3f} "
            f"{late[len(late) * 99 // 100] * 1e6:9.0f} {late[-1] * 1e6:9.0f}"
        )


def main() -> None:
    """With a collector beside it."""
    if sys.argv[1:] == ["collector"]:
        collect()
        return
    logging.disable(logging.CRITICAL)  # exporters tell that nobody listens
    beside = subprocess.Popen(
        [sys.executable, __file__, "collector"], stdout=subprocess.PIPE, text=True
    )
    assert beside.stdout is not None
    try:
        measure(int(beside.stdout.readline()))
    finally:
        beside.kill()
        beside.communicate()


if __name__ == "__main__":
    main()

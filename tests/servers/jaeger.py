"""A real Jaeger that keeps its traces in memory, and what its query API tells of them."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

from servers.server import HOST, PATIENCE, Closing, free_port

# no port but these: no metrics of its own, no health check; the query's gRPC takes any
CONFIG = """
service:
  extensions: [jaeger_storage, jaeger_query]
  pipelines:
    traces:
      receivers: [otlp]
      exporters: [jaeger_storage_exporter]
  telemetry:
    metrics:
      level: none
extensions:
  jaeger_storage:
    backends:
      kept:
        memory:
          max_traces: 1000
  jaeger_query:
    storage:
      traces: kept
    http:
      endpoint: {host}:{query}
    grpc:
      endpoint: {host}:0
receivers:
  otlp:
    protocols:
      http:
        endpoint: {host}:{otlp}
exporters:
  jaeger_storage_exporter:
    trace_storage: kept
"""


@dataclass(frozen=True)
class Span:
    """A span as Jaeger shows it.

    Attributes:
        service: of the process that made it.
        tags: its attributes, with their types as Jaeger has them: `int64`, `float64`, `string`.
        references: type, trace id and span id of each span that it refers to.

    """

    trace_id: str
    span_id: str
    name: str
    service: str
    duration: float
    tags: dict[str, Any]
    types: dict[str, str]
    references: list[tuple[str, str, str]]

    @classmethod
    def of(cls, told: dict[str, Any], processes: dict[str, Any]) -> Span:
        return cls(
            trace_id=told["traceID"],
            span_id=told["spanID"],
            name=told["operationName"],
            service=processes[told["processID"]]["serviceName"],
            duration=told["duration"] / 1_000_000,
            tags={tag["key"]: tag["value"] for tag in told["tags"]},
            types={tag["key"]: tag["type"] for tag in told["tags"]},
            references=[(r["refType"], r["traceID"], r["spanID"]) for r in told["references"]],
        )


class Jaeger(Closing):
    """One Jaeger process: OTLP over HTTP in, the query API out, both on the loopback alone.

    Args:
        program: the path of its binary.

    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._folder = Path(tempfile.mkdtemp(prefix="ig", dir="/tmp"))
        self._log = self._folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it, and wait until it takes spans and answers."""
        end = time.monotonic() + PATIENCE
        self._launch()
        while not self._answers():
            assert self._process is not None
            if self._process.poll() is not None:
                log = self._log.read_text()
                if "address already in use" not in log:
                    raise RuntimeError(f"Jaeger ended: {log[-2000:]}")
                self._kill()  # somebody took a port in between
                self._launch()
            assert time.monotonic() < end, f"no answer: {self._log.read_text()[-2000:]}"
            time.sleep(0.02)
        return self

    def _launch(self) -> None:
        self._query, self._otlp = free_port(), free_port()
        config = self._folder / "config.yaml"
        config.write_text(CONFIG.format(host=HOST, query=self._query, otlp=self._otlp))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [self._program, "--config", config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )
        # ends it when this process is gone, however it went
        self._watchdog = subprocess.Popen(
            [
                *("sh", "-c", 'read -r _; kill -9 "$1"; rm -rf "$2"', "sh"),
                *(str(self._process.pid), str(self._folder)),
            ],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def _answers(self) -> bool:
        try:
            self.ask("/api/services")
            wire = http.client.HTTPConnection(HOST, self._otlp, timeout=PATIENCE)
            wire.connect()
        except OSError:
            return False
        wire.close()
        return True

    def _kill(self) -> None:
        if self._watchdog is not None:
            assert self._watchdog.stdin is not None
            self._watchdog.kill()
            self._watchdog.wait()
            self._watchdog.stdin.close()
            self._watchdog = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End it; its traces are gone with it."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- what it is asked --------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where it takes spans: what OTEL_EXPORTER_OTLP_ENDPOINT is set to."""
        return f"http://{HOST}:{self._otlp}"

    def ask(self, path: str, **query: str) -> Any:
        """The data that the query API answers with; None where it finds nothing."""
        wire = http.client.HTTPConnection(HOST, self._query, timeout=PATIENCE)
        try:
            wire.request("GET", f"{path}?{urlencode(query)}")
            answer = wire.getresponse()
            text = answer.read().decode()
        finally:
            wire.close()
        if answer.status == http.client.NOT_FOUND:
            return None
        assert answer.status == http.client.OK, f"{path}: {answer.status} {text}"
        return json.loads(text)["data"]

    def services(self) -> list[str]:
        """The services that sent anything."""
        return self.ask("/api/services") or []

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of a trace that are there so far."""
        return _spans(self.ask(f"/api/traces/{trace_id}"))

    def search(self, service: str, **tags: str) -> list[Span]:
        """The spans of all traces of a service in which one of its spans has these tags."""
        return _spans(self.ask("/api/traces", service=service, tags=json.dumps(tags)))


def _spans(traces: list[dict[str, Any]] | None) -> list[Span]:
    return [Span.of(told, trace["processes"]) for trace in traces or () for told in trace["spans"]]

"""An OTLP/HTTP receiver on loopback: the spans and metrics that processes really export, as plain objects."""

from __future__ import annotations

import gzip
import threading
import zlib
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2
from servers.server import HOST, PATIENCE, Closing, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
    from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

TRACES, METRICS = "/v1/traces", "/v1/metrics"


@dataclass(frozen=True)
class Link:
    """A span's link: whither, as hex, and with what attributes."""

    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Event:
    """A span's event, at nanoseconds since 1970."""

    name: str
    attributes: dict[str, Any]
    time: int


@dataclass(frozen=True)
class Span:
    """A span; ids are hex, `parent` is None for a root, times are nanoseconds since 1970.

    `kind` is the name of OTLP without its prefix (`INTERNAL`), `status` too (`UNSET`, `OK`, `ERROR`).
    """

    name: str
    trace_id: str
    span_id: str
    parent: str | None
    kind: str
    start: int
    end: int
    attributes: dict[str, Any]
    links: tuple[Link, ...]
    events: tuple[Event, ...]
    status: str
    status_text: str
    resource: dict[str, Any]
    scope: str
    scope_version: str

    @property
    def seconds(self) -> float:
        """How long it was open."""
        return (self.end - self.start) / 1e9


@dataclass(frozen=True)
class Point:
    """One point of a metric: a counter's `value`, or a histogram's `count`, `sum` and buckets."""

    name: str
    unit: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    scope: str
    time: int
    value: float | None = None
    count: int | None = None
    sum: float | None = None
    bounds: tuple[float, ...] = ()
    buckets: tuple[int, ...] = ()


@dataclass
class _Heard:
    spans: list[Span] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    bodies: list[tuple[str, bytes]] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)


class Receiver(Closing):
    """Listens at `url` from `start` (or a `with`) on; `close` ends it.

    Attributes:
        status: what it answers with; 200 unless it is set.

    """

    def __init__(self) -> None:
        self.status = 200
        self._heard = _Heard()
        self._lock = threading.Lock()
        self._held = threading.Event()
        self._held.set()
        self._server: _Listener | None = None
        self._thread: threading.Thread | None = None

    # --- its life ----------------------------------------------------------------------------------

    def start(self) -> Self:
        self._server = _Listener(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="otlp", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        self._held.set()
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join(PATIENCE)
            self._server.server_close()  # and waits for those that are being answered
            self._server = None
            assert not self._heard.faults, self._heard.faults

    @property
    def url(self) -> str:
        """What OTEL_EXPORTER_OTLP_ENDPOINT is to be."""
        assert self._server is not None
        return f"http://{HOST}:{self._server.server_port}"

    def hang(self) -> None:
        """Take what is sent and answer nothing, until `close`."""
        self._held.clear()

    # --- what it heard -----------------------------------------------------------------------------

    @property
    def spans(self) -> list[Span]:
        """Every span so far, in the order of their coming."""
        with self._lock:
            return list(self._heard.spans)

    @property
    def points(self) -> list[Point]:
        """The newest point of every series: name, attributes and resource."""
        with self._lock:
            points = list(self._heard.points)
        newest: dict[Any, Point] = {}
        for point in points:
            key = (point.name, _frozen(point.attributes), _frozen(point.resource))
            if key not in newest or newest[key].time <= point.time:
                newest[key] = point
        return list(newest.values())

    @property
    def bodies(self) -> list[tuple[str, bytes]]:
        """Path and uncompressed body of every request so far, whatever it was answered."""
        with self._lock:
            return list(self._heard.bodies)

    def total(self, name: str, **attributes: Any) -> float:
        """The sum of a counter over the series that have these attributes (`_` for `.` in names)."""
        return sum(
            point.value or 0
            for point in self.points
            if point.name == name
            and attributes.items()
            <= {key.replace(".", "_"): value for key, value in point.attributes.items()}.items()
        )

    def wait_for(self, found: Callable[[list[Span]], Any], patience: float = PATIENCE) -> Any:
        """What `found` gives for the spans so far, as soon as it is something."""
        return until(lambda: found(self.spans), patience, "what is exported")

    def forget(self) -> None:
        """Forget all that was heard."""
        with self._lock:
            self._heard = _Heard(faults=self._heard.faults)

    # --- in a request's thread ---------------------------------------------------------------------

    def take(self, path: str, body: bytes) -> int:
        """Keep what came, and say what to answer."""
        try:
            if path == TRACES:
                spans, points = list(_spans(ExportTraceServiceRequest.FromString(body))), []
            else:
                spans, points = [], list(_points(ExportMetricsServiceRequest.FromString(body)))
        except Exception as error:  # noqa: BLE001 - told when it is closed
            self._heard.faults.append(error)
            return 400
        with self._lock:
            self._heard.bodies.append((path, body))
            if self.status == 200:
                self._heard.spans += spans
                self._heard.points += points
        self._held.wait(PATIENCE)
        return self.status


class _Listener(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        super().__init__((HOST, 0), _Request)

    def handle_error(self, *_: object) -> None:
        """A client that hung up is its own affair."""


class _Request(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        match self.headers.get("Content-Encoding"):
            case "gzip":
                body = gzip.decompress(body)
            case "deflate":
                body = zlib.decompress(body)
        assert isinstance(self.server, _Listener)
        known = self.path in (TRACES, METRICS)
        self.send_response(self.server.receiver.take(self.path, body) if known else 404)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


# --- from protobuf ---------------------------------------------------------------------------------------


def _spans(request: ExportTraceServiceRequest) -> Iterable[Span]:
    for resource in request.resource_spans:
        about = _plain(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent=span.parent_span_id.hex() or None,
                    kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes=_plain(span.attributes),
                    links=tuple(
                        Link(link.trace_id.hex(), link.span_id.hex(), _plain(link.attributes))
                        for link in span.links
                    ),
                    events=tuple(
                        Event(event.name, _plain(event.attributes), event.time_unix_nano)
                        for event in span.events
                    ),
                    status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix(
                        "STATUS_CODE_"
                    ),
                    status_text=span.status.message,
                    resource=about,
                    scope=scope.scope.name,
                    scope_version=scope.scope.version,
                )


def _points(request: ExportMetricsServiceRequest) -> Iterable[Point]:
    for resource in request.resource_metrics:
        about = _plain(resource.resource.attributes)
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                yield from _of_metric(metric, about, scope.scope.name)


def _of_metric(metric: Metric, resource: dict[str, Any], scope: str) -> Iterable[Point]:
    kind = metric.WhichOneof("data")
    for point in getattr(metric, kind).data_points if kind else ():
        told = {
            "name": metric.name,
            "unit": metric.unit,
            "attributes": _plain(point.attributes),
            "resource": resource,
            "scope": scope,
            "time": point.time_unix_nano,
        }
        if kind == "histogram":
            yield Point(
                **told,
                count=point.count,
                sum=point.sum,
                bounds=tuple(point.explicit_bounds),
                buckets=tuple(point.bucket_counts),
            )
        else:
            yield Point(**told, value=getattr(point, point.WhichOneof("value")))


def _plain(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return tuple(map(_value, value.array_value.values))
    if kind == "kvlist_value":
        return _plain(value.kvlist_value.values)
    return getattr(value, kind)


def _frozen(attributes: dict[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset((key, repr(value)) for key, value in attributes.items())

"""What the environment says of where spans and metrics go, and where to look for them then.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SIGNALS = ("traces", "metrics")
SERVICE = "idemguard-demo"
PROTOCOL = "http/protobuf"  # the only one that is spoken here
GRPC_PORT, HTTP_PORT = 4317, 4318  # of OTLP, as a rule
JAEGER_PORT = 16686  # of its pages
_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def endpoints() -> dict[str, str]:
    """Where each signal goes, by the variables of OpenTelemetry; nothing where they name no place."""
    if _variable("OTEL_SDK_DISABLED").lower() == "true":
        return {}
    common = _variable("OTEL_EXPORTER_OTLP_ENDPOINT")
    found = {
        signal: _variable(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT") or common
        for signal in SIGNALS
        if _variable(f"OTEL_{signal.upper()}_EXPORTER").lower() != "none"
    }
    return {signal: place for signal, place in found.items() if place}


def unspoken(signals: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Signals that are to go by another protocol: of each the variable that says so, and what it says."""
    found = {}
    for signal in signals:
        for name in (
            f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL",
            "OTEL_EXPORTER_OTLP_PROTOCOL",
        ):
            if protocol := _variable(name):
                if protocol.lower() != PROTOCOL:
                    found[signal] = name, protocol
                break
    return found


def advice(signal: str, place: str, unsent: Mapping[str, str]) -> str:
    """What helps where a signal did not arrive; empty where that is not known.

    Args:
        signal: the one that did not.
        place: where it was sent to.
        unsent: every signal that did not arrive, and why.

    """
    try:
        port = urlsplit(place).port
    except ValueError:
        port = None
    if port == GRPC_PORT:
        return f"port {GRPC_PORT} is for gRPC as a rule, and {HTTP_PORT} for {PROTOCOL}, which is spoken here"
    # where both are not known, the address is wrong
    if signal == "metrics" and "traces" not in unsent and unsent[signal].startswith("404"):
        return "a plain Jaeger takes none: set OTEL_METRICS_EXPORTER=none to leave them out"
    return ""


def installed() -> bool:
    """Whether what sends them is there."""
    try:
        return all(importlib.util.find_spec(name) for name in _NEEDED)
    except ModuleNotFoundError:
        return False


def service() -> str:
    """The service's name in every span and metric."""
    pairs = (pair.partition("=") for pair in _variable("OTEL_RESOURCE_ATTRIBUTES").split(","))
    given = {name.strip(): value.strip() for name, _, value in pairs}
    return _variable("OTEL_SERVICE_NAME") or given.get("service.name") or SERVICE


def jaeger(endpoint: str) -> str:
    """Where Jaeger's pages show the service, if it is where the spans are sent to.

    Args:
        endpoint: of the traces; IDEMGUARD_JAEGER_URL counts before it.

    """
    base = _variable("IDEMGUARD_JAEGER_URL").rstrip("/")
    if not base:
        try:
            host = urlsplit(endpoint).hostname or "localhost"
        except ValueError:
            host = "localhost"
        base = f"http://{f'[{host}]' if ':' in host else host}:{JAEGER_PORT}"
    return f"{base}/search?service={quote(service(), safe='')}"


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()

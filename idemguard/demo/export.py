"""What the environment says of where spans and metrics go, and where to look for them then."""

from __future__ import annotations

import importlib.util
import os
from urllib.parse import quote, urlsplit

SIGNALS = ("traces", "metrics")
SERVICE = "idemguard-demo"
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

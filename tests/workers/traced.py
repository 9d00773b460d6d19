"""A process as a user who traces has it: the SDK, its exporter over OTLP, one guarded task that calls a model."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from workers.jobs import wait_for

from idemguard import agent, capture, configure, idempotent, record_usage, worker

TOOK = 0.1  # seconds that the model answers, so that who waits for it has waited
tracer = trace.get_tracer("users.own")


@idempotent(task_type="summarise", key="doc")
def summarise(doc: str, started: str, gate: str) -> str:
    """A summary, a moment after the gate is open."""
    with tracer.start_as_current_span("chat small"):
        Path(started).touch()
        wait_for(gate)
        time.sleep(TOOK)
        record_usage(
            model="small",
            input_tokens=1200,
            output_tokens=150,
            cache_read_tokens=200,
            reasoning_tokens=50,
        )
    return f"of {doc}"


def main(name: str, url: str, doc: str, started: str, gate: str) -> None:
    """Call it once, within a span of the user's own; say what it came to."""
    provider = TracerProvider()  # its service and its exporter's endpoint are the environment's
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    configure(store=url, pricer={"small": {"input": "3", "output": "15"}})
    with (
        worker(name),
        agent("writer"),
        capture() as calls,
        tracer.start_as_current_span("request") as span,
    ):
        summarise(doc, started, gate)
    provider.shutdown()
    told = {
        "source": calls[0].source,
        "fingerprint": calls[0].fingerprint,
        "execution": calls[0].execution_id,
        "trace": f"{span.get_span_context().trace_id:032x}",
        "leader": calls[0].leader,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])

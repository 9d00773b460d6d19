"""A process that calls one task, tells the ids of the span inside, and at its end all that it exported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from workers.jobs import wait_for

from idemguard import Guard, capture

SAMPLERS = {
    "always": sampling.ALWAYS_ON,
    "never": sampling.ALWAYS_OFF,
    "as its parent": sampling.ParentBased(sampling.ALWAYS_OFF),
}


def main(url: str, how: str, started: str, gate: str, **options: Any) -> None:
    """Call it, as a user's process does who samples so.

    Args:
        url: of the store.
        how: of `SAMPLERS`, or "no SDK".
        started: a file to write what the body sees, once it runs.
        gate: a file that the body waits for; empty: it does not.
        options: of the task.

    """
    exporter = InMemorySpanExporter()
    if how != "no SDK":
        provider = TracerProvider(sampler=SAMPLERS[how])
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)  # the global one: nothing is configured
    guard = Guard(store=url)

    @guard.idempotent(task_type="t", **options)
    def task(n: int) -> int:
        inside = trace.get_current_span().get_span_context()
        told = [f"{inside.trace_id:032x}", f"{inside.span_id:016x}"]
        Path(f"{started}.part").write_text(json.dumps(told), "utf-8")
        Path(f"{started}.part").rename(started)
        if gate:
            wait_for(gate)
        return n

    with trace.get_tracer("user").start_as_current_span("request"), capture() as calls:
        task(1)
    guard.close()
    spans = [
        [span.name, f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"]
        for span in exporter.get_finished_spans()
    ]
    print(json.dumps({"source": calls[0].source, "spans": spans}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

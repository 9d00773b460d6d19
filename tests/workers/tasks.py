"""Decorated functions that worker processes import by name."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from workers.jobs import append

from idemguard import configure, idempotent


def setup(url: str) -> None:
    """What a pool's process does before its first task."""
    configure(store=url)


@idempotent(task_type="digest", key="doc")
def digest(doc: str, log: str) -> dict[str, object]:
    append(log, {"pid": os.getpid(), "doc": doc})
    return {"doc": doc, "size": Path(log).stat().st_size, "by": os.getpid()}


@idempotent(task_type="adigest", key="doc")
async def adigest(doc: str, log: str) -> dict[str, object]:
    append(log, {"pid": os.getpid(), "doc": doc})
    await asyncio.sleep(0.02)
    return {"doc": doc, "by": os.getpid()}


def run_adigest(doc: str, log: str) -> dict[str, object]:
    """The coroutine, for a pool that knows plain functions alone."""
    return asyncio.run(adigest(doc, log))

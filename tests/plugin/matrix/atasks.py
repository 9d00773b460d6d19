"""Tasks of the generated project: coroutines here, and plain functions where `async` is taken out."""

from __future__ import annotations

import os

from alib import complete
from shared import failures, guard

from idemguard import OutOfScope, record_usage

__all__ = ["complete"]


@guard.idempotent(task_type="summarise", mode="observe")
async def naive(doc):
    record_usage(input_tokens=100, output_tokens=0, model="m")
    return doc.upper()


@guard.idempotent(task_type="summarise")
async def good(doc):
    return doc.upper()


@guard.idempotent(task_type="unsteady")
async def unsteady():
    if failures:
        raise failures.pop()


@guard.idempotent(task_type="declines")
async def declines():
    return {"status": "out_of_scope"}


@guard.idempotent(task_type="refuses")
async def refuses():
    raise OutOfScope


@guard.idempotent(task_type="short", ttl=0)
async def short():
    return 1


@guard.idempotent(task_type="dies", lease=0.1)
async def dies():
    if "DIES" in os.environ:
        os._exit(3)


@guard.idempotent(task_type="dated")
async def dated(doc, day):
    return doc, day

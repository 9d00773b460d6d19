"""How a row's body calls tasks: as tasks of an event loop."""

from __future__ import annotations

import asyncio
import sys
import unittest
from asyncio import Event

import children

__all__ = ["Case", "Event", "both", "call", "ended", "in_child", "plainly", "started", "until"]

Case = unittest.IsolatedAsyncioTestCase


async def call(fn, *args):
    """Call it, and wait for it."""
    return await asyncio.create_task(fn(*args))


async def both(fn, *args):
    """Call it twice, at once."""
    return await asyncio.gather(fn(*args), fn(*args))


async def started(fn, *args):
    """Begin to call it, beside what follows."""
    return asyncio.create_task(fn(*args))


async def ended(one):
    """Wait for what was begun."""
    await one


async def until(event):
    """Wait for an event."""
    await asyncio.wait_for(event.wait(), 20)


async def in_child(kind):
    """Run the task `naive` in a child."""
    if kind == "sub-process":
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", children.CODE)
        assert await child.wait() == 0
        return
    child = children.process(kind)
    await asyncio.to_thread(child.join)
    assert child.exitcode == 0


def plainly(act, *args):
    """Call where there is no loop."""
    return asyncio.run(act(*args))

"""How a row's body calls tasks: each call in a thread of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import plain
from plain import Case, Event, ended, plainly, started, until

__all__ = ["Case", "Event", "both", "call", "ended", "in_child", "plainly", "started", "until"]


def call(fn, *args):
    """Call it, and wait for it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, *args).result()


def both(fn, *args):
    """Call it twice, at once."""
    with ThreadPoolExecutor(2) as pool:
        return [one.result() for one in (pool.submit(fn, *args), pool.submit(fn, *args))]


def in_child(kind):
    """Run the task `naive` in a child."""
    ended(started(plain.in_child, kind))  # a forked pool would wait for itself

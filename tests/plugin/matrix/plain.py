"""How a row's body calls tasks: as plain functions, in the test's own thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import unittest
from threading import Event

import children

__all__ = ["Case", "Event", "both", "call", "ended", "in_child", "plainly", "started", "until"]

Case = unittest.TestCase


def call(fn, *args):
    """Call it."""
    return fn(*args)


def both(fn, *args):
    """Call it twice."""
    return fn(*args), fn(*args)


def started(fn, *args):
    """Begin to call it, beside what follows."""
    thread = threading.Thread(target=fn, args=args)
    thread.start()
    return thread


def ended(one):
    """Wait for what was begun."""
    one.join()


def until(event):
    """Wait for an event."""
    assert event.wait(20)


def in_child(kind):
    """Run the task `naive` in a child."""
    if kind == "sub-process":
        subprocess.run([sys.executable, "-c", children.CODE], check=True)
        return
    child = children.process(kind)
    child.join()
    assert child.exitcode == 0


def plainly(act, *args):
    """Call where there is no loop."""
    return act(*args)

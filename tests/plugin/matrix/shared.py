"""What both shapes of the tasks have in common: where they are kept, and what tokens cost."""

from __future__ import annotations

from idemguard import Guard

guard = Guard(store="sqlite:///tasks.db", pricer={"m": {"input": "10", "output": "0"}})
failures = []  # to come


def forget(fn, *args):
    """Have it run again because somebody asked for it."""
    guard.forget(guard.task_of(fn, *args))

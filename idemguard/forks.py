"""Who must start anew in a forked child.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class _Forked(Protocol):
    def forked(self) -> None: ...


_all: WeakSet[_Forked] = WeakSet()


def on_fork(thing: _Forked) -> None:
    """Call `thing.forked()` in every child that this process forks, as long as the thing lives.

    What a parent's other threads held at that moment (a lock, a half-written dictionary) is
    in the child as it was, with nobody to let it go: so the thing must not use any of it.
    """
    _all.add(thing)


def _tell() -> None:
    for thing in list(_all):
        thing.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)

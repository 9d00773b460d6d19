"""Whether the garbage collector runs right now: it may have hit amid anybody's lock.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import gc
from typing import Any

# By phase, the last one last. Told without a step of Python, since Ctrl-C that hits one which the
# collector has called is swallowed.
_phases: dict[str, Any] = {}
gc.callbacks += [_phases.pop, _phases.__setitem__]


def collecting() -> bool:
    """Whether this may be called from a finaliser that the collector started."""
    return next(reversed(_phases), None) == "start"

"""Whether the garbage collector runs right now, in this thread: it may have hit amid anybody's lock."""

from __future__ import annotations

import gc
import threading
from typing import Any

_collecting: set[int] = set()


def _note(phase: str, _: dict[str, Any]) -> None:
    (_collecting.add if phase == "start" else _collecting.discard)(threading.get_ident())


gc.callbacks.append(_note)


def collecting() -> bool:
    """Whether this is called from a finaliser that the collector started."""
    return threading.get_ident() in _collecting

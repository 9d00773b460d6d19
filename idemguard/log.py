"""What idemguard says in the log: one logger, and no warning more than once a minute."""

from __future__ import annotations

import logging
import os
import threading
import time

logger = logging.getLogger("idemguard")
logger.addHandler(logging.NullHandler())

QUIET = 60.0  # seconds between two warnings of one kind
_last: dict[str, float] = {}
_lock = threading.Lock()


def _forked() -> None:
    global _lock  # noqa: PLW0603 - a thread of the parent may have held it
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def warn(kind: str, message: str, *args: object) -> None:
    """Log a WARNING, at most one per minute and kind.

    Args:
        kind: what the warning is about; warnings of one kind share the minute.
        message: with `%s` places, as `logging` has them.
        args: what goes there; put together only when the warning is due.

    """
    now = time.monotonic()
    with _lock:
        if now - _last.get(kind, -QUIET) < QUIET:
            return
        _last[kind] = now
    logger.warning(message, *args)


def forget_warnings() -> None:
    """Let every kind warn again at once (a test's beginning)."""
    with _lock:
        _last.clear()

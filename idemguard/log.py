"""What idemguard says in the log: one logger, no warning more than once a minute, no payload.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import traceback

from idemguard.errors import StoreError

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
        message: with `%s` places, as `logging` has them; nothing of a payload or a result, and
            no words of an error that `words` would not give.
        args: what goes there; put together only when the warning is due.

    """
    if _due(kind):
        logger.warning(message, *args)


def tell(kind: str, message: str, *args: object) -> None:
    """Log a WARNING as `warn` does, and where none is due an INFO: a line in any case.

    Args:
        kind: as for `warn`.
        message: as for `warn`.
        args: as for `warn`.

    """
    logger.log(logging.WARNING if _due(kind) else logging.INFO, message, *args)


def note(message: str, *args: object) -> None:
    """Log an INFO: something notable that is nobody's fault.

    Args:
        message: as for `warn`.
        args: as for `warn`.

    """
    logger.info(message, *args)


def _due(kind: str) -> bool:
    now = time.monotonic()
    with _lock:
        if now - _last.get(kind, -QUIET) < QUIET:
            return False
        _last[kind] = now
    return True


def forget_warnings() -> None:
    """Let every kind warn again at once (a test's beginning)."""
    with _lock:
        _last.clear()


# --- what may stand in it ----------------------------------------------------------------------------

_CLIENTS = {"redis", "valkey", "sqlite3"}
_REPEATED = re.compile(r",? with args beginning with:.*", re.DOTALL)  # of a command, by a server
_FORGET = "; forget() the task to drop it"


def words(error: BaseException) -> str:
    """What may be said of an error: a store's own words, of all else the name of its type.

    Args:
        error: any; the text of one that comes from somebody's code may repeat a payload.

    """
    cause, name = error.__cause__, type(error).__qualname__
    if not isinstance(error, StoreError):
        return name
    text = _REPEATED.sub("", str(error))
    root = type(cause).__module__.partition(".")[0]
    if cause is None or isinstance(cause, OSError) or root in _CLIENTS:
        return text
    if root == "idemguard":  # in parentheses stands what a row has
        return text.partition(" (")[0] + _FORGET * text.endswith(_FORGET)
    return f"{name} ({type(cause).__qualname__})"


def place(error: BaseException) -> str:
    """The type of an error, and the line of code that raised it.

    Args:
        error: that was caught.

    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__qualname__}{where}"


# The reasons that codec, tagged and members give. Their places are made of the result's own keys,
# and in parentheses stands what validators said of its values.
_PLACE = re.compile(
    r"""result(?: \.\w+ | \[-?\d+\] | \[…\] | \['(?:[^'\\]|\\.)*'\] | \["(?:[^"\\]|\\.)*"\] | …)*:\ """,
    re.VERBOSE,
)
_FIXED = re.compile(
    r"larger than the \d+ bytes of max_result_bytes; raise it, or return less"
    r"|the stream is larger than \d+ bytes; raise max_result_bytes="
    r"|the result of a stream is given as the list of its chunks"
    r"|nested deeper than \d+ levels, or holds itself; return a flatter value"
    r"|nested too deeply; return a flatter value"
)
_STRANGER = re.compile(r".* is no member of (\S+)", re.DOTALL)
_TYPE = re.compile(
    r"(\S+ (?:has no stored form|is not named by the return annotation|would come back as its base"
    r"|is used up by reading it|is unknown, for the annotation is unclear|comes back changed"
    r"|cannot be restored|cannot be written|is no class that pydantic can restore"
    r"|is a secret, which no store is given|is a container of its own|is a \w+ beside its fields"
    r"|is a time zone that cannot be restored))\b"
)
_ADVICE = "return plain values, or name its class with result="


def unstorable(reason: str, task_type: str) -> str:
    """What may be said of why a result cannot be kept: the type, and what to do.

    Args:
        reason: as the codec has it.
        task_type: whose name it begins with.

    """
    reason = reason.removeprefix(f"{task_type}: ")
    found = _PLACE.match(reason)
    problem = reason[found.end() :] if found else reason
    if _FIXED.fullmatch(problem):
        return problem
    if found and (stranger := _STRANGER.fullmatch(problem)):
        return f"a value is no member of {stranger[1]}; {_ADVICE}"
    if found and (known := _TYPE.match(problem)):
        return f"{known[1]}; {_ADVICE}"
    return _ADVICE

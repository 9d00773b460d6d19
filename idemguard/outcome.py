"""What a call came to, as people see it.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from decimal import Decimal

    from idemguard.guard import Reply
    from idemguard.record import Cause
    from idemguard.usage import Usage

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What one call came to.

    Attributes:
        source: `executed`, `reused`, `fallback`, `declined`, `failed`, `refused` or `unguarded`.
        result: what the caller got; None where it got an error.
        task_type: of the task.
        fingerprint: of the task, 64 hex digits.
        execution_id: of the execution whose result this is, or None.
        worker: of that execution, or None.
        usage: the tokens of that execution (exclusive), also when it was reused.
        cost: of that execution, or None where it is unpriced.
        waited: seconds that the call waited for others.
        runs: executions of this address so far, or None where the store could not tell.
        cause: why that execution started, or None.
        lost: whether this call's execution had lost its claim when it ended.
        leader: trace id and span id of that execution, or None.
        error: what the caller got instead of a result, or None.

    """

    source: str
    result: T
    task_type: str
    fingerprint: str
    execution_id: str | None = None
    worker: str | None = None
    usage: Usage | None = None
    cost: Decimal | None = None
    waited: float = 0.0
    runs: int | None = None
    cause: Cause | None = None
    lost: bool = False
    leader: tuple[str, str] | None = None
    error: BaseException | None = None


def outcome(reply: Reply, result: Any, task_type: str, fingerprint: str) -> Outcome[Any]:
    """A reply of the flows as people see it.

    Args:
        reply: what the call came to.
        result: what the caller gets.
        task_type: of the task.
        fingerprint: of the task.

    """
    claim = reply.claim
    return Outcome(
        source=reply.source,
        result=result,
        task_type=task_type,
        fingerprint=fingerprint,
        execution_id=None if claim is None else claim.id,
        worker=None if claim is None else claim.caller.worker,
        usage=reply.spent.usage,
        cost=reply.spent.price,
        waited=reply.waited / 1000,
        runs=reply.runs,
        cause=None if claim is None else claim.cause,
        lost=reply.lost,
        leader=None if claim is None else claim.caller.trace,
        error=reply.error,
    )


OUT_OF_SCOPE = "out_of_scope"
_LONGEST = 4096  # characters of a text that is looked into for a status


def declined(value: Any) -> bool:
    """Whether a value hands its task back: its status is `out_of_scope`; never raises.

    Args:
        value: the mapping, its JSON text, or any object with that `status`.

    """
    kind = type(value)
    if value is None or kind in (int, float, bool, list, tuple, bytes):
        return False
    try:
        if kind is str:
            return _text_declines(value)
        return _is_out(value.get("status") if isinstance(value, Mapping) else value.status)
    except (Exception, SystemExit):  # noqa: BLE001 - a foreign object's own trouble is no answer
        return False


def _is_out(status: object) -> bool:
    return isinstance(status, str) and status == OUT_OF_SCOPE


def _text_declines(text: str) -> bool:
    if len(text) > _LONGEST or OUT_OF_SCOPE not in text:
        return False
    found: object = json.loads(text)
    return isinstance(found, dict) and _is_out(found.get("status"))


def is_flow(value: object) -> bool:
    """Whether a value is consumed by being looked at: an iterator, an async one, an awaitable."""
    kind = type(value)
    try:
        return (
            (hasattr(kind, "__next__") and hasattr(kind, "__iter__"))
            or hasattr(kind, "__anext__")
            or hasattr(kind, "__await__")
        )
    except Exception:  # noqa: BLE001 - a foreign class's own trouble is no answer
        return False

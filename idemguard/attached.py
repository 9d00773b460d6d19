"""Which execution is current, in OpenTelemetry's context too, which instrumentations carry on.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from opentelemetry import context as otel
from opentelemetry import trace

from idemguard import context

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemguard.context import Current

_bodies: WeakKeyDictionary[trace.Span, Current] = WeakKeyDictionary()  # by the call's span
_EXECUTION = otel.create_key("idemguard.execution")


class Attached:
    """An execution, and the span of its call, are the current ones here.

    A coroutine or a stream that is dropped is torn down in another context, where nothing of it
    is current: there is nothing to detach then, and OpenTelemetry would log an error at it.

    Args:
        execution: which.
        within: what `Attached.context` made of it, or an earlier step has left.
        left: is given what stands there at its end.

    """

    __slots__ = ("_execution", "_left", "_mark", "_token", "_within")

    def __init__(
        self, execution: Current, within: otel.Context, left: Callable[[otel.Context], None]
    ) -> None:
        self._execution = execution
        self._within = within
        self._left = left

    @staticmethod
    def context(execution: Current, around: otel.Context) -> otel.Context:
        """A context of OpenTelemetry that names an execution."""
        with suppress(Exception):  # a tracer of somebody's own, whose spans cannot be referred to
            _bodies[trace.get_current_span(around)] = execution
        return otel.set_value(_EXECUTION, execution, around)

    def __enter__(self) -> None:
        self._token = otel.attach(self._within)
        self._mark = context.enter(self._execution)

    def __exit__(self, *_: object) -> None:
        if context.leave(self._mark):
            self._left(otel.get_current())
            otel.detach(self._token)


def execution_of(within: otel.Context | None) -> Current | None:
    """The execution that a context of OpenTelemetry belongs to; None outside of one.

    Args:
        within: the context, as it is handed on to threads; None: the present one.

    """
    with suppress(Exception):
        # a thread may have been handed the span of the call alone
        if (found := _bodies.get(trace.get_current_span(within))) is not None:
            return found
    return cast("Current | None", otel.get_value(_EXECUTION, within))

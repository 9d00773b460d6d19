"""What a test may ask of the runs in it: the fixture `idemguard_ledger`.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

from pytest_idemguard.journals import outermost
from pytest_idemguard.message import DIGITS, place
from pytest_idemguard.message import times as often
from pytest_idemguard.runs import Book

if TYPE_CHECKING:
    from pytest_idemguard.runs import Run
    from pytest_idemguard.session import Session


class RunLedger:
    """What ran in this test, or since `fresh()`; a task type of None means all.

    Args:
        session: the test run.
        node: the test.

    """

    def __init__(self, session: Session, node: pytest.Item) -> None:
        assert session.current is not None
        self._session, self._attempt, self._node = session, session.current, node
        if not self._attempt.spaces:  # nobody counted it until it was asked for
            self.fresh()

    @property
    def namespace(self) -> str:
        """Where this test's records lie; to be sent along to workers that were started before it."""
        return self._attempt.spaces[-1]

    def _book(self) -> Book:
        self._session.drain()
        here = self.namespace
        events = list(self._attempt.events)
        return Book(one for one in events if outermost(one["ns"]) == here)

    def _all(self, task: str | None) -> list[Run]:
        return [run for run in self._book().runs.values() if task in (None, run.task)]

    def _ran(self, task: str | None) -> list[Run]:
        return [run for run in self._all(task) if run.ran()]

    def runs(self, task: str | None = None) -> int:
        """How often a task ran, without runs that raised or handed it back."""
        return len(self._ran(task))

    def failed(self, task: str | None = None) -> int:
        """How many of its runs raised."""
        return sum(run.status == "failed" for run in self._all(task))

    def reused(self, task: str | None = None) -> int:
        """How many calls were given the result of another one's run."""
        return self._book().called("reused", task)

    def fallbacks(self, task: str | None = None) -> int:
        """How many runs went beside a leader that took too long."""
        return sum(run.cause == "fallback" for run in self._all(task))

    def tokens(self, task: str | None = None) -> int:
        """The tokens that all runs reported, those that raised too."""
        return sum(run.tokens or 0 for run in self._all(task))

    def cost(self, task: str | None = None) -> Decimal:
        """What these tokens cost, in dollars; unpriced ones count 0."""
        return sum((run.money for run in self._all(task)), Decimal(0))

    def assert_ran(self, task: str | None, times: int) -> None:
        """Fail the test unless the task ran so often."""
        __tracebackhide__ = True
        ran = self._ran(task)
        if len(ran) != times:
            pytest.fail(self._unlike(task, times, ran))

    def assert_ran_once(self, task: str | None = None) -> None:
        """Fail the test unless the task ran once."""
        __tracebackhide__ = True
        self.assert_ran(task, 1)

    def assert_not_run(self, task: str | None = None) -> None:
        """Fail the test if the task ran."""
        __tracebackhide__ = True
        self.assert_ran(task, 0)

    @contextmanager
    def expect(self, task: str | None = None, runs: int = 1) -> Iterator[None]:
        """Fail the test unless the task runs so often in this block."""
        __tracebackhide__ = True
        before = {run.id for run in self._ran(task)}
        yield
        ran = [run for run in self._ran(task) if run.id not in before]
        if len(ran) != runs:
            pytest.fail(self._unlike(task, runs, ran))

    def fresh(self) -> None:
        """Begin anew: what ran before in this test is neither reused nor counted with what follows.

        For each example of a property-based test.
        """
        self._session.again(self._attempt)

    def _unlike(self, task: str | None, times: int, ran: list[Run]) -> str:
        name = "any task" if task is None else f"task {task!r}"
        besides = f"{self.reused(task)} reused, {self.failed(task)} failed"
        lines = [f"idemguard: {name} ran {often(len(ran))}, expected {often(times)} ({besides})"]
        for run in ran[:20]:
            where = place(run, self._node.config.rootpath)
            lines.append(f"  {run.task} [{run.fp[:DIGITS]}] {run.cause}, called from {where}")
        if not ran:
            known = sorted({run.task for run in self._book().runs.values()})
            lines.append(f"  tasks that ran: {', '.join(known) or 'none'}")
        return "\n".join(lines)

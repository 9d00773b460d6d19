"""How a failure is put on a test's report; only a session with guarded calls has it.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_idemguard.session import RECORD, Failure

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_idemguard.session import Session


class Active:
    """Finishes reports, and takes what they bring.

    Args:
        session: the test run.

    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Before others' hooks around a test do anything."""
        if self._session.base.scope != "session":  # there, all is one
            self._session.leave()
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test is over, here or in a worker."""
        if self._session.is_worker:
            return
        records = self._session.records
        made = getattr(report, "idemguard", None)
        outcome: str = report.outcome  # other plugins have more of them than pytest
        if made is not None and outcome != "rerun":
            records[report.nodeid] = made
        elif records and report.when != "call":  # another attempt, the last so far
            records.pop(report.nodeid, None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: Any
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """The crash is where the test is, and what was counted travels along."""
        return finished((yield), item, call)


def finished(report: pytest.TestReport, item: pytest.Item, call: Any) -> pytest.TestReport:
    """A report with what is to be told on it."""
    if call.excinfo is not None and isinstance(call.excinfo.value, Failure):
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None:
            path, line, _ = item.location
            crash.path, crash.lineno = str(item.config.rootpath / path), (line or 0) + 1
            crash.message = call.excinfo.value.short
    if call.when == "teardown" and (made := item.stash.get(RECORD, None)) is not None:
        del item.stash[RECORD]
        report.idemguard = made  # type: ignore[attr-defined]  # plain data: xdist carries it
    return report

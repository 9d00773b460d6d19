"""How a failure is put on a test's report; only a session with guarded calls has it.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_idemguard.session import RECORD, Failure

if TYPE_CHECKING:
    from collections.abc import Generator


class Active:
    """Finishes reports."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: Any
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """The crash is where the test is, and what was counted travels along."""
        report = yield
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

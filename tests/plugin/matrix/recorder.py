"""A plugin that writes down what was reported, and which test set a wider fixture up."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

SEEN = Path("seen.jsonl")
MADE = Path("made.txt")


def made():
    """The test that is under way is the one that sets this fixture up, or tears it down."""
    with MADE.open("a") as file:
        file.write(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0] + "\n")


def _write(nodeid, line):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with SEEN.open("a") as file:
            file.write(json.dumps([nodeid, line]) + "\n")


def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" in os.environ or hasattr(report, "context"):  # of a subtest
        return
    kind = report.outcome
    if hasattr(report, "wasxfail"):
        kind = {"skipped": "xfailed", "passed": "xpassed"}[kind]
    if kind != "passed" or report.when == "call":
        _write(report.nodeid, f"{report.when} {kind}{_said(report)}")
    for title, text in report.sections:
        if title == f"Captured idemguard {report.when}":
            _write(report.nodeid, f"beside it: {_plain(text)}")
    if report.when == "teardown":
        for name, value in report.user_properties:
            if name == "idemguard.duplicates":
                _write(report.nodeid, f"junit: {value} too many")


def pytest_warning_recorded(warning_message, nodeid):
    if warning_message.category.__name__ == "DuplicateRunWarning":
        _write(nodeid, f"warned: {_plain(str(warning_message.message))}")


def pytest_collectreport(report):
    if report.failed:
        _write(f"{report.nodeid}::", f"collection failed: {str(report.longrepr).partition(';')[0]}")


def _said(report):
    if report.longrepr is None:
        return ""
    if isinstance(report.longrepr, tuple):  # skipped
        return f": {report.longrepr[2]}"
    if isinstance(report.longrepr, str):  # of an xfail that passes
        return f": {report.longrepr.strip()}"
    crash = report.longrepr.reprcrash
    message = _plain(crash.message)
    if not message.startswith("idemguard"):
        return f": {message}"
    path, line, _ = report.location
    found = []
    if Path(crash.path) != Path(path).absolute() or crash.lineno != line + 1:
        found.append("the crash is not where the test is")
    if _plain(str(report.longrepr)) != message or "\n" in crash.message:
        found.append("its first line is not the crash's message")
    return f": {'; '.join([message, *found])}"


def _plain(text):
    """Its first line, without the fingerprint."""
    return re.sub(r" \[[0-9a-f]{16}\]", "", text.partition("\n")[0])

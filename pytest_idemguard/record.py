"""What was counted in one test, as plain data that travels on its report.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pytest_idemguard.journals import outermost
from pytest_idemguard.message import text
from pytest_idemguard.runs import Book, as_plain
from pytest_idemguard.settings import Rules, dollars

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pytest_idemguard.judge import Finding
    from pytest_idemguard.session import Session
    from pytest_idemguard.spaces import Attempt

OUTCOMES = ("executed", "reused", "fallback", "declined", "failed", "refused", "unguarded")


def record(session: Session, attempt: Attempt) -> dict[str, Any]:
    """Of an attempt that is over."""
    return plain_record(
        attempt.item.nodeid, session.number(), session.worker, attempt.rules, Book(attempt.events),
        attempt.found, session.config.rootpath,
    )  # fmt: skip


def plain_record(  # noqa: PLR0917 - all that a record tells
    nodeid: str,
    attempt: int,
    worker: str,
    rules: Rules,
    book: Book,
    found: list[Finding],
    root: Path,
) -> dict[str, Any]:
    """What is told of one test.

    Args:
        nodeid: of the test.
        attempt: its number.
        worker: the process of the test run.
        rules: what is asked of it.
        book: what happened in it.
        found: what of that is not allowed.
        root: paths below it are shown relative to it.

    """
    tasks = {run.task for run in book.runs.values()}
    return {
        "nodeid": nodeid,
        "attempt": attempt,
        "worker": worker,
        **sums(book),
        "duplicates": [told(one, root) for one in found if one.kind == "duplicate"],
        "near_duplicates": [told(one, root) for one in found if one.kind == "near"],
        "budgets": [told(one, root) for one in found if one.kind == "budget"],
        "max_runs": {task: rules.of(task).max_runs for task in tasks},
        "count_failed": [task for task in tasks if rules.of(task).count_failed],
        "mode": rules.mode,
        "modes": {task: rules.of(task).mode for task in tasks},
        "runs": [as_plain(run) for run in book.runs.values()],
    }


def from_asked(said: dict[str, Any]) -> Rules:
    """What was asked of a test, as its worker wrote it down."""
    tasks = {task: _amounts(own) for task, own in said["tasks"].items()}
    return Rules(**_amounts(said) | {"tasks": tasks})


def _amounts(said: Mapping[str, Any]) -> dict[str, Any]:
    return {**said, "max_cost": dollars(said["max_cost"])} if "max_cost" in said else dict(said)


def sums(book: Book) -> dict[str, Any]:
    """Counts and sums of all calls and runs."""
    calls = dict.fromkeys(OUTCOMES, 0)
    for (_, source), times in book.calls.items():
        calls[source] += times
    return {
        "calls": sum(calls.values()),
        **calls,
        "executed": len(book.runs),
        "tokens": sum(run.tokens or 0 for run in book.runs.values()),
        "cost": str(sum((run.money for run in book.runs.values()), Decimal(0))),
        "saved": str(sum(book.saved.values(), Decimal(0))),
    }


def told(finding: Finding, root: Path) -> dict[str, Any]:
    """A finding as plain data."""
    said: dict[str, Any] = {
        "task": finding.task, "mode": finding.mode, "text": text([finding], root),
    }  # fmt: skip
    if finding.kind == "budget":
        return said | {
            "unit": finding.unit,
            "spent": str(finding.counted),
            "allowed": str(finding.allowed),
        }
    said["fixture"] = finding.where
    said["executions"] = [as_plain(run) for run in finding.runs]
    if finding.kind == "near":
        return said | {"fields": list(finding.fields)}
    first = finding.runs[0]
    return said | {
        "fingerprint": first.fp, "scope": first.scope, "version": first.version,
        "runs": finding.counted, "allowed": finding.allowed, "cause": finding.why,
    }  # fmt: skip


def properties(made: dict[str, Any]) -> list[tuple[str, object]]:
    """For junit."""
    extra = sum(one["runs"] - one["allowed"] for one in made["duplicates"])
    counted = {**made, "duplicates": extra}
    names = ("executed", "reused", "duplicates", "tokens", "cost")
    return [(f"idemguard.{name}", str(counted[name])) for name in names]


def leftovers(session: Session) -> list[dict[str, Any]]:
    """Events that belong to no report: of fixtures, of tests that were over, of no test."""
    found = []
    for wide in session.wide.values():
        told_keys = [list(sign[2][1:]) for sign in wide.told if sign[0] == "duplicate"]
        for event in wide.events:
            own = wide.rules.of(event["task"])
            event |= {
                "fixture": wide.label, "told": told_keys, "allowed": own.max_runs,
                "count_failed": own.count_failed, "mode": own.mode,
            }  # fmt: skip
            found.append(event)
    for event in session.late:
        owner = session.owner(outermost(event["ns"]))
        if owner is not None:
            event["nodeid"], event["attempt"], is_last = owner
            if not is_last:
                continue  # of an attempt that does not count
        found.append(event)
    going_on = {run.id for run in Book(found).runs.values() if run.status == "open" and run.ran()}
    for event in found:
        if event["kind"] == "start" and event["id"] in going_on:
            event["went_on"] = True
    return found

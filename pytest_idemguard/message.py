"""What a finding says to people: what ran, from where, the likely cause, and what to do.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import time
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_idemguard.judge import Finding
    from pytest_idemguard.runs import Run

SHOWN = 10  # runs of one task
REQUESTS = ("openai ", "anthropic ")  # before the names of what an SDK asks
DIGITS = 16  # of a fingerprint


def text(findings: list[Finding], root: Path) -> str:
    """All of it; the first line is short, and says the most.

    Args:
        findings: what to tell.
        root: paths below it are shown relative to it.

    """
    return "\n\n".join(["\n".join(_lines(one, root)) for one in findings])


def headline(finding: Finding) -> str:
    """One finding in a line."""
    if finding.kind == "budget" and finding.why:
        return f"idemguard: {finding.why}"
    if finding.kind == "budget":
        what = "this test's tasks" if finding.task is None else finding.task
        return f"idemguard: {what} spent {_of(finding, finding.counted)}, {_of(finding, finding.allowed)} allowed"
    where = "in this test" if finding.where is None else f"in fixture {finding.where}"
    if finding.kind == "near":
        names = " and ".join(f"`{name}`" for name in finding.fields)
        return f"idemguard: {finding.task} ran twice {where}, equal but for {names}, which looks generated"
    return (
        f"idemguard: {finding.task} [{finding.runs[0].fp[:DIGITS]}] ran {times(finding.counted)} "
        f"{where}, {finding.allowed} allowed"
    )


def times(number: int | Decimal) -> str:
    """So often, in words."""
    return "once" if number == 1 else f"{number} times"


def _of(finding: Finding, amount: int | Decimal) -> str:
    return dollars(Decimal(amount)) if finding.unit == "$" else f"{amount} tokens"


def dollars(amount: Decimal) -> str:
    """Money as people read it: cents, and more digits where it is less than one."""
    if not amount or amount >= Decimal("0.01"):
        return f"${amount:.2f}"
    return f"${amount.normalize():f}"


def _lines(finding: Finding, root: Path) -> list[str]:
    lines = [headline(finding)]
    runs = finding.runs
    if finding.kind == "duplicate" and (spent := _spent(runs[1:])):
        lines.append(f"  the runs after the first spent {spent}")
    if finding.kind != "budget":
        for number, run in enumerate(runs[:SHOWN], 1):
            lines += _told(number, run, root)
        if len(runs) > SHOWN:
            lines.append(f"  ... and {len(runs) - SHOWN} more")
    return [*lines, *_advice(finding)]


def _spent(runs: list[Run]) -> str:
    tokens = sum(run.tokens or 0 for run in runs)
    cost = sum((run.money for run in runs), Decimal(0))
    said = [f"{tokens} tokens"] if tokens else []
    return ", ".join([*said, dollars(cost)] if cost else said)


def _told(number: int, run: Run, root: Path) -> list[str]:
    status = (
        "abandoned" if run.abandoned() else "still running" if run.ended is None else run.status
    )
    if run.error is not None and run.status == "failed":
        status = f"failed with {run.error}"
    end = "" if run.ended is None else f" to {_clock(run.ended)}"
    took = "" if run.took is None else f" ({run.took} ms)"
    during = "" if run.test is None else f", during {run.test}"
    who = f"worker {run.worker}, process {run.pid}, thread {run.thread}"
    return [
        f"  {number}. {status} ({run.cause}), {_clock(run.started)}{end}{took}: {who}{during}",
        f"     called from {place(run, root)}",
    ]


def place(run: Run, root: Path) -> str:
    """Where a run was called from, below the root where it is."""
    below = f"{root}{os.sep}"
    return run.where.replace(below, "")


def _clock(at: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at * 1000) % 1000:03d}"


# --- why, and what to do -----------------------------------------------------------------------------


def cause(runs: list[Run]) -> tuple[str, str]:
    """The likely cause of a duplicate, and what to do.

    Args:
        runs: those that count, in the order in which they started.

    """
    causes = {run.cause for run in runs[1:]}
    if "watched" in causes and runs[0].task.startswith(REQUESTS):
        return (
            "a package's request is only watched, and nothing holds a second one back",
            'guard the function that sends it with @idempotent(task_type="..."), and say what it returns',
        )
    for name, why, remedy in _BY_CAUSE:
        if name in causes:
            return why.format(_patience(runs)), remedy
    if any(run.status == "open" for run in runs[:-1]):
        return "the first run was not awaited in time: it still runs", "await what the test starts"
    if any(run.status == "failed" for run in runs):
        return (
            "a run that raised counts here (count_failed), and was tried again",
            "make the body succeed at once, or leave count_failed out",
        )
    if len({run.pid for run in runs}) > 1 or len({run.store for run in runs}) > 1:
        kinds = " and ".join(sorted({run.store for run in runs}))
        return (
            f"the runs share no store ({kinds}), so that neither could see the other's claim",
            "give all processes one store: IDEMGUARD_STORE where the code names none, else store=",
        )
    return (
        "neither run saw the other's claim: two guards with stores of their own, or one that was emptied",
        "let one guard, with one store, do this task",
    )


_BY_CAUSE = (
    (
        "watched",
        "this function is not guarded: it is only watched, and nothing holds a second call back",
        'guard it with @idempotent(task_type="...")',
    ),
    (
        "lost",
        "the lease ran out while the run before was still at work, so another one took over",
        "make lease= longer, or let the body give the interpreter up, so that it is renewed",
    ),
    (
        "fallback",
        "a caller lost its patience{} (wait_timeout) and ran beside the leader",
        "make wait_timeout= longer than the body takes, or leave it out",
    ),
    (
        "unguarded",
        "the store was down, so it ran unguarded",
        "see that the store is there when the tests run",
    ),
    (
        "observed",
        'mode="observe" counts, and holds nothing back',
        'guard it with mode="enforce", the default, and without IDEMGUARD_MODE=observe',
    ),
)


def _patience(runs: list[Run]) -> str:
    waited = max(run.waited for run in runs)
    return f" after a wait of {waited / 1000:.3g} s" if waited else ""


def _advice(finding: Finding) -> list[str]:
    if finding.kind == "budget" and finding.why:
        return [f"  what to do: {finding.remedy}"]
    if finding.kind == "budget":
        name = "max_cost" if finding.unit == "$" else "max_tokens"
        return [f"  what to do: spend less, or allow more with @pytest.mark.idemguard({name}=...)"]
    if finding.kind == "near":
        names = ", ".join(f'"{name}"' for name in finding.fields)
        return [
            f"  what to do: if it says nothing about the task, drop it: @idempotent(volatile=({names},));",
            f'  if it does, say so: @pytest.mark.idemguard(task="{finding.task}", near="off")',
        ]
    return [
        f"  likely cause: {finding.why}",
        f"  what to do: {finding.remedy};",
        f"  if it is meant: {_allowing(finding)}",
    ]


def _allowing(finding: Finding) -> str:
    marker = f"@pytest.mark.idemguard(max_runs={finding.counted})"
    if finding.where is None:
        return marker
    return (
        f"{marker} at the fixture's class, `pytestmark` in its module, or, where the session has it, "
        f"--idemguard-max-runs={finding.counted}"
    )

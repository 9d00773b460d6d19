"""What a report holds, read from a ledger.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from idemguard import findings
from idemguard.alerts import ROW
from idemguard.ledger import summary
from idemguard.report.alarms import check
from idemguard.report.limits import project_limits
from idemguard.report.lines import workers
from idemguard.report.worst import Worst, worst
from idemguard.windows import SPAN, total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemguard.alerts import Alert, Limits
    from idemguard.ledger import ExecutionLedger
    from idemguard.report.alarms import Checked
    from idemguard.windows import Window

Row: TypeAlias = dict[str, Any]

DAY = 86_400_000  # ms
MONTH = 31 * DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What ran in a stretch of time, and what it came to.

    Sums count by whole windows. Workers and findings are told by the newest lines, so that a
    report takes no longer where there are more.

    Attributes:
        namespace: whose ledger it is.
        since: ms; None: all that is kept.
        until: ms.
        task_type: the one that it is about; None: all.
        agent: the one that it is about; None: all.
        totals: as `ExecutionLedger.totals` has it, but `doubled_share`: None where it is of a part
            (of a `since`, of an agent), which does not know whether a task was executed elsewhere
            before.
        task_types: the same for each, with `task_type`; most charged first.
        agents: the same for each, with `agent`, which is None where none was named. Each is a part.
        over_time: for each five minutes in which something was executed (each hour where a part is
            older than a day, each day in UTC where it is of more than 31 days): `start` and `end`
            (ms), `executions`, `duplicates` and `duplication_rate`; oldest first.
        worst_tasks: those whose duplicates wasted most.
        checked: what alerts at its end, and in how much it was looked for.
        looked_at: how many of the newest lines the rest is told by.
        workers: what each executed, as `lines.workers` has it.
        drops: tasks that were only ever handed back.
        loops: tasks that were handed back again and again.
        missed_duplicates: executions that repeat others but for a field or two.
        growth: task types whose input grows from step to step.
        store: the URL that the command line named, for commands that are shown; None: none.
        known: the task types that there are, where the one that it is about never was; else None.

    """

    namespace: str
    since: int | None
    until: int
    task_type: str | None
    agent: str | None
    totals: Row
    task_types: Sequence[Row]
    agents: Sequence[Row]
    over_time: Sequence[Row]
    worst_tasks: Sequence[Worst]
    checked: Checked
    looked_at: int
    workers: Sequence[Row]
    drops: Sequence[findings.Drop]
    loops: Sequence[findings.Loop]
    missed_duplicates: Sequence[findings.Missed]
    growth: Sequence[findings.Growth]
    store: str | None = None
    known: Sequence[str] | None = None

    @property
    def limits(self) -> Limits:
        """What was looked for."""
        return self.checked.limits

    @property
    def alerts(self) -> Sequence[Alert]:
        """What alerts at its end."""
        return self.checked.alerts

    @property
    def empty(self) -> bool:
        """Whether nothing was called or executed."""
        return not self.totals["calls"] and not self.totals["executions"]


def gather(
    ledger: ExecutionLedger,
    *,
    since: int | None = None,
    until: int | None = None,
    task_type: str | None = None,
    agent: str | None = None,
    limits: Limits | None = None,
    store: str | None = None,
) -> Report:
    """Read a report.

    Args:
        ledger: from where.
        since: ms of the store's clock; None: from the beginning.
        until: ms; None: until now.
        task_type: only what was called as this.
        agent: only what was called by this; empty: where none was named.
        limits: what alerts; those of the project that is worked in where they are not given.
        store: the URL that the command line named, where it may be shown.

    Raises:
        ConfigurationError: what the project sets cannot be.
        StoreError: the store says so.

    """
    limits = project_limits() if limits is None else limits
    now = ledger.now()
    span = (since or 0, now + 1 if until is None else until)
    all_ = ledger.windows(span=span)
    windows = [
        one
        for one in all_
        if task_type in (None, one.key.task_type) and agent in (None, one.key.agent or "")
    ]
    lines = ledger.newest(span=span, task_type=task_type, agent=agent, windows=all_)
    drops, loops = ledger.handed_back(lines)
    end = now if until is None else until
    moment = min(now, end)
    if since is not None and since > now:  # all of it is to come, and what alerts now is not of it
        moment = since + (ROW + 1) * SPAN
    checked = check(ledger, limits, moment, task_type=task_type, agent=agent)
    whole = since is None and agent is None
    known = None
    if task_type is not None and not windows:
        ever = task_types(ledger)
        known = None if task_type in ever else ever
    return Report(
        namespace=ledger.namespace,
        since=since,
        until=end,
        task_type=task_type,
        agent=agent,
        totals=_summary(windows, whole=whole),
        task_types=_each("task_type", windows, whole=whole),
        agents=_each("agent", windows, whole=False),
        over_time=_over_time(windows),
        worst_tasks=worst(lines),
        checked=checked,
        looked_at=len(lines),
        workers=workers(lines),
        drops=drops,
        loops=loops,
        missed_duplicates=findings.missed(lines),
        growth=findings.growth(lines),
        store=store,
        known=known,
    )


def task_types(ledger: ExecutionLedger) -> list[str]:
    """All that anything was ever called as, by name."""
    return sorted({one.key.task_type for one in ledger.windows()})


def _summary(windows: Sequence[Window], *, whole: bool) -> Row:
    """What windows came to, and which share of the tasks was doubled where that is known."""
    row = summary(total(windows))
    # where older windows are gone, tasks may be doubled that were executed first in those
    known = row["doubled"] <= row["tasks"] and (row["tasks"] > 0 or not row["executions"])
    return row if whole and known else {**row, "doubled_share": None}


def _each(name: str, windows: Sequence[Window], *, whole: bool) -> list[Row]:
    """A summary for each task type or agent, the most charged first."""
    groups: dict[str | None, list[Window]] = {}
    for window in windows:
        groups.setdefault(getattr(window.key, name), []).append(window)
    rows = [{name: key, **_summary(group, whole=whole)} for key, group in groups.items()]
    return sorted(rows, key=lambda row: (-row["charged"], -row["executions"], str(row[name])))


def _over_time(windows: Sequence[Window]) -> list[Row]:
    """What was executed when, of all task types and agents together, in steps of one length."""
    groups: dict[int, list[Window]] = {}
    starts = [one.key.start for one in windows]
    step = max((one.span for one in windows), default=SPAN)
    if starts and max(starts) - min(starts) > MONTH:
        step = DAY
    for window in windows:
        groups.setdefault(window.key.start - window.key.start % step, []).append(window)
    rows = list[Row]()
    for start, group in sorted(groups.items()):
        executions = sum(one.executions for one in group)
        duplicates = sum(one.duplicates for one in group)
        if executions > 0:
            rows.append({
                "start": start,
                "end": start + step,
                "executions": executions,
                "duplicates": duplicates,
                "duplication_rate": duplicates / executions,
            })  # fmt: skip
    return rows

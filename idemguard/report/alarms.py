"""What alerts in a ledger, and how it is told: one line each, and the command that explains it.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from idemguard import alerts
from idemguard.report.lines import silent
from idemguard.report.words import brief, harmless, local, many, minute, short
from idemguard.windows import SPAN, total

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from idemguard.alerts import Alert, Figure, Limits
    from idemguard.ledger import ExecutionLedger
    from idemguard.windows import Window

SHARES = {
    "duplication": ("execution", "are duplicates"),
    "fallback": ("call", "that found a claim ran beside its leader"),
    "unguarded": ("execution", "were unguarded"),
    "usage": ("execution", "ended and told no usage"),
}
COUNTS = {
    "drops": "handed back by everybody",
    "loops": "handed back again and again",
}
# of the windows that alerted: the same whenever it is read
_EXPLAIN = "explain --since {start} --until {end} -- {task_type}"
_REPORT = "report --since {start} --until {end} --task-type={task_type}"
COMMANDS = {
    "duplication": _EXPLAIN,
    "fallback": _REPORT,
    "tokens": "compare --a {before}..{start} --b {start}..{end} --task-type={task_type}",
    "drops": _REPORT,
    "loops": _REPORT,
    "unguarded": _EXPLAIN,
    "usage": _REPORT,
}
MOST = 3  # task types that are named beside the worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was looked at, and what alerts.

    Attributes:
        namespace: whose ledger it is.
        limits: what was looked for.
        start: of the last three complete windows, ms.
        end: of them, ms.
        calls: that ended in them.
        executions: that started in them.
        empty: whether nothing was ever called or executed.
        alerts: one for each kind at most.

    """

    namespace: str
    limits: Limits
    start: int
    end: int
    calls: int
    executions: int
    empty: bool
    alerts: Sequence[Alert]


def check(
    ledger: ExecutionLedger,
    limits: Limits,
    moment: int,
    *,
    task_type: str | None = None,
    agent: str | None = None,
) -> Checked:
    """Read what alerts.

    Args:
        ledger: from where.
        limits: which kinds, and when.
        moment: when, ms of the store's clock. Windows that are over a day old are of hours, and
            tell no alert.
        task_type: only what was called as this.
        agent: only what was called by this; empty: where none was named.

    Raises:
        StoreError: the store says so.

    """
    span = alerts.needed(limits, moment)
    windows = [
        one
        for one in ledger.windows(span=span)
        if task_type in (None, one.key.task_type) and agent in (None, one.key.agent or "")
    ]
    starts = alerts.last(moment)
    there = [one for one in windows if one.key.start in starts and one.span == SPAN]
    if set(alerts.BESIDE) & set(limits.on):
        for start in starts:
            windows += _beside(ledger, start, task_type, agent)
    counts = total(there)
    calls = sum(number for name, number in counts.items() if name.startswith("call_"))
    executions = sum(one.executions for one in there)
    return Checked(
        namespace=ledger.namespace,
        limits=limits,
        start=starts[0],
        end=starts[-1] + SPAN,
        calls=calls,
        executions=executions,
        empty=not calls and not executions and not ledger.windows(),
        alerts=alerts.alerting(windows, limits, moment),
    )


def _beside(
    ledger: ExecutionLedger, start: int, task_type: str | None, agent: str | None
) -> list[Window]:
    """What was handed back in one window, by its newest executions."""
    lines = ledger.newest(span=(start, start + SPAN), task_type=task_type, agent=agent)
    drops, loops = ledger.handed_back(lines)
    return [
        *alerts.handed_back("drops", start, drops),
        *alerts.handed_back("loops", start, loops),
        *alerts.handed_back(alerts.SILENT, start, [one for one in lines if silent(one)]),
    ]


# --- in words --------------------------------------------------------------------------------------


def percent(number: Fraction) -> str:
    """A share or multiple, to a hundredth of a percent."""
    return f"{float(number * 100):,.2f}".rstrip("0").rstrip(".") + "%"


def limit(kind: str, over: Fraction) -> str:
    """A limit as it was set."""
    return f"{over}" if kind in alerts.COUNTED else f"{float(over * 100):.10g}%"


def told(alert: Alert) -> str:
    """An alert as one line."""
    figure, kind = alert.figure, alert.kind
    line = f"{kind}: {_figure(kind, figure)}"
    if figure.task_type is None:
        line += f", most in {named(alert.task_type)}"
    line += f" (limit {limit(kind, alert.limit.over)}, {times(alert.start, alert.end)})"
    if more := [named(one.task_type or "") for one in alert.task_types[1:]]:
        rest = f" and {len(more) - MOST:,} more" if len(more) > MOST else ""
        line += f", also {', '.join(more[:MOST])}{rest}"
    return line


def quiet(found: Checked) -> str:
    """That nothing alerts, and of how much."""
    namespace = harmless(found.namespace)
    if found.empty:
        return f"no alert: nothing was called or executed yet in namespace {namespace}"
    when = times(found.start, found.end)
    if not found.calls and not found.executions:
        return f"no alert: nothing was called or executed from {when} in namespace {namespace}"
    on = ", ".join(found.limits.on) or "nothing"
    least = min((found.limits.of[kind].volume for kind in found.limits.on), default=0)
    few = f" (an alert needs {least:,})" if found.executions < least else ""
    return f"no alert: {on} checked in {many(found.executions, 'execution')}{few} from {when}"


def named(task_type: str) -> str:
    """A task type in a sentence; a long one is cut, as the command has the whole of it."""
    return brief(harmless(task_type))


def _figure(kind: str, figure: Figure) -> str:
    where = "" if figure.task_type is None else f" of {named(figure.task_type)}"
    if kind in COUNTS:
        tasks = many(int(figure.value), "task")
        return f"at least {tasks}{where} {COUNTS[kind]} in each five minutes"
    if figure.baseline is not None:
        average = figure.value * figure.baseline
        return (
            f"{percent(figure.value)} of the baseline{where}: {short(round(average))} input tokens "
            f"per execution ({figure.volume:,}), {short(round(figure.baseline))} in the 7 days before"
        )
    what, are = SHARES[kind]
    return f"{percent(figure.value)} of {many(figure.volume, what)}{where} {are}"


def times(start: int, end: int) -> str:
    """From when to when, in local time."""
    return f"{local(start, '%Y-%m-%d %H:%M')} to {local(end, '%H:%M')}"


def command(alert: Alert, namespace: str, *, store: str | None = None) -> str:
    """What to type for more.

    Args:
        alert: that is to be explained.
        namespace: whose ledger it is about.
        store: the URL that the command line named, or None.

    """
    options = "" if store is None else f"--store {_quoted(store)} "
    if namespace != "default":
        options += f"--namespace {_quoted(namespace)} "
    what = COMMANDS[alert.kind].format(
        start=minute(alert.start),
        end=minute(alert.end),
        before=minute(max(0, alert.start - alerts.WEEK)),
        task_type=_quoted(alert.task_type),
    )
    return f"idemguard {options}{what}"


def _quoted(text: str) -> str:
    """A text as a shell takes it, in one line, and with nothing that a terminal would obey."""
    if text.isprintable():
        return shlex.quote(text)
    shown = (c if c.isprintable() and c not in "'\\" else f"\\U{ord(c):08x}" for c in text)
    return f"$'{''.join(shown)}'"

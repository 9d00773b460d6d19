"""What alerts in a ledger, and how it is told: one line each, and the command that explains it.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from idemguard import alerts, config
from idemguard.ledger import EVER
from idemguard.record import Execution, Status
from idemguard.report.words import brief, harmless, many, minute, short, stretch
from idemguard.windows import FINE, SPAN, Window, total

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from fractions import Fraction

    from idemguard.alerts import Alert, Figure, Limit, Limits, Measured
    from idemguard.ledger import ExecutionLedger
    from idemguard.record import Record

Piece = TypeVar("Piece")

SHARES = {
    "duplication": ("execution", "are duplicates"),
    "fallback": ("call", "that found a claim ran beside its leader"),
    "unguarded": ("execution", "were unguarded"),
    "usage": ("execution", "ended and told no usage"),
}
# what each kind is looked for in, where it is not all executions
IN = {
    "fallback": ("call", "that found a claim"),
    "tokens": ("execution", "of task types with a baseline"),
    "usage": ("execution", "that ended"),
}
COUNTS = {
    "drops": "handed back by everybody",
    "loops": "handed back again and again",
}
# of the windows that alerted: the same whenever it is read
_EXPLAIN = "explain --since {start} --until {end} -- {task_type}"
_REPORT = "report --since {start} --until {end} --task-type={task_type}"
_SINCE = "report --since {start} --task-type={task_type}"  # where only later lines are kept
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


class Untold(tuple["Alert", ...]):
    """No alerts, since none can be told any longer: the windows are over a day old."""

    __slots__ = ()


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
        measured: in how much each kind was looked for; empty where it was too long ago.
        empty: whether nothing was ever called or executed.
        alerts: one for each kind at most; `Untold` where it was too long ago.

    """

    namespace: str
    limits: Limits
    start: int
    end: int
    calls: int
    executions: int
    measured: Sequence[Measured]
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
    trimmed = set[tuple[str, str]]()
    if set(alerts.COUNTED) & set(limits.on):
        beside, trimmed = _beside(ledger, starts, there, task_type, agent)
        windows += beside
    counts = total(there)
    calls = sum(number for name, number in counts.items() if name.startswith("call_"))
    executions = sum(one.executions for one in there)
    found: Sequence[Alert] = [
        replace(one, trimmed=(one.kind, one.task_type) in trimmed)
        for one in alerts.alerting(windows, limits, moment)
    ]
    measured = alerts.measured(windows, limits, moment)
    if not found and starts[0] + FINE <= ledger.now():
        found, measured = Untold(), []
    return Checked(
        namespace=ledger.namespace,
        limits=limits,
        start=starts[0],
        end=starts[-1] + SPAN,
        calls=calls,
        executions=executions,
        measured=measured,
        empty=not calls and not executions and not ledger.windows(),
        alerts=found,
    )


def _beside(
    ledger: ExecutionLedger,
    starts: Sequence[int],
    there: Sequence[Window],
    task_type: str | None,
    agent: str | None,
) -> tuple[list[Window], set[tuple[str, str]]]:
    """What was handed back in each window, by the newest executions.

    Returns:
        It, as windows; and the kinds and task types of which some lines are no longer kept.

    """
    lines = list[Execution]()
    # a task that goes round quickly has its lines in what is under way alone
    for start in (*starts, starts[-1] + SPAN):
        end = start + SPAN if start in starts else EVER
        lines += ledger.newest(span=(start, end), task_type=task_type, agent=agent)
    back = {
        (line.started - line.started % SPAN, line.claim.address)
        for line in lines
        if line.status is Status.DECLINED
    }
    declined: Counter[tuple[int, str]] = Counter()
    for window in there:
        declined[window.key.start, window.key.task_type] += window.counts.get("call_declined", 0)
    windows, trimmed = list[Window](), set[tuple[str, str]]()
    drops, loops = ledger.handed_back(lines)
    for kind, one in (*(("drops", each) for each in drops), *(("loops", each) for each in loops)):
        address = lines[0].claim.address._replace(
            fingerprint=one.fingerprint, scope=one.scope, version=one.version
        )
        kept = {start for start in starts if (start, address) in back}
        gone = {start for start in starts if declined[start, one.task_type] > 0} - kept
        if gone:
            record, _ = ledger.look(address)
            gone = {start for start in gone if _trimmed(record, start)}
        if gone:
            trimmed.add((kind, one.task_type))
        for start in kept | gone:
            windows += alerts.handed_back(kind, start, [one])
    return windows, trimmed


def _trimmed(record: Record, start: int) -> bool:
    """Whether lines of a window may be among those that made room for newer ones."""
    kept = min((line.started for line in record.lines if line.ended is not None), default=0)
    begun = 0 if record.generation is None else record.generation  # a token, by the store's clock
    return record.runs > len(record.lines) and begun < start + SPAN <= kept


# --- in words --------------------------------------------------------------------------------------


def percent(number: Fraction) -> str:
    """A share or multiple, to a hundredth of a percent."""
    return f"{float(number * 100):,.2f}".rstrip("0").rstrip(".") + "%"


def limit(kind: str, over: Fraction) -> str:
    """A limit as it was set."""
    return f"{over}" if kind in alerts.COUNTED else f"{float(over * 100):.10g}%"


def told(alert: Alert) -> str:
    """An alert as one line, in local time."""
    return f"{alert.kind}: {''.join(sentence(alert, named, [times(alert.start, alert.end)]))}"


def sentence(
    alert: Alert, name: Callable[[str], Piece], when: Sequence[Piece | str]
) -> list[Piece | str]:
    """An alert in words, without its kind.

    Args:
        alert: that is told.
        name: what stands for a task type.
        when: what stands for its time.

    Returns:
        Texts, with what stands for task types and times between them.

    """
    figure = alert.figure
    where: list[Piece | str] = [] if figure.task_type is None else [" of ", name(figure.task_type)]
    told = _figure(alert.kind, figure, where)
    if figure.task_type is None:
        told += [", most in ", name(alert.task_type)]
    told += [f" (limit {limit(alert.kind, alert.limit.over)}, ", *when, ")"]
    more = [one.task_type or "" for one in alert.task_types[1:]]
    for number, task_type in enumerate(more[:MOST]):
        told += [", " if number else ", also ", name(task_type)]
    if len(more) > MOST:
        told.append(f" and {len(more) - MOST:,} more")
    return told


def quiet(found: Checked) -> str:
    """That nothing alerts, and of how much."""
    namespace = harmless(found.namespace)
    if found.empty:
        return f"no alert: nothing was called or executed yet in namespace {namespace}"
    when = times(found.start, found.end)
    if not found.calls and not found.executions:
        return f"no alert: nothing was called or executed from {when} in namespace {namespace}"
    return f"no alert: {looked_for(found, when=f' from {when}')}"


def looked_for(found: Checked, name: Callable[[str], str] = str, *, when: str = "") -> str:
    """What was looked for, in how much of what; and what could not be.

    Args:
        found: what was looked at.
        name: what stands for a kind.
        when: what stands for its time, behind what was looked at.

    """
    kinds: dict[str, list[str]] = {}
    unknown = list[str]()
    for one in found.measured:
        told = _looked_at(one, found.limits.of[one.kind])
        if told is None:
            unknown.append(
                f"{name(one.kind)} could not be checked: there is no baseline yet (that takes "
                f"{found.limits.of[one.kind].volume:,} executions of a task type in the 7 days before)"
            )
        else:
            kinds.setdefault(told, []).append(name(one.kind))
    parts = [f"{', '.join(names)} checked in {told}" for told, names in kinds.items()]
    seen = [f"{'; '.join(parts)}{when}"] if parts else []
    return "; ".join([*seen, *unknown]) or "nothing is checked"


def _looked_at(one: Measured, limit: Limit) -> str | None:
    """In how much a kind was looked for, and why that may be too little; None: in nothing."""
    if one.of is None:
        return None
    what, which = IN.get(one.kind, ("execution", ""))
    needs = list[str]()
    own = " of one task type" if one.kind == "tokens" else ""
    if one.most < limit.volume or one.apart:
        needs.append(f"{limit.volume:,}{own}")
    if one.windows < alerts.ROW or one.apart:
        had = f"{f'only {one.windows}' if one.windows else 'none'} had any"
        had = "no task type has both" if one.apart else had
        needs.append(f"some{'' if needs else own} in each of the {alerts.ROW} windows: {had}")
    lacks = f" (an alert needs {' and '.join(needs)})" if needs else ""
    return f"{many(one.of, what)}{f' {which}' if which else ''}{lacks}"


def named(task_type: str) -> str:
    """A task type in a sentence; a long one is cut, as the command has the whole of it."""
    return brief(harmless(task_type))


def _figure(kind: str, figure: Figure, where: Sequence[Piece | str]) -> list[Piece | str]:
    if kind in COUNTS:
        tasks = many(int(figure.value), "task")
        return [f"at least {tasks}", *where, f" {COUNTS[kind]} in each five minutes"]
    if figure.baseline is not None:
        average = figure.value * figure.baseline
        return [
            f"{percent(figure.value)} of the baseline",
            *where,
            f": {short(round(average))} input tokens per execution ({figure.volume:,})",
            f", {short(round(figure.baseline))} in the 7 days before",
        ]
    what, are = SHARES[kind]
    return [f"{percent(figure.value)} of {many(figure.volume, what)}", *where, f" {are}"]


def times(start: int, end: int) -> str:
    """From when to when, in local time, which is named: it may be read elsewhere."""
    return stretch(start, end, "%Y-%m-%d %H:%M", "%H:%M", named=True)


def command(alert: Alert, namespace: str, *, store: str | None = None) -> str:
    """What to type for more.

    Args:
        alert: that is to be explained.
        namespace: whose ledger it is about. It is named unless it is what is read where nothing
            is said, here and wherever else nothing is set.
        store: the URL that the command line named, or None. A file is named by its whole path:
            the command may be typed in another folder.

    """
    options = "" if store is None else f"--store {_quoted(_wherever(store))} "
    if not namespace == config.namespace(config.Settings()) == "default":
        options += f"--namespace {_quoted(namespace)} "
    what = (_SINCE if alert.trimmed else COMMANDS[alert.kind]).format(
        start=minute(alert.start),
        end=minute(alert.end),
        before=minute(max(0, alert.start - alerts.WEEK)),
        task_type=_quoted(alert.task_type),
    )
    return f"idemguard {options}{what}"


def _wherever(store: str) -> str:
    """The URL by which a store is found from every folder."""
    scheme, separator, path = store.partition(":///")
    return f"{scheme}{separator}{Path(path).absolute()}" if scheme == "sqlite" else store


def _quoted(text: str) -> str:
    """A text as a shell takes it, in one line, and with nothing that a terminal would obey."""
    if text.isprintable():
        return shlex.quote(text)
    shown = (c if c.isprintable() and c not in "'\\" else f"\\U{ord(c):08x}" for c in text)
    return f"$'{''.join(shown)}'"

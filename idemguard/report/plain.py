"""Reports, comparisons, explanations and ledger lines as programs read them: JSON and CSV.

Money is decimal text, times are ISO in UTC, absent is null (in CSV an empty cell).
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import csv
import io
import json
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from idemguard.alerts import COUNTED
from idemguard.digests import DROPPED, UNMATCHED
from idemguard.record import DUPLICATES
from idemguard.report.alarms import command
from idemguard.report.words import decimal_text, harmless, iso
from idemguard.usage import COST_DIGITS, TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from fractions import Fraction

    from idemguard.alerts import Alert, Figure, Limit
    from idemguard.change import Change, Comparison, Part
    from idemguard.findings import Drop, Explanation, Growth, Loop, Missed
    from idemguard.record import Execution
    from idemguard.report.alarms import Checked
    from idemguard.report.gather import Report, Row
    from idemguard.report.worst import Worst

COUNTS = (
    "calls", "executions", "tasks", "doubled_share", "duplication_rate", "duplicates",
    "executed", "reused", "fallback", "declined", "failed", "refused", "unguarded", "lost",
    "input_tokens", "output_tokens", "total_tokens", "avg_input", "wasted_tokens", "saved_tokens",
)  # fmt: skip
MONEY = ("charged", "wasted", "saved")
UNKNOWN = ("unpriced", "without_usage")
FIELDS = (*COUNTS, *MONEY, "currency", *UNKNOWN)
INCLUSIVE = ("inclusive_tokens", "inclusive")  # of a row; of the totals they would count twice

LINE = (
    "execution_id", "namespace", "fingerprint", "task_type", "scope", "version", "parent",
    "cause", "duplicate", "status", "kept", "worker", "agent", "started", "ended", "lease_until",
    "run_ms", "model", "provider", "usage_reports", *TOKENS, "total_tokens", "cost", "currency",
    "price_version", "cost_input", "cost_cache_read", "cost_cache_write", "unpriced_reports",
    "nested", "inner_input_tokens", "inner_output_tokens", "inner_cost", "trace_id", "span_id",
    "input_tokens_by_report", "response_ids", "digests", "dropped", "unmatched",
)  # fmt: skip
_SHEET = ("kind", "name", *FIELDS, *INCLUSIVE)


def dump(told: object) -> str:
    """JSON for people to look at too."""
    return json.dumps(told, indent=2) + "\n"


# --- a report --------------------------------------------------------------------------------------

FORMULAS = ("=", "+", "-", "@")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def report(found: Report) -> dict[str, Any]:
    """All of a report, for JSON."""
    return {
        "since": iso(found.since),
        "until": iso(found.until),
        "namespace": found.namespace,
        "totals": _counts(found.totals, FIELDS),
        "task_types": [
            {"task_type": row["task_type"], **_counts(row, (*FIELDS, *INCLUSIVE))}
            for row in found.task_types
        ],
        "agents": [
            {"agent": row["agent"], **_counts(row, (*FIELDS, *INCLUSIVE))} for row in found.agents
        ],
        "over_time": [
            {**row, "start": iso(row["start"]), "end": iso(row["end"])} for row in found.over_time
        ],
        "worst_tasks": [worst_task(one) for one in found.worst_tasks],
        "checked": _checked(found.checked),
        "alerts": [alert(one, found.namespace, store=found.store) for one in found.alerts],
        "drops": [handed_back(drop) for drop in found.drops],
        "loops": [handed_back(loop) for loop in found.loops],
        "missed_duplicates": [missed(one) for one in found.missed_duplicates],
        "workers": [
            {**row, **{name: decimal_text(row[name]) for name in ("charged", "wasted")}}
            for row in found.workers
        ],
        "growth": [growth(one) for one in found.growth],
        **{
            name: value
            for name, value in (("task_type", found.task_type), ("agent", found.agent))
            if value is not None  # what it was filtered by
        },
    }


def report_sheet(found: Report) -> str:
    """A report's totals and rows, for CSV: one table, whose first column says what a row is."""
    rows = [("total", "", found.totals)]
    rows += [("task_type", row["task_type"], row) for row in found.task_types]
    rows += [("agent", row["agent"], row) for row in found.agents]
    cells = (
        {"kind": kind, "name": name, **_counts(row, FIELDS if kind == "total" else _SHEET[2:])}
        for kind, name, row in rows
    )
    return "".join(sheet(_SHEET, cells))


def _counts(row: Row, fields: Iterable[str]) -> Row:
    return {
        field: decimal_text(row[field]) if field in (*MONEY, "inclusive") else row[field]
        for field in fields
    }


def worst_task(found: Worst) -> dict[str, Any]:
    """A task that was executed twice."""
    return {
        "task_type": found.task_type,
        "fingerprint": found.fingerprint,
        "scope": found.scope,
        "version": found.version,
        "executions": found.executions,
        "duplicates": found.duplicates,
        "wasted_tokens": found.wasted_tokens,
        "charged": decimal_text(found.charged),
        "wasted": decimal_text(found.wasted),
        "unpriced": found.unpriced,
        "unpriced_duplicates": found.unpriced_duplicates,
        "workers": list(found.workers),
        "last": iso(found.last),
    }


def handed_back(found: Drop | Loop) -> dict[str, Any]:
    """A drop or a loop."""
    return {
        "task_type": found.task_type,
        "fingerprint": found.fingerprint,
        "scope": found.scope,
        "version": found.version,
        "times": found.times,
        "workers": list(found.workers),
        "first": iso(found.first),
        "last": iso(found.last),
    }


def missed(found: Missed) -> dict[str, Any]:
    """Duplicates that were missed."""
    return {
        "task_type": found.task_type,
        "executions": found.executions,
        "looked_at": found.looked_at,
        "tokens": found.tokens,
        "charged": None if found.charged is None else decimal_text(found.charged),
        "suspects": [
            {"field": one.field, "differs": one.differs, "pairs": one.pairs}
            for one in found.suspects
        ],
    }


# --- alerts ----------------------------------------------------------------------------------------


def checked(found: Checked, *, store: str | None = None) -> dict[str, Any]:
    """What was looked at, and what alerts; `store` is the URL that the command line named."""
    return {
        "since": iso(found.start),
        "until": iso(found.end),
        "namespace": found.namespace,
        "calls": found.calls,
        "executions": found.executions,
        "empty": found.empty,
        "checked": _checked(found),
        "alerts": [alert(one, found.namespace, store=store) for one in found.alerts],
    }


def alert(found: Alert, namespace: str, *, store: str | None = None) -> dict[str, Any]:
    """An alert; its figure is of the worst task type, or of all where none passes alone."""
    return {
        "kind": found.kind,
        **_figure(found.kind, found.figure),
        **_limit(found.kind, found.limit),
        "task_type": found.task_type,
        "overall": None if found.overall is None else _figure(found.kind, found.overall),
        "task_types": [
            {"task_type": one.task_type, **_figure(found.kind, one)} for one in found.task_types
        ],
        "since": iso(found.start),
        "until": iso(found.end),
        "command": command(found, namespace, store=store),
    }


def _checked(found: Checked) -> list[dict[str, Any]]:
    of = {one.kind: one.of for one in found.measured}
    return [
        {"kind": kind, **_limit(kind, found.limits.of[kind]), "of": of.get(kind)}
        for kind in found.limits.on
    ]


def _limit(kind: str, limit: Limit) -> dict[str, Any]:
    return {"limit": _number(kind, limit.over), "minimum": limit.volume}


def _figure(kind: str, figure: Figure) -> dict[str, Any]:
    told = {"figure": _number(kind, figure.value), "of": figure.volume}
    if figure.baseline is not None:
        told["baseline"] = float(figure.baseline)
    return told


def _number(kind: str, number: Fraction) -> float:
    return int(number) if kind in COUNTED else float(number)


# --- an explanation, a comparison --------------------------------------------------------------------


def explanation(found: Explanation, growths: Iterable[Growth]) -> dict[str, Any]:
    """What is known of a task type."""
    return {
        "task_type": found.task_type,
        "executions": found.executions,
        "causes": {str(cause): number for cause, number in found.causes.items()},
        "workers": dict(found.workers),
        "duplicates_by": dict(found.duplicates_by),
        "advice": [
            {
                "cause": str(one.cause),
                "executions": one.executions,
                "duplicates": one.duplicates,
                "why": one.why,
                "remedy": one.remedy,
            }
            for one in found.advice
        ],
        "missed_duplicates": None if found.missed is None else missed(found.missed),
        "dropped": dict(found.dropped),
        "unmatched": list(found.unmatched),
        "growth": [growth(one) for one in growths],
    }


def growth(found: Growth) -> dict[str, Any]:
    """Input that grows from report to report."""
    return {
        "task_type": found.task_type,
        "executions": found.executions,
        "steps": found.steps,
        "tokens": found.tokens,
        "per_step": found.per_step,
        "capped": found.capped,
        "summarised": found.summarised,
        "every": found.every,
    }


def comparison(found: Comparison, growths: Iterable[Growth]) -> dict[str, Any]:
    """Why a bill changed."""
    return {
        "a": dict(zip(("since", "until"), map(iso, found.a), strict=True)),
        "b": dict(zip(("since", "until"), map(iso, found.b), strict=True)),
        "total": _change(found.total),
        "changes": [_change(change) for change in found.changes],
        "growth": [growth(one) for one in growths],
    }


def _change(change: Change) -> dict[str, Any]:
    def pair(both: tuple[int, int]) -> dict[str, int]:
        return {"before": both[0], "after": both[1]}

    return {
        "task_type": change.task_type,
        "executions": pair(change.executions),
        "duplicates": pair(change.duplicates),
        "tokens": _part(change.tokens),
        "money": {name: decimal_text(amount) for name, amount in _part(change.money).items()},
        "unpriced": pair(change.unpriced),
    }


def _part(part: Part) -> dict[str, Any]:
    names = ("before", "after", "runs", "duplicates", "size", "price")
    return {name: getattr(part, name) for name in names}


# --- lines -------------------------------------------------------------------------------------------


def line(found: Execution) -> dict[str, Any]:
    """An execution with all that is known of it, flat; its fields are those of `LINE`."""
    usage, spent, ended = found.usage, found.spent, found.ended
    parts, inner = spent.parts or (None,) * 3, spent.inner or (None,) * 3
    digests = found.claim.caller.digests
    return {
        "execution_id": found.execution_id,
        "namespace": found.claim.address.namespace,
        "fingerprint": found.fingerprint,
        "task_type": found.task_type,
        "scope": found.scope,
        "version": found.version,
        "parent": found.parent,
        "cause": str(found.cause),
        "duplicate": found.cause in DUPLICATES,
        "status": str(found.status),
        "kept": found.kept,
        "worker": found.worker,
        "agent": found.agent,
        "started": iso(found.started),
        "ended": iso(ended),
        "lease_until": iso(found.until),
        "run_ms": None if ended is None else ended - found.started,
        "model": found.model,
        "provider": None if usage is None else usage.provider,
        "usage_reports": spent.reports,
        **{name: None if usage is None else getattr(usage, name) for name in TOKENS},
        "total_tokens": None if usage is None else usage.total_tokens,
        "cost": _units(spent.cost),
        "currency": found.currency,
        "price_version": found.price_version,
        "cost_input": _units(parts[0]),
        "cost_cache_read": _units(parts[1]),
        "cost_cache_write": _units(parts[2]),
        "unpriced_reports": spent.unpriced,
        "nested": spent.nested,
        "inner_input_tokens": inner[0],
        "inner_output_tokens": inner[1],
        "inner_cost": _units(inner[2]),
        "trace_id": found.trace_id,
        "span_id": found.span_id,
        "input_tokens_by_report": list(spent.inputs),
        "response_ids": list(spent.responses),
        "digests": {name: told for name, told in digests if told not in (DROPPED, UNMATCHED)},
        "dropped": [name for name, told in digests if told == DROPPED],
        "unmatched": [name for name, told in digests if told == UNMATCHED],
    }


def _units(amount: int | None) -> str | None:
    return None if amount is None else decimal_text(Decimal(amount).scaleb(-COST_DIGITS))


def jsonl(lines: Iterable[Execution]) -> Iterator[str]:
    """One JSON object a line."""
    write = json.JSONEncoder(separators=(",", ":")).encode
    return (f"{write(line(one))}\n" for one in lines)


def sheet(fields: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """CSV, row by row: lists and objects are JSON, control characters are escaped."""
    page = io.StringIO()
    writer = csv.writer(page, lineterminator="\n")
    columns = tuple(fields)
    writer.writerow(columns)
    for row in rows:
        yield _taken(page)
        writer.writerow([_cell(row.get(name)) for name in columns])
    yield _taken(page)


def _taken(page: io.StringIO) -> str:
    text = page.getvalue()
    page.seek(0)
    page.truncate()
    return text


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict)):
        return json.dumps(value, separators=(",", ":"))
    if not isinstance(value, str):
        return value
    shown = value if value.isprintable() else harmless(value)
    # a spreadsheet takes such text for a formula
    return f"'{shown}" if shown.startswith(FORMULAS) and not _NUMBER.fullmatch(shown) else shown

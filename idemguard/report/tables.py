"""A report for people: a headline, tables, findings, and what to do about them.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from idemguard.report import alarms
from idemguard.report.words import (
    alike,
    cell,
    harmless,
    local,
    many,
    money,
    share,
    short,
    spent,
    stretch,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from idemguard.findings import Drop, Growth, Loop, Missed
    from idemguard.report.alarms import Checked
    from idemguard.report.gather import Report, Row
    from idemguard.report.paper import Paper
    from idemguard.report.worst import Worst

MOST_ROWS = 50  # of a table
MOST_FOUND = 10  # findings of a kind
MOST_NAMES = 5  # workers of a finding
DIGITS = 16  # of a fingerprint, as people are shown it
BAD, GOOD, WARNING, QUIET = "red", "green", "yellow", "dim"

EXECUTIONS, RATE, DOUBLED = "execu-\ntions", "dupli-\ncation\nrate", "doubled\nshare"
MONEY = ("tokens", "charged", "wasted", "saved")
TOKENS = ("tokens", "wasted\ntokens", "saved\ntokens")


def show(on: Paper, found: Report) -> None:
    """All of a report."""
    on.say(f"{_about(found)}, {_window(found)}", "bold")
    _alerts(on, found)
    if found.empty:
        on.say("".join(nothing(found)))
    else:
        _headline(on, found.totals)
        _hidden(on, found.missed_duplicates)
        _gaps(on, found.totals)
        _rows(on, "Task types", "task type", found.task_types)
        _rows(on, "Agents", "agent", found.agents)
        _workers(on, found)
    _drops(on, found.drops)
    _loops(on, found.loops)
    _missed(on, found.missed_duplicates)
    if found.growth:
        on.head("Growing input: history that is sent along with every step")
        growth(on, found.growth)


def _about(found: Report) -> str:
    about = f"Namespace {harmless(found.namespace)}"
    if found.task_type is not None:
        about += f", task type {harmless(found.task_type)}"
    if found.agent is not None:
        about += f", agent {harmless(found.agent) or '(none)'}"
    return about


def _window(found: Report) -> str:
    if found.since is None:
        return f"all until {local(found.until)}"
    span = stretch(found.since, found.until)
    return f"{span}, sums by whole windows of five minutes or an hour"


def nothing(found: Report) -> list[str]:
    """That a report is empty, and of what: a sentence, at every second place a foreign name.

    A name that is misspelt has an empty report too, and a clock that was set back hides what
    there is: so it does not say that there is nothing else.
    """
    when = "until then" if found.since is None else "in this time"
    names = []
    if found.task_type is not None:
        names.append(f"task type {harmless(found.task_type)}")
    if found.agent is not None:
        names.append(f"agent {harmless(found.agent) or '(none)'}")
    if names:
        told = [f"Nothing that was called or executed {when} matches ", " and ".join(names)]
        if found.known is None or found.task_type is None:
            return [*told, "."]
        first, *more = alike(found.task_type, found.known)
        return [*told, f"; {first}", *more] if more else [*told, f"; {first}."]
    about = f"Nothing was called or executed {when}: namespace "
    return [about, harmless(found.namespace), " was not used."]


# --- alerts ----------------------------------------------------------------------------------------


def _alerts(on: Paper, found: Report) -> None:
    if isinstance(found.alerts, alarms.Untold):
        on.say("Whether anything alerted then can no longer be told.", QUIET)
    for alert in found.alerts:
        more = alarms.command(alert, found.namespace, store=found.store)
        on.one_line(f"Alert: {alarms.told(alert)}: {more}", BAD)


def checked(on: Paper, found: Checked, *, store: str | None = None) -> None:
    """What alerts, a line each; or that nothing does."""
    for alert in found.alerts:
        more = alarms.command(alert, found.namespace, store=store)
        on.one_line(f"{alarms.told(alert)}: {more}", BAD)
    if not found.alerts:
        on.one_line(alarms.quiet(found), GOOD)


# --- in five seconds -------------------------------------------------------------------------------


def _headline(on: Paper, totals: Row) -> None:
    paid = bool(totals["charged"] or totals["wasted"] or totals["saved"])
    duplicates, currency = totals["duplicates"], totals["currency"]
    rate = (
        f"{duplicates:,} of {many(totals['executions'], 'execution')} are duplicates "
        f"(duplication rate {share(totals['duplication_rate'])})"
    )
    if totals["executions"] and totals["doubled_share"] is None:
        style = BAD if duplicates else WARNING if totals["doubled"] > 0 else GOOD
        on.say(f"Runs twice: {rate}; {doubled(totals)}.", style)
    elif totals["doubled"] or duplicates:
        told = f"{doubled(totals)} (doubled share {doubled_share(totals)})"
        on.say(f"Runs twice: {told}; {rate}.", BAD if duplicates else WARNING)
    else:
        on.say(
            f"Runs twice: nothing. {many(totals['tasks'], 'task')}, "
            f"{many(totals['executions'], 'execution')}, no duplicates.",
            GOOD,
        )
    charged, wasted, saved = (
        f"{short(totals[name])} tokens"
        for name in ("total_tokens", "wasted_tokens", "saved_tokens")
    )
    if 0 < totals["executions"] <= totals["without_usage"]:
        charged, wasted = "unknown", "unknown" if duplicates else wasted
    if paid:
        sums = in_all(totals)
        charged = f"{sums[0]} ({charged})"
        wasted = f"{sums[1]} ({wasted})"
        saved = f"{money(totals['saved'], currency)} ({saved})"
    part = ""
    if paid and totals["wasted"] and totals["charged"]:
        part = f", {share(float(totals['wasted'] / totals['charged']))} of it"
    on.say(f"Cost:  {charged}; duplicates wasted {wasted}{part}.")
    on.say(f"Saved: {saved} by {many(totals['reused'], 'reused call')}.")


def doubled(row: Row) -> str:
    """How many tasks were executed twice, of how many.

    A part of the ledger (some time, one agent) has later executions of tasks whose first one it
    has not: then it is not known how many tasks there were.
    """
    if row["doubled_share"] is None:
        return f"tasks executed first here: {max(0, row['tasks']):,}"
    return f"{row['doubled']:,} of {many(row['tasks'], 'task')}"


def doubled_share(row: Row) -> str:
    """The share of tasks that were executed twice; a dash where it is not known."""
    fraction = row["doubled_share"]
    return "-" if fraction is None else share(fraction)


def in_all(totals: Row) -> tuple[str, str]:
    """What all was charged, and what duplicates wasted; `?` where none of it has a price."""
    unpriced = totals["unpriced"]
    charged, wasted = (
        money(None if missing and not totals[name] else totals[name], totals["currency"])
        for name, missing in (("charged", unpriced), ("wasted", unpriced and totals["duplicates"]))
    )
    return charged, wasted


def _hidden(on: Paper, found: Sequence[Missed]) -> None:
    if found:
        on.say(hidden(found), BAD)


def hidden(found: Sequence[Missed]) -> str:
    """How much more may run twice than is counted, in a sentence."""
    costs = [one.charged for one in found if one.charged is not None]
    cost = f", {money(sum(costs[1:], costs[0]))}" if costs else ""
    cost += "+?" if costs and len(costs) < len(found) else ""
    return (
        f"Missed: {sum(one.executions for one in found):,} executions look like duplicates "
        f"that a field hides ({short(sum(one.tokens for one in found))} tokens{cost}); see below."
    )


def _gaps(on: Paper, totals: Row) -> None:
    ends = ("failed", "declined", "fallback", "refused", "unguarded")
    told = [f"{totals[name]:,} {name}" for name in ends if totals[name]]
    if told:
        on.say(f"Of {many(totals['calls'], 'call')}: {', '.join(told)}.")
    if totals["lost"]:
        on.say(f"Lost, with their effect unknown: {many(totals['lost'], 'execution')}.", WARNING)
    if totals["unpriced"]:
        on.say(
            f"The cost of {many(totals['unpriced'], 'execution')} is unknown and not in it: "
            "no price for its model.",
            WARNING,
        )
    if totals["without_usage"]:
        on.say(
            f"{many(totals['without_usage'], 'execution')} told no usage: their tokens are "
            "unknown and not in it (record_usage).",
            WARNING,
        )


# --- tables ----------------------------------------------------------------------------------------


def _rows(on: Paper, title: str, name: str, rows: Sequence[Row]) -> None:
    if not rows or (name == "agent" and all(row["agent"] is None for row in rows)):
        return
    key = name.replace(" ", "_")
    paid = any(row["charged"] or row["wasted"] or row["saved"] for row in rows)
    heads = MONEY if paid else TOKENS
    on.head(title)
    on.grid(
        [name, EXECUTIONS, RATE, DOUBLED, *heads],
        [
            [
                _named(row[key]),
                cell(row["executions"]),
                share(row["duplication_rate"]),
                doubled_share(row),
                cell(row["total_tokens"]),
                *(_spent(row, paid=paid)),
            ]
            for row in rows[:MOST_ROWS]
        ],
    )
    _rest(on, len(rows) - MOST_ROWS)


def _spent(row: Row, *, paid: bool) -> list[str]:
    if not paid:
        return [cell(row["wasted_tokens"]), cell(row["saved_tokens"])]
    return [*bill(row, row["currency"]), cell(row["saved"], row["currency"])]


def bill(row: Row, currency: str) -> tuple[str, str]:
    """What a row was charged, and what duplicates wasted of it."""
    unpriced = row["unpriced"]
    # sums do not know whether those without a price are duplicates, lines do
    twice = row.get("unpriced_duplicates", min(unpriced, row["duplicates"]))
    return spent(row["charged"], unpriced, currency), spent(row["wasted"], twice, currency)


def _workers(on: Paper, found: Report) -> None:
    if not found.workers:
        return
    currency = found.totals["currency"]
    paid = any(row["charged"] for row in found.workers)
    some = found.looked_at < found.totals["executions"]
    on.head(f"Workers, of the newest {found.looked_at:,} executions" if some else "Workers")
    on.grid(
        ["worker", EXECUTIONS, "dupli-\ncates", "failed", "lost", "tokens"]
        + (["charged", "wasted"] if paid else []),
        [
            [
                row["worker"],
                *(cell(row[name]) for name in ("executions", "duplicates", "failed", "lost")),
                cell(row["total_tokens"]),
                *(bill(row, currency) if paid else ()),
            ]
            for row in found.workers[:MOST_ROWS]
        ],
    )
    more = len(found.workers) - MOST_ROWS
    if more > 0:
        on.say(f"and {more:,} more", QUIET)


def _named(name: str | None) -> str:
    return "(no agent)" if name is None else name


def _rest(on: Paper, more: int) -> None:
    if more > 0:
        on.say(f"and {more:,} more (--format json has all)", QUIET)


# --- findings --------------------------------------------------------------------------------------


def _drops(on: Paper, drops: Sequence[Drop]) -> None:
    if drops:
        on.head("Drops: handed back by everybody, done by nobody; the newest first")
        _handed_back(on, drops)
        on.say(
            "What to do: give these tasks to a worker that takes them, or widen what one "
            "counts as its own.",
            WARNING,
        )


def _loops(on: Paper, loops: Sequence[Loop]) -> None:
    if loops:
        on.head("Loops: handed back again and again; the newest first")
        _handed_back(on, loops)
        on.say(
            "What to do: send each task type to the worker that owns it, and what was handed "
            "back never to the same worker again.",
            WARNING,
        )


def newest(found: Iterable[Drop | Loop]) -> list[Drop | Loop]:
    """What was handed back, the newest first: so old tasks do not hide today's."""
    return sorted(found, key=lambda one: -one.last)


def scoped(found: Iterable[Worst | Drop | Loop]) -> bool:
    """Whether any of them has a scope, so that two of them may differ by it alone."""
    return any(one.scope for one in found)


def _handed_back(on: Paper, found: Sequence[Drop | Loop]) -> None:
    rows = newest(found)[:MOST_FOUND]
    scopes = scoped(rows)
    on.grid(
        ["task type", *(["scope"] if scopes else []), "by", "fingerprint", "times", "last"],
        [
            [
                one.task_type,
                *([one.scope or "-"] if scopes else []),
                _listed(one.workers),
                one.fingerprint[:DIGITS],
                f"{one.times:,}",
                local(one.last, "%m-%d %H:%M"),
            ]
            for one in rows
        ],
        names=3 if scopes else 2,
    )
    _rest(on, len(found) - MOST_FOUND)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _missed(on: Paper, found: Sequence[Missed]) -> None:
    if not found:
        return
    on.head("Missed duplicates: equal to an earlier execution but for a field or two")
    for one in found[:MOST_FOUND]:
        missed(on, one)
    _rest(on, len(found) - MOST_FOUND)


def missed(on: Paper, found: Missed) -> None:
    """What one task type repeats, and what to do."""
    cost = "" if found.charged is None else f", {money(found.charged)}"
    on.say(
        f"{harmless(found.task_type)}: {found.executions:,} of "
        f"{many(found.looked_at, 'execution')} looked at repeat an earlier one "
        f"({short(found.tokens)} tokens{cost})."
    )
    for suspect in found.suspects:
        on.say(f"  {harmless(str(suspect))}", WARNING)
    names = [suspect.field for suspect in found.suspects]
    fields = ", ".join(map(repr, names)) + ("," if len(names) == 1 else "")
    if names:
        on.say(
            f"  What to do, if the work is the same without: volatile=({harmless(fields)}); "
            "if it tells two tasks apart, nothing.",
            WARNING,
        )


def growth(on: Paper, growths: Iterable[Growth]) -> None:
    """Input that grows the way a carried history does, and what would save."""
    for one in growths:
        on.say(
            f"{harmless(one.task_type)}: the input grows by {one.per_step:,.0f} tokens from report "
            f"to report, over {one.steps:.1f} reports an execution, as a carried history does "
            f"({short(one.tokens)} input tokens in {many(one.executions, 'execution')}). A cap at "
            f"half the steps would save {short(one.capped)} tokens, a summary every {one.every} "
            f"steps {short(one.summarised)}.",
            WARNING,
        )

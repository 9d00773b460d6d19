"""`report`, `explain` and `compare`: what ran, what it cost, and why.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from idemguard.cli.base import FINE, absent, answer, opened, paper, shown_store, where
from idemguard.cli.output import busy, to_file, writing
from idemguard.cli.times import When, of_window, since_until, span, window
from idemguard.report import details, gather, plain, tables
from idemguard.report.gather import task_types
from idemguard.report.words import alike, brief

if TYPE_CHECKING:
    from idemguard.cli.base import Place

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)


@click.command()
@answer(("table", "json", "csv", "html"))
@to_file
@since_until
@click.option("--task-type", metavar="T", help="Of this one alone.")
@click.option("--agent", metavar="A", help="Of this one alone.")
@where
def report(
    *,
    form: str,
    path: str | None,
    since: When | None,
    until: When | None,
    task_type: str | None,
    agent: str | None,
) -> int:
    """How much runs twice, who does it, what it cost, what was saved."""
    with opened() as place, busy("reading"):
        now = place.ledger.now()
        start, end = span(since, until, now)
        found = gather(
            place.ledger, since=start, until=end, task_type=task_type, agent=agent,
            store=shown_store(),
        )  # fmt: skip
    with writing(path) as file:
        if form == "json":
            file.write(plain.dump(plain.report(found)))
        elif form == "csv":
            file.write(plain.report_sheet(found))
        elif form == "html":
            from idemguard.report import html  # noqa: PLC0415 - loaded when needed

            file.write(html.page(found))
        else:
            tables.show(paper(file), found)
    return FINE


@click.command()
@click.argument("task_type")
@answer(("table", "json"))
@since_until
@where
def explain(task_type: str, form: str, since: When | None, until: When | None) -> int:
    """Why a task type runs so often, and which duplicates are missed.

    Executions that are equal but for a field or two, close in time, are suspected to be
    duplicates that a volatile field hides; the suspects are named.
    """
    with opened() as place, busy("reading"):
        now = place.ledger.now()
        start, end = span(since, until, now)
        when = start or 0, now + 1 if end is None else end
        found = place.ledger.explain(task_type, span=when)
        growths = place.ledger.growth(span=when, task_type=task_type)
        ran = place.ledger.task_type_summary(task_type, span=when)["executions"]
        hint = "" if found.executions or ran else _misspelt(place, task_type)
    if not found.executions:
        times = "time" if ran == 1 else "times"
        why = f"; it was executed {ran:,} {times}, but no line of it is kept" if ran else ""
        when_ = "" if hint else _asked(since, until)
        return absent(f"{_unknown(place, task_type)}{when_}{why}{hint}")
    if form == "json":
        click.echo(plain.dump(plain.explanation(found, growths)), nl=False)
    else:
        details.explanation(paper(), found, growths)
    return FINE


@click.command()
@window("--a", "Before")
@window("--b", "After")
@answer(("table", "json"))
@click.option("--task-type", metavar="T", help="Of this one alone.")
@where
def compare(a: tuple[When, When], b: tuple[When, When], form: str, task_type: str | None) -> int:
    """Why the bill changed from one time to another.

    The change is split into more runs, more duplicates, bigger runs and the price, which add
    up to it exactly.
    """
    with opened() as place, busy("reading"):
        now = place.ledger.now()
        before, after = of_window("--a", a, now), of_window("--b", b, now)
        found = place.ledger.compare(_times(before), _times(after))
        growths = place.ledger.growth(span=after)
        missing = task_type not in (None, *(one.task_type for one in found.changes))
        hint = _misspelt(place, task_type or "") if missing else ""
    if task_type is not None:
        found = replace(
            found, changes=tuple(one for one in found.changes if one.task_type == task_type)
        )
        if not found.changes:
            return absent(f"{_unknown(place, task_type)}{hint or ' in these times'}")
        found = replace(found, total=found.changes[0])
        growths = [one for one in growths if one.task_type == task_type]
    if form == "json":
        click.echo(plain.dump(plain.comparison(found, growths)), nl=False)
    else:
        details.comparison(paper(), found, growths)
    return FINE


def _unknown(place: Place, task_type: str) -> str:
    return f"nothing is known of task type {brief(task_type)} in {brief(place.namespace)}"


def _asked(since: When | None, until: When | None) -> str:
    """The time that was asked for, behind what is said of it."""
    if since is not None:
        return " in this time"
    return "" if until is None else " until then"


def _misspelt(place: Place, task_type: str) -> str:
    """Which task types look like one that never was; nothing of one that was."""
    known = task_types(place.ledger)
    return "" if task_type in known else f"; {''.join(alike(task_type, known))}"


def _times(span: tuple[int, int]) -> tuple[datetime, datetime]:
    start, end = (_BEGIN + timedelta(milliseconds=moment) for moment in span)
    return start, end

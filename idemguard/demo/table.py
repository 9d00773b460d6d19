"""The demo for people: progress bars, one table, and what it says in words.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from idemguard.demo.documents import shown
from idemguard.demo.tasks import COSTLY, COUNTED, LARGE, PRICES, SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from idemguard.demo.plan import Plan
    from idemguard.demo.reading import Figures

WIDEST = 100  # columns of running text
NAMED = 20  # skipped files that are named one by one


def console() -> Console:
    """Where it is shown; without colours or bars where that is no terminal."""
    found = Console(highlight=False, markup=False, emoji=False)
    found.width = min(WIDEST, found.width)
    return found


def say(to: Console, text: str, style: str = "") -> None:
    """Some running text; in a file or pipe a paragraph is one line."""
    to.print(Text(text, style), soft_wrap=not to.is_terminal)


def introduce(to: Console, plan: Plan, documents: int, skipped: Mapping[str, str]) -> None:
    """What will be done, and which files are left out."""
    share = len(plan.doubled) / plan.tasks
    say(
        to,
        f"{_many(documents, 'document')}, {plan.tasks} tasks, {len(plan.batches)} workers; "
        f"{len(plan.doubled)} tasks ({share:.0%}) are in two batches.",
    )
    for name, reason in list(skipped.items())[:NAMED]:
        say(to, f"skipped {shown(name)}: {reason}", "yellow")
    if len(skipped) > NAMED:
        say(to, f"skipped {len(skipped) - NAMED} more (--json names all of them)", "yellow")


@contextmanager
def bar(to: Console, mode: str, calls: int) -> Iterator[Callable[[], None]]:
    """A progress bar for one pass; gives what is to be called after each call."""
    progress = Progress(
        TextColumn("{task.description:>7}"),
        BarColumn(bar_width=min(40, max(10, to.width - 32))),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=to,
        disable=not sys.stdout.isatty(),
    )
    with progress:
        task = progress.add_task(mode, total=calls)
        yield lambda: progress.advance(task)


def show(to: Console, observed: Figures, enforced: Figures) -> None:
    """One table for both passes, and what was seen."""
    table = Table(title="What the ledger counted", title_justify="left", title_style="bold")
    table.add_column("")
    for mode, style in (("observe", "red"), ("enforce", "green")):
        table.add_column(mode, justify="right", style=style)
    for name, told in ROWS.items():
        table.add_row(name, told(observed), told(enforced))
    to.print()
    to.print(table)
    for sentence in sentences(observed, enforced):
        say(to, sentence)
    say(
        to,
        f"Prices are invented, per million tokens in and out: {_price(LARGE)} for "
        f"{' and '.join(COSTLY)}, {_price(SMALL)} for the rest. Counted are {COUNTED}.",
        "dim",
    )


ROWS: dict[str, Callable[[Figures], str]] = {
    "calls": lambda found: f"{found.calls:,}",
    "executions": lambda found: f"{found.executions:,}",
    "reused": lambda found: f"{found.reused:,}",
    "tasks": lambda found: f"{found.tasks:,}",
    "doubled share": lambda found: f"{found.doubled_share:.1%}",
    "duplication rate": lambda found: f"{found.duplication_rate:.1%}",
    "tokens billed": lambda found: f"{found.tokens:,}",
    "bill": lambda found: f"${found.bill:.4f}",
    "ideal: each task once": lambda found: f"${found.ideal:.4f}",
    "bill against the ideal": lambda found: f"{found.against_ideal:.2f} x",
}


def sentences(observed: Figures, enforced: Figures) -> list[str]:
    """What was seen, in words."""
    dear = sum(observed.doubled_types.get(kind, 0) for kind in COSTLY)
    said = []
    if observed.doubled:
        said.append(
            f"Observe: {observed.doubled} of {observed.tasks} tasks were executed more than once, "
            f"{dear} of them {' or '.join(COSTLY)}. The bill is {observed.against_ideal:.2f} times "
            "the ideal, and nothing but the ledger tells."
        )
    else:
        said.append("Observe: no task was executed more than once.")
    if enforced.duplicates:
        said.append(f"Enforce: {_many(enforced.duplicates, 'execution')} too many.")
    elif (saved := observed.bill - enforced.bill) > 0:
        said.append(
            f"Enforce: every task was executed once, {_many(enforced.reused, 'call')} reused a "
            f"result, and ${saved:.4f} of ${observed.bill:.4f} stayed unspent."
        )
    else:
        said.append("Enforce: every task was executed once.")
    return said


def _price(model: str) -> str:
    return f"${PRICES[model]['input']} and ${PRICES[model]['output']}"


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"

"""What is not allowed of all that ran: duplicates, near duplicates, budgets.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_idemguard.message import cause
from pytest_idemguard.plugin import rules_of
from pytest_idemguard.runs import NOT_TWICE, Book, Run, counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_idemguard.session import Session
    from pytest_idemguard.settings import Rules
    from pytest_idemguard.spaces import Attempt

GENERATED = "!"  # behind a digest, as idemguard.digests has it
MARKS = ("~", "?")  # in place of one
FIELDS = 2  # in which near duplicates differ, at most
MOST = 500  # runs of one task type that are compared


@dataclass(slots=True)
class Finding:
    """Something that is not allowed.

    Attributes:
        kind: `duplicate`, `near`, or `budget`.
        mode: what it does: `error`, `warn`, `report`.
        task: task type; None: all of them.
        runs: that it is about.
        counted: how many of them count; of a budget, what was spent.
        allowed: how many may.
        fields: of near duplicates, in which they differ.
        unit: of a budget: `tokens` or `$`.
        where: the fixture that they are of, or None.
        why: the likely cause of a duplicate.
        remedy: what to do about it.

    """

    kind: Literal["duplicate", "near", "budget"]
    mode: str
    task: str | None
    runs: list[Run] = field(default_factory=list)
    counted: int | Decimal = 0
    allowed: int | Decimal = 0
    fields: tuple[str, ...] = ()
    unit: str = ""
    where: str | None = None
    why: str = ""
    remedy: str = ""

    @property
    def sign(self) -> tuple[Any, ...]:
        """What makes it the same finding when it is looked for again."""
        key = self.runs[0].key if self.kind == "duplicate" else None
        why = self.why if self.kind == "budget" else ""
        return self.kind, self.task, key, self.fields, self.unit, why


def judged(
    session: Session, attempt: Attempt, *, wide: bool, lenient: bool = False
) -> list[Finding]:
    """What is not allowed in a test so far and was not told yet; it counts as told from now on.

    Args:
        session: of the test.
        attempt: at it.
        wide: whether it is to be told of what a wider fixture ran.
        lenient: whether what was asked of it at its start counts, where a marker has come since that
            says what there is not.

    Raises:
        pytest.UsageError: there is such a marker.

    """
    try:
        attempt.rules = rules_of(attempt.item, session.base)  # markers may have come since
    except pytest.UsageError:
        if not lenient:
            raise
    rules = attempt.rules
    found = []
    if not _is_fine(attempt.events, rules):
        found = _new(attempt.told, all_findings(Book(attempt.events), rules, None))
    news, session.news = (session.news, []) if wide else ([], session.news)
    for one in dict.fromkeys(news):
        new = _new(one.told, all_findings(Book(one.events), one.rules, one.label))
        session.given += [(one, finding.sign) for finding in new]
        found += new
    attempt.found += found
    return found


def _is_fine(events: list[dict[str, Any]], rules: Rules) -> bool:
    """Whether there is plainly nothing to find: most tests run one task, once."""
    if not rules.max_runs or rules.tasks or rules.max_tokens is not None:
        return False
    starts = sum(event["kind"] == "start" for event in events)
    return starts <= 1 and rules.max_cost is None


def _new(told: set[Any], findings: Iterable[Finding]) -> list[Finding]:
    new = [one for one in findings if one.sign not in told]
    told.update(one.sign for one in new)
    return new


def all_findings(book: Book, rules: Rules, where: str | None) -> list[Finding]:
    """All that is not allowed."""
    if not rules.counts():
        return []
    return [
        one
        for one in (
            *duplicates(book, rules, where),
            *near(book, rules, where),
            *_budgets(book, rules),
        )
        if one.mode != "off"
    ]


def duplicates(book: Book, rules: Rules, where: str | None = None) -> list[Finding]:
    """Tasks that ran more often than allowed."""
    found = []
    for key, runs in book.by_key().items():
        own = rules.of(key[1])
        some = counted(runs, failed=own.count_failed)
        if len(some) > own.max_runs:
            found.append(too_often(own.mode, runs, some, own.max_runs, where))
    return found


def too_often(
    mode: str, runs: list[Run], some: list[Run], allowed: int, where: str | None
) -> Finding:
    """A task that ran more often than allowed; `some` of its runs count."""
    why, remedy = cause(some)
    return Finding(
        "duplicate",
        mode,
        runs[0].task,
        runs,
        len(some),
        allowed,
        where=where,
        why=why,
        remedy=remedy,
    )


def _budgets(book: Book, rules: Rules) -> list[Finding]:
    found = []
    asked: list[tuple[str | None, Any, Any, str]] = [
        (None, rules.max_tokens, rules.max_cost, rules.mode)
    ]
    for task, own in rules.tasks.items():
        mode = rules.of(task).mode
        asked.append((task, own.get("max_tokens"), own.get("max_cost"), mode))
    for kind, tokens, cost, mode in asked:
        runs = [run for run in book.runs.values() if kind in (None, run.task)]
        spent = sum(run.tokens or 0 for run in runs)
        if tokens is not None and spent > tokens:
            found.append(Finding("budget", mode, kind, runs, spent, tokens, unit="tokens"))
        money = sum((run.money for run in runs), Decimal(0))
        unpriced = [run for run in runs if run.tokens and run.cost is None]
        if cost is not None and money > cost:
            found.append(Finding("budget", mode, kind, runs, money, cost, unit="$"))
        elif cost is not None and unpriced and mode != "off":
            found.append(_unpriced(kind, unpriced, cost))
    return found


def _unpriced(task: str | None, runs: list[Run], cost: Decimal) -> Finding:
    """What is held to a cost, and has none that is known: it is told, and fails nothing."""
    names = ", ".join(sorted({run.task for run in runs}))
    why = f"max_cost says nothing of {names}: its tokens have no price"
    remedy = "give prices for its model: configure(pricer=...), or the extra idemguard[pricing]"
    return Finding(
        "budget", "report", task, runs, Decimal(0), cost, unit="$", why=why, remedy=remedy
    )


# --- near duplicates -------------------------------------------------------------------------------


def near(book: Book, rules: Rules, where: str | None = None) -> list[Finding]:
    """Runs of one task type that are equal but for one or two fields that look generated."""
    kinds: dict[tuple[Any, ...], list[Run]] = {}
    for run in book.runs.values():
        own = rules.of(run.task)
        if "off" not in (own.near, own.mode) and run.ran() and run.cause not in NOT_TWICE:
            kinds.setdefault((run.ns, run.task, run.scope, run.version), []).append(run)
    return [
        Finding("near", _severity(rules.of(kind[1])), kind[1], pair, fields=names, where=where)
        for kind, runs in kinds.items()
        for names, pair in near_pairs(runs).items()
    ]


def _severity(rules: Rules) -> str:
    """A near duplicate is told at the end; `error` alone makes it a failure."""
    return "error" if rules.near == "error" else "report"


def near_pairs(runs: list[Run]) -> dict[tuple[str, ...], list[Run]]:
    """The first two runs that differ in these fields alone, by the fields.

    Args:
        runs: of one task type.

    """
    payloads = []
    for run in runs[:MOST]:
        values = {name: digest for name, digest in run.digests if digest not in MARKS}
        payloads.append((run, values))
    found: dict[tuple[str, ...], list[Run]] = {}
    paired: set[tuple[str, str]] = set()
    for number in range(1, FIELDS + 1):
        alike: dict[Any, list[tuple[Run, dict[str, str]]]] = {}
        for run, values in payloads:
            generated = [name for name in values if values[name].endswith(GENERATED)]
            for names in combinations(sorted(generated), number):
                rest = frozenset(values.items() - {(name, values[name]) for name in names})
                if rest:  # the only field there is may well be the point
                    alike.setdefault((names, rest), []).append((run, values))
        for (names, _), same in alike.items():
            first = same[0]
            for other in same[1:]:
                pair = first[0].fp, other[0].fp
                differ = all(first[1][name] != other[1][name] for name in names)
                if pair[0] != pair[1] and pair not in paired and differ:
                    paired.add(pair)
                    found.setdefault(names, [first[0], other[0]])
    return found

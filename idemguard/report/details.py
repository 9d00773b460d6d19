"""One task, one task type, one change, one execution: drawn for people.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from idemguard.record import DUPLICATES, Status
from idemguard.report.lines import unpriced
from idemguard.report.tables import BAD, DIGITS, GOOD, MOST_ROWS, QUIET, WARNING, growth, missed
from idemguard.report.words import cell, harmless, lasted, local, many, money, short, stretch
from idemguard.stores import without_password

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from decimal import Decimal

    from idemguard.change import Change, Comparison
    from idemguard.findings import Explanation, Growth
    from idemguard.record import Address, Execution, Record
    from idemguard.report.paper import Paper

STYLES = {
    Status.OPEN: "cyan",
    Status.OK: GOOD,
    Status.FAILED: BAD,
    Status.LOST: BAD,
    Status.LATE: WARNING,
    Status.DECLINED: WARNING,
}


# --- a task ----------------------------------------------------------------------------------------


def place(address: Address) -> str:
    """The scope and version of an address, in words."""
    scope = f"scope {harmless(address.scope)}" if address.scope else "no scope"
    return scope if address.version is None else f"{scope}, version {harmless(address.version)}"


def listed(names: Iterable[str]) -> str:
    """Foreign names, one behind the other."""
    return ", ".join(map(harmless, names))


def task(on: Paper, address: Address, record: Record, now: int) -> None:
    """What is known of one address; its executions follow."""
    on.say(
        f"{place(address)}: executed {_times(record.runs)}, "
        f"{f'reused {_times(record.reused)}' if record.reused else 'never reused'}; "
        f"{_state(record, now)}"
    )
    if 0 < len(record.lines) < record.runs:
        on.say(f"  the last {len(record.lines)} executions are kept", QUIET)


def _times(number: int) -> str:
    return "never" if not number else "once" if number == 1 else f"{number:,} times"


def _state(record: Record, now: int) -> str:
    if living := record.living(now):
        return f"being executed by {harmless(living[0].worker)}"
    result = record.result
    if result is not None and now < result.until:
        kept = (
            "its result is kept" if result.available else "done, but its result could not be kept"
        )
        return f"{kept} until {local(result.until)}"
    if (lost := record.unknown(now)) is not None:
        return (
            f"its outcome is unknown, as {harmless(lost.worker)} was lost "
            "(resolve gives it a result, forget has it executed anew)"
        )
    return "no result is kept"


def execution(
    on: Paper, line: Execution, inside: Sequence[Execution], now: int, jaeger: str | None
) -> None:
    """One execution.

    Args:
        on: where to.
        line: which.
        inside: the guarded executions inside it, at every depth.
        now: ms.
        jaeger: the address of Jaeger, for a link; None: no link.

    """
    if line.ended is not None:
        run = lasted(line.ended - line.started)
    elif line.status is Status.LOST:
        run = f"heard of for {lasted(line.until - line.started)} at most"
    else:
        run = f"open for {lasted(now - line.started)}"
    twice = " (duplicate)" if line.cause in DUPLICATES else ""
    who = f"worker {harmless(line.worker)}"
    who += "" if line.agent is None else f", agent {harmless(line.agent)}"
    style = STYLES[line.status]
    on.say(f"  {local(line.started)}  {line.cause}{twice} -> {line.status}, {run}, {who}", style)
    on.say(f"    {spending(line)}")
    if inside:
        known = [line, *inside]
        tokens = sum(one.usage.total_tokens or 0 for one in known if one.usage is not None)
        costs = [one.cost for one in known if one.cost is not None]
        kinds = sorted({harmless(one.task_type) for one in inside})
        cost = f", {money(sum(costs[1:], costs[0]))}" if costs else ""
        cost += "+?" if costs and any(map(unpriced, known)) else ""
        on.say(
            f"    with {many(len(inside), 'guarded execution')} inside ({', '.join(kinds)}): "
            f"{tokens:,} tokens{cost}"
        )
    if line.trace_id is not None:
        on.say(f"    trace {harmless(line.trace_id)}")
        if jaeger is not None:
            on.say(f"    {link(jaeger, line.trace_id)}", QUIET)


def spending(line: Execution) -> str:
    """The tokens and money of one execution alone."""
    usage = line.usage
    if usage is None:
        return "nothing reported itself" if line.spent.nested else "no usage reported"
    parts = [f"{'?' if n is None else f'{n:,}'} {name}" for n, name in (
        (usage.input_tokens, "in"), (usage.output_tokens, "out"))]  # fmt: skip
    cost = "unpriced" if line.cost is None else money(line.cost, line.currency or "USD")
    cost += "+?" if line.cost is not None and unpriced(line) else ""
    model = "" if line.model is None else f", {harmless(line.model)}"
    return f"tokens {' + '.join(parts)}, {cost}{model}"


def link(jaeger: str, trace_id: str) -> str:
    """Where Jaeger shows a trace."""
    return f"{harmless(without_password(jaeger)).rstrip('/')}/trace/{quote(trace_id, safe='')}"


def last_change(line: Execution) -> int:
    """When an execution ended, was lost, or, being open, started; ms."""
    if line.ended is not None:
        return line.ended
    return line.until if line.status is Status.LOST else line.started


def event(on: Paper, line: Execution) -> None:
    """One line of a live view: an execution that has started, or ended."""
    told = [
        local(last_change(line), "%H:%M:%S"),
        f"{'started' if line.status is Status.OPEN else line.status:<8}",
        harmless(line.task_type),
        line.fingerprint[:DIGITS],
        str(line.cause),
        harmless(line.worker),
    ]
    if line.agent is not None:
        told.append(harmless(line.agent))
    if line.ended is not None:
        told.append(lasted(line.ended - line.started))
    if line.usage is not None:
        told.append(spending(line))
    on.say("  ".join(told), BAD if line.cause in DUPLICATES else STYLES[line.status])


# --- a task type -----------------------------------------------------------------------------------


def explanation(on: Paper, found: Explanation, growths: Iterable[Growth]) -> None:
    """What is known of a task type."""
    on.say(f"{harmless(found.task_type)}: {many(found.executions, 'execution')}", "bold")
    for title, counts in (
        ("Why they started", found.causes),
        ("Who executed", found.workers),
        ("Whose duplicates", found.duplicates_by),
    ):
        told = [f"{harmless(str(name))} {number:,}" for name, number in _most(counts)]
        if told:
            on.say(f"{title}: {', '.join(told)}.")
    for one in found.advice:
        on.say(str(one), WARNING if one.duplicates else QUIET)
    if found.missed is None:
        on.say("Missed duplicates: none found.", GOOD)
    else:
        on.head("Missed duplicates")
        missed(on, found.missed)
    if found.dropped:
        told = [f"{harmless(name)} (in {number:,})" for name, number in _most(found.dropped)]
        on.say(f"Fields that do not count: {', '.join(told)}.")
    if found.unmatched:
        names = ", ".join(map(harmless, found.unmatched))
        on.say(f"Volatile names that never matched: {names}. Misspelt?", WARNING)
    growth(on, growths)


def _most(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda one: -one[1])[:MOST_ROWS]


# --- a change --------------------------------------------------------------------------------------

PARTS = ("runs", "duplicates", "size", "price")
REASONS = ("more\nruns", "more\ndupl.", "bigger\nper run", "price")


def comparison(on: Paper, found: Comparison, growths: Iterable[Growth]) -> None:
    """Why a bill changed."""
    for name, span in (("a", found.a), ("b", found.b)):
        on.say(f"{name}: {stretch(*span)}", QUIET)
    if not found.changes:
        on.say("Nothing was executed in either.")
        return
    rows = [*found.changes[:MOST_ROWS], found.total]
    total = found.total
    on.say(
        f"{many(total.executions[0], 'execution')} became {total.executions[1]:,}, "
        f"{many(total.duplicates[0], 'duplicate')} {total.duplicates[1]:,}."
    )
    if any(row.money.before or row.money.after for row in rows):
        on.head(_because("Money", total.money.after - total.money.before, _of_money(total)))
        on.grid(
            ["task type", "a", "b", *REASONS],
            [
                [
                    row.task_type,
                    cell(row.money.before),
                    cell(row.money.after),
                    *(cell(amount, signed=True) for amount in _of_money(row)),
                ]
                for row in rows
            ],
        )
    if any(total.unpriced):
        before, after = total.unpriced
        on.say(f"Unpriced executions, not in the money: {before:,} and {after:,}.", WARNING)
    on.head(_because("Tokens", total.tokens.after - total.tokens.before, _of_tokens(total)))
    on.grid(
        ["task type", "a", "b", *REASONS[:3]],
        [
            [
                row.task_type,
                cell(row.tokens.before),
                cell(row.tokens.after),
                *(cell(tokens, signed=True) for tokens in _of_tokens(row)),
            ]
            for row in rows
        ],
    )
    if len(found.changes) > MOST_ROWS:
        on.say(f"and {len(found.changes) - MOST_ROWS:,} more (--format json has all)", QUIET)
    growth(on, growths)


def _of_money(change: Change) -> list[Decimal]:
    return [getattr(change.money, part) for part in PARTS]


def _of_tokens(change: Change) -> list[int]:
    return [getattr(change.tokens, part) for part in PARTS[:3]]


def _because(what: str, by: Decimal | int, parts: Sequence[Decimal] | Sequence[int]) -> str:
    """A headline that names the largest reason."""
    if not by:
        return f"{what}: as before"
    reasons = ("more runs", "more duplicates", "bigger runs", "the price")
    fewer = ("fewer runs", "fewer duplicates", "smaller runs", "the price")
    most = max(range(len(parts)), key=lambda at: parts[at] if by > 0 else -parts[at])
    why = (reasons if by > 0 else fewer)[most]
    amount = short(abs(by)) if isinstance(by, int) else money(abs(by))
    return f"{what}: {amount} {'more' if by > 0 else 'less'}, chiefly by {why}"

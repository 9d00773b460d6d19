"""Why a bill changed: more runs, more duplicates, bigger runs, or another price.

Pure: sums of two spans go in, a split that adds up exactly comes out.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from idemguard.usage import money
from idemguard.windows import duplicates, executions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from idemguard.windows import Counts

Amount: TypeAlias = "int | Decimal"

ALL = "all"
_EXACT = Context(prec=100)  # whatever the user's own rounds to


@dataclass(frozen=True, slots=True)
class Part:
    """A change, and what it is made of: `before`, plus the rest, is `after` exactly.

    Attributes:
        before: in the first span; tokens, or units of money.
        after: in the second.
        runs: what more (or less) executions that are no duplicates account for.
        duplicates: what more duplicates do.
        size: what bigger executions do.
        price: what another price per token does; of tokens, 0.

    """

    before: Amount
    after: Amount
    runs: Amount
    duplicates: Amount
    size: Amount
    price: Amount

    @property
    def change(self) -> Any:
        """All of it."""
        with localcontext(_EXACT):
            return self.after - self.before


@dataclass(frozen=True, slots=True)
class Change:
    """How one task type changed from one span to another.

    Attributes:
        task_type: which; "all" for their sum.
        executions: in the first span and in the second.
        duplicates: of them.
        tokens: input and output together.
        money: what was charged.
        unpriced: executions with tokens that had no price; what they cost is in no sum.

    """

    task_type: str
    executions: tuple[int, int]
    duplicates: tuple[int, int]
    tokens: Part
    money: Part
    unpriced: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two spans of time side by side.

    Attributes:
        a: from when to when, ms.
        b: the same of the second.
        changes: by task type, the largest change of money first, then of tokens.
        total: their sum.

    """

    a: tuple[int, int]
    b: tuple[int, int]
    changes: tuple[Change, ...]
    total: Change


def compared(
    a: tuple[int, int],
    b: tuple[int, int],
    before: Mapping[str, Counts],
    after: Mapping[str, Counts],
) -> Comparison:
    """Split the change between two spans.

    Args:
        a: the first span, ms.
        b: the second.
        before: the counts of the first, by task type.
        after: those of the second.

    """
    empty: Counts = Counter()
    names = sorted({*before, *after})
    changes = [change(n, before.get(n, empty), after.get(n, empty)) for n in names]
    with localcontext(_EXACT):
        ordered = sorted(changes, key=lambda one: (-abs(one.money.change), -abs(one.tokens.change)))
    return Comparison(a, b, tuple(ordered), _summed(changes))


def change(task_type: str, before: Counts, after: Counts) -> Change:
    """How one task type changed.

    What is left of the order of the factors is settled so: runs first, then duplicates, then
    size, then price, each with those before it as they are in the second span. What counts of
    an older version do not tell stands with the last of them.
    """
    one, other = _factors(before), _factors(after)
    one, other = _filled(one, other), _filled(other, one)
    stages = (
        one,
        one._replace(runs=other.runs),
        one._replace(runs=other.runs, duplicates=other.duplicates),
        other._replace(prices=one.prices),
        other,
    )
    ends = [(counts["input"] + counts["output"], counts["cost"]) for counts in (before, after)]
    tokens = [ends[0][0], *(_whole(stage.tokens()) for stage in stages[1:3]), ends[1][0]]
    units = [ends[0][1], *(_whole(stage.cost()) for stage in stages[1:4]), ends[1][1]]
    runs, doubled, size = (later - earlier for earlier, later in itertools.pairwise(tokens))
    costs = [money(later - earlier) for earlier, later in itertools.pairwise(units)]
    return Change(
        task_type,
        (executions(before), executions(after)),
        (duplicates(before), duplicates(after)),
        Part(tokens[0], tokens[-1], runs, doubled, size, 0),
        Part(money(units[0]), money(units[-1]), costs[0], costs[1], costs[2], costs[3]),
        (before["unpriced"], after["unpriced"]),
    )


class _Factors(NamedTuple):
    """What tokens and cost of a span are the product of, exactly.

    Sizes are tokens per execution, prices units per token, both by kind, with the execution
    itself as the last kind; None where there is nothing to take them from.
    """

    runs: int
    duplicates: int
    size: tuple[Fraction | None, ...]
    wasted: tuple[Fraction | None, ...]  # the size of duplicates
    prices: tuple[Fraction | None, ...]

    def amounts(self) -> list[Fraction]:
        """By kind; the last are the executions."""
        zero = Fraction(0)
        return [
            self.runs * (size or zero) + self.duplicates * (wasted or zero)
            for size, wasted in zip(self.size, self.wasted, strict=True)
        ]

    def tokens(self) -> Fraction:
        return sum(self.amounts()[:-1], Fraction(0))

    def cost(self) -> Fraction:
        priced = zip(self.amounts(), self.prices, strict=True)
        return sum((amount * (price or Fraction(0)) for amount, price in priced), Fraction(0))


def _factors(counts: Counts) -> _Factors:
    doubled = duplicates(counts)
    runs = executions(counts) - doubled
    whole, wasted = _by_kind(counts, ""), _by_kind(counts, "wasted_")
    in_cache = counts["cost_cache_read"], counts["cost_cache_write"]
    out = counts["cost"] - counts["cost_input"] - sum(in_cache)
    costs = [counts["cost_input"], *in_cache, out]
    # what is charged for no tokens of its kind is charged for the execution
    flat = sum(cost for cost, amount in zip(costs, whole, strict=True) if not amount)
    prices = [
        Fraction(cost, amount) if amount else None
        for cost, amount in zip(costs, whole, strict=True)
    ]
    mine = [all_ - lost for all_, lost in zip(whole, wasted, strict=True)]
    return _Factors(
        runs,
        doubled,
        (*_each(mine, runs), Fraction(1)),
        (*_each(wasted, doubled), Fraction(1)),
        (*prices, Fraction(flat, runs + doubled) if runs + doubled else None),
    )


def _by_kind(counts: Counts, prefix: str) -> list[int]:
    read, written = counts[f"{prefix}cache_read"], counts[f"{prefix}cache_write"]
    return [counts[f"{prefix}input"] - read - written, read, written, counts[f"{prefix}output"]]


def _each(amounts: list[int], number: int) -> tuple[Fraction | None, ...]:
    return tuple(Fraction(amount, number) if number else None for amount in amounts)


def _filled(one: _Factors, other: _Factors) -> _Factors:
    """What a span says nothing of is as in the other: it has not changed."""

    def fill(
        mine: tuple[Fraction | None, ...], theirs: tuple[Fraction | None, ...]
    ) -> tuple[Fraction | None, ...]:
        return tuple(b if a is None else a for a, b in zip(mine, theirs, strict=True))

    return one._replace(
        size=fill(one.size, other.size),
        wasted=fill(one.wasted, fill(other.wasted, one.size)),
        prices=fill(one.prices, other.prices),
    )


def _whole(number: Fraction) -> int:
    return round(number)


def _summed(changes: list[Change]) -> Change:
    def part(parts: list[Part], zero: Amount) -> Part:
        with localcontext(_EXACT):
            sums = [sum((getattr(one, name) for one in parts), zero) for name in Part.__slots__]
        return Part(*sums)

    def two(pairs: list[tuple[int, int]]) -> tuple[int, int]:
        return sum(one for one, _ in pairs), sum(other for _, other in pairs)

    return Change(
        ALL,
        two([one.executions for one in changes]),
        two([one.duplicates for one in changes]),
        part([one.tokens for one in changes], 0),
        part([one.money for one in changes], Decimal(0)),
        two([one.unpriced for one in changes]),
    )

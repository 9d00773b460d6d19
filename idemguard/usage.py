"""Tokens: one normal form, whoever provided the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any, NamedTuple

COST_DIGITS = 12  # costs are whole numbers of 10**-12 units of currency, so that sums are exact

TOKENS = (
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one request, or one execution, spent.

    Attributes:
        input_tokens: all tokens that went in, cache reads and writes included.
        output_tokens: all tokens that came out, reasoning included.
        cache_read_tokens: the part of the input that was read from a prompt cache.
        cache_write_tokens: the part of the input that was written to one.
        reasoning_tokens: the part of the output that was reasoning.
        model: as the provider names it.
        provider: who ran the model.
        response_id: the provider's id of the response; one id counts once.

    None means unknown, never zero.

    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None
    model: str | None = None
    provider: str | None = None
    response_id: str | None = None

    def __post_init__(self) -> None:
        for name in TOKENS:
            count = getattr(self, name)
            if count is not None and (
                isinstance(count, bool) or not isinstance(count, int) or count < 0
            ):
                raise ValueError(f"{name} must be a whole number of tokens >= 0, not {count!r}")

    @property
    def total_tokens(self) -> int | None:
        """Input and output; None where both are unknown."""
        return _sum((self.input_tokens, self.output_tokens))


class Spent(NamedTuple):
    """What an execution has spent so far, as its ledger line keeps it.

    Attributes:
        reports: how many usage reports it is made of; of two, the one with more is the later.
        usage: their sum; None where nothing was reported.
        inputs: the input tokens of each report, the last 64.
        responses: the response ids seen, the last 64.
        cost: in units of 10**-12 of the currency, so that sums are exact; None where unpriced.
        currency: of the cost.
        price_version: which price table it was taken from.
        nested: it holds guarded executions, so that reporting nothing itself is no gap.

    """

    reports: int = 0
    usage: Usage | None = None
    inputs: tuple[int, ...] = ()
    responses: tuple[str, ...] = ()
    cost: int | None = None
    currency: str | None = None
    price_version: str | None = None
    nested: bool = False

    @property
    def price(self) -> Decimal | None:
        """The cost in units of its currency; None: unpriced."""
        return None if self.cost is None else Decimal(self.cost).scaleb(-COST_DIGITS)


NOTHING = Spent()
REMEMBERED = 64


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def total(usages: Iterable[Usage]) -> Usage | None:
    """The sum of several usages: each field over those that know it; None of none."""
    all_ = list(usages)
    if not all_:
        return None
    counts = {name: _sum(getattr(usage, name) for usage in all_) for name in TOKENS}
    names = {
        name: next((v for usage in reversed(all_) if (v := getattr(usage, name)) is not None), None)
        for name in ("model", "provider")
    }
    return Usage(**counts, **names)  # type: ignore[arg-type]


def normal(source: object = None, /, **given: Any) -> Usage:
    """One usage report in the normal form.

    Args:
        source: a `Usage`, a mapping with fields of `Usage`, or None.
        given: fields of `Usage`; they outrank the source's.

    Raises:
        ValueError: there is no usage in it that could be read.

    """
    names = {field.name for field in fields(Usage)}
    if unknown := given.keys() - names:
        raise ValueError(f"no field of Usage: {', '.join(sorted(unknown))}")
    if isinstance(source, Usage):
        return replace(source, **given)
    found: dict[str, Any] = {}
    if isinstance(source, Mapping):
        found = {str(name): source[name] for name in source if name in names}
    if not found and not given:
        raise ValueError(f"no usage found in {type(source).__name__}")
    return Usage(**{**found, **given})


class Meter:
    """Adds up what one execution reports; safe to use from several threads.

    Args:
        price: what a usage costs, in units of 10**-12; None where nothing is priced.
        currency: of that.

    """

    __slots__ = (
        "_cost",
        "_currency",
        "_inputs",
        "_lock",
        "_price",
        "_reports",
        "_responses",
        "_sum",
        "nested",
    )

    def __init__(
        self, price: Callable[[Usage], int | None] | None = None, currency: str | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._price = price
        self._currency = currency
        self._cost: int | None = None
        self._reports = 0
        self._sum: Usage | None = None
        self._inputs: list[int] = []
        self._responses: dict[str, None] = {}
        self.nested = False

    def add(self, usage: Usage) -> None:
        """Count one report; a response id that was seen before counts no second time."""
        with self._lock:
            if usage.response_id is not None:
                if usage.response_id in self._responses:
                    return
                self._responses[usage.response_id] = None
            self._reports += 1
            self._sum = usage if self._sum is None else total((self._sum, usage))
            cost = None if self._price is None else self._price(usage)
            if cost is not None:
                self._cost = cost + (self._cost or 0)
            if usage.input_tokens is not None:
                self._inputs.append(usage.input_tokens)

    def spent(self) -> Spent:
        """The sum so far."""
        with self._lock:
            if not self._reports:
                return Spent(nested=True) if self.nested else NOTHING
            return Spent(
                reports=self._reports,
                usage=self._sum,
                inputs=tuple(self._inputs[-REMEMBERED:]),
                responses=tuple(self._responses)[-REMEMBERED:],
                cost=self._cost,
                currency=None if self._cost is None else self._currency,
                nested=self.nested,
            )

"""Tokens: one normal form, whoever provided the model.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

COST_DIGITS = 12  # costs are whole numbers of 10**-12 units of currency, so that sums are exact


def money(units: int) -> Decimal:
    """An amount in units of its currency, exactly, whatever the decimal context rounds to."""
    whole, part = divmod(abs(units), 10**COST_DIGITS)
    text = f"{whole}.{part:0{COST_DIGITS}}".rstrip("0").rstrip(".")  # 2, not 2.000000000000
    return Decimal(f"-{text}" if units < 0 else text)


MOST = 2**62  # tokens of one report: stores add such counts up to 2**63
_TEXTS = ("model", "provider", "response_id")
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
                isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST
            ):
                raise ValueError(
                    f"{name} must be a whole number of tokens, from 0 to 2**62, not {count!r}"
                )
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and (type(value) is not str or not value.isascii()):
                object.__setattr__(self, name, _text(name, value))

    @property
    def total_tokens(self) -> int | None:
        """Input and output; None where both are unknown."""
        return _sum((self.input_tokens, self.output_tokens))


def _text(name: str, value: object) -> str:
    """A name as any store can keep it."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool) or not isinstance(value, (str, int, UUID)):
        raise ValueError(f"{name} must be a text, not {value!r}")  # noqa: TRY004 - as of the rest
    return str(value).encode(errors="replace").decode()


class Cost(NamedTuple):
    """What one report costs, in units of 10**-12 of the currency.

    Attributes:
        units: all of it.
        parts: of it what came in uncached, what was read from a cache, and what was written to
            one; the rest is what came out.
        version: which price table it was taken from; None where it was no table with one.

    """

    units: int
    parts: tuple[int, int, int]
    version: str | None = None


Price: TypeAlias = "Callable[[Usage], Cost | None]"


class Spent(NamedTuple):
    """What an execution has spent so far, as its ledger line keeps it.

    Attributes:
        reports: how often it was told something; of two, the one with more is the later.
        usage: the sum of what was reported; None where nothing was.
        inputs: the input tokens of each report, the last 64.
        responses: the response ids seen, also by guarded calls inside; the last 64.
        cost: in units of 10**-12 of the currency, so that sums are exact; None where unpriced.
        currency: of the cost.
        price_version: which price table it was taken from.
        nested: it holds guarded calls, so that reporting nothing itself is no gap.
        parts: of the cost, as `Cost` has them; None where there is none.
        inner: input tokens, output tokens and cost (units) of the guarded executions inside, at
            all depths, that have ended; None where there were none.
        unpriced: the reports that have no price.

    """

    reports: int = 0
    usage: Usage | None = None
    inputs: tuple[int, ...] = ()
    responses: tuple[str, ...] = ()
    cost: int | None = None
    currency: str | None = None
    price_version: str | None = None
    nested: bool = False
    parts: tuple[int, int, int] | None = None
    inner: tuple[int, int, int] | None = None
    unpriced: int = 0

    @property
    def price(self) -> Decimal | None:
        """The cost in units of its currency; None: unpriced."""
        return None if self.cost is None else money(self.cost)


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


_NAMES = frozenset(field.name for field in fields(Usage))
_OWN = _NAMES | {"total_tokens"}


def normal(source: object = None, /, **given: Any) -> Usage:
    """One usage report in the normal form.

    Args:
        source: a `Usage`, a mapping with fields of `Usage`, or None.
        given: fields of `Usage`; they outrank the source's.

    Raises:
        ValueError: there is no usage in it that could be read.

    """
    if unknown := given.keys() - _NAMES:
        raise ValueError(f"no field of Usage: {', '.join(sorted(unknown))}")
    if isinstance(source, Usage):
        return replace(source, **given)
    found: dict[str, Any] = {}
    if isinstance(source, Mapping):
        found = {str(name): source[name] for name in source if name in _NAMES}
    if not found and not given:
        raise ValueError(f"no usage found in {type(source).__name__}")
    return Usage(**{**found, **given})


def is_own(source: object) -> bool:
    """Whether it is a mapping with fields of `Usage` and no others."""
    return isinstance(source, Mapping) and bool(source) and _OWN.issuperset(source)


def merged(earlier: Usage, later: Usage) -> Usage:
    """Two snapshots of one response: the latest value per field wins."""
    known = {name: value for name in Usage.__slots__ if (value := getattr(later, name)) is not None}
    return replace(earlier, **known)


def _beyond(usage: Usage, told: Iterable[Usage]) -> Usage | None:
    """What of a total was not told yet; None where that is nothing."""
    known = total(told)
    if known is None:
        return usage
    left: dict[str, Any] = {
        name: max(0, count - (getattr(known, name) or 0))
        for name in TOKENS
        if (count := getattr(usage, name)) is not None
    }
    return replace(usage, **left) if any(left.values()) else None


def _size(usage: Usage) -> tuple[int | None, int | None]:
    return usage.input_tokens, usage.output_tokens


_ELSEWHERE = object()  # in place of the key of a response that a guarded call inside has told


@dataclass(slots=True)
class _Report:
    usage: Usage
    cost: Cost | None
    place: int | None  # among the inputs


class Meter:
    """Adds up what one execution reports; safe to use from several threads.

    Args:
        price: what a usage costs; None where nothing is priced.
        currency: of that.

    """

    __slots__ = (
        "_bare",
        "_cost",
        "_currency",
        "_elsewhere",
        "_inner",
        "_inputs",
        "_lock",
        "_names",
        "_open",
        "_parts",
        "_price",
        "_priced",
        "_reports",
        "_reused",
        "_sum",
        "_told",
        "_totals",
        "_unpriced",
        "_version",
        "nested",
    )

    def __init__(self, price: Price | None = None, currency: str | None = None) -> None:
        self._lock = threading.RLock()  # a signal handler, or a finaliser, may come in between
        self._price = price
        self._currency = currency
        self._told = 0
        self._reports: dict[object, _Report] = {}
        self._open: dict[object, object] = {}  # by who reads a stream, its key among the reports
        self._names: dict[object, Usage] = {}  # what parts of streams told beside numbers
        self._bare: dict[tuple[int | None, int | None], list[object]] = {}  # without an id
        self._sum: Usage | None = None
        self._cost: int | None = None
        self._parts = [0, 0, 0]
        self._version: str | None = None
        self._unpriced = 0
        self._priced = 0  # reports
        self._inputs: list[int] = []
        self._inner: Spent | None = None  # of the guarded executions inside
        self._reused: list[Usage] = []  # of the executions whose results were reused inside
        self._elsewhere: set[str] = set()  # the responses that are theirs
        self._totals: set[str] = set()  # the responses of which only a difference is counted
        self.nested = False

    def add(
        self,
        usage: Usage,
        *,
        stream: bool = False,
        adds: bool = False,
        opens: bool = False,
        closes: bool = False,
        aggregate: bool = False,
        returned: bool = False,
        reader: object = None,
    ) -> None:
        """Count one report; a response id that was seen before counts no second time.

        Args:
            usage: the report.
            stream: a part of a streamed response: the latest value per field wins.
            adds: such a part, whose numbers add to those of the parts before.
            opens: what comes without an id from this reader is of the same response from now on.
            closes: no longer.
            aggregate: a total that may repeat what was reported before, here or by guarded calls
                inside: only the difference counts.
            returned: it was read off what the body returned or yielded, and may have been
                reported before without its id.
            reader: tells streams apart that are read at the same time.

        """
        with self._lock:
            name = usage.response_id
            if name is not None and name in self._elsewhere:
                if stream and opens:
                    self._open[reader] = _ELSEWHERE  # what follows without an id is theirs, too
                return
            if name is None and stream and self._open.get(reader) is _ELSEWHERE:
                if closes:
                    del self._open[reader]
                return
            if returned and name not in self._reports and self._was_told(usage):
                return
            if name in self._totals or (aggregate and (name is None or name not in self._reports)):
                left = self._left(usage)
                if left is None:
                    return
                usage, stream = left, False
            key: object = name
            if key is None:
                key = self._open.get(reader) if stream else None
                if key is None or (not adds and self._shrinks(key, usage)):
                    key = object()
            if stream and (opens or name is None):
                self._open[reader] = key
            if closes:
                self._open.pop(reader, None)
            names = self._names.pop(key, None)
            if names is not None:
                usage = merged(names, usage)
            if stream and all(getattr(usage, name) is None for name in TOKENS):
                if key in self._reports:  # its model, say, comes last
                    self._put(key, usage, adds=False)
                elif not closes:
                    self._names[key] = usage
                return
            if name is None and not (stream or aggregate or returned):
                self._bare.setdefault(_size(usage), []).append(key)
            self._put(key, usage, adds=adds)

    def _was_told(self, usage: Usage) -> bool:
        """Whether it is of a response that was told without its id: from now on with it."""
        told = None if usage.input_tokens is None else self._bare.get(_size(usage))
        if not told:
            return False
        key = told.pop()
        if usage.response_id is not None:
            self._reports[usage.response_id] = self._reports.pop(key)
            key = usage.response_id
        self._put(key, usage, adds=False)
        return True

    def _left(self, usage: Usage) -> Usage | None:
        """What of a total is to be counted."""
        name = usage.response_id
        if name in self._totals:  # told anew: what was counted of it is counted no more
            self._totals.discard(name)
            self._take_out(name)
        left = None
        if not any(_size(usage) == _size(reused) for reused in self._reused):
            inner = [] if self._inner is None or self._inner.usage is None else [self._inner.usage]
            left = _beyond(usage, [*(report.usage for report in self._reports.values()), *inner])
        if name is not None:
            (self._elsewhere if left is None else self._totals).add(name)
        return left

    def _take_out(self, key: object) -> None:
        """Count a report no more."""
        taken = self._reports.pop(key, None)
        if taken is None:
            return
        reports = list(self._reports.values())
        self._told += 1
        self._sum = total(report.usage for report in reports)
        self._take_back(taken)
        if not self._priced:
            self._cost = None
        if taken.place is not None:
            del self._inputs[taken.place]
            for report in reports:
                if report.place is not None and report.place > taken.place:
                    report.place -= 1

    def _shrinks(self, key: object, usage: Usage) -> bool:
        """Whether it is the first of another response: snapshots of one only grow."""
        if isinstance(key, str) or key not in self._reports:
            return False
        before = self._reports[key].usage
        return any(
            (count := getattr(usage, name)) is not None and count < (getattr(before, name) or 0)
            for name in TOKENS
        )

    def _put(self, key: object, usage: Usage, *, adds: bool) -> None:
        before = self._reports.get(key)
        if before is not None:
            usage = _added(before.usage, usage) if adds else merged(before.usage, usage)
            if usage == before.usage:
                return
        self._told += 1
        cost = None if self._price is None else self._price(usage)
        report = _Report(usage, cost, None if before is None else before.place)
        self._reports[key] = report
        if usage.input_tokens is not None:
            if report.place is None:
                report.place = len(self._inputs)
                self._inputs.append(usage.input_tokens)
            else:
                self._inputs[report.place] = usage.input_tokens
        if before is not None:
            self._take_back(before)
        self._sum = usage if self._sum is None else _plus(self._sum, usage, before)
        if cost is None:
            self._unpriced += 1
            if not self._priced:
                self._cost = None
            return
        self._priced += 1
        self._cost = cost.units + (self._cost or 0)
        self._parts = [one + other for one, other in zip(self._parts, cost.parts, strict=True)]
        self._version = cost.version or self._version

    def _take_back(self, before: _Report) -> None:
        if before.cost is None:
            self._unpriced -= 1
            return
        assert self._cost is not None
        self._priced -= 1
        self._cost -= before.cost.units
        parts = zip(self._parts, before.cost.parts, strict=True)
        self._parts = [one - other for one, other in parts]

    def inside(self, spent: Spent, *, reused: bool, meter: Meter | None = None) -> None:
        """A guarded call inside has come to its end.

        Args:
            spent: by its execution.
            reused: its result was there before, so that nobody was charged.
            meter: of that execution, where it was executed in this process.

        """
        theirs, handed = set(spent.responses), list[Usage]()
        if meter is not None:
            with meter._lock:  # noqa: SLF001 - of the same kind
                theirs |= {name for name in meter._reports if isinstance(name, str)}  # noqa: SLF001
                theirs |= meter._elsewhere  # noqa: SLF001
                handed = list(meter._reused)  # noqa: SLF001
        both = [usage for usage in (spent.usage, _inner_usage(spent)) if usage is not None]
        with self._lock:
            self._elsewhere |= theirs
            self._reused += handed
            self.nested = True  # what was reused tells no less than what was executed
            if reused:
                self._reused += both
                return
            for name in theirs:  # what was handed on to it, and told by it, too, is told once
                self._take_out(name)
            if not both and not spent.inner:
                return
            self._told += 1
            before = self._inner or NOTHING
            usage = total([*both, *([] if before.usage is None else [before.usage])])
            cost = (before.cost or 0) + (spent.cost or 0) + (spent.inner[2] if spent.inner else 0)
            self._inner = Spent(usage=usage, cost=cost)

    def spent(self) -> Spent:
        """The sum so far."""
        with self._lock:
            if not self._told:
                seen = tuple(self._elsewhere)[-REMEMBERED:]
                return Spent(nested=self.nested, responses=seen) if self.nested or seen else NOTHING
            names = [*self._elsewhere, *(n for n in self._reports if isinstance(n, str))]
            return Spent(
                reports=self._told,
                usage=self._sum,
                inputs=tuple(self._inputs[-REMEMBERED:]),
                responses=tuple(names[-REMEMBERED:]),
                cost=self._cost,
                currency=None if self._cost is None else self._currency,
                price_version=None if self._cost is None else self._version,
                nested=self.nested,
                parts=None if self._cost is None else _three(self._parts),
                inner=None if self._inner is None else _sums(self._inner),
                unpriced=self._unpriced,
            )


def _three(numbers: Iterable[int]) -> tuple[int, int, int]:
    one, two, three = numbers
    return one, two, three


def _sums(inner: Spent) -> tuple[int, int, int]:
    usage = inner.usage or Usage()
    return usage.input_tokens or 0, usage.output_tokens or 0, inner.cost or 0


def _inner_usage(spent: Spent) -> Usage | None:
    if spent.inner is None:
        return None
    return Usage(input_tokens=spent.inner[0], output_tokens=spent.inner[1])


def _added(one: Usage, other: Usage) -> Usage:
    """The sum of two parts of one response."""
    both = total((one, other))
    assert both is not None
    return replace(both, response_id=one.response_id or other.response_id)


def _plus(sum_: Usage, usage: Usage, before: _Report | None) -> Usage:
    """A sum with one report more, or with another in its place."""
    counts: dict[str, Any] = {}
    for name in TOKENS:
        old = None if before is None else getattr(before.usage, name)
        known, count = getattr(sum_, name), getattr(usage, name)
        if count is not None:
            counts[name] = (known or 0) + count - (old or 0)
    return replace(
        sum_,
        **counts,
        model=usage.model or sum_.model,
        provider=usage.provider or sum_.provider,
        response_id=sum_.response_id if before is not None else None,
    )

"""Money: what tokens cost, in exact decimals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

from idemguard import log
from idemguard.errors import ConfigurationError
from idemguard.usage import COST_DIGITS, Usage

Price: TypeAlias = Callable[[Usage], "int | None"]
Pricer: TypeAlias = Callable[[Usage], "Decimal | None"] | Mapping[str, Mapping[str, Any]]

CURRENCY = "USD"
_MILLION = Decimal(1_000_000)
_PARTS = ("input", "output", "cache_read", "cache_write")


def price_by(pricer: Pricer | None) -> Price | None:
    """How usage is priced, in units of 10**-12 of the currency; None: not at all.

    Args:
        pricer: a plain function `Usage -> Decimal | None`, or a mapping from model to dollars
            per million tokens: `{"input": "3", "output": "15", "cache_read": "0.3",
            "cache_write": "3.75"}`. Without a price of their own, cache reads and writes cost
            what input costs.

    Raises:
        ConfigurationError: it is neither, or a price is no number.

    """
    if pricer is None:
        return None
    if isinstance(pricer, Mapping):
        table = {model: _prices(model, prices) for model, prices in pricer.items()}
        return lambda usage: _from_table(table, usage)
    if callable(pricer):
        return lambda usage: _from_function(pricer, usage)
    raise ConfigurationError(
        "pricer= takes a function of a Usage, or a mapping from model to prices, "
        f"not {type(pricer).__name__}"
    )


def _prices(model: str, prices: Mapping[str, Any]) -> dict[str, Decimal]:
    if not isinstance(prices, Mapping) or "input" not in prices or "output" not in prices:
        raise ConfigurationError(f"pricer={{{model!r}: ...}} needs at least `input` and `output`")
    if unknown := prices.keys() - set(_PARTS):
        raise ConfigurationError(f"pricer={{{model!r}: ...}}: no such price: {sorted(unknown)}")
    found = {}
    for part, price in prices.items():
        try:
            amount = Decimal(str(price))
        except InvalidOperation:
            amount = Decimal("NaN")
        if not amount.is_finite() or amount < 0:
            raise ConfigurationError(f"pricer={{{model!r}: ...}}: {part} is no price: {price!r}")
        found[part] = amount
    return found


def _from_table(table: Mapping[str, Mapping[str, Decimal]], usage: Usage) -> int | None:
    prices = table.get(usage.model or "")
    if prices is None or usage.input_tokens is None or usage.output_tokens is None:
        return None
    read, written = usage.cache_read_tokens or 0, usage.cache_write_tokens or 0
    amount = (
        (usage.input_tokens - read - written) * prices["input"]
        + read * prices.get("cache_read", prices["input"])
        + written * prices.get("cache_write", prices["input"])
        + usage.output_tokens * prices["output"]
    )
    return _units(amount / _MILLION)


def _from_function(pricer: Callable[[Usage], Decimal | None], usage: Usage) -> int | None:
    try:
        amount = pricer(usage)
        return None if amount is None else _units(Decimal(str(amount)))
    except Exception as error:  # noqa: BLE001 - a price must not cost the result
        log.warn("pricer", "pricer failed on model %s: %r", usage.model, error)
        return None


def _units(amount: Decimal) -> int:
    return int(amount.scaleb(COST_DIGITS).to_integral_value())

"""Money: what tokens cost, in exact decimals.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from idemguard import log
from idemguard.errors import ConfigurationError
from idemguard.usage import COST_DIGITS, Cost, Price, Usage

if TYPE_CHECKING:
    from types import ModuleType

Pricer: TypeAlias = "Callable[[Usage], Decimal | None] | Mapping[str, Mapping[str, Any]] | str"

CURRENCY = "USD"
MOST = 2**60  # units of one report, a million dollars: stores add up to 2**63
TABLE = "genai-prices"
_MILLION = 1_000_000
_UNITS: int = 10**COST_DIGITS
_PARTS = ("input", "output", "cache_read", "cache_write")


def price_by(pricer: Pricer | None) -> Price | None:
    """How usage is priced; None: not at all.

    Args:
        pricer: a plain function `Usage -> Decimal | None`; or a mapping from model to dollars
            per million tokens: `{"input": "3", "output": "15", "cache_read": "0.3",
            "cache_write": "3.75"}`, where cache reads and writes without a price of their own
            cost what input costs; or `"genai-prices"`, the table of the package of that name
            (the `pricing` extra), as it was installed: nothing is fetched.

    Raises:
        ConfigurationError: it is none of these, a price is no number, or the package is missing.

    """
    if pricer is None:
        return None
    if isinstance(pricer, str):
        if pricer != TABLE:
            raise ConfigurationError(
                f"pricer={pricer!r}: the only table that is known by name is {TABLE!r}; "
                "else give a function of a Usage, or a mapping from model to prices"
            )
        _installed()
        return _from_package
    if isinstance(pricer, Mapping):
        table = {model: _prices(model, prices) for model, prices in pricer.items()}
        return functools.partial(_from_table, table)
    if callable(pricer):
        return functools.partial(_from_function, pricer)
    raise ConfigurationError(
        "pricer= takes a function of a Usage, a mapping from model to prices, or "
        f"{TABLE!r}, not {type(pricer).__name__}"
    )


# --- a mapping ---------------------------------------------------------------------------------------


class _Prices(NamedTuple):
    """What a token costs, by its kind: whole numbers of a share of a unit."""

    input: int
    output: int
    cache_read: int
    cache_write: int
    shares: int  # that make a unit; 1 unless prices have more than six decimals


def _prices(model: str, prices: Mapping[str, Any]) -> _Prices:
    if not isinstance(prices, Mapping) or "input" not in prices or "output" not in prices:
        raise ConfigurationError(f"pricer={{{model!r}: ...}} needs at least `input` and `output`")
    if unknown := prices.keys() - set(_PARTS):
        raise ConfigurationError(f"pricer={{{model!r}: ...}}: no such price: {sorted(unknown)}")
    found = {}
    for part, price in prices.items():
        try:
            amount = _exact(price) * _UNITS / _MILLION
        except (ArithmeticError, ValueError):
            amount = Fraction(-1)
        if amount < 0:
            raise ConfigurationError(f"pricer={{{model!r}: ...}}: {part} is no price: {price!r}")
        found[part] = amount
    shares = lcm(*(amount.denominator for amount in found.values()))
    plain, out, read, written = (int(found.get(p, found["input"]) * shares) for p in _PARTS)
    return _Prices(plain, out, read, written, shares)


def _from_table(table: Mapping[str, _Prices], usage: Usage) -> Cost | None:
    prices = table.get(usage.model or "")
    if prices is None or usage.input_tokens is None or usage.output_tokens is None:
        return None
    read, written = usage.cache_read_tokens or 0, usage.cache_write_tokens or 0
    plain = max(0, usage.input_tokens - read - written) * prices.input
    from_cache, to_cache = read * prices.cache_read, written * prices.cache_write
    amount = plain + from_cache + to_cache + usage.output_tokens * prices.output
    if prices.shares == 1:
        return Cost(amount, (plain, from_cache, to_cache))
    whole, one, two, three = (
        round(Fraction(part, prices.shares)) for part in (amount, plain, from_cache, to_cache)
    )
    return Cost(whole, (one, two, three))


# --- a function --------------------------------------------------------------------------------------


def _from_function(pricer: Callable[[Usage], Decimal | None], usage: Usage) -> Cost | None:
    try:
        amount = pricer(usage)
        if amount is None:
            return None
        units = _units(_exact(amount))
        if units < 0:
            raise ValueError(f"a price below zero: {amount}")  # noqa: TRY301 - told below
        return Cost(units, _parts(pricer, usage, units))
    except Exception as error:  # noqa: BLE001 - a price must not cost the result
        log.warn("pricer", "pricer failed on model %s: %s", usage.model, log.words(error))
        return None


def _parts(
    pricer: Callable[[Usage], Decimal | None], usage: Usage, units: int
) -> tuple[int, int, int]:
    """What of a price is for what, by asking for each kind of token alone."""
    read, written = usage.cache_read_tokens or 0, usage.cache_write_tokens or 0
    bare = replace(
        usage, input_tokens=0, output_tokens=0, cache_read_tokens=None, cache_write_tokens=None,
        reasoning_tokens=None,
    )  # fmt: skip
    alone = [
        replace(bare, input_tokens=read, cache_read_tokens=read) if read else None,
        replace(bare, input_tokens=written, cache_write_tokens=written) if written else None,
        replace(
            bare, output_tokens=usage.output_tokens, reasoning_tokens=usage.reasoning_tokens
        ) if usage.output_tokens else None,
    ]  # fmt: skip
    try:
        amounts = [0 if one is None else pricer(one) for one in alone]
        from_cache, to_cache, out = (_units(_exact(amount)) for amount in amounts)
    except Exception:  # noqa: BLE001 - it prices whole reports alone: then all is for the input
        return units, 0, 0
    return units - from_cache - to_cache - out, from_cache, to_cache


# --- a package's table -------------------------------------------------------------------------------


def _installed() -> None:
    from importlib.util import find_spec  # noqa: PLC0415 - seldom asked

    if find_spec("genai_prices") is None:
        raise ConfigurationError(
            f'pricer="{TABLE}" needs a package that is not installed: '
            "pip install 'idemguard[pricing]'"
        )


@functools.cache
def _package() -> tuple[ModuleType, str]:
    from importlib.metadata import version  # noqa: PLC0415 - as above

    import genai_prices  # noqa: PLC0415 - heavy: its table loads with the first price

    return genai_prices, f"{TABLE} {version(TABLE)}"


# what OpenTelemetry calls providers, where the table calls them otherwise
_PROVIDERS = {
    "aws.bedrock": "aws",
    "azure.ai.openai": "azure",
    "azure.ai.inference": "azure",
    "gcp.gemini": "google",
    "gcp.gen_ai": "google",
    "gcp.vertex_ai": "google",
    "mistral_ai": "mistral",
    "x_ai": "x-ai",
    "google_genai": "google",
    "google_vertexai": "google",
    "bedrock": "aws",
    "bedrock_converse": "aws",
}


def _from_package(usage: Usage) -> Cost | None:
    if usage.model is None or usage.input_tokens is None or usage.output_tokens is None:
        return None
    try:
        package, version = _package()
        return _priced(package, version, usage)
    except Exception as error:  # noqa: BLE001 - a price must not cost the result
        log.warn("pricer", "%s failed on model %s: %s", TABLE, usage.model, log.words(error))
        return None


def _priced(package: ModuleType, version: str, usage: Usage) -> Cost | None:
    provider = _PROVIDERS.get(usage.provider or "", usage.provider)
    for one in dict.fromkeys((provider, None)):  # the table may know the model alone
        try:
            found = _asked(package, usage, one)
            whole = found(usage)
        except LookupError:
            continue
        units = _units(Fraction(whole))
        return Cost(units, _parts(found, usage, units), version)
    return None


def _asked(package: ModuleType, usage: Usage, provider: str | None) -> Callable[[Usage], Decimal]:
    def price(one: Usage) -> Decimal:
        tokens = package.Usage(
            input_tokens=one.input_tokens,
            output_tokens=one.output_tokens,
            cache_read_tokens=one.cache_read_tokens,
            cache_write_tokens=one.cache_write_tokens,
        )
        found = package.calc_price(tokens, usage.model, provider_id=provider)
        return Decimal(found.total_price)

    return price


def _exact(amount: object) -> Fraction:
    """A number as it is written; the user's decimal context rounds nothing."""
    return Fraction(Decimal(str(amount)))


def _units(amount: Fraction) -> int:
    units = round(amount * _UNITS)
    if abs(units) > MOST:
        raise ValueError(f"no report costs {float(amount):g}")
    return units

"""What tokens cost: exact, known, or unknown, but never made up."""

from __future__ import annotations

import subprocess
import sys
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from importlib.metadata import version

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemguard import Guard, agent, configure, errors, idempotent, record_usage
from idemguard.ledger import ExecutionLedger
from idemguard.pricing import price_by
from idemguard.usage import COST_DIGITS, Usage

SONNET = {"input": "3", "output": "15", "cache_read": "0.3", "cache_write": "3.75"}
PRICES = {"sonnet": SONNET, "plain": {"input": 2, "output": 8.0}}
TABLE = "genai-prices"
KNOWN = "claude-sonnet-4-20250514"  # its prices are those of SONNET

# a process in which the package cannot be found, though it is installed
BLOCKED = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "genai_prices":
            raise ModuleNotFoundError(name)

import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: (
    None if name == "genai_prices" else found(name, *rest)
)
sys.meta_path.insert(0, Blocker())
"""


def use(input_tokens, output_tokens=0, model="sonnet", **more) -> Usage:
    return Usage(input_tokens=input_tokens, output_tokens=output_tokens, model=model, **more)


def dollars(cost) -> Decimal:
    return Decimal(cost.units).scaleb(-COST_DIGITS)


def price(pricer, usage: Usage) -> Decimal | None:
    """What it costs; checked to be of parts that are not more than the whole."""
    cost = price_by(pricer)(usage)
    if cost is None:
        return None
    assert all(part >= 0 for part in cost.parts)
    assert sum(cost.parts) <= cost.units
    return dollars(cost)


# --- a mapping -----------------------------------------------------------------------------------------


def test_a_cached_request_is_priced_by_the_kind_of_its_tokens():
    usage = use(12307, 550, cache_read_tokens=0, cache_write_tokens=12304)
    assert price(PRICES, usage) == Decimal("0.054399")
    assert round(price(PRICES, usage), 4) == Decimal("0.0544")
    cost = price_by(PRICES)(usage)
    assert cost.parts == (9_000_000, 0, 46_140_000_000)
    assert cost.units - sum(cost.parts) == 8_250_000_000


def test_reading_from_the_cache_is_cheaper():
    assert price(PRICES, use(1000, cache_read_tokens=1000)) == Decimal("0.0003")
    assert price(PRICES, use(1000, cache_read_tokens=400)) == Decimal("0.00192")


def test_without_a_price_of_its_own_the_cache_costs_what_input_does():
    usage = use(1000, 100, "plain", cache_read_tokens=300, cache_write_tokens=200)
    assert price(PRICES, usage) == Decimal("0.0028")
    assert price_by(PRICES)(usage).parts == (10**9, 6 * 10**8, 4 * 10**8)


def test_reasoning_is_part_of_the_output():
    assert price(PRICES, use(0, 100, reasoning_tokens=90)) == price(PRICES, use(0, 100))


def test_prices_are_text_or_numbers():
    for three in ("3", 3, 3.0, Decimal(3), "3.00", "3e0"):
        assert price({"m": {"input": three, "output": "0"}}, use(1000, 9, "m")) == Decimal("0.003")
    assert price({"m": {"input": 0.1, "output": 0}}, use(3, 0, "m")) == Decimal("0.0000003")
    assert price({"m": {"input": 0, "output": 0}}, use(3, 3, "m")) == 0


@pytest.mark.parametrize(
    "usage",
    [use(1, 1, "unheard of"), use(1, 1, None), use(None, 1), use(1, None), use(1, 1, "Sonnet")],
)
def test_what_is_not_known_has_no_price(usage):
    assert price(PRICES, usage) is None


@pytest.mark.parametrize(
    ("prices", "named"),
    [
        ({"m": {"input": "3"}}, "output"),
        ({"m": {"output": "3"}}, "input"),
        ({"m": "3"}, "'m'"),
        ({"m": None}, "'m'"),
        ({"m": {**SONNET, "reasoning": "3"}}, "reasoning"),
        ({"m": {"input": "three", "output": "3"}}, "three"),
        ({"m": {"input": "-1", "output": "3"}}, "-1"),
        ({"m": {"input": "NaN", "output": "3"}}, "NaN"),
        ({"m": {"input": float("inf"), "output": "3"}}, "inf"),
        ({"m": {"input": True, "output": "3"}}, "True"),
        ({"m": {"input": None, "output": "3"}}, "None"),
        ("openai-prices", "openai-prices"),
        (5, "int"),
        (["m"], "list"),
    ],
)
def test_a_pricer_that_is_none_is_an_error_where_it_is_given(prices, named):
    with pytest.raises(errors.ConfigurationError, match="pricer=") as caught:
        Guard(store="memory://", pricer=prices)
    assert named in str(caught.value)


tokens = st.integers(0, 10**9)


@given(input_=tokens, output=tokens, read=tokens, written=tokens, prec=st.integers(1, 40))
def test_a_price_is_the_exact_sum(input_, output, read, written, prec):
    usage = use(input_ + read + written, output, cache_read_tokens=read, cache_write_tokens=written)
    exact = sum(
        count * Fraction(SONNET[kind]) / 10**6
        for kind, count in (
            ("input", input_), ("output", output), ("cache_read", read), ("cache_write", written),
        )
    )  # fmt: skip
    with localcontext(Context(prec=prec)):
        cost = price_by(PRICES)(usage)
    assert Fraction(cost.units, 10**COST_DIGITS) == exact
    assert cost.units - sum(cost.parts) == output * 15 * 10**6


def test_a_price_of_many_decimals_is_rounded_once():
    third = {"m": {"input": "0.00000033", "output": "1"}}
    assert price(third, use(1, 0, "m")) == 0
    assert price(third, use(1000, 1, "m")) == Decimal("0.00000100033")
    assert price(third, use(3, 0, "m")) == Decimal("0.000000000001")


def test_a_cache_that_is_larger_than_the_input_makes_nothing_negative():
    assert price(PRICES, use(5, cache_read_tokens=1000)) == Decimal("0.0003")


# --- a function ----------------------------------------------------------------------------------------


def by_hand(usage: Usage) -> Decimal:
    """As a user would write it, for all that is asked."""
    read, written = usage.cache_read_tokens or 0, usage.cache_write_tokens or 0
    plain = usage.input_tokens - read - written
    return (
        plain * Decimal(3)
        + read * Decimal("0.3")
        + written * Decimal("3.75")
        + usage.output_tokens * Decimal(15)
    ) / 1_000_000


@given(input_=tokens, output=tokens, read=tokens, written=tokens)
def test_a_function_says_what_a_table_does_and_of_which_parts(input_, output, read, written):
    usage = use(input_ + read + written, output, cache_read_tokens=read, cache_write_tokens=written)
    assert price_by(by_hand)(usage) == price_by(PRICES)(usage)


def test_a_function_may_price_whole_reports_alone():
    cost = price_by(lambda usage: Decimal("0.01") if usage.input_tokens == 7 else None)(use(7, 5))
    assert (dollars(cost), cost.parts) == (Decimal("0.01"), (10**10, 0, 0))
    flat = price_by(lambda _: Decimal("0.01"))(use(7))
    assert (dollars(flat), sum(flat.parts)) == (Decimal("0.01"), 10**10)


@pytest.mark.parametrize("amount", [0.1, "0.10", Decimal("0.1"), Decimal("0.100")])
def test_what_a_function_gives_is_taken_as_it_is_written(amount):
    assert price(lambda _: amount, use(1)) == Decimal("0.1")


@pytest.mark.parametrize(
    "amount", [None, "free", float("nan"), float("inf"), Decimal(-1), True, object()]
)
def test_what_is_no_amount_is_unpriced(amount):
    assert price_by(lambda _: amount)(use(1)) is None


def test_a_function_that_fails_costs_no_result(guard_of, warned):
    def broken(usage):
        raise RuntimeError("no table")

    @guard_of(pricer=broken).idempotent(task_type="t")
    def task(n):
        record_usage(input_tokens=5, output_tokens=5, model="m")
        return n

    assert task(1) == 1
    assert any("pricer failed on model m" in message for message in warned())


# --- the package ---------------------------------------------------------------------------------------


def test_the_package_prices_what_it_knows():
    usage = use(12307, 550, KNOWN, cache_read_tokens=0, cache_write_tokens=12304)
    cost = price_by(TABLE)(usage)
    assert round(dollars(cost), 4) == Decimal("0.0544")
    assert cost.version == f"{TABLE} {version(TABLE)}"
    assert cost.parts == (9_000_000, 0, 46_140_000_000)


@pytest.mark.parametrize("provider", ["anthropic", "aws.bedrock", "nobody", None])
def test_a_model_that_is_known_has_a_price_whoever_runs_it(provider):
    assert price(TABLE, use(1000, 10, KNOWN, provider=provider)) == Decimal("0.00315")


@pytest.mark.parametrize(
    "usage", [use(1, 1, "unheard of"), use(1, 1, None), use(None, 1, KNOWN), use(1, None, KNOWN)]
)
def test_what_the_package_does_not_know_has_no_price(usage):
    assert price(TABLE, usage) is None


def test_the_environment_names_the_package(monkeypatch, store):
    monkeypatch.setenv("IDEMGUARD_PRICER", TABLE)

    @Guard(store=store).idempotent(task_type="t")
    def task(n):
        record_usage(input_tokens=1000, output_tokens=0, model=KNOWN)
        return n

    task(1)
    (line,) = ExecutionLedger(store).lines()
    assert (line.cost, line.currency) == (Decimal("0.003"), "USD")
    assert line.price_version == f"{TABLE} {version(TABLE)}"


def test_what_is_given_outranks_the_environment(monkeypatch, store):
    monkeypatch.setenv("IDEMGUARD_PRICER", TABLE)
    guard = Guard(store=store, pricer={KNOWN: {"input": "1", "output": "1"}})

    @guard.idempotent(task_type="t")
    def task(n):
        record_usage(input_tokens=1000, output_tokens=0, model=KNOWN)
        return n

    task(1)
    (line,) = guard.ledger.lines()
    assert (line.cost, line.price_version) == (Decimal("0.001"), None)


def test_an_environment_that_names_no_pricer_is_an_error(monkeypatch):
    monkeypatch.setenv("IDEMGUARD_PRICER", "prices.json")
    configure(store="memory://")

    @idempotent(task_type="t")
    def task(n):
        return n

    with pytest.raises(errors.ConfigurationError, match=r"prices\.json"):
        task(1)


def _in_a_process(code: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_without_the_package_an_error_names_the_extra():
    told = _in_a_process(
        BLOCKED
        + """
from idemguard import Guard, errors
try:
    Guard(store="memory://", pricer="genai-prices")
except errors.ConfigurationError as error:
    print(error)
"""
    )
    assert "pip install 'idemguard[pricing]'" in told


def test_the_package_is_loaded_at_the_first_price_and_asks_nobody():
    told = _in_a_process("""
import socket, sys
from idemguard import Guard, record_usage

def refuse(*args, **kwargs):
    raise AssertionError("a price is looked up offline")

socket.socket.connect = socket.getaddrinfo = refuse
guard = Guard(store="memory://", pricer="genai-prices")

@guard.idempotent(task_type="t")
def task(n):
    if n:
        record_usage(input_tokens=1000, output_tokens=0, model="claude-sonnet-4-20250514")
    return n

task(0)
print("genai_prices" in sys.modules)
task(1)
print("genai_prices" in sys.modules, guard.ledger.totals()["charged"])
guard.close()
""")
    assert told.split() == ["False", "True", "0.003"]


# --- in the ledger -------------------------------------------------------------------------------------


def test_an_unknown_model_is_counted_as_unpriced_and_never_as_nothing(guard_of):
    guard = guard_of(pricer=PRICES)

    @guard.idempotent(task_type="t")
    def task(n, model):
        record_usage(input_tokens=1000, output_tokens=0, model=model)
        return n

    task(1, "sonnet")
    task(2, "unheard of")
    task(3, None)
    known, *unknown = guard.ledger.lines()
    assert (known.cost, known.currency) == (Decimal("0.003"), "USD")
    assert [(line.cost, line.currency) for line in unknown] == [(None, None)] * 2
    summary = guard.ledger.task_type_summary("t")
    assert (summary["unpriced"], summary["charged"]) == (2, Decimal("0.003"))


def test_an_execution_of_which_a_part_has_no_price_is_counted_as_unpriced(guard_of):
    guard = guard_of(pricer=PRICES)

    @guard.idempotent(task_type="t")
    def task(n):
        record_usage(input_tokens=1000, output_tokens=0, model="sonnet")
        record_usage(input_tokens=1000, output_tokens=0, model="unheard of")
        return n

    task(1)
    summary = guard.ledger.task_type_summary("t")
    assert (summary["unpriced"], summary["charged"]) == (1, Decimal("0.003"))
    (line,) = guard.ledger.lines()
    assert line.cost == Decimal("0.003")


def test_money_of_ten_thousand_lines_is_exact(tmp_path):
    guard = Guard(store="memory://", namespace=tmp_path.name, pricer=PRICES)

    @guard.idempotent(task_type="t")
    def task(n):
        record_usage(input_tokens=n, output_tokens=1, model="sonnet", cache_read_tokens=n // 3)
        return n

    for n in range(10_000):
        with agent(f"a-{n % 7}"):
            task(n)
    expected = sum(
        (n - n // 3) * Decimal(3) + n // 3 * Decimal("0.3") + 15 for n in range(10_000)
    ) / Decimal(1_000_000)
    ledger = guard.ledger
    assert ledger.totals()["charged"] == expected
    assert sum(row["charged"] for row in ledger.agents()) == expected
    assert sum(line.cost for line in ledger.lines()) == expected
    (row,) = ledger.worker_summaries()
    assert row["charged"] == expected
    with localcontext(Context(prec=3)):
        assert ledger.totals()["charged"] == expected
        assert ledger.worker_summaries()[0]["charged"] == expected


def test_money_travels_as_it_was_stored(guard_of):
    guard = guard_of(pricer=lambda usage: Decimal(usage.input_tokens).scaleb(-COST_DIGITS))

    @guard.idempotent(task_type="t")
    def task(n):
        record_usage(input_tokens=n, output_tokens=0, model="m")
        return n

    amounts = [1, 2**53 + 1, 10**17 + 3, 999_999_999_999]
    for n in amounts:
        task(n)
    with localcontext(Context(prec=60)):
        assert [line.cost.scaleb(COST_DIGITS) for line in guard.ledger.lines()] == amounts
        assert guard.ledger.totals()["charged"].scaleb(COST_DIGITS) == sum(amounts)

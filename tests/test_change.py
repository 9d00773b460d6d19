"""Why a bill changed: the parts add up, and what did not change is nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemguard import Guard, agent, bypass, errors, record_usage
from idemguard.change import ALL, change, compared
from idemguard.record import DUPLICATES, Cause
from idemguard.stores.memory import MemoryStore
from idemguard.stores.sqlite import SqliteStore
from idemguard.usage import money
from idemguard.windows import COUNTERS

PRICES = {"input": 3, "cache_read": 1, "cache_write": 4, "output": 15}  # units per token
FACTORS = ("runs", "duplicates", "size", "price")
KINDS = ("input", "cache_read", "cache_write", "output")


def counts(runs=0, duplicates=0, size=None, wasted=None, prices=PRICES, flat=0) -> Counter[str]:
    """The counts of a span.

    Args:
        runs: executions that are no duplicates.
        duplicates: those that are.
        size: of each run, tokens by kind, `input` being what is in no cache.
        wasted: of each duplicate; None: as a run.
        prices: units per token, by kind.
        flat: units per execution.

    """
    size = dict.fromkeys(KINDS, 0) | (size or {})
    wasted = size if wasted is None else dict.fromkeys(KINDS, 0) | wasted
    spent = {kind: runs * size[kind] + duplicates * wasted[kind] for kind in KINDS}
    cost = {kind: spent[kind] * prices[kind] for kind in KINDS}
    fixed = flat * (runs + duplicates)
    lost = {kind: duplicates * wasted[kind] for kind in KINDS}
    return Counter({
        "cause_first": runs,
        "cause_fallback": duplicates // 2,
        "cause_observed": duplicates - duplicates // 2,
        "input": spent["input"] + spent["cache_read"] + spent["cache_write"],
        "cache_read": spent["cache_read"],
        "cache_write": spent["cache_write"],
        "output": spent["output"],
        "wasted_input": lost["input"] + lost["cache_read"] + lost["cache_write"],
        "wasted_cache_read": lost["cache_read"],
        "wasted_cache_write": lost["cache_write"],
        "wasted_output": lost["output"],
        "cost": sum(cost.values()) + fixed,
        "cost_input": cost["input"],
        "cost_cache_read": cost["cache_read"],
        "cost_cache_write": cost["cache_write"],
    })  # fmt: skip


def parts(part):
    return {name: getattr(part, name) for name in FACTORS if getattr(part, name)}


def adds_up(found) -> None:
    for part in (found.tokens, found.money):
        assert part.before + part.runs + part.duplicates + part.size + part.price == part.after
        assert part.after - part.before == part.change
    assert found.tokens.price == 0


SIZE = {"input": 700, "cache_read": 200, "cache_write": 100, "output": 50}
WASTED = {"input": 90, "output": 7}


# --- one factor alone ----------------------------------------------------------------------------------


def test_nothing_changed():
    one = counts(10, 3, SIZE, WASTED)
    found = change("t", one, one)
    assert parts(found.tokens) == parts(found.money) == {}
    assert (found.executions, found.duplicates) == ((13, 13), (3, 3))
    adds_up(found)


@pytest.mark.parametrize("wasted", [None, WASTED], ids=["alike", "of another size"])
@pytest.mark.parametrize("duplicates", [0, 3])
def test_more_runs_alone(duplicates, wasted):
    found = change("t", counts(10, duplicates, SIZE, wasted), counts(17, duplicates, SIZE, wasted))
    assert parts(found.tokens) == {"runs": 7 * 1050}
    assert parts(found.money) == {"runs": money(7 * (2100 + 200 + 400 + 750))}
    adds_up(found)


@pytest.mark.parametrize(("before", "after"), [(0, 4), (4, 0), (3, 5), (0, 1)])
def test_more_duplicates_alone(before, after):
    found = change("t", counts(10, before, SIZE, WASTED), counts(10, after, SIZE, WASTED))
    assert parts(found.tokens) == {"duplicates": (after - before) * 97}
    assert parts(found.money) == {"duplicates": money((after - before) * (270 + 105))}
    adds_up(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duplicates", [0, 3])
def test_a_bigger_size_of_one_kind_alone(kind, duplicates):
    bigger = SIZE | {kind: SIZE[kind] + 13}
    found = change("t", counts(10, duplicates, SIZE), counts(10, duplicates, bigger))
    more = 13 * (10 + duplicates)
    assert parts(found.tokens) == {"size": more}
    assert parts(found.money) == {"size": money(more * PRICES[kind])}
    adds_up(found)


def test_another_share_of_the_cache_alone_is_another_size_of_the_same_tokens():
    cached = SIZE | {"input": 400, "cache_read": 500}
    found = change("t", counts(10, 3, SIZE), counts(10, 3, cached))
    assert parts(found.tokens) == {}
    assert parts(found.money) == {"size": money(-2 * 300 * 13)}
    adds_up(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wasted", [None, WASTED], ids=["alike", "of another size"])
def test_another_price_of_one_kind_alone(kind, wasted):
    other = PRICES | {kind: PRICES[kind] + 2}
    found = change("t", counts(10, 3, SIZE, wasted), counts(10, 3, SIZE, wasted, prices=other))
    assert parts(found.tokens) == {}
    tokens = 10 * SIZE[kind] + 3 * (SIZE if wasted is None else {"cache_read": 0, **WASTED}).get(
        kind, 0
    )
    assert parts(found.money) == {"price": money(2 * tokens)}
    adds_up(found)


def test_a_price_per_execution_is_a_price_too():
    found = change("t", counts(10, 3, flat=5), counts(10, 3, flat=7))
    assert parts(found.money) == {"price": money(26)}
    found = change("t", counts(10, 0, flat=5), counts(14, 0, flat=5))
    assert parts(found.money) == {"runs": money(20)}
    found = change("t", counts(10, 0, flat=5), counts(10, 2, flat=5))
    assert parts(found.money) == {"duplicates": money(10)}
    adds_up(found)


def test_sizes_that_are_no_whole_numbers_are_the_same_all_the_same():
    three = Counter(counts(3, 0, {"input": 3})) + Counter({"input": 1, "cost_input": 3, "cost": 3})
    six = Counter({name: 2 * count for name, count in three.items()})
    found = change("t", three, six)
    assert parts(found.tokens) == {"runs": 10}
    assert parts(found.money) == {"runs": money(30)}


# --- spans that say little ---------------------------------------------------------------------------


def test_where_nothing_ran_all_is_more_runs():
    found = change("t", counts(), counts(10, 2, SIZE))
    assert parts(found.tokens) == {"runs": 10_500, "duplicates": 2_100}
    adds_up(found)
    found = change("t", counts(10, 2, SIZE), counts())
    assert parts(found.tokens) == {"runs": -10_500, "duplicates": -2_100}
    assert set(parts(found.money)) == {"runs", "duplicates"}
    adds_up(found)
    adds_up(change("t", counts(), counts()))


def test_without_a_price_money_does_not_change():
    free = dict.fromkeys(KINDS, 0)
    before, after = counts(1, 0, SIZE, prices=free), counts(2, 0, SIZE, prices=free)
    before["unpriced"], after["unpriced"] = 1, 2
    found = change("t", before, after)
    assert parts(found.money) == {}
    assert parts(found.tokens) == {"runs": 1050}
    assert found.unpriced == (1, 2)


def test_executions_that_told_no_tokens_make_the_others_smaller():
    before = counts(10, 0, SIZE)
    after = Counter(before)
    after["cause_retry"] += 10
    after["unknown_usage"] += 10
    found = change("t", before, after)
    assert parts(found.tokens) == {"runs": 10_500, "size": -10_500}
    adds_up(found)


def test_spans_in_which_all_are_duplicates():
    found = change("t", counts(0, 3, SIZE, WASTED), counts(0, 5, SIZE, WASTED))
    assert parts(found.tokens) == {"duplicates": 194}
    adds_up(found)


# --- any counts -----------------------------------------------------------------------------------------

small = st.integers(0, 5)
sizes = st.fixed_dictionaries({kind: st.integers(0, 10**7) for kind in KINDS})
prices = st.fixed_dictionaries({kind: st.integers(0, 10**9) for kind in KINDS})
spans = st.builds(
    counts, runs=small, duplicates=small, size=sizes, wasted=sizes, prices=prices,
    flat=st.integers(0, 10**12),
)  # fmt: skip


@given(before=spans, after=spans)
def test_the_parts_add_up_for_any_two_spans(before, after):
    found = change("t", before, after)
    adds_up(found)
    assert found.tokens.before == before["input"] + before["output"]
    assert found.tokens.after == after["input"] + after["output"]
    assert found.money.before == money(before["cost"])
    assert found.money.after == money(after["cost"])


raw = st.dictionaries(st.sampled_from(COUNTERS), st.integers(0, 10**12)).map(Counter)


@given(before=raw, after=raw)
def test_the_parts_add_up_for_any_counts(before, after):
    found = change("t", before, after)
    adds_up(found)
    assert found.tokens.before == before["input"] + before["output"]
    assert found.tokens.after == after["input"] + after["output"]
    assert found.money.before == money(before["cost"])
    assert found.money.after == money(after["cost"])


@given(size=sizes, wasted=sizes, prices=prices, numbers=st.tuples(*[st.integers(1, 9)] * 4))
def test_one_factor_alone_whatever_the_others_are(size, wasted, prices, numbers):
    runs, more_runs, duplicates, more_duplicates = numbers
    before = counts(runs, duplicates, size, wasted, prices)
    found = change("t", before, counts(more_runs, duplicates, size, wasted, prices))
    assert set(parts(found.tokens)) | set(parts(found.money)) <= {"runs"}
    found = change("t", before, counts(runs, more_duplicates, size, wasted, prices))
    assert set(parts(found.tokens)) | set(parts(found.money)) <= {"duplicates"}
    bigger = {kind: number * 2 + 1 for kind, number in size.items()}
    found = change("t", before, counts(runs, duplicates, bigger, wasted, prices))
    assert set(parts(found.tokens)) == {"size"}
    dearer = {kind: price * 3 + 1 for kind, price in prices.items()}
    found = change("t", before, counts(runs, duplicates, size, wasted, dearer))
    assert set(parts(found.tokens)) == set()
    if any(size[kind] and not wasted[kind] for kind in KINDS):
        assert set(parts(found.money)) == {"price"}
    assert set(parts(found.money)) <= {"price"}


@given(st.lists(st.tuples(spans, spans), max_size=4))
def test_the_total_is_the_sum_of_all(pairs):
    before = {f"t{n}": one for n, (one, _) in enumerate(pairs)}
    after = {f"t{n}": other for n, (_, other) in enumerate(pairs)}
    with localcontext(Context(prec=3)):
        found = compared((0, 1), (1, 2), before, after)
        whole = found.total.money.change
    assert found.total.task_type == ALL
    adds_up(found.total)
    assert whole == found.total.money.after - found.total.money.before
    for name in ("before", "after", *FACTORS):
        assert getattr(found.total.money, name) == sum(
            (getattr(one.money, name) for one in found.changes), Decimal(0)
        )
        assert getattr(found.total.tokens, name) == sum(
            getattr(one.tokens, name) for one in found.changes
        )
    changes = [(abs(one.money.change), abs(one.tokens.change)) for one in found.changes]
    assert changes == sorted(changes, reverse=True)


def test_task_types_of_one_span_alone():
    found = compared((0, 1), (1, 2), {"old": counts(1, 0, SIZE)}, {"new": counts(2, 0, SIZE)})
    assert [one.task_type for one in found.changes] == ["new", "old"]
    assert [one.executions for one in found.changes] == [(0, 2), (1, 0)]
    assert found.total.executions == (1, 2)
    assert ((found.a, found.b)) == ((0, 1), (1, 2))


# --- of real calls -----------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite"])
def made(request, tmp_path, clock):
    """A guard on a store with a clock that is told."""
    store = (
        MemoryStore(clock)
        if request.param == "memory"
        else SqliteStore(tmp_path / "guard.db", clock=clock)
    )
    guard = Guard(
        store=store,
        pricer={"m": {"input": "3", "output": "15"}, "dear": {"input": "6", "output": "15"}},
        retention=timedelta(days=3),
    )
    yield guard
    guard.close()


@pytest.fixture
def spend(made, clock):
    """Executes a new task that spends tokens; then a second passes."""
    numbers = itertools.count()

    @made.idempotent(task_type="t")
    def task(n, size, model):
        record_usage(input_tokens=size, output_tokens=10, model=model)
        return n

    def call(size=1000, model="m", times=1, duplicates=0):
        for _ in range(times):
            number = next(numbers)
            task(number, size, model)
            clock.advance(1)
        for _ in range(duplicates):
            made.idempotent(
                lambda n, size, model: record_usage(input_tokens=size, output_tokens=10, model=model),
                task_type="t", mode="observe",
            )(number, size, model)  # fmt: skip
            clock.advance(1)

    return call


@pytest.fixture
def moment(clock):
    """The time."""
    return lambda: datetime.fromtimestamp(clock() / 1000, UTC)


HOUR = 3600


def test_more_runs_of_real_calls(made, spend, moment, clock):
    start = moment()
    spend(times=4)
    clock.advance(HOUR)
    middle = moment()
    spend(times=7)
    found = made.ledger.compare((start, middle), (middle, moment()))
    (one,) = found.changes
    assert (one.task_type, one.executions) == ("t", (4, 7))
    assert parts(one.tokens) == {"runs": 3030}
    assert parts(one.money) == {"runs": 3 * Decimal("0.00315")}
    assert parts(found.total.tokens) == parts(one.tokens)


def test_more_duplicates_bigger_runs_and_another_price_of_real_calls(made, spend, moment, clock):
    cuts = [moment()]
    for more in ({}, {"duplicates": 2}, {"size": 1500}, {"model": "dear"}):
        spend(times=4, **more)
        clock.advance(HOUR)
        cuts.append(moment())
    spans = list(itertools.pairwise(cuts))
    told = [made.ledger.compare(spans[0], span).total for span in spans]
    assert [parts(one.tokens) for one in told] == [{}, {"duplicates": 2020}, {"size": 2000}, {}]
    assert [parts(one.money) for one in told] == [
        {},
        {"duplicates": Decimal("0.0063")},
        {"size": Decimal("0.006")},
        {"price": Decimal("0.012")},
    ]
    for one in told:
        adds_up(one)


def test_a_span_may_cut_a_window(made, spend, moment, clock):
    clock.advance(300 - clock() // 1000 % 300)  # a window begins
    spend(times=10)
    start = moment()
    spend(times=20)
    middle = moment()
    spend(times=30, size=500)
    end = moment()
    found = made.ledger.compare((start, middle), (middle, end))
    assert found.total.executions == (20, 30)
    assert (found.total.tokens.before, found.total.tokens.after) == (20 * 1010, 30 * 510)
    assert found.total.money.before == 20 * Decimal("0.00315")
    nothing = end + timedelta(seconds=1), end + timedelta(seconds=2)
    assert made.ledger.compare(nothing, (start, end)).total.executions == (0, 50)


def test_a_span_may_cut_the_window_of_one_agent_or_another(made, moment, clock):
    @made.idempotent(task_type="t")
    def task(n):
        record_usage(input_tokens=n, output_tokens=0, model="m")
        return n

    clock.advance(300 - clock() // 1000 % 300)
    cuts = [moment()]
    for n in range(6):
        with agent("even" if n % 2 == 0 else "odd"):
            task(10**n)
        clock.advance(1)
        cuts.append(moment())
    for first, last in itertools.combinations(range(7), 2):
        told = made.ledger.compare((cuts[first], cuts[last]), (cuts[0], cuts[6])).total
        assert told.tokens.before == sum(10**n for n in range(first, last))
        assert told.tokens.after == 111_111


def test_where_lines_are_gone_a_window_counts_where_it_starts(made, moment, clock):
    @made.idempotent(task_type="t")
    def task(n):
        record_usage(input_tokens=1, output_tokens=0, model="m")
        return n

    clock.advance(300 - clock() // 1000 % 300)
    start = moment()
    for _ in range(70):  # of which 64 lines are kept
        with bypass():
            task(1)
        clock.advance(1)
    end = moment()
    middle = start + timedelta(seconds=30)
    found = made.ledger.compare((start, middle), (middle, end))
    assert found.total.executions == (70, 0)
    assert found.total.tokens.before == 70


def test_spans_of_windows_that_were_rolled_up(made, spend, moment, clock):
    clock.advance(HOUR - clock() // 1000 % HOUR)
    cuts = [moment()]
    for number in range(3):
        spend(times=number + 1)
        clock.advance(HOUR - clock() // 1000 % HOUR)
        cuts.append(moment())
    clock.advance(26 * HOUR)
    made.engine.store.tend(None)
    spans = {window.span for window in made.ledger.windows()}
    assert spans == {HOUR * 1000}
    found = made.ledger.compare((cuts[0], cuts[1]), (cuts[1], cuts[3]))
    assert found.total.executions == (1, 5)
    assert parts(found.total.tokens) == {"runs": 4040}
    # an hour is cut where its lines are still kept
    cut = cuts[2] + timedelta(seconds=1)
    assert made.ledger.compare((cuts[2], cut), (cut, cuts[3])).total.executions == (1, 2)
    clock.advance(3 * 24 * HOUR)
    made.engine.store.tend(None)
    assert list(made.ledger.lines()) == []
    assert made.ledger.compare((cuts[2], cut), (cut, cuts[3])).total.executions == (3, 0)
    found = made.ledger.compare((cuts[0], cuts[1]), (cuts[1], cuts[3]))
    assert found.total.executions == (1, 5)


def test_reuse_costs_nothing_in_either_span(made, moment, clock):
    task = made.idempotent(lambda n: n, task_type="t")
    task(1)
    clock.advance(HOUR / 6)
    start = moment()
    task(1)
    clock.advance(1)
    found = made.ledger.compare((start, moment()), (moment() - timedelta(1), moment()))
    assert found.total.executions == (0, 1)


@pytest.mark.parametrize(
    "bad", [None, (1, 2), (datetime.now(UTC),), (datetime(2026, 1, 2), datetime(2026, 1, 1))],  # noqa: DTZ001 - local
    ids=["nothing", "numbers", "one", "backwards"],
)  # fmt: skip
def test_a_span_is_two_moments(made, bad):
    good = (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC))
    with pytest.raises(errors.ConfigurationError, match="a takes"):
        made.ledger.compare(bad, good)
    with pytest.raises(errors.ConfigurationError, match="b takes"):
        made.ledger.compare(good, bad)


def test_the_causes_of_duplicates_are_those_that_are_counted():
    for cause in Cause:
        one = Counter({f"cause_{cause}": 2})
        assert change("t", one, one).duplicates == ((2, 2) if cause in DUPLICATES else (0, 0))

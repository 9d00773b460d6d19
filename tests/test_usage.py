"""An execution's meter: whatever is reported, in whatever order, is counted once."""

from __future__ import annotations

import signal
import threading
from decimal import Context, Decimal, Inexact, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemguard.pricing import price_by
from idemguard.usage import (
    NOTHING,
    TOKENS,
    Cost,
    Meter,
    Spent,
    Usage,
    is_own,
    merged,
    normal,
    total,
)

PRICES = {
    "m": {"input": "3", "output": "15", "cache_read": "0.3", "cache_write": "3.75"},
    "n": {"input": "0.15", "output": "0.6"},
}
PRICE = price_by(PRICES)


def use(input_tokens=None, output_tokens=None, response_id=None, **more) -> Usage:
    return Usage(
        input_tokens=input_tokens, output_tokens=output_tokens, response_id=response_id, **more
    )


def counted(meter: Meter) -> tuple[int | None, int | None]:
    usage = meter.spent().usage
    assert usage is not None
    return usage.input_tokens, usage.output_tokens


@pytest.fixture
def meter():
    """One that prices."""
    return Meter(PRICE, "USD")


# --- usages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 1.0, "5", True])
@pytest.mark.parametrize("name", TOKENS)
def test_tokens_are_whole_numbers(name, bad):
    with pytest.raises(ValueError, match=name):
        Usage(**{name: bad})


def test_a_total_is_unknown_where_both_are():
    assert Usage().total_tokens is None
    assert use(0).total_tokens == 0
    assert use(output_tokens=3).total_tokens == 3
    assert use(2, 3).total_tokens == 5


def test_the_sum_of_usages_knows_what_one_of_them_knows():
    assert total([]) is None
    both = total([use(1, model="m"), use(2, 3, cache_read_tokens=0, response_id="r")])
    assert both == use(3, 3, cache_read_tokens=0, model="m")


def test_of_two_snapshots_the_latest_known_value_wins():
    assert merged(use(5, 1, "r"), use(None, 0, model="m")) == use(5, 0, "r", model="m")


def test_the_normal_form_of_what_users_hand_over():
    assert normal(None, input_tokens=3) == use(3)
    assert normal({"input_tokens": 3, "stop": 1}, output_tokens=2) == use(3, 2)
    assert normal(use(3), input_tokens=4) == use(4)
    with pytest.raises(ValueError, match="tokens_in"):
        normal(None, tokens_in=3)
    for nothing in (None, {}, {"prompt": 3}, 5, "text"):
        with pytest.raises(ValueError, match="no usage found"):
            normal(nothing)


def test_a_mapping_of_ours_has_our_fields_alone():
    assert is_own({"input_tokens": 1, "total_tokens": 1})
    assert not is_own({"input_tokens": 1, "cached_tokens": 1})
    assert not is_own({})
    assert not is_own([("input_tokens", 1)])


# --- reports -------------------------------------------------------------------------------------------


def test_nothing_reported_is_nothing_spent(meter):
    assert meter.spent() == NOTHING
    assert NOTHING.price is None


def test_several_calls_add_up(meter):
    meter.add(use(1000, 100, model="m"))
    meter.add(use(2000, 200, model="m"))
    spent = meter.spent()
    assert counted(meter) == (3000, 300)
    assert (spent.inputs, spent.responses, spent.reports) == ((1000, 2000), (), 2)
    assert (spent.price, spent.currency, spent.unpriced) == (Decimal("0.0135"), "USD", 0)


def test_equal_reports_without_an_id_are_of_two_calls(meter):
    meter.add(use(10, 1))
    meter.add(use(10, 1))
    assert counted(meter) == (20, 2)


def test_one_id_counts_once(meter):
    for _ in range(3):
        meter.add(use(1000, 100, "r-1", model="m"))
    assert counted(meter) == (1000, 100)
    spent = meter.spent()
    assert (spent.reports, spent.responses, spent.price) == (1, ("r-1",), Decimal("0.0045"))


def test_one_id_counts_once_whether_streamed_or_whole(meter):
    meter.add(use(10, 1, "r"), stream=True)
    meter.add(use(10, 7, "r"), stream=True)
    meter.add(use(10, 7, "r"))
    assert counted(meter) == (10, 7)
    assert meter.spent().inputs == (10,)


def test_what_nobody_knows_stays_unknown(meter):
    meter.add(use(None, 5))
    usage = meter.spent().usage
    assert (usage.input_tokens, usage.cache_read_tokens, usage.reasoning_tokens) == (None,) * 3
    assert meter.spent().inputs == ()
    meter.add(use(7, None, reasoning_tokens=0))
    usage = meter.spent().usage
    assert (usage.input_tokens, usage.output_tokens, usage.reasoning_tokens) == (7, 5, 0)
    assert usage.cache_read_tokens is None
    assert meter.spent().unpriced == 2


def test_the_last_model_and_provider_are_told(meter):
    meter.add(use(1, model="m", provider="p"))
    meter.add(use(1, model="n"))
    meter.add(use(1))
    usage = meter.spent().usage
    assert (usage.model, usage.provider, usage.response_id) == ("n", "p", None)


def test_a_report_without_a_price_is_counted_as_unpriced(meter):
    meter.add(use(1000, 0, model="unheard of"))
    spent = meter.spent()
    assert (spent.cost, spent.price, spent.currency, spent.parts, spent.unpriced) == (
        None, None, None, None, 1,
    )  # fmt: skip
    meter.add(use(1000, 0, model="m"))
    spent = meter.spent()
    assert (spent.price, spent.currency, spent.unpriced) == (Decimal("0.003"), "USD", 1)


def test_a_report_that_gets_its_model_later_gets_its_price(meter):
    meter.add(use(1000, 0, "r"), stream=True)
    assert meter.spent().unpriced == 1
    meter.add(use(None, 100, "r", model="m"), stream=True)
    spent = meter.spent()
    assert (spent.price, spent.unpriced) == (Decimal("0.0045"), 0)


def test_a_report_whose_model_turns_out_to_have_no_price_costs_nothing_known(meter):
    meter.add(use(1000, 0, "r", model="m"), stream=True)
    meter.add(use(1000, 0, "r", model="unheard of"), stream=True)
    spent = meter.spent()
    assert spent.unpriced == 1
    assert not spent.cost


def test_without_a_pricer_nothing_is_priced():
    meter = Meter()
    meter.add(use(5, 5, model="m"))
    assert (meter.spent().cost, meter.spent().unpriced) == (None, 1)


def test_the_parts_of_a_cost_add_up(meter):
    usage = use(12307, 550, "r", cache_read_tokens=0, cache_write_tokens=12304, model="m")
    meter.add(usage)
    meter.add(use(1000, 10, cache_read_tokens=400, model="m"))
    spent = meter.spent()
    plain, read, written = (Decimal(part).scaleb(-12) for part in spent.parts)
    assert plain == Decimal("0.000009") + Decimal("0.0018")
    assert (read, written) == (Decimal("0.00012"), Decimal("0.04614"))
    assert spent.price - plain - read - written == Decimal("0.00825") + Decimal("0.00015")


def test_a_cost_is_exact_whatever_the_decimal_context_says(meter):
    meter.add(use(123_456_789, 987_654_321, model="m"))
    expected = meter.spent().price
    narrow = Context(prec=3, traps=[Inexact])
    with localcontext(narrow):
        other = Meter(price_by(PRICES), "USD")
        other.add(use(123_456_789, 987_654_321, model="m"))
        price = other.spent().price
    assert price == expected == Decimal("15185.185182")


def test_only_the_last_are_remembered_but_all_are_counted(meter):
    for number in range(100):
        meter.add(use(number, 1, f"r-{number}"))
    spent = meter.spent()
    assert spent.inputs == tuple(range(36, 100))
    assert spent.responses == tuple(f"r-{number}" for number in range(36, 100))
    assert spent.usage.input_tokens == sum(range(100))
    for number in range(100):
        meter.add(use(number, 1, f"r-{number}"))
    assert meter.spent() == spent


def test_of_two_tellings_the_later_one_has_more_reports(meter):
    seen = []
    for report in (use(1), use(1, 0, "r"), use(1, 5, "r"), use(0, 0, "q"), use(3, 3, "q")):
        meter.add(report, stream=True)
        seen.append(meter.spent().reports)
    meter.inside(Spent(1, use(9)), reused=False)
    seen.append(meter.spent().reports)
    assert seen == sorted(set(seen))


# --- streams -------------------------------------------------------------------------------------------


def test_of_a_streams_snapshots_the_latest_counts(meter):
    for output in (1, 4, 9):
        meter.add(use(20, output, "r", model="m"), stream=True)
    assert counted(meter) == (20, 9)
    assert meter.spent().price == Decimal("0.000195")


def test_what_follows_an_opening_without_an_id_is_of_the_same_response(meter):
    for response in ("r-1", "r-2"):  # as a message that starts, goes on, and stops
        meter.add(use(25, 1, response, model="m"), stream=True, opens=True)
        meter.add(use(None, 15), stream=True)
        meter.add(Usage(), stream=True, closes=True)
    assert counted(meter) == (50, 30)
    assert meter.spent().inputs == (25, 25)
    assert meter.spent().unpriced == 0


def test_a_stream_that_shrinks_after_its_opening_is_still_the_same(meter):
    meter.add(use(25, 9, "r"), stream=True, opens=True)
    meter.add(use(None, 3), stream=True)
    assert counted(meter) == (25, 3)


def test_what_comes_after_a_close_is_of_another_response(meter):
    meter.add(use(10, 1, "r"), stream=True, opens=True)
    meter.add(use(None, 5), stream=True, closes=True)
    meter.add(use(10, 6), stream=True)
    assert counted(meter) == (20, 11)


def test_snapshots_without_an_id_only_grow(meter):
    for output in (1, 5, 8):
        meter.add(use(10, output), stream=True)
    assert counted(meter) == (10, 8)
    for output in (2, 3):  # the next response
        meter.add(use(10, output), stream=True)
    assert counted(meter) == (20, 11)
    meter.add(use(9, 3), stream=True)
    assert counted(meter) == (29, 14)


def test_readers_without_ids_do_not_meet(meter):
    for output in (1, 2, 3):
        for reader in ("one", "two"):
            meter.add(use(10, output), stream=True, reader=reader)
    assert counted(meter) == (20, 6)


def test_one_reader_of_several_streams_tells_them_apart_by_their_ids(meter):
    for output in (1, 2, 3):
        for response in ("r-1", "r-2"):
            meter.add(use(10, output, response), stream=True)
    assert counted(meter) == (20, 6)


def test_openings_of_several_readers_in_turns(meter):
    for reader in (1, 2):
        meter.add(use(100 * reader, 1, f"r-{reader}"), stream=True, opens=True, reader=reader)
    for reader in (2, 1):
        meter.add(use(None, 10 * reader), stream=True, reader=reader)
    for reader in (1, 2):
        meter.add(Usage(), stream=True, closes=True, reader=reader)
    assert counted(meter) == (300, 30)


def test_parts_whose_numbers_add(meter):
    meter.add(use(20, 0, "run-1"), stream=True, adds=True)
    for _ in range(3):
        meter.add(use(None, 5, "run-1", cache_read_tokens=1), stream=True, adds=True)
    meter.add(use(1, 1, "run-2"), stream=True, adds=True)
    assert counted(meter) == (21, 16)
    assert meter.spent().usage.cache_read_tokens == 3
    assert meter.spent().inputs == (20, 1)


def test_names_that_come_before_or_after_the_numbers_are_kept(meter):
    meter.add(use(response_id="r", model="m"), stream=True)  # told without a number
    assert meter.spent() == NOTHING
    meter.add(use(1000, 0, "r"), stream=True, adds=True)
    assert meter.spent().price == Decimal("0.003")
    meter.add(use(1000, 0, "q"), stream=True, adds=True)
    assert meter.spent().unpriced == 1
    meter.add(use(response_id="q", model="m"), stream=True, adds=True)
    assert (meter.spent().price, meter.spent().unpriced) == (Decimal("0.006"), 0)


def test_the_end_of_a_stream_that_told_nothing_is_nothing(meter):
    meter.add(use(response_id="r"), stream=True, opens=True)
    meter.add(Usage(), stream=True, closes=True)
    assert meter.spent() == NOTHING


def test_a_report_beside_a_stream_is_of_another_response(meter):
    meter.add(use(10, 1, "r"), stream=True, opens=True)
    meter.add(use(3, 3))
    meter.add(use(None, 5), stream=True)
    assert counted(meter) == (13, 8)


# --- totals --------------------------------------------------------------------------------------------


def test_of_a_total_only_the_difference_counts(meter):
    meter.add(use(10, 1, model="m"))
    meter.add(use(20, 2, model="m"))
    meter.add(use(100, 10, model="m"), aggregate=True)
    assert counted(meter) == (100, 10)
    meter.add(use(100, 10, model="m"), aggregate=True)
    meter.add(use(90, 10, model="m"), aggregate=True)
    assert counted(meter) == (100, 10)
    assert meter.spent().price == Decimal("0.00045")


def test_a_total_of_which_nothing_was_told_is_a_report(meter):
    meter.add(use(100, 10), aggregate=True)
    meter.add(use(5, 5))
    assert counted(meter) == (105, 15)


def test_a_total_that_knows_more_kinds_adds_those(meter):
    meter.add(use(10, 5))
    meter.add(use(10, 5, cache_read_tokens=4), aggregate=True)
    usage = meter.spent().usage
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens) == (10, 5, 4)


def test_a_total_with_an_id_counts_once(meter):
    meter.add(use(10, 1, "r-1"))
    for _ in range(3):
        meter.add(use(30, 3, "t"), aggregate=True)
    assert counted(meter) == (30, 3)
    meter.add(use(30, 3, "t"))
    assert counted(meter) == (30, 3)


def test_a_total_with_an_id_may_grow(meter):
    meter.add(use(10, 1, "r-1"))
    meter.add(use(30, 3, "t"), aggregate=True)
    meter.add(use(15, 1, "r-2"))  # of which the total told 20 before
    meter.add(use(40, 4, "t"), aggregate=True)
    assert counted(meter) == (40, 4)


def test_a_total_all_of_which_was_told_is_known_by_its_id_from_then_on(meter):
    meter.add(use(10, 1, "r-1"))
    meter.add(use(10, 1, "t"), aggregate=True)
    meter.add(use(10, 1, "t"))
    assert counted(meter) == (10, 1)


def test_a_response_that_was_told_is_no_total_beside_itself(meter):
    meter.add(use(10, 1, "r-1"))
    meter.add(use(30, 3, "r-2"))
    meter.add(use(30, 3, "r-2"), aggregate=True)
    assert counted(meter) == (40, 4)


def test_a_total_counts_what_guarded_calls_inside_spent_as_told(meter):
    meter.add(use(10, 1))
    meter.inside(Spent(1, use(20, 2)), reused=False)
    meter.inside(Spent(0, None, nested=True, inner=(30, 3, 7)), reused=False)
    meter.add(use(100, 10), aggregate=True)
    assert counted(meter) == (50, 5)
    assert meter.spent().inner == (50, 5, 7)


def test_the_total_of_a_reused_execution_is_charged_to_nobody(meter):
    meter.inside(Spent(1, use(20, 2), responses=("r-1",)), reused=True)
    meter.add(use(20, 2), aggregate=True)
    meter.add(use(20, 2, "r-1"))
    assert meter.spent() == Spent(
        nested=True, responses=("r-1",)
    )  # known, in case somebody above returns it


# --- what the body returns -----------------------------------------------------------------------------


def test_a_returned_response_whose_usage_was_told_without_its_id_counts_once(meter):
    meter.add(use(1000, 0))
    meter.add(use(1000, 0, "r", model="m", cache_read_tokens=0), returned=True)
    assert counted(meter) == (1000, 0)
    spent = meter.spent()
    assert (spent.responses, spent.price, spent.inputs) == (("r",), Decimal("0.003"), (1000,))
    meter.add(use(1000, 0, "r"))
    assert counted(meter) == (1000, 0)


def test_each_report_without_an_id_stands_for_one_returned_response(meter):
    meter.add(use(10, 1))
    meter.add(use(10, 1))
    for number in range(3):
        meter.add(use(10, 1, f"r-{number}"), returned=True)
    assert counted(meter) == (30, 3)


def test_returned_responses_without_an_id_stand_for_themselves(meter):
    meter.add(use(10, 1), returned=True)
    meter.add(use(10, 1), returned=True)
    assert counted(meter) == (20, 2)


def test_a_returned_response_of_another_size_is_another_one(meter):
    meter.add(use(10, 1))
    meter.add(use(10, 2, "r"), returned=True)
    assert counted(meter) == (20, 3)


# --- guarded calls inside ------------------------------------------------------------------------------


def test_what_is_spent_inside_is_told_apart(meter):
    meter.add(use(10, 1, model="m"))
    spent = Spent(2, use(100, 20, response_id=None), responses=("i",), cost=5, inner=(7, 3, 2))
    meter.inside(spent, reused=False)
    told = meter.spent()
    assert counted(meter) == (10, 1)
    assert told.inner == (107, 23, 7)
    assert told.nested
    meter.inside(spent, reused=False)
    assert meter.spent().inner == (214, 46, 14)


def test_what_told_nothing_inside_leaves_no_sum(meter):
    meter.inside(NOTHING, reused=False)
    assert meter.spent() == Spent(nested=True)


def test_a_response_of_a_guarded_call_inside_is_not_told_again(meter):
    meter.inside(Spent(1, use(5, 5), responses=("i",)), reused=False)
    meter.add(use(5, 5, "i"))
    assert meter.spent().usage is None
    assert meter.spent().inner == (5, 5, 0)


def test_a_response_that_was_handed_on_to_a_guarded_call_is_told_once(meter):
    meter.add(use(1000, 0, "other", model="m"))
    meter.add(use(2000, 100, "handed on", model="m", cache_read_tokens=500))
    meter.add(use(4000, 0, "third", model="m"))
    before = meter.spent().reports
    meter.inside(Spent(1, use(2000, 100), responses=("handed on",), cost=9), reused=False)
    spent = meter.spent()
    assert counted(meter) == (5000, 0)
    assert (spent.inputs, spent.responses) == ((1000, 4000), ("handed on", "other", "third"))
    assert (spent.price, spent.parts) == (Decimal("0.015"), (15 * 10**9, 0, 0))
    assert (spent.usage.cache_read_tokens, spent.unpriced) == (None, 0)
    assert spent.inner == (2000, 100, 9)
    assert spent.reports > before
    meter.add(use(4000, 6, "third", model="m"))
    assert meter.spent().inputs == (1000, 4000)
    assert counted(meter) == (5000, 6)


def test_all_that_was_told_may_be_of_a_guarded_call(meter):
    meter.add(use(1000, 0, "r", model="m"))
    meter.inside(Spent(1, use(1000, 0), responses=("r",), cost=3), reused=False)
    spent = meter.spent()
    assert (spent.usage, spent.cost, spent.parts, spent.inputs) == (None, None, None, ())


# --- from several threads --------------------------------------------------------------------------------


def test_threads_that_report_at_once_lose_nothing():
    meter, together = Meter(PRICE, "USD"), threading.Barrier(8)

    def report(number):
        together.wait()
        for turn in range(200):
            meter.add(use(10, 1, f"{number}-{turn}", model="m"))
            meter.add(use(10, 3, f"{number}-{turn}", model="m"))
            meter.add(use(5, 5, model="n"))
            meter.inside(Spent(1, use(2, 1), cost=3), reused=False)
            meter.spent()

    threads = [threading.Thread(target=report, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = meter.spent()
    assert counted(meter) == (1600 * 15, 1600 * 8)
    assert spent.price == 1600 * (Decimal("0.000075") + Decimal("0.00000375"))
    assert spent.inner == (3200, 1600, 4800)
    assert spent.reports == 1600 * 4


def test_a_signal_handler_may_report_in_the_middle_of_a_report():
    heard = []

    def price(usage):
        if usage.model == "m":
            signal.raise_signal(signal.SIGUSR1)  # the handler runs in here
        return Cost(usage.input_tokens, (usage.input_tokens, 0, 0))

    meter = Meter(price, "USD")
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(meter.add(use(5, 0, "h"))))
    try:
        meter.add(use(10, 0, "r", model="m"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [None]
    assert meter.spent().usage.input_tokens == meter.spent().cost == 15


# --- any order -----------------------------------------------------------------------------------------

counts = st.integers(0, 10**9)
finals = st.lists(
    st.builds(
        Usage,
        input_tokens=counts,
        output_tokens=counts,
        cache_read_tokens=st.none() | counts,
        cache_write_tokens=st.none() | counts,
        reasoning_tokens=st.none() | counts,
        model=st.sampled_from(["m", "n", "unheard of"]),
        provider=st.just("p"),
    ),
    min_size=1,
    max_size=5,
)


def booked(usages: list[Usage]) -> Spent:
    """What they come to where each is told once, whole."""
    meter = Meter(PRICE, "USD")
    for number, usage in enumerate(usages):
        meter.add(Usage(**{**_fields(usage), "response_id": f"r-{number}"}))
    return meter.spent()


def _fields(usage: Usage) -> dict:
    return {name: getattr(usage, name) for name in Usage.__slots__}


def same(one: Spent, other: Spent) -> None:
    assert all(getattr(one.usage, n) == getattr(other.usage, n) for n in TOKENS)
    assert (one.cost, one.parts, one.unpriced) == (other.cost, other.parts, other.unpriced)
    assert one.price_version == other.price_version
    assert sorted(one.inputs) == sorted(other.inputs)
    assert set(one.responses) == set(other.responses)


@given(usages=finals, data=st.data())
def test_snapshots_in_any_order_come_to_what_their_last_ones_do(usages, data):
    """However streams are mixed, and whichever part tells a field last."""
    parts = []
    for number, usage in enumerate(usages):
        told = {name: value for name, value in _fields(usage).items() if value is not None}
        snapshots = data.draw(
            st.lists(
                st.dictionaries(st.sampled_from(sorted(told)), st.just(None), max_size=4),
                max_size=4,
            )
        )
        mine = [
            {n: told[n] if isinstance(told[n], str) else data.draw(counts) for n in names}
            for names in snapshots
        ]
        order = data.draw(st.permutations(sorted(told)))
        cut = data.draw(st.integers(0, len(order)))
        # each field's last value comes in one of the last two parts
        mine += [{n: told[n] for n in order[:cut]}, {n: told[n] for n in order[cut:]}]
        parts.append([Usage(**{**one, "response_id": f"r-{number}"}) for one in mine])
    meter = Meter(PRICE, "USD")
    while any(parts):
        queue = data.draw(st.sampled_from([queue for queue in parts if queue]))
        meter.add(queue.pop(0), stream=True, reader=data.draw(st.integers(0, 2)))
    same(meter.spent(), booked(usages))


@given(usages=finals, order=st.randoms(use_true_random=False))
def test_whole_reports_in_any_order_and_number(usages, order):
    meter = Meter(PRICE, "USD")
    reports = [
        Usage(**{**_fields(usage), "response_id": f"r-{number}"})
        for number, usage in enumerate(usages)
        for _ in range(order.randint(1, 3))
    ]
    order.shuffle(reports)
    for report in reports:
        meter.add(report, stream=order.random() < 0.5)
    same(meter.spent(), booked(usages))
    prices = [PRICE(usage) for usage in usages]
    known = [cost.units for cost in prices if cost is not None]
    assert meter.spent().cost == (sum(known) if known else None)
    assert meter.spent().unpriced == prices.count(None)


@given(usages=finals, told=st.lists(st.booleans(), min_size=5, max_size=5))
def test_a_total_comes_to_itself_whatever_was_told_before(usages, told):
    meter = Meter()
    for number, usage in enumerate(usages):
        if told[number]:
            meter.add(Usage(**{**_fields(usage), "response_id": f"r-{number}"}))
    whole = total(usages)
    meter.add(whole, aggregate=True)
    meter.add(whole, aggregate=True)
    usage = meter.spent().usage
    for name in TOKENS:
        assert (getattr(usage, name) or 0) == (getattr(whole, name) or 0)

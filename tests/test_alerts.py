"""What alerts, and when: the limits' edges, odd windows and clocks, and a week of traffic."""

from __future__ import annotations

import random
from bisect import bisect_left
from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemguard.alerts import (
    DEFAULTS,
    KINDS,
    VOLUME,
    Limits,
    alerting,
    changed,
    handed_back,
    last,
    measured,
    needed,
)
from idemguard.errors import ConfigurationError
from idemguard.findings import Drop, Loop
from idemguard.windows import HOUR, SPAN, Key, Window, total

NOW = 1_800_000_000_000 // HOUR * HOUR  # a window has just ended
A, B, C = last(NOW)
ALL = Limits(on=KINDS)
DAY = 24 * HOUR


def window(start, task_type="t", agent=None, span=SPAN, **counts):
    return Window(Key(start, task_type, agent), span, counts)


def ran(start, number, doubled=0, **more):
    """A window of so many executions, of which some are duplicates."""
    first = {"cause_first": number - doubled} if number - doubled else {}
    second = {"cause_observed": doubled} if doubled else {}
    names = {name: more.pop(name) for name in ("task_type", "agent", "span") if name in more}
    return window(start, **names, **first, **second, **more)


def kinds(windows, now=NOW, limits=ALL):
    return [alert.kind for alert in alerting(windows, limits, now)]


def three(*counts, **more):
    """The last three windows, of (executions, duplicates)."""
    return [ran(at, *pair, **more) for at, pair in zip((A, B, C), counts, strict=True)]


# --- edges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "alerts"),
    [
        pytest.param([], False, id="nothing at all"),
        pytest.param(three((100, 3), (100, 3), (100, 3)), False, id="exactly 3 %"),
        pytest.param(three((1000, 31), (1000, 31), (1000, 31)), True, id="3.1 %"),
        pytest.param(three((100, 4), (100, 3), (100, 4)), False, id="exactly 3 % in the middle"),
        pytest.param(three((100, 4), (100, 4), (100, 3)), False, id="exactly 3 % in the last"),
        pytest.param(three((100, 99), (100, 99), (100, 0)), False, id="over, and over again"),
        pytest.param(three((100, 4), (100, 4), (100, 4))[1:], False, id="two windows"),
        pytest.param(three((100, 4), (0, 0), (100, 4)), False, id="a window of zero executions"),
        pytest.param(three((7, 1), (6, 1), (6, 1)), False, id="19 executions"),
        pytest.param(three((7, 1), (7, 1), (6, 1)), True, id="20 executions"),
        pytest.param(three((10, 1), (10, 1), (10, 1)), True, id="10 in five minutes"),
        pytest.param(three((1, 1), (1, 1), (1, 1)), False, id="three calls page nobody"),
        pytest.param(three((1, 1), (17, 1), (2, 1)), True, id="20 in all, one in the first"),
        pytest.param(
            three((100, 4), (100, 4), (100, 4), span=HOUR), False, id="windows of an hour"
        ),
        pytest.param(
            [ran(C + SPAN, 100), *three((100, 4), (100, 4), (100, 4))], True,
            id="the one that is not complete says nothing yet",
        ),
        pytest.param(
            [ran(at, 100, 4) for at in (B, C, C + SPAN)], False,
            id="and does not count as the third",
        ),
        pytest.param(
            three((10, -1), (10, -1), (10, -1)), False, id="what was taken back too often"
        ),
    ],
)  # fmt: skip
def test_duplication(windows, alerts):
    assert kinds(windows, limits=Limits()) == ["duplication"] * alerts


@pytest.mark.parametrize("late", [0, 1, SPAN - 1])
def test_a_window_that_has_just_ended_is_complete_until_the_next_is(late):
    windows = three((100, 4), (100, 4), (100, 4))
    assert kinds(windows, NOW + late) == ["duplication"]
    assert kinds(windows, NOW - 1) == []
    assert kinds(windows, NOW + SPAN) == []


def test_a_task_type_alerts_on_its_own_and_is_named():
    windows = [
        *three((20, 2), (20, 2), (20, 2), task_type="worse"),
        *three((20, 1), (20, 1), (20, 1), task_type="bad"),
        *three((1000, 0), (1000, 0), (1000, 0), task_type="fine"),
    ]
    (alert,) = alerting(windows, Limits(), NOW)
    assert (alert.task_type, alert.overall) == ("worse", None)
    assert [(one.task_type, one.value, one.volume) for one in alert.task_types] == [
        ("worse", Fraction(1, 10), 60), ("bad", Fraction(1, 20), 60),
    ]  # fmt: skip
    assert alert.figure is alert.task_types[0]
    assert (alert.start, alert.end) == (A, NOW)


def test_task_types_of_too_few_executions_alert_together_and_the_worst_is_named():
    windows = [
        *three((3, 1), (3, 1), (3, 2), task_type="a"),
        *three((3, 1), (3, 1), (3, 1), task_type="b"),
        *three((3, 0), (3, 0), (3, 0), task_type="c"),
    ]
    (alert,) = alerting(windows, Limits(), NOW)
    assert (alert.task_types, alert.task_type) == ((), "a")
    assert alert.figure is alert.overall
    assert (alert.figure.task_type, alert.figure.value) == (None, Fraction(7, 27))


def test_together_they_may_alert_where_each_has_its_turn():
    windows = [
        ran(A, 40, 4, task_type="a"), ran(A, 40, task_type="b"),
        ran(B, 40, task_type="a"), ran(B, 40, 4, task_type="b"),
        ran(C, 40, 4, task_type="a"), ran(C, 40, task_type="b"),
    ]  # fmt: skip
    (alert,) = alerting(windows, Limits(), NOW)
    assert (alert.task_types, alert.task_type) == ((), "a")


def test_agents_of_one_task_type_are_added_up():
    windows = [one for name in ("x", "y", None) for one in three(*[(3, 1)] * 3, agent=name)]
    (alert,) = alerting(windows, Limits(), NOW)
    assert alert.figure.volume == 27
    assert kinds(windows[:3]) == []


@pytest.mark.parametrize(
    ("found", "fell_back", "alerts"),
    [
        ((100, 100, 100), (5, 5, 5), False),
        ((100, 100, 100), (6, 6, 6), True),
        ((7, 6, 6), (1, 1, 1), False),
        ((7, 7, 6), (1, 1, 1), True),
        ((0, 100, 100), (6, 6, 6), False),
        ((1000, 100, 100), (6, 6, 6), False),
    ],
)
def test_fallback_is_a_share_of_the_calls_that_found_a_claim(found, fell_back, alerts):
    windows = [
        window(at, found=calls, cause_fallback=number, cause_first=10_000)
        for at, calls, number in zip((A, B, C), found, fell_back, strict=True)
    ]
    assert kinds(windows) == ["fallback"] * alerts


BEFORE = ran(A - DAY, 20, input=20_000, span=HOUR)  # 1,000 each


@pytest.mark.parametrize(
    ("windows", "before", "alerts"),
    [
        pytest.param([(10, 15_000)] * 3, [BEFORE], False, id="exactly 150 %"),
        pytest.param([(10, 15_001)] * 3, [BEFORE], True, id="more"),
        pytest.param([(10, 90_000)] * 3, [], False, id="no baseline"),
        pytest.param(
            [(10, 90_000)] * 3, [ran(A - DAY, 19, input=19_000, span=HOUR)], False,
            id="a baseline of 19",
        ),
        pytest.param(
            [(10, 90_000)] * 3, [ran(A - DAY, 100, input=100_000, task_type="u")], False,
            id="another one's baseline",
        ),
        pytest.param(
            [(10, 90_000)] * 3, [ran(A - DAY, 100, unknown_usage=100)], False,
            id="a baseline without usage",
        ),
        pytest.param([(10, 90_000)] * 3, [ran(A - DAY, 100)], False, id="a baseline of nothing"),
        pytest.param(
            [(10, 90_000)] * 3, [ran(A - 7 * DAY, 20, input=20_000)], True, id="7 days before"
        ),
        pytest.param(
            [(10, 90_000)] * 3, [ran(NOW - HOUR, 20, input=20_000, span=HOUR)], False,
            id="an hour that has not ended before",
        ),
        pytest.param(
            [(10, 90_000)] * 3, [ran(A - 7 * DAY - SPAN, 20, input=20_000)], False,
            id="more than 7 days before",
        ),
        pytest.param([(10, 90_000), (0, 0), (10, 90_000)], [BEFORE], False, id="none in one"),
        pytest.param([(7, 90_000), (6, 90_000), (6, 90_000)], [BEFORE], False, id="19"),
        pytest.param([(7, 90_000), (7, 90_000), (6, 90_000)], [BEFORE], True, id="20"),
        pytest.param([(10, 90_000), (10, 90_000), (10, 9_000)], [BEFORE], False, id="over again"),
    ],
)  # fmt: skip
def test_input_tokens_are_held_against_the_baseline(windows, before, alerts):
    there = [
        ran(at, number, input=tokens)
        for at, (number, tokens) in zip((A, B, C), windows, strict=True)
    ]
    assert kinds(there + before, limits=Limits(on=("tokens",))) == ["tokens"] * alerts


def test_executions_that_told_no_tokens_are_in_no_average():
    silent = {"unknown_usage": 50, "nested": 40, "input": 15_001}
    windows = [*(ran(at, 100, **silent) for at in (A, B, C)), BEFORE]
    (alert,) = alerting(windows, Limits(on=("tokens",)), NOW)
    assert alert.figure.baseline == 1000
    assert (alert.figure.value, alert.figure.volume) == (Fraction(15_001, 10_000), 30)
    assert alert.overall is None  # another mix of task types is another average


@pytest.mark.parametrize(
    ("counts", "alerts"),
    [
        ({"cause_first": 100, "heard": 95, "silent": 5}, False),
        ({"cause_first": 100, "heard": 94, "silent": 6}, True),
        (
            {"cause_first": 100, "heard": 95, "silent": 5, "unknown_usage": 50},
            False,
        ),  # may tell yet
        ({"cause_first": 100, "unknown_usage": 100}, False),
        ({"cause_first": 6, "silent": 6, "unknown_usage": 6}, False),  # 18 in all
        ({"cause_first": 200, "heard": 91, "silent": 4, "nested": 105}, False),  # wrappers apart
        ({"cause_first": 200, "heard": 90, "silent": 5, "nested": 105}, True),
        ({"cause_first": 60, "heard": 20, "silent": 10, "lost": 12}, True),  # whatever is lost
    ],
)
def test_usage_is_missing_where_an_execution_ended_without(counts, alerts):
    assert ("usage" in kinds([window(at, **counts) for at in (A, B, C)])) is alerts


@pytest.mark.parametrize(("number", "alerts"), [(0, False), (1, True)])
def test_unguarded_executions(number, alerts):
    windows = [window(at, cause_first=10, cause_unguarded=number) for at in (A, B, C)]
    assert ("unguarded" in kinds(windows)) is alerts


def back(cls, *task_types):
    return [cls(name, "f" * 64, "", None, 3, ("w",), A, C) for name in task_types]


@pytest.mark.parametrize(("kind", "cls"), [("drops", Drop), ("loops", Loop)])
def test_drops_and_loops_are_counted_beside_the_windows(kind, cls):
    executed = three((10, 0), (10, 0), (10, 0))
    counted = [
        handed_back(kind, at, back(cls, *["t"] * number)) for at, number in ((A, 3), (B, 1), (C, 2))
    ]
    there = [*executed, *chain(*counted)]
    assert kinds(executed) == []
    assert kinds([*executed, *counted[0], *counted[1]]) == []
    (alert,) = alerting(there, ALL, NOW)
    assert (alert.kind, alert.task_type) == (kind, "t")
    assert (alert.figure.value, alert.figure.volume) == (1, 30)  # in each, at least
    assert kinds([*three((7, 0), (6, 0), (6, 0)), *chain(*counted)]) == []
    limits = changed(ALL, {"limits": {kind: 1}})
    assert kinds(there, limits=limits) == []


def test_only_what_is_on_alerts_and_in_its_order():
    usage = {
        "silent": 20,
        "unknown_usage": 20,
        "found": 10,
        "cause_fallback": 5,
        "cause_unguarded": 5,
    }
    windows = [ran(at, 20, 10, **usage) for at in (A, B, C)]
    assert kinds(windows, limits=Limits()) == ["duplication"]
    assert kinds(windows, limits=Limits(on=())) == []
    assert kinds(windows) == ["duplication", "fallback", "unguarded", "usage"]


# --- late windows, clocks that jump ---------------------------------------------------------------


COUNTS = st.fixed_dictionaries(
    {
        "start": st.integers(-5, 5).map(lambda number: NOW + number * SPAN)
        | st.integers(1, 200).map(lambda number: NOW - number * HOUR),
        "number": st.integers(0, 60),
        "doubled": st.integers(0, 9),
        "task_type": st.sampled_from(["t", "u"]),
        "agent": st.sampled_from([None, "x"]),
        "input": st.integers(0, 10_000),
    }
)


def made(counts):
    given = dict(counts)
    given["doubled"] = min(given["doubled"], given["number"])
    return ran(given.pop("start"), given.pop("number"), given.pop("doubled"), **given)


@given(st.lists(COUNTS, max_size=30).map(lambda found: list(map(made, found))), st.randoms())
def test_windows_may_come_in_any_order_and_in_parts(windows, chance):
    whole = alerting(windows, ALL, NOW)
    mixed = [
        Window(one.key, one.span, {name: number})
        for one in windows
        for name, number in one.counts.items()
    ]
    chance.shuffle(mixed)
    assert alerting(mixed, ALL, NOW) == whole


@given(st.lists(COUNTS, max_size=30).map(lambda found: list(map(made, found))))
def test_what_is_not_needed_changes_nothing(windows):
    start, end = needed(ALL, NOW)
    some = [one for one in windows if start <= one.key.start < end]
    assert alerting(some, ALL, NOW) == alerting(windows, ALL, NOW)


@given(
    st.lists(COUNTS, max_size=30).map(lambda found: list(map(made, found))),
    st.integers(-6, 6),
)
def test_an_alert_is_true_of_each_of_its_windows(windows, jump):
    now = NOW + jump * SPAN + 17
    for alert in alerting(windows, Limits(), now):
        assert (alert.start, alert.end) == (last(now)[0], last(now)[-1] + SPAN)
        for one in (alert.overall, *alert.task_types):
            if one is None:
                continue
            assert one.value > alert.limit.over
            assert one.volume >= alert.limit.volume
            for at in last(now):
                counts = total(
                    each for each in windows
                    if each.key.start == at and one.task_type in (None, each.key.task_type)
                )  # fmt: skip
                assert counts["cause_observed"] * 100 > 3 * (
                    counts["cause_first"] + counts["cause_observed"]
                )


@given(windows=st.lists(st.builds(made, COUNTS), max_size=40))
def test_what_alerts_was_looked_for_in_enough(windows):
    looked = {one.kind: one for one in measured(windows, ALL, NOW)}
    assert list(looked) == list(KINDS)
    for alert in alerting(windows, ALL, NOW):
        one = looked[alert.kind]
        assert alert.figure.volume <= one.of
        assert (one.most >= alert.limit.volume, one.windows, one.apart) == (True, 3, False)


def test_each_kind_is_looked_for_in_what_its_share_is_one_of():
    windows = [
        *[ran(at, 10, found=2, cause_fallback=1, heard=4, silent=1) for at in (A, B)],
        ran(A, 30, task_type="u", input=10),
        *handed_back("drops", B, back(Drop, "v")),
    ]
    limits = changed(ALL, {"volume": {"tokens": 6}})
    told = {one.kind: (one.of, one.most, one.windows) for one in measured(windows, limits, NOW)}
    assert told == {
        **dict.fromkeys(("duplication", "drops", "loops"), (52, 52, 2)),
        "unguarded": (52, 52, 2),
        "fallback": (4, 4, 2),
        "usage": (10, 10, 2),
        "tokens": (None, 0, 0),
    }
    # of the week before, five executions are too few for a baseline, and an hour's six are enough
    few = ran(A - DAY, 5, input=5)
    (tokens,) = measured([*windows, few], changed(limits, {"fail_on": ["tokens"]}), NOW)
    assert tokens.of is None
    hour = ran(A - DAY, 6, input=6, span=HOUR, task_type="u")
    (tokens,) = measured([*windows, few, hour], changed(limits, {"fail_on": ["tokens"]}), NOW)
    assert (tokens.of, tokens.most, tokens.windows) == (30, 30, 1)
    wide = [ran(at, 1, input=1, task_type="w") for at in (A, B, C)]
    based = [*windows, few, hour, *wide, ran(A - DAY, 6, input=6, task_type="w")]
    (tokens,) = measured(based, changed(limits, {"fail_on": ["tokens"]}), NOW)
    assert (tokens.of, tokens.most, tokens.windows, tokens.apart) == (33, 30, 3, True)
    gone = ran(A - DAY, 6, input=6, task_type="gone")  # a baseline, and nothing to hold against it
    (tokens,) = measured([*windows, gone], changed(limits, {"fail_on": ["tokens"]}), NOW)
    assert (tokens.of, tokens.most, tokens.windows) == (0, 0, 0)


def test_a_clock_that_jumps_makes_no_alert_of_a_gap_or_of_the_future():
    windows = [ran(NOW + number * SPAN, 100, 50) for number in range(-3, 0)]
    future = [ran(NOW + number * SPAN, 100, 50) for number in range(50)]
    assert kinds(windows + future) == ["duplication"]
    assert kinds(future) == []  # it was ahead, and is right again
    assert kinds(windows, NOW + DAY) == []
    assert kinds(windows, NOW - DAY) == []
    assert kinds(windows, 0) == []
    assert kinds([ran(0, 100, 50)], 1) == []


def test_a_window_that_is_late_counts_when_it_is_there_and_only_where_it_belongs():
    early = three((100, 50), (0, 0), (100, 50))
    assert kinds(early) == []
    late = ran(B, 100, 50)
    assert kinds([*early, late]) == ["duplication"]
    assert kinds([*early, late], NOW + SPAN) == []


# --- limits ----------------------------------------------------------------------------------------


def test_limits_are_set_one_over_the_other():
    first = changed(
        Limits(),
        {
            "fail_on": ["tokens", "duplication"],
            "limits": {"tokens": 2, "fallback": 0.1},
            "volume": 7,
        },
    )
    assert first.on == ("duplication", "tokens")
    assert first.of["tokens"].over == 2
    assert {limit.volume for limit in first.of.values()} == {7}
    second = changed(first, {"limits": {"tokens": "175%"}, "volume": {"drops": "3"}})
    assert second.on == first.on
    assert (second.of["tokens"].over, second.of["fallback"].over) == (
        Fraction(7, 4), Fraction(1, 10),
    )  # fmt: skip
    assert (second.of["drops"].volume, second.of["tokens"].volume) == (3, 7)
    assert changed(second, {}) == second
    assert {limit.volume for limit in DEFAULTS.values()} == {VOLUME}


@pytest.mark.parametrize(
    ("text", "number"),
    [("3%", "3/100"), ("0.03", "3/100"), (" 2.5% ", "1/40"), (0.1, "1/10"), (0, "0"), (1e-3, "1/1000")],
)  # fmt: skip
def test_a_number_is_exactly_what_is_written(text, number):
    assert changed(Limits(), {"limits": {"duplication": text}}).of["duplication"].over == Fraction(
        number
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": {}}, "P: there is no 'limit'; there are fail_on, limits, volume"),
        ({"limits": {"dup": 1}}, "P limits: there is no 'dup'; there are duplication, fallback"),
        ({"volume": {"dup": 1}}, "P volume: there is no 'dup'"),
        ({"fail_on": ["dup"]}, "P fail_on: there is no 'dup'"),
        ({"fail_on": "duplication"}, "P fail_on takes a list of kinds, not 'duplication'"),
        ({"fail_on": [1]}, "P fail_on takes a list"),
        ({"fail_on": None}, "P fail_on takes a list"),
        ({"limits": 3}, "P limits takes a table of kinds, not 3"),
        ({"limits": {"duplication": 3}}, "P limits.duplication takes a share below 1, as 0.03 or 3%"),
        *(
            ({"limits": {"duplication": bad}}, "P limits.duplication takes a share")
            for bad in (1, "100%", "3 %", -0.1, "-1%", "", "1e3", True, None, float("nan"),
                        float("inf"), [], "٣%")
        ),
        ({"limits": {"tokens": 0.5}}, "P limits.tokens takes a multiple of the baseline, as 1.5"),
        ({"limits": {"drops": 0.5}}, "P limits.drops takes a whole number of tasks"),
        ({"limits": {"drops": 10**400}}, "P limits.drops takes a whole number of tasks"),
        ({"limits": {"tokens": 1e300}}, "P limits.tokens takes a multiple"),
        *(({"volume": bad}, "P volume takes a whole number > 0")
          for bad in (0, -1, 1.5, "100%", " 100% ", 10**400, "x", "", True, None, "١", "9" * 5000)),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_named(given, message):
    with pytest.raises(ConfigurationError) as error:
        changed(Limits(), given, "P")
    assert message in str(error.value)


# --- a week ----------------------------------------------------------------------------------------


MONDAY = 1_799_625_600_000  # midnight


def at(day, hour, minute=0):
    return MONDAY + day * DAY + hour * HOUR + minute * 60_000


def traffic():
    """A week of two task types, with two episodes and noise; quiet nights, in which all is double."""
    chance = random.Random(8)
    found = []
    for start in range(MONDAY, at(7, 0), SPAN):
        hour = (start - MONDAY) % DAY // HOUR
        for task_type, tokens in (("summarise", 3_000), ("extract", 400)):
            if hour < 5:
                found.append(ran(start, 3, 2, task_type=task_type, input=9 * tokens))
                continue
            number = chance.randrange(40, 60)
            doubled = chance.random() < 0.2  # about 2 %, now and then
            if task_type == "summarise" and at(1, 10) <= start < at(1, 11):
                doubled = 9
            each = tokens * chance.uniform(0.85, 1.15)
            if task_type == "extract" and at(3, 14, 10) <= start < at(3, 14, 40):
                each *= 2
            if start == at(4, 9):  # one window is no episode
                doubled, each = 20, each * 3
            found.append(
                ran(start, number, int(doubled), task_type=task_type, input=round(number * each))
            )
    return found


def rolled(windows):
    """The same as hours."""
    hours = {}
    for one in windows:
        hours.setdefault((one.key.start // HOUR * HOUR, one.key.task_type), []).append(one)
    return [window(*key, span=HOUR, **total(each)) for key, each in hours.items()]


def test_a_week_alerts_when_it_should_and_at_no_other_time():
    fine = traffic()
    coarse = rolled(fine)
    limits = Limits(on=("duplication", "tokens"))
    raised = {}
    for now in range(MONDAY + SPAN, at(7, 0) + 1, SPAN):
        hour = (now - HOUR) // HOUR * HOUR  # those before it are rolled up
        index = (hour - MONDAY) // SPAN * 2
        windows = coarse[: bisect_left(coarse, hour, key=lambda one: one.key.start)]
        windows += fine[max(0, index) : (now - MONDAY) // SPAN * 2 + 2]  # what is under way too
        for alert in alerting(windows, limits, now):
            raised.setdefault((alert.kind, alert.task_type), []).append(now)
    assert raised == {
        ("duplication", "summarise"): list(range(at(1, 10, 15), at(1, 11) + 1, SPAN)),
        ("tokens", "extract"): list(range(at(3, 14, 25), at(3, 14, 40) + 1, SPAN)),
    }

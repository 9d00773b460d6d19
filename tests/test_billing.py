"""A meter's events are the executions that were paid for, and what was sent is held against them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from test_readme import pieces
from workers import story

from idemguard import Guard, OutOfScope, Task, agent, billing, errors, record_usage, scope, worker
from idemguard.billing import BACK, Event, Meter, UnreadableError, Why
from idemguard.cli import command, lines
from idemguard.record import Address, Caller, Cause, Claim, Execution, Status
from idemguard.stores.sqlite import SqliteStore
from idemguard.usage import COST_DIGITS, Spent, Usage

NOW = 1_800_000_000_000
DAY = 86_400_000
EVER = (0, 2**53)
TOKENS = Meter("tokens", "total_tokens", "agent")
SPENT = Spent(1, Usage(input_tokens=30, output_tokens=4), cost=4_500_000_000)  # $0.0045


def line(number=1, **given):
    """An execution."""
    started = given.get("started", NOW - number)
    caller = Caller(given.get("task_type", "t"), given.get("worker", "w"), given.get("agent", "a"))
    address = Address("n", f"{number:064x}", given.get("scope", ""))
    claim = Claim(address, started, f"{number:016x}", Cause.FIRST, 1, started, True, caller)
    status = given.get("status", Status.OK)
    ended = None if status in (Status.OPEN, Status.LOST) else started + 5
    return Execution(claim, started + 30_000, status, ended, spent=given.get("spent", SPENT))


def event(number=1, value="34", customer="a", at=NOW // 1000):
    """An event."""
    return Event(f"{number}-x", at, customer, Decimal(value))


def told(events, name="tokens"):
    """Events as JSON Lines."""
    return "".join(f"{json.dumps(one.told(name))}\n" for one in events)


def exported(meter, found, now=NOW):
    """What the command writes, and what it leaves out."""
    left_out = lines._LeftOut()
    return "".join(lines._events(meter, found, now, left_out)), left_out


def read(text):
    """What a file tells of, given as text or as bytes would be split."""
    return list(billing.sent(io.StringIO(text, newline="")))


# --- which executions are events ---------------------------------------------------------------------


def test_an_event_as_stripe_takes_it():
    found = TOKENS.event(line(started=NOW + 999))
    assert found.told("tokens") == {
        "event_name": "tokens",
        "identifier": f"{NOW + 999}-0000000000000001",
        "timestamp": NOW // 1000,
        "payload": {"stripe_customer_id": "a", "value": "34"},
    }


@pytest.mark.parametrize(
    ("value", "told_"),
    [("total_tokens", "34"), ("input_tokens", "30"), ("output_tokens", "4"), ("cost", "0.0045")],
)
def test_each_value(value, told_):
    found = replace(TOKENS, value=value).event(line())
    assert found.told("x")["payload"]["value"] == told_


@pytest.mark.parametrize("units", [0, 1, 15, 10**COST_DIGITS, 999 * 10**COST_DIGITS + 10**6])
def test_a_cost_is_every_digit_of_it_and_no_exponent(units):
    found = replace(TOKENS, value="cost").event(line(spent=SPENT._replace(cost=units)))
    text = found.told("x")["payload"]["value"]
    assert "E" not in text
    assert Decimal(text) * 10**COST_DIGITS == units


@pytest.mark.parametrize(
    ("status", "asked", "found"),
    [
        ("ok", (), Event),
        ("late", (), Event),
        ("open", ("failed", "declined", "lost"), Why.OPEN),
        ("failed", ("declined", "lost"), Why.FAILED),
        ("failed", ("failed",), Event),
        ("declined", ("failed", "lost"), Why.DECLINED),
        ("declined", ("declined",), Event),
        ("lost", ("failed", "declined"), Why.LOST),
        ("lost", ("lost",), Event),
    ],
)
def test_events_by_how_an_execution_ended(status, asked, found):
    meter = replace(TOKENS, include=frozenset(map(Status, asked)))
    got = meter.event(line(status=Status(status)))
    assert got is found or isinstance(got, Event) is (found is Event)
    _, left_out = exported(meter, [line(status=Status(status))])
    assert not left_out.why  # nobody is told of what is not to be billed


NO_OUTPUT = Spent(1, Usage(input_tokens=3))


@pytest.mark.parametrize(
    ("value", "spent", "found"),
    [
        ("total_tokens", Spent(), Why.NO_USAGE),
        ("cost", Spent(), Why.NO_USAGE),
        ("cost", Spent(nested=True), Why.INSIDE),
        ("total_tokens", Spent(nested=True), Why.INSIDE),
        ("output_tokens", NO_OUTPUT, Why.NO_USAGE),
        ("total_tokens", NO_OUTPUT, "3"),
        ("total_tokens", Spent(1, Usage()), Why.NO_USAGE),
        ("cost", NO_OUTPUT, Why.UNPRICED),
        ("cost", SPENT._replace(unpriced=1), Why.UNPRICED),  # a part would be a wrong bill
        ("cost", SPENT._replace(cost=0), "0"),
        ("input_tokens", Spent(1, Usage(input_tokens=0)), "0"),
        ("input_tokens", Spent(1, Usage(input_tokens=10**15 - 1)), "9" * 15),
        ("input_tokens", Spent(1, Usage(input_tokens=10**15)), Why.TOO_LONG),
        ("cost", SPENT._replace(cost=10**15 - 1), "999.999999999999"),
        ("cost", SPENT._replace(cost=10**15 + 1), Why.TOO_LONG),
        ("cost", SPENT._replace(cost=10**15), "1000"),
    ],
)
def test_what_was_not_told_is_no_zero(value, spent, found):
    got = replace(TOKENS, value=value).event(line(spent=spent))
    assert (f"{got.value:f}" if isinstance(got, Event) else got) == found


@pytest.mark.parametrize("customer", billing.CUSTOMERS)
def test_a_customer_is_named_by_any_of_these(customer):
    meter = replace(TOKENS, customer=customer)
    assert meter.event(line(**{customer: " acme, inc\n"})).customer == "acme, inc"
    assert meter.event(line(**{customer: " \n\t"})) is Why.NO_CUSTOMER
    mapped = replace(meter, customers={"acme": "cus_1", "other": "cus_2"})
    assert mapped.event(line(**{customer: "acme"})).customer == "cus_1"
    assert mapped.event(line(**{customer: "unheard-of"})) is Why.NO_CUSTOMER


@pytest.mark.parametrize("given_", [{"customer": "agent"}, {"customer": "scope"}])
def test_who_names_no_customer_has_one_only_if_the_map_says_so(given_):
    meter, nobody = replace(TOKENS, **given_), line(agent=None, scope="")
    assert meter.event(nobody) is Why.NO_CUSTOMER
    assert replace(meter, customers={"x": "cus"}).event(nobody) is Why.NO_CUSTOMER
    assert replace(meter, customers={"": "cus"}).event(nobody).customer == "cus"


@pytest.mark.parametrize(
    ("back", "taken"),
    [(0, True), (BACK, True), (BACK + 1, False), (-300_000, True), (-300_001, True), (-301_000, False)],
)  # fmt: skip
def test_stripe_takes_35_days_and_5_minutes(back, taken):
    text, left_out = exported(TOKENS, [line(started=NOW - back)])
    assert bool(text) is taken
    assert left_out.why == ({} if taken else {Why.OUT_OF_RANGE: 1})


def test_what_is_left_out_is_told_in_one_sentence():
    found = [
        line(1), line(2, spent=Spent()), line(3, started=NOW - BACK - 5000), line(4, agent="b"),
        *(line(5 + n, agent=f"c{n % 4}") for n in range(8)), line(20, agent=None),
        line(21, spent=Spent(1, Usage(input_tokens=10**15))), line(22, status=Status.OPEN),
    ]  # fmt: skip
    text, left_out = exported(replace(TOKENS, customers={"a": "cus"}), found)
    assert len(text.splitlines()) == 1
    assert left_out.told() == (
        "13 executions left out: 1 no usage, 10 no customer ('b', 'c0', 'c1' and 3 more), "
        "1 more than 15 digits, 1 out of range"
    )
    _, left_out = exported(replace(TOKENS, customers={}), [line(1, agent="n" * 999)])
    assert re.fullmatch(r"1 execution left out: 1 no customer \('n{148}…n{148}'\)", left_out.told())


def test_names_that_a_map_lacks_can_be_copied():
    names = [f"organisation-{'0' * 100}/{n}/department-{'0' * 100}" for n in ("eu", "us", "ap")]
    found = [line(n, agent=name) for n, name in enumerate([*names, "x" * 999, "x" * 998], 1)]
    _, left_out = exported(replace(TOKENS, customers={}), found)
    told = ", ".join(map(repr, names))
    assert left_out.told() == f"5 executions left out: 5 no customer ({told} and 2 more)"
    _, left_out = exported(replace(TOKENS, customers={}), found[3:])
    assert re.search(r"\('x{148}…x{148}' \(2 that look so\)\)$", left_out.told())


# --- files of sent events ----------------------------------------------------------------------------


HEAD = "event_name,identifier,timestamp,stripe_customer_id,value\n"
ROW = "tokens,1-x,1800000000,a,34\n"
OBJECT = json.dumps(event().told("tokens"))
HUGE = "1e99999999999999999999"
ONE = [billing.Sent(1, "tokens", event())]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        (OBJECT, 1),
        (f"\ufeff{OBJECT}\r\n", 1),
        (f"\n  \n {OBJECT}\n\n", 3),
        (OBJECT.replace('"34"', "34"), 1),
        (OBJECT.replace('"34"', "34.0"), 1),
        (OBJECT.replace('"34"', "3.4e1"), 1),
        (OBJECT.replace("1800000000", '"1800000000"'), 1),
        (OBJECT.replace("1800000000", '"2027-01-15T08:00:00.999Z"'), 1),
        (OBJECT.replace("1800000000", '"2027-01-15T09:00:00+01:00"'), 1),
        (OBJECT.replace("{", '{"object": "billing.meter_event", "livemode": true, "created": 5,', 1), 1),
        (HEAD + ROW, 2),
        (f"\ufeff{HEAD}{ROW}".replace("\n", "\r\n"), 2),
        (f"\n{HEAD}\n{ROW}\n", 4),
        ((HEAD + ROW).replace(",", " , "), 2),
        (HEAD + 'tokens, "1-x", 1800000000, "a", "34"\n', 2),
        (OBJECT.replace('"a"', '" a "'), 1),
        (HEAD.replace("stripe", "payload_stripe").replace("value", "payload_value") + ROW, 2),
        ('value, "note" ,identifier,event_name,timestamp,stripe_customer_id\n'.replace(', "note" ', ',"note"')
         + '" 34 ","a\nb, c",1-x,tokens,1800000000,a\n', 2),
    ],
)  # fmt: skip
def test_a_file_is_read_whatever_it_looks_like(text, at):
    (one,) = read(text)
    assert one == (at, "tokens", event())


@pytest.mark.parametrize("text", ["", "\n", "\ufeff", " \r\n\n"])
def test_an_empty_file_is_one_of_no_events(text):
    assert read(text) == []
    assert read(HEAD) == []


def changed(field, value):
    """The event with something else in one place."""
    found = json.loads(OBJECT)
    (found["payload"] if field in found["payload"] else found)[field] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]\n", "line 1: neither a JSON object nor the head of a CSV table"),
        ("hello\n", "no column event_name, identifier, timestamp, stripe_customer_id, value"),
        ("event_name,identifier,value\n", "line 1: .*: no column timestamp, stripe_customer_id$"),
        (HEAD.replace("value", "value,payload_value"), "two columns value"),
        (HEAD + ROW + "tokens,1-x\n", "line 3: 2 cells under a head of 5"),
        (HEAD + ROW.replace("a,", "a,b,"), "line 2: 6 cells"),
        (HEAD + '"a\nb",1-x,5,a,1\n\n5,1-x\n', "line 5: 2 cells"),
        (HEAD + 'tokens,"1-x\n\n', "line 2: unexpected end of data"),
        (HEAD + ROW.replace("1-x", ""), "line 2: identifier must be a text, not ''"),
        (HEAD + ROW.replace("34", ""), "line 2: value must be a number, not ''"),
        (HEAD + f'tokens,"{"x" * 200_000}",5,a,1\n', "line 2: field larger"),
        (f"{OBJECT}\n\n{{\n", "line 3: no JSON: "),
        (f"{OBJECT}\n5\n", "line 2: no JSON object"),
        (f"{OBJECT} x\n", "line 1: no JSON: Extra data"),
        ('{"a":' * 100_000, "line 1: no JSON: it goes too deep"),
        ("{}", "line 1: it has no payload"),
        (OBJECT.replace('"value"', '"other"'), "line 1: value must be a number, not None"),
        (OBJECT.replace('"34"', "NaN"), "line 1: no JSON: NaN"),
        (OBJECT.replace('"value": "34"', '"value": "34", "value": "35"'), "'value' stands twice"),
        (changed("value", True), "value must be a number, not True"),
        (changed("value", [5]), "value must be a number"),
        (changed("value", "five"), "value must be a number, not 'five'"),
        (changed("value", "1e99"), "value must be a number"),
        (changed("value", "0.1e-99"), "value must be a number"),
        (changed("value", "9" * 5000), "value must be a number, not '9999"),
        (changed("value", "٣"), "value must be a number"),
        (changed("value", "inf"), "value must be a number"),
        (changed("stripe_customer_id", None), "stripe_customer_id must be a text, not None"),
        (changed("stripe_customer_id", ""), "stripe_customer_id must be a text"),
        (changed("identifier", 5), "identifier must be a text, not 5"),
        (changed("event_name", False), "event_name must be a text, not False"),
        (changed("timestamp", True), "timestamp must be whole seconds since 1970, not True|number"),
        (changed("timestamp", -1), "timestamp must be whole seconds"),
        (changed("timestamp", 1.5), "timestamp must be whole seconds"),
        (changed("timestamp", 10**30), "timestamp must be whole seconds"),
        (changed("timestamp", "2027-01-15"), "timestamp must be whole seconds"),
        (changed("timestamp", "1969-01-15T00:00:00Z"), "timestamp must be whole seconds"),
        (changed("timestamp", "soon"), "timestamp must be whole seconds"),
        (changed("timestamp", "9999-12-31T23:59:59-12:00"), "timestamp must be whole seconds"),
        (changed("stripe_customer_id", " \n"), "stripe_customer_id must be a text"),
        (OBJECT.replace('"34"', HUGE), "line 1: a number beyond all bounds: 1e99"),
        (OBJECT.replace("1800000000", HUGE), "line 1: a number beyond all bounds: 1e99"),
        (f'{OBJECT}\n{{"x": [-{HUGE}]}}\n', "line 2: a number beyond all bounds: -1e99"),
        (OBJECT.replace("1-x", "1\x01"), r"no JSON: Invalid control character at column \d+$"),
        (OBJECT + "\n{", "line 2: no JSON: .* at column 2$"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_by_its_line(text, words):
    with pytest.raises(UnreadableError, match=words) as error:
        read(text)
    assert error.value.at is not None
    assert len(str(error.value)) < 200


def test_huge_and_negative_numbers_are_numbers():
    for value in ("-5", "9" * 60, "0." + "1" * 60, "+1", "-0"):
        (one,) = read(changed("value", value))
        assert one.event.value == Decimal(value)
    found = billing.reconcile(
        TOKENS, [], read(told([event(1, "9" * 60), event(2, f"0.{'1' * 60}")])), EVER
    )
    assert f"{found.total.sent:f}" == f"{'9' * 60}.{'1' * 60}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "a JSON object from names to customer ids"),
        ("{", "no JSON"),
        ('{"a": 5}', "the customer id of 'a' must be a text, not 5"),
        ('{"a": true}', "not True"),
        ('{"a": null}', "not None"),
        ('{"a": " "}', "must be a text"),
        ('{"a": "cus_1\\n"}', "blanks around it, or a control character"),
        ('{"a": " cus_1"}', "blanks around it, or a control character"),
        ('{"a": "cus\\u001b_1"}', "blanks around it, or a control character"),
        (f'{{"a": {HUGE}}}', "a number beyond all bounds: 1e99"),
        ('{"a":\n "b}', r"^line 2: no JSON: Unterminated string starting at column 2$"),
        ('{"a": "x", "a": "y"}', "'a' stands twice in one object"),
        (f'{{"{"a" * 99}": "x", "{"a" * 99}": "y"}}', "^'a{99}' stands twice in one object"),
        (f'{{"{"a" * 999}": 5}}', "^the customer id of 'a{299}… must be a text"),
        (f'{{"{"a" * 99}": " b"}}', "^the customer id of 'a{99}' has blanks"),
    ],
)
def test_what_is_no_map_of_customers(text, words):
    with pytest.raises(UnreadableError, match=words):
        billing.customers(text)
    assert billing.customers('\ufeff{"": "cus_1", "a,\\n": "cus_2"}') == {
        "": "cus_1",
        "a,\n": "cus_2",
    }


# --- whatever there is -------------------------------------------------------------------------------


NAMES = st.sampled_from(["a", "b", "acme, inc", "two\nlines", 'say "x"', "é", " ", "=1"])
COUNTS = st.none() | st.integers(0, 10**17)
SPENDS = st.builds(
    lambda i, o, cost, unpriced, nested, told_: Spent(
        1, Usage(input_tokens=i, output_tokens=o) if told_ else None, cost=cost if told_ else None,
        unpriced=unpriced, nested=nested,
    ),
    COUNTS, COUNTS, st.none() | st.integers(0, 10**17), st.integers(0, 1), st.booleans(),
    st.booleans() | st.just(True),
)  # fmt: skip
BACKS = st.integers(0, 3 * DAY) | st.integers(-400_000, 40 * DAY)
LINES = st.lists(
    st.tuples(BACKS, NAMES | st.none(), SPENDS, st.sampled_from(Status) | st.just(Status.OK)),
    max_size=12,
).map(
    lambda rows: [
        line(n, started=NOW - back, agent=name, spent=spent, status=status)
        for n, (back, name, spent, status) in enumerate(rows)
    ]
)
METERS = st.builds(
    Meter, st.just("tokens"), st.sampled_from(billing.VALUES), st.just("agent"),
    st.none() | st.just({"a": "cus_1", "b": "cus_1", "two\nlines": "cus,2", "": "cus_3"}),
    st.sets(st.sampled_from(billing.UNPAID)).map(frozenset),
)  # fmt: skip


def in_a_table(text, prefix):
    """The same events as CSV."""
    page = io.StringIO()
    writer = csv.writer(page)
    writer.writerow(
        ["value", "event_name", f"{prefix}stripe_customer_id", "timestamp", "identifier"]
    )
    for found in map(json.loads, text.splitlines()):
        payload = found["payload"]
        writer.writerow([
            payload["value"], found["event_name"], payload["stripe_customer_id"], found["timestamp"],
            found["identifier"],
        ])  # fmt: skip
    return page.getvalue()


@given(METERS, LINES, st.integers(0, DAY), st.sampled_from(["", "payload_"]))
def test_what_was_exported_is_equal_and_the_same_again(meter, found, later, prefix):
    text, left_out = exported(meter, found)
    assert exported(meter, found)[0] == text
    again, _ = exported(meter, found, NOW + later)  # some are too old by then, or old enough
    first, second = (dict.fromkeys(t.splitlines()) for t in (text, again))
    soon = [one for one in second if one not in first]
    assert all(json.loads(one)["timestamp"] * 1000 > NOW for one in soon)
    assert [one for one in first if one in second] == [one for one in second if one in first]
    taken = [one for one in found if not isinstance(meter.event(one), Event)
             or billing.in_range(meter.event(one), NOW)]  # fmt: skip
    for file in (text, in_a_table(text, prefix)):
        held = billing.reconcile(meter, taken, read(file), EVER)
        assert held.equal
        assert held.total.sent_events == held.total.expected_events == len(text.splitlines())
        assert held.total.difference == 0
        assert not any(sums.differs for sums in held.days.values())
    missed = billing.reconcile(meter, found, read(text), EVER)
    assert len(missed.missing) == left_out.why[Why.OUT_OF_RANGE]
    ignored = held.total.sent_events + held.without_event.total()
    assert ignored == len(taken)


HARMS = st.lists(
    st.tuples(
        st.sampled_from(["drop", "double", "value", "customer", "time", "identifier"]),
        st.integers(0, 99),
        st.integers(1, 10**12) | st.integers(-(10**12), -1),
    ),
    max_size=5,
)
SPENDERS = st.lists(
    st.tuples(st.integers(0, 3 * DAY), NAMES.filter(str.strip), st.integers(0, 10**14)),
    min_size=1,
    max_size=8,
).map(
    lambda rows: [
        line(n, started=NOW - back, agent=name, spent=SPENT._replace(cost=cost))
        for n, (back, name, cost) in enumerate(rows)
    ]
)


def sums_of(events):
    """By day and customer, counted otherwise."""
    found = Counter()
    for one in events:
        day = time.strftime("%Y-%m-%d", time.gmtime(one.timestamp))
        found[day, one.customer] += Fraction(one.value)
    return found


def kept(found):
    return {key: value for key, value in found.items() if value}


@given(SPENDERS, HARMS)
def test_whatever_is_dropped_doubled_or_changed_is_found_with_its_sums(found, harms):
    meter = replace(TOKENS, value="cost")
    due = [meter.event(one) for one in found]
    whole = [[one] for one in due]  # what was sent of each
    missing, differing, extra, double = [], [], [], []
    touched = set()
    for harm, where, amount in harms:
        at = where % len(due)
        if at in touched:
            continue
        touched.add(at)
        one = due[at]
        if harm == "drop":
            whole[at] = []
            missing.append(one)
        elif harm == "double":
            whole[at] = [one, one]
            double.append(one)
        elif harm == "identifier":
            other = one._replace(identifier=f"z{one.identifier}")
            whole[at] = [other]
            missing.append(one)
            extra.append(other)
        else:
            other = {
                "value": one._replace(value=one.value + Decimal(amount).scaleb(-COST_DIGITS)),
                "customer": one._replace(customer=f"{one.customer}!"),
                "time": one._replace(timestamp=one.timestamp + amount % 10**6 + 1),
            }[harm]
            whole[at] = [other]
            differing.append((one, other))
    file = [one for group in whole for one in group]
    held = billing.reconcile(meter, found, read(told(file)), EVER)
    assert held.equal is (not touched)
    assert set(held.missing) == set(missing)
    assert len(held.missing) == len(missing)
    assert Counter(one.event for one in held.double) == Counter(double)
    assert {(pair.expected, pair.sent.event) for pair in held.differing} == set(differing)
    assert [one.sent.event for one in held.extra if one.why is None] == [
        one for one in file if one in extra
    ]
    for name, events in (("expected", due), ("sent", file), ("missing", missing),
                         ("double", double), ("extra", extra)):  # fmt: skip
        got = {key: Fraction(getattr(sums, name)) for key, sums in held.days.items()}
        assert kept(got) == kept(sums_of(events))
        assert Fraction(getattr(held.total, name)) == sum(Fraction(one.value) for one in events)
    for sums in (held.total, *held.days.values()):
        assert sums.difference == sums.sent - sums.expected
        assert sums.difference == -sums.missing + sums.double + sums.differing + sums.extra
    all_ = [one for pair in differing for one in pair] + missing + double + extra
    days = {(one.day, one.customer) for one in all_}
    assert {key for key, sums in held.days.items() if sums.differs} == days


def test_of_two_that_were_sent_the_right_one_is_none_of_the_differing():
    due = TOKENS.event(line())
    wrong = due._replace(value=Decimal(35))
    held = billing.reconcile(TOKENS, [line()], read(told([wrong, due, wrong])), EVER)
    assert [one.at for one in held.double] == [1, 3]
    assert (held.differing, held.missing, held.extra) == ([], [], [])
    held = billing.reconcile(TOKENS, [line()], read(told([wrong, wrong])), EVER)
    assert [(pair.sent.at, pair.fields) for pair in held.differing] == [(1, ("value",))]
    assert [one.at for one in held.double] == [2]


@pytest.mark.parametrize("value", ["34.0", "34", "0034", "3.4e1"])
def test_a_number_is_the_same_however_it_is_written(value):
    due = TOKENS.event(line()).told("tokens")
    due["payload"]["value"] = value
    assert billing.reconcile(TOKENS, [line()], read(json.dumps(due)), EVER).equal


@pytest.mark.parametrize(
    ("given_", "why"),
    [
        ({"status": Status.FAILED}, Why.FAILED),
        ({"status": Status.OPEN}, Why.OPEN),
        ({"spent": Spent()}, Why.NO_USAGE),
        ({"agent": None}, Why.NO_CUSTOMER),
    ],
)
def test_what_was_sent_of_an_execution_that_is_no_event(given_, why):
    sent = TOKENS.event(line())
    held = billing.reconcile(TOKENS, [line(**given_)], read(told([sent, sent])), EVER)
    assert [(one.sent.at, one.why) for one in held.extra] == [(1, why)]
    assert [one.at for one in held.double] == [2]
    assert held.without_event == {why: 1}


def test_a_span_cuts_no_second_and_leaves_out_what_lies_beside_it():
    assert billing.whole_seconds(1_001, 2_001) == (1_000, 3_000)
    assert billing.whole_seconds(1_000, 2_000) == (1_000, 2_000)
    span = (NOW - 10_000, NOW)
    inside = line(1, started=NOW - 10_000 + 999)
    sent = [
        TOKENS.event(inside)._replace(timestamp=5),  # moved far away, and still found
        event(2, at=NOW // 1000), event(3, at=NOW // 1000 - 11),
    ]  # fmt: skip
    held = billing.reconcile(TOKENS, [inside], read(told(sent)), span)
    assert [pair.fields for pair in held.differing] == [("timestamp",)]
    assert (held.extra, held.total.sent_events) == ([], 1)
    held = billing.reconcile(TOKENS, [], read(told([event(2, at=NOW // 1000 - 10)])), span)
    assert [one.why for one in held.extra] == [None]


# --- the commands ------------------------------------------------------------------------------------


STRIPE = ("--format", "stripe-meter-events")
METER = ("--event-name", "llm", "--value", "total_tokens", "--customer", "agent")
COST = ("--event-name", "llm", "--value", "cost", "--customer", "agent")


@pytest.fixture
def run():
    """Runs the command: exit code, output, complaints."""

    def invoke(*args, text=None):
        done = CliRunner().invoke(command, [str(arg) for arg in args], input=text)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stdout, done.stderr

    return invoke


def tell(url):
    """Executions that end in each way."""
    guard = Guard(store=url, pricer=story.PRICES)
    with agent("acme, inc\n"), worker("w-1"):
        guard.run_task("t", 1, story.spends(1000, 100))
        guard.run_task("t", 2, story.spends(500, 0))
        guard.run_task("t", 2, story.spends(500, 0))  # reused: nothing was paid
        with suppress(ValueError):
            guard.run_task("t", 3, _fails)
        with suppress(OutOfScope):
            guard.run_task("t", 4, _hands_back)
        with suppress(errors.UnknownOutcomeError):
            guard.run_task("t", 5, _knows_not)
    with agent("b"), scope("tenant"):
        guard.run_task("t", 6, story.spends(10, 1, "unheard-of"))
    guard.run_task("t", 7, story.quiet)
    open_ = guard.claim(Task.of("t", 8), "w-1")
    return guard, open_


def _fails(_):
    record_usage(input_tokens=7, model="m")
    raise ValueError


def _hands_back(_):
    record_usage(input_tokens=8, model="m")
    raise OutOfScope


def _knows_not(_):
    record_usage(input_tokens=9, model="m")
    raise errors.UnknownOutcomeError


@pytest.fixture(params=["sqlite", "redis"])
def at(request, tmp_path):
    """The options that name a store in which executions ended in each way."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
    guard, open_ = tell(url)
    yield ("--store", url)
    open_.release()
    guard.close()


def values(text):
    """In the order of their size: what starts within a millisecond has no other."""
    found = [json.loads(row)["payload"]["value"] for row in text.splitlines()]
    return sorted(found, key=Decimal, reverse=True)


def test_an_export_held_against_its_ledger(at, run, tmp_path):
    file, other = tmp_path / "sent.jsonl", tmp_path / "again.jsonl"
    code, text, err = run("export", *at, *STRIPE, *METER)
    assert (code, values(text)) == (0, ["1100", "500", "11"])
    assert err == "idemguard: 1 execution left out: 1 no usage\n"
    for path in (file, other):
        assert run("export", *at, *STRIPE, *METER, "-o", path)[:2] == (0, "")
    assert file.read_text() == other.read_text() == text
    for row in map(json.loads, text.splitlines()):
        assert list(row) == ["event_name", "identifier", "timestamp", "payload"]
        assert len(row["identifier"]) <= 100
        assert 0 <= time.time() - row["timestamp"] < 120
    ids = [json.loads(row)["identifier"] for row in text.splitlines()]
    known = [json.loads(row)["execution_id"] for row in run("export", *at)[1].splitlines()]
    assert [one for one in known if one in ids] == ids
    code, shown, err = run("reconcile", file, *at, *METER)
    assert (code, err) == (0, "")
    assert "Equal: 3 events, 1,611 total_tokens." in shown
    assert "1 declined, 1 failed, 1 lost, 1 no usage, 1 open." in shown
    table = tmp_path / "sent.csv"
    table.write_text(in_a_table(text, "payload_"), newline="")
    assert run("reconcile", table, *at, *METER)[0] == 0
    assert run("reconcile", "-", *at, *METER, text=table.read_bytes())[0] == 0


def test_those_that_were_paid_for_in_vain_are_events_where_they_are_asked_for(at, run, tmp_path):
    every = [word for kind in billing.UNPAID for word in ("--include", kind)]
    _, text, _ = run("export", *at, *STRIPE, *METER, *every)
    assert values(text) == ["1100", "500", "11", "9", "8", "7"]
    (tmp_path / "all").write_text(text)
    assert run("reconcile", tmp_path / "all", *at, *METER, *every)[0] == 0
    code, text, _ = run("reconcile", tmp_path / "all", *at, *METER, "--json")
    found = json.loads(text)
    assert code == 1
    assert {one["why"] for one in found["extra"]} == {"failed", "declined", "lost"}
    assert (found["total"]["extra"], found["total"]["difference"]) == ("24", "24")
    _, text, _ = run("reconcile", tmp_path / "all", *at, *METER)
    assert "Different: 3 extra." in text
    assert "  7  (failed)\n" in text
    assert run("reconcile", tmp_path / "all", *at, *METER, "--include", "failed")[0] == 1


def test_what_differs_is_shown_and_told_with_its_sums(at, run, tmp_path):
    _, text, err = run("export", *at, *STRIPE, *COST)
    assert values(text) == ["0.0045", "0.0015"]
    assert err == "idemguard: 2 executions left out: 1 no usage, 1 unpriced\n"
    second, first = sorted(
        map(json.loads, text.splitlines()), key=lambda one: one["payload"]["value"]
    )
    first["payload"]["value"] = 0.0046
    strange = {**second, "event_name": "other"}
    file = tmp_path / "sent.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in (first, first, strange)))
    code, text, err = run("reconcile", file, *at, *COST, "--json")
    found = json.loads(text)
    assert (code, err, found["equal"], found["other_events"]) == (1, "", False, 1)
    assert [one["identifier"] for one in found["missing"]] == [second["identifier"]]
    assert [(one["line"], one["differs"]) for one in found["differing"]] == [(1, ["value"])]
    assert found["differing"][0]["instead_of"]["payload"]["value"] == "0.0045"
    assert [one["line"] for one in found["double"]] == [2]
    sums = {
        "expected_events": 2, "expected": "0.006", "sent_events": 2, "sent": "0.0092",
        "missing": "0.0015", "double": "0.0046", "differing": "0.0001", "extra": "0",
        "difference": "0.0032",
    }  # fmt: skip
    assert found["total"] == sums
    (day,) = found["days"]
    assert day == {"day": day["day"], "customer": "acme, inc", **sums}
    code, text, err = run("reconcile", file, *at, *COST)
    assert (code, err) == (1, "")
    for words in (
        "Different: 1 missing, 1 double, 1 differing.",
        "Sent: 2 events, 0.0092 US dollars; the ledger has 2 events, 0.006 US dollars.",
        "By UTC day and customer, in US dollars",
        "1 event of other names not looked at.",
        "acme, inc",
        f"  line 2: {first['identifier']}",
        f"  {second['identifier']}",
    ):
        assert words in text


def test_times_are_those_of_the_other_formats(at, run, tmp_path):
    (tmp_path / "none").write_text("")
    for times in (("--until", "24h"), ("--since", "2w", "--until", "1w")):
        assert run("export", *at, *STRIPE, *METER, *times) == (0, "", "")
        assert run("reconcile", tmp_path / "none", *at, *METER, *times)[0] == 0
    code, text, _ = run("reconcile", tmp_path / "none", *at, *METER, "--since", "1h", "--json")
    assert (code, len(json.loads(text)["missing"])) == (1, 3)


def test_a_map_of_customers(at, run, tmp_path):
    names = tmp_path / "map.json"
    names.write_text(json.dumps({"acme, inc\n": "cus_1"}), encoding="utf-8-sig")
    code, text, err = run("export", *at, *STRIPE, *METER, "--customers", names)
    assert (code, values(text)) == (0, ["1100", "500"])
    assert {json.loads(row)["payload"]["stripe_customer_id"] for row in text.splitlines()} == {
        "cus_1"
    }
    assert err == "idemguard: 2 executions left out: 1 no usage, 1 no customer ('b')\n"
    (tmp_path / "sent").write_text(text)
    assert run("reconcile", tmp_path / "sent", *at, *METER, "--customers", names)[0] == 0
    assert run("reconcile", tmp_path / "sent", *at, *METER)[0] == 1


def test_strict_makes_an_error_of_what_cannot_be_billed(at, run, tmp_path):
    file = tmp_path / "sent.jsonl"
    code, text, err = run("export", *at, *STRIPE, *METER, "--strict", "-o", file)
    assert (code, text, err) == (2, "", "idemguard: 1 execution left out: 1 no usage\n")
    assert not file.exists()


def test_what_is_too_old_is_told_and_missing(run, tmp_path):
    store = SqliteStore(tmp_path / "old.db", clock=lambda: int(time.time() * 1000) - 36 * DAY)
    guard = Guard(store=store, pricer=story.PRICES, retention=60 * 86_400)
    with agent("a"):
        guard.run_task("t", 1, story.spends(5, 0))
    guard.close()
    store.close()
    at = ("--store", f"sqlite:///{tmp_path / 'old.db'}")
    assert run("export", *at, *STRIPE, *METER) == (
        0, "", "idemguard: 1 execution left out: 1 out of range\n",
    )  # fmt: skip
    (tmp_path / "none").write_text("")
    assert run("reconcile", tmp_path / "none", *at, *METER)[0] == 1
    assert run("reconcile", tmp_path / "none", *at, *METER, "--since", "35d")[0] == 0


def test_a_time_in_the_middle_of_a_second_parts_no_event_from_its_line(run, tmp_path):
    second = int(time.time()) - 3600
    store = SqliteStore(tmp_path / "cut.db", clock=lambda: second * 1000 + 700)
    guard = Guard(store=store)
    with agent("a"):
        guard.run_task("t", 1, story.spends(5, 0))
    guard.close()
    store.close()
    at = ("--store", f"sqlite:///{tmp_path / 'cut.db'}")
    run("export", *at, *STRIPE, *METER, "-o", tmp_path / "sent")
    moment = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.500Z"
    for times in (("--until", moment), ("--since", moment)):
        code, text, _ = run("reconcile", tmp_path / "sent", *at, *METER, *times)
        assert code == 0
        assert "Equal: 1 event, 5 total_tokens." in text


def test_many_differences_are_cut_short_for_people_alone(run, tmp_path):
    guard = Guard(store=f"sqlite:///{tmp_path / 'm.db'}")
    with agent("a"):
        for number in range(25):
            guard.run_task("t", number, story.spends(1, 0))
    guard.close()
    at = ("--store", f"sqlite:///{tmp_path / 'm.db'}")
    code, text, err = run("export", *at, *STRIPE, *METER, "--strict")
    assert (code, values(text), err) == (0, ["1"] * 25, "")
    (tmp_path / "none").write_text("")
    _, text, _ = run("reconcile", tmp_path / "none", *at, *METER)
    assert "Different: 25 missing." in text
    assert "and 5 more (--json)" in text
    assert text.count("Z  a  1\n") == 20
    _, text, _ = run("reconcile", tmp_path / "none", *at, *METER, "--json")
    assert len(json.loads(text)["missing"]) == 25


def test_a_row_without_room_for_its_sums_adds_up_all_the_same(run, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    guard = Guard(store=f"sqlite:///{tmp_path / 'm.db'}")
    with agent("a-customer-of-some-length"):
        for number in range(4):
            guard.run_task("t", number, story.spends(10**9 + number, 0))
    guard.close()
    at = ("--store", f"sqlite:///{tmp_path / 'm.db'}")
    rows = run("export", *at, *STRIPE, *METER)[1].splitlines()
    strange = rows[0].replace('"identifier":"', '"identifier":"x')
    rows = [rows[1], rows[1], rows[2].replace('"value":"1', '"value":"2'), rows[3], strange]
    (tmp_path / "sent").write_text("\n".join(rows))
    code, text, _ = run("reconcile", tmp_path / "sent", *at, *METER)
    assert code == 1
    assert "no room for" not in text
    (sums,) = re.findall(r"^  sent (\S+) = expected (\S+) - missing (\S+) \+ double (\S+) "
                         r"\+ differing (\S+) \+ extra (\S+)$", text, re.MULTILINE)  # fmt: skip
    sent, expected, missing, *more = (int(one.replace(",", "")) for one in sums)
    assert sent == expected - missing + sum(more)
    assert min(missing, *more) >= 10**9
    monkeypatch.setenv("COLUMNS", "120")
    _, text, _ = run("reconcile", tmp_path / "sent", *at, *METER)
    assert re.search(r"^day +customer +expected +sent +missing +double +differing +extra$",
                     text, re.MULTILINE)  # fmt: skip


@pytest.mark.parametrize("value", ["total_tokens", "cost"])
def test_equal_sums_say_what_they_are_of(run, tmp_path, value):
    guard = Guard(store=f"sqlite:///{tmp_path / 'm.db'}", pricer=story.PRICES)
    with agent("a"):
        guard.run_task("t", 1, story.spends(1000, 100))
    guard.close()
    args = ("--store", f"sqlite:///{tmp_path / 'm.db'}", *METER[:2], "--value", value, *METER[4:])
    run("export", *args, *STRIPE, "-o", tmp_path / "sent")
    said = {"total_tokens": "1,100 total_tokens.", "cost": "0.0045 US dollars."}[value]
    assert f"Equal: 1 event, {said}\n" in run("reconcile", tmp_path / "sent", *args)[1]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_differences_are_told_by_the_code_also_where_nobody_reads(empty, tmp_path, form):
    (tmp_path / "sent").write_text(OBJECT.replace('"tokens"', '"llm"'))
    (tmp_path / "none").write_text("")
    for name, code in (("sent", 1), ("none", 0)):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "idemguard", "reconcile", tmp_path / name, *empty, *METER, *form],
            stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
        os.close(writing)
        assert (done.returncode, done.stderr) == (code, "")


def test_a_closed_standard_input_is_an_error(empty):
    done = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", sys.executable, "-m", "idemguard", "reconcile", "-", *empty, *METER],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "idemguard: standard input is closed\n"


@pytest.fixture
def empty(tmp_path):
    """The options that name a store in which nothing happened."""
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    guard = Guard(store=url)
    guard.ledger.totals()
    guard.close()
    return ("--store", url)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hello\n", "sent: line 1: neither a JSON object nor the head of a CSV table"),
        (HEAD.encode() + b"tokens,1-x,1,\xff,5\n", "sent: line 2: no UTF-8 text"),
        (OBJECT.encode("utf-16"), "sent: line 1: no UTF-8 text"),
        (OBJECT.encode() + b"\n{}\n", "sent: line 2: it has no payload"),
        (b"\0" * 9, "sent: line 1: "),
        (b"\x1b[31m,b\n", "sent: line 1: neither"),
        (OBJECT.replace('"34"', HUGE).encode(), "sent: line 1: a number beyond all bounds"),
        (
            OBJECT.replace("1800000000", '"9999-12-31T23:59:59-12:00"')
            .replace("tokens", "llm")
            .encode(),
            "sent: line 1: timestamp must be whole seconds",
        ),
        (None, "sent: no such file or directory"),
    ],
)
def test_a_file_that_is_none_is_one_line_and_an_error(run, empty, tmp_path, content, words):
    file = tmp_path / "sent"
    if content is not None:
        file.write_bytes(content)
    code, text, err = run("reconcile", file, *empty, *METER)
    assert (code, text, err.count("\n")) == (2, "", 1)
    assert words in err
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("export", *STRIPE), "--format stripe-meter-events needs --event-name"),
        (("export", *STRIPE, *METER[:2]), "needs --value"),
        (("export", *STRIPE, *METER[:4]), "needs --customer"),
        (("export", *METER[:2]), "--event-name is for --format stripe-meter-events"),
        (("export", "--format", "csv", "--include", "lost"), "--include is for --format"),
        (("export", "--strict"), "--strict is for --format"),
        (("export", *STRIPE, *METER, "--include", "open"), "'--include'"),
        (("export", *STRIPE, *METER, "--event-name", ""), "1 to 100 characters"),
        (("export", *STRIPE, *METER, "--event-name", "x" * 101), "1 to 100 characters"),
        (("export", *STRIPE, *METER, "--value", "tokens"), "'--value'"),
        (("export", *STRIPE, *METER, "--customers", "/no/such"), "/no/such: no such file"),
        (("export", *STRIPE, *METER, "--customers", "/"), "/: is a directory"),
        (("reconcile", "-"), "Missing option '--event-name'"),
        (("reconcile", *METER), "Missing argument 'SENT_FILE'"),
        (("reconcile", "/", *METER), "/: is a directory"),
        (("reconcile", "-", *METER, "--since", "1h", "--until", "2h"), "it is not before --until"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_clear_line(run, empty, args, words):
    code, text, err = run(*args, *empty, text="")
    assert (code, text, err.count("\n")) == (2, "", 1)
    assert words in err


def test_a_map_that_is_none_is_one_line(run, empty, tmp_path):
    for content, words in (
        (b"\xff", "no UTF-8 text"), (b'{"a": 5}', "must be a text, not 5"),
        (f'{{"a": {HUGE}}}'.encode(), "map: a number beyond all bounds"),
    ):  # fmt: skip
        (tmp_path / "map").write_bytes(content)
        code, _, err = run("export", *STRIPE, *METER, "--customers", tmp_path / "map", *empty)
        assert (code, err.count("\n")) == (2, 1)
        assert words in err


def test_nothing_sent_of_nothing_is_equal(run, empty, tmp_path):
    (tmp_path / "sent").write_text("")
    code, text, err = run("reconcile", tmp_path / "sent", *empty, *METER)
    assert (code, err) == (0, "")
    assert "Equal: 0 events, 0 total_tokens." in text


# --- what the documentation shows ----------------------------------------------------------------------


PAGE = (Path(__file__).parents[1] / "docs" / "billing.md").read_text()
SHOWN = re.compile(r"^```console\n\$ idemguard ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIES = (
    (r"\d{13}-[0-9a-f]{16}", "ID"),
    (r"\d{4}-\d\d-\d\d[ T][\d:]{8}Z?", "TIME"),
    (r"\d{4}-\d\d-\d\d", "DAY"),
)


def settled(text):
    for what, instead in VARIES:
        text = re.sub(what, instead, text)
    return [one.rstrip() for one in text.splitlines()]


def test_commands_print_what_is_shown(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    code = "\n".join(piece for kind, piece in pieces(PAGE) if kind == "code")
    subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=60, check=True)
    shown = SHOWN.findall(PAGE)
    codes = []
    for words, text in shown:
        code, out, err = run(*shlex.split(words))
        assert (settled(out), err) == (settled(text), "")
        codes.append(code)
    assert codes == [0, 0, 1]


def test_the_sender_runs_where_it_is_copied_alone_and_sends_no_double(tmp_path):
    (sender,) = (piece for kind, piece in pieces(PAGE) if kind == "code" and "def send" in piece)
    (tmp_path / "events").write_text(f"{OBJECT}\n{OBJECT}\n")
    more = "posted = []\nsend('events', posted.append)\nsend('events', posted.append)\nprint(len(posted))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{sender}\n{more}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_every_reason_and_option_is_told_of():
    for why in Why:
        assert str(why) in PAGE or why is Why.INSIDE
    for name in ("export", "reconcile"):
        for parameter in command.commands[name].params:
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                assert option in PAGE or option in ("-o", "--help", "--namespace"), option


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_file_without_an_event_of_this_name_is_an_error_that_tells_its_names(
    at, run, tmp_path, form
):
    _, text, _ = run("export", *at, *STRIPE, *METER)
    file, table = tmp_path / "sent.jsonl", tmp_path / "sent.csv"
    file.write_text(text)
    table.write_text(in_a_table(text, ""), newline="")
    mistyped = ("--event-name", "lllm", *METER[2:])
    for path in (file, table):
        assert run("reconcile", path, *at, *mistyped, *form) == (
            2, "",
            f"idemguard: {path}: none of its 3 events is named 'lllm', but 'llm' (--event-name)\n",
        )  # fmt: skip
    others = [
        {"event_name": name} | {"payload": {}} for name in ("b", "a\n", "c", "a\n", "n" * 999)
    ]
    file.write_text("".join(f"{json.dumps(one)}\n" for one in others))
    code, shown, err = run("reconcile", "-", *at, *METER, *form, text=file.read_bytes())
    assert (code, shown, err.count("\n")) == (2, "", 1)
    assert r"standard input: none of its 5 events is named 'llm', but 'a\n', 'b', 'c' and 1" in err
    file.write_text("".join(f"{json.dumps(one)}\n" for one in others[-1:]))
    assert re.search(r", but 'n{148}…n{148}' \(", run("reconcile", file, *at, *METER, *form)[2])
    # what is to be typed stands whole, and whatever is asked for and of which file, in one line
    names = [f"meter-{'0' * 260}-{n}-tokens" for n in range(5)]
    deep = tmp_path / ("d" * 200) / ("e" * 200) / "sent.jsonl"
    deep.parent.mkdir(parents=True)
    deep.write_text(
        "".join(f"{json.dumps({'event_name': name, 'payload': {}})}\n" for name in names)
    )
    err = run("reconcile", deep, *at, "--event-name", "\x01" * 100, *METER[2:], *form)[2]
    assert f"', but {', '.join(map(repr, names[:3]))} and 2 more (--event-name)\n" in err
    # where some are of this name, the others do not matter
    file.write_text(text.splitlines(keepends=True)[0] + f"{json.dumps(others[0])}\n")
    code, shown, err = run("reconcile", file, *at, *METER, *form)
    assert (code, err) == (1, "")
    file.write_text("\n")
    code, shown, err = run("reconcile", file, *at, *METER, *form)
    assert (code, err) == (1, "")


def test_events_of_other_meters_may_tell_anything():
    ours = {"event_name": "n", "identifier": "1-a", "timestamp": 1,
            "payload": {"stripe_customer_id": "c", "value": "1"}}  # fmt: skip
    other = {"event_name": "other", "identifier": "o", "timestamp": "?", "payload": {"seats": []}}
    lines = [json.dumps(event) + "\n" for event in (other, ours, other)]
    assert [told.event_name for told in billing.sent(lines, "n")] == ["other", "n", "other"]
    with pytest.raises(billing.UnreadableError, match="line 1"):
        list(billing.sent(lines, "other"))
    with pytest.raises(billing.UnreadableError, match="line 1"):
        list(billing.sent(lines))

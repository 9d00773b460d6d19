"""A report from a real ledger: what it gathers, and how it is written for people and programs."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from html import unescape

import pytest
from conftest import Clock
from rich.cells import cell_len
from workers import story
from workers.story import HOSTILE

from idemguard import ExecutionLedger, Guard, OutOfScope, Task, agent, record_usage, scope, worker
from idemguard.alerts import Limits
from idemguard.change import Comparison
from idemguard.report import details, gather, html, plain, tables
from idemguard.report.paper import Paper, cut
from idemguard.report.words import (
    cell,
    decimal_text,
    harmless,
    iso,
    lasted,
    local,
    money,
    share,
    short,
)
from idemguard.stores.memory import MemoryStore

FIELDS = {
    "calls", "executions", "tasks", "doubled_share", "duplication_rate", "duplicates", "reused",
    "fallback", "declined", "failed", "refused", "unguarded", "lost", "input_tokens",
    "output_tokens", "total_tokens", "saved_tokens", "charged", "wasted", "saved", "unpriced",
    "without_usage",
}  # fmt: skip
MORE = {"executed", "avg_input", "wasted_tokens", "currency"}
OF_ROWS = {"inclusive", "inclusive_tokens"}


@pytest.fixture
def ledger(store):
    """A ledger in which everything has happened once."""
    story.tell(store, broken=HOSTILE)
    return ExecutionLedger(store)


@pytest.fixture
def drawn(monkeypatch):
    """Draws a report on a page of so many columns."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def draw(found, columns=80):
        page = io.StringIO()
        paper = Paper(page)
        paper.width = columns
        tables.show(paper, found)
        return page.getvalue()

    return draw


TWICE = (
    "Runs twice: 3 of 22 tasks (doubled share 13.6%); 1 of 26 executions are duplicates "
    "(duplication rate 3.8%)."
)


def row(rows, key, name):
    return next(one for one in rows if one[key] == name)


# --- what it holds ---------------------------------------------------------------------------------


def test_a_report_says_what_ran_and_what_it_came_to(ledger):
    told = plain.report(gather(ledger))
    assert told["totals"] == {
        "calls": 30,
        "executions": 26,
        "tasks": 22,
        "doubled_share": 3 / 22,
        "duplication_rate": 1 / 26,
        "duplicates": 1,
        "executed": 21,
        "reused": 4,
        "fallback": 0,
        "declined": 4,
        "failed": 1,
        "refused": 0,
        "unguarded": 0,
        "lost": 0,
        "input_tokens": 7920,
        "output_tokens": 501,
        "total_tokens": 8421,
        "avg_input": 7920 / 20,
        "wasted_tokens": 1100,
        "saved_tokens": 2000,
        "charged": "0.03123",
        "wasted": "0.0045",
        "saved": "0.006",
        "currency": "USD",
        "unpriced": 1,
        "without_usage": 6,
    }
    assert json.loads(plain.dump(told)) == told


def test_totals_and_rows_hold_the_same_fields(ledger):
    told = plain.report(gather(ledger))
    assert list(told) == [
        "since", "until", "namespace", "totals", "task_types", "agents", "over_time",
        "worst_tasks", "checked", "alerts", "drops", "loops", "missed_duplicates", "workers",
        "growth",
    ]  # fmt: skip
    assert told["totals"].keys() == FIELDS | MORE
    for key, rows in (("task_type", told["task_types"]), ("agent", told["agents"])):
        assert all(one.keys() == FIELDS | MORE | OF_ROWS | {key} for one in rows)
        for field in ("calls", "executions", "tasks", "reused", "total_tokens", "unpriced"):
            assert sum(one[field] for one in rows) == told["totals"][field], field
        charged = sum(Decimal(one["charged"]) for one in rows)
        assert charged == Decimal(told["totals"]["charged"])


def test_rows_say_who_spent_and_who_saved(ledger):
    told = plain.report(gather(ledger))
    summarise = row(told["task_types"], "task_type", "summarise")
    assert told["task_types"][0] is summarise  # the most charged
    assert (summarise["executions"], summarise["tasks"], summarise["duplicates"]) == (5, 4, 1)
    assert (summarise["doubled_share"], summarise["duplication_rate"]) == (1 / 4, 1 / 5)
    assert (summarise["charged"], summarise["wasted"]) == ("0.0225", "0.0045")
    outer = row(told["task_types"], "task_type", "outer")
    assert (outer["charged"], outer["inclusive"]) == ("0.0003", "0.0033")
    assert (outer["total_tokens"], outer["inclusive_tokens"]) == (100, 1100)
    reader = row(told["agents"], "agent", "reader")
    assert (reader["calls"], reader["executions"], reader["saved"]) == (6, 2, "0.006")
    assert row(told["agents"], "agent", None)["unpriced"] == 1


def test_findings_name_who_and_when(ledger):
    told = plain.report(gather(ledger))
    (drop,), (loop,) = told["drops"], told["loops"]
    assert (drop["task_type"], drop["times"], drop["workers"]) == ("review", 2, ["w-1", "w-2"])
    assert (loop["task_type"], loop["times"], loop["workers"]) == ("translate", 2, ["w-1"])
    for found in (drop, loop):
        assert len(found["fingerprint"]) == 64
        assert found["first"] <= found["last"] <= told["until"]
        assert (found["scope"], found["version"]) == ("", None)
    (missed,) = told["missed_duplicates"]
    assert (missed["task_type"], missed["looked_at"]) == ("draft", 8)
    assert [suspect["field"] for suspect in missed["suspects"]] == ["x7"]
    assert missed["executions"] == 7


@pytest.mark.parametrize("store", ["memory", "sqlite"], indirect=True)
def test_a_report_of_one_task_type(ledger):
    whole = plain.report(gather(ledger))
    one = plain.report(gather(ledger, task_type="review"))
    assert one["task_types"] == [row(whole["task_types"], "task_type", "review")]
    assert one["totals"].items() <= one["task_types"][0].items()
    assert [agent["agent"] for agent in one["agents"]] == [None]
    assert {**one["totals"], "doubled_share": None}.items() <= one["agents"][0].items()
    assert (one["drops"], one["loops"], one["missed_duplicates"]) == (whole["drops"], [], [])
    one = plain.report(gather(ledger, task_type="draft"))
    assert (one["drops"], one["loops"]) == ([], [])
    assert one["missed_duplicates"] == whole["missed_duplicates"]
    assert [worker["worker"] for worker in gather(ledger, task_type="date").workers] == ["w-3"]


@pytest.mark.parametrize("store", ["memory", "sqlite"], indirect=True)
def test_a_report_of_one_agent(ledger):
    whole = plain.report(gather(ledger))
    one = plain.report(gather(ledger, agent="reader"))
    assert one["agents"] == [row(whole["agents"], "agent", "reader")]
    assert one["totals"].items() <= one["agents"][0].items()
    assert [kind["task_type"] for kind in one["task_types"]] == ["extract"]
    assert (one["drops"], one["loops"], one["missed_duplicates"]) == ([], [], [])
    both = plain.report(gather(ledger, agent="reader", task_type="extract"))
    assert both["totals"] == one["totals"]
    assert gather(ledger, agent="reader", task_type="review").empty


@pytest.mark.parametrize("store", ["memory"], indirect=True)
@pytest.mark.parametrize("about", [{"task_type": "nosuch"}, {"agent": "nosuch"}, {"until": 1}])
def test_where_nothing_ran_there_are_noughts(ledger, about, drawn):
    found = gather(ledger, **about)
    told = plain.report(found)["totals"]
    assert told["avg_input"] is None
    assert {told[name] for name in ("charged", "wasted", "saved")} == {"0"}
    assert not any(told[name] for name in FIELDS - {"charged", "wasted", "saved"})
    assert found.empty
    says = {
        "task_type": "Nothing that was called or executed until then matches task type nosuch; "
        "there are 10 task types.",
        "agent": "Nothing that was called or executed until then matches agent nosuch.",
        "until": "Nothing was called or executed until then: namespace default was not used.",
    }
    assert says[next(iter(about))] in drawn(found)


MATCHES = "Nothing that was called or executed until then matches task type"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("sumarise", "sumarise; did you mean summarise?"),
        ("mmar", "mmar; did you mean summarise?"),
        ("inter", "inter; did you mean inner or outer?"),
        ("xyz", "xyz; there are 10 task types."),
        ("", "; there are 10 task types."),
        ("[red]", f"[red]; did you mean {harmless(HOSTILE)}?"),
    ],
)
@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_task_type_that_never_was_may_be_misspelt(ledger, drawn, asked, told):
    found = gather(ledger, task_type=asked)
    assert f"{MATCHES} {told}\n" in drawn(found)
    page = re.sub("<[^>]*>", "", unescape(html.page(found)))
    assert f"task type {told}" in page


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_task_type_that_ran_at_another_time_is_not_misspelt(ledger, drawn):
    found = gather(ledger, until=1, task_type="summarise")
    assert f"{MATCHES} summarise.\n" in drawn(found)


@pytest.mark.parametrize("store", ["memory"], indirect=True)
@pytest.mark.parametrize(
    ("since", "until", "told"),
    [
        ("00:30", "01:15", "2026-10-25 02:30:00 UTC+02:00 to 2026-10-25 02:15:00 UTC+01:00, sums"),
        ("01:15", "01:30", "2026-10-25 02:15:00 to 2026-10-25 02:30:00, sums"),
    ],
)
def test_where_clocks_are_changed_in_between_times_have_their_offset(
    guard, drawn, monkeypatch, since, until, told
):
    span = [
        round(datetime.fromisoformat(f"2026-10-25T{at}Z").timestamp() * 1000)
        for at in (since, until)
    ]
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        text = drawn(gather(guard.ledger, since=span[0], until=span[1]))
        page = io.StringIO()
        details.comparison(Paper(page), Comparison((*span,), (*span,), (), None), ())
    time.tzset()
    assert f"Namespace default, {told} by whole windows" in text
    assert f"b: {told.removesuffix(', sums')}\n" in page.getvalue()


def test_a_window_of_time_counts_what_started_in_it(guard_of, clock):
    guard = guard_of(pricer=story.PRICES)
    guard.run_task("early", 1, story.spends(10, 1))
    clock.advance(7200)
    guard.run_task("late", 1, story.spends(20, 2))
    now = clock.now
    for since, until, kinds in (
        (None, None, {"early", "late"}),
        (now - 3_600_000, None, {"late"}),
        (None, now - 3_600_000, {"early"}),
        (now - 3_600_000, now - 3_000_000, set()),
    ):
        found = gather(guard.ledger, since=since, until=until)
        assert {one["task_type"] for one in found.task_types} == kinds
        assert bool(found.workers) is bool(kinds)
        assert plain.report(found)["since"] == (None if since is None else iso(since))
        assert plain.report(found)["until"] == iso(now if until is None else until)


@pytest.mark.parametrize("store", ["memory", "sqlite"], indirect=True)
def test_windows_tell_the_rate_over_time(guard_of, clock):
    observed = guard_of(mode="observe")

    def runs(*payloads):
        for payload in payloads:
            observed.run_task("t", payload, story.quiet)
            observed.run_task("other", payload, story.quiet)

    clock.now -= clock.now % 3_600_000
    runs(1, 1, 2)
    first = clock.now
    clock.advance(600)
    guard_of().run_task("t", 1, story.quiet)  # reused: nothing is executed in this window
    clock.advance(300)
    runs(3)
    steps = [
        (first, first + 300_000, 6, 2, 1 / 3),
        (first + 900_000, first + 1_200_000, 2, 0, 0),
    ]
    found = gather(observed.ledger)
    assert [tuple(one.values()) for one in found.over_time] == steps
    told = plain.report(found)["over_time"]
    assert told[0] == {
        "start": iso(first), "end": iso(first + 300_000), "executions": 6, "duplicates": 2,
        "duplication_rate": 1 / 3,
    }  # fmt: skip
    only = gather(observed.ledger, task_type="t").over_time
    assert [(one["executions"], one["duplicates"]) for one in only] == [(3, 1), (1, 0)]
    assert gather(observed.ledger, until=first).over_time == []


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_where_a_part_is_of_hours_all_steps_are(guard_of, store, clock):
    observed = guard_of(mode="observe")
    clock.now -= clock.now % 3_600_000
    first = clock.now
    for _ in range(2):
        observed.run_task("t", 1, story.quiet)
    clock.advance(30 * 3600)
    for number in range(3):
        observed.run_task("t", 2 + number % 2, story.quiet)
        clock.advance(300)
    store.tend(None)
    assert {one.span for one in observed.ledger.windows()} == {300_000, 3_600_000}
    found = gather(observed.ledger)
    assert [tuple(one.values()) for one in found.over_time] == [
        (first, first + 3_600_000, 2, 1, 1 / 2),
        (first + 30 * 3_600_000, first + 31 * 3_600_000, 3, 1, 1 / 3),
    ]
    assert sum(one["executions"] for one in found.over_time) == found.totals["executions"]


@pytest.mark.parametrize("store", ["memory"], indirect=True)
@pytest.mark.parametrize(("days", "step"), [(31, 3_600_000), (32, 86_400_000)])
def test_over_a_month_steps_are_days(guard_of, store, clock, days, step):
    guard = guard_of(window_retention=None)
    clock.now -= clock.now % 86_400_000
    first = clock.now
    for number in range(days + 1):
        guard.run_task("t", number, story.quiet)
        clock.advance(86_400)
    store.tend(None)
    found = gather(guard.ledger).over_time
    assert {one["end"] - one["start"] for one in found} == {step}
    assert [one["start"] for one in found] == [first + at * 86_400_000 for at in range(days + 1)]


def test_the_worst_tasks_are_those_whose_duplicates_wasted_most(guard_of, clock):
    observed = guard_of(mode="observe", pricer=story.PRICES)
    for payload, tokens, times in (("dear", 1000, 3), ("cheap", 10, 4), ("once", 10**6, 1)):
        for number in range(times):
            with worker(f"w-{number % 3}"):
                observed.run_task("t", payload, story.spends(tokens, 0))
            clock.advance(1)
    with suppress(ValueError):
        observed.run_task("again", 1, story.fails)
    observed.run_task("again", 1, story.quiet)  # a retry is none
    told = plain.report(gather(observed.ledger))["worst_tasks"]
    assert told == [
        {
            "task_type": "t", "fingerprint": Task.of("t", "dear").fingerprint, "scope": "",
            "version": None, "executions": 3, "duplicates": 2, "wasted_tokens": 2000,
            "charged": "0.009", "wasted": "0.006", "unpriced": 0, "unpriced_duplicates": 0, "workers": ["w-1", "w-2"],
            "last": iso(clock.now - 6000),
        },
        {
            "task_type": "t", "fingerprint": Task.of("t", "cheap").fingerprint, "scope": "",
            "version": None, "executions": 4, "duplicates": 3, "wasted_tokens": 30,
            "charged": "0.00012", "wasted": "0.00009", "unpriced": 0, "unpriced_duplicates": 0,
            "workers": ["w-1", "w-2", "w-0"], "last": iso(clock.now - 2000),
        },
    ]  # fmt: skip
    assert plain.report(gather(observed.ledger, task_type="again"))["worst_tasks"] == []


def partly_priced(observed):
    """Executions of which some have no price: of an agent, of workers, of tasks that ran twice."""
    for name, who, task, model in (
        ("w-1", "writer", "half", "m"), ("w-2", "writer", "half", "unheard-of"),
        ("w-3", "reader", "none", "unheard-of"), ("w-3", "reader", "none", "unheard-of"),
        ("w-1", "writer", "all", "m"),
    ):  # fmt: skip
        with worker(name), agent(who):
            observed.run_task(task, 1, story.spends(1000, 0, model))

    def two_models(_):
        record_usage(input_tokens=1000, output_tokens=0, model="m")
        record_usage(input_tokens=9000, output_tokens=0, model="unheard-of")

    with worker("w-4"), agent("mixed"):
        observed.run_task("mixed", 1, two_models)


def test_executions_without_a_price_are_told_wherever_money_is(guard_of):
    observed = guard_of(mode="observe", pricer=story.PRICES)
    partly_priced(observed)
    told = plain.report(gather(observed.ledger))

    def sums(rows, key):
        fields = ("charged", "wasted", "unpriced", "unpriced_duplicates")
        return {one[key]: tuple(one.get(field) for field in fields) for one in rows}

    assert sums(told["workers"], "worker") == {
        "w-1": ("0.006", "0", 0, 0),
        "w-2": ("0", "0", 1, 1),
        "w-3": ("0", "0", 2, 1),
        "w-4": ("0.003", "0", 1, 0),
    }
    assert sums(told["worst_tasks"], "task_type") == {
        "half": ("0.003", "0", 1, 1), "none": ("0", "0", 2, 1),
    }  # fmt: skip
    assert {one["agent"]: one["unpriced"] for one in told["agents"]} == {
        "writer": 1, "reader": 2, "mixed": 1,
    }  # fmt: skip


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_people_see_a_question_mark_where_money_is_missing(guard_of, drawn):
    observed = guard_of(mode="observe", pricer=story.PRICES)
    partly_priced(observed)
    text = drawn(gather(observed.ledger))
    rows = {line.split()[0]: line.split()[-3:] for line in text.splitlines() if line.strip()}
    assert rows["half"] == ["$0.0030+?", "?", "-"]
    assert rows["none"] == ["?", "?", "-"]
    assert rows["all"] == ["$0.0030", "-", "-"]
    assert rows["writer"] == ["$0.0060+?", "?", "-"]
    assert rows["reader"] == ["?", "?", "-"]
    assert rows["mixed"] == ["$0.0030+?", "-", "-"]
    assert rows["w-1"][1:] == ["$0.0060", "-"]
    assert rows["w-2"][1:] == rows["w-3"][1:] == ["?", "?"]
    assert rows["w-4"][1:] == ["$0.0030+?", "-"]
    assert "Cost:  $0.0090 (15.0k tokens); duplicates wasted ? (2,000 tokens)." in text
    assert "The cost of 4 executions is unknown and not in it" in text


def test_the_newest_lines_are_read_once(guard_of, monkeypatch):
    observed = guard_of(mode="observe")
    for _ in range(2):
        observed.run_task("t", 1, story.quiet)
    read = []
    newest = ExecutionLedger.newest

    def counted(self, *args, **more):
        read.append(more["span"])
        return newest(self, *args, **more)

    monkeypatch.setattr(ExecutionLedger, "newest", counted)
    found = gather(observed.ledger)
    assert (found.looked_at, len(found.worst_tasks)) == (2, 1)
    assert len(read) == 1


def test_what_was_handed_back_is_told_as_the_ledger_tells_it(guard_of, clock):
    guard = guard_of()
    for payload, times in (("dropped", 1), ("looped", 3), ("over", 2), ("resolved", 2)):
        for _ in range(times):
            with suppress(OutOfScope):
                guard.run_task("t", payload, story.hands_back)
        if payload in ("over", "resolved"):
            guard.resolve(Task.of("t", payload), 1)
        if payload == "over":  # and so is what it was resolved by
            clock.advance(1000)
    found = gather(guard.ledger)

    def tasks(rows):
        return {one.fingerprint: one.times for one in rows}

    prints = {
        name: Task.of("t", name).fingerprint for name in ("dropped", "looped", "over", "resolved")
    }
    assert tasks(found.drops) == {prints["dropped"]: 1, prints["looped"]: 3}
    assert tasks(found.loops) == {prints["looped"]: 3, prints["over"]: 2, prints["resolved"]: 2}
    assert (found.drops, found.loops) == (guard.ledger.drops(), guard.ledger.loops())


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_twenty_of_the_worst_are_told_of_equals_the_newest(guard_of, clock):
    observed = guard_of(mode="observe")
    for payload in [*range(25), *range(25)]:
        observed.run_task("t", payload, story.quiet)
        clock.advance(1)
    found = gather(observed.ledger)
    assert [one.fingerprint for one in found.worst_tasks] == [
        Task.of("t", payload).fingerprint for payload in range(24, 4, -1)
    ]
    assert found.totals["duplicates"] == 25


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_what_was_looked_for_is_told(ledger):
    limits = Limits(on=("tokens", "drops"))
    assert plain.report(gather(ledger, limits=limits))["checked"] == [
        {"kind": "tokens", "limit": 1.5, "minimum": 20, "of": None},
        {"kind": "drops", "limit": 0, "minimum": 20, "of": 0},
    ]


# --- CSV, lines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_a_sheet_has_totals_and_rows_in_one_table(ledger):
    found = gather(ledger)
    told = plain.report(found)
    rows = list(csv.DictReader(io.StringIO(plain.report_sheet(found))))
    kinds = [one["kind"] for one in rows]
    assert kinds == ["total"] + ["task_type"] * len(told["task_types"]) + ["agent"] * 3
    for field, value in told["totals"].items():
        assert rows[0][field] == str(value), field
    assert rows[0]["inclusive"] == ""
    assert rows[1]["name"] == "summarise"
    assert rows[1]["charged"] == "0.0225"
    hostile = row(rows, "name", harmless(HOSTILE))
    assert hostile["failed"] == "1"
    assert "\x1b" not in plain.report_sheet(found)


def test_a_line_is_flat_and_whole(ledger):
    lines = list(ledger.lines())
    told = [json.loads(text) for text in plain.jsonl(lines)]
    assert len(told) == 26
    assert all(list(one) == list(plain.LINE) for one in told)
    assert all(
        not isinstance(value, dict)
        for one in told
        for name, value in one.items()
        if name != "digests"
    )
    twice = row(told, "cause", "observed")
    assert twice["duplicate"] is True
    assert (twice["task_type"], twice["worker"], twice["agent"]) == ("summarise", "w-1", "writer")
    assert (twice["input_tokens"], twice["total_tokens"], twice["cost"]) == (1000, 1100, "0.0045")
    assert (twice["currency"], twice["model"], twice["kept"]) == ("USD", "m", False)
    assert twice["input_tokens_by_report"] == [1000]
    inner, outer = row(told, "task_type", "inner"), row(told, "task_type", "outer")
    assert inner["parent"] == outer["execution_id"]
    assert (inner["nested"], outer["nested"]) == (False, True)
    date = row(told, "task_type", "date")
    assert (date["cost"], date["input_tokens"], date["total_tokens"]) == (None, None, None)
    assert date["started"] <= date["ended"]
    assert date["run_ms"] >= 0


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_lines_as_a_sheet_say_the_same(ledger):
    lines = list(ledger.lines())
    told = [json.loads(text) for text in plain.jsonl(lines)]
    rows = list(csv.DictReader(plain.sheet(plain.LINE, map(plain.line, lines))))
    assert len(rows) == len(told)
    for cells, one in zip(rows, told, strict=True):
        assert cells["execution_id"] == one["execution_id"]
        assert cells["cost"] == (one["cost"] or "")
        assert cells["duplicate"] == ("true" if one["duplicate"] else "false")
        assert json.loads(cells["input_tokens_by_report"]) == one["input_tokens_by_report"]
        assert json.loads(cells["digests"]) == one["digests"]
        assert cells["task_type"] == harmless(one["task_type"])


def test_lines_are_written_one_by_one(guard):
    guard.run_task("t", 1, story.quiet)
    (line,) = guard.ledger.lines()

    def endless():
        while True:
            yield line

    for texts in (plain.jsonl(endless()), plain.sheet(plain.LINE, map(plain.line, endless()))):
        assert next(texts)
        assert next(texts)


# --- for people --------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory", "sqlite"], indirect=True)
def test_the_headline_says_how_much_runs_twice_what_it_cost_and_what_was_saved(ledger, drawn):
    lines = drawn(gather(ledger)).splitlines()
    assert lines[1:8] == [
        TWICE,
        "Cost:  $0.0312 (8,421 tokens); duplicates wasted $0.0045 (1,100 tokens), 14.4% of it.",
        "Saved: $0.0060 (2,000 tokens) by 4 reused calls.",
        (
            "Missed: 7 executions look like duplicates that a field hides (700 tokens, $0.0021); "
            "see below."
        ),
        "Of 30 calls: 1 failed, 4 declined.",
        "The cost of 1 execution is unknown and not in it: no price for its model.",
        "6 executions told no usage: their tokens are unknown and not in it (record_usage).",
    ]


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_tables_and_findings_follow_and_say_what_to_do(ledger, drawn):
    text = drawn(gather(ledger))
    heads = ("Task types", "Agents", "Workers", "Drops: ", "Loops: ", "Missed duplicates: ")
    places = [text.index(f"\n{head}") for head in heads]
    assert places == sorted(places)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["summarise"] == ["5", "20.0%", "25.0%", "5,500", "$0.0225", "$0.0045", "-"]
    assert rows["extract"] == ["2", "0.0%", "0.0%", "1,000", "$0.0030", "-", "$0.0060"]
    assert rows["language"][-3:] == ["?", "-", "-"]
    assert rows["w-3"][:3] == ["3", "-", "1"]
    assert text.count("What to do") == 3
    assert "`x7` differs in" in text
    assert "volatile=('x7',)" in text
    assert "run_id" not in text


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_with_no_prices_tables_tell_tokens(guard_of, drawn):
    guard = guard_of(mode="observe")
    for _ in range(2):
        guard.run_task("t", 1, story.spends(1000, 100))
    text = drawn(gather(guard.ledger))
    assert "wasted\n" not in text
    assert "$" not in text
    assert "Cost:  2,200 tokens; duplicates wasted 1,100 tokens." in text
    assert "Agents" not in text  # nobody named one


@pytest.fixture
def in_parts():
    """A ledger in which each agent has a part of what ran twice."""
    clock = Clock()
    guard = Guard(store=MemoryStore(clock), mode="observe", ttl=7200)
    for name, numbers in (("a", range(3)), ("b", range(4)), ("c", range(3)), ("d", [3, 0, 1, 9])):
        with agent(name):
            for number in numbers:
                guard.run_task("summarise", number, story.quiet)
        clock.advance(300)
    yield guard.ledger
    guard.close()


@pytest.mark.parametrize(
    ("name", "twice", "first"),
    [
        ("a", "0 of 3 executions are duplicates (duplication rate 0.0%)", 3),
        ("b", "3 of 4 executions are duplicates (duplication rate 75.0%)", 1),
        ("c", "3 of 3 executions are duplicates (duplication rate 100.0%)", 0),
        # more tasks than doubled ones, and yet it does not know of how many these are
        ("d", "3 of 4 executions are duplicates (duplication rate 75.0%)", 1),
    ],
)
def test_a_part_tells_its_duplicates_and_no_doubled_share(in_parts, drawn, name, twice, first):
    here = f"tasks executed first here: {first}"
    found = gather(in_parts, agent=name)
    lines = drawn(found).splitlines()
    assert lines[1] == f"Runs twice: {twice}; {here}."
    assert "doubled share" not in lines[1]
    rows = [line.split() for line in lines if line.startswith((f"{name} ", "summarise "))]
    assert [row[3] for row in rows] == ["-", "-"]
    page = html.page(found)
    note = f"not known of a part; {here}"
    assert f'<dd class="value">-</dd><dd class="note">{note}</dd>' in page
    assert page.count('<td class="share">-</td>') == 2  # the task type, the agent
    told = plain.report(found)
    (kind,), (who,) = told["task_types"], told["agents"]
    assert {one["doubled_share"] for one in (told["totals"], kind, who)} == {None}
    assert told["totals"]["tasks"] == first
    head, *sheet = csv.reader(io.StringIO(plain.report_sheet(found)))
    assert [one[head.index("doubled_share")] for one in sheet] == ["", "", ""]
    assert isinstance(in_parts.agent_summary(name)["doubled_share"], float)


def test_the_whole_tells_its_doubled_share_and_no_agent_does(in_parts, drawn):
    lines = drawn(gather(in_parts)).splitlines()
    assert lines[1] == (
        "Runs twice: 4 of 5 tasks (doubled share 80.0%); 9 of 14 executions are duplicates "
        "(duplication rate 64.3%)."
    )
    rows = {
        line.split()[0]: line.split()[3] for line in lines if re.match(r"([a-d]|summarise) ", line)
    }
    assert rows == {"summarise": "80.0%", **dict.fromkeys("abcd", "-")}
    told = plain.report(gather(in_parts, task_type="summarise"))
    assert (told["totals"]["doubled_share"], told["task_types"][0]["doubled_share"]) == (0.8, 0.8)
    assert {one["doubled_share"] for one in told["agents"]} == {None}


def test_a_part_in_time_tells_no_doubled_share_and_what_was_until_then_does(in_parts, drawn):
    now = in_parts.now()
    late = gather(in_parts, since=now - 300_000)  # what the last agent did
    assert "Runs twice: 3 of 4 executions are duplicates (duplication rate 75.0%); " in drawn(late)
    assert (late.totals["doubled_share"], late.task_types[0]["doubled_share"]) == (None, None)
    then = gather(in_parts, until=now - 600_000)  # what the first two did
    assert "Runs twice: 3 of 4 tasks (doubled share 75.0%); 3 of 7 " in drawn(then)
    assert (then.totals["doubled_share"], then.task_types[0]["doubled_share"]) == (0.75, 0.75)


def test_where_the_first_executions_are_no_longer_kept_all_is_a_part(drawn):
    clock = Clock()
    store = MemoryStore(clock)
    guard = Guard(store=store, mode="observe", ttl=864_000, window_retention=86_400)
    for _ in range(2):
        for number in range(3):
            guard.run_task("summarise", number, story.quiet)
        clock.advance(100_000)
    guard.run_task("summarise", 0, story.quiet)
    store.tend(86_400_000)
    found = gather(guard.ledger)
    assert "Runs twice: 1 of 1 execution are duplicates (duplication rate 100.0%); tasks " in drawn(
        found
    )
    assert found.totals["doubled_share"] is None
    guard.close()


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_where_nothing_runs_twice_it_says_so(guard, drawn):
    guard.run_task("t", 1, story.quiet)
    text = drawn(gather(guard.ledger))
    assert "Runs twice: nothing. 1 task, 1 execution, no duplicates." in text
    assert "Cost:  unknown; duplicates wasted 0 tokens." in text


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_what_nobody_told_is_unknown_and_not_none(guard_of, drawn):
    observed = guard_of(mode="observe")
    for _ in range(2):
        observed.run_task("t", 1, story.quiet)
    assert "Cost:  unknown; duplicates wasted unknown." in drawn(gather(observed.ledger))


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_foreign_names_break_no_table_and_do_nothing_to_a_terminal(guard_of, drawn, columns):
    guard = guard_of(pricer=story.PRICES)
    for name in (
        HOSTILE,
        "日本語" * 30,
        "a.very.long.module_name." * 6 + "summarise",
        "e\u0301" * 90,
    ):
        guard.run_task(name, 1, story.spends(1_000_000, 10_000))
    text = drawn(gather(guard.ledger), columns)
    assert "\x1b" not in text
    assert "[red]" in text or columns < 100
    assert "😄" not in text
    table = text[text.index("\nTask types") : text.index("\nWorkers")].splitlines()
    assert max(map(cell_len, table)) <= columns
    assert sum("$" in line for line in table) == 4
    ends = {cell_len(line) for line in table if "$" in line}
    assert len(ends) == 1  # the columns stand under each other


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_where_there_is_no_room_the_last_columns_go_and_are_named(ledger, drawn):
    text = drawn(gather(ledger), 40)
    assert (
        max(map(cell_len, text[text.index("\nTask types") :].split("(no room")[0].splitlines()))
        <= 40
    )
    assert re.search(r"\nsummarise +5 +20.0% +25.0%\n", text)
    assert "\n(no room for: tokens, charged, wasted, saved)\n" in text


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_history_that_is_sent_along_is_told(guard, drawn):
    def agent(_):
        for step in range(1, 11):
            record_usage(input_tokens=1000 * step)

    guard.run_task("agent", 1, agent)
    text = drawn(gather(guard.ledger))
    assert "Growing input: history that is sent along with every step" in text
    assert (
        "agent: the input grows by 1,000 tokens from report to report, over 10.0 reports an "
        "execution, as a carried history does (55.0k input tokens in 1 execution). A cap at half "
        "the steps would save 40.0k tokens"
    ) in text


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_long_lists_are_cut_and_say_so(guard, drawn):
    for number in range(60):
        guard.run_task(f"type-{number}", 1, story.quiet)
        with worker(f"w-{number}"), suppress(OutOfScope):
            guard.run_task("review", number % 12, story.hands_back)
    text = drawn(gather(guard.ledger))
    assert text.count("\nand 11 more (--format json has all)\n") == 1  # task types
    assert text.count("\nand 2 more (--format json has all)\n") == 2  # drops, loops
    assert "w-0, w-12, w-24, w-36, w-48\n" not in text
    assert "\nand 11 more\n" in text  # workers


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_the_newest_that_was_handed_back_comes_first(guard, drawn, clock):
    for number in range(12):
        for _ in range(2 + (number == 0)):  # the oldest is the worst
            with worker(f"w-{number:02}"), suppress(OutOfScope):
                guard.run_task("review", number, story.hands_back)
        clock.advance(60)
    text = drawn(gather(guard.ledger))
    for head in ("Drops", "Loops"):
        table = text[text.index(f"\n{head}: ") :].split("\nand 2 more")[0]
        assert re.findall(r"w-\d\d", table) == [f"w-{n:02}" for n in range(11, 1, -1)]


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_scope_tells_two_rows_apart(guard, drawn):
    def hand_back():
        with worker("a-worker-of-some-length"), suppress(OutOfScope):
            guard.run_task("a-task-type-of-some-length", 1, story.hands_back)

    hand_back()
    assert "scope" not in drawn(gather(guard.ledger))
    for name in ("customer-acme", "customer-bolt"):
        with scope(name):
            hand_back()
    table = drawn(gather(guard.ledger)).split("\nDrops: ")[1].split("\nWhat to do")[0]
    assert "no room" not in table
    rows = table.splitlines()[3:]
    assert sorted(row.split()[1] for row in rows) == ["-", "customer-acme", "customer-bolt"]
    assert all(re.search(r"  1  \d\d-\d\d \d\d:\d\d$", row) for row in rows)
    assert max(map(cell_len, rows)) <= 80


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_clock_that_was_set_back_makes_no_ledger_unused(guard, drawn, clock):
    guard.run_task("t", 1, story.quiet)
    clock.advance(-86_400)
    text = drawn(gather(guard.ledger))
    assert "Nothing was called or executed until then" in text
    assert " yet" not in text


# --- words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amount", "text", "shown"),
    [
        ("0E-12", "0", "$0.00"),
        ("-0", "0", "$0.00"),
        ("1E-12", "0.000000000001", "<$0.0001"),
        ("0.0001", "0.0001", "$0.0001"),
        ("-0.0001", "-0.0001", "-$0.0001"),
        ("0.000099999999", "0.000099999999", "<$0.0001"),
        ("0.4228", "0.4228", "$0.4228"),
        ("1.500000000000", "1.5", "$1.50"),
        ("100", "100", "$100.00"),
        ("1E+3", "1000", "$1,000"),
        ("12345.678901234567", "12345.678901234567", "$12,346"),
        ("-0.25", "-0.25", "-$0.2500"),
        ("123456789012345678901234567890.123456789012", "123456789012345678901234567890.123456789012",
         "$123,456,789,012,345,678,901,234,567,890"),
    ],
)  # fmt: skip
def test_money_is_text_without_an_exponent(amount, text, shown):
    assert decimal_text(Decimal(amount)) == text
    assert money(Decimal(amount)) == shown


def test_numbers_are_short_where_there_is_little_room():
    told = [short(n) for n in (0, 9_999, 12_345, 999_999, 1_500_000, 3 * 10**9, 10**13, -20_000)]
    assert told == ["0", "9,999", "12.3k", "1.0M", "1.5M", "3.0G", "10.0T", "-20.0k"]
    assert [share(f) for f in (0, 0.0001, 0.182, 1)] == ["0.0%", "<0.1%", "18.2%", "100.0%"]
    assert [lasted(ms) for ms in (0, 999, 1500, 65_000, 3_700_000)] == [
        "0 ms", "999 ms", "1.5 s", "1 min 5 s", "1 h 1 min",
    ]  # fmt: skip
    assert [money(None), money(Decimal(2), "EUR"), money(Decimal(2), "CHF")] == [
        "?", "€2.00", "CHF 2.00",
    ]  # fmt: skip
    assert [cell(0), cell(Decimal(0)), cell(5, signed=True), cell(Decimal(-5), signed=True)] == [
        "-", "-", "+5", "-$5.00",
    ]  # fmt: skip


def test_a_time_beyond_the_calendar_is_no_error():
    assert (iso(None), iso(2**53)) == (None, None)
    assert local(2**53) == "for ever"
    assert iso(1_800_000_000_123) == "2027-01-15T08:00:00.123+00:00"


@pytest.mark.parametrize(
    "text", ["short", "a.b.c.d.e.f.g.h.i.j.k", "日本語日本語日本語", "x" * 100]
)
@pytest.mark.parametrize("width", [8, 9, 12])
def test_a_name_is_cut_in_the_middle(text, width):
    found = cut(text, width)
    assert cell_len(found) <= width
    if cell_len(text) <= width:
        assert found == text
    else:
        head, tail = found.split("…")
        assert text.startswith(head.strip())
        assert text.endswith(tail)

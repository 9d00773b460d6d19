"""docs/telemetry.md names every span, attribute, event and metric that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from idemguard import telemetry

PAGE = (Path(__file__).parents[1] / "docs" / "telemetry.md").read_text()

ATTRIBUTES = {
    telemetry.TASK_TYPE, telemetry.FINGERPRINT, telemetry.WORKER, telemetry.AGENT,
    telemetry.OUTCOME, telemetry.CAUSE, telemetry.EXECUTION_ID, telemetry.WAIT_DURATION,
    telemetry.COST_AMOUNT, telemetry.COST_CURRENCY, telemetry.SAVED_AMOUNT,
    telemetry.SAVED_CURRENCY, telemetry.LEADER_TRACE_ID, telemetry.LEADER_SPAN_ID,
    telemetry.ERROR_TYPE, *telemetry.GEN_AI.values(),
    *(telemetry.USAGE + field for field in telemetry.FIELDS),
    telemetry.SAVED + telemetry.FIELDS[0],
}  # fmt: skip
EVENTS = {telemetry.LOST, telemetry.FALLBACK, telemetry.DECLINED, telemetry.STORE_FAILED}
METRICS = {
    telemetry.CALLS, telemetry.FOUND, telemetry.EXECUTIONS, telemetry.DUPLICATED, telemetry.USAGE_TOKENS,
    telemetry.USAGE_COST, telemetry.SAVED_TOKENS, telemetry.SAVED_COST, telemetry.CALL_DURATION,
    telemetry.WAIT_DURATION,
}  # fmt: skip


def table(heading):
    """The rows below the header that begins with this word, as lists of cells."""
    body = PAGE.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [line.strip("|").split("|") for line in body.splitlines()[2:]]


def first(rows):
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


@pytest.mark.parametrize(
    ("heading", "names"), [("attribute", ATTRIBUTES), ("event", EVENTS), ("metric", METRICS)]
)
def test_the_tables_name_what_there_is(heading, names):
    assert first(table(heading)) == names


def test_every_attribute_tells_its_type_and_an_example():
    for row in table("attribute"):
        _, kind, _, example, on = (cell.strip() for cell in row)
        assert kind in {"string", "int", "double"}
        assert example
        assert on


def test_the_metrics_attributes_are_those_that_there_are():
    named = {
        name for row in table("metric") for name in re.findall(r"`([a-z_]+\.[a-z_.]+)`", row[3])
    }
    assert named - METRICS <= ATTRIBUTES | {telemetry.TOKEN_TYPE}

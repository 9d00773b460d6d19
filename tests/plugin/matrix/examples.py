"""Rows of Hypothesis, whose examples are all one test."""

from __future__ import annotations

from atasks import good, naive
from coroutines import both, call
from hypothesis import HealthCheck, given, settings, strategies

few = settings(
    max_examples=5,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@few
@given(number=strategies.integers())
async def test_fresh(idemguard_ledger, number):
    idemguard_ledger.fresh()
    await both(good, "x")
    idemguard_ledger.assert_ran_once("summarise")


@few
@given(number=strategies.integers())
async def test_not_fresh(number):
    await call(naive, "x")

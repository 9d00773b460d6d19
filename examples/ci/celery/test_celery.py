"""The tests: the last one fails, since its task ran twice in the worker."""

import pytest
from app import careless, work

from pytest_idemguard import RunLedger

pytestmark = pytest.mark.usefixtures("worker")


def test_runs_once(idemguard_ledger: RunLedger) -> None:
    assert [work.delay("x").get(timeout=60) for _ in range(2)] == ["X", "X"]
    idemguard_ledger.assert_ran_once("summarise")
    assert idemguard_ledger.reused("summarise") == 1


def test_is_not_served_the_result_of_another_test(idemguard_ledger: RunLedger) -> None:
    assert work.delay("x").get(timeout=60) == "X"
    idemguard_ledger.assert_ran_once("summarise")


def test_runs_twice() -> None:
    for _ in range(2):
        assert careless.delay("x").get(timeout=60) == "x"

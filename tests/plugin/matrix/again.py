"""Rows of attempts: a test that is run again by one of the plugins that do that."""

from __future__ import annotations

import pytest
from atasks import good, naive
from attempts import again
from coroutines import both, call

attempts = {"once": 0, "own": 0}


@again
async def test_again_then_once():
    attempts["once"] += 1
    await call(good, "y")
    await call(naive, "x")
    if attempts["once"] == 1:
        await call(naive, "x")


@again
async def test_again_and_again():
    await both(naive, "x")


@again
async def test_again_for_its_own_failure(idemguard_ledger):
    attempts["own"] += 1
    await both(good, "x")
    idemguard_ledger.assert_ran_once("summarise")
    if attempts["own"] == 1:
        pytest.fail("own")

"""Rows of the standard library's test cases."""

from __future__ import annotations

import unittest

from atasks import good, naive
from coroutines import Case, both, call, plainly
from recorder import made


class TestUnit(Case):
    async def asyncSetUp(self):
        await call(naive, "y")

    async def test_body(self):
        await both(naive, "x")

    async def test_set_up(self):
        await call(naive, "y")

    async def test_subtests(self):
        for number in range(2):
            with self.subTest(number=number):
                await call(naive, "x")

    async def test_reuse(self):
        await both(good, "x")

    async def test_fails(self):
        await both(naive, "x")
        self.fail("own")

    async def test_skips(self):
        await both(naive, "x")
        self.skipTest("own")

    @unittest.expectedFailure
    async def test_expected(self):
        await both(naive, "x")

    @unittest.expectedFailure
    async def test_expected_without(self):
        await both(good, "x")


class TestUnitClass(Case):
    @classmethod
    def setUpClass(cls):
        made()
        plainly(both, naive, "x")

    async def test_1(self):
        pass

    async def test_2(self):
        pass

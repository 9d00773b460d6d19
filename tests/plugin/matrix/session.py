"""Rows of scope session: what several tests do, in whichever worker."""

from __future__ import annotations

import pytest
from atasks import good, naive
from coroutines import call

here = __name__


@pytest.mark.idemguard(scope="session")
@pytest.mark.parametrize("number", range(4))
async def test_shared(number):
    await call(good, f"shared {here}")


@pytest.mark.idemguard(scope="session")
@pytest.mark.parametrize("number", range(2))
async def test_anywhere(number):
    await call(naive, f"anywhere {here}")

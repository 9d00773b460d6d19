"""Rows of children, however they are started."""

from __future__ import annotations

import pytest
from atasks import naive
from coroutines import call, in_child


@pytest.mark.parametrize("kind", ["forked", "spawned", "sub-process"])
async def test_child(kind):
    await call(naive, "x")
    await in_child(kind)

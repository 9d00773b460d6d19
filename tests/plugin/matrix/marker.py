"""A marker that says what there is not."""

from __future__ import annotations

import pytest


@pytest.mark.idemguard(max_run=2)
async def test_wrong():
    pass

"""Rows of modules that are watched, and imported late or not at all."""

from __future__ import annotations

import importlib


async def test_imports():
    importlib.import_module("seldom")


async def test_passes():
    pass

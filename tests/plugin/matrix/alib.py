"""A function that nobody guards, and that is watched by name."""

from __future__ import annotations


async def complete(prompt):
    return prompt

"""The ledger for people and programs: gathered once, then drawn, or written plainly.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from idemguard.report.gather import Report, gather

__all__ = ["Report", "gather"]

"""The pytest plugin: a test in which a task ran twice fails.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pytest_idemguard.ledger import RunLedger
    from pytest_idemguard.plugin import DuplicateRunWarning

__all__ = ["DuplicateRunWarning", "RunLedger"]


def __getattr__(name: str) -> object:
    if name == "RunLedger":  # for annotations: `def test_x(idemguard_ledger: RunLedger)`
        from pytest_idemguard.ledger import RunLedger

        return RunLedger
    if name == "DuplicateRunWarning":
        from pytest_idemguard.plugin import DuplicateRunWarning

        return DuplicateRunWarning
    raise AttributeError(name)

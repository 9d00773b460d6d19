"""What lines tell of those who executed, beside the ledger's own sums.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from idemguard.ledger import by_worker
from idemguard.record import DUPLICATES, Execution

if TYPE_CHECKING:
    from collections.abc import Sequence


def unpriced(line: Execution) -> bool:
    """Whether it told usage that has no price, all of it or a part."""
    spent = line.spent
    return spent.usage is not None and (spent.cost is None or spent.unpriced > 0)


def workers(lines: Sequence[Execution]) -> list[dict[str, Any]]:
    """What the executions of each worker came to.

    Args:
        lines: the executions.

    Returns:
        As `by_worker` gives it, and the executions that are not, or not wholly, in the money:
        `unpriced`, and of them `unpriced_duplicates`.

    """
    missing = [line for line in lines if unpriced(line)]
    all_ = Counter(line.worker for line in missing)
    twice = Counter(line.worker for line in missing if line.cause in DUPLICATES)
    return [
        {**row, "unpriced": all_[row["worker"]], "unpriced_duplicates": twice[row["worker"]]}
        for row in by_worker(lines)
    ]

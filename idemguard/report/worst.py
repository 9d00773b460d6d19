"""Which tasks wasted most: told by lines, as sums do not know a task from another of its type.

Pure: lines go in, tasks come out.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from idemguard.findings import by_task
from idemguard.record import DUPLICATES
from idemguard.report.lines import unpriced
from idemguard.usage import money

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from decimal import Decimal

    from idemguard.record import Execution

MOST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """A task that was executed twice, and what that cost.

    Attributes:
        task_type: of the task.
        fingerprint: of the task.
        scope: that it was called in; empty at the root.
        version: that it was decorated with, or None.
        executions: of it, among the lines that were looked at.
        duplicates: among these.
        wasted_tokens: what the duplicates took; those that told no usage are in no sum.
        charged: what the executions cost; those without a price are in no sum.
        wasted: what the duplicates did.
        unpriced: executions that are not, or not wholly, in the money.
        unpriced_duplicates: those of them that are duplicates.
        workers: who executed the duplicates, in the order in which they first did.
        last: when the last duplicate started, ms.

    """

    task_type: str
    fingerprint: str
    scope: str
    version: str | None
    executions: int
    duplicates: int
    wasted_tokens: int
    charged: Decimal
    wasted: Decimal
    unpriced: int
    unpriced_duplicates: int
    workers: tuple[str, ...]
    last: int


def worst(lines: Iterable[Execution]) -> list[Worst]:
    """The tasks whose duplicates wasted most, the worst first, of equals the newest; 20 at most.

    Args:
        lines: executions, oldest first.

    """
    found = [
        _worst(task, twice)
        for task in by_task(lines).values()
        if (twice := [line for line in task if line.cause in DUPLICATES])
    ]
    found.sort(
        key=lambda one: (
            -one.wasted, -one.wasted_tokens, -one.duplicates, -one.last, one.fingerprint,
        )
    )  # fmt: skip
    return found[:MOST]


def _worst(task: Sequence[Execution], twice: Sequence[Execution]) -> Worst:
    one = task[0]
    return Worst(
        task_type=one.task_type,
        fingerprint=one.fingerprint,
        scope=one.scope,
        version=one.version,
        executions=len(task),
        duplicates=len(twice),
        wasted_tokens=sum(
            0 if line.usage is None else line.usage.total_tokens or 0 for line in twice
        ),
        charged=money(sum(line.spent.cost or 0 for line in task)),
        wasted=money(sum(line.spent.cost or 0 for line in twice)),
        unpriced=sum(map(unpriced, task)),
        unpriced_duplicates=sum(map(unpriced, twice)),
        workers=tuple(dict.fromkeys(line.worker for line in twice)),
        last=max(line.started for line in twice),
    )

"""What the ledger says about a pass.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from idemguard.record import DUPLICATES, Address

if TYPE_CHECKING:
    from idemguard.ledger import ExecutionLedger
    from idemguard.record import Execution

NOTHING = Decimal(0)


@dataclass(frozen=True)
class Figures:
    """One pass in figures.

    Attributes:
        calls: executions and reuses together.
        executions: bodies that started.
        reused: calls that got the result of somebody else's execution.
        tasks: that were executed.
        doubled: of these, executed two or more times.
        duplicates: executions beside a result or a living leader.
        tokens: that were billed, input and output.
        bill: dollars.
        ideal: dollars, had every task been executed once.
        doubled_types: how many of the doubled tasks are of which type, the most frequent first.

    """

    calls: int
    executions: int
    reused: int
    tasks: int
    doubled: int
    duplicates: int
    tokens: int
    bill: Decimal
    ideal: Decimal
    doubled_types: dict[str, int]

    @property
    def doubled_share(self) -> float:
        """Doubled tasks per task."""
        return self.doubled / self.tasks if self.tasks else 0.0

    @property
    def duplication_rate(self) -> float:
        """Duplicates per execution."""
        return self.duplicates / self.executions if self.executions else 0.0

    @property
    def against_ideal(self) -> float:
        """How many times too high the bill is; 1 is as it should be, 0 is no bill."""
        return float(self.bill / self.ideal) if self.ideal else 0.0


def figures(ledger: ExecutionLedger) -> Figures:
    """Count a pass from its lines, and from the reuses in the records that they stand in.

    Args:
        ledger: of the pass's store and namespace.

    Raises:
        StoreError: it cannot be read.

    """
    tasks: dict[Address, list[Execution]] = defaultdict(list)
    for line in ledger.lines():
        tasks[line.claim.address].append(line)
    lines = [line for executions in tasks.values() for line in executions]
    store = ledger._store  # noqa: SLF001 - a ledger tells the reuses of all tasks, not of one
    reused = sum(store.look(address)[0].reused for address in tasks)
    doubled = [executions for executions in tasks.values() if len(executions) > 1]
    return Figures(
        calls=len(lines) + reused,
        executions=len(lines),
        reused=reused,
        tasks=len(tasks),
        doubled=len(doubled),
        duplicates=sum(line.cause in DUPLICATES for line in lines),
        tokens=sum(_tokens(line) for line in lines),
        bill=sum((_cost(line) for line in lines), NOTHING),
        ideal=sum((max(map(_cost, executions)) for executions in tasks.values()), NOTHING),
        doubled_types=dict(
            Counter(executions[0].task_type for executions in doubled).most_common()
        ),
    )


def _tokens(line: Execution) -> int:
    return 0 if line.usage is None else line.usage.total_tokens or 0


def _cost(line: Execution) -> Decimal:
    return NOTHING if line.cost is None else line.cost

"""Who gets which batch, and which tasks are in two of them (pure).

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from idemguard.demo.tasks import CHEAP, COSTLY

if TYPE_CHECKING:
    from collections.abc import Sequence

WORKERS = 3
OVERLAP = 0.18
STRAY = 25  # one in so many doubled tasks is a cheap one


@dataclass(frozen=True, slots=True)
class Call:
    """A task that a worker is given: a task type and a document."""

    task_type: str
    document: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is handed out.

    Attributes:
        batches: the calls of each worker, in order.
        tasks: how many different ones there are.
        doubled: those that are in two batches.

    """

    batches: tuple[tuple[Call, ...], ...]
    tasks: int
    doubled: tuple[Call, ...]

    @property
    def calls(self) -> int:
        """How many are handed out."""
        return sum(map(len, self.batches))


def plan(documents: Sequence[str], overlap: float = OVERLAP, workers: int = WORKERS) -> Plan:
    """Batches that overlap.

    Every worker gets the tasks of every third document, and besides some of its neighbours':
    the costly ones, since those are under way long enough to be picked up twice, and now and
    then a cheap one. All go through the documents in one order, so that both owners of a task
    come to it at about the same time.

    Args:
        documents: their names.
        overlap: the share of tasks that two workers get.
        workers: how many there are, at least two.

    Returns:
        The same for the same arguments.

    """
    costly = [Call(kind, document) for document in documents for kind in COSTLY]
    cheap = [Call(kind, document) for document in documents for kind in CHEAP]
    tasks = len(costly) + len(cheap)
    wanted = round(overlap * tasks)
    stray = min(len(cheap), max(wanted - len(costly), round(wanted / STRAY)))
    doubled = [*_spread(costly, wanted - stray), *_spread(cheap, stray)]

    owner = {document: place % workers for place, document in enumerate(documents)}
    batches: list[set[Call]] = [set() for _ in range(workers)]
    for call in (*costly, *cheap):
        batches[owner[call.document]].add(call)
    for place, call in enumerate(doubled):
        further = 1 + place % (workers - 1)  # the neighbours in turn
        batches[(owner[call.document] + further) % workers].add(call)

    kinds = {kind: place for place, kind in enumerate((*COSTLY, *CHEAP))}
    order = {document: place for place, document in enumerate(documents)}
    return Plan(
        tuple(
            tuple(sorted(batch, key=lambda call: (order[call.document], kinds[call.task_type])))
            for batch in batches
        ),
        tasks,
        tuple(doubled),
    )


def _spread(calls: Sequence[Call], wanted: int) -> list[Call]:
    """So many of them, evenly from first to last."""
    return [calls[place * len(calls) // wanted] for place in range(wanted)]

"""What the simulator drives: the rules of the project, or a faulty variant of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from idemguard import claim, windows
from idemguard.claim import Answer, Command
from idemguard.record import Address, Caller, Record
from idemguard.usage import Spent, Usage

LEASE = 10  # ms; one tick of the clock: who does not renew within it has lost its lease
ADDRESS = Address("tests", "f" * 64)

# what an execution has spent by its first renewal, and by its end
SO_FAR = Spent(1, Usage(input_tokens=3, output_tokens=1), (3,), cost=30)
IN_ALL = Spent(2, Usage(input_tokens=7, output_tokens=2), (3, 4), cost=70)
UNPRICED = Spent(2, Usage(input_tokens=7, output_tokens=2), (3, 4))


class Rules(NamedTuple):
    """The pure functions that every store performs by."""

    transition: Callable[[Record, Command, int], tuple[Record, Answer]] = claim.transition
    wakes: Callable[[Record, Record, Command, int], str | None] = claim.wakes
    waits: Callable[[Record, str | None, int], bool] = claim.waits
    entries: Callable[[Record, Record, Command, Answer, int], Any] = windows.entries


class Broken(Exception):  # noqa: N818 - a promise is, not a program
    """A promise does not hold."""


def need(holds: object, what: str, *about: object) -> None:
    """Demand what a promise says."""
    if not holds:
        raise Broken(what, *about)


def caller(name: str) -> Caller:
    """Somebody who calls; everybody is an agent of their own, so that windows tell them apart."""
    return Caller("job", worker=f"w{name}", agent=f"a{name}")

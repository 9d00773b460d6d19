"""What to do when a server does not answer a step as it should: decisions alone.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from enum import Enum, auto

from idemguard.stores.clients import Meaning

PATIENCE = 5.0  # seconds that a server is waited for that says: soon
QUEUE = 300.0  # and a free connection of the pool, which is no outage
GRACE = 0.5  # and one that cannot be reached, so that a restart is no outage
BRIEF = 0.25  # and by who must not be held up
LONGEST_PAUSE = 0.1
LAG = 0.2  # seconds; where a time runs out so late, it was a busy loop that did not look sooner
TRIES = 3  # and so often it is tried then


def late(passed: float, limit: float | None) -> bool:
    """Whether a time ran out because nobody looked, which says nothing of the server.

    Args:
        passed: s since it began.
        limit: s that it may take; None: no time ran out.

    """
    return limit is not None and passed > limit + LAG


class Then(Enum):
    """What to do next."""

    AGAIN = auto()
    LOAD = auto()  # with the script's text
    ALONE = auto()  # with the record's key alone
    GIVE_UP = auto()


class Patience:
    """How long one step is tried.

    Args:
        started: s, by any clock.
        brief: the caller must not be held up.
        grace: how long one that cannot be reached is tried, s.

    """

    def __init__(self, started: float, *, brief: bool, grace: float = GRACE) -> None:
        self._started = started
        self._brief = brief
        self._grace = min(GRACE, grace)
        self._tries = 0
        self.pause = 0.0  # seconds before the next try

    def after(
        self, meaning: Meaning, now: float, *, connecting: bool, cold: bool, alone: bool
    ) -> Then:
        """What to do after a failure.

        Args:
            meaning: of the error.
            now: s, by the same clock.
            connecting: there was no connection yet.
            cold: the script was sent by its name.
            alone: the step went to the record's key alone.

        """
        self._tries += 1
        self.pause = 0.0
        if meaning is Meaning.COLD and cold:
            return Then.LOAD
        if meaning is Meaning.MOVING and not alone:
            return Then.ALONE
        if meaning is Meaning.REFUSED:
            return Then.GIVE_UP
        passed = now - self._started
        if meaning is Meaning.AWAY:
            limit = self._grace
            if not connecting and self._tries == 1 and (not self._brief or passed < BRIEF):
                return Then.AGAIN  # it broke in use: another connection may hold
        else:
            limit = QUEUE if meaning is Meaning.BUSY else PATIENCE
        if self._brief:
            limit = min(limit, BRIEF)
        if passed >= limit:
            return Then.GIVE_UP
        self.pause = min(LONGEST_PAUSE, 0.005 * 2 ** min(self._tries, 8))
        return Then.AGAIN

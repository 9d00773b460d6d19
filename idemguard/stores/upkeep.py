"""What is removed from a server when it is over, and how old windows are poured together.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from idemguard.stores import wire
from idemguard.stores.talk import READING
from idemguard.windows import FINE, HOUR, SPAN

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemguard.stores.talk import Exchange, Talk

BATCH = 200  # records looked at by one script
POURED = 600_000  # ms after its end, a window is written to no longer
KEPT = 8 * 86_400_000  # ms that windows' names live at least


def window(name: str) -> tuple[int, int]:
    """Start and span of a window, ms, of its name."""
    return int(name.lstrip("h")), HOUR if name.startswith("h") else SPAN


class Upkeep:
    """The upkeep of one shard.

    Args:
        do: performs an exchange.
        talk: makes them.
        namespace, digit: which shard.
        cursors: where the last looks through the indexes ended, by shard.

    Raises:
        StoreError, StoreUnavailableError: as the server, or its absence, says.

    """

    def __init__(
        self,
        do: Callable[[Exchange], Any],
        talk: Talk,
        namespace: str,
        digit: str,
        cursors: dict[tuple[str, str], int],
    ) -> None:
        self._do = do
        self._talk = talk
        self._shard = (namespace, digit)
        self._cursors = cursors
        self._prefix = wire.shard(namespace, digit)
        self._windows, self._tasks, self._starts, self._open = wire.shard_keys(namespace, digit)
        self._names = f"{self._prefix}window-names"
        now, _ = do(talk.run("overdue", (self._open,), (talk.now(),), READING))
        self._now: int = now

    def tend(self, window_retention: int | None) -> None:
        """Pour old windows together, and remove what is over.

        Args:
            window_retention: ms; None keeps windows for ever.

        """
        self._pour(window_retention)
        if window_retention is not None:
            self._drop(window_retention)
        self._prune()

    def _plain(self, *args: Any) -> Any:
        return self._do(self._talk.plain(args, args[1], READING))

    # --- windows --------------------------------------------------------------------------------

    def _pour(self, retention: int | None) -> None:
        fields = self._plain("HKEYS", self._windows)
        starts = {int(start) for start in (field.partition(b" ")[0] for field in fields)
                  if start.isdigit()}  # fmt: skip
        poured = sorted(start for start in starts if start + SPAN + POURED <= self._now)
        names = [
            name.decode()
            for name in self._plain("ZRANGEBYSCORE", self._names, "-inf", self._now - FINE)
        ]
        fine: dict[int, list[str]] = {}
        for name in names:
            start, span = window(name)
            if span == SPAN and self._is_old(start):
                fine.setdefault(start - start % HOUR, []).append(name)
        hot: dict[str, list[int]] = {}
        for start in poured:
            target = f"h{start - start % HOUR}" if self._is_old(start) else str(start)
            hot.setdefault(target, []).append(start)
        for hour in fine:
            hot.setdefault(f"h{hour}", [])
        for target, sources in hot.items():
            start, span = window(target)
            life = None
            if retention is not None:
                life = max(start + span + retention - self._now, 1) + HOUR
            empties = fine.get(start, []) if span == HOUR else []
            self._into(target, start, life, sources, empties)

    def _is_old(self, start: int) -> bool:
        return start + FINE <= self._now - self._now % HOUR

    def _into(
        self, target: str, start: int, life: int | None, sources: list[int], empties: list[str]
    ) -> None:
        keys = (
            self._windows, self._names, f"{self._prefix}window:{target}",
            *(f"{self._prefix}window:{name}" for name in empties),
        )  # fmt: skip
        lives = ("", "") if life is None else (life, max(life, KEPT))
        args = (target, start, *lives, len(sources), *sources, *empties)
        self._do(self._talk.run("pour", keys, args, READING))

    def _drop(self, retention: int) -> None:
        """Windows that are older than they are kept."""
        names = self._plain("ZRANGEBYSCORE", self._names, "-inf", self._now - retention)
        for name in names:
            start, span = window(name.decode())
            if start + span + retention <= self._now:
                key = f"{self._prefix}window:{name.decode()}"
                self._plain("DEL", key)
                self._plain("ZREM", self._names, name)
        fields = self._plain("HKEYS", self._windows)
        over = [
            field for field in fields
            if (start := field.partition(b" ")[0]).isdigit()
            and int(start) + SPAN + retention <= self._now
        ]  # fmt: skip
        if over:
            self._plain("HDEL", self._windows, *over)

    # --- records --------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Take out of the indexes what has no record any longer: the oldest, and some others."""
        place = 0
        while members := self._plain("ZRANGE", self._starts, place, place + BATCH - 1):
            names = [member.decode().partition(" ")[0] for member in members]
            gone = self._remove(names, members)
            if gone < len(members):
                break
        cursor, found = self._plain(
            "ZSCAN", self._tasks, self._cursors.get(self._shard, 0), "COUNT", BATCH
        )
        self._cursors[self._shard] = int(cursor)
        names = [
            each.decode() for each in (one[0] if isinstance(one, (list, tuple)) else one
            for one in found) if isinstance(each, bytes) and not each.isdigit()
        ]  # fmt: skip
        if names:
            self._remove(names, [b""] * len(names))

    def _remove(self, names: list[str], members: list[bytes]) -> int:
        keys = (
            self._tasks, self._starts, self._open,
            *(f"{self._prefix}task:{name}" for name in names),
        )  # fmt: skip
        pairs = [part for pair in zip(names, members, strict=True) for part in pair]
        return int(self._do(self._talk.run("prune", keys, (self._talk.now(), *pairs), READING)))

"""What a shard of a server must answer, hint at and hold: by the pure rules."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from idemguard.claim import (
    Begin,
    Command,
    Complete,
    Renew,
    Renewed,
    Replay,
    Resolve,
    aged,
    transition,
    wakes,
)
from idemguard.record import Address, Record, Status
from idemguard.stores import wire
from idemguard.windows import SPAN, TOKENS, Key, entries

if TYPE_CHECKING:
    from idemguard.claim import Answer
    from idemguard.record import Result

MOST = 2**63 - 1  # what a server counts to
EMPTY = Record()
RUNS_ONLY = (Begin, Renew)  # their replies tell no hint


class TooMuchError(Exception):
    """A count that no server holds."""


class Share(NamedTuple):
    """What the other waiters of one process came to."""

    address: Address
    retention: int
    shares: tuple[tuple[str, str | None, int, int], ...]  # task type, agent, found, reused


class Emptied(NamedTuple):
    """The record's key is gone."""

    address: Address


class Evicted(NamedTuple):
    """The result's key is gone."""

    address: Address


class Act(NamedTuple):
    """Something that happens at a time."""

    now: int
    what: Command | Share | Emptied | Evicted
    alone: bool = False  # with the record's key alone


class Expected(NamedTuple):
    """What a server must do at an act."""

    answer: Answer | None
    hint: str | None
    kept: Replay | None  # what a completion leaves
    message: str | None  # what is published, without who asked
    record: Record  # after it
    elsewhere: bool  # the result stands in a key that the step could not touch


class Shard:
    """The indexes of a shard."""

    def __init__(self) -> None:
        self.tasks: set[str] = set()
        self.starts: dict[str, int] = {}
        self.open: dict[str, int] = {}
        self.windows: dict[Key, Counter[str]] = {}


class Model:
    """All that one namespace holds."""

    def __init__(self) -> None:
        self.records: dict[Address, Record] = {}  # as they were written last
        self.shards: dict[str, Shard] = {}
        self._inside: set[Address] = set()  # whose result stands in the record itself

    def record(self, address: Address, now: int) -> Record:
        """As time has left it."""
        return aged(self.records.get(address, EMPTY), now)

    def perform(self, act: Act) -> Expected | None:
        """What happens at an act; None where nothing is asked.

        Raises:
            TooMuchError: a count would be more than a server holds; then nothing happened.

        """
        now, what, alone = act
        address = what.address
        if isinstance(what, Emptied):
            self.records.pop(address, None)
            self._inside.discard(address)
            return None
        if isinstance(what, Evicted):
            if address in self.records and address not in self._inside:
                self.records[address] = self.records[address]._replace(result=None)
            return None
        if isinstance(what, Share):
            return self._share(what, now, alone=alone)
        before = self.record(address, now)
        after, answer = transition(before, what, now)
        added = entries(before, after, what, answer, now)
        replayed = isinstance(answer, Replay)
        elsewhere = replayed and alone and address not in self._inside
        if elsewhere:  # it cannot know what is saved
            added = {key: _unsaved(counts) for key, counts in added.items()}
        self._book(address, added)
        if after is not before:
            self._write(address, after)
        fresh = after.result if after.result is not before.result else None
        if not (isinstance(what, Resolve) and replayed):
            self._place(address, fresh, after.result, alone=alone)
        whom = wakes(before, after, what, now)
        message = whom
        beats = isinstance(what, Renew) and isinstance(answer, Renewed)
        if beats and what.claim.id == after.leader:
            message = f"beat {what.claim.id} {answer.left}"
        kept = Replay(fresh, after.runs) if fresh and isinstance(what, Complete) else None
        told = None if isinstance(what, RUNS_ONLY) else whom
        return Expected(answer, told, kept, message, aged(after, now), elsewhere)

    def _place(
        self, address: Address, fresh: Result | None, result: Result | None, *, alone: bool
    ) -> None:
        if fresh is not None and (alone or not fresh.available):
            self._inside.add(address)
        elif result is None or (result.available and not alone):
            self._inside.discard(address)

    def _share(self, share: Share, now: int, *, alone: bool) -> Expected:
        before = self.record(share.address, now)
        result, added = before.result, {}
        seen = not alone or share.address in self._inside
        for task_type, agent, found, reused in share.shares:
            counts = added.setdefault(Key(now - now % SPAN, task_type, agent), Counter())
            counts["found"] += found
            if result is not None and not result.available:
                counts["call_refused"] += reused
                continue
            counts["call_reused"] += reused
            if result is not None and seen:
                usage = result.spent.usage
                for name in TOKENS[:2]:
                    count = getattr(usage, f"{name}_tokens") if usage else None
                    counts[f"saved_{name}"] += (count or 0) * reused
                counts["saved_cost"] += (result.spent.cost or 0) * reused
        self._book(share.address, added)
        after = before
        if any(reused for *_, reused in share.shares):
            last = [now + share.retention, before.kept_until]
            last += [line.until for line in before.lines if line.status is Status.OPEN]
            if result is not None:
                last.append(result.gone)
            more = sum(reused for *_, reused in share.shares)
            if result is not None and not result.available:
                more = 0
            after = before._replace(reused=before.reused + more, kept_until=max(last))
            self._write(share.address, after)
        if after is not before or any(found for _, _, found, _ in share.shares):
            self._place(share.address, None, result, alone=alone)
        return Expected(None, None, None, None, aged(after, now), elsewhere=False)

    def shard(self, address: Address) -> Shard:
        """The shard of an address."""
        return self.shards.setdefault(wire.digit(address.fingerprint), Shard())

    def _book(self, address: Address, added: dict[Key, Counter[str]]) -> None:
        windows = self.shard(address).windows
        for key, counts in added.items():
            there = windows.get(key, {})
            if any(abs(there.get(name, 0)) + abs(by) > MOST for name, by in counts.items()):
                raise TooMuchError
        for key, counts in added.items():
            windows.setdefault(key, Counter()).update(counts)

    def _write(self, address: Address, after: Record) -> None:
        shard, name = self.shard(address), wire.name(address)
        shard.tasks.add(name)
        for line in self.records.get(address, EMPTY).lines:
            del shard.starts[f"{name} {line.claim.id}"]
        for line in after.lines:
            shard.starts[f"{name} {line.claim.id}"] = line.claim.started
        due = [line.until for line in after.lines if line.status is Status.OPEN]
        if due:
            shard.open[name] = min(due)
        else:
            shard.open.pop(name, None)
        self.records[address] = after


def _unsaved(counts: Counter[str]) -> Counter[str]:
    return Counter({name: by for name, by in counts.items() if not name.startswith("saved_")})


def counted(windows: dict[Key, Counter[str]]) -> dict[Key, dict[str, Any]]:
    """Windows without what is nothing."""
    found = {
        key: {name: count for name, count in counts.items() if count}
        for key, counts in windows.items()
    }
    return {key: counts for key, counts in found.items() if counts}

"""What really happened, kept beside the record and never shown to the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from idemguard.claim import LEAVERS
from idemguard.record import Cause, Claim, Execution, Record, Result, Status
from idemguard.usage import NOTHING, Spent
from idemguard.windows import Key

DUPLICATES = ("lost", "fallback", "observed", "unguarded")
OF_CALLS = ("found", "call_reused")  # counted by call, and again when it asks again
END_OF = {"ok": "executed", "failed": "failed", "lost": "failed", "declined": "declined"}


class Run(NamedTuple):
    """A claim that was given out, and what became of it."""

    claim: Claim
    fate: str = "claimed"  # running, or how its body ended
    told: int | None = None  # when its end was told
    spent: Spent = NOTHING
    told_lost: bool = False
    kept: bool = False
    erased: bool = False  # the store was emptied of it


class Ghost(NamedTuple):
    """The truth."""

    why: str = "first"  # cause of the next execution
    top: int = 0  # the highest token ever given
    generation: int | None = None  # of those who held since the last kept result
    used: int = 0  # idempotency keys up to this one have had their result
    runs: tuple[Run, ...] = ()
    beside: tuple[tuple[str, str], ...] = ()  # nonces of a fallback and of its leader
    unstarted: int = 0  # told lost, then withdrawn by a caller that lived to say so
    left: tuple[str, ...] = ()  # nonces of those who left
    counted: bool = True  # nothing was emptied: the windows hold all that happened

    def run(self, claim: Claim) -> Run | None:
        return next((run for run in self.runs if run.claim.id == claim.id), None)

    def of(self, nonce: str) -> list[Run]:
        """The claims of this nonce that the record knows; an emptied store may give it another."""
        return [run for run in self.runs if run.claim.nonce == nonce and not run.erased]

    def put(self, run: Run) -> Ghost:
        if self.run(run.claim) is None:
            return self._replace(runs=(*self.runs, run))
        runs = tuple(run if r.claim.id == run.claim.id else r for r in self.runs)
        return self._replace(runs=runs)

    def leave(self, nonce: str) -> Ghost:
        if nonce in self.left:
            return self
        return self._replace(left=(*self.left, nonce)[-LEAVERS:])

    def emptied(self) -> Ghost:
        """Nothing is left of the record."""
        runs = tuple(run._replace(erased=True, spent=NOTHING, told_lost=False) for run in self.runs)
        return Ghost(top=self.top, runs=runs, counted=False)

    def account(self) -> Counter[tuple[int, str, str]]:
        """What the windows must add up to over all that happened: by window, agent and count."""
        sums: Counter[tuple[int, str, str]] = Counter()
        for run in self.runs:
            where = (window(run.claim.started), run.claim.caller.agent or "")
            for name, number in _counts(run).items():
                sums[*where, name] += number
            if run.told is not None:
                sums[window(run.told), where[1], f"call_{_outcome(run)}"] += 1
        sums[0, "", "tasks"] = len(self.runs) > 0
        sums[0, "", "doubled"] = len(self.runs) > 1
        return sums


def _counts(run: Run) -> dict[str, int]:
    usage, cost = run.spent.usage, run.spent.cost
    went_in, came_out = (
        (0, 0) if usage is None else (usage.input_tokens or 0, usage.output_tokens or 0)
    )
    wasted, ended = run.claim.cause in DUPLICATES, run.fate in END_OF
    return {
        f"cause_{run.claim.cause}": 1,
        "input": went_in,
        "output": came_out,
        "cost": cost or 0,
        "wasted_input": wasted * went_in,
        "wasted_output": wasted * came_out,
        "wasted_cost": wasted * (cost or 0),
        "lost": run.told_lost,
        "run": ended,
        "failures": run.fate == "failed" and not run.told_lost,
        "unknown_usage": usage is None,  # from its start, until it tells
        "unpriced": usage is not None and cost is None,
        "heard": ended and usage is not None,
        # of one that was lost before it nobody remembers that it was handed back
        "silent": ended and usage is None and (run.fate != "declined" or run.told_lost),
    }


def _outcome(run: Run) -> str:
    outcome = END_OF[run.fate]
    if outcome == "executed" and run.claim.cause in ("fallback", "unguarded"):
        return str(run.claim.cause)
    return outcome


def window(when: int) -> int:
    """When the five minutes began that a moment lies in."""
    return when // 300_000 * 300_000


def booked(entries: Mapping[Key, Mapping[str, int]]) -> Counter[tuple[int, str, str]]:
    """The entries of one command in the terms of an account; what counts calls alone is left out."""
    sums: Counter[tuple[int, str, str]] = Counter()
    for key, counts in entries.items():
        for name, number in counts.items():
            if name in ("tasks", "doubled"):
                sums[0, "", name] += number
            elif name not in OF_CALLS and not name.startswith("saved_"):
                part = "run" if name.startswith("run_") else name
                sums[key.start, key.agent or "", part] += number
    return sums


# --- the simulator's own reading of a record (not the rules') ------------------------------------------


def seen(record: Record, now: int) -> Record:
    """The record without what time has taken."""
    if record.kept_until and record.kept_until <= now:
        return Record()
    gone = record.result is not None and record.result.gone <= now
    return record._replace(result=None) if gone else record


def lives(line: Execution, now: int) -> bool:
    return line.status == "open" and now < line.until


def told(line: Execution, now: int) -> str:
    return "lost" if line.status == "open" and line.until <= now else str(line.status)


def places(record: Record) -> list[str]:
    return [place for place in (record.leader, record.fallback) if place is not None]


def holders(record: Record, now: int) -> list[Execution]:
    """The living leader, the living fallback."""
    return [
        line
        for place in places(record)
        for line in record.lines
        if line.claim.holds and line.claim.id == place and lives(line, now)
    ]


def line_of(record: Record, claim: Claim) -> Execution | None:
    return next((line for line in record.lines if line.claim.id == claim.id), None)


def has_ended(record: Record, claim: Claim) -> bool:
    line = line_of(record, claim)
    return line is not None and line.ended is not None


def untouched(record: Record) -> bool:
    """Nobody has held it since it began."""
    return record.cause is Cause.FIRST and record.leader is None


def adopts(record: Record, claim: Claim) -> bool:
    """A claim whose line is gone is taken up again if nobody has held it since."""
    new = line_of(record, claim) is None
    return new and claim.holds and untouched(record) and claim.nonce not in record.leavers


def owned(record: Record, claim: Claim) -> bool:
    return claim.holds and (claim.id in places(record) or adopts(record, claim))


def unsure(record: Record, now: int) -> bool:
    """Something was lost, and nobody knows what became of it."""
    return any(
        told(line, now) == "lost" and line.claim.holds and line.claim.token > record.settled
        for line in record.lines
    )


def serves(result: Result | None, since: int | None, now: int) -> bool:
    if result is None:
        return False
    return now < result.until or (since is not None and since <= result.at)


def droppable(record: Record, line: Execution) -> bool:
    """Over, or lost and unknown no longer."""
    settled = not line.claim.holds or line.claim.token <= record.settled
    return line.ended is not None or (line.status is Status.LOST and settled)

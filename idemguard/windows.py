"""What is counted, and in which window.

Pure. A window counts the calls that ended in it, and the executions that started in it
with all that they spent. Every store books the entries of one command in the step of
that command.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from idemguard.claim import Begin, Complete, InFlight, Release, Replay, Withdraw
from idemguard.record import DUPLICATES, Cause, Execution, Record, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from idemguard.claim import Answer, Command
    from idemguard.record import Caller
    from idemguard.usage import Spent

SPAN = 300_000  # ms: five minutes
HOUR = 3_600_000
FINE = 86_400_000  # ms: windows older than this are rolled up to hours

OUTCOMES = ("executed", "reused", "fallback", "declined", "failed", "refused", "unguarded")
TOKENS = ("input", "output", "cache_read", "cache_write", "reasoning")
WASTED = TOKENS[:4]
SAVED = TOKENS[:2]
PARTS = ("input", "cache_read", "cache_write")  # input: what is in no cache
# upper bounds of the run-time histogram, ms; the last bucket has none
RUN_TIMES = (
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 20_000, 30_000, 60_000,
    120_000, 300_000, 600_000, 1_800_000, 3_600_000,
)  # fmt: skip

COUNTERS: tuple[str, ...] = (
    *(f"call_{outcome}" for outcome in OUTCOMES),
    "found",  # calls that found a claim
    *(f"cause_{cause}" for cause in Cause),
    "tasks",  # executed for the first time
    "doubled",  # executed for the second time
    "failures",
    "lost",
    *TOKENS,
    "cost",
    *(f"cost_{part}" for part in PARTS),  # of it; the rest is the output's
    *(f"wasted_{name}" for name in WASTED),
    "wasted_cost",
    "inner_input",  # of the guarded executions inside
    "inner_output",
    "inner_cost",
    "saved_input",
    "saved_output",
    "saved_cost",
    "unpriced",
    "unknown_usage",
    "nested",  # told no usage of their own so far, since they hold guarded executions
    "heard",  # ended, and had told usage
    "silent",  # ended, and should have; not those that were handed back
    *(f"run_{number}" for number in range(len(RUN_TIMES) + 1)),
)

Counts: TypeAlias = "Counter[str]"


class Key(NamedTuple):
    """Which window."""

    start: int  # ms
    task_type: str
    agent: str | None


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time, a task type and an agent, and what happened there."""

    key: Key
    span: int  # ms
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def executions(self) -> int:
        """Bodies that started."""
        return executions(self.counts)

    @property
    def duplicates(self) -> int:
        """Executions that started beside a result or a leader, or unseen."""
        return duplicates(self.counts)


def executions(counts: Mapping[str, int]) -> int:
    """How many executions are counted here."""
    return sum(counts.get(f"cause_{cause}", 0) for cause in Cause)


def duplicates(counts: Mapping[str, int]) -> int:
    """How many of them are duplicates."""
    return sum(counts.get(f"cause_{cause}", 0) for cause in DUPLICATES)


def total(windows: Iterable[Window]) -> Counts:
    """The sum of several windows."""
    counts: Counts = Counter()
    for window in windows:
        counts.update(window.counts)
    return counts


Entries: TypeAlias = "dict[Key, Counts]"


def entries(before: Record, after: Record, command: Command, answer: Answer, now: int) -> Entries:
    """What one command adds to the windows.

    Args:
        before: the record that the command met, aged.
        after: what became of it.
        command: what was asked.
        answer: what was answered.
        now: the store's clock, ms.

    Returns:
        By window, what to add; counts can be negative.

    """
    book = _Book()
    match command:
        case Begin():
            if isinstance(answer, Replay):
                counts = book.at(now, command.caller)
                if answer.result.available:
                    counts["call_reused"] += 1
                    _spend(counts, answer.result.spent, "saved_", SAVED)
                else:  # its caller gets an error
                    counts["call_refused"] += 1
            elif isinstance(answer, InFlight) and command.since is None:
                book.at(now, command.caller)["found"] += 1
        case Withdraw(outcome=outcome) if command.nonce not in before.leavers:
            if outcome is not None:
                book.at(now, command.caller)[f"call_{outcome}"] += 1
        case _:
            pass
    if after.lines is not before.lines:
        _lines(book, before, after, command, now)
    return {key: counts for key, counts in book.items() if counts}


class _Book(dict[Key, "Counts"]):
    def at(self, when: int, caller: Caller) -> Counts:
        return self.setdefault(Key(when - when % SPAN, caller.task_type, caller.agent), Counter())


def _lines(book: _Book, before: Record, after: Record, command: Command, now: int) -> None:
    same = set(map(id, before.lines))
    for line in after.lines:
        if id(line) in same:
            continue
        old = next((old for old in before.lines if old.claim.names(line.claim)), None)
        counts = book.at(line.claim.started, line.claim.caller)
        if old is None:
            _start(counts, line, before.runs, 1)
        _change(counts, old, line)
        if line.ended is not None and (old is None or old.ended is None):
            outcome = _outcome(line, command)
            if outcome is not None:
                book.at(now, line.claim.caller)[f"call_{outcome}"] += 1
    if isinstance(command, Withdraw):
        for line in before.lines:  # its body never started
            if not any(line.claim.names(new.claim) for new in after.lines):
                counts = book.at(line.claim.started, line.claim.caller)
                _start(counts, line, before.runs - 1, -1)
                _miss(counts, line.spent, -1)
                if line.status is Status.LOST:
                    counts["lost"] -= 1


def _start(counts: Counts, line: Execution, earlier: int, by: int) -> None:
    counts[f"cause_{line.claim.cause}"] += by
    if earlier == 0:
        counts["tasks"] += by
    elif earlier == 1:
        counts["doubled"] += by


def _change(counts: Counts, old: Execution | None, line: Execution) -> None:
    if old is None or line.spent is not old.spent:
        _miss(counts, line.spent, 1)
        if old is not None:
            _miss(counts, old.spent, -1)
        _exclusive(counts, line.spent, 1, wasted=line.claim.cause in DUPLICATES)
        if old is not None:
            _exclusive(counts, old.spent, -1, wasted=line.claim.cause in DUPLICATES)
    if line.status is Status.LOST and (old is None or old.status is not Status.LOST):
        counts["lost"] += 1
    if line.ended is not None and (old is None or old.ended is None):
        if line.status is Status.FAILED:
            counts["failures"] += 1
        counts[f"run_{bisect_left(RUN_TIMES, line.ended - line.claim.started)}"] += 1
        if line.spent.usage is not None:
            counts["heard"] += 1
        elif not line.spent.nested and line.status is not Status.DECLINED:
            counts["silent"] += 1
    for name in [name for name, count in counts.items() if not count]:
        del counts[name]


def counted(line: Execution) -> Counts:
    """What one execution is counted as in the window in which it started.

    Whether its task was executed for the first time, or the second, a line does not tell.
    """
    counts: Counts = Counter()
    counts[f"cause_{line.claim.cause}"] += 1
    _change(counts, None, line)
    return counts


def _exclusive(counts: Counts, spent: Spent, sign: int, *, wasted: bool) -> None:
    _spend(counts, spent, "", TOKENS, sign)
    if wasted:
        _spend(counts, spent, "wasted_", WASTED, sign)
    for part, cost in zip(PARTS, spent.parts or (), strict=False):
        if cost:
            counts[f"cost_{part}"] += sign * cost
    for name, inner in zip(("input", "output", "cost"), spent.inner or (), strict=False):
        if inner:
            counts[f"inner_{name}"] += sign * inner


def _spend(
    counts: Counts, spent: Spent, prefix: str, names: tuple[str, ...], sign: int = 1
) -> None:
    usage = spent.usage
    if usage is not None:
        for name in names:
            if count := getattr(usage, f"{name}_tokens"):
                counts[prefix + name] += sign * count
    if spent.cost:
        counts[f"{prefix}cost"] += sign * spent.cost


def _miss(counts: Counts, spent: Spent, by: int) -> None:
    """An execution counts as one of unknown usage from its start, until it tells."""
    if spent.usage is None:
        counts["nested" if spent.nested else "unknown_usage"] += by
    elif spent.cost is None or spent.unpriced:
        counts["unpriced"] += by


def _outcome(line: Execution, command: Command) -> str | None:
    match command:
        case Complete():
            if line.claim.cause is Cause.FALLBACK:
                return "fallback"
            return "unguarded" if line.claim.cause is Cause.UNGUARDED else "executed"
        case Release(status=Status.DECLINED):
            return "declined"
        case Release():
            return "failed"
    return None


def rolled(windows: Iterable[Window], now: int) -> tuple[list[Window], list[Window]]:
    """Five-minute windows that are over a day old, as windows of an hour.

    Args:
        windows: any.
        now: the store's clock, ms.

    Returns:
        The windows to remove, and those to add in their place.

    """
    old = [w for w in windows if w.span == SPAN and w.key.start + FINE <= now - now % HOUR]
    hours: dict[Key, Counts] = {}
    for window in old:
        start = window.key.start - window.key.start % HOUR
        key = Key(start, window.key.task_type, window.key.agent)
        hours.setdefault(key, Counter()).update(window.counts)
    return old, [Window(key, HOUR, counts) for key, counts in hours.items()]


def percentile(counts: Mapping[str, int], share: float) -> int | None:
    """An upper bound of the run time that this share of the executions kept to.

    Args:
        counts: of one or more windows.
        share: between 0 and 1.

    Returns:
        Milliseconds: the bound of the bucket; None where no execution has ended.

    """
    runs = [counts.get(f"run_{number}", 0) for number in range(len(RUN_TIMES) + 1)]
    if not (ended := sum(runs)):
        return None
    seen = 0
    for number, count in enumerate(runs):
        seen += count
        if seen >= share * ended:
            return RUN_TIMES[min(number, len(RUN_TIMES) - 1)]
    return RUN_TIMES[-1]

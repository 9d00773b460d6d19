"""What lines tell beside sums: drops, loops, missed duplicates, growing input.

Pure: lines go in, findings come out.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, NamedTuple

from idemguard.digests import DROPPED, GENERATED, REST, UNMATCHED
from idemguard.record import DUPLICATES, Cause, Status
from idemguard.usage import money

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from idemguard.record import Address, Execution

HANDED_BACK = 2  # a task handed back more often than this goes round in a loop
NEAR = 3_600_000  # ms between two executions that may be one task's
DIFFERENT = 2  # fields that may differ in executions that are equal otherwise
AGREE = 3  # pairs that must point to a field before it is suspected
ONCE = 0.8  # distinct values per execution of a field that may be volatile
MOSTLY = 0.9  # of its values that must look generated, where that is what tells
TASKS = 5  # that go by the other fields, before a field is suspected whose values say nothing
ALIKE = 0.1  # by which the input tokens of two repetitions may differ
SUSPECTS = 6  # fields of a task type that are looked at


# --- drops and loops ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandedBack:
    """A task that its workers declined.

    Attributes:
        task_type: of the task.
        fingerprint: of the task.
        scope: that it was called in; empty at the root.
        version: that it was decorated with, or None.
        times: how often it was declined.
        workers: who declined it, in the order in which they first did.
        first: when it was first declined, ms.
        last: when it was declined last, ms.

    """

    task_type: str
    fingerprint: str
    scope: str
    version: str | None
    times: int
    workers: tuple[str, ...]
    first: int
    last: int


class Drop(HandedBack):
    """A task that its workers only ever declined."""

    __slots__ = ()


class Loop(HandedBack):
    """A task that was handed back more than twice, or twice by one worker."""

    __slots__ = ()


def drops(tasks: Iterable[Sequence[Execution]]) -> list[Drop]:
    """Tasks that workers only ever declined, the most often declined first.

    Args:
        tasks: the executions of one task each.

    """
    found = [
        Drop(*_handed_back(back))
        for lines in tasks
        if (back := _declined(lines)) and all(_says_no(line) for line in lines)
    ]
    return sorted(found, key=lambda drop: (-drop.times, drop.first, drop.fingerprint))


def loops(tasks: Iterable[Sequence[Execution]]) -> list[Loop]:
    """Tasks handed back more than twice, or twice by one worker; the most often first."""
    found = [
        Loop(*_handed_back(back))
        for lines in tasks
        if (back := _declined(lines))
        and (
            len(back) > HANDED_BACK
            or max(Counter(line.worker for line in back).values()) >= HANDED_BACK
        )
    ]
    return sorted(found, key=lambda loop: (-loop.times, loop.first, loop.fingerprint))


def _declined(lines: Sequence[Execution]) -> list[Execution]:
    return [line for line in lines if line.status is Status.DECLINED]


def _says_no(line: Execution) -> bool:
    """Whether nobody did the task in this execution, nor may be doing it."""
    return line.status in (Status.DECLINED, Status.FAILED)


def _handed_back(
    back: list[Execution],
) -> tuple[str, str, str, str | None, int, tuple[str, ...], int, int]:
    ends = [line.started if line.ended is None else line.ended for line in back]
    one = back[0]
    workers = tuple(dict.fromkeys(line.worker for line in back))
    return (
        one.task_type, one.fingerprint, one.scope, one.version, len(back), workers, min(ends),
        max(ends),
    )  # fmt: skip


def by_task(lines: Iterable[Execution]) -> dict[Address, list[Execution]]:
    """Executions, in their order, by their tasks."""
    tasks: dict[Address, list[Execution]] = defaultdict(list)
    for line in lines:
        tasks[line.claim.address].append(line)
    return tasks


# --- missed duplicates -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Suspect:
    """A field that may be volatile, though nobody said so.

    Attributes:
        field: its name in the payload; as a path where the payload's only field holds it.
        differs: pairs of executions, equal otherwise, in which it differs.
        pairs: pairs of executions that are equal but for one or two fields.

    """

    field: str
    differs: int
    pairs: int

    def __str__(self) -> str:
        return (
            f"`{self.field}` differs in {self.differs} of {self.pairs} otherwise equal pairs: "
            "volatile?"
        )


@dataclass(frozen=True, slots=True)
class Missed:
    """Executions of one task type that repeat an earlier one but for the suspects.

    Attributes:
        task_type: of the tasks.
        executions: that repeat an earlier one.
        looked_at: executions that were compared.
        tokens: that the repeating ones spent.
        charged: what they cost; None where nothing of it is priced.
        suspects: the fields that differ, the one that explains most first.

    """

    task_type: str
    executions: int
    looked_at: int
    tokens: int
    charged: Decimal | None
    suspects: tuple[Suspect, ...]


def missed(lines: Iterable[Execution]) -> list[Missed]:
    """Executions that are equal but for one or two fields, close in time, by task type.

    A field that tells tasks apart differs between them, too. So a field is suspected only where
    nearly all its values are seen once, or go with the worker; and where they look generated, or
    where there are more tasks that go by the other fields than executions of each of them. Where
    the input tokens are known and differ, it is no repetition.

    Args:
        lines: of any task types, oldest first. Only those whose fields have digests are compared.

    Returns:
        One for each task type in which a field is suspected, the dearest first.

    """
    types: dict[str, list[_Compared]] = defaultdict(list)
    for line in lines:
        if line.claim.caller.digests and line.cause in (Cause.FIRST, Cause.EXPIRED):
            types[line.task_type].append(_compared(line))
    found = [one for name, own in types.items() if (one := _missed(name, own)) is not None]
    return sorted(found, key=lambda one: (-(one.charged or 0), -one.tokens, -one.executions))


class _Compared(NamedTuple):
    line: Execution
    values: dict[str, str]  # digest by field
    place: tuple[str, str, str | None]


def _compared(line: Execution) -> _Compared:
    digests = line.claim.caller.digests
    values = {name: digest for name, digest in digests if digest not in (DROPPED, UNMATCHED)}
    return _Compared(line, values, (line.claim.address.namespace, line.scope, line.version))


def _missed(task_type: str, compared: list[_Compared]) -> Missed | None:
    loose = _loose(compared)
    found: dict[frozenset[str], list[tuple[_Compared, _Compared]]] = {}
    for size in range(1, DIFFERENT + 1):
        for names in map(frozenset, combinations(loose, size)):
            if not any(smaller <= names for smaller in found):
                pairs, tasks = _pairs(compared, names)
                many = tasks >= TASKS and tasks**2 >= len(compared)
                if len(pairs) >= AGREE and _repeats(pairs) and (many or _made(names, pairs)):
                    found[names] = pairs
    if not found:
        return None
    counted: Counter[str] = Counter()
    again: dict[str, Execution] = {}
    for names, pairs in found.items():
        for _, later in pairs:
            again[later.line.execution_id] = later.line
            counted.update(names)
    total = sum(len(pairs) for pairs in found.values())
    priced = [line.spent.cost for line in again.values() if line.spent.cost is not None]
    return Missed(
        task_type,
        len(again),
        len(compared),
        sum(line.usage.total_tokens or 0 for line in again.values() if line.usage is not None),
        money(sum(priced)) if priced else None,
        tuple(Suspect(name, differs, total) for name, differs in counted.most_common()),
    )


def _loose(compared: list[_Compared]) -> list[str]:
    """Fields whose values are seen about once each, or go with the worker."""
    values: dict[str, Counter[str]] = defaultdict(Counter)
    workers: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for _, own, _ in compared:
        for name, digest in own.items():
            values[name][digest] += 1
    for line, own, _ in compared:
        for name, digest in own.items():
            workers[name].add((line.worker, digest))
    everybody = {line.worker for line, *_ in compared}
    found = []
    for name, seen in values.items():
        once = len(seen) >= ONCE * seen.total()
        theirs = len(everybody) > 1 and len(workers[name]) == len(seen) == len(everybody)
        if name != REST and len(seen) > 1 and (once or theirs):
            found.append(name)
    return sorted(found, key=lambda name: (-len(values[name]), name))[:SUSPECTS]


def _pairs(
    compared: list[_Compared], names: frozenset[str]
) -> tuple[list[tuple[_Compared, _Compared]], int]:
    """Neighbours in time that are equal but for these fields; and how many tasks there would be."""
    groups: dict[object, list[_Compared]] = defaultdict(list)
    for one in compared:
        if names <= one.values.keys() and len(one.values) > len(names):
            rest = frozenset(item for item in one.values.items() if item[0] not in names)
            groups[one.place, rest].append(one)
    pairs = [
        (one, other)
        for group in groups.values()
        for one, other in pairwise(group)
        if other.line.started - one.line.started <= NEAR
        and all(one.values[name] != other.values[name] for name in names)
    ]
    return pairs, len(groups)


def _repeats(pairs: list[tuple[_Compared, _Compared]]) -> bool:
    """Whether what is known of their input speaks for it, or nothing is."""
    known = [
        (one.line.usage.input_tokens, other.line.usage.input_tokens)
        for one, other in pairs
        if one.line.usage is not None and other.line.usage is not None
    ]
    same = [abs(a - b) <= ALIKE * max(a, b) for a, b in known if a is not None and b is not None]
    return sum(same) >= len(same) / 2


def _made(names: frozenset[str], pairs: list[tuple[_Compared, _Compared]]) -> bool:
    """Whether these fields look made for one occasion."""
    looks = [one.values[name].endswith(GENERATED) for one, _ in pairs for name in names]
    return sum(looks) >= MOSTLY * len(looks)


# --- one task type ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Explanation:
    """What stands behind the figures of one task type.

    Attributes:
        task_type: which.
        executions: that were looked at.
        causes: how many of them started for which cause.
        missed: executions that repeat an earlier one but for a field or two; None: there are none.
        dropped: by volatile name or path, the executions in which it left something out.
        unmatched: volatile names and paths that were declared and never left anything out.
        workers: how many of them were whose.
        duplicates_by: how many duplicates were whose.
        raised: of those with the cause `lost`, how many follow a body that raised
            `UnknownOutcomeError`.
        ran_out: how many of them follow a lease that ran out; of the rest it is not known.

    """

    task_type: str
    executions: int
    causes: dict[str, int]
    missed: Missed | None
    dropped: dict[str, int]
    unmatched: tuple[str, ...]
    workers: dict[str, int]
    duplicates_by: dict[str, int]
    raised: int = 0
    ran_out: int = 0

    @property
    def advice(self) -> list[Advice]:
        """Why they started more than once, and what to do."""
        return advice(self.causes, raised=self.raised, ran_out=self.ran_out)


@dataclass(frozen=True, slots=True)
class Advice:
    """Why executions started beside the first, and what to do.

    Attributes:
        cause: for which they started.
        executions: how many did.
        why: the likely reason.
        remedy: what to do.

    """

    cause: Cause
    executions: int
    why: str
    remedy: str

    @property
    def duplicates(self) -> bool:
        """Whether they are duplicates."""
        return self.cause in DUPLICATES

    def __str__(self) -> str:
        are = "" if self.duplicates else " (no duplicates)"
        return (
            f"Likely cause of {self.executions:,} {self.cause}{are}: {self.why}. "
            f"What to do: {self.remedy}."
        )


_ADVICE = {
    Cause.OBSERVED: (
        'mode="observe" (or ledger.record) counts, and holds nothing back',
        'guard it with mode="enforce", the default, and without IDEMGUARD_MODE=observe',
    ),
    Cause.FALLBACK: (
        "a caller lost its patience (wait_timeout) and ran beside the leader",
        "make wait_timeout= longer than the body takes, or leave it out",
    ),
    Cause.UNGUARDED: (
        "the store was down, so it ran unguarded",
        (
            'see that the store is there; or run nothing without it: on_store_error="raise", the '
            "default, and no observe mode, which runs in any case"
        ),
    ),
    Cause.EXPIRED: (
        "the time of the result before (ttl) was over",
        "make ttl= longer than the time between the calls, if the result is still good then",
    ),
    Cause.RETRY: (
        "the run before failed",
        "see why it fails, where that is often",
    ),
    Cause.DECLINED: (
        "the worker before handed it back",
        "send it to the worker that takes it",
    ),
    Cause.FORCED: (
        "it was asked for, by forget or a bypass",
        "nothing, if that was meant",
    ),
}

_KEEP_ALIVE = (
    "see what ends processes; if nothing does, make lease= longer (and max_run= longer than "
    "the body takes), or let the body give the interpreter up, so that it is renewed"
)
_FIND_OUT = (
    'resolve() it once that is known, or set on_lost="raise" (in mode="enforce"), so that nothing '
    "runs again before"
)
# why executions are `lost`: the lease of the one before ran out, its body said so, or it is not known
_RAN_OUT = (
    "the lease ran out: the process was killed, or still at work, and another one took over",
    _KEEP_ALIVE,
)
_RAISED = (
    "the body before raised UnknownOutcomeError: nobody knows whether it came about",
    _FIND_OUT,
)
_EITHER = (
    (
        "the lease ran out (the process was killed, or still at work), or the body before raised "
        "UnknownOutcomeError (nobody knows whether it came about)"
    ),
    f"if a lease ran out, {_KEEP_ALIVE}; if it was raised, {_FIND_OUT}",
)


def advice(causes: Mapping[str, int], *, raised: int = 0, ran_out: int = 0) -> list[Advice]:
    """Why a task type is executed more than once, and what to do.

    Args:
        causes: how many executions started for which cause.
        raised: of those with the cause `lost`, how many follow a body that raised
            `UnknownOutcomeError`.
        ran_out: how many of them follow a lease that ran out.

    Returns:
        One for each cause that there is but `first`, of `lost` one for each of its reasons: those
        of duplicates before the others, the most frequent first.

    """
    lost = causes.get(Cause.LOST, 0)
    known = [(cause, causes.get(cause, 0), *told) for cause, told in _ADVICE.items()]
    known += [
        (Cause.LOST, ran_out, *_RAN_OUT),
        (Cause.LOST, raised, *_RAISED),
        (Cause.LOST, lost - ran_out - raised, *_EITHER),
    ]
    found = [Advice(*one) for one in known if one[1] > 0]
    return sorted(found, key=lambda one: (not one.duplicates, -one.executions))


def explanation(task_type: str, lines: Sequence[Execution]) -> Explanation:
    """Explain the executions of one task type.

    Args:
        task_type: which.
        lines: its executions, oldest first.

    """
    marks: dict[str, Counter[str]] = {DROPPED: Counter(), UNMATCHED: Counter()}
    for line in lines:
        for name, digest in line.claim.caller.digests:
            if digest in marks:
                marks[digest][name] += 1
    dropped, idle = marks[DROPPED], marks[UNMATCHED]
    raised, ran_out = _lost(lines)
    return Explanation(
        task_type,
        len(lines),
        dict(Counter(str(line.cause) for line in lines).most_common()),
        next(iter(missed(lines)), None),
        dict(dropped.most_common()),
        tuple(sorted(name for name in idle if name not in dropped)),
        dict(Counter(line.worker for line in lines).most_common()),
        dict(Counter(line.worker for line in lines if line.cause in DUPLICATES).most_common()),
        raised,
        ran_out,
    )


def _lost(lines: Iterable[Execution]) -> tuple[int, int]:
    """How many followed a body that said it was lost, and how many a lease that ran out."""
    raised = ran_out = 0
    for own in by_task(lines).values():
        before: Execution | None = None
        for line in sorted(own, key=lambda line: line.claim.token):
            if line.cause is Cause.LOST and before is not None:
                said = before.status is Status.LOST and _ended_within(before)
                raised, ran_out = raised + said, ran_out + (not said)
            if line.claim.holds and line.status in (Status.LOST, Status.LATE):
                before = line
    return raised, ran_out


def _ended_within(line: Execution) -> bool:
    """Whether its end was told before its lease was over."""
    return line.ended is not None and line.ended < line.until


# --- growing input -----------------------------------------------------------------------------------

STEPS = 4  # usage reports of one execution from which a growth can be told
STEADY = 0.8  # of the steps that must add, and of the executions that must show it
EVERY = 5  # steps after which a summary takes the history's place
SUMMARY = 1  # steps' worth of tokens that a summary is long


@dataclass(frozen=True, slots=True)
class Growth:
    """A task type whose input grows from step to step, as carried history does.

    Attributes:
        task_type: which.
        executions: that show it.
        steps: usage reports per execution, on average.
        tokens: input tokens that these executions spent.
        per_step: tokens by which the input grows with each step, on average.
        capped: input tokens that would be saved if each stopped at half its steps.
        every: steps after which a summary would take the history's place.
        summarised: input tokens that would be saved by that.

    """

    task_type: str
    executions: int
    steps: float
    tokens: int
    per_step: float
    capped: int
    every: int
    summarised: int


def growth(lines: Iterable[Execution]) -> list[Growth]:
    """Task types whose executions carry their history along, those that spend most on it first.

    Args:
        lines: of any task types.

    """
    types: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for line in lines:
        if len(line.spent.inputs) >= STEPS:
            types[line.task_type].append(line.spent.inputs)
    found = []
    for task_type, runs in types.items():
        growing = [inputs for inputs in runs if _grows(inputs)]
        if growing and len(growing) >= STEADY * len(runs):
            found.append(_growth(task_type, growing))
    return sorted(found, key=lambda one: (-one.tokens, one.task_type))


def _grows(inputs: Sequence[int]) -> bool:
    """Nearly every step adds, and the last sends at least twice what the first does."""
    added = [later > earlier for earlier, later in pairwise(inputs)]
    return sum(added) >= STEADY * len(added) and inputs[-1] >= 2 * inputs[0]


def _growth(task_type: str, runs: list[tuple[int, ...]]) -> Growth:
    steps = [(inputs[-1] - inputs[0]) / (len(inputs) - 1) for inputs in runs]
    return Growth(
        task_type,
        len(runs),
        sum(map(len, runs)) / len(runs),
        sum(map(sum, runs)),
        sum(steps) / len(steps),
        sum(sum(inputs[(len(inputs) + 1) // 2 :]) for inputs in runs),
        EVERY,
        sum(sum(inputs) - _summarised(inputs, EVERY) for inputs in runs),
    )


def _summarised(inputs: Sequence[int], every: int) -> int:
    """The input of the same steps if a summary took the history's place every so many steps."""
    sent = before = 0
    carried = inputs[0]
    for number, now in enumerate(inputs):
        if number:
            carried += now - before
            if number % every == 0:  # a summary as long as an average step, and the newest step
                carried = min(carried, inputs[0] + SUMMARY * max(0, now - before))
        before = now
        sent += max(0, carried)
    return min(sent, sum(inputs))

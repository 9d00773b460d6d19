"""What alerts: the limits, and which of them the last windows passed.

Pure: windows, limits and a time go in, alerts come out.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from idemguard.errors import ConfigurationError
from idemguard.windows import SPAN, Key, Window, duplicates, executions, total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from idemguard.findings import HandedBack
    from idemguard.windows import Counts

ROW = 3  # complete windows in each of which a limit must be passed
WEEK = 604_800_000  # ms before them of which a baseline is made
VOLUME = 20
MOST = 10**9

KINDS = ("duplication", "fallback", "tokens", "drops", "loops", "unguarded", "usage")
COUNTED = ("drops", "loops")  # in tasks, the others in shares and multiples


# --- limits ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """When one kind alerts.

    Attributes:
        over: more than this is too much: a share (3/100), a multiple of the baseline (`tokens`),
            or a number of tasks (`drops`, `loops`).
        volume: fewer than this in the three windows together say nothing: of what the share is
            one of, for `drops` and `loops` executions.

    """

    over: Fraction
    volume: int = VOLUME


DEFAULTS: Mapping[str, Limit] = MappingProxyType({
    "duplication": Limit(Fraction(3, 100)),
    "fallback": Limit(Fraction(5, 100)),
    "tokens": Limit(Fraction(3, 2)),
    "drops": Limit(Fraction(0)),
    "loops": Limit(Fraction(0)),
    "unguarded": Limit(Fraction(0)),
    "usage": Limit(Fraction(5, 100)),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """What is looked for, and when it alerts.

    Attributes:
        on: the kinds that are looked for.
        of: the limit of each kind.

    """

    on: tuple[str, ...] = ("duplication",)
    of: Mapping[str, Limit] = field(default_factory=lambda: DEFAULTS)


SETTINGS = ("fail_on", "limits", "volume")


def changed(limits: Limits, given: Mapping[str, object], where: str = "") -> Limits:
    """Limits with what is set over them.

    Args:
        limits: what counts where nothing is set.
        given: `fail_on`, a list of kinds; `limits`, a number for each of some kinds; `volume`,
            a whole number, or one for each of some kinds. Shares may be texts: "3%".
        where: it was set, for the error, which names the rest.

    Raises:
        ConfigurationError: a name that there is not, or a value that cannot be; it is named.

    """
    _known(given, SETTINGS, where)
    at = f"{where} " if where else ""
    of = dict(limits.of)
    for kind, value in _table(given.get("limits", {}), f"{at}limits").items():
        of[kind] = replace(of[kind], over=_over(kind, value, f"{at}limits.{kind}"))
    volume = given.get("volume", {})
    each = volume if isinstance(volume, dict) else dict.fromkeys(KINDS, volume)
    for kind, value in _table(each, f"{at}volume").items():
        of[kind] = replace(of[kind], volume=_least(value, f"{at}volume"))
    return Limits(_kinds(given.get("fail_on", limits.on), f"{at}fail_on"), of)


def _known(given: Iterable[str], names: Sequence[str], where: str) -> None:
    if unknown := sorted(set(given) - set(names)):
        raise ConfigurationError(
            f"{where or 'limits'}: there is no {', '.join(map(repr, unknown))}; there are "
            f"{', '.join(names)}"
        )


def _table(given: object, where: str) -> dict[str, object]:
    if not isinstance(given, dict):
        raise ConfigurationError(f"{where} takes a table of kinds, not {given!r}")
    _known(given, KINDS, where)
    return given


def _kinds(given: object, where: str) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) for one in given):
        raise ConfigurationError(f"{where} takes a list of kinds, not {given!r}")
    _known(given, KINDS, where)
    return tuple(kind for kind in KINDS if kind in given)


_NUMBER = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(%?)", re.ASCII)


def _over(kind: str, value: object, where: str) -> Fraction:
    number = _number(value)
    if kind in COUNTED:
        fits, what = number is not None and number.denominator == 1, "a whole number of tasks, as 0"
    elif kind == "tokens":
        fits, what = (
            number is not None and number >= 1,
            "a multiple of the baseline, as 1.5 or 150%",
        )
    else:  # 3 is not 3 %, and nothing would ever pass it
        fits, what = number is not None and number < 1, "a share below 1, as 0.03 or 3%"
    if number is None or not fits:
        raise ConfigurationError(f"{where} takes {what}, not {value!r}")
    return number


def _number(value: object) -> Fraction | None:
    """A number that is not negative, exactly as it is written."""
    if isinstance(value, str) and (found := _NUMBER.fullmatch(value.strip())):
        return Fraction(found[1]) / (100 if found[2] else 1)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return Fraction(str(value)) if 0 <= value <= MOST else None  # nan is neither


def _least(value: object, where: str) -> int:
    number = None if isinstance(value, str) and "%" in value else _number(value)
    if number is None or number.denominator != 1 or number < 1:
        raise ConfigurationError(f"{where} takes a whole number > 0, not {value!r}")
    return int(number)


# --- what is measured ------------------------------------------------------------------------------


def _told(counts: Counts) -> int:
    """Executions whose tokens are known."""
    return max(0, executions(counts) - counts["unknown_usage"] - counts["nested"])


def _silent(counts: Counts) -> int:
    """Executions that ended and told none; one that is still open may yet."""
    return counts["silent"]


def _ended(counts: Counts) -> int:
    """Those that ended, but for wrappers and what was handed back with nothing to tell."""
    return counts["silent"] + counts["heard"]


Measure: TypeAlias = "Callable[[Counts], int]"

# a part, and what it is a part of
MEASURES: Mapping[str, tuple[Measure, Measure]] = MappingProxyType({
    "duplication": (duplicates, executions),
    "fallback": (lambda counts: counts["cause_fallback"], lambda counts: counts["found"]),
    "tokens": (lambda counts: counts["input"], _told),
    "drops": (lambda counts: counts["drops"], executions),
    "loops": (lambda counts: counts["loops"], executions),
    "unguarded": (lambda counts: counts["cause_unguarded"], executions),
    "usage": (_silent, _ended),
})  # fmt: skip


def last(now: int) -> tuple[int, ...]:
    """Where the last complete windows start, oldest first; ms.

    Args:
        now: ms. A window that ends just now is complete.

    """
    end = now - now % SPAN
    return tuple(end - SPAN * number for number in range(ROW, 0, -1))


def needed(limits: Limits, now: int) -> tuple[int, int]:
    """From when to before when windows are needed to tell what alerts; ms."""
    first = last(now)[0]
    return max(0, first - WEEK if "tokens" in limits.on else first), first + ROW * SPAN


def handed_back(kind: str, start: int, found: Iterable[HandedBack]) -> list[Window]:
    """What was handed back, as it is counted beside a window, which does not know of it.

    Args:
        kind: `drops` or `loops`.
        start: of the window in which they were handed back; ms.
        found: the tasks.

    """
    tasks = Counter(one.task_type for one in found)
    return [Window(Key(start, name, None), SPAN, {kind: count}) for name, count in tasks.items()]


# --- alerts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """What the three windows together came to.

    Attributes:
        task_type: of this one; None: of all.
        value: the share; the multiple of the baseline; of `drops` and `loops` the tasks that
            there were at least in each window.
        volume: of how many.
        baseline: input tokens per execution in the 7 days before, where it is measured by that.

    """

    task_type: str | None
    value: Fraction
    volume: int
    baseline: Fraction | None = None


@dataclass(frozen=True, slots=True)
class Alert:
    """A limit that was passed in each of the last three complete windows.

    Attributes:
        kind: one of `KINDS`.
        limit: that was passed.
        overall: what all task types together came to, where they pass it; else None.
        task_types: those that pass it on their own, the worst first.
        task_type: the worst one; where none passes on its own, the one that adds most.
        start: of the three windows, ms.
        end: of the three windows, ms.
        trimmed: whether lines of it are no longer kept, so that later ones must tell.

    """

    kind: str
    limit: Limit
    overall: Figure | None
    task_types: tuple[Figure, ...]
    task_type: str
    start: int
    end: int
    trimmed: bool = False

    @property
    def figure(self) -> Figure:
        """Of the worst task type that passes on its own, else of all together."""
        if self.task_types:
            return self.task_types[0]
        assert self.overall is not None
        return self.overall


_Rows: TypeAlias = "dict[str, list[Counts]]"


def alerting(windows: Iterable[Window], limits: Limits, now: int) -> list[Alert]:
    """What alerts at a moment.

    Args:
        windows: in any order, of any time; those of `needed` count. What was handed back is
            counted beside them, by `handed_back`.
        limits: which kinds, and when.
        now: ms by the clock that the windows are of.

    Returns:
        At most one for each kind that is on, in the order of `KINDS`.

    """
    starts = last(now)
    rows, before = _parted(windows, starts)
    found = (_alert(kind, limits.of[kind], rows, before, starts) for kind in limits.on)
    return [alert for alert in found if alert is not None]


def _parted(
    windows: Iterable[Window], starts: Sequence[int]
) -> tuple[_Rows, dict[str, list[Window]]]:
    """By task type, the counts of the three windows, and the windows of the week before."""
    rows: _Rows = {}
    before: dict[str, list[Window]] = {}
    since = starts[0] - WEEK
    for window in windows:
        key = window.key
        if window.span == SPAN and key.start in starts:
            own = rows.setdefault(key.task_type, [Counter() for _ in starts])
            own[starts.index(key.start)].update(window.counts)
        elif since <= key.start and key.start + window.span <= starts[0]:
            before.setdefault(key.task_type, []).append(window)
    return rows, before


def _alert(
    kind: str,
    limit: Limit,
    rows: _Rows,
    before: Mapping[str, Sequence[Window]],
    starts: Sequence[int],
) -> Alert | None:
    passed = list[Figure]()
    for task_type, counts in rows.items():
        figure = _passed(kind, limit, counts, task_type, before.get(task_type, ()))
        passed += [] if figure is None else [figure]
    # never for tokens: of all task types together there is no baseline, as their mix changes
    overall = _passed(kind, limit, _sums(rows, starts))
    if not passed and overall is None:
        return None
    passed.sort(key=lambda one: (-one.value, -one.volume, one.task_type or ""))
    part, _ = MEASURES[kind]
    worst = passed[0].task_type if passed else None
    if worst is None:
        worst = min(rows, key=lambda name: (-sum(map(part, rows[name])), name))
    return Alert(kind, limit, overall, tuple(passed), worst, starts[0], starts[-1] + SPAN)


def _sums(rows: _Rows, starts: Sequence[int]) -> list[Counts]:
    sums: list[Counts] = [Counter() for _ in starts]
    for counts in rows.values():
        for one, more in zip(sums, counts, strict=True):
            one.update(more)
    return sums


def _baseline(limit: Limit, before: Sequence[Window]) -> Fraction | None:
    """Input tokens per execution; None where there were too few to tell, or none."""
    counts = total(before)
    if (told := _told(counts)) < limit.volume or counts["input"] <= 0:
        return None
    return Fraction(counts["input"], told)


def _passed(
    kind: str,
    limit: Limit,
    counts: Sequence[Counts],
    task_type: str | None = None,
    before: Sequence[Window] = (),
) -> Figure | None:
    """The figure of three windows; None where one of them does not pass the limit."""
    part, whole = (list(map(measure, counts)) for measure in MEASURES[kind])
    volume = sum(whole)
    if volume < limit.volume:
        return None
    if kind in COUNTED:
        least = min(part)
        return Figure(task_type, Fraction(least), volume) if least > limit.over else None
    base = _baseline(limit, before) if kind == "tokens" else None
    if kind == "tokens" and base is None:
        return None
    unit = Fraction(1) if base is None else base
    if any(
        there <= 0 or some <= limit.over * unit * there
        for some, there in zip(part, whole, strict=True)
    ):
        return None
    return Figure(task_type, Fraction(sum(part), volume) / unit, volume, base)


# --- what could alert ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """In how much of the last three complete windows one kind could be looked for.

    Attributes:
        kind: one of `KINDS`.
        of: how many there were of what its share is one of; of `tokens`, executions of task types
            that have a baseline. None: no task type has one yet.
        most: the most that alerts together: all of them; of `tokens`, those of one task type.
        windows: of the three, in which there were any of these; of `tokens`, at most of one task
            type.
        apart: whether one task type has enough, and only others have some in each window.

    """

    kind: str
    of: int | None
    most: int = 0
    windows: int = 0
    apart: bool = False


def measured(windows: Iterable[Window], limits: Limits, now: int) -> list[Measured]:
    """In how much each kind that is on could be looked for, in their order.

    Args:
        windows: as for `alerting`.
        limits: which kinds, and how many make a baseline.
        now: ms by the clock that the windows are of.

    """
    starts = last(now)
    rows, before = _parted(windows, starts)
    return [_measured(kind, limits.of[kind], rows, before, starts) for kind in limits.on]


def _measured(
    kind: str,
    limit: Limit,
    rows: _Rows,
    before: Mapping[str, Sequence[Window]],
    starts: Sequence[int],
) -> Measured:
    compared = [_sums(rows, starts)]
    if kind == "tokens":
        based = {name for name, own in before.items() if _baseline(limit, own) is not None}
        if not based:
            return Measured(kind, None)
        compared = [counts for name, counts in rows.items() if name in based]
    _, whole = MEASURES[kind]
    there = [list(map(whole, counts)) for counts in compared]
    each = [(sum(number > 0 for number in numbers), sum(numbers)) for numbers in there]
    most = max((number for _, number in each), default=0)
    windows = max((in_windows for in_windows, _ in each), default=0)
    both = any(in_windows == ROW and number >= limit.volume for in_windows, number in each)
    apart = most >= limit.volume and windows == ROW and not both
    return Measured(kind, sum(number for _, number in each), most, windows, apart)

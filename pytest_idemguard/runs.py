"""Events put together: which runs there were, how each ended, and which of them count.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_idemguard.journals import alive, outermost

if TYPE_CHECKING:
    from collections.abc import Iterable

Key: TypeAlias = "tuple[str, str, str, str, str | None]"

NOT_TWICE = ("expired", "forced")  # causes: its result's time was over, or it was asked for
AGAIN = ("retry", "declined", "lost")  # causes: it stands for the run before


@dataclass(slots=True)
class Run:
    """One execution of a body, as events tell of it."""

    id: str
    ns: str
    task: str
    fp: str
    scope: str = ""
    version: str | None = None
    cause: str = "first"
    worker: str = "?"
    pid: int = 0
    thread: str = "?"
    where: str = "?"
    store: str = "?"
    started: float = 0.0
    ended: float | None = None
    status: str = "open"  # ok, failed, declined
    error: str | None = None
    took: int | None = None  # ms
    tokens: int | None = None
    cost: str | None = None
    waited: int = 0  # ms
    test: str | None = None  # during which it ran, where its namespace is no test's
    digests: list[list[str]] = field(default_factory=list)
    went_on: bool = False  # when its worker told of it; by now that has ended

    @property
    def key(self) -> Key:
        """Its address."""
        return self.ns, self.task, self.fp, self.scope, self.version

    @property
    def money(self) -> Decimal:
        """What it cost; 0 where that is unknown."""
        return Decimal(self.cost or 0)

    def abandoned(self) -> bool:
        """Whether its process has died before its end."""
        return self.status == "open" and not self.went_on and not alive(self.pid)

    def ran(self) -> bool:
        """Whether it ran to its end, or still runs."""
        return self.status in ("ok", "open") and not self.abandoned()


def counted(runs: Iterable[Run], *, failed: bool) -> list[Run]:
    """Those of one task's runs that must not be more than allowed.

    Args:
        runs: in the order in which they started.
        failed: whether runs that raised count.

    """
    found, excused, before = [], False, None
    for run in runs:
        stands_in = run.cause in AGAIN and before is not None and not before.ran()
        if not stands_in:
            excused = run.cause in NOT_TWICE
        if not excused and (failed if run.status == "failed" else run.ran()):
            found.append(run)
        before = run
    return found


_NAMES = {one.name for one in fields(Run)}
_PLAIN = sorted(_NAMES - {"digests", "went_on"})
WATCHED = "watched"  # cause of a run that no guard has, as pytest_idemguard.watched has it


class Book:
    """Runs and calls by what events told; an event that comes twice changes nothing."""

    def __init__(self, events: Iterable[dict[str, Any]] = ()) -> None:
        self.runs: dict[str, Run] = {}
        self.calls: Counter[tuple[str, str]] = Counter()  # by task type and outcome
        self.saved: dict[str, Decimal] = {}  # by task type
        self._answers: dict[tuple[str, str], Run] = {}  # by a provider's response
        for event in events:
            self.add(event)

    def add(self, event: dict[str, Any]) -> None:
        """Something happened."""
        match event["kind"]:
            case "start":
                if event["id"] not in self.runs:
                    known = {name: event[name] for name in event.keys() & _NAMES}
                    self.runs[event["id"]] = Run(**known, started=event["at"])
            case "stop":
                if (run := self.runs.get(event["id"])) is not None and run.ended is None:
                    _end(run, event)
                    self._once(run, event["responses"])
            case "call":
                self._call(event)

    def _once(self, run: Run, responses: Iterable[str]) -> None:
        """What a watched call and the guarded task around it both tell is spent once."""
        for name in responses:
            key = outermost(run.ns), name
            other = self._answers.setdefault(key, run)
            # a server that stands in for the real one may have one id for all
            both = (run, other) if other is not run and _within(run, other) else ()
            double = next((one for one in both if one.cause == WATCHED), None)
            if double is not None:
                double.tokens = double.cost = None
                self._answers[key] = run if double is other else other

    def _call(self, event: dict[str, Any]) -> None:
        task, source = event["task"], event["source"]
        self.calls[task, source] += 1
        if source == "reused" and event["cost"] is not None:
            self.saved[task] = self.saved.get(task, Decimal(0)) + Decimal(event["cost"])
        elif source != "reused" and (run := self.runs.get(event["id"])) is not None:
            run.waited = event["waited"]

    def by_key(self) -> dict[Key, list[Run]]:
        """The runs of each address, in the order in which they started."""
        found: dict[Key, list[Run]] = {}
        for run in self.runs.values():
            found.setdefault(run.key, []).append(run)
        for runs in found.values():
            runs.sort(key=lambda run: run.started)
        return found

    def called(self, source: str, task: str | None = None) -> int:
        """Calls that came to this outcome."""
        return sum(
            times
            for (kind, came_to), times in self.calls.items()
            if came_to == source and task in (None, kind)
        )


def _within(one: Run, other: Run) -> bool:
    """Whether one of two runs that have ended took place in the other's time."""
    outer, inner = (one, other) if one.started <= other.started else (other, one)
    return (inner.ended or 0) <= (outer.ended or 0)


def _end(run: Run, event: dict[str, Any]) -> None:
    run.ended, run.took, run.error = event["at"], event["took"], event["error"]
    run.tokens, run.cost = event["tokens"], event["cost"]
    run.status = "declined" if event["declined"] else "failed" if event["error"] else "ok"


def as_plain(run: Run) -> dict[str, Any]:
    """A run as plain data, to travel on a report."""
    plain = {name: getattr(run, name) for name in _PLAIN}
    if run.abandoned():
        plain["status"] = "abandoned"
    return plain


def from_plain(plain: dict[str, Any]) -> Run:
    """A run that has travelled."""
    return Run(**plain, went_on=plain["status"] == "open")

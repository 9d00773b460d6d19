"""What was executed: lines, counts, sums.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from idemguard import change, config, engine, findings, windows
from idemguard.claim import Begin, Claimed, Complete, Sweep
from idemguard.codec import Value
from idemguard.context import placed
from idemguard.errors import ConfigurationError
from idemguard.journal import watch
from idemguard.pricing import CURRENCY
from idemguard.record import DUPLICATES, Address, Caller, Cause, Mode, Status
from idemguard.stores import Client, Store, as_store
from idemguard.usage import NOTHING, money
from idemguard.windows import OUTCOMES, duplicates, executions, total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from idemguard.record import Execution, Record
    from idemguard.windows import Counts, Key, Window

EVER = 2**53  # ms; later than any clock
COUNTED = "counted"  # the version of records that are only counted, apart from all others
LOOKED_AT = 10_000  # executions that are looked at one by one
READ = 50_000  # and those that may have to be read for it
_LEASE = 30_000
_DIGITS = set("0123456789abcdef")
_TOLD = {Status.FAILED: "failed", Status.LOST: "lost", Status.DECLINED: "declined"}
_NO_WORK = {
    "executions": 0, "duplicates": 0, "failed": 0, "lost": 0, "declined": 0, "total_tokens": 0,
    "charged": 0, "wasted": 0,
}  # fmt: skip

Span: TypeAlias = "tuple[int, int]"  # from when to before when, ms by the store's clock


class ExecutionLedger:
    """What was executed in one namespace of one store, and what it came to.

    Args:
        store: a store, its URL, or a client of a server; the configured guard's where it is not given.
        namespace: the configured guard's where it is not given.

    Attributes:
        namespace: whose lines these are.

    """

    def __init__(
        self, store: Store | Client | str | None = None, *, namespace: str | None = None
    ) -> None:
        if store is None:
            here = engine.source().engine
            self._store: Store = here.store
            self.namespace = namespace or here.own_namespace
            return
        self._store = as_store(store)
        self.namespace = namespace or config.namespace(config.Settings())

    @property
    def _namespace(self) -> str:
        return placed(self.namespace)

    # --- one task ------------------------------------------------------------------------------------

    def record(self, fingerprint: str, worker_id: str, *, task_type: str = "counted") -> int:
        """Count one execution, for code that has no decorator: nothing is held back.

        Args:
            fingerprint: of the task, as `task_fingerprint` gives it.
            worker_id: who executes.
            task_type: what it is counted under.

        Returns:
            The executions of this task so far, this one included; more than 1 are duplicates.

        """
        caller = Caller(config.text("task_type", task_type), config.text("worker_id", worker_id))
        address = Address(self._namespace, _whole(fingerprint), "", COUNTED)
        begin = Begin(address, os.urandom(8).hex(), caller, _LEASE, mode=Mode.OBSERVE)
        answer = self._store.perform(begin)
        assert isinstance(answer, Claimed)
        if watch.on():
            watch.started(answer.claim, self._store)
        counted = Value("unstorable", b"it was counted alone")
        self._store.perform(Complete(answer.claim, counted, 86_400_000, _LEASE))
        if watch.on():
            watch.settled(answer.claim, "executed", NOTHING)
        return answer.runs

    def runs(
        self, fingerprint: str, *, scope: str | None = None, version: str | None = None
    ) -> int:
        """How often a task was executed, in all scopes and versions unless one is named."""
        return sum(record.runs for record, _ in self._records(fingerprint, scope, version))

    def reused(
        self, fingerprint: str, *, scope: str | None = None, version: str | None = None
    ) -> int:
        """How often a task's result was reused, in all scopes and versions unless one is named."""
        return sum(record.reused for record, _ in self._records(fingerprint, scope, version))

    def workers(
        self, fingerprint: str, *, scope: str | None = None, version: str | None = None
    ) -> list[str]:
        """Who executed a task, each once, in the order in which they first did."""
        found: dict[str, None] = {}
        for record, _ in self._records(fingerprint, scope, version):
            found |= dict.fromkeys(record.workers)
            found |= dict.fromkeys(line.worker for line in record.lines)
        return list(found)

    def executions(
        self, fingerprint: str, *, scope: str | None = None, version: str | None = None
    ) -> list[Execution]:
        """A task's executions, oldest first; one whose lease ran out with no end is `lost`."""
        found = [
            _as_told(line, now)
            for record, now in self._records(fingerprint, scope, version)
            for line in record.lines
        ]
        return sorted(found, key=lambda line: (line.started, line.claim.token))

    def _records(
        self, fingerprint: str, scope: str | None, version: str | None
    ) -> Iterator[tuple[Record, int]]:
        for address in self._store.addresses(self._namespace, _whole(fingerprint)):
            if scope is not None and address.scope != scope:
                continue
            if version is None or address.version == version:
                yield self._store.look(address)

    def tree(self, execution: Execution) -> list[Execution]:
        """The guarded executions inside an execution, at all depths, oldest first.

        Args:
            execution: as the ledger gives it.

        """
        until = EVER if execution.ended is None else execution.ended + 1
        inside: dict[str, list[Execution]] = {}
        for line in self._store.lines(self._namespace, execution.started, until):
            if line.parent is not None:
                inside.setdefault(line.parent, []).append(line)
        now, found = self.now(), inside.pop(execution.execution_id, [])
        for line in found:  # which grows meanwhile
            found += inside.pop(line.execution_id, [])
        found.sort(key=lambda line: (line.started, line.claim.token))
        return [_as_told(line, now) for line in found]

    def find(self, prefix: str) -> list[Address]:
        """Where tasks stand whose fingerprint starts so, oldest first; all scopes and versions.

        Args:
            prefix: hex digits of a fingerprint.

        Raises:
            ConfigurationError: it is no such text.

        """
        if not isinstance(prefix, str) or set(prefix) - _DIGITS:
            raise ConfigurationError(f"a fingerprint has hex digits alone: {prefix!r}")
        return self._store.addresses(self._namespace, prefix)

    def look(self, address: Address) -> tuple[Record, int]:
        """A task's record as time has left it, and the store's clock (ms)."""
        return self._store.look(address)

    # --- all of them -----------------------------------------------------------------------------------

    def lines(
        self, since: timedelta | None = None, *, span: Span | None = None
    ) -> Iterator[Execution]:
        """The executions that started within this time, oldest first; all where none is given.

        Args:
            since: how far back.
            span: from when to before when, ms by the store's clock; instead of `since`.

        """
        start, end = self._when(since, span)
        now = self.now()
        for line in self._store.lines(self._namespace, start, end):
            yield _as_told(line, now)

    def duplication_rate(
        self, since: timedelta | None = None, *, span: Span | None = None
    ) -> float:
        """Duplicates per execution, both counted in the windows in which they started.

        Args:
            since: how far back, by whole windows of five minutes; all that is kept where it is
                not given.
            span: from when to before when, ms by the store's clock; instead of `since`.

        Returns:
            A fraction between 0 and 1; 0 where nothing was executed.

        """
        counts = self._counts(since, span)
        started = executions(counts)
        return duplicates(counts) / started if started else 0.0

    def doubled_share(self) -> float:
        """Tasks that were executed two or more times per task that was executed.

        Returns:
            A fraction between 0 and 1, over all windows that are kept.

        """
        return _doubled_share(self._counts(None, None))

    def task_type_summary(
        self, task_type: str, since: timedelta | None = None, *, span: Span | None = None
    ) -> dict[str, Any]:
        """What the calls and executions of one task type came to.

        Returns:
            `task_type`; `runs` (executions), `avg_input` (input tokens per execution), and the
            rest of `totals()`.

        """
        counts = self._counts(since, span, lambda key: key.task_type == task_type)
        return {"task_type": task_type, **summary(counts)}

    def agent_summary(
        self, agent: str | None, since: timedelta | None = None, *, span: Span | None = None
    ) -> dict[str, Any]:
        """What the calls and executions of one agent came to: `agent`, and as for a task type."""
        counts = self._counts(since, span, lambda key: key.agent == agent)
        return {"agent": agent, **summary(counts)}

    def totals(self, since: timedelta | None = None, *, span: Span | None = None) -> dict[str, Any]:
        """What all calls and executions came to.

        Args:
            since: how far back, by whole windows of five minutes; all that is kept where it is
                not given.
            span: from when to before when, ms by the store's clock; instead of `since`.

        Returns:
            Whole numbers: `calls` and each outcome of a call, `runs` and `executions` (the same),
            `tasks` (executed first in this time), `doubled` (those whose second execution started
            in it), `duplicates`, `lost`, `input_tokens`, `output_tokens`, `total_tokens`,
            `cache_read_tokens`, `cache_write_tokens`, `reasoning_tokens`, `wasted_tokens` (spent
            by duplicates), `saved_tokens` (by reuse), `inclusive_tokens` (those of guarded
            executions inside counted too), `unpriced`, `without_usage`. Fractions:
            `doubled_share` (`doubled` per task; over all that is kept it is what its name says, of
            a part, where some were executed first elsewhere, it is 1 at most),
            `duplication_rate`. Decimals: `charged` (with `wasted`), `wasted`,
            `saved`, `inclusive`. `avg_input`: tokens, or None. `currency`.

        """
        return summary(self._counts(since, span))

    def task_types(
        self, since: timedelta | None = None, *, span: Span | None = None
    ) -> list[dict[str, Any]]:
        """A summary for each task type, the most charged first, then the most executed."""
        return self._each("task_type", since, span)

    def agents(
        self, since: timedelta | None = None, *, span: Span | None = None
    ) -> list[dict[str, Any]]:
        """A summary for each agent, None where none was named; in the same order."""
        return self._each("agent", since, span)

    def _each(self, name: str, since: timedelta | None, span: Span | None) -> list[dict[str, Any]]:
        groups: dict[Any, list[Window]] = {}
        for window in self.windows(since, span=span):
            groups.setdefault(getattr(window.key, name), []).append(window)
        rows = [{name: key, **summary(total(group))} for key, group in groups.items()]
        return sorted(rows, key=lambda r: (-r["charged"], -r["executions"], str(r[name])))

    # --- what lines tell beside sums -----------------------------------------------------------------

    def newest(
        self,
        since: timedelta | None = None,
        *,
        span: Span | None = None,
        task_type: str | None = None,
        agent: str | None = None,
        windows: Iterable[Window] | None = None,
    ) -> list[Execution]:
        """The newest executions of this time, oldest first; about 10,000 at most.

        What is found out by looking at lines is found out by these, so that it takes no longer
        where there are more.

        Args:
            since: how far back.
            span: from when to before when, ms by the store's clock; instead of `since`.
            task_type: of this one alone.
            agent: of this one alone; empty: of those that name none.
            windows: of this time, where they were read just now.

        """
        start, end = self._when(since, span)
        spans: dict[Span, tuple[int, int]] = {}  # executions that are wanted, and all of them
        if windows is None:
            windows = self._store.windows(self._namespace, start, end)
        for window in windows:
            when = window.key.start, window.key.start + window.span
            wanted = task_type in (None, window.key.task_type) and agent in (
                None,
                window.key.agent or "",
            )
            own, all_ = spans.get(when, (0, 0))
            spans[when] = own + wanted * window.executions, all_ + window.executions
        now = self.now()
        found: deque[Execution] = deque(maxlen=LOOKED_AT)
        for first, last in _to_read(spans):
            lines = self._store.lines(self._namespace, max(first, start), min(last, end))
            found.extend(
                _as_told(line, now)
                for line in lines
                if task_type in (None, line.task_type) and agent in (None, line.agent or "")
            )
        return list(found)

    def worker_summaries(
        self, since: timedelta | None = None, *, span: Span | None = None
    ) -> list[dict[str, Any]]:
        """What the executions of each worker came to, by the newest lines; see `by_worker`."""
        return by_worker(self.newest(since, span=span))

    def drops(
        self, since: timedelta | None = None, *, span: Span | None = None
    ) -> list[findings.Drop]:
        """Tasks that workers only ever declined, by the newest executions of this time."""
        return self.handed_back(self.newest(since, span=span))[0]

    def loops(
        self, since: timedelta | None = None, *, span: Span | None = None
    ) -> list[findings.Loop]:
        """Tasks handed back more than twice, or twice by one worker; as for `drops`."""
        return self.handed_back(self.newest(since, span=span))[1]

    def handed_back(
        self, lines: Iterable[Execution]
    ) -> tuple[list[findings.Drop], list[findings.Loop]]:
        """Drops and loops among the tasks that were declined in these lines."""
        declined = (line.claim.address for line in lines if line.status is Status.DECLINED)
        tasks: list[list[Execution]] = []
        unsettled: list[list[Execution]] = []
        for address in dict.fromkeys(declined):
            record, now = self._store.look(address)
            tasks.append([_as_told(line, now) for line in record.lines])
            # settled by hand, say; a resolution leaves its cause behind when its result is over
            if record.result is None and record.cause is not Cause.EXPIRED:
                unsettled.append(tasks[-1])
        return findings.drops(unsettled), findings.loops(tasks)

    def missed(
        self,
        since: timedelta | None = None,
        *,
        span: Span | None = None,
        task_type: str | None = None,
    ) -> list[findings.Missed]:
        """Executions that repeat an earlier one but for a field or two that may be volatile.

        Args:
            since: how far back.
            span: from when to before when, ms; instead of `since`.
            task_type: of this one alone.

        """
        return findings.missed(self.newest(since, span=span, task_type=task_type))

    def explain(
        self, task_type: str, since: timedelta | None = None, *, span: Span | None = None
    ) -> findings.Explanation:
        """What stands behind the figures of one task type, by the newest executions."""
        return findings.explanation(task_type, self.newest(since, span=span, task_type=task_type))

    def growth(
        self,
        since: timedelta | None = None,
        *,
        span: Span | None = None,
        task_type: str | None = None,
    ) -> list[findings.Growth]:
        """Task types whose input grows from step to step, as carried history does."""
        return findings.growth(self.newest(since, span=span, task_type=task_type))

    def compare(
        self, a: tuple[datetime, datetime], b: tuple[datetime, datetime]
    ) -> change.Comparison:
        """Why the bill changed from one span of time to another.

        Args:
            a: from when to when; without a time zone it is local time.
            b: the same of the second.

        Returns:
            By task type and in all, the change of tokens and of money, split into more runs,
            more duplicates, bigger runs and another price. Where a span cuts a window (of five
            minutes, or of an hour where it is over a day old), the lines are counted that are
            kept of it, or else the window counts where it starts.

        Raises:
            ConfigurationError: a span that is none.

        """
        spans = _moments("a", a), _moments("b", b)
        before, after = (self._by_type(span) for span in spans)
        return change.compared(*spans, before, after)

    def _by_type(self, span: Span) -> dict[str, Counts]:
        """The counts of a span; of windows that it cuts, those of the lines that are kept."""
        found: dict[str, Counts] = {}
        for window in self.windows(span=span):
            start, end = window.key.start, window.key.start + window.span
            if span[0] <= start and end <= span[1]:
                counts = window.counts
            else:
                cut = max(start, span[0]), min(end, span[1])
                counts = self._cut(window, cut)
            found.setdefault(window.key.task_type, Counter()).update(counts)
        return found

    def _cut(self, window: Window, span: Span) -> Mapping[str, int]:
        start, end = window.key.start, window.key.start + window.span
        lines = [
            line
            for line in self._store.lines(self._namespace, start, end)
            if line.task_type == window.key.task_type and line.agent == window.key.agent
        ]
        if len(lines) < window.executions:  # some are gone: it counts where it starts
            return window.counts if span[0] == start else Counter()
        counts: Counts = Counter()
        for line in lines:
            if span[0] <= line.started < span[1]:
                counts.update(windows.counted(line))
        return counts

    # --- windows ---------------------------------------------------------------------------------------

    def windows(self, since: timedelta | None = None, *, span: Span | None = None) -> list[Window]:
        """The windows that overlap this time, with all that is lost made final first.

        Args:
            since: how far back.
            span: from when to before when, ms by the store's clock; instead of `since`.

        """
        self.sweep()
        return self._store.windows(self._namespace, *self._when(since, span))

    def _counts(
        self,
        since: timedelta | None,
        span: Span | None,
        wanted: Callable[[Key], bool] = lambda _: True,
    ) -> Counts:
        return total(window for window in self.windows(since, span=span) if wanted(window.key))

    def _when(self, since: timedelta | None, span: Span | None) -> Span:
        if span is not None:
            return span
        return (0 if since is None else self.now() - _span(since)), EVER

    def sweep(self) -> int:
        """Make final what is lost where nobody calls again; how many tasks that were."""
        overdue = self._store.overdue(self._namespace)
        for address in overdue:
            self._store.perform(Sweep(address))
        return len(overdue)

    def now(self) -> int:
        """The store's clock, ms since 1970."""
        return self._store.look(Address(self._namespace, ""))[1]


def by_worker(lines: Iterable[Execution]) -> list[dict[str, Any]]:
    """What the executions of each worker came to.

    Args:
        lines: the executions.

    Returns:
        For each `worker`, `executions`, `duplicates`, `failed`, `lost`, `declined`,
        `total_tokens`, `charged` and `wasted` (Decimals); the most executions first.

    """
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        row = rows.setdefault(line.worker, {"worker": line.worker, **_NO_WORK})
        row["executions"] += 1
        if line.status in _TOLD:
            row[_TOLD[line.status]] += 1
        price = line.spent.cost or 0
        row["total_tokens"] += 0 if line.usage is None else line.usage.total_tokens or 0
        row["charged"] += price
        if line.cause in DUPLICATES:
            row["duplicates"] += 1
            row["wasted"] += price
    for row in rows.values():
        row |= {name: money(row[name]) for name in ("charged", "wasted")}
    return sorted(rows.values(), key=lambda row: (-row["executions"], row["worker"]))


def summary(counts: Counts) -> dict[str, Any]:
    """Windows' counts by the names that reports use: see `ExecutionLedger.totals`."""
    started = executions(counts)
    outcomes = {outcome: counts[f"call_{outcome}"] for outcome in OUTCOMES}
    input_, output = counts["input"], counts["output"]
    told = started - counts["unknown_usage"] - counts["nested"]
    return {
        "calls": sum(outcomes.values()),
        **outcomes,
        "runs": started,
        "executions": started,
        "tasks": counts["tasks"],
        "duplicates": duplicates(counts),
        "doubled": counts["doubled"],
        "doubled_share": _doubled_share(counts),
        "duplication_rate": duplicates(counts) / started if started else 0.0,
        "lost": counts["lost"],
        "avg_input": input_ / told if told > 0 else None,
        "input_tokens": input_,
        "output_tokens": output,
        "total_tokens": input_ + output,
        "cache_read_tokens": counts["cache_read"],
        "cache_write_tokens": counts["cache_write"],
        "reasoning_tokens": counts["reasoning"],
        "wasted_tokens": counts["wasted_input"] + counts["wasted_output"],
        "saved_tokens": counts["saved_input"] + counts["saved_output"],
        "inclusive_tokens": input_ + output + counts["inner_input"] + counts["inner_output"],
        "charged": money(counts["cost"]),
        "wasted": money(counts["wasted_cost"]),
        "saved": money(counts["saved_cost"]),
        "inclusive": money(counts["cost"] + counts["inner_cost"]),
        "currency": CURRENCY,
        "unpriced": counts["unpriced"],
        "without_usage": counts["unknown_usage"],
    }


def _doubled_share(counts: Counts) -> float:
    """Doubled tasks per task; of a part, where some were executed first elsewhere, at most all."""
    doubled = max(0, counts["doubled"])
    return doubled / max(counts["tasks"], doubled) if doubled else 0.0


def _to_read(spans: dict[Span, tuple[int, int]]) -> list[Span]:
    """The stretches of time to read for the newest executions that are wanted, oldest first."""
    left, spare, read = LOOKED_AT, READ, list[Span]()
    for when, (own, all_) in sorted(spans.items(), reverse=True):
        if left <= 0 or spare <= 0:
            break
        if own:
            left, spare = left - own, spare - all_
            read.append(when)
    if not read:
        return []
    first, last = read[-1][0], max(end for _, end in read)
    if sum(all_ for when, (_, all_) in spans.items() if when[0] >= first) <= READ:
        return [(first, last)]  # few enough to be read in one go
    stretches: list[Span] = []
    for start, end in reversed(read):
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = stretches[-1][0], max(end, stretches[-1][1])
        else:
            stretches.append((start, end))
    return stretches


def _span(since: timedelta) -> int:
    return config.milliseconds("since", since, least=0)


def _moments(name: str, span: object) -> Span:
    match span:
        case (datetime() as start, datetime() as end):
            first, last = (round(moment.timestamp() * 1000) for moment in (start, end))
            if first < last:
                return first, last
    raise ConfigurationError(
        f"{name} takes a pair of datetimes, (start, end), the earlier first, not {span!r}"
    )


def _whole(fingerprint: str) -> str:
    if not isinstance(fingerprint, str) or len(fingerprint) != 64 or set(fingerprint) - _DIGITS:  # noqa: PLR2004 - SHA-256
        raise ConfigurationError(
            f"a fingerprint has 64 hex digits, as task_fingerprint() gives them: {fingerprint!r}"
        )
    return fingerprint


def _as_told(line: Execution, now: int) -> Execution:
    return line if line.told(now) is line.status else line._replace(status=line.told(now))


class AsyncLedger:
    """A ledger whose methods are awaited; they are done in a thread."""

    def __init__(self, ledger: ExecutionLedger) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._ledger, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            def do() -> Any:
                found = method(*args, **kwargs)
                return list(found) if name == "lines" else found

            return await asyncio.to_thread(do)

        return call


def cumulative_input_tokens(steps: int, avg_per_step: int = 1000) -> int:
    """The input tokens of an agent that sends its whole history along with every step.

    Args:
        steps: how many it takes.
        avg_per_step: the tokens that each adds to the history.

    Returns:
        1,000, 15,000, 55,000 and 210,000 tokens at 1, 5, 10 and 20 steps of 1,000.

    """
    for name, number in (("steps", steps), ("avg_per_step", avg_per_step)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigurationError(f"{name} must be a whole number >= 0, not {number!r}")
    return avg_per_step * steps * (steps + 1) // 2

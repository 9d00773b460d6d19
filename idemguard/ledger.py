"""What was executed: lines, counts, sums."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from idemguard import config, engine
from idemguard.claim import Begin, Claimed, Complete, Sweep
from idemguard.codec import Value
from idemguard.errors import ConfigurationError
from idemguard.record import Address, Caller, Mode
from idemguard.stores import Store, open_store
from idemguard.usage import COST_DIGITS
from idemguard.windows import OUTCOMES, duplicates, executions, total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemguard.record import Execution, Record
    from idemguard.windows import Counts

EVER = 2**53  # ms; later than any clock
COUNTED = "counted"  # the version of records that are only counted, apart from all others
_LEASE = 30_000


class ExecutionLedger:
    """What was executed in one namespace of one store, and what it came to.

    Args:
        store: a store or its URL; the configured guard's where it is not given.
        namespace: the configured guard's where it is not given.

    """

    def __init__(self, store: Store | str | None = None, *, namespace: str | None = None) -> None:
        if store is None:
            here = engine.source().engine
            self._store: Store = here.store
            self._namespace = namespace or here.namespace
            return
        self._store = open_store(store) if isinstance(store, str) else store
        if not isinstance(self._store, Store):
            raise ConfigurationError(f"store= takes a URL or a store, not {store!r}")
        self._namespace = namespace or config.namespace(config.Settings())

    @property
    def namespace(self) -> str:
        """Whose lines these are."""
        return self._namespace

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
        counted = Value("unstorable", b"it was counted alone")
        self._store.perform(Complete(answer.claim, counted, 86_400_000, _LEASE))
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

    # --- all of them -----------------------------------------------------------------------------------

    def lines(self, since: timedelta | None = None) -> Iterator[Execution]:
        """The executions that started within this time, oldest first; all where none is given."""
        now = self._now()
        start = 0 if since is None else now - _span(since)
        for line in self._store.lines(self._namespace, start, EVER):
            yield _as_told(line, now)

    def duplication_rate(self, since: timedelta | None = None) -> float:
        """Duplicates per execution, both counted in the windows in which they started.

        Args:
            since: how far back, by whole windows of five minutes; all that is kept where it is
                not given.

        Returns:
            A fraction between 0 and 1; 0 where nothing was executed.

        """
        counts = self._counts(since)
        started = executions(counts)
        return duplicates(counts) / started if started else 0.0

    def doubled_share(self) -> float:
        """Tasks that were executed two or more times per task that was executed.

        Returns:
            A fraction between 0 and 1, over all windows that are kept.

        """
        counts = self._counts(None)
        return counts["doubled"] / counts["tasks"] if counts["tasks"] > 0 else 0.0

    def task_type_summary(self, task_type: str, since: timedelta | None = None) -> dict[str, Any]:
        """What the calls and executions of one task type came to.

        Returns:
            `task_type`; `runs` (executions), `avg_input` (input tokens per execution), and the
            rest of `totals()`.

        """
        counts = self._counts(since, lambda key: key.task_type == task_type)
        return {"task_type": task_type, **summary(counts)}

    def agent_summary(self, agent: str, since: timedelta | None = None) -> dict[str, Any]:
        """What the calls and executions of one agent came to: `agent`, and as for a task type."""
        counts = self._counts(since, lambda key: key.agent == agent)
        return {"agent": agent, **summary(counts)}

    def totals(self, since: timedelta | None = None) -> dict[str, Any]:
        """What all calls and executions came to.

        Returns:
            Whole numbers: `calls` and each outcome of a call, `runs` and `executions` (the same),
            `tasks`, `duplicates`, `lost`, `input_tokens`, `output_tokens`, `total_tokens`,
            `wasted_tokens` (spent by duplicates), `saved_tokens` (by reuse), `unpriced`,
            `without_usage`. Fractions: `doubled_share`, `duplication_rate`. Decimals: `charged`
            (with `wasted`), `wasted`, `saved`. `avg_input`: tokens, or None.

        """
        return summary(self._counts(since))

    def _counts(
        self, since: timedelta | None, wanted: Callable[[Any], bool] = lambda _: True
    ) -> Counts:
        self.sweep()
        start = 0 if since is None else self._now() - _span(since)
        windows = self._store.windows(self._namespace, start, EVER)
        return total(window for window in windows if wanted(window.key))

    def sweep(self) -> int:
        """Make final what is lost where nobody calls again; how many tasks that were."""
        overdue = self._store.overdue(self._namespace)
        for address in overdue:
            self._store.perform(Sweep(address))
        return len(overdue)

    def _now(self) -> int:
        return self._store.look(Address(self._namespace, ""))[1]


def summary(counts: Counts) -> dict[str, Any]:
    """Windows' counts by the names that reports use: see `ExecutionLedger.totals`."""
    started = executions(counts)
    outcomes = {outcome: counts[f"call_{outcome}"] for outcome in OUTCOMES}
    input_, output = counts["input"], counts["output"]
    told = started - counts["unknown_usage"]
    return {
        "calls": sum(outcomes.values()),
        **outcomes,
        "runs": started,
        "executions": started,
        "tasks": counts["tasks"],
        "duplicates": duplicates(counts),
        "doubled_share": counts["doubled"] / counts["tasks"] if counts["tasks"] > 0 else 0.0,
        "duplication_rate": duplicates(counts) / started if started else 0.0,
        "lost": counts["lost"],
        "avg_input": input_ / told if told > 0 else None,
        "input_tokens": input_,
        "output_tokens": output,
        "total_tokens": input_ + output,
        "wasted_tokens": counts["wasted_input"] + counts["wasted_output"],
        "saved_tokens": counts["saved_input"] + counts["saved_output"],
        "charged": _money(counts["cost"]),
        "wasted": _money(counts["wasted_cost"]),
        "saved": _money(counts["saved_cost"]),
        "unpriced": counts["unpriced"],
        "without_usage": counts["unknown_usage"],
    }


def _money(units: int) -> Decimal:
    return Decimal(units).scaleb(-COST_DIGITS)


def _span(since: timedelta) -> int:
    return config.milliseconds("since", since, least=0)


def _whole(fingerprint: str) -> str:
    digits = set("0123456789abcdef")
    if not isinstance(fingerprint, str) or len(fingerprint) != 64 or set(fingerprint) - digits:  # noqa: PLR2004 - SHA-256
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

"""How records, results, executions and windows stand in the rows of a database."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from idemguard.codec import Value
from idemguard.record import Address, Caller, Cause, Claim, Execution, Record, Result, Status
from idemguard.usage import NOTHING, Spent, Usage
from idemguard.windows import COUNTERS, HOUR, Key, Window

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SCHEMA = 1

RECORD = (
    "token", "leader", "fallback", "cause", "generation", "settled", "digest", "runs", "workers",
    "reused", "ordered", "leavers", "kept_until", "expires",
)  # fmt: skip
CLAIM = (
    "token", "nonce", "cause", "generation", "started", "holds",
    "task_type", "worker", "agent", "parent", "trace_id", "span_id", "digests",
)  # fmt: skip
SPENT = (
    "reports", "input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens",
    "reasoning_tokens", "model", "provider", "inputs", "responses", "cost", "currency",
    "price_version", "nested",
)  # fmt: skip
LINE = (*CLAIM, "until", "status", "ended", "kept", *SPENT)
RESULT = (*CLAIM, *SPENT, "codec", "data", "at", "until", "gone")

_INTEGERS = frozenset({
    "token", "generation", "settled", "runs", "reused", "kept_until", "expires", "started",
    "holds", "until", "ended", "kept", "reports", "cost", "nested", "at", "gone",
    *(name for name in SPENT if name.endswith("_tokens")),
})  # fmt: skip


def _columns(names: Sequence[str]) -> str:
    kinds = {"data": "BLOB"} | dict.fromkeys(_INTEGERS, "INTEGER")
    return ", ".join(f"{name} {kinds.get(name, 'TEXT')}" for name in names)


TABLES = (
    f"""CREATE TABLE record (id INTEGER PRIMARY KEY, namespace TEXT NOT NULL,
        fingerprint TEXT NOT NULL, scope TEXT NOT NULL, version TEXT NOT NULL,
        {_columns(RECORD)}, hint TEXT, hinted INTEGER NOT NULL DEFAULT 0)""",
    "CREATE UNIQUE INDEX record_address ON record (namespace, fingerprint, scope, version)",
    "CREATE INDEX record_expires ON record (expires)",
    "CREATE INDEX record_hinted ON record (hinted)",
    f"CREATE TABLE result (record INTEGER PRIMARY KEY, {_columns(RESULT)})",
    f"CREATE TABLE line (id INTEGER PRIMARY KEY, record INTEGER NOT NULL, {_columns(LINE)})",
    "CREATE INDEX line_record ON line (record)",
    "CREATE INDEX line_started ON line (started)",
    "CREATE INDEX line_open ON line (until) WHERE status = 'open'",
    f"""CREATE TABLE window (namespace TEXT NOT NULL, start INTEGER NOT NULL,
        span INTEGER NOT NULL, task_type TEXT NOT NULL, agent TEXT NOT NULL,
        {", ".join(f"{name} INTEGER NOT NULL DEFAULT 0" for name in COUNTERS)},
        PRIMARY KEY (namespace, start, span, task_type, agent)) WITHOUT ROWID""",
    "CREATE TABLE namespace (name TEXT PRIMARY KEY, secret BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE tended (at INTEGER NOT NULL)",
    "INSERT INTO tended VALUES (0)",
)


def place(address: Address) -> tuple[str, str, str, str]:
    """An address as its columns; a version is never the empty text, so that stands for none."""
    version = "" if address.version is None else address.version
    return address.namespace, address.fingerprint, address.scope, version


def address(row: Sequence[Any]) -> Address:
    """The address in the columns namespace, fingerprint, scope, version."""
    return Address(row[0], row[1], row[2], row[3] or None)


def record_row(record: Record) -> tuple[Any, ...]:
    """A record as its columns."""
    # the removal of what is over goes by whole hours, so that its index seldom changes
    expires = record.kept_until - record.kept_until % -HOUR
    return (
        record.token, record.leader, record.fallback, record.cause, record.generation,
        record.settled, record.digest, record.runs, _texts(record.workers), record.reused,
        record.ordered, _texts(record.leavers), record.kept_until, expires,
    )  # fmt: skip


def record(row: Sequence[Any], result: Result | None, lines: Iterable[Execution]) -> Record:
    """The record in these columns."""
    (token, leader, fallback, cause, generation, settled, digest, runs, workers, reused,
     ordered, leavers, kept_until, _) = row  # fmt: skip
    return Record(
        token, leader, fallback, Cause(cause), generation, settled, digest, result, tuple(lines),
        runs, _tuple(workers), reused, ordered, _tuple(leavers), kept_until,
    )  # fmt: skip


def _texts(texts: tuple[str, ...]) -> str | None:
    return json.dumps(texts) if texts else None


def _tuple(text: str | None) -> tuple[Any, ...]:
    return () if text is None else tuple(json.loads(text))


def claim_row(claim: Claim) -> tuple[Any, ...]:
    """A claim as its columns."""
    caller = claim.caller
    return (
        claim.token, claim.nonce, claim.cause, claim.generation, claim.started, claim.holds,
        caller.task_type, caller.worker, caller.agent, caller.parent, caller.trace_id,
        caller.span_id, json.dumps(dict(caller.digests)) if caller.digests else None,
    )  # fmt: skip


def claim(where: Address, row: Sequence[Any]) -> Claim:
    """The claim in these columns."""
    (token, nonce, cause, generation, started, holds,
     task_type, worker, agent, parent, trace_id, span_id, digests) = row  # fmt: skip
    fields = () if digests is None else tuple(json.loads(digests).items())
    caller = Caller(task_type, worker, agent, parent, trace_id, span_id, fields)
    return Claim(where, token, nonce, Cause(cause), generation, started, bool(holds), caller)


def spent_row(spent: Spent) -> tuple[Any, ...]:
    """What was spent, as its columns."""
    if spent is NOTHING:
        return _NOTHING
    usage = spent.usage or Usage()
    return (
        spent.reports, usage.input_tokens, usage.output_tokens, usage.cache_read_tokens,
        usage.cache_write_tokens, usage.reasoning_tokens, usage.model, usage.provider,
        _texts(spent.inputs), _texts(spent.responses), spent.cost, spent.currency,  # type: ignore[arg-type]
        spent.price_version, spent.nested,
    )  # fmt: skip


_NOTHING = (0, *([None] * (len(SPENT) - 2)), False)


def spent(row: Sequence[Any]) -> Spent:
    """What was spent, from these columns."""
    reports, *tokens, model, provider, inputs, responses, cost, currency, version, nested = row
    if not reports and not nested:
        return NOTHING
    usage = None
    if reports:
        names = SPENT[1:6]
        usage = Usage(**dict(zip(names, tokens, strict=True)), model=model, provider=provider)
    return Spent(
        reports, usage, _tuple(inputs), _tuple(responses), cost, currency, version, bool(nested)
    )


def line_row(line: Execution) -> tuple[Any, ...]:
    """An execution as its columns."""
    return (
        *claim_row(line.claim), line.until, line.status, line.ended, line.kept,
        *spent_row(line.spent),
    )  # fmt: skip


def line(where: Address, row: Sequence[Any]) -> Execution:
    """The execution in these columns."""
    size = len(CLAIM)
    until, status, ended, kept = row[size : size + 4]
    return Execution(
        claim(where, row[:size]), until, Status(status), ended, bool(kept), spent(row[size + 4 :])
    )


def result_row(result: Result) -> tuple[Any, ...]:
    """A result as its columns."""
    return (
        *claim_row(result.claim), *spent_row(result.spent), result.value.codec,
        result.value.data, result.at, result.until, result.gone,
    )  # fmt: skip


def result(where: Address, row: Sequence[Any]) -> Result:
    """The result in these columns; its data is None where only its times are asked for."""
    size = len(CLAIM)
    codec, data, at, until, gone = row[-5:]
    value = Value(codec, b"" if data is None else bytes(data))
    return Result(claim(where, row[:size]), value, spent(row[size:-5]), at, until, gone)


def window(row: Sequence[Any]) -> Window:
    """The window in the columns start, span, task_type, agent, and the counters."""
    start, span, task_type, agent, *numbers = row
    counts: Mapping[str, int] = {
        name: number for name, number in zip(COUNTERS, numbers, strict=True) if number
    }
    return Window(Key(start, task_type, agent or None), span, counts)

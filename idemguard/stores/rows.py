"""How records, results, executions and windows stand in the rows of a database.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from idemguard.codec import Value
from idemguard.record import Address, Caller, Cause, Claim, Execution, Record, Result, Status
from idemguard.usage import NOTHING, Spent, Usage
from idemguard.windows import COUNTERS, Key, Window

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Mapping, Sequence

SCHEMA = 3


def _column(counter: str) -> str:
    return f"{counter} INTEGER NOT NULL DEFAULT 0"


# A record is one row, so that a command reads one and writes one: what is searched for stands
# in columns, the rest in JSON. One index serves all that goes by time: it is searched for the
# first start, and scanned, being small, for the rest. The view is for people.
TABLES = (
    """CREATE TABLE record (id INTEGER PRIMARY KEY, namespace TEXT NOT NULL,
        fingerprint TEXT NOT NULL, scope TEXT NOT NULL, version TEXT NOT NULL,
        head TEXT NOT NULL, lines TEXT NOT NULL, reused INTEGER NOT NULL,
        kept_until INTEGER NOT NULL, expires INTEGER NOT NULL,
        first INTEGER, last INTEGER, due INTEGER,
        waited INTEGER NOT NULL DEFAULT 0, hint TEXT, hinted INTEGER)""",
    "CREATE UNIQUE INDEX record_address ON record (namespace, fingerprint, scope, version)",
    "CREATE INDEX record_times ON record (first, last, due, expires)",
    "CREATE INDEX record_hinted ON record (hinted) WHERE hinted IS NOT NULL",
    """CREATE TABLE result (record INTEGER PRIMARY KEY, source TEXT NOT NULL,
        codec TEXT NOT NULL, at INTEGER NOT NULL, until INTEGER NOT NULL, gone INTEGER NOT NULL,
        data BLOB NOT NULL)""",
    f"""CREATE TABLE window (namespace TEXT NOT NULL, start INTEGER NOT NULL,
        span INTEGER NOT NULL, task_type TEXT NOT NULL, agent TEXT NOT NULL,
        {", ".join(_column(name) for name in COUNTERS)},
        PRIMARY KEY (namespace, start, span, task_type, agent)) WITHOUT ROWID""",
    "CREATE TABLE namespace (name TEXT PRIMARY KEY, secret BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE tended (at INTEGER NOT NULL)",
    "INSERT INTO tended VALUES (0)",
    """CREATE VIEW execution AS SELECT namespace, scope, version, fingerprint,
        json_extract(value, '$[0][6][0]') AS task_type, json_extract(value, '$[0][2]') AS cause,
        json_extract(value, '$[2]') AS status, json_extract(value, '$[0][6][1]') AS worker,
        json_extract(value, '$[0][4]') AS started, json_extract(value, '$[3]') AS ended
        FROM record, json_each('[' || replace(lines, char(10), ',') || ']')""",
)

_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def add_counters(connection: sqlite3.Connection) -> None:
    """Have windows count all that there is to count."""
    there = {name for _, name, *_ in connection.execute("PRAGMA table_info(window)")}
    for counter in COUNTERS:
        if counter not in there:
            connection.execute(f"ALTER TABLE window ADD COLUMN {_column(counter)}")


def place(address: Address) -> tuple[str, str, str, str]:
    """An address as its columns; a version is never the empty text, so that stands for none."""
    namespace, fingerprint, scope, version = address
    return namespace, fingerprint, scope, "" if version is None else version


def address(row: Sequence[Any]) -> Address:
    """The address in the columns namespace, fingerprint, scope, version."""
    return Address(row[0], row[1], row[2], row[3] or None)


def head(record: Record) -> str:
    """What of a record stands in no column of its own."""
    return _json((
        record.token, record.leader, record.fallback, record.cause, record.generation,
        record.settled, record.digest, record.runs, record.workers, record.ordered,
        record.leavers,
    ))  # fmt: skip


def bare(head: str, lines: Iterable[Execution]) -> Record:
    """A record by its head and its lines; without its result and its other columns."""
    (token, leader, fallback, cause, generation, settled, digest, runs, workers, ordered,
     leavers) = json.loads(head)  # fmt: skip
    return Record(
        token, leader, fallback, Cause(cause), generation, settled, digest, None, tuple(lines),
        runs, tuple(workers), 0, ordered, tuple(leavers),
    )  # fmt: skip


def line(execution: Execution) -> str:
    """An execution as one line of JSON."""
    claim, until, status, ended, kept, spent = execution
    return _json((claim[1:], until, status, ended, kept, _spent(spent)))


def execution(where: Address, line: str) -> Execution:
    """The execution in this line."""
    source, until, status, ended, kept, spent = json.loads(line)
    return Execution(_claim(where, source), until, Status(status), ended, kept, _spending(spent))


def result(kept: Result) -> tuple[Any, ...]:
    """A result as its columns."""
    source = _json((kept.claim[1:], _spent(kept.spent)))
    return source, kept.value.codec, kept.at, kept.until, kept.gone, kept.value.data


def kept(where: Address, row: Sequence[Any]) -> Result:
    """The result in these columns; its data is None where only the rest is asked for."""
    source, codec, at, until, gone, data = row
    claim, spent = _source(where, source)
    return Result(claim, Value(codec, data or b""), spent, at, until, gone)


@lru_cache(256)
def _source(where: Address, source: str) -> tuple[Claim, Spent]:
    claim, spent = json.loads(source)
    return _claim(where, claim), _spending(spent)


def _claim(where: Address, source: list[Any]) -> Claim:
    token, nonce, cause, generation, started, holds, caller = source
    task_type, worker, agent, parent, trace_id, span_id, digests, *flags = caller
    pairs = tuple([(name, digest) for name, digest in digests])
    who = Caller(task_type, worker, agent, parent, trace_id, span_id, pairs, *flags)
    return Claim(where, token, nonce, Cause(cause), generation, started, holds, who)


_USAGE = tuple(Usage.__dataclass_fields__)


def _spent(spent: Spent) -> tuple[Any, ...] | None:
    if spent is NOTHING:
        return None
    usage = spent.usage
    return (
        spent.reports, None if usage is None else [getattr(usage, name) for name in _USAGE],
        spent.inputs, spent.responses, spent.cost, spent.currency, spent.price_version,
        spent.nested, *_beside(spent),
    )  # fmt: skip


def _beside(spent: Spent) -> tuple[Any, ...]:
    """What most executions have nothing of."""
    beside = spent.parts, spent.inner, spent.unpriced
    return () if beside == (None, None, 0) else beside


def _spending(row: list[Any] | None) -> Spent:
    if row is None:
        return NOTHING
    reports, counts, inputs, responses, cost, currency, version, nested, *beside = row
    usage = None if counts is None else Usage(**dict(zip(_USAGE, counts, strict=True)))
    parts, inner, unpriced = beside or (None, None, 0)
    return Spent(
        reports, usage, tuple(inputs), tuple(responses), cost, currency, version, nested,
        None if parts is None else tuple(parts), None if inner is None else tuple(inner), unpriced,
    )  # fmt: skip


def times(lines: Iterable[Execution]) -> tuple[int | None, int | None, int | None]:
    """The first start, the last start, and the end of the lease that ends first of those open."""
    first = last = due = None
    for claim, until, status, *_ in lines:
        started = claim.started
        first = started if first is None or started < first else first
        last = started if last is None or started > last else last
        if status is Status.OPEN:
            due = until if due is None or until < due else due
    return first, last, due


def window(row: Sequence[Any]) -> Window:
    """The window in the columns start, span, task_type, agent, and the counters."""
    start, span, task_type, agent, *numbers = row
    counts: Mapping[str, int] = {
        name: int(number) for name, number in zip(COUNTERS, numbers, strict=True) if number
    }
    return Window(Key(start, task_type, agent or None), span, counts)

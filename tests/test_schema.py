"""A SQLite file of an earlier version is upgraded where it is, and counts on."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from decimal import Decimal

import pytest

from idemguard import ExecutionLedger, Guard, record_usage
from idemguard.stores import rows
from idemguard.stores.file import APPLICATION
from idemguard.stores.sqlite import SqliteStore
from idemguard.windows import COUNTERS, SPAN

# what windows counted in schema 1
FIRST = (
    "call_executed", "call_reused", "call_fallback", "call_declined", "call_failed", "call_refused",
    "call_unguarded", "found", "cause_first", "cause_retry", "cause_expired", "cause_declined",
    "cause_forced", "cause_lost", "cause_fallback", "cause_observed", "cause_unguarded", "tasks",
    "doubled", "failures", "lost", "input", "output", "cache_read", "cache_write", "reasoning", "cost",
    "wasted_input", "wasted_output", "wasted_cost", "saved_input", "saved_output", "saved_cost",
    "unpriced", "unknown_usage", *(f"run_{number}" for number in range(19)),
)  # fmt: skip
# a line of it, without what a line tells since then
LINE = (
    '[[1800000000000,"n1","first",1800000000000,1800000000000,true,["t","w-1",null,null,null,null,'
    '[]]],1800000000010,"ok",1800000000010,true,[1,[100,10,null,null,null,"m",null,null],[100],[],'
    '450000000,"USD",null,false]]'
)
HEAD = '[1800000000000,null,null,"expired",null,0,null,1,[],null,[]]'
PRINT = "ab" * 32
PRICES = {"m": {"input": "3", "output": "15"}}


def window_of(counters) -> str:
    columns = ", ".join(f"{name} INTEGER NOT NULL DEFAULT 0" for name in counters)
    return (
        "CREATE TABLE window (namespace TEXT NOT NULL, start INTEGER NOT NULL, "
        f"span INTEGER NOT NULL, task_type TEXT NOT NULL, agent TEXT NOT NULL, {columns}, "
        "PRIMARY KEY (namespace, start, span, task_type, agent)) WITHOUT ROWID"
    )


@pytest.fixture
def old(tmp_path):
    """A file of schema 1, in which one execution was counted."""
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        for table in rows.TABLES:
            connection.execute(window_of(FIRST) if "TABLE window" in table else table)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute("PRAGMA user_version = 1")
        connection.execute(
            "INSERT INTO record (namespace, fingerprint, scope, version, head, lines, reused, "
            "kept_until, expires, first, last) VALUES ('default', ?, '', '', ?, ?, 0, ?, ?, ?, ?)",
            (PRINT, HEAD, LINE, *[1_800_086_400_000] * 2, *[1_800_000_000_000] * 2),
        )
        counted = {
            "call_executed": 1, "cause_first": 1, "tasks": 1, "input": 100, "output": 10,
            "cost": 450_000_000, "run_0": 1,
        }  # fmt: skip
        connection.execute(
            f"INSERT INTO window (namespace, start, span, task_type, agent, {', '.join(counted)}) "
            f"VALUES ('default', 1800000000000, {SPAN}, 't', '', "
            f"{', '.join(map(str, counted.values()))})"
        )
    return path


def columns(path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        return {name for _, name, *_ in connection.execute("PRAGMA table_info(window)")}


def schema(path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0]


def test_an_older_file_is_upgraded_and_counts_on(old, clock):
    assert not set(COUNTERS) <= columns(old)
    store = SqliteStore(old, clock=clock)
    guard = Guard(store=store, pricer=PRICES)
    before = guard.ledger.totals()
    assert (before["executions"], before["input_tokens"]) == (1, 100)
    assert (before["charged"], before["inclusive"]) == (Decimal("0.00045"),) * 2
    (line,) = guard.ledger.executions(PRINT)
    assert (line.usage.input_tokens, line.cost) == (100, Decimal("0.00045"))
    assert (line.spent.parts, line.spent.inner, line.spent.unpriced) == (None, None, 0)

    @guard.idempotent(task_type="t")
    def inner(n):
        record_usage(input_tokens=1000, output_tokens=0, cache_read_tokens=400, model="m")

    @guard.idempotent(task_type="t")
    def outer(name):
        inner(1)

    outer("a")
    after = guard.ledger.totals()
    assert (after["executions"], after["input_tokens"]) == (3, 1100)
    assert after["inclusive_tokens"] == 1110 + 1000
    assert after["charged"] == Decimal("0.00345")
    (window,) = guard.ledger.windows()
    assert window.counts["cost_input"] == 1_800_000_000
    assert (schema(old), rows.SCHEMA) == (3, 3)
    assert set(COUNTERS) <= columns(old)
    guard.close()


def test_an_upgraded_file_opens_like_a_new_one(old, tmp_path, clock):
    new = tmp_path / "new.db"
    for path in (old, new, old, old):
        with closing(SqliteStore(path, clock=clock)) as store:
            told = ExecutionLedger(store).totals()["executions"]
            assert told == (path == old)
    assert columns(old) == columns(new)


def test_an_older_file_is_read_by_who_only_looks(old, clock):
    with closing(SqliteStore(old, clock=clock)) as store:
        ledger = ExecutionLedger(store)
        assert [line.fingerprint for line in ledger.lines()] == [PRINT]
        assert ledger.task_type_summary("t")["charged"] == Decimal("0.00045")
        assert ledger.missed() == ledger.growth() == []


def test_two_who_upgrade_at_once_do_it_once(old, clock):
    stores = [SqliteStore(old, clock=clock) for _ in range(4)]
    together, told = threading.Barrier(4), []

    def look(store):
        together.wait()
        told.append(len(store.windows("default", 0, 2**53)))

    threads = [threading.Thread(target=look, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    assert told == [1] * 4
    assert schema(old) == rows.SCHEMA

"""A store in one file, shared by the processes of one machine."""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from idemguard.claim import Begin, Forget, Resolve, aged, transition, waits, wakes
from idemguard.errors import ConfigurationError, StoreError, StoreUnavailableError
from idemguard.forks import on_fork
from idemguard.record import Mode, Record
from idemguard.stores import rows
from idemguard.stores.bridge import InThread
from idemguard.stores.room import Waiter, WaitingRoom
from idemguard.stores.watch import Watch
from idemguard.windows import COUNTERS, SPAN, entries, rolled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemguard.claim import Answer, Command
    from idemguard.record import Address, Execution
    from idemguard.stores import Unpark
    from idemguard.windows import Entries, Window

APPLICATION = 0x1DE36A2D  # marks the file as ours
PATIENCE = 5.0  # seconds that a busy database is waited for
BRIEF = 0.25  # and by a call that is only observed: it must not be held up
TEND = 60_000  # ms between two removals of what is over, of all processes together
BATCH = 500  # records removed in one transaction
UPGRADE = "upgrade idemguard, or give this project a file of its own (store=)"

_LINE = ", ".join(rows.LINE)
_RECORD = ", ".join(rows.RECORD)
_PLACE = "namespace, fingerprint, scope, version"
_AT = "namespace = ? AND fingerprint = ? AND scope = ? AND version = ?"
_SELECT = f"SELECT id, {_RECORD} FROM record WHERE {_AT}"
_SELECT_LINES = f"SELECT id, {_LINE} FROM line WHERE record = ? ORDER BY id"
_SELECT_RESULT = f"SELECT {', '.join(rows.RESULT)} FROM result WHERE record = ?"
_SELECT_TIMES = _SELECT_RESULT.replace(" data,", " NULL,")
_HINTED = "(SELECT max(hinted) + 1 FROM record)"


def _marks(names: tuple[str, ...]) -> str:
    return ", ".join("?" * len(names))


def _sets(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} = ?" for name in names)


_INSERT = f"INSERT INTO record ({_PLACE}, {_RECORD}) VALUES (?, ?, ?, ?, {_marks(rows.RECORD)})"
_UPDATE = f"UPDATE record SET {_sets(rows.RECORD)} WHERE id = ?"
_HINT = f"UPDATE record SET hint = ?, hinted = {_HINTED} WHERE id = ? RETURNING hinted"
_INSERT_LINE = f"INSERT INTO line (record, {_LINE}) VALUES (?, {_marks(rows.LINE)})"
_UPDATE_LINE = f"UPDATE line SET {_sets(rows.LINE)} WHERE id = ?"
_PUT_RESULT = (
    f"INSERT OR REPLACE INTO result (record, {', '.join(rows.RESULT)}) "
    f"VALUES (?, {_marks(rows.RESULT)})"
)


class SqliteStore:
    """Records in a SQLite database in WAL mode; every command is one transaction.

    Args:
        path: of the file; it and its folder are made at first use.
        patience: seconds that a database that others write to is waited for.
        clock: tells ms; the machine's wall clock where none is given.

    Raises:
        ConfigurationError: the path cannot be one of a file.

    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        patience: float = PATIENCE,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self._check_path()
        self._patience = patience
        self._clock = clock or _wall
        self._room = WaitingRoom()
        self._watch = Watch(self._room, self._connect, self.path.name)
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._patient = patience
        self._abandoned: list[sqlite3.Connection] = []
        on_fork(self)

    @classmethod
    def from_url(cls, url: str) -> SqliteStore:
        """The store of `sqlite:///relative.db` or `sqlite:////absolute.db`."""
        path = url.partition("://")[2]
        if not path.startswith("/") or not path.strip("/") or path.endswith("/"):
            raise ConfigurationError(
                f"store={url!r} names no file: sqlite:///relative.db or sqlite:////absolute.db"
            )
        if path == "/:memory:":
            raise ConfigurationError(f"store={url!r}: for a store in memory say memory://")
        return cls(path[1:])

    def _check_path(self) -> None:
        if "\0" in str(self.path):
            raise ConfigurationError("store=: a path cannot hold a NUL character")
        if self.path.is_dir():
            raise ConfigurationError(f"store=: {self.path} is a folder, not a file")
        there = next(parent for parent in self.path.parents if parent.exists())
        if not there.is_dir():
            raise ConfigurationError(f"store=: {self.path} cannot be made: {there} is no folder")
        if there != self.path.parent and not os.access(there, os.W_OK):
            raise ConfigurationError(f"store=: {self.path.parent} cannot be made in {there}")

    def __repr__(self) -> str:
        return f"SqliteStore({str(self.path)!r})"

    @cached_property
    def aio(self) -> InThread:
        """The store for calls on an event loop."""
        return InThread(self)

    def forked(self) -> None:
        """Open anew: a connection must not be used, nor closed, on both sides of a fork."""
        if self._connection is not None:
            self._abandoned.append(self._connection)
        self._connection = None
        self._lock = threading.RLock()
        self._room = WaitingRoom()
        self._watch = Watch(self._room, self._connect, self.path.name)

    # --- commands ------------------------------------------------------------------------------

    def perform(self, command: Command) -> Answer:
        """One command in one immediate transaction."""
        observed = isinstance(command, Begin) and command.mode is Mode.OBSERVE
        hinted = None
        with self._transaction(BRIEF if observed else self._patience) as connection:
            now = self._clock()
            whole = isinstance(command, (Begin, Resolve))
            found = self._load(connection, command, now, whole=whole)
            after, answer = transition(found.record, command, now)
            booked = entries(found.record, after, command, answer, now)
            whom = wakes(found.record, after, command, now)
            if after is not found.record:
                found.write(connection, command.address, after)
            self._book(connection, command.address.namespace, booked)
            if whom is not None and found.id is not None:
                hinted = connection.execute(_HINT, (whom, found.id)).fetchone()[0]
        if hinted is not None:
            self._watch.own(hinted)
        self._room.call(command.address, whom)
        return answer

    def _load(
        self, connection: sqlite3.Connection, command: Command, now: int, *, whole: bool
    ) -> _Found:
        found = _Found()
        try:
            found.read(connection, command.address, whole=whole)
        except (ValueError, TypeError, KeyError) as error:
            if not isinstance(command, Forget):
                raise StoreError(
                    f"{self.path}: the row of task {command.address.fingerprint[:16]} is damaged "
                    f"({error}). forget() the task to drop it.",
                    fingerprint=command.address.fingerprint,
                ) from error
            found.drop(connection)
        found.record = aged(found.record, now)
        return found

    @staticmethod
    def _book(connection: sqlite3.Connection, namespace: str, booked: Entries) -> None:
        for key, counts in booked.items():
            values = (namespace, key.start, SPAN, key.task_type, key.agent or "")
            connection.execute(_upsert(tuple(counts)), (*values, *counts.values()))

    def park(self, address: Address, holder: str | None, wake: Callable[[], None]) -> Unpark:
        """Wait in the room, which a thread watches the file for."""
        room, waiter = self._room, Waiter(holder, wake)
        room.enter(address, waiter)
        try:
            self._watch.start()
            record, now = self.look(address)
        except BaseException:
            room.leave(address, waiter)
            raise
        if not waits(record, holder, now) and room.leave(address, waiter):
            wake()
        return room.unpark(address, waiter)

    # --- reading -------------------------------------------------------------------------------

    def look(self, address: Address) -> tuple[Record, int]:
        """The record as time has left it, and the clock."""
        with self._reading() as connection:
            found, now = _Found(), self._clock()
            found.read(connection, address, whole=True)
            return aged(found.record, now), now

    def addresses(self, namespace: str, prefix: str) -> list[Address]:
        """Where there are records whose fingerprint starts so."""
        with self._reading() as connection:
            found = connection.execute(
                f"SELECT {_PLACE} FROM record WHERE namespace = ? AND fingerprint >= ? "
                "AND fingerprint < ? AND kept_until > ? ORDER BY id",
                (namespace, prefix, prefix + "\U0010ffff", self._clock()),
            )
            return [rows.address(row) for row in found]

    def overdue(self, namespace: str) -> list[Address]:
        """Where executions stand open whose lease is past."""
        with self._reading() as connection:
            found = connection.execute(
                f"SELECT DISTINCT {_PLACE} FROM record JOIN line ON line.record = record.id "
                "WHERE line.status = 'open' AND line.until <= ? AND namespace = ?",
                (self._clock(), namespace),
            )
            return [rows.address(row) for row in found]

    def lines(self, namespace: str, since: int, until: int) -> Iterator[Execution]:
        """The executions that started in this time, oldest first; read in batches."""
        columns = ", ".join(f"line.{name}" for name in rows.LINE)
        query = (
            f"SELECT line.id, {_PLACE}, {columns} FROM line JOIN record ON line.record = record.id "
            "WHERE namespace = ? AND started < ? AND (started, line.id) > (?, ?) "
            "ORDER BY started, line.id LIMIT 1000"
        )
        last = (since, -1)
        while True:
            with self._reading() as connection:
                batch = connection.execute(query, (namespace, until, *last)).fetchall()
                found = [rows.line(rows.address(row[1:5]), row[5:]) for row in batch]
            if not batch:
                return
            last = (found[-1].claim.started, batch[-1][0])
            yield from found

    def windows(self, namespace: str, since: int, until: int) -> list[Window]:
        """The windows that overlap this time."""
        with self._reading() as connection:
            found = connection.execute(
                f"SELECT start, span, task_type, agent, {', '.join(COUNTERS)} FROM window "
                "WHERE namespace = ? AND start < ? AND start + span > ? ORDER BY start",
                (namespace, until, since),
            )
            return [rows.window(row) for row in found]

    def secret(self, namespace: str) -> bytes:
        """The namespace's secret."""
        with self._transaction(self._patience) as connection:
            connection.execute(
                "INSERT OR IGNORE INTO namespace VALUES (?, ?)",
                (namespace, secrets.token_bytes(32)),
            )
            found = connection.execute("SELECT secret FROM namespace WHERE name = ?", (namespace,))
            return bytes(found.fetchone()[0])

    # --- upkeep --------------------------------------------------------------------------------

    def tend(self, window_retention: int | None) -> None:
        """Remove what is over, in short transactions, where no process did so a minute ago."""
        now = self._clock()
        with self._transaction(self._patience) as connection:
            mine = connection.execute(
                "UPDATE tended SET at = ? WHERE at NOT BETWEEN ? AND ?", (now, now - TEND, now)
            )
            if not mine.rowcount:
                return
            self._roll(connection, now, window_retention)
        removed = BATCH
        while removed == BATCH:
            with self._transaction(self._patience) as connection:
                over = connection.execute(
                    "SELECT id FROM record WHERE expires <= ? LIMIT ?", (now, BATCH)
                ).fetchall()
                for table, column in (("line", "record"), ("result", "record"), ("record", "id")):
                    connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", over)
                removed = len(over)
        with self._transaction(self._patience) as connection:
            connection.execute(
                "DELETE FROM result WHERE record IN (SELECT record FROM result WHERE gone <= ? "
                "LIMIT ?)",
                (now, BATCH),
            )

    def _roll(self, connection: sqlite3.Connection, now: int, window_retention: int | None) -> None:
        if window_retention is not None:
            connection.execute(
                "DELETE FROM window WHERE start + span + ? <= ?", (window_retention, now)
            )
        names = connection.execute("SELECT DISTINCT namespace FROM window").fetchall()
        for (namespace,) in names:
            found = connection.execute(
                f"SELECT start, span, task_type, agent, {', '.join(COUNTERS)} FROM window "
                "WHERE namespace = ? AND span = ? ORDER BY start LIMIT 10000",
                (namespace, SPAN),
            )
            drop, put = rolled([rows.window(row) for row in found], now)
            connection.executemany(
                "DELETE FROM window WHERE namespace = ? AND start = ? AND span = ? "
                "AND task_type = ? AND agent = ?",
                [
                    (namespace, w.key.start, w.span, w.key.task_type, w.key.agent or "")
                    for w in drop
                ],
            )
            for w in put:
                values = (namespace, w.key.start, w.span, w.key.task_type, w.key.agent or "")
                connection.execute(_upsert(tuple(w.counts)), (*values, *w.counts.values()))

    def close(self) -> None:
        """Close the file."""
        self._watch.stop()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    # --- the connection ----------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, patience: float) -> Iterator[sqlite3.Connection]:
        with self._reading(patience) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _reading(self, patience: float | None = None) -> Iterator[sqlite3.Connection]:
        patience = self._patience if patience is None else patience
        if not self._lock.acquire(timeout=patience):
            raise StoreUnavailableError(
                f"{self.path}: another thread of this process has used it for {patience:g} s"
            )
        try:
            with self._speaking():
                if self._connection is None:
                    self._connection = self._open()
                if patience != self._patient:
                    self._connection.execute(f"PRAGMA busy_timeout = {int(patience * 1000)}")
                    self._patient = patience
                yield self._connection
        finally:
            self._lock.release()

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """Errors of the database in words."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            primary = None if code is None else code & 0xFF
            if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise StoreUnavailableError(
                    f"{self.path}: another process has kept the database locked for longer than "
                    f"{self._patient:g} s ({error})"
                ) from error
            hint = "" if primary is None else _HINTS.get(primary, "")
            raise StoreError(f"{self.path}: {error}{hint}") from error
        except OSError as error:
            raise StoreError(f"{self.path}: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self.path,
            timeout=self._patience,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=512,
        )

    def _open(self) -> sqlite3.Connection:
        self._make_folder()
        connection = self._connect()
        try:
            self._wal(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._patient = self._patience
        return connection

    def _make_folder(self) -> None:
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        ignore = folder / ".gitignore"
        if folder.name == ".idemguard" and not ignore.exists():
            ignore.write_text("*\n")

    def _wal(self, connection: sqlite3.Connection) -> None:
        # switching to WAL does not wait for others that switch at the same moment
        end = time.monotonic() + self._patience
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() > end:
                    raise
                threading.Event().wait(0.005)
            else:
                return

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            (owner,) = connection.execute("PRAGMA application_id").fetchone()
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if owner not in (0, APPLICATION) or (owner == 0 and tables):
                raise StoreError(
                    f"{self.path}: a database of another application; {UPGRADE.split(', or ')[1]}"
                )
            if schema > rows.SCHEMA:
                raise StoreError(
                    f"{self.path}: written by a newer idemguard (schema {schema}, this one knows "
                    f"{rows.SCHEMA}); {UPGRADE}"
                )
            if not tables:
                for table in rows.TABLES:
                    connection.execute(table)
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute(f"PRAGMA user_version = {rows.SCHEMA}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


_HINTS = {
    sqlite3.SQLITE_READONLY: "; give it a place that can be written to (store=)",
    sqlite3.SQLITE_CANTOPEN: "; is its folder there, and may it be written to?",
    sqlite3.SQLITE_NOTADB: "; choose another file (store=), or move this one away",
    sqlite3.SQLITE_CORRUPT: "; move it away, and a new one is begun",
    sqlite3.SQLITE_FULL: "; make room on the disk",
}


class _Found:
    """A record as it was read, and the rows that it was read from."""

    __slots__ = ("has_result", "id", "lines", "record")

    def __init__(self) -> None:
        self.id: int | None = None
        self.record = Record()
        self.has_result = False
        self.lines: dict[tuple[int, str], tuple[int, Execution]] = {}

    def read(self, connection: sqlite3.Connection, address: Address, *, whole: bool) -> None:
        row = connection.execute(_SELECT, rows.place(address)).fetchone()
        if row is None:
            return
        self.id = row[0]
        lines = []
        for id_, *columns in connection.execute(_SELECT_LINES, (self.id,)):
            line = rows.line(address, columns)
            self.lines[line.claim.token, line.claim.nonce] = id_, line
            lines.append(line)
        select = _SELECT_RESULT if whole else _SELECT_TIMES
        kept = connection.execute(select, (self.id,)).fetchone()
        self.has_result = kept is not None
        result = None if kept is None else rows.result(address, kept)
        self.record = rows.record(row[1:], result, lines)

    def drop(self, connection: sqlite3.Connection) -> None:
        """What cannot be read: remove it, so that the address is as good as new."""
        for table, column in (("line", "record"), ("result", "record"), ("record", "id")):
            connection.execute(f"DELETE FROM {table} WHERE {column} = ?", (self.id,))
        self.id, self.record, self.lines, self.has_result = None, Record(), {}, False

    def write(self, connection: sqlite3.Connection, address: Address, after: Record) -> None:
        """Write what has changed."""
        if self.id is None:
            values = (*rows.place(address), *rows.record_row(after))
            self.id = connection.execute(_INSERT, values).lastrowid
        else:
            connection.execute(_UPDATE, (*rows.record_row(after), self.id))
        left = dict(self.lines)
        for line in after.lines:
            id_, old = left.pop((line.claim.token, line.claim.nonce), (None, None))
            if old is None:
                connection.execute(_INSERT_LINE, (self.id, *rows.line_row(line)))
            elif line is not old:
                connection.execute(_UPDATE_LINE, (*rows.line_row(line), id_))
        for id_, _ in left.values():
            connection.execute("DELETE FROM line WHERE id = ?", (id_,))
        if after.result is None:
            if self.has_result:
                connection.execute("DELETE FROM result WHERE record = ?", (self.id,))
        elif after.result is not self.record.result:
            connection.execute(_PUT_RESULT, (self.id, *rows.result_row(after.result)))


@lru_cache(maxsize=512)
def _upsert(names: tuple[str, ...]) -> str:
    adds = ", ".join(f"{name} = {name} + excluded.{name}" for name in names)
    return (
        f"INSERT INTO window (namespace, start, span, task_type, agent, {', '.join(names)}) "
        f"VALUES (?, ?, ?, ?, ?, {_marks(names)}) "
        f"ON CONFLICT (namespace, start, span, task_type, agent) DO UPDATE SET {adds}"
    )


def _wall() -> int:
    return time.time_ns() // 1_000_000

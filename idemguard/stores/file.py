"""A SQLite file: opened at its first use, made where there is none, its errors in words."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

from idemguard.errors import StoreError, StoreUnavailableError
from idemguard.stores import rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

APPLICATION = 0x1DE36A2D  # marks the file as ours
BUSY = 8  # ms that SQLite itself waits for another process: it tries after 1, 3 and 8
PAUSE = 0.001  # seconds, about, until we have it try again; left alone it would wait ever longer
ANOTHER = "give this project a file of its own (store=)"


class File:
    """One connection to a database in WAL mode, for one thread at a time.

    Args:
        path: where it is; the file and its folder are made at first use.
        patience: seconds that other processes that write to it are waited for.

    """

    def __init__(self, path: Path, patience: float) -> None:
        self.path = path
        self.connection: sqlite3.Connection | None = None
        self.lock = threading.Lock()
        self._patience = patience
        self._abandoned: list[sqlite3.Connection] = []
        _files.add(self)

    def forked(self) -> None:
        """Open anew: a connection must not be used, nor closed, on both sides of a fork."""
        if self.connection is not None:
            self._abandoned.append(self.connection)
        self.connection = None
        self.lock = threading.Lock()

    def read(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """What `act` reads."""
        return self._do(None, act, self._patience)

    def write(self, act: Callable[[sqlite3.Connection], T], patience: float | None = None) -> T:
        """What comes of `act` in one immediate transaction.

        Args:
            act: may be called several times; only its last call has an effect.
            patience: seconds, where it is not the file's.

        Raises:
            StoreUnavailableError: other processes have used the file for so long.
            StoreError: whatever else the database says, in words.

        """
        return self._do("BEGIN IMMEDIATE", act, self._patience if patience is None else patience)

    def _do(self, begin: str | None, act: Callable[[sqlite3.Connection], T], patience: float) -> T:
        end: float | None = None
        while True:
            try:
                # a plain lock and no context manager of our own: so an interrupt, which may come
                # at any moment, cannot leave it locked
                with self.lock:
                    return self._act(begin, act)
            except sqlite3.Error as error:
                now = time.monotonic()
                end = now + patience - BUSY / 1000 if end is None else end
                if now >= end or not _busy(error):
                    raise self._spoken(error, patience) from error
            except (OSError, UnicodeEncodeError, OverflowError) as error:
                raise self._spoken(error, patience) from error
            time.sleep(PAUSE * random.uniform(0.5, 1.5))  # noqa: S311 - so that two do not keep step

    def _act(self, begin: str | None, act: Callable[[sqlite3.Connection], T]) -> T:
        connection = self.connection
        if connection is None:
            connection = self.connection = self._open()
        if connection.in_transaction:  # an interrupt while it was rolled back
            connection.execute("ROLLBACK")
        if begin is None:
            return act(connection)
        try:
            connection.execute(begin)
            answer = act(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return answer

    def _spoken(self, error: Exception, patience: float) -> StoreError:
        if isinstance(error, sqlite3.Error):
            if _busy(error):
                return StoreUnavailableError(
                    f"{self.path}: another process has kept the database locked for longer than "
                    f"{patience:g} s ({error})"
                )
            return StoreError(f"{self.path}: {error}{_HINTS.get(_code(error), '')}")
        if isinstance(error, OSError):
            return StoreError(f"{self.path}: {error}")
        return StoreError(f"{self.path}: this cannot be stored: {error}")

    def close(self) -> None:
        """Close it; it opens anew when it is used again."""
        with self.lock:
            if self.connection is not None:
                self.connection.close()
                self.connection = None

    # --- opening -----------------------------------------------------------------------------------

    def connect(self) -> sqlite3.Connection:
        """A connection to what is there."""
        return sqlite3.connect(
            self.path,
            timeout=BUSY / 1000,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=512,
        )

    def _open(self) -> sqlite3.Connection:
        self._make_folder()
        connection = self.connect()
        try:
            if not self._prepared(connection):
                connection.execute("PRAGMA journal_mode = WAL")
                self._prepare(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            connection.close()
            raise
        return connection

    def _make_folder(self) -> None:
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        ignore = folder / ".gitignore"
        if folder.name == ".idemguard" and not ignore.exists():
            ignore.write_text("*\n")

    def _prepared(self, connection: sqlite3.Connection) -> bool:
        """Whether it has our tables; a file that is not for us is left as it is."""
        connection.execute("BEGIN")
        try:
            (owner,) = connection.execute("PRAGMA application_id").fetchone()
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        finally:
            connection.execute("ROLLBACK")
        if owner != APPLICATION and (owner or schema or tables):
            raise StoreError(f"{self.path}: a database of another application; {ANOTHER}")
        if schema > rows.SCHEMA:
            raise StoreError(
                f"{self.path}: written by a newer idemguard (schema {schema}, this one knows "
                f"{rows.SCHEMA}); upgrade idemguard, or {ANOTHER}"
            )
        return bool(schema)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if not tables:  # else another process was faster
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
    sqlite3.SQLITE_IOERR: "; is there room on the disk, and does it work?",
}


def _code(error: sqlite3.Error) -> int:
    """The primary code; 0 where the error is Python's own."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _busy(error: sqlite3.Error) -> bool:
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


# --- forks ---------------------------------------------------------------------------------------------

# SQLite has locks of its own inside, which a child would find locked for ever if another thread
# were in the middle of something: so nobody is, while this process forks

_files: WeakSet[File] = WeakSet()
_held: list[threading.Lock] = []


def _hold() -> None:
    for file in list(_files):
        lock = file.lock
        if lock.acquire(timeout=1):
            _held.append(lock)


def _let_go() -> None:
    while _held:
        _held.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_held.clear)

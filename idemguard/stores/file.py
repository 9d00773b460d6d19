"""A SQLite file: opened at its first use, made where there is none, its errors in words.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet, ref

from idemguard.errors import StoreError, StoreUnavailableError
from idemguard.stores import rows
from idemguard.stores.bridge import called

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

APPLICATION = 0x1DE36A2D  # marks the file as ours
BUSY = 8  # ms that SQLite itself waits for another process: it tries after 1, 3 and 8
PAUSE = 0.001  # seconds, about, until we have it try again; left alone it would wait ever longer
CHECK = 1.0  # seconds between two looks at whether the file is still the one that is open
HOLD = 2.0  # seconds that a fork waits for steps of other threads
_own = random.Random()  # noqa: S311 - pauses; the application's own numbers stay as it seeded them
ANOTHER = "give this project a file of its own (store=)"


class Connection(sqlite3.Connection):
    """Knows its cursors: one that is read in part, and lives on in a traceback, keeps it open."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._cursors: list[ref[sqlite3.Cursor]] = []  # held, a statement would not end
        super().__init__(*args, **options)

    def execute(self, *args: Any) -> Any:
        """As it does, by a cursor that is closed with the connection."""
        made = super().execute(*args)
        self._cursors.append(ref(made))
        return made

    def done(self) -> None:
        """No cursor is in use any more."""
        while self._cursors:
            cursor = self._cursors.pop()()
            if cursor is not None:
                with suppress(sqlite3.Error):
                    cursor.close()

    def close(self) -> None:
        """Close it for good."""
        self.done()
        super().close()


class File:
    """One connection to a database in WAL mode, for one thread at a time.

    A signal handler, or a finaliser that garbage collection calls, may come in between, in the
    same thread and in the middle of a step: then the step that it came into begins anew.

    Args:
        path: where it is; the file and its folder are made at first use.
        patience: seconds that other processes that write to it are waited for.

    Attributes:
        lock: held while any of its connections is used.
        opened: how often all connections had to be given up, because of a fork or a new file.
        replaced: how often there was another file, or none, where it had been.

    """

    def __init__(self, path: Path, patience: float) -> None:
        self.path = path
        self.connection: Connection | None = None
        self.lock = threading.RLock()
        self.opened = self.replaced = 0
        self._patience = patience
        self._connections: list[Connection] = []  # that are open: ours, and a watch's
        self._identity: tuple[int, int] | None = None
        self._checked = 0.0
        self._free = 0.0  # when it was last written to
        self._inside = False  # whether a step is under way
        self._turn = 0  # how often somebody who came in between ended a step's transaction
        with _birth:
            _files.add(self)

    def read(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """What `act` reads."""
        return self._do(None, act, self._patience)

    def write(self, act: Callable[[sqlite3.Connection], T], patience: float | None = None) -> T:
        """What comes of `act` in one immediate transaction.

        Args:
            act: may be called several times; only its last call has an effect.
            patience: seconds from the call on, where it is not the file's.

        Raises:
            StoreUnavailableError: other processes have used the file for so long.
            StoreError: whatever else the database says, in words.

        """
        return self._do("BEGIN IMMEDIATE", act, self._patience if patience is None else patience)

    def _do(self, begin: str | None, act: Callable[[sqlite3.Connection], T], patience: float) -> T:
        came, end = called(), None
        while True:
            try:
                # a lock of C and no context manager of our own: so an interrupt, which may come
                # at any moment, cannot leave it locked
                with self.lock:
                    return self._act(begin, act)
            except sqlite3.Error as error:
                if end is None:  # who came late to a file that nobody keeps locked may wait
                    end = max(came, self._free) + patience - BUSY / 1000
                if time.monotonic() >= end or not _busy(error):
                    raise self._spoken(error, patience) from error
            except (OSError, UnicodeEncodeError, OverflowError) as error:
                raise self._spoken(error, patience) from error
            time.sleep(PAUSE * _own.uniform(0.5, 1.5))  # so that two do not keep step

    def _act(self, begin: str | None, act: Callable[[sqlite3.Connection], T]) -> T:
        between, self._inside = self._inside, True
        ended: Connection | None = None
        try:
            while True:
                connection = self._ready(between)
                if connection.in_transaction:  # of whom we came in between of, or an interrupt's
                    self._turn += 1
                    ended = connection
                    connection.execute("ROLLBACK")
                turn = self._turn
                try:
                    answer = self._once(connection, begin, act, turn)
                except Exception:
                    if turn == self._turn:
                        raise
                else:
                    if turn == self._turn:
                        return answer
        finally:
            self._inside = between
            if not between:
                if self.connection is not None:
                    self.connection.done()
            elif ended is not None:  # the rest of the other step must not commit by statements
                with suppress(sqlite3.Error):
                    ended.execute("BEGIN")

    def _once(
        self,
        connection: Connection,
        begin: str | None,
        act: Callable[[sqlite3.Connection], T],
        turn: int,
    ) -> T:
        if begin is None:
            return act(connection)
        try:
            connection.execute(begin)
            self._free = time.monotonic()
            answer = act(connection)
            if turn == self._turn:
                connection.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise
        return answer

    def _ready(self, between: bool) -> Connection:
        if not between:
            self.check()
        if self.connection is None:
            made = self._open()
            if self.connection is None:
                self.connection = made
            else:  # who came in between was faster
                self.disconnect(made)
        return self.connection

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
            connection, self.connection = self.connection, None
            if connection is not None:
                self._turn += self._inside
                self.disconnect(connection)

    def give_up(self) -> None:
        """Close all connections, whoever uses them, who must open anew; the lock is held."""
        self.connection = None
        self.opened += 1
        self._turn += self._inside
        while self._connections:
            with suppress(sqlite3.Error):
                self._connections.pop().close()

    def check(self) -> None:
        """Give up a file that was removed or replaced; the lock is held."""
        now = time.monotonic()
        if not self._connections or now - self._checked < CHECK:
            return
        self._checked = now
        with suppress(OSError):  # it may be there nevertheless
            if self._there() != self._identity:
                self.replaced += 1
                self.give_up()

    def _there(self) -> tuple[int, int] | None:
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return None
        return there.st_dev, there.st_ino

    def forked(self, held: Any) -> None:
        """Begin anew in a child: with connections of its own, or none if it was not held."""
        self._checked = 0.0
        if held is not None and self._inside:
            held.release()  # a step of the thread that forked goes on in the child
            return
        self.lock, self._inside = threading.RLock(), False
        if self._connections:
            _lost.add(os.path.realpath(self.path))
            _abandoned.extend(self._connections)
            self._connections, self.connection = [], None

    # --- opening -----------------------------------------------------------------------------------

    def connect(self) -> Connection:
        """A connection to what is there; the lock is held."""
        if _lost and os.path.realpath(self.path) in _lost:
            raise StoreUnavailableError(
                f"{self.path}: this process was forked while a thread of its parent had been in "
                f"the middle of a step for longer than {HOLD:g} s, or by a program that does not "
                "tell Python; so it cannot use this database safely: start it anew"
            )
        made = sqlite3.connect(
            self.path,
            timeout=BUSY / 1000,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=512,
            factory=Connection,
        )
        if not self._connections:
            self._identity, self._checked = self._there(), time.monotonic()
        self._connections.append(made)
        return made

    def disconnect(self, connection: Connection) -> None:
        """Close one that `connect` made; the lock is held."""
        if connection in self._connections:
            self._connections.remove(connection)
        connection.close()

    def _open(self) -> Connection:
        self._make_folder()
        connection = self.connect()
        try:
            if not self._prepared(connection):
                connection.execute("PRAGMA journal_mode = WAL")
                self._prepare(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            self.disconnect(connection)
            raise
        return connection

    def _make_folder(self) -> None:
        folder = self.path.parent
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if made and folder.name == ".idemguard":
            (folder / ".gitignore").write_text("*\n")

    def _prepared(self, connection: sqlite3.Connection) -> bool:
        """Whether it has our tables; a file that is not for us is left as it is."""
        connection.execute("BEGIN")
        try:
            (owner,) = connection.execute("PRAGMA application_id").fetchone()
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        finally:
            _roll_back(connection)
        if owner != APPLICATION and (owner or schema or tables):
            raise StoreError(f"{self.path}: a database of another application; {ANOTHER}")
        if schema > rows.SCHEMA:
            raise StoreError(
                f"{self.path}: written by a newer idemguard (schema {schema}, this one knows "
                f"{rows.SCHEMA}); upgrade idemguard, or {ANOTHER}"
            )
        return bool(schema == rows.SCHEMA)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if not tables:  # else another process was faster
                for table in rows.TABLES:
                    connection.execute(table)
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
            else:
                rows.add_counters(connection)  # of a version that counted less
            connection.execute(f"PRAGMA user_version = {rows.SCHEMA}")
            connection.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise


_HINTS = {
    sqlite3.SQLITE_READONLY: "; give it a place that can be written to (store=)",
    sqlite3.SQLITE_CANTOPEN: "; is its folder there, and may it be written to?",
    sqlite3.SQLITE_NOTADB: "; choose another file (store=), or move this one away",
    sqlite3.SQLITE_CORRUPT: "; move it away, and a new one is begun",
    sqlite3.SQLITE_FULL: "; make room on the disk",
    sqlite3.SQLITE_IOERR: "; is there room on the disk, and does it work?",
}


def _roll_back(connection: sqlite3.Connection) -> None:
    """End a transaction, if there still is one; what ended it is told, and not this."""
    with suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _code(error: sqlite3.Error) -> int:
    """The primary code; 0 where the error is Python's own."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _busy(error: sqlite3.Error) -> bool:
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


# --- forks ---------------------------------------------------------------------------------------------

# SQLite knows by process which files are open and locked. A child that inherits this takes no
# lock of the kernel's for what its parent has locked, and so others remove the log under it;
# and locks inside of SQLite that another thread held would be locked for ever. So nobody is in
# the middle of anything while this process forks, and no connection is open: both sides open
# anew. Where a thread is in the middle of a step for too long, we fork nevertheless, and the
# child refuses the file.

_files: WeakSet[File] = WeakSet()
_birth = threading.RLock()  # held while a file is added
_held: dict[File | None, Any] = {}  # what is kept from being used meanwhile, and by which lock
_lost: set[str] = set()  # which this process must not open
_abandoned: list[Connection] = []  # to be closed by nobody


def _hold() -> None:
    end = time.monotonic() + HOLD
    if _birth.acquire(timeout=HOLD):
        _held[None] = _birth
    for file in _everyone():
        lock = file.lock
        if lock.acquire(timeout=max(0.0, end - time.monotonic())):
            _held[file] = lock
            file.give_up()


def _everyone() -> list[File]:
    while True:
        with suppress(RuntimeError):  # one was added meanwhile
            return list(_files)


def _let_go() -> None:
    while _held:
        _held.popitem()[1].release()


def _begin_anew() -> None:
    """In the child."""
    global _birth  # noqa: PLW0603
    for file in _everyone():
        file.forked(_held.pop(file, None))
    _held.clear()
    _birth = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_begin_anew)

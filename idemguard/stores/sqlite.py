"""A store in one file, shared by the processes of one machine.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import heapq
import itertools
import os
import secrets
import sqlite3
import time
from array import array
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idemguard.claim import Begin, Forget, Resolve, aged, transition, waits, wakes
from idemguard.digests import keyed
from idemguard.errors import ConfigurationError, StoreError
from idemguard.forks import on_fork
from idemguard.record import Record
from idemguard.stores import rows
from idemguard.stores.bridge import InThread
from idemguard.stores.file import File
from idemguard.stores.room import Waiter, WaitingRoom
from idemguard.stores.watch import LAST_HINT, Watch
from idemguard.windows import COUNTERS, FINE, HOUR, SPAN, entries, rolled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemguard.claim import Answer, Command
    from idemguard.record import Address, Execution
    from idemguard.stores import Unpark
    from idemguard.windows import Window

PATIENCE = 5.0  # seconds that a busy database is waited for
BRIEF = 0.25  # and by a call that is only observed: it must not be held up
TEND = 60_000  # ms between two removals of what is over, of all processes together
BATCH = 500  # records read, or removed, in one transaction
SEEN = 256  # records whose rows need not be parsed again
NOBODY = Record()

_PLACE = "namespace, fingerprint, scope, version"
_AT = "namespace = ? AND fingerprint = ? AND scope = ? AND version = ?"
_SELECT = (
    "SELECT id, head, lines, reused, kept_until, waited, source, codec, at, until, gone, {data} "
    f"FROM record LEFT JOIN result ON record = id WHERE {_AT}"
)
_WHOLE, _TIMES = _SELECT.format(data="data"), _SELECT.format(data="NULL")
_INSERT = (
    f"INSERT INTO record ({_PLACE}, head, lines, reused, kept_until, expires, first, last, due) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_UPDATE = (
    "UPDATE record SET head = ?, lines = ?, reused = ?, kept_until = ?, expires = ?, "
    "first = ?, last = ?, due = ? WHERE id = ?"
)
_REUSE = "UPDATE record SET reused = ?, kept_until = ? WHERE id = ?"
_PUT_RESULT = "INSERT OR REPLACE INTO result VALUES (?, ?, ?, ?, ?, ?, ?)"
# larger than every earlier one, also where the row of the last was removed
_HINT = (
    "UPDATE record SET hint = ?, waited = ?, hinted = max(?, "
    f"1 + coalesce(({LAST_HINT}), 0)) WHERE id = ?"
)
_WINDOWS = (
    f"SELECT start, span, task_type, agent, {', '.join(COUNTERS)} FROM window WHERE namespace = ?"
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
        self._file = File(self.path, patience)
        self._clock = clock or _wall
        self._room = WaitingRoom()
        self._watch = Watch(self._room, self._file)
        self._known = _Rows()
        self._secrets: dict[tuple[int, str], bytes] = {}
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
        """The parent's waiters stay the parent's."""
        self._known = _Rows()
        self._room = WaitingRoom()
        self._watch = Watch(self._room, self._file)

    # --- commands ------------------------------------------------------------------------------

    def perform(self, command: Command) -> Answer:
        """One command in one immediate transaction."""
        patience = BRIEF if getattr(command, "brief", False) else None
        command = keyed(command, lambda: self.secret(command.address.namespace, patience))
        answer, whom = self._file.write(partial(self._step, command), patience)
        self._room.call(command.address, whom)
        return answer

    def _step(self, command: Command, connection: sqlite3.Connection) -> tuple[Answer, str | None]:
        address, now = command.address, self._clock()
        found = self._found(connection, command)
        before = aged(found.record, now)
        after, answer = transition(before, command, now)
        whom = wakes(before, after, command, now)
        if after is not found.record:
            self._known.write(connection, found, address, after)
        for key, counts in entries(before, after, command, answer, now).items():
            values = (address.namespace, key.start, SPAN, key.task_type, key.agent or "")
            connection.execute(_upsert(tuple(counts)), (*values, *counts.values()))
        if whom is not None and found.waited:
            hint = f"{whom} {self._watch.name}"
            connection.execute(_HINT, (hint, whom == "one", now, found.id))
        return answer, whom

    def _found(self, connection: sqlite3.Connection, command: Command) -> _Found:
        whole = isinstance(command, (Begin, Resolve))
        try:
            return self._known.read(connection, command.address, whole=whole)
        except _DamageError as error:
            if not isinstance(command, Forget):
                raise self._damaged(command.address, error) from error
        return _afresh(connection, command.address)

    def _damaged(self, address: Address, error: Exception) -> StoreError:
        return StoreError(
            f"{self.path}: the row of task {address.fingerprint[:16]} is damaged "
            f"({error}); forget() the task to drop it",
            fingerprint=address.fingerprint,
        )

    def park(self, address: Address, holder: str | None, wake: Callable[[], None]) -> Unpark:
        """Wait in the room, which a thread watches the file for."""
        room, waiter = self._room, Waiter(holder, wake)
        room.enter(address, waiter)
        try:
            self._file.read(lambda _: self._watch.start())
            over = self._over(address, holder)
        except BaseException:
            room.leave(address, waiter)
            raise
        if over and room.leave(address, waiter):
            wake()

        def unpark() -> None:
            room.leave(address, waiter)

        return unpark

    def _over(self, address: Address, holder: str | None) -> bool:
        """Whether there is nothing to wait for; else other processes know that somebody waits."""

        def over(connection: sqlite3.Connection, *, writes: bool = False) -> bool | None:
            found, now = self._read(connection, address), self._clock()
            if not waits(found.record, holder, now):
                return True
            if writes:
                found.expect(connection, address, now)
            return False if found.waited or writes else None

        told = self._file.read(over)
        return self._file.write(partial(over, writes=True)) is True if told is None else told

    # --- reading -------------------------------------------------------------------------------

    def _read(self, connection: sqlite3.Connection, address: Address) -> _Found:
        try:
            return self._known.read(connection, address, whole=True)
        except _DamageError as error:
            raise self._damaged(address, error) from error

    def look(self, address: Address) -> tuple[Record, int]:
        """The record as time has left it, and the clock."""
        record = self._file.read(lambda connection: self._read(connection, address)).record
        now = self._clock()
        return aged(record, now), now

    def _rows(self, query: str, *values: Any) -> list[Any]:
        return self._file.read(lambda connection: connection.execute(query, values).fetchall())

    def addresses(self, namespace: str, prefix: str) -> list[Address]:
        """Where there are records whose fingerprint starts so."""
        found = self._rows(
            f"SELECT {_PLACE} FROM record WHERE namespace = ? AND fingerprint >= ? "
            "AND fingerprint < ? AND kept_until > ? ORDER BY id",
            namespace, prefix, prefix + "\U0010ffff", self._clock(),
        )  # fmt: skip
        return [rows.address(row) for row in found]

    def overdue(self, namespace: str) -> list[Address]:
        """Where executions stand open whose lease is past."""
        found = self._rows(
            f"SELECT {_PLACE} FROM record WHERE namespace = ? AND id IN "
            "(SELECT id FROM record INDEXED BY record_times WHERE due <= ?) ORDER BY id",
            namespace, self._clock(),
        )  # fmt: skip
        return [rows.address(row) for row in found]

    def lines(self, namespace: str, since: int, until: int) -> Iterator[Execution]:
        """The executions that started in this time, oldest first; read in batches.

        Each that stands there from the first to the last comes once, whatever is written meanwhile.
        """
        # records come by their first start: a line is due when no later record can precede it
        waiting: list[tuple[int, int, int, Execution]] = []
        numbers = itertools.count()
        for first, lines in self._records(namespace, self._places(since, until)):
            while waiting and waiting[0][0] < first:
                yield heapq.heappop(waiting)[-1]
            for line in lines:
                # what began before its record did was written meanwhile
                if max(since, first) <= line.started < until:
                    entry = (line.started, line.claim.token, next(numbers), line)
                    heapq.heappush(waiting, entry)
        while waiting:
            yield heapq.heappop(waiting)[-1]

    def _places(self, since: int, until: int) -> list[array[int]]:
        """The records that have some of this time, in batches: first starts and ids, in turn.

        All as of one moment: the first start of a record changes, and its id does not.
        """

        def places(connection: sqlite3.Connection) -> list[array[int]]:
            found = connection.execute(
                "SELECT CAST(first AS INTEGER), id FROM record INDEXED BY record_times "
                "WHERE first < ? AND last >= ? ORDER BY first",
                (until, since),
            )
            batches = iter(partial(found.fetchmany, BATCH), [])
            return [array("q", itertools.chain.from_iterable(batch)) for batch in batches]

        return self._file.read(places)

    def _records(
        self, namespace: str, places: list[array[int]]
    ) -> Iterator[tuple[int, list[Execution]]]:
        """First start and lines of these records, as far as they are there, in that order."""
        for batch in places:
            ids = batch[1::2]
            found = self._rows(
                f"SELECT id, {_PLACE}, lines FROM record "
                f"WHERE id IN ({', '.join('?' * len(ids))}) AND +namespace = ?",
                *ids, namespace,
            )  # fmt: skip
            there = {row[0]: row for row in found}
            for first, number in zip(batch[::2], ids, strict=True):
                if number not in there:
                    continue
                _, *place, lines = there[number]
                address = rows.address(place)
                try:
                    executions = [rows.execution(address, line) for line in lines.splitlines()]
                except UNREADABLE as error:
                    raise self._damaged(address, error) from error
                yield first, executions

    def windows(self, namespace: str, since: int, until: int) -> list[Window]:
        """The windows that overlap this time."""
        found = self._rows(
            f"{_WINDOWS} AND start BETWEEN ? AND ? AND start + span > ? ORDER BY start",
            namespace, since - HOUR, until - 1, since,
        )  # fmt: skip
        return [rows.window(row) for row in found]

    def secret(self, namespace: str, patience: float | None = None) -> bytes:
        """The namespace's secret; read, and made where there is none, once by each process."""
        known = self._secrets.get((self._file.replaced, namespace))
        if known is None:
            known = self._secret(namespace, patience)
            self._secrets[self._file.replaced, namespace] = known
        return known

    def _secret(self, namespace: str, patience: float | None) -> bytes:
        fresh = secrets.token_bytes(32)

        def step(connection: sqlite3.Connection) -> bytes:
            connection.execute("INSERT OR IGNORE INTO namespace VALUES (?, ?)", (namespace, fresh))
            found = connection.execute("SELECT secret FROM namespace WHERE name = ?", (namespace,))
            return bytes(found.fetchone()[0])

        return self._file.write(step, patience)

    # --- upkeep --------------------------------------------------------------------------------

    def tend(self, window_retention: int | None) -> None:
        """Remove what is over, in short transactions, where no process did so a minute ago."""
        now = self._clock()
        if not self._file.write(partial(self._begin_to_tend, now, window_retention)):
            return
        records = "SELECT id FROM record INDEXED BY record_times WHERE expires <= ?"
        self._remove(records, "record", "id", "expires", now)
        self._remove("SELECT record FROM result WHERE gone <= ?", "result", "record", "gone", now)

    def _begin_to_tend(
        self, now: int, window_retention: int | None, connection: sqlite3.Connection
    ) -> bool:
        mine = connection.execute(
            "UPDATE tended SET at = ? WHERE at NOT BETWEEN ? AND ?", (now, now - TEND, now)
        )
        if mine.rowcount:
            self._roll(connection, now, window_retention)
        return bool(mine.rowcount)

    def _remove(self, query: str, table: str, key: str, time: str, now: int) -> None:
        ids = [str(id_) for (id_,) in self._rows(query, now)]
        for start in range(0, len(ids), BATCH):
            # not those that have come to life meanwhile
            over = f"{key} IN ({', '.join(ids[start : start + BATCH])}) AND {time} <= ?"

            def step(connection: sqlite3.Connection, over: str = over) -> None:
                if table == "record":
                    mine = (
                        f"DELETE FROM result WHERE record IN (SELECT id FROM record WHERE {over})"
                    )
                    connection.execute(mine, (now,))
                connection.execute(f"DELETE FROM {table} WHERE {over}", (now,))

            self._file.write(step)

    def _roll(self, connection: sqlite3.Connection, now: int, window_retention: int | None) -> None:
        if window_retention is not None:
            connection.execute(
                "DELETE FROM window WHERE start + span + ? <= ?", (window_retention, now)
            )
        names = connection.execute("SELECT DISTINCT namespace FROM window").fetchall()
        for (namespace,) in names:
            found = connection.execute(
                f"{_WINDOWS} AND span = ? AND start <= ? ORDER BY start LIMIT 10000",
                (namespace, SPAN, now - FINE),
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
            for w in filter(lambda w: w.counts, put):
                values = (namespace, w.key.start, w.span, w.key.task_type, w.key.agent or "")
                connection.execute(_upsert(tuple(w.counts)), (*values, *w.counts.values()))

    def close(self) -> None:
        """Close the file."""
        self._watch.stop()
        for address in self._room.waiting():  # whoever waits asks again, and so opens it anew
            self._room.call(address, "all")
        self._file.close()


# what a row raises that a failing disk, or somebody else, has written to
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)


class _DamageError(Exception):
    """A row that cannot be read."""


class _Found:
    """A record as it was read, and what it was read from."""

    __slots__ = ("has_result", "id", "record", "texts", "waited")

    def __init__(self) -> None:
        self.id: int | None = None
        self.record = NOBODY
        self.has_result = self.waited = False
        self.texts: tuple[str, ...] = ()  # of its lines

    def only_reused(self, after: Record) -> bool:
        """Whether nothing was changed but the count of its reuses, and how long it is kept."""
        before = self.record
        if after.lines is not before.lines or after.result is not before.result:
            return False
        return after._replace(reused=before.reused, kept_until=before.kept_until) == before

    def expect(self, connection: sqlite3.Connection, address: Address, now: int) -> None:
        """From now on, commands on this record leave a hint for other processes."""
        if self.id is None:
            nothing = (rows.head(NOBODY), "", 0, 0, now + HOUR, None, None, None)
            self.id = connection.execute(_INSERT, (*rows.place(address), *nothing)).lastrowid
        connection.execute("UPDATE record SET waited = 1 WHERE id = ?", (self.id,))


def _afresh(connection: sqlite3.Connection, address: Address) -> _Found:
    """Remove what stands there, so that the address is as good as new."""
    place, here = rows.place(address), f"SELECT id FROM record WHERE {_AT}"
    connection.execute(f"DELETE FROM result WHERE record IN ({here})", place)
    connection.execute(f"DELETE FROM record WHERE id IN ({here})", place)
    found = _Found()
    found.waited = True  # perhaps
    return found


class _Rows:
    """Reads and writes rows; those that it has seen lately need not be parsed again."""

    def __init__(self) -> None:
        # a head, and the texts of lines, as they stand in the file: and what they say
        self._seen: dict[Address, tuple[str, str, Record, tuple[str, ...]]] = {}

    def read(self, connection: sqlite3.Connection, address: Address, *, whole: bool) -> _Found:
        """What stands there; where not whole, without the result's data."""
        answer = connection.execute(_WHOLE if whole else _TIMES, rows.place(address))
        try:
            row = answer.fetchone()
            return _Found() if row is None else self._parsed(address, row)
        except sqlite3.OperationalError as error:
            if hasattr(error, "sqlite_errorcode"):
                raise
            raise _DamageError(error) from error  # a text that is none
        except UNREADABLE as error:
            raise _DamageError(f"{type(error).__name__}: {error}") from error

    def _parsed(self, address: Address, row: tuple[Any, ...]) -> _Found:
        found = _Found()
        found.id, head, lines, reused, kept_until, found.waited, *result = row
        seen = self._seen.get(address)
        if seen is not None and seen[0] == head and seen[1] == lines:
            _, _, record, found.texts = seen
        else:
            found.texts = tuple(lines.splitlines())
            record = rows.bare(head, [rows.execution(address, text) for text in found.texts])
            self._keep(address, head, lines, record, found.texts)
        found.has_result = result[0] is not None
        if not all(
            type(number) is int
            for number in (reused, kept_until, *(result[2:5] if found.has_result else ()))
        ):
            raise TypeError("a number is none")
        found.record = record._replace(
            result=rows.kept(address, result) if found.has_result else None,
            reused=reused,
            kept_until=kept_until,
        )
        return found

    def _keep(
        self, address: Address, head: str, lines: str, record: Record, texts: tuple[str, ...]
    ) -> None:
        if len(self._seen) >= SEEN:
            self._seen.clear()
        if record.result is not None:
            record = record._replace(result=None)  # its data may be large
        self._seen[address] = head, lines, record, texts

    def write(
        self, connection: sqlite3.Connection, found: _Found, address: Address, after: Record
    ) -> None:
        """Write what has changed."""
        before, expires = found.record, _hour(after.kept_until)
        if (
            found.id is not None
            and found.only_reused(after)
            and expires == _hour(before.kept_until)
        ):
            connection.execute(_REUSE, (after.reused, after.kept_until, found.id))
            return
        old = {id(line): text for line, text in zip(before.lines, found.texts, strict=True)}
        texts = tuple([old.get(id(line)) or rows.line(line) for line in after.lines])
        head, lines = rows.head(after), "\n".join(texts)
        values = (head, lines, after.reused, after.kept_until, expires, *rows.times(after.lines))
        if found.id is None:
            place = rows.place(address)
            found.id = connection.execute(_INSERT, (*place, *values)).lastrowid
        else:
            connection.execute(_UPDATE, (*values, found.id))
        if after.result is None:
            if found.has_result:
                connection.execute("DELETE FROM result WHERE record = ?", (found.id,))
        elif after.result is not before.result:
            connection.execute(_PUT_RESULT, (found.id, *rows.result(after.result)))
        self._keep(address, head, lines, after, texts)


@lru_cache(maxsize=512)
def _upsert(names: tuple[str, ...]) -> str:
    adds = ", ".join(f"{name} = {name} + excluded.{name}" for name in names)
    return (
        f"INSERT INTO window (namespace, start, span, task_type, agent, {', '.join(names)}) "
        f"VALUES (?, ?, ?, ?, ?, {', '.join('?' * len(names))}) "
        f"ON CONFLICT (namespace, start, span, task_type, agent) DO UPDATE SET {adds}"
    )


def _hour(when: int) -> int:
    """The removal of what is over goes by whole hours, so that its index seldom changes."""
    return when - when % -HOUR


def _wall() -> int:
    return time.time_ns() // 1_000_000

"""How waiters learn of what other processes commit to a SQLite file.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idemguard.errors import StoreError
from idemguard.stores import rows
from idemguard.stores.notice import Silence, listen

if TYPE_CHECKING:
    from idemguard.stores.file import Connection, File
    from idemguard.stores.notice import Notice
    from idemguard.stores.room import WaitingRoom

# All in seconds. A look is one pragma that reads shared memory, and opens no transaction. Its pause
# grows with what it took, so that waiting stays near a hundredth of a core on a slow machine or a
# busy file too; but the wake-up comes first.
SHARE = 100  # times the CPU time that a look took is the pause after it
LONGEST = 0.016  # of these pauses
CREDIT = 0.1  # of pauses that are put off, where nothing was to be seen before
INTERVAL = 0.012  # between two looks where nobody tells: the median of a wake-up is half of it
# Who commits writes to the log first, which is told, and then to shared memory, which is not:
# so we look a little later, and then again after twice as long, and again
SOON = 0.001
SAFETY = 0.25  # between two looks while nothing is told
TRUST = 2  # so many changes that were not told, one after the other, and we listen no more

LAST_HINT = "SELECT hinted FROM record WHERE hinted IS NOT NULL ORDER BY hinted DESC LIMIT 1"
_SINCE = (
    "SELECT namespace, fingerprint, scope, version, hint, hinted FROM record "
    "WHERE hinted > ? ORDER BY hinted"
)


class Watch:
    """A thread that lives while somebody waits, and hints at them what others have ended.

    Args:
        room: where they wait.
        file: which they wait for.

    Attributes:
        name: marks the hints that come from here, which were given already.

    """

    def __init__(self, room: WaitingRoom, file: File) -> None:
        self.name = secrets.token_hex(8)
        self._room = room
        self._file = file
        self._lock = threading.RLock()  # a signal handler may come in between
        self._thread: threading.Thread | None = None
        self._notice: Notice = Silence()
        self._trusts = True  # that changes are told

    def start(self) -> None:
        """See everything that is committed from now on; the file's lock is held meanwhile."""
        with self._lock:
            if self._thread is not None:
                return
            reader, notice = _Reader(self._file), None
            try:
                reader.begin()
                # SQLite has the log beside the file itself, not beside a link to it
                log = Path(os.path.realpath(self._file.path) + "-wal")
                self._notice = notice = listen(log) if self._trusts else Silence()
                thread = threading.Thread(
                    target=self._look_on,
                    args=(reader, notice),
                    name=f"idemguard-watch-{self._file.path.name}",
                    daemon=True,
                )
                thread.start()
            except BaseException:
                if notice is not None:
                    notice.close()
                reader.close()
                raise
            self._thread = thread

    def stop(self) -> None:
        """Look on no more."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._notice.stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _look_on(self, reader: _Reader, notice: Notice) -> None:
        pace = _Pace()
        try:
            while not notice.stopped:
                with self._file.lock:  # nobody forks meanwhile
                    changed, hints, afresh = reader.read()
                if afresh:  # nobody has told there that somebody waits: whoever does asks again
                    for address in self._room.waiting():
                        self._room.call(address, "all")
                for *place, hint, _ in hints:
                    whom, _, name = hint.partition(" ")
                    if name != self.name:
                        self._room.call(rows.address(place), whom)
                if not self._room and self._retired(notice):
                    return
                if changed and pace.found():
                    notice = self._mistrust(notice)
                pace.wait(notice)
        finally:
            with self._lock:
                if self._notice is notice:  # whatever ended it, the next waiter starts anew
                    self._thread = None
            with self._file.lock:  # nobody forks meanwhile
                reader.close()
                notice.close()

    def _retired(self, notice: Notice) -> bool:
        with self._lock:
            if self._notice is not notice or self._thread is None:
                return True  # it was stopped at this moment
            if self._room:
                return False
            self._thread = None
            return True

    def _mistrust(self, notice: Notice) -> Notice:
        """Whom to wait with instead, as this one does not tell."""
        with self._file.lock, self._lock:
            if self._notice is not notice or self._thread is None:
                return notice  # it was stopped at this moment
            self._trusts = False
            self._notice = Silence()
            notice.close()
            return self._notice


class _Reader:
    """Reads what was committed since it read last; the file's lock is held meanwhile."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._connection: Connection | None = None
        self._opened, self._replaced = file.opened, file.replaced
        self._version = -1
        self._seen = 0

    def begin(self) -> None:
        """See what is committed from now on."""
        self._connection = self._file.connect()
        (self._seen,) = self._connection.execute(LAST_HINT).fetchone() or (0,)
        self._connection.done()

    def read(self) -> tuple[bool, list[Any], bool]:
        """Whether anything was committed, the hints among it, and whether it is another file."""
        self._file.check()
        afresh = self._replaced != self._file.replaced
        try:
            changed, hints = self._read(self._current())
        except (sqlite3.Error, StoreError):
            return False, [], afresh  # those who wait look again when the lease is over
        return changed, hints, afresh

    def _current(self) -> Connection:
        """The connection; a new one after a fork of this process, or to another file."""
        file = self._file
        if self._replaced != file.replaced:
            self._seen = 0
        if self._opened != file.opened or self._connection is None:
            self._connection, self._version = None, -1
            self._opened, self._replaced = file.opened, file.replaced
            self._connection = file.connect()
        return self._connection

    def _read(self, connection: Connection) -> tuple[bool, list[Any]]:
        try:
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if version == self._version:
                return False, []
            hints = connection.execute(_SINCE, (self._seen,)).fetchall()
        finally:
            connection.done()
        self._version = version
        if hints:
            self._seen = hints[-1][-1]
        return True, hints

    def close(self) -> None:
        """Read no more."""
        if self._connection is not None:
            self._file.disconnect(self._connection)
            self._connection = None


class _Pace:
    """When to look again: soon after a change was told, then ever more seldom."""

    def __init__(self) -> None:
        self._used = time.thread_time()
        self._due = 0.0  # when what was used is paid for
        self._pause = SOON
        self._late = False  # whether nothing was told for long
        self._misses = 0

    def found(self) -> bool:
        """A change was found; whether by now so many were not told that none will be."""
        self._pause = max(self._pause, LONGEST)  # the one that was told, most likely
        self._misses = self._misses + 1 if self._late else 0
        return self._misses >= TRUST

    def wait(self, notice: Notice) -> None:
        """Wait until it is time, or the end."""
        before, self._used = self._used, time.thread_time()
        price = SHARE * (self._used - before)
        if not notice.tells:
            notice.rest(min(max(price, INTERVAL), LONGEST))
            self._late = False
        elif self._told(notice, price):
            self._pause, self._late = SOON, False
        else:
            self._late = self._pause >= SAFETY
            self._pause = min(2 * self._pause, SAFETY)

    def _told(self, notice: Notice, price: float) -> bool:
        """Wait until it is time; whether something was told."""
        now = time.monotonic()
        owed = min(max(self._due, now - CREDIT) + price - now, LONGEST)
        self._due = now + owed
        if owed > 0:  # the file is busy: to sleep once costs less than to be told meanwhile
            notice.rest(owed)
            if notice.forget():
                return True
        if not notice.wait(self._pause):
            return False
        notice.rest(SOON)
        return notice.forget()

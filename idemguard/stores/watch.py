"""How waiters learn of what other processes commit to a SQLite file."""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from typing import TYPE_CHECKING

from idemguard.stores import rows

if TYPE_CHECKING:
    from idemguard.stores.file import File
    from idemguard.stores.room import WaitingRoom

# Seconds between two looks: the median of a wake-up is half of it. A look is one pragma that
# reads shared memory, and opens no transaction. Where it is dear, on a slow or busy machine, the
# pauses are longer, so that waiting stays near a hundredth of a core, but the wake-up comes first.
INTERVAL, LONGEST = 0.012, 0.016
SHARE = 100  # times the CPU time that a look took is the pause after it

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
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = _held()

    def start(self) -> None:
        """See everything that is committed from now on."""
        with self._lock:
            if self._thread is not None:
                return
            connection = self._file.connect()
            try:
                seen = connection.execute(LAST_HINT).fetchone() or (0,)
            except BaseException:
                connection.close()
                raise
            self._stopping = _held()
            arguments = (connection, seen[0], self._stopping)
            title = f"idemguard-watch-{self._file.path.name}"
            self._thread = threading.Thread(
                target=self._look_on, args=arguments, name=title, daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Look on no more."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._stopping.release()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _look_on(self, connection: sqlite3.Connection, seen: int, stopping: threading.Lock) -> None:
        version, pause, used = -1, INTERVAL, time.thread_time()
        try:
            # a lock and not an event, whose every wait makes a lock of its own
            while not stopping.acquire(timeout=pause):
                try:
                    with self._file.lock:  # nobody forks meanwhile
                        (now,) = connection.execute("PRAGMA data_version").fetchone()
                        hints = (
                            [] if now == version else connection.execute(_SINCE, (seen,)).fetchall()
                        )
                    version = now
                except sqlite3.Error:
                    hints = []  # those who wait look again when the lease is over
                for *place, hint, hinted in hints:
                    seen = hinted
                    whom, _, name = hint.partition(" ")
                    if name != self.name:
                        self._room.call(rows.address(place), whom)
                before, used = used, time.thread_time()
                pause = min(max(INTERVAL, SHARE * (used - before)), LONGEST)
                if not self._room and self._retired(stopping):
                    return
        finally:
            connection.close()
            with self._lock:
                if self._stopping is stopping:  # whatever ended it, the next waiter starts anew
                    self._thread = None

    def _retired(self, stopping: threading.Lock) -> bool:
        with self._lock:
            if self._stopping is not stopping or self._thread is None:
                return True  # it was stopped at this moment
            if self._room:
                return False
            self._thread = None
            return True


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock

"""How waiters learn of what other processes commit to a SQLite file."""

from __future__ import annotations

import sqlite3
import threading
import time
from typing import TYPE_CHECKING

from idemguard.stores import rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemguard.stores.room import WaitingRoom

# seconds between two looks: the median of a wake-up is half of it; a look is one pragma
# that reads shared memory, and opens no transaction
INTERVAL = 0.008
SHARE = 25  # a look that took long is followed by a pause of this many times that

_SINCE = (
    "SELECT namespace, fingerprint, scope, version, hint, hinted FROM record "
    "WHERE hinted > ? ORDER BY hinted"
)


class Watch:
    """A thread that lives while somebody waits, and hints at them what others have ended.

    Args:
        room: where they wait.
        connect: opens a connection of the watch's own.
        name: of the file, for the thread's name.

    """

    def __init__(
        self, room: WaitingRoom, connect: Callable[[], sqlite3.Connection], name: str
    ) -> None:
        self._room = room
        self._connect = connect
        self._name = f"idemguard-watch-{name}"
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._mine: set[int] = set()

    def start(self) -> None:
        """See everything that is committed from now on."""
        with self._lock:
            if self._thread is not None:
                return
            connection = self._connect()
            try:
                seen = connection.execute("SELECT max(hinted) FROM record").fetchone()[0] or 0
            except BaseException:
                connection.close()
                raise
            self._mine.clear()
            self._stopping = threading.Event()
            arguments = (connection, seen, self._stopping)
            self._thread = threading.Thread(
                target=self._look_on, args=arguments, name=self._name, daemon=True
            )
            self._thread.start()

    def own(self, hinted: int) -> None:
        """This hint is our own, and was given already."""
        if self._thread is not None:
            self._mine.add(hinted)

    def stop(self) -> None:
        """Look on no more."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopping.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _look_on(
        self, connection: sqlite3.Connection, seen: int, stopping: threading.Event
    ) -> None:
        version, pause = -1, INTERVAL
        try:
            while not stopping.wait(pause):
                started = time.perf_counter()
                try:
                    (now,) = connection.execute("PRAGMA data_version").fetchone()
                    if now != version:
                        seen = self._tell(connection, seen)
                        version = now
                except sqlite3.Error:
                    pass  # those who wait look again when the lease is over
                pause = max(INTERVAL, SHARE * (time.perf_counter() - started))
                if not self._room and self._retired(stopping):
                    return
        finally:
            connection.close()

    def _tell(self, connection: sqlite3.Connection, seen: int) -> int:
        top = connection.execute("SELECT max(hinted) FROM record").fetchone()[0] or 0
        seen = min(seen, top)  # the last hint may have been removed with its record
        for *place, whom, hinted in connection.execute(_SINCE, (seen,)).fetchall():
            seen = hinted
            if hinted in self._mine:
                self._mine.discard(hinted)
            else:
                self._room.call(rows.address(place), whom)
        return seen

    def _retired(self, stopping: threading.Event) -> bool:
        with self._lock:
            if self._room or stopping.is_set():
                return stopping.is_set()
            self._thread = None
            return True

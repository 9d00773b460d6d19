"""Who tells that a file has changed: the kernel, where it can, and otherwise nobody.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

from idemguard.forks import on_fork

if TYPE_CHECKING:
    from pathlib import Path

# of <sys/inotify.h>
_MODIFY, _MOVED, _CREATE, _DELETE = 0x2, 0x40 | 0x80, 0x100, 0x200
_QUEUE = 1 << 16  # bytes read at once; what is left is told again


class Notice(Protocol):
    """Waits for changes, in one thread, until another thread stops it.

    Attributes:
        tells: whether it knows of changes at all.
        stopped: whether it was stopped; then it waits no longer.

    """

    tells: bool
    stopped: bool

    def wait(self, seconds: float) -> bool:
        """Wait so long for a change; whether there was one."""

    def rest(self, seconds: float) -> None:
        """Wait so long, whatever changes."""

    def forget(self) -> bool:
        """Tell no more of what has changed so far; whether anything has."""

    def stop(self) -> None:
        """End all waiting."""

    def close(self) -> None:
        """Let go of what it holds; only its own thread may do so, or whoever never started one."""


def listen(path: Path) -> Notice:
    """Who tells of changes to this file, which may be removed and made anew."""
    try:
        return (_Kqueue if hasattr(select, "kqueue") else _Inotify)(path)
    except (OSError, ImportError, AttributeError):  # no libc, none of that in it, none left
        return Silence()


class Silence:
    """Nobody tells."""

    tells = False

    def __init__(self) -> None:
        self.stopped = False
        # a lock and not an event, whose every wait makes a lock of its own
        self._running = threading.Lock()
        self._running.acquire()

    def wait(self, seconds: float) -> bool:
        """Wait so long."""
        self.rest(seconds)
        return False

    def rest(self, seconds: float) -> None:
        """Wait so long."""
        if not self.stopped:
            self._running.acquire(timeout=seconds)

    def forget(self) -> bool:
        """Nothing was told."""
        return False

    def stop(self) -> None:
        """End all waiting."""
        self.stopped = True
        self._running.release()

    def close(self) -> None:
        """It holds nothing."""


class _Kernel(ABC):
    """What both kinds have in common: a pipe that ends the waiting, and descriptors to close."""

    tells = True

    def __init__(self, path: Path) -> None:
        self.stopped = False
        self._path = path
        self._bell, self._rope = os.pipe()
        self._open = {self._bell, self._rope}
        self._alone = _poll(self._bell)
        on_fork(self)
        try:
            self._listen()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _listen(self) -> None:
        """Begin to be told."""

    def rest(self, seconds: float) -> None:
        """Wait so long, whatever changes."""
        self._alone.poll(ceil(seconds * 1000))

    def stop(self) -> None:
        """End all waiting."""
        self.stopped = True
        os.write(self._rope, b"!")

    def close(self) -> None:
        """Close the descriptors."""
        while self._open:
            os.close(self._open.pop())

    def forked(self) -> None:
        """The child has copies that nobody uses; the parent's are not touched."""
        self.close()


class _Inotify(_Kernel):
    """Linux tells."""

    def _listen(self) -> None:
        self._add = _libc().inotify_add_watch
        self._queue = _checked(_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._open.add(self._queue)
        self._both = _poll(self._bell, self._queue)
        self._watch(self._path.parent, _CREATE | _DELETE | _MOVED)
        with suppress(FileNotFoundError):
            self._watch(self._path, _MODIFY)

    def _watch(self, path: Path, what: int) -> None:
        _checked(self._add(self._queue, os.fsencode(path), what))

    def wait(self, seconds: float) -> bool:
        """Wait so long for a change; whether there was one."""
        with suppress(OSError):  # it is not there; or there is no room for another one
            self._watch(self._path, _MODIFY)  # nothing new, unless it was made anew
        return bool(self._both.poll(ceil(seconds * 1000)))

    def forget(self) -> bool:
        """Tell no more of what has changed so far; whether anything has."""
        try:
            return bool(os.read(self._queue, _QUEUE))
        except BlockingIOError:
            return False


class _Kqueue(_Kernel):
    """macOS and the BSDs tell."""

    def _listen(self) -> None:
        self._kqueue = _bsd.kqueue()  # a child gets no copy of it
        self._file: int | None = None
        self._told = False  # what was told is told once, unlike by inotify
        self._register(self._bell, _bsd.KQ_FILTER_READ, _bsd.KQ_EV_ADD)
        folder = self._descriptor(self._path.parent)
        self._register_changes(folder, _bsd.KQ_NOTE_WRITE)
        self._follow()

    def _descriptor(self, path: Path) -> int:
        # of the log, which has no locks: where a file has some, closing it would drop them
        made = os.open(path, getattr(os, "O_EVTONLY", os.O_RDONLY) | os.O_CLOEXEC)
        self._open.add(made)
        return made

    def _register(self, descriptor: int, filter_: int, flags: int, notes: int = 0) -> None:
        self._kqueue.control([_bsd.kevent(descriptor, filter_, flags, notes)], 0)

    def _register_changes(self, descriptor: int, notes: int) -> None:
        flags = _bsd.KQ_EV_ADD | _bsd.KQ_EV_CLEAR
        self._register(descriptor, _bsd.KQ_FILTER_VNODE, flags, notes)

    def _follow(self) -> None:
        """Listen to the file that has this name now."""
        try:
            there = self._path.stat()
            if self._file is not None:
                if os.path.samestat(os.fstat(self._file), there):
                    return
                self._open.remove(self._file)
                os.close(self._file)
                self._file = None
            self._file = self._descriptor(self._path)
        except FileNotFoundError:
            return
        self._register_changes(
            self._file,
            _bsd.KQ_NOTE_WRITE | _bsd.KQ_NOTE_EXTEND | _bsd.KQ_NOTE_DELETE | _bsd.KQ_NOTE_RENAME,
        )

    def wait(self, seconds: float) -> bool:
        """Wait so long for a change; whether there was one."""
        with suppress(OSError):
            self._follow()
        if not self._told:
            self._told = bool(self._kqueue.control(None, 8, seconds))
        return self._told

    def forget(self) -> bool:
        """Tell no more of what has changed so far; whether anything has."""
        told, self._told = self._told, False
        return bool(self._kqueue.control(None, 8, 0)) or told

    def close(self) -> None:
        """Close the descriptors."""
        super().close()
        if hasattr(self, "_kqueue"):
            self._kqueue.close()

    def forked(self) -> None:
        """The child has copies that nobody uses, but for the queue."""
        super().close()


_bsd: Any = select  # whose names a type checker on Linux does not know


def _poll(*descriptors: int) -> select.poll:
    made = select.poll()
    for descriptor in descriptors:
        made.register(descriptor, select.POLLIN)
    return made


@cache
def _libc() -> Any:
    import ctypes  # noqa: PLC0415 - most processes never need it

    return ctypes.CDLL(None, use_errno=True)


def _checked(answer: int) -> int:
    if answer < 0:
        import ctypes  # noqa: PLC0415 - loaded already

        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return answer

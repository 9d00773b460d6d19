"""What runs in this process, told to who watches it: a test session, and a file that outlives a process.

Where nobody watches, it costs a look at one flag. A child finds out in its environment which folder
tells of the session; where that was emptied, in a file that is named after its parent. Which test is
under way stands in the folder and is read at each call: a child may outlive the test it was born in.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from idemguard.forks import on_fork

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from idemguard.guard import Ask, Reply
    from idemguard.record import Claim
    from idemguard.usage import Spent

Event: TypeAlias = "dict[str, Any]"

HOST = "pytest_idemguard.plugin"  # asked first, if it is loaded
OVERRIDE = "IDEMGUARD_NAMESPACE_OVERRIDE"
JOURNAL = "IDEMGUARD_JOURNAL"
# a namespace of a test session, and what may lie in it; compiled where one is met
TESTS = r"pytest-[0-9a-f]{10}-(?:[^%]*-(?:t\d+(?:\.\d+)?|f\d+|outside(?:\.\d+)?)|session|early|m[0-9a-f]{16})(?:%2F.*)?"
PLACE = "namespace"  # the file of a session's folder that tells in which namespace all others lie
ROOM = 128  # bytes of it; then comes a mark that somebody writes
PARENTS = 6  # generations in which a watcher is looked for
ASKED = 4096  # calls that have not begun, whose place is remembered
_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_POOLS = (f"multiprocessing{os.sep}pool.py", f"futures{os.sep}process.py")
_POOLED = ("worker", "_process_worker")  # their loops
_OWN = tuple(
    f"{Path(__file__).parent.parent / name}{os.sep}" for name in ("idemguard", "pytest_idemguard")
)


class _Kept:
    """Functions as they were at the start: tests put others in their places.

    They are no globals, where pyfakefs and freezegun look for them.
    """

    getpid, getppid = staticmethod(os.getpid), staticmethod(os.getppid)
    open, close = staticmethod(os.open), staticmethod(os.close)
    read, write, seek = staticmethod(os.read), staticmethod(os.write), staticmethod(os.lseek)
    urandom, fstat = staticmethod(os.urandom), staticmethod(os.fstat)
    dumps, time = staticmethod(json.dumps), staticmethod(time.time)


class Watch:
    """Who watches this process.

    Attributes:
        namespace: in which all namespaces of this process lie, or None.

    """

    def __init__(self) -> None:
        self.namespace: str | None = None
        self._sink: Callable[[Event], None] | None = None
        self._folder: str | None = None
        self._file: int | None = None
        self._place: str | None = None  # a file that tells the present namespace
        self._known = self._on = False
        self._asked: dict[str, str] = {}
        self._lock = threading.Lock()
        on_fork(self)

    def forked(self) -> None:
        """What a child tells its copy of a sink reaches nobody: it writes a journal of its own."""
        self._lock = threading.Lock()
        self._file, self._asked, self._known = None, {}, False
        self._sink = None

    def begin(
        self,
        sink: Callable[[Event], None] | None,
        folder: str | None,
        namespace: str | None,
        *,
        follow: bool = False,
    ) -> None:
        """Watch from now on.

        Args:
            sink: is given every event, in the thread that it happens in; must not raise.
            folder: of journals, one file per process.
            namespace: in which all others lie.
            follow: whether the folder tells it from now on.

        """
        self._sink, self._folder, self.namespace = sink, folder, namespace
        self._place = f"{folder}{os.sep}{PLACE}" if follow and folder is not None else None
        self._on = sink is not None or folder is not None
        self._known = True

    def end(self) -> None:
        """Watch no longer; who watches is looked for anew at the next call."""
        self._leave_file()
        self.namespace = self._sink = self._folder = self._place = None
        self._known = self._on = False

    def on(self) -> bool:
        """Whether anybody watches."""
        return self._on if self._known else self._look()

    def within(self) -> str | None:
        """The namespace of this process, also where nothing can be told any more; or None."""
        self.on()
        if self._place is not None and (told := _told(self._place)) is not None:
            self.namespace = told.strip() or None
        return self.namespace

    def _look(self) -> bool:
        host = sys.modules.get(HOST)
        if host is None or not host.join(self):
            folder, namespace = os.environ.get(JOURNAL), os.environ.get(OVERRIDE)
            if folder is None:
                folder = _told_by_parents()
            told = _told(f"{folder}{os.sep}{PLACE}") if folder else None
            # a namespace that the session did not give is meant for this process alone
            own = namespace and told and told.strip() and session(namespace) != session(told)
            follow = told is not None and not own
            self.begin(None, folder or None, namespace or None, follow=follow)
        return self._on

    # --- what happens ------------------------------------------------------------------------------

    def asked(self, nonce: str, body: object = None) -> None:
        """A call asks; a coroutine's body begins when its caller is no longer on the stack.

        Args:
            nonce: of the call.
            body: what it is to execute, where that is known.

        """
        if len(self._asked) >= ASKED:
            with suppress(KeyError, StopIteration, RuntimeError):  # other threads do the same
                del self._asked[next(iter(self._asked))]
        self._asked[nonce] = where(body)

    def started(self, claim: Claim, store: object) -> None:
        """An execution starts."""
        caller, address = claim.caller, claim.address
        self.emit({
            "kind": "start", "id": claim.id, **_task(claim), "cause": str(claim.cause),
            "worker": caller.worker, "parent": caller.parent, "store": _name(store),
            "thread": threading.current_thread().name, "digests": caller.digests,
            "scope": address.scope, "version": address.version,
            "where": self._asked.pop(_call(claim.nonce), None) or where(),
        })  # fmt: skip

    def stopped(
        self, claim: Claim, error: BaseException | None, spent: Spent, took: int, *, declined: bool
    ) -> None:
        """An execution has ended, or was given up."""
        name = None if error is None else type(error).__qualname__
        self._stopped(claim, name, spent, took, declined=declined)

    def settled(self, claim: Claim, outcome: str, spent: Spent) -> None:
        """A claim that was held by hand is given back."""
        error = "released" if outcome == "failed" else None
        self._stopped(claim, error, spent, None, declined=False)
        self.emit({
            "kind": "call", "id": claim.id, **_task(claim), "source": outcome, "waited": 0,
            "lost": False, "tokens": None, "cost": None,
        })  # fmt: skip

    def _stopped(
        self, claim: Claim, error: str | None, spent: Spent, took: int | None, *, declined: bool
    ) -> None:
        usage = spent.usage
        self.emit({
            "kind": "stop", "id": claim.id, **_task(claim), "took": took, "declined": declined,
            "error": error, "tokens": None if usage is None else usage.total_tokens,
            "cost": _text(spent), "responses": spent.responses,
        })  # fmt: skip

    def told(self, ask: Ask, reply: Reply) -> None:
        """A call has come to its end."""
        self._asked.pop(ask.nonce, None)
        reused = reply.source == "reused"
        usage = reply.spent.usage if reused else None
        self.emit({
            "kind": "call", "id": None if reply.claim is None else reply.claim.id,
            "ns": ask.address.namespace, "task": ask.caller.task_type,
            "fp": ask.address.fingerprint, "source": reply.source, "waited": reply.waited,
            "lost": reply.lost, "tokens": None if usage is None else usage.total_tokens,
            "cost": _text(reply.spent) if reused else None,
        })  # fmt: skip

    def emit(self, event: Event) -> None:
        """Tell those who watch; adds which process, and when."""
        event["pid"], event["at"] = _Kept.getpid(), _Kept.time()
        if self._sink is not None:
            self._sink(event)
        if self._folder is not None:
            self._put(event)

    def _put(self, event: Event) -> None:
        line = _Kept.dumps(event, separators=(",", ":"), default=str) + "\n"
        try:
            if self._file is None:
                self._begin_file()
            assert self._file is not None
            _Kept.write(self._file, line.encode())  # at once: what is killed can flush nothing
        except OSError:
            self._folder = None  # the session is over, and its folder gone
            self._on = self._sink is not None

    def _begin_file(self) -> None:
        with self._lock:
            if self._file is None:
                name = f"{self._folder}/{_Kept.getpid()}-{_Kept.urandom(4).hex()}.jsonl"
                flags = os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY
                self._file = _Kept.open(name, flags, 0o600)
                _mark(f"{self._folder}{os.sep}{PLACE}")

    def _leave_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                _Kept.close(self._file)
            self._file = None


watch = Watch()


def _task(claim: Claim) -> Event:
    address = claim.address
    return {"ns": address.namespace, "task": claim.caller.task_type, "fp": address.fingerprint}


def _name(store: object) -> str:
    path = getattr(store, "path", None)
    return type(store).__name__ if path is None else f"{type(store).__name__} {path}"


def session(namespace: str) -> str:
    """The part of a session's namespace that all of its namespaces begin with."""
    return "-".join(namespace.split("-", 2)[:2])


def of_tests(namespace: str) -> bool:
    """Whether a test session has given it."""
    return re.fullmatch(TESTS, namespace) is not None


def _told(path: str) -> str | None:
    """What stands in a small file, or None: read at each call of a child."""
    try:
        file = _Kept.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None
    try:
        return _Kept.read(file, ROOM).decode(errors="replace")
    except OSError:
        return None
    finally:
        _Kept.close(file)


def _mark(path: str) -> None:
    """Tell the session that there is a journal more; it looks for them no more often."""
    with suppress(OSError):
        file = _Kept.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            _Kept.seek(file, ROOM, os.SEEK_SET)
            _Kept.write(file, b"1")
        finally:
            _Kept.close(file)


def _call(nonce: str) -> str:
    """Of a call, without the attempt's number."""
    return nonce.partition(".")[0]


def _text(spent: Spent) -> str | None:
    return None if spent.price is None else str(spent.price)


def where(body: object = None) -> str:
    """The place in the user's code that the present call comes from.

    Args:
        body: what is called; where no code of the user's does, as in a pool of threads, it is told
            where this is.

    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no other way to tell
    outside: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN):
            outside = outside or frame
            if frame.f_code.co_name in _POOLED and file.endswith(_POOLS):
                break  # what lies above made the pool, and not this call
            library = file.startswith((_LIBRARY, "<frozen"))
            if not library and not any(part in file for part in _INSTALLED):
                return _place(frame)
        frame = frame.f_back
    # a thread or a loop that has no code of the user's below the call
    found = "?" if outside is None else _place(outside).removeprefix(_LIBRARY)
    code = getattr(body, "__code__", None)
    if code is None:
        return found
    return f"{found} ({code.co_name} is at {code.co_filename}:{code.co_firstlineno})"


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


# --- found without an environment ------------------------------------------------------------------


def _told_by_parents() -> str | None:
    """A session's folder, from a living parent of the same user that watches."""
    if not hasattr(os, "getppid") or not hasattr(os, "geteuid"):
        return None
    pid = _Kept.getppid()
    for _ in range(PARENTS):
        if pid <= 1:
            break
        told = pointer(f"/tmp/idemguard-{os.geteuid()}-{pid}")  # noqa: S108 - whose it is, is looked at
        if told is not None and told[1]:
            return told[0].decode(errors="replace").strip()
        pid = _parent_of(pid)
    return None


def pointer(path: str) -> tuple[bytes, bool] | None:
    """What stands in a file by which children find their session, and whether who wrote it lives.

    None where it is not this user's own, or no file: the folder is everybody's.
    """
    import fcntl  # noqa: PLC0415 - not on every platform

    try:
        file = _Kept.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = _Kept.fstat(file)
        ours = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
        if not ours or not stat.S_ISREG(found.st_mode):
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # held by who wrote it
            return _Kept.read(file, 4096), True
        return _Kept.read(file, 4096), False
    finally:
        _Kept.close(file)


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0

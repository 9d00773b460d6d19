"""Whose namespace counts now, and what was seen in which.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_idemguard.journals import Journals, outermost
from pytest_idemguard.kept import Kept
from pytest_idemguard.place import PLACE, Place

if TYPE_CHECKING:
    import pytest

    from pytest_idemguard.judge import Finding
    from pytest_idemguard.settings import Rules

OVERRIDE = "IDEMGUARD_NAMESPACE_OVERRIDE"  # as idemguard.journal has them
JOURNAL = "IDEMGUARD_JOURNAL"
_APPEND = os.O_CREAT | os.O_APPEND | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
FOLDER = "idemguard-"  # before the name of a run's folder


class Attempt:
    """One attempt at one test.

    Attributes:
        item: the test.
        rules: what is asked of it; what its markers say is looked at anew when something ran.
        spaces: its namespaces; the last one counts now.
        events: what happened in them.
        told: what was reported already.
        found: all that was found.
        looked: how many events there were when it was last looked at.

    """

    __slots__ = ("events", "found", "item", "looked", "rules", "spaces", "told")

    def __init__(self, item: pytest.Item, rules: Rules, space: str | None) -> None:
        self.item, self.rules = item, rules
        self.spaces: list[str] = [] if space is None else [space]
        self.events: list[dict[str, Any]] = []
        self.told: set[Any] = set()
        self.found: list[Finding] = []
        self.looked = 0


class Wide:
    """The namespace of a fixture that several tests share.

    Attributes:
        label: which fixture.
        rules: what is asked of its class, module or session.
        events: what happened in it.
        told: what was reported already.

    """

    __slots__ = ("events", "label", "rules", "told")

    def __init__(self, label: str, rules: Rules) -> None:
        self.label, self.rules = label, rules
        self.events: list[dict[str, Any]] = []
        self.told: set[Any] = set()


class Spaces:
    """The namespaces of one process of a test run.

    Args:
        worker: name of the process.
        shared: folder and id of the run, from the controller, or None.
        is_worker: whether there is a controller.
        outside: whether what happens outside of tests is watched.

    Attributes:
        folder: of what the run's processes write.
        uid: of the run.
        prefix: of all its namespaces.
        current: the attempt that is under way.
        begun: the test of each attempt, in their order.
        wide: fixtures that several tests share, by namespace.
        news: those in which something has happened since.
        late: events of nobody, or of a test that is over.
        seen: whether there was a guarded call.

    """

    pointing: ClassVar[bool] = False  # whether this process has a file that points to it

    def __init__(
        self, worker: str, shared: dict[str, str] | None, *, is_worker: bool, outside: bool = True
    ) -> None:
        self.worker, self.is_worker = folder_of(worker), is_worker
        if shared is not None and Path(shared["folder"]).is_dir():
            self.folder, self._owned = shared["folder"], None
        else:  # of this run, or on another machine
            self._owned = Path(tempfile.gettempdir())  # tests may put another in its place
            self.folder = tempfile.mkdtemp(prefix=FOLDER, dir=self._owned)
        self.uid: str = os.urandom(5).hex() if shared is None else shared["uid"]
        self.prefix = f"pytest-{self.uid}-"
        self._outer = f"{self.prefix}{self.worker}-outside" if outside else None
        self._mine = f"{self.folder}/{self.worker}"
        self._tests = f"{self.prefix}{self.worker}-t"  # before a test's number
        Path(self._mine).mkdir()
        self.current: Attempt | None = None
        self.begun: list[pytest.Item] = []
        self._numbers: list[int] = []  # of those attempts, as far as they were counted
        self._times: dict[str, int] = {}  # attempts at a test, as far
        self._counting = threading.Lock()
        self.wide: dict[str, Wide] = {}
        self.news: list[Wide] = []
        self.late: list[dict[str, Any]] = []
        self.seen = False
        self._pid = Kept.getpid()
        self._watches: list[Any] = []  # one, but where idemguard was imported anew
        self._before = {name: os.environ.get(name) for name in (OVERRIDE, JOURNAL)}
        self._pointer = self._point()
        self.space: str | None = None
        self._begin()

    # --- namespaces --------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._tell_children(self._mine)
        watch = getattr(sys.modules.get("idemguard.journal"), "watch", None)
        if watch is not None:
            self.join(watch)
        self.enter(self._outer)

    def _tell_children(self, folder: str) -> None:
        """Name a folder to them that holds what they write, and the present namespace."""
        os.environ[JOURNAL] = folder
        self._place = Place(folder)
        self.journals = Journals(folder, self._place)

    def forked(self) -> None:
        """In a forked child tests are run, as some plugins do: it is told here what happens in it."""
        self._pid, self._counting = Kept.getpid(), threading.Lock()
        self.worker = (
            f"{self.worker}~{self._pid}"  # the parent goes on counting from the same number
        )
        self._tests = f"{self.prefix}{self.worker}-t"
        # its own children follow it, and not its parent
        self._mine = f"{self._mine}/{self._pid}"
        Path(self._mine).mkdir()
        self._tell_children(self._mine)
        for watch in list(self._watches):
            self.join(watch)

    def is_fork(self) -> bool:
        """Whether this is a forked child of the process that it was made in."""
        return Kept.getpid() != self._pid

    def is_whole(self) -> bool:
        """Whether what children have written is still there."""
        return Path(self._mine, PLACE).exists()

    def join(self, watch: Any) -> bool:
        """idemguard is in use; in a forked child, what it tells its copy of this reaches nobody."""
        if self.is_fork():
            watch.begin(None, self._mine, self.space, follow=True)
            return True
        if watch not in self._watches:
            self._watches.append(watch)
        if self.space is not None:
            os.environ[OVERRIDE] = self.space
        # what a worker saw must outlive its crash
        watch.begin(self.on_event, self._mine if self.is_worker else None, self.space)
        return True

    def enter(self, space: str | None) -> str | None:
        """Have all namespaces lie in this one from now on; the one before is returned."""
        before, self.space = self.space, space
        self._place.tell(space)
        if space is None:
            os.environ.pop(OVERRIDE, None)
        elif before is None or "idemguard" in sys.modules:
            # for children that cannot read what the place tells; where this process has no guarded
            # functions, that they are of this session is enough
            os.environ[OVERRIDE] = space
        for watch in self._watches:
            watch.namespace = space
        return before

    def leave(self) -> None:
        """What hooks do between two tests is no test's, and not one for all times between two."""
        if self._watches:
            self.enter(None if self._outer is None else f"{self._outer}.{len(self.begun)}")

    def _point(self) -> int | None:
        """A file by which children find this session whose environment was emptied."""
        if not hasattr(os, "geteuid"):
            return None
        import fcntl

        path = f"/tmp/idemguard-{os.geteuid()}-{self._pid}"  # noqa: S108 - made anew, and ours alone
        if Spaces.pointing:
            return None  # a session inside another one, in one process
        try:
            Path(path).unlink(missing_ok=True)  # of an earlier process of this number
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(path, flags, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as this process lives
            os.write(file, self._mine.encode())
        except OSError:
            return None
        self._path, Spaces.pointing = path, True
        return file

    def sweep(self) -> None:
        """Remove what processes of this run that crashed have left, and runs that were killed."""
        if self._pointer is None:
            return
        from idemguard.journal import pointer

        mine = f"{self.folder}/".encode()
        for path in Path("/tmp").glob(f"idemguard-{os.geteuid()}-*"):  # noqa: S108 - as above
            told = None if str(path) == self._path else pointer(str(path))
            if told is None or (told[1] and not told[0].startswith(mine)):
                continue  # a run that goes on
            with suppress(OSError):
                path.unlink()
            if not told[1] and not told[0].startswith(mine):
                _remove(Path(os.fsdecode(told[0])).parent, Path(tempfile.gettempdir()))

    def close(self) -> None:
        """Watch no longer, and remove what was written."""
        for watch in self._watches:
            watch.end()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.seen and not self.is_worker:
            self.sweep()
        if self._pointer is not None:
            Spaces.pointing = False
            os.close(self._pointer)
            with suppress(OSError):
                Path(self._path).unlink()
        self._place.close()
        if self._owned is not None:
            _remove(Path(self.folder), self._owned)

    # --- what happens ------------------------------------------------------------------------------

    def on_event(self, event: dict[str, Any]) -> None:
        """Something happened, here or in a child; called from any thread."""
        space = outermost(event["ns"])
        if not space.startswith(self.prefix):
            return  # a test that is not watched
        self.seen = True
        current = self.current
        if current is not None and space in current.spaces:
            if not current.events and self.is_worker:
                self._name(current, event["at"])
            current.events.append(event)
        elif (wide := self.wide.get(space)) is not None:
            event["test"] = None if current is None else current.item.nodeid
            wide.events.append(event)
            self.news.append(wide)
        else:
            self.late.append(event)

    def _name(self, attempt: Attempt, at: float) -> None:
        """Should this worker crash, the controller has to know whose namespaces these are."""
        line = {"kind": "test", "ns": attempt.spaces[0], "nodeid": attempt.item.nodeid,
                "attempt": self.number(), "at": at, "rules": attempt.rules._asdict()}  # fmt: skip
        with suppress(OSError):
            file = Kept.open(f"{self._mine}/{self._pid}-tests.jsonl", _APPEND, 0o600)
            try:
                Kept.write(file, Kept.dumps(line, default=str).encode() + b"\n")
            finally:
                Kept.close(file)

    def adopt(self, events: list[dict[str, Any]]) -> None:
        """What happened in this process before there was a session."""
        self.seen = self.seen or bool(events)
        self.late += events

    def drain(self) -> None:
        """Read what children have written."""
        if not self.journals.quiet():
            for event in self.journals.news():
                self.on_event(event)

    def number(self, attempt: int = -1) -> int:
        """Which attempt at its test this is, from 1: the present one, or the one of that place in `begun`."""
        with self._counting:
            for item in self.begun[len(self._numbers) :]:
                times = self._times[item.nodeid] = self._times.get(item.nodeid, 0) + 1
                self._numbers.append(times)
            return self._numbers[attempt]

    def owner(self, space: str) -> tuple[str, int, bool] | None:
        """The test that a namespace is of, which attempt at it, and whether that is the last."""
        number = space.removeprefix(self._tests).partition(".")[0]
        if not space.startswith(self._tests) or not number.isdecimal():
            return None
        if int(number) >= len(self.begun):  # somebody has made it up
            return None
        nodeid, times = self.begun[int(number)].nodeid, self.number(int(number))
        return nodeid, times, times == self._times[nodeid]

    def space_of(self, item: pytest.Item, scope: str) -> str:
        """The namespace of the attempt that began last."""
        if scope == "session":
            return f"{self.prefix}session"
        if scope == "module":
            return self._module(item.nodeid)
        return f"{self._tests}{len(self.begun) - 1}"

    def space_for(self, label: str, scope: str, nodeid: str, rules: Rules) -> str | None:
        """The namespace of a fixture that several tests share; None: it is not watched.

        Args:
            label: as people are shown it.
            scope: of the fixture.
            nodeid: of its class, module or session.
            rules: what is asked of that.

        """
        if rules.mode == "off":
            return None
        if rules.scope == "session":
            return f"{self.prefix}session"
        if rules.scope == "module" and scope in ("class", "module"):
            return self._module(nodeid)
        space = f"{self.prefix}{self.worker}-f{len(self.wide)}"
        self.wide[space] = Wide(label, rules)
        return space

    def again(self, attempt: Attempt) -> None:
        """A namespace more for a test: nothing that ran before is in it."""
        first = f"{self._tests}{len(self.begun) - 1}"
        attempt.spaces.append(f"{first}.{len(attempt.spaces)}")
        self.enter(attempt.spaces[-1])

    def _module(self, nodeid: str) -> str:
        import hashlib

        name = os.fsencode(nodeid.partition("::")[0])
        return f"{self.prefix}m{hashlib.sha256(name).hexdigest()[:16]}"


def folder_of(worker: str) -> str:
    """The name of a process of a test run, as it may stand in paths and namespaces."""
    return worker if worker.isalnum() else re.sub(r"[^\w.-]", "_", worker)


def _remove(folder: Path, parent: Path) -> None:
    """Remove a run's folder; nothing else is."""
    import shutil

    if folder.name.startswith(FOLDER) and folder.parent == parent:
        shutil.rmtree(folder, ignore_errors=True)

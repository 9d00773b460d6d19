"""How a process learns of what others commit to a SQLite file: it is told, or looks by itself."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import select
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from idemguard.claim import Begin, Complete, InFlight, Release
from idemguard.codec import Value
from idemguard.record import Address, Caller
from idemguard.stores import notice, watch
from idemguard.stores.notice import Silence, listen
from idemguard.stores.sqlite import SqliteStore

LONG = 30.0  # seconds for what must come
LINUX = sys.platform == "linux"
CALLER = Caller("summarise", "w-1")
VALUE = Value("json", b"1")
numbers = iter(range(10**9))
told_only = pytest.mark.skipif(not LINUX, reason="what Linux tells, and its /proc")


def begin(name=0) -> Begin:
    address = Address("default", f"{name:064x}")
    return Begin(address, f"n{next(numbers)}", CALLER, 900_000)


def execute(store, name):
    claim = store.perform(begin(name)).claim
    assert store.perform(Complete(claim, VALUE, 900_000, 30_000)).kept


class Bell(threading.Event):
    def __call__(self):
        self.set()


class Kqueue:
    """What the BSDs have, as far as it is used here, by looking at the files all the time."""

    def __init__(self) -> None:
        self._files: dict[int, tuple] = {}
        self._pipes: set[int] = set()

    def control(self, changes, most, timeout=None):
        for descriptor, kind, flags, notes in changes or ():
            assert flags & FakeSelect.KQ_EV_ADD
            if kind == FakeSelect.KQ_FILTER_READ:
                self._pipes.add(descriptor)
            else:
                assert notes & FakeSelect.KQ_NOTE_WRITE
                self._files[descriptor] = self._state(descriptor)
        end = time.monotonic() + (timeout or 0)
        while most:
            if events := self._events():
                return events[:most]
            if time.monotonic() >= end:
                break
            time.sleep(0.001)
        return []

    def _events(self):
        events = select.select(self._pipes, [], [], 0)[0]
        for descriptor, before in list(self._files.items()):
            try:
                now = self._state(descriptor)
            except OSError:  # closed: it is no longer registered
                del self._files[descriptor]
                continue
            if now != before:
                events.append(descriptor)
                self._files[descriptor] = now
        return events

    @staticmethod
    def _state(descriptor):
        found = os.fstat(descriptor)
        return found.st_ino, found.st_mtime_ns, found.st_size, found.st_nlink

    def close(self):
        self._files.clear()


class FakeSelect:
    kqueue = Kqueue
    KQ_FILTER_READ, KQ_FILTER_VNODE, KQ_EV_ADD, KQ_EV_CLEAR = 1, 2, 1, 2
    KQ_NOTE_WRITE, KQ_NOTE_EXTEND, KQ_NOTE_DELETE, KQ_NOTE_RENAME = 1, 2, 4, 8

    @staticmethod
    def kevent(*fields):
        return fields


def as_on_bsd(monkeypatch):
    fake = SimpleNamespace(kqueue=Kqueue, poll=select.poll, POLLIN=select.POLLIN)
    monkeypatch.setattr(notice, "_bsd", FakeSelect)
    monkeypatch.setattr(notice, "select", fake)


def deaf(monkeypatch):
    """A file system that lets itself be listened to, and tells nothing."""

    class Deaf(Silence):
        tells = True

    monkeypatch.setattr(watch, "listen", lambda _: Deaf())


def refusing(name, code):
    """A libc in which one function fails."""
    real = ctypes.CDLL(None, use_errno=True)

    def fail(*_):
        ctypes.set_errno(code)
        return -1

    names = ("inotify_init1", "inotify_add_watch")
    return SimpleNamespace(
        **{each: fail if each == name else getattr(real, each) for each in names}
    )


def without_libc(monkeypatch):
    def none():
        raise OSError("no libc")

    monkeypatch.setattr(notice, "_libc", none)


WAYS = {
    "told": lambda _: None,
    "kqueue": as_on_bsd,
    "polling": lambda patch: patch.setattr(watch, "listen", lambda _: Silence()),
    "deaf": deaf,
    "no libc": without_libc,
    "libc without inotify": lambda p: p.setattr(notice, "_libc", SimpleNamespace),
    "no ctypes": lambda p: p.setattr(notice, "_libc", lambda: __import__("no_such_module")),
    "no instance left": lambda p: p.setattr(
        notice, "_libc", lambda: refusing("inotify_init1", errno.EMFILE)
    ),
    "no watch left": lambda p: p.setattr(
        notice, "_libc", lambda: refusing("inotify_add_watch", errno.ENOSPC)
    ),
}
TELLING = {"told", "kqueue", "deaf"}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Every way of learning of a change, and every reason for which the kernel tells nothing."""
    if request.param not in {"kqueue", "polling", "deaf"} and not LINUX:
        pytest.skip("inotify is Linux's")
    WAYS[request.param](monkeypatch)
    return request.param


@pytest.fixture(params=["told", "kqueue"])
def telling(request, monkeypatch):
    """Those ways in which something is told."""
    if request.param == "told" and not LINUX:
        pytest.skip("inotify is Linux's")
    WAYS[request.param](monkeypatch)
    return request.param


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def pair(path):
    """Two stores of one file, which know of each other by it alone."""
    made = SqliteStore(path), SqliteStore(path)
    yield made
    for store in made:
        store.close()


# --- who waits for an end is woken -------------------------------------------------------------------


def test_an_end_wakes_in_every_way(pair, way):
    here, there = pair
    for name in range(4):
        claim, bell = there.perform(begin(name)).claim, Bell()
        here.park(claim.address, claim.id, bell)
        if name == 0:
            assert here._watch._notice.tells is (way in TELLING)
        there.perform(Release(claim))
        assert bell.wait(LONG)


@pytest.mark.parametrize("way", ["told", "polling"], indirect=True)
def test_many_waiters_have_one_thread_and_are_all_woken(pair, way):
    here, there = pair
    claims = [there.perform(begin(name)).claim for name in range(100)]
    bells = [Bell() for _ in claims]
    for claim, bell in zip(claims, bells, strict=True):
        here.park(claim.address, claim.id, bell)
    title = f"idemguard-watch-{here.path.name}"
    assert [thread.name for thread in threading.enumerate()].count(title) == 1
    for claim in claims:
        there.perform(Release(claim))
    assert all(bell.wait(LONG) for bell in bells)


def test_a_link_to_the_file_is_as_good_as_the_file(pair, tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(watch, "listen", lambda log: heard.append(log) or listen(log))
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(pair[1].path)
    claim, bell = pair[1].perform(begin()).claim, Bell()
    here = SqliteStore(link)
    here.park(claim.address, claim.id, bell)
    pair[1].perform(Release(claim))
    assert bell.wait(LONG)
    here.close()
    assert heard == [Path(f"{os.path.realpath(pair[1].path)}-wal")]


def test_who_tells_nothing_is_soon_listened_to_no_more(pair, monkeypatch, until):
    deaf(monkeypatch)
    here, there = pair
    claim = there.perform(begin()).claim
    bell = Bell()
    here.park(claim.address, claim.id, bell)
    first = here._watch._notice

    def polls():
        execute(there, next(numbers) + 1000)
        return not here._watch._notice.tells

    assert first.tells
    until(polls)
    there.perform(Release(claim))
    assert bell.wait(LONG)
    here._watch.stop()
    again = there.perform(begin()).claim
    here.park(again.address, again.id, Bell())
    assert not here._watch._notice.tells  # nor by the next thread


def test_the_log_is_replaced_while_somebody_waits(pair, way):
    # by another file, and that by the first one, which the watch still has open
    here, there = pair
    claim, bell = there.perform(begin()).claim, Bell()
    here.park(claim.address, claim.id, bell)
    there.close()
    here._file.close()
    log = Path(f"{here.path}-wal")
    before = log.stat().st_ino
    log.rename(log.with_name("kept"))
    log.write_bytes(log.with_name("kept").read_bytes())
    log.with_name("kept").replace(log)
    assert log.stat().st_ino == before
    there.perform(Release(claim))
    assert bell.wait(LONG)


# --- what is told of a file --------------------------------------------------------------------------


def told(heard) -> bool:
    """Whether something is told, which is then forgotten."""
    answer = heard.wait(LONG)
    heard.forget()
    return answer


def test_a_file_is_followed_through_deletion_and_replacement(telling, tmp_path):
    file, other = tmp_path / "log", tmp_path / "other"
    file.write_bytes(b"1")
    heard = listen(file)
    assert heard.tells
    assert not heard.wait(0)

    def write():
        with file.open("ab") as open_file:
            open_file.write(b"more")

    def replace():
        other.write_bytes(b"longer than the other one")
        other.replace(file)

    for act in (write, write, file.unlink, file.touch, write, replace, write):
        act()
        assert told(heard), act
        while heard.wait(0):  # listens to the file that is there now
            heard.forget()
    heard.close()


def test_a_file_that_is_not_there_yet(telling, tmp_path):
    heard = listen(tmp_path / "log")
    assert heard.tells
    (tmp_path / "log").write_bytes(b"1")
    assert told(heard)
    heard.close()


def test_a_folder_that_is_not_there(telling, tmp_path):
    assert not listen(tmp_path / "none" / "log").tells


def test_what_was_told_is_told_until_it_is_forgotten(telling, tmp_path):
    heard = listen(tmp_path / "log")
    (tmp_path / "log").write_bytes(b"1")
    assert heard.wait(LONG)
    assert heard.wait(LONG)
    assert heard.forget()
    assert not heard.forget()
    heard.close()


def test_who_was_stopped_waits_no_longer(way, tmp_path):
    heard = watch.listen(tmp_path / "log")
    thread = threading.Thread(target=heard.wait, args=(10 * LONG,))
    thread.start()
    heard.stop()
    thread.join(LONG)
    assert not thread.is_alive()
    heard.rest(10 * LONG)
    heard.wait(10 * LONG)
    assert heard.stopped
    heard.close()
    heard.close()


# --- what waiting costs ------------------------------------------------------------------------------


def counted(store, monkeypatch):
    """The looks at the file, from now on."""
    looks, connect = [], store._file.connect

    def traced():
        connection = connect()
        connection.set_trace_callback(lambda text: "data_version" in text and looks.append(text))
        return connection

    monkeypatch.setattr(store._file, "connect", traced)
    return looks


@told_only
def test_hardly_a_look_while_nothing_happens(pair, monkeypatch):
    here, there = pair
    claim = there.perform(begin()).claim
    here.look(claim.address)
    looks = counted(here, monkeypatch)
    here.park(claim.address, claim.id, Bell())
    threading.Event().wait(1.0)
    assert 0 < len(looks) < 30  # a poll has 80, a spin thousands


def test_no_look_after_a_look_in_a_burst(pair, way, monkeypatch):
    here, there = pair
    claim, bell = there.perform(begin()).claim, Bell()
    here.look(claim.address)
    looks = counted(here, monkeypatch)
    here.park(claim.address, claim.id, bell)
    started = time.monotonic()
    for name in range(1, 200):
        execute(there, name)
    there.perform(Release(claim))
    assert bell.wait(LONG)
    assert len(looks) < 20 + 1000 * (time.monotonic() - started)  # each rests for 1 ms at least


def test_no_transaction_is_open_while_somebody_waits(pair, way):
    here, there = pair
    claim, bell = there.perform(begin()).claim, Bell()
    here.park(claim.address, claim.id, bell)
    beside = sqlite3.connect(here.path, isolation_level=None, timeout=LONG)
    for name in range(1, 20):
        execute(there, name)
        busy, log, done = beside.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert (busy, log) == (0, done)
    beside.close()
    there.perform(Release(claim))
    assert bell.wait(LONG)


# --- its end -----------------------------------------------------------------------------------------


def descriptors(store) -> int:
    """How many of them are open that this store can have opened.

    SQLite keeps one of a closed connection for the next. Sockets are other tests', whose
    threads may still open and close them.
    """
    store._file.connect().close()
    gc.collect()
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(entry.readlink()))
    mine = ("pipe:", "anon_inode:inotify", str(store.path))
    return sum(link.startswith(mine) for link in links)


@told_only
def test_no_descriptor_is_left(pair, way):
    here, there = pair
    claims = [there.perform(begin(name)).claim for name in range(20)]
    here.park(claims[0].address, claims[0].id, Bell())
    thread = here._watch._thread
    here._watch.stop()
    thread.join(LONG)
    before = descriptors(here)
    for claim in claims:
        bell = Bell()
        unpark = here.park(claim.address, claim.id, bell)
        thread = here._watch._thread
        if claim.address.fingerprint.endswith(("0", "2", "4")):
            here._watch.stop()
        elif claim.address.fingerprint.endswith("1"):
            unpark()
        else:
            there.perform(Release(claim))
            assert bell.wait(LONG)
        here._watch.stop()
        thread.join(LONG)
        assert not thread.is_alive()
    assert descriptors(here) == before


@told_only
def test_no_descriptor_is_left_where_no_thread_can_be_started(pair, way, monkeypatch):
    here, there = pair
    claim = there.perform(begin()).claim
    unpark = here.park(claim.address, claim.id, Bell())
    thread = here._watch._thread
    here._watch.stop()
    unpark()
    thread.join(LONG)
    before = descriptors(here)

    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            here.park(claim.address, claim.id, Bell())
    assert descriptors(here) == before
    bell = Bell()
    here.park(claim.address, claim.id, bell)  # the next one starts anew
    there.perform(Release(claim))
    assert bell.wait(LONG)


def test_close_ends_the_watch_and_lets_those_who_wait_ask_again(pair, way):
    here, there = pair
    claim, bell = there.perform(begin()).claim, Bell()
    here.park(claim.address, claim.id, bell)
    thread = here._watch._thread
    here.close()
    assert bell.is_set()
    assert not thread.is_alive()
    assert isinstance(here.perform(begin()), InFlight)


FORK = """
import os, sys, threading
from idemguard.claim import Begin, Release
from idemguard.record import Address, Caller
from idemguard.stores.sqlite import SqliteStore

def told():
    links = [os.readlink(f"/proc/self/fd/{name}") for name in NAMES]
    return sum("inotify" in link or "pipe" in link for link in links)

class Names:
    def __iter__(self):
        for name in os.listdir("/proc/self/fd"):
            if os.path.lexists(f"/proc/self/fd/{name}"):
                yield name
NAMES = Names()

store = SqliteStore(sys.argv[1])
address = Address("default", "0" * 64)
claim = store.perform(Begin(address, "n", Caller("t", "w"), 900_000)).claim
before = told()
bell = threading.Event()
store.park(address, claim.id, bell.set)
assert told() == before + 3
reads, writes = os.pipe()
child = os.fork()
if child == 0:
    assert told() == before + 2  # that pipe; the parent's are closed
    bell = threading.Event()
    store.park(address, claim.id, bell.set)
    assert told() == before + 5
    thread = store._watch._thread
    os.write(writes, b"!")
    assert bell.wait(30)
    thread.join(30)
    assert told() == before + 2
    os._exit(0)
os.read(reads, 1)
assert not bell.is_set() and store._watch._thread.is_alive()
other = SqliteStore(sys.argv[1])
other.perform(Release(claim))
assert bell.wait(30)  # the child has taken nothing from its parent
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@told_only
def test_a_child_closes_what_is_its_parents_and_opens_its_own(path):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG * 2, check=False)
    assert done.returncode == 0, done.stderr


LIGHT = """
import sys, threading
before = "ctypes" in sys.modules
from idemguard.claim import Begin
from idemguard.record import Address, Caller
from idemguard.stores.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
address = Address("default", "0" * 64)
claim = store.perform(Begin(address, "n", Caller("t", "w"), 900_000)).claim
assert before or "ctypes" not in sys.modules
store.park(address, claim.id, print)
assert "ctypes" in sys.modules
"""


@told_only
def test_ctypes_is_loaded_by_the_first_waiter(path):
    subprocess.run([sys.executable, "-c", LIGHT, str(path)], check=True, timeout=LONG * 2)

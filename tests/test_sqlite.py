"""The SQLite store on real files: how they are made, shared, locked, damaged, full and forked."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest

from idemguard import claim as claims
from idemguard.claim import Begin, Claimed, Complete, Forget, InFlight, Release, Replay
from idemguard.codec import Value
from idemguard.errors import ConfigurationError, StoreError, StoreUnavailableError
from idemguard.record import Address, Caller, Cause, Mode
from idemguard.stores import bridge, file, open_store, rows
from idemguard.stores.file import APPLICATION
from idemguard.stores.memory import MemoryStore
from idemguard.stores.room import Waiter, WaitingRoom
from idemguard.stores.sqlite import BRIEF, SqliteStore

LONG = 30.0  # seconds for what must come
CALLER = Caller("summarise", "w-1")
LEASE, TTL = 30_000, 900_000
VALUE = Value("json", b'{"idemguard":1,"value":1}\n')
numbers = iter(range(10**9))


def address(name=0) -> Address:
    return Address("default", f"{name:064x}")


def begin(name=0, nonce=None, **more) -> Begin:
    return Begin(address(name), nonce or f"n{next(numbers)}", CALLER, LEASE, **more)


def execute(store, name=0, value=VALUE):
    claimed = store.perform(begin(name))
    assert isinstance(claimed, Claimed)
    assert store.perform(Complete(claimed.claim, value, TTL, LEASE)).kept
    return claimed.claim


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def own(path):
    store = SqliteStore(path)
    yield store
    store.close()


@pytest.fixture
def beside(path, own):
    """A connection of somebody else to the store's file."""
    own.look(address())
    connection = sqlite3.connect(path, isolation_level=None, timeout=0)
    yield connection
    connection.close()


PRELUDE = """
import json, os, signal, sqlite3, sys, threading, time
from pathlib import Path
from idemguard.claim import *
from idemguard.codec import Value
from idemguard.errors import *
from idemguard.record import *
from idemguard.stores.sqlite import SqliteStore
CALLER = Caller("summarise", "w-1")
VALUE = Value("json", b"1")
def begin(name, nonce):
    return Begin(Address("default", f"{name:064x}"), nonce, CALLER, 30_000)
def execute(store, name, nonce="n"):
    claim = store.perform(begin(name, nonce)).claim
    assert store.perform(Complete(claim, VALUE, 900_000, 30_000)).kept
def taken(lock):
    free = []
    def look():
        free.append(lock.acquire(blocking=False))
        if free[0]:
            lock.release()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return not free[0]
path = Path(sys.argv[1])
"""


def script(body: str) -> list[str]:
    return [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        PRELUDE + textwrap.dedent(body),
    ]


def run(body: str, *args) -> str:
    """What a script prints that runs in a process of its own."""
    done = subprocess.run(
        [*script(body), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=2 * LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the file ------------------------------------------------------------------------------------------


def test_the_file_is_in_wal_mode_and_marked_as_ours(own, beside):
    ours = own._file.connection
    assert ours.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert ours.execute("PRAGMA synchronous").fetchone() == (1,)
    assert ours.execute("PRAGMA busy_timeout").fetchone()[0] > 0
    assert beside.execute("PRAGMA application_id").fetchone() == (APPLICATION,)
    assert beside.execute("PRAGMA user_version").fetchone() == (rows.SCHEMA,)
    assert not ours.in_transaction


def test_nothing_is_opened_before_the_first_use(path):
    store = SqliteStore(path)
    assert not path.exists()
    store.close()
    assert not path.exists()
    store.look(address())
    assert path.exists()
    store.close()


def test_the_view_tells_people_what_was_executed(own, beside):
    claim = execute(own)
    own.perform(begin(1))
    found = beside.execute(
        "SELECT fingerprint, task_type, cause, status, worker, started FROM execution ORDER BY 1"
    ).fetchall()
    assert found[0] == (claim.address.fingerprint, "summarise", "first", "ok", "w-1", claim.started)
    assert found[1][3] == "open"


@pytest.mark.parametrize("name", [".idemguard", "else"])
def test_only_its_own_folder_ignores_itself_in_git(tmp_path, name):
    store = SqliteStore(tmp_path / name / "sub.db")
    execute(store)
    store.close()
    ignore = tmp_path / name / ".gitignore"
    assert (ignore.read_text() if ignore.exists() else None) == {".idemguard": "*\n"}.get(name)


def test_an_ignore_file_that_is_there_is_left_alone(tmp_path):
    (tmp_path / ".idemguard").mkdir()
    (tmp_path / ".idemguard/.gitignore").write_text("!kept\n")
    store = SqliteStore(tmp_path / ".idemguard/a.db")
    execute(store)
    store.close()
    assert (tmp_path / ".idemguard/.gitignore").read_text() == "!kept\n"


CREATE = """
    for line in sys.stdin:
        store = SqliteStore(path / line.strip() / ".idemguard" / "new.db")
        answer = store.perform(begin(0, f"n{os.getpid()}"))
        told = [isinstance(answer, Claimed), store.secret("default").hex()]
        store.close()
        print(json.dumps(told), flush=True)
"""


def test_many_processes_make_one_file_at_the_same_moment(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([*script(CREATE), str(tmp_path)], **pipes) for _ in range(8)]
    for number in range(10):
        for worker in workers:
            worker.stdin.write(f"round-{number}\n")
            worker.stdin.flush()
        told = [json.loads(worker.stdout.readline()) for worker in workers]
        assert sum(claimed for claimed, _ in told) == 1
        assert len({secret for _, secret in told}) == 1
    for worker in workers:
        with worker:
            worker.stdin.close()


# --- files that will not do --------------------------------------------------------------------------------


def refused(path, error=StoreError, *words):
    """A store cannot work on this path, and says so in a sentence that names it."""
    with pytest.raises(error) as caught:
        execute(SqliteStore(path))
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_newer_schema_is_left_alone(path, own, beside):
    execute(own)
    own.close()
    beside.execute(f"PRAGMA user_version = {rows.SCHEMA + 1}")
    refused(path, StoreError, "newer idemguard", "upgrade", "store=")
    assert beside.execute("SELECT count(*) FROM record").fetchone() == (1,)


def test_no_database(path):
    path.write_bytes(b"# a text\n" * 200)
    refused(path, StoreError, "not a database", "store=")
    assert path.read_bytes() == b"# a text\n" * 200


@pytest.mark.parametrize("mark", ["application_id", "user_version", None])
def test_a_database_of_another_application_is_left_as_it_is(path, mark):
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE mine (a)" if mark is None else f"PRAGMA {mark} = 77")
    other.commit()
    other.close()
    before = path.read_bytes()
    refused(path, StoreError, "another application", "store=")
    assert path.read_bytes() == before
    assert not Path(f"{path}-wal").exists()


def test_an_empty_file_is_as_good_as_none(path):
    path.touch()
    store = SqliteStore(path)
    execute(store)
    store.close()


def test_a_folder(tmp_path):
    refused(tmp_path, ConfigurationError, "folder")


def test_a_folder_in_the_place_of_the_file_later_on(path):
    store = SqliteStore(path)
    path.mkdir()
    with pytest.raises(StoreError, match=re.escape(str(path))):
        execute(store)


def test_a_nul_in_the_path(tmp_path):
    with pytest.raises(ConfigurationError, match="NUL"):
        SqliteStore(f"{tmp_path}/a\0b.db")


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "a.db", ConfigurationError, "no folder")
    refused(tmp_path / "file" / "sub" / "a.db", ConfigurationError, "no folder")


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://a.db",
        "sqlite:///",
        "sqlite:////",
        "sqlite:///a/",
        "sqlite:///:memory:",
        "sqlite:a",
    ],
)
def test_a_url_that_names_no_file(url):
    with pytest.raises(ConfigurationError, match=r"sqlite:///|memory://"):
        open_store(url)


def test_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("sqlite:///sub/a.db").path == tmp_path / "sub/a.db"
    assert open_store(f"sqlite:///{tmp_path}/b.db").path == tmp_path / "b.db"


AS_NOBODY = """
    store = SqliteStore(path)
    if os.getuid() == 0:  # who may write everywhere
        os.setgid(65534), os.setuid(65534)
    try:
        execute(store, 1)
    except StoreError as error:
        print(error)
"""


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_cannot_be_written_to(what):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # every parent can be read by everybody
    try:
        folder.chmod(0o755)
        path = folder / "store.db"
        if what == "file":
            store = SqliteStore(path)
            execute(store)
            store.close()
            path.chmod(0o444)
        else:
            folder.chmod(0o555)
        message = run(AS_NOBODY, path)
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
    assert str(path) in message
    assert "written to" in message


def test_a_folder_that_cannot_be_made():
    refused(Path("/proc/none/store.db"))


FULL = """
    import resource
    store = SqliteStore(path)
    execute(store, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name(path.name + "-wal").stat().st_size + 30_000, -1))
    big = Value("json", b"x" * 50_000)
    claim = store.perform(begin(1, "n")).claim
    try:
        store.perform(Complete(claim, big, 900_000, 30_000))
    except StoreError as error:
        print(error)
    assert not store._file.connection.in_transaction
    assert store.look(Address("default", f"{0:064x}"))[0].result is not None
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    assert isinstance(store.perform(begin(0, "m")), Replay)
    assert store.perform(Complete(claim, big, 900_000, 30_000)).kept
"""


def test_a_full_disk(path):
    message = run(FULL, path)
    assert str(path) in message
    assert "room on the disk" in message


def test_a_full_database(own):
    execute(own)
    connection = own._file.connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    claim = own.perform(begin(1)).claim
    with pytest.raises(StoreError, match="make room on the disk"):
        own.perform(Complete(claim, Value("json", b"x" * 50_000), TTL, LEASE))
    assert isinstance(own.perform(begin(0)), Replay)
    connection.execute("PRAGMA max_page_count = 100000")
    assert own.perform(Complete(claim, VALUE, TTL, LEASE)).kept


# --- a locked database ------------------------------------------------------------------------------------


def test_a_locked_database_is_waited_for_and_then_told_of(path, own, beside):
    execute(own)
    brief = SqliteStore(path, patience=0.05)
    beside.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailableError, match=r"another process.*0\.05 s"):
        brief.perform(begin(1))
    assert brief.look(address())[0].runs == 1  # who only reads is not held up
    beside.execute("ROLLBACK")
    execute(brief, 1)
    brief.close()


@pytest.mark.parametrize("fresh", [True, False])
def test_an_observer_is_held_up_only_briefly(path, own, beside, fresh):
    store = SqliteStore(path, patience=LONG) if fresh else own
    beside.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=f"{BRIEF:g} s"):
        store.perform(begin(1, mode=Mode.OBSERVE, brief=True))
    assert time.monotonic() - started < LONG / 2
    beside.execute("ROLLBACK")
    execute(store, 1)
    store.close()


def test_an_observer_is_held_up_only_briefly_by_a_thread_that_is(path, beside):
    own = SqliteStore(path, patience=2)
    execute(own)
    waiting = threading.Event()
    beside.execute("BEGIN IMMEDIATE")

    def wait():
        waiting.set()
        with pytest.raises(StoreUnavailableError):
            own.perform(begin(1))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    with pytest.raises(StoreUnavailableError, match=f"{BRIEF:g} s"):
        own.perform(begin(1, mode=Mode.OBSERVE, brief=True))
    thread.join(LONG)
    beside.execute("ROLLBACK")
    execute(own, 1)
    own.close()


def test_observers_on_one_loop_are_held_up_together(path, own, beside):
    execute(own)
    beside.execute("BEGIN IMMEDIATE")

    async def observe(number):
        with pytest.raises(StoreUnavailableError):
            await own.aio.perform(begin(number, mode=Mode.OBSERVE, brief=True))

    async def all_of_them():
        await asyncio.gather(*map(observe, range(40)))

    started = time.monotonic()
    asyncio.run(all_of_them())
    assert time.monotonic() - started < 20 * BRIEF
    beside.execute("ROLLBACK")
    execute(own, 1)


def test_who_waited_for_ones_own_steps_is_not_told_of_a_locked_file(own, beside):
    """Patience with other processes is not used up by a long queue."""
    execute(own)

    async def both():
        slow = asyncio.ensure_future(own.aio._do(lambda: (time.sleep(3 * BRIEF), execute(own, 1))))
        brief = asyncio.ensure_future(own.aio.perform(begin(2, mode=Mode.OBSERVE, brief=True)))
        await slow
        return await brief

    asyncio.run(both())


def test_the_thread_for_loops_ends_when_idle(path, monkeypatch):
    monkeypatch.setattr(bridge, "IDLE", 0.05)
    store = SqliteStore(path)

    async def use(store, number):
        await store.aio.look(address(number))

    def threads():
        return [t for t in threading.enumerate() if t.name == "idemguard-store"]

    before = len(threads())
    for number in range(3):
        asyncio.run(use(store, number))
        end = time.monotonic() + LONG
        while len(threads()) > before and time.monotonic() < end:
            time.sleep(0.01)
        assert len(threads()) == before
    monkeypatch.setattr(bridge, "IDLE", LONG)
    asyncio.run(use(store, 4))
    store.close()
    alive = weakref.ref(store)
    del store
    gc.collect()
    assert alive() is None


def test_a_lock_that_goes_away_is_no_error(own):
    execute(own)
    other = sqlite3.connect(own.path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    asked = threading.Event()

    def let_go():
        asked.wait(LONG)
        other.execute("ROLLBACK")

    thread = threading.Thread(target=let_go)
    thread.start()
    asked.set()
    execute(own, 1)
    thread.join(LONG)
    other.close()


# --- damage ----------------------------------------------------------------------------------------------------

HARM = {
    "no JSON": "UPDATE record SET head = 'x'",
    "too short": "UPDATE record SET head = '[1]'",
    "another shape": "UPDATE record SET lines = '{}'",
    "a cause that is none": "UPDATE record SET head = replace(head, 'expired', 'e')",
    "a status that is none": "UPDATE record SET lines = replace(lines, '\"ok\"', '\"?\"')",
    "null": "UPDATE record SET lines = 'null'",
    "no text": "UPDATE record SET lines = CAST(x'ff00fe' AS TEXT)",
    "a number": "UPDATE record SET head = 3",
    "a result's source": "UPDATE result SET source = '[]'",
    "a text as a number": "UPDATE record SET kept_until = 'soon'",
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_damaged_row_is_told_of_and_forget_repairs_it(path, own, beside, harm):
    claim = execute(own)
    execute(own, 1)
    own.close()
    beside.execute(harm + " WHERE " + ("record = 1" if "result" in harm else "id = 1"))
    assert beside.execute("SELECT changes()").fetchone() == (1,)
    for act in (
        lambda: own.perform(begin()),
        lambda: own.perform(Complete(claim, VALUE, TTL, LEASE)),
        lambda: own.look(address()),
        lambda: own.park(address(), "1-n", lambda: None),
    ):
        with pytest.raises(StoreError) as caught:
            act()
        assert str(path) in str(caught.value)
        assert "forget()" in str(caught.value)
        assert caught.value.fingerprint == address().fingerprint
    assert isinstance(own.perform(begin(1)), Replay)  # the others are well
    own.perform(Forget(address(), "order"))
    assert own.perform(begin()).claim.cause is Cause.FORCED
    assert own.look(address())[0].runs == 1


def test_a_damaged_line_is_told_of_by_the_ledger(path, own, beside):
    execute(own)
    beside.execute("UPDATE record SET lines = '?'")
    with pytest.raises(StoreError, match=r"damaged.*forget"):
        list(own.lines("default", 0, 2**62))


def test_a_damaged_page_is_told_of(path, own):
    for number in range(200):
        execute(own, number)
    own.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    refused(path, StoreError, "move it away")


def test_a_file_that_is_removed_under_the_store(path, own):
    execute(own)
    own.close()
    for left in path.parent.iterdir():
        left.unlink()
    execute(own)  # as good as new


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_is_no_longer_there_is_given_up(path, own, monkeypatch, how):
    monkeypatch.setattr(file, "CHECK", 0.05)
    execute(own)
    claim = own.perform(begin(1)).claim
    bell = Bell()
    own.park(address(1), claim.id, bell)
    if how == "replaced":
        new = SqliteStore(path.with_name("new.db"))
        execute(new, 5)
        new.close()
        path.with_name("new.db").replace(path)
    for left in path.parent.iterdir():
        if how == "removed" or left.name != "store.db":
            left.unlink()
    assert bell.wait(LONG)  # who waits asks again
    execute(own, 1)
    other = SqliteStore(path)
    assert other.look(address(1))[0].runs == 1
    assert other.look(address(5))[0].runs == (how == "replaced")
    assert own.look(address(0))[0].runs == 0
    claim = other.perform(begin(2)).claim
    bell = Bell()
    own.park(address(2), claim.id, bell)
    other.perform(Release(claim))
    assert bell.wait(LONG)
    other.close()
    own.close()
    whole = sqlite3.connect(path)
    assert whole.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    whole.close()


def test_what_ended_a_look_at_a_file_is_told(path, own, monkeypatch):
    class Failing(file.Connection):
        def execute(self, sql, *args):
            if "user_version" in sql:
                super().execute("ROLLBACK")  # as SQLite does by itself
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(sql, *args)

    monkeypatch.setattr(file, "Connection", Failing)
    with pytest.raises(StoreError, match="disk I/O error"):
        execute(own)


# --- waiting ---------------------------------------------------------------------------------------------------


class Bell(threading.Event):
    def __call__(self):
        self.set()


def test_a_parked_waiter_holds_no_transaction_open(own, beside):
    claim = own.perform(begin()).claim
    bell = Bell()
    own.park(address(), claim.id, bell)
    assert not own._file.connection.in_transaction
    # the watch reads for a moment, which is waited out; what is held open is not
    beside.execute("PRAGMA busy_timeout = 10000")
    for _ in range(5):
        execute(own, next(numbers))
        busy, log, done = beside.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert (busy, log) == (0, done)
    beside.execute("VACUUM")
    assert not bell.is_set()
    own.perform(Release(claim))
    assert bell.is_set()


def test_the_watch_ends_with_the_last_waiter_and_starts_anew(path, own):
    other = SqliteStore(path)
    for number in range(3):
        claim = other.perform(begin(number)).claim
        bell = Bell()
        unpark = own.park(address(number), claim.id, bell)
        watch = own._watch._thread
        assert watch.is_alive()
        if number == 1:
            unpark()
        else:
            other.perform(Release(claim))
            assert bell.wait(LONG)
        watch.join(LONG)
        assert not watch.is_alive()
        assert own._watch._thread is None
    other.close()


def test_a_command_that_nobody_waits_for_leaves_no_hint(own, beside):
    execute(own)
    claim = own.perform(begin(1)).claim
    assert beside.execute("SELECT max(hinted) FROM record").fetchone() == (None,)
    own.park(address(1), claim.id, Bell())
    own.perform(Complete(claim, VALUE, TTL, LEASE))
    assert beside.execute("SELECT count(hinted) FROM record").fetchone() == (1,)


def test_a_hint_is_seen_although_the_last_one_was_removed_with_its_record(path):
    now = [1_790_000_000_000]
    own, other = (SqliteStore(path, clock=lambda: now[0]) for _ in range(2))
    first = own.perform(begin(0)).claim
    own.park(address(0), first.id, Bell())
    own.perform(Release(first))
    held = own.perform(begin(1)).claim
    bell = Bell()
    own.park(address(1), held.id, bell)()
    now[0] += 3 * 86_400_000
    other.tend(None)
    again = other.perform(begin(1)).claim
    bell = Bell()
    own.park(address(1), again.id, bell)
    other.perform(Release(again))
    assert bell.wait(LONG)
    for store in (own, other):
        store.close()


def test_close_lets_those_who_wait_ask_again(own):
    claim = own.perform(begin()).claim
    bell = Bell()
    own.park(address(), claim.id, bell)
    own.close()
    assert bell.is_set()
    assert isinstance(own.perform(begin()), InFlight)


IDLE = """
    import resource
    store = SqliteStore(path)
    claims = [store.perform(begin(n, "n")).claim for n in range(50)]
    parked = [store.park(c.address, c.id, lambda: None) for c in claims]
    def used():
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime
    before, started = used(), time.monotonic()
    threading.Event().wait(1)
    print((used() - before) / (time.monotonic() - started))
"""


def test_fifty_parked_waiters_cost_next_to_nothing(path):
    assert float(run(IDLE, path)) < 0.1  # the figure is told by benchmarks/wake.py; a spin is 1


# --- forks and crashes -------------------------------------------------------------------------------------------

FORK = """
    store = SqliteStore(path)
    execute(store, 0)
    claim = store.perform(begin(1, "parent")).claim
    bell = threading.Event()
    store.park(claim.address, claim.id, bell.set)
    child = os.fork()
    if child == 0:
        assert isinstance(store.perform(begin(0, "child")), Replay)
        execute(store, 2, "child")
        woken = threading.Event()
        store.park(claim.address, claim.id, woken.set)
        Path(sys.argv[2]).touch()
        assert woken.wait(20)
        store.perform(begin(3, "child"))
        sys.exit(0)
    for _ in range(2000):
        if Path(sys.argv[2]).exists():
            break
        time.sleep(0.01)
    assert not bell.is_set()
    assert store.perform(Complete(claim, VALUE, 900_000, 30_000)).kept
    assert bell.is_set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.look(Address("default", f"{3:064x}"))[0].runs == 1
    execute(store, 4)
    assert store._file.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
"""


def test_parent_and_child_both_use_it_after_a_fork(path, tmp_path):
    run(FORK, path, tmp_path / "parked")


BUSY_FORK = """
    store = SqliteStore(path)
    stop = threading.Event()
    def work(number):
        for turn in range(10**9):
            if stop.is_set():
                return
            execute(store, number * 10**6 + turn)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(40):
        child = os.fork()
        if child == 0:
            execute(store, 10**9 + turn)
            os._exit(0)
        end = time.monotonic() + 20
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os._exit(9)
            time.sleep(0.002)
        assert done[1] == 0, done
    stop.set()
    for thread in threads:
        thread.join()
    assert store._file.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
"""


def test_a_fork_while_other_threads_are_in_the_middle_of_it(path):
    run(BUSY_FORK, path)


AFTER = """
    from idemguard import Guard
    log = path.with_name("log")
    g = Guard(store=f"sqlite:///{path}")
    @g.idempotent(task_type="t")
    def f(x):
        with open(log, "a") as out:
            out.write(f"{x}\\n")
    f("warm")
    reads, tell = os.pipe()
    goes, go = os.pipe()
    if os.fork() == 0:
        f("c")
        os.write(tell, b".")
        os.read(goes, 1)
        f("k")
        os.write(tell, b".")
        os.read(goes, 1)
        os._exit(0)
    os.read(reads, 1)
    g.close()  # the last one that SQLite knew of, had the child inherited a connection
    os.write(go, b".")
    os.read(reads, 1)
    f("k")
    os.write(go, b".")
    os.wait()
    assert log.read_text().split() == ["warm", "c", "k"], log.read_text()
    assert len(list(g.ledger.lines())) == 3
"""


def test_a_parent_that_closes_takes_nothing_from_its_child(path):
    run(AFTER, path)


POOL = """
    import multiprocessing, random, subprocess
    from idemguard import Guard
    log = path.with_name("log")
    g = Guard(store=f"sqlite:///{path}")
    @g.idempotent(task_type="t", wait_timeout=20)
    def f(x):
        with open(log, "a") as out:
            out.write(f"{x}\\n")
    def work(seed):
        for x in random.Random(seed).choices(range(60), k=25):
            f(x)
    def newcomers():
        end = time.monotonic() + 2
        while time.monotonic() < end:
            one = sqlite3.connect(path)
            one.execute("SELECT count(*) FROM record").fetchone()
            one.close()
    if len(sys.argv) > 2:  # a parent that is killed, while its children go on
        work(0)
        for seed in range(4):
            if os.fork() == 0:
                work(seed)
                os._exit(0)
        work(9)
        os.kill(os.getpid(), signal.SIGKILL)
    f(0)
    killed = subprocess.Popen([sys.executable, "-W", "ignore", "-c", BODY, str(path), "killed"])
    newcomer = multiprocessing.get_context("fork").Process(target=newcomers)
    newcomer.start()
    with multiprocessing.get_context("fork").Pool(4) as pool:
        done = pool.map_async(work, range(20), chunksize=1)
        while not done.ready():
            work(random.random())
            g.close()
            done.wait(0.01)
        done.get()
    killed.wait()
    newcomer.join()
    work(1)
    ran = sorted(map(int, log.read_text().split()))
    assert ran == sorted(set(ran)), ran
    assert len(list(g.ledger.lines())) == len(ran)
    g.close()
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)
"""


def test_a_pool_whose_parent_goes_on_closes_and_is_killed(path):
    body = textwrap.dedent(POOL)
    run(f"BODY = PRELUDE + {body!r}\n{body}".replace("PRELUDE", repr(PRELUDE), 1), path)


INSIDE = """
    children = []
    def clock():
        if not children:
            children.append(os.fork())
        return 1_790_000_000_000
    warm = SqliteStore(path)
    execute(warm, 0)
    store = SqliteStore(path, clock=clock)
    answer = store.perform(begin(1, f"n"))
    assert isinstance(answer, Claimed), answer
    if children[0] == 0:
        execute(store, 2)
        execute(warm, 3)
        assert not taken(store._file.lock)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert store.perform(Complete(answer.claim, VALUE, 900_000, 30_000)).kept
    assert store.look(Address("default", f"{2:064x}"))[0].runs == 1
    assert not taken(store._file.lock)
"""


def test_a_fork_in_the_middle_of_ones_own_step(path):
    run(INSIDE, path)


STUCK = """
    from idemguard.stores import file
    file.HOLD = 0.1
    inside, on = threading.Event(), threading.Event()
    def clock():
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            on.wait()
        return 1_790_000_000_000
    other, store = SqliteStore(path), SqliteStore(path, clock=clock)
    execute(other, 0)
    thread = threading.Thread(target=execute, args=(store, 1))
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        for mine in (store, other, SqliteStore(path)):
            try:
                mine.look(Address("default", "0" * 64))
                os._exit(1)
            except StoreUnavailableError as error:
                assert "forked" in str(error)
        execute(SqliteStore(path.with_name("another.db")), 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    on.set()
    thread.join()
    assert store.look(Address("default", f"{1:064x}"))[0].runs == 1
    execute(other, 2)
    child = os.fork()
    if child == 0:
        execute(other, 3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_child_refuses_a_file_that_was_in_use_at_the_fork(path):
    run(STUCK, path)


HALF_READ = """
    store = SqliteStore(path)
    for name in range(3):
        execute(store, name)
    def half(connection):
        cursor = connection.execute("SELECT id FROM record")
        cursor.fetchone()
        raise KeyError
    kept = []
    try:
        store._file.read(half)
    except KeyError as error:
        kept.append(error)  # and so its frames, and the cursor
    lines = store.lines("default", 0, 1 << 60)
    next(lines)
    def fds():
        names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return [name for name in names if os.path.realpath(name).startswith(str(path))]
    assert fds()
    child = os.fork()
    if child == 0:
        os._exit(len(fds()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(lines)) == 2, lines
"""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_nothing_keeps_a_connection_open_through_a_fork(path):
    run(HALF_READ, path)


HINTED = """
    import subprocess
    from idemguard.stores import file
    store = SqliteStore(path)
    claim = store.perform(begin(1, "n")).claim
    bell = threading.Event()
    store.park(claim.address, claim.id, bell.set)
    file._hold()  # as before a fork
    assert not store._file._connections
    subprocess.run([sys.executable, "-c", FORGETS, str(path)], check=True)
    assert not bell.is_set()
    file._let_go()  # as after it, in the parent
    assert bell.wait(20)
"""


def test_what_is_hinted_while_a_parent_forks_is_seen(path):
    forgets = PRELUDE + 'SqliteStore(path).perform(Forget(Address("default", f"{1:064x}"), "f"))\n'
    run(f"FORGETS = {forgets!r}\n{textwrap.dedent(HINTED)}", path)


# --- in between ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite"])
def between(request, path, monkeypatch):
    """A store; and `come(act)`, by which `act` comes into the middle of its next command."""
    store = SqliteStore(path) if request.param == "sqlite" else MemoryStore()
    module = sys.modules[type(store).__module__]
    execute(store, 99)
    todo = []

    def transition(*args):
        if todo:
            todo.pop()()
        return claims.transition(*args)

    monkeypatch.setattr(module, "transition", transition)
    yield store, todo.append
    store.close()


def test_a_step_in_the_middle_of_a_step_of_the_same_thread(between):
    store, come = between
    answers = []
    come(lambda: answers.append(store.perform(begin(1))))
    outer = store.perform(begin(1))
    assert isinstance(answers[0], Claimed)
    assert isinstance(outer, InFlight)
    come(lambda: execute(store, 2))
    ended = store.perform(Complete(answers[0].claim, VALUE, TTL, LEASE))
    assert ended.kept
    for name in (1, 2, 99):
        assert store.look(address(name))[0].result is not None
    windows = store.windows("default", 0, 1 << 60)
    assert sum(w.counts.get("first", 0) for w in windows) in (0, 3)
    other = threading.Thread(target=execute, args=(store, 3))
    other.start()
    other.join(LONG)
    assert not other.is_alive()


def test_a_step_in_the_middle_of_one_that_fails(between):
    store, come = between

    def fail():
        execute(store, 2)
        raise KeyboardInterrupt

    come(fail)
    with pytest.raises(KeyboardInterrupt):
        store.perform(begin(1))
    assert store.look(address(1))[0].runs == 0
    assert store.look(address(2))[0].result is not None


def test_reading_in_the_middle_of_a_step_sees_nothing_of_it(path, own, beside):
    execute(own)
    seen = []

    def step(connection):
        connection.execute("UPDATE record SET reused = 7")
        if not seen:
            seen.append(own.look(address())[0].reused)
        connection.execute("UPDATE record SET reused = reused + 1")

    own._file.write(step)
    assert seen == [0]
    assert own.look(address())[0].reused == 8
    beside.execute("BEGIN IMMEDIATE")  # nothing is left open
    beside.execute("ROLLBACK")


def test_somebody_comes_while_another_enters_the_room():
    room, woken = WaitingRoom(), []
    here = address(1)

    class Slow(Waiter):
        def __hash__(self):
            if not woken:
                room.call(here, "all")
            return 1

    room.enter(here, Waiter(None, lambda: woken.append("first")))
    room.enter(here, Slow(None, lambda: woken.append("slow")))
    room.call(here, "all")
    assert woken == ["first", "slow"]
    assert not room


CRASH = """
    store = SqliteStore(path)
    execute(store, 0)
    connection = store._file.connection
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("DELETE FROM record")
    connection.execute("PRAGMA cache_size = 1")
    for _ in range(50):
        connection.execute("INSERT INTO namespace VALUES (hex(randomblob(9000)), x'00')")
    print("in the middle", flush=True)
    time.sleep(60)
"""


def test_a_kill_in_the_middle_of_a_transaction_leaves_a_usable_file(path, own):
    with subprocess.Popen([*script(CRASH), str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"in the middle\n"
        process.send_signal(signal.SIGKILL)
    assert isinstance(own.perform(begin(0)), Replay)
    execute(own, 1)
    assert own._file.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_an_interrupt_in_the_middle_leaves_no_transaction_open(path, beside):
    interrupts = [KeyboardInterrupt, None]

    def clock():
        if interrupts and (error := interrupts.pop(0)):
            raise error
        return 1_790_000_000_000

    store = SqliteStore(path, clock=clock)
    with pytest.raises(KeyboardInterrupt):
        store.perform(begin(5))
    beside.execute("BEGIN IMMEDIATE")
    beside.execute("ROLLBACK")
    assert store.look(address(5))[0].runs == 0
    execute(store, 5)
    store.close()


INTERRUPTS = """
    import random
    class Interrupt(BaseException): pass
    def interrupt(*_): raise Interrupt
    signal.signal(signal.SIGALRM, interrupt)
    store, other = SqliteStore(path, patience=2), SqliteStore(path, patience=2)
    execute(store, 0)
    kept, hit = 0, 0
    for turn in range(1, 1500):
        ask = begin(turn, "n")
        try:
            signal.setitimer(signal.ITIMER_REAL, random.Random(turn).uniform(1e-6, 4e-4))
            claim = store.perform(ask).claim
            store.perform(Complete(claim, VALUE, 900_000, 30_000))
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            hit += 1
        finally:
            while True:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    break
                except Interrupt:
                    pass
        assert not taken(store._file.lock), turn
        answer = other.perform(ask)  # the same command again: the same claim, or it is over
        if isinstance(answer, Claimed):
            assert other.perform(Complete(answer.claim, VALUE, 900_000, 30_000)).kept
        assert isinstance(other.perform(begin(turn, "m")), Replay)
    print(hit)
"""


def test_interrupts_at_any_moment_leave_it_usable(path):
    assert int(run(INTERRUPTS, path)) > 100


# --- much of it ---------------------------------------------------------------------------------------------------


def test_a_large_result(own, path):
    data = os.urandom(4 << 20) * 2
    execute(own, 0, Value("json", data))
    other = SqliteStore(path)
    for store in (own, other):
        assert store.perform(begin()).result.value.data == data
    other.close()
    wal = Path(f"{path}-wal").stat().st_size
    for _ in range(20):
        own.perform(begin())
    assert Path(f"{path}-wal").stat().st_size - wal < 1 << 20  # reuse does not write it anew


def cost(store, act) -> int:
    """The steps of SQLite's machine that something takes, in hundreds."""
    taken = [0]

    def count():
        taken[0] += 1

    store._file.connection.set_progress_handler(count, 10)
    try:
        act()
    finally:
        store._file.connection.set_progress_handler(None, 0)
    return taken[0]


def test_the_work_of_a_command_does_not_grow_with_the_records(own):
    execute(own)
    found = {}
    for size in (10, 3000):
        for _ in range(size):
            execute(own, next(numbers) + 1000)
        name = next(numbers) + 1000
        claim = own.perform(begin(name)).claim
        own.park(address(name), claim.id, Bell())
        found[size] = (
            cost(own, lambda: own.perform(begin(next(numbers) + 1000))),
            cost(own, lambda: own.perform(begin(0))),
            cost(own, lambda c=claim: own.perform(Complete(c, VALUE, TTL, LEASE))),
            cost(own, lambda n=name: own.addresses("default", f"{n:064x}")),
            cost(own, lambda: own.look(address(0))),
        )
    for few, many in zip(found[10], found[3000], strict=True):
        assert many <= 2 * few + 5


def test_the_work_of_a_command_does_not_grow_with_its_executions(own):
    found = []
    for _ in range(300):
        claim = own.perform(begin()).claim
        found.append(cost(own, lambda c=claim: own.perform(Release(c))))
    assert max(found[100:]) <= 2 * max(found[:20])
    record = own.look(address())[0]
    assert (record.runs, len(record.lines)) == (300, 64)


def test_what_a_process_remembers_is_limited(own):
    for number in range(2000):
        own.perform(begin(number, "n"))
    assert len(own._known._seen) <= 256


def test_what_is_remembered_is_never_older_than_the_file(path, own):
    other = SqliteStore(path)
    claim = own.perform(begin()).claim
    assert own.look(address())[0].lines[0].ended is None
    other.perform(Complete(claim, VALUE, TTL, LEASE))
    assert own.look(address())[0].lines[0].ended is not None
    other.perform(Forget(address(), "order"))
    assert own.look(address())[0].result is None
    other.close()


def test_errors_can_be_told_to_another_process(path):
    import pickle  # noqa: PLC0415 - beside its only use

    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError) as caught:
        execute(SqliteStore(path))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert json.dumps(str(caught.value))

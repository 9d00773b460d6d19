"""What a test begins with: nothing configured, nothing warned of, and guards on stores of its own."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import itertools
import os
import signal
import threading
import time
import warnings
from concurrent.futures import Future

import pytest
from workers.lab import Lab, Pool

from idemguard import Guard, context, engine, log
from idemguard.errors import StoreUnavailableError
from idemguard.stores import memory
from idemguard.stores.bridge import Direct, InThread
from idemguard.stores.loops import LoopSide
from idemguard.stores.memory import MemoryStore
from idemguard.stores.redis import RedisStore
from idemguard.stores.sharing import LATE
from idemguard.stores.side import Side
from idemguard.stores.sqlite import SqliteStore

pytest_plugins = ("servers.fixtures",)

LONG = 60.0  # seconds; a machine under load is slow, but what takes longer hangs
# the package has a function of this module's name
decorator = importlib.import_module("idemguard.idempotent")
SURROUNDINGS = (
    "KUBERNETES_SERVICE_HOST",
    "AWS_LAMBDA_FUNCTION_NAME",
    "K_SERVICE",
    "CLOUD_RUN_JOB",
)


def _forget_all() -> None:
    engine._default.clear()
    memory.process_store.cache_clear()
    context._default = None
    log.forget_warnings()


# Where the plugin counts in this suite. The others run tasks twice on purpose, name their own
# namespaces, or look into stores by hand.
COUNTED = {
    "test_clients.py", "test_codec.py", "test_ears.py", "test_errors.py", "test_findings.py",
    "test_fingerprint.py", "test_guard.py", "test_idempotent.py", "test_import.py",
    "test_money.py", "test_pickle.py", "test_providers.py", "test_readme.py", "test_servers.py",
    "test_shapes.py", "test_span_usage.py", "test_sqlite.py", "test_telemetry_page.py",
    "test_usage.py", "test_watch.py",
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No test sees what another one configured, warned of, or set in the environment."""
    for name in list(os.environ):
        if name.startswith("IDEMGUARD_") or name in SURROUNDINGS:
            monkeypatch.delenv(name)
    _forget_all()
    yield
    _forget_all()


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Where the suite runs in a shell's background, Ctrl-C would be ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Here connections are cut, killed and cancelled, and loops closed by hand: what the client libraries
# then leave to the garbage collector is theirs, and would fail whichever test it comes by in. What
# we leave open is counted at the server (test_redis_lives).
_ROUGH = ("test_redis_", "test_clients")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in COUNTED:
            item.add_marker(pytest.mark.idemguard(mode="error"))
        if item.path.name.startswith(_ROUGH):
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="module", autouse=True)
def swept(request):
    """Nothing of a rough module is left for the collector to find in another."""
    yield
    if request.path.name.startswith(_ROUGH):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


class Clock:
    """A store's clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1_800_000_000_000

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds) -> None:
        self.now += round(seconds * 1000)


@pytest.fixture
def clock():
    """The clock of `store`, in tests that name it."""
    return Clock()


@pytest.fixture(params=["memory", "sqlite", "redis"])
def store(request, tmp_path):
    """A fresh store of each kind; with `clock` where the test has one."""
    clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else None
    if request.param == "memory":
        made = MemoryStore(clock)
    elif request.param == "sqlite":
        made = SqliteStore(tmp_path / "guard.db", clock=clock)
    else:
        made = RedisStore(request.getfixturevalue("redis_url"), clock=clock)
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Worker processes, for the tests of a file."""
    made = Pool(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "redis"])
def lab(request, tmp_path, pool):
    """Worker processes around a store of each shared kind; `memory` where a test asks for it."""
    url = {
        "memory": lambda: "memory://",
        "sqlite": lambda: None,
        "redis": lambda: request.getfixturevalue("redis_url"),
    }[request.param]()
    made = Lab(tmp_path, pool, url)
    yield made
    made.close()
    pool.back()


class Tapped:
    """A real store that tells what it was asked for, and fails on command."""

    def __init__(self, store) -> None:
        self.store = store
        self.seen = []  # the commands that it got
        self.parked = 0  # how often somebody began to wait
        self.fails = None  # an error, or a function of the command that returns one or None
        self.aio = (Direct if isinstance(store, MemoryStore) else InThread)(self)

    def down(self, words="connection refused") -> None:
        """Nothing is answered from now on."""
        self.fails = StoreUnavailableError(words)

    def down_for(self, *kinds, words="connection refused") -> None:
        """These commands are not answered from now on."""
        self.fails = lambda c: StoreUnavailableError(words) if isinstance(c, kinds) else None

    def up(self) -> None:
        """All is answered again."""
        self.fails = None

    def _fail(self, command=None) -> None:
        error = self.fails(command) if callable(self.fails) else self.fails
        if error is not None:
            raise error

    def perform(self, command):
        self.seen.append(command)
        self._fail(command)
        return self.store.perform(command)

    def park(self, address, holder, wake):
        self._fail()
        unpark = self.store.park(address, holder, wake)
        self.parked += 1
        return unpark

    def look(self, address):
        self._fail()
        return self.store.look(address)

    def addresses(self, namespace, prefix):
        self._fail()
        return self.store.addresses(namespace, prefix)

    def overdue(self, namespace):
        self._fail()
        return self.store.overdue(namespace)

    def lines(self, namespace, since, until):
        self._fail()
        return self.store.lines(namespace, since, until)

    def windows(self, namespace, since, until):
        self._fail()
        return self.store.windows(namespace, since, until)

    def secret(self, namespace):
        self._fail()
        return self.store.secret(namespace)

    def tend(self, window_retention):
        self._fail()
        self.store.tend(window_retention)

    def close(self):
        self.store.close()


@pytest.fixture
def tapped(store):
    """The same, tapped."""
    return Tapped(store)


@pytest.fixture
def guard_of(store):
    """Makes guards on the store."""

    made = []

    def make(**settings):
        made.append(Guard(**{"store": store} | settings))
        return made[-1]

    yield make
    for guard in made:
        if guard._desk._engine is not None:  # a store that is left broken is owed nothing
            guard.engine.backlog._owed.clear()


@pytest.fixture
def guard(guard_of):
    """A guard on a fresh store, with every default."""
    return guard_of()


class Shape:
    """Guards plain functions, or the same as coroutines; both are called plainly."""

    def __init__(self, name: str) -> None:
        self.is_async = name == "coroutine"

    def guarded(self, guard, body, **options):
        """The body, guarded."""
        if not self.is_async:
            return guard.idempotent(body, **options)
        inner = guard.idempotent(self._coroutine(body), **options)
        call = functools.wraps(body)(lambda *args, **kwargs: asyncio.run(inner(*args, **kwargs)))
        call.guarded = inner
        return call

    def run_task(self, guard, task_type, payload, body, **options):
        """The body, as a task."""
        if not self.is_async:
            return guard.run_task(task_type, payload, body, **options)

        async def call():
            return await guard.run_task(task_type, payload, self._coroutine(body), **options)

        return asyncio.run(call())

    @staticmethod
    def _coroutine(body):
        @functools.wraps(body)
        async def coroutine(*args, **kwargs):
            return body(*args, **kwargs)

        return coroutine


@pytest.fixture(params=["plain", "coroutine"])
def shape(request):
    """Both shapes of a guarded callable."""
    return Shape(request.param)


class Crew:
    """Threads; each call in one of its own, and nobody is waited for without an end."""

    def __init__(self) -> None:
        self._threads = []

    def start(self, act, *args):
        """Call in a thread; the future has the value or the error."""
        future = Future()

        def run() -> None:
            try:
                future.set_result(act(*args))
            except BaseException as error:  # noqa: BLE001 - told where it is asked for
                future.set_exception(error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()
        return future

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LONG)
            assert not thread.is_alive(), "a thread of the test hangs"


@pytest.fixture
def crew():
    """Threads that are over when the test is."""
    made = Crew()
    yield made
    made.join()


def _until(condition, timeout=LONG):
    end = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < end, "what the test waits for does not happen"
        time.sleep(0.002)
    return found


@pytest.fixture
def until():
    """Waits until something holds, at most so long."""
    return _until


class Waiting:
    """Who of this process waits at a server, and what is heard there, as it goes on."""

    def __init__(self, monkeypatch) -> None:
        self._there = set()
        self.ever = 0  # how often a call began to wait
        self.beats = []  # when the leader was heard to renew, s
        park, apark, hint = RedisStore.park, LoopSide.park, Side.hint

        def parked(store, *args):
            return self._noted(park(store, *args))

        async def aparked(side, *args):
            return self._noted(await apark(side, *args))

        def heard(side, channel, text):
            if text.startswith("beat "):
                self.beats.append(time.monotonic())
            return hint(side, channel, text)

        monkeypatch.setattr(RedisStore, "park", parked)
        monkeypatch.setattr(LoopSide, "park", aparked)
        monkeypatch.setattr(Side, "hint", heard)

    def _noted(self, unpark):
        self._there.add(unpark)
        self.ever += 1

        def leave() -> None:
            self._there.discard(unpark)
            unpark()

        return leave

    @property
    def now(self) -> int:
        """How many calls wait, with all that this takes done."""
        return len(self._there)

    def unheard(self, lease, since) -> int:
        """How often since then the waiters had to ask, since no renewal was heard in time."""
        end = time.monotonic()
        before = [since, *(beat for beat in self.beats if beat < since)][-1]
        heard = [before, *(beat for beat in self.beats if beat > before), end]
        quiet = lease / 3 + LATE / 1000
        return sum(int((b - a) / quiet) for a, b in itertools.pairwise(heard))


@pytest.fixture
def waiting(monkeypatch):
    """Who waits at a server, and what is heard there."""
    return Waiting(monkeypatch)


@pytest.fixture
def warned(caplog):
    """The messages that idemguard warned with so far."""

    def messages() -> list[str]:
        ours = [r for r in caplog.records if r.name == "idemguard"]
        assert {r.levelname for r in ours} <= {"WARNING"}
        return [r.getMessage() for r in ours]

    caplog.set_level("WARNING", logger="idemguard")
    return messages

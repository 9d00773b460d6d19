"""An argument outranks a guard's setting, that the environment, that the default; and what cannot be is refused."""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from functools import partial

import pytest

from idemguard import (
    ExecutionLedger,
    Guard,
    capture,
    config,
    configure,
    engine,
    errors,
    idempotent,
    run_task,
    task_fingerprint,
)
from idemguard.guard import Policy
from idemguard.record import Mode
from idemguard.stores.memory import MemoryStore


def plain(n: int = 0) -> int:
    """A function that has a name of its own."""
    return n


async def coroutine(n: int = 0) -> int:
    """As `plain`."""
    return n


def policy_of(function):
    """How a guarded function is guarded."""
    return function._self_spec.job().policy


# --- defaults and precedence -----------------------------------------------------------------------


@pytest.fixture(params=[plain, coroutine], ids=["plain", "coroutine"])
def body(request):
    """Both shapes."""
    return request.param


def test_the_defaults(body):
    guard = Guard(store="memory://")
    assert policy_of(guard.idempotent(body)) == Policy(
        ttl=900_000,
        lease=30_000,
        max_run=3_600_000,
        wait_timeout=None,
        fall_back=True,
        rerun_lost=True,
        run_unguarded=False,
        mode=Mode.ENFORCE,
        retention=86_400_000,
    )
    job = guard.idempotent(body)._self_spec.job()
    assert (job.version, job.agent, job.usage) == (None, None, None)
    assert guard.engine.namespace == "default"
    assert guard.engine.limit == 8 * 1024 * 1024
    assert guard.settings.window_retention == timedelta(days=8).total_seconds()
    assert guard.engine.price is None


POLICIES = [
    # name, the guard's value, the argument's, the field, what the guard's comes to, the argument's
    ("ttl", 1, timedelta(minutes=2), "ttl", 1000, 120_000),
    ("ttl", 1, 0, "ttl", 1000, 0),
    ("lease", 1, 0.25, "lease", 1000, 250),
    ("max_run", 1, "auto", "max_run", 1000, None),
    ("max_run", "auto", 2, "max_run", None, 2000),
    ("wait_timeout", 1, 0, "wait_timeout", 1000, 0),
    ("on_timeout", "raise", "fallback", "fall_back", False, True),
    ("on_lost", "raise", "rerun", "rerun_lost", False, True),
    ("on_store_error", "run", "raise", "run_unguarded", True, False),
    ("mode", "observe", "enforce", "mode", Mode.OBSERVE, Mode.ENFORCE),
]


@pytest.mark.parametrize(("name", "set_to", "given", "field", "by_guard", "by_argument"), POLICIES)
def test_an_argument_outranks_the_guard_and_that_the_default(
    body, name, set_to, given, field, by_guard, by_argument
):
    guard = Guard(store="memory://", **{name: set_to})
    assert getattr(policy_of(guard.idempotent(body)), field) == by_guard
    assert getattr(policy_of(guard.idempotent(body, **{name: given})), field) == by_argument
    assert getattr(policy_of(guard.idempotent(body, **{name: None})), field) == by_guard
    configure(store="memory://", **{name: set_to})
    assert getattr(policy_of(idempotent(body)), field) == by_guard
    assert getattr(policy_of(idempotent(body, **{name: given})), field) == by_argument
    elsewhere = Guard(store="memory://")
    assert policy_of(idempotent(body, guard=elsewhere)) == Policy()
    assert (
        getattr(policy_of(idempotent(body, guard=elsewhere, **{name: given})), field) == by_argument
    )


def test_max_run_auto_goes_by_the_run_times_that_are_known(guard):
    task = guard.idempotent(plain, task_type="t", max_run="auto")
    job = task._self_spec.job()
    assert job.longest() == 3_600_000
    for n in range(20):
        task(n)
    guard.engine._usual.clear()  # what is known for the next minute
    assert job.longest() == 3 * 10
    assert (
        guard.idempotent(plain, task_type="u", max_run="auto")._self_spec.job().longest()
        == 3_600_000
    )


def test_a_record_is_kept_as_long_as_its_result(body):
    day = 86_400
    assert (
        policy_of(Guard(store="memory://").idempotent(body, ttl=3 * day)).retention
        == 3 * day * 1000
    )
    guard = Guard(store="memory://", retention=10, ttl=5)
    assert policy_of(guard.idempotent(body)).retention == 10_000


def test_what_is_configured_later_counts_for_what_was_decorated_before():
    task = idempotent(plain)
    first, second = MemoryStore(), MemoryStore()
    configure(store=first)
    task(1)
    configure(store=second, namespace="n")
    task(1)
    fingerprint = task_fingerprint(f"{__name__}.plain", {"n": 1})
    assert ExecutionLedger().runs(fingerprint) == 1
    assert ExecutionLedger().namespace == "n"
    assert ExecutionLedger(first).runs(fingerprint) == 1
    assert ExecutionLedger(second).runs(fingerprint) == 0


def test_what_is_not_configured_again_is_a_default_again():
    configure(store="memory://", ttl=1, namespace="n")
    configure(store="memory://")
    assert policy_of(idempotent(plain)).ttl == 900_000
    assert ExecutionLedger().namespace == "default"


def test_threads_that_come_first_at_once_get_one_guard(crew, monkeypatch):
    """Each guard has a connection of its own, and its waiters are woken less soon by another's."""
    monkeypatch.setenv("IDEMGUARD_STORE", "memory://")
    made, together = [], threading.Barrier(8)

    class Slow(engine.Engine):
        def __init__(self, settings):
            made.append(settings)
            threading.Event().wait(0.05)  # long enough for the others to come
            super().__init__(settings)

    def first():
        together.wait(10)
        return engine.source().engine

    monkeypatch.setattr(engine, "Engine", Slow)
    engines = [crew.start(first) for _ in range(8)]
    assert len({id(found.result(10)) for found in engines}) == len(made) == 1


def test_namespaces_keep_apart(store):
    one, other = Guard(store=store, namespace="one"), Guard(store=store, namespace="other")
    for guard in (one, other):
        with capture() as calls:
            guard.idempotent(plain)(1)
        assert calls[0].source == "executed"
    assert one.ledger.runs(calls[0].fingerprint) == 1
    assert one.ledger.namespace == "one"


# --- the environment -------------------------------------------------------------------------------


def test_the_environment_is_read_at_the_first_use(monkeypatch, tmp_path):
    task = idempotent(plain)
    guard = Guard()
    monkeypatch.setenv("IDEMGUARD_STORE", f"sqlite:///{tmp_path}/of-the-environment.db")
    monkeypatch.setenv("IDEMGUARD_NAMESPACE", "of-the-environment")
    assert not (tmp_path / "of-the-environment.db").exists()
    task(1)
    assert (tmp_path / "of-the-environment.db").exists()
    assert ExecutionLedger().namespace == guard.engine.namespace == "of-the-environment"
    ExecutionLedger()._store.close()
    guard.close()


def test_code_outranks_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("IDEMGUARD_STORE", f"sqlite:///{tmp_path}/unused.db")
    monkeypatch.setenv("IDEMGUARD_NAMESPACE", "unused")
    store = MemoryStore()
    configure(store=store, namespace="n")
    idempotent(plain)(1)
    assert len(store.addresses("n", "")) == 1
    assert not (tmp_path / "unused.db").exists()


def test_an_empty_variable_says_nothing(monkeypatch):
    for name in ("NAMESPACE", "MODE", "WORKER"):
        monkeypatch.setenv(f"IDEMGUARD_{name}", "")
    guard = Guard(store="memory://")
    assert guard.engine.namespace == "default"
    with capture() as calls:
        guard.idempotent(plain)(1)
    assert calls[0].source == "executed"
    assert calls[0].worker


def test_a_mode_that_there_is_not_is_an_error(monkeypatch):
    monkeypatch.setenv("IDEMGUARD_MODE", "of")
    with pytest.raises(errors.ConfigurationError, match=r"IDEMGUARD_MODE.*'of'"):
        Guard(store="memory://").idempotent(plain)(1)


def test_a_store_that_there_is_not_is_an_error(monkeypatch):
    monkeypatch.setenv("IDEMGUARD_STORE", "mongodb://user:secret@host/1")
    with pytest.raises(errors.ConfigurationError, match="mongodb") as caught:
        idempotent(plain)(1)
    assert "secret" not in str(caught.value)


# --- the store where none is named -----------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder deep inside another one, which is worked in."""
    inner = tmp_path / "src" / "deep"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return tmp_path


@pytest.mark.parametrize("mark", ["pyproject.toml", "setup.cfg", ".git"])
def test_the_default_store_is_a_file_at_the_projects_root(project, mark):
    (project / mark).touch()
    guard = Guard()
    assert not (project / ".idemguard").exists()
    guard.idempotent(plain)(1)
    assert (project / ".idemguard" / "idemguard.db").is_file()
    assert (project / ".idemguard" / ".gitignore").read_text() == "*\n"
    guard.close()


def test_a_git_folder_marks_a_root_and_the_nearest_counts(project):
    (project / "setup.cfg").touch()
    (project / "src" / ".git").mkdir()
    assert config.project_root() == project / "src"


def test_without_a_project_it_is_the_current_folder(project, monkeypatch):
    monkeypatch.setattr(config, "ROOT_MARKS", ("no such mark",))
    assert config.project_root() == project / "src" / "deep"


def test_two_guards_of_one_project_share_its_file(project, monkeypatch):
    (project / "pyproject.toml").touch()
    first = Guard()
    first.idempotent(plain)(1)
    monkeypatch.chdir(project)
    second = Guard()
    with capture() as calls:
        second.idempotent(plain)(1)
    assert calls[0].source == "reused"
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("variable", "place"),
    [
        ("KUBERNETES_SERVICE_HOST", "Kubernetes"),
        ("AWS_LAMBDA_FUNCTION_NAME", "Lambda"),
        ("K_SERVICE", "Cloud Run"),
        ("CLOUD_RUN_JOB", "Cloud Run"),
    ],
)
def test_where_a_file_shares_nothing_a_store_must_be_named(project, monkeypatch, variable, place):
    monkeypatch.setenv(variable, "x")
    with pytest.raises(errors.ConfigurationError, match=f"{place}.*IDEMGUARD_STORE"):
        idempotent(plain)(1)
    with pytest.raises(errors.ConfigurationError, match=place):
        ExecutionLedger()
    assert not list(project.rglob("*.db"))
    assert Guard(store="memory://").idempotent(plain)(1) == 1
    monkeypatch.setenv("IDEMGUARD_STORE", "memory://")
    assert Guard().idempotent(plain)(2) == 2


def test_switched_off_no_store_is_needed_anywhere(project, monkeypatch):
    monkeypatch.setenv("K_SERVICE", "x")
    monkeypatch.setenv("IDEMGUARD_MODE", "off")
    assert idempotent(plain)(1) == 1
    assert not list(project.rglob("*.db"))


def test_a_guard_that_was_never_used_opens_nothing_to_close(project, monkeypatch):
    monkeypatch.setenv("K_SERVICE", "x")
    Guard().close()


# --- URLs ------------------------------------------------------------------------------------------


def test_memory_is_one_store_in_a_process():
    task = Guard(store="memory://").idempotent(plain)
    task(1)
    with capture() as calls:
        Guard(store="memory://").idempotent(plain)(1)
    assert calls[0].source == "reused"


def test_a_relative_path_and_an_absolute_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:///relative.db", f"sqlite:///{tmp_path}/absolute.db"):
        guard = Guard(store=url)
        guard.idempotent(plain)(1)
        guard.close()
    assert {path.name for path in tmp_path.glob("*.db")} == {"relative.db", "absolute.db"}


BAD_STORES = {
    "unknown": "mongodb://host",
    "no-url": "guard.db",
    "empty": "",
    "memory-with-more": "memory://x",
    "no-file": "sqlite://",
    "no-name": "sqlite:///",
    "folder": "sqlite:////tmp/",
    "in-memory": "sqlite:///:memory:",
    "nul": "sqlite:///a\0b.db",
    "number": 5,
    "object": object(),
}


@pytest.mark.parametrize("bad", BAD_STORES.values(), ids=BAD_STORES)
def test_a_store_that_cannot_be_is_refused_when_it_is_named(bad):
    for set_it in (configure, Guard):
        with pytest.raises(errors.ConfigurationError, match="store="):
            set_it(store=bad)


@pytest.mark.parametrize("url", ["mongodb://user:secret@host/1", "redis+x://:secret@host"])
def test_no_password_is_told(url):
    with pytest.raises(errors.ConfigurationError) as caught:
        configure(store=url)
    assert "secret" not in str(caught.value)
    assert url.partition(":")[0] in str(caught.value)


def test_a_path_that_cannot_be_used_is_refused_when_it_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path in (tmp_path, file / "guard.db", file / "deep" / "guard.db"):
        with pytest.raises(errors.ConfigurationError, match=str(path)):
            Guard(store=f"sqlite:///{path}")


def test_configuring_opens_nothing(tmp_path):
    configure(store=f"sqlite:///{tmp_path}/deep/guard.db")
    idempotent(plain)
    assert list(tmp_path.iterdir()) == []


# --- what cannot be --------------------------------------------------------------------------------


POLICY_ERRORS = [
    *(("lease", bad) for bad in (0, -1, timedelta(0), "5", True, math.nan, math.inf, [])),
    *(("ttl", bad) for bad in (-1, "5", False, math.nan, 1e300, 10**400)),
    *(("max_run", bad) for bad in (0, -1, "automatic", True)),
    *(("wait_timeout", bad) for bad in (-0.1, "5", math.inf)),
    *(("on_timeout", bad) for bad in ("wait", 5, True, [])),
    *(("on_lost", bad) for bad in ("run", 5)),
    *(("on_store_error", bad) for bad in ("ignore", 5)),
    *(("mode", bad) for bad in ("enforced", "", 5)),
]


@pytest.mark.parametrize(("name", "bad"), POLICY_ERRORS)
def test_a_policy_that_cannot_be_is_refused_at_once(body, name, bad):
    attempts = (
        lambda: idempotent(body, **{name: bad}),
        lambda: idempotent(**{name: bad})(body),
        lambda: configure(store="memory://", **{name: bad}),
        lambda: Guard(store="memory://", **{name: bad}),
        lambda: Guard(store="memory://").run_task("t", 1, body, **{name: bad}),
    )
    for attempt in attempts:
        with pytest.raises(errors.ConfigurationError, match=f"{name}="):
            attempt()


OPTION_ERRORS = [
    *(("task_type", bad) for bad in ("", 5, b"t", "\ud800")),
    *(("key", bad) for bad in (5, "m", (), ("n", "m"), coroutine, [5])),
    *(("volatile", bad) for bad in (5, None, "n..b", (5,), "n")),
    *(("keep", bad) for bad in (5, None, "m")),
    *(("version", bad) for bad in ("", 5, "\ud800")),
    *(("agent", bad) for bad in ("", 5)),
    *(("usage", bad) for bad in (5, coroutine, "usage")),
    *(("guard", bad) for bad in (5, "memory://", MemoryStore())),
]


@pytest.mark.parametrize(("name", "bad"), OPTION_ERRORS)
def test_an_option_that_cannot_be_is_refused_at_decoration(body, name, bad):
    with pytest.raises(errors.ConfigurationError, match=name):
        idempotent(body, **{name: bad})


@pytest.mark.parametrize(
    ("name", "bad"),
    [(name, bad) for name, bad in OPTION_ERRORS if name in {"version", "agent", "usage", "guard"}],
)
def test_an_option_of_run_task_that_cannot_be_is_refused(name, bad):
    configure(store="memory://")
    with pytest.raises(errors.ConfigurationError, match=name):
        run_task("t", 1, plain, **{name: bad})


def test_an_async_method_is_no_plain_function_either():
    class Key:
        async def __call__(self, bound):
            return "k"

    with pytest.raises(errors.ConfigurationError, match="key"):
        idempotent(plain, key=Key())
    with pytest.raises(errors.ConfigurationError, match="usage="):
        idempotent(plain, usage=Key())


def test_an_option_that_there_is_not_is_refused(body):
    for attempt in (
        lambda: idempotent(body, lese=5),
        lambda: idempotent(lese=5),
        lambda: configure(lese=5),
        lambda: Guard(lese=5),
        lambda: Guard(store="memory://").idempotent(body, lese=5),
        lambda: Guard(store="memory://").run_task("t", 1, body, lese=5),
        lambda: run_task("t", 1, body, task_type="u"),
        lambda: run_task("t", 1, body, key="n"),
    ):
        with pytest.raises((errors.ConfigurationError, TypeError), match=r"lese|task_type|key"):
            attempt()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("namespace", bad) for bad in ("", 5, "\ud800")),
        *(("volatile", bad) for bad in (5, "name", [5], (n for n in "ab"))),
        *(("max_result_bytes", bad) for bad in (0, -1, 1.5, True, "8 MiB")),
        *(("retention", bad) for bad in (0, -1, "1 d")),
        *(("window_retention", bad) for bad in (0, -1, "1 d")),
        *(
            ("pricer", bad)
            for bad in (5, {"m": {"input": 1}}, {"m": {"input": "x", "output": 1}}, {"m": 5})
        ),
    ],
)
def test_a_setting_that_cannot_be_is_refused_and_named(name, bad):
    for set_it in (configure, Guard):
        with pytest.raises(errors.ConfigurationError, match=f"{name}="):
            set_it(store="memory://", **{name: bad})


def test_a_setting_that_cannot_be_leaves_the_configured_guard_alone():
    configure(store="memory://", namespace="n")
    with pytest.raises(errors.ConfigurationError):
        configure(store="memory://", lease=0)
    assert ExecutionLedger().namespace == "n"


def test_a_lambda_and_a_local_function_need_a_task_type():
    def local(n):
        return n

    for nameless in (lambda n: n, local, partial(local, 1)):
        with pytest.raises(errors.ConfigurationError, match="task_type"):
            idempotent(nameless)
    configure(store="memory://")
    assert idempotent(lambda n: n, task_type="t")(1) == 1


def test_what_is_not_callable_cannot_be_decorated():
    for thing in (5, "text"):
        with pytest.raises(errors.ConfigurationError, match=repr(thing)):
            idempotent(thing)
        with pytest.raises(errors.ConfigurationError, match="function"):
            run_task("t", 1, thing)


def test_a_callable_is_guarded_once(body):
    with pytest.raises(errors.ConfigurationError, match="already"):
        idempotent(idempotent(body))


@pytest.mark.parametrize("bad", ["", None, 5, "\ud800"], ids=repr)
def test_run_task_needs_a_task_type_and_a_worker_that_are_texts(bad):
    configure(store="memory://")
    with pytest.raises(errors.ConfigurationError, match="task_type="):
        run_task(bad, 1, plain)
    if bad is not None:
        with pytest.raises(errors.ConfigurationError, match="worker_id="):
            run_task("t", 1, plain, worker_id=bad)


def test_times_are_seconds_or_timedeltas_and_are_rounded_up():
    assert config.milliseconds("lease", 0.0001, least=1) == 1
    assert config.milliseconds("lease", 1.0001, least=1) == 1001
    assert config.milliseconds("ttl", timedelta(seconds=2), least=0) == 2000

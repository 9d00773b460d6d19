"""A guarded callable that is copied, or crosses to another process, is guarded there as well."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import pytest
from workers import callables
from workers.callables import CALLABLES, RUNS, Tool, take

from idemguard import ExecutionLedger, Guard, engine, idempotent
from idemguard.errors import ConfigurationError

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)
SCRIPT = Path(callables.__file__)


@pytest.fixture(autouse=True)
def shared(tmp_path, monkeypatch):
    """A store and a list of bodies that ran, for this process and its children."""
    monkeypatch.setenv("IDEMGUARD_STORE", f"sqlite:///{tmp_path / 'shared.db'}")
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    yield
    engine.source().engine.store.close()


@pytest.fixture
def ran(tmp_path):
    """The bodies that ran, in any process."""

    def bodies():
        file = tmp_path / "ran"
        return file.read_text().splitlines() if file.exists() else []

    return bodies


def once_each(ran, *, calls=2) -> None:
    """Every body ran once, and the shared ledger knows all calls."""
    assert Counter(ran()) == Counter(RUNS)
    totals = ExecutionLedger().totals()
    assert totals["executions"] == len(RUNS)
    assert totals["duplicates"] == 0
    assert totals["reused"] == (calls - 1) * len(CALLABLES)


def is_guarded(call) -> bool:
    """Whether it, or what it calls at last, is one of ours."""
    return type(call).__name__ in {"Guarded", "BoundGuarded"}


# --- in this process -------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", CALLABLES)
def test_a_pickled_callable_is_the_same_task(name, protocol, ran):
    call = CALLABLES[name]
    again = pickle.loads(pickle.dumps(call, protocol))
    assert take(again) == take(call)
    assert len(ran()) == RUNS.count(name)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "name", ["plain", "coroutine", "stream", "astream", "beneath", "above", "under_static"]
)
def test_what_can_be_imported_is_pickled_by_reference(name, protocol):
    call = CALLABLES[name]
    assert pickle.loads(pickle.dumps(call, protocol)) is call
    assert cloudpickle.loads(cloudpickle.dumps(call, protocol)) is call


def test_methods_are_pickled_with_what_they_are_bound_to():
    for call in (Tool.over_class, Tool("a").over_class, Tool.under_class):
        assert pickle.loads(pickle.dumps(call)) == call
    method = pickle.loads(pickle.dumps(Tool("a").method))
    assert method.__self__ == Tool("a")
    assert pickle.loads(pickle.dumps(Tool.method)).__wrapped__ is Tool.method.__wrapped__


def test_a_class_method_of_a_subclass_comes_back_bound_to_it():
    again = pickle.loads(pickle.dumps(Sub.over_class))
    assert again.__self__ is Sub
    assert b"Sub" in pickle.dumps(Sub.method)


class Sub(Tool):
    pass


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", CALLABLES)
def test_a_copy_is_the_same_task(name, copied, ran):
    call = CALLABLES[name]
    again = copied(call)
    assert take(again) == take(call)
    assert len(ran()) == RUNS.count(name)
    if name not in {"method", "comethod"}:
        assert again is call or again == call


def test_a_deep_copy_of_a_method_is_bound_to_a_copy():
    tool = Tool("a")
    again = copy.deepcopy(tool.method)
    assert is_guarded(again)
    assert again.__self__ is not tool
    assert again.__self__ == tool
    tool.callback = tool.method
    whole = copy.deepcopy(tool)
    assert whole.callback.__self__ is whole


def test_a_deep_copy_of_an_overridden_method_is_still_that_of_the_base(guard):
    class Base:
        @guard.idempotent(volatile="self", task_type="base")
        def run(self, n):
            return ["base", n]

    class Other(Base):
        def run(self, n):
            return ["sub", n]

        @property
        def inherited(self):
            return super().run

    assert copy.deepcopy(Other().inherited)(1) == ["base", 1]


def test_another_name_for_a_function_is_guarded_as_well(ran):
    other = idempotent(callables.added, task_type="other")
    for again in (pickle.loads(pickle.dumps(other)), cloudpickle.loads(cloudpickle.dumps(other))):
        assert is_guarded(again)
        assert again(1, 2) == other(1, 2) == 3
    assert ran() == ["partial"]


def test_a_local_function_cannot_be_pickled_as_it_never_could(guard):
    @guard.idempotent(task_type="local")
    def local(): ...

    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        pickle.dumps(local)


# --- by processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_pools_child_shares_every_task(method, ran):
    theirs = callables.by_pool(method)
    assert theirs == {name: take(call) for name, call in CALLABLES.items()}
    once_each(ran)


@pytest.mark.parametrize("method", ["fork", "spawn", "by_value"])
def test_a_script_shares_every_task_with_its_children(method, ran):
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, method], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["theirs"] == found["ours"]
    assert found["ours"].keys() == CALLABLES.keys()
    once_each(ran)


BY_VALUE = """
import os, subprocess, sys
import cloudpickle
from idemguard import idempotent

class Base:
    @idempotent
    @classmethod
    def make(cls, n=1):
        with open(os.environ["RAN"], "a") as file:
            print(cls.__name__, file=file)
        return cls.__name__

class Sub(Base): ...

CODE = '''
import sys, pickle, cloudpickle
calls = pickle.load(sys.stdin.buffer)
print(*[call() for call in calls], flush=True)
if sys.argv[1] == "on":
    import subprocess
    sent = cloudpickle.dumps(calls)
    subprocess.run([sys.executable, "-c", sys.argv[2], "off"], input=sent, check=True)
'''
print(Base.make(), Sub.make(), flush=True)
sent = cloudpickle.dumps([Base.make, Sub.make])
subprocess.run([sys.executable, "-c", CODE, "on", CODE], input=sent, check=True)
"""


def test_class_methods_that_are_handed_on_and_on_stay_the_same_tasks(tmp_path, ran):
    script = tmp_path / "job.py"
    script.write_text(BY_VALUE)
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Base", "Sub"] * 3
    assert ran() == ["Base", "Sub"]


# --- by value ----------------------------------------------------------------------------------------


def brought(call):
    """As another process gets it."""
    return pickle.loads(cloudpickle.dumps(call))


def local_function(guard):
    @guard.idempotent(task_type="local", key=("n", "lang"), ttl=60)
    def local(n, *, lang="en"):
        """Count down."""
        return [n] if not n else [n, *local(n - 1, lang=lang)]

    return local


def test_a_local_function_is_brought_along_whole(tmp_path):
    guard = Guard(store=f"sqlite:///{tmp_path / 'own.db'}", namespace="own")
    local = local_function(guard)
    again = brought(local)
    assert is_guarded(again)
    assert again is not local
    assert (again.__name__, again.__doc__) == ("local", "Count down.")
    assert again(2) == local(2) == again(2, lang="en") == [2, 1, 0]
    assert guard.ledger.totals()["executions"] == 3
    crossed = again._self_spec.source
    assert crossed is not guard
    assert crossed.settings == guard.settings
    assert brought(again)._self_spec.source is crossed
    crossed.close()
    guard.close()


def test_a_function_that_holds_itself_holds_the_guarded_one():
    again = brought(local_function(Guard(store="memory://")))
    cells = [cell.cell_contents for cell in again.__closure__]
    assert any(content is again for content in cells)


def test_a_local_coroutine_and_a_lambda_are_brought_along_guarded():
    @idempotent(task_type="coroutine")
    async def coroutine(n): ...

    for call in (coroutine, idempotent(lambda n: n, task_type="lambda")):
        assert is_guarded(brought(call))


@pytest.mark.parametrize("name", ["workers", "workers.callables"])
def test_a_module_that_is_registered_by_value_is_brought_along_guarded(name):
    module = importlib.import_module(name)
    cloudpickle.register_pickle_by_value(module)
    try:
        again = brought(callables.plain)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert is_guarded(again)
    assert again is not callables.plain
    assert again._self_spec.task_type == callables.plain._self_spec.task_type


def test_a_cloudpickle_inside_another_package_does_the_same(tmp_path, monkeypatch):
    inside = tmp_path / "vendor" / "cloudpickle"
    inside.parent.mkdir()
    shutil.copytree(Path(cloudpickle.__file__).parent, inside)
    monkeypatch.syspath_prepend(tmp_path)
    vendored = importlib.import_module("vendor.cloudpickle")
    try:
        again = vendored.loads(vendored.dumps(idempotent(lambda n: n, task_type="lambda")))
        assert is_guarded(again)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vendor"]:
            del sys.modules[name]


def test_a_local_class_is_brought_along_with_its_guarded_methods(tmp_path):
    guard = Guard(store=f"sqlite:///{tmp_path / 'own.db'}")

    @dataclass
    class Local:
        name: str

        @guard.idempotent(keep="self", task_type="run")
        def run(self, n: int) -> list[object]:
            return [self.name, n]

    assert Local("a").run(1) == ["a", 1]
    child = subprocess.run(
        [sys.executable, "-c", "import pickle,sys; print(pickle.load(sys.stdin.buffer)(1))"],
        input=cloudpickle.dumps(Local("a").run),
        capture_output=True,
        check=True,
    )
    assert child.stdout.decode().strip() == "['a', 1]"
    totals = guard.ledger.totals()
    assert (totals["executions"], totals["reused"]) == (1, 1)
    guard.close()


def test_a_brought_function_still_asks_what_identifies_an_instance():
    class Patched:
        pass

    Patched.run = brought(idempotent(lambda self, n: n, task_type="later"))
    with pytest.raises(ConfigurationError, match=r'volatile=\("self",\)'):
        Patched().run(1)

"""What tests put in place, of Python's own or of the plugin's, changes no count, and no count changes them."""

from __future__ import annotations

import pytest

CHILD = '''
"""A child that executes what it is told to."""
import sys
from tasks import naive
for line in sys.stdin:
    naive(line.strip())
    print("done", flush=True)
'''
CHILDREN = """
import json, os, subprocess, sys
from pathlib import Path
from unittest import mock
import pytest
from tasks import good, naive

def start():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "child.py"], text=True, **pipes)

def ask(child, *docs):
    for doc in docs:
        child.stdin.write(doc + chr(10)); child.stdin.flush()
        assert child.stdout.readline() == "done" + chr(10)

def end(child):
    child.communicate(timeout=60)

@pytest.fixture(scope="session")
def shared():
    child = start(); ask(child, "first"); yield child; end(child)

@pytest.fixture
def child():
    child = start(); yield child; end(child)

def fails(*args, **kwargs): raise ProcessLookupError
def is_wrong(*args, **kwargs): raise ValueError("a test's own")
"""


MEMORY = """
from idemguard import configure, idempotent
configure(store="memory://")

@idempotent(task_type="summarise", mode="observe")
def naive(doc): return doc.upper()

@idempotent(task_type="summarise")
def good(doc): return doc.upper()
"""


def test_children_are_heard_whatever_is_put_in_place(project):
    project.write("child.py", CHILD)
    project.write(
        "test_it.py",
        CHILDREN
        + """
PLACES = {
    "kill": (os, "kill", fails), "dir": (os, "listdir", lambda *_: []), "no_dir": (os, "listdir", fails),
    "odd_dir": (os, "listdir", is_wrong), "bytes": (Path, "read_bytes", lambda _: b""),
    "text": (Path, "read_text", lambda *_, **__: "1 (x) Z 1"), "open": (os, "open", is_wrong),
    "read": (os, "read", is_wrong), "loads": (json, "loads", lambda *_, **__: {}),
}
@pytest.mark.parametrize("name", PLACES)
def test_dup(child, monkeypatch, name):
    monkeypatch.setattr(*PLACES[name]); ask(child, "x", "x")
@pytest.mark.parametrize("name", PLACES)
def test_once(shared, monkeypatch, name):
    monkeypatch.setattr(*PLACES[name]); ask(shared, "x")
@pytest.mark.parametrize("name", PLACES)
def test_dup_that_fails(child, monkeypatch, name):
    monkeypatch.setattr(*PLACES[name]); ask(child, "x", "x"); assert not name
def test_dup_of_the_same_child(shared): ask(shared, "x", "x")
def test_ledger(child, idemguard_ledger):
    ask(child, "x")
    with mock.patch("os.kill") as kill:
        assert idemguard_ledger.runs() == 1
        assert not kill.called
""",
    )
    result = project.run(None, "--idemguard-json=report.json")
    result.came_to(passed=10, failed=19)
    assert result.report["totals"]["duplicates"] == 19
    assert result.report["incomplete"] == []
    assert "::test_dup_of_the_same_child" in result.out


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_what_is_put_in_place_is_not_called_for_the_plugin(project, workers):
    project.write("tasks.py", MEMORY)
    result = project.run(
        """
from unittest import mock
import pytest
from tasks import naive
@pytest.mark.parametrize("place", ["os.open", "os.write", "os.close", "json.dumps", "pathlib.Path.open"])
def test_clean(place):
    with mock.patch(place, side_effect=AssertionError("called")) as patched:
        naive("x")
    assert not patched.called
def test_dup(): naive("x"); naive("x")
""",
        *workers,
        plugins=["xdist"] if workers else [],
    )
    result.came_to(passed=5, failed=1)


def test_a_second_import_leaves_the_first_ones_tests_apart(project):
    result = project.run(
        """
import sys
from unittest import mock
from tasks import good, naive
kept = []
def test_before(): good("x")
def test_import():
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "idemguard"]:
            del sys.modules[name]
        from idemguard import Guard
        own = Guard(store="memory://").idempotent(task_type="own", mode="observe")(lambda n: n)
        own(1)
        kept.append(own)
def test_once(idemguard_ledger): good("x"); idemguard_ledger.assert_ran_once("summarise")
def test_once_more(idemguard_ledger):
    good("x"); kept[0](1)
    idemguard_ledger.assert_ran_once("summarise"); idemguard_ledger.assert_ran_once("own")
def test_dup(): naive("x"); naive("x")
def test_dup_of_the_second(): kept[0](1); kept[0](1)
""",
        "--idemguard-json=report.json",
    )
    result.came_to(passed=4, failed=2)
    assert result.report["session"] == []


@pytest.mark.parametrize("uses", [True, False])
def test_hooks_between_tests_are_in_no_test(project, uses):
    """Each time between two tests is apart: what hooks do before each is done before each."""
    project.write(
        "conftest.py",
        """
import pytest
from tasks import good, naive
seeded = []
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    naive("ping")
    return (yield)
def pytest_runtest_logstart():
    with_count = len(seeded)
    good("seed") and seeded.append(with_count)
""",
    )
    project.write("tasks.py", SEEDS)
    result = project.run(
        f"""
import pytest
from tasks import good, naive, ran
@pytest.mark.parametrize("number", range(3))
def test_it(number, idemguard_ledger):
    assert ran.count("seed") == number + 1
    if {uses}:
        naive("ping"); good("seed"); idemguard_ledger.assert_ran("summarise", 2)
        ran.pop()
""",
        "--idemguard-json=report.json",
    )
    result.came_to(passed=3)
    assert result.ret == 0
    assert result.report["session"] == []


def test_hooks_between_tests_are_of_a_session_that_is_one(project):
    project.write("tasks.py", SEEDS)
    project.write(
        "conftest.py",
        """
from tasks import naive
def pytest_runtest_logstart(nodeid):
    if nodeid.endswith("[2]"): naive("x")
""",
    )
    test = """
import pytest
from tasks import naive
@pytest.mark.parametrize("number", range(3))
def test_it(number):
    if number == 1: naive("x")
"""
    assert project.run(test).ret == 0
    result = project.run(test, "--idemguard-scope=session")
    assert result.ret == 1
    assert "idemguard: summarise" in result.out


SEEDS = """
from idemguard import configure, idempotent
configure(store="memory://")
ran = []

@idempotent(task_type="summarise", mode="observe")
def naive(doc): return doc

@idempotent(task_type="summarise")
def good(doc): ran.append(doc); return doc
"""


def test_what_looks_through_all_modules_for_functions_of_pythons_finds_none_that_counts(project):
    """As pyfakefs and freezegun do."""
    project.write("child.py", CHILD)
    result = project.run(
        CHILDREN
        + """
import time
@pytest.fixture
def nothing_is_as_it_was(monkeypatch):
    own = [getattr(os, name) for name in ("open", "read", "write", "close", "lseek", "listdir", "kill",
        "getpid", "getppid", "urandom", "fstat")] + [time.time, json.loads, json.dumps]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("idemguard", "pytest_idemguard"):
            for key, value in list(vars(module).items()):
                if any(value is one for one in own): monkeypatch.setattr(module, key, fails)
def test_dup(nothing_is_as_it_was):
    for _ in range(2):
        child = os.fork()
        if not child:
            naive("x"); os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
def test_dup_of_a_child(child, nothing_is_as_it_was): ask(child, "x", "x")
"""
    )
    result.came_to(failed=2)


def test_left_amid_a_test_that_has_a_wrong_marker(project):
    result = project.run(
        """
import pytest
from tasks import naive
def test_it(request):
    request.node.add_marker(pytest.mark.idemguard(max_rus=2))
    naive("x"); naive("x"); raise KeyboardInterrupt
""",
        "--idemguard-json=report.json",
    )
    assert result.ret == 2
    assert result.report["totals"]["duplicates"] == 1


def test_a_folder_for_what_is_temporary_that_tests_change(project):
    project.environment["TMPDIR"] = str(project.folder)
    result = project.run("""
import tempfile
def test_it(): tempfile.tempdir = tempfile.gettempdir() + "/other"
""")
    result.came_to(passed=1)
    assert not list(project.folder.glob("idemguard-*"))


def test_markers_of_every_kind_and_moment(project):
    project.write(
        "conftest.py",
        """
import pytest
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_appended": item.own_markers.append(pytest.mark.idemguard(max_runs=2).mark)
        if item.name == "test_parent": item.parent.add_marker(pytest.mark.idemguard(max_runs=2))
""",
    )
    result = project.run("""
import pytest
from tasks import naive
def both(): naive("x"); naive("x")
def test_appended(): both()
class TestA:
    def test_parent(self): both()
    def test_sibling(self): both()
class TestB:
    def test_dup(self): both()
    def test_marks_the_class(self, request):
        request.node.parent.add_marker(pytest.mark.idemguard(mode="off")); both()
    def test_after(self): both()
def test_wrong_fails(request):
    request.node.add_marker(pytest.mark.idemguard(bogus=1)); both()
def test_wrong_fails_anyway(request):
    request.node.add_marker(pytest.mark.idemguard(bogus=1)); both(); assert 0
def test_last(): naive("x")
""")
    result.came_to(passed=6, failed=3)
    assert result.out.count("the idemguard marker takes no bogus") >= 2


def test_a_namespace_that_was_made_up(project):
    result = project.run("""
from idemguard.context import use_namespace
from tasks import naive
def test_it(idemguard_ledger):
    with use_namespace(idemguard_ledger.namespace.rpartition("-")[0] + "-t9999"): naive("x")
""")
    result.came_to(passed=1)
    assert result.ret == 0

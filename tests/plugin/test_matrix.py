"""Each row of docs/ci.md's table with plain, threaded and asynchronous bodies, however the tests are spread; and the hook that it needs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from plugin.conftest import Project
from plugin.matrix_table import FLAKY, RERUNFAILURES, RETRY, ROWS, counts

from pytest_idemguard import plugin
from pytest_idemguard.session import Session
from pytest_idemguard.telling import Active
from pytest_idemguard.watching import Watching

SOURCES = Path(__file__).parent / "matrix"

# --- bodies: one source, in the shape of each ------------------------------------------------------

TO_PLAIN = (
    ("async def ", "def "),
    ("await ", ""),
    ("asyncSetUp", "setUp"),
    ("atasks", "tasks"),
    ("alib", "lib"),
)
ANY = "from with_loops import fixture\n"
LOOPS = """
import functools, pytest_asyncio
fixture = functools.partial(pytest_asyncio.fixture, loop_scope="session")
"""
BODIES = {  # how a call is made, and what makes tests and fixtures of coroutines
    "plain": ("plain", "from pytest import fixture\n"),
    "threads": ("threads", "from pytest import fixture\n"),
    "asyncio": ("coroutines", f'{LOOPS}pytestmark = pytest.mark.asyncio(loop_scope="session")\n'),
    "auto": ("coroutines", LOOPS),
    "anyio": ("coroutines", "from pytest import fixture\npytestmark = pytest.mark.anyio\n"),
}
SYNC = ("plain", "threads")
STRICT = (*SYNC, "asyncio", "anyio")
OWN_LOOP = (*SYNC, "asyncio")  # what anyio has no part in


def shaped(source, body):
    """A source file with bodies of this kind."""
    calls, loops = BODIES[body]
    text = (SOURCES / f"{source}.py").read_text().replace("from coroutines ", f"from {calls} ")
    if body in SYNC:
        for old, new in TO_PLAIN:
            text = text.replace(old, new)
    return text.replace(ANY, loops) if ANY in text else f"{text}\nimport pytest\n{loops}"


def file_of(source, body):
    """Where a project has it."""
    return f"test_{source}_{body}.py"


# --- projects: what is run together ----------------------------------------------------------------


class Kind(NamedTuple):
    """A project.

    Attributes:
        bodies: of each source.
        attempts: rows of the plugin that runs tests again.
        again: what it is told.
        plugins: that are loaded.
        args: that it is run with.

    """

    bodies: dict
    attempts: dict
    again: str
    plugins: tuple
    args: tuple = ()

    def rows(self, source):
        """What is expected of a source's tests."""
        return self.attempts if source == "again" else ROWS[source]


KINDS = {
    "strict": Kind(
        {"rows": STRICT, "processes": OWN_LOOP, "examples": STRICT, "units": OWN_LOOP, "again": STRICT},
        RERUNFAILURES, "reruns=2",
        ("asyncio", "anyio", "repeat", "hypothesispytest", "rerunfailures"), ("--asyncio-mode=strict",),
    ),
    "auto": Kind(
        {"rows": ("auto",), "processes": ("auto",), "units": ("auto",), "again": (*SYNC, "auto")},
        FLAKY, "max_runs=3", ("asyncio", "repeat", "flaky"), ("--asyncio-mode=auto",),
    ),
    "session": Kind(
        {"session": STRICT, "again": STRICT},
        RETRY, "retries=2", ("asyncio", "anyio", "pytest-retry"), ("--asyncio-mode=strict",),
    ),
}  # fmt: skip
# of which single rows are run, without a hook
ALONE = dict.fromkeys(("rows", "session", "marker", "watching"), SYNC[:1])
SINGLE = Kind(ALONE, {}, "", ())
SPREAD = {
    "n0": ("-n0",),
    "n2": ("-n2",),
    "loadfile": ("-n2", "--dist=loadfile"),
    "random": ("-n0", "--random-order-bucket=global"),
}
CONFTEST = """
import pytest
import atasks, tasks  # what is watched has been imported by name
@pytest.fixture(scope="session")
def anyio_backend(): return "asyncio"
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if "test_hooked_2" in item.name: tasks.naive(item.nodeid)
    return (yield)
"""
WITHOUT = """
import importlib, os
module, _, name = os.environ["WITHOUT"].partition(":")
owner = importlib.import_module(module)
*outer, name = name.split(".")
for part in outer: owner = getattr(owner, part)
delattr(owner, name)
"""
WRITTEN = ("seen.jsonl", "made.txt", "report.json")


def project_of(folder, compiled, kind):
    """The files of a project."""
    made = Project(folder, compiled)
    for path in SOURCES.glob("*.py"):
        if path.stem not in {*ROWS, "again"}:
            made.write(path.name, path.read_text())
    made.write("tasks.py", shaped("atasks", "plain"))
    made.write("lib.py", shaped("alib", "plain"))
    for source, bodies in kind.bodies.items():
        for body in bodies:
            made.write(file_of(source, body), shaped(source, body))
    made.write("attempts.py", f"import pytest\nagain = pytest.mark.flaky({kind.again})\n")
    made.write("conftest.py", CONFTEST)
    made.write("without.py", WITHOUT)
    made.environment["TMPDIR"] = str(made.folder / "temporary")
    return made


def run(project, kind, spread, tests, without=None):
    """What is seen of a run of these tests, without one of the hooks where it is named."""
    for name in WRITTEN:
        (project.folder / name).unlink(missing_ok=True)
    shutil.rmtree(project.folder / "temporary", ignore_errors=True)
    (project.folder / "temporary").mkdir()
    project.environment["WITHOUT"] = without or ""
    plugins = [] if without is None else ["without"]  # before the plugin is registered
    plugins += ["pytest_idemguard.plugin", "recorder", "xdist", "random_order", *kind.plugins]
    result = project.run(
        None, *tests, *SPREAD[spread], *kind.args, "--doctest-modules",
        "-o", "asyncio_default_fixture_loop_scope=function", "--idemguard-json=report.json",
        "--idemguard-watch=lib:complete", "--idemguard-watch=alib:complete",
        plugins=plugins, plugin=False,
    )  # fmt: skip
    return Seen(result)


# --- what is seen of a run -------------------------------------------------------------------------


class Seen:
    """What is seen of a run.

    Attributes:
        tests: what was reported of each, and what was counted.
        made: those that set a wider fixture up, or tore it down.
        code: the exit code.
        rest: what is of no test, and what was left behind.
        order: the line that tells a random order's seed.

    """

    def __init__(self, result):
        self.tests, self.code = defaultdict(list), result.ret
        seen, made, report = (result.folder / name for name in WRITTEN)
        for line in seen.read_text().splitlines() if seen.exists() else ():
            nodeid, said = json.loads(line)
            self.tests[nodeid].append(said)
        self.made = set(made.read_text().splitlines()) if made.exists() else set()
        self.rest = self._left(result.folder / "temporary")
        if report.exists():
            self._read(json.loads(report.read_text()))
        else:
            self.rest.append("there is no report")
        section = result.out.partition("= idemguard =")[2]
        for nodeid, said in re.findall(r"^(\S+::\S+):\n(idemguard: .*)$", section, re.MULTILINE):
            self.tests[nodeid].append(f"at the end: {_bare(said)}")
        unseen = result.out.partition("= idemguard: not watched =")[2]
        self.rest += re.findall("^idemguard_watch: (.*)$", unseen, re.MULTILINE)
        self.order = re.findall("^.*random-order-seed=.*$", result.out, re.MULTILINE)

    @staticmethod
    def _left(folder):
        found = [*folder.glob("idemguard*")]
        for path in Path("/tmp").glob(f"idemguard-{os.geteuid()}-*"):
            with suppress(FileNotFoundError):  # others come and go
                if os.fsencode(folder) in path.read_bytes():
                    path.unlink()
                    found.append(path)
        return ["something is left behind"] if found else []

    def _read(self, report):
        for one in report["tests"]:
            lines = self.tests[one["nodeid"]]
            too_many = sum(dup["runs"] - dup["allowed"] for dup in one["duplicates"])
            junit = [line for line in lines if line.startswith("junit")]  # of each attempt
            if junit[-1:] == [f"junit: {too_many} too many"]:
                lines[:] = [line for line in lines if line not in junit]
            near = len(one["near_duplicates"])
            lines.append(counts(one["executed"], one["reused"], too_many, near, one["attempt"]))
        for one in report["session"]:
            tests = {run["test"] for run in one["executions"]}
            for nodeid in tests - {None}:
                self.tests[nodeid].append(f"session: {_bare(one['text'])}")
            if None in tests:
                self.rest.append(_bare(one["text"]))
        self.rest += report["incomplete"]


def _bare(said):
    return re.sub(r" \[[0-9a-f]{16}\]", "", said.partition("\n")[0])


def nodeids(row, file):
    """The row's tests in a file."""
    return [f"{file}::{name.format(module=file.removesuffix('.py'))}" for name in row.tests]


def compared(seen, row, file):
    """What is expected of a row's tests, and what was seen of them."""
    lib = "lib" if file.endswith(("_plain.py", "_threads.py")) else "alib"
    expected, found = {}, {}
    for nodeid, name in zip(nodeids(row, file), row.tests, strict=True):
        lines = (row.shown if row.shown and nodeid in seen.made else row.tests)[name]
        expected[nodeid] = [line.format(file=file, lib=lib) for line in lines]
        found[nodeid] = list(seen.tests.get(nodeid, ()))
    if row.mixed:
        return sorted(expected.values()), sorted(found.values())
    return expected, found


def code_of(row, expected):
    """The exit code of a run of the row alone."""
    if row.code is not None:
        return row.code
    lines = [line for lines in expected.values() for line in lines]
    return int(any(" failed" in line or line.startswith("session") for line in lines))


# --- the rows --------------------------------------------------------------------------------------


class Matrix:
    """Each project and each spread is run once."""

    def __init__(self, factory):
        self._factory, self._projects, self._seen = factory, {}, {}

    def project(self, kind):
        """The project of a kind."""
        if id(kind) not in self._projects:
            folder = self._factory.mktemp("project")
            compiled = self._factory.getbasetemp() / "compiled"
            self._projects[id(kind)] = project_of(folder, compiled, kind)
        return self._projects[id(kind)]

    def all(self, name, spread):
        """What is seen of all tests of a project."""
        if (name, spread) not in self._seen:
            self._seen[name, spread] = None  # it is not tried again for each row
            kind = KINDS[name]
            files = [file_of(one, body) for one, bodies in kind.bodies.items() for body in bodies]
            self._seen[name, spread] = run(self.project(kind), kind, spread, files)
        seen = self._seen[name, spread]
        if seen is None:
            pytest.fail("the run broke: the first of these tests tells how")
        return seen


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return Matrix(tmp_path_factory)


@pytest.mark.parametrize(
    ("name", "spread", "file", "row"),
    [
        pytest.param(name, spread, file_of(source, body), row, id=f"{label}-{body}-{spread}-{name}")
        for name, kind in KINDS.items()
        for spread in SPREAD
        for source, bodies in kind.bodies.items()
        for body in bodies
        for label, row in kind.rows(source).items()
    ],
)
def test_row(matrix, name, spread, file, row):
    seen = matrix.all(name, spread)
    expected, found = compared(seen, row, file)
    assert found == expected, seen.order


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("name", KINDS)
def test_there_is_nothing_besides(matrix, name, spread):
    seen, kind = matrix.all(name, spread), KINDS[name]
    known = {
        nodeid
        for source, bodies in kind.bodies.items()
        for body in bodies
        for row in kind.rows(source).values()
        for nodeid in nodeids(row, file_of(source, body))
    }
    assert seen.tests.keys() - known == set()
    assert (seen.code, seen.rest) == (1, [])


# --- the hooks -------------------------------------------------------------------------------------

TESTS, CODE, REST = "tests", "code", "rest"
BODY = ("rows", "twice in the body")
UNSEEN = ("watching", "a watched module that nobody imports")
TWO = ("session", "scope session, in two tests")
# what shows that a hook is missing: a row, how it is run, and what is not as expected then
HOOKS = {
    "session:Session.pytest_runtest_setup": (*BODY, "n0", {TESTS, REST}),
    "session:Session.pytest_fixture_setup": ("rows", "wider fixture and body", "n0", {TESTS}),
    "session:Session.pytest_runtest_call": (*BODY, "n0", {TESTS}),
    "session:Session.pytest_runtest_teardown": ("rows", "only in teardown", "n0", {TESTS}),
    "session:Session.pytest_runtest_makereport": ("rows", "failed anyway", "n0", {TESTS}),
    "telling:Active.pytest_runtest_logreport": (*BODY, "n0", {TESTS}),
    "telling:Active.pytest_runtest_protocol": ("rows", "between two tests", "n0", {TESTS, CODE}),
    "session:Session.pytest_configure_node": (*TWO, "n2", {TESTS, CODE}),
    "session:Session.pytest_testnodedown": (*TWO, "n2", {REST}),
    "session:Session.pytest_sessionfinish": (*TWO, "n0", {TESTS, CODE, REST}),
    "session:Session.pytest_terminal_summary": ("rows", "mode report", "n0", {TESTS}),
    "telling:Active.pytest_runtest_makereport": (*BODY, "n0", {TESTS}),
    "watching:Watching.pytest_collection_finish": (
        "watching", "a watched module that there is not", "n0", {TESTS, REST},
    ),
    "watching:Watching.pytest_testnodedown": (
        "watching", "a watched module that one worker imports", "n2", {REST},
    ),
    "watching:Watching.pytest_sessionfinish": (*UNSEEN, "n0", {REST}),
    "watching:Watching.pytest_terminal_summary": (*UNSEEN, "n0", {REST}),
    "plugin:pytest_addoption": (*BODY, "n0", {TESTS, REST}),
    "plugin:pytest_load_initial_conftests": ("rows", "watched", "n0", {TESTS, CODE}),
    "plugin:pytest_configure": (*BODY, "n0", {TESTS, CODE, REST}),
    "plugin:pytest_unconfigure": (*BODY, "n0", {REST}),
    "plugin:pytest_make_collect_report": ("marker", "a wrong marker", "n0", {TESTS, CODE, REST}),
}  # fmt: skip


def differing(matrix, source, label, spread, without=None):
    """What of a row, run alone, is not as expected."""
    row, file = ROWS[source][label], file_of(source, "plain")
    tests = [nodeid.removesuffix("::") for nodeid in nodeids(row, file)]
    seen = run(matrix.project(SINGLE), SINGLE, spread, [*tests, *row.args], without)
    expected, found = compared(seen, row, file)
    differs = {
        TESTS: found != expected,
        CODE: seen.code != code_of(row, expected),
        REST: seen.rest != [*row.rest],
    }
    return {name for name, differs in differs.items() if differs}


@pytest.mark.parametrize("hook", HOOKS)
def test_without_a_hook_its_row_fails(matrix, hook):
    source, label, spread, expected = HOOKS[hook]
    found = differing(matrix, source, label, spread, f"pytest_idemguard.{hook}")
    assert found == expected


@pytest.mark.parametrize(
    ("source", "label", "spread"),
    sorted({(row, label, how) for row, label, how, _ in HOOKS.values()}),
)
def test_with_all_hooks_it_holds(matrix, source, label, spread):
    assert differing(matrix, source, label, spread) == set()


def test_no_hook_is_left_out():
    owners = {
        "session:Session.": Session,
        "telling:Active.": Active,
        "watching:Watching.": Watching,
        "plugin:": plugin,
    }
    hooks = {
        f"{where}{name}"
        for where, owner in owners.items()
        for name in vars(owner)
        if name.startswith("pytest_")
    }
    assert hooks == HOOKS.keys()

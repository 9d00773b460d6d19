"""Runs in other processes: children however they were started, workers of pytest-xdist, those that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

# this suite's own session watches its children as well
UNWATCHED = {"IDEMGUARD_JOURNAL": "", "IDEMGUARD_NAMESPACE_OVERRIDE": ""}


def test_children_however_they_are_started(project):
    result = project.run(
        """
import multiprocessing, os, subprocess, sys
import pytest
from tasks import good, naive
CHILD = "from tasks import naive; naive('x')"
def processes(method, fn):
    context = multiprocessing.get_context(method)
    started = [context.Process(target=fn, args=("x",)) for _ in range(2)]
    [one.start() for one in started]; [one.join() for one in started]
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_dup(method): processes(method, naive)
def test_guarded(idemguard_ledger):
    processes("spawn", good)
    idemguard_ledger.assert_ran_once("summarise"); assert idemguard_ledger.reused() == 1
def test_subprocess():
    for _ in range(2): subprocess.run([sys.executable, "-c", CHILD], check=True)
def test_here_and_in_a_child():
    naive("x"); subprocess.run([sys.executable, "-c", CHILD], check=True)
def test_none(): pass
""",
        "-rA",
    )
    result.came_to(failed=5, passed=2)
    assert "PASSED test_it.py::test_none" in result.out
    result.has("     called from <string>:1 in <module>")


def test_an_empty_environment_and_a_child_killed_after_its_second_run(project):
    result = project.run(
        """
import os, signal, subprocess, sys
from unittest import mock
import pytest
PATHS = repr(sys.path)
CHILD = f'''
import sys; sys.path[:] = {PATHS}
from tasks import naive
naive("x"); naive("x")
import os, signal; os.kill(os.getpid(), signal.SIGKILL)
'''
def test_empty():
    done = subprocess.run([sys.executable, "-c", CHILD], env={})
    assert done.returncode == -signal.SIGKILL
def test_through_a_shell():
    subprocess.run(["/bin/sh", "-c", 'echo started; "$0" -c "$1"; :', sys.executable, CHILD], env={})
def test_cleared_here():
    with mock.patch.dict(os.environ, {}, clear=True):
        from tasks import naive
        naive("x"); naive("x")
def test_none(): pass
"""
    )
    result.came_to(failed=3, passed=1)


def test_a_run_that_a_dead_process_abandoned_does_not_count(project):
    result = project.run(
        """
import os, subprocess, sys
from idemguard import Guard
guard = Guard(store="sqlite:///own.db")
@guard.idempotent(task_type="dies", lease=0.3)
def dies(die):
    if os.environ.get("DIE"): os._exit(3)
    return 1
def test_it(idemguard_ledger):
    subprocess.run([sys.executable, "-c", "from test_it import dies; dies(1)"], env=os.environ | {"DIE": "1"})
    dies(1)
    idemguard_ledger.assert_ran_once("dies")
"""
    )
    result.came_to(passed=1)


POOLS = """
import multiprocessing, os, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
import pytest
from tasks import good, naive
CHILD = "from tasks import good; good('x')"
@pytest.fixture(scope="session", params=["fork", "spawn", "forkserver"])
def pool(request):
    with ProcessPoolExecutor(1, multiprocessing.get_context(request.param)) as pool:
        pool.submit(good, "x").result()  # its worker is started, and has called
        yield pool
kept = {}
@pytest.mark.parametrize("number", range(2))
def test_pool(pool, number, idemguard_ledger):
    for _ in range(2): pool.submit(good, "x").result()
    idemguard_ledger.assert_ran_once("summarise"); assert idemguard_ledger.reused() == 1
def test_pool_dup(pool):
    for _ in range(2): pool.submit(naive, "x").result()
def test_pool_fresh(pool, idemguard_ledger):
    pool.submit(good, "x").result(); idemguard_ledger.fresh(); pool.submit(good, "x").result()
    idemguard_ledger.assert_ran_once("summarise")
@pytest.mark.idemguard(mode="off")
def test_pool_off(pool):
    for _ in range(2): pool.submit(naive, "x").result()
@pytest.mark.parametrize("number", range(2))
def test_an_older_environment(number, idemguard_ledger):
    kept.update(kept or os.environ)
    for _ in range(2): subprocess.run([sys.executable, "-c", CHILD], env=kept, check=True)
    idemguard_ledger.assert_ran_once("summarise")
@pytest.mark.parametrize("number", range(2))
def test_an_older_server_of_forks(number, idemguard_ledger):
    context = multiprocessing.get_context("forkserver")
    for _ in range(2):
        child = context.Process(target=good, args=("x",)); child.start(); child.join()
    idemguard_ledger.assert_ran_once("summarise")
def test_a_namespace_of_ones_own():
    own = {**os.environ, "IDEMGUARD_NAMESPACE_OVERRIDE": "mine"}
    code = "from idemguard import context; assert context.placed('a') == 'mine/a'"
    subprocess.run([sys.executable, "-c", code], env=own, check=True)
"""


def test_children_that_are_older_than_the_test(project):
    result = project.run(POOLS, "--idemguard-json=report.json", plugins=["xdist"])
    result.came_to(passed=17, failed=3)
    for method in ("fork", "spawn", "forkserver"):
        assert f"FAILED test_it.py::test_pool_dup[{method}]" in result.out
    assert result.report["session"] == []
    again = project.run(None, "-n2", "--idemguard-json=report.json", plugins=["xdist"])
    again.came_to(passed=17, failed=3)


def test_pools_of_the_first_conftest_and_an_environment_without_the_folder(project):
    project.write(
        "conftest.py",
        """
import multiprocessing, os
from unittest import mock
import pytest, tasks
POOL = multiprocessing.get_context("fork").Pool(1)
@pytest.fixture(scope="module")
def bare():
    path = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")}
    with mock.patch.dict(os.environ, path, clear=True): yield
""",
    )
    result = project.run(
        """
import subprocess, sys
import pytest, tasks
from conftest import POOL
CHILD = "from tasks import naive; naive('x'); naive('x')"
@pytest.mark.parametrize("number", range(2))
def test_guarded(number, idemguard_ledger):
    POOL.map(tasks.good, ["x", "x"]); idemguard_ledger.assert_ran_once()
def test_dup(): POOL.map(tasks.naive, ["x", "x"])
def test_bare(bare): subprocess.run([sys.executable, "-c", CHILD], check=True)
def test_close(): POOL.close(); POOL.join()
"""
    )
    result.came_to(passed=3, failed=2)


@pytest.mark.parametrize("args", [[], ["-n1"]])
def test_a_session_whose_folder_was_removed_is_incomplete(project, args):
    project.environment["TMPDIR"] = str(project.folder)
    result = project.run(
        """
import pathlib, shutil, tempfile
from tasks import good
def test_a():
    good("x")
    for folder in pathlib.Path(tempfile.gettempdir()).glob("idemguard-*"): shutil.rmtree(folder)
def test_b(): good("x")
""",
        *args, "--idemguard-json=report.json", plugins=["xdist"],
    )  # fmt: skip
    result.came_to(passed=2)
    assert result.report["incomplete"]
    assert all("was removed" in told for told in result.report["incomplete"])
    result.has("incomplete: the folder * was removed*")


def test_a_test_that_ends_the_run_as_if_it_were_fine(project):
    result = project.run(
        """
import pytest
from tasks import naive
def test_a(): naive("x"); naive("x"); pytest.exit("bye", returncode=0)
"""
    )
    assert result.ret == 1
    assert "ran 2 times in this test" in result.out


def test_a_namespace_in_a_test_lies_in_the_tests_own(project):
    result = project.run(
        """
from idemguard.context import namespace_override, use_namespace
from tasks import good, naive
def test_it(idemguard_ledger):
    with use_namespace("tenant/1"):
        good("x"); there = namespace_override()
    with use_namespace("other"): good("x")
    with use_namespace(there): good("x")
    good("x")
    assert idemguard_ledger.runs() == 3 and idemguard_ledger.reused() == 1
def test_again(idemguard_ledger):
    with use_namespace("tenant/1"): good("x")
    idemguard_ledger.assert_ran_once()
def test_dup():
    with use_namespace("tenant/1"): naive("x"); naive("x")
"""
    )
    result.came_to(passed=2, failed=1)


CONFTEST = "from tasks import good, naive; good('x'); good('x')"


@pytest.mark.parametrize("args", [["-n0"], ["-n1"]])
def test_what_the_first_conftest_calls_has_a_namespace_of_its_own(project, args):
    args = [*args, "-v", "--idemguard-json=report.json"]
    project.write("conftest.py", CONFTEST)
    for _ in range(2):  # nothing of the first run is reused in the second
        result = project.run("def test_it(): pass\n", *args, plugins=["xdist"])
        result.came_to(passed=1)
        assert result.ret == 0
        processes = 2 if "-n1" in args else 1
        totals = result.report["totals"]
        assert (totals["executed"], totals["reused"]) == (processes, processes)
    project.write("conftest.py", "from tasks import naive; naive('x'); naive('x')")
    result = project.run(None, *args, plugins=["xdist"])
    assert result.ret == 1
    result.has("idemguard: summarise * ran 2 times outside of tests, 1 allowed")
    off = project.run(None, *args, "--idemguard-mode=off", plugins=["xdist"])
    assert off.ret == 0
    assert off.report["totals"]["executed"] == 0


def test_a_run_that_only_collects_leaves_nothing_of_its_conftest(project):
    project.write("conftest.py", CONFTEST)
    project.write("test_it.py", "def test_it(): pass\n")
    project.write(
        "go.py",
        """
import pytest
from idemguard import context
assert pytest.main(["-p", "pytest_idemguard.plugin", "--collect-only", "-q"]) == 0
assert context.placed("a") == "a"
""",
    )
    done = subprocess.run(
        [sys.executable, "go.py"],
        cwd=project.folder, env=project.environment | UNWATCHED, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_worker_on_another_machine_needs_the_namespace_in_its_message(project):
    result = project.run(
        """
import multiprocessing
import pytest
from idemguard.context import use_namespace
from tasks import good, naive
def serve(pipe):
    while (message := pipe.recv()) is not None:
        doc, namespace = message
        with use_namespace(namespace): pipe.send(good(doc))
@pytest.fixture(scope="session")
def worker():
    import os
    os.environ["IDEMGUARD_NAMESPACE_OVERRIDE"] = "elsewhere"  # it does not follow the tests
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,)); process.start()
    yield here
    here.send(None); process.join()
@pytest.mark.parametrize("number", range(2))
def test_with(worker, number, idemguard_ledger):
    for _ in range(2):
        worker.send(("x", idemguard_ledger.namespace)); worker.recv()
    idemguard_ledger.assert_ran_once("summarise"); assert idemguard_ledger.reused() == 1
def test_without(worker, idemguard_ledger):
    worker.send(("x", None)); worker.recv()
    idemguard_ledger.assert_not_run()
"""
    )
    result.came_to(passed=3)


RUNS_ON = """
import pathlib, subprocess, sys
CHILD = '''
import pathlib, time
from tasks import naive
naive("x"); pathlib.Path("ran").touch()
while not pathlib.Path("go").exists(): time.sleep(0.01)
naive("x")
'''
children = []
def test_starts():
    children.append(subprocess.Popen([sys.executable, "-c", CHILD]))
    while not pathlib.Path("ran").exists(): pass
"""
IN_THE_NEXT = """
def test_other(idemguard_ledger):
    pathlib.Path("go").touch(); children[0].wait()
    idemguard_ledger.assert_ran_once()  # as a thread's that runs on: the test's that is under way
"""
AT_THE_END = """
import pathlib, pytest, sys
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    pathlib.Path("go").touch(); sys.modules["test_it"].children[0].wait()
"""


@pytest.mark.parametrize("when", ["in the next", "at the end"])
def test_a_child_that_runs_on_after_its_test_was_over(project, when):
    project.write("conftest.py", AT_THE_END if when == "at the end" else "")
    result = project.run(RUNS_ON + (IN_THE_NEXT if when == "in the next" else ""))
    result.came_to(passed=1 if when == "at the end" else 2)
    assert result.ret == (1 if when == "at the end" else 0)
    if when == "at the end":
        result.has(
            "idemguard: summarise * ran 2 times in test_it.py::test_starts and after its end, 1*"
        )


GOES_ON = """
import threading
from idemguard import idempotent
starts, began, forever = threading.Event(), threading.Event(), threading.Event()
@idempotent(task_type="slow", mode="observe")
def slow(doc):
    if starts.is_set(): began.set(); forever.wait()
def late(): starts.wait(); slow("x")
"""


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_a_run_that_still_goes_on_at_the_end(project, workers):
    """What its worker saw going on has not been given up when the worker has ended."""
    project.write("slow.py", GOES_ON)
    where = "'PYTEST_XDIST_WORKER' in os.environ" if workers else "True"
    project.write(
        "conftest.py",
        "import os, slow\ndef pytest_runtest_logfinish():\n"
        f"    if {where}: slow.starts.set(); slow.began.wait(60)\n",
    )
    result = project.run(
        "import threading\nimport slow\ndef test_starts():\n"
        "    slow.slow('x'); threading.Thread(target=slow.late, daemon=True).start()\n",
        *workers,
        plugins=["xdist"] if workers else [],
    )
    assert result.ret == 1
    result.has("idemguard: slow * ran 2 times in test_it.py::test_starts and after its end, 1*")


FORKS = """
import os, pytest
from _pytest.runner import runtestprotocol
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    child = os.fork()
    if not child:
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        os._exit(int(any(report.failed for report in reports)))
    failed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outcome = "failed" if failed else "passed"
    report = pytest.TestReport(item.nodeid, item.location, {}, outcome, None, "call")
    item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


def test_a_plugin_that_runs_each_test_in_a_fork(project):
    project.write("conftest.py", FORKS)
    result = project.run(
        """
from tasks import good, naive
good("while it is collected")
def test_dup(): naive("x"); naive("x")
def test_ok(idemguard_ledger): good("x"); good("x"); idemguard_ledger.assert_ran_once()
"""
    )
    result.came_to(passed=1, failed=1)


@pytest.mark.parametrize("times", [1, 2])
def test_children_of_a_test_in_a_fork(project, times):
    project.write("conftest.py", FORKS)
    result = project.run(f"""
import os
import pytest
from tasks import good, naive
def test_before(): good("x")
@pytest.mark.parametrize("number", range(2))
def test_it(number, idemguard_ledger):
    for task in [naive] * {times} + [good]:
        child = os.fork()
        if not child:
            task("x" if task is naive else "y"); os._exit(0)
        os.waitpid(child, 0)
    assert idemguard_ledger.runs() == {times} + 1  # none was served another test's
""")
    result.came_to(**({"passed": 3} if times == 1 else {"passed": 1, "failed": 2}))
    assert result.ret == times - 1


# --- pytest-xdist ----------------------------------------------------------------------------------

MANY = """
import pytest
from tasks import anaive, good, naive
import asyncio, threading
def test_dup(): naive("x"); naive("x")
def test_coroutines():
    async def main(): await asyncio.gather(anaive("x"), anaive("x"))
    asyncio.run(main())
def test_threads():
    threads = [threading.Thread(target=naive, args=("x",)) for _ in range(2)]
    [one.start() for one in threads]; [one.join() for one in threads]
@pytest.mark.parametrize("number", range(4))
def test_ok(number): good("x"); good("x")
@pytest.fixture(scope="session")
def double(): naive("x"); naive("x")
@pytest.mark.parametrize("number", range(4))
def test_wide(number, double): pass
"""


@pytest.mark.parametrize(
    "args", [["-n0"], ["-n2"], ["-n2", "--dist=loadfile"], ["-n2", "--random-order"]]
)
def test_xdist(project, args):
    plugins = ["xdist", "random_order"]
    result = project.run(MANY, *args, "-v", "--idemguard-json=report.json", plugins=plugins)
    workers = 1 if args == ["-n0"] or "--dist=loadfile" in args else 2
    # each worker sets its session fixture up, if it gets a test that wants it
    wide = result.outcomes["failed"] - 3
    assert 1 <= wide <= workers, result
    assert result.outcomes["passed"] == 8 - wide
    totals = result.report["totals"]
    assert totals["reused"] == 4
    assert totals["executed"] == 6 + 4 + 2 * wide
    assert totals["duplicates"] == 3 + wide
    assert result.report["incomplete"] == []
    assert result.report["session"] == []


def test_scope_session_shares_claims_among_workers(project):
    result = project.run(
        """
import pytest
from tasks import good
@pytest.mark.parametrize("number", range(6))
def test_it(number): good("x")
""",
        "-n2", "-v", "--idemguard-scope=session", plugins=["xdist"],
    )  # fmt: skip
    result.came_to(passed=6)
    assert result.ret == 0
    result.has("idemguard: 6 calls, 1 executed, 5 reused; 0 duplicates*")


SHARED = """
import pytest
from tasks import naive
@pytest.mark.parametrize("number", range(4))
def test_it(number): naive("x")
def test_both(): naive("y"); naive("y")
"""


@pytest.mark.parametrize("args", [["-n0"], ["-n2"]])
def test_scope_session_a_duplicate_anywhere_fails_the_session(project, args):
    project.environment["GITHUB_ACTIONS"] = "true"
    result = project.run(
        SHARED, *args, "--idemguard-scope=session", "--idemguard-json=report.json",
        plugins=["xdist"],
    )  # fmt: skip
    result.came_to(passed=4, failed=1)
    result.has(
        "idemguard: summarise * ran 4 times in this session, 1 allowed", "::error *ran 4 times*"
    )
    only = project.run(
        SHARED, *args, "-k", "test_it", "--idemguard-scope=session", "--no-summary",
        plugins=["xdist"],
    )  # fmt: skip
    assert only.ret == 1
    assert "idemguard" not in only.out.partition("collected")[2]
    (finding,) = result.report["session"]
    assert finding["runs"] == 4
    assert result.report["totals"]["duplicates"] == 3 + 1
    assert len({run["test"] for run in finding["executions"]}) == 4


def test_scope_module(project):
    project.write("test_other.py", "from tasks import naive\ndef test_it(): naive('x')\n")
    result = project.run(
        """
import pytest
from tasks import good, naive
def test_1(): good("x")
def test_2(idemguard_ledger): good("x"); idemguard_ledger.assert_not_run("summarise")
@pytest.mark.idemguard(scope="test")
def test_3(idemguard_ledger): good("x"); idemguard_ledger.assert_ran_once("summarise")
""",
        "--idemguard-scope=module",
    )
    result.came_to(passed=4)
    assert result.ret == 0


@pytest.mark.parametrize("scope", ["test", "session"])
def test_what_a_crashed_worker_saw_is_shown_and_incomplete(project, scope):
    project.environment["TMPDIR"] = str(project.folder)
    result = project.run(
        """
import os
from tasks import naive
def test_a(): naive("a")
def test_crash():
    naive("x"); naive("x"); os._exit(3)
def test_b(): naive("b")
""",
        "-n1", f"--idemguard-scope={scope}", "--idemguard-json=report.json", plugins=["xdist"],
    )  # fmt: skip
    assert result.ret == 1
    result.has("idemguard: 4 calls, 4 executed, 0 reused; 1 duplicate*", "incomplete: worker gw0*")
    assert result.report["incomplete"] == ["worker gw0 crashed"]
    assert result.report["totals"]["executed"] == 4
    tests = {one["nodeid"]: one for one in result.report["tests"]}
    found = [
        *result.report["session"],
        *tests.get("test_it.py::test_crash", {"duplicates": []})["duplicates"],
    ]
    assert [one["runs"] for one in found] == [2]
    left = Path("/tmp").glob(f"idemguard-{os.geteuid()}-*")
    assert not [one for one in left if str(project.folder) in one.read_text()]


def test_a_test_that_crashes_at_every_attempt_is_told_once(project):
    result = project.run(
        """
import os
from tasks import naive
def test_crash(): naive("x"); naive("x"); os._exit(3)
def test_other(): naive("x")
""",
        "-n1", "--reruns=1", "--idemguard-json=report.json", plugins=["xdist", "rerunfailures"],
    )  # fmt: skip
    assert result.ret == 1
    assert result.report["incomplete"] == ["worker gw0 crashed", "worker gw1 crashed"]
    told = [test["nodeid"] for test in result.report["tests"]]
    assert sorted(told) == ["test_it.py::test_crash", "test_it.py::test_other"]
    assert result.report["totals"]["duplicates"] == 1


def test_a_crashed_workers_tests_are_held_to_their_markers(project):
    result = project.run(
        """
import os
import pytest
from tasks import naive
pytestmark = pytest.mark.idemguard(max_cost="0.5", task="summarise")
@pytest.mark.idemguard(max_runs=2, max_cost=1)
def test_allowed():
    naive("x"); naive("x"); os._exit(3)
@pytest.mark.idemguard(task="summarise", max_runs=2)
def test_dup():
    naive("y"); naive("y"); naive("y"); os._exit(3)
@pytest.mark.idemguard(mode="warn")
def test_warned():
    naive("y"); naive("y"); os._exit(3)
""",
        "-n1", "--idemguard-json=report.json", plugins=["xdist"],
    )  # fmt: skip
    assert result.ret == 1
    tests = {one["nodeid"].partition("::")[2]: one for one in result.report["tests"]}
    assert {name: [one["allowed"] for one in test["duplicates"]] for name, test in tests.items()} == {
        "test_allowed": [], "test_dup": [2], "test_warned": [1],
    }  # fmt: skip
    assert [one["mode"] for one in tests["test_warned"]["duplicates"]] == ["warn"]
    assert all(one["incomplete"] for one in tests.values())
    assert result.report["session"] == []


def test_a_crash_in_a_project_without_tasks_is_not_told_of(project):
    result = project.run("import os\ndef test_a(): os._exit(3)\n", "-n1", plugins=["xdist"])
    assert result.ret == 1
    assert "idemguard" not in result.out


def test_ctrl_c(project):
    project.write(
        "test_it.py",
        """
import os, pathlib, time
from tasks import naive
def test_a(): naive("x"); naive("x")
def test_b():
    pathlib.Path("started").touch(); time.sleep(60)
""",
    )
    process = subprocess.Popen(
        project.command("--idemguard-json=report.json"),
        cwd=project.folder, env=project.environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 30
    while not (project.folder / "started").exists() and time.monotonic() < until:
        threading.Event().wait(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "idemguard: 2 calls, 2 executed, 0 reused; 1 duplicate" in out
    assert "incomplete: the run was interrupted" in out
    report = json.loads((project.folder / "report.json").read_text())
    assert report["incomplete"] == ["the run was interrupted"]
    assert len(report["tests"][0]["duplicates"]) == 1


@pytest.mark.parametrize("args", [[], ["-n1"]])
def test_what_ran_when_the_run_was_left_is_told(project, args):
    result = project.run(
        """
from tasks import naive
def test_a(): naive("x")
def test_b(): naive("y"); naive("y"); raise KeyboardInterrupt
""",
        *args, "--idemguard-json=report.json", plugins=["xdist"],
    )  # fmt: skip
    assert result.ret == 2
    assert result.report["totals"]["executed"] == 3
    assert result.report["totals"]["duplicates"] == 1
    assert "idemguard: summarise" in result.out
    assert "the run was interrupted" in result.report["incomplete"]


@pytest.mark.parametrize(("imports", "namespaces"), [("os, idemguard", 3), ("os", 1)])
def test_the_environment_tells_children_that_cannot_ask(project, imports, namespaces):
    """In another container nothing of the session can be read, but what a test sent along."""
    result = project.run(f"""
import {imports}, pytest
seen = set()
@pytest.mark.parametrize("number", range(3))
def test_it(number): seen.add(os.environ["IDEMGUARD_NAMESPACE_OVERRIDE"])
def test_all():
    assert len(seen) == {namespaces}
    assert {{one.split("-")[0] for one in seen}} == {{"pytest"}}
""")
    result.came_to(passed=4)


def test_markers_that_come_while_tests_are_run(project):
    result = project.run("""
import pytest
from tasks import naive
@pytest.fixture
def allowed(request): request.node.add_marker(pytest.mark.idemguard(max_runs=2))
class TestA:
    def test_plain(self): naive("x")
    def test_dup_before(self): naive("x"); naive("x")
    def test_allowed(self, allowed): naive("x"); naive("x")
    @pytest.mark.idemguard(mode="off")
    def test_off(self): naive("x"); naive("x")
    def test_dup_after(self): naive("x"); naive("x")
@pytest.mark.idemguard(max_runs=2)
class TestB:
    def test_allowed(self): naive("x"); naive("x")
    def test_too_often(self): naive("x"); naive("x"); naive("x")
def test_dup_outside(): naive("x"); naive("x")
""")
    result.came_to(passed=4, failed=4)
    failed = (
        "TestA::test_dup_before",
        "TestA::test_dup_after",
        "TestB::test_too_often",
        "test_dup_outside",
    )
    assert all(f"FAILED test_it.py::{name}" in result.out for name in failed)


def test_a_journal_that_cannot_be_written_changes_no_namespace(project):
    code = """
from idemguard import Guard, context
task = Guard(store="memory://").idempotent(lambda n: n, task_type="t")
assert context.placed("a") == "x/a"
assert task(1) == task(1)
assert context.placed("a") == "x/a"
"""
    told = {"IDEMGUARD_JOURNAL": str(project.folder / "none"), "IDEMGUARD_NAMESPACE_OVERRIDE": "x"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=project.environment | told, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_others_left_where_children_look_is_left_alone(project, tmp_path):
    """A name there can be guessed by everybody: a queue would hold the session up for ever."""
    from idemguard.journal import pointer  # noqa: PLC0415 - the core, in a test that needs no project

    queue, text, link = tmp_path / "queue", tmp_path / "text", tmp_path / "link"
    os.mkfifo(queue, 0o600)
    text.write_bytes(b"\xff\n")
    text.chmod(0o600)
    link.symlink_to(text)
    assert [pointer(str(path)) for path in (queue, link, tmp_path)] == [None, None, None]
    assert pointer(str(text)) == (b"\xff\n", False)
    text.chmod(0o644)
    assert pointer(str(text)) is None

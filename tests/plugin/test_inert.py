"""A project that never asked for the plugin does not notice it, and one that uses it is left as it was."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("idemguard", "pytest_idemguard")


def test_a_project_without_tasks(project):
    result = project.run(
        """
import os, sys
def test_a():
    ours = [name for name in sys.modules if name.partition(".")[0] == "idemguard"]
    heavy = {"sqlite3", "redis", "pydantic", "opentelemetry", "hashlib_"} & sys.modules.keys()
    assert not ours and not heavy
    assert "pytest_idemguard.judge" not in sys.modules
""",
        "--strict-markers", "-W", "error", "-v", "--idemguard-json=report.json",
    )  # fmt: skip
    result.came_to(passed=1)
    assert "idemguard" not in result.out.replace("pytest_idemguard", "")
    assert result.report["tests"] == []
    assert result.report["totals"]["calls"] == 0


def test_no_tests_stays_exit_code_5(project):
    assert project.run("from tasks import naive\nnaive('x')\n").ret == 5
    assert project.run(None, "-k", "nothing").ret == 5


def test_what_is_run_while_tests_are_collected(project):
    result = project.run(
        "from tasks import naive\nnaive('x'); naive('x')\ndef test_a(): naive('x')\n"
    )
    result.came_to(passed=1)
    assert result.ret == 1
    result.has("idemguard: summarise * ran 2 times outside of tests, 1 allowed")


def test_lists_of_tests_run_nothing(project):
    result = project.run("def test_a(): pass\n", "--collect-only", "-q")
    assert result.ret == 0
    assert project.run(None, "--fixtures", "-q").ret == 0
    assert "idemguard(*, max_runs=1" in project.run(None, "--markers").out


def test_without_the_plugin_it_is_inert(project):
    result = project.run(
        """
import pytest
from tasks import naive
@pytest.mark.idemguard(max_runs=1)
def test_a(): naive("x"); naive("x")
""",
        plugin=False,
    )
    result.came_to(passed=1, warning=1)  # the marker is not known


# this suite's own session watches its children as well
UNWATCHED = {"IDEMGUARD_JOURNAL": "", "IDEMGUARD_NAMESPACE_OVERRIDE": ""}


def test_the_environment_and_the_disk_are_left_as_they_were(project):
    left = project.folder / "left"
    left.mkdir()
    project.environment["TMPDIR"] = str(left)
    project.write(
        "go.py",
        """
import os, pathlib, sys
import pytest
before = dict(os.environ)
code = pytest.main(["-p", "pytest_idemguard.plugin", "-p", "no:cacheprovider", "test_it.py"])
before.pop("PYTEST_VERSION", None)
assert dict(os.environ) == before, set(os.environ) ^ set(before)
from idemguard import context, journal
assert not journal.watch.on() and context.placed("a") == "a"
assert not pathlib.Path(f"/tmp/idemguard-{os.geteuid()}-{os.getpid()}").exists()
sys.exit(int(code))
""",
    )
    project.write("test_it.py", "from tasks import good\ndef test_a(): good('x')\n")
    done = subprocess.run(
        [sys.executable, "go.py"],
        cwd=project.folder, env=project.environment | UNWATCHED, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(left.glob("idemguard*"))


def test_a_session_inside_a_test(project):
    result = project.run(
        """
pytest_plugins = ["pytester"]
from tasks import naive
def test_inner(pytester, idemguard_ledger):
    naive("x")
    pytester.makepyfile("from tasks import naive\\ndef test_a(): naive('x'); naive('x')")
    inner = pytester.runpytest_inprocess("-p", "pytest_idemguard.plugin", "-p", "no:cacheprovider")
    inner.assert_outcomes(failed=1)
    idemguard_ledger.assert_ran_once()
    naive("y")
    assert idemguard_ledger.runs() == 2
def test_dup(): naive("x"); naive("x")
"""
    )
    result.came_to(passed=1, failed=1)


def test_the_entry_module_imports_pytest_and_the_standard_library_alone():
    code = """
import sys
import pytest
before = set(sys.modules)
import pytest_idemguard.plugin
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - {"pytest_idemguard"} - sys.stdlib_module_names))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_assertions_of_the_packages_are_not_rewritten(package):
    files = list((ROOT / package).rglob("*.py"))
    without = [
        str(file.relative_to(ROOT))
        for file in files
        if "PYTEST_DONT_REWRITE" not in (ast.get_docstring(ast.parse(file.read_text())) or "")
    ]
    assert not without


def test_a_redis_left_dirty_by_an_earlier_session(project, redis_url):
    tests = f"""
from idemguard import Guard
guard = Guard(store="{redis_url}")
@guard.idempotent(task_type="counts")
def counts(): return 1
def test_a(idemguard_ledger):
    counts(); counts()
    idemguard_ledger.assert_ran_once("counts"); assert idemguard_ledger.reused() == 1
"""
    project.run(tests).came_to(passed=1)
    project.run(None).came_to(passed=1)

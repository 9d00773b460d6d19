"""What a user sets and sees: options, ini values, markers, the fixture, messages and reports."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from decimal import Decimal

import pytest

from pytest_idemguard.settings import KEYS, Rules, rules, wrong

DUP = """
from tasks import naive
def test_dup():
    naive("x"); naive("x")
def test_other():
    naive("x")
"""


# --- which setting counts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "task", "expected"),
    [
        ([], "a", Rules(max_runs=2)),
        ([{"max_runs": 3}], "a", Rules(max_runs=3)),
        ([{"max_runs": 3}, {"max_runs": 4, "mode": "warn"}], "a", Rules(max_runs=3, mode="warn")),
        ([{"task": "a", "max_runs": 5}], "a", Rules(max_runs=5)),
        ([{"task": "b", "max_runs": 5}], "a", Rules(max_runs=2)),
        ([{"task": "a", "max_runs": 5}, {"max_runs": 4}], "a", Rules(max_runs=5)),
        ([{"max_runs": 4}, {"task": "a", "max_runs": 5}], "a", Rules(max_runs=4)),
        ([{"max_runs": 4}, {"task": "a", "near": "off"}], "a", Rules(max_runs=4, near="off")),
        ([{"max_cost": 0.1}], "a", Rules(max_runs=2, max_cost=Decimal("0.1"))),
    ],
)
def test_the_closest_setting_wins(marks, task, expected):
    assert rules(Rules(max_runs=2), marks).of(task)._replace(tasks={}) == expected


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ({"max_run": 2}, "takes no max_run"),
        ({"mode": "fail"}, "mode= takes 'error' or 'warn'"),
        ({"max_runs": -1}, "max_runs= takes a number"),
        ({"max_runs": True}, "max_runs= takes a number"),
        ({"max_runs": None}, "max_runs= takes a number"),
        ({"max_tokens": 1.5}, "max_tokens= takes a number"),
        ({"max_cost": "much"}, "max_cost= takes an amount"),
        ({"max_cost": float("nan")}, "max_cost= takes an amount"),
        ({"count_failed": 1}, "count_failed= takes True or False"),
        ({"task": ""}, "task= takes a task type"),
        ({"task": "a", "scope": "session"}, "of a whole test"),
    ],
)
def test_what_is_wrong_with_a_marker(said, part):
    assert part in wrong((), said)


def test_what_is_right_with_a_marker():
    given = dict.fromkeys(KEYS)
    given |= {"max_runs": 1, "mode": "error", "scope": "test", "near": "off", "count_failed": False}
    assert wrong((), given | {"scope": "test", "task": None}) is None
    assert "keywords alone" in wrong((3,), {})


def test_marker_before_command_line_before_ini(project):
    project.write(
        "pyproject.toml", '[tool.pytest]\nidemguard_max_runs = 2\nidemguard_mode = "error"\n'
    )
    result = project.run(
        """
import pytest
from tasks import naive
def three(): [naive("x") for _ in range(3)]
def test_ini_or_line(): three()
@pytest.mark.idemguard(max_runs=3)
def test_marker(): three()
@pytest.mark.idemguard(mode="warn")
def test_warn(): three()
@pytest.mark.idemguard(mode="report")
def test_report(): three()
@pytest.mark.idemguard(mode="off")
def test_off(): three()
@pytest.mark.idemguard(task="summarise", max_runs=3)
@pytest.mark.idemguard(task="other", max_runs=0)
def test_task(): three()
class TestAll:
    pytestmark = pytest.mark.idemguard(max_runs=9)
    def test_class(self): three()
    @pytest.mark.idemguard(max_runs=1)
    def test_closer(self): three()
@pytest.mark.idemguard(max_runs=1)
@pytest.mark.idemguard(max_runs=3)
def test_lower_is_closer(): three()
def test_late(request):
    request.node.add_marker(pytest.mark.idemguard(max_runs=3)); three()
""",
        "--idemguard-max-runs=1", "-rA", "--strict-markers",
    )  # fmt: skip
    result.came_to(failed=2, passed=8, warning=1)
    assert "FAILED test_it.py::TestAll::test_closer" in result.out
    result.has("*test_it.py:8: DuplicateRunWarning: idemguard: summarise * ran 3 times*")
    result.has(
        "test_it.py::test_report:", "idemguard: summarise * ran 3 times in this test, 1 allowed"
    )
    assert project.run(DUP).ret == 0


@pytest.mark.parametrize(
    ("mode", "outcomes"),
    [("warn", {"passed": 2, "warning": 1}), ("report", {"passed": 2}), ("off", {"passed": 2})],
)
def test_modes(project, mode, outcomes):
    result = project.run(DUP, f"--idemguard-mode={mode}")
    result.came_to(**outcomes)
    assert result.ret == 0
    assert ("idemguard: 3 calls, 3 executed, 0 reused; 1 duplicate" in result.out) == (
        mode != "off"
    )


def test_warnings_may_be_errors(project):
    result = project.run(
        DUP, "--idemguard-mode=warn", "-W", "error::pytest_idemguard.DuplicateRunWarning"
    )
    result.came_to(failed=1, passed=1)


def test_off_leaves_namespaces_alone(project):
    result = project.run(
        """
import os
from idemguard import context
from tasks import good
def test_1(): good("x"); assert context.placed("default") == "default"
def test_2(): assert "IDEMGUARD_NAMESPACE_OVERRIDE" not in os.environ
def test_asked_for(idemguard_ledger):
    good("x"); good("x"); idemguard_ledger.assert_ran_once("summarise")
""",
        "--idemguard-mode=off",
    )
    result.came_to(passed=3)


def test_where_no_code_of_the_users_calls_the_task_is_named_itself(project):
    result = project.run("""
import asyncio, multiprocessing, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import pytest
from tasks import anaive, naive
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes(method):
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool: pool.map(naive, ["x", "x"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_executor(method):
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, context) as pool: list(pool.map(naive, ["x", "x"]))
def test_pool():
    with ThreadPoolExecutor(2) as pool: list(pool.map(naive, ["x", "x"]))
def test_thread():
    for _ in range(2):
        thread = threading.Thread(target=naive, args=("x",)); thread.start(); thread.join()
def test_to_thread():
    async def main(): await asyncio.gather(*(asyncio.to_thread(naive, "x") for _ in range(2)))
    asyncio.run(main())
def test_tasks():
    async def main(): await asyncio.gather(*(asyncio.create_task(anaive("x")) for _ in range(2)))
    asyncio.run(main())
""")
    result.came_to(failed=8)
    place = r"called from {} \(naive is at tasks\.py:\d+\)\n"
    for caller, times in (
        (r"concurrent/futures/thread\.py:\d+ in run", 4),
        (r"threading\.py:\d+ in run", 2),
        (r"multiprocessing/pool\.py:\d+ in mapstar", 4),
        (r"concurrent/futures/process\.py:\d+ in \S+", 4),
    ):
        assert len(re.findall(place.format(caller), result.out)) == times, result
    assert len(re.findall(r"called from test_it\.py:\d+ in ", result.out)) == 2, result


NATIVE = """
[tool.pytest]
idemguard_mode = "warn"
idemguard_near = "off"
idemguard_scope = "test"
idemguard_max_runs = 2
idemguard_max_tokens = 150
idemguard_max_cost = 0.5
idemguard_max_session_cost = 5
idemguard_watch = ["lib:f"]
idemguard_watch_llm = true
idemguard_json = "report.json"
"""
OLDER = """
[pytest]
idemguard_mode = warn
idemguard_near = off
idemguard_scope = test
idemguard_max_runs = 2
idemguard_max_tokens = 150
idemguard_max_cost = 0.5
idemguard_max_session_cost = 5
idemguard_watch =
    lib:f
idemguard_watch_llm = true
idemguard_json = report.json
"""


@pytest.mark.parametrize("ini", [("pyproject.toml", NATIVE), ("pytest.ini", OLDER)])
def test_ini_values_of_both_forms(project, ini):
    (project.folder / "pyproject.toml").unlink()
    project.write(*ini)
    project.write("lib.py", "def f(x): return x\n")
    result = project.run(
        DUP.replace("def test_other", "from lib import f\ndef test_f(): f(1)\ndef test_other")
    )
    result.came_to(passed=3, warning=1)
    result.has(
        "*DuplicateRunWarning: idemguard: this test's tasks spent 200 tokens, 150 tokens allowed"
    )
    assert [one["executed"] for one in result.report["tests"]] == [2, 1, 1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            'idemguard_mode = "fail"',
            "idemguard_mode takes 'error' or 'warn' or 'report' or 'off', not 'fail'",
        ),
        ("idemguard_max_runs = -1", "idemguard_max_runs takes a number, 0 or more, not -1"),
        (
            "idemguard_max_session_cost = -1.0",
            "idemguard_max_session_cost takes an amount in dollars",
        ),
    ],
)
def test_a_value_that_cannot_be_is_an_error_of_usage(project, line, said):
    project.write("pyproject.toml", f"[tool.pytest]\n{line}\n")
    result = project.run(DUP)
    assert result.ret == 4
    assert said in result.err


@pytest.mark.parametrize("args", [[], ["-n2"]])
def test_a_wrong_marker_is_an_error_at_collection(project, args):
    result = project.run(
        """
import pytest
@pytest.mark.idemguard(max_run=2)
def test_a(): pass
""",
        *args, plugins=["xdist"] if args else [],
    )  # fmt: skip
    assert result.ret in (1, 2)
    result.came_to(error=1)
    result.has("*ERROR collecting test_it.py*")
    assert (
        "test_it.py::test_a: the idemguard marker takes no max_run; it takes max_runs,"
        in result.out
    )


# --- the fixture -----------------------------------------------------------------------------------


def test_a_limit_of_cost_without_prices_is_told_to_say_nothing(project):
    result = project.run(
        """
import pytest
from idemguard import Guard, record_usage
guard = Guard(store="memory://", pricer={"m": {"input": "10", "output": "0"}})
@guard.idempotent(task_type="asks")
def asks(model, tokens):
    record_usage(input_tokens=tokens, output_tokens=0, model=model)
@pytest.mark.idemguard(max_cost=0.01)
class TestCost:
    def test_unpriced(self): asks("other", 1_000_000)
    def test_priced(self): asks("m", 1)
    def test_both(self): asks("other", 1); asks("m", 10_000)
    @pytest.fixture
    def late(self):
        yield
        asks("m", 10_000)
    def test_late(self, late): asks("other", 1)
"""
    )
    result.came_to(passed=3, failed=1, error=1)
    result.has(
        "*test_unpriced:",
        "idemguard: max_cost says nothing of asks: its tokens have no price",
        "  what to do: give prices*",
    )
    assert "test_priced" not in result.out


@pytest.mark.parametrize("args", [[], ["--idemguard-mode=off"]])
def test_a_guard_that_the_environment_switches_off_is_told(project, args):
    project.environment["IDEMGUARD_MODE"] = "off"
    result = project.run("from tasks import naive\ndef test_a(): naive('x'); naive('x')\n", *args)
    result.came_to(passed=1)
    assert ("IDEMGUARD_MODE=off, so that nothing is guarded" in result.out) is not bool(args)
    other = project.run("def test_a(): pass\n", *args)
    assert "IDEMGUARD_MODE" not in other.out


def test_what_to_do_where_it_is_meant_can_be_done(project):
    result = project.run(
        """
import pytest
from tasks import naive
naive("loaded"); naive("loaded")
@pytest.fixture(scope="class")
def double(): naive("x"); naive("x")
class TestOne:
    def test_it(self, double): pass
""",
        "--idemguard-json=report.json",
    )
    (told,) = result.report["session"]
    assert "if it is meant: --idemguard-max-runs=2" in told["text"]
    assert "max_runs=2) at the fixture's class" in result.out
    project.run(None, "--idemguard-max-runs=2").came_to(passed=1)


def test_the_ledger(project):
    result = project.run(
        """
from decimal import Decimal
import pytest
from idemguard import record_usage
from tasks import good, naive, idempotent
@idempotent(task_type="raises")
def raises():
    record_usage(input_tokens=5, output_tokens=0, model="m"); raise ValueError
def test_all(idemguard_ledger):
    ledger = idemguard_ledger
    ledger.assert_not_run(); ledger.assert_not_run("summarise")
    with ledger.expect("summarise"): good("x"); good("x")
    with ledger.expect(runs=2): good("y"); good("z")
    with ledger.expect("summarise", runs=0): good("z")
    with pytest.raises(ValueError): raises()
    assert (ledger.runs(), ledger.runs("summarise"), ledger.runs("other")) == (3, 3, 0)
    assert (ledger.failed(), ledger.failed("raises"), ledger.failed("summarise")) == (1, 1, 0)
    assert (ledger.reused("summarise"), ledger.fallbacks("summarise")) == (2, 0)
    assert (ledger.tokens(), ledger.tokens("raises")) == (305, 5)
    assert ledger.cost("summarise") == Decimal("0.003")
    ledger.assert_ran("summarise", 3)
    ledger.fresh()
    good("x"); ledger.assert_ran_once("summarise")
def test_once(idemguard_ledger): good("x"); good("y"); idemguard_ledger.assert_ran_once("summarise")
def test_not(idemguard_ledger): good("x"); idemguard_ledger.assert_not_run("summarise")
def test_expect(idemguard_ledger):
    with idemguard_ledger.expect("sumarise"): good("x")
def test_fresh_does_not_hide(idemguard_ledger):
    naive("x"); naive("x"); idemguard_ledger.fresh(); naive("x")
""",
        "-rA",
    )
    result.came_to(passed=1, failed=4)
    result.has(
        "*idemguard: task 'summarise' ran 2 times, expected once (0 reused, 0 failed)",
        "*called from test_it.py:* in test_once",
        "*idemguard: task 'summarise' ran once, expected 0 times*",
        "*idemguard: task 'sumarise' ran 0 times, expected once*",
        "*tasks that ran: summarise",
        "*FAILED test_it.py::test_fresh_does_not_hide*ran 2 times*",
    )


# --- near duplicates -------------------------------------------------------------------------------

NEAR = """
import uuid
import pytest
from tasks import idempotent
@idempotent(task_type="report")
def report(doc, run_at, run=None): return doc
def run(*days):
    for day in days: report("a", f"2026-01-{day:02}T10:00:00Z")
def test_near(): run(1, 2)
def test_both():
    for day in (1, 2): report("a", f"2026-01-0{day}T10:00:00Z", str(uuid.uuid4()))
def test_numbers(): report("a", 1); report("a", 2)
def test_others(): report("a", "2026-01-01T10:00:00Z"); report("b", "2026-01-02T10:00:00Z")
@idempotent(task_type="single")
def single(id): return 1
def test_only_field(): single(str(uuid.uuid4())); single(str(uuid.uuid4()))
@pytest.mark.idemguard(near="off")
def test_off(): run(1, 2)
@pytest.mark.idemguard(task="report", near="error")
def test_error(): run(1, 2, 3)
"""


def test_near_duplicates(project):
    result = project.run(NEAR, "--idemguard-json=report.json")
    result.came_to(passed=6, failed=1)
    result.has(
        "FAILED test_it.py::test_error - idemguard: report ran twice in this test, equal but for `run_at`*"
    )
    section = result.out.partition("= idemguard =")[2]
    assert section.count("which looks generated") - section.count("FAILED") == 2
    for line in (
        "test_it.py::test_near:",
        "idemguard: report ran twice in this test, equal but for `run_at`, which looks generated",
        '@idempotent(volatile=("run_at",))',
        '@pytest.mark.idemguard(task="report", near="off")',
        "equal but for `run` and `run_at`, which look",
    ):
        assert line in section, result
    found = {one["nodeid"]: one["near_duplicates"] for one in result.report["tests"]}
    assert found["test_it.py::test_near"][0]["fields"] == ["run_at"]
    assert not found["test_it.py::test_only_field"]
    quiet = project.run(NEAR, "--idemguard-near=off", "-k", "not error")
    assert quiet.ret == 0
    assert "= idemguard =" not in quiet.out


# --- messages and reports --------------------------------------------------------------------------


def test_every_traceback_style(project):
    project.write("test_it.py", DUP)
    for args in (["--tb=long"], ["--tb=short"], ["--tb=native", "-q"], ["-v"]):
        result = project.run(None, *args)
        result.came_to(failed=1, passed=1)
        assert "session.py" not in result.out, result
        result.has("idemguard: summarise * ran 2 times in this test, 1 allowed", "  what to do: *")
    line = project.run(None, "--tb=line")
    line.has("*test_it.py:3: idemguard: summarise * ran 2 times in this test, 1 allowed")
    assert project.run(None, "--tb=no", "-q").ret == 1


def test_budgets(project):
    result = project.run(
        """
import pytest
from tasks import naive
@pytest.mark.idemguard(max_tokens=150)
def test_tokens(): naive("a"); naive("b")
@pytest.mark.idemguard(max_cost=0.0015)
def test_cost(): naive("a"); naive("b")
@pytest.mark.idemguard(task="summarise", max_cost="0.002", max_tokens=200)
def test_within(): naive("a"); naive("b")
@pytest.mark.idemguard(task="summarise", max_tokens=0)
def test_task(): naive("a")
""",
        "-o", "idemguard_max_session_cost=0.005", "--idemguard-json=report.json",
    )  # fmt: skip
    result.came_to(failed=3, passed=1)
    result.has(
        "idemguard: this test's tasks spent 200 tokens, 150 tokens allowed",
        "idemguard: this test's tasks spent $0.002, $0.0015 allowed",
        "idemguard: summarise spent 100 tokens, 0 tokens allowed",
        "idemguard: the session spent $0.007, $0.005 allowed (idemguard_max_session_cost)",
    )
    only = project.run(None, "-k", "within", "-o", "idemguard_max_session_cost=0.001")
    only.came_to(passed=1, deselected=3)
    assert only.ret == 1


def test_json_junit_and_step_summary(project):
    project.environment |= {
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": str(project.folder / "s.md"),
    }
    result = project.run(
        DUP + "def test_none(): pass\n", "--idemguard-json=out/report.json", "--junitxml=j.xml"
    )
    result.came_to(failed=1, passed=2)
    report = json.loads((project.folder / "out" / "report.json").read_text())
    assert report["version"] == 1
    assert report["session"] == report["incomplete"] == []
    assert {name: report["totals"][name] for name in ("calls", "executed", "reused", "duplicates", "tokens", "cost")} == {
        "calls": 3, "executed": 3, "reused": 0, "duplicates": 1, "tokens": 300, "cost": "0.003",
    }  # fmt: skip
    dup, other = report["tests"]
    assert (dup["nodeid"], dup["attempt"]) == ("test_it.py::test_dup", 1)
    assert (other["duplicates"], other["near_duplicates"]) == ([], [])
    (finding,) = dup["duplicates"]
    assert (finding["task"], finding["runs"], finding["allowed"]) == ("summarise", 2, 1)
    assert len(finding["fingerprint"]) == 64
    assert [run["cause"] for run in finding["executions"]] == ["first", "observed"]
    cases = {case.get("name"): case for case in ET.parse(project.folder / "j.xml").iter("testcase")}
    assert cases["test_dup"].find("failure") is not None
    assert cases["test_dup"].find("error") is None
    found = {one.get("name"): one.get("value") for one in cases["test_dup"].iter("property")}
    assert found == {
        "idemguard.executed": "2", "idemguard.reused": "0", "idemguard.duplicates": "1",
        "idemguard.tokens": "200", "idemguard.cost": "0.002",
    }  # fmt: skip
    assert not list(cases["test_none"].iter("property"))
    summary = (project.folder / "s.md").read_text()
    assert "| `test_it.py::test_dup` | `summarise` | 2 | 1 |" in summary


def test_the_section_comes_on_problems_or_with_v_alone(project):
    clean = "from tasks import good\ndef test_a(): good('x'); good('x')\n"
    assert "= idemguard =" not in project.run(clean).out
    result = project.run(None, "-v")
    result.has(
        "idemguard: 2 calls, 1 executed, 1 reused; 0 duplicates; $0.001 charged, $0.001 saved"
    )


def test_first_failure_and_last_failed(project):
    project.write("test_it.py", DUP + "def test_more(): naive('x'); naive('x')\n")
    project.run(None, "-x", cache=True).came_to(failed=1)
    project.run(None, cache=True).came_to(failed=2, passed=1)
    project.run(None, "--lf", cache=True).came_to(failed=2)


def test_reports_that_cannot_be_written_fail_no_run(project):
    project.environment["GITHUB_STEP_SUMMARY"] = str(project.folder / "none" / "x")
    result = project.run(
        "from tasks import good\ndef test_a(): good('x')\n", f"--idemguard-json={project.folder}"
    )
    result.came_to(passed=1)
    assert result.ret == 0
    result.has("* could not be written: Is a directory", "* could not be written: No such file *")

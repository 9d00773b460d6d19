"""What happens to a test in which a task ran twice: each row of the table in docs/ci.md."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET

import pytest

DUP = """
from tasks import naive
def test_dup():
    naive("x"); naive("x")
def test_other():
    naive("x")
"""


def test_twice_in_one_test_fails_it_once(project):
    result = project.run(DUP)
    result.came_to(failed=1, passed=1)
    assert result.ret == 1
    result.has(
        "idemguard: summarise * ran 2 times in this test, 1 allowed",
        "  the runs after the first spent 100 tokens, $0.001",
        "  1. ok (first), *worker *, process *, thread MainThread",
        "     called from test_it.py:4 in test_dup",
        "  2. ok (observed), *",
        '  likely cause: mode="observe" counts*',
        '  what to do: guard it with mode="enforce"*',
        "FAILED test_it.py::test_dup - idemguard: summarise * ran 2 times*",
    )


def test_bodies_threads_and_function_fixtures(project):
    result = project.run(
        """
import asyncio
from concurrent.futures import ThreadPoolExecutor
import pytest
from tasks import agood, anaive, good, naive

def test_threads():
    with ThreadPoolExecutor(4) as pool: list(pool.map(naive, ["x"] * 4))
def test_threads_guarded(idemguard_ledger):
    with ThreadPoolExecutor(4) as pool: list(pool.map(good, ["x"] * 8))
    idemguard_ledger.assert_ran_once("summarise")
    assert idemguard_ledger.reused() == 7
def test_coroutines():
    async def main(): await asyncio.gather(anaive("x"), anaive("x"))
    asyncio.run(main())
def test_coroutines_guarded(idemguard_ledger):
    async def main(): await asyncio.gather(agood("x"), agood("x"))
    asyncio.run(main())
    idemguard_ledger.assert_ran_once("answer")
@pytest.fixture
def ran(): naive("x")
def test_fixture_and_body(ran): naive("x")
def test_swallows():
    try:
        naive("x"); naive("x")
    except BaseException: pass
"""
    )
    result.came_to(failed=4, passed=2)
    result.has(
        "*thread ThreadPoolExecutor-*",
        "     called from test_it.py:* in main",
        "FAILED test_it.py::test_threads *",
        "FAILED test_it.py::test_coroutines *",
        "FAILED test_it.py::test_fixture_and_body *",
        "FAILED test_it.py::test_swallows *",
    )


def test_only_in_teardown_is_an_error_there(project):
    result = project.run(
        """
import pytest
from tasks import naive
@pytest.fixture
def late():
    yield
    naive("x"); naive("x")
def test_a(late): pass
@pytest.fixture
def third():
    yield
    naive("x")
def test_told_in_its_call_alone(third): naive("x"); naive("x")
"""
    )
    result.came_to(passed=1, error=1, failed=1)
    result.has("*ERROR at teardown of test_a*", "idemguard: summarise * ran 2 times*")


def test_in_two_tests_or_two_parameters_it_is_allowed_and_nothing_is_reused(project):
    result = project.run(
        """
import pytest
from tasks import good
@pytest.mark.parametrize("number", range(3))
def test_it(number, idemguard_ledger):
    good("x")
    idemguard_ledger.assert_ran_once("summarise")
    assert idemguard_ledger.reused() == 0
""",
        "-v",
    )
    result.came_to(passed=3)
    result.has("idemguard: 3 calls, 3 executed, 0 reused; 0 duplicates; $0.003 charged*")


WIDE = """
import pytest
from tasks import good, naive
@pytest.fixture(scope="module")
def corpus():
    good("x"); yield; good("y")
def test_1(corpus, idemguard_ledger):
    good("x"); idemguard_ledger.assert_ran_once("summarise")
def test_2(corpus, idemguard_ledger):
    good("x"); idemguard_ledger.assert_ran_once("summarise")

@pytest.fixture(scope="session")
def double():
    naive("x"); naive("x")
def test_3(double): pass
def test_4(double): pass

class TestClass:
    @classmethod
    def setup_class(cls): naive("x")
    def setup_method(self): naive("x")
    def test_5(self): pass
    def test_6(self): naive("x")

class TestTwice:
    @classmethod
    def setup_class(cls): naive("x"); naive("x")
    def test_7(self): pass
    def test_8(self): pass
"""


WIDE_TESTS = (
    "test_1", "test_2", "test_3", "test_4", "TestClass::test_5", "TestClass::test_6",
    "TestTwice::test_7", "TestTwice::test_8",
)  # fmt: skip


@pytest.mark.parametrize("step", [1, -1])
def test_wider_fixtures_have_a_namespace_of_their_own(project, step):
    result = project.run(WIDE, *(f"test_it.py::{name}" for name in WIDE_TESTS[::step]))
    result.came_to(failed=3, passed=5)
    result.has("idemguard: summarise * ran 2 times in fixture test_it.py::double, 1 allowed")
    result.has("idemguard: summarise * in fixture test_it.py::TestTwice::setup_class, 1 allowed")
    first = ("test_3", "TestTwice::test_7") if step == 1 else ("test_4", "TestTwice::test_8")
    for name in ("TestClass::test_6", *first):
        assert f"FAILED test_it.py::{name} - idemguard:" in result.out, result


def test_a_wider_fixture_that_runs_twice_in_its_teardown(project):
    result = project.run(
        """
import pytest
from tasks import naive
@pytest.fixture(scope="module")
def late():
    yield
    naive("x"); naive("x")
def test_1(late): pass
def test_2(late): pass
@pytest.fixture(scope="class")
def both(): naive("x"); yield; naive("x")
class TestBoth:
    def test_3(self, both): naive("z")
    def test_4(self, both): pass
""",
        "--idemguard-json=report.json",
    )
    result.came_to(passed=4, error=1)
    result.has("*ERROR at teardown of TestBoth.test_4*")
    for name in ("both", "late"):
        assert f"ran 2 times in fixture test_it.py::{name}, 1 allowed" in result.out, result
    assert result.report["session"] == []


def test_unittest_subtests_and_doctests(project):
    project.write(
        "snippets.py",
        '''
def twice():
    """
    >>> from tasks import naive
    >>> naive("x"), naive("x")
    ('X', 'X')
    """
def once():
    """
    >>> 1
    1
    """
''',
    )
    result = project.run(
        """
import unittest
from tasks import anaive, good, naive
class T(unittest.TestCase):
    @classmethod
    def setUpClass(cls): naive("x")
    def test_dup(self): naive("x"); naive("x")
    def test_ok(self): good("x"); good("x")
    def test_own(self):
        naive("x"); naive("x"); self.fail("own failure")
    def test_sub(self):
        for number in range(2):
            with self.subTest(number=number): naive("x")
    def test_skipped(self):
        naive("x"); naive("x"); self.skipTest("no")
class A(unittest.IsolatedAsyncioTestCase):
    async def test_async(self): await anaive("x"); await anaive("x")
def test_subtests(subtests):
    for number in range(2):
        with subtests.test(number=number): naive("x")
""",
        "--doctest-modules", "test_it.py", "snippets.py", "-rA",
    )  # fmt: skip
    for name in ("T::test_dup", "T::test_sub", "A::test_async", "test_subtests"):
        assert f"FAILED test_it.py::{name} - idemguard:" in result.out, result
    assert "FAILED snippets.py::snippets.twice" in result.out, result
    assert "PASSED snippets.py::snippets.once" in result.out
    assert "PASSED test_it.py::T::test_ok" in result.out
    assert "FAILED test_it.py::T::test_own - AssertionError: own failure" in result.out
    result.has(
        "*own failure*", "*- Captured idemguard call -*", "idemguard: summarise * ran 2 times*"
    )
    assert "SKIPPED" in result.out


def test_xfail_covers_it_and_its_raises_counts(project):
    result = project.run(
        """
import pytest
from tasks import naive
@pytest.mark.xfail
def test_covered(): naive("x"); naive("x")
@pytest.mark.xfail(strict=True)
def test_covered_strictly(): naive("x"); naive("x")
@pytest.mark.xfail(raises=ValueError)
def test_another(): naive("x"); naive("x")
"""
    )
    result.came_to(xfailed=2, failed=1)


def test_a_test_that_failed_or_was_skipped_anyway_keeps_its_outcome(project):
    result = project.run(
        """
import pytest
from tasks import naive
def test_fails():
    naive("x"); naive("x")
    assert 1 == 2
def test_skips():
    naive("x"); naive("x"); pytest.skip("no")
@pytest.fixture
def broken():
    naive("x"); naive("x"); raise ValueError("broken")
def test_set_up(broken): pass
""",
        "--idemguard-json=report.json",
    )
    result.came_to(failed=1, skipped=1, error=1)
    result.has(
        "*- Captured idemguard setup -*",
        "idemguard: summarise * ran 2 times*",
        "*assert 1 == 2*",
        "*- Captured idemguard call -*",
        "idemguard: summarise * ran 2 times*",
    )
    assert {one["nodeid"]: len(one["duplicates"]) for one in result.report["tests"]} == {
        "test_it.py::test_fails": 1,
        "test_it.py::test_skips": 1,
        "test_it.py::test_set_up": 1,
    }


# --- what counts -----------------------------------------------------------------------------------


def test_which_runs_count(project):
    result = project.run(
        """
import time
import pytest
import tasks
from idemguard import Guard, OutOfScope, bypass, idempotent
store = Guard(store="memory://")
tries = 0
@store.idempotent(task_type="flaky")
def flaky():
    global tries
    tries += 1
    if tries == 1: raise RuntimeError
    return tries
@store.idempotent(task_type="handed back")
def declines(): return {"status": "out_of_scope"}
@store.idempotent(task_type="raises")
def raises(): raise OutOfScope
@store.idempotent(task_type="short", ttl=0)
def short(): return 1
@store.idempotent(task_type="plain")
def plain(): return 1
@store.idempotent(task_type="stream", mode="observe")
def stream(): yield 1; yield 2

def test_retry(idemguard_ledger):
    global tries
    tries = 0
    with pytest.raises(RuntimeError): flaky()
    flaky(); flaky()
    ledger = idemguard_ledger
    assert (ledger.runs(), ledger.failed(), ledger.reused()) == (1, 1, 1)
@pytest.mark.idemguard(count_failed=True)
def test_retry_that_counts():
    global tries
    tries = 0
    with pytest.raises(RuntimeError): flaky()
    flaky()
def test_handed_back():
    for _ in range(2):
        declines()
        with pytest.raises(OutOfScope): raises()
def test_expired(): short(); short()
def test_forced():
    plain(); store.forget(store.task_of(plain)); plain()
    with bypass(): plain()
def test_a_forced_run_that_is_tried_again():
    global tries
    tries = 2
    flaky(); store.forget(store.task_of(flaky)); tries = 0
    with pytest.raises(RuntimeError): flaky()
    flaky()
def test_stream_twice(): list(stream()); list(stream())
def test_stream_left():
    next(stream()); list(stream())
def test_claims_by_hand(idemguard_ledger):
    from idemguard import Task
    task = Task.of("by hand", {"n": 1})
    claim = store.claim(task); claim.release()
    claim = store.claim(task); claim.complete(1)
    assert (idemguard_ledger.runs("by hand"), idemguard_ledger.failed("by hand")) == (1, 1)
def test_counted_alone(idemguard_ledger):
    from idemguard import task_fingerprint
    store.ledger.record(task_fingerprint("t", {"n": 1}), "w-1", task_type="t")
    idemguard_ledger.assert_ran_once("t")
    store.ledger.record(task_fingerprint("t", {"n": 1}), "w-2", task_type="t")
    plain()
    assert store.ledger.runs(store.task_of(plain).fingerprint) == 1  # those of this test
def test_no_shared_store():
    other = Guard(store="sqlite:///other.db")
    twin = other.idempotent(plain_body, task_type="twin")
    twin(); store.idempotent(plain_body, task_type="twin")()
def plain_body(): return 1
"""
    )
    result.came_to(failed=4, passed=7)
    result.has(
        "*a run that raised counts here (count_failed)*",
        "  likely cause: the runs share no store (MemoryStore and SqliteStore *)*",
        "FAILED test_it.py::test_retry_that_counts *",
        "FAILED test_it.py::test_stream_twice *",
        "FAILED test_it.py::test_counted_alone - idemguard: t * ran 2 times*",
        "FAILED test_it.py::test_no_shared_store *",
    )


def test_causes_lease_fallback_and_a_run_that_goes_on(project):
    result = project.run(
        """
import threading
from idemguard import Guard
guard = Guard(store="memory://")
def pair(fn):
    entered, go = threading.Event(), threading.Event()
    def body(first):
        if first:
            entered.set(); go.wait(20)
        return 1
    return body, entered, go

def test_fallback():
    entered, go, turns = threading.Event(), threading.Event(), []
    @guard.idempotent(task_type="slow", wait_timeout=0.05)
    def slow():
        turns.append(1)
        if len(turns) == 1:
            entered.set(); go.wait(20)
        return 1
    thread = threading.Thread(target=slow); thread.start(); entered.wait(20)
    slow(); go.set(); thread.join()

def test_lease(monkeypatch):
    from idemguard.heart import Beat
    monkeypatch.setattr(Beat, "start", lambda self: None)
    turns = []
    @guard.idempotent(task_type="frozen", lease=0.05)
    def frozen():
        turns.append(1)
        if len(turns) == 1:
            thread = threading.Thread(target=frozen); thread.start(); thread.join()
        return 1
    frozen()

def test_goes_on():
    entered = threading.Event()
    @guard.idempotent(task_type="goes on", mode="observe")
    def goes_on(): entered.set(); stop.wait(20)
    for _ in range(2):
        threading.Thread(target=goes_on, daemon=True).start(); entered.wait(20); entered.clear()
stop = threading.Event()
def test_end(): stop.set()
"""
    )
    result.came_to(failed=3, passed=1)
    result.has(
        "*fallback*",
        "  likely cause: a caller lost its patience after a wait of 0.0* s (wait_timeout)*",
        "  likely cause: the lease ran out while*",
        "  1. still running*",
    )


# --- other plugins ---------------------------------------------------------------------------------

RERUN = """
import pytest
from tasks import good, naive
tries = 0
{mark}
def test_it(idemguard_ledger):
    global tries
    tries += 1
    good("x"); idemguard_ledger.assert_ran_once("summarise")
    assert tries == 3
again = 0
{mark}
def test_dup_is_run_again():
    global again
    again += 1
    naive("x")
    if again == 1: naive("x")
"""


@pytest.mark.parametrize(
    ("plugins", "mark", "args"),
    [
        (["rerunfailures"], "", ["--reruns=2"]),
        (["rerunfailures", "xdist"], "", ["--reruns=2", "-n1"]),
        (["flaky"], "@pytest.mark.flaky(max_runs=3)", []),
        (["pytest-retry"], "", ["--retries=2"]),
    ],
)
def test_a_rerun_is_a_new_attempt(project, plugins, mark, args):
    result = project.run(
        RERUN.format(mark=mark), *args, "--idemguard-json=report.json", "--junitxml=j.xml",
        plugins=plugins,
    )  # fmt: skip
    assert result.ret == 0, result
    assert result.outcomes["passed"] == 2
    tests = {one["nodeid"].rpartition("::")[2]: one for one in result.report["tests"]}
    assert tests["test_it"]["attempt"] == 3
    assert tests["test_dup_is_run_again"]["attempt"] == 2
    assert not tests["test_dup_is_run_again"]["duplicates"]
    for case in ET.parse(project.folder / "j.xml").iter("testcase"):
        names = [one.get("name") for one in case.iter("property")]
        assert len(names) == len(set(names)) == 5


@pytest.mark.parametrize(
    ("plugins", "args"),
    [
        (["rerunfailures"], ["--reruns=2"]),
        (["rerunfailures", "xdist"], ["--reruns=2", "-n1"]),
        (["pytest-retry"], ["--retries=2"]),
    ],
)
def test_a_last_attempt_without_a_call_is_all_that_counts(project, plugins, args):
    result = project.run(
        """
import atexit
import pytest
from tasks import good, naive
tries = []
def test_it():
    tries.append(1)
    if len(tries) < 3:
        naive("x"); naive("x"); good("x")
@pytest.fixture
def late():
    yield
    if len(tries) < 5: good("late")
def test_other(late):
    tries.append(1)
    assert len(tries) > 4
""",
        *args, "--idemguard-json=report.json", "-v", plugins=plugins,
    )  # fmt: skip
    assert result.ret == 0, result
    assert result.outcomes["passed"] == 2
    assert result.report["tests"] == result.report["session"] == []
    assert result.report["totals"]["executed"] == 0
    assert "session.Failure" not in result.out


def test_a_first_call_in_a_teardown_that_fails_is_counted(project):
    result = project.run(
        """
import pytest
@pytest.fixture
def broken():
    yield
    from tasks import naive
    naive("x"); naive("x")
    raise LookupError("broken")
def test_it(broken): pass
""",
        "--idemguard-json=report.json",
    )
    result.came_to(passed=1, error=1)
    (told,) = result.report["tests"]
    assert [one["runs"] for one in told["duplicates"]] == [2]
    result.has("*LookupError: broken", "*idemguard: summarise * ran 2 times in this test*")


def test_an_expected_failure_of_unittest_covers_it(project):
    result = project.run(
        """
import unittest
from tasks import good, naive
class One(unittest.TestCase):
    @unittest.expectedFailure
    def test_covered(self): naive("x"); naive("x")
    @unittest.expectedFailure
    def test_own(self): naive("x"); naive("x"); self.fail("as expected")
    @unittest.expectedFailure
    def test_unexpected(self): good("x"); good("x")
    @unittest.expectedFailure
    def test_skipped(self): naive("x"); naive("x"); self.skipTest("no")
@unittest.expectedFailure
class Two(unittest.TestCase):
    def test_covered(self): naive("x"); naive("x")
class Three(unittest.TestCase):
    def tearDown(self): raise RuntimeError("torn down")
    @unittest.expectedFailure
    def test_torn(self): naive("x"); naive("x")
""",
        "-rA",
    )
    result.came_to(xfailed=3, failed=2, skipped=1)
    assert "FAILED test_it.py::One::test_unexpected" in result.out
    result.has("XFAIL test_it.py::One::test_covered - *idemguard: summarise * ran 2 times*")


def test_the_mode_of_a_task_type_counts(project):
    test = """
import pytest
from tasks import naive
@pytest.mark.idemguard(task="summarise", mode="off")
def test_off(): naive("x"); naive("x")
@pytest.mark.idemguard(task="other", mode="off")
def test_other(): naive("x"); naive("x")
@pytest.mark.idemguard(task="summarise", mode="error")
def test_error(): naive("x"); naive("x")
"""
    result = project.run(test, "--idemguard-json=report.json")
    result.came_to(passed=1, failed=2)
    assert result.report["session"] == []
    off = project.run(None, "--idemguard-mode=off", "--idemguard-json=report.json")
    off.came_to(passed=2, failed=1)
    assert off.report["session"] == []


def test_what_a_test_puts_in_the_place_of_the_systems_functions(project):
    result = project.run(
        """
import os, time
from unittest import mock
import pytest
from idemguard.context import use_namespace
@pytest.fixture(scope="class")
def another():
    with mock.patch("os.getpid", return_value=4_000_000): yield
class TestOne:
    def test_first(self, another): pass
    def test_second(self): pass
class TestTwo:
    def test_third(self, another):
        from tasks import naive
        naive("x"); naive("x")
@mock.patch("time.time", mock.MagicMock())
def test_time():
    from tasks import naive
    naive("x"); naive("x")
@mock.patch("os.getpid", return_value=4_000_000)
def test_pid(_):
    from tasks import naive
    naive("x"); naive("x")
def test_after():
    from tasks import naive
    naive("x"); naive("x")
@pytest.mark.parametrize("name", ["pytest-mine", "pytest-0123456789-x"])
def test_names(name, idemguard_ledger):
    from tasks import good, naive
    with use_namespace(name): good("x")
    with use_namespace(idemguard_ledger.namespace + "-agent1"): good("x")
    assert idemguard_ledger.runs() == 2
def test_none(): pass
"""
    )
    result.came_to(passed=5, failed=4)
    assert result.ret == 1


def test_a_file_whose_name_is_no_text(project):
    project.environment["GITHUB_STEP_SUMMARY"] = str(project.folder / "summary.md")
    name = os.fsencode(project.folder) + b"/test_\xff.py"
    with open(name, "w") as file:  # noqa: PTH123 - as bytes
        file.write("from tasks import naive\ndef test_a(): naive('x'); naive('x')\n")
    result = project.run(None, "--idemguard-scope=module")
    result.came_to(failed=1)
    assert "| `summarise` | 2 | 1 |" in (project.folder / "summary.md").read_text()


def test_repeat_and_random_order(project):
    result = project.run(
        DUP.replace('naive("x"); naive("x")', 'naive("x")') + WIDE.partition('@pytest.fixture(scope="session")')[0],
        "--count=2", "--random-order", plugins=["repeat", "random_order"],
    )  # fmt: skip
    result.came_to(passed=8)


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_pytest_asyncio(project, mode):
    result = project.run(
        f"""
import asyncio
import pytest, pytest_asyncio
from tasks import agood, anaive
pytestmark = {'pytest.mark.asyncio(loop_scope="module")' if mode == "strict" else "[]"}
@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker():
    queue = asyncio.Queue()
    async def loop():
        while True:
            doc, future = await queue.get()
            future.set_result(await agood(doc))
    task = asyncio.create_task(loop())
    async def submit(doc):
        future = asyncio.get_running_loop().create_future()
        await queue.put((doc, future)); return await future
    yield submit
    task.cancel()
async def test_dup(): await asyncio.gather(anaive("x"), anaive("x"))
async def test_ok(idemguard_ledger):
    await asyncio.gather(agood("x"), agood("x"))
    idemguard_ledger.assert_ran_once("answer")
@pytest.mark.asyncio(loop_scope="module")
async def test_1(worker, idemguard_ledger):
    await worker("x"); idemguard_ledger.assert_ran_once("answer")
@pytest.mark.asyncio(loop_scope="module")
async def test_2(worker, idemguard_ledger):
    await worker("x"); await worker("x"); idemguard_ledger.assert_ran_once("answer")
""",
        f"--asyncio-mode={mode}", "-o", "asyncio_default_fixture_loop_scope=function",
        plugins=["asyncio"],
    )  # fmt: skip
    result.came_to(failed=1, passed=3)


def test_anyio_on_asyncio(project):
    result = project.run(
        """
import anyio, pytest
from tasks import agood, anaive
pytestmark = pytest.mark.anyio
@pytest.fixture(scope="module")
def anyio_backend(): return "asyncio"
@pytest.fixture(scope="module")
async def wide(anyio_backend): yield await agood("x")
async def test_dup(wide): await anaive("x"); await anaive("x")
async def test_ok(wide, idemguard_ledger):
    async with anyio.create_task_group() as group:
        group.start_soon(agood, "x"); group.start_soon(agood, "x")
    idemguard_ledger.assert_ran_once("answer")
""",
        plugins=["anyio"],
    )
    result.came_to(failed=1, passed=1)


def test_hypothesis_begins_anew_for_each_example(project):
    result = project.run(
        """
from hypothesis import HealthCheck, given, settings, strategies
from tasks import good
seen = []
@given(strategies.integers(0, 9))
@settings(max_examples=20, database=None, suppress_health_check=list(HealthCheck))
def test_it(idemguard_ledger, number):
    idemguard_ledger.fresh()
    good("x"); good("x")
    idemguard_ledger.assert_ran_once("summarise")
    assert idemguard_ledger.reused() == 1
    seen.append(idemguard_ledger.namespace)
def test_all(): assert len(set(seen)) == len(seen) > 1
""",
        plugins=["hypothesispytest"],
    )
    result.came_to(passed=2)


DOUBLE = """
import pytest
from tasks import naive
@pytest.fixture(scope="{}", autouse=True)
def wide(): naive("x"); naive("x")
"""


@pytest.mark.parametrize("scope", ["module", "session"])
def test_a_wider_fixtures_duplicate_stays_over_reruns(project, scope):
    tests = DOUBLE.format(scope) + "def test_a(): pass\ndef test_b(): pass\n"
    result = project.run(tests, "--reruns", "1", plugins=["rerunfailures"])
    result.came_to(failed=1, passed=1, rerun=1)


@pytest.mark.parametrize("first", ["pytest.skip()", "pytest.xfail('known')", "assert 0"])
def test_a_wider_fixtures_duplicate_waits_for_a_test_that_can_fail(project, first):
    mark = "@pytest.mark.xfail\n" if "assert" in first else ""
    tests = DOUBLE.format("session") + f"{mark}def test_a(): {first}\n"
    kind = "skipped" if "skip" in first else "xfailed"
    result = project.run(tests + "def test_b(): pass\n")
    # its own teardown where it skips by itself, the next test where nothing of it can fail
    found = {"failed": 1} if mark else {"passed": 1, "error": 1}
    result.came_to(**{kind: 1}, **found)
    assert project.run(tests).ret == 1  # also where no other is left

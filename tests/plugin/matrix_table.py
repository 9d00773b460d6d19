"""What comes of each row of docs/ci.md's table: what is reported of its tests, and what was counted."""

from __future__ import annotations

from typing import NamedTuple


def counts(ran, reused=0, too_many=0, near=0, attempt=1):
    """What the JSON report says of a test."""
    said = f"{ran} ran, {reused} reused, {too_many} too many"
    said += f", {near} near" if near else ""
    return said + (f", attempt {attempt}" if attempt > 1 else "")


def told(task="summarise", ran=2, where="in this test"):
    """The first line of what is said of a duplicate."""
    return f"idemguard: {task} ran {ran} times {where}, 1 allowed"


def passes(*numbers, **more):
    """It passes; and what was counted."""
    return ["call passed", counts(*numbers, **more)]


def fails(said=None, ran=2, reused=0, too_many=1, phase="call", **more):
    """A duplicate fails it, once; and what was counted."""
    first = [] if phase == "call" else ["call passed"]
    failed = f"{phase} failed: {said or told()}"
    return [*first, failed, counts(ran, reused, too_many, **more)]


NOTHING = ["call passed"]
NEAR = "idemguard: dated ran twice in this test, equal but for `day`, which looks generated"


class Row(NamedTuple):
    """A row: what comes of its tests.

    Attributes:
        tests: what is seen of each.
        shown: what is seen of the one instead that sets a wider fixture up, or tears it down.
        mixed: whether it is open which of the tests it is seen of.
        args: that it is run with, where it is run alone.
        code: the exit code then; None: as its tests come out.
        rest: what is told then that is of no test.

    """

    tests: dict
    shown: dict | None = None
    mixed: bool = False
    args: tuple = ()
    code: int | None = None
    rest: tuple = ()


def all_of(expected, *names):
    """The same for all of these tests."""
    return Row(dict.fromkeys(names, expected))


def wide(label, phase="call", *, name, tests=("1", "2"), ran=(0, 0)):
    """A fixture of several tests runs a task twice, and the one that has it run fails."""
    names = [f"{name}{one}" for one in tests]
    said = told(where=f"in fixture {{file}}::{label}")
    return Row(
        {one: passes(n) if n else NOTHING for one, n in zip(names, ran, strict=True)},
        {one: fails(said, n, phase=phase) for one, n in zip(names, ran, strict=True)},
    )


TABLE = {
    "twice in the body": all_of(fails(), "test_body", "test_body_apart", "test_body_swallows"),
    "two tasks, once each": all_of(passes(2), "test_body_one_more_allowed"),
    "function fixtures": all_of(
        fails(), "test_fixture_twice", "test_fixture_and_body", "test_fixtures",
        "TestMethods::test_setup_method",
    ),
    "only in teardown": all_of(
        fails(phase="teardown"), "test_teardown", "test_teardown_and_body"
    ),
    "told once, in the call": all_of(fails(ran=3), "test_teardown_after_body"),
    "two tests": all_of(passes(2), "test_tests_1", "test_tests_2"),
    "between two tests": all_of(passes(1), "test_hooked_1", "test_hooked_2"),
    "two parameters": all_of(passes(2), "test_parameters[0]", "test_parameters[1]"),
    "repeat": all_of(passes(2), "test_repeat[1-2]", "test_repeat[2-2]"),
    "class fixture": wide("of_class", name="TestOfClass::test_", ran=(1, 0)),
    "module fixture": wide("of_module", name="test_of_module_", ran=(0, 1)),
    "session fixture": wide("of_session", name="test_of_session_"),
    "setup_class": wide("TestSetupClass::setup_class", name="TestSetupClass::test_"),
    "class fixture's teardown": wide("of_class_late", "teardown", name="TestOfClassLate::test_"),
    "wider fixture and body": all_of(passes(1), "test_apart_1", "test_apart_2"),
    "subtests": all_of(fails(), "test_subtests"),
    "doctest": all_of(fails(), "{module}.in_doctest"),
    "doctest's reuse": all_of(passes(1, 1), "{module}.in_doctest_once"),
    "xfail": all_of(
        [f"call xfailed: {told()}", counts(2, 0, 1)],
        "test_xfail", "test_xfail_strict", "test_xfail_raises_it",
    ),
    "xfail, in teardown": all_of(
        ["call xpassed", f"teardown xfailed: {told()}", counts(2, 0, 1)], "test_xfail_in_teardown"
    ),
    "xfail of another exception": all_of(fails(), "test_xfail_raises_another"),
    "strict xfail of a test that passes": all_of(
        ["call failed: [XPASS(strict)]", counts(1, 1)], "test_xfail_without"
    ),
    "failed anyway": all_of(
        ["call failed: ValueError: own", f"beside it: {told()}", counts(2, 0, 1)],
        "test_anyway_fails",
    ),
    "skipped anyway": all_of(
        ["call skipped: Skipped: own", f"beside it: {told()}", counts(2, 0, 1)],
        "test_anyway_skips",
    ),
    "set-up failed anyway": all_of(
        ["setup failed: ValueError: own", f"beside it: {told()}", counts(2, 0, 1)],
        "test_anyway_in_set_up",
    ),
    "scope session, in one test": all_of(fails(), "test_scope_session"),
    "reuse": all_of(passes(1, 1), "test_counts_reuse"),
    "raised": all_of(passes(2, 1), "test_counts_raised"),
    "raised, count_failed": all_of(fails(told("unsteady")), "test_counts_raised_where_asked"),
    "declined": all_of(passes(4), "test_counts_declined"),
    "expired": all_of(passes(2), "test_counts_expired"),
    "abandoned": all_of(passes(2), "test_counts_abandoned"),
    "fallback": all_of(fails(told("slow")), "test_counts_fallback"),
    "forget": all_of(passes(2), "test_counts_forget"),
    "bypass": all_of(passes(2), "test_counts_bypass"),
    "watched": all_of(fails(told("{lib}:complete")), "test_counts_watched"),
    "max_runs": all_of(passes(2), "test_counts_max_runs"),
    "mode warn": all_of(
        ["call passed", f"warned: {told()}", counts(2, 0, 1)], "test_mode_warn"
    ),
    "mode report": all_of(
        ["call passed", counts(2, 0, 1), f"at the end: {told()}"], "test_mode_report"
    ),
    "mode off": all_of(NOTHING, "test_mode_off"),
    "near": all_of(["call passed", counts(2, near=1), f"at the end: {NEAR}"], "test_near_warn"),
    "near error": all_of(fails(NEAR, too_many=0, near=1), "test_near_error"),
    "near off": all_of(passes(2), "test_near_off"),
}  # fmt: skip

PROCESSES = {
    kind: all_of(fails(), f"test_child[{kind}]") for kind in ("forked", "spawned", "sub-process")
}
EXAMPLES = {
    "hypothesis": all_of(passes(5, 5), "test_fresh"),
    "hypothesis without fresh": all_of(fails(told(ran=5), 5, too_many=4), "test_not_fresh"),
}
UNITS = {
    "unittest": all_of(fails(ran=3), "TestUnit::test_body"),
    "unittest's setUp and body": all_of(fails(), "TestUnit::test_set_up"),
    "unittest's subtests": all_of(fails(ran=3), "TestUnit::test_subtests"),
    "unittest's reuse": all_of(passes(2, 1), "TestUnit::test_reuse"),
    "unittest, failed anyway": all_of(
        ["call failed: AssertionError: own", f"beside it: {told()}", counts(3, 0, 1)],
        "TestUnit::test_fails",
    ),
    "unittest, skipped anyway": all_of(
        ["call skipped: Skipped: own", f"beside it: {told()}", counts(3, 0, 1)],
        "TestUnit::test_skips",
    ),
    "unittest's expectedFailure": all_of(
        [f"call xfailed: _pytest.outcomes.XFailed: {told()}", counts(3, 0, 1)],
        "TestUnit::test_expected",
    ),
    "unittest's expectedFailure of a test that passes": all_of(
        ["call failed: Failed: Unexpected success", counts(2, 1)], "TestUnit::test_expected_without"
    ),
    "setUpClass": wide("TestUnitClass::setUpClass", name="TestUnitClass::test_"),
}  # fmt: skip

SESSION = {
    "scope session, shared": Row(
        {f"test_shared[{n}]": passes(int(n == 0), int(n != 0)) for n in range(4)}, mixed=True
    ),
    "scope session, in two tests": all_of(
        ["call passed", counts(1), f"session: {told(where='in this session')}"],
        "test_anywhere[0]", "test_anywhere[1]",
    ),
}  # fmt: skip

# run alone
MARKER = {
    "a wrong marker": Row(
        {"": ["collection failed: {file}::test_wrong: the idemguard marker takes no max_run"]},
        code=2, rest=("the run was interrupted",),
    ),
}  # fmt: skip
SELDOM = ("--idemguard-watch=seldom:ask",)
WATCHING = {
    "a watched module that there is not": Row(
        {"test_passes": []}, args=("--idemguard-watch=nowhere:ask",), code=4
    ),
    "a watched module that nobody imports": Row(
        {"test_passes": NOTHING}, args=SELDOM,
        rest=("seldom:ask: nothing was counted, the module 'seldom' was never imported",),
    ),
    "a watched module that one worker imports": Row(
        {"test_imports": NOTHING, "test_passes": NOTHING}, args=SELDOM
    ),
}  # fmt: skip


def attempts(first, *, last, each=True):
    """Rows of a plugin that runs a test up to three times.

    Args:
        first: how it reports what is run again; None: not at all.
        last: what the last attempt's failure says.
        each: whether it reports every one, or the first alone.

    """
    times = 0 if first is None else 2 if each else 1
    return {
        "again, then once": all_of(
            [*[f"call {first}: {told()}"] * min(times, 1), *passes(2, attempt=2)],
            "test_again_then_once",
        ),
        "again and again": all_of(
            [*[f"call {first}: {told()}"] * times, *fails(last, attempt=3)],
            "test_again_and_again",
        ),
        "again for its own failure": all_of(
            [*[f"call {first}: Failed: own"] * min(times, 1), *passes(1, 1, attempt=2)],
            "test_again_for_its_own_failure",
        ),
    }


RERUNFAILURES = attempts("rerun", last=told())
FLAKY = attempts(None, last=told())
# the last attempt's report is made past all hooks
RETRY = attempts("retried", last=f"Failed: {told()}", each=False)

# by the file of matrix/ that has the tests; those of attempts by the plugin that makes them
ROWS = {
    "rows": TABLE,
    "processes": PROCESSES,
    "examples": EXAMPLES,
    "units": UNITS,
    "session": SESSION,
    "marker": MARKER,
    "watching": WATCHING,
}

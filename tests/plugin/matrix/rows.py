"""The table's rows as tests: coroutines here, and plain functions where `async` is taken out."""

from __future__ import annotations

from contextlib import suppress

import pytest
from atasks import (
    complete,
    dated,
    declines,
    dies,
    good,
    naive,
    refuses,
    short,
    unsteady,
)
from children import die
from coroutines import Event, both, call, ended, plainly, started, until
from recorder import made
from shared import failures, forget, guard
from with_loops import fixture

from idemguard import OutOfScope, bypass

# --- in one test -----------------------------------------------------------------------------------


async def test_body():
    await both(naive, "x")


async def test_body_apart():
    await call(naive, "x")
    await call(naive, "x")


async def test_body_swallows():
    with suppress(BaseException):
        await both(naive, "x")


async def test_body_one_more_allowed():
    await call(naive, "x")
    await call(naive, "y")


@fixture()
async def once():
    await call(naive, "x")


@fixture()
async def once_more():
    await call(naive, "x")


@fixture()
async def twice():
    await both(naive, "x")


async def test_fixture_twice(twice):
    pass


async def test_fixture_and_body(once):
    await call(naive, "x")


async def test_fixtures(once, once_more):
    pass


class TestMethods:
    def setup_method(self):
        plainly(call, naive, "x")

    async def test_setup_method(self):
        await call(naive, "x")


# --- teardown --------------------------------------------------------------------------------------


@fixture()
async def late():
    yield
    await call(naive, "x")


@fixture()
async def twice_late():
    yield
    await both(naive, "x")


async def test_teardown(twice_late):
    pass


async def test_teardown_and_body(late):
    await call(naive, "x")


async def test_teardown_after_body(late):
    await both(naive, "x")


# --- allowed ---------------------------------------------------------------------------------------


async def test_hooked_1(request):
    # before the second one, a hook of the project does the same
    await call(naive, request.node.nodeid.replace("hooked_1", "hooked_2"))


async def test_hooked_2():
    await call(naive, "y")


async def test_tests_1():
    await call(good, "x")
    await call(naive, "y")


async def test_tests_2():
    await call(good, "x")
    await call(naive, "y")


@pytest.mark.parametrize("number", range(2))
async def test_parameters(number):
    await call(good, "x")
    await call(naive, "y")


@pytest.mark.repeat(2)
async def test_repeat():
    await call(good, "x")
    await call(naive, "y")


# --- fixtures that several tests share -------------------------------------------------------------


@fixture(scope="class")
async def of_class():
    made()
    await both(naive, "x")


class TestOfClass:
    async def test_1(self, of_class):
        await call(naive, "x")

    async def test_2(self, of_class):
        pass


@fixture(scope="module")
async def of_module():
    made()
    await both(naive, "x")


async def test_of_module_1(of_module):
    pass


async def test_of_module_2(of_module):
    await call(naive, "x")


@fixture(scope="session")
async def of_session():
    made()
    await both(naive, "x")


async def test_of_session_1(of_session):
    pass


async def test_of_session_2(of_session):
    pass


class TestSetupClass:
    @classmethod
    def setup_class(cls):
        made()
        plainly(both, naive, "x")

    async def test_1(self):
        pass

    async def test_2(self):
        pass


@fixture(scope="class")
async def of_class_late():
    yield
    made()
    await both(naive, "x")


class TestOfClassLate:
    async def test_1(self, of_class_late):
        pass

    async def test_2(self, of_class_late):
        pass


@fixture(scope="module")
async def apart():
    await call(good, "x")
    yield
    await call(good, "y")


async def test_apart_1(apart):
    await call(good, "x")


async def test_apart_2(apart):
    await call(good, "x")


# --- other kinds of tests --------------------------------------------------------------------------


async def test_subtests(subtests):
    for number in range(2):
        with subtests.test(number=number):
            await call(naive, "x")


def in_doctest():
    """
    >>> plainly(both, naive, "x") and None
    """


def in_doctest_once():
    """
    >>> plainly(both, good, "x") and None
    """


# --- outcomes that it keeps ------------------------------------------------------------------------


@pytest.mark.xfail
async def test_xfail():
    await both(naive, "x")


@pytest.mark.xfail(strict=True)
async def test_xfail_strict():
    await both(naive, "x")


@pytest.mark.xfail(raises=pytest.fail.Exception)
async def test_xfail_raises_it():
    await both(naive, "x")


@pytest.mark.xfail(raises=ValueError)
async def test_xfail_raises_another():
    await both(naive, "x")


@pytest.mark.xfail
async def test_xfail_in_teardown(twice_late):
    pass


@pytest.mark.xfail(strict=True)
async def test_xfail_without():
    await both(good, "x")


async def test_anyway_fails():
    await both(naive, "x")
    raise ValueError("own")


async def test_anyway_skips():
    await both(naive, "x")
    pytest.skip("own")


@fixture()
async def broken():
    await both(naive, "x")
    raise ValueError("own")


async def test_anyway_in_set_up(broken):
    pass


@pytest.mark.idemguard(scope="session")
async def test_scope_session():
    await both(naive, f"scope {__name__}")


# --- what counts -----------------------------------------------------------------------------------


async def test_counts_reuse(idemguard_ledger):
    await both(good, "x")
    idemguard_ledger.assert_ran_once("summarise")


async def test_counts_raised():
    failures.append(RuntimeError())
    with pytest.raises(RuntimeError):
        await call(unsteady)
    await both(unsteady)


@pytest.mark.idemguard(count_failed=True)
async def test_counts_raised_where_asked():
    failures.append(RuntimeError())
    with pytest.raises(RuntimeError):
        await call(unsteady)
    await call(unsteady)


async def test_counts_declined():
    for _ in range(2):
        await call(declines)
        with pytest.raises(OutOfScope):
            await call(refuses)


async def test_counts_expired():
    await call(short)
    await call(short)


async def test_counts_abandoned():
    die()
    await call(dies)


async def test_counts_fallback():
    entered, go, turns = Event(), Event(), []

    @guard.idempotent(task_type="slow", wait_timeout=0.05)
    async def slow():
        turns.append(1)
        if len(turns) == 1:
            entered.set()
            await until(go)

    leader = await started(slow)
    await until(entered)
    await call(slow)
    go.set()
    await ended(leader)


async def test_counts_forget():
    await call(good, "x")
    forget(good, "x")
    await call(good, "x")


async def test_counts_bypass():
    await call(good, "x")
    with bypass():
        await good("x")


async def test_counts_watched():
    await both(complete, "x")


@pytest.mark.idemguard(max_runs=2)
async def test_counts_max_runs():
    await both(naive, "x")


# --- modes -----------------------------------------------------------------------------------------


@pytest.mark.idemguard(mode="warn")
async def test_mode_warn():
    await both(naive, "x")


@pytest.mark.idemguard(mode="report")
async def test_mode_report():
    await both(naive, "x")


@pytest.mark.idemguard(mode="off")
async def test_mode_off():
    await both(naive, "x")


async def near():
    for day in (1, 2):
        await call(dated, "x", f"2026-01-0{day}T10:00:00Z")


async def test_near_warn():
    await near()


@pytest.mark.idemguard(near="error")
async def test_near_error():
    await near()


@pytest.mark.idemguard(near="off")
async def test_near_off():
    await near()

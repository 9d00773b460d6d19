"""The hooks of a test run: an attempt begins, is judged, and told of; at the end all of it is.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from pytest_idemguard.kept import Kept
from pytest_idemguard.plugin import DuplicateRunWarning, is_marked, rules_of
from pytest_idemguard.spaces import Attempt, Spaces

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_idemguard.judge import Finding
    from pytest_idemguard.settings import Rules
    from pytest_idemguard.spaces import Wide

RECORD = pytest.StashKey["dict[str, Any]"]()


class Failure(pytest.fail.Exception):  # type: ignore[name-defined,misc]
    """A plain failure, without a traceback into this package."""

    def __init__(self, text: str) -> None:
        super().__init__(text, pytrace=False)
        self.short = text.partition("\n")[0]


# shown by plugins that format it by themselves, and a failure like any other
Failure.__module__, Failure.__qualname__ = "builtins", "Failed"


def _unexpected(item: pytest.Item, failed: list[Any]) -> bool:
    """Whether all that failed is that a test of `unittest` was expected to."""
    of = (getattr(item, "obj", None), getattr(item, "cls", None))
    expected = any(getattr(one, "__unittest_expecting_failure__", False) for one in of)
    return expected and [str(one.value)[:18] for one in failed] == ["Unexpected success"]


class Session(Spaces):
    """The hooks; with pytest-xdist each worker is a session, and the controller.

    Args:
        config: of the run.
        base: what is asked of every test.

    """

    def __init__(self, config: pytest.Config, base: Rules) -> None:
        given = getattr(config, "workerinput", None)
        worker = "main" if given is None else given["workerid"]
        shared = None if given is None else given.get("idemguard")
        super().__init__(worker, shared, is_worker=given is not None, outside=base.mode != "off")
        self.config, self.base = config, base
        self.records: dict[str, dict[str, Any]] = {}  # by test; not in a worker
        self.left: list[dict[str, Any]] = []  # what workers saw besides
        self.missing: set[str] = set()  # workers that have not told all
        self.removed: set[str] = set()  # and those whose children could not
        self.verdict: Any = None
        # what the present attempt was told of wider fixtures
        self.given: list[tuple[Wide, Any]] = []
        self._active = False

    # --- one test ----------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A new attempt: reruns call this hook again, but not the one around it.

        It comes before every test of whoever has the plugin installed: what can wait until something
        runs does.
        """
        if Kept.getpid() != self._pid:
            self.forked()
        if self.given:
            self._take_back(item)
        if self._watches and not self._active:
            self._activate()  # so that what comes between this test and the next is in neither
        self.begun.append(item)
        base, why = self.base, None
        if is_marked(item):
            try:
                base = rules_of(item, base)
            except pytest.UsageError as error:
                why = str(error)
        # who asks for the ledger has it counted in any case
        counted = base.counts() or "idemguard_ledger" in getattr(item, "fixturenames", ())
        space = self.space_of(item, base.scope) if counted else None
        self.current = Attempt(item, base, space)
        self.enter(space)
        if why is not None:
            pytest.fail(why, pytrace=False)

    def _take_back(self, item: pytest.Item) -> None:
        """An attempt that does not count has told nobody of wider fixtures."""
        given, self.given = self.given, []
        if self.begun[-1].nodeid == item.nodeid:
            for wide, sign in given:
                wide.told.discard(sign)
                self.news.append(wide)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        """What a wider fixture runs is its own, whichever test sets it up."""
        if fixturedef.scope == "function":
            return (yield)
        rules = rules_of(request.node, self.base)
        # what pytest makes of `setup_class` and its kin is shown under that name
        name = re.sub(r"^_(?:xunit|unittest)_(\w+?)_fixture_.*", r"\1", fixturedef.argname)
        label = f"{fixturedef.baseid}::{name}".lstrip(":")
        space = self.space_for(label, fixturedef.scope, request.node.nodeid, rules)
        kept: list[str | None] = []
        fixturedef.addfinalizer(lambda: self.enter(kept.pop()))  # after all others of this fixture
        before = self.enter(space)
        try:
            return (yield)
        finally:
            self.enter(before)
            fixturedef.addfinalizer(lambda: kept.append(self.enter(space)))  # and before

    def findings(self, attempt: Attempt, call: Any = None) -> list[Finding]:
        """What is not allowed and was not told yet.

        What a wider fixture ran waits for a test that can fail by it.
        """
        if len(attempt.events) == attempt.looked and not self.news and self.journals.quiet():
            return []
        self.drain()
        if len(attempt.events) == attempt.looked and not self.news:
            return []
        attempt.looked = len(attempt.events)
        self._activate()
        from pytest_idemguard.judge import judged

        skips = (pytest.skip.Exception, pytest.xfail.Exception)
        skipped = call is not None and isinstance(call.excinfo.value, skips)
        excused = attempt.item.get_closest_marker("xfail") is not None
        try:
            return judged(self, attempt, wide=not skipped and not excused)
        except pytest.UsageError as error:  # a marker that came while it ran
            if call is None:
                raise Failure(str(error)) from None
            attempt.item.add_report_section(call.when, "idemguard", str(error))
            return []

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """After the test itself; not called where it raised."""
        if (attempt := self.current) is None:
            return
        if not (found := self.findings(attempt)):
            return
        if failed := getattr(item, "_excinfo", None):  # unittest keeps a failure on the item
            if _unexpected(item, failed) and any(one.mode == "error" for one in found):
                failed.clear()  # it has failed as it should
                pytest.xfail(Failure(self._text(found)).short)
            self._beside(item, "call", found)
        else:
            self._deliver(item, found)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """What ran in teardown alone is an error there."""
        if (attempt := self.current) is not None and (found := self.findings(attempt)):
            self._deliver(item, found)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> pytest.TestReport | None:
        """A test that failed or was skipped anyway keeps its outcome."""
        attempt = self.current
        if attempt is None or (call.excinfo is None and call.when != "teardown"):
            return None
        was_active = self._active
        own = call.excinfo is not None and not isinstance(call.excinfo.value, Failure)
        if own and (found := self.findings(attempt, call)):
            self._beside(item, call.when, found)
        if call.when == "teardown":
            if attempt.events or attempt.found:
                self._activate()
                from pytest_idemguard.record import properties, record

                item.stash[RECORD] = made = record(self, attempt)
                item.user_properties[:] = [
                    one for one in item.user_properties if not one[0].startswith("idemguard.")
                ] + properties(made)
            self.current = None
        if self._active and not was_active:  # too late for its hook to be called for this report
            from pytest_idemguard.telling import finished

            return finished(pytest.TestReport.from_item_and_call(item, call), item, call)
        return None

    def _deliver(self, item: pytest.Item, found: list[Finding]) -> None:
        for one in found:
            if one.mode == "warn":
                path, line, _ = item.location
                file = str(item.config.rootpath / path)
                said = DuplicateRunWarning(self._text([one]))
                warnings.warn_explicit(said, None, file, (line or 0) + 1)
        if failing := [one for one in found if one.mode == "error"]:
            raise Failure(self._text(failing))

    def _text(self, found: list[Finding]) -> str:
        from pytest_idemguard.message import text

        return text(found, self.config.rootpath)

    def _beside(self, item: pytest.Item, when: str, found: list[Finding]) -> None:
        if told := [one for one in found if one.mode in ("error", "warn")]:
            item.add_report_section(when, "idemguard", self._text(told))

    def _activate(self) -> None:
        """What only a session with guarded calls pays for."""
        if not self._active:
            from pytest_idemguard.telling import Active

            self._active = True
            self.config.pluginmanager.register(Active(self), "idemguard-active")

    # --- all of it ---------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker is about to start."""
        self._activate()
        node.workerinput["idemguard"] = {"folder": self.folder, "uid": self.uid}
        self.missing.add(node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended; one that crashed has no output."""
        output = getattr(node, "workeroutput", None)
        if output is not None:
            self.left += output.get("idemguard", [])
            self.missing.discard(node.gateway.id)
            if output.get("idemguard_removed"):
                self.removed.add(node.gateway.id)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """After the last fixtures were torn down, before the terminal's summary."""
        self.drain()
        if (attempt := self.current) is not None:  # the run was left amid a test
            self._broken_off(attempt)
        if self.missing:
            self.sweep()
        whole = self.is_whole()
        if self.is_worker:
            output: dict[str, Any] = session.config.workeroutput  # type: ignore[attr-defined]
            from pytest_idemguard.record import leftovers

            output["idemguard"] = leftovers(self) if self.seen else []
            if not whole:
                output["idemguard_removed"] = True
            return
        if not whole:
            self.removed.add(self.worker)
        if not (self.seen or self.records or self.left or self.missing or self.json_path):
            return
        from pytest_idemguard.verdict import Verdict  # not before something ran

        interrupted = session.exitstatus == pytest.ExitCode.INTERRUPTED
        self.verdict = Verdict(self, interrupted=interrupted)
        self.verdict.write()
        if self.verdict.fails and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _broken_off(self, attempt: Attempt) -> None:
        self.current = None
        if self.is_worker:
            self.late += attempt.events
        elif attempt.events:
            from pytest_idemguard.judge import judged
            from pytest_idemguard.record import record

            judged(self, attempt, wide=True, lenient=True)
            self.records[attempt.item.nodeid] = record(self, attempt) | {"incomplete": True}

    @property
    def json_path(self) -> str:
        """Where the JSON report is written; empty: nowhere."""
        given: str | None = self.config.option.idemguard_json
        return given or str(self.config.getini("idemguard_json"))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The section, where there is something to say."""
        if self.verdict is not None:
            self.verdict.show(terminalreporter)
        off = os.environ.get("IDEMGUARD_MODE") == "off"
        if off and "idemguard.calls" in sys.modules and self.base.mode != "off":
            terminalreporter.write_line(
                "idemguard: IDEMGUARD_MODE=off, so that nothing is guarded, and nothing counted",
                yellow=True,
            )

"""The hooks, in the order in which pytest calls them; imports pytest and the standard library alone.

Plain hooks, and no fixture that is used unasked: what is raised here unwinds everybody else's wrappers
in order, so that xfail, reruns, `-x`, `--lf` and reports work as for any failure.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pytest_idemguard.kept import Kept
from pytest_idemguard.settings import (
    CHOICES,
    MODES,
    NEAR,
    SCOPES,
    Rules,
    dollars,
    misfit,
    rules,
    wrong,
)

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    from pytest_idemguard.ledger import RunLedger
    from pytest_idemguard.session import Session

NAME = "idemguard-session"
_sessions: list[Session] = []  # the innermost last: a session may run tests that run sessions


class _Early:
    """What runs while the first conftest files are loaded, and has a namespace of its own, too."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._watch: Any = None
        self._pid = Kept.getpid()

    def join(self, watch: Any) -> bool:
        """idemguard is in use."""
        if Kept.getpid() != self._pid:  # a forked child finds the session that comes of it
            return False
        self._watch = watch
        watch.begin(self.events.append, None, f"pytest-{os.urandom(5).hex()}-early")
        return True

    def end(self) -> None:
        """No session came of it."""
        if self._watch is not None:
            self._watch.end()


_early: list[_Early] = []


class DuplicateRunWarning(UserWarning):
    """A task ran more often than allowed, and the mode is `warn`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The command line's options, and the same for the ini file."""
    group = parser.getgroup("idemguard", "idemguard: no task runs twice")
    group.addoption(
        "--idemguard-mode", choices=MODES, help="what a duplicate does: error (default), warn, "
        "report (in the terminal section alone), off.",
    )  # fmt: skip
    group.addoption(
        "--idemguard-near", choices=NEAR, help="what two runs do that are equal but for a field "
        "that looks generated: warn (default), error, off.",
    )  # fmt: skip
    group.addoption(
        "--idemguard-scope", choices=SCOPES,
        help="how far results are shared, and runs counted: test (default), module, session.",
    )  # fmt: skip
    group.addoption(
        "--idemguard-max-runs", type=int, metavar="N", help="runs of one task that are allowed (1)."
    )
    group.addoption(
        "--idemguard-json", metavar="PATH", help="write what was counted to this file, as JSON."
    )
    group.addoption(
        "--idemguard-watch", action="append", default=[], metavar="MODULE:QUALNAME",
        help="count the calls of a function that is not decorated, too (may be repeated).",
    )  # fmt: skip
    group.addoption(
        "--idemguard-watch-llm", action="store_true", default=None,
        help="count the requests of the openai and anthropic packages, too.",
    )  # fmt: skip
    parser.addini("idemguard_mode", "see --idemguard-mode", default="error")
    parser.addini("idemguard_near", "see --idemguard-near", default="warn")
    parser.addini("idemguard_scope", "see --idemguard-scope", default="test")
    parser.addini("idemguard_max_runs", "see --idemguard-max-runs", type="int", default=1)
    parser.addini("idemguard_json", "see --idemguard-json", default="")
    parser.addini("idemguard_watch", "see --idemguard-watch", type="linelist", default=[])
    parser.addini("idemguard_watch_llm", "see --idemguard-watch-llm", type="bool", default=False)
    parser.addini(
        "idemguard_max_tokens", "tokens that one test may spend", type="int", default=None
    )
    for name, what in (("max_cost", "one test"), ("max_session_cost", "all tests together")):
        text = f"dollars that {what} may spend"
        parser.addini(f"idemguard_{name}", text, type="float", default=None)


def asked(config: pytest.Config) -> Rules:
    """What command line and ini file say.

    Raises:
        pytest.UsageError: a value that cannot be; it is named.

    """
    said: dict[str, Any] = {}
    for name in (*CHOICES, "max_runs"):
        given = getattr(config.option, f"idemguard_{name}", None)
        said[name] = config.getini(f"idemguard_{name}") if given is None else given
    said["max_tokens"] = config.getini("idemguard_max_tokens")
    said["max_cost"] = config.getini("idemguard_max_cost")
    limit = {"max_session_cost": config.getini("idemguard_max_session_cost")}
    for name, value in (said | limit).items():
        if (why := misfit(name, value)) is not None:
            raise pytest.UsageError(f"idemguard_{name} takes {why}, not {value!r}")
    return Rules(**said | {"max_cost": dollars(said["max_cost"])})


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Watch functions before any conftest can import them by name, and what it calls."""
    option = early_config.known_args_namespace
    mode = option.idemguard_mode or early_config.getini("idemguard_mode")
    if mode != "off" and not _sessions:
        _early.append(_Early())
        early_config.add_cleanup(_forget_early)
    targets = [*option.idemguard_watch, *early_config.getini("idemguard_watch")]
    llm = option.idemguard_watch_llm or early_config.getini("idemguard_watch_llm")
    if targets or llm:
        from pytest_idemguard.watching import install

        early_config.add_cleanup(install(targets, llm=bool(llm), config=early_config))


def _forget_early() -> None:
    while _early:
        _early.pop().end()


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch."""
    config.addinivalue_line(
        "markers",
        "idemguard(*, max_runs=1, task=None, mode='error', scope='test', max_tokens=None, "
        "max_cost=None, count_failed=False, near='warn'): how often a task may run in this test.",
    )
    base = asked(config)
    if not config.option.collectonly:
        from pytest_idemguard.session import Session

        session = Session(config, base)
        if _early:
            session.adopt(_early.pop().events)
        _sessions.append(session)
        config.pluginmanager.register(session, NAME)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave everything as it was."""
    session = (
        config.pluginmanager.unregister(name=NAME)
        if config.pluginmanager.has_plugin(NAME)
        else None
    )
    if session in _sessions:
        _sessions.remove(session)
        session.close()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A marker that says what there is not is an error at collection."""
    report = yield
    above = is_marked(collector)
    for item in report.result or ():
        if (above or item.own_markers) and isinstance(item, pytest.Item):
            for mark in item.iter_markers("idemguard"):
                if (why := wrong(mark.args, mark.kwargs)) is not None:
                    report.outcome, report.result = "failed", []
                    report.longrepr = f"{item.nodeid}: {why}"
                    return report
    return report


def is_marked(node: Any) -> bool:
    """Whether a test, or what it is in, has any marker; `keywords` may know less than the markers."""
    while node is not None:
        if node.own_markers:
            return True
        node = node.parent
    return False


def rules_of(node: pytest.Item | pytest.Collector, base: Rules) -> Rules:
    """What is asked of a test, or of all in a module.

    Raises:
        pytest.UsageError: one of its markers says what there is not.

    """
    marks = list(node.iter_markers("idemguard"))
    if not marks:
        return base
    for mark in marks:
        if (why := wrong(mark.args, mark.kwargs)) is not None:
            raise pytest.UsageError(f"{node.nodeid}: {why}")
    return rules(base, [mark.kwargs for mark in marks])


@pytest.fixture
def idemguard_ledger(request: pytest.FixtureRequest) -> RunLedger:
    """What ran in this test: runs, reuse, tokens, cost, and assertions about them."""
    from pytest_idemguard.ledger import RunLedger

    return RunLedger(_sessions[-1], request.node)


def join(watch: Any) -> bool:
    """Called by idemguard at the first guarded call of a process: whether a session watches it.

    Args:
        watch: `idemguard.journal.watch`.

    """
    here = _sessions or _early
    return bool(here) and here[-1].join(watch)

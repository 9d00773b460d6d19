"""What a user sees in a real Jaeger: two processes, one execution, and the link from one trace to the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from programs import need
from servers.jaeger import Jaeger
from servers.server import HOST, PATIENCE
from workers.lab import found_a_claim, until

from idemguard.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.jaeger import Span

pytestmark = pytest.mark.jaeger

TESTS = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "idemguard"
CALL, WAIT, REQUEST, BODY = "idemguard summarise", "idemguard wait", "request", "chat small"
# 1,200 tokens at 3 dollars a million, and 150 at 15
SPENT = {
    "input_tokens": ("int64", 1200),
    "output_tokens": ("int64", 150),
    "total_tokens": ("int64", 1350),
    "cache_read_tokens": ("int64", 200),
    "reasoning_tokens": ("int64", 50),
}
COST = {"cost.amount": ("float64", 0.00585), "cost.currency": ("string", "USD")}
USED = {f"idemguard.usage.{name}": value for name, value in SPENT.items()}
CHARGED = USED | {f"idemguard.{name}": value for name, value in COST.items()}
SAVED = {f"idemguard.saved.{name}": value for name, value in (SPENT | COST).items()}


@pytest.fixture(scope="module")
def jaeger() -> Iterator[Jaeger]:
    """A Jaeger, everybody's: each test has services of its own."""
    program = need(
        "jaeger",
        places=sorted(CACHE.glob("jaeger-*/jaeger"), reverse=True),
        how="run tests/build_jaeger.sh, which needs Go",
    )
    with Jaeger(program) as made:
        yield made


@dataclass(frozen=True)
class Told:
    """What a process said of its call, and its service."""

    service: str
    source: str
    fingerprint: str
    execution: str
    trace: str
    leader: list[str] | None


class Users:
    """Processes that call one task around one store, and send their spans to a Jaeger."""

    def __init__(self, jaeger: Jaeger, url: str, folder: Path) -> None:
        self._jaeger = jaeger
        self.url = url
        self._folder = folder
        self._gate, self._started = folder / "gate", folder / "started"
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str) -> None:
        """A process that calls, as a service of that name."""
        given = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
        given |= {
            "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}",
            "NO_PROXY": HOST,
            "OTEL_SERVICE_NAME": self.service(name),
            "OTEL_EXPORTER_OTLP_ENDPOINT": self._jaeger.endpoint,
        }
        self._processes[name] = subprocess.Popen(
            [
                *(sys.executable, "-W", "error", "-m", "workers.traced"),
                *(name, self.url, "a-17", self._started, self._gate),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=given,
        )

    def service(self, name: str) -> str:
        return f"{name}-{self._folder.name}"

    def executes(self, name: str) -> None:
        """Wait until a body runs in that process."""
        until(lambda: self._started.exists() or not self._runs(name), what="a body has started")
        assert self._runs(name), self._processes[name].communicate()

    def _runs(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def open(self) -> None:
        """Let bodies end."""
        self._gate.touch()

    def ended(self, name: str) -> Told:
        """Wait until that process has ended well; what it said."""
        process = self._processes[name]
        out, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (0, ""), errors
        return Told(self.service(name), **json.loads(out))

    def close(self) -> None:
        for process in self._processes.values():
            with process:
                process.kill()


@pytest.fixture(params=["sqlite", "redis"])
def users(request, jaeger, tmp_path) -> Iterator[Users]:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
    made = Users(jaeger, url, tmp_path)
    yield made
    made.close()


def shown(jaeger: Jaeger, told: Told, *names: str) -> list[Span]:
    """The spans of a process, which are these and no others, each once, as soon as Jaeger has them."""
    until(lambda: len(jaeger.trace(told.trace)) >= len(names), what=f"{names} in Jaeger")
    spans = jaeger.trace(told.trace)
    assert sorted(span.name for span in spans) == sorted(names)
    assert {(span.service, span.trace_id) for span in spans} == {(told.service, told.trace)}
    return sorted(spans, key=lambda span: names.index(span.name))


def child_of(span: Span) -> tuple[str, str, str]:
    return ("CHILD_OF", span.trace_id, span.span_id)


def follows(span: Span) -> tuple[str, str, str]:
    return ("FOLLOWS_FROM", span.trace_id, span.span_id)


def typed(span: Span, *prefixes: str) -> dict[str, tuple[str, Any]]:
    """Its tags of such names, each with its type."""
    return {
        name: (span.types[name], value)
        for name, value in span.tags.items()
        if name.startswith(prefixes)
    }


def is_the_execution(span: Span, told: Told, name: str) -> None:
    """The tags say who executed which task why, and what it cost."""
    assert told.source == span.tags["idemguard.outcome"] == "executed"
    assert span.tags["idemguard.task.type"] == "summarise"
    assert span.tags["idemguard.fingerprint"] == told.fingerprint[:16]
    assert span.tags["idemguard.worker"] == name
    assert span.tags["gen_ai.agent.name"] == "writer"
    assert span.tags["idemguard.cause"] == "first"
    assert span.tags["idemguard.execution.id"] == told.execution
    assert typed(span, "idemguard.usage.", "idemguard.cost.", "idemguard.saved.") == CHARGED
    assert not typed(span, "idemguard.leader.", "idemguard.wait.", "error", "gen_ai.usage.")


def is_reused(span: Span, told: Told, name: str, leader: Span, execution: str) -> None:
    """The tags say whose execution it is, and what was saved."""
    assert told.source == span.tags["idemguard.outcome"] == "reused"
    assert span.tags["idemguard.task.type"] == "summarise"
    assert span.tags["idemguard.fingerprint"] == leader.tags["idemguard.fingerprint"]
    assert span.tags["idemguard.worker"] == name
    assert span.tags["idemguard.cause"] == "first"
    assert span.tags["idemguard.execution.id"] == told.execution == execution
    assert typed(span, "idemguard.usage.", "idemguard.cost.", "idemguard.saved.") == SAVED
    assert typed(span, "idemguard.leader.") == {
        "idemguard.leader.trace_id": ("string", leader.trace_id),
        "idemguard.leader.span_id": ("string", leader.span_id),
    }
    assert told.leader == [leader.trace_id, leader.span_id]
    assert not typed(span, "error", "gen_ai.usage.")


def test_a_later_process_is_one_click_from_the_execution_of_one_that_has_ended(jaeger, users):
    users.open()
    users.start("first")
    first = users.ended("first")
    users.start("second")
    second = users.ended("second")

    request, executed, body = shown(jaeger, first, REQUEST, CALL, BODY)
    is_the_execution(executed, first, "first")
    assert request.references == []
    assert executed.references == [child_of(request)]
    assert body.references == [child_of(executed)]

    request, reused = shown(jaeger, second, REQUEST, CALL)
    is_reused(reused, second, "second", executed, first.execution)
    assert reused.trace_id != executed.trace_id
    assert reused.references == [child_of(request), follows(executed)]
    assert "idemguard.wait.duration" not in reused.tags


def test_who_waits_is_one_click_from_whom_it_waits_for(jaeger, users):
    users.start("leader")
    users.executes("leader")
    users.start("waiter")
    store = open_store(users.url)
    try:
        until(lambda: found_a_claim(store), what="the second one waits")
    finally:
        store.close()
    users.open()
    leader, waiter = users.ended("leader"), users.ended("waiter")

    request, executed, body = shown(jaeger, leader, REQUEST, CALL, BODY)
    is_the_execution(executed, leader, "leader")
    assert executed.references == [child_of(request)]
    assert body.references == [child_of(executed)]

    request, reused, wait = shown(jaeger, waiter, REQUEST, CALL, WAIT)
    is_reused(reused, waiter, "waiter", executed, leader.execution)
    assert wait.trace_id != executed.trace_id
    assert reused.references == [child_of(request), follows(executed)]
    assert wait.references == [child_of(reused), follows(executed)]
    assert 0 < wait.duration <= reused.duration
    assert 0 < reused.tags["idemguard.wait.duration"] <= reused.duration
    assert reused.types["idemguard.wait.duration"] == "float64"


@pytest.mark.parametrize("users", ["sqlite"], indirect=True)
def test_it_is_found_by_its_service_and_its_tags(jaeger, users):
    users.open()
    users.start("first")
    first = users.ended("first")
    users.start("second")
    second = users.ended("second")
    shown(jaeger, first, REQUEST, CALL, BODY)
    shown(jaeger, second, REQUEST, CALL)

    def found(told: Told, **tags: str) -> set[str]:
        wanted = {f"idemguard.{name}": value for name, value in tags.items()}
        return {span.trace_id for span in jaeger.search(told.service, **wanted)}

    assert {first.service, second.service} <= set(jaeger.services())
    task = first.fingerprint[:16]
    assert found(first) == found(first, fingerprint=task) == {first.trace}
    assert found(second) == found(second, fingerprint=task) == {second.trace}
    assert found(second, fingerprint=task, outcome="reused") == {second.trace}
    assert found(first, fingerprint=task, outcome="reused") == set()
    assert found(first, fingerprint="0" * 16) == set()

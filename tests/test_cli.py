"""The command as people and scripts run it, on ledgers of real calls."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.cells import cell_len
from workers import story
from workers.story import HOSTILE

from idemguard import Guard, Task, errors, ledger, record_usage, scope, worker
from idemguard.claim import Begin
from idemguard.cli import command
from idemguard.cli.output import writing
from idemguard.cli.times import When, when
from idemguard.record import Address, Caller
from idemguard.report import plain
from idemguard.report.words import stretch
from idemguard.stores.sqlite import SqliteStore

COMMAND = (sys.executable, "-W", "error", "-m", "idemguard")
PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The URL of a file in which everything has happened once."""
    url = f"sqlite:///{tmp_path_factory.mktemp('whole') / 'ledger.db'}"
    story.tell(url, broken=HOSTILE)
    return url


@pytest.fixture
def run(monkeypatch):
    """Runs the command in this process."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*args, text=None, **environment):
        done = CliRunner().invoke(command, [str(arg) for arg in args], input=text, env=environment)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return invoke


@pytest.fixture
def out(run):
    """What a command that goes well prints."""

    def invoke(*args, **more):
        done = run(*args, **more)
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout

    return invoke


@pytest.fixture
def line_of(run):
    """The one line that a command ends with that does not go well."""

    def invoke(code, *args, **more):
        done = run(*args, **more)
        assert (done.exit_code, done.stdout) == (code, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("idemguard")
        return line

    return invoke


@pytest.fixture
def here(tmp_path):
    """A guard on a file, and the options that name it."""
    guard = Guard(store=f"sqlite:///{tmp_path / 'here.db'}", pricer=story.PRICES)
    yield guard, ("--store", f"sqlite:///{tmp_path / 'here.db'}")
    guard.close()


def of(task_type, payload):
    return Task.of(task_type, payload).fingerprint


def process(*args, **more):
    return subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, timeout=60, check=False, **more
    )


# --- whose ledger ----------------------------------------------------------------------------------


def test_the_store_is_named_before_or_behind_the_command_or_by_the_environment(
    whole, out, tmp_path
):
    def ran(*args, **more):
        return json.loads(out(*args, "--format", "json", **more))["totals"]["executions"]

    assert ran("--store", whole, "report") == 26
    assert ran("report", "--store", whole) == 26
    assert ran("--store", "sqlite:////no/such.db", "report", "--store", whole) == 26
    assert ran("report", IDEMGUARD_STORE=whole) == 26
    assert ran("report", "--store", whole, IDEMGUARD_STORE="sqlite:////no/such.db") == 26


def test_the_namespace_is_named_in_the_same_ways(whole, out):
    def ran(*args, **more):
        told = json.loads(out("--store", whole, *args, "--format", "json", **more))
        return told["namespace"], told["totals"]["executions"]

    assert ran("report") == ("default", 26)
    assert ran("report", "--namespace", "other") == ("other", 0)
    assert ran("--namespace", "other", "report") == ("other", 0)
    assert ran("report", IDEMGUARD_NAMESPACE="other") == ("other", 0)
    assert ran("report", "--namespace", "default", IDEMGUARD_NAMESPACE="other") == ("default", 26)


def test_with_nothing_named_it_is_the_projects_file(run, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    done = run("report")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "there is no ledger yet: no file" in done.stderr
    assert ".idemguard/idemguard.db" in done.stderr
    assert not (tmp_path / ".idemguard").exists()
    guard = Guard()
    guard.run_task("t", 1, story.quiet)
    guard.close()
    assert "1 execution" in run("report").stdout


READING = (
    ("report",), ("report", "--format", "csv"), ("explain", "t"), ("export",), ("tail",),
    ("compare", "--a", "2h..1h", "--b", "1h.."), ("show", "0" * 64), ("forget", "0" * 64),
    ("resolve", "0" * 64, "1"),
)  # fmt: skip


@pytest.mark.parametrize("args", READING, ids=" ".join)
def test_a_file_that_is_not_there_is_an_error_and_is_not_made(line_of, tmp_path, args):
    line = line_of(2, *args, "--store", f"sqlite:///{tmp_path}/deep/none.db")
    assert f"no file {tmp_path}/deep/none.db" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("report",), 0, "Nothing was called or executed until then: namespace default was not used."),
        (("report", "--format", "html"), 0, "Nothing was called or executed until then"),
        (("check",), 0, "no alert: nothing was called or executed yet in namespace default"),
        (("compare", "--a", "2h..1h", "--b", "1h.."), 0, "Nothing was executed in either."),
        (("export",), 0, ""),
        (("reconcile", os.devnull, "--event-name", "n", "--value", "cost", "--customer", "agent"),
         0, "Equal: 0 events"),
        (("explain", "t"), 1, "nothing is known of task type t"),
        (("show", "0" * 64), 1, "has a fingerprint that begins with"),
        (("forget", "0" * 64), 1, "has a fingerprint that begins with"),
        (("resolve", "0" * 64, "1"), 1, "has a fingerprint that begins with"),
        (("tail",), 2, "there is no ledger yet: an empty file "),
    ],
    ids=lambda one: " ".join(one[:2]) if isinstance(one, tuple) else None,
)  # fmt: skip
def test_an_empty_file_is_an_empty_ledger_and_stays_as_it_is(run, tmp_path, args, code, says):
    (tmp_path / "x.db").touch()
    done = run(*args, "--store", f"sqlite:///{tmp_path}/x.db")
    assert done.exit_code == code, done.output
    assert says in " ".join(done.output.split())
    assert [(one.name, one.stat().st_size) for one in tmp_path.iterdir()] == [("x.db", 0)]


@pytest.mark.parametrize("args", READING, ids=" ".join)
def test_what_is_no_file_is_an_error_and_no_empty_ledger(line_of, tmp_path, args):
    os.mkfifo(tmp_path / "pipe")
    for path in (Path(os.devnull), tmp_path / "pipe"):
        assert f"{path} is no file" in line_of(2, *args, "--store", f"sqlite:///{path}")
    assert "is a folder, not a file" in line_of(2, *args, "--store", f"sqlite:///{tmp_path}")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--agent", "nobody"), "executed until then matches agent nobody."),
        (("--task-type", "n", "--agent", ""), "until then matches task type n and agent (none)"),
        (("--agent", "no", "--since", "1h"), "called or executed in this time matches agent no."),
        (("--namespace", "prdo"), "executed until then: namespace prdo was not used."),
    ],
)
def test_a_wrong_name_is_told_from_an_empty_ledger(whole, out, args, says):
    assert says in out("report", "--store", whole, *args)
    page = re.sub(r"</?bdi>", "", out("report", "--store", whole, *args, "--format", "html"))
    assert says in page


@pytest.mark.parametrize("args", [one for one in READING if one[0] != "tail"], ids=" ".join)
def test_reading_changes_nothing_in_a_file(run, whole, tmp_path, args):
    path = Path(whole.removeprefix("sqlite:///"))
    before = path.read_bytes()
    assert run(*args, "--store", whole).exit_code in (0, 1)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("args", READING[::3], ids=" ".join)  # each needs a second
def test_a_store_that_is_down_is_one_line_without_its_password(line_of, args):
    line = line_of(2, *args, "--store", "redis://me:geheim@127.0.0.1:1/0")
    assert "127.0.0.1:1" in line
    assert "geheim" not in line


@pytest.mark.parametrize("args", READING, ids=" ".join)
def test_a_file_that_is_none_of_ours_is_one_line(line_of, args):
    assert "not a database" in line_of(2, *args, "--store", f"sqlite:///{__file__}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--bogus",), "--bogus"),
        (("reprot",), "No such command 'reprot'"),
        (("report", "--format", "xml"), "'--format'"),
        (("report", "--since", "5x"), "'5x' is no time: 15m, 24h or 7d ago, or ISO"),
        (("report", "--since", "1h", "--until", "2h"), "--since: it is not before --until"),
        (("report", "--output", "/no/such/file"), "--output /no/such/file: cannot be written"),
        (("report", "--output", "a\0b"), "--output a\\x00b: cannot be written"),
        (("report", "--output", "/"), "--output /: that is a folder"),
        (("report", "--namespace", ""), "namespace= takes a text that is not empty"),
        (("report", "--store", "memory://"), "of one process alone"),
        (("report", "--store", ""), "no store that idemguard knows"),
        (("report", "--store", "mongodb://me:geheim@host"), "no store that idemguard knows"),
        (("report", "--store", "redis://me:geheim@host:port/0"), "the port is no number"),
        (("report", "--store", "sqlite:///"), "names no file"),
        (("report", "--store", "sqlite://me:geheim@host/x.db"), "names no file"),
        (("report", "--store", "me:geheim@host"), "no store that idemguard knows"),
        (("report", "--store", "http://host?password=geheim"), "no store that idemguard knows"),
        (("compare",), "'--a'"),
        (("compare", "--a", "2h", "--b", "1h.."), "'2h' is no window"),
        (("compare", "--a", "..1h", "--b", "1h.."), "'..1h' is no window"),
        (("compare", "--a", "1h..2h", "--b", "1h.."), "--a: its start is not before its end"),
        (("compare", "--a", "2h..", "--b", "3000-01-01..3001-01-01"), "--b: it lies in the future"),
        (("compare", "--a", "3000-01-01..3001-01-01", "--b", "1h.."), "--a: it lies in the future"),
        (("show",), "Missing argument 'FINGERPRINT'"),
        (("show", "abcdef1"), "give 8 digits or more"),
        (("show", "abcdefgh"), "is no fingerprint"),
        (("show", "0" * 65), "is no fingerprint"),
        (("resolve", "0" * 64, "{"), "JSON: "),
        (("resolve", "0" * 64, "NaN"), "NaN is no JSON"),
        (("resolve", "0" * 64, "1e999"), "JSON: a number beyond all bounds: 1e999"),
        (("resolve", "0" * 64, '{"a": [1, -1.5E+400]}'), "beyond all bounds: -1.5E+400"),
        (("resolve", "0" * 64, "1e-400"), "JSON: a number too small to be told from 0: 1e-400"),
        (("resolve", "0" * 64, f"[-0.{'0' * 400}1E+5]"), "too small to be told from 0: -0.000"),
        (("resolve", "0" * 64, "[" * 100_000), "JSON: "),
        (("resolve", "0" * 64, "1", "--ttl", "soon"), "'soon' is no length of time"),
        (("tail", "--interval", "0"), "'--interval'"),
        (("tail", "--interval", "nan"), "nan is no length of time"),
        (("--namespace", "n", "demo"), "a demo makes namespaces of its own"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(whole, line_of, args, message):
    line = line_of(2, *args, IDEMGUARD_STORE=whole)
    assert message in line
    assert "geheim" not in line


LONG = f"b{'x' * 10_000}e"


@pytest.mark.parametrize(
    ("code", "args"),
    [
        (1, ("explain", LONG)),
        (1, ("explain", "t", "--namespace", LONG)),
        (1, ("compare", "--a", "2h..1h", "--b", "1h..", "--task-type", LONG)),
        (1, ("show", "0" * 64, "--scope", LONG, "--task-version", LONG)),
        (1, ("show", "0" * 64, "--namespace", LONG)),
        (2, ("show", LONG)),
        (2, ("report", "--since", LONG)),
        (2, ("resolve", "0" * 64, "1", "--ttl", LONG)),
        (2, ("resolve", "0" * 64, "1" * 400 + ".0")),
        (2, ("compare", "--a", LONG, "--b", "1h..")),
        (2, ("compare", "--b", f"{LONG}..1h", "--a", "1h..")),
    ],
    ids=lambda one: " ".join(part[:20] for part in one) if isinstance(one, tuple) else None,
)
def test_a_line_holds_no_more_of_a_foreign_text_than_can_be_read(whole, line_of, code, args):
    line = line_of(code, *args, IDEMGUARD_STORE=whole)
    assert len(line) < 400
    assert "…" in line
    assert all(one in line for one in args if one == "0" * 64 and args[0] == "show")


@pytest.mark.parametrize(
    "args",
    [
        (LONG,), (f"--{LONG}",), ("report", LONG), ("report", "--format", LONG),
        ("report", "--store", LONG), ("report", "--output", f"/{LONG}"), ("check", "--fail-on", LONG),
        ("check", "--limit", LONG), ("check", "--volume", f"{LONG}=1"),
    ],
    ids=lambda args: " ".join(part[:20] for part in args),
)  # fmt: skip
def test_no_line_is_longer_than_can_be_read(whole, line_of, args):
    assert len(line_of(2, *args, IDEMGUARD_STORE=whole)) < 1_600


@pytest.mark.skipif(not os.geteuid(), reason="root may read everything")
def test_a_file_that_may_not_be_read_is_one_line(line_of, tmp_path):
    story.tell(f"sqlite:///{tmp_path}/ledger.db")
    (tmp_path / "ledger.db").chmod(0)
    assert "ledger.db" in line_of(2, "report", "--store", f"sqlite:///{tmp_path}/ledger.db")


@pytest.mark.parametrize("args", [("report",), ("export",), ("report", "--format", "json")])
def test_a_namespace_in_which_nothing_happened_is_empty_and_no_error(whole, out, args):
    text = out(*args, "--store", whole, "--namespace", "nobody's")
    assert ("namespace nobody's was not used." in text) is (args == ("report",))


# --- report ----------------------------------------------------------------------------------------


def test_report_is_a_table_or_json_or_csv(whole, out):
    assert "Runs twice: 3 of 22 tasks" in out("report", "--store", whole)
    told = json.loads(out("report", "--store", whole, "--format", "json"))
    assert (told["totals"]["charged"], told["since"]) == ("0.03123", None)
    rows = list(csv.DictReader(io.StringIO(out("report", "--store", whole, "--format", "csv"))))
    assert (rows[0]["kind"], rows[0]["charged"]) == ("total", "0.03123")


def test_report_of_a_time_or_a_task_type_or_an_agent(whole, out):
    def totals(*args):
        return json.loads(out("report", "--store", whole, "--format", "json", *args))

    assert totals("--since", "24h")["totals"]["executions"] == 26
    assert totals("--until", "24h")["totals"]["executions"] == 0
    assert totals("--task-type", "draft")["totals"]["executions"] == 8
    assert totals("--agent", "reader")["totals"]["reused"] == 4
    told = totals("--since", "2026-01-02T03:04:05Z", "--until", "now")
    assert told["since"] == "2026-01-02T03:04:05.000+00:00"
    assert datetime.fromisoformat(told["until"]).utcoffset() == timedelta(0)


def test_output_goes_to_a_file_without_colours(whole, out, tmp_path):
    for form in ("table", "json", "csv"):
        path = tmp_path / form
        assert out("report", "--store", whole, "--format", form, "--output", path) == ""
        assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
        assert "\x1b" not in path.read_text()
    assert json.loads((tmp_path / "json").read_text())["totals"]["executions"] == 26
    assert "Runs twice" in (tmp_path / "table").read_text()
    assert out("report", "--store", whole, "--output", "-").startswith("Namespace default")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["csv", "json", "table"]


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


# --- a file that is whole or not there -----------------------------------------------------------------


def test_a_file_has_its_name_only_when_all_is_written(tmp_path):
    path = tmp_path / "out.txt"
    with writing(str(path)) as file:
        file.write("one\n")
        assert not path.exists()
    assert path.read_text() == "one\n"
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ValueError, match="gone"):
        _half(tmp_path / "link")
    assert path.read_text() == "one\n"
    with writing(str(tmp_path / "link")) as file:
        file.write("two\n")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("two\n", 0o600)
    assert (tmp_path / "link").is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "out.txt"]


def _half(path):
    with writing(str(path)) as file:
        file.write("half")
        raise ValueError("it is gone")


def test_what_is_no_file_is_written_to_and_stays_what_it_is(whole, out, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    out("export", "--store", whole, "--output", tmp_path / "pipe")
    reader.join(20)
    assert len(read[0].splitlines()) == 26
    assert (tmp_path / "pipe").is_fifo()


# --- show ------------------------------------------------------------------------------------------


def test_show_tells_a_task_with_its_executions(whole, out):
    fingerprint = of("summarise", {"doc": 0})
    text = out("show", fingerprint[:8], "--store", whole)
    assert text == out("show", fingerprint.upper(), "--store", whole)
    lines = text.splitlines()
    assert lines[0] == f"summarise  {fingerprint}"
    assert lines[1].startswith("no scope: executed 2 times, never reused; its result is kept until")
    assert re.search(r"first -> ok, \d+ ms, worker w-0, agent writer$", lines[2])
    assert lines[3] == "    tokens 1,000 in + 100 out, $0.0045, m"
    assert "observed (duplicate) -> ok" in lines[4]
    assert "worker w-1" in lines[4]


def test_show_tells_reuse_what_is_inside_and_what_it_costs_with_that(whole, out):
    text = out("show", of("extract", {"doc": 0}), "--store", whole)
    assert "executed once, reused 2 times" in text
    told = json.loads(out("export", "--store", whole).splitlines()[-3])
    assert told["task_type"] == "outer"
    text = out("show", told["fingerprint"], "--store", whole)
    assert "tokens 100 in + 0 out, $0.0003, m" in text
    assert "with 2 guarded executions inside (inner): 1,100 tokens, $0.0033" in text
    told = json.loads(out("show", told["fingerprint"], "--store", whole, "--json"))
    (execution,) = told["records"][0]["executions"]
    assert [one["task_type"] for one in execution["inside"]] == ["inner", "inner"]


def test_show_tells_where_a_part_of_the_cost_is_unknown(here, out):
    guard, at = here

    def inner(_):
        record_usage(input_tokens=1000, output_tokens=0, model="unheard-of")

    def outer(_):
        record_usage(input_tokens=1000, output_tokens=0, model="m")
        guard.run_task("inner", 1, inner)

    def two_models(_):
        record_usage(input_tokens=1000, output_tokens=0, model="m")
        record_usage(input_tokens=1000, output_tokens=0, model="unheard-of")

    guard.run_task("outer", 1, outer)
    text = out("show", of("outer", 1), *at)
    assert "tokens 1,000 in + 0 out, $0.0030, m\n" in text
    assert "with 1 guarded execution inside (inner): 2,000 tokens, $0.0030+?\n" in text
    guard.run_task("mixed", 1, two_models)
    assert "tokens 2,000 in + 0 out, $0.0030+?, " in out("show", of("mixed", 1), *at)


def test_show_of_all_scopes_and_versions_unless_one_is_named(here, out, line_of):
    guard, at = here
    fingerprint = of("t", 1)
    guard.run_task("t", 1, story.quiet)
    guard.run_task("t", 1, story.quiet, version="2")
    with scope("run-1"):
        guard.run_task("t", 1, story.quiet)

    def places(*args):
        told = json.loads(out("show", fingerprint, *at, "--json", *args))
        return [(record["scope"], record["version"]) for record in told["records"]]

    assert places() == [("", None), ("", "2"), ("run-1", None)]
    assert places("--scope", "run-1") == [("run-1", None)]
    assert places("--scope", "") == [("", None), ("", "2")]
    assert places("--task-version", "2") == [("", "2")]
    assert places("--task-version", "", "--scope", "") == [("", None)]
    line = line_of(1, "show", fingerprint, *at, "--scope", "run-2")
    assert "scope run-2" in line


def test_show_tells_of_a_task_under_way_and_of_one_that_was_lost(here, out, until):
    guard, at = here
    task = Task.of("t", 1)
    claim = guard.claim(task, "w-1")
    text = out("show", task.fingerprint, *at)
    assert "being executed by w-1" in text
    assert re.search(r"first -> open, open for \d+ ms, worker w-1", text)
    claim.release()
    brief = Guard(store=guard.engine.store, lease=0.01)
    brief.claim(task, "w-2")
    until(lambda: "w-2 was lost" in out("show", task.fingerprint, *at))
    text = out("show", task.fingerprint, *at)
    assert "its outcome is unknown, as w-2 was lost (resolve gives it a result" in text
    assert "retry -> lost" in text
    (record,) = json.loads(out("show", task.fingerprint, *at, "--json"))["records"]
    assert record["unknown_outcome"] is True
    assert record["kept_until"] is None


def test_show_of_what_is_only_counted(here, out):
    guard, at = here
    for number in range(66):
        guard.ledger.record("ab" * 32, f"w-{number}")
    text = out("show", "abababab", *at)
    assert "no scope, version counted: executed 66 times, never reused; done, but its" in text
    assert "the last 64 executions are kept" in text
    assert len(re.findall("observed", text)) >= 63


def test_show_names_the_tag_that_finds_a_task_in_traces(here, out):
    guard, at = here
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traced = Guard(store=guard.engine.store, tracer_provider=provider)
    traced.run_task("t", 1, story.quiet)
    guard.run_task("t", 2, story.quiet)  # without a trace there is nothing to search for
    (span,) = exporter.get_finished_spans()
    tag = f"idemguard.fingerprint={span.attributes['idemguard.fingerprint']}"
    lines_ = out("show", of("t", 1), *at).splitlines()
    assert lines_[:2] == [f"t  {of('t', 1)}", f"all its calls in traces: {tag}"]
    assert "idemguard.fingerprint" not in out("show", of("t", 2), *at)


def test_show_links_to_jaeger_where_it_is_known(here, out):
    guard, at = here
    trace = "0af7651916cd43dd8448eb211c80319c"
    task = Task.of("t", 1)
    caller = Caller("t", "w", None, None, trace, "b7ad6b7169203331")
    guard.engine.store.perform(Begin(Address("default", task.fingerprint), "n", caller, 30_000))
    assert f"    trace {trace}\n" in out("show", task.fingerprint, *at)
    link = f"http://jaeger:16686/trace/{trace}"
    for args, environment in (
        (("--jaeger-url", "http://jaeger:16686"), {}),
        (("--jaeger-url", "http://jaeger:16686/"), {"IDEMGUARD_JAEGER_URL": "http://other"}),
        ((), {"IDEMGUARD_JAEGER_URL": "http://jaeger:16686/"}),
    ):
        assert f"    {link}\n" in out("show", task.fingerprint, *at, *args, **environment)
    base = "http://me:geheim@jaeger"
    assert "geheim" not in out("show", task.fingerprint, *at, "--jaeger-url", base)
    told = json.loads(out("show", task.fingerprint, *at, "--json", "--jaeger-url", "http://j"))
    (execution,) = told["records"][0]["executions"]
    assert (execution["trace_id"], execution["trace_url"]) == (trace, f"http://j/trace/{trace}")


@pytest.mark.parametrize("args", [("show",), ("forget",), ("resolve", "1")], ids=" ".join)
def test_a_fingerprint_that_is_unknown_or_of_several_tasks(here, line_of, args):
    guard, at = here
    name, *more = args
    alike = ["abcdef01" + digit * 56 for digit in "123"] + ["abcdef01" + "1" * 20 + "2" * 36]
    for fingerprint in alike:
        guard.ledger.record(fingerprint, "w")
    line = line_of(1, name, "abcdef02", *more, *at)
    assert "no task of namespace default has a fingerprint that begins with abcdef02" in line
    line = line_of(2, name, "abcdef01", *more, *at)
    assert line.startswith("idemguard: 4 fingerprints begin with abcdef01: ")
    for fingerprint in alike:
        assert fingerprint[:29] in line
    assert "give more digits" in line


# --- forget, resolve -----------------------------------------------------------------------------------


def test_forget_acts_on_all_scopes_and_versions_unless_one_is_named(here, out):
    guard, at = here
    fingerprint = of("t", 1)

    def call():
        sources = [guard.run_task("t", 1, story.quiet).source]
        with scope("run-1"):
            sources.append(guard.run_task("t", 1, story.quiet).source)
        return sources

    assert call() == ["executed", "executed"]
    text = out("forget", fingerprint[:12], *at, "--scope", "run-1")
    assert text == f"forgotten: {fingerprint[:16]}, scope run-1\n"
    assert call() == ["reused", "executed"]
    text = out("forget", fingerprint[:12], *at)
    assert text.splitlines() == [
        f"forgotten: {fingerprint[:16]}, no scope",
        f"forgotten: {fingerprint[:16]}, scope run-1",
    ]
    assert call() == ["executed", "executed"]
    assert [line.cause for line in guard.ledger.executions(fingerprint, scope="")] == [
        "first", "forced",
    ]  # fmt: skip


def test_forget_tells_who_goes_on_for_nobody(here, out):
    guard, at = here
    task = Task.of("t", 1)
    claim = guard.claim(task, "w\x1b-1")
    assert r"; w\x1b-1 is still executing it, for nobody" in out("forget", task.fingerprint, *at)
    assert claim.complete(1) is False


def test_forget_drops_what_cannot_be_read(here, out, line_of):
    guard, at = here
    guard.run_task("t", 1, story.quiet)
    fingerprint = of("t", 1)
    guard.close()
    connection = sqlite3.connect(at[1].removeprefix("sqlite:///"))
    with connection:
        connection.execute("UPDATE record SET head = 'x'")
    connection.close()
    assert "damaged" in line_of(2, "show", fingerprint, *at)
    assert "forgotten" in out("forget", fingerprint, *at)
    assert guard.run_task("t", 1, story.quiet).source == "executed"


def test_resolve_gives_a_lost_task_a_result(here, out, line_of, until):
    guard, at = here
    careful = Guard(store=guard.engine.store, lease=0.01, on_lost="raise")
    task = Task.of("t", 1)
    careful.claim(task, "w-1")

    def unknown():
        with pytest.raises(errors.IdemguardError) as raised:
            careful.run_task("t", 1, story.quiet, wait_timeout=0, on_timeout="raise")
        return isinstance(raised.value, errors.UnknownOutcomeError)

    until(unknown)
    text = out("resolve", task.fingerprint[:10], '{"paid": ["yes", 1.5, null]}', *at)
    assert text == f"resolved: {task.fingerprint[:16]}, no scope\n"
    assert careful.run_task("t", 1, story.quiet).result == {"paid": ["yes", 1.5, None]}
    line = line_of(2, "resolve", task.fingerprint, "2", *at)
    assert "a fresh result of worker" in line
    assert careful.run_task("t", 1, story.quiet).result == {"paid": ["yes", 1.5, None]}


def test_resolve_reads_standard_input_and_keeps_as_long_as_it_is_told(here, out, line_of):
    guard, at = here
    task = Task.of("t", 1)
    guard.claim(task, "w-1").release()
    out("resolve", task.fingerprint, "-", "--ttl", "2h", *at, text='"grüß"\n')
    assert guard.peek(task).result == "grüß"
    record, now = guard.engine.store.look(guard._desk.address(task))
    assert 7_100_000 < record.result.until - now <= 7_200_000
    out("forget", task.fingerprint, *at)
    assert "no JSON" in line_of(2, "resolve", task.fingerprint, "-", *at, text="-Infinity")
    assert "no UTF-8" in line_of(2, "resolve", task.fingerprint, "-", *at, text=b"\xff")
    assert guard.peek(task) is None


def test_resolve_needs_one_place(here, out, line_of):
    guard, at = here
    fingerprint = of("t", 1)
    guard.claim(Task("t", fingerprint)).release()
    guard.claim(Task("t", fingerprint, "run-1")).release()
    guard.claim(Task("t", fingerprint, "run-1", "2")).release()
    line = line_of(2, "resolve", fingerprint, "1", *at)
    assert "in 3 places: (no scope), (scope run-1), (scope run-1, version 2)" in line
    assert guard.peek(Task("t", fingerprint)) is None
    line_of(2, "resolve", fingerprint, "1", *at, "--scope", "run-1")
    out("resolve", fingerprint, "1", *at, "--scope", "run-1", "--task-version", "2")
    assert guard.peek(Task("t", fingerprint, "run-1", "2")).result == 1
    assert guard.peek(Task("t", fingerprint, "run-1")) is None
    guard.claim(Task("t", fingerprint, LONG, LONG)).release()
    guard.claim(Task("t", fingerprint, LONG.replace("x" * 10_000, "x" * 9_000), LONG)).release()
    line = line_of(2, "resolve", fingerprint, "1", *at)
    two = r"\(scope bx{148}…x{148}e, version bx{148}…x{148}e\) \(2 that look so\); name one"
    assert re.search(f"in 5 places: .*{two}", line)


def test_a_scope_that_is_to_be_typed_stands_whole(here, out, line_of):
    guard, at = here
    fingerprint = of("t", 1)
    scopes = [f"organisation-{'0' * 120}-{n}-department-{'0' * 120}" for n in range(9)]
    for one in scopes:
        guard.claim(Task("t", fingerprint, one)).release()
    line = line_of(2, "resolve", fingerprint, "1", *at)
    told = re.findall(r"\(scope ([^ )]+)\)", line)
    assert 2 < len(told) == len({*told} & {*scopes})
    assert f" and {9 - len(told)} more; name one with --scope and --task-version" in line
    out("resolve", fingerprint, "1", *at, "--scope", told[-1])


def test_resolve_takes_every_zero_that_is_one(here, out):
    guard, at = here
    task = Task.of("t", 1)
    guard.claim(task, "w-1").release()
    out("resolve", task.fingerprint, "[0.0, 0e-999, -0.00E5, 1e-300]", *at)
    assert guard.peek(task).result == [0.0, 0.0, 0.0, 1e-300]


# --- explain, compare ------------------------------------------------------------------------------------


def test_explain_names_the_suspects(whole, out):
    text = out("explain", "draft", "--store", whole)
    assert text.startswith("draft: 8 executions\n")
    assert "Why they started: first 8." in text
    assert "Who executed: w-1 8." in text
    assert "`x7` differs in" in text
    assert "volatile=('x7',)" in text
    assert "run_id" not in text
    told = json.loads(out("explain", "draft", "--store", whole, "--format", "json"))
    assert told["task_type"] == "draft"
    assert told["missed_duplicates"]["suspects"][0]["field"] == "x7"
    assert told["causes"] == {"first": 8}


def test_explain_of_what_is_known_and_unsuspected(whole, out, line_of):
    assert "Missed duplicates: none found." in out("explain", "summarise", "--store", whole)
    line = line_of(1, "explain", "no\x1bsuch", "--store", whole)
    assert line.startswith(r"idemguard: nothing is known of task type no\x1bsuch in default; ")
    line_of(1, "explain", "draft", "--store", whole, "--until", "1h")


def test_explain_tells_of_fields_that_do_not_count_of_duplicates_and_of_growth(here, out):
    guard, at = here
    observed = Guard(store=guard.engine.store, mode="observe")

    def body(payload):
        for step in range(1, 6):
            record_usage(input_tokens=100 * step)

    task = observed.idempotent(body, task_type="agent", volatile=("payload.at", "payload.att"))
    for number in range(2):
        with worker(f"w-{number}"):
            task({"doc": 1, "at": number})
    text = out("explain", "agent", *at)
    assert "Why they started: first 1, observed 1." in text
    assert "Whose duplicates: w-1 1." in text
    assert "Fields that do not count: payload.at (in 2)." in text
    assert "Volatile names that never matched: payload.att. Misspelt?" in text
    assert "agent: the input grows by 100 tokens from report to report" in text
    told = json.loads(out("explain", "agent", *at, "--format", "json"))
    assert (told["dropped"], told["unmatched"]) == ({"payload.at": 2}, ["payload.att"])
    assert (told["duplicates_by"], told["growth"][0]["per_step"]) == ({"w-1": 1}, 100)
    text = out("compare", "--a", "2h..1h", "--b", "1h..", *at)
    assert "agent: the input grows by 100 tokens" in text
    assert "Money" not in text
    assert "Unpriced executions, not in the money: 0 and 2." in text


def test_explain_of_what_ran_before_many_others(here, out, monkeypatch):
    guard, at = here
    guard.run_task("early", 1, story.quiet)
    for number in range(3):
        guard.run_task("late", number, story.quiet)
    monkeypatch.setattr(ledger, "LOOKED_AT", 3)
    assert "early" in out("explain", "early", *at)


def test_explain_of_what_has_no_lines_left(tmp_path, line_of):
    url = f"sqlite:///{tmp_path}/ledger.db"
    earlier = SqliteStore(
        tmp_path / "ledger.db", clock=lambda: int(time.time() - 2 * 86_400) * 1000
    )
    guard = Guard(store=earlier, namespace="n")
    guard.run_task("early", 1, story.quiet)
    guard.close()
    store = SqliteStore(tmp_path / "ledger.db")
    store.tend(None)
    store.close()
    line = line_of(1, "explain", "early", "--store", url, "--namespace", "n")
    assert "it was executed 1 time, but no line of it is kept" in line


def test_compare_tells_less_of_it(tmp_path, out):
    url = f"sqlite:///{tmp_path}/ledger.db"
    earlier = SqliteStore(tmp_path / "ledger.db", clock=lambda: int(time.time() - 5_400) * 1000)
    story.change(url, earlier, "prod")
    text = out("compare", "--a", "2h..1h", "--b", "1h..", "--store", url, "--namespace", "prod")
    assert "21 executions became 12, 3 duplicates 0." in text
    assert "Money: $0.0525 less, chiefly by fewer runs" in text
    told = out(
        "compare", "--a", "2h..1h", "--b", "1h..", "--store", url, "--namespace", "prod",
        "--format", "json", "--task-type", "extract",
    )  # fmt: skip
    (change,) = json.loads(told)["changes"]
    assert change == json.loads(told)["total"]
    assert (change["money"]["before"], change["money"]["after"]) == ("0.0105", "0.006")


def test_compare_splits_a_change(here, out, line_of):
    guard, at = here
    guard.run_task("t", 1, story.spends(1000, 0))
    between = guard.ledger.now()
    told = json.loads(out("compare", "--a", "2h..1h", "--b", "1h..", *at, "--format", "json"))
    (change,) = told["changes"]
    assert (change["task_type"], change["executions"]) == ("t", {"before": 0, "after": 1})
    tokens, money = change["tokens"], change["money"]
    assert (tokens["before"], tokens["after"], money["after"]) == (0, 1000, "0.003")
    assert sum(tokens[name] for name in ("before", "runs", "duplicates", "size", "price")) == 1000
    assert told["total"]["tokens"] == tokens
    assert datetime.fromisoformat(told["b"]["until"]).timestamp() * 1000 >= between
    text = out("compare", "--a", "2h..1h", "--b", "1h..", *at)
    assert "0 executions became 1, 0 duplicates 0." in text
    assert "Money: $0.0030 more, chiefly by more runs" in text
    assert "Tokens: 1,000 more, chiefly by more runs" in text
    assert "Nothing was executed in either." in out(
        "compare", "--a", "4h..3h", "--b", "3h..2h", *at
    )
    out("compare", "--a", "2h..1h", "--b", "1h..", *at, "--task-type", "t")
    line = line_of(1, "compare", "--a", "2h..1h", "--b", "1h..", *at, "--task-type", "u")
    assert "nothing is known of task type u" in line


def test_a_misspelt_task_type_is_told_what_can_be_typed(here, line_of):
    guard, at = here
    whole_ = [f"my.agents.{'stage' * 20}.{n}.{'summarise' * 5}" for n in ("one", "two")]
    for name in (*whole_, *(f"far{'x' * n}" for n in (400, 401, 290)), "Unk"):
        guard.run_task(name, 1, story.quiet)
    for args in (("explain",), ("compare", "--a", "2h..1h", "--b", "1h..", "--task-type")):
        line = line_of(1, *args, whole_[0].replace("one", "on"), *at)
        assert sorted(line.partition("; did you mean ")[2].rstrip("?").split(" or ")) == whole_
        assert line_of(1, *args, "uNK", *at).endswith(" in default; did you mean Unk?")
        line = line_of(1, *args, "xxx", *at)
        cut = r"farx{146}…x{149} \(2 that look so\)"
        assert re.search(rf"did you mean ({cut} or farx{{290}}|farx{{290}} or {cut})\?$", line)
    line = line_of(1, "explain", "t", "--namespace", "nobody's", *at)
    assert line.endswith("nothing is known of task type t in nobody's; the namespace was not used")


def test_what_was_at_another_time_alone_is_told_with_the_time(here, line_of):
    guard, at = here
    guard.run_task("t", 1, story.quiet)
    said = "idemguard: nothing is known of task type t in default"
    for args, when_ in (
        (("explain", "t", "--since", "2h", "--until", "1h"), "in this time"),
        (("explain", "t", "--until", "1h"), "until then"),
        (("compare", "--a", "3h..2h", "--b", "2h..1h", "--task-type", "t"), "in these times"),
    ):
        assert line_of(1, *args, *at) == f"{said} {when_}"


# --- export, tail ----------------------------------------------------------------------------------------


def test_export_has_every_line(whole, out, tmp_path):
    told = [json.loads(line) for line in out("export", "--store", whole).splitlines()]
    assert len(told) == 26
    assert [one["started"] for one in told] == sorted(one["started"] for one in told)
    assert HOSTILE in {one["task_type"] for one in told}
    out("export", "--store", whole, "--format", "csv", "--output", tmp_path / "lines.csv")
    with (tmp_path / "lines.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["execution_id"] for row in rows] == [one["execution_id"] for one in told]
    assert out("export", "--store", whole, "--until", "1h") == ""
    assert len(out("export", "--store", whole, "--since", "1h").splitlines()) == 26


def test_export_that_fails_leaves_the_file_that_was_there(here, line_of, tmp_path):
    guard, at = here
    for number in range(3):
        guard.run_task("t", number, story.quiet)
    guard.close()
    connection = sqlite3.connect(at[1].removeprefix("sqlite:///"))
    with connection:
        _damage_a_line(connection)
    connection.close()
    path = tmp_path / "lines.jsonl"
    path.write_text("yesterday's")
    assert "damaged" in line_of(2, "export", *at, "--output", path)
    assert path.read_text() == "yesterday's"
    assert [one.name for one in tmp_path.glob("*lines*")] == ["lines.jsonl"]


def _damage_a_line(connection):
    connection.execute("UPDATE record SET lines = 'x' WHERE id = (SELECT max(id) FROM record)")


class Following:
    """`tail` in a process of its own, line by line."""

    def __init__(self, *args):
        self.process = subprocess.Popen(
            [*COMMAND, "tail", "--interval", "0.05", *args],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def line(self):
        return self.process.stdout.readline()

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture
def following():
    """Starts `tail`s that are over when the test is."""
    started = []

    def start(*args):
        started.append(Following(*args))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_tail_follows_what_starts_and_ends_until_it_is_interrupted(here, following):
    guard, at = here
    claim = guard.claim(Task.of("long", 1), "w-1")
    tail = following(*at)
    assert re.fullmatch(r"\d\d:\d\d:\d\d  started   long  [0-9a-f]{16}  first  w-1\n", tail.line())
    with worker("w-2"):
        guard.run_task("short\x1b", 1, story.spends(1000, 100))
    line = tail.line()
    assert r"  ok        short\x1b  " in line
    assert line.endswith("tokens 1,000 in + 100 out, $0.0045, m\n")
    claim.complete(1)
    assert "  ok        long  " in tail.line()
    assert tail.interrupt() == (0, "", "")


def test_tail_ends_calmly_however_often_it_is_interrupted(here, following):
    guard, at = here
    claim = guard.claim(Task.of("t", 1), "w-1")
    tail = following(*at)
    assert tail.line()
    tail.process.send_signal(signal.SIGINT)
    for _ in range(4_000):  # all the while that it leaves
        with suppress(subprocess.TimeoutExpired):
            tail.process.wait(0.005)
            break
        tail.process.send_signal(signal.SIGINT)
    out, err = tail.process.communicate(timeout=20)
    assert (tail.process.returncode, out, err) == (0, "", "")
    claim.release()


LOADING = """
import sys, time
class Loading:
    def find_spec(self, name, path=None, target=None):
        if name == "idemguard.report.paper":
            print("loading", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Loading())
from idemguard.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("name", "code", "told"), [("tail", 0, ""), ("report", 130, "\nidemguard: interrupted\n")]
)
def test_an_interrupt_while_it_still_loads_is_one_like_others(here, name, code, told):
    guard, at = here
    guard.run_task("t", 1, story.quiet)
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", LOADING, name, *at],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (code, "", told)


def test_tail_of_one_task_type_as_json(here, following):
    guard, at = here
    claim = guard.claim(Task.of("t", 1), "w-1")
    tail = following(*at, "--json", "--task-type", "t")
    first = json.loads(tail.line())
    assert (first["status"], first["worker"], first["ended"]) == ("open", "w-1", None)
    guard.run_task("u", 1, story.quiet)
    claim.release()
    last = json.loads(tail.line())
    assert (last["execution_id"], last["status"]) == (first["execution_id"], "failed")
    assert tail.interrupt() == (0, "", "")


def test_tail_tells_what_is_lost_and_what_comes_late(here, following):
    guard, at = here
    first = guard.claim(Task.of("first", 1), "w-1")
    tail = following(*at, "--json")
    assert json.loads(tail.line())["task_type"] == "first"
    first.release()
    assert json.loads(tail.line())["status"] == "failed"
    brief = Guard(store=guard.engine.store, lease=0.2)
    claim = brief.claim(Task.of("t", 1), "w-1")
    told = [json.loads(tail.line())["status"]]
    if told == ["open"]:
        told.append(json.loads(tail.line())["status"])
    assert told[-1] == "lost"
    assert guard.run_task("t", 1, story.quiet).cause == "lost"
    told = json.loads(tail.line())
    if told["status"] == "open":  # it was looked at in between
        told = json.loads(tail.line())
    assert (told["cause"], told["status"]) == ("lost", "ok")
    claim.complete(1)
    assert json.loads(tail.line())["status"] == "late"
    assert tail.interrupt()[0] == 0


def test_tail_waits_for_a_store_that_goes_away(own_server, following):
    guard = Guard(store=own_server.url)
    claim = guard.claim(Task.of("long", 1), "w-1")
    tail = following("--store", own_server.url, "--json")
    assert json.loads(tail.line())["status"] == "open"
    own_server.kill()
    assert "(trying again)" in tail.process.stderr.readline()
    own_server.start()
    assert tail.process.stderr.readline() == "idemguard: the store is back\n"
    claim.complete(1)
    assert json.loads(tail.line())["status"] == "ok"
    assert tail.interrupt()[0] == 0
    guard.close()


# --- every command on a server ---------------------------------------------------------------------------


def test_every_command_on_redis(redis_url, out, line_of, following, tmp_path):
    story.tell(redis_url)
    at = ("--store", redis_url)
    told = json.loads(out("report", *at, "--format", "json"))
    assert (told["totals"]["executions"], told["totals"]["charged"]) == (26, "0.03123")
    assert [drop["task_type"] for drop in told["drops"]] == ["review"]
    assert "Runs twice: 3 of 22 tasks" in out("report", *at)
    assert len(out("export", *at).splitlines()) == 26
    assert "`x7` differs in" in out("explain", "draft", *at)
    assert "26" in out("compare", "--a", "2h..1h", "--b", "1h..", *at)
    fingerprint = of("extract", {"doc": 0})
    assert "executed once, reused 2 times" in out("show", fingerprint[:8], *at)
    assert out("forget", fingerprint[:8], *at).startswith("forgotten")
    assert out("resolve", fingerprint[:8], "[1]", *at).startswith("resolved")
    guard = Guard(store=redis_url)
    assert guard.peek(Task.of("extract", {"doc": 0})).result == [1]
    assert "a fresh result" in line_of(2, "resolve", fingerprint, "2", *at)
    line_of(1, "show", "00000000", *at)
    line_of(1, "explain", "nosuch", *at)
    claim = guard.claim(Task.of("long", 1), "w-1")
    tail = following(*at, "--json", "--task-type", "long")
    assert json.loads(tail.line())["status"] == "open"
    claim.complete(1)
    assert json.loads(tail.line())["status"] == "ok"
    assert tail.interrupt() == (0, "", "")
    guard.close()


# --- as a process ------------------------------------------------------------------------------------


def test_exit_codes_of_a_process(whole):
    environment = {**os.environ, "IDEMGUARD_STORE": whole}
    for code, args in (
        (0, ("report",)),
        (1, ("show", "0" * 64)),
        (2, ("show", "0")),
        (2, ("report", "--store", "redis://127.0.0.1:1")),
    ):
        done = process(*args, env=environment)
        assert (done.returncode, done.stderr.count("\n")) == (code, int(code > 0))
        assert bool(done.stdout) is not bool(code)


def test_a_pipe_gets_no_colours_and_80_columns(whole):
    environment = {**os.environ, "TERM": "xterm-256color", "IDEMGUARD_STORE": whole}
    environment.pop("COLUMNS", None)
    text = process("report", env=environment).stdout
    assert "\x1b" not in text
    tables = [line for line in text.splitlines() if "──" in line]
    assert tables
    assert max(map(len, tables)) <= 80


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_gets_colours_unless_it_wants_none(whole, quiet):
    ours, theirs = pty.openpty()
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "IDEMGUARD_STORE": whole,
        "COLUMNS": "70",
    }
    environment |= {"NO_COLOR": "1"} if quiet else {}
    started = subprocess.Popen([*COMMAND, "report"], stdout=theirs, env=environment)
    os.close(theirs)
    text = _heard(ours).replace("\r\n", "\n")
    assert started.wait(30) == 0
    assert ("\x1b[" in text) is not quiet
    assert "\x1b[31m[red]" not in text
    assert max(cell_len(line) for line in ESCAPE.sub("", text).splitlines()) <= 70


def test_a_terminal_gets_a_progress_bar_and_a_pipe_none(whole, tmp_path):
    ours, theirs = pty.openpty()
    arguments = ("export", "--output", str(tmp_path / "lines"), "--store", whole)
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    started = subprocess.Popen([*COMMAND, *arguments], stderr=theirs, env=environment)
    os.close(theirs)
    text = ESCAPE.sub("", _heard(ours))
    assert started.wait(30) == 0
    assert "lines ━" in text
    assert " 26 " in text
    assert process(*arguments).stderr == ""


def _heard(terminal):
    heard = b""
    try:
        while piece := os.read(terminal, 4096):
            heard += piece
    except OSError:  # how Linux tells the end
        pass
    os.close(terminal)
    return heard.decode()


def test_nobody_reads_on(whole):
    started = subprocess.Popen(
        [*COMMAND, "tail", "--interval", "0.05", "--store", whole, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    guard = Guard(store=whole, namespace="default")
    stop = threading.Event()

    def call():
        while not stop.is_set():
            guard.run_task("noise", time.monotonic_ns(), story.quiet)
            stop.wait(0.02)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        assert started.stdout.readline()
        started.stdout.close()
        assert started.wait(20) == 0
        assert started.stderr.read() == ""
    finally:
        stop.set()
        caller.join(20)
        guard.close()
        started.stderr.close()
        started.kill()
        started.wait()


def unread(*args, **more):
    """A command whose output nobody reads."""
    reading, writing_ = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            [*COMMAND, *args],
            **{"stdout": writing_, "stderr": subprocess.PIPE} | dict.fromkeys(more, writing_),
            text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writing_)


@pytest.mark.parametrize(
    "args", [("export",), ("report",), ("report", "--format", "json"), (), ("--help",)]
)
def test_a_pipe_that_is_closed_is_no_error(whole, args, monkeypatch):
    monkeypatch.setenv("IDEMGUARD_STORE", whole)
    done = unread(*args)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_alert_is_told_by_the_code_also_where_nobody_reads(tmp_path, form):
    window = 300_000
    last = int(time.time() * 1000) // window * window
    for back in range(4):  # one more, should a window end meanwhile
        moment = last - back * window
        store = SqliteStore(tmp_path / "ledger.db", clock=lambda moment=moment: moment)
        guard = Guard(store=store, mode="observe")
        for _ in range(10):
            guard.run_task("t", back, story.quiet)
        guard.close()
    at = ("--store", f"sqlite:///{tmp_path / 'ledger.db'}")
    for _ in range(3):
        done = unread("check", *at, *form)
        assert (done.returncode, done.stderr) == (1, "")
    assert unread("check", *at, *form, "--namespace", "other").returncode == 0


def test_an_error_is_told_by_the_code_also_where_nobody_reads_it(whole):
    assert unread("show", "0", stderr=...).returncode == 2
    assert unread("show", "0" * 64, "--store", whole, stderr=...).returncode == 1


def test_all_is_forgotten_also_where_nobody_reads(here):
    guard, at = here
    for name in ("a", "b", "c"):
        with scope(name):
            guard.run_task("t", 1, story.quiet)
    done = unread("forget", of("t", 1), *at)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("a", "b", "c"):
        assert guard.peek(Task("t", of("t", 1), name)) is None


def test_a_closed_standard_input_is_an_error(here):
    guard, at = here
    guard.claim(Task.of("t", 1), "w-1").release()
    done = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", *COMMAND, "resolve", of("t", 1), "-", *at],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "idemguard: standard input is closed\n"


@contextmanager
def reader(folder):
    """Somebody who may read a folder, and not write there; root is somebody else meanwhile."""
    root = not os.geteuid()
    folder.chmod(0o555)
    try:
        if root:
            os.setegid(65534)
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
            os.setegid(0)
        folder.chmod(0o755)


def test_who_may_only_read_a_file_is_told_what_a_reader_needs(run):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        story.tell(f"sqlite:///{path}")
        path.chmod(0o444)
        at = ("--store", f"sqlite:///{path}")
        assert run("report", *at).exit_code == 0  # and all that it needs is loaded
        with reader(Path(folder)):
            read = run("report", *at)
            written = run("forget", of("extract", {"doc": 0}), *at)
    for done in (read, written):
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "who reads a SQLite ledger writes to the file and its folder too (WAL)" in read.stderr
    assert "or read a copy" in read.stderr
    assert "who reads" not in written.stderr


def test_an_export_that_is_interrupted_leaves_no_traceback(here):
    guard, at = here
    for number in range(150):  # more than a pipe holds
        guard.run_task("t", number, story.quiet)
    started = subprocess.Popen(
        [*COMMAND, "export", *at], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout.readline()
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=20)
    assert started.returncode == 130
    assert err.split() == ["idemguard:", "interrupted"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_disk_that_is_full_is_one_line(whole):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "export", "--store", whole],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert re.fullmatch(r"idemguard: .*No space left on device\n", done.stderr)


def test_the_shell_completes_commands_and_options():
    def complete(words, at):
        environment = {
            **os.environ, "COMP_WORDS": words, "COMP_CWORD": str(at),
            "_IDEMGUARD_COMPLETE": "bash_complete",
        }  # fmt: skip
        return process(env=environment).stdout.split()

    environment = {**os.environ, "_IDEMGUARD_COMPLETE": "zsh_source"}
    assert "idemguard" in process(env=environment).stdout
    assert complete("idemguard re", 1) == ["plain,reconcile", "plain,report", "plain,resolve"]
    assert "plain,--task-type" in complete("idemguard report --t", 2)
    assert complete("idemguard report --format ", 3) == [
        "plain,table",
        "plain,json",
        "plain,csv",
        "plain,html",
    ]


# --- what the documentation shows ------------------------------------------------------------------------


SHOWN = re.compile(r"^```console\n\$ idemguard ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIES = (
    (r"\d{4}-\d\d-\d\d[ T][\d:.]{8,12}(\+00:00)?", "DAY"),
    (r"\d\d-\d\d \d\d:\d\d\b", "TIME"),
    (r"\d+ ms|\d+\.\d s\b", "MS"),
)


def _settled(text):
    """A text without what is another one every time, and without blanks at the ends of lines."""
    for what, instead in VARIES:
        text = re.sub(what, instead, text)
    return [line.rstrip() for line in text.strip().splitlines()]


def test_commands_print_what_is_shown(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/ledger.db"
    earlier = SqliteStore(tmp_path / "ledger.db", clock=lambda: int(time.time() - 5_400) * 1000)
    story.tell(url)
    story.change(earlier, url, "prod")
    shown = SHOWN.findall(PAGE.read_text())
    assert {shlex.split(line)[0] for line, _ in shown} == {*command.commands} - {"tail", "demo"}
    for line, text in shown:
        assert _settled(out(*shlex.split(line), IDEMGUARD_STORE=url)) == _settled(text), line
    assert len((tmp_path / "lines.jsonl").read_text().splitlines()) == 26


def test_all_fields_options_and_commands_are_told_of():
    page = PAGE.read_text()
    told = set(re.findall(r"[`\"]([a-z_]+)[`\"]", page))
    assert set(plain.LINE) | set(plain.FIELDS) | set(plain.INCLUSIVE) <= told
    for name, one in command.commands.items():
        assert f"`{name}`" in page
        for parameter in one.params if name != "demo" else ():
            for option in parameter.opts if isinstance(parameter, click.Option) else ():
                assert option in page or option in ("-o", "--help"), (name, option)


# --- times ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("90s", When(ago=90_000)),
        ("15m", When(ago=900_000)),
        ("1.5h", When(ago=5_400_000)),
        ("7d", When(ago=604_800_000)),
        ("2w", When(ago=1_209_600_000)),
        ("now", When()),
        ("1970-01-01T00:00:01Z", When(at=1_000)),
        ("1970-01-01T01:00:01.250+01:00", When(at=1_250)),
    ],
)
def test_times_as_they_are_typed(text, found):
    assert when(text) == found


def test_a_time_without_an_offset_is_local(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        moment = datetime(2026, 11, 30, 0, 0, tzinfo=UTC).timestamp() * 1000
        assert when("2026-11-30T09:00") == When(at=int(moment))
        assert when("2026-11-30") == When(at=int(moment) - 9 * 3_600_000)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "text", ["", "5", "h", "-1h", "1 year", "١h", "2026-13-01", "9" * 20 + "d"]
)
def test_what_is_no_time(text):
    with pytest.raises(click.BadParameter, match="is no time"):
        when(text)


def _times_of(args):
    """A command of each kind with these times."""
    yield ("report", *args)
    yield ("explain", "t", *args)
    yield ("export", *args)
    yield ("reconcile", os.devnull, "--event-name", "n", "--value", "cost", "--customer", "agent",
           *args)  # fmt: skip


@pytest.mark.parametrize("where", ["sqlite", "redis"])
@pytest.mark.parametrize(
    "args",
    [
        ("--until", "1960-01-01"), ("--until", "1970-01-01T00:00Z"), ("--until", "5000w"),
        ("--since", "1950-01-01", "--until", "1960-01-01"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_time_in_which_nothing_can_be_is_empty_for_every_command(here, run, request, where, args):
    guard, at = here
    if where == "redis":
        url = request.getfixturevalue("redis_url")
        guard, at = Guard(store=url), ("--store", url)
    guard.run_task("t", 1, story.quiet)
    for words in _times_of(args):
        done = run(*words, *at)
        if words[0] == "explain":
            assert done.exit_code == 1
            assert "nothing is known of task type t" in done.stderr
        else:
            assert (done.exit_code, done.stderr) == (0, ""), words
    guard.close()


def test_compare_with_a_time_before_all_times(here, out):
    guard, at = here
    guard.run_task("t", 1, story.quiet)
    args = ("--a", "1950-01-01..1960-01-01", "--b", "1h..", "--format", "json")
    total = json.loads(out("compare", *args, *at))["total"]["executions"]
    assert (total["before"], total["after"]) == (0, 1)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--since", "2099-01-01"), "--since: it lies in the future"),
        (("--since", "2098-01-01", "--until", "2099-01-01"), "--since: it lies in the future"),
        (("--since", "1h", "--until", "2h"), "--since: it is not before --until"),
        (("--since", "1960-01-01", "--until", "1950-01-01"), "--since: it is not before --until"),
    ],
)
def test_times_in_the_wrong_order_are_an_error_of_every_command(whole, line_of, args, says):
    for words in _times_of(args):
        assert says in line_of(2, *words, "--store", whole)


@pytest.mark.parametrize(
    ("zone", "told"), [("LMT0:44:30", "UTC-00:44:30"), ("IST-5:30", "UTC+05:30"), ("UTC0", "UTC")]
)
def test_an_offset_has_seconds_where_it_had(monkeypatch, zone, told):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert stretch(10**12, 10**12 + 1, named=True).endswith(f" {told}")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_time_before_all_times_is_the_first():
    assert When(ago=10**12).moment(5) == 0
    assert When(at=-5).moment(5) == 0


@pytest.mark.parametrize("name", ["report", "export"])
def test_a_closed_output_is_no_error(here, name):
    guard, at = here
    guard.run_task("t", 1, story.quiet)
    told = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *COMMAND, name, *at],
        stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (told.returncode, told.stderr) == (0, "")


ENDED = """
import os, signal, sys, threading
from idemguard.cli.output import writing
with writing(sys.argv[1]) as file:
    file.write("half")
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(20)
"""


def test_who_is_ended_leaves_no_half_file(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDED, tmp_path / "out.csv"], timeout=60, check=False
    )
    assert done.returncode == 143
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["=1+1", "+1", "-x", "@SUM(A1)"])
def test_csv_holds_no_formula(here, out, name):
    guard, at = here
    with worker(name):
        guard.run_task(name, 1, story.quiet)
    for args in (("report", "--format", "csv"), ("export", "--format", "csv")):
        rows = list(csv.DictReader(io.StringIO(out(*args, *at))))
        texts = {text for row in rows for text in row.values()}
        assert f"'{name}" in texts
        assert not any(text.startswith(name) for text in texts)

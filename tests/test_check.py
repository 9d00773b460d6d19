"""`idemguard check` and a report's alerts: real ledgers, the project's limits, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from html import unescape
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from conftest import Clock
from workers import story

from idemguard import (
    ExecutionLedger,
    Guard,
    OutOfScope,
    Task,
    agent,
    errors,
    record_usage,
    worker,
)
from idemguard.alerts import KINDS, Alert, Limits, changed
from idemguard.cli import command
from idemguard.report import alarms, gather, html, plain, tables
from idemguard.report.limits import project_limits
from idemguard.report.paper import Paper
from idemguard.stores.memory import MemoryStore
from idemguard.stores.redis import RedisStore
from idemguard.stores.sqlite import SqliteStore
from idemguard.windows import COUNTERS, HOUR, SPAN

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "cli.md").read_text()
DAY = 86_400_000
ODD = "summarise doc's"
ALL = ",".join(KINDS)
UTC = r"\d{4}-\d\d-\d\dT\d\d:\d\dZ"


def episode(store_of, namespace="default"):
    """Three windows, and the one that is under way, in which all went wrong; a day before, nothing.

    Args:
        store_of: makes a store by a clock.
        namespace: whose ledger.

    """
    under_way = time.time_ns() // 1_000_000 // SPAN * SPAN
    now = [under_way - DAY // 2]
    store = store_of(lambda: now[0])
    given = {"store": store, "namespace": namespace}
    observed, guarded = Guard(mode="observe", **given), Guard(**given)
    for number in range(30):
        guarded.run_task("extract", {"n": -number}, story.spends(100, 1))
    # where a window ends meanwhile, these are the last three that are complete just as well,
    # but for the baseline, which then has the first
    for number, window in enumerate(range(under_way - 3 * SPAN, under_way + 1, SPAN)):
        now[0] = window
        for doc in range(7):
            with agent("writer"):
                for _ in range(3):
                    observed.run_task(ODD, {"n": number, "doc": doc}, story.quiet)
            guarded.run_task("extract", {"n": number, "doc": doc}, story.spends(200, 1))
            claim = guarded.claim(Task.of("slow", [number, doc]))
            guarded.run_task("slow", [number, doc], story.quiet, wait_timeout=0)
            claim.release()
        for _ in range(2):
            with worker("w-1"), suppress(OutOfScope):
                guarded.run_task("review", {"n": number}, story.hands_back)
    observed.close()
    guarded.close()
    return under_way


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """The URL of a file in which all went wrong."""
    path = tmp_path_factory.mktemp("bad") / "ledger.db"
    episode(lambda clock: SqliteStore(path, clock=clock))
    return f"sqlite:///{path}"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command in this process, in a project without limits."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def invoke(*args, **environment):
        done = CliRunner().invoke(command, [str(arg) for arg in args], env=environment)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return invoke


@pytest.fixture
def check(run):
    """Runs `check`, which goes well; its exit code and its lines."""

    def invoke(*args, **environment):
        done = run("check", *args, **environment)
        assert done.stderr == ""
        return done.exit_code, done.stdout.splitlines()

    return invoke


def told(run, *args, **environment):
    done = run("check", "--json", *args, **environment)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.exit_code == bool(found["alerts"])
    return found


# --- what it says ----------------------------------------------------------------------------------


def test_duplication_alone_is_on_at_first(check, bad):
    code, (line,) = check("--store", bad)
    assert code == 1
    assert re.fullmatch(
        r"duplication: 66.67% of 63 executions of summarise doc's are duplicates "
        r"\(limit 3%, \d{4}-\d\d-\d\d \d\d:\d\d to \d\d:\d\d UTC\), also slow: "
        rf"idemguard --store sqlite:////\S+ explain --since {UTC} --until {UTC} -- "
        r"'summarise doc'\"'\"'s'",
        line,
    )


@pytest.fixture(params=["sqlite", "redis"])
def everywhere(request):
    """A store of each shared kind in which all went wrong."""
    if request.param == "sqlite":
        return request.getfixturevalue("bad")
    url = request.getfixturevalue("redis_url")
    episode(lambda clock: RedisStore(url, clock=clock))
    return url


def test_the_rest_is_added_by_name_and_each_is_a_line(check, everywhere):
    code, lines = check("--fail-on", ALL, "--limit", "tokens=1.6", IDEMGUARD_STORE=everywhere)
    assert code == 1
    lines = [re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d to \d\d:\d\d UTC", "WHEN", line) for line in lines]
    lines = [re.sub(UTC, "UTC", line) for line in lines]
    lines[2] = re.sub(
        r"(200|168.18)% of (.*\(21\)), (100|119) in", r"SHARE of \2, BASE in", lines[2]
    )
    assert lines == [
        (
            "duplication: 66.67% of 63 executions of summarise doc's are duplicates (limit 3%, WHEN), "
            "also slow: idemguard explain --since UTC --until UTC -- 'summarise doc'\"'\"'s'"
        ),
        (
            "fallback: 100% of 21 calls of slow that found a claim ran beside its leader "
            "(limit 5%, WHEN): idemguard report --since UTC --until UTC --task-type=slow"
        ),
        (
            "tokens: SHARE of the baseline of extract: 200 input tokens per execution (21), BASE in "
            "the 7 days before (limit 160%, WHEN): idemguard compare --a UTC..UTC --b UTC..UTC "
            "--task-type=extract"
        ),
        (
            "drops: at least 1 task handed back by everybody in each five minutes, most in "
            "review (limit 0, WHEN): idemguard report --since UTC --until UTC --task-type=review"
        ),
        (
            "loops: at least 1 task handed back again and again in each five minutes, most in "
            "review (limit 0, WHEN): idemguard report --since UTC --until UTC --task-type=review"
        ),
        (
            "usage: 100% of 63 executions of summarise doc's ended and told no usage (limit 5%, WHEN), "
            "also slow: idemguard report --since UTC --until UTC --task-type='summarise doc'\"'\"'s'"
        ),
    ]


def typed(run, line, *more, **environment):
    """What a command prints that an alert names."""
    program, *args = shlex.split(line)
    assert program == "idemguard"
    at = args.index("--") if "--" in args else len(args)
    done = run(*args[:at], *more, *args[at:], **environment)
    assert (done.exit_code, done.stderr) == (0, ""), line
    return json.loads(done.stdout)


def test_each_command_that_is_named_shows_what_alerted(run, bad):
    found = told(run, "--fail-on", ALL, IDEMGUARD_STORE=bad)
    commands = {one["kind"]: one["command"] for one in found["alerts"]}
    assert list(commands) == ["duplication", "fallback", "tokens", "drops", "loops", "usage"]
    shown = {
        kind: typed(run, line, "--format", "json", IDEMGUARD_STORE=bad)
        for kind, line in commands.items()
    }
    # of the three windows: neither what is under way nor what was before
    assert shown["duplication"]["executions"] == 63
    assert sum(shown["duplication"]["duplicates_by"].values()) == 42
    assert shown["fallback"]["totals"]["fallback"] == 21
    change = shown["tokens"]["total"]
    assert change["executions"]["before"] in (30, 37)  # where a window has ended meanwhile
    assert (change["executions"]["after"], change["tokens"]["after"]) == (21, 21 * 201)
    assert len(shown["drops"]["drops"]) == len(shown["loops"]["loops"]) == 3
    usage = shown["usage"]["totals"]
    assert (usage["executions"], usage["without_usage"]) == (63, 63)
    for kind in ("fallback", "drops", "loops", "usage"):
        assert (shown[kind]["since"], shown[kind]["until"]) == (found["since"], found["until"])


def test_a_command_of_a_time_that_is_over_is_of_that_time(run, tmp_path, project):
    path = tmp_path / "ledger.db"
    end = time.time_ns() // 1_000_000 // SPAN * SPAN - 20 * SPAN  # and quiet since
    now = [0]
    store = SqliteStore(path, clock=lambda: now[0])
    guard = Guard(store=store, mode="observe")
    for at in (end - 3 * SPAN, end - 2 * SPAN, end - SPAN):
        now[0] = at
        for _ in range(10):
            guard.run_task("t", at, story.spends(1, 1))
    guard.close()
    store.close()
    url = f"sqlite:///{path}"
    assert told(run, "--store", url)["alerts"] == []
    (alert,) = report(run, url, "--until", f"{plain.iso(end)}")["alerts"]
    assert (alert["since"], alert["until"]) == (plain.iso(end - 3 * SPAN), plain.iso(end))
    shown = typed(run, alert["command"], "--format", "json")
    assert (shown["executions"], shown["causes"]["observed"]) == (30, 27)
    project('[tool.idemguard]\nfail_on = ["fallback", "unguarded", "duplication"]\n')
    page = run("report", "--store", url, "--until", plain.iso(end), "--format", "html").stdout
    assert f"explain --since {alert['since'][:16]}Z --until {alert['until'][:16]}Z -- t<" in page


def test_what_was_handed_back_in_silence_is_no_missing_usage(run, tmp_path):
    end = time.time_ns() // 1_000_000 // SPAN * SPAN
    now = [0]
    store = SqliteStore(tmp_path / "ledger.db", clock=lambda: now[0])
    guard = Guard(store=store)
    args = (
        "--store",
        f"sqlite:///{tmp_path}/ledger.db",
        "--fail-on",
        "usage",
        "--limit",
        "usage=4%",
    )
    windows = (end - 3 * SPAN, end - 2 * SPAN, end - SPAN, end)
    for at in windows:
        now[0] = at
        for number in range(10):
            guard.run_task("told", [at, number], story.spends(1, 1))
            guard.run_task("told", [at, number, "back"], _tells_and_hands_back)
            with suppress(OutOfScope):
                guard.run_task("back", [at, number], story.hands_back)
    assert told(run, *args)["alerts"] == []
    for at in windows:
        now[0] = at
        guard.run_task("silent", at, story.quiet)
    (alert,) = told(run, *args)["alerts"]
    # what was handed back counts where it told its usage
    assert alert["overall"] == {"figure": 3 / 63, "of": 63}
    guard.close()
    store.close()


def _tells_and_hands_back(_):
    record_usage(input_tokens=1, output_tokens=1)
    return {"status": "out_of_scope"}


def test_json_has_all_of_it(run, bad):
    found = told(run, "--store", bad, "--fail-on", "tokens,duplication", "--volume", "tokens=21")
    assert list(found) == [
        "since", "until", "namespace", "calls", "executions", "empty", "checked", "alerts",
    ]  # fmt: skip
    assert found["checked"] == [
        {"kind": "duplication", "limit": 0.03, "minimum": 20, "of": 132},
        {"kind": "tokens", "limit": 1.5, "minimum": 21, "of": 21},
    ]
    assert (found["calls"], found["executions"], found["empty"]) == (132, 132, False)
    duplication, tokens = found["alerts"]
    assert duplication == {
        "kind": "duplication", "figure": 2 / 3, "of": 63, "limit": 0.03, "minimum": 20,
        "task_type": ODD, "overall": {"figure": 63 / 132, "of": 132},
        "task_types": [
            {"task_type": ODD, "figure": 2 / 3, "of": 63},
            {"task_type": "slow", "figure": 0.5, "of": 42},
        ],
        "since": found["since"], "until": found["until"],
        "command": f"idemguard --store {bad} explain --since {found['since'][:16]}Z "
        f"--until {found['until'][:16]}Z -- {shlex.quote(ODD)}",
    }  # fmt: skip
    assert (tokens["figure"], tokens["of"]) == (pytest.approx(200 / tokens["baseline"]), 21)
    assert tokens["baseline"] in (100.0, 4400 / 37)
    assert tokens["overall"] is None


def test_the_command_names_the_namespace_and_the_store_but_no_password(run, redis_url):
    episode(lambda clock: RedisStore(redis_url, clock=clock), "a b")
    (alert,) = told(run, "--store", redis_url, "--namespace", "a b")["alerts"]
    assert alert["command"].startswith(f"idemguard --store {redis_url} --namespace 'a b' explain ")
    secret = redis_url.replace("://", "://default:geheim@")
    (alert,) = told(run, "--store", secret, "--namespace", "a b")["alerts"]
    assert alert["command"].startswith("idemguard --namespace 'a b' explain ")


@pytest.mark.parametrize(
    ("environment", "options", "named"),
    [
        (None, (), ""),
        (None, ("--namespace", "default"), ""),
        ("other", ("--namespace", "default"), "--namespace default "),
        ("default", (), ""),
    ],
)
def test_the_namespace_is_named_where_the_command_would_read_another(
    run, bad, environment, options, named
):
    given = {} if environment is None else {"IDEMGUARD_NAMESPACE": environment}
    (alert,) = told(run, "--store", bad, *options, **given)["alerts"]
    assert alert["command"].startswith(f"idemguard --store {bad} {named}explain ")
    shown = typed(run, alert["command"], "--format", "json", **given)
    assert sum(shown["duplicates_by"].values()) == 42


def test_a_namespace_of_the_environment_is_named_for_who_reads_it_elsewhere(run, tmp_path):
    episode(lambda clock: SqliteStore(tmp_path / "x.db", clock=clock), "prod")
    at = ("--store", f"sqlite:///{tmp_path}/x.db")
    (alert,) = told(run, *at, IDEMGUARD_NAMESPACE="prod")["alerts"]
    assert " --namespace prod explain " in alert["command"]


def test_where_nothing_happened_it_says_so_and_is_fine(check, bad):
    code, (line,) = check("--store", bad, "--namespace", "nobody's")
    assert (code, line) == (
        0, "no alert: nothing was called or executed yet in namespace nobody's",
    )  # fmt: skip
    assert check("--store", bad, "--namespace", "nobody's", "--quiet") == (0, [])


def test_where_little_happened_it_says_so_and_is_fine(check, tmp_path):
    now = time.time_ns() // 1_000_000
    made = SqliteStore(tmp_path / "x.db", clock=lambda: now - DAY // 2)
    guard = Guard(store=made)
    guard.run_task("t", 1, story.quiet)
    at = ("--store", f"sqlite:///{tmp_path}/x.db")
    code, (line,) = check(*at)
    assert code == 0
    assert re.fullmatch(
        r"no alert: nothing was called or executed from .* in namespace default", line
    )
    made = SqliteStore(tmp_path / "x.db", clock=lambda: now - SPAN)
    for _ in range(3):
        Guard(store=made, mode="observe").run_task("t", 1, story.quiet)
    code, (line,) = check(*at)
    assert code == 0
    assert re.fullmatch(
        r"no alert: duplication checked in 3 executions \(an alert needs 20 and some in each of "
        r"the 3 windows: only 1 had any\) from .* UTC",
        line,
    )
    guard.close()
    made.close()


@pytest.mark.parametrize(
    ("windows", "needs"),
    [
        (1, " (an alert needs some in each of the 3 windows: only 1 had any)"),
        (2, " (an alert needs some in each of the 3 windows: only 2 had any)"),
        (3, ""),
    ],
)
def test_what_is_too_short_to_alert_is_said_to_be(windows, needs):
    clock = Clock()
    clock.now -= clock.now % SPAN
    guard = Guard(store=MemoryStore(clock), mode="observe")
    for window in range(3):
        for number in range(30 if window < windows else 0):
            guard.run_task("t", [window, number], story.quiet)
        clock.now += SPAN
    text = alarms.quiet(alarms.check(guard.ledger, Limits(), clock.now))
    many = windows * 30
    assert text.startswith(f"no alert: duplication checked in {many} executions{needs} from ")
    guard.close()


@pytest.fixture
def healthy():
    """A ledger in which three windows are well, and so many ran the day before."""
    clock = Clock()
    clock.now -= clock.now % SPAN
    guard = Guard(store=MemoryStore(clock))

    def run(before, waited=0):
        for number in range(before):
            guard.run_task("extract", -number - 1, story.spends(100, 1))
        clock.now += DAY // 2
        for window in range(3):
            for number in range(waited if window < 2 else 0):
                claim = guard.claim(Task.of("slow", [window, number]))
                with suppress(errors.WaitTimeoutError):
                    guard.run_task(
                        "slow", [window, number], story.quiet, wait_timeout=0, on_timeout="raise"
                    )
                claim.release()
            for number in range(10):
                guard.run_task("extract", [window, number], story.spends(100, 1))
            clock.now += SPAN
        return guard.ledger, clock.now

    yield run
    guard.close()


@pytest.mark.parametrize(
    ("before", "waited", "kinds", "told"),
    [
        (
            0, 0, ["tokens"],
            ("tokens could not be checked: there is no baseline yet (that takes 20 executions of a "
            "task type in the 7 days before)"),
        ),
        (20, 0, ["tokens"], "tokens checked in 30 executions of task types with a baseline WHEN"),
        (
            0, 0, ["duplication", "tokens", "unguarded"],
            ("duplication, unguarded checked in 30 executions WHEN; tokens could not be checked: "
            "there is no baseline yet (that takes 20 executions of a task type in the 7 days before)"),
        ),
        (
            0, 0, ["fallback"],
            ("fallback checked in 0 calls that found a claim (an alert needs 20 and some in each of "
            "the 3 windows: none had any) WHEN"),
        ),
        (
            0, 10, ["duplication", "fallback"],
            ("duplication checked in 50 executions; fallback checked in 20 calls that found a claim "
            "(an alert needs some in each of the 3 windows: only 2 had any) WHEN"),
        ),
        (0, 0, ["usage"], "usage checked in 30 executions that ended WHEN"),
    ],
)  # fmt: skip
def test_each_kind_says_in_what_it_was_checked(healthy, before, waited, kinds, told):
    ledger, now = healthy(before, waited)
    limits = changed(Limits(), {"fail_on": kinds})
    found = alarms.check(ledger, limits, now)
    when = f"from {alarms.times(found.start, found.end)}"
    assert alarms.quiet(found) == f"no alert: {told.replace('WHEN', when)}"
    # a page says the same, with the limits
    said = told.replace(" WHEN", "")
    for kind in kinds:
        over = alarms.limit(kind, limits.of[kind].over)
        said = re.sub(rf"\b{kind}(?=,| checked| could)", f"{kind} over {over}", said)
    page = html.page(gather(ledger, limits=limits))
    assert f">No alert in the last three windows of five minutes; {said}.<" in page


_WIDE, _MANY = "some in each of the 3 windows", "20 of one task type"


@pytest.mark.parametrize(
    ("ran", "needs"),
    [
        ({"A": (6, 6, 6), "B": (100, 100, 0)}, f"{_MANY} and {_WIDE}: no task type has both"),
        ({"A": (6, 6, 6), "B": (5, 5, 0)}, _MANY),
        (
            {"A": (6, 6, 0), "B": (100, 100, 0)},
            "some of one task type in each of the 3 windows: only 2 had any",
        ),
        (
            {"A": (6, 6, 0), "B": (100, 0, 0)},
            "some of one task type in each of the 3 windows: only 2 had any",
        ),
        ({"A": (6, 6, 0), "B": (0, 0, 7)}, f"{_MANY} and {_WIDE}: only 2 had any"),
        ({"A": (7, 7, 7), "B": (100, 100, 0)}, None),
    ],
)
def test_what_no_task_type_has_is_said_and_nothing_that_one_has(ran, needs):
    clock = Clock()
    clock.now -= clock.now % SPAN
    guard = Guard(store=MemoryStore(clock))
    for number in range(20):
        for name in ran:
            guard.run_task(name, number, story.spends(100, 1))
    clock.now += DAY // 2
    for window in range(3):
        for name, numbers in ran.items():
            for number in range(numbers[window]):
                guard.run_task(name, [window, number], story.spends(100, 1))
        clock.now += SPAN
    limits = changed(Limits(), {"fail_on": ["tokens"]})
    text = alarms.quiet(alarms.check(guard.ledger, limits, clock.now))
    many = sum(map(sum, ran.values()))
    lacks = f" (an alert needs {needs})" if needs else ""
    told = (
        f"no alert: tokens checked in {many} executions of task types with a baseline{lacks} from "
    )
    assert text.startswith(told)
    guard.close()


def test_calls_that_executed_nothing_are_said_to_be_too_few():
    clock = Clock()
    clock.now -= clock.now % SPAN
    guard = Guard(store=MemoryStore(clock))
    guard.run_task("t", 1, story.quiet)
    clock.now += SPAN
    guard.run_task("t", 1, story.quiet)
    clock.now += 3 * SPAN
    text = alarms.quiet(alarms.check(guard.ledger, Limits(), clock.now))
    needs = "an alert needs 20 and some in each of the 3 windows: none had any"
    assert text.startswith(f"no alert: duplication checked in 0 executions ({needs}) from ")
    guard.close()


def test_a_file_is_named_by_its_whole_path(run, bad, tmp_path, monkeypatch):
    there = Path(bad.removeprefix("sqlite:///"))
    monkeypatch.chdir(there.parent)
    (alert,) = told(run, "--store", f"sqlite:///{there.name}")["alerts"]
    assert alert["command"].startswith(f"idemguard --store {bad} explain ")
    assert report(run, f"sqlite:///{there.name}")["alerts"] == [alert]
    monkeypatch.chdir(tmp_path)
    assert typed(run, alert["command"], "--format", "json")["executions"] == 63


def test_a_task_type_that_is_misspelt_is_told_what_looks_alike(run, bad):
    for name, told_ in (
        ("exract", "did you mean extract?"),
        ("trac", "did you mean extract?"),
        ("x", "there are 4 task types"),
        ("nosuch", "there are 4 task types"),
    ):
        for args in (
            ("explain", name),
            ("compare", "--a", "2h..1h", "--b", "1h..", "--task-type", name),
        ):
            done = run(*args, "--store", bad)
            assert (done.exit_code, done.stdout) == (1, "")
            line = f"idemguard: nothing is known of task type {name} in default; {told_}\n"
            assert done.stderr == line
    done = run("explain", "extract", "--store", bad, "--until", "3d")  # it was, later
    assert done.stderr == "idemguard: nothing is known of task type extract in default until then\n"


def test_a_store_that_is_not_there_is_an_error_and_no_alert(run, tmp_path):
    for args in (
        ("--store", f"sqlite:///{tmp_path}/none.db"),
        ("--store", f"sqlite:///{__file__}"),
    ):
        done = run("check", "--quiet", *args)
        assert (done.exit_code, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_only_an_alert_is_printed_when_quiet(check, bad):
    assert check("--store", bad, "--quiet")[0] == 1
    assert len(check("--store", bad, "--quiet")[1]) == 1
    assert check("--store", bad, "--quiet", "--limit", "duplication=70%") == (0, [])
    assert check("--store", bad, "--quiet", "--json", "--volume", "1000") == (0, [])


SHORT = """
import os, sys
from idemguard import Guard, record_usage
from idemguard.stores.redis import RedisStore
from idemguard.stores.sqlite import SqliteStore

url, at, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
kind = RedisStore if url.startswith("redis") else SqliteStore
store = kind(url.removeprefix("sqlite:///"), clock=lambda: at)
guard = Guard(store=store, mode="observe")
for number in range(7, 0, -1):
    for _ in range(3):
        guard.run_task("t", {"n": number, "at": at}, lambda _: record_usage(input_tokens=tokens))
os._exit(0)  # with nothing tended, closed or written at the end
"""


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_programs_that_live_for_a_moment_are_seen(request, tmp_path, kind):
    url = request.getfixturevalue("redis_url") if kind == "redis" else f"sqlite:///{tmp_path}/x.db"
    end = time.time_ns() // 1_000_000 // SPAN * SPAN

    def process(*args):
        return subprocess.run(
            [sys.executable, "-W", "error", *args],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    windows = (end - 3 * SPAN, end - 2 * SPAN, end - SPAN, end)  # one may end meanwhile
    for at, tokens in ((end - 2 * DAY, 10), *((at, 200) for at in windows)):
        assert process("-c", SHORT, url, str(at), str(tokens)).returncode == 0
    kinds = "duplication,tokens"
    done = process("-m", "idemguard", "check", "--json", "--store", url, "--fail-on", kinds)
    assert (done.returncode, done.stderr) == (1, "")
    duplication, tokens = json.loads(done.stdout)["alerts"]
    assert (duplication["kind"], duplication["figure"]) == ("duplication", 2 / 3)
    assert (tokens["kind"], tokens["baseline"] < 200) == ("tokens", True)
    assert duplication["of"] == tokens["of"] == 63


# --- tasks that are handed back so often that their lines make room -----------------------------


BACK = changed(Limits(), {"fail_on": ["drops", "loops"], "volume": 1})


@pytest.fixture(params=["memory"])
def going_round(request):
    """Hands tasks back so often in each of three windows and the one that is under way.

    Gives what alerts then, and the reports that the alerts' commands show.
    """
    clock = Clock()
    clock.now -= clock.now % SPAN
    if request.param == "memory":
        store = MemoryStore(clock)
    else:
        store = RedisStore(request.getfixturevalue("redis_url"), clock=clock)
    guard = Guard(store=store)

    def go(task, *often, others=()):
        for window, times in enumerate(often):
            start = clock.now
            for number in range(times + (window in others)):
                with worker(f"w-{number % 2}"), suppress(OutOfScope):
                    other = number == times
                    guard.run_task("review", f"other {window}" if other else task, story.hands_back)
                clock.now += 1000
            clock.now = start + SPAN * (window < len(often) - 1)
        clock.now += 200_000
        found = alarms.check(guard.ledger, BACK, clock.now).alerts
        shown = []
        for alert in found:
            args = shlex.split(alarms.command(alert, "default"))
            since = datetime.fromisoformat(args[args.index("--since") + 1])
            until = alert.end if "--until" in args else None
            told = gather(guard.ledger, since=round(since.timestamp() * 1000), until=until)
            shown.append(len(told.drops if alert.kind == "drops" else told.loops))
        return [one.kind for one in found], shown

    yield go
    guard.close()
    store.close()


@pytest.mark.parametrize(
    ("going_round", "often"),
    [
        ("memory", (3, 2, 2, 0)), ("memory", (32, 32, 32, 6)), ("memory", (90, 3, 70, 0)),
        ("memory", (70, 70, 70, 70)), ("redis", (3, 3, 3, 70)),
    ],
    indirect=["going_round"],
)  # fmt: skip
def test_a_task_that_goes_round_more_quickly_alerts_all_the_same(going_round, often):
    assert going_round("hot", *often) == (["drops", "loops"], [1, 1])


@pytest.mark.parametrize(
    ("often", "others"),
    [
        pytest.param((0, 70, 70, 70), (), id="in two windows"),
        pytest.param((0, 70, 70, 70), (0,), id="and others in the first"),
        pytest.param((0, 0, 0, 70), (0, 1, 2), id="only in the window that is under way"),
        pytest.param((3, 0, 70, 70, 0), (), id="again, when nothing had been handed back"),
        pytest.param((70, 0, 3, 3, 0), (1,), id="again, and its lines from before are there"),
    ],
)
def test_what_goes_round_again_or_for_the_first_time_was_not_there_before(
    going_round, often, others
):
    kinds, _ = going_round("new", *often, others=others)
    assert "loops" not in kinds


def test_what_is_handed_back_beside_a_result_was_not_there_before_its_first_line():
    clock = Clock()
    clock.now -= clock.now % SPAN
    observed = Guard(store=MemoryStore(clock), mode="observe")
    with suppress(OutOfScope):
        observed.run_task("review", "other", story.hands_back)
    for bodies in ([story.quiet, *[story.hands_back] * 3], [story.hands_back] * 3):
        clock.now += SPAN
        for body in bodies:
            with suppress(OutOfScope):
                observed.run_task("review", "done", body)
    clock.now += SPAN
    assert list(alarms.check(observed.ledger, BACK, clock.now).alerts) == []
    observed.close()


# --- limits ----------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Writes a project's file, and works in a folder of it."""

    def write(text, inside="src/deep"):
        (tmp_path / "pyproject.toml").write_text(text)
        (tmp_path / inside).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / inside)

    return write


def test_the_project_sets_limits_and_options_outrank_them(check, run, bad, project):
    project(
        '[tool.idemguard]\nfail_on = ["tokens"]\nvolume = {tokens = 21}\n'
        "[tool.idemguard.limits]\nduplication = 0.67\ntokens = 1.6\n"
    )
    found = told(run, "--store", bad)
    assert found["checked"] == [{"kind": "tokens", "limit": 1.6, "minimum": 21, "of": 21}]
    assert [one["kind"] for one in found["alerts"]] == ["tokens"]
    assert check("--store", bad, "--limit", "tokens=2")[0] == 0
    assert check("--store", bad, "--volume", "22")[0] == 0
    assert check("--store", bad, "--fail-on", "duplication")[0] == 0
    assert check("--store", bad, "--fail-on", "duplication", "--limit", "duplication=0.67")[0] == 0
    assert check("--store", bad, "--fail-on", "duplication", "--limit", "duplication=49%")[0] == 1


def test_the_nearest_file_that_sets_any_counts(project, tmp_path):
    project("[tool.idemguard]\nvolume = 7\n")
    assert project_limits() == changed(Limits(), {"volume": 7})
    (tmp_path / "src" / "pyproject.toml").write_text("[tool.other]\n")
    assert project_limits() == changed(Limits(), {"volume": 7})
    (tmp_path / "src" / "deep" / "pyproject.toml").mkdir()  # a folder is no file
    assert project_limits() == changed(Limits(), {"volume": 7})
    (tmp_path / "src" / "pyproject.toml").write_text("[tool.idemguard]\nfail_on = []\n")
    assert project_limits() == Limits(on=())


def test_a_limit_of_what_is_not_checked_says_what_to_add(run, check, bad, project):
    for option in ("--limit", "--volume"):
        done = run("check", "--store", bad, option, "fallback=1" + "%" * (option == "--limit"))
        assert (done.exit_code, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        told = f"{option}: fallback is not checked; add it: --fail-on duplication,fallback"
        assert told in line
    added = ("--fail-on", "duplication,fallback", "--limit", "fallback=1%")
    assert check("--store", bad, *added)[0] == 1
    assert check("--store", bad, "--volume", "1000")[0] == 0  # of every kind
    project("[tool.idemguard.limits]\nfallback = 0.01\n")  # for whoever adds it
    assert len(check("--store", bad)[1]) == 1
    assert run("check", "--store", bad, "--limit", "fallback=2%").exit_code == 2
    project('[tool.idemguard]\nfail_on = ["fallback"]\n')
    assert check("--store", bad, "--limit", "fallback=1%")[0] == 1


def test_nothing_to_check_is_an_error_and_a_report_says_it(run, check, bad, project):
    project("[tool.idemguard]\nfail_on = []\n")
    done = run("check", "--store", bad)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "nothing is checked: fail_on is empty in [tool.idemguard]; name kinds there" in line
    assert check("--store", bad, "--fail-on", "duplication")[0] == 1
    done = run("report", "--store", bad, "--format", "html")
    assert (done.exit_code, "; nothing is checked." in done.stdout) == (0, True)


@pytest.mark.parametrize(
    "text", ["", "[project]\n", "tool = 1\n", "[tool.other]\n", "\ufeff[tool]\n", "[tool.idemguard]\n"]
)  # fmt: skip
def test_a_file_that_sets_none_changes_nothing(project, text):
    project(text, ".")
    assert project_limits() == Limits()


@pytest.mark.parametrize("name", ["check", "report"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[tool.idemguard]\nlimit = 3\n", "pyproject.toml [tool.idemguard]: there is no 'limit'"),
        (
            b"[tool.idemguard.limits]\ndup = 3\n",
            "pyproject.toml [tool.idemguard] limits: there is no 'dup'",
        ),
        (
            b"[tool.idemguard.limits]\nduplication = 3\n",
            "pyproject.toml [tool.idemguard] limits.duplication takes a share below 1",
        ),
        (b"[tool]\nidemguard = 3\n", "pyproject.toml: [tool.idemguard] is no table"),
        (b"[tool.idemguard\n", "pyproject.toml: no TOML: "),
        (b"a = " + b"[" * 100_000, "pyproject.toml: no TOML: "),
        (b"a = '\xff'", "pyproject.toml: cannot be read: "),
    ],
    ids=str,
)
def test_what_the_project_sets_wrongly_is_one_line(run, bad, tmp_path, name, text, message):
    (tmp_path / "pyproject.toml").write_bytes(text)
    done = run(name, "--store", bad)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--fail-on", "dup"), "--fail-on: fail_on: there is no 'dup'; there are duplication, "),
        (("--fail-on", ""), "--fail-on: fail_on: there is no ''"),
        (("--limit", "duplication"), "--limit: limits.duplication takes a share below 1"),
        (("--limit", "=3"), "--limit: limits: there is no ''"),
        (("--limit", "tokens=50%"), "--limit: limits.tokens takes a multiple"),
        (("--volume", "0"), "--volume: volume takes a whole number > 0, not '0'"),
        (("--volume", "x=1"), "--volume: volume: there is no 'x'"),
        (("--volume", "tokens="), "--volume: volume takes a whole number"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(run, bad, args, message):
    done = run("check", "--store", bad, *args)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert message in line


def test_what_is_measured_is_counted():
    measured = {
        "found", "input", "unknown_usage", "nested", "heard", "silent", "cause_fallback",
        "cause_unguarded",
    }  # fmt: skip
    assert measured <= set(COUNTERS)


# --- a report --------------------------------------------------------------------------------------


def report(run, url, *args):
    return json.loads(run("report", "--store", url, "--format", "json", *args).stdout)


def test_a_report_has_the_same_alerts(run, bad, project):
    found = told(run, "--store", bad)["alerts"]
    assert f"--store {bad}" in found[0]["command"]  # where one would look else is another ledger
    assert report(run, bad)["alerts"] == found
    assert report(run, bad, "--since", "1m")["alerts"] == found
    line = run("report", "--store", bad).stdout.splitlines()[1]
    assert line == f"Alert: {run('check', '--store', bad).stdout.rstrip()}"
    project('[tool.idemguard]\nfail_on = ["fallback", "usage"]\n')
    assert [one["kind"] for one in report(run, bad)["alerts"]] == ["fallback", "usage"]


def test_a_report_of_one_task_type_or_agent_or_time_has_its_alerts(run, bad, project):
    def alerting(*args):
        found = report(run, bad, *args)["alerts"]
        return {one["kind"]: [each["task_type"] for each in one["task_types"]] for one in found}

    assert alerting("--task-type", "slow") == {"duplication": ["slow"]}
    assert alerting("--task-type", "extract") == {}
    assert alerting("--agent", "writer") == {"duplication": [ODD]}
    assert alerting("--agent", "") == {"duplication": ["slow"]}
    assert alerting("--until", "1h") == {}
    project('[tool.idemguard]\nfail_on = ["drops"]\nvolume = 6\n')
    assert alerting() == {"drops": ["review"]}
    assert alerting("--task-type", "slow") == alerting("--agent", "writer") == {}


@pytest.fixture
def paged():
    """The page of a report with alerts of these task types, as of so many hours later."""

    def page(*task_types, hours=0, at=None):
        clock = Clock()
        clock.now = (clock.now if at is None else at) // SPAN * SPAN
        store = MemoryStore(clock)
        guard = Guard(store=store, mode="observe")
        for _ in range(3):
            for task_type in task_types:
                for _ in range(10):
                    guard.run_task(task_type, clock.now, story.quiet)
            clock.now += SPAN
        end = clock.now
        clock.now += hours * HOUR
        store.tend(None)
        found = gather(guard.ledger, until=end, limits=Limits())
        guard.close()
        return html.page(found)

    return page


def test_a_page_of_a_time_long_ago_says_that_alerts_can_be_told_no_longer(paged):
    fine, gone = "No alert in the last three windows of five minutes", "can no longer be told"
    assert "1 alert in the last three windows" in paged("t", hours=23)
    assert fine in paged(hours=23)
    for page in (paged("t", hours=25), paged(hours=25)):
        assert fine not in page
        assert (
            f"Whether anything alerted then {gone}: windows of five minutes are kept for a day"
            in page
        )


@pytest.mark.parametrize("until", [None, 2 * DAY])
@pytest.mark.parametrize("ahead", [1, SPAN, DAY])
def test_what_alerts_now_is_none_of_what_is_to_come(ahead, until):
    clock = Clock()
    clock.now = clock.now // SPAN * SPAN
    guard = Guard(store=MemoryStore(clock), mode="observe")
    for _ in range(4):
        for _ in range(10):
            guard.run_task("t", 1, story.quiet)
        clock.now += SPAN
    now, limits = clock.now, Limits()
    assert len(gather(guard.ledger, since=now, limits=limits).alerts) == 1
    end = None if until is None else now + until
    found = gather(guard.ledger, since=now + ahead, until=end, limits=limits)
    assert list(found.alerts) == []
    fine = "No alert in the last three windows of five minutes; nothing was called or executed in them."
    assert fine in html.page(found)
    guard.close()


def test_an_alert_on_a_page_is_of_the_page_s_time_zone(paged, monkeypatch):
    summer = datetime.fromisoformat("2026-10-25T00:45Z")  # an hour later clocks are turned back
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        page = paged("t", at=round(summer.timestamp() * 1000))
        line = alarms.times(*(round(summer.timestamp() * 1000) + at for at in (0, 3 * SPAN)))
    time.tzset()
    assert line == "2026-10-25 02:45 UTC+02:00 to 02:00 UTC+01:00"
    begin, end = '<time datetime="2026-10-25T0{}:00.000+00:00">', "</time>"
    assert (
        f"(limit 3%, {begin.format('0:45')}2026-10-25 01:45{end} to {begin.format('1:00')}02:00{end})"
        in page
    )
    assert "Times are UTC+01:00" in page


def test_names_in_an_alert_do_not_turn_the_line_around(paged):
    names = ["\u05d0", "\u05d1", "\u05d2"]
    page = unescape(paged(*names))
    assert f" of <bdi>{names[0]}</bdi> are duplicates (limit 3%, <time " in page
    assert f", also <bdi>{names[1]}</bdi>, <bdi>{names[2]}</bdi></span>" in page


def test_foreign_names_in_alerts_do_nothing_to_a_terminal(tmp_path):
    path = tmp_path / "ledger.db"
    now = [time.time_ns() // 1_000_000 // SPAN * SPAN]
    store = SqliteStore(path, clock=lambda: now[0])
    guard = Guard(store=store, mode="observe")
    end = now[0]
    for at in range(end - 3 * SPAN, end, SPAN):
        now[0] = at
        for _ in range(10):
            guard.run_task(story.HOSTILE, at, story.quiet)
    now[0] = end
    limits = changed(Limits(), {"fail_on": ["duplication", "usage"]})
    found = gather(ExecutionLedger(store), limits=limits)
    page = io.StringIO()
    tables.show(Paper(page), found)
    alerts = [line for line in page.getvalue().splitlines() if line.startswith("Alert: ")]
    assert [line.split(":")[1] for line in alerts] == [" duplication", " usage"]
    assert all("bad\\x1b[31m[red]\\n:smile:" in line for line in alerts)
    assert [one["task_type"] for one in plain.report(found)["alerts"]] == [story.HOSTILE] * 2
    guard.close()
    store.close()


# --- what is there to copy -------------------------------------------------------------------------


def shell(line, url, **environment):
    """What a shell does with a line; `idemguard` is ours."""
    path = Path(environment.pop("bin"))
    path.mkdir()
    (path / "idemguard").write_text(
        f'#!/bin/sh\nexec {sys.executable} -W error -m idemguard "$@"\n'
    )
    (path / "idemguard").chmod(0o755)
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", line],
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}", "IDEMGUARD_STORE": url, **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_cron_line_mails_an_alert(bad, tmp_path):
    text = (ROOT / "examples" / "cron" / "idemguard").read_text()
    (line,) = [one for one in text.splitlines() if one[:1].isdigit()]
    minutes, *_, user, program = line.split(maxsplit=6)
    assert (minutes, user) == ("1-59/5", "nobody")
    assert "%" not in line  # a newline, to cron
    done = shell(program, bad, bin=tmp_path / "bin")
    assert (done.returncode, done.stderr) == (1, "")
    assert [one.split(":")[0] for one in done.stdout.splitlines()] == ["duplication", "fallback"]


def test_the_job_fails_on_an_alert_and_tells_it(bad, tmp_path):
    job = yaml.safe_load((ROOT / "examples" / "ci" / "check.yml").read_text())["jobs"]["check"]
    (step,) = [one for one in job["steps"] if one.get("name") == "idemguard check"]
    assert step["shell"] == "bash"
    assert list(step["env"]) == ["IDEMGUARD_STORE"]
    summary = tmp_path / "summary.md"
    done = shell(step["run"], bad, bin=tmp_path / "bin", GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 1
    assert done.stdout == summary.read_text()
    assert [one.split(":")[0] for one in done.stdout.splitlines()] == [
        "duplication", "fallback", "tokens",
    ]  # fmt: skip


def test_the_settings_that_the_page_shows_can_be_set(project):
    (text,) = re.findall(r"```toml\n(.*?\[tool\.idemguard\].*?)```", PAGE, re.DOTALL)
    project(text)
    assert project_limits() != Limits()


@pytest.mark.parametrize(
    "task_type", ["a\n::error::b", "it's\x1b[31m", "\u202eabc\\", "plain", "ä b"]
)
def test_a_command_is_one_line_and_what_a_shell_takes(task_type):
    found = Alert("duplication", Limits().of["duplication"], None, (), task_type, 0, 900_000)
    typed = alarms.command(found, "default")
    assert typed.isprintable()
    shown = typed.replace("idemguard ", "printf '<%s>' ", 1)
    said = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert said.endswith(f"<{task_type}>")

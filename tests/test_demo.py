"""The demo as a person runs it: the command, its odd inputs, its figures, the example."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest
from programs import need
from servers.jaeger import Jaeger
from servers.otlp import METRICS, TRACES, Receiver
from servers.server import HOST, free_port

from idemguard import ExecutionLedger, Guard, record_usage
from idemguard.cli.demo import _missing
from idemguard.demo import TEXTS, export, figures
from idemguard.demo.documents import LARGEST, UnusableError, look_through, read, shown
from idemguard.demo.plan import plan
from idemguard.demo.run import Came
from idemguard.demo.tasks import CHEAP, COSTLY, KINDS, digest, tokens

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "idemguard"
EXAMPLE = Path(__file__).parents[1] / "examples" / "double_bill.py"
COMMAND = (sys.executable, "-W", "error", "-m", "idemguard")
QUICK = ("--delay", "0.01")
GOOD = "The harbour opens on 3 May 2025. It cost 4,200 euros. The mayor will come at noon. " * 12
NAMES = [f"document-{number}.txt" for number in range(16)]


def demo(*args: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "demo", *args], capture_output=True, text=True, timeout=60, check=False, **more
    )


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error."""
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """One run on the documents that ship, with its ledger kept: where that is, what it printed."""
    store = f"sqlite:///{tmp_path_factory.mktemp('kept') / 'demo.db'}"
    done = demo("--json", "--store", store, "--delay", "0.03")
    assert done.stderr == ""
    assert done.returncode == 0
    return store, json.loads(done.stdout)


# --- the figures -----------------------------------------------------------------------------------------


def test_observed_the_bill_nearly_doubles_for_less_than_a_fifth_of_the_tasks(kept):
    seen = kept[1]["observe"]
    assert 0.16 < seen["doubled_share"] < 0.20
    assert 1.8 < seen["against_ideal"] < 2.0
    assert 0.14 < seen["duplication_rate"] < 0.17
    assert sum(seen["doubled_types"][kind] for kind in COSTLY) > 0.9 * seen["doubled"]
    assert (seen["failed"], seen["died"], seen["reused"]) == ([], [], 0)
    assert Decimal(seen["bill"]) > Decimal(seen["ideal"]) > 0


def test_enforced_every_task_is_executed_once(kept):
    observed, enforced = kept[1]["observe"], kept[1]["enforce"]
    assert enforced["duplicates"] == enforced["doubled"] == 0
    assert enforced["doubled_share"] == enforced["duplication_rate"] == 0
    assert enforced["against_ideal"] == 1
    assert enforced["executions"] == enforced["tasks"] == observed["tasks"]
    assert enforced["calls"] == observed["calls"] == kept[1]["planned"]["calls"]
    assert enforced["reused"] == observed["executions"] - observed["tasks"]
    assert enforced["bill"] == enforced["ideal"] == observed["ideal"]
    assert enforced["tokens"] < observed["tokens"]


def test_the_ledger_that_was_kept_says_the_same(kept):
    store, told = kept
    for mode in ("observe", "enforce"):
        ledger = ExecutionLedger(store, namespace=told[mode]["namespace"])
        found = figures(ledger)
        assert (found.calls, found.tokens) == (told[mode]["calls"], told[mode]["tokens"])
        assert found.doubled_share == pytest.approx(ledger.doubled_share())
        assert found.duplication_rate == pytest.approx(ledger.duplication_rate())
        assert found.bill == ledger.totals()["charged"]
        assert {line.worker for line in ledger.lines()} == {"worker-1", "worker-2", "worker-3"}


def test_three_workers_begin_at_the_same_moment(kept):
    store, told = kept
    ledger = ExecutionLedger(store, namespace=told["observe"]["namespace"])
    first: dict[str, int] = {}
    for line in ledger.lines():
        first.setdefault(line.worker, line.started)
    assert max(first.values()) - min(first.values()) < 500


@pytest.fixture
def counted(tmp_path):
    """A ledger of four calls of two tasks, and a way to delete from it."""
    path = tmp_path / "ledger.db"
    guard = Guard(
        store=f"sqlite:///{path}",
        mode="observe",
        pricer={"m": {"input": "3", "output": "15"}},
    )

    def body(_: dict[str, int]) -> str:
        record_usage(input_tokens=1000, output_tokens=100, model="m")
        return "done"

    for number in (1, 1, 1, 2):
        guard.run_task("count", {"number": number}, body)

    def delete(part: str, most: int = 99) -> None:
        connection = sqlite3.connect(path)
        with connection:
            for id_, text in connection.execute("SELECT id, lines FROM record").fetchall():
                left = []
                for line in text.splitlines():
                    if part in line and most:
                        most -= 1
                    else:
                        left.append(line)
                values = ("\n".join(left), id_)
                connection.execute("UPDATE record SET lines = ? WHERE id = ?", values)
        connection.close()

    yield guard.ledger, delete
    guard.close()


def test_lines_that_are_deleted_lower_every_figure(counted):
    ledger, delete = counted
    before = figures(ledger)
    assert (before.calls, before.executions, before.tasks, before.doubled) == (4, 4, 2, 1)
    assert (before.duplicates, before.tokens) == (2, 4400)
    assert (before.bill, before.against_ideal) == (Decimal("0.018"), 2)

    delete('"observed"')
    after = figures(ledger)
    for name in (
        "calls", "executions", "doubled", "duplicates", "tokens", "bill", "doubled_share",
        "duplication_rate", "against_ideal",
    ):  # fmt: skip
        assert getattr(after, name) < getattr(before, name), name
    assert (after.tasks, after.ideal, after.against_ideal) == (2, before.ideal, 1)

    delete('"first"', 1)
    assert figures(ledger).tasks == 1
    assert figures(ledger).ideal < before.ideal

    delete("")
    nothing = figures(ledger)
    assert (nothing.calls, nothing.tasks, nothing.bill, nothing.against_ideal) == (0, 0, 0, 0)


def test_reuses_count_with_the_lines_of_their_task(tmp_path):
    guard = Guard(store=f"sqlite:///{tmp_path / 'ledger.db'}")
    for number in (1, 1, 2):
        guard.run_task("count", {"number": number}, lambda _: "done")
    found = figures(guard.ledger)
    guard.close()
    assert (found.calls, found.executions, found.reused, found.bill) == (3, 2, 1, 0)


# --- the plan --------------------------------------------------------------------------------------------


def test_a_plan_is_the_same_for_the_same_documents():
    assert plan(NAMES) == plan(NAMES)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 60])
def test_a_plan_hands_every_task_out_and_a_share_of_them_twice(count):
    found = plan([f"{number}.txt" for number in range(count)])
    handed = [call for batch in found.batches for call in batch]
    assert len(set(handed)) == found.tasks == count * len(KINDS)
    assert len(handed) == found.calls == found.tasks + len(found.doubled)
    assert len(set(found.doubled)) == len(found.doubled)
    assert len(found.doubled) / found.tasks == pytest.approx(0.18, abs=0.02)
    assert sum(call.task_type in COSTLY for call in found.doubled) >= 0.9 * len(found.doubled)
    assert all(len(set(batch)) == len(batch) for batch in found.batches)


@pytest.mark.parametrize("overlap", [0, 0.05, 0.5, 1])
def test_a_plan_overlaps_as_much_as_it_is_told(overlap):
    found = plan(NAMES, overlap)
    assert len(found.doubled) == round(overlap * found.tasks)
    sizes = [len(batch) for batch in found.batches]
    assert max(sizes) < 1.3 * min(sizes)


# --- what is done to a document --------------------------------------------------------------------------


def test_the_documents_that_ship_are_of_ordinary_size():
    texts = [path.read_text(encoding="utf-8") for path in TEXTS.iterdir()]
    assert 12 <= len(texts) <= 20
    assert all(250 <= len(text.split()) <= 900 for text in texts)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_task_gives_the_same_answer_twice_and_one_that_json_keeps(kind):
    text = (TEXTS / "incident-checkout-latency.txt").read_text(encoding="utf-8")
    found = digest(kind, text)
    assert found == digest(kind, text)
    assert found.answer == json.loads(json.dumps(found.answer))
    assert found.answer
    assert 0 < found.output_tokens < found.input_tokens or kind.name in CHEAP
    assert (found.input_tokens > tokens(text)) == (kind.name in COSTLY)


def test_answers_are_about_the_text():
    text = (TEXTS / "protokoll-lieferengpass.txt").read_text(encoding="utf-8")
    answers = {name: digest(kind, text).answer for name, kind in KINDS.items()}
    assert answers["language"] == "German"
    assert answers["date"] == "6. Mai 2025"
    assert all(part in text.replace("\n", " ") for part in answers["summarise"].split(". "))
    assert all(fact["figure"] in fact["about"] for fact in answers["extract_facts"])
    assert tokens("Twelve letter: no!") == 1 + 1 + 1 + 1 + 1


@pytest.mark.parametrize("text", ["a " * 90_000, "x" * 180_000, "1 " * 90_000, ".\n1" * 60_000])
def test_a_text_out_of_the_ordinary_takes_no_time(text):
    start = time.monotonic()
    for kind in KINDS.values():
        digest(kind, text)
    assert time.monotonic() - start < 8


# --- folders ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A folder with three documents and everything that is none."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "inside" / "further").mkdir(parents=True)
    (folder / "nothing.txt").mkdir()
    for name in ("good.txt", "-rf [red]\n\x1b[31m🎉.md", "inside/further/good"):
        (folder / name).write_text(GOOD)
    (folder / "empty.txt").touch()
    (folder / "blank.txt").write_text(" \n\t\n")
    (folder / "marks.txt").write_text("... --- ...")
    (folder / "binary.txt").write_bytes(b"text\0text" * 50)
    (folder / "latin.txt").write_bytes("Grüße aus Köln".encode("latin-1"))
    (folder / "wide.txt").write_bytes("hello".encode("utf-16"))
    (folder / "huge.txt").write_bytes(b"word " * LARGEST)
    (folder / "dangling.txt").symlink_to("nowhere")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "linked").symlink_to(folder)
    (folder / ".hidden").write_text(GOOD)
    os.mkfifo(folder / "pipe.txt")
    (folder / "device.txt").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(str(folder / "socket"))
    Path(os.fsdecode(os.fsencode(folder) + b"/bad\xff.txt")).write_text(GOOD)
    (folder / "closed.txt").write_text(GOOD)
    (folder / "closed.txt").chmod(0)
    return folder


REASONS = {
    "nothing.txt/": "an empty folder",
    "empty.txt": "empty",
    "blank.txt": "empty",
    "marks.txt": "no words in it",
    "binary.txt": "binary",
    "latin.txt": "not UTF-8 text",
    "wide.txt": "not UTF-8 text (UTF-16)",
    "huge.txt": "larger than 200 kB",
    "dangling.txt": "a link to nothing",
    "loop.txt": "too many levels of symbolic links",
    "linked": "a link to a folder",
    ".hidden": "hidden",
    "pipe.txt": "a pipe",
    "device.txt": "a device",
    "socket": "a socket",
    r"bad\udcff.txt": "its name is no valid Unicode",
}
if os.geteuid():  # root may read everything
    REASONS["closed.txt"] = "may not be read"


@pytest.fixture(scope="module")
def piped(odd):
    """A run on the odd folder, into a pipe."""
    start = time.monotonic()
    done = demo(str(odd), *QUICK, env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"})
    assert time.monotonic() - start < 30
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_an_odd_folder_is_named_file_by_file_and_ends_soon(piped):
    skipped = re.findall(r"^skipped (.*?): (.*)$", piped, flags=re.MULTILINE)
    assert dict(skipped) == REASONS
    documents = 3 if os.geteuid() else 4
    assert piped.startswith(f"{documents} documents, {11 * documents} tasks, 3 workers")


def test_a_pipe_gets_no_colours_and_no_bars(piped):
    assert "\x1b" not in piped
    assert "━━━━ " not in piped
    rows = [line for line in piped.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == [
        "calls", "executions", "reused", "tasks", "doubled share", "duplication rate",
        "tokens billed", "bill", "ideal: each task once", "bill against the ideal",
    ]  # fmt: skip
    assert "Enforce: every task was executed once" in piped


@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_gets_a_bar_for_each_pass_and_lines_that_fit(odd, columns):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*COMMAND, "demo", str(odd), *QUICK], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    heard = b""
    try:
        while piece := os.read(ours, 4096):
            heard += piece
    except OSError:  # how Linux tells the end
        pass
    os.close(ours)
    assert process.wait(30) == 0
    text = heard.decode()
    assert "\x1b[" in text
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= min(columns, 100)
    for mode in ("observe", "enforce"):
        bars = [line for line in lines if line.startswith(mode)]
        done, calls = bars[-1].split()[-2].split("/")
        assert done == calls


def test_a_folder_with_nothing_usable_is_one_clear_sentence(tmp_path):
    assert "holds no text that could be read" in error_of(demo(str(tmp_path)))
    (tmp_path / "empty.txt").touch()
    assert "all 1 entries were skipped, empty.txt as empty" in error_of(demo(str(tmp_path)))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("/no/such/folder",), "there is no folder /no/such/folder"),
        ((__file__,), "is a file, and a folder of text files is needed"),
        (("--overlap", "7"), "no share between 0 and 1, as 0.18 or 18%"),
        (("--overlap", "nan"), "no share between 0 and 1"),
        (("--delay", "-1"), "'--delay'"),
        (("--store", "memory://"), "three processes cannot share it"),
        (("--store", "nothing://there"), "is no store that idemguard knows"),
        (("--store", f"sqlite:///{__file__}"), "file is not a database"),
        (("--bogus",), "--bogus"),
    ],
)
def test_what_cannot_be_used_is_one_clear_sentence(args, message):
    assert message in error_of(demo(*args))


def test_folders_in_folders_are_gone_through_in_the_order_of_names(odd):
    found = look_through(odd, 0.1)
    assert found.documents == sorted(found.documents)
    assert "inside/further/good" in found.documents


def test_many_files_are_cut_to_what_there_is_time_for(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:03}.txt").write_text(GOOD)
    quick, slow = look_through(tmp_path, 0.1), look_through(tmp_path, 5)
    assert len(quick.documents) == 60
    assert len(slow.documents) == 1
    assert len(quick.skipped) == 40
    assert "left out" in slow.skipped["099.txt"]


def test_names_that_unicode_holds_for_one_are_one_document(tmp_path):
    for name in ("\u00e9.txt", "e\u0301.txt"):
        (tmp_path / name).write_text(GOOD)
    found = look_through(tmp_path, 0.1)
    assert len(found.documents) == len(found.skipped) == 1


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbfTitle\nText")
    assert read(path) == "Title\nText"
    with pytest.raises(UnusableError, match="gone"):
        read(tmp_path / "missing.txt")


def test_a_name_is_shown_on_one_line():
    assert shown("a\nb\u202ec\udcff") == r"a\nb\u202ec\udcff"
    assert len(shown("x" * 300)) == 80


# --- ends that nobody wished for -------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """The workers that a demo has started; multiprocessing has a process of its own beside them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = process.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            arguments = process.joinpath("cmdline").read_text()
        except OSError:  # it has ended
            continue
        if int(parent) == pid and "spawn_main" in arguments:
            found.append(int(process.name))
    return found


def alive(pids: list[int]) -> list[int]:
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    return [
        pid
        for pid, state in zip(pids, states, strict=True)
        if state.exists() and ") Z" not in state.read_text()
    ]


def lines_of(path: Path, where: str = "true") -> int:
    if not path.exists():
        return 0
    connection = sqlite3.connect(path)
    try:
        return connection.execute(f"SELECT count(*) FROM execution WHERE {where}").fetchone()[0]
    except sqlite3.OperationalError:  # it is being made
        return 0
    finally:
        connection.close()


@pytest.fixture
def at_work(tmp_path):
    """The demo when its workers work: the process, theirs, and the store."""
    path = tmp_path / "demo.db"
    process = subprocess.Popen(
        [*COMMAND, "demo", "--delay", "0.2", "--json", "--store", f"sqlite:///{path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 20
        while lines_of(path) < 4 and time.monotonic() < until:
            time.sleep(0.05)
        workers = children(process.pid)
        assert len(workers) == 3
        yield process, workers, path
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_interrupted_leaves_no_process_and_no_claim(at_work, number, code):
    process, workers, path = at_work
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert (out, err.strip()) == ("", "idemguard: interrupted" if code == 130 else "")
    assert alive(workers) == []
    assert lines_of(path) > lines_of(path, "status = 'open'") == 0


def test_a_demo_that_is_killed_leaves_no_process(at_work):
    process, workers, _ = at_work
    process.kill()
    process.communicate(timeout=10)
    until = time.monotonic() + 10
    while alive(workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(workers) == []


def test_a_worker_that_is_killed_holds_nothing_up(at_work):
    process, workers, _ = at_work
    os.kill(workers[0], signal.SIGKILL)
    out, err = process.communicate(timeout=45)
    assert process.returncode == 2
    assert re.fullmatch(
        r"idemguard: observe: worker-\d was killed \(SIGKILL\); the figures are those of the rest\n",
        err,
    )
    told = json.loads(out)
    assert told["observe"]["calls"] < told["planned"]["calls"] == told["enforce"]["calls"]
    assert told["enforce"]["duplicates"] == 0


# --- OpenTelemetry ---------------------------------------------------------------------------------------

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """No variable of whoever runs the tests sends anything anywhere."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A folder of two documents."""
    folder = tmp_path_factory.mktemp("few")
    (folder / "one.txt").write_text(GOOD)
    (folder / "two.txt").write_text(GOOD.replace("harbour", "market"))
    return str(folder)


@pytest.fixture
def receiver():
    """Somebody who takes spans and metrics."""
    with Receiver() as made:
        yield made


def sending(few, *args, **environment):
    return demo(few, "--overlap", "50%", *QUICK, *args, env={**os.environ, **environment})


def test_spans_and_metrics_go_where_the_environment_says(few, receiver):
    done = sending(few, "--json", **{ENDPOINT: receiver.url})
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    observed, enforced = told["observe"], told["enforce"]
    calls = [span for span in receiver.spans if "idemguard.outcome" in span.attributes]
    assert len(calls) == observed["calls"] + enforced["calls"] == 2 * (22 + 11)
    assert {span.resource["service.name"] for span in calls} == {"idemguard-demo"}
    assert len({span.resource["service.instance.id"] for span in calls}) == 6
    reused = [span for span in calls if span.attributes["idemguard.outcome"] == "reused"]
    assert len(reused) == enforced["reused"] == 11
    executed = {
        (span.trace_id, span.span_id): span.name
        for span in calls
        if span.attributes["idemguard.outcome"] == "executed"
    }
    for span in reused:
        (link,) = span.links
        assert executed[link.trace_id, link.span_id] == span.name
    assert receiver.total("idemguard.calls") == len(calls)
    assert receiver.total("idemguard.calls", idemguard_outcome="reused") == 11
    assert receiver.total("idemguard.duplicates") == observed["duplicates"]
    assert receiver.total("idemguard.usage.tokens") == observed["tokens"] + enforced["tokens"]
    charged = float(Decimal(observed["bill"]) + Decimal(enforced["bill"]))
    assert receiver.total("idemguard.usage.cost") == pytest.approx(charged)


def test_it_says_where_to_look(few, receiver):
    done = sending(
        few,
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{receiver.url}{TRACES}",
        OTEL_SERVICE_NAME="my demo",
    )
    assert (done.returncode, done.stderr) == (0, "")
    where, search = done.stdout.splitlines()[-2:]
    assert where == f"Traces in Jaeger: http://{HOST}:16686/search?service=my%20demo"
    assert "idemguard.outcome=reused" in search
    fingerprint = re.search(r"idemguard\.fingerprint=([0-9a-f]{16}) ", search)[1]
    found = [
        span.attributes["idemguard.outcome"]
        for span in receiver.spans
        if span.attributes["idemguard.fingerprint"] == fingerprint and span.name != "idemguard wait"
    ]
    assert sorted(found) == ["executed", "executed", "executed", "reused"]
    assert {span.resource["service.name"] for span in receiver.spans} == {"my demo"}
    assert METRICS not in dict(receiver.bodies)


def test_without_the_variables_it_says_nothing_of_it(piped):
    assert "Jaeger" not in piped


@pytest.mark.parametrize("how", ["refuses", "hangs", "does not know them"])
def test_a_collector_that_is_down_is_two_lines_and_the_demo_goes_on(few, receiver, how):
    url = receiver.url
    if how == "refuses":
        url, why = f"http://user:secret@{HOST}:{free_port()}", "Connection refused"
    elif how == "hangs":
        receiver.hang()
        why = "no answer in time"
    else:
        receiver.status, why = 404, "404"
    done = sending(few, **{ENDPOINT: url})
    assert done.returncode == 0
    assert "Enforce: every task was executed once" in done.stdout
    assert not re.search("Jaeger|Search there|went to", done.stdout)  # there is nothing to see
    lines = done.stderr.splitlines()
    assert [line.split()[1] for line in lines] == ["metrics", "traces"]
    for line in lines:
        shown = url.replace("user:secret", "***")
        assert line.startswith(f"idemguard: {line.split()[1]} did not arrive at {shown}: ")
        assert why in line


def unknown(receiver, signal):
    """Variables by which a signal goes where nobody knows it, and the other one arrives."""
    return {ENDPOINT: receiver.url, f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT": f"{receiver.url}/no"}


def test_it_says_where_to_look_only_for_what_arrived(few, receiver):
    done = sending(few, **unknown(receiver, "TRACES"))
    assert done.returncode == 0
    assert done.stderr == f"idemguard: traces did not arrive at {receiver.url}/no: 404 Not Found\n"
    assert "Jaeger" not in done.stdout
    assert done.stdout.splitlines()[-1] == f"Metrics went to {receiver.url}."
    assert receiver.total("idemguard.calls") == 2 * (22 + 11)


def test_what_arrived_in_part_is_said_so(capsys):
    refused = {"metrics": "no answer in time", "traces": "no answer in time"}
    _missing([Came(unsent=refused, arrived={"traces"}), Came()], dict.fromkeys(refused, "http://c"))
    assert capsys.readouterr().err.splitlines() == [
        "idemguard: metrics did not arrive at http://c: no answer in time",
        "idemguard: some traces did not arrive at http://c: no answer in time",
    ]


@pytest.mark.jaeger
def test_a_plain_jaeger_is_one_line_that_says_how_to_leave_the_metrics_out(few):
    program = need(
        "jaeger",
        places=sorted(CACHE.glob("jaeger-*/jaeger"), reverse=True),
        how="run tests/build_jaeger.sh, which needs Go",
    )
    with Jaeger(program) as jaeger:
        done = sending(few, **{ENDPOINT: jaeger.endpoint})
        assert done.returncode == 0
        assert done.stderr == (
            f"idemguard: metrics did not arrive at {jaeger.endpoint}: 404 Not Found; "
            "a plain Jaeger takes none: set OTEL_METRICS_EXPORTER=none to leave them out\n"
        )
        assert f"Traces in Jaeger: http://{HOST}:16686/" in done.stdout
        assert "idemguard-demo" in jaeger.ask("/api/services")
        done = sending(few, **{ENDPOINT: jaeger.endpoint, "OTEL_METRICS_EXPORTER": "none"})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("signal", "place", "unsent", "told"),
    [
        ("metrics", "http://c:4318", {"metrics": "404 Not Found"}, "OTEL_METRICS_EXPORTER=none"),
        ("metrics", "http://c:4318", {"metrics": "404 x", "traces": "404 x"}, ""),
        ("metrics", "http://c:4318", {"metrics": "503 Service Unavailable"}, ""),
        ("traces", "http://c:4318", {"traces": "404 Not Found"}, ""),
        ("traces", "http://c:4317", {"traces": "Connection aborted"}, "and 4318 for http/protobuf"),
        ("traces", "http://c:port", {"traces": "Connection aborted"}, ""),
    ],
)
def test_what_helps_is_said_where_it_is_known(signal, place, unsent, told):
    advice = export.advice(signal, place, unsent)
    assert told in advice
    assert bool(told) == bool(advice)


PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
OF_TRACES, OF_METRICS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"


@pytest.mark.parametrize(
    ("variables", "without", "settings", "paths"),
    [
        ({PROTOCOL: "grpc"}, "traces and metrics", f"{PROTOCOL} (now grpc)", set()),
        ({PROTOCOL: "grpc", OF_TRACES: "http/protobuf"}, "metrics", f"{PROTOCOL} (now grpc)", {TRACES}),
        (
            {OF_TRACES: "grpc", OF_METRICS: "http/json"},
            "traces and metrics",
            f"{OF_TRACES} (now grpc) and {OF_METRICS} (now http/json)",
            set(),
        ),
    ],
)  # fmt: skip
def test_another_protocol_is_one_line_before_it_starts_and_nothing_is_sent(
    few, receiver, variables, without, settings, paths
):
    done = subprocess.run(
        [*COMMAND, "demo", few, *QUICK],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
        env={**os.environ, **variables, ENDPOINT: receiver.url, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert done.returncode == 0
    first, *rest = done.stdout.splitlines()
    assert first == (
        f"idemguard: the demo speaks http/protobuf alone and goes on without {without}; to have them "
        f"sent, set {settings} to http/protobuf, and the endpoint to a port that takes it, 4318 as a rule"
    )
    assert not [line for line in rest if line.startswith("idemguard:")]
    assert ("Traces in Jaeger" in done.stdout) == (TRACES in paths)
    assert {path for path, _ in receiver.bodies} == paths


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, {}),
        ({PROTOCOL: ""}, {}),
        ({PROTOCOL: " HTTP/protobuf "}, {}),
        ({PROTOCOL: "grpc"}, {"traces": (PROTOCOL, "grpc"), "metrics": (PROTOCOL, "grpc")}),
        ({PROTOCOL: "grpc", OF_METRICS: "http/protobuf"}, {"traces": (PROTOCOL, "grpc")}),
        ({PROTOCOL: "http/protobuf", OF_METRICS: "grpc"}, {"metrics": (OF_METRICS, "grpc")}),
        ({PROTOCOL: "grpc", OF_METRICS: " "}, {"traces": (PROTOCOL, "grpc"), "metrics": (PROTOCOL, "grpc")}),
    ],
)  # fmt: skip
def test_the_protocol_of_a_signal_counts_before_the_common_one(monkeypatch, variables, found):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert export.unspoken(("traces", "metrics")) == found
    assert export.unspoken(()) == {}


def test_what_hangs_is_left_behind_in_two_seconds(receiver):
    receiver.hang()
    script = (
        "import time\n"
        "from idemguard.demo.otlp import Export\n"
        "export = Export(('traces', 'metrics'))\n"
        "export.tracers.get_tracer('t').start_span('s').end()\n"
        "export.meters.get_meter('m').create_counter('c').add(1)\n"
        "start = time.monotonic()\n"
        "unsent = export.close()\n"
        "end = time.monotonic()\n"
        "print(end - start, end, *sorted(unsent))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, ENDPOINT: receiver.url},
    )  # fmt: skip
    exited = time.monotonic()
    took, end, *unsent = done.stdout.split()
    assert unsent == ["metrics", "traces"]
    assert float(took) < 4
    assert exited - float(end) < 4  # the process does not wait for it when it exits either
    assert done.stderr == ""


def test_settings_that_the_sdk_does_not_take_are_said(few, receiver):
    done = sending(few, "--json", **{ENDPOINT: receiver.url, "OTEL_BSP_MAX_QUEUE_SIZE": "-1"})
    assert done.returncode == 0
    assert json.loads(done.stdout)["enforce"]["duplicates"] == 0
    assert len(done.stderr.splitlines()) == 2
    assert "max_queue_size must be a positive integer" in done.stderr


def test_spans_that_nobody_samples_are_not_missed(few, receiver):
    done = sending(few, **{ENDPOINT: receiver.url, "OTEL_TRACES_SAMPLER": "always_off"})
    assert (done.returncode, done.stderr, receiver.spans) == (0, "", [])
    assert "Jaeger" not in done.stdout
    assert receiver.total("idemguard.calls") == 2 * (22 + 11)


def test_an_interrupted_demo_does_not_wait_for_its_collector(few, receiver):
    receiver.hang()
    process = subprocess.Popen(
        [*COMMAND, "demo", few, "--delay", "1", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, ENDPOINT: receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "50"},
    )  # fmt: skip
    try:
        until = time.monotonic() + 40
        while not receiver.bodies and time.monotonic() < until:
            time.sleep(0.02)
        workers = children(process.pid)
        assert len(workers) == 3
        process.terminate()
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (143, "", "")
    assert alive(workers) == []


def test_without_the_sdk_it_says_which_extra_to_install_and_goes_on(few):
    script = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        f"sys.argv = ['idemguard', 'demo', {few!r}, '--json', '--delay', '0']\n"
        "from idemguard.__main__ import main\n"
        "if __name__ == '__main__': sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, ENDPOINT: f"http://{HOST}:{free_port()}"},
    )  # fmt: skip
    assert done.returncode == 0
    assert json.loads(done.stdout)["enforce"]["duplicates"] == 0
    (line,) = done.stderr.splitlines()
    assert "pip install 'idemguard[otlp]'" in line


def test_without_the_variables_the_sdk_is_not_loaded(few):
    script = (
        f"import sys; sys.argv = ['idemguard', 'demo', {few!r}, '--json', '--delay', '0']\n"
        "from idemguard.__main__ import main\n"
        "if __name__ == '__main__':\n"
        "    import idemguard.demo.run\n"  # all that a worker loads
        "    assert main() == 0\n"
        "    print([name for name in sys.modules if 'opentelemetry.sdk' in name], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, {}),
        ({ENDPOINT: " "}, {}),
        ({ENDPOINT: "http://c:4318"}, {"traces": "http://c:4318", "metrics": "http://c:4318"}),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m/x"}, {"metrics": "http://m/x"}),
        (
            {ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t"},
            {"traces": "http://t", "metrics": "http://c"},
        ),
        ({ENDPOINT: "http://c", "OTEL_METRICS_EXPORTER": "none"}, {"traces": "http://c"}),
        ({ENDPOINT: "http://c", "OTEL_SDK_DISABLED": "TRUE"}, {}),
        ({ENDPOINT: "http://c", "OTEL_SDK_DISABLED": "false", "OTEL_TRACES_EXPORTER": "none"}, {"metrics": "http://c"}),
    ],
)  # fmt: skip
def test_the_variables_of_opentelemetry_count(monkeypatch, variables, found):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert export.endpoints() == found


@pytest.mark.parametrize(
    ("endpoint", "variables", "where"),
    [
        ("http://jaeger.example:4318", {}, "http://jaeger.example:16686/search?service=idemguard-demo"),
        ("https://u:p@j/v1/traces", {}, "http://j:16686/search?service=idemguard-demo"),
        ("http://[::1]:4318", {}, "http://[::1]:16686/search?service=idemguard-demo"),
        ("nonsense", {}, "http://localhost:16686/search?service=idemguard-demo"),
        ("http://[bad", {}, "http://localhost:16686/search?service=idemguard-demo"),
        ("http://c", {"OTEL_SERVICE_NAME": "a&b"}, "http://c:16686/search?service=a%26b"),
        (
            "http://c",
            {"OTEL_RESOURCE_ATTRIBUTES": "a=b, service.name=mine"},
            "http://c:16686/search?service=mine",
        ),
        (
            "http://c",
            {"IDEMGUARD_JAEGER_URL": "https://traces.example/ui/"},
            "https://traces.example/ui/search?service=idemguard-demo",
        ),
    ],
)  # fmt: skip
def test_jaegers_pages_are_guessed_from_the_endpoint(monkeypatch, endpoint, variables, where):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert export.jaeger(endpoint) == where


# --- the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_it_says_which_one_to_install(missing):
    script = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['idemguard', 'demo']\n"
        "from idemguard.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "pip install 'idemguard[cli]'" in line


def test_the_demo_itself_needs_no_extra():
    script = "import sys, idemguard.demo.run; print(*{'click', 'rich'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_help_and_version_are_there():
    def run(*args: str) -> str:
        done = subprocess.run([*COMMAND, *args], capture_output=True, text=True, check=True)
        return done.stdout

    assert run() == run("--help") == run("-h")
    assert "demo" in run()
    assert "0.18" in run("demo", "--help") or "18%" in run("demo", "--help")
    assert re.fullmatch(r"idemguard, version \d\S*\n", run("--version"))


def test_the_mode_of_the_environment_does_not_spoil_it(tmp_path):
    (tmp_path / "one.txt").write_text(GOOD)
    done = demo(str(tmp_path), "--json", *QUICK, env={**os.environ, "IDEMGUARD_MODE": "off"})
    assert json.loads(done.stdout)["observe"]["doubled"] == 2


# --- the example -----------------------------------------------------------------------------------------


def example(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_example_shows_the_same():
    done = example()
    assert (done.returncode, done.stderr) == (0, "")
    _, observed, enforced = (line.split() for line in done.stdout.splitlines())
    assert observed[:2] == ["observe", enforced[1]]
    assert 16 < float(observed[3].rstrip("%")) < 20
    assert 1.75 < float(observed[6]) < 2.0
    assert (enforced[3], enforced[6]) == ("0.0%", "1.00")


def test_the_example_passes_over_what_it_cannot_read(odd, tmp_path):
    done = example(str(odd))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2].startswith("enforce")
    done = example(str(tmp_path / "missing"))
    assert done.returncode == 1
    assert "no .txt files" in done.stderr


def test_the_example_needs_the_standard_library_and_idemguard_alone():
    imports = re.findall(r"^(?:from|import) (\w+)", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert {name for name in imports if name not in sys.stdlib_module_names} == {"idemguard"}

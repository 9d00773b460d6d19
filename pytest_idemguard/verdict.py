"""The whole run: what all processes saw, put together, and what it comes to.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_idemguard.journals import Journals, outermost
from pytest_idemguard.judge import Finding, all_findings, too_often
from pytest_idemguard.message import dollars
from pytest_idemguard.record import from_asked, leftovers, plain_record, told
from pytest_idemguard.runs import Book, counted, from_plain
from pytest_idemguard.settings import dollars as amount
from pytest_idemguard.spaces import folder_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_idemguard.runs import Key
    from pytest_idemguard.session import Session

VERSION = 1
SHOWN = 50  # tests in the step summary
KINDS = ("duplicates", "near_duplicates", "budgets")
INNER = ("runs", "max_runs", "count_failed", "mode", "modes")  # of a record, for this process alone
SUMS = (
    "calls", "executed", "reused", "fallback", "declined", "failed", "refused", "unguarded", "tokens",
)  # fmt: skip


class Verdict:
    """What a run came to.

    Args:
        session: of the only process, or of the controller.
        interrupted: whether the run was left before its end.

    Attributes:
        tests: a record of each test with guarded calls.
        session: findings that are of no single test.
        incomplete: what is missing.

    """

    def __init__(self, session: Session, *, interrupted: bool) -> None:
        self._of = session
        self._root = session.config.rootpath
        self.tests: list[dict[str, Any]] = list(session.records.values())
        missing = sorted(session.missing)
        self._unwritten: list[str] = []
        self.incomplete = [f"worker {name} crashed" for name in missing]
        self.incomplete += [
            f"the folder {session.folder} was removed, in which children of {name} write"
            for name in sorted(session.removed)
        ]
        if interrupted:
            self.incomplete.append("the run was interrupted")
        self._book = Book()
        self._facts: dict[str, dict[str, Any]] = {}  # of namespaces that are no test's
        for record in self.tests:
            self._take(record)
        events = [*leftovers(session), *session.left]
        events += self._crashed(missing)
        self._rest(events)
        self.session = [self._plain(one) for one in self._findings()]
        self.session += self._over_budget()

    # --- putting it together -----------------------------------------------------------------------

    def _take(self, record: dict[str, Any]) -> None:
        for plain in record["runs"]:
            run = from_plain(plain)
            run.test = record["nodeid"]
            self._book.runs.setdefault(run.id, run)

    def _crashed(self, workers: list[str]) -> list[dict[str, Any]]:
        """What workers that crashed had written down; tests that they had not told get a record."""
        written = {
            one: Journals(f"{self._of.folder}/{folder_of(one)}", None).news() for one in workers
        }
        names: dict[str, list[dict[str, Any]]] = {
            worker: sorted(
                (one for one in events if one["kind"] == "test"), key=lambda one: one["at"]
            )
            for worker, events in written.items()
        }
        last: dict[str, tuple[float, str]] = {}  # a test that crashes one may be tried in another
        for worker, tests in names.items():
            for one in tests:
                last[one["nodeid"]] = max(last.get(one["nodeid"], (0.0, "")), (one["at"], worker))
        rest = []
        for worker, events in written.items():
            by_test: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for event in events:
                if event["kind"] == "test":
                    continue
                if (nodeid := _test_of(event, names[worker])) is None:
                    rest.append(event)
                elif nodeid not in self._of.records and last[nodeid][1] == worker:
                    by_test[nodeid].append(event)
            for nodeid, own in by_test.items():
                self._record(nodeid, worker, own, names[worker])
        return rest

    def _record(
        self,
        nodeid: str,
        worker: str,
        events: list[dict[str, Any]],
        names: list[dict[str, Any]],
    ) -> None:
        attempts = [one for one in names if one["nodeid"] == nodeid]
        book, rules = Book(events), from_asked(attempts[-1]["rules"])
        found = all_findings(book, rules, None)
        number = max(one["attempt"] for one in attempts)
        record = plain_record(nodeid, number, worker, rules, book, found, self._root)
        record["incomplete"] = True
        self.tests.append(record)
        self._take(record)

    def _rest(self, events: list[dict[str, Any]]) -> None:
        last = {record["nodeid"]: record["attempt"] for record in self.tests}
        for event in events:
            nodeid = event.get("nodeid")
            if nodeid is not None and event["attempt"] != last.get(nodeid, event["attempt"]):
                continue  # of an attempt that does not count
            if "fixture" in event:
                self._facts[event["ns"]] = event
            self._book.add({**event, "test": event.get("test") or nodeid})

    # --- findings of no single test ------------------------------------------------------------------

    def _findings(self) -> Iterable[Finding]:
        by_test = {one["nodeid"]: one for one in self.tests}
        for key, runs in self._book.by_key().items():
            fact = self._facts.get(key[0], {})
            tests = {run.test for run in runs} & by_test.keys()
            records = [by_test[nodeid] for nodeid in tests]
            if list(key[1:]) in fact.get("told", []) or (
                len(records) == 1 and _is_told(records[0], key)
            ):
                continue
            mode, allowed, failed = self._asked(fact, records, key[1])
            some = counted(runs, failed=failed)
            if mode != "off" and len(some) > allowed:
                yield too_often(mode, runs, some, allowed, fact.get("fixture"))

    def _asked(
        self, fact: dict[str, Any], records: list[dict[str, Any]], task: str
    ) -> tuple[str, int, bool]:
        base = self._of.base
        if fact:
            return fact["mode"], fact["allowed"], fact["count_failed"]
        if not records:
            return base.mode, base.max_runs, base.count_failed
        allowed = max(one["max_runs"].get(task, base.max_runs) for one in records)
        modes = {one["modes"].get(task, one["mode"]) for one in records}
        mode = next(mode for mode in ("error", "warn", "report", "off") if mode in modes)
        return mode, allowed, any(task in one["count_failed"] for one in records)

    def _plain(self, finding: Finding) -> dict[str, Any]:
        plain = {"kind": finding.kind, **told(finding, self._root)}
        if finding.where is None:
            tests = sorted({run.test for run in finding.runs if run.test})
            where = "in this session" if tests else "outside of tests"
            if len(tests) == 1:
                where = f"in {tests[0]} and after its end"
            plain["text"] = plain["text"].replace("in this test", where)
            marker = f"@pytest.mark.idemguard(max_runs={finding.counted})"
            allowed = f"--idemguard-max-runs={finding.counted}"
            plain["text"] = plain["text"].replace(marker, allowed)
        return plain

    def _over_budget(self) -> list[dict[str, Any]]:
        limit = amount(self._of.config.getini("idemguard_max_session_cost"))
        spent = self._total_cost()
        if limit is None or spent <= limit:
            return []
        said = (
            f"idemguard: the session spent {dollars(spent)}, {dollars(limit)} allowed "
            "(idemguard_max_session_cost)"
        )
        return [{
            "kind": "budget", "mode": self._of.base.mode, "task": None, "unit": "$", "text": said,
            "spent": str(spent), "allowed": str(limit),
        }]  # fmt: skip

    def _total_cost(self) -> Decimal:
        return sum((run.money for run in self._book.runs.values()), Decimal(0))

    @property
    def fails(self) -> bool:
        """Whether the session fails, whatever its tests did."""
        amid = [
            one for record in self.tests if record.get("incomplete") for one in record["duplicates"]
        ]
        return any(one["mode"] == "error" for one in (*self.session, *amid))

    # --- telling it --------------------------------------------------------------------------------

    def totals(self) -> dict[str, Any]:
        """Sums over everything."""
        found: dict[str, Any] = {name: sum(one[name] for one in self.tests) for name in SUMS}
        for (_, source), times in self._book.calls.items():
            found["calls"] += times
            if source in found and source != "executed":
                found[source] += times
        found["executed"] = len(self._book.runs)
        found["tokens"] = sum(run.tokens or 0 for run in self._book.runs.values())
        found["cost"] = str(self._total_cost())
        saved = sum((Decimal(one["saved"]) for one in self.tests), Decimal(0))
        found["saved"] = str(saved + sum(self._book.saved.values(), Decimal(0)))
        wider = [one for one in self.session if "runs" in one]
        covered = {run["id"] for one in wider for run in one["executions"]}
        own = [  # where both are told of one task, the wider finding counts all its runs
            one
            for one in self._all("duplicates")
            if not covered.issuperset(run["id"] for run in one["executions"])
        ]
        found["duplicates"] = sum(one["runs"] - one["allowed"] for one in (*own, *wider))
        found["near_duplicates"] = len(self._all("near_duplicates"))
        return found

    def _all(self, kind: str) -> list[dict[str, Any]]:
        return [one for record in self.tests for one in record[kind]]

    def write(self) -> None:
        """The JSON report, and the step summary where there is one."""
        if self._of.json_path:
            report = {
                "version": VERSION,
                "totals": self.totals(),
                "tests": [
                    {name: value for name, value in one.items() if name not in INNER}
                    for one in self.tests
                ],
                "session": self.session,
                "incomplete": self.incomplete,
            }
            path = self._of.config.invocation_params.dir / self._of.json_path
            with self._telling(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(report, indent=1), encoding="utf-8")
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary and self._book.runs:
            with (
                self._telling(Path(summary)),
                Path(summary).open("a", encoding="utf-8", errors="backslashreplace") as file,
            ):
                file.write(self._markdown())

    @contextmanager
    def _telling(self, path: Path) -> Iterator[None]:
        """A file that cannot be written fails no run that has ended."""
        try:
            yield
        except OSError as error:
            self._unwritten.append(f"{path} could not be written: {error.strerror}")

    def _markdown(self) -> str:
        lines = ["### idemguard", "", self.line(), ""]
        lines += [f"- {one['text'].splitlines()[0]}" for one in self.session]
        lines += [f"- incomplete: {one}" for one in self.incomplete]
        found = [(one["nodeid"], dup) for one in self.tests for dup in one["duplicates"]]
        if found:
            lines += ["", "| test | task | runs | allowed |", "|---|---|---|---|"]
            for nodeid, dup in found[:SHOWN]:
                cells = (f"`{nodeid}`", f"`{dup['task']}`", str(dup["runs"]), str(dup["allowed"]))
                lines.append(
                    f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
                )
        others = [
            (one["nodeid"], other)
            for one in self.tests
            for other in (*one["near_duplicates"], *one["budgets"])
        ]
        lines += [""] * bool(others)
        for nodeid, other in others[:SHOWN]:
            lines.append(f"- `{nodeid}`: {other['text'].splitlines()[0]}")
        return "\n".join(lines) + "\n"

    def line(self) -> str:
        """All of it in a line."""
        sums = self.totals()
        number = sums["duplicates"]
        said = (
            f"idemguard: {sums['calls']} calls, {sums['executed']} executed, {sums['reused']} reused; "
            f"{number} duplicate{'' if number == 1 else 's'}"
        )
        if near := sums["near_duplicates"]:
            said += f", {near} near"
        cost, saved = Decimal(sums["cost"]), Decimal(sums["saved"])
        return f"{said}; {dollars(cost)} charged, {dollars(saved)} saved" if cost or saved else said

    def show(self, terminal: Any) -> None:
        """The terminal's section."""
        nothing = not self._book.runs and not self._book.calls and not self.tests
        if nothing or self._of.config.option.no_summary:
            return
        told_here = self._unseen()
        problems = (
            self.session
            or self.incomplete
            or self._unwritten
            or any(self._all(kind) for kind in KINDS)
        )
        if not problems and self._of.config.option.verbose <= 0:
            return
        terminal.section("idemguard")
        terminal.write_line(self.line())
        for nodeid, one in told_here:
            terminal.write_line("")
            terminal.write_line(f"{nodeid}:", yellow=True)
            terminal.write_line(one["text"])
        for one in self.session:
            terminal.write_line("")
            terminal.write_line(one["text"], red=True)
        for unwritten in self._unwritten:
            terminal.write_line(unwritten, red=True)
        for missing in self.incomplete:
            terminal.write_line(
                f"incomplete: {missing}, and what it did not tell is not in here", red=True
            )
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for one in self.session:
                terminal.ensure_newline()
                terminal.write_line(f"::error title=idemguard::{_escaped(one['text'])}")

    def _unseen(self) -> list[tuple[str, dict[str, Any]]]:
        """What no report of a test has shown."""
        found = []
        for record in self.tests:
            for kind in KINDS:
                hidden = record.get("incomplete", False)
                found += [
                    (record["nodeid"], one)
                    for one in record[kind]
                    if hidden or one["mode"] == "report"
                ]
        return found


def _is_told(record: dict[str, Any], key: Key) -> bool:
    return any(
        (one["task"], one["fingerprint"], one["scope"], one["version"]) == key[1:]
        for one in record["duplicates"]
    )


def _test_of(event: dict[str, Any], names: list[dict[str, Any]]) -> str | None:
    """The test that something happened in: the last one in this namespace that had begun."""
    space, found = outermost(event["ns"]).partition(".")[0], None
    for name in names:
        if name["ns"] == space and name["at"] <= event["at"]:
            found = name["nodeid"]
    return found


def _escaped(said: str) -> str:
    return said.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

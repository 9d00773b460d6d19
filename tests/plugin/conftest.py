"""A project of its own for each test, and a pytest run in it with the plugin alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.pytester import LineMatcher

ROOT = Path(__file__).parents[2]
LONG = 90.0  # seconds after which a run hangs

TASKS = '''
"""Tasks of a project: one that is only counted, one that is guarded."""
import time
from idemguard import configure, idempotent, record_usage

configure(
    store="sqlite:///tasks.db",
    pricer={"m": {"input": "10", "output": "0"}},
)

@idempotent(task_type="summarise", mode="observe")
def naive(doc):
    record_usage(input_tokens=100, output_tokens=0, model="m")
    return doc.upper()

@idempotent(task_type="summarise")
def good(doc):
    record_usage(input_tokens=100, output_tokens=0, model="m")
    return doc.upper()

@idempotent(task_type="answer", mode="observe")
async def anaive(doc):
    return doc

@idempotent(task_type="answer")
async def agood(doc):
    return doc
'''


class Result:
    """What a run said, and how it ended."""

    def __init__(self, done, folder):
        self.ret = done.returncode
        self.out, self.err = done.stdout, done.stderr
        self.folder = folder

    def __repr__(self):
        return f"exit code {self.ret}\n{self.out}\n{self.err}"

    @property
    def outcomes(self):
        """As the last line counts them."""
        last = [line for line in self.out.splitlines() if re.search(r" in [\d.:]+s", line)][-1]
        return {kind.rstrip("s"): int(number) for number, kind in re.findall(r"(\d+) (\w+)", last)}

    def came_to(self, **expected):
        """Exactly these outcomes."""
        found = {kind: n for kind, n in self.outcomes.items() if kind in KINDS}
        assert found == expected, self

    def has(self, *patterns):
        """These lines, in this order, others between them."""
        LineMatcher(self.out.splitlines()).fnmatch_lines(patterns)

    @property
    def report(self):
        """The JSON report."""
        return json.loads((self.folder / "report.json").read_text())


KINDS = (
    "passed",
    "failed",
    "error",
    "skipped",
    "xfailed",
    "xpassed",
    "rerun",
    "warning",
    "deselected",
    "retried",
)


class Project:
    """A folder with tasks and tests."""

    def __init__(self, folder, compiled):
        self.folder = folder
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("IDEMGUARD", "GITHUB", "PYTEST", "COV"))
        } | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        self.environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "160"}
        # compiled once for all runs, and nothing of it beside the sources
        self.environment |= {"PYTHONPYCACHEPREFIX": str(compiled), "PYTHONDONTWRITEBYTECODE": ""}
        self.environment.pop("CI", None)
        self.write("tasks.py", TASKS)
        self.write("pyproject.toml", "")

    def write(self, name, text):
        """A file of the project."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def command(self, *args, plugins=(), plugin=True, cache=False):
        """What starts a run."""
        loaded = ["pytest_idemguard.plugin"] if plugin else []
        loaded += plugins
        options = [part for name in loaded for part in ("-p", name)]
        options += [] if cache else ["-p", "no:cacheprovider"]
        return [sys.executable, "-m", "pytest", *options, *args]

    def run(self, test=None, *args, **loading):
        """Run it, with a test file of this text if there is one."""
        if test is not None:
            self.write("test_it.py", test)
        done = subprocess.run(
            self.command(*args, **loading),
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=LONG, check=False,
            errors="backslashreplace",
        )  # fmt: skip
        assert "INTERNALERROR" not in done.stdout + done.stderr, done.stdout + done.stderr
        return Result(done, self.folder)


@pytest.fixture
def project(tmp_path, tmp_path_factory):
    return Project(tmp_path, tmp_path_factory.getbasetemp() / "compiled")

"""Importing idemguard opens nothing, reads no variable of its own, starts no thread, and is quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest

import idemguard

HEAVY = (
    "redis",
    "pydantic",
    "click",
    "rich",
    "opentelemetry.sdk",
    "sqlite3",
    "numpy",
    "attrs",
    "trio",
)

PROBE = """
import json, os, sys, threading

opened, asked = [], []

def watch(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        opened.append(str(args[0]))
    elif event.split(".")[0] in {"socket", "subprocess", "sqlite3"}:
        opened.append(event)

class Asked(type(os.environ)):
    def __getitem__(self, name):
        asked.append(name)
        return super().__getitem__(name)

os.environ.__class__ = Asked
os.environ["IDEMGUARD_STORE"] = "no store"
os.environ["IDEMGUARD_MODE"] = "no mode"
sys.addaudithook(watch)
import idemguard
from idemguard import *
print(json.dumps({
    "opened": [name for name in opened if not name.endswith(".pyc") and ".pyc." not in name],
    "asked": [name for name in asked if name.startswith("IDEMGUARD")],
    "threads": [thread.name for thread in threading.enumerate()],
    "loaded": sorted(sys.modules),
}))
"""


# coverage loads modules of its own into every interpreter that it measures
UNMEASURED = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}


@pytest.fixture(scope="module")
def probed():
    """What an interpreter of its own saw of the import."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE],
        capture_output=True,
        check=True,
        text=True,
        env=UNMEASURED,
    )
    assert ran.stderr == ""
    return json.loads(ran.stdout)


def test_importing_opens_nothing(probed):
    assert probed["opened"] == []


def test_importing_reads_no_variable_of_its_own(probed):
    assert probed["asked"] == []


def test_importing_starts_no_thread(probed):
    assert probed["threads"] == ["MainThread"]


def test_importing_loads_nothing_heavy(probed):
    loaded = set(probed["loaded"])
    assert not loaded & set(HEAVY)
    assert "idemguard.errors" in loaded


def test_a_decoration_and_a_guard_start_and_open_nothing_either(tmp_path):
    script = (
        "import threading, sys, idemguard\n"
        "guard = idemguard.Guard(store='sqlite:///guard.db')\n"
        "guard.idempotent(lambda n: n, task_type='t')\n"
        "idemguard.idempotent(lambda n: n, task_type='t')\n"
        "assert threading.active_count() == 1\n"
        "assert not {'redis', 'pydantic'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env=UNMEASURED)
    assert list(tmp_path.iterdir()) == []


def test_a_plain_call_loads_no_pydantic_and_no_redis():
    script = (
        "import sys, idemguard\n"
        "guard = idemguard.Guard(store='memory://')\n"
        "task = guard.idempotent(lambda n: {'n': [n, None]}, task_type='t')\n"
        "assert task(1) == task(1)\n"
        "assert not {'redis', 'pydantic', 'sqlite3'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=UNMEASURED)


def test_the_public_names_are_those_of_the_contract():
    assert set(idemguard.__all__) == {
        "idempotent", "run_task", "configure", "Guard", "Outcome", "Task", "capture", "current",
        "record_usage", "Usage", "worker", "agent", "scope", "bypass", "task_fingerprint",
        "cumulative_input_tokens", "ExecutionLedger", "OutOfScope", "errors",
    }  # fmt: skip
    assert list(idemguard.__all__) == sorted(idemguard.__all__)


def test_there_is_nothing_public_beside_them():
    others = {
        name
        for name, found in vars(idemguard).items()
        if not name.startswith("_") and not isinstance(found, types.ModuleType)
    }
    assert others - {"annotations"} == set(idemguard.__all__) - {"errors"}


def test_every_public_name_says_what_it_is():
    for name in set(idemguard.__all__) - {"errors"}:
        assert getattr(idemguard, name).__doc__, name

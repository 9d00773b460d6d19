"""Real worker processes around one store, and what a test needs to steer and to count them."""

from __future__ import annotations

import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from idemguard import ExecutionLedger, task_fingerprint
from idemguard.record import Address
from idemguard.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemguard.record import Execution, Record
    from idemguard.stores import Store

TESTS = Path(__file__).parents[1]
PATIENCE = 60.0  # seconds; a machine under load is slow, but what takes longer hangs


def until(true: Callable[[], Any], patience: float = PATIENCE, what: str = "") -> Any:
    """What `true` gives as soon as it is something."""
    end = time.monotonic() + patience
    while not (found := true()):
        assert time.monotonic() < end, f"not within {patience:g} s: {what or true}"
        time.sleep(0.005)
    return found


class Worker:
    """A process that does jobs of `workers.jobs`, one at a time.

    Args:
        errors: where its standard error goes.

    """

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        with errors.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workers.actor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                cwd=errors.parent,
                env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
            )
        self._unread = b""
        self.busy = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, job: str, **given: Any) -> Worker:
        """Give it a job, and do not wait for its answer."""
        assert not self.busy
        assert self._process.stdin is not None
        self.busy = True
        asked = json.dumps({"job": job, "given": given}).encode()
        self._process.stdin.write(asked + b"\n")
        self._process.stdin.flush()
        return self

    def end(self, patience: float = PATIENCE) -> Any:
        """Its answer."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        end = time.monotonic() + patience
        while b"\n" not in self._unread:
            ready, _, _ = select.select([file], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no answer within {patience:g} s"
            chunk = os.read(file, 65536)
            assert chunk, f"the worker is gone: {self._errors.read_text()[-3000:]}"
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        self.busy = False
        answer = json.loads(line)
        assert "failed" not in answer, f"{answer}\n{self._errors.read_text()[-3000:]}"
        return answer["done"]

    def do(self, job: str, **given: Any) -> Any:
        """Give it a job, and wait for the answer."""
        return self.begin(job, **given).end()

    def freeze(self) -> None:
        """SIGSTOP; it stands still when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # it had not read the last job
                pipe.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


class Pool:
    """Worker processes that go on from one test to the next; those that are not idle are ended."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "stderr"
        self._idle: list[Worker] = []
        self._out: list[Worker] = []

    def take(self) -> Worker:
        """A worker that is idle."""
        worker = self._idle.pop() if self._idle else Worker(self._errors)
        self._out.append(worker)
        return worker

    def back(self) -> None:
        """All that were taken are no longer needed."""
        for worker in self._out:
            if worker.alive and not worker.busy:
                worker.do("close")
                self._idle.append(worker)
            else:
                worker.kill()
        self._out.clear()

    def close(self) -> None:
        """End all of them."""
        self.back()
        for worker in self._idle:
            worker.kill()


class Lab:
    """One store, the log that bodies write, gates that they wait at, processes that call.

    Args:
        folder: of this test's own.
        pool: where the processes come from.
        url: of the store; a file in the folder where none is given.

    """

    def __init__(self, folder: Path, pool: Pool, url: str | None = None) -> None:
        self.folder = folder
        self.file = folder / "store.db"
        self.url = url or f"sqlite:///{self.file}"
        self.log = folder / "log"
        self.log.touch()
        self._pool = pool
        self._store: Store | None = None

    @property
    def shared(self) -> bool:
        """Whether all processes have one store."""
        return self.url != "memory://"

    def workers(self, count: int) -> list[Worker]:
        """So many idle processes."""
        return [self._pool.take() for _ in range(count)]

    def worker(self) -> Worker:
        """An idle process."""
        return self._pool.take()

    def call(self, worker: Worker, key: str, **given: Any) -> Worker:
        """Have it call a task."""
        return worker.begin("call", url=self.url, log=str(self.log), key=key, **given)

    # --- gates -----------------------------------------------------------------------------------

    def gate(self, name: str) -> str:
        """Where a body waits until it is opened."""
        return str(self.folder / f"gate-{name}")

    def open(self, name: str) -> None:
        """Let whoever waits there go on."""
        Path(self.gate(name)).touch()

    # --- the truth beside the ledger -------------------------------------------------------------

    def said(self) -> list[dict[str, Any]]:
        """All that bodies wrote."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def starts(self, key: str | None = None) -> list[dict[str, Any]]:
        """The bodies that started, in their order."""
        return [s for s in self.said() if "token" in s and key in (None, s["key"])]

    def checks(self, key: str) -> dict[str, dict[str, Any]]:
        """What bodies found when they asked whether they hold the claim, by occasion."""
        return {s["check"]: s for s in self.said() if "check" in s and s["key"] == key}

    def started(self, key: str, count: int = 1) -> dict[str, Any]:
        """The so-manieth body of a task, as soon as it has started."""
        until(lambda: len(self.starts(key)) >= count, what=f"start {count} of {key}")
        return self.starts(key)[count - 1]

    # --- the store -------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """A store of the test's own on the same data."""
        if self._store is None:
            self._store = open_store(self.url)
        return self._store

    def fingerprint(self, key: str) -> str:
        return task_fingerprint("work", {"key": key})

    def address(self, key: str) -> Address:
        return Address("default", self.fingerprint(key))

    def record(self, key: str) -> Record:
        return self.store.look(self.address(key))[0]

    @property
    def ledger(self) -> ExecutionLedger:
        return ExecutionLedger(self.store)

    def lines(self, key: str) -> list[Execution]:
        """The ledger's lines of a task."""
        return self.ledger.executions(self.fingerprint(key))

    def lapsed(self, key: str) -> None:
        """Until the lease of every open execution of a task is past."""

        def true() -> bool:
            record, now = self.store.look(self.address(key))
            return not any(line.lives(now) for line in record.lines)

        until(true, what=f"the lease of {key} is past")

    def empty(self) -> None:
        """Delete every row of every task, or all there is, as somebody does who cleans up by hand."""
        if self.url.startswith("redis:"):
            with redis.Redis.from_url(self.url) as client:
                client.flushall()
            return
        connection = sqlite3.connect(self.file, timeout=20)
        try:
            with connection:
                tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                for (table,) in tables.fetchall():
                    if table not in ("window", "namespace", "tended"):
                        connection.execute(f"DELETE FROM {table}")
        finally:
            connection.close()

    def close(self) -> None:
        """Give back what is open."""
        if self._store is not None:
            self._store.close()


def found_a_claim(store: Store) -> int:
    """How many calls have found a claim of somebody else's."""
    windows = store.windows("default", 0, 2**53)
    return sum(window.counts.get("found", 0) for window in windows)

"""How long a report takes, and what memory, over few and over many executions: `report.py [MANY]`.

Executions of 20 task types over a day, made by the store's own commands with a clock that goes
by. The command line is measured as its users run it: a process of its own, start-up included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import redis

from idemguard.claim import Answer, Begin, Command, Complete
from idemguard.codec import Value
from idemguard.record import Address, Caller
from idemguard.stores import Store, wire
from idemguard.stores.redis import RedisStore
from idemguard.stores.scripts import script
from idemguard.stores.sqlite import SqliteStore
from idemguard.usage import Spent, Usage

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from servers.server import Server

FEW = 10_000
TYPES = 20
DAY = 86_000_000  # ms, a little less than records are kept
LEASE = 30_000
BATCH = 2_000
WORKERS = [f"w-{number}" for number in range(8)]
AGENTS = ["researcher", "writer", None]


class Clock:
    """Goes as it is told."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def begins(count: int, clock: Clock) -> Iterator[Begin]:
    """Claims of as many tasks, one after the other over a day."""
    chance, first = random.Random(7), time.time_ns() // 1_000_000 - DAY
    for number in range(count):
        clock.now = first + DAY * number // count
        task_type = f"type-{number % TYPES:02}"
        fingerprint = sha256(f"{task_type}:{number}".encode()).hexdigest()
        digests = (("doc", f"{number:08x}"), ("lang", "0a1b2c3d"))
        caller = Caller(task_type, chance.choice(WORKERS), chance.choice(AGENTS), digests=digests)
        yield Begin(Address("bench", fingerprint), f"{number:016x}", caller, LEASE)


def end(claim: Any, number: int) -> Complete:
    """The end of one execution, and what it spent."""
    tokens = 900 + number % 700
    usage = Usage(input_tokens=tokens, output_tokens=120, model="m")
    units = tokens * 3_000_000 + 120 * 15_000_000
    spent = Spent(1, usage, (tokens,), (), units, "USD", None, parts=(tokens * 3_000_000, 0, 0))
    return Complete(claim, Value("json", b'"done"'), 900_000, LEASE, spent)


# --- filling ------------------------------------------------------------------------------------------


def fill_file(path: Path, count: int) -> Store:
    """A file with as many executions; a transaction for each batch of commands."""
    clock = Clock()
    store = SqliteStore(path, clock=clock)
    todo = begins(count, clock)

    def batch(connection: Any) -> bool:
        for place, begin in zip(range(BATCH), todo, strict=False):
            claimed, _ = store._step(begin, connection)
            store._step(end(claimed.claim, place), connection)
        return True

    for _ in range(0, count, BATCH):
        store._file.write(batch)
    store.close()
    return SqliteStore(path)


def fill_server(url: str, count: int) -> Store:
    """A server with as many executions; a pipeline for each batch of commands."""
    clock, client = Clock(), redis.Redis.from_url(url)
    for name in ("begin", "complete"):
        client.script_load(script(name).text)

    def send(pipe: Any, command: Command) -> None:
        step = wire.step(command)
        args = (clock.now, "", "", step.retention, *step.args)
        pipe.evalsha(script(step.script).sha, len(step.keys), *step.keys, *args)

    def answers(pipe: Any, commands: list[Any]) -> list[Answer]:
        return [wire.answer(c, r) for c, r in zip(commands, pipe.execute(), strict=True)]

    todo, store, sent = begins(count, clock), RedisStore(url), 0
    client.sadd(wire.NAMESPACES, wire.in_registry("bench"))
    while asked := [begin for _, begin in zip(range(BATCH), todo, strict=False)]:
        pipe = client.pipeline(transaction=False)
        for begin in asked:
            send(pipe, begin)
        ends = [end(a.claim, n) for n, a in enumerate(answers(pipe, asked))]  # type: ignore[union-attr]
        pipe = client.pipeline(transaction=False)
        for one in ends:
            send(pipe, one)
        answers(pipe, ends)
        sent += len(asked)
        if sent % (10 * BATCH) == 0:
            store.tend(None)  # as it is done every minute where calls are made
    client.close()
    return store


# --- measuring ----------------------------------------------------------------------------------------


def measured(url: str, *args: str) -> tuple[float, float]:
    """Seconds and peak MB of one command."""
    command = [sys.executable, "-c", CHILD, *args, "--store", url, "--namespace", "bench"]
    started = time.perf_counter()
    told = subprocess.run(command, stderr=subprocess.PIPE, check=True, stdout=subprocess.DEVNULL)
    took = time.perf_counter() - started
    return took, int(told.stderr.splitlines()[-1]) / 1024


CHILD = """
import sys
from idemguard.__main__ import main
try:
    main()
finally:  # what getrusage tells begins with the parent's
    peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(peak[0].split()[1], file=sys.stderr)
"""


def main() -> None:
    """Prints the figures, and as JSON where `--json` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("many", nargs="?", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for kind in ("sqlite", "redis"):
            for count in (FEW, options.many):
                started = time.perf_counter()
                if kind == "sqlite":
                    url = f"sqlite:///{folder / str(count)}.db"
                    store = fill_file(folder / f"{count}.db", count)
                else:
                    url = stack.enter_context(Server("--save", "")).url
                    store = fill_server(url, count)
                filled = time.perf_counter() - started
                store.tend(None)
                store.close()
                row = {"filled": round(filled, 1)}
                for name in ("report", "export"):
                    args = (name, "--format", "json" if name == "report" else "jsonl")
                    runs = [measured(url, *args) for _ in range(3 if name == "report" else 1)]
                    row[name] = round(sorted(took for took, _ in runs)[len(runs) // 2], 2)
                    row[f"{name}_mb"] = round(max(memory for _, memory in runs), 1)
                found[f"{kind} {count}"] = row
                if not options.json:
                    print(f"{kind} {count:>9,}", row, flush=True)
    if options.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

"""Compares many sequences in a process of its own: `python -m lua.work port db label first count moving`."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from lua.runner import Runner, shrunk
from lua.sequences import generated
from servers.server import HOST

if TYPE_CHECKING:
    from lua.runner import Difference

BATCH = 40  # sequences: what the server has got while the next are made


def first_difference(
    runner: Runner, seeds: range, *, moving: bool = False, crowded: bool = False
) -> Difference | None:
    """The first sequence that the server answers otherwise; while it works, the next are made."""
    under_way = []
    size = 5 if crowded else BATCH
    for start in [*seeds[::size], None]:
        batch = []
        if start is not None:
            batch = [
                generated(seed, runner.label, moving=moving, crowded=crowded)
                for seed in range(start, min(start + size, seeds.stop))
            ]
        if under_way and (found := runner.receive(under_way)):
            return found[0]
        if batch:
            runner.send(batch)
        under_way = batch
    return None


def main() -> None:
    """Prints what was done, and the first difference, as JSON."""
    port, db, label, first, count, moving = sys.argv[1:]
    began = time.monotonic()
    seeds = range(int(first), int(first) + int(count))
    with Runner(HOST, int(port), db=int(db), label=label) as runner:
        found = first_difference(runner, seeds, moving=moving == "moving")
        if found is not None:
            found = shrunk(runner, found)
        print(json.dumps({
            "sequences": len(seeds),
            "commands": runner.commands,
            "looks": runner.looks,
            "seconds": round(time.monotonic() - began, 1),
            "difference": None if found is None else str(found),
        }))  # fmt: skip


if __name__ == "__main__":
    main()

"""A body forks: what the child makes of its copy of the call is no word to the store about the parent's."""

from __future__ import annotations

import subprocess
import sys

import pytest
from workers.lab import PATIENCE

FORKS = """
import asyncio, os, sys
from idemguard import Guard

url, shape, how = sys.argv[1:]
guard, first, others = Guard(store=url), os.getpid(), asyncio.Event()


def forks(number):
    child = os.fork()
    if child == 0:
        if how == "exits":
            sys.exit("child")
        if how == "raises":
            raise ValueError("child")
        return "child"
    os.waitpid(child, 0)
    lines = list(guard.ledger.lines())
    assert {str(line.status) for line in lines} == {"open"}, lines
    for one in [guard.task_of(work, 1)] + ([guard.task_of(slow, 2)] if shape == "coroutine" else []):
        assert Guard(store=url).claim(one) is None, "somebody else may execute it"
    others.set()
    return "parent"


@guard.idempotent(task_type="slow")
async def slow(number):
    await others.wait()
    return number


if shape == "plain":
    work = guard.idempotent(forks, task_type="work")

    def main():
        return work(1)

else:
    @guard.idempotent(task_type="work")
    async def work(number):
        while len(list(guard.ledger.lines())) < 2:
            await asyncio.sleep(0)
        return forks(number)

    def main():  # with one that executes, and one that waits for it
        async def all_of_them():
            return (await asyncio.gather(*map(asyncio.ensure_future, (work(1), slow(2), slow(2)))))[0]

        return loop.run_until_complete(all_of_them())


loop = asyncio.new_event_loop()
try:
    value = main()
except (SystemExit, ValueError) as error:
    value = repr(error)
if os.getpid() != first:
    for task in asyncio.all_tasks(loop):
        task.get_coro().close()  # nobody runs them any more
    guard.close()
    print("in the child:", value, flush=True)
    os._exit(0)  # its copy of the loop is not closed: what the parent's listens to is the same
loop.close()
guard.close()
print("in the parent:", value)
for line in guard.ledger.lines():
    print(line.task_type, line.status, line.cause)
print(guard.ledger.totals()["calls"], "calls")
"""


EXIT, ERROR = "SystemExit('child')", "ValueError('child')"


@pytest.mark.parametrize("store", ["sqlite", "redis"])
@pytest.mark.parametrize(
    ("shape", "how", "came_to"),
    [
        ("plain", "exits", EXIT),
        ("plain", "raises", ERROR),
        ("plain", "returns", "child"),
        ("coroutine", "raises", ERROR),  # asyncio itself goes on no further in a child
    ],
)
def test_a_child_gives_nothing_back_of_its_parents(request, tmp_path, store, shape, how, came_to):
    """Were the parent's claim given back, the task could be executed beside it."""
    url = f"sqlite:///{tmp_path}/x.db"
    if store == "redis":
        url = request.getfixturevalue("standalone").url
    done = subprocess.run(
        [sys.executable, "-c", FORKS, url, shape, how],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[:2] == [f"in the child: {came_to}", "in the parent: parent"]
    plain = ["work ok first", "1 calls"]
    assert sorted(told[2:]) == sorted(
        plain if shape == "plain" else ["slow ok first", "work ok first", "3 calls"]
    )

"""Threads, tasks, processes, forks and pools on one task execute it once, whoever comes when."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from workers import jobs
from workers.lab import PATIENCE, Lab, found_a_claim, until

from idemguard import ExecutionLedger, Guard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemguard.stores import Store

ROUNDS = 50
TURNS = 20  # of one loop, which takes its tasks in the same order each time
KEYS = 50
AGES = 300.0  # seconds that thousands of calls may take under load


@pytest.fixture
def guard(store: Store) -> Iterator[Guard]:
    guard = Guard(store=store)
    yield guard
    guard.close()


def counted(path: Path) -> list[str]:
    return path.read_text().splitlines()


def once_each(ledger: ExecutionLedger, rounds: int, calls: int) -> None:
    """The ledger agrees that every round was one execution, and every other call reused it."""
    # calls that were answered without the store are booked together, a moment later
    until(lambda: ledger.totals()["reused"] >= calls - rounds, what="all are booked")
    totals = ledger.totals()
    assert totals["executions"] == totals["tasks"] == totals["executed"] == rounds
    assert totals["calls"] == calls
    assert totals["reused"] == calls - rounds
    assert totals["duplicates"] == 0
    assert [line.cause for line in ledger.lines()] == ["first"] * rounds


# --- everybody starts at once --------------------------------------------------------------------


def test_64_threads_on_a_cold_key(guard: Guard, tmp_path: Path) -> None:
    log, barrier = tmp_path / "ran", threading.Barrier(64)

    @guard.idempotent(task_type="round")
    def work(number: int) -> int:
        jobs.append(str(log), {"round": number})
        time.sleep(0.001)
        return number * 7

    def one(_: int) -> list[int]:
        found = []
        for number in range(ROUNDS):
            barrier.wait(timeout=PATIENCE)
            found.append(work(number))
        return found

    with ThreadPoolExecutor(64) as threads:
        for found in threads.map(one, range(64)):
            assert found == [number * 7 for number in range(ROUNDS)]
    assert len(counted(log)) == len(set(counted(log))) == ROUNDS
    once_each(guard.ledger, ROUNDS, 64 * ROUNDS)


def test_200_tasks_of_one_loop_on_a_cold_key(guard: Guard, tmp_path: Path) -> None:
    log = tmp_path / "ran"

    @guard.idempotent(task_type="round")
    async def work(number: int) -> int:
        jobs.append(str(log), {"round": number})
        await asyncio.sleep(0.001)
        return number * 7

    async def all_rounds() -> None:
        for number in range(TURNS):
            found = await asyncio.gather(*(work(number) for _ in range(200)))
            assert found == [number * 7] * 200

    asyncio.run(all_rounds())
    assert len(counted(log)) == len(set(counted(log))) == TURNS
    once_each(guard.ledger, TURNS, 200 * TURNS)


def test_8_processes_on_a_cold_key(lab: Lab) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(8), context.Queue()
    names = [f"round-{number}" for number in range(ROUNDS)]
    given = (lab.url, str(lab.log), names, barrier, answers)
    crowd = [
        context.Process(target=jobs.rounds, args=(*given, "async" if number % 2 else "sync"))
        for number in range(8)
    ]
    for process in crowd:
        process.start()
    try:
        sources = [answers.get(timeout=PATIENCE) for _ in crowd]
    finally:
        for process in crowd:
            process.join(PATIENCE)
            process.kill()
    assert [process.exitcode for process in crowd] == [0] * 8
    for of_round in zip(*sources, strict=True):
        assert Counter(of_round) == {"executed": 1, "reused": 7}
    assert Counter(start["key"] for start in lab.starts()) == dict.fromkeys(names, 1)
    once_each(lab.ledger, ROUNDS, 8 * ROUNDS)


@pytest.mark.timeout(3 * AGES)  # these are 20,000 calls
def test_8_processes_on_50_cold_keys(lab: Lab) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(8), context.Queue()
    given = (lab.url, str(lab.log), ROUNDS, KEYS, barrier, answers)
    crowd = [context.Process(target=jobs.many_rounds, args=(*given, number)) for number in range(8)]
    for process in crowd:
        process.start()
    try:
        sources = [answers.get(timeout=AGES) for _ in crowd]
    finally:
        for process in crowd:
            process.join(PATIENCE)
            process.kill()
    assert [process.exitcode for process in crowd] == [0] * 8
    count = ROUNDS * KEYS
    assert sum(map(Counter, sources), Counter()) == {"executed": count, "reused": 7 * count}
    starts = Counter(said["key"] for said in lab.said())
    assert len(starts) == starts.total() == count
    once_each(lab.ledger, count, 8 * count)


def test_200_scattered_calls_of_a_short_body(lab: Lab) -> None:
    workers = lab.workers(8)
    for number, worker in enumerate(workers):
        worker.begin(
            "crowd", url=lab.url, log=str(lab.log), key="short", count=25, jitter=0.05,
            seed=number, kind="async" if number % 2 else "sync",
        )  # fmt: skip
    told = [outcome for worker in workers for outcome in worker.end()]
    assert Counter(outcome["source"] for outcome in told) == {"executed": 1, "reused": 199}
    (start,) = lab.starts("short")
    assert {outcome["result"]["token"] for outcome in told} == {start["token"]}
    once_each(lab.ledger, 1, 200)
    assert lab.record("short").reused == 199


# --- a framework tries again ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same process", "another process"])
def test_a_retry_runs_at_once(lab: Lab, kind: str, elsewhere: bool) -> None:
    first, second = lab.workers(2)
    steps = [("raise once", lab.gate("failed"))]
    failed = lab.call(first, "flaky", kind=kind, steps=steps, lease=60).end()
    assert (failed["source"], failed["raised"]) == ("failed", "BoomError")
    again = second if elsewhere else first
    done = lab.call(again, "flaky", kind=kind, steps=steps, lease=60).end()
    assert (done["source"], done["cause"], done["runs"]) == ("executed", "retry", 2)
    assert done["waited"] == 0
    assert done["took"] < 30  # and not a lease
    assert len(lab.starts("flaky")) == 2
    assert [line.status for line in lab.lines("flaky")] == ["failed", "ok"]
    assert lab.ledger.duplication_rate() == 0
    assert lab.ledger.totals()["duplicates"] == 0


def test_a_waiter_elsewhere_retries_as_soon_as_the_leader_fails(lab: Lab) -> None:
    leader, waiter = lab.workers(2)
    steps = [("gate", lab.gate("go")), ("raise once", lab.gate("failed"))]
    lab.call(leader, "flaky", steps=steps, lease=60)
    lab.started("flaky")
    lab.call(waiter, "flaky", steps=steps, lease=60)
    until(lambda: found_a_claim(lab.store), what="it waits")
    opened = time.time()
    lab.open("go")
    assert leader.end()["raised"] == "BoomError"
    assert waiter.end()["cause"] == "retry"
    assert lab.starts("flaky")[1]["at"] - opened < 30
    assert lab.ledger.totals()["duplicates"] == 0


# --- one key for what lies downstream ------------------------------------------------------------


def test_the_idempotency_key_is_one_over_retries_and_take_overs(lab: Lab) -> None:
    one, two, three = lab.workers(3)
    boom = [("raise", "no")]
    lab.call(one, "pay", steps=boom).end()
    lab.call(one, "pay", kind="async", steps=boom).end()
    lab.call(two, "pay", steps=boom).end()
    lab.call(two, "pay", steps=[("gate", lab.gate("never"))], lease=0.5)
    lab.started("pay", 4)
    two.kill()
    done = lab.call(three, "pay", ttl=0.2, lease=0.5).end()
    assert done["source"] == "executed"
    causes = [start["cause"] for start in lab.starts("pay")]
    assert causes == ["first", "retry", "retry", "retry", "lost"]
    (key,) = {start["idempotency_key"] for start in lab.starts("pay")}

    until(lambda: lab.record("pay").result is None, what="its result has expired")
    again = lab.call(one, "pay", ttl=60).end()
    assert again["cause"] == "expired"
    expired = lab.starts("pay")[-1]["idempotency_key"]

    two = lab.worker()
    two.do("forget", url=lab.url, key="pay")
    forced = lab.call(three, "pay").end()
    assert forced["cause"] == "forced"
    forgotten = lab.starts("pay")[-1]["idempotency_key"]
    assert len({key, expired, forgotten}) == 3

    tokens = [start["token"] for start in lab.starts("pay")]
    assert tokens == sorted(set(tokens))


def test_two_tasks_have_two_idempotency_keys(lab: Lab) -> None:
    worker = lab.worker()
    for key in ("a", "b"):
        lab.call(worker, key).end()
    assert len({start["idempotency_key"] for start in lab.starts()}) == 2


# --- loops and threads of one process ------------------------------------------------------------


def test_two_loops_in_two_threads(guard: Guard, tmp_path: Path) -> None:
    log, barrier = tmp_path / "ran", threading.Barrier(2)

    @guard.idempotent(task_type="round")
    async def work(number: int) -> int:
        jobs.append(str(log), {"round": number})
        await asyncio.sleep(0.005)
        return number

    async def crowd(number: int) -> list[int]:
        return await asyncio.gather(*(work(number) for _ in range(10)))

    def loop(_: int) -> list[list[int]]:
        found = []
        with asyncio.Runner() as runner:
            for number in range(ROUNDS):
                barrier.wait(timeout=PATIENCE)
                found.append(runner.run(crowd(number)))
        return found

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(loop, range(2)):
            assert found == [[number] * 10 for number in range(ROUNDS)]
    assert len(counted(log)) == ROUNDS
    once_each(guard.ledger, ROUNDS, 20 * ROUNDS)


def test_one_function_in_one_loop_after_another(guard: Guard, tmp_path: Path) -> None:
    log = tmp_path / "ran"

    @guard.idempotent(task_type="round")
    async def work(number: int) -> int:
        jobs.append(str(log), {"round": number})
        await asyncio.sleep(0.001)
        return number

    async def crowd(number: int) -> list[int]:
        return await asyncio.gather(*(work(number) for _ in range(5)))

    for number in (1, 1, 2):
        assert asyncio.run(crowd(number)) == [number] * 5
    assert len(counted(log)) == 2
    once_each(guard.ledger, 2, 15)


@pytest.mark.parametrize("leader", ["sync", "async"])
def test_plain_code_and_coroutines_call_one_task(guard: Guard, tmp_path: Path, leader: str) -> None:
    log, inside, go = tmp_path / "ran", threading.Event(), threading.Event()

    def body(_: Any) -> str:
        jobs.append(str(log), {"kind": "sync"})
        inside.set()
        assert go.wait(PATIENCE)
        return "value"

    async def abody(_: Any) -> str:
        jobs.append(str(log), {"kind": "async"})
        inside.set()
        assert await asyncio.to_thread(go.wait, PATIENCE)
        return "value"

    def plain() -> str:
        return guard.run_task("work", 1, body).result

    def looped() -> list[str]:
        async def crowd() -> list[Any]:
            return await asyncio.gather(*(guard.run_task("work", 1, abody) for _ in range(4)))

        return [outcome.result for outcome in asyncio.run(crowd())]

    with ThreadPoolExecutor(6) as threads:
        first, second = (plain, looped) if leader == "sync" else (looped, plain)
        running = [threads.submit(first)]
        assert inside.wait(PATIENCE)
        running += [threads.submit(second), threads.submit(plain)]
        until(lambda: found_a_claim(guard.engine.store) == 5, what="all others wait")
        go.set()
        found = [future.result(PATIENCE) for future in running]
    assert [v for values in found for v in ([values] if values == "value" else values)] == (
        ["value"] * 6
    )
    assert counted(log) == [f'{{"kind": "{leader}"}}']
    once_each(guard.ledger, 1, 6)


# --- forks and pools -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("lab", ["memory", "sqlite", "redis"], indirect=True)
def test_a_forked_child_calls_after_its_parent(lab: Lab, kind: str) -> None:
    parent, lease = lab.worker(), 1.4
    parent.begin("fork_after_use", url=lab.url, log=str(lab.log), kind=kind, lease=lease)
    if lab.shared:  # the child renews its own claim while somebody else is after it
        lab.started("long")
        other = lab.worker()
        waited = lab.call(other, "long").end()
        assert waited["source"] == "reused"
    told = parent.end()
    assert told["parent"]["source"] == "executed"
    assert told["long"]["source"] == "executed"
    assert not told["long"]["lost"]
    assert told["after"]["source"] == "reused"
    assert told["long"]["me"] != told["parent"]["me"]
    # memory is each process's own, and a child's begins empty
    assert told["same"]["source"] == ("reused" if lab.shared else "executed")
    assert told["same"]["raised"] is None
    assert len(lab.starts("long")) == 1
    assert len(lab.starts("same")) == (1 if lab.shared else 2)
    if lab.shared:
        once_each(lab.ledger, 2, 5)


@pytest.mark.parametrize("lab", ["memory", "sqlite", "redis"], indirect=True)
def test_forks_while_other_threads_call(lab: Lab) -> None:
    told = lab.worker().do("fork_amid_calls", url=lab.url, log=str(lab.log), forks=30, threads=4)
    assert told["failures"] == []
    assert [child["source"] for child in told["children"]] == ["executed"] * 30
    starts = Counter(start["key"] for start in lab.starts())
    assert set(starts.values()) == {1}
    assert len(starts) == 2 + 30 + told["calls"]
    if lab.shared:
        once_each(lab.ledger, len(starts), len(starts))


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("lab", ["memory", "sqlite", "redis"], indirect=True)
def test_a_body_forks(lab: Lab, kind: str) -> None:
    lease = 1.4
    parent = lab.worker()
    parent.begin("fork_inside", url=lab.url, log=str(lab.log), lease=lease, kind=kind)
    if lab.shared:
        lab.started("outer")
        assert lab.call(lab.worker(), "outer").end()["source"] == "reused"
    told = parent.end()
    assert told["outer"]["source"] == "executed"
    assert not told["outer"]["lost"]
    assert told["other"]["source"] == "executed"
    assert told["own"]["raised"] == "ReentrantCallError"
    assert Counter(start["key"] for start in lab.starts()) == {"outer": 1, "other": 1}
    if lab.shared:
        outer, other = lab.lines("outer") + lab.lines("other")
        assert (outer.status, other.status) == ("ok", "ok")
        assert other.parent == outer.execution_id


def test_eight_children_that_were_forked_after_use(lab: Lab) -> None:
    told = lab.worker().do("prefork", url=lab.url, log=str(lab.log), children=8, keys=KEYS)
    # the parent calls before and beside them
    assert [len(sources) for sources in told] == [KEYS] * 8 + [KEYS + 2]
    sources = Counter(source for each in told for source in each)
    assert sources == {"executed": KEYS + 2, "reused": 8 * KEYS}
    assert Counter(start["key"] for start in lab.starts()).most_common(1)[0][1] == 1
    once_each(lab.ledger, KEYS + 2, 9 * KEYS + 2)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_process_pool_imports_a_decorated_function(lab: Lab, method: str) -> None:
    if method == "fork":  # in a process of its own: this one may have threads by now
        told = lab.worker().do("pooled", url=lab.url, log=str(lab.log), method=method)
    else:
        told = jobs.pooled(lab.url, str(lab.log), method)
    assert [found["doc"] for found in told] == ["a", "b"] * 6 + ["c", "d"] * 6
    by_doc: dict[str, set[int]] = {}
    for found in told:
        by_doc.setdefault(found["doc"], set()).add(found["by"])
    assert [len(pids) for pids in by_doc.values()] == [1] * 4
    assert sorted(said["doc"] for said in lab.said()) == ["a", "b", "c", "d"]
    once_each(lab.ledger, 4, 24)

"""Calls and wake-ups on a Redis or Valkey server, as ratios to the bare pair SET NX EX + SET EX.

uv run python benchmarks/server.py redis://127.0.0.1:6379/0
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import threading
import time
import uuid

import redis
import redis.asyncio

from idemguard import Guard

ROUNDS, CALLS = 40, 50
TEXT = "x" * 190  # with the rest a payload of about 230 bytes
VALUE = {"summary": "y" * 60}


def timed(act, numbers):
    """Seconds that each call took."""
    took = []
    for number in numbers:
        started = time.perf_counter()
        act(number)
        took.append(time.perf_counter() - started)
    return took


async def atimed(act, numbers):
    """The same, awaited."""
    took = []
    for number in numbers:
        started = time.perf_counter()
        await act(number)
        took.append(time.perf_counter() - started)
    return took


def told(name, pair, executed, reused):
    """One line of the report."""
    base, first, again = (statistics.median(each) * 1e6 for each in (pair, executed, reused))
    print(
        f"{name:8} pair {base:6.0f} us   executed {first:6.0f} us, {first / base:4.2f}"
        f"   reused {again:6.0f} us, {again / base:4.2f}"
    )


def calls(url):
    """Executed and reused calls, interleaved with the pair."""
    guard, client, mark = (
        Guard(store=url, namespace=uuid.uuid4().hex),
        redis.Redis.from_url(url),
        uuid.uuid4().hex,
    )

    @guard.idempotent(task_type="summarise")
    def work(doc, lang, number):
        return VALUE

    def pair(number):
        client.set(f"{mark}{number}", b"claimed", nx=True, ex=30)
        client.set(f"{mark}{number}", b"y" * 80, ex=900)

    pairs, executed, reused = [], [], []
    for round_ in range(ROUNDS):
        numbers = range(round_ * CALLS, (round_ + 1) * CALLS)
        pairs += timed(pair, numbers)
        executed += timed(lambda number: work(TEXT, "en", number), numbers)
        reused += timed(lambda number: work(TEXT, "en", number), numbers)
    told("sync", pairs, executed, reused)
    client.close()
    guard.close()


async def acalls(url):
    """The same, on a loop."""
    guard, mark = Guard(store=url, namespace=uuid.uuid4().hex), uuid.uuid4().hex
    client = redis.asyncio.Redis.from_url(url)

    @guard.idempotent(task_type="summarise")
    async def work(doc, lang, number):
        return VALUE

    async def pair(number):
        await client.set(f"{mark}{number}", b"claimed", nx=True, ex=30)
        await client.set(f"{mark}{number}", b"y" * 80, ex=900)

    pairs, executed, reused = [], [], []
    for round_ in range(ROUNDS):
        numbers = range(round_ * CALLS, (round_ + 1) * CALLS)
        pairs += await atimed(pair, numbers)
        executed += await atimed(lambda number: work(TEXT, "en", number), numbers)
        reused += await atimed(lambda number: work(TEXT, "en", number), numbers)
    told("asyncio", pairs, executed, reused)
    await client.aclose()
    guard.close()


def lead(url, namespace, rounds, begun, go, ended):
    """The leader's process: executes a task a round, and tells when its end was written."""
    guard = Guard(store=url, namespace=namespace)

    def body(_):
        begun.send(None)
        go.recv()
        return VALUE

    for round_ in range(rounds):
        guard.run_task("wake", round_, body)
        ended.send(time.monotonic())
    guard.close()


def all_wait(guard, calls):
    """Until so many calls have found somebody else's claim."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        windows = guard.engine.store.windows(guard.engine.namespace, 0, 2**53)
        if sum(window.counts.get("found", 0) for window in windows) >= calls:
            return
    raise RuntimeError("the waiters do not come to wait")


def waking(url, crowd, rounds, *, loop):
    """Milliseconds from the leader's write (its reply, in another process) to each waiter's value."""
    namespace, context = uuid.uuid4().hex, multiprocessing.get_context("spawn")
    (seen, begun), (go, let), (end, ended) = (context.Pipe(duplex=False) for _ in range(3))
    leader = context.Process(target=lead, args=(url, namespace, rounds, begun, go, ended))
    leader.start()
    guard, took = Guard(store=url, namespace=namespace), []
    never = lambda _: None  # noqa: E731 - a waiter that executes shows as a missing result
    for round_ in range(rounds):
        seen.recv()
        at = []
        if loop:

            async def one(number, at=at):
                await guard.run_task("wake", number, anever)
                at.append(time.monotonic())

            async def all_(number=round_, one=one):
                tasks = [asyncio.create_task(one(number)) for _ in range(crowd)]
                await asyncio.to_thread(all_wait, guard, crowd * (number + 1))
                let.send(None)
                await asyncio.gather(*tasks)

            asyncio.run(all_())
        else:
            threads = [
                threading.Thread(
                    target=lambda at=at, number=round_: (
                        guard.run_task("wake", number, never), at.append(time.monotonic()))
                )
                for _ in range(crowd)
            ]  # fmt: skip
            for thread in threads:
                thread.start()
            all_wait(guard, crowd * (round_ + 1))
            let.send(None)
            for thread in threads:
                thread.join()
        wrote = end.recv()
        took += [(each - wrote) * 1000 for each in at]
    leader.join()
    guard.close()
    took.sort()
    print(
        f"{crowd:4} {'tasks' if loop else 'threads':8} woken after: median "
        f"{statistics.median(took):6.2f} ms   p99 {took[int(len(took) * 0.99)]:6.2f} ms"
    )


async def anever(_):
    """As `never`."""


def main():
    url = sys.argv[1]
    calls(url)
    asyncio.run(acalls(url))
    waking(url, 1, 30, loop=False)
    waking(url, 1, 30, loop=True)
    waking(url, 200, 10, loop=True)
    waking(url, 200, 10, loop=False)


if __name__ == "__main__":
    main()

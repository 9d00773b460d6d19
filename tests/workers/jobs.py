"""What a worker process can be asked to do, and the bodies that it executes."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import idemguard
from idemguard import Guard, capture, current, errors
from idemguard.stores.memory import process_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PATIENCE = 120.0  # seconds that a body waits at a gate which nobody opens

Steps = "Sequence[tuple[str, Any]]"


class BoomError(Exception):
    """What a body raises when it is told to."""


_guards: dict[tuple[str, float | None], Guard] = {}


def guard_of(url: str, retention: float | None = None) -> Guard:
    """The guard of a store; one in each process."""
    if (url, retention) not in _guards:
        _guards[url, retention] = Guard(store=url, retention=retention)
    return _guards[url, retention]


def close() -> None:
    """Give back what is open."""
    for guard in _guards.values():
        guard.close()
    _guards.clear()
    process_store.cache_clear()  # the next test's memory:// begins empty


# --- bodies --------------------------------------------------------------------------------------


def append(path: str, what: dict[str, Any]) -> None:
    """Write one line, in one step, behind all others: the truth beside the ledger."""
    line = json.dumps(what).encode() + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def tell_start(log: str, key: str) -> dict[str, Any]:
    """A body's first step: say that it runs, and as what."""
    here = current()
    assert here is not None
    said = {
        "key": key,
        "pid": os.getpid(),
        "token": here.token,
        "cause": str(here.cause),
        "idempotency_key": here.idempotency_key,
        "at": time.time(),
    }
    append(log, said)
    return {"by": here.worker, "token": here.token}


def do(step: str, given: Any, log: str, key: str) -> None:
    """One step of a body."""
    match step:
        case "sleep":
            time.sleep(given)
        case "hold":  # a call into C that keeps the interpreter to itself
            ctypes.PyDLL(None).usleep(int(given * 1_000_000))
        case "gate":
            wait_for(given)
        case "usage":
            idemguard.record_usage(input_tokens=given[0], output_tokens=given[1])
        case "check":
            append(log, {"check": given, "key": key, **checked()})
        case "raise":
            raise BoomError(given)
        case "raise once":
            if not Path(given).exists():
                Path(given).touch()
                raise BoomError(given)
        case "fork":
            fork_and_live(given)
        case _:
            raise AssertionError(step)


async def ado(step: str, given: Any, log: str, key: str) -> None:
    """One step of a coroutine; `sleep` and `hold` block its loop."""
    match step:
        case "pause":
            await asyncio.sleep(given)
        case "gate":
            while not os.path.exists(given):  # noqa: ASYNC110, ASYNC240, PTH110 - it is cancelled
                await asyncio.sleep(0.005)
        case _:
            do(step, given, log, key)


def wait_for(gate: str) -> None:
    """Until that file is there."""
    end = time.monotonic() + PATIENCE
    while not Path(gate).exists():
        assert time.monotonic() < end, f"nobody opened {gate}"
        time.sleep(0.005)


def checked() -> dict[str, Any]:
    """What the current execution says of its claim."""
    here = current()
    assert here is not None
    try:
        here.check()
    except errors.LeaseLostError as error:
        return {"held": False, "lost": here.lost, "names": error.execution_id == here.execution_id}
    return {"held": True, "lost": here.lost, "names": None}


def body_of(kind: str, steps: Steps, log: str, key: str) -> Callable[[Any], Any]:
    """A function or coroutine of these steps."""

    def body(_: Any) -> dict[str, Any]:
        said = tell_start(log, key)
        for step, given in steps:
            do(step, given, log, key)
        return said

    async def abody(_: Any) -> dict[str, Any]:
        said = tell_start(log, key)
        for step, given in steps:
            await ado(step, given, log, key)
        return said

    return abody if kind == "async" else body


# --- calls ---------------------------------------------------------------------------------------


def call(
    url: str,
    log: str,
    key: str,
    kind: str = "sync",
    steps: Steps = (),
    retention: float | None = None,
    hit: float = 0,
    **policy: Any,
) -> dict[str, Any]:
    """One guarded call, and what it came to; a coroutine may be hit by a SIGINT meanwhile."""
    body = body_of(kind, steps, log, key)
    started = time.monotonic()
    with capture() as calls:
        try:
            found = guard_of(url, retention).run_task("work", {"key": key}, body, **policy)
            if kind == "async":
                asyncio.run(_awaited(found, hit))
        except BaseException as error:  # noqa: BLE001 - told in the answer
            raised = type(error).__name__
            text = "".join(traceback.format_exception(error))
        else:
            raised = text = None
    told = _told(calls[0]) if calls else {"source": None}
    return told | {"raised": raised, "text": text, "took": time.monotonic() - started}


async def _awaited(awaitable: Any, hit: float = 0) -> Any:
    with armed(hit):  # while the loop runs: what hits its making is not ours
        return await awaitable


def _told(came_to: idemguard.Outcome[Any]) -> dict[str, Any]:
    return {
        "source": came_to.source,
        "result": came_to.result,
        "cause": None if came_to.cause is None else str(came_to.cause),
        "lost": came_to.lost,
        "runs": came_to.runs,
        "waited": came_to.waited,
        "worker": came_to.worker,
        "me": idemguard.context.present_worker(),
        "id": came_to.execution_id,
    }


def crowd(
    url: str,
    log: str,
    key: str,
    count: int,
    kind: str = "sync",
    jitter: float = 0.0,
    seed: int = 0,
    steps: Steps = (),
    **policy: Any,
) -> list[dict[str, Any]]:
    """Many calls of one task at the same time: from threads, or from tasks of one loop."""
    chance = random.Random(seed)
    delays = [chance.uniform(0, jitter) for _ in range(count)]
    guard = guard_of(url)
    if kind == "async":
        body = body_of("async", steps, log, key)

        async def one(delay: float) -> dict[str, Any]:
            await asyncio.sleep(delay)
            return _told(await guard.run_task("work", {"key": key}, body, **policy))

        async def all_of_them() -> list[dict[str, Any]]:
            return await asyncio.gather(*map(one, delays))

        return asyncio.run(all_of_them())

    body = body_of("sync", steps, log, key)

    def plain(delay: float) -> dict[str, Any]:
        time.sleep(delay)
        return _told(guard.run_task("work", {"key": key}, body, **policy))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(plain, delays))


def forget(url: str, key: str) -> None:
    """Forget a task."""
    guard = guard_of(url)
    guard.forget(idemguard.Task.of("work", {"key": key}))


def ledger(url: str, key: str | None = None) -> dict[str, Any]:
    """What a reader sees who has nothing to do with the calls."""
    book = idemguard.ExecutionLedger(url)
    lines = book.lines()
    if key is not None:
        lines = iter(book.executions(idemguard.task_fingerprint("work", {"key": key})))
    told = [
        {
            "fingerprint": line.fingerprint,
            "status": str(line.status),
            "cause": str(line.cause),
            "worker": line.worker,
            "tokens": None if line.usage is None else line.usage.total_tokens,
            "token": line.claim.token,
            "kept": line.kept,
        }
        for line in lines
    ]
    totals = book.totals()
    return {
        "lines": told,
        "totals": {name: number for name, number in totals.items() if isinstance(number, int)},
        "duplication_rate": totals["duplication_rate"],
    }


# --- rounds --------------------------------------------------------------------------------------


def rounds(url: str, log: str, names: Sequence[str], barrier: Any, answers: Any, kind: str) -> None:
    """Start together with others, once for each name; the sources of all calls are the answer."""
    sources = []
    for name in names:
        barrier.wait(timeout=PATIENCE)
        sources.append(call(url, log, name, kind)["source"])
    answers.put(sources)


def many_rounds(
    url: str, log: str, rounds: int, keys: int, barrier: Any, answers: Any, number: int
) -> None:
    """Start together with others, with many new tasks each time; the sources are the answer."""
    guard, sources = guard_of(url), list[str]()

    def body(payload: Any) -> str:
        append(log, payload)
        return str(payload["key"])

    async def abody(payload: Any) -> str:
        return body(payload)

    async def together(names: list[str]) -> list[idemguard.Outcome[str]]:
        return await asyncio.gather(*(guard.run_task("work", {"key": n}, abody) for n in names))

    with asyncio.Runner() as runner:
        for turn in range(rounds):
            names = [f"{turn}-{key}" for key in range(keys)]
            names = names[6 * number :] + names[: 6 * number]  # each begins elsewhere
            barrier.wait(timeout=PATIENCE)
            if number % 2:
                found = runner.run(together(names))
            else:
                found = [guard.run_task("work", {"key": name}, body) for name in names]
            assert [outcome.result for outcome in found] == names
            sources += [outcome.source for outcome in found]
    answers.put(sources)


def pooled(url: str, log: str, method: str) -> list[dict[str, Any]]:
    """Two functions, mapped over documents by the processes of a pool."""
    from workers import tasks  # noqa: PLC0415 - what it configures counts for this process

    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(4, context, initializer=tasks.setup, initargs=(url,)) as pool:
        plain = pool.map(tasks.digest, ["a", "b"] * 6, [log] * 12)
        looped = pool.map(tasks.run_adigest, ["c", "d"] * 6, [log] * 12)
        return [*plain, *looped]


# --- interrupts ----------------------------------------------------------------------------------


def interrupted(
    url: str, log: str, prefix: str, rounds: int, seed: str, lease: float, kind: str = "sync"
) -> list[dict[str, Any]]:
    """Calls that a SIGINT hits at random moments, from before the claim to after the end."""
    chance = random.Random(seed)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    took = [call(url, log, f"{prefix}-warm-{n}", kind)["took"] for n in range(9)]
    usual = sorted(took)[len(took) // 2]
    told = []
    for number in range(rounds):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        key, delay = f"{prefix}-{number}", chance.uniform(0.000_01, 1.2 * usual)
        said: dict[str, Any] = {"key": key, "source": None, "raised": None}
        try:
            with armed(delay if kind == "sync" else 0):
                said |= call(url, log, key, kind, lease=lease, hit=0 if kind == "sync" else delay)
        except KeyboardInterrupt:
            said["raised"] = "KeyboardInterrupt"
        told.append(said)
    return told


class Interrupt:
    """Raises a KeyboardInterrupt at the so-manieth point where Python would let a signal in.

    Those are the beginnings of Python functions and the returns of C functions (and jumps
    backwards, which a profiler is not told of). What is raised inside a finaliser reaches nobody,
    so that the next point behind one is taken.
    """

    def __init__(self, point: int) -> None:
        self._left = point
        self.at: str | None = None

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event not in ("call", "c_return"):
            return
        self._left -= 1
        if self._left <= 0 and not in_finaliser(frame):
            sys.setprofile(None)
            code = frame.f_code
            self.at = f"{code.co_filename}:{frame.f_lineno} {code.co_name}, {event}"
            raise KeyboardInterrupt


def in_finaliser(frame: Any) -> bool:
    """Whether the end of an object, or the garbage collection, has called this."""
    while frame is not None:
        name = frame.f_code.co_qualname
        if name.endswith(("__del__", "gc_callback")) or name.startswith(
            ("WeakSet.__init__", "WeakKeyDictionary.__init__")
        ):
            return True
        frame = frame.f_back
    return False


def interrupted_everywhere(url: str, log: str, prefix: str, lease: float) -> list[dict[str, Any]]:
    """Calls that are interrupted at one point each, from the first to the last there is."""
    guard, told = guard_of(url), []
    call(url, log, f"{prefix}-warm")
    for number in itertools.count(1):
        key, interrupt, raised = f"{prefix}-{number}", Interrupt(number), None
        payload, body = {"key": key}, body_of("sync", (), log, key)
        sys.setprofile(interrupt)
        try:
            guard.run_task("work", payload, body, lease=lease)
        except KeyboardInterrupt:
            raised = "KeyboardInterrupt"
        finally:
            sys.setprofile(None)
        if interrupt.at is None:
            return told
        told.append({"key": key, "at": interrupt.at, "raised": raised})
    raise AssertionError


@contextmanager
def armed(delay: float) -> Iterator[None]:
    """A SIGINT after so many seconds, unless the block is over by then; 0: none."""
    signal.setitimer(signal.ITIMER_REAL, delay)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def quick(url: str, log: str, keys: Sequence[str], patience: float) -> list[dict[str, Any]]:
    """Calls that must not have to wait for long."""
    return [call(url, log, key, wait_timeout=patience, on_timeout="raise") for key in keys]


# --- forks ---------------------------------------------------------------------------------------


def in_child(act: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """What `act` answers in a forked child; the child ends without cleaning up."""
    return _read(*_fork(act), patience)


def _fork(act: Callable[[], Any]) -> tuple[int, int]:
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.write(into, json.dumps(act()).encode())
            code = 0
        except BaseException:  # noqa: BLE001 - told by the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(into)
    return pid, out


def _read(pid: int, out: int, patience: float) -> Any:
    os.set_blocking(out, False)
    end, data = time.monotonic() + patience, b""
    while True:
        try:
            chunk = os.read(out, 65536)
        except BlockingIOError:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise TimeoutError("the forked child hangs") from None
            time.sleep(0.002)
            continue
        if not chunk:
            break
        data += chunk
    os.close(out)
    _, status = os.waitpid(pid, 0)
    if status:
        raise ChildProcessError(f"the forked child ended with {status}")
    return json.loads(data)


def fork_and_live(seconds: float) -> None:
    """Inside a body: a child that lives for a while, calls, and must disturb nobody."""

    def child() -> dict[str, Any]:
        time.sleep(seconds)
        return {"lost": getattr(current(), "lost", None)}

    in_child(child)


def fork_after_use(url: str, log: str, kind: str, lease: float) -> dict[str, Any]:
    """The parent calls; its child calls the same task, and a long one that outlives its lease."""
    told = {"parent": call(url, log, "same", kind)}

    def child() -> dict[str, Any]:
        same = call(url, log, "same", kind)
        step = ("pause" if kind == "async" else "sleep", 2 * lease)
        return {"same": same, "long": call(url, log, "long", kind, [step], lease=lease)}

    told |= in_child(child)
    told["after"] = call(url, log, "same", kind)
    return told


def prefork(url: str, log: str, children: int, keys: int) -> list[list[str]]:
    """The parent calls, and then forks children that all call the same, as it does itself."""
    used = [call(url, log, f"first-{kind}", kind)["source"] for kind in ("sync", "async")]

    def act(number: int) -> list[str]:
        chance = random.Random(number)
        names = [f"task-{n}" for n in range(keys)]
        chance.shuffle(names)
        return [
            call(url, log, name, chance.choice(("sync", "async")), [("sleep", 0.001)])["source"]
            for name in names
        ]

    def child(number: int) -> list[str]:
        sources = act(number)
        close()  # a child ends without what a process does at its end
        return sources

    running = [_fork(lambda n=n: child(n)) for n in range(children)]
    own = act(children)
    return [*(_read(*child, PATIENCE) for child in running), [*used, *own]]


def fork_amid_calls(url: str, log: str, forks: int, threads: int) -> dict[str, Any]:
    """Forks while other threads call all the time; every child calls too."""
    for kind in ("sync", "async"):  # whatever is loaded at the first call is there
        call(url, log, f"warm-{kind}", kind)
    stop, failures = threading.Event(), []
    counts = [0] * threads

    def hammer(number: int) -> None:
        while not stop.is_set():
            try:
                call(url, log, f"parent-{number}-{counts[number]}")
            except BaseException as error:  # noqa: BLE001 - told in the answer
                failures.append(repr(error))
                return
            counts[number] += 1

    running = [threading.Thread(target=hammer, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    try:
        children = [
            in_child(lambda n=n: call(url, log, f"child-{n}", "async" if n % 2 else "sync"))
            for n in range(forks)
        ]
    finally:
        stop.set()
        for thread in running:
            thread.join(20)
    return {"children": children, "calls": sum(counts), "failures": failures}


def fork_inside(url: str, log: str, lease: float, kind: str) -> dict[str, Any]:
    """A body forks; its child calls another task, and its own, and lives past the lease."""
    guard, children = guard_of(url), []

    def inner(key: str) -> dict[str, Any]:
        return call(url, log, key)

    def child() -> dict[str, Any]:
        other, own = inner("other"), inner("outer")
        time.sleep(1.25 * lease)
        return {"other": other, "own": own}

    def body(_: Any) -> dict[str, Any]:
        said = tell_start(log, "outer")
        children.append(in_child(child))
        time.sleep(lease / 2)
        return said

    async def abody(_: Any) -> dict[str, Any]:
        said = tell_start(log, "outer")
        children.append(await asyncio.to_thread(in_child, child))
        return said

    found = guard.run_task(
        "work", {"key": "outer"}, abody if kind == "async" else body, lease=lease
    )
    outcome = asyncio.run(_awaited(found)) if kind == "async" else found
    return {"outer": _told(outcome), **children[0]}

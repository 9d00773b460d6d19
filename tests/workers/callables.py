"""Every shape of a guarded callable; to be imported, or run as the main script of an interpreter."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import cloudpickle

from idemguard import idempotent


def tell(what: str) -> None:
    """Leave a trace of a body that runs."""
    file = os.open(os.environ["RAN"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{what}\n".encode())
    finally:
        os.close(file)


@idempotent
def plain(n: int, *, lang: str = "en") -> list[object]:
    tell("plain")
    return [n, lang]


@idempotent
async def coroutine(n: int, *, lang: str = "en") -> list[object]:
    tell("coroutine")
    return [n, lang]


@idempotent
def stream(n: int) -> Iterator[int]:
    tell("stream")
    yield from (n, 0, n)


@idempotent
async def astream(n: int) -> AsyncIterator[int]:
    tell("astream")
    for chunk in (n, 0, n):
        yield chunk


@idempotent
def recursive(n: int, least: int = 0) -> list[int]:
    tell("recursive")
    return [n] if n <= least else [n, *recursive(n - 1, least)]


def logged(fn: Any) -> Any:
    """Do nothing, as other people's decorators do."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


@logged
@idempotent
def beneath(n: int) -> int:
    tell("beneath")
    return n


@idempotent
@logged
async def above(n: int) -> int:
    tell("above")
    return n


@dataclass
class Tool:
    """An agent's tool, whose fields count."""

    name: str

    @idempotent(keep=("self",))
    def method(self, n: int) -> list[object]:
        tell("method")
        return [self.name, n]

    @idempotent(keep=("self",))
    async def comethod(self, n: int) -> list[object]:
        tell("comethod")
        return [self.name, n]

    @idempotent
    @classmethod
    def over_class(cls, n: int) -> list[object]:
        tell("over_class")
        return [cls.__name__, n]

    @classmethod
    @idempotent
    def under_class(cls, n: int) -> list[object]:
        tell("under_class")
        return [cls.__name__, n]

    @idempotent
    @staticmethod
    def over_static(n: int) -> int:
        tell("over_static")
        return n

    @staticmethod
    @idempotent
    def under_static(n: int) -> int:
        tell("under_static")
        return n

    def unguarded(self, n: int) -> list[object]:
        tell("unguarded")
        return [self.name, n]

    def __call__(self, n: int) -> list[object]:
        tell("object")
        return [self.name, n]


def added(a: int, b: int) -> int:
    tell("partial")
    return a + b


partial = idempotent(functools.partial(added, 40))
tool = idempotent(Tool("t"), keep=("self",))
bound = idempotent(Tool("b").unguarded, keep=("self",))

CALLABLES = {
    "plain": plain,
    "coroutine": coroutine,
    "stream": stream,
    "astream": astream,
    "recursive": recursive,
    "beneath": beneath,
    "above": above,
    "method": Tool("a").method,
    "comethod": Tool("a").comethod,
    "over_class": Tool.over_class,
    "under_class": Tool.under_class,
    "over_static": Tool.over_static,
    "under_static": Tool.under_static,
    "partial": partial,
    "object": tool,
    "unguarded": bound,
}
RUNS = [name for name in CALLABLES for _ in range(3 if name == "recursive" else 1)]


def take(call: Any, n: int = 2) -> Any:
    """The whole of what a call gives, whatever its shape."""
    made = call(n)
    if inspect.isawaitable(made):
        return asyncio.run(_awaited(made))
    if hasattr(made, "__anext__"):
        return asyncio.run(_collected(made))
    return list(made) if hasattr(made, "__next__") else made


async def _awaited(made: Any) -> Any:
    return await made


async def _collected(made: Any) -> list[Any]:
    return [chunk async for chunk in made]


def by_pool(method: str) -> dict[str, Any]:
    """What a pool's child gets of all of them."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        found = {name: pool.submit(take, call) for name, call in CALLABLES.items()}
        return {name: future.result(timeout=60) for name, future in found.items()}


STRANGER = """
import json, pickle, sys
found = {}
for name, (take, call) in pickle.load(sys.stdin.buffer).items():
    found[name] = take(call)
print(json.dumps(found))
"""


def by_value() -> dict[str, Any]:
    """What an interpreter gets that knows nothing of this module."""
    sent = cloudpickle.dumps({name: (take, call) for name, call in CALLABLES.items()})
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", STRANGER],
        input=sent,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


if __name__ == "__main__":
    theirs = by_value() if sys.argv[1] == "by_value" else by_pool(sys.argv[1])
    ours = {name: take(call) for name, call in CALLABLES.items()}
    print(json.dumps({"theirs": theirs, "ours": ours}))

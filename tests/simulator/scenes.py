"""Who takes part in an exploration, and how much may happen to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from simulator.rules import LEASE

from idemguard.claim import DAY
from idemguard.record import Mode

# what may happen, each so many times: a lease passes, the store is emptied, an operator's orders,
# a sweep, the wire brings a command again, loses a reply, a caller dies, leaves before its body
# started, does without the store
HAPPENINGS = (
    "tick", "flush", "forget", "resolve", "sweep", "again", "lost", "crash", "leave", "away",
)  # fmt: skip


class Way(NamedTuple):
    """By which policy a caller calls, and how often."""

    mode: Mode = Mode.ENFORCE
    rerun: bool = True
    fallback: bool = False
    ttl: int = 2 * LEASE
    calls: int = 1
    max_run: int = 10**9
    digest: str | None = None
    retention: int = DAY


@dataclass(frozen=True)
class Scene:
    """Some callers, how their bodies may end, and what may happen."""

    name: str
    ways: tuple[Way, ...]
    ends: tuple[str, ...] = ("ok", "failed")
    budget: dict[str, int] = field(default_factory=dict)
    same_ms: bool = False  # emptied and asked again within one millisecond
    few_lines: bool = False  # a record remembers three executions


E = Way()
OBSERVES = Way(Mode.OBSERVE)
BYPASSES = Way(Mode.BYPASS)
FALLS_BACK = Way(fallback=True)
UNSURE = Way(rerun=False)
SHARES = Way(ttl=0)
SHORT = Way(retention=2 * LEASE, ttl=LEASE)
SOON = Way(retention=LEASE // 2)  # shorter than a lease, and than a result
EVERY_END = ("ok", "failed", "declined", "lost")


def _scene(name: str, ways: tuple[Way, ...], ends: tuple[str, ...], **budget: int) -> Scene:
    return Scene(name, ways, ends, budget)


TWO_ENDS = ("ok", "failed")
SCENES = (
    _scene("three callers", (E, E, E), TWO_ENDS, tick=2, lost=1, crash=1, leave=1),
    _scene("every end", (E._replace(calls=2), E), EVERY_END, tick=2, lost=1, leave=1),
    _scene("all comes again", (E, E), TWO_ENDS, tick=2, again=2, lost=1, leave=1),
    _scene("fallback of four", (E, FALLS_BACK, FALLS_BACK, FALLS_BACK), TWO_ENDS, tick=1),
    _scene("fallback, every end", (FALLS_BACK,) * 3, ("ok", "failed", "declined"), tick=2, leave=1),
    _scene("fallback, lost replies", (FALLS_BACK,) * 3, TWO_ENDS, tick=2, lost=1, crash=1),
    _scene("fallback, emptied", (E, FALLS_BACK, FALLS_BACK), TWO_ENDS, tick=1, flush=1, again=1),
    _scene(
        "fallback, forgotten", (E, FALLS_BACK, FALLS_BACK), TWO_ENDS, tick=1, forget=1, resolve=1
    ),
    _scene(
        "unknown, resolved",
        (UNSURE, E, UNSURE),
        ("ok", "failed", "lost"),
        tick=2,
        resolve=1,
        sweep=1,
    ),
    _scene("unknown, forgotten", (UNSURE, E, UNSURE), TWO_ENDS, tick=2, forget=1, sweep=1),
    _scene("orders come again", (UNSURE, E), TWO_ENDS, tick=1, forget=1, resolve=1, again=1),
    _scene(
        "unknown beside a fallback",
        (UNSURE, UNSURE._replace(fallback=True), UNSURE),
        TWO_ENDS,
        tick=2,
        sweep=1,
    ),
    _scene(
        "unknown, two lives",
        (UNSURE._replace(calls=2), UNSURE),
        ("ok", "failed", "lost"),
        tick=2,
        resolve=1,
        forget=1,
        crash=1,
    ),
    _scene("observe beside enforce", (OBSERVES, OBSERVES, E), TWO_ENDS, tick=2, crash=1),
    _scene("observe, again and again", (OBSERVES, OBSERVES), TWO_ENDS, tick=2, again=2, lost=1),
    _scene("observe, emptied", (OBSERVES, OBSERVES, E), ("ok",), tick=1, flush=1, forget=1),
    _scene("bypass", (BYPASSES, E, E), TWO_ENDS, tick=1, flush=1),
    _scene("ttl 0", (SHARES, SHARES, SHARES), TWO_ENDS, tick=1, lost=1),
    _scene("ttl 0, twice", (SHARES._replace(calls=2), SHARES), ("ok",), tick=2, again=1, lost=1),
    _scene("emptied and forgotten", (E, E, E), TWO_ENDS, tick=1, flush=1, forget=1),
    _scene(
        "emptied, with leavers",
        (E._replace(calls=2), E),
        TWO_ENDS,
        tick=1,
        flush=1,
        lost=1,
        leave=1,
        again=1,
    ),
    Scene("emptied within a ms", (E, E, E), TWO_ENDS, {"tick": 1, "flush": 2}, same_ms=True),
    _scene("max_run", (E._replace(max_run=15), E), TWO_ENDS, tick=3, again=1),
    _scene("conflict", (E._replace(digest="a"), E._replace(digest="b")), TWO_ENDS, tick=2, flush=1),
    _scene(
        "conflict, observed",
        (E._replace(digest="a"), OBSERVES._replace(digest="b")),
        TWO_ENDS,
        tick=2,
        resolve=1,
    ),
    _scene("records age", (SHORT._replace(calls=2), SHORT), TWO_ENDS, tick=5, forget=1),
    _scene(
        "aged while frozen",
        (SHORT, UNSURE._replace(retention=2 * LEASE)),
        EVERY_END,
        tick=4,
        again=1,
    ),
    _scene("records age soon", (SOON, SOON), TWO_ENDS, tick=4, sweep=1),
    _scene("unguarded", (E, E), TWO_ENDS, tick=2, away=2, lost=1),
    _scene("unguarded beside others", (E, UNSURE, FALLS_BACK), ("ok",), tick=1, away=1, again=1),
    _scene("unguarded, observed", (OBSERVES, OBSERVES), TWO_ENDS, tick=1, away=1, flush=1),
    Scene(
        "few lines are remembered",
        (E._replace(calls=6), UNSURE),
        ("failed",),
        {"tick": 1, "forget": 1, "crash": 1},
        few_lines=True,
    ),
)

LONG = Scene(
    "long random runs",
    (
        FALLS_BACK._replace(calls=25),
        UNSURE._replace(calls=25),
        OBSERVES._replace(calls=25),
        SHARES._replace(calls=25),
    ),
    EVERY_END,
    {
        "tick": 90, "flush": 6, "forget": 8, "resolve": 8, "sweep": 9, "again": 60, "lost": 60,
        "crash": 15, "leave": 15, "away": 10,
    },
)  # fmt: skip
# the same without an emptied store, so that the windows are compared to the very end
COUNTED = Scene("long counted runs", LONG.ways, EVERY_END, LONG.budget | {"flush": 0})

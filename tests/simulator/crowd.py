"""Many callers of one task who come at once, in the order of the events, with hints as stores give them."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from simulator.rules import ADDRESS, Rules, caller

from idemguard.codec import Value
from idemguard.guard import Ask, Await, Execute, Pause, Policy, Ran, Reply, Wish, call, hold
from idemguard.record import Cause, Record
from idemguard.usage import NOTHING

NOON = 1_000_000  # ms: when the first one calls; the others follow, one a ms
LATEST = NOON + 500_000


@dataclass
class Came:
    """What a crowd came to."""

    executions: list[tuple[str, Cause, int]] = field(default_factory=list)  # who, why, when
    replies: dict[str, tuple[Reply, int]] = field(default_factory=dict)  # and when
    record: Record = field(default_factory=Record)

    @property
    def sources(self) -> Counter[str]:
        return Counter(reply.source for reply, _ in self.replies.values())

    @property
    def last(self) -> int:
        """When the last one was served."""
        return max(when for _, when in self.replies.values())


class Crowd:
    """Some callers under one policy, and a body that takes this long.

    Args:
        policy: everybody's.
        body: how long an execution takes, ms.
        fails: so many executions fail.
        killed: this caller is killed where its body starts.
        rules: the project's own, or a variant.

    """

    def __init__(
        self,
        policy: Policy,
        body: int,
        *,
        fails: int = 0,
        killed: str | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.policy, self.body, self.fails, self.killed = policy, body, fails, killed
        self.rules = rules or Rules()
        self.now = NOON
        self.came = Came()
        self._numbers = itertools.count()
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._waiting: dict[int, Callable[[], None]] = {}  # in the order in which they came
        self._beating: set[str] = set()

    def run(self, callers: int) -> Came:
        """Everybody is served, or the day is over."""
        for number in range(callers):
            self._at(NOON + number, self._caller(f"c{number}"))
        while self._due and self._due[0][0] < LATEST:
            self.now, _, act = heapq.heappop(self._due)
            act()
        return self.came

    def _at(self, when: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), act))

    def _caller(self, name: str) -> Callable[[], None]:
        ask = Ask(ADDRESS, caller(name), name, self.policy)
        flow = call(ask, lambda kept: Value("json", kept.encode()), lambda kept: False)
        return lambda: self._go_on(name, flow)

    def _go_on(self, name: str, flow: Generator[Wish, Any, Any], answer: Any = None) -> None:
        try:
            wish = flow.send(answer)
            while True:
                match wish:
                    case Await():
                        return self._park(name, flow, wish)
                    case Pause(time=time):
                        return self._at(self.now + time, lambda: self._beat(name, flow))
                    case Execute():
                        return self._execute(name, flow, wish)
                    case _:
                        wish = flow.send(self._perform(wish))
        except StopIteration as end:
            if isinstance(end.value, Reply):
                self.came.replies[name] = end.value, self.now - NOON
        return None

    def _beat(self, name: str, flow: Generator[Wish, Any, Any]) -> None:
        if name in self._beating:
            self._go_on(name, flow, NOTHING)

    def _execute(self, name: str, flow: Generator[Wish, Any, Any], wish: Execute) -> None:
        self.came.executions.append((name, wish.claim.cause, self.now - NOON))
        if name == self.killed:
            return
        ran = Ran(name)
        if self.fails:
            self.fails -= 1
            ran = Ran(error=ValueError("it fails"))
        self._beating.add(name)
        longest = self.policy.max_run or 0
        self._go_on(name, hold(wish.claim, self.policy, longest, lambda: None))
        self._at(self.now + self.body, lambda: self._ended(name, flow, ran))

    def _ended(self, name: str, flow: Generator[Wish, Any, Any], ran: Ran) -> None:
        self._beating.discard(name)
        self._go_on(name, flow, ran)

    def _park(self, name: str, flow: Generator[Wish, Any, Any], wish: Await) -> None:
        since, number = self.now, next(self._numbers)

        def wake() -> None:
            if self._waiting.pop(number, None) is not None:
                self._go_on(name, flow, self.now - since)

        self._waiting[number] = wake
        if not self.rules.waits(self.came.record, wish.holder, self.now):
            self._at(self.now, wake)
        if wish.timeout is not None:
            self._at(self.now + wish.timeout, wake)

    def _perform(self, command: Any) -> Any:
        before = self.came.record
        after, answer = self.rules.transition(before, command, self.now)
        self.came.record = after
        hint = self.rules.wakes(before, after, command, self.now)
        waiting = list(self._waiting.values())
        for wake in waiting if hint == "all" else waiting[:1] if hint == "one" else []:
            self._at(self.now, wake)
        return answer

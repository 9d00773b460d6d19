"""The real flows of guard.py in a random order, on a wire, a clock and a store that misbehave."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from simulator import ghost as truth
from simulator.explorer import RESOLVED, START, Explorer, World, aged
from simulator.rules import ADDRESS, IN_ALL, SO_FAR, Rules, caller, need
from simulator.scenes import COUNTED, LONG

from idemguard.claim import DAY, Command, Complete, Forget, Release, Resolve, Sweep, Withdraw
from idemguard.codec import Value
from idemguard.errors import (
    StoreError,
    StoreUnavailableError,
    UnknownOutcomeError,
    WaitTimeoutError,
)
from idemguard.guard import (
    Ask,
    Await,
    Execute,
    OutOfScope,
    Owe,
    Pause,
    Policy,
    Ran,
    Reply,
    Rest,
    Wish,
    call,
    hold,
)
from idemguard.record import Cause, Claim, Mode

ENOUGH = 40_000  # steps after which flows should have ended long ago
LEASE = 30


class Cancelled(BaseException):
    """The caller is not interested any more."""


@dataclass
class Task:
    """A flow, and where it stands."""

    name: str
    flow: Generator[Wish, Any, Any]
    policy: Policy
    beats_for: str | None = None  # the heartbeat of this call
    wish: Any = None
    since: int = 0  # when it wished so
    hinted: bool = False
    frozen: int = 0  # until then
    body: Ran | None = None  # what its body will have come to
    ends: int = 0  # when its body ends
    started: bool = False
    cancelled: bool = False
    awaited: bool = False
    holder: str | None = None  # whom it waits for
    patience: int = 0  # how long it has waited for this one


class Stage:
    """Some calls of one task, each driven by the real flows.

    Args:
        seed: of all chance.
        rules: the project's own, or a variant.
        counted: the store is never emptied and nobody is killed, so that every count must agree.

    """

    def __init__(self, seed: int, rules: Rules, *, counted: bool) -> None:
        self.chance = random.Random(seed)
        self.counted = counted
        self.explorer = Explorer(COUNTED if counted else LONG, rules)
        self.world: World = self.explorer.start()._replace(callers=(), now=START)
        self.tasks: list[Task] = []
        self.owed: list[tuple[Command, int]] = []
        self.down = 0  # until then the store does not answer
        self.steps = 0
        self.replies: dict[str, Reply] = {}
        self.booked: Counter[tuple[int, str, str]] = Counter()
        self.calls: Counter[str] = Counter()
        self.interrupted = 0  # calls that were, before their body

    def run(self, calls: int) -> int:
        """All calls to their end; the steps that it took."""
        begun = 0
        while self.tasks or begun < calls or self.owed:
            self.steps += 1
            need(self.steps < ENOUGH, "the flows do not end", self.tasks)
            if begun < calls and self.chance.random() < 0.15:
                self._begin(f"c{begun}")
                begun += 1
            self._outside()
            self._tell_owed()
            if self.tasks:
                self._step(self.chance.choice(self.tasks))
            self._pass(0 if self.chance.random() < 0.6 else self.chance.choice((1, 2, 5)))
            self.explorer.check(self.world)
        self._close()
        return self.steps

    # --- what happens outside of the calls -----------------------------------------------------------

    def _pass(self, time: int) -> None:
        self.world = aged(self.world._replace(now=self.world.now + time))

    def _outside(self) -> None:
        luck, now = self.chance.random(), self.world.now
        if luck < 0.004:
            self.down = now + self.chance.choice((1, 10, 60))
        elif luck < 0.008 and not truth.holders(self.world.record, now):
            operator = caller("op")
            orders = (
                Forget(ADDRESS, f"f{self.steps}"),
                Resolve(ADDRESS, f"r{self.steps}", operator, RESOLVED, 20),
                Sweep(ADDRESS),
            )
            self._perform(self.chance.choice(orders))
        elif luck < 0.0085 and not self.counted:
            now = max(now + 10, self.world.ghost.top + 1)
            emptied = self.world.ghost.emptied()
            self.world = self.world._replace(record=truth.Record(), ghost=emptied, now=now)

    def _tell_owed(self) -> None:
        if not self.owed or self.world.now < self.down or self.chance.random() < 0.7:
            return
        command, since = self.owed[0]
        if isinstance(command, (Complete, Release)):
            ago, claim = self.world.now - since, command.claim
            if claim.cause is Cause.UNGUARDED:
                claim = claim._replace(started=self.world.now - ago + claim.started)
            command = replace(command, claim=claim, ago=ago)
        self._perform(command)
        if self.chance.random() < 0.8:  # else its reply is lost, and it is told again
            self.owed.pop(0)

    def _perform(self, command: Command) -> Any:
        self.world, answer = self.explorer.send(self.world, command)
        for key, counts in self.explorer.entries.items():
            for name in counts:
                self.calls[name] += counts[name] * name.startswith("call_")
            self.booked.update(truth.booked({key: counts}))
        if self.explorer.hint is not None and self.chance.random() < 0.95:
            waiting = [t for t in self.tasks if isinstance(t.wish, Await) and not t.hinted]
            for task in waiting if self.explorer.hint == "all" else waiting[:1]:
                task.hinted = True
        return answer

    # --- calls -----------------------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        pick = self.chance.choice
        mode = Mode(pick(("enforce",) * 4 + ("observe", "bypass")))
        policy = Policy(
            ttl=pick((0, 25, 200)),
            lease=LEASE,
            max_run=200,
            wait_timeout=pick((None, 0, 20)),
            fall_back=pick((True, False)),
            rerun_lost=pick((True, True, False)),
            run_unguarded=pick((True, False)),
            mode=mode,
            observes=mode is Mode.OBSERVE,
            retention=DAY if self.counted else pick((DAY, 60)),
        )
        ask = Ask(ADDRESS, caller(name), name, policy)
        task = Task(name, call(ask, _encode, _declined), policy)
        self.tasks.append(task)
        self._go_on(task)

    def _go_on(self, task: Task, answer: Any = None, error: BaseException | None = None) -> None:
        try:
            task.wish = task.flow.throw(error) if error else task.flow.send(answer)
        except StopIteration as end:
            self.tasks.remove(task)
            if task.beats_for is None:
                self._over(task, end.value)
            return
        except Cancelled:
            need(task.cancelled, "cancelled by nobody", task)
            self._torn(task)
            return
        task.since, task.hinted = self.world.now, False
        if isinstance(task.wish, Await):
            need(task.policy.mode is Mode.ENFORCE, "9: observe or bypass waits", task)
            if task.wish.holder != task.holder:  # counted anew for a new leader
                task.holder, task.patience = task.wish.holder, 0
            need(task.wish.timeout > 0, "waits for no time", task.wish)
            limit, passed = task.policy.wait_timeout, task.patience
            if limit is not None and passed < limit:
                need(task.wish.timeout <= limit - passed, "waits longer than its patience", task)
            task.awaited = True
            waits = self.explorer.rules.waits
            task.hinted = not waits(self.world.record, task.wish.holder, self.world.now)
        elif isinstance(task.wish, Execute):
            self._execute(task, task.wish.claim)

    def _torn(self, task: Task) -> None:
        """A flow that was torn down: its driver gives back what it holds."""
        self._gone(task.name)
        self.interrupted += 1
        wish = task.wish
        if isinstance(wish, Execute) and wish.claim.cause is not Cause.UNGUARDED:
            leaving = Withdraw(ADDRESS, wish.claim.nonce, wish.claim.caller, "failed")
            self.owed.append((leaving, self.world.now))

    def _gone(self, name: str) -> None:
        self.tasks[:] = [t for t in self.tasks if name not in (t.name, t.beats_for)]

    def _execute(self, task: Task, claim: Claim) -> None:
        if claim.cause is Cause.FALLBACK:
            policy, leader = task.policy, dict(self.world.ghost.beside)[claim.nonce]
            need(policy.fall_back and policy.wait_timeout is not None, "2: fell back unasked", task)
            if policy.wait_timeout:
                waited_for = task.holder is not None and task.holder.partition("-")[2] == leader
                need(waited_for, "2: fell back beside another", task)
                need(task.patience >= policy.wait_timeout, "2: fell back before its time", task)
        took = self.chance.choice((0, 3, 12, 40, 90, 250))
        task.ends, task.started = self.world.now + took, True
        value, error = task.name, None
        match self.chance.randrange(8):
            case 0:
                error = ValueError("it fails")
            case 1:
                error = OutOfScope()
            case 2:
                error = UnknownOutcomeError("who knows")
            case 3:
                value = "declined"
        task.body = Ran(None if error else value, error, IN_ALL, took)
        run = self.world.ghost.run(claim)
        if run is not None:
            ghost = self.world.ghost.put(run._replace(fate="running"))
            self.world = self.world._replace(ghost=ghost)
        if claim.cause is not Cause.UNGUARDED:
            flow = hold(claim, task.policy, task.policy.max_run or 0, lambda: None)
            beat = Task(f"{task.name} beats", flow, task.policy, beats_for=task.name)
            self.tasks.append(beat)
            self._go_on(beat)

    def _step(self, task: Task) -> None:
        wish, now, luck = task.wish, self.world.now, self.chance.random()
        if now < task.frozen:
            return
        if luck < 0.01:
            task.frozen = now + self.chance.choice((5, 40, 100))
        elif luck < 0.014 and task.beats_for is None and not self.counted:
            self._gone(task.name)  # kill -9: the call and its heartbeat
        elif luck < 0.025 and task.beats_for is None:
            self._cancel(task, wish)
        elif isinstance(wish, Execute):
            if now >= task.ends:
                self._body_ended(task)
        elif isinstance(wish, Await):
            passed = now - task.since
            if task.hinted or passed >= wish.timeout:
                task.patience += passed
                self._go_on(task, passed)
        elif isinstance(wish, Pause):
            if now - task.since >= wish.time:
                self._go_on(task, SO_FAR)
        elif isinstance(wish, Rest):
            if now - task.since >= wish.time:
                self._go_on(task, now)
        elif isinstance(wish, Owe):
            self.owed.append((wish.command, now))
            self._go_on(task)
        else:
            self._command(task, wish)

    def _body_ended(self, task: Task) -> None:
        self.tasks[:] = [t for t in self.tasks if t.beats_for != task.name]
        self._go_on(task, task.body)

    def _cancel(self, task: Task, wish: Any) -> None:
        """Interrupted: a command is shielded, and raises when it is done; a body ends by it."""
        if task.cancelled:
            return
        task.cancelled = True
        if isinstance(wish, Execute):
            if task.body is not None and self.chance.random() < 0.9:
                task.body = replace(task.body, value=None, error=Cancelled())
                self._body_ended(task)
            elif wish.claim.cause is not Cause.UNGUARDED:  # before the body began
                run = self.world.ghost.run(wish.claim)
                if run is not None and not run.spent.reports:
                    task.started = False
                    self.tasks[:] = [t for t in self.tasks if t.beats_for != task.name]
                    self._go_on(task, error=Cancelled())
            return
        if isinstance(wish, Owe):
            return
        if isinstance(wish, Await):
            task.patience += self.world.now - task.since
        elif not isinstance(wish, Rest) and self.world.now >= self.down:
            self._perform(wish)
        self._go_on(task, error=Cancelled())

    def _command(self, task: Task, wish: Any) -> None:
        if self.world.now < self.down:
            self._go_on(task, error=StoreUnavailableError("down"))
            return
        luck = self.chance.random()
        if luck < 0.005:
            self._go_on(task, error=StoreError("it makes no sense"))
            return
        answer = self._perform(wish)
        if luck < 0.1:  # its reply is lost, and the client sends it again
            self._pass(self.chance.choice((0, 1, 35)))
            answer = self._perform(wish)
        if luck > 0.99:
            self._go_on(task, error=StoreUnavailableError("its reply is lost for good"))
        else:
            self._go_on(task, answer)

    # --- what a call must have come to -----------------------------------------------------------------

    def _over(self, task: Task, reply: Reply) -> None:
        self.replies[task.name] = reply
        policy, ran = task.policy, task.body if task.started else None
        if policy.mode is Mode.OBSERVE and not task.cancelled:
            need(ran is not None and reply.error is ran.error, "9: observe raises", reply)
        if ran is not None:
            need(
                reply.source not in ("reused", "refused"), "4: executed, and told otherwise", reply
            )
            need(reply.value == ran.value, "4: its result does not reach its caller", reply)
            need(task.cancelled or reply.error is ran.error, "4: another error", reply)
            return
        if reply.source == "reused":
            need(reply.result is not None and reply.error is None, "reused nothing", reply)
            need(policy.mode is Mode.ENFORCE, "9: reused, though it may not", reply)
            return
        error = reply.error
        need(error is not None, "neither executed nor refused", reply)
        if isinstance(error, WaitTimeoutError):
            waits = policy.wait_timeout is not None and not policy.fall_back
            need(waits, "timed out, though it may not", reply)
        elif isinstance(error, UnknownOutcomeError):
            need(not policy.rerun_lost, "unknown, though it does not mind", reply)
        elif isinstance(error, StoreUnavailableError):
            need(not policy.run_unguarded, "refused, though it runs unguarded", reply)
        else:
            need(isinstance(error, (StoreError, Cancelled)), "refused with what error?", reply)

    def _close(self) -> None:
        """Everything was told: the windows hold every execution and every call, once."""
        ghost = self.world.ghost
        if not ghost.counted:
            return
        due = ghost.account()
        wrong = {
            key: (self.booked[key], due[key])
            for key in {*self.booked, *due}
            if self.booked[key] != due[key] and key[2] not in ("call_failed", "call_refused")
        }
        need(not wrong, "the windows do not add up", wrong)
        if self.counted:
            told = Counter(f"call_{reply.source}" for reply in self.replies.values())
            told["call_failed"] += self.interrupted
            retries = self.calls["call_reused"] - told["call_reused"]
            need(retries >= 0, "a reuse is not counted", self.calls, told)
            told["call_reused"] += retries
            for counts in (told, self.calls):  # who is interrupted while it leaves may be either
                counts["call_failed"] += counts.pop("call_refused", 0)
            wrong_calls = {
                key: (self.calls[key], told[key])
                for key in {*self.calls, *told}
                if self.calls[key] != told[key]
            }
            need(not wrong_calls, "calls are not counted once", wrong_calls)


def _encode(value: Any) -> Value:
    return Value("json", f'"{value}"\n'.encode())


def _declined(value: Any) -> bool:
    return bool(value == "declined")


def flows(seed: int, rules: Rules, *, calls: int = 12, counted: bool = False) -> int:
    """Random runs of the real flows; the steps that were made.

    Raises:
        Broken: a promise.

    """
    return Stage(seed, rules, counted=counted).run(calls)

"""Every order in which callers, a clock, the wire and an operator can act on one record.

A caller here may do whatever a real one might, at any moment: more than the flows of guard.py
ever do. After every step the promises are checked against what really happened.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from simulator import ghost as truth
from simulator.ghost import Ghost, Run, holders, line_of, lives, owned, seen
from simulator.rules import ADDRESS, IN_ALL, LEASE, SO_FAR, UNPRICED, Rules, caller, need
from simulator.scenes import HAPPENINGS, Scene, Way

from idemguard.claim import (
    Answer,
    Begin,
    Claimed,
    Command,
    Complete,
    Conflict,
    Done,
    Ended,
    Forget,
    InFlight,
    Over,
    Release,
    Renew,
    Renewed,
    Replay,
    Resolve,
    Sweep,
    Unknown,
    Withdraw,
)
from idemguard.codec import Value
from idemguard.record import Cause, Claim, Mode, Record, Status
from idemguard.usage import NOTHING

START = 300_000 - LEASE - 2  # the first tick crosses into the next window
NOT_KEPT = Value("unstorable", b"")
RESOLVED = Value("json", b'"resolved"\n')
SPENT = {"ok": IN_ALL, "failed": IN_ALL, "declined": NOTHING, "lost": UNPRICED}
NEXT = {"failed": "retry", "declined": "declined", "lost": "lost"}
PROBE = "probe"


class Caller(NamedTuple):
    """Where somebody stands."""

    state: str = "idle"  # asking (no reply yet), waiting, over, claimed, running, ending, gone
    calls: int = 0  # begun so far
    nonce: str = ""
    claim: Claim | None = None
    since: int | None = None
    holder: str | None = None  # whom it waits for
    pending: Command | None = None  # its reply was lost
    owes: tuple[Command, ...] = ()  # what the store could not be told
    last: Command | None = None  # the wire may bring it again


class World(NamedTuple):
    """A state."""

    record: Record
    callers: tuple[Caller, ...]
    now: int
    ghost: Ghost
    budget: tuple[int, ...]


Then = Callable[[World, Answer], World]
Steps = Iterator[tuple[str, World]]


def value(nonce: str) -> Value:
    """The result of an execution."""
    return Value("json", f'"{nonce}"\n'.encode())


class Explorer:
    """One scene, driven by these rules."""

    def __init__(self, scene: Scene, rules: Rules) -> None:
        self.scene, self.rules = scene, rules
        self.commands = 0
        self.hint: str | None = None  # of the last command
        self.entries: Any = {}
        self._probed: set[tuple[Record, int]] = set()

    def start(self) -> World:
        budget = tuple(self.scene.budget.get(kind, 0) for kind in HAPPENINGS)
        callers = tuple(Caller() for _ in self.scene.ways)
        return World(Record(), callers, START, Ghost(), budget)

    # --- one command, and what must hold of any ------------------------------------------------------

    def send(self, world: World, command: Command) -> tuple[World, Answer]:
        """The command arrives; the record, what really happened, and the answer."""
        now, ghost = world.now, world.ghost
        before = seen(world.record, now)
        after, answer = self.rules.transition(world.record, command, now)
        self.commands += 1
        self._once(after, command, answer, now)
        self._keeps_promises(before, after, command, answer, now)
        self._hints(before, after, command, now)
        ghost = self._happened(before, after, command, answer, now, ghost)
        ghost = self._told(before, after, command, ghost)
        self._books(before, after, command, answer, now, world.ghost, ghost)
        return world._replace(record=after, ghost=ghost), answer

    def _once(self, after: Record, command: Command, answer: Answer, now: int) -> None:
        """A command that arrives twice at once does nothing more, and is answered alike."""
        twice, again = self.rules.transition(after, command, now)
        after = seen(after, now)
        if twice is not after:
            need(twice._replace(reused=after.reused) == after, "twice is not once", command)
        need(again == answer, "the second reply differs", command, answer, again)
        counts = truth.booked(self.rules.entries(after, twice, command, again, now))
        need(not any(counts.values()), "booked twice", command, counts)

    def _keeps_promises(
        self, before: Record, after: Record, command: Command, answer: Answer, now: int
    ) -> None:
        fresh = before.result is not None and now < before.result.until
        if fresh and after.result != before.result:
            need(isinstance(command, Forget), "1: a fresh result was replaced", command)
        need(after.token >= before.token, "3: the token fell", command)
        if after != before and not isinstance(command, Sweep):
            least = [now + command.retention, before.kept_until]
            least += [line.until for line in after.lines if line.status == "open"]
            least += [] if after.result is None else [after.result.gone]
            need(after.kept_until == max(least), "a record lives too short or too long", command)
        if isinstance(answer, Renewed):
            assert isinstance(command, Renew)
            ends, was = now + answer.left, line_of(before, command.claim)
            allowed = min(now + command.lease, command.claim.started + command.max_run)
            known = was is not None and was.until == ends
            need(known or ends == allowed, "renewed past its lease or max_run", command)
            owns = owned(before, command.claim)
            need(answer.owns == owns, "3: told wrongly whether its result will be kept", command)
        if isinstance(command, (Renew, Complete, Release, Withdraw)):
            self._leaves_others(before, after, command, answer)

    def _leaves_others(self, before: Record, after: Record, command: Any, answer: Answer) -> None:
        """A caller changes its own lines, and its own places, alone."""
        nonce = command.nonce if isinstance(command, Withdraw) else command.claim.nonce
        had = [line for line in before.lines if line.claim.nonce != nonce]
        has = [line for line in after.lines if line.claim.nonce != nonce]
        if len(before.lines) + 1 < _most(self.scene):
            need(had == has, "3: a foreign line changed", command)
        places = [place.partition("-")[2] for place in truth.places(before)]
        if nonce not in places and not truth.untouched(before):
            was = (before.leader, before.fallback, before.result, before.cause, before.settled)
            now_ = (after.leader, after.fallback, after.result, after.cause, after.settled)
            need(was == now_, "3: a stale caller changed its successor's state", command)
        if not (isinstance(answer, Ended) and answer.kept):
            foreign = {p for p in truth.places(before) if p.partition("-")[2] != nonce}
            left = {p for p in truth.places(after) if p.partition("-")[2] != nonce}
            need(foreign == left, "3: a foreign place changed", command)

    def _hints(self, before: Record, after: Record, command: Command, now: int) -> None:
        """Whoever waits is hinted at when it is worth while to ask again, and else left alone."""
        hint = self.hint = self.rules.wakes(before, after, command, now)
        kept = after.result is not None and after.result != before.result
        freed = before.fallback is not None and after.fallback is None
        if kept:
            need(hint == "all", "a kept result does not wake all", command)
        elif isinstance(command, Begin):
            need(hint is None, "a Begin wakes others", command)
        elif not holders(after, now):
            need(hint == "one", "5: an end that leaves nobody living does not wake one", command)
        else:
            need(hint == ("all" if freed else None), "a hint for nothing, or none", command, hint)

    # --- what really happened ------------------------------------------------------------------------

    def _happened(
        self,
        before: Record,
        after: Record,
        command: Command,
        answer: Answer,
        now: int,
        ghost: Ghost,
    ) -> Ghost:
        match command:
            case Begin():
                return self._begun(before, command, answer, now, ghost)
            case Renew(claim=claim, spent=spent):
                run = ghost.run(claim)
                if run is not None and run.told is None and spent.reports >= run.spent.reports:
                    ghost = ghost.put(run._replace(spent=spent))
            case Complete(claim=claim) | Release(claim=claim) if not truth.has_ended(before, claim):
                ghost = self._ended(before, after, command, answer, now, ghost)
            case Withdraw(nonce=nonce):
                ghost = self._withdrawn(before, after, nonce, ghost)
            case Forget(nonce=nonce) if before.ordered != nonce:
                need(after.result is None, "forget keeps the result", after)
                need(not truth.places(after), "forget keeps a claim", after)
                ghost = ghost._replace(why="forced")
            case Resolve() if not (before.result is not None and now < before.result.until):
                if before.ordered != command.nonce:
                    need(after.result is not None, "a resolved result is not kept", after)
                    need(not truth.places(after), "resolve keeps a claim", after)
                    top = max(ghost.top, after.token)
                    ghost = ghost._replace(why="expired", generation=None, used=top, top=top)
            case _:
                pass
        return ghost

    def _begun(self, before: Record, ask: Begin, answer: Answer, now: int, ghost: Ghost) -> Ghost:
        living, unsure = holders(before, now), truth.unsure(before, now)
        served = truth.serves(before.result, ask.since, now)
        other = before.digest is not None and before.digest != ask.digest
        enforce = ask.mode is Mode.ENFORCE
        match answer:
            case Claimed(claim=claim) if line_of(before, claim) is None:
                return self._claimed(before, ask, answer, now, ghost)
            case Claimed(claim=claim):
                line = line_of(before, claim)
                need(claim.nonce == ask.nonce, "3: somebody else's claim", answer)
                need(line is not None and line.status == "open", "a claim that is over", answer)
                need(not claim.holds or owned(before, claim), "a claim that it lost", answer)
            case Replay(result=result):
                need(enforce and served and not other, "1: a result for the wrong call", ask)
                need(result == before.result, "1: not the result that is kept", answer)
            case InFlight(holder=holder, left=left):
                need(enforce and living and not other, "told to wait for nobody", answer)
                need(holder == living[0].claim, "told to wait for another", answer)
                need(left == living[0].until - now, "told a wrong rest of the lease", answer)
                since = now if ask.since is None else ask.since
                need(answer.since == since, "told another moment", answer)
            case Unknown(lost=claim):
                need(enforce and not ask.rerun_lost and unsure, "nothing is unknown", answer)
                need(not living and not served, "unknown, though there is somebody", answer)
                line = line_of(before, claim)
                need(line is not None and truth.told(line, now) == "lost", "was not lost", answer)
            case Conflict():
                begun = living or served or before.generation is not None
                need(enforce and other and begun, "there is no conflict", ask)
            case Over():
                over = [
                    run.told is not None
                    or run.told_lost
                    or (run.claim.holds and not owned(before, run.claim))
                    for run in ghost.of(ask.nonce)
                ]
                need(ask.nonce in ghost.left or any(over), "over, though it is not", ask)
        return ghost

    def _claimed(
        self, before: Record, ask: Begin, answer: Claimed, now: int, ghost: Ghost
    ) -> Ghost:
        claim, living = answer.claim, holders(before, now)
        served = truth.serves(before.result, ask.since, now)
        need(claim.nonce == ask.nonce, "3: a claim under another nonce", answer)
        need(claim.nonce not in ghost.left, "a claim for a caller that has left", ask)
        need(claim.started == now and claim.caller == ask.caller, "a wrong start", answer)
        if ask.mode is Mode.BYPASS:
            want = "forced"
        elif living or served:
            want = "observed" if ask.mode is Mode.OBSERVE else "fallback"
        else:
            want = "lost" if truth.places(before) else ghost.why
            ghost = ghost._replace(why=want)
        need(claim.cause == want, f"2: the cause is {claim.cause}, not {want}", ask)
        holds = ask.mode is not Mode.BYPASS and want != "observed"
        need(claim.holds == holds, "1: holds, or does not, against its mode", answer)
        if not self.scene.same_ms:
            need(claim.token > ghost.top, "3: a token came back", ask)
        need(claim.token >= now, "3: a token behind the clock", ask)
        if want == "fallback":
            need(not served, "1: a fallback beside a result", ask)
            need(len(living) == 1, "1: a fallback beside a fallback", ask)
            need(ask.beside == living[0].claim.id, "2: beside a leader it did not wait for", ask)
            need(
                before.digest is None or before.digest == ask.digest, "beside another payload", ask
            )
            pair = (claim.nonce, living[0].claim.nonce)
            ghost = ghost._replace(beside=(*ghost.beside, pair))
        need(claim.generation > ghost.used, "an idempotency key came back after its result", ask)
        if holds:
            need(ghost.generation in (None, claim.generation), "the idempotency key changed", ask)
            ghost = ghost._replace(generation=claim.generation)
        if want == "observed":
            conflict = before.digest is not None and before.digest != ask.digest
            need(answer.conflict == conflict, "an observed conflict is not told", answer)
        ghost = ghost.put(Run(claim))
        return ghost._replace(top=max(ghost.top, claim.token))

    def _ended(
        self,
        before: Record,
        after: Record,
        command: Complete | Release,
        answer: Answer,
        now: int,
        ghost: Ghost,
    ) -> Ghost:
        assert isinstance(answer, Ended)
        claim, owns = command.claim, owned(before, command.claim)
        line = line_of(before, claim)
        lost = line.status == "lost" if line else claim.holds and not truth.adopts(before, claim)
        fate = "ok" if isinstance(command, Complete) else str(command.status)
        want = "late" if lost and fate != "lost" else fate
        told = line_of(after, claim)
        need(told is not None and told.status == want, f"the end is not told {want}", command, told)
        assert told is not None
        need(
            answer.lost == (want == "late"), "its caller is told otherwise than the ledger", answer
        )
        keeps = owns and isinstance(command, Complete)
        need(answer.kept == keeps == told.kept, "1: an owner's result is not kept, or another's is")
        ended = max(now - command.ago, claim.started)
        need(told.ended == ended, "the wrong end", command, told)
        if keeps:
            assert isinstance(command, Complete)
            result = after.result
            need(result is not None and result.value == command.value, "1: the value is not there")
            assert result is not None
            until, gone = now + command.ttl, now + max(command.ttl, command.lease)
            need(
                (result.at, result.until, result.gone) == (now, until, gone), "wrong times", result
            )
            need(not truth.places(after), "1: a claim beside a new result", after)
            ghost = ghost._replace(why="expired", generation=None, used=ghost.top)
        elif owns:
            ghost = ghost._replace(why=NEXT[fate])
        run = ghost.run(claim) or Run(claim)
        spent = command.spent if command.spent.reports >= run.spent.reports else run.spent
        return ghost.put(
            run._replace(
                fate=fate,
                told=now,
                spent=spent,
                kept=keeps,
                told_lost=run.told_lost or fate == "lost",
            )
        )

    def _withdrawn(self, before: Record, after: Record, nonce: str, ghost: Ghost) -> Ghost:
        gone = [run for run in ghost.of(nonce) if run.told is None]
        need(nonce in after.leavers, "a leaver is not remembered", nonce)
        for run in gone:
            need(line_of(after, run.claim) is None, "an execution that never started", run)
            need(run.claim.id not in truth.places(after), "a place for nobody", run)
            # the fallback of a leader that left leads, and keeps its claim
            runs = tuple(other for other in ghost.runs if other is not run)
            ghost = ghost._replace(runs=runs, unstarted=ghost.unstarted + run.told_lost)
        return ghost.leave(nonce)

    def _told(self, before: Record, after: Record, command: Command, ghost: Ghost) -> Ghost:
        """What was made final as lost, and which lines were dropped."""
        for line in after.lines:
            run = ghost.run(line.claim)
            if run is None:
                continue
            lost = run.told_lost or line.status == "lost"
            back = run.erased and line_of(before, line.claim) is None  # it is told anew
            if lost != run.told_lost or back:
                ghost = ghost.put(run._replace(told_lost=lost, erased=run.erased and not back))
            if back:
                ghost = ghost._replace(counted=False)
        for line in before.lines:
            run = ghost.run(line.claim)
            if run is not None and line_of(after, line.claim) is None:
                need(len(before.lines) + 1 > _most(self.scene), "a line is gone", command, line)
                need(truth.droppable(before, line), "an open or unknown line was dropped", line)
                need(line.claim.caller.worker in after.workers, "its worker is forgotten", line)
                ghost = ghost.put(run._replace(erased=True))
        return ghost

    def _books(
        self,
        before: Record,
        after: Record,
        command: Command,
        answer: Answer,
        now: int,
        was: Ghost,
        is_: Ghost,
    ) -> None:
        """What the windows are told is the difference between two accounts of what happened."""
        self.entries = self.rules.entries(before, after, command, answer, now)
        if not is_.counted:
            return
        counts = truth.booked(self.entries)
        if isinstance(command, Withdraw) and command.outcome is not None:
            key = (truth.window(now), command.caller.agent or "", f"call_{command.outcome}")
            counts[key] -= command.nonce not in was.left
        due = is_.account()
        due.subtract(was.account())
        wrong = {k: (counts[k], due[k]) for k in {*counts, *due} if counts[k] != due[k]}
        need(not wrong, "the windows are told otherwise", command, wrong)

    # --- the steps -----------------------------------------------------------------------------------

    def steps(self, world: World) -> Steps:
        """All that may happen next, and the world after it."""
        for number in range(len(world.callers)):
            yield from self._caller_steps(world, number)
        yield from self._world_steps(world)

    def _caller_steps(self, world: World, number: int) -> Steps:
        me, way = world.callers[number], self.scene.ways[number]
        match me.state:
            case "idle":
                if not self._arrives_later(world, number):
                    nonce = f"{number}.{me.calls}"
                    begun = _put(world, number, nonce=nonce, calls=me.calls + 1)
                    ask = _begin(way, number, nonce)
                    yield from self._ask(begun, number, ask, self._answered(number), "begins")
                    yield from self._away(begun, number)
            case "waiting":
                ask = _begin(way, number, me.nonce, me.since)
                then = self._answered(number)
                yield from self._ask(world, number, ask, then, "begins again")
                if way.fallback:
                    ask = replace(ask, beside=me.holder)
                    yield from self._ask(world, number, ask, then, "lost patience")
                yield from self._leave(world, number)
                yield from self._away(world, number)
            case "asking":
                assert me.pending is not None
                then = self._answered(number)
                yield from self._ask(world, number, me.pending, then, "asks again")
                yield from self._leave(world, number)
                yield from self._crash(world, number)
                yield from self._away(world, number)
            case "over":
                yield from self._asks_anew(world, number)
            case "claimed":
                yield f"{number} starts", self._started(world, number)
                yield from self._leave(world, number)
                yield from self._crash(world, number)
            case "running":
                yield from self._end(world, number)
                yield from self._crash(world, number)
            case "ending":
                assert me.pending is not None
                then = self._gone(number)
                yield from self._ask(world, number, me.pending, then, "ends again")
                yield from self._crash(world, number)
            case "owing":
                first, *rest = me.owes
                then = self._gone(number) if not rest else _still_owing(number, tuple(rest))
                yield from self._ask(world, number, first, then, "tells what it owes")
                yield from self._crash(world, number)
        if me.last is not None and (again := _spend(world, "again")):
            yield f"{number}'s last command comes again", self.send(again, me.last)[0]

    def _asks_anew(self, world: World, number: int) -> Steps:
        """Its claim is gone: leave that one alone, and ask under a new nonce."""
        me, way = world.callers[number], self.scene.ways[number]
        leaving = Withdraw(ADDRESS, me.nonce, caller(str(number)), None, way.retention)
        left, _ = self.send(world, leaving)
        nonce = f"{me.nonce}'"
        left = _put(left, number, nonce=nonce)
        ask = _begin(way, number, nonce, me.since)
        then = self._answered(number)
        yield from self._ask(left, number, ask, then, "asks under a new nonce")

    def _arrives_later(self, world: World, number: int) -> bool:
        """Callers of one policy are alike: they arrive in order."""
        way, ways = self.scene.ways[number], self.scene.ways
        earlier = [c for c, w in zip(world.callers[:number], ways, strict=False) if w == way]
        return world.callers[number].calls == 0 and any(c.calls == 0 for c in earlier)

    def _ask(self, world: World, number: int, command: Command, then: Then, label: str) -> Steps:
        """Send a command; its reply arrives, or is lost on the way."""
        sent, answer = self.send(world, command)
        sent = _put(sent, number, last=command if _left(world, "again") else None)
        yield f"{number} {label}", then(sent, answer)
        if lost := _spend(sent, "lost"):
            if world.callers[number].owes:
                yield f"{number} {label} (reply lost)", lost
                return
            state = "asking" if isinstance(command, Begin) else "ending"
            yield f"{number} {label} (reply lost)", _put(lost, number, state=state, pending=command)

    def _answered(self, number: int) -> Then:
        def then(world: World, answer: Answer) -> World:
            match answer:
                case Claimed(claim=claim):
                    return _put(world, number, state="claimed", claim=claim, pending=None)
                case InFlight(holder=holder, since=since):
                    waits = {"state": "waiting", "since": since, "holder": holder.id}
                    return _put(world, number, pending=None, **waits)
                case Over():
                    return _put(world, number, state="over", pending=None)
            return self._gone(number)(world, answer)

        return then

    def _gone(self, number: int) -> Then:
        def then(world: World, answer: Answer | None) -> World:
            me, way = world.callers[number], self.scene.ways[number]
            state = "idle" if me.calls < way.calls else "gone"
            return _put(
                world, number,
                state=state, nonce="", claim=None, since=None, holder=None, pending=None, owes=(),
            )  # fmt: skip

        return then

    def _started(self, world: World, number: int) -> World:
        claim = world.callers[number].claim
        assert claim is not None
        run = world.ghost.run(claim)
        if run is not None:
            world = world._replace(ghost=world.ghost.put(run._replace(fate="running")))
        return _put(world, number, state="running")

    def _end(self, world: World, number: int) -> Steps:
        me, way = world.callers[number], self.scene.ways[number]
        claim = me.claim
        assert claim is not None
        for end in self.scene.ends:
            command: Complete | Release
            if end == "ok":
                kept = value(me.nonce) if claim.holds else NOT_KEPT
                command = Complete(claim, kept, way.ttl, LEASE, SPENT[end], way.retention)
            else:
                command = Release(claim, Status(end), SPENT[end], way.retention)
            if claim.cause is Cause.UNGUARDED:  # told when the store is back, with its own times
                then = claim._replace(started=world.now - 4)
                owed = (*me.owes, replace(command, claim=then, ago=1))
                yield f"{number} {end}, unguarded", _put(world, number, state="owing", owes=owed)
                continue
            yield from self._ask(world, number, command, self._gone(number), end)

    def _away(self, world: World, number: int) -> Steps:
        """The store does not answer: execute without it, and tell it later."""
        if away := _spend(world, "away"):
            me, way = world.callers[number], self.scene.ways[number]
            who = caller(str(number))
            nonce = f"{number}.{me.calls}.u"
            claim = Claim(ADDRESS, 0, nonce, Cause.UNGUARDED, 0, 0, holds=False, caller=who)
            leaving = Withdraw(ADDRESS, me.nonce, who, None, way.retention)
            change = {"state": "running", "claim": claim, "owes": (leaving,), "pending": None}
            yield f"{number} goes unguarded", _put(away, number, **change)

    def _leave(self, world: World, number: int) -> Steps:
        if left := _spend(world, "leave"):
            me, way = world.callers[number], self.scene.ways[number]
            who = caller(str(number))
            sent, answer = self.send(
                left, Withdraw(ADDRESS, me.nonce, who, "failed", way.retention)
            )
            yield f"{number} leaves", self._gone(number)(sent, answer)

    def _crash(self, world: World, number: int) -> Steps:
        if down := _spend(world, "crash"):
            yield f"{number} crashes", self._gone(number)(down, None)

    def _world_steps(self, world: World) -> Steps:
        yield from self._ticks(world)
        if flush := _spend(world, "flush"):
            # tokens run ahead of the clock by one a claim
            later = max(world.now + LEASE, world.ghost.top + 1)
            now = world.now if self.scene.same_ms else later
            yield "emptied", flush._replace(record=Record(), now=now, ghost=world.ghost.emptied())
        budget = dict(zip(HAPPENINGS, world.budget, strict=True))
        operator = caller("op")
        forget = Forget(ADDRESS, f"f{budget['forget']}")
        resolve = Resolve(ADDRESS, f"r{budget['resolve']}", operator, RESOLVED, 2 * LEASE)
        for kind, order in (("forget", forget), ("resolve", resolve), ("sweep", Sweep(ADDRESS))):
            if spent := _spend(world, kind):
                yield kind, self.send(spent, order)[0]
        ordered = seen(world.record, world.now).ordered
        if ordered is not None and (again := _spend(world, "again")):
            same = (
                replace(forget, nonce=ordered)
                if ordered.startswith("f")
                else replace(resolve, nonce=ordered)
            )
            sent, answer = self.send(again, same)
            need(sent.record == seen(again.record, world.now), "an order acts again", same)
            need(isinstance(answer, Done), "an order is answered otherwise", answer)
            yield "the last order comes again", sent

    def _ticks(self, world: World) -> Steps:
        """A lease passes, and any of those who execute renew just before its end."""
        if not (tick := _spend(world, "tick")):
            return
        callers, ways = world.callers, self.scene.ways
        running = [
            number
            for number, c in enumerate(callers)
            if c.state in ("running", "claimed") and c.claim and c.claim.cause != "unguarded"
        ]
        for chosen in range(2 ** len(running)):
            beats = [number for bit, number in enumerate(running) if chosen >> bit & 1]
            later = tick._replace(now=world.now + LEASE - 1)
            for number in beats:
                claim, way = callers[number].claim, ways[number]
                assert claim is not None
                spent = SO_FAR if callers[number].state == "running" else NOTHING
                renewal = Renew(claim, LEASE, way.max_run, spent, way.retention)
                later, _ = self.send(aged(later), renewal)
            yield f"a lease passes, {beats} renew", aged(later._replace(now=world.now + LEASE))

    # --- what must hold in every state ---------------------------------------------------------------

    def check(self, world: World) -> None:
        """Demand all promises of a state."""
        record, ghost, now = seen(world.record, world.now), world.ghost, world.now
        live = [
            line
            for line in record.lines
            if line.claim.holds and line.claim.token > record.settled and lives(line, now)
        ]
        leading = sum(line.claim.cause != "fallback" for line in live)
        need(leading <= 1 and len(live) <= 2, "1: two leaders, or two fallbacks", live)
        self._check_lines(record, ghost)
        self._check_causes(record, ghost, now)
        for leader in {of for _, of in ghost.beside}:
            beside = [n for n, of in ghost.beside if of == leader]
            lines = [line for line in record.lines if line.claim.nonce in beside]
            there = sum(lives(line, now) or line.status == "ok" for line in lines)
            need(there <= 1, "1: two fallbacks beside one leader", leader)
        for me, way in zip(world.callers, self.scene.ways, strict=False):
            self._check_waiter(record, me, way, now)
        if (record, now) not in self._probed:
            self._probed.add((record, now))
            self._probe(record, now)

    def _check_lines(self, record: Record, ghost: Ghost) -> None:
        for run in ghost.runs:
            line = line_of(record, run.claim)
            if run.erased:
                need(line is None, "a line came back", run)
                continue
            need(line is not None, "2: an execution without a line", run)
            assert line is not None
            need(line.claim.cause == run.claim.cause, "2: the wrong cause", line, run)
            fates = {"claimed": ("open", "lost"), "running": ("open", "lost"), "lost": ("lost",)}
            allowed = fates.get(run.fate, (run.fate, "late"))
            need(line.status in allowed, f"2: told {line.status}, was {run.fate}", line)
            need((line.ended is None) == (run.told is None), "an end is not told", line)
            need(line.spent == run.spent, "what was spent is lost", line, run)
            need(line.kept == run.kept, "kept, or not, against the ledger", line)
        ids = [line.claim.id for line in record.lines]
        need(len(ids) == len(set(ids)), "two lines of one execution", ids)
        need(len(ids) <= _most(self.scene) + len(truth.places(record)), "too many lines", ids)
        if ghost.counted:
            need(record.runs == len(ghost.runs), "the runs are not the executions", record)
        elif not self.scene.few_lines:
            need(record.runs == len(record.lines), "the runs are not the lines", record)

    def _check_causes(self, record: Record, ghost: Ghost, now: int) -> None:
        if not ghost.counted:
            return
        causes = Counter(str(run.claim.cause) for run in ghost.runs)
        lost = ghost.unstarted + sum(
            run.told_lost or truth.told(line, now) == "lost"
            for run in ghost.runs
            if run.claim.holds and (line := line_of(record, run.claim)) is not None
        )
        need(causes["first"] <= 1, "2: two firsts", causes)
        if not self.scene.few_lines:
            need(causes["lost"] <= lost, "2: a rerun with nothing lost", causes)
        ways = self.scene.ways
        need(any(way.fallback for way in ways) or not causes["fallback"], "2: a fallback", causes)
        observe = any(way.mode is Mode.OBSERVE for way in ways)
        need(observe or not causes["observed"], "2: observed", causes)
        need(self.scene.budget.get("away") or not causes["unguarded"], "2: unguarded", causes)

    def _check_waiter(self, record: Record, me: Caller, way: Way, now: int) -> None:
        """A waiter gets what it waited for, while it is there."""
        if me.state != "waiting" or record.result is None or me.since is None:
            return
        came_late = any(line.claim.nonce == me.nonce for line in record.lines)
        if came_late or me.since > record.result.at or me.nonce in record.leavers:
            return
        ask = replace(_begin(way, 0, me.nonce, me.since), digest=record.digest)
        _, answer = self.rules.transition(record, ask, now)
        need(isinstance(answer, Replay), "a waiter does not get what it waited for", answer)

    def _probe(self, record: Record, now: int) -> None:
        """Whatever the state, a newcomer is never stuck, and never doubles a living leader."""

        def ask(record: Record, **given: Any) -> Answer:
            probe = Begin(ADDRESS, PROBE, caller(PROBE), LEASE, **given)
            return self.rules.transition(record, probe, now)[1]

        for mode in (Mode.OBSERVE, Mode.BYPASS):
            answer = ask(record, mode=mode, rerun_lost=False)
            need(isinstance(answer, Claimed), "9: observe or bypass was held back", answer)
        living = holders(record, now)
        fresh = truth.serves(record.result, None, now)
        unsure = truth.unsure(record, now)
        for rerun in (True, False):
            answer = ask(record, rerun_lost=rerun, digest=record.digest)
            if living or fresh:
                want: type = Replay if fresh else InFlight
                need(isinstance(answer, want), "2: a living leader was doubled", answer)
                other = ask(record, rerun_lost=rerun, digest="another")
                if record.digest is not None:
                    need(isinstance(other, Conflict), "another payload slips in", other)
                continue
            if record.digest is not None and record.generation is not None:
                other = ask(record, rerun_lost=True, digest="another")
                need(isinstance(other, Conflict), "two payloads under one key downstream", other)
            want = Unknown if unsure and not rerun else Claimed
            need(isinstance(answer, want), f"stuck: {answer} instead of {want.__name__}", record)
            if isinstance(answer, Unknown):
                self._probe_orders(record, now, ask)
        self._probe_parking(record, living, now, ask)
        for line in record.lines:
            if line.ended is not None:  # a beat that comes after the end
                renewal = Renew(line.claim, LEASE, 10**9, IN_ALL)
                after, answer = self.rules.transition(record, renewal, now)
                need(after == record, "a renewal changes what has ended", line)
                need(isinstance(answer, Over), "what has ended is renewed", line)
                leaving = Withdraw(ADDRESS, line.claim.nonce, line.claim.caller, "failed")
                after, _ = self.rules.transition(record, leaving, now)
                need(line in after.lines, "an execution that has ended was none", line)

    def _probe_orders(self, record: Record, now: int, ask: Callable[..., Answer]) -> None:
        order: Command = Forget(ADDRESS, "order")
        answer = ask(self.rules.transition(record, order, now)[0], rerun_lost=False)
        forced = isinstance(answer, Claimed) and answer.claim.cause == "forced"
        need(forced, "unknown for ever: forget does not help", answer)
        order = Resolve(ADDRESS, "order", caller("op"), RESOLVED, LEASE)
        known, _ = self.rules.transition(record, order, now)
        answer = ask(known, rerun_lost=False, digest=record.digest)
        need(isinstance(answer, Replay), "unknown for ever: resolve does not help", answer)
        later = now + LEASE  # that result is over, and still nothing is unknown
        probe = Begin(ADDRESS, PROBE, caller(PROBE), LEASE, rerun_lost=False, digest=record.digest)
        answer = self.rules.transition(known, probe, later)[1]
        claimed = isinstance(answer, Claimed) and answer.claim.cause == "expired"
        need(claimed, "unknown again after resolve", answer)

    def _probe_parking(
        self, record: Record, living: list[Any], now: int, ask: Callable[..., Answer]
    ) -> None:
        """Who would be told to wait for somebody waits for them, and nobody else does."""
        answer = ask(record, digest=record.digest)
        holder = answer.holder.id if isinstance(answer, InFlight) else None
        ids = {line.claim.id for line in record.lines} | {"nobody"}
        for one in ids:
            waits = self.rules.waits(record, one, now)
            need(waits == (one == holder), "waits for nothing, or does not wait", one, answer)
        idle = not living and not isinstance(answer, Replay)
        need(self.rules.waits(record, None, now) == idle, "does not wait for a first", answer)


def _begin(way: Way, number: int, nonce: str, since: int | None = None) -> Begin:
    return Begin(
        ADDRESS, nonce, caller(str(number)), LEASE, way.digest, way.mode, way.rerun, since,
        retention=way.retention,
    )  # fmt: skip


def _most(scene: Scene) -> int:
    return 3 if scene.few_lines else 64


def _put(world: World, number: int, **change: Any) -> World:
    callers = list(world.callers)
    callers[number] = callers[number]._replace(**change)
    return world._replace(callers=tuple(callers))


def _still_owing(number: int, rest: tuple[Command, ...]) -> Then:
    return lambda world, answer: _put(world, number, owes=rest)


def _left(world: World, kind: str) -> int:
    return world.budget[HAPPENINGS.index(kind)]


def _spend(world: World, kind: str) -> World | None:
    if not _left(world, kind):
        return None
    budget = list(world.budget)
    budget[HAPPENINGS.index(kind)] -= 1
    return world._replace(budget=tuple(budget))


def aged(world: World) -> World:
    """Time took the whole record: as if the store were emptied. The rules must see so themselves."""
    until = world.record.kept_until
    if until and until <= world.now:
        return world._replace(ghost=world.ghost.emptied())
    return world


# --- exploring ---------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What an exploration came to."""

    states: int
    commands: int
    all: bool  # there are no more states
    broken: tuple[str, ...] | None = None  # what, and by which steps


def explore(scene: Scene, rules: Rules, limit: int) -> Found:
    """The states of a scene, the nearest first, up to a limit; ends at the first broken promise."""
    explorer = Explorer(scene, rules)
    first = explorer.start()
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    queue = deque([first])
    while queue and len(came_from) < limit:
        world = queue.popleft()
        label = ""
        try:
            for label, after in explorer.steps(world):
                if after not in came_from:
                    came_from[after] = (world, label)
                    explorer.check(after)
                    queue.append(after)
        except Exception as error:  # noqa: BLE001 - faulty rules may fail in any way
            path = (*_path(came_from, world), f"after {label!r}", repr(error))
            return Found(len(came_from), explorer.commands, False, path)
    return Found(len(came_from), explorer.commands, not queue)


def _path(came_from: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    labels = []
    while (step := came_from[world]) is not None:
        world, label = step
        labels.append(label)
    return labels[::-1]


def wander(seed: int, scene: Scene, length: int, rules: Rules) -> int:
    """One long random run; the steps that it made.

    Raises:
        Broken: a promise.

    """
    chance, explorer = random.Random(seed), Explorer(scene, rules)
    world = explorer.start()
    for step in range(length):
        options = list(explorer.steps(world))
        if not options:
            return step
        _, world = chance.choice(options)
        explorer.check(world)
    return length

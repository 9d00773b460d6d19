"""Deliberate faults in the rules: each is a passage of the source, and what stands there instead."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from simulator.crowd import Crowd
from simulator.explorer import explore, wander
from simulator.flows import flows
from simulator.rules import Broken, Rules
from simulator.scenes import LONG, SCENES
from simulator.variants import FEW_LINES, Edit, variant

from idemguard.guard import Policy

LIMITS = (400, 2_500)  # states a scene; most faults lie near
NAMED = 12_000  # of the scene that is said to show it


class Fault(NamedTuple):
    """What is wrong, and how it is made."""

    name: str
    edits: tuple[Edit, ...]


def _claim(name: str, old: str, new: str) -> Fault:
    return Fault(name, (Edit("claim.py", old, new),))


def _record(name: str, old: str, new: str) -> Fault:
    return Fault(name, (Edit("record.py", old, new),))


def _windows(name: str, old: str, new: str) -> Fault:
    return Fault(name, (Edit("windows.py", old, new),))


TOKEN = "    token = max(record.token + 1, now)\n    generation = record.generation\n"
SERVES = "now < result.until or (since is not None and since <= result.at)"
AGES = "    before = aged(record, now)\n"

FAULTS = (
    # --- tokens and nonces ---
    _record(
        "the token alone owns, without the nonce",
        "return claim.holds and claim.id in (self.leader, self.fallback)",
        "places = [p and p.partition('-')[0] for p in (self.leader, self.fallback)]\n"
        "        return claim.holds and str(claim.token) in places",
    ),
    _claim("tokens count from the record alone", TOKEN, TOKEN.replace("max(record.token + 1, now)", "record.token + 1")),
    _claim("the clock alone makes tokens", TOKEN, TOKEN.replace("max(record.token + 1, now)", "now")),
    _claim(
        "a Begin that comes twice claims twice",
        "    if mine := next((line for line in record.lines if line.claim.nonce == ask.nonce), None):",
        "    if mine := None:",
    ),
    _claim(
        "a Begin whose claim was lost is told that it holds",
        "    if mine.status is not Status.OPEN or (claim.holds and not record.owns(claim)):\n",
        "    if False:\n",
    ),
    _claim(
        "a Begin that comes after its Withdraw claims",
        "    if ask.nonce in record.leavers:\n        return record, Over()\n",
        "",
    ),
    _claim("a leaver is not remembered", "(*record.leavers, ask.nonce)[-LEAVERS:]", "record.leavers"),
    # --- a stale holder ---
    _claim(
        "a foreign release frees the place",
        "        if record.owns(ask.claim):\n            record = _vacate(",
        "        if record.leader:\n            record = record._replace(leader=None)\n            record = _vacate(",
    ),
    _claim(
        "a late completion replaces the kept result",
        "        owns = record.owns(ask.claim)\n        line = _ended(",
        "        owns = ask.claim.holds\n        line = _ended(",
    ),
    _claim(
        "an execution without the claim keeps its result",
        "        owns = record.owns(ask.claim)\n        line = _ended(",
        "        owns = record.owns(ask.claim) or not ask.claim.holds\n        line = _ended(",
    ),
    _claim(
        "a renewal takes a lost claim back from its successor",
        "    if line.status is Status.LOST or until <= now:\n",
        "    if line.status is Status.LOST:\n"
        "        return record._replace(leader=ask.claim.id), Renewed(ask.lease, True)\n"
        "    if until <= now:\n",
    ),
    _claim("a renewal knows no max_run", "min(now + ask.lease, ask.claim.started + ask.max_run)", "now + ask.lease"),
    _claim("a renewal shortens the lease", "line._replace(until=max(line.until, until))", "line._replace(until=until - 1)"),
    _claim(
        "a renewal says that its result will be kept, always",
        "Renewed(line.until - now, record.owns(ask.claim))",
        "Renewed(line.until - now, True)",
    ),
    _claim(
        "a repeated Complete is told that nothing was kept",
        "            record = _keep(record, result)\n    return record, Ended(line.kept,",
        "            record = _keep(record, result)\n    return record, Ended(record.leader is None and line.ended == now,",
    ),
    # --- fallbacks ---
    _claim("two fallbacks beside one leader", "len(living) == 1 and holder.claim.id == ask.beside", "holder.claim.id == ask.beside"),
    _claim("a fallback beside a leader that it did not wait for", "holder.claim.id == ask.beside", "ask.beside"),
    _claim(
        "a fallback beside anybody, unasked",
        "len(living) == 1 and holder.claim.id == ask.beside",
        "len(living) == 1 and ask.since is not None",
    ),
    _claim("the fallback falls with its leader", "leader=record.fallback, fallback=None)", "leader=None, fallback=None)"),
    _claim(
        "the place of a dead fallback stays taken",
        "        if record.owns(line.claim) and not line.lives(now):\n",
        "        if line.claim.id == record.leader and not line.lives(now):\n",
    ),
    # --- orders ---
    _claim(
        "forget leaves nothing behind",
        "        record = _tell_lost(record, now)._replace(\n            result=None,",
        "        record = Record()._replace(\n            result=None,",
    ),
    _claim(
        "forget keeps the claim",
        "            result=None,\n            leader=None,\n            fallback=None,\n            cause=Cause.FORCED",
        "            result=None,\n            cause=Cause.FORCED",
    ),
    _claim("a repeated Forget forgets again", "    if record.ordered != ask.nonce:\n", "    if True:\n"),
    _claim(
        "a repeated Resolve resolves again",
        "    if record.ordered == ask.nonce:\n        return record, Done()\n",
        "",
    ),
    _claim(
        "resolve replaces a fresh result",
        "    if record.result is not None and now < record.result.until:\n"
        "        return record, Replay(record.result, record.runs)\n",
        "",
    ),
    _claim(
        "unknown for ever: a result does not settle",
        "        generation=None,\n        settled=record.token,\n",
        "        generation=None,\n",
    ),
    _claim(
        "unknown for ever: forget does not settle",
        "            settled=record.token,\n            ordered=ask.nonce,\n",
        "            ordered=ask.nonce,\n",
    ),
    _claim("a run after forget is told a retry", "cause=Cause.FORCED,\n            digest", "cause=Cause.RETRY,\n            digest"),
    # --- an emptied store, and age ---
    _claim(
        "a completion after the store was emptied is dropped",
        "    leads = claim.holds and virgin and",
        "    leads = False and",
    ),
    _claim(
        "a completion after the store was emptied overtakes a successor",
        "    leads = claim.holds and virgin and",
        "    leads = claim.holds and record.result is None and",
    ),
    _claim("a completion after forget is taken up", "    virgin = record.cause is Cause.FIRST and record", "    virgin = record.result is None and record"),
    _claim(
        "an execution without the claim takes it up",
        "    leads = claim.holds and virgin and",
        "    leads = virgin and",
    ),
    _claim("a record never ages", AGES, "    before = record\n"),
    _claim(
        "a result outlives its record's time",
        "    if record.result is not None and record.result.gone <= now:\n",
        "    if False:\n",
    ),
    _claim("a result is gone before it is over", "record.result.gone <= now", "record.result.at < now"),
    _claim(
        "a record ages while somebody executes",
        "    last += [line.until for line in record.lines if line.status is Status.OPEN]\n",
        "",
    ),
    _claim("a record ages before its result", "        last.append(record.result.gone)\n", "        pass\n"),
    _claim("a command shortens a record's life", "now + command.retention, record.kept_until]", "now + command.retention]"),
    _claim("a record's life is not extended", "    return record._replace(kept_until=max(last))", "    return record"),
    # --- who leads ---
    _record("a dead leader goes on leading", "if self.owns(line.claim) and line.lives(now)]", "if self.owns(line.claim)]"),
    _claim(
        "a successor does not tell its predecessor lost",
        "            record = _put(record, line._replace(status=Status.LOST))\n",
        "",
    ),
    _claim(
        "a take-over is told a retry",
        "_vacate(record, line.claim)._replace(cause=Cause.LOST)",
        "_vacate(record, line.claim)._replace(cause=Cause.RETRY)",
    ),
    _claim("a retry is told a loss", "    Status.FAILED: Cause.RETRY,", "    Status.FAILED: Cause.LOST,"),
    _claim("an unknown end is told a retry", "    Status.LOST: Cause.LOST,", "    Status.LOST: Cause.RETRY,"),
    _claim("on_lost is ignored", "if lost and ask.mode is Mode.ENFORCE and not ask.rerun_lost:", "if False:"),
    _claim("observe asks what was lost", "if lost and ask.mode is Mode.ENFORCE and not", "if lost and not"),
    _record("an end that nobody knows is told a failure", "return Status.LOST if self.status", "return Status.FAILED if self.status"),
    # --- modes ---
    _claim(
        "observe holds back",
        "    if ask.mode is Mode.OBSERVE:\n        return _open(record, ask, Cause.OBSERVED, now, holds=False)\n",
        "",
    ),
    _claim("an observed duplicate takes the claim", "Cause.OBSERVED, now, holds=False)", "Cause.OBSERVED, now)"),
    _claim("a bypass takes the claim", "Cause.FORCED, now, holds=False)", "Cause.FORCED, now)"),
    _claim(
        "a conflict is executed",
        "    if _other(record, ask):\n        return record, Conflict(record.runs)\n",
        "",
    ),
    _claim(
        "another payload goes under the key of a failed one",
        "if record.generation is not None and ask.mode is Mode.ENFORCE and _other(record, ask):",
        "if False:",
    ),
    _claim("a forgotten task conflicts for ever", "            digest=None,\n", ""),
    _claim("an observed conflict is not told", "claim.cause is Cause.OBSERVED and _other(record, ask)", "False"),
    # --- results ---
    _claim("ttl 0 shares nothing", SERVES, "now < result.until"),
    _claim("a result is never over", SERVES, "True"),
    _claim(
        "a result that is falsy is none",
        "    if result is None or now < result.until or",
        "    if result is None or (now < result.until and result.value.data < b'\"1') or",
    ),
    _claim("the idempotency key changes with every claim", "    if ask.mode is Mode.BYPASS or generation is None:\n", "    if True:\n"),
    _claim(
        "the idempotency key never changes",
        "        cause=Cause.EXPIRED,\n        generation=None,\n",
        "        cause=Cause.EXPIRED,\n",
    ),
    # --- lines ---
    _claim("a withdrawn claim is an execution", "lines=others, runs=record.runs - 1)", "lines=others)"),
    _claim(
        "a withdrawn claim stays",
        "            record = _vacate(record, mine.claim)\n            record = record._replace(lines",
        "            record = record._replace(lines",
    ),
    _claim(
        "a withdrawal takes an execution that has ended",
        "if mine.claim.nonce == ask.nonce and mine.ended is None:",
        "if mine.claim.nonce == ask.nonce:",
    ),
    _claim("what a killed execution spent is lost", "    line = line._replace(spent=_later(line.spent, ask.spent))\n", ""),
    _claim("an older report outdoes a later one", "return one if one.reports > other.reports else other", "return one if one.reports < other.reports else other"),
    _claim("late is told ok", "        status = Status.LATE\n", "        pass\n"),
    _claim("an end that is told late is told now", "ask.spent, now - ask.ago, kept=owns)", "ask.spent, now, kept=owns)"),
    _claim(
        "an unguarded execution that is told is a loss",
        "Status.OPEN if leads or not claim.holds else Status.LOST)",
        "Status.OPEN if leads else Status.LOST)",
    ),
    Fault(
        "open lines make room",
        (
            FEW_LINES,
            Edit(
                "claim.py",
                "    return line.ended is not None or (line.status is Status.LOST and settled)",
                "    return True",
            ),
        ),
    ),
    Fault(
        "no line makes room",
        (
            FEW_LINES,
            Edit("claim.py", "if _done(record, other)][:spare]", "if _done(record, other)][:0]"),
        ),
    ),
    Fault(
        "who executed is forgotten with the line",
        (FEW_LINES, Edit("claim.py", "        workers=tuple(workers)[-WORKERS:],\n", "")),
    ),
    # --- hints ---
    _claim("a kept result wakes one", '        return "all"\n    if not after.living', '        return "one"\n    if not after.living'),
    _claim("an end without a value wakes nobody", '        return "one"\n', "        return None\n"),
    _claim("an end without a value wakes all", '        return "one"\n', '        return "all"\n'),
    _claim("a free place beside the leader wakes nobody", 'return "all" if before.fallback', "return None if before.fallback"),
    _claim("who came too late to be woken waits on", "    return (living[0].claim.id if living else None) == holder", "    return bool(living) or holder is not None"),
    _claim(
        "who waits does not see the result",
        "    if record.result is not None and now < record.result.until:\n        return False\n",
        "",
    ),
    # --- windows ---
    _windows("every change of a line counts it again", "        if old is None:\n            _start(", "        if True:\n            _start("),
    _windows(
        "tokens are booked with every report",
        "            _exclusive(counts, old.spent, -1, wasted=line.claim.cause in DUPLICATES)\n",
        "            pass\n",
    ),
    _windows(
        "wasted tokens are booked with every report",
        "_exclusive(counts, old.spent, -1, wasted=line.claim.cause in DUPLICATES)",
        "_exclusive(counts, old.spent, -1, wasted=False)",
    ),
    _windows("a withdrawn claim stays in the windows", "_start(counts, line, before.runs - 1, -1)", "pass"),
    _windows("the third execution doubles again", "    elif earlier == 1:\n", "    elif earlier >= 1:\n"),
    _windows(
        "an execution counts where it ends",
        "        counts = book.at(line.claim.started, line.claim.caller)\n        if old is None:",
        "        counts = book.at(now, line.claim.caller)\n        if old is None:",
    ),
    _windows("unguarded is told executed", 'return "unguarded" if line.claim.cause is Cause.UNGUARDED else "executed"', 'return "executed"'),
    _windows("late is a failure", "        if line.status is Status.FAILED:\n", "        if line.status in (Status.FAILED, Status.LATE):\n"),
    _windows(
        "a leaver counts as often as it leaves",
        "case Withdraw(outcome=outcome) if command.nonce not in before.leavers:",
        "case Withdraw(outcome=outcome):",
    ),
)  # fmt: skip


# where a fault shows soonest, for those that other scenes show late or never
SOONEST = {
    "emptied within a ms": ("the token alone owns, without the nonce",),
    "observe beside enforce": (
        "an execution without the claim keeps its result",
        "an observed duplicate takes the claim",
    ),
    "max_run": ("a renewal knows no max_run",),
    "fallback, forgotten": (
        "a renewal says that its result will be kept, always",
        "a repeated Complete is told that nothing was kept",
        "forget leaves nothing behind",
        "a repeated Resolve resolves again",
        "resolve replaces a fresh result",
        "the idempotency key never changes",
    ),
    "fallback of four": ("the place of a dead fallback stays taken",),
    "orders come again": ("a repeated Forget forgets again",),
    "fallback, emptied": (
        "a completion after the store was emptied is dropped",
        "a completion after the store was emptied overtakes a successor",
    ),
    "observe, emptied": ("a completion after forget is taken up",),
    "bypass": (
        "an execution without the claim takes it up",
        "a bypass takes the claim",
        "an unguarded execution that is told is a loss",
    ),
    "ttl 0": (
        "a record never ages",
        "a result outlives its record's time",
        "ttl 0 shares nothing",
        "a result is never over",
    ),
    "records age": ("a command shortens a record's life",),
    "conflict": ("a conflict is executed",),
    "conflict, observed": ("an observed conflict is not told",),
    "unguarded": (
        "an end that is told late is told now",
        "unguarded is told executed",
    ),
    "few lines are remembered": (
        "open lines make room",
        "no line makes room",
        "who executed is forgotten with the line",
    ),
    "unguarded, observed": ("wasted tokens are booked with every report",),
    "records age soon": (
        "a record ages while somebody executes",
        "a record ages before its result",
    ),
}


def hunt(fault: Fault) -> str | None:
    """How the simulator finds a fault; None where it does not."""
    few = variant(FEW_LINES, *[edit for edit in fault.edits if edit != FEW_LINES])
    with variant(*fault.edits).in_force() as rules:
        soonest = [scene for scene in SCENES if fault.name in SOONEST.get(scene.name, ())]
        tries = [(NAMED, scene) for scene in soonest]
        if FEW_LINES not in fault.edits:
            tries += itertools.product(LIMITS, SCENES)
        for limit, scene in tries:
            found = explore(scene, few.rules if scene.few_lines else rules, limit)
            if found.broken is not None:
                return f"{scene.name}, {found.states} states: {found.broken[-1][:120]}"
        return _by_chance(rules)


def _by_chance(rules: Rules) -> str | None:
    for seed in range(40):
        try:
            wander(seed, LONG, 200, rules)
            flows(seed, rules)
        except (Broken, AssertionError) as broken:
            return f"seed {seed}: {broken!r:.120}"
    late = Crowd(Policy(), 5000, fails=1, rules=rules).run(21).last
    return None if late == 10_000 else "a crowd is served late"

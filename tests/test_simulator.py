"""The promises hold in whatever order callers, wire, clock and operator act on one record.

`IDEMGUARD_SIM_STATES` (states a scene) and `IDEMGUARD_SIM_SEEDS` (random runs of each kind) make
a deeper run of it:

    IDEMGUARD_SIM_STATES=100000 IDEMGUARD_SIM_SEEDS=1000 pytest tests/test_simulator.py -rP --timeout 0

The last test prints what was seen; `-rP` shows it.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from simulator.crowd import Crowd
from simulator.explorer import explore, wander
from simulator.flows import flows
from simulator.rules import ADDRESS, LEASE, Rules, caller
from simulator.scenes import COUNTED, LONG, SCENES, Scene
from simulator.variants import FEW_LINES, PLAIN, variant

from idemguard.claim import Answer, Begin, Claimed, Command, Forget, Release
from idemguard.errors import UnknownOutcomeError, WaitTimeoutError
from idemguard.guard import Policy
from idemguard.record import Record

STATES = int(os.environ.get("IDEMGUARD_SIM_STATES", "4000"))
SEEDS = int(os.environ.get("IDEMGUARD_SIM_SEEDS", "60"))
STEPS = 200  # of a random walk
RULES = Rules()

saw: Counter[str] = Counter()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_every_order_of_a_scene_keeps_the_promises(scene: Scene, record_property) -> None:
    rules = variant(FEW_LINES) if scene.few_lines else PLAIN
    found = explore(scene, rules.rules, STATES)
    record_property("states", found.states)
    record_property("commands", found.commands)
    saw["scenes"] += 1
    saw["states"] += found.states
    saw["commands"] += found.commands
    saw["scenes seen whole"] += found.all
    assert found.broken is None, "\n".join(found.broken or ())
    assert found.all or found.states >= STATES


@pytest.mark.parametrize("scene", [LONG, COUNTED], ids=lambda scene: scene.name)
def test_long_random_walks_keep_the_promises(scene: Scene) -> None:
    seeds = max(1, SEEDS // 15)
    made = sum(wander(seed, scene, STEPS, RULES) for seed in range(seeds))
    saw["seeds of walks"] += seeds
    saw["random steps of walks"] += made
    assert made == seeds * STEPS


@pytest.mark.parametrize("counted", [True, False], ids=["counted to the end", "emptied and killed"])
def test_the_real_flows_keep_the_promises_whatever_happens_around_them(counted: bool) -> None:
    made = sum(flows(seed, RULES, counted=counted) for seed in range(SEEDS))
    saw["seeds of flows"] += SEEDS
    saw["random steps of flows"] += made
    assert made > 12 * SEEDS  # each run takes twelve calls to their end


def test_a_record_remembers_64_executions_and_all_that_is_unknown() -> None:
    record, now = Record(), 1_000_000

    def step(command: Command) -> Answer:
        nonlocal record
        record, answer = RULES.transition(record, command, now)
        return answer

    for number in range(100):
        if number == 5:
            now += LEASE  # the one before never ends
        answer = step(Begin(ADDRESS, f"n{number}", caller(str(number)), LEASE))
        assert isinstance(answer, Claimed)
        assert answer.runs == number + 1
        if number != 4:
            end = Release(answer.claim)
            assert end.address == ADDRESS
            step(end)
    nonces = [line.claim.nonce for line in record.lines]
    assert nonces == ["n4", *(f"n{number}" for number in range(37, 100))]
    assert record.lines[0].status == "lost"
    assert record.workers == tuple(f"w{number}" for number in range(37) if number != 4)
    assert record.runs == 100
    step(Forget(ADDRESS, "f"))
    step(Begin(ADDRESS, "n100", caller("100"), LEASE))  # what was lost is known to be over
    assert record.lines[0].claim.nonce == "n37"


# --- twenty waiters --------------------------------------------------------------------------------------


def test_one_of_twenty_falls_back_beside_a_slow_leader() -> None:
    came = Crowd(Policy(wait_timeout=1000), 5000).run(21)
    assert [(name, str(cause), when) for name, cause, when in came.executions] == [
        ("c0", "first", 0),
        ("c1", "fallback", 1001),
    ]
    assert came.sources == {"executed": 1, "fallback": 1, "reused": 19}
    served = {when for reply, when in came.replies.values() if reply.source == "reused"}
    assert served == {5000}  # by the first to complete
    assert came.record.reused == 19


def test_the_fallback_serves_all_where_it_is_first() -> None:
    came = Crowd(Policy(wait_timeout=1000, lease=3000), 5000, killed="c0").run(21)
    causes = [str(cause) for _, cause, _ in came.executions]
    assert causes[:2] == ["first", "fallback"]
    assert came.sources["reused"] == 20 - len(causes) + 1
    assert {reply.value for reply, _ in came.replies.values()} >= {"c1"}


def test_twenty_who_would_rather_raise_time_out() -> None:
    came = Crowd(Policy(wait_timeout=1000, fall_back=False), 5000).run(21)
    assert len(came.executions) == 1
    assert came.sources == {"executed": 1, "refused": 20}
    errors = [reply.error for reply, _ in came.replies.values() if reply.error is not None]
    assert all(isinstance(error, WaitTimeoutError) for error in errors)
    assert {error.worker for error in errors} == {"wc0"}  # it names the holder


def test_nobody_doubles_a_living_leader_unasked() -> None:
    came = Crowd(Policy(), 500_000 - 1).run(21)
    assert len(came.executions) == 1
    came = Crowd(Policy(), 5000).run(21)
    assert came.sources == {"executed": 1, "reused": 20}
    assert came.last == 5000


def test_who_does_not_wait_falls_back_once() -> None:
    came = Crowd(Policy(wait_timeout=0), 5000).run(21)
    assert [when for _, _, when in came.executions] == [0, 1]
    assert came.sources == {"executed": 1, "fallback": 1, "reused": 19}


def test_a_killed_leader_is_followed_by_one_within_a_lease() -> None:
    came = Crowd(Policy(lease=3000), 500, killed="c0").run(21)
    assert [(str(cause), when) for _, cause, when in came.executions] == [
        ("first", 0),
        ("lost", 3000),
    ]
    assert came.sources == {"executed": 1, "reused": 19}


def test_a_killed_leader_leaves_the_unsure_unsure() -> None:
    came = Crowd(Policy(lease=3000, rerun_lost=False), 500, killed="c0").run(21)
    assert len(came.executions) == 1
    assert came.sources == {"refused": 20}
    errors = [reply.error for reply, _ in came.replies.values()]
    assert all(isinstance(error, UnknownOutcomeError) for error in errors)
    assert came.last == 3000


def test_a_leader_that_fails_is_followed_by_one_at_once() -> None:
    came = Crowd(Policy(), 5000, fails=1).run(21)
    assert [(str(cause), when) for _, cause, when in came.executions] == [
        ("first", 0),
        ("retry", 5000),
    ]
    assert came.sources == {"failed": 1, "executed": 1, "reused": 19}
    assert came.last == 10_000


def test_each_failure_promotes_one_more() -> None:
    came = Crowd(Policy(), 1000, fails=5).run(21)
    assert [when for _, _, when in came.executions] == [0, 1000, 2000, 3000, 4000, 5000]
    assert came.sources == {"failed": 5, "executed": 1, "reused": 15}


def test_ttl_0_is_shared_by_those_who_overlap() -> None:
    came = Crowd(Policy(ttl=0), 500).run(21)
    assert came.sources == {"executed": 1, "reused": 20}
    assert came.last == 500


# --- what was seen ---------------------------------------------------------------------------------------


def test_enough_was_seen(record_property) -> None:
    """Runs last; where tests were picked, there is nothing to say."""
    for name, number in saw.items():
        record_property(name, number)
        print(f"{name:24}{number:>12,}")
    if saw["scenes"] == len(SCENES):
        assert saw["states"] >= min(STATES, 4000) * len(SCENES) * 0.8
    if saw["seeds of flows"]:
        assert saw["random steps of flows"] >= 100 * saw["seeds of flows"]

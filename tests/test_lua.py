"""The scripts on a real server do what the pure rules do, command by command."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from lua.faults import FAULTS, Fault, texts
from lua.runner import COMMANDS, Runner, shrunk
from lua.sequences import generated
from lua.work import first_difference
from servers.server import HOST, until

from idemguard.claim import (
    Begin,
    Claimed,
    Complete,
    Done,
    Forget,
    InFlight,
    Release,
    Renew,
    Resolve,
    Sweep,
    Withdraw,
)
from idemguard.codec import Value
from idemguard.record import Address, Caller, Cause, Record
from idemguard.stores import scripts, wire

pytest_plugins = ["servers.fixtures"]

TESTS = Path(__file__).parent
# how many are compared with all keys; of those of a moving slot there are a third as many
SEQUENCES = int(os.environ.get("IDEMGUARD_LUA_SEQUENCES", "20000"))
WORKERS = 2
SOON = 4000  # sequences that a fault is found within

WHERE = Address("lua", "ab" * 32)
CALLER = Caller("summarise", "w-1", "researcher")
NOW = 1_800_000_000_000
EMPTY = Record()
VALUE = Value("json", b"1")


def in_its_own_process(*args):
    """A module of `lua` at work; it is not measured, so that it is fast."""
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", *map(str, args)],
        cwd=TESTS, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def told(processes):
    """What processes print."""
    try:
        outputs = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output) for output, _ in outputs]


class Server:
    """Performs commands one by one."""

    def __init__(self, server, now=NOW) -> None:
        self.client = server.client()
        self.now = now  # "": by the server's clock

    def perform(self, command, *more_keys):
        step = wire.step(command)
        keys = (*step.keys, *more_keys)
        args = (self.now, "PUBLISH", "me", step.retention, *step.args)
        return wire.answer(command, self.run(step.script, keys, args))

    def look(self, address=WHERE):
        step = wire.look(address)
        reply = self.run("look", step.keys, (self.now, "", "", 0))
        return wire.record(address, reply)[0]

    def run(self, script, keys, args):
        text = scripts.script(script).text
        return self.client.execute_command("EVAL", text, len(keys), *keys, *args)

    def lives(self):
        """How long each key lives, ms."""
        return {key.decode(): self.client.pttl(key) for key in self.client.keys("*")}


@pytest.fixture
def server(standalone):
    """The server, by a clock that stands still."""
    return Server(standalone)


@pytest.fixture
def ticking(standalone):
    """The same, by its own clock."""
    return Server(standalone, "")


# --- the rules -----------------------------------------------------------------------------------


def compare(standalone, count, *, moving):
    """Have processes compare sequences; tells what they did."""
    share = -(-count // WORKERS)
    done = told([
        in_its_own_process(
            "lua.work", standalone.port, db, "pq"[db], db * share, share,
            "moving" if moving else "still",
        )
        for db in range(WORKERS)
    ])  # fmt: skip
    for each in done:
        assert each["difference"] is None, each["difference"]
    totals = {name: sum(each[name] for each in done) for name in ("sequences", "commands", "looks")}
    print(totals, [each["seconds"] for each in done])
    return totals


@pytest.mark.timeout(60 + SEQUENCES // 50)
def test_every_answer_hint_record_and_window_is_that_of_the_rules(standalone):
    totals = compare(standalone, SEQUENCES, moving=False)
    assert totals["sequences"] >= SEQUENCES
    assert totals["commands"] > 10 * SEQUENCES
    assert totals["looks"] > 0.95 * totals["commands"]


@pytest.mark.timeout(60 + SEQUENCES // 50)
def test_steps_on_the_record_alone_answer_the_same_and_owe_the_rest(standalone):
    totals = compare(standalone, SEQUENCES // 3, moving=True)
    assert totals["commands"] > 10 * (SEQUENCES // 3)


def test_the_sequences_reach_every_branch_of_the_rules():
    [found] = told([in_its_own_process("lua.cover", 1500)])
    assert found["reached"] > 200
    # a line ends by a completion or a release alone
    idle = {"return None", "case Release(): -> return None"}
    idle.add("if outcome is not None: -> for line in after.lines:")
    missing = [each for each in found["missing"] if each[0] != "windows.py" or each[2] not in idle]
    assert missing == []
    assert {text for _, _, text in found["missing"]} == idle


def test_a_seed_tells_the_sequence():
    assert generated(7, "q").acts == generated(7, "q").acts
    assert generated(7, "q").acts != generated(8, "q").acts


# --- deliberate faults ---------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(standalone, fault: Fault, record_property):
    with Runner(HOST, standalone.port, texts=texts(fault)) as runner:
        found = first_difference(runner, range(SOON), moving=fault.moving, crowded=fault.crowded)
    assert found is not None, f"nothing differs: {fault.name}"
    record_property("found", found.plan.label)


def test_a_difference_is_told_shortly(standalone):
    fault = next(fault for fault in FAULTS if fault.name == "a failure leaves the cause")
    with Runner(HOST, standalone.port, texts=texts(fault)) as runner:
        found = first_difference(runner, range(SOON))
        assert found is not None
    with Runner(HOST, standalone.port, texts=texts(fault)) as runner:
        short = shrunk(runner, found)
    assert len(short.plan.acts) <= min(5, len(found.plan.acts) - 1)
    assert isinstance(short.plan.acts[-1].what, Release)
    assert short.plan.label in str(short)
    assert "the record is" in str(short)


def test_the_scripts_as_they_are_show_no_difference(standalone):
    with Runner(HOST, standalone.port) as runner:
        assert first_difference(runner, range(100)) is None


def test_a_passage_that_does_not_stand_there_is_an_error():
    with pytest.raises(LookupError):
        texts(Fault("none", "no such passage"))
    with pytest.raises(LookupError):
        texts(Fault("many", "record"))


# --- expiry --------------------------------------------------------------------------------------

SLACK = 1_000  # ms that a key outlives what it holds
AWHILE = 10_000  # ms that these tests may take at most


SHARED = 1.125  # how much longer those live that records share, so that few steps need to say so


def about(life, expected, share=1.0):
    return expected - AWHILE < life <= expected * share + SLACK


def test_every_key_ends_when_what_it_holds_does(ticking):
    task, result, windows, tasks, starts, open_ = wire.keys(WHERE)
    claim = ticking.perform(
        Begin(WHERE, "n", CALLER, 30_000, retention=100_000), wire.NAMESPACES
    ).claim
    lives = ticking.lives()
    assert set(lives) == {task, windows, tasks, starts, open_, wire.NAMESPACES}
    assert about(lives[wire.NAMESPACES], 400 * 86_400_000)
    assert about(lives[windows], 8 * 86_400_000, SHARED)
    assert about(lives[task], 100_000)
    for key in (tasks, starts, open_):
        assert about(lives[key], 100_000, SHARED), key
    ticking.perform(Complete(claim, VALUE, 300_000, 30_000, retention=100_000))
    lives = ticking.lives()
    assert set(lives) == {task, result, windows, tasks, starts, wire.NAMESPACES}
    for key in (task, result):
        assert about(lives[key], 300_000), key
    for key in (tasks, starts):
        assert about(lives[key], 300_000, SHARED), key
    # one that lives shorter does not shorten the others
    ticking.perform(Begin(WHERE._replace(scope="s"), "n2", CALLER, 1_000, retention=1_000))
    lives = ticking.lives()
    assert about(lives[open_], 1_000, SHARED)
    assert about(lives[wire.keys(WHERE._replace(scope="s"))[0]], 1_000)
    for key in (tasks, starts):
        assert about(lives[key], 300_000, SHARED), key


@pytest.mark.parametrize("moving", [False, True])
def test_no_script_makes_a_key_that_stays(standalone, moving):
    client, seen = Server(standalone), set()
    for seed in range(300):
        each = generated(seed, "q", moving=moving)
        for act in each.acts:
            what = act.what
            if not isinstance(what, COMMAND_TYPES):
                continue
            step = wire.step(what)
            keys = step.keys[:1] if act.alone else step.keys
            args = (act.now, "PUBLISH", "me", step.retention, *step.args)
            client.run(step.script, keys, args)
            seen.add(step.script)
        for key, life in client.lives().items():
            longest = 9 * 86_400_000 * SHARED + 2 * 3_600_000
            assert 0 < life < longest, (each.label, key)
        client.client.flushdb()
    assert seen == set(COMMANDS) - {"share"}


COMMAND_TYPES = (Begin, Renew, Complete, Release, Withdraw, Forget, Resolve, Sweep)


def test_a_share_makes_no_key_that_stays(ticking):
    for keys in (wire.keys(WHERE), wire.keys(WHERE)[:1]):
        step = wire.share(WHERE, 50_000, {wire.label("t", None): (3, 2)})
        assert ticking.run(step.script, keys, ("", "PUBLISH", "me", 50_000, *step.args)) == [
            b"done"
        ]
        lives = ticking.lives()
        assert about(lives.pop(wire.keys(WHERE)[0]), 50_000)
        assert all(life > 0 for life in lives.values())
        ticking.client.flushdb()


def test_a_record_whose_key_has_ended_is_an_empty_one(ticking):
    ask = Begin(WHERE, "n", CALLER, 1, retention=1)
    first = ticking.perform(ask).claim
    assert isinstance(ticking.perform(Renew(first, 20, 60_000, retention=1)).left, int)
    task, _, _, tasks, starts, open_ = wire.keys(WHERE)
    until(lambda: not ticking.client.exists(task))
    assert ticking.look() == EMPTY
    # a record by the same clock: whatever the indexes still hold is of its first life
    answer = ticking.perform(Begin(WHERE, "n2", CALLER, 30_000))
    assert isinstance(answer, Claimed)
    assert (answer.claim.cause, answer.runs) == (Cause.FIRST, 1)
    assert answer.claim.token > first.token
    assert [line.claim for line in ticking.look().lines] == [answer.claim]
    assert ticking.client.zrange(tasks, 0, -1) == [wire.name(WHERE).encode()]
    assert ticking.client.zscore(open_, wire.name(WHERE)) == answer.claim.started + 30_000
    assert ticking.client.zscore(starts, f"{wire.name(WHERE)} {answer.claim.id}") is not None


def test_the_server_s_clock_counts_where_no_other_is_named(ticking):
    seconds, micros = ticking.client.time()
    claim = ticking.perform(Begin(WHERE, "n", CALLER, 30_000)).claim
    assert 0 <= claim.started - (seconds * 1000 + micros // 1000) < AWHILE
    answer = ticking.perform(Begin(WHERE, "n2", CALLER, 30_000))
    assert isinstance(answer, InFlight)
    assert 30_000 - AWHILE < answer.left <= 30_000


# --- damage --------------------------------------------------------------------------------------


def real(server) -> bytes:
    """A record's bytes, as a script wrote them."""
    claim = server.perform(Begin(WHERE, "n", CALLER, 30_000)).claim
    server.perform(Complete(claim, VALUE, 60_000, 30_000))
    stands = server.client.get(wire.keys(WHERE)[0])
    assert stands.startswith(b"idemguard1:")
    server.client.flushdb()
    return stands


def halves(server):
    stands = real(server)
    return [stands[:size] for size in range(len(stands))]


def noises(server):
    chance = random.Random(1)
    noise = [chance.randbytes(chance.randrange(200)) for _ in range(200)]
    return [*noise, *(b"idemguard1:" + each for each in noise)]


DAMAGE = {
    "noise": noises,
    "a pickle": lambda server: [pickle.dumps({"token": 1})],
    "foreign JSON": lambda server: [b'{"token": 1}', b"[]", b"null", b'"x"', b"1"],
    "another form": lambda server: [real(server).replace(b"idemguard1:", b"idemguard2:")],
    "cut short": halves,
    "too few fields": lambda server: [b"idemguard1:\x93\x01\x02\x03", b"idemguard1:\x80"],
    "nothing": lambda server: [b""],
}


def commands(server):
    """One command of each kind but Forget."""
    claim = server.perform(Begin(WHERE._replace(scope="other"), "n", CALLER, 30_000)).claim
    claim = claim._replace(address=WHERE)
    server.client.flushdb()
    return [
        Begin(WHERE, "n", CALLER, 30_000),
        Renew(claim, 30_000, 60_000),
        Complete(claim, VALUE, 60_000, 30_000),
        Release(claim),
        Withdraw(WHERE, "n", CALLER, "failed"),
        Resolve(WHERE, "o", CALLER, VALUE, 60_000),
        Sweep(WHERE),
    ]


def everything(client):
    return {key: client.dump(key) for key in client.keys("*")}


def refuses(server, act, words):
    before = everything(server.client)
    with pytest.raises(redis.ResponseError, match=words):
        act()
    assert everything(server.client) == before


def share(server):
    step = wire.share(WHERE, 1000, {wire.label("t", None): (1, 1)})
    return server.run(step.script, step.keys, (server.now, "PUBLISH", "me", 1000, *step.args))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_bytes_are_refused_and_forget_mends_them(server, kind):
    asked = commands(server)
    for number, damage in enumerate(DAMAGE[kind](server)):
        server.client.set(wire.keys(WHERE)[0], damage)
        for command in asked if number < 20 else asked[number % len(asked) :][:1]:
            refuses(server, lambda: server.perform(command), "^DAMAGED")  # noqa: B023 - called at once
        refuses(server, server.look, "^DAMAGED")
        refuses(server, lambda: share(server), "^DAMAGED")
        assert server.perform(Forget(WHERE, "o")) == Done()
        assert server.look() == Record(
            cause=Cause.FORCED, ordered="o", kept_until=NOW + 86_400_000
        )  # fmt: skip
        claimed = server.perform(Begin(WHERE, "n9", CALLER, 30_000))
        assert isinstance(claimed, Claimed)
        assert claimed.claim.cause is Cause.FORCED
        server.client.flushdb()


def test_a_key_of_another_type_is_refused_and_kept(server):
    asked = [*commands(server), Forget(WHERE, "o")]
    server.client.hset(wire.keys(WHERE)[0], "a", "b")
    for command in asked:
        refuses(server, lambda: server.perform(command), "^WRONGTYPE")  # noqa: B023 - called at once
    refuses(server, server.look, "^WRONGTYPE")
    refuses(server, lambda: share(server), "^WRONGTYPE")

"""Conformance: a store is `transition` and `entries`, whatever is asked in whatever order."""

from __future__ import annotations

import itertools
from collections import Counter

from conformance.scene import CALLER, DAY, EVER, LEASE, MINUTE, Scene
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from idemguard.claim import (
    Begin,
    Claimed,
    Complete,
    Forget,
    InFlight,
    Release,
    Renew,
    Resolve,
    Sweep,
    Withdraw,
    aged,
    transition,
)
from idemguard.codec import Value
from idemguard.record import Address, Caller, Claim, Mode, Record, Status
from idemguard.usage import NOTHING, Spent, Usage
from idemguard.windows import SPAN, entries

numbers = itertools.count()

settle = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
        HealthCheck.too_slow,
    ],
)

steps = st.lists(
    st.tuples(
        st.sampled_from([
            "begin", "begin", "begin", "observe", "bypass", "beside", "again", "renew", "renew",
            "complete", "complete", "release", "declined", "unsure", "withdraw", "leave",
            "forget", "resolve", "sweep", "repeat",
        ]),
        st.integers(0, 7),
        st.sampled_from([0, 0, 0, 1, 50, LEASE // 3, LEASE - 1, LEASE, 10 * MINUTE, 2 * DAY]),
    ),
    max_size=40,
)  # fmt: skip

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = texts.filter(bool)
counts = st.integers(0, 2**62)
usages = st.builds(
    Usage,
    input_tokens=st.none() | counts,
    output_tokens=st.none() | counts,
    cache_read_tokens=st.none() | counts,
    cache_write_tokens=st.none() | counts,
    reasoning_tokens=st.none() | counts,
    model=st.none() | texts,
    provider=st.none() | texts,
    response_id=st.none() | texts,
)
spendings = st.just(NOTHING) | st.builds(
    Spent,
    reports=st.integers(1, 2**62),
    usage=st.none() | usages,
    inputs=st.lists(counts, max_size=3).map(tuple),
    responses=st.lists(texts, max_size=3).map(tuple),
    cost=st.none() | counts,
    currency=st.none() | texts,
    price_version=st.none() | texts,
    nested=st.booleans(),
    parts=st.none() | st.tuples(counts, counts, counts),
    inner=st.none() | st.tuples(counts, counts, counts),
    unpriced=st.integers(0, 2**31),
)
callers = st.builds(
    Caller,
    task_type=names,
    worker=texts,
    agent=st.none() | names,
    parent=st.none() | texts,
    trace_id=st.none() | texts,
    span_id=st.none() | texts,
    digests=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
)
values = st.builds(Value, codec=texts, data=st.binary(max_size=40))


class Model:
    """What a store must answer and hold."""

    def __init__(self) -> None:
        self.records: dict[Address, Record] = {}
        self.windows: dict[tuple[object, ...], Counter[str]] = {}

    def perform(self, command, now):
        """By the pure rules."""
        before = aged(self.records.get(command.address, Record()), now)
        after, answer = transition(before, command, now)
        self.records[command.address] = after
        for key, add in entries(before, after, command, answer, now).items():
            self.windows.setdefault((*key, SPAN), Counter()).update(add)
        return answer

    def seen(self):
        """The windows as a scene tells them."""
        windows = {
            key: {name: count for name, count in counted.items() if count}
            for key, counted in self.windows.items()
        }
        return {key: counted for key, counted in windows.items() if counted}


class Sequence:
    """Commands on two addresses, each made of what was answered before."""

    def __init__(self, namespace: str) -> None:
        self.addresses = [Address(namespace, f"{n:064x}", scope=f"s{n}") for n in (0, 1)]
        self.claims: list[Claim] = []
        self.asked: list[Begin] = []
        self.since: dict[str, int] = {}
        self.last = None
        self.nonces = itertools.count()

    def command(self, name: str, number: int):
        """The command of one step; None where it has nothing to go by."""
        self.last = self._command(name, number) or self.last
        return self.last

    def heard(self, command, answer) -> None:
        """What was answered."""
        if isinstance(answer, Claimed) and answer.claim not in self.claims:
            self.claims.append(answer.claim)
        if isinstance(answer, InFlight):
            self.since[command.nonce] = answer.since

    def _command(self, name: str, number: int):
        address = self.addresses[number % 2]
        caller = CALLER._replace(worker=f"w{number % 3}", agent=[None, "a"][number % 2])
        spent = NOTHING if number < 4 else Spent(
            number, Usage(input_tokens=number, cache_read_tokens=number // 2), cost=3 * number,
            parts=(number, number % 3, 1), inner=[None, (number, 1, 2)][number % 2],
            unpriced=number % 3,
        )  # fmt: skip
        retention = DAY if number % 3 else MINUTE
        if name in ("begin", "observe", "bypass", "beside"):
            mode = {"observe": Mode.OBSERVE, "bypass": Mode.BYPASS}.get(name, Mode.ENFORCE)
            beside = self.claims[-1].id if name == "beside" and self.claims else None
            digest = [None, None, None, "d", "e"][number % 5]
            ask = Begin(
                address, f"n{next(self.nonces)}", caller, LEASE, digest, mode,
                rerun_lost=number != 5, beside=beside, retention=retention,
            )  # fmt: skip
            self.asked.append(ask)
            return ask
        if name == "again" and self.asked:
            ask = self.asked[-1 - number % len(self.asked)]
            since = self.since.get(ask.nonce)
            return Begin(ask.address, ask.nonce, ask.caller, LEASE, ask.digest, since=since)
        if name == "leave" and self.asked:
            ask = self.asked[-1 - number % len(self.asked)]
            return Withdraw(ask.address, ask.nonce, ask.caller, [None, "failed"][number % 2])
        if name == "forget":
            return Forget(address, f"o{number}", retention)
        if name == "resolve":
            ttl = MINUTE * number
            return Resolve(address, f"o{number}", caller, Value("json", b"r"), ttl, retention)
        if name == "sweep":
            return Sweep(address)
        if name == "repeat":
            return self.last
        if not self.claims:
            return None
        claim = self.claims[-1 - number % len(self.claims)]
        ago = [0, 0, 0, 5000][number % 4]
        statuses = {
            "release": Status.FAILED, "declined": Status.DECLINED, "unsure": Status.LOST,
        }  # fmt: skip
        if name == "renew":
            return Renew(claim, LEASE, 10 * MINUTE, spent, retention)
        if name == "complete":
            value = Value("json", b"%d" % number)
            return Complete(claim, value, number * MINUTE, LEASE, spent, retention, ago)
        if name in statuses:
            return Release(claim, statuses[name], spent, retention, ago)
        return Withdraw(claim.address, claim.nonce, claim.caller, None, retention)


class Equivalence:
    """Cases of random commands and random texts."""

    @settle
    @given(steps=steps)
    @example(steps=[("begin", 0, 0), ("release", 0, 1)] * 70)  # more lines than are remembered
    @example(steps=[("begin", 0, 0), ("complete", 0, 0), ("begin", 0, 2 * DAY), ("sweep", 0, 0)])
    @example(steps=[("begin", 2, LEASE), ("sweep", 0, 10 * MINUTE), ("complete", 6, 0)])
    def test_random_commands_are_answered_as_the_rules_do(self, steered: Scene, steps):
        namespace = f"{steered.folder.name}-{next(numbers)}"
        model, sequence = Model(), Sequence(namespace)
        steered.namespace = namespace
        for name, number, passing in steps:
            steered.clock.advance(passing)
            command = sequence.command(name, number)
            if command is None:
                continue
            now = steered.clock()
            expected = model.perform(command, now)
            answer = steered.here.perform(command)
            assert answer == expected
            sequence.heard(command, answer)
            record = aged(model.records[command.address], now)
            assert steered.here.look(command.address) == (record, now)
        assert steered.windows() == model.seen()
        self._reads_as(steered, model)

    @staticmethod
    def _reads_as(scene: Scene, model: Model) -> None:
        now = scene.clock()
        known = [a for a, record in model.records.items() if record.kept_until > now]
        assert set(scene.here.call("addresses", scene.namespace, "")) == set(known)
        overdue = set(scene.here.call("overdue", scene.namespace))
        for address, record in model.records.items():
            late = any(
                line.status is Status.OPEN and not line.lives(now)
                for line in aged(record, now).lines
            )
            assert (address in overdue) or not late
        lines = scene.here.call("lines", scene.namespace, 0, EVER)
        ids = {line.execution_id for line in lines}
        for address in known:
            assert ids >= {line.execution_id for line in model.records[address].lines}
        starts = [line.started for line in lines]
        assert starts == sorted(starts)

    @settle
    @given(
        caller=callers,
        ended_by=callers,
        spent=spendings,
        later=spendings,
        value=values,
        scope=texts,
        version=st.none() | names,
        digest=st.none() | texts,
        nonce=texts,
        number=st.integers(1, 2**40),
    )
    def test_every_field_comes_back(
        self, steered: Scene, caller, ended_by, spent, later, value, scope, version, digest, nonce,
        number,
    ):  # fmt: skip
        namespace = f"{steered.folder.name}-{next(numbers)}"
        steered.namespace = namespace
        address = Address(namespace, f"{number:064x}", scope, version)
        model = Model()

        def both(command):
            expected = model.perform(command, steered.clock())
            answer = steered.here.perform(command)
            assert answer == expected
            assert repr(answer) == repr(expected)  # True is not 1, "first" not Cause.FIRST
            record = steered.here.look(address)[0]
            assert record == model.records[address]
            assert repr(record) == repr(model.records[address])
            return answer

        ask = Begin(address, nonce, caller, number, digest, retention=number)
        claim = both(ask).claim
        both(Renew(claim, number, DAY, spent))
        both(Begin(address, nonce + "2", ended_by, number, digest, Mode.OBSERVE))
        both(Complete(claim, value, number, number, later))
        both(Begin(address, nonce + "3", ended_by, number, digest))
        both(Withdraw(address, nonce + "4", ended_by, "failed"))
        both(Forget(address, nonce + "5"))
        both(Resolve(address, nonce + "6", ended_by, value, number))
        assert steered.here.call("addresses", namespace, f"{number:064x}"[:60]) == [address]
        lines = steered.here.call("lines", namespace, 0, EVER)
        assert lines == list(model.records[address].lines)
        assert repr(lines) == repr(list(model.records[address].lines))
        assert steered.windows() == model.seen()

"""Conformance: what a store answers to every command, once and twice, from wherever it comes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conformance.scene import CALLER, DAY, LEASE, MINUTE, TTL, VALUE, Scene

from idemguard.claim import (
    Claimed,
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
from idemguard.errors import StoreError
from idemguard.record import Cause, Mode, Record, Status
from idemguard.usage import Spent, Usage

SPENT = Spent(1, Usage(input_tokens=7, output_tokens=0), (7,), ("r-1",), 12, "USD")


class Commands:
    """Cases of `perform` and `look`."""

    def test_nothing_is_an_empty_record(self, scene: Scene):
        record, now = scene.here.look(scene.address())
        assert record == Record()
        assert now == scene.clock() or not scene.kind.steerable

    def test_the_first_claims_the_second_waits_the_third_reuses(self, pair: Scene):
        address = pair.address()
        claimed = pair.here.perform(pair.begin(address, "one"))
        assert isinstance(claimed, Claimed)
        assert (claimed.claim.cause, claimed.runs) == (Cause.FIRST, 1)

        waiting = pair.there.perform(pair.begin(address, "two"))
        assert isinstance(waiting, InFlight)
        assert waiting.holder == claimed.claim
        assert 0 < waiting.left <= LEASE

        ended = pair.here.perform(pair.complete(claimed.claim))
        assert ended == Ended(kept=True, lost=False, runs=1)
        replay = pair.there.perform(pair.begin(address, "two", since=waiting.since))
        assert isinstance(replay, Replay)
        assert (replay.result.value, replay.result.claim) == (VALUE, claimed.claim)
        assert pair.counts() == {
            "found": 1, "cause_first": 1, "tasks": 1, "call_executed": 1, "call_reused": 1,
            "unknown_usage": 1, "silent": 1,
            **{n: 1 for n in pair.counts() if n.startswith("run_")},
        }  # fmt: skip

    def test_a_failure_lets_the_next_execute(self, pair: Scene):
        address = pair.address()
        claim = pair.here.perform(pair.begin(address)).claim
        assert pair.here.perform(Release(claim)) == Ended(kept=False, lost=False, runs=1)
        assert pair.claim(address, pair.there).cause is Cause.RETRY
        assert pair.counts()["duplicates"] == pair.counts()["failures"] - 1 == 0

    def test_a_renewal_moves_the_lease_and_carries_what_was_spent(self, pair: Scene):
        claim = pair.claim(pair.address())
        answer = pair.here.perform(Renew(claim, 2 * LEASE, DAY, SPENT))
        assert isinstance(answer, Renewed)
        assert answer.owns
        assert LEASE < answer.left <= 2 * LEASE
        assert pair.there.look(claim.address)[0].lines[0].spent == SPENT

    def test_a_withdrawn_claim_was_no_execution(self, pair: Scene):
        address = pair.address()
        claim = pair.claim(address)
        pair.there.perform(Withdraw(address, claim.nonce, CALLER))
        record = pair.record(address)
        assert (record.runs, record.lines, record.leavers) == (0, (), (claim.nonce,))
        assert pair.here.perform(pair.begin(address, claim.nonce)) == Over()
        assert pair.windows() == {}

    def test_forget_lets_the_next_execute_as_forced(self, pair: Scene):
        address = pair.address()
        pair.keep(address)
        assert pair.there.perform(Forget(address, "order")) == Done()
        assert pair.record(address).result is None
        assert pair.claim(address).cause is Cause.FORCED

    def test_resolve_keeps_a_result_and_yields_to_a_fresh_one(self, pair: Scene):
        address = pair.address()
        claim = pair.claim(address)
        order = Resolve(address, "order", CALLER, VALUE, TTL)
        assert pair.there.perform(order) == Done()
        answer = pair.here.perform(pair.complete(claim, Value("json", b"2")))
        assert answer == Ended(kept=False, lost=False, runs=1)
        again = pair.here.perform(Resolve(address, "another", CALLER, VALUE, TTL))
        assert isinstance(again, Replay)
        assert again.result.value == VALUE

    def test_an_observer_executes_beside_all_and_keeps_nothing(self, pair: Scene):
        address = pair.address()
        pair.keep(address)
        claim = pair.claim(address, pair.there, mode=Mode.OBSERVE)
        assert (claim.cause, claim.holds) == (Cause.OBSERVED, False)
        told = pair.there.perform(pair.complete(claim, Value("json", b"2")))
        assert told == Ended(kept=False, lost=False, runs=2)
        assert pair.record(address).result.value == VALUE

    def test_another_payload_under_one_key_is_a_conflict(self, pair: Scene):
        address = pair.address()
        pair.claim(address, digest="one")
        assert pair.there.perform(pair.begin(address, digest="two")) == Conflict(1)
        claimed = pair.there.perform(pair.begin(address, digest="two", mode=Mode.OBSERVE))
        assert claimed.conflict

    def test_a_fallback_has_one_place_beside_the_leader(self, pair: Scene):
        address = pair.address()
        leader = pair.claim(address)
        beside = pair.claim(address, pair.there, beside=leader.id)
        assert beside.cause is Cause.FALLBACK
        assert isinstance(pair.here.perform(pair.begin(address, beside=leader.id)), InFlight)
        assert pair.there.perform(pair.complete(beside)).kept
        late = pair.here.perform(pair.complete(leader, Value("json", b"2")))
        assert not late.kept
        assert pair.record(address).result.value == VALUE

    def test_a_lease_that_ran_out_is_taken_over_or_unknown(self, timed: Scene):
        address = timed.address()
        lost = timed.claim(address)
        timed.clock.advance(LEASE)
        unknown = timed.there.perform(timed.begin(address, rerun_lost=False))
        assert unknown == Unknown(lost, 1)
        successor = timed.claim(address, timed.there)
        assert successor.cause is Cause.LOST
        assert successor.token > lost.token
        assert timed.here.perform(Renew(lost, LEASE, DAY)) == Over()
        late = timed.here.perform(timed.complete(lost, Value("json", b"late")))
        assert late == Ended(kept=False, lost=True, runs=2)
        timed.there.perform(timed.complete(successor))
        assert timed.record(address).result.value == VALUE
        statuses = [line.status for line in timed.record(address).lines]
        assert statuses == [Status.LATE, Status.OK]

    def test_a_sweep_makes_final_what_is_lost(self, timed: Scene):
        claim = timed.claim(timed.address())
        assert timed.there.call("overdue", timed.namespace) == []
        timed.clock.advance(LEASE)
        assert timed.there.call("overdue", timed.namespace) == [claim.address]
        assert timed.there.perform(Sweep(claim.address)) == Done()
        assert timed.there.call("overdue", timed.namespace) == []
        assert timed.counts()["lost"] == 1

    def test_a_result_is_reused_for_its_ttl(self, timed: Scene):
        address = timed.address()
        timed.keep(address, 10 * MINUTE)
        timed.clock.advance(10 * MINUTE - 1)
        assert isinstance(timed.there.perform(timed.begin(address)), Replay)
        timed.clock.advance(1)
        assert timed.claim(address, timed.there).cause is Cause.EXPIRED

    def test_with_no_ttl_only_those_who_overlapped_share(self, timed: Scene):
        address = timed.address()
        claim = timed.claim(address)
        waiting = timed.there.perform(timed.begin(address, "w"))
        timed.here.perform(timed.complete(claim, ttl=0))
        timed.clock.advance(1)
        replay = timed.there.perform(timed.begin(address, "w", since=waiting.since))
        assert isinstance(replay, Replay)
        assert timed.claim(address, timed.there).cause is Cause.EXPIRED

    def test_a_token_outlives_forget_and_the_record(self, timed: Scene):
        address = timed.address()
        first = timed.claim(address)
        timed.here.perform(Forget(address, "order"))
        second = timed.claim(address, timed.there)
        assert second.token > first.token
        timed.clock.advance(2 * DAY)
        third = timed.claim(address, timed.there)
        assert (third.cause, timed.record(address).runs) == (Cause.FIRST, 1)
        assert third.token > second.token

    @pytest.mark.parametrize(
        "name",
        ["begin", "waiting", "renew", "complete", "declined", "unsure", "release", "withdraw",
         "forget", "resolve", "sweep"],
    )  # fmt: skip
    def test_a_command_that_arrives_twice_is_answered_alike(self, pair: Scene, name):
        address = pair.address()
        if name == "begin":
            command = pair.begin(address)
        else:
            claim = pair.claim(address)
            command = {
                "waiting": pair.begin(address, "other", since=pair.clock()),
                "renew": Renew(claim, 2 * LEASE, DAY, SPENT),
                "declined": Release(claim, Status.DECLINED, SPENT),
                "unsure": Release(claim, Status.LOST, SPENT),
                "sweep": Sweep(address),
                **pair.ends(claim),
            }[name]
        once = pair.here.perform(command)
        record, windows = pair.record(address), pair.windows()
        twice = pair.there.perform(command)
        if not pair.kind.steerable:
            assert type(twice) is type(once)
            return
        assert twice == once
        assert pair.record(address) == record
        assert pair.windows() == windows

    def test_addresses_never_meet(self, scene: Scene):
        here = scene.namespace
        parts = [
            {}, {"version": "None"}, {"version": "0"}, {"version": " "}, {"version": "v:1"},
            {"scope": "a"}, {"scope": "a", "version": "a"}, {"scope": "a:b"}, {"scope": "a/b"},
            {"scope": "a", "version": "b"}, {"scope": "A"}, {"scope": "a\0"}, {"scope": "a\0b"},
            {"scope": "'; --"}, {"scope": '"'}, {"scope": "*"}, {"scope": "%"}, {"scope": "{x}"},
            {"scope": "\N{SNOWMAN}\N{PILE OF POO}"}, {"scope": "é"}, {"scope": "e\u0301"},
            {"scope": "a\nb"}, {"scope": " a"}, {"scope": "a "}, {"scope": "x" * 5000},
            {"namespace": here + ":"}, {"namespace": here + "a"}, {"namespace": here.upper() + "A"},
            {"namespace": here + "{}"}, {"namespace": here + "*"}, {"namespace": here + "\0"},
            {"namespace": here, "scope": ":"}, {"namespace": here + ":", "scope": ":"},
        ]  # fmt: skip
        addresses = [scene.address("x", **part) for part in parts]
        assert len(set(addresses)) == len(addresses)
        claims = [scene.claim(address) for address in addresses]
        assert {claim.cause for claim in claims} == {Cause.FIRST}
        for address, claim in zip(addresses, claims, strict=True):
            record = scene.record(address)
            assert [line.claim for line in record.lines] == [claim]
        for namespace in {address.namespace for address in addresses}:
            mine = [address for address in addresses if address.namespace == namespace]
            assert scene.here.call("addresses", namespace, "") == mine

    @pytest.mark.parametrize("data", [b"", b"\0", b"null\n", bytes(range(256)), b"x" * 70_000])
    @pytest.mark.parametrize("codec", ["json", "tagged", "unstorable"])
    def test_a_value_comes_back_as_it_was(self, pair: Scene, codec, data):
        value = Value(codec, data)
        claim = pair.claim(pair.address())
        pair.here.perform(pair.complete(claim, value))
        replay = pair.there.perform(pair.begin(claim.address))
        assert replay.result.value == value
        assert type(replay.result.value.data) is bytes

    def test_zero_is_not_unknown(self, pair: Scene):
        zero = Spent(1, Usage(input_tokens=0, output_tokens=0), (0,), (), 0, "USD")
        unknown = Spent(1, Usage(), (), (), None, None)
        for spent in (zero, unknown, Spent(nested=True), Spent()):
            claim = pair.claim(pair.address(spent))
            pair.here.perform(pair.complete(claim, spent=spent))
            assert pair.record(claim.address).lines[0].spent == spent
            replay = pair.there.perform(pair.begin(claim.address))
            assert replay.result.spent == spent

    def test_a_text_that_is_no_unicode_is_kept_or_refused_in_words(self, scene: Scene):
        odd = scene.address(scope="\ud800")
        refused = None
        try:
            scene.store.perform(scene.begin(odd))
        except StoreError as error:
            refused = error
        assert refused is not None or scene.record(odd).runs == 1
        assert scene.claim(scene.address("after")).cause is Cause.FIRST

    def test_of_many_at_once_one_claims(self, pair: Scene):
        address, start = pair.address(), threading.Barrier(9)

        def ask(number: int):
            start.wait()
            return pair.store.perform(pair.begin(address, f"t{number}"))

        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(ask, number) for number in range(8)]
            start.wait()
            there = pair.there.perform(pair.begin(address, "there"))
            answers = [there, *(one.result() for one in asked)]
        claimed = [a for a in answers if isinstance(a, Claimed)]
        assert len(claimed) == 1
        assert {a.holder for a in answers if isinstance(a, InFlight)} == {claimed[0].claim}
        assert pair.counts()["found"] == 8

    def test_many_tasks_at_once_lose_no_count(self, pair: Scene):
        def execute(number: int) -> None:
            claim = pair.claim(pair.address(number), nonce=f"h{number}")
            pair.here.perform(pair.complete(claim, spent=SPENT))

        with ThreadPoolExecutor(4) as threads:
            done = [threads.submit(execute, number) for number in range(40)]
            for number in range(40, 60):
                claim = pair.claim(pair.address(number), pair.there, nonce=f"t{number}")
                pair.there.perform(pair.complete(claim, spent=SPENT))
            for one in done:
                one.result()
        counts = pair.counts()
        assert (counts["tasks"], counts["call_executed"], counts["input"]) == (60, 60, 420)

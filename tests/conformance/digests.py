"""Conformance: what a store keeps of a payload's fields: digests, made with its own secret."""

from __future__ import annotations

import pytest
from conformance.scene import CALLER, DAY, EVER, LEASE, TTL, VALUE, Scene

from idemguard.claim import Complete, Release, Renew, Resolve
from idemguard.digests import DROPPED, UNMATCHED, raw_digests
from idemguard.fingerprint import identify_payload
from idemguard.record import Address, Caller, Cause, Claim, Status

NOW = "2026-11-30T08:42:03Z"


def caller_of(payload: object, **options: object) -> Caller:
    """Who asks, with what a call tells a store of its payload."""
    return CALLER._replace(digests=raw_digests(identify_payload("summarise", payload, **options)))


def digests_of(scene: Scene, address: Address) -> list[dict[str, str]]:
    """What the lines of a record keep, as another caller reads them."""
    return [dict(line.claim.caller.digests) for line in scene.record(address).lines]


def is_keyed(digest: str) -> bool:
    """Whether it is eight hex digits, and a mark where the value looks generated."""
    return len(digest.rstrip("!")) == 8 and set(digest.rstrip("!")) <= set("0123456789abcdef")


class Digests:
    """Cases of field digests."""

    def test_a_line_keeps_digests_made_with_the_secret(self, pair: Scene):
        caller = caller_of({"doc": "a", "at": NOW, "n": 1})
        claim = pair.claim(pair.address(1), caller=caller)
        (told,) = digests_of(pair, claim.address)
        assert set(told) == {"doc", "at", "n"}
        assert all(map(is_keyed, told.values()))
        assert {name for name, digest in told.items() if digest.endswith("!")} == {"at"}
        raw = dict(caller.digests)
        assert not any(raw[name].startswith(digest[:8]) for name, digest in told.items())
        assert dict(claim.caller.digests) == told

    def test_equal_values_have_equal_digests_wherever_they_come_from(self, pair: Scene):
        one = pair.claim(pair.address(1), caller=caller_of({"doc": "a", "n": 1}))
        other = pair.claim(pair.address(2), pair.there, caller=caller_of({"doc": "a", "n": 2}))
        again = pair.claim(pair.address(3), caller=caller_of({"n": 2, "doc": "b"}))
        one, other, again = (digests_of(pair, c.address)[0] for c in (one, other, again))
        assert one["doc"] == other["doc"] != again["doc"]
        assert one["n"] != other["n"] == again["n"]

    def test_another_namespace_has_other_digests(self, scene: Scene):
        caller = caller_of({"doc": "a", "n": 1})
        here = scene.claim(scene.address(), caller=caller)
        there = scene.claim(scene.address(namespace=scene.namespace + "2"), caller=caller)
        one, other = (digests_of(scene, claim.address)[0] for claim in (here, there))
        assert all(is_keyed(digest) for digest in (*one.values(), *other.values()))
        assert one["doc"] != other["doc"]
        assert one["n"] != other["n"]

    def test_names_that_were_left_out_are_told_as_they_are(self, scene: Scene):
        caller = caller_of({"doc": "a", "request_id": "r"}, volatile=("trace",))
        claim = scene.claim(scene.address(), caller=caller)
        (told,) = digests_of(scene, claim.address)
        assert is_keyed(told.pop("doc"))
        assert told == {"request_id": DROPPED, "trace": UNMATCHED}

    @pytest.mark.parametrize("end", ["complete", "failed", "declined", "unsure"])
    def test_the_end_of_an_unguarded_execution_is_keyed_too(self, pair: Scene, end):
        caller = caller_of({"doc": "a", "at": NOW})
        guarded = pair.claim(pair.address("guarded"), caller=caller)
        address = pair.address("unguarded")
        claim = Claim(address, 0, "n.u", Cause.UNGUARDED, 0, 0, holds=False, caller=caller)
        status = {"failed": Status.FAILED, "declined": Status.DECLINED, "unsure": Status.LOST}
        pair.there.perform(
            Complete(claim, VALUE, TTL, LEASE) if end == "complete" else Release(claim, status[end])
        )
        (told,) = digests_of(pair, address)
        assert told == digests_of(pair, guarded.address)[0]
        assert all(map(is_keyed, told.values()))

    def test_what_came_back_from_a_store_is_not_keyed_again(self, pair: Scene):
        claim = pair.claim(pair.address(), caller=caller_of({"doc": "a"}))
        before = digests_of(pair, claim.address)
        pair.there.perform(Renew(claim, 2 * LEASE, DAY))
        assert digests_of(pair, claim.address) == before
        pair.here.perform(pair.complete(claim))
        assert digests_of(pair, claim.address) == before

    def test_a_command_with_digests_that_arrives_twice_is_answered_alike(self, pair: Scene):
        ask = pair.begin(pair.address(), caller=caller_of({"doc": "a"}))
        once, twice = pair.here.perform(ask), pair.there.perform(ask)
        assert once.claim == twice.claim
        assert len(digests_of(pair, ask.address)) == 1

    def test_an_order_leaves_no_digest_that_others_could_make(self, scene: Scene):
        caller = caller_of({"doc": "a"})
        scene.here.perform(Resolve(scene.address(), "o", caller, VALUE, TTL))
        kept = scene.record(scene.address()).result.claim.caller.digests
        assert all(is_keyed(digest) for _, digest in kept)

    def test_who_waits_is_told_what_the_line_keeps(self, pair: Scene):
        caller = caller_of({"doc": "a"})
        claim = pair.claim(pair.address(), caller=caller)
        waiting = pair.there.perform(pair.begin(pair.address(), caller=caller))
        assert waiting.holder == claim
        lines = pair.there.call("lines", pair.namespace, 0, EVER)
        assert [line.claim for line in lines] == [claim]

    def test_the_secret_of_the_digests_is_the_namespaces(self, pair: Scene):
        one = pair.claim(pair.address(1), caller=caller_of({"doc": "a"}))
        secret = pair.there.call("secret", pair.namespace)
        pair.there.call("close")
        two = pair.claim(pair.address(2), pair.there, caller=caller_of({"doc": "a"}))
        assert digests_of(pair, one.address) == digests_of(pair, two.address)
        assert pair.here.call("secret", pair.namespace) == secret

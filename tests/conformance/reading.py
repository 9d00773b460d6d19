"""Conformance: what a store tells of all its records, and what it removes."""

from __future__ import annotations

from decimal import Decimal

from conformance.meanwhile import Writer, read_at_once, read_between
from conformance.scene import DAY, EVER, HOUR, LEASE, MINUTE, TTL, Scene

from idemguard import ExecutionLedger
from idemguard.claim import Begin, Complete, Release, Renew, Withdraw
from idemguard.codec import Value
from idemguard.record import Address, Mode
from idemguard.usage import Spent, Usage
from idemguard.windows import SPAN


class Reading:
    """Cases of everything but `perform` and `park`."""

    def test_addresses_by_the_beginning_of_their_fingerprint(self, pair: Scene):
        prints = ["a" * 64, "ab" + "0" * 62, "a" * 63 + "b", "f" * 64, "0" * 64]
        addresses = [Address(pair.namespace, print_) for print_ in prints]
        addresses.append(addresses[0]._replace(scope="s", version="2"))
        for address in addresses:
            pair.claim(address)
        pair.claim(addresses[0]._replace(namespace=pair.namespace + "2"))

        def found(prefix):
            return pair.there.call("addresses", pair.namespace, prefix)

        assert found("") == addresses
        assert found("a") == [addresses[i] for i in (0, 1, 2, 5)]
        assert found("a" * 10) == [addresses[i] for i in (0, 2, 5)]
        assert found("a" * 64) == [addresses[i] for i in (0, 5)]
        assert found("0") == [addresses[4]]
        for nothing in ("b", "%", "_", "*", "A", "[a]", "a" * 65, "\0"):
            assert found(nothing) == []

    def test_a_record_that_is_over_has_no_address(self, timed: Scene):
        timed.keep(timed.address())
        timed.clock.advance(DAY - 1)
        assert timed.there.call("addresses", timed.namespace, "") == [timed.address()]
        timed.clock.advance(1)
        assert timed.there.call("addresses", timed.namespace, "") == []

    def test_who_was_only_waited_for_has_no_record(self, scene: Scene):
        address = scene.address()
        scene.store.park(address, None, lambda: None)()
        assert scene.here.call("addresses", scene.namespace, "") == []
        assert scene.record(address).kept_until == 0
        assert scene.claim(address).cause == "first"

    def test_overdue_is_what_stands_open_with_its_lease_past(self, timed: Scene):
        early = [timed.claim(timed.address(n)) for n in range(3)]
        timed.claim(early[0].address._replace(namespace=timed.namespace + "2"))
        timed.here.perform(Complete(early[1], Value("json", b"1"), TTL, LEASE))
        timed.clock.advance(LEASE - 1)
        assert timed.there.call("overdue", timed.namespace) == []
        timed.claim(timed.address("new"))
        timed.clock.advance(1)
        overdue = timed.there.call("overdue", timed.namespace)
        assert sorted(overdue) == sorted([early[0].address, early[2].address])

    def test_lines_by_their_start(self, steered: Scene):
        starts = []
        for number in range(40):
            claim = steered.claim(steered.address(number % 7))
            steered.here.perform(Release(claim))
            starts.append((claim.started, claim.id))
            steered.clock.advance((number % 3) * 1000)

        def found(since, until):
            lines = steered.here.call("lines", steered.namespace, since, until)
            return [(line.started, line.execution_id) for line in lines]

        assert sorted(found(0, EVER)) == sorted(starts)
        assert [start for start, _ in found(0, EVER)] == [start for start, _ in starts]
        first, last = starts[10][0], starts[30][0]
        within = [start for start, _ in starts if first <= start < last]
        assert [start for start, _ in found(first, last)] == within
        assert found(last, last) == found(EVER - 1, EVER) == found(0, starts[0][0]) == []
        assert steered.here.call("lines", steered.namespace + "2", 0, EVER) == []

    def test_thousands_of_lines_come_each_once(self, pair: Scene):
        ids = set()
        for number in range(1100):
            claim = pair.store.perform(
                Begin(pair.address(number), "n", pair.begin(pair.address()).caller, LEASE)
            ).claim
            ids.add((claim.address, claim.id))
            if number % 100 == 0:
                for again in range(3):
                    pair.store.perform(Release(claim))
                    claim = pair.store.perform(pair.begin(claim.address, f"a{again}")).claim
                    ids.add((claim.address, claim.id))
        lines = pair.there.call("lines", pair.namespace, 0, EVER)
        assert len(lines) == len(ids) == 1133
        assert {(line.claim.address, line.execution_id) for line in lines} == ids
        starts = [line.started for line in lines]
        assert starts == sorted(starts)

    def test_a_line_that_stands_comes_once_whatever_is_written_meanwhile(self, timed: Scene):
        writer = Writer(timed)
        read_between(writer, timed)
        read_at_once(writer, timed)

    def test_lines_may_be_left_half_read(self, scene: Scene):
        for number in range(3):
            scene.claim(scene.address(number))
        lines = scene.store.lines(scene.namespace, 0, EVER)
        next(lines)
        scene.claim(scene.address("meanwhile"))  # nothing is held up by the reader
        del lines
        assert len(scene.here.call("lines", scene.namespace, 0, EVER)) == 4

    def test_windows_overlap_the_time_that_is_asked_for(self, timed: Scene):
        start = timed.clock() - timed.clock() % SPAN
        for _ in range(3):
            timed.claim(timed.address(timed.clock()))
            timed.clock.advance(SPAN)

        def found(since, until):
            windows = timed.there.call("windows", timed.namespace, since, until)
            return sorted((window.key.start - start) // SPAN for window in windows)

        assert found(0, EVER) == [0, 1, 2]
        assert found(start + SPAN, start + SPAN + 1) == [1]
        assert found(start + SPAN - 1, start + SPAN) == [0]
        assert found(start + SPAN - 1, start + SPAN + 1) == [0, 1]
        assert (
            found(start + SPAN, start + SPAN)
            == found(0, start)
            == found(start + 3 * SPAN, EVER)
            == []
        )

    def test_windows_by_task_type_and_agent(self, pair: Scene):
        for number, agent in enumerate([None, "None", "a", "a\0", "'"]):
            for task_type in ("t", "T", "t'", "t\0"):
                address = pair.address((number, task_type))
                caller = pair.begin(address).caller._replace(task_type=task_type, agent=agent)
                pair.claim(address, caller=caller)
        assert len(pair.windows()) == 20
        assert {counts["tasks"] for counts in pair.windows().values()} == {1}

    def test_old_windows_are_rolled_up_to_hours(self, timed: Scene):
        spent = Spent(1, Usage(input_tokens=5, output_tokens=2**40), cost=2**50)
        for number in range(30):  # two and a half hours
            claim = timed.claim(timed.address(number))
            timed.here.perform(Complete(claim, Value("json", b"1"), TTL, LEASE, spent))
            timed.here.perform(timed.begin(claim.address))
            timed.clock.advance(SPAN)
        before = timed.counts()
        timed.there.call("tend", None)
        assert {span for *_, span in timed.windows()} == {SPAN}
        timed.clock.advance(DAY + HOUR)
        timed.there.call("tend", None)
        assert {span for *_, span in timed.windows()} == {HOUR}
        assert len(timed.windows()) == 3
        assert timed.counts() == before
        timed.clock.advance(2 * MINUTE)
        timed.here.call("tend", None)
        assert timed.counts() == before
        middle = min(timed.windows())[0] + HOUR // 2
        assert len(timed.there.call("windows", timed.namespace, middle, middle + 1)) == 1

    def test_what_comes_late_is_counted_with_its_hour(self, timed: Scene):
        claims = [timed.claim(timed.address(number), lease=3 * DAY) for number in range(2)]
        timed.clock.advance(DAY + 2 * HOUR)
        timed.there.call("tend", None)
        spent = Spent(1, Usage(input_tokens=5))
        for claim in claims:  # its start has been rolled up meanwhile
            timed.here.perform(Complete(claim, Value("json", b"1"), TTL, LEASE, spent))
        timed.clock.advance(2 * MINUTE)
        timed.here.call("tend", None)
        counts = timed.counts()
        assert (counts["input"], counts["cause_first"], counts["call_executed"]) == (10, 2, 2)
        assert sorted(span for *_, span in timed.windows()) == [SPAN, HOUR]

    def test_a_window_in_which_nothing_is_left_is_rolled_up_too(self, timed: Scene):
        claim = timed.claim(timed.address())
        timed.here.perform(Withdraw(claim.address, claim.nonce, claim.caller))
        timed.clock.advance(DAY + 2 * HOUR)
        timed.there.call("tend", 9 * DAY)
        assert timed.windows() == {}

    def test_windows_live_for_their_retention(self, timed: Scene):
        timed.claim(timed.address())
        timed.clock.advance(DAY + 3 * HOUR)
        timed.there.call("tend", 2 * DAY)
        assert len(timed.windows()) == 1
        timed.clock.advance(DAY)
        timed.there.call("tend", 2 * DAY)
        assert timed.windows() == {}

    def test_windows_without_a_retention_live_for_ever(self, timed: Scene):
        timed.claim(timed.address())
        timed.clock.advance(4000 * DAY)
        timed.there.call("tend", None)
        assert timed.counts()["tasks"] == 1

    def test_what_is_over_is_removed(self, timed: Scene):
        old = timed.keep(timed.address("old"))
        long = timed.claim(timed.address("long"))
        timed.here.perform(Complete(long, Value("json", b"1"), 9 * DAY, LEASE))
        timed.clock.advance(DAY + 2 * HOUR)
        timed.keep(timed.address("new"))
        timed.there.call("tend", None)
        assert timed.record(old.address).kept_until == 0
        addresses = [timed.address("long"), timed.address("new")]
        assert timed.there.call("addresses", timed.namespace, "") == addresses
        lines = timed.there.call("lines", timed.namespace, 0, EVER)
        assert {line.claim.address for line in lines} == set(addresses)
        assert timed.record(long.address).result is not None

    def test_sums_outlive_the_lines_that_they_are_of(self, timed: Scene):
        usage = Usage(input_tokens=100, output_tokens=10, cache_read_tokens=40)
        spent = Spent(
            1, usage, (100,), ("r",), 7_000, "USD", "v", nested=True, parts=(1_000, 2_000, 3_000),
            inner=(5, 6, 7), unpriced=1,
        )  # fmt: skip
        for number in range(3):
            claim = timed.claim(timed.address(number))
            half = spent._replace(reports=0, cost=3_000, parts=(500, 0, 0), inner=(2, 3, 4))
            timed.there.perform(Renew(claim, LEASE, DAY, half))
            timed.here.perform(Complete(claim, Value("json", b"1"), TTL, LEASE, spent))
            beside = timed.claim(claim.address, mode=Mode.OBSERVE)
            timed.here.perform(Complete(beside, Value("json", b"1"), TTL, LEASE, spent))
            timed.here.perform(timed.begin(claim.address))
        ledger = ExecutionLedger(timed.store, namespace=timed.namespace)
        before, types = ledger.totals(), ledger.task_types()
        assert (before["executions"], before["total_tokens"], before["charged"]) == (
            6, 660, Decimal("0.000000042"),
        )  # fmt: skip
        assert (before["wasted_tokens"], before["saved_tokens"]) == (330, 330)
        assert before["inclusive_tokens"] == 660 + 66
        timed.clock.advance(3 * DAY)
        timed.there.call("tend", None)
        assert timed.there.call("lines", timed.namespace, 0, EVER) == []
        assert ledger.totals() == before
        assert ledger.task_types() == types
        assert ledger.agent_summary("researcher") == {"agent": "researcher", **before}
        assert ledger.task_type_summary("summarise") == {"task_type": "summarise", **before}

    def test_a_result_goes_before_its_record(self, timed: Scene):
        claim = timed.keep(timed.address(), ttl=MINUTE)
        timed.clock.advance(2 * MINUTE)
        timed.there.call("tend", None)
        record = timed.record(claim.address)
        assert record.result is None
        assert len(record.lines) == 1
        assert timed.claim(claim.address).cause == "expired"

    def test_thousands_of_records_are_removed(self, timed: Scene):
        for number in range(1500):
            timed.store.perform(timed.begin(timed.address(number), "n"))
        timed.clock.advance(2 * DAY)
        timed.there.call("tend", DAY)
        assert timed.there.call("lines", timed.namespace, 0, EVER) == []
        assert timed.windows() == {}

    def test_the_secret_is_one_for_all(self, pair: Scene):
        secret = pair.there.call("secret", pair.namespace)
        assert len(secret) >= 32
        assert pair.here.call("secret", pair.namespace) == secret
        assert pair.here.call("secret", pair.namespace + "2") != secret
        pair.there.call("close")
        assert pair.there.call("secret", pair.namespace) == secret

    def test_two_objects_that_ask_at_once_get_one_secret(self, pair: Scene):
        for number in range(10):
            name = f"{pair.namespace}-{number}"
            assert pair.here.call("secret", name) == pair.there.call("secret", name)

"""Conformance: whoever waits is woken, once, by whoever ends what is waited for."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from conformance.parties import LONG
from conformance.scene import CALLER, LEASE, PATIENT, Scene

from idemguard.claim import Begin, Complete, Forget, InFlight, Release, Replay, Withdraw
from idemguard.drive import adrive, drive
from idemguard.guard import Await
from idemguard.record import Mode
from idemguard.stores.bridge import InThread

ROUNDS = 60  # of a race; enough to meet it where it can be lost


class Bell:
    """What `park` is given: counts how often it was woken."""

    def __init__(self) -> None:
        self.rings = 0
        self._rang = threading.Event()

    def __call__(self) -> None:
        self.rings += 1
        self._rang.set()

    def rang(self, timeout: float = LONG) -> bool:
        """Whether it was woken within so many seconds."""
        return self._rang.wait(timeout)


class Waiting:
    """Cases of `park`."""

    @pytest.mark.parametrize("name", ["complete", "release", "withdraw", "forget", "resolve"])
    def test_every_end_wakes_who_waits(self, pair: Scene, name):
        claim = pair.claim(pair.address())
        wait = pair.there.wait(claim.address, pair.holder(claim.address, pair.there))
        pair.here.perform(pair.ends(claim)[name])
        assert pair.there.woken(wait)

    def test_the_end_of_a_fallback_wakes_those_who_want_its_place(self, pair: Scene):
        leader = pair.claim(pair.address())
        beside = pair.claim(leader.address, beside=leader.id)
        waits = [pair.there.wait(leader.address, leader.id) for _ in range(3)]
        pair.here.perform(Release(beside))
        assert all(pair.there.woken(wait) for wait in waits)

    def test_a_result_wakes_all(self, pair: Scene):
        claim = pair.claim(pair.address())
        waits = [pair.there.wait(claim.address, claim.id) for _ in range(5)]
        bells = [Bell() for _ in range(5)]
        for bell in bells:
            pair.store.park(claim.address, claim.id, bell)
        pair.here.perform(pair.complete(claim))
        assert all(pair.there.woken(wait) for wait in waits)
        assert [bell.rings for bell in bells] == [1] * 5  # at once, in the same process

    def test_a_failure_wakes_one_and_who_leaves_passes_it_on(self, scene: Scene):
        claim = scene.claim(scene.address())
        bells = [Bell() for _ in range(3)]
        for bell in bells:
            scene.store.park(claim.address, claim.id, bell)
        scene.here.perform(Release(claim))
        assert [bell.rings for bell in bells] == [1, 0, 0]
        scene.here.perform(Withdraw(claim.address, "gave up", CALLER, "failed"))
        assert [bell.rings for bell in bells] == [1, 1, 0]

    def test_a_result_wakes_all_although_one_of_them_leaves_at_once(self, pair: Scene):
        for number in range(10):
            claim = pair.claim(pair.address(number))
            waits = [pair.there.wait(claim.address, claim.id) for _ in range(3)]
            pair.here.perform(pair.complete(claim))
            # before those who look on from another process have seen the first hint
            pair.here.perform(Withdraw(claim.address, "cancelled", CALLER, "failed"))
            assert all(pair.there.woken(wait, LEASE / 2000) for wait in waits)

    def test_another_task_wakes_nobody(self, scene: Scene):
        claim, other = scene.claim(scene.address("a")), scene.claim(scene.address("b"))
        bell = Bell()
        unpark = scene.store.park(claim.address, claim.id, bell)
        scene.here.perform(scene.complete(other))
        scene.here.perform(scene.begin(claim.address))
        assert bell.rings == 0
        unpark()

    def test_what_is_over_already_wakes_at_once(self, pair: Scene):
        kept = pair.keep(pair.address("kept"))
        failed = pair.claim(pair.address("failed"))
        pair.here.perform(Release(failed))
        taken = pair.claim(pair.address("taken"))
        pair.here.perform(Forget(taken.address, "order"))
        successor = pair.claim(taken.address)
        for claim in (kept, failed, taken):
            bell = Bell()
            pair.store.park(claim.address, claim.id, bell)
            assert bell.rings == 1
            assert pair.there.woken(pair.there.wait(claim.address, claim.id))
        nobody, bell = pair.address("nobody"), Bell()
        pair.store.park(nobody, "1-n", bell)
        assert bell.rings == 1
        assert successor.id != taken.id

    def test_a_lease_that_is_past_wakes_at_once(self, timed: Scene):
        claim = timed.claim(timed.address())
        timed.clock.advance(LEASE)
        assert timed.there.woken(timed.there.wait(claim.address, claim.id))

    def test_who_waits_for_a_result_where_nobody_executes_is_woken_by_it(self, pair: Scene):
        address = pair.address()
        wait = pair.there.wait(address, None)
        bell = Bell()
        pair.store.park(address, None, bell)
        assert bell.rings == 0
        pair.keep(address)
        assert pair.there.woken(wait)
        assert bell.rings == 1

    def test_who_was_unparked_is_woken_no_more(self, scene: Scene):
        claim, bell = scene.claim(scene.address()), Bell()
        unpark = scene.store.park(claim.address, claim.id, bell)
        unpark()
        unpark()
        later = Bell()
        again = scene.store.park(claim.address, claim.id, later)
        scene.here.perform(scene.complete(claim))
        again()
        assert (bell.rings, later.rings) == (0, 1)

    def test_a_second_claim_is_waited_for_like_the_first(self, pair: Scene):
        address = pair.address()
        for _ in range(3):
            claim = pair.claim(address, pair.there)
            bell = Bell()
            pair.store.park(address, claim.id, bell)
            pair.there.perform(Release(claim))
            assert bell.rang()

    def test_no_end_slips_in_between_the_question_and_the_waiting(self, pair: Scene):
        for number in range(ROUNDS):
            address = pair.address(number)
            claim = pair.claim(address)
            ended = threading.Thread(target=pair.here.perform, args=(pair.complete(claim),))
            asked = pair.there.perform(pair.begin(address, "w", lease=PATIENT))
            ended.start()
            if isinstance(asked, InFlight):
                wait = pair.there.wait(address, asked.holder.id)
                assert pair.there.woken(wait)
            again = pair.there.perform(pair.begin(address, "w", since=0))
            assert isinstance(again, Replay)
            ended.join()

    def test_every_hand_over_reaches_the_next(self, pair: Scene):
        # leader after leader fails; the others, here and there, take over one at a time
        address = pair.address()
        claim = pair.claim(address)
        for number in range(ROUNDS // 4):
            holder = claim.id
            wait = pair.there.wait(address, holder)
            bell = Bell()
            unpark = pair.store.park(address, holder, bell)
            (pair.here, pair.there)[number % 2].perform(Release(claim))
            # one of them, where both are in one process; it leaves, and so hints at the other
            pair.here.perform(Withdraw(address, f"left {number}", CALLER, "failed"))
            assert pair.there.woken(wait)
            assert bell.rang()
            unpark()
            claim = pair.claim(address, (pair.there, pair.here)[number % 2])

    def test_two_hundred_threads_are_all_served(self, pair: Scene):
        claim, store = pair.claim(pair.address(), pair.there), pair.store
        parked, served = threading.Semaphore(0), []

        class Counted:
            perform, look = store.perform, store.look

            def park(self, *args):
                try:
                    return store.park(*args)
                finally:
                    parked.release()

        def flow(nonce):
            first = yield Begin(claim.address, nonce, CALLER, PATIENT)
            passed = yield Await(claim.address, first.holder.id, round(LONG * 1000))
            assert passed < LONG * 1000, "nobody has woken it"
            return (yield Begin(claim.address, nonce, CALLER, PATIENT, since=first.since))

        def call(number):
            served.append(drive(flow(f"c{number}"), Counted(), None, None))

        threads = [threading.Thread(target=call, args=(n,), daemon=True) for n in range(200)]
        for thread in threads:
            thread.start()
        assert all(parked.acquire(timeout=LONG) for _ in threads)
        pair.there.perform(pair.complete(claim))
        end = time.monotonic() + 2 * LONG
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))
        assert len(served) == 200
        assert all(isinstance(answer, Replay) for answer in served)
        assert pair.counts()["call_reused"] == pair.counts()["found"] == 200

    def test_two_hundred_tasks_are_all_served(self, pair: Scene):
        claim = pair.claim(pair.address(), pair.there)
        aio = getattr(pair.store, "aio", None) or InThread(pair.store)
        parked = []

        class Counted:
            perform, look = aio.perform, aio.look

            async def park(self, *args):
                unpark = await aio.park(*args)
                parked.append(args)
                if len(parked) == 200:
                    threading.Thread(target=end).start()
                return unpark

        def end():
            pair.there.perform(pair.complete(claim))

        def flow(nonce):
            first = yield Begin(claim.address, nonce, CALLER, PATIENT)
            passed = yield Await(claim.address, first.holder.id, round(LONG * 1000))
            assert passed < LONG * 1000, "nobody has woken it"
            return (yield Begin(claim.address, nonce, CALLER, PATIENT, since=first.since))

        async def main():
            calls = (adrive(flow(f"c{n}"), Counted(), None, None) for n in range(200))
            return await asyncio.wait_for(asyncio.gather(*calls), LONG)

        assert all(isinstance(answer, Replay) for answer in asyncio.run(main()))

    def test_a_cancelled_command_is_done_to_its_end(self, scene: Scene):
        aio = getattr(scene.store, "aio", None) or InThread(scene.store)
        address = scene.address()

        async def main():
            asked = asyncio.ensure_future(aio.perform(scene.begin(address, "gone")))
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
            async with asyncio.timeout(LONG):
                while not (await aio.look(address))[0].runs:  # noqa: ASYNC110 - nobody is told when it is done
                    await asyncio.sleep(0.002)

        asyncio.run(main())

    def test_a_store_that_was_closed_opens_again(self, pair: Scene):
        claim = pair.claim(pair.address())
        pair.store.close()
        pair.store.close()
        wait = pair.there.wait(claim.address, claim.id)
        assert pair.here.perform(pair.complete(claim)).kept
        assert pair.there.woken(wait)

    def test_a_loop_that_is_gone_wakes_nobody_and_harms_nobody(self, scene: Scene):
        claim = scene.claim(scene.address())
        aio = getattr(scene.store, "aio", None) or InThread(scene.store)

        async def give_up():
            wish = Await(claim.address, claim.id, round(LONG * 1000))
            waiting = asyncio.ensure_future(adrive(iter_one(wish), aio, None, None))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()

        asyncio.run(give_up())
        bell = Bell()
        scene.store.park(claim.address, claim.id, bell)
        scene.here.perform(Complete(claim, scene.complete(claim).value, 0, LEASE))
        assert bell.rings == 1

    def test_an_observer_is_never_waited_for(self, pair: Scene):
        address = pair.address()
        pair.keep(address, ttl=0)
        leader = pair.claim(address)
        observer = pair.claim(address, pair.there, mode=Mode.OBSERVE)
        bell = Bell()
        pair.store.park(address, leader.id, bell)
        pair.here.perform(pair.complete(observer))
        assert bell.rings == 0
        pair.here.perform(pair.complete(leader))
        assert bell.rings == 1


def iter_one(wish):
    return (yield wish)

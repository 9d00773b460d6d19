"""Conformance: that all lines of a namespace can be read while others write to it."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count, cycle

from conformance.scene import CALLER, EVER, LEASE, TTL, VALUE, Scene

from idemguard.claim import Claimed, Complete, Withdraw
from idemguard.record import Address, Cause, Claim, Execution, Mode

RECORDS = 540  # more than a store reads at once
HOT = 2  # records that hold as many lines as a record may
LINES = 64
TURNS = 60  # of who writes meanwhile

Name = tuple[str, str]


def name(line: Execution) -> Name:
    """What tells a line from all others of a namespace."""
    return line.fingerprint, line.execution_id


class Writer:
    """Fills a namespace, and then writes to it whatever moves, adds or removes a line.

    Args:
        scene: whose first caller fills it, and whose second writes.
        steps: ms between two starts, in turn.

    Attributes:
        stands: the lines that it leaves where they are.

    """

    def __init__(self, scene: Scene, steps: Iterable[int] = (0, 1)) -> None:
        self._scene = scene
        self._numbers, self._steps = count(), cycle(steps)
        # digits alike at first, so that a store which spreads them has them all in one place
        self._addresses = [
            scene.address()._replace(fingerprint=f"a{number:063x}") for number in range(RECORDS)
        ]
        claims = [self._begin(address) for address in self._addresses]
        for claim in claims[:HOT]:
            self._end(claim)
            for _ in range(LINES - 1):
                self._end(self._begin(claim.address, Mode.OBSERVE))
        self._leaving = deque(claims[HOT:-100:4])
        self._late = deque(self._addresses[:HOT:-1])
        leaving = {claim.address for claim in self._leaving}
        self.stands = {
            (claim.address.fingerprint, claim.id)
            for claim in claims[HOT:]
            if claim.address not in leaving
        }
        self._start = claims[0].started
        self._turns = cycle([self._run_again, self._leave, self._leave, self._tell_late])
        self._hot = cycle(self._addresses[:HOT])
        self._by = scene.there

    def _begin(self, address: Address, mode: Mode = Mode.ENFORCE) -> Claim:
        answer = self._scene.store.perform(self._scene.begin(address, mode=mode))
        assert isinstance(answer, Claimed)
        self._scene.clock.advance(next(self._steps))
        return answer.claim

    def _end(self, claim: Claim) -> None:
        self._scene.store.perform(Complete(claim, VALUE, TTL, LEASE))

    def write(self) -> None:
        """One thing more."""
        next(self._turns)()

    def _run_again(self) -> None:
        """Where a record is full, its oldest line is dropped."""
        claim = self._scene.claim(next(self._hot), self._by, mode=Mode.OBSERVE)
        self._by.perform(Complete(claim, VALUE, TTL, LEASE))

    def _leave(self) -> None:
        """A line is removed, and its task begins anew."""
        claim = self._leaving.popleft()
        self._by.perform(Withdraw(claim.address, claim.nonce, CALLER))
        self._leaving.append(self._scene.claim(claim.address, self._by))

    def _tell_late(self) -> None:
        """What ran while the store was down is told when it is back: its start is long past."""
        address = self._late[0]
        self._late.rotate(-1)
        nonce = f"late-{next(self._numbers)}"
        claim = Claim(
            address, 0, nonce, Cause.UNGUARDED, 0, self._start, holds=False, caller=CALLER
        )
        self._by.perform(Complete(claim, VALUE, TTL, LEASE))


def check(given: Iterable[Execution], stands: set[Name]) -> None:
    """Every line that stood there was given, none twice, the oldest first."""
    given = list(given)
    counted = Counter(name(line) for line in given)
    assert [one for one, times in counted.items() if times > 1] == []
    assert stands - counted.keys() == set()
    starts = [line.started for line in given]
    assert starts == sorted(starts)


def read_between(writer: Writer, scene: Scene) -> None:
    """Read the lines, and write between one and the next."""
    before, given = _there(scene), []
    for number, line in enumerate(scene.store.lines(scene.namespace, 0, EVER)):
        given.append(line)
        if number % 8 == 0:
            writer.write()
    after = _there(scene)
    assert before - after  # the test would show nothing else
    assert after - before
    assert before & after > writer.stands
    check(given, before & after)


def _there(scene: Scene) -> set[Name]:
    return {name(line) for line in scene.store.lines(scene.namespace, 0, EVER)}


def read_at_once(writer: Writer, scene: Scene) -> None:
    """Read the lines again and again, while another thread, or process, writes."""
    reading = threading.Event()

    def write() -> None:
        reading.wait()
        for _ in range(TURNS):
            writer.write()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        reading.set()
        check(scene.store.lines(scene.namespace, 0, EVER), writer.stands)
        while not writing.done():
            check(scene.store.lines(scene.namespace, 0, EVER), writer.stands)
        writing.result()

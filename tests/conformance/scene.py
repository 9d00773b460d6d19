"""What a conformance test works with: a store on a fresh folder, its callers, and their commands."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

from conformance.kinds import Clock, Kind, RealClock
from conformance.parties import Elsewhere, Party, Remote

from idemguard.claim import (
    Begin,
    Claimed,
    Complete,
    Forget,
    InFlight,
    Release,
    Resolve,
    Withdraw,
)
from idemguard.codec import Value
from idemguard.record import Address, Caller, Claim, Record
from idemguard.stores import Store
from idemguard.windows import Window

LEASE, TTL, DAY, MINUTE, HOUR = 30_000, 900_000, 86_400_000, 60_000, 3_600_000
PATIENT = 20 * LEASE  # of who waits: a third of its lease is long after a test has given up
CALLER = Caller("summarise", "w-1", "researcher")
VALUE = Value("json", b'{"idemguard":1,"value":null}\n')
EVER = 2**62


class Scene:
    """A store, two callers, and short words for what they ask.

    Args:
        kind: of the store.
        folder: fresh.
        driver: by which both callers ask.
        elsewhere: the process of the second caller; None: it is in this one.

    """

    def __init__(
        self, kind: Kind, folder: Path, driver: str, elsewhere: Elsewhere | None = None
    ) -> None:
        self.kind, self.folder = kind, folder
        self._driver, self._elsewhere = driver, elsewhere
        steering = Clock(folder / "clock") if kind.steerable else None
        self._given = steering
        self.clock: Clock | RealClock = steering or RealClock()
        self.store: Store = kind.make(folder, steering)
        self.here = Party(self.store, driver)
        self._there: Party | Remote | None = None
        self.namespace = folder.name
        self._numbers = itertools.count()

    @property
    def there(self) -> Party | Remote:
        """The second caller, made when it is first asked for."""
        if self._there is None and self._elsewhere is None:
            self._there = Party(self.kind.make(self.folder, self._given), self._driver)
        elif self._there is None:
            self._there = self._elsewhere.open(self.kind, self.folder, self._given, self._driver)
        return self._there

    def close(self) -> None:
        """Give all back."""
        if self._there is not None:
            self._there.close()
        self.here.close()

    # --- what is asked -----------------------------------------------------------------------------

    def address(self, name: object = "", **parts: Any) -> Address:
        """An address of this test."""
        fingerprint = hashlib.sha256(str(name).encode()).hexdigest()
        return Address(**{"namespace": self.namespace, "fingerprint": fingerprint} | parts)

    def begin(self, address: Address, nonce: str | None = None, **more: Any) -> Begin:
        """A call asks."""
        nonce = f"n{next(self._numbers)}" if nonce is None else nonce
        return Begin(address, nonce, **{"caller": CALLER, "lease": LEASE} | more)

    def claim(self, address: Address, by: Party | Remote | None = None, **more: Any) -> Claim:
        """A call asks, and may execute."""
        answer = (by or self.here).perform(self.begin(address, **more))
        assert isinstance(answer, Claimed), answer
        return answer.claim

    def holder(self, address: Address, by: Party | Remote | None = None) -> str:
        """A call asks, and learns who executes."""
        answer = (by or self.here).perform(self.begin(address, lease=PATIENT))
        assert isinstance(answer, InFlight), answer
        return answer.holder.id

    def keep(self, address: Address, ttl: int = TTL, **more: Any) -> Claim:
        """An execution with a result that is kept."""
        claim = self.claim(address, **more)
        self.here.perform(Complete(claim, VALUE, ttl, LEASE))
        return claim

    def complete(self, claim: Claim, value: Value = VALUE, ttl: int = TTL, **more: Any) -> Complete:
        """An execution ends with a value."""
        return Complete(claim, value, ttl, LEASE, **more)

    def ends(self, claim: Claim) -> dict[str, Any]:
        """Every command that leaves nobody executing, by name."""
        return {
            "complete": self.complete(claim),
            "release": Release(claim),
            "withdraw": Withdraw(claim.address, claim.nonce, CALLER),
            "forget": Forget(claim.address, "order"),
            "resolve": Resolve(claim.address, "order", CALLER, VALUE, TTL),
        }

    # --- what is seen -------------------------------------------------------------------------------

    def record(self, address: Address) -> Record:
        """The record as the second caller, if there is one, reads it."""
        return (self._there or self.here).look(address)[0]

    def windows(self) -> dict[tuple[Any, ...], dict[str, int]]:
        """All windows of the test in which anything is counted, by their keys."""
        found: list[Window] = self.here.call("windows", self.namespace, 0, EVER)
        counted = {
            (*window.key, window.span): {name: n for name, n in window.counts.items() if n}
            for window in found
        }
        assert len(counted) == len(found)
        return {key: counts for key, counts in counted.items() if counts}

    def counts(self) -> Counter[str]:
        """All windows' counts together."""
        counts: Counter[str] = Counter()
        for window in self.windows().values():
            counts.update(window)
        return counts

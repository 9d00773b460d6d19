"""Commands at random, each made of what was answered before; a seed tells which."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

from lua.model import Act, Emptied, Evicted, Expected, Model, Share, TooMuchError

from idemguard.claim import (
    Begin,
    Claimed,
    Command,
    Complete,
    Forget,
    InFlight,
    Release,
    Renew,
    Resolve,
    Sweep,
    Unknown,
    Withdraw,
)
from idemguard.codec import Value
from idemguard.record import Address, Caller, Cause, Claim, Mode, Status
from idemguard.usage import NOTHING, Spent, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable

START = 1_800_000_000_000
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
LEASE, MAX_RUN = 30_000, 10 * MINUTE

TASKS = ("t", "send mail", 'é"\\/')
AGENTS = (None, "a", "ü b")
OUTCOMES = (None, None, "failed", "refused", "reused")
RESTS: tuple[dict[str, Any], ...] = (
    {}, {}, {"parent": "7-n"}, {"trace_id": "ab" * 16, "span_id": "cd" * 8},
    {"digests": (("to", "d1"), ("a/b", 'd"2'))},
)  # fmt: skip
USAGES = (
    None,
    Usage(),
    Usage(input_tokens=0, output_tokens=0),
    Usage(input_tokens=12, output_tokens=7, model="m"),
    Usage(
        input_tokens=2**53 + 1, output_tokens=5, cache_read_tokens=2**55 + 3, cache_write_tokens=1,
        reasoning_tokens=2, provider="p", response_id="r",
    ),
    Usage(input_tokens=2**62, reasoning_tokens=2**62 - 1),
    Usage(output_tokens=3),
)  # fmt: skip
VALUES = (
    Value("json", b"1"),
    Value("json", b""),
    Value("tagged", bytes(range(256))),
    Value("unstorable", "zu groß".encode()),
)

COMMON = {
    "begin": 32, "again": 8, "renew": 12, "complete": 14, "release": 10, "withdraw": 6, "leave": 3,
    "forget": 3, "resolve": 4, "sweep": 4, "share": 4, "emptied": 1, "evicted": 1, "unguarded": 3,
    "repeat": 5,
}  # fmt: skip
# what some sequences are about: leavers, lines, tokens of commands whose claims are gone
ABOUT: tuple[dict[str, int], ...] = (
    {},
    {},
    {},
    {"leave": 40},
    {"emptied": 14, "complete": 30, "renew": 30},
    {"begin": 60, "complete": 40},
    {"forget": 15, "resolve": 20},
)


class Plan(NamedTuple):
    """A sequence, and what a server must do at it."""

    label: str
    acts: tuple[Act, ...]
    expected: tuple[Expected | None, ...]
    model: Model
    addresses: tuple[Address, ...]


def closed(acts: Iterable[Act], addresses: tuple[Address, ...]) -> list[Act]:
    """With steps so that what some could not touch is owed nothing when it goes, or at the end."""
    acts = list(acts)
    if not any(act.alone for act in acts):
        return acts
    done: list[Act] = []
    for act in acts:
        if isinstance(act.what, Emptied):
            done.append(Act(act.now, Sweep(act.what.address)))
        done.append(act)
    return done + [Act(acts[-1].now, Sweep(address)) for address in addresses]


def sane(plan: Plan) -> bool:
    """Whether one id means one claim, as it does where no two calls have one nonce."""
    claims: dict[tuple[Address, str], Claim] = {}
    for act, told in zip(plan.acts, plan.expected, strict=True):
        for holder in (act.what, told and told.answer):
            claim = getattr(holder, "claim", None)
            if claim is None or not claim.token:
                continue
            if claims.setdefault((claim.address, claim.id), claim) != claim:
                return False
    return True


def plan(label: str, acts: Iterable[Act], addresses: tuple[Address, ...]) -> Plan:
    """What a server must do at these acts."""
    model, done, expected = Model(), [], []
    for act in acts:
        try:
            expected.append(model.perform(act))
        except TooMuchError:
            continue
        done.append(act)
    return Plan(label, tuple(done), tuple(expected), model, addresses)


def generated(seed: int, label: str, *, moving: bool = False, crowded: bool = False) -> Plan:
    """The sequence of a seed.

    Args:
        seed: any number.
        label: begins its namespace.
        moving: some of its commands get the record's key alone, as while a slot moves.
        crowded: it begins with more executions than a record remembers; else few do.

    """
    return _Generator(seed, f"{label}{seed}", moving=moving, crowded=crowded).run()


class _Generator:
    def __init__(self, seed: int, namespace: str, *, moving: bool, crowded: bool) -> None:
        self.chance = chance = random.Random(seed)
        self.namespace = namespace
        digit = chance.choice("09af")
        one = Address(namespace, digit + f"{seed % 16**8:08x}" * 7 + "0123456")
        others = (
            one._replace(scope="s/é"),
            one._replace(version="2:b"),
            one._replace(fingerprint=digit + "e" * 63),
            one._replace(fingerprint="5" + "e" * 63, scope="x:y", version=""),
        )
        self.addresses = (one, *chance.sample(others, chance.choice((0, 0, 0, 1, 1, 2))))
        self.moving = chance.choice((0.2, 0.5, 0.8)) if moving else 0.0
        self.model = Model()
        self.now = START + chance.randrange(HOUR)
        self.claims: list[Claim] = []
        self.owed: list[Claim] = []
        self.asks: list[Begin] = []
        self.since: dict[str, int] = {}
        self.last: Any = None
        self.count = 0
        self.lease = chance.choice((LEASE, LEASE, 2 * HOUR, 50))
        self.retention = chance.choice((DAY, DAY, HOUR, MINUTE, 1))
        self.digests: tuple[str | None, ...] = chance.choice(
            ((None,), ("d",), (None, "d", "d", "e", ""))
        )
        self.strict = chance.random() < 0.2  # nobody reruns what was lost
        self.crowd = self.in_crowd = 0
        weights = COMMON | chance.choice(ABOUT)
        size = chance.random()
        if crowded or size > 0.998:
            self.crowd = chance.randrange(100, 350)  # executions that begin or end, at its start
            self.left_open = chance.choice((0.02, 0.3))
            self.length = self.crowd + chance.randrange(10, 60)
            self.retention = 8 * DAY
            weights = weights | {"emptied": 0}
        elif size < 0.7:
            self.length = chance.randrange(3, 15)
        else:
            self.length = chance.randrange(15, 40)
        if moving:
            weights = weights | {"evicted": 0}
        self.kinds, self.weights = tuple(weights), tuple(weights.values())

    def run(self) -> Plan:
        acts: list[Act] = []
        expected: list[Expected | None] = []

        def add(what: Any, *, alone: bool = False) -> None:
            act = Act(self.now, what, alone)
            try:
                told = self.model.perform(act)
            except TooMuchError:
                return
            acts.append(act)
            expected.append(told)
            if told is not None and not isinstance(what, Share):
                self._heard(what, told)

        while len(acts) < self.length:
            address = self._address()
            if self.crowd > 0:
                self.crowd -= 1
                self.now += 1
                what = self._crowd(address)
            else:
                self._pass(address)
                what = self._command(address)
            if what is None:
                continue
            alone = self.chance.random() < self.moving
            if isinstance(what, (Emptied, Evicted)):
                alone = False
                if self.moving:  # what is owed would be gone with it
                    add(Sweep(what.address))
            add(what, alone=alone)
        if self.moving:
            for address in self.addresses:
                add(Sweep(address))
        return Plan(self.namespace, tuple(acts), tuple(expected), self.model, self.addresses)

    def _heard(self, what: Command, told: Expected) -> None:
        self.last = what
        answer = told.answer
        match answer:
            case Claimed(claim=claim) | InFlight(holder=claim) | Unknown(lost=claim):
                if claim not in self.claims[-20:]:
                    # emptied within the milliseconds that tokens run ahead, it may give one anew
                    self.claims = [other for other in self.claims if other.id != claim.id]
                    self.claims.append(claim)
        if isinstance(answer, InFlight):
            self.since[what.nonce] = answer.since

    def _address(self) -> Address:
        return self.addresses[0 if self.chance.random() < 0.8 else -1]

    def _pass(self, address: Address) -> None:
        chance, way = self.chance, self.chance.random()
        if way < 0.5:
            return
        if way < 0.62:
            self.now += chance.choice((1, 7, 50, 700))
            return
        if way < 0.9:  # to where something ends
            record = self.model.records.get(address)
            if record is None:
                return
            ends = {line.until for line in record.lines} | {record.kept_until}
            ends |= {line.claim.started + MAX_RUN for line in record.lines}
            if record.result is not None:
                ends |= {record.result.until, record.result.gone}
            later = sorted(end for end in ends if end > self.now)[:5]
            if later:
                self.now = max(self.now, chance.choice(later) + chance.choice((-1, 0, 0, 1)))
            return
        self.now += chance.choice(
            (self.lease // 3, self.lease - 1, self.lease, 5 * MINUTE, MAX_RUN, HOUR, 2 * DAY)
        )

    def _crowd(self, address: Address) -> Any:
        """One more execution, or the end of one."""
        if self.in_crowd and self.in_crowd == len(self.claims):
            self.in_crowd = 0
            if self.chance.random() > self.left_open:
                return self._release(self.claims[-1])
        self.in_crowd = len(self.claims) + 1
        mode = self.chance.choice((Mode.BYPASS, Mode.BYPASS, Mode.OBSERVE, Mode.ENFORCE))
        self.asks.append(Begin(address, self._nonce(), self._caller(), 3 * DAY, mode=mode))
        return self.asks[-1]

    def _command(self, address: Address) -> Any:
        chance = self.chance
        kind = chance.choices(self.kinds, self.weights)[0]
        match kind:
            case "begin":
                return self._begin(address)
            case "again":
                return self._again()
            case "leave":
                return self._withdraw(address, self._nonce())
            case "withdraw" if self.asks:
                ask = self._recent(self.asks)
                return self._withdraw(ask.address, ask.nonce, ask.caller)
            case "forget":
                return Forget(address, f"o{chance.randrange(4)}", self._retention())
            case "resolve":
                ttl = chance.choice((0, 1, MINUTE, DAY, 3 * DAY))
                order, value = f"o{chance.randrange(4)}", chance.choice(VALUES)
                return Resolve(address, order, self._caller(), value, ttl, self._retention())
            case "sweep":
                return Sweep(address)
            case "share":
                return self._share(address)
            case "emptied":
                return Emptied(address)
            case "evicted":
                return Evicted(address)
            case "unguarded":
                return self._unguarded(address)
            case "repeat":
                return self.last
        if not self.claims:
            return None
        claim = self._claim(address)
        match kind:
            case "renew":
                lease = chance.choice((self.lease, self.lease, 1, 0))
                max_run = chance.choice((MAX_RUN, MAX_RUN, MAX_RUN, DAY, 0))
                return Renew(
                    claim, lease, max_run, self._spent(), self._retention(),
                    brief=chance.random() < 0.1,
                )  # fmt: skip
            case "complete":
                return self._complete(claim)
            case "release":
                return self._release(claim)
        return self._withdraw(claim.address, claim.nonce, claim.caller)

    def _begin(self, address: Address) -> Begin:
        chance, mode, beside, since = self.chance, Mode.ENFORCE, None, None
        way = chance.random()
        if way < 0.08:
            mode = Mode.OBSERVE
        elif way < 0.16:
            mode = Mode.BYPASS
        elif way < 0.36:  # waited long enough
            record = self.model.record(address, self.now)
            beside = record.leader if chance.random() < 0.8 else record.fallback
            if chance.random() < 0.15 and self.claims:
                beside = self._recent(self.claims).id
        if chance.random() < 0.15:
            since = self.now - chance.choice((0, 1, 50, self.lease, HOUR))
        ask = Begin(
            address, self._nonce(), self._caller(), self.lease, chance.choice(self.digests), mode,
            rerun_lost=not self.strict or chance.random() < 0.3, since=since, beside=beside,
            retention=self._retention(), brief=chance.random() < 0.1,
        )  # fmt: skip
        self.asks.append(ask)
        return ask

    def _again(self) -> Begin | None:
        if not self.asks:
            return None
        ask = self._recent(self.asks)
        mode = ask.mode if self.chance.random() < 0.8 else self.chance.choice(tuple(Mode))
        return Begin(
            ask.address, ask.nonce, ask.caller, self.chance.choice((self.lease, 1, 10 * LEASE)),
            ask.digest, mode, ask.rerun_lost, self.since.get(ask.nonce), ask.beside,
            self._retention(),
        )  # fmt: skip

    def _complete(self, claim: Claim) -> Complete:
        chance = self.chance
        ttl = chance.choice((900_000, 900_000, MINUTE, 1, 0, 2 * DAY))
        lease = chance.choice((self.lease, self.lease, 1))
        value = VALUES[0] if chance.random() < 0.5 else chance.choice(VALUES)
        return Complete(
            claim, value, ttl, lease, self._spent(), self._retention(), self._ago(),
            brief=chance.random() < 0.1,
        )  # fmt: skip

    def _release(self, claim: Claim) -> Release:
        status = self.chance.choice((Status.FAILED, Status.FAILED, Status.DECLINED, Status.LOST))
        return Release(claim, status, self._spent(), self._retention(), self._ago())

    def _withdraw(self, address: Address, nonce: str, caller: Caller | None = None) -> Withdraw:
        caller = caller or self._caller()
        return Withdraw(address, nonce, caller, self.chance.choice(OUTCOMES), self._retention())

    def _unguarded(self, address: Address) -> Complete | Release:
        started = self.now - self.chance.choice((0, 5, 700, HOUR))
        self.count += 1
        claim = Claim(
            address, 0, f"n{self.count}.u", Cause.UNGUARDED, 0, started, holds=False,
            caller=self._caller(),
        )  # fmt: skip
        if self.owed and self.chance.random() < 0.2:  # told again, and its start computed anew
            claim = self._recent(self.owed)
            claim = claim._replace(started=claim.started + self.chance.choice((-1, 2)))
        elif self.chance.random() < 0.3:
            self.claims.append(claim)
        else:
            self.owed.append(claim)
        if self.chance.random() < 0.5:
            return self._complete(claim)
        return self._release(claim)

    def _share(self, address: Address) -> Share:
        labels = {(self.chance.choice(TASKS), self.chance.choice(AGENTS)) for _ in range(2)}
        shares = tuple(
            (*label, self.chance.choice((0, 1, 30)), self.chance.choice((1, 2, 5)))
            for label in sorted(labels, key=repr)
        )
        return Share(address, self._retention(), shares)

    def _claim(self, address: Address) -> Claim:
        """One of the newest, one that holds a place now, or any."""
        record = self.model.records.get(address)
        if record is not None and record.lines and self.chance.random() < 0.4:
            return self.chance.choice(record.lines[-4:]).claim
        return self._recent(self.claims)

    def _recent(self, items: list[Any]) -> Any:
        return items[-1 - min(int(self.chance.expovariate(0.7)), len(items) - 1)]

    def _nonce(self) -> str:
        if self.asks and self.chance.random() < 0.04:
            return self.chance.choice(self.asks).nonce
        self.count += 1
        return f"n{self.count}" if self.chance.random() < 0.9 else f'n/é"{self.count}'

    def _caller(self) -> Caller:
        chance = self.chance
        number = self.count if self.crowd else chance.randrange(3)
        return Caller(
            chance.choice(TASKS), f"w{number}", chance.choice(AGENTS), **chance.choice(RESTS)
        )

    def _spent(self) -> Spent:
        chance = self.chance
        if chance.random() < 0.5:
            return NOTHING
        usage = chance.choice(USAGES)
        return Spent(
            chance.choice((1, 2, 9, 10, 11, 100, 2**53 + 1, 2**53 + 2, 2**62)), usage,
            chance.choice(((), (1, 2**62))), chance.choice(((), ("r1", "é"))),
            chance.choice((None, 0, 5, 10**12, 2**53 + 1, 2**60 + 1)), chance.choice((None, "USD")),
            chance.choice((None, "v1")), chance.random() < 0.2,
            chance.choice((None, None, (0, 0, 0), (5, 0, 2), (2**60, 1, 2**53 + 1))),
            chance.choice((None, None, (0, 0, 0), (7, 1, 30), (2**53 + 1, 2, 2**60))),
            chance.choice((0, 0, 0, 1, 12)),
        )  # fmt: skip

    def _ago(self) -> int:
        return self.chance.choice((0, 0, 0, 4, 5_000, 2 * HOUR))

    def _retention(self) -> int:
        return self.retention if self.chance.random() < 0.9 else self.chance.choice((1, DAY))

"""How steps are sent to a server, and what is done when it does not answer as it should.

Pure but for the clock of patience: an exchange yields what to send, or seconds to rest; whoever
drives it does the I/O, with a sync client or on a loop, and throws in what the client raises.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from idemguard.claim import Begin, Forget, Renew
from idemguard.digests import keyed, unkeyed
from idemguard.errors import StoreError, StoreUnavailableError
from idemguard.stores import wire
from idemguard.stores.clients import connecting, meaning, spoken, stumbled
from idemguard.stores.patience import Patience, Then
from idemguard.stores.scripts import script

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from idemguard.claim import Answer, Command
    from idemguard.record import Address, Execution, Record
    from idemguard.stores.clients import Clients

REGISTERED = 400 * 86_400_000  # ms that a namespace is remembered after a process began to write
AWAY = 0.5  # seconds after an outage in which who must not be held up does not try
SECRET_LIVES = 400 * 86_400_000  # ms after its last use
READING, BOOKING = "reading the ledger", "booking calls"


class Request:
    """What is sent to the server: a script by its name, or with its text, or a plain command."""

    __slots__ = ("args", "key")

    def __init__(self, args: tuple[Any, ...], key: str) -> None:
        self.args = args
        self.key = key


Exchange: TypeAlias = "Generator[Request | float, Any, Any]"


class Talk:
    """What one process, or one loop, sends to the server.

    Args:
        clients: of the server.
        clock: tells ms, for tests; None: the server's.
        name: of the process that speaks.
        namespaces: those that this process has written to, each with its secret, or None where
            that is not known.

    """

    def __init__(
        self,
        clients: Clients,
        clock: Callable[[], int] | None,
        name: str,
        namespaces: dict[str, bytes | None],
    ) -> None:
        self._clients = clients
        self._namespaces = namespaces
        self._clock = clock
        self._verb = "SPUBLISH" if clients.cluster else "PUBLISH"
        self.name = name
        self._loaded: set[str] = set()  # scripts that the server has seen, in a cluster by shard
        self._away_until = 0.0

    def now(self) -> int | str:
        """The clock that scripts go by."""
        return "" if self._clock is None else self._clock()

    def perform(self, command: Command) -> Exchange:
        """Have a script perform a command; gives its reply."""
        namespace = command.address.namespace
        doing = f"{type(command).__name__.lower()} of task {command.address.fingerprint[:16]}"
        known_here, secret = namespace in self._namespaces, self._namespaces.get(namespace)
        asks = False
        if secret is None and unkeyed(command):
            asks = (
                not self._clients.cluster and type(command) is Begin
            )  # and is told with the answer
            if not asks:
                secret = yield from self.secret(namespace)
        if secret is not None:
            known = secret
            command = keyed(command, lambda: known)
        step = wire.step(command)
        if asks:
            step = step._replace(
                keys=(*step.keys, wire.NAMESPACES, wire.secret_key(namespace)),
                args=(*step.args, secrets.token_bytes(32), SECRET_LIVES),
            )
        elif not known_here:
            if self._clients.cluster:
                entry = ("SADD", wire.NAMESPACES, wire.in_registry(namespace))
                yield from self.plain(entry, wire.NAMESPACES, doing)
                life = ("PEXPIRE", wire.NAMESPACES, REGISTERED)
                yield from self.plain(life, wire.NAMESPACES, doing)
            else:
                step = step._replace(keys=(*step.keys, wire.NAMESPACES))
        brief = getattr(command, "brief", False) and type(command) is not Renew
        try:
            reply = yield from self.step(step, doing, brief=brief)
        except StoreError as error:
            if type(command) is not Forget or not stumbled(error.__cause__):
                raise
            for key in step.keys[:2]:  # what no script can read is dropped whole
                yield from self.plain(("DEL", key), key, doing)
            reply = yield from self.step(step, doing, brief=brief)
        if asks:
            *reply, secret = reply
        self._namespaces[namespace] = secret
        return reply

    def secret(self, namespace: str) -> Exchange:
        """Have a namespace's secret told, made where there is none."""
        args = (secrets.token_bytes(32), SECRET_LIVES)
        return self.run("secret", (wire.secret_key(namespace),), args, READING)

    def answer(self, command: Command, reply: list[Any]) -> Answer:
        """What a command's reply means.

        Raises:
            StoreError: what is kept is damaged.

        """
        try:
            return wire.answer(command, reply)
        except Exception as error:
            raise self.damaged(command.address) from error

    def record(self, address: Address, reply: list[Any]) -> tuple[Record, int]:
        """A record as a reply tells it, and the server's clock; raises as `answer`."""
        try:
            return wire.record(address, reply)
        except Exception as error:
            raise self.damaged(address) from error

    def execution(self, address: Address, line: list[Any]) -> Execution:
        """A line as a reply tells it; raises as `answer`."""
        try:
            return wire.execution(address, line)
        except Exception as error:
            raise self.damaged(address) from error

    def damaged(self, address: Address) -> StoreError:
        """The error of a record that cannot be read."""
        return StoreError(
            f"{self._clients.name}: the record of task {address.fingerprint[:16]} is damaged; "
            "forget() the task to drop it",
            fingerprint=address.fingerprint,
        )

    def look(self, address: Address) -> Exchange:
        """Have a record read; gives its reply."""
        return self.step(wire.look(address), READING)

    def step(self, step: wire.Step, doing: str, *, brief: bool = False) -> Exchange:
        """Have a script do one step on one record; gives its reply."""
        args = (self.now(), self._verb, self.name, step.retention, *step.args)
        reply = yield from self.run(
            step.script, step.keys, args, doing, brief=brief, divisible=True
        )
        if reply.__class__ is list and wire.elsewhere(reply):
            content = yield from self.plain(
                ("HMGET", step.keys[1], "source", "spent", "codec", "data"), step.keys[1], doing
            )
            if None in content:
                raise StoreUnavailableError(
                    f"{doing} at {self._clients.name} failed for now: the slot of its result is moving"
                )
            reply = wire.completed(reply, content)
        return reply

    def run(
        self, name: str, keys: tuple[str, ...], args: tuple[Any, ...], doing: str,
        *, brief: bool = False, divisible: bool = False,
    ) -> Exchange:  # fmt: skip
        """Run a script; gives its reply.

        Args:
            name: of the script.
            keys: that it may touch.
            args: of its own.
            doing: what that is, for messages.
            brief: the caller must not be held up.
            divisible: it can go to the first key alone while the slot is moving.

        Raises:
            StoreError, StoreUnavailableError: as the server, or its absence, says.

        """
        if brief and time.monotonic() < self._away_until:
            raise StoreUnavailableError(
                f"{doing} at {self._clients.name} was not tried: it did not answer just now"
            )
        lua = script(name)
        # each node of a cluster has scripts of its own, and all of a slot's keys are at one
        seen = f"{name} {keys[0].partition('}')[0]}" if self._clients.cluster else name
        load = seen not in self._loaded
        started, patience = time.monotonic(), None
        while True:
            head = ("EVAL", lua.text) if load else ("EVALSHA", lua.sha)
            try:
                reply = yield Request((*head, len(keys), *keys, *args), keys[0])
            except Exception as error:  # noqa: BLE001 - what it means is decided below
                if patience is None:
                    patience = Patience(started, brief=brief, grace=self._grace())
                then = self._after(
                    error, patience, doing, cold=not load, alone=not divisible or len(keys) == 1
                )
                if then is Then.LOAD:
                    load = True
                elif then is Then.ALONE:
                    keys = keys[:1]
                elif patience.pause:
                    yield patience.pause
            else:
                if load:
                    self._loaded.add(seen)
                return reply

    def plain(self, args: tuple[Any, ...], key: str, doing: str) -> Exchange:
        """Send a plain command; gives its reply."""
        started, patience = time.monotonic(), None
        while True:
            try:
                return (yield Request(args, key))
            except Exception as error:  # noqa: BLE001 - what it means is decided below
                if patience is None:
                    patience = Patience(started, brief=False, grace=self._grace())
                self._after(error, patience, doing, cold=False, alone=True)
                if patience.pause:
                    yield patience.pause

    def _grace(self) -> float:
        return getattr(self._clients, "connect_timeout", None) or 1.0

    def _after(
        self, error: Exception, patience: Patience, doing: str, *, cold: bool, alone: bool
    ) -> Then:
        if isinstance(error, StoreError):
            raise error
        means = meaning(error)
        if means is None:
            raise StoreError(
                f"{doing} at {self._clients.name} failed: {type(error).__name__}: {error}"
            ) from error
        reaching = connecting(error)
        then = patience.after(means, time.monotonic(), connecting=reaching, cold=cold, alone=alone)
        if then is Then.GIVE_UP:
            said = spoken(error, self._clients.name, doing)
            if isinstance(said, StoreUnavailableError):
                self._away_until = time.monotonic() + AWAY
            raise said from error
        return then

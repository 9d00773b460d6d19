"""Sends sequences to a real server in few round trips, and compares all that it says and holds."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from lua.model import EMPTY, Emptied, Evicted, Share, counted
from lua.sequences import closed, plan, sane

from idemguard.claim import Complete
from idemguard.stores import scripts, wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lua.model import Act, Expected
    from lua.sequences import Plan

PATIENCE = 60.0  # seconds
FEW = 12  # lines; a record of more is not looked at after every command
COMMANDS = (
    "begin", "renew", "complete", "release", "withdraw", "forget", "resolve", "sweep", "share",
)  # fmt: skip


class ServerError(Exception):
    """An error that the server replied with."""


class Difference(NamedTuple):
    """Where a server does not what the rules say."""

    plan: Plan
    act: int  # how many acts were done before
    what: str
    expected: object
    found: object

    def __str__(self) -> str:
        acts = "\n".join(f"  {number}: {act}" for number, act in enumerate(self.plan.acts))
        return (
            f"{self.plan.label}: at act {self.act} the {self.what} is\n  {self.found!r}\nand not\n"
            f"  {self.expected!r}\n{acts}"
        )


class Line:
    """One connection: many commands out, many replies in."""

    def __init__(self, host: str, port: int, db: int = 0) -> None:
        self._socket = socket.create_connection((host, port), PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data, self._at = b"", 0
        self.send([framed("SELECT", db)])
        assert self.reply() == b"OK"

    def send(self, frames: Iterable[bytes]) -> None:
        self._socket.sendall(b"".join(frames))

    def ask(self, *words: object) -> Any:
        """One command, one reply."""
        self.send([framed(*words)])
        return self.reply()

    def reply(self) -> Any:
        """The next reply; an error is one too."""
        while True:
            try:
                reply, self._at = _parsed(self._data, self._at)
            except (ValueError, IndexError):
                self._more()
            else:
                return reply

    def _more(self) -> None:
        received = self._socket.recv(1 << 20)
        assert received, "the server hung up"
        self._data, self._at = self._data[self._at :] + received, 0

    def close(self) -> None:
        self._socket.close()


def _parsed(data: bytes, at: int) -> tuple[Any, int]:
    end = data.index(b"\r\n", at)
    kind, rest = data[at], end + 2
    if kind == 36:  # $
        size = int(data[at + 1 : end])
        if size < 0:
            return None, rest
        after = rest + size + 2
        if after > len(data):
            raise IndexError
        return data[rest : after - 2], after
    if kind == 58:  # :
        return int(data[at + 1 : end]), rest
    if kind == 42:  # *
        items = []
        for _ in range(int(data[at + 1 : end])):
            end = data.index(b"\r\n", rest)
            if data[rest] == 36 and (size := int(data[rest + 1 : end])) >= 0:
                rest = end + size + 4  # most are texts: they are not worth a call
                items.append(data[end + 2 : rest - 2])
            else:
                item, rest = _parsed(data, rest)
                items.append(item)
        if rest > len(data):
            raise IndexError
        return items, rest
    text = data[at + 1 : end]
    return (text if kind == 43 else ServerError(text.decode())), rest


def framed(*words: object) -> bytes:
    """A command as it goes over the wire."""
    parts = [f"*{len(words)}\r\n".encode()]
    for word in words:
        text = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)


class Runner:
    """Runs sequences on a server, with the scripts as they are or with others.

    Args:
        host: of the server.
        port: of the server.
        db: a database of its own, which is emptied.
        label: begins its sequences' namespaces.
        texts: other texts of scripts, by name.

    """

    def __init__(
        self, host: str, port: int, *, db: int = 0, label: str = "q",
        texts: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.label = label
        self._line, self._ear = Line(host, port, db), Line(host, port)
        self._ear.send([framed("PSUBSCRIBE", f"idemguard:{{{label}*")])
        assert self._ear.reply()[0] == b"psubscribe"
        self._shas = {
            name: self._line.ask(
                "SCRIPT", "LOAD", (texts or {}).get(name) or scripts.script(name).text
            )
            for name in (*COMMANDS, "look")
        }
        bad = {name: sha for name, sha in self._shas.items() if not isinstance(sha, bytes)}
        assert not bad, bad
        self.commands = 0
        self.looks = 0

    def close(self) -> None:
        self._line.close()
        self._ear.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- out -----------------------------------------------------------------------------------------

    def send(self, plans: list[Plan]) -> None:
        """All that these sequences ask, and a flush behind."""
        frames: list[bytes] = []
        for number, each in enumerate(plans):
            for turn, act in enumerate(each.acts):
                frames += self._act(each, number, turn, act)
            for digit in sorted(each.model.shards):
                windows, tasks, starts, open_ = wire.shard_keys(each.label, digit)
                frames += [
                    framed("HGETALL", windows),
                    framed("ZRANGE", tasks, 0, -1),
                    framed("ZRANGE", starts, 0, -1, "WITHSCORES"),
                    framed("ZRANGE", open_, 0, -1, "WITHSCORES"),
                ]
        frames.append(framed("FLUSHDB"))
        self._line.send(frames)

    def _act(self, each: Plan, number: int, turn: int, act: Act) -> list[bytes]:
        what = act.what
        keys = wire.keys(what.address)
        if isinstance(what, Emptied):
            return [framed("DEL", keys[0])]
        if isinstance(what, Evicted):
            return [framed("DEL", keys[1])]
        step = stepped(what)
        frames = [self._call(step, act.now, f"{number}.{turn}", alone=act.alone)]
        if each.expected[turn].elsewhere:
            frames.append(framed("HMGET", keys[1], "source", "spent", "codec", "data"))
        if looked_at(each, turn):
            frames.append(self._call(wire.look(what.address), act.now, "", alone=False))
        return frames

    def _call(self, step: wire.Step, now: int, who: str, *, alone: bool) -> bytes:
        keys = step.keys[:1] if alone else step.keys
        return framed(
            "EVALSHA", self._shas[step.script], len(keys), *keys, now, "PUBLISH", who,
            step.retention, *step.args,
        )  # fmt: skip

    # --- in ------------------------------------------------------------------------------------------

    def receive(self, plans: list[Plan]) -> list[Difference]:
        """What was said and held otherwise: the first difference of each sequence."""
        messages = self._expected_messages(plans)
        found = [self._compare(each) for each in plans]
        assert self._line.reply() == b"OK"
        heard = self._heard()
        for number, each in enumerate(plans):
            if found[number] is None and heard.get(number, {}) != messages.get(number, {}):
                differ = heard.get(number, {}).items() ^ messages.get(number, {}).items()
                first = min(turn for turn, _ in differ)
                want = messages.get(number, {}).get(first)
                found[number] = Difference(each, first, "hint", want, heard[number].get(first))
        return [difference for difference in found if difference is not None]

    @staticmethod
    def _expected_messages(plans: list[Plan]) -> dict[int, dict[int, tuple[str, str]]]:
        return {
            number: {
                turn: (wire.keys(act.what.address)[0], told.message)
                for turn, (act, told) in enumerate(zip(each.acts, each.expected, strict=True))
                if told is not None and told.message is not None
            }
            for number, each in enumerate(plans)
        }

    def _heard(self) -> dict[int, dict[int, tuple[str, str]]]:
        """What was published since the last time."""
        self._ear.send([framed("PING")])
        heard: dict[int, dict[int, tuple[str, str]]] = {}
        while (message := self._ear.reply())[0] == b"pmessage":
            *_, channel, text = message
            text, _, who = text.decode().rpartition(" ")
            number, turn = map(int, who.split("."))
            assert turn not in heard.setdefault(number, {}), "published twice"
            heard[number][turn] = (channel.decode(), text)
        return heard

    def _compare(self, each: Plan) -> Difference | None:
        found: Difference | None = None
        for turn, (act, told) in enumerate(zip(each.acts, each.expected, strict=True)):
            differs = self._compare_act(each, turn, act, told)
            if differs is not None and found is None:
                found = Difference(each, turn, *differs)
        for digit, shard in sorted(each.model.shards.items()):
            windows = wire.written(self._line.reply())
            read = {
                key: dict(counts) for found in windows.values() for key, counts in found.items()
            }
            tasks = {name.decode() for name in self._line.reply()}
            starts, open_ = _scores(self._line.reply()), _scores(self._line.reply())
            indexes = [
                ("tasks", dict.fromkeys(shard.tasks), dict.fromkeys(tasks)),
                ("starts", shard.starts, starts),
                ("open", shard.open, open_),
            ]
            if any(act.alone for act in each.acts):  # what is over may stand there or not
                indexes = [(what, *_due(each, want, got)) for what, want, got in indexes]
            for what, want, got in (("windows", counted(shard.windows), counted(read)), *indexes):
                if found is None and want != got:
                    found = Difference(each, len(each.acts), f"{what} of shard {digit}", want, got)
        return found

    def _compare_act(
        self, each: Plan, turn: int, act: Act, told: Expected | None
    ) -> tuple[str, object, object] | None:
        reply, what = self._line.reply(), act.what
        if told is None:
            return None
        content = self._line.reply() if told.elsewhere else None
        look = self._line.reply() if looked_at(each, turn) else None
        self.commands += 1
        if isinstance(reply, ServerError):
            return "reply", told.answer, reply
        if wire.elsewhere(reply) != told.elsewhere:
            return "place of the result", told.elsewhere, reply
        if content is not None:
            reply = wire.completed(reply, content)
        if isinstance(what, Share):
            if reply != [b"done"]:
                return "reply", [b"done"], reply
        else:
            try:
                answer = wire.answer(what, reply)
            except (ValueError, TypeError, AttributeError) as error:
                return "reply", told.answer, (reply, error)
            if answer != told.answer:
                return "answer", told.answer, answer
            if (hint := wire.hints_at(what, reply)) != told.hint:
                return "told hint", told.hint, hint
            if isinstance(what, Complete) and (kept := wire.kept_by(what, reply)) != told.kept:
                return "kept result", told.kept, kept
        if look is not None:
            self.looks += 1
            if isinstance(look, ServerError):
                return "look", told.record, look
            found = wire.record(what.address, look)
            want = told.record if told.record.kept_until > 0 else EMPTY
            if found != (want, act.now):
                return "record", want, found[0]
        return None


def stepped(what: Any) -> wire.Step:
    """What an act is on the wire."""
    if not isinstance(what, Share):
        return wire.step(what)
    shares = {wire.label(task, agent): counts for task, agent, *counts in what.shares}
    return wire.share(what.address, what.retention, shares)


def looked_at(each: Plan, turn: int) -> bool:
    """Whether the record is looked at after this act: long ones not always, but at the end."""
    told = each.expected[turn]
    return len(told.record.lines) <= FEW or turn % 8 == 0 or turn > len(each.acts) - 3


def _due(each: Plan, want: dict[str, Any], got: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Of an index, what must be there, and what is; what is over may be there, and is left out."""
    now, standing, current = each.acts[-1].now, set(), set()
    for address, record in each.model.records.items():
        if record.kept_until > now:
            name = wire.name(address)
            standing.add(name)
            current |= {name, *(f"{name} {line.claim.id}" for line in record.lines)}
    over = set(map(wire.name, each.addresses)) - standing
    return (
        {member: score for member, score in want.items() if member in current},
        {
            member: score
            for member, score in got.items()
            if member in current or (member.split()[0] not in over and member not in want)
        },
    )


def _scores(pairs: list[bytes]) -> dict[str, int]:
    each = iter(pairs)
    return {member.decode(): int(float(score)) for member, score in zip(each, each, strict=True)}


def shrunk(runner: Runner, found: Difference, tries: int = 400) -> Difference:
    """A shorter sequence that differs too: what can be left out is left out."""
    acts = list(found.plan.acts[: found.act + 1])
    size = max(len(acts) // 2, 1)
    while tries > 0:
        at = 0
        while at < len(acts) and tries > 0:
            tries -= 1
            fewer = acts[:at] + acts[at + size :]
            addresses = found.plan.addresses
            each = plan(found.plan.label, closed(fewer, addresses), addresses)
            if not sane(each):
                at += size
                continue
            runner.send([each])
            if differences := runner.receive([each]):
                acts, found = fewer, differences[0]
            else:
                at += size
        if size == 1:
            break
        size = max(size // 2, 1)
    return found

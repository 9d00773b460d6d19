"""How commands and answers, records and windows travel to a Redis server: keys, arguments, replies.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from idemguard.claim import (
    Begin,
    Claimed,
    Complete,
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
from idemguard.record import Address, Caller, Cause, Claim, Execution, Record, Result, Status
from idemguard.usage import NOTHING, TOKENS, Spent, Usage
from idemguard.windows import COUNTERS, Key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from idemguard.claim import Answer, Command
    from idemguard.windows import Counts

SHARDS = "0123456789abcdef"  # the first digit of a fingerprint
NAMESPACES = "idemguard:namespaces"  # the only key that belongs to no shard

_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_causes = {str(cause): cause for cause in Cause}
_statuses = {str(status): status for status in Status}


# --- keys ------------------------------------------------------------------------------------------


@lru_cache(1024)
def shard(namespace: str, digit: str) -> str:
    """What the keys of one shard begin with; the braces make them one slot of a Cluster."""
    return f"idemguard:{{{_quoted(namespace)}:{digit}}}:"


def secret_key(namespace: str) -> str:
    """The key of a namespace's secret."""
    return f"{shard(namespace, '0')}secret"


def in_registry(namespace: str) -> str:
    """A namespace as it stands among the namespaces."""
    return _quoted(namespace)


def from_registry(text: str) -> str:
    """The namespace that stands there so."""
    return _unquoted(text)


@lru_cache(256)
def shard_keys(namespace: str, digit: str) -> tuple[str, str, str, str]:
    """The keys that the records of a shard share: windows, tasks, starts, open."""
    prefix = shard(namespace, digit)
    return f"{prefix}windows", f"{prefix}tasks", f"{prefix}starts", f"{prefix}open"


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


def digit(fingerprint: str) -> str:
    """The shard of a fingerprint; what is none goes to the first."""
    return fingerprint[0] if fingerprint[:1] in SHARDS and fingerprint else "0"


def name(address: Address) -> str:
    """A record's name in its shard: its fingerprint, and where it has them scope and version."""
    _, fingerprint, scope, version = address
    if not scope and version is None:
        return _quoted(fingerprint)
    about = "" if version is None else f"={_quoted(version)}"
    return f"{_quoted(fingerprint)}:{_quoted(scope)}:{about}"


def named(namespace: str, text: str) -> Address:
    """The address of a record's name."""
    fingerprint, _, rest = text.partition(":")
    scope, _, about = rest.partition(":")
    version = _unquoted(about[1:]) if about else None
    return Address(namespace, _unquoted(fingerprint), _unquoted(scope), version)


def _unquoted(text: str) -> str:
    return unquote(text, errors="surrogatepass")


@lru_cache(2048)
def keys(address: Address) -> tuple[str, ...]:
    """The keys that a command on this address may touch; the first is also its channel."""
    where = digit(address.fingerprint)
    prefix, task = shard(address.namespace, where), name(address)
    return (
        f"{prefix}task:{task}",
        f"{prefix}result:{task}",
        *shard_keys(address.namespace, where),
    )


# --- commands ----------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A script, its keys, and its arguments behind those that every script has."""

    script: str
    keys: tuple[str, ...]
    retention: int
    args: tuple[Any, ...]


@lru_cache(1024)
def label(task_type: str, agent: str | None) -> str:
    """A task type and an agent, as the windows' fields end."""
    return _json((task_type, agent))


@lru_cache(256)
def _text(text: str) -> str:
    return _json(text)


def _rest(caller: Caller) -> str:
    if caller[3:] == (None, None, None, (), None):
        return ""
    return _json(caller[3:7] if caller.trace_flags is None else caller[3:])


def spent_text(spent: Spent) -> str:
    """What was spent, as text; amounts are texts in it, since a script counts only to 2**53."""
    if spent is NOTHING or spent == NOTHING:
        return ""
    usage = spent.usage
    about = None
    if usage is not None:
        amounts = [getattr(usage, name) for name in TOKENS]
        about = [
            *(None if amount is None else str(amount) for amount in amounts),
            usage.model, usage.provider, usage.response_id,
        ]  # fmt: skip
    return _json((
        str(spent.reports), about, spent.inputs, spent.responses,
        None if spent.cost is None else str(spent.cost),
        spent.currency, spent.price_version, spent.nested, *_beside(spent),
    ))  # fmt: skip


def _beside(spent: Spent) -> tuple[Any, ...]:
    """What most executions have nothing of."""
    if spent.parts is None and spent.inner is None and not spent.unpriced:
        return ()
    parts, inner = (
        None if amounts is None else [str(amount) for amount in amounts]
        for amounts in (spent.parts, spent.inner)
    )
    return parts, inner, spent.unpriced


def _claim_args(claim: Claim) -> tuple[Any, ...]:
    caller = claim.caller
    about = _json((
        claim.cause, claim.generation, claim.started, claim.holds,
        label(caller.task_type, caller.agent), _text(caller.worker), _rest(caller),
    ))  # fmt: skip
    return about, claim.token, claim.nonce


def step(command: Command) -> Step:
    """What a command is on the wire."""
    return _STEPS[type(command)](command)


def _begin(ask: Begin) -> Step:
    caller = ask.caller
    return Step("begin", keys(ask.address), ask.retention, (
        ask.nonce, label(caller.task_type, caller.agent), _text(caller.worker), _rest(caller),
        ask.lease, str(ask.mode), 1 if ask.rerun_lost else 0,
        "" if ask.since is None else ask.since, "" if ask.beside is None else ask.beside,
        "" if ask.digest is None else f"={ask.digest}",
    ))  # fmt: skip


def _renew(ask: Renew) -> Step:
    args = (*_claim_args(ask.claim), ask.lease, ask.max_run, spent_text(ask.spent))
    return Step("renew", keys(ask.address), ask.retention, args)


def _complete(ask: Complete) -> Step:
    return Step("complete", keys(ask.address), ask.retention, (
        *_claim_args(ask.claim), ask.ttl, ask.lease, spent_text(ask.spent), ask.ago,
        ask.value.codec, ask.value.data,
    ))  # fmt: skip


def _release(ask: Release) -> Step:
    args = (*_claim_args(ask.claim), str(ask.status), spent_text(ask.spent), ask.ago)
    return Step("release", keys(ask.address), ask.retention, args)


def _withdraw(ask: Withdraw) -> Step:
    caller = ask.caller
    outcome = "" if ask.outcome is None else ask.outcome
    args = (ask.nonce, label(caller.task_type, caller.agent), outcome)
    return Step("withdraw", keys(ask.address), ask.retention, args)


def _forget(ask: Forget) -> Step:
    return Step("forget", keys(ask.address), ask.retention, (ask.nonce,))


def _resolve(ask: Resolve) -> Step:
    caller = ask.caller
    return Step("resolve", keys(ask.address), ask.retention, (
        ask.nonce, label(caller.task_type, caller.agent), _text(caller.worker), _rest(caller),
        ask.ttl, ask.value.codec, ask.value.data,
    ))  # fmt: skip


def _sweep(ask: Sweep) -> Step:
    return Step("sweep", keys(ask.address), 0, ())


_STEPS: Mapping[type, Callable[[Any], Step]] = {
    Begin: _begin, Renew: _renew, Complete: _complete, Release: _release, Withdraw: _withdraw,
    Forget: _forget, Resolve: _resolve, Sweep: _sweep,
}  # fmt: skip


def look(address: Address) -> Step:
    """The step that reads one record."""
    return Step("look", keys(address), 0, ())


def share(address: Address, retention: int, shares: Mapping[str, Sequence[int]]) -> Step:
    """The step that books what several calls of one process came to.

    Args:
        address: of their task.
        retention: of the record, ms.
        shares: by label, the calls that found a claim and those that reused the result.

    """
    args = tuple(part for label, counts in shares.items() for part in (label, *counts))
    return Step("share", keys(address), retention, args)


# --- answers -----------------------------------------------------------------------------------------


def answer(command: Command, reply: list[Any]) -> Answer:
    """What the server's reply to a command means."""
    where = command.address
    match reply:
        case [b"claimed", source, runs, conflict, before]:
            lost = claim(where, before.decode()) if before else None
            return Claimed(claim(where, source.decode()), runs, conflict == 1, lost)
        case [b"replay", *result, runs] if len(result) == 7:  # noqa: PLR2004 - its fields
            return Replay(_result(where, result), runs)
        case [b"replay", *result, runs, _]:
            return Replay(_result(where, result), runs)
        case [b"in_flight", source, left, since, runs]:
            return InFlight(claim(where, source.decode()), left, since, runs)
        case [b"renewed", left, owns]:
            return Renewed(left, owns == 1)
        case [b"ended", kept, lost, runs, *_]:
            return Ended(kept == 1, lost == 1, runs)
        case [b"done", *_]:
            return Done()
        case [b"over"]:
            return Over()
        case [b"unknown", source, runs]:
            return Unknown(claim(where, source.decode()), runs)
        case [b"conflict", runs]:
            return Conflict(runs)
    raise ValueError(f"the server answers {reply!r} to {type(command).__name__}")


def hints_at(command: Command, reply: list[Any]) -> str | None:
    """Whom the step hinted at: "all", "one", or nobody."""
    match reply:
        case [b"ended", _, _, _, whom, *_] | [b"done", whom]:
            return whom.decode() or None
        case [b"replay", *_, whom] if isinstance(command, Resolve):
            return whom.decode() or None
    return None


def kept_by(command: Complete, reply: list[Any]) -> Replay | None:
    """The result that a completion has just left, as later calls get it."""
    match reply:
        case [b"ended", 1, _, runs, b"all", now, spent]:
            gone = now + max(command.ttl, command.lease)
            result = Result(
                command.claim, command.value, spending(spent.decode()), now, now + command.ttl, gone
            )
            return Replay(result, runs)
    return None


@lru_cache(512)
def claim(where: Address, source: str) -> Claim:
    """The claim in a text that a script made of it."""
    token, nonce, cause, generation, started, holds, (task_type, agent), worker, rest = json.loads(
        source
    )
    if rest is None:
        who = Caller(task_type, worker, agent)
    else:
        parent, trace_id, span_id, digests, *flags = rest
        pairs = tuple([(n, d) for n, d in digests])
        who = Caller(task_type, worker, agent, parent, trace_id, span_id, pairs, *flags)
    return Claim(where, token, nonce, _causes[cause], generation, started, holds, who)


@lru_cache(512)
def spending(text: str) -> Spent:
    """What was spent, of its text."""
    if not text:
        return NOTHING
    reports, about, inputs, responses, cost, currency, version, nested, *beside = json.loads(text)
    parts, inner, unpriced = beside or (None, None, 0)
    usage = None
    if about is not None:
        *amounts, model, provider, response = about
        usage = Usage(
            **{
                name: None if amount is None else int(amount)
                for name, amount in zip(TOKENS, amounts, strict=True)
            },
            model=model, provider=provider, response_id=response,
        )  # fmt: skip
    return Spent(
        int(reports), usage, tuple(inputs), tuple(responses),
        None if cost is None else int(cost), currency, version, nested,
        _three(parts), _three(inner), unpriced,
    )  # fmt: skip


def _three(amounts: list[str] | None) -> tuple[int, int, int] | None:
    if amounts is None:
        return None
    one, two, three = amounts
    return int(one), int(two), int(three)


def _result(where: Address, fields: list[Any]) -> Result:
    source, spent, codec, data, at, until, gone = fields
    if not at.__class__ is until.__class__ is gone.__class__ is int:
        raise TypeError("a time of a result is none")
    return Result(
        claim(where, source.decode()), Value(codec.decode(), data), spending(spent.decode()),
        at, until, gone,
    )  # fmt: skip


def elsewhere(reply: list[Any]) -> bool:
    """Whether the result that is told stands in a key that the step could not touch."""
    return reply[:1] == [b"replay"] and reply[1] == b""


def completed(reply: list[Any], content: list[Any]) -> list[Any]:
    """A told result, with what stands in that key: its source, spending, codec and data."""
    return [reply[0], *content, *reply[5:]]


def record(where: Address, reply: list[Any]) -> tuple[Record, int]:
    """A record as it was told, and the server's clock."""
    if len(reply) == 1:
        return Record(), reply[0]
    now, head, lines, result = reply
    read = _head(where, head, lines)
    return (read._replace(result=_result(where, result)) if result else read), now


def _head(where: Address, head: list[Any], lines: list[Any]) -> Record:
    (token, leader, fallback, cause, generation, settled, digest, runs, reused, ordered, kept_until,
     _, workers, leavers) = head  # fmt: skip
    if any(number.__class__ is not int for number in (token, settled, runs, reused, kept_until)):
        raise TypeError("a number of a record is none")
    return Record(
        token, leader.decode() or None, fallback.decode() or None, _causes[cause.decode()],
        None if generation == b"" else generation, settled, _optional(digest), None,
        tuple(execution(where, line) for line in lines), runs,
        tuple(json.loads(worker) for worker in workers), reused, _optional(ordered),
        tuple(leaver.decode() for leaver in leavers), kept_until,
    )  # fmt: skip


def _optional(text: bytes) -> str | None:
    return text[1:].decode() if text else None


def execution(where: Address, line: list[Any]) -> Execution:
    """A line as it was told."""
    source, until, status, ended, kept, spent = line
    return Execution(
        claim(where, source.decode()), until, _statuses[status.decode()],
        None if ended == b"" else ended, kept == 1, spending(spent.decode()),
    )  # fmt: skip


def made(head: list[Any]) -> int:
    """When a record was made, by the server's microseconds; 0 where it does not say."""
    try:
        return int(head[11])
    except (TypeError, ValueError):
        return 0


# --- windows -----------------------------------------------------------------------------------------

_counters = frozenset(COUNTERS)


def written(fields: Iterable[bytes]) -> dict[int, dict[Key, Counts]]:
    """The windows that are written to, by their starts: of fields and numbers in turn."""
    found: dict[int, dict[Key, Counts]] = {}
    for field, number in _pairs(fields):
        start, _, rest = field.partition(" ")
        if start.isdecimal():
            _add(found.setdefault(int(start), {}), int(start), rest, number)
    return found


def counted(start: int, fields: Iterable[bytes]) -> dict[Key, Counts]:
    """One window's counts, by task type and agent: of labels, and counters and numbers, in turn."""
    found: dict[Key, Counts] = {}
    each = iter(fields)
    for text, counters in zip(each, each, strict=True):
        task_type, agent = json.loads(text)
        counts: Counts = Counter()
        parts = iter(counters.decode().split())
        for counter, number in zip(parts, parts, strict=True):
            if counter in _counters:
                counts[counter] += int(number)
        found[Key(start, task_type, agent)] = counts
    return found


def _add(found: dict[Key, Counts], start: int, field: str, number: int) -> None:
    counter, _, text = field.partition(" ")
    if not number or counter not in _counters:
        return
    task_type, agent = json.loads(text)
    found.setdefault(Key(start, task_type, agent), Counter())[counter] += number


def _pairs(fields: Iterable[bytes]) -> Iterable[tuple[str, int]]:
    each = iter(fields)
    for field, number in zip(each, each, strict=True):
        yield field.decode(), int(number)

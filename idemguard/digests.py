"""Short digests of a payload's fields: executions that differ in one or two of them are found by these.

A line keeps eight hex digits per field, made with a secret of the namespace, so that no value
can be guessed from it; and whether the value looks made for one occasion. Pure.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from idemguard.claim import Begin, Complete, Release, Renew, Resolve
from idemguard.generated import looks_generated

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemguard.fingerprint import Identified

Digests: TypeAlias = "tuple[tuple[str, str], ...]"
C = TypeVar("C")

DROPPED = "~"  # in place of a digest: a volatile name or path that left something out
UNMATCHED = "?"  # one that was declared, and left nothing out
GENERATED = "!"  # behind the digest of a value that looks made for one occasion
MOST = 32  # fields of a payload
LONGEST = 96  # characters of a name
REST = "..."  # the name under which the fields have one digest for which there is no room
LARGEST = 1 << 20  # bytes of a payload; a larger one has none
RAW, KEYED = 40, 8  # hex digits, before and after the secret was added

_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def raw_digests(found: Identified) -> Digests:
    """Digests of a payload's fields, to be keyed by the store before it keeps them.

    Args:
        found: the payload, as its fingerprint was taken. Where its only field is a mapping, the
            fields of that one count.

    """
    if len(found.canonical) > LARGEST:
        return ()
    try:
        return _digests(found)
    except RecursionError:  # so deep that it is not worth an error
        return ()


def _digests(found: Identified) -> Digests:
    payload = json.loads(found.canonical)
    pairs = [(name, DROPPED) for name in sorted(found.matched)]
    pairs += [(name, UNMATCHED) for name in found.declared if name not in found.matched]
    pairs = [pair for pair in pairs if len(pair[0]) <= LONGEST][:MOST]
    if isinstance(payload, dict):
        fields = _fields(payload)
        fitting = [name for name in fields if len(name) <= LONGEST and name != REST][:MOST]
        rest = {name: value for name, value in fields.items() if name not in fitting}
        pairs += [
            (name, _raw(value) + (GENERATED if looks_generated(value) else ""))
            for name, value in fields.items()
            if name not in rest
        ]
        pairs += [(REST, _raw(rest))] if rest else []
    return tuple(pairs)


def _raw(value: Any) -> str:
    return hashlib.sha1(_encode(value).encode(), usedforsecurity=False).hexdigest()


def _fields(payload: dict[str, Any]) -> dict[str, Any]:
    if len(payload) == 1:
        ((name, only),) = payload.items()
        if isinstance(only, dict):
            return {f"{name}.{key}": value for key, value in only.items()}
    return payload


def keyed(command: C, secret: Callable[[], bytes]) -> C:
    """A command as a store performs it: the digests in it made with the secret.

    Args:
        command: any.
        secret: gives that of the command's namespace; called where it is needed.

    """
    if not unkeyed(command):
        return command
    if isinstance(command, (Begin, Resolve)):
        caller = command.caller
        keyed_caller = caller._replace(digests=_keyed(caller.digests, secret()))
        return replace(command, caller=keyed_caller)
    assert isinstance(command, (Complete, Release, Renew))
    caller = command.claim.caller
    keyed_caller = caller._replace(digests=_keyed(caller.digests, secret()))
    return replace(command, claim=command.claim._replace(caller=keyed_caller))


def unkeyed(command: object) -> bool:
    """Whether a command holds digests that the store has to key."""
    if isinstance(command, (Begin, Resolve)):
        return _is_raw(command.caller.digests)
    return isinstance(command, (Complete, Release, Renew)) and _is_raw(command.claim.caller.digests)


def _is_raw(digests: Digests) -> bool:
    return bool(digests) and any(len(digest) >= RAW for _, digest in digests)


def _keyed(digests: Digests, secret: bytes) -> Digests:
    return tuple(
        (name, digest if len(digest) < RAW else _with(secret, digest)) for name, digest in digests
    )


def _with(secret: bytes, digest: str) -> str:
    both = secret + bytes.fromhex(digest[:RAW])
    return hashlib.sha1(both, usedforsecurity=False).hexdigest()[:KEYED] + digest[RAW:]

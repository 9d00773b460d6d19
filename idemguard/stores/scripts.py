"""The Lua scripts that a Redis server performs commands with: which parts each is made of.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import NamedTuple

_COMMAND = ("form", "record", "windows")
_PARTS = {
    "begin": _COMMAND,
    "renew": (*_COMMAND, "ends"),
    "complete": (*_COMMAND, "ends", "orders"),
    "release": (*_COMMAND, "ends"),
    "withdraw": _COMMAND,
    "forget": (*_COMMAND, "orders"),
    "resolve": (*_COMMAND, "orders"),
    "sweep": (*_COMMAND, "orders"),
    "share": _COMMAND,
    "look": ("form", "record", "reading"),
    "read": ("form", "reading"),
    "prune": ("form",),
    "pour": (),
    "tallies": (),
    "overdue": (),
    "secret": (),
}
NAMES = tuple(_PARTS)


class Script(NamedTuple):
    """A script, and what the server calls it once it has seen it."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """The script of this name."""
    text = "\n".join(_part(part) for part in (*_PARTS[name], name))
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@cache
def _part(name: str) -> str:
    return (resources.files("idemguard.stores") / "lua" / f"{name}.lua").read_text("utf-8")

"""What a store's requests are: scripts by their names, commands by theirs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from idemguard.stores.scripts import NAMES, script

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCRIPTS = {told.encode(): name for name in NAMES for told in (script(name).text, script(name).sha)}


def asked(frames: Iterable[list[bytes]]) -> Counter[str]:
    """How many requests of each name."""
    return Counter(map(_name, frames))


def _name(frame: list[bytes]) -> str:
    command = frame[0].decode().upper()
    return _SCRIPTS[frame[1]] if command in ("EVAL", "EVALSHA") else command

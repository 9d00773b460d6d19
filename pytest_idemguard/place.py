"""The file that a session shares with its children: they learn the namespace in it, and tell that they write.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import mmap
import os

PLACE = "namespace"  # name and size as idemguard.journal has them
ROOM = 128  # bytes of a namespace; a mark follows
NOTHING = 0x20


class Place:
    """One such file, in memory: it is looked at in every test.

    Args:
        folder: of what the children write.

    Attributes:
        shared: its bytes; the last one is `NOTHING` until a child begins to write.

    """

    def __init__(self, folder: str) -> None:
        flags = os.O_CREAT | os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
        file = os.open(f"{folder}/{PLACE}", flags, 0o600)
        try:
            os.write(file, bytes([NOTHING]) * (ROOM + 1))
            self.shared = mmap.mmap(file, ROOM + 1)
        finally:
            os.close(file)

    def tell(self, space: str | None) -> None:
        """The namespace in which all others lie from now on."""
        self.shared[:ROOM] = (space or "").ljust(ROOM).encode()

    def unmark(self) -> None:
        """What was begun up to now is looked for next."""
        self.shared[ROOM] = NOTHING

    def close(self) -> None:
        """Share it no longer."""
        self.shared.close()

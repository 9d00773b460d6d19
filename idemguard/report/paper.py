"""What reports are drawn on: a terminal, a pipe or a file, whose width and colours it knows.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING, Any, NoReturn

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from idemguard.report.words import harmless

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import JustifyMethod

NARROW = 80  # columns, where there is no terminal
WIDEST = 120
LEAST_NAME = 12  # columns of a name that is cut
GAP = 2  # columns between two, of which the box has one


class Paper(Console):
    """Draws plain text and tables; foreign texts on it are taken as they are, never as markup.

    Args:
        file: where to; standard output where none is given.
        err: to standard error.

    """

    def __init__(self, file: IO[str] | None = None, *, err: bool = False) -> None:
        plain = bool(os.environ.get("NO_COLOR"))
        more: dict[str, Any] = {"color_system": None} if plain else {}
        super().__init__(file=file, stderr=err, highlight=False, markup=False, emoji=False, **more)
        there = file or (sys.stderr if err else sys.stdout)
        if there is not None and there.isatty():
            self.width = min(WIDEST, self.width)
        else:
            columns = os.environ.get("COLUMNS", "")
            self.width = int(columns) if columns.isdecimal() and int(columns) else NARROW

    def on_broken_pipe(self) -> NoReturn:
        """Whoever read has gone: that is for the command to end."""
        raise BrokenPipeError

    def say(self, text: str, style: str = "") -> None:
        """Some running text; in a file or pipe a paragraph is one line."""
        self.print(Text(text, style), soft_wrap=not self.is_terminal)

    def one_line(self, text: str, style: str = "") -> None:
        """Some text that is one line everywhere, to be copied as it is."""
        self.print(Text(text, style), soft_wrap=True)

    def head(self, text: str) -> None:
        """A headline over what follows."""
        self.print()
        self.say(text, "bold")

    def grid(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, names: int = 1
    ) -> None:
        """A table whose first columns are names, cut in the middle where there is no room.

        Args:
            columns: their heads.
            rows: their cells; foreign texts are shown harmlessly.
            names: how many columns are names; the rest are numbers, of which the last are left
                out where there is no room at all.

        """
        cells = [[harmless(cell) for cell in row] for row in rows]
        widths = [
            max(cell_len(line) for line in (*head.split("\n"), *(row[at] for row in cells)))
            for at, head in enumerate(columns)
        ]
        least = [min(width, LEAST_NAME) for width in widths[:names]]
        there = len(columns)
        while there > names + 1 and _total(least + widths[names:there]) > self.width:
            there -= 1
        left = self.width - _total([0] * names + widths[names:there])
        for at, width in enumerate(widths[:names]):
            widths[at] = min(width, max(least[at], left // (names - at)))
            left -= widths[at]
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0), show_edge=False
        )
        for at, head in enumerate(columns[:there]):
            justify: JustifyMethod = "left" if at < names else "right"
            table.add_column(head, justify=justify, vertical="bottom", no_wrap=True)
        for row in cells:
            table.add_row(*(Text(cut(cell, widths[at])) for at, cell in enumerate(row[:there])))
        self.print(table)
        if there < len(columns):
            out = ", ".join(head.replace("-\n", "").replace("\n", " ") for head in columns[there:])
            self.say(f"(no room for: {out})", "dim")


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def cut(text: str, width: int) -> str:
    """A text of at most so many columns; what is too much is left out in the middle."""
    if cell_len(text) <= width:
        return text
    head = max(1, (width - 1) * 3 // 5)
    tail = max(0, width - 1 - head)
    end = text
    while cell_len(end) > tail:
        end = end[1:]
    return f"{set_cell_size(text, head).rstrip()}…{end}"

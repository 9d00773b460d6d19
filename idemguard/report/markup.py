"""Elements of a page: every text in them is a text, whatever it holds.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, TypeAlias
from xml.etree.ElementTree import Element, tostring

from idemguard.report.tables import MOST_NAMES
from idemguard.report.words import brief, harmless, iso

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LONGEST = 120  # characters of a name that are shown
Inside: TypeAlias = "Element | str | None"
Cells: TypeAlias = "Sequence[Inside]"


def tag(name: str, *inside: Inside, **attributes: str | None) -> Element:
    """An element; texts in it are texts, whatever they hold."""
    made = Element(name)
    for key, value in attributes.items():
        if value is not None:
            made.set(key.rstrip("_").replace("_", "-"), value)
    last = None
    for one in inside:
        if isinstance(one, Element):
            made.append(one)
            last = one
        elif last is not None:
            last.tail = (last.tail or "") + (one or "")
        else:
            made.text = (made.text or "") + (one or "")
    return made


def text_of(element: Element) -> str:
    """The element as HTML, in ASCII: it is the same in whatever encoding it is written."""
    written: bytes = tostring(element, "us-ascii", "html")
    return written.decode("ascii")


def foreign(text: str) -> Element:
    """What somebody else named, which does not turn the line around it; a long one is cut."""
    whole = harmless(text)
    shown = brief(whole, LONGEST)
    return tag("bdi", shown, title=None if shown == whole else whole)


def listed(texts: Sequence[str]) -> Element:
    inside = list[Inside]()
    for text in texts[:MOST_NAMES]:
        inside += [", " if inside else "", foreign(text)]
    more = len(texts) - MOST_NAMES
    return tag("span", *inside, f" and {more:,} more" if more > 0 else "")


def note(*inside: Inside) -> Element:
    return tag("p", *inside, class_="note")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: at its head.
        kind: the class of its cells: text, number, share, or code.
        field: of the JSON that it shows, where a chart reads it.

    """

    title: str
    kind: str = "number"
    field: str | None = None


def table(
    name: str, title: str, about: str, columns: Sequence[Column], rows: Iterable[Cells]
) -> Element:
    """A table that scrolls on its own, by keyboard too; a row's first cell names it.

    Args:
        name: its id.
        title: of its section: who only hears the caption knows which table it is.
        about: what it holds, in what order.
        columns: their heads.
        rows: their cells.

    """
    kinds = [f"text {one.kind}" if one.kind == "code" else one.kind for one in columns]
    heads = [
        tag("th", one.title, scope="col", class_=kind, data_of=one.field)
        for one, kind in zip(columns, kinds, strict=True)
    ]
    body = tag("tbody")
    for cells in rows:
        row = tag("tr")
        for number, (inside, kind) in enumerate(zip(cells, kinds, strict=True)):
            first = {} if number else {"scope": "row"}
            row.append(tag("td" if number else "th", inside, class_=kind, **first))
        body.append(row)
    caption = tag("caption", tag("span", f"{title}: ", class_="unseen"), about)
    made = tag("table", caption, tag("thead", tag("tr", *heads)), body, id=name)
    label = f"{title}: {about}"
    return tag("div", made, class_="wide", tabindex="0", role="region", aria_label=label)


def chart(of: str, about: str, key: Sequence[tuple[str, str]], **data: str | None) -> Element:
    """Where a chart is drawn, with its key; `about` is for who does not see it."""
    canvas = tag("canvas", role="img", aria_label=about, **data)
    return tag(
        "figure",
        tag("ul", *(tag("li", text, class_=look) for look, text in key), class_="key"),
        tag("div", canvas),
        class_=f"chart {of}",
    )


class Times:
    """Times as they are told where the report was made, all by one offset, which is named."""

    def __init__(self, until: int) -> None:
        try:
            here = datetime.fromtimestamp(until / 1000).astimezone().utcoffset()
        except (OverflowError, ValueError, OSError):
            here = None
        self.zone = timezone(here) if here else UTC
        self.minutes = (here or timedelta()) // timedelta(minutes=1)

    def tag(self, moment: int, spec: str = "%Y-%m-%d %H:%M:%S") -> Element:
        try:
            text = datetime.fromtimestamp(moment / 1000, self.zone).strftime(spec)
        except (OverflowError, ValueError, OSError):
            text = "for ever"
        return tag("time", text, datetime=iso(moment))

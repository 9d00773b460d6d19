"""Numbers, money, times and foreign names as text.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SIGNS = {"USD": "$", "EUR": "€", "GBP": "£"}
_STEPS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
LEAST = Decimal("0.0001")  # of money that is told in digits
TYPED = 300  # characters of a name that is to be typed or copied: half of one is of no use
ROOM = 1_000  # characters of all such names in one line, which has to say what they are as well
ALIKE = 3  # names that are told where one is misspelt
PART = 3  # characters that are part of a name by more than chance
_WHOLE = 10_000  # counts below this are told to the last digit


def harmless(text: str) -> str:
    """A foreign text on one line that does nothing to a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def brief(text: str, most: int = 60) -> str:
    """A text of at most so many characters; what is too much is left out in the middle."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def apart(looks: Iterable[str], most: int) -> list[tuple[str, int]]:
    """Names that are to be typed or copied, as many as a line has room for.

    Args:
        looks: each name as it is shown, at most `TYPED` characters of it.
        most: of them.

    Returns:
        The first, each with how many names look so: two that differ are never told as one.

    """
    found, room = list[tuple[str, int]](), ROOM
    for look, number in Counter(looks).items():
        room -= len(look)
        if len(found) == most or (found and room < 0):
            break
        found.append((look, number))
    return found


def so(number: int) -> str:
    """What is said behind a name that looks like others."""
    return "" if number == 1 else f" ({number:,} that look so)"


def typed(looks: Sequence[str], most: int) -> str:
    """Names that are to be typed or copied, one behind the other, and how many more there are."""
    found = apart(looks, most)
    more = len(looks) - sum(number for _, number in found)
    told = ", ".join(f"{look}{so(number)}" for look, number in found)
    return told + (f" and {more:,} more" if more else "")


def decimal_text(amount: Decimal) -> str:
    """An amount as programs read it: every digit, and never an exponent."""
    text = f"{amount:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def money(amount: Decimal | None, currency: str = "USD") -> str:
    """An amount as people read it; `?` where it is unknown."""
    if amount is None:
        return "?"
    sign = SIGNS.get(currency, f"{harmless(currency)} ")
    size, minus = amount.copy_abs(), "-" if amount < 0 else ""
    if size and size < LEAST:
        return f"{minus}<{sign}{LEAST}"
    places = 0 if size >= 1000 else 2 if size >= 1 or not size else 4  # noqa: PLR2004 - seven digits at most
    return f"{minus}{sign}{size:,.{places}f}"


def short(number: int) -> str:
    """A count in few digits: `950`, `9,876`, `12.3k`, `4.6M`."""
    if abs(number) >= _WHOLE:
        for step, name in _STEPS:
            if abs(number) >= step * 0.99995:  # what would round to 1000.0 of the next
                return f"{number / step:,.1f}{name}"
    return f"{number:,}"


def cell(amount: Decimal | int, currency: str = "USD", *, signed: bool = False) -> str:
    """Money, or a count, in a table; none of it is a dash."""
    if not amount:
        return "-"
    text = short(amount) if isinstance(amount, int) else money(amount, currency)
    return f"+{text}" if signed and amount > 0 and text[0] != "<" else text


def spent(known: Decimal, unpriced: int, currency: str = "USD") -> str:
    """Money in a table; `?` where it is unknown, `+?` where executions without a price add to it."""
    told = cell(known, currency)
    if not unpriced:
        return told
    return f"{told}+?" if known else "?"


def share(fraction: float) -> str:
    """A fraction as a percentage; one that is not 0 does not look like it."""
    if 0 < fraction < 0.0005:  # noqa: PLR2004 - what would round to 0.0%
        return "<0.1%"
    return f"{fraction:.1%}"


def many(number: int, what: str) -> str:
    """A count with its noun."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def alike(name: str, known: Sequence[str]) -> list[str]:
    """Which task types look like one that there is not, else how many there are.

    Returns:
        A few words, at every second place a foreign name.

    """
    if not known:
        return ["the namespace was not used"]
    low = name.casefold()
    folded: dict[str, list[str]] = {}
    for one in known:
        folded.setdefault(one.casefold(), []).append(one)
    within = [one for one in folded if len(low) >= PART and low in one]
    near = get_close_matches(low, folded, ALIKE) or within
    names = [one for key in near for one in folded[key]][:ALIKE]
    if not names:
        return [f"there {'is' if len(known) == 1 else 'are'} {many(len(known), 'task type')}"]
    told = ["did you mean "]
    for look, number in apart((brief(harmless(one), TYPED) for one in names), ALIKE):
        told += [look, f"{so(number)} or "]
    return [*told[:-1], f"{told[-1].removesuffix(' or ')}?"]


def iso(moment: int | None) -> str | None:
    """A time in ms as programs read it: UTC, with its offset; None stays None."""
    if moment is None:
        return None
    try:
        return datetime.fromtimestamp(moment / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return None  # later than any calendar


def minute(moment: int) -> str:
    """A time in ms as commands take it: UTC, to the minute."""
    told = iso(moment)
    return "now" if told is None else f"{told[:16]}Z"


def local(moment: int, spec: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A time in ms as people here read it."""
    try:
        return datetime.fromtimestamp(moment / 1000).astimezone().strftime(spec)
    except (OverflowError, ValueError, OSError):
        return "for ever"


def stretch(
    start: int,
    end: int,
    spec: str = "%Y-%m-%d %H:%M:%S",
    end_spec: str | None = None,
    *,
    named: bool = False,
) -> str:
    """From when to when, as people here read it.

    Args:
        start: ms.
        end: ms.
        spec: how a time is written.
        end_spec: how the end is, where it is written otherwise.
        named: whether the time zone is named; it is where clocks are changed in between.

    """
    zones = [f" {zone}" if (zone := _zone(moment)) else "" for moment in (start, end)]
    same = zones[0] == zones[1]
    first = local(start, spec) + ("" if same else zones[0])
    return f"{first} to {local(end, end_spec or spec)}{zones[1] if named or not same else ''}"


def _zone(moment: int) -> str:
    """By how much local time is then ahead of UTC; empty beyond the calendar."""
    offset = local(moment, "%z")
    if offset[0] not in "+-":
        return ""
    hours, minutes, seconds = offset[:3], offset[3:5], offset[5:]  # the last of old times alone
    told = f"UTC{hours}:{minutes}" + (f":{seconds}" if seconds else "")
    return "UTC" if offset == "+0000" else told


def lasted(span: int) -> str:
    """A length of time, given in ms."""
    seconds = span / 1000
    if seconds < 1:
        return f"{span} ms"
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"

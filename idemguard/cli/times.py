"""Times as they are typed: `15m`, `24h`, `7d` ago, or ISO.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from idemguard.report.words import brief

if TYPE_CHECKING:
    from collections.abc import Callable

_AGO = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", re.ASCII)
_UNITS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
HELP = "15m, 24h or 7d ago, or an ISO time (without an offset: local time)"


@dataclass(frozen=True)
class When:
    """A time, before it is known what time it is.

    Attributes:
        at: ms; None where it is told by `ago`.
        ago: ms before now.

    """

    at: int | None = None
    ago: int = 0

    def exact(self, now: int) -> int:
        """In ms since 1970; before that it is negative."""
        return now - self.ago if self.at is None else self.at

    def moment(self, now: int) -> int:
        """In ms since 1970, not before."""
        return max(0, self.exact(now))


def when(text: str) -> When:
    """A time as it is typed.

    Raises:
        click.BadParameter: it is none.

    """
    text = text.strip()
    if text == "now":
        return When()
    if ago := _AGO.fullmatch(text):
        return When(ago=round(float(ago[1]) * _UNITS[ago[2]]))
    try:
        moment = datetime.fromisoformat(text)
        seconds = moment.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            f"{brief(repr(text))} is no time: 15m, 24h or 7d ago, or ISO as 2026-11-30T09:00"
        ) from None
    return When(at=seconds // timedelta(milliseconds=1))


def length(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """A length of time as it is typed, `15m` or `24h`, in seconds."""
    if value is None:
        return None
    found = _AGO.fullmatch(value.strip())
    if found is None:
        raise click.BadParameter(f"{brief(repr(value))} is no length of time, as 15m, 24h or 7d")
    return float(found[1]) * _UNITS[found[2]] / 1000


def _when(_: click.Context, __: click.Parameter, value: str | None) -> When | None:
    return None if value is None else when(value)


def _window(_: click.Context, __: click.Parameter, value: str) -> tuple[When, When]:
    start, dots, end = value.partition("..")
    if not dots or not start:
        raise click.BadParameter(
            f"{brief(repr(value))} is no window, as 2d..1d or 2026-11-01..2026-11-08"
        )
    return when(start), when(end) if end else When()


def window(name: str, what: str) -> Callable[[Any], Any]:
    """Gives a command an option `START..END`."""
    return click.option(
        name, callback=_window, required=True, metavar="START..END", help=f"{what}: {HELP}."
    )


def since_until(function: Any) -> Any:
    """Gives a command the options `--since` and `--until`."""
    function = click.option("--until", callback=_when, metavar="TIME", help="Else until now.")(
        function
    )
    return click.option(
        "--since",
        callback=_when,
        metavar="TIME",
        help=f"From when on: {HELP}. Else all that is kept.",
    )(function)


def span(since: When | None, until: When | None, now: int) -> tuple[int | None, int | None]:
    """The time of `--since` and `--until`, from when to before when, in ms since 1970.

    Returns:
        None for what is not given. A time that lies before 1970 is the first ms of it, in which
        nothing happened.

    Raises:
        click.BadParameter: no time lies between them, or all of it is to come.

    """
    if since is None:
        return None, None if until is None else max(1, until.moment(now))
    if until is None:
        _not_to_come("--since", since, now)
        return since.moment(now), None
    if since.exact(now) >= until.exact(now):
        raise click.BadParameter("--since: it is not before --until")
    _not_to_come("--since", since, now)
    return _between(since, until, now)


def of_window(name: str, window: tuple[When, When], now: int) -> tuple[int, int]:
    """The time of an option `START..END`, in the same way.

    Raises:
        click.BadParameter: its start is not before its end, or all of it is to come.

    """
    start, end = window
    if start.exact(now) >= end.exact(now):
        raise click.BadParameter(f"{name}: its start is not before its end")
    _not_to_come(name, start, now)
    return _between(start, end, now)


def _not_to_come(name: str, start: When, now: int) -> None:
    """What nobody can know yet is not told as nothing."""
    if start.exact(now) > now:
        raise click.BadParameter(f"{name}: it lies in the future")


def _between(start: When, end: When, now: int) -> tuple[int, int]:
    first = start.moment(now)
    return first, max(first + 1, end.moment(now))

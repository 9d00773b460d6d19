"""`reconcile`: the ledger held against what a billing meter was sent; and how a meter is named.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from idemguard import billing
from idemguard.cli.base import FINE, opened, paper, standard_input, where
from idemguard.cli.output import busy
from idemguard.cli.times import When, since_until, span
from idemguard.ledger import EVER
from idemguard.record import Status
from idemguard.report import plain
from idemguard.report.tables import BAD, GOOD, QUIET
from idemguard.report.words import (
    TYPED,
    brief,
    decimal_text,
    harmless,
    iso,
    local,
    many,
    stretch,
    typed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from decimal import Decimal

    from idemguard.billing import Event, Extra, Meter, Reconciliation, Sent, Sums
    from idemguard.report.paper import Paper

DIFFERENT = 1
MOST = 20  # events of a kind, and days, that people are shown
NAMED = 3  # names of events that a sentence tells
MOST_ASKED = billing.MOST_NAME + 2  # characters of the name that was asked for, with its quotes
_SUMS = ("expected", "sent", "missing", "double", "differing", "extra")


# --- the meter -------------------------------------------------------------------------------------


def _event_name(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    name = value.strip()
    if not 0 < len(name) <= billing.MOST_NAME:
        raise click.BadParameter(f"a name of 1 to {billing.MOST_NAME} characters is needed")
    return name


def _customers(_: click.Context, __: click.Parameter, path: str | None) -> dict[str, str] | None:
    if path is None:
        return None
    try:
        return billing.customers(Path(path).read_bytes().decode())
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {_why(error)}") from error


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "no UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


def metered(function: Any, *, required: bool = True) -> Any:
    """Gives a command the options that name a meter; see `meter_of`."""
    for option in (
        click.option(
            "--include", multiple=True, type=click.Choice([str(one) for one in billing.UNPAID]),
            help="Executions that ended so are events too; may be given several times.",
        ),
        click.option(
            "--customers", callback=_customers, metavar="MAP.json",
            help="From such a name to the customer's id; else the name is the id.",
        ),
        click.option(
            "--customer", type=click.Choice(billing.CUSTOMERS), required=required,
            help="What of an execution names its customer.",
        ),
        click.option(
            "--value", type=click.Choice(billing.VALUES), required=required,
            help="What is metered; the cost in US dollars.",
        ),
        click.option(
            "--event-name", callback=_event_name, metavar="NAME", required=required,
            help="Of the meter.",
        ),
    ):  # fmt: skip
        function = option(function)
    return function


def meter_of(
    *,
    event_name: str,
    value: str,
    customer: str,
    customers: dict[str, str] | None,
    include: Iterable[str],
) -> Meter:
    """The meter that the options of `metered` name."""
    kinds = frozenset(Status(one) for one in include)
    return billing.Meter(event_name, value, customer, customers, kinds)


# --- the command -----------------------------------------------------------------------------------


@click.command()
@click.argument("sent_file")
@metered
@since_until
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
@where
def reconcile(
    *, sent_file: str, since: When | None, until: When | None, as_json: bool, **options: Any
) -> int:
    """Hold the ledger against the events that a billing meter was sent.

    SENT_FILE has the sent events as JSON Lines or as CSV; - is standard input. The options that
    name the meter are those of the export. Nothing is sent.

    Exit codes: 0 equal, 1 there are differences, 2 an error.
    """
    meter = meter_of(**options)
    try:
        with _reading(sent_file) as lines:
            told = list(billing.sent(lines, meter.event_name))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{_called(sent_file)}: {_why(error)}") from error
    ours = [one for one in told if one.event_name == meter.event_name]
    if told and not ours:  # all would be missing, and somebody would send it again
        names = Counter(one.event_name for one in told)
        raise click.ClickException(
            f"{brief(_called(sent_file), TYPED)}: none of its {many(len(told), 'event')} is named "
            f"{brief(repr(meter.event_name), MOST_ASKED)}, but {_named(names)} (--event-name)"
        )
    with opened() as place, busy("reading"):
        now = place.ledger.now()
        start, end = span(since, until, now)
        when = billing.whole_seconds(start or 0, EVER if end is None else end)
        found = billing.reconcile(meter, place.ledger.lines(span=when), ours, when)
    others = len(told) - len(ours)
    upto = now if end is None else end
    if as_json:
        about = {"since": iso(start), "until": iso(upto)}
        about["namespace"] = place.namespace
        click.echo(plain.dump({**about, **_told(meter, found, others)}), nl=False)
    else:
        times = f"all until {local(upto)}" if start is None else stretch(start, upto)
        _show(paper(), f"Namespace {harmless(place.namespace)}, {times}", meter, found, others)
    return FINE if found.equal else DIFFERENT


def _called(file: str) -> str:
    return "standard input" if file == "-" else file


def _named(names: Counter[str]) -> str:
    """Names of events, the most frequent first."""
    return typed([brief(repr(name), TYPED) for name, _ in names.most_common()], NAMED)


@contextmanager
def _reading(name: str) -> Iterator[Iterator[str]]:
    """The lines of a file as text.

    Raises:
        OSError: it cannot be read.
        UnreadableError: while they are read: one is no UTF-8 text.

    """
    if name == "-":
        yield _decoded(standard_input().buffer)
        return
    with Path(name).open("rb") as file:
        yield _decoded(file)


def _decoded(lines: Iterable[bytes]) -> Iterator[str]:
    for at, line in enumerate(lines, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError:
            raise billing.UnreadableError("no UTF-8 text", at) from None


# --- for programs ----------------------------------------------------------------------------------


def _told(meter: Meter, found: Reconciliation, others: int) -> dict[str, Any]:
    name = meter.event_name

    def one(sent: Sent) -> dict[str, Any]:
        return {"line": sent.at, **sent.event.told(name)}

    return {
        "event_name": name,
        "value": meter.value,
        "customer": meter.customer,
        "equal": found.equal,
        "total": _sums(found.total),
        "missing": [event.told(name) for event in found.missing],
        "double": [one(sent) for sent in found.double],
        "differing": [
            {**one(pair.sent), "differs": pair.fields, "instead_of": pair.expected.told(name)}
            for pair in found.differing
        ],
        "extra": [{**one(sent), "why": why or "no line"} for sent, why in found.extra],
        "days": [
            {"day": day, "customer": customer, **_sums(sums)}
            for (day, customer), sums in found.days.items()
        ],
        "without_event": dict(sorted(found.without_event.items())),
        "other_events": others,
    }


def _sums(sums: Sums) -> dict[str, Any]:
    return {
        "expected_events": sums.expected_events,
        "sent_events": sums.sent_events,
        **{name: decimal_text(getattr(sums, name)) for name in _SUMS},
        "difference": decimal_text(sums.difference),
    }


# --- for people ------------------------------------------------------------------------------------


def _show(on: Paper, about: str, meter: Meter, found: Reconciliation, others: int) -> None:
    on.say(f"{about}; meter {harmless(meter.event_name)}", "bold")
    total, sum_ = found.total, partial(_sum, meter.value)
    if found.equal:
        on.say(f"Equal: {many(total.sent_events, 'event')}, {sum_(total.sent)}.", GOOD)
    else:
        kinds = (
            (len(found.missing), "missing"), (len(found.double), "double"),
            (len(found.differing), "differing"), (len(found.extra), "extra"),
        )  # fmt: skip
        on.say(f"Different: {', '.join(f'{n:,} {name}' for n, name in kinds if n)}.", BAD)
        on.say(
            f"Sent: {many(total.sent_events, 'event')}, {sum_(total.sent)}; the ledger has "
            f"{many(total.expected_events, 'event')}, {sum_(total.expected)}."
        )
    if found.without_event:
        kinds_ = ", ".join(f"{n:,} {why}" for why, n in sorted(found.without_event.items()))
        on.say(f"Executions that are no events: {kinds_}.", QUIET)
    if others:
        on.say(f"{many(others, 'event')} of other names not looked at.", QUIET)
    if not found.equal:
        _days(on, found, meter.value)
        _events(on, found)


def _sum(of: str, amount: Decimal) -> str:
    """An amount with what it is of."""
    return f"{_number(amount)} US dollars" if of == "cost" else f"{_number(amount)} {of}"


def _days(on: Paper, found: Reconciliation, of: str) -> None:
    on.head(f"By UTC day and customer{', in US dollars' if of == 'cost' else ''}")
    days = [(*key, sums) for key, sums in found.days.items() if sums.differs]
    names = [name for name in _SUMS if name in _SUMS[:2] or any(getattr(d[2], name) for d in days)]
    rows = [
        (day, customer, *(_number(getattr(sums, name)) for name in names))
        for day, customer, sums in days[:MOST]
    ]
    heads = ("day", "customer", *names)
    if _fits(on, heads, rows):
        on.grid(heads, rows, names=2)
    else:  # a row whose sums are not all there would not add up
        for day, customer, expected, sent, *parts in rows:
            told = [f"expected {expected}"]
            for name, part in zip(names[2:], parts, strict=True):
                told.append(f"{'-' if name == 'missing' else '+'} {name} {part}")
            on.say(f"{day}  {harmless(customer)}")
            on.say(f"  sent {sent} = {' '.join(told)}")
    _more(on, len(days))


def _fits(on: Paper, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether a table has room for every number; the customer may be cut."""
    from idemguard.report.paper import GAP, LEAST_NAME  # noqa: PLC0415 - loaded when needed

    numbers = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    numbers[1] = LEAST_NAME
    return sum(numbers) + GAP * (len(numbers) - 1) <= on.width


def _events(on: Paper, found: Reconciliation) -> None:
    kinds: tuple[tuple[str, Iterable[str], int], ...] = (
        ("Missing: in the ledger, not sent", map(_event, found.missing), len(found.missing)),
        ("Double: sent again", map(_at, found.double), len(found.double)),
        (
            "Differing: sent otherwise than the ledger has it",
            (f"{_at(sent)}; the ledger: {_event(event)}" for event, sent in found.differing),
            len(found.differing),
        ),
        ("Extra: sent, and no event of the ledger", map(_extra, found.extra), len(found.extra)),
    )
    for head, rows, number in kinds:
        if number:
            on.head(head)
            for row in islice(rows, MOST):
                on.say(f"  {row}")
            _more(on, number)


def _more(on: Paper, number: int) -> None:
    if number > MOST:
        on.say(f"  and {number - MOST:,} more (--json)", QUIET)


def _at(sent: Sent) -> str:
    return f"line {sent.at}: {_event(sent.event)}"


def _event(event: Event) -> str:
    when = (iso(event.timestamp * 1000) or "")[:19]
    id_, customer = harmless(event.identifier), harmless(event.customer)
    return f"{id_}  {when}Z  {customer}  {_number(event.value)}"


def _extra(one: Extra) -> str:
    return f"{_at(one.sent)}  ({'no such line' if one.why is None else one.why})"


def _number(amount: Decimal) -> str:
    text = f"{amount:,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text

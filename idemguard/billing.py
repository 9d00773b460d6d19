"""Executions as events of a billing meter, and the events that were sent held against them.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

from idemguard.record import Status
from idemguard.usage import money

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from idemguard.record import Execution

VALUES = ("total_tokens", "input_tokens", "output_tokens", "cost")
CUSTOMERS = ("scope", "agent", "worker", "task_type")
UNPAID = (Status.FAILED, Status.DECLINED, Status.LOST)  # events where they are asked for
MOST_NAME = 100  # characters of an event's name, and of its identifier
MOST_KEY = 300  # characters of a key that somebody has to find in a file
MOST_DIGITS = 15  # of a value; Stripe refuses more (its changelog of 2026-04-22)
BACK, AHEAD = 35 * 86_400_000, 300_000  # ms that an event may lie before and after now

_EXACT = Context(prec=200, traps=[Inexact])
_NONE = Decimal(0)
_NUMBER = re.compile(r"[+-]?\d{1,60}(\.\d{1,60})?([eE][+-]?\d{1,3})?", re.ASCII)
_PLACES = 60  # digits before and after the point of a number that is read
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_LAST = 253_402_300_799  # s; the end of the calendar
_COLUMNS = ("event_name", "identifier", "timestamp")
_PAYLOAD = ("stripe_customer_id", "value")


class Why(StrEnum):
    """Why an execution is no event."""

    OPEN = "open"
    FAILED = "failed"
    DECLINED = "declined"
    LOST = "lost"
    INSIDE = "spent inside"  # all it spent was spent by guarded executions, which have events
    NO_USAGE = "no usage"
    UNPRICED = "unpriced"
    NO_CUSTOMER = "no customer"
    TOO_LONG = "more than 15 digits"
    OUT_OF_RANGE = "out of range"


# something was spent, or may have been, and nobody will be billed for it
GAPS = (Why.NO_USAGE, Why.UNPRICED, Why.NO_CUSTOMER, Why.TOO_LONG, Why.OUT_OF_RANGE)


class Event(NamedTuple):
    """An event of a meter.

    Attributes:
        identifier: the execution's id, far shorter than the 100 characters that are allowed.
        timestamp: when the execution started, whole seconds since 1970.
        customer: whom it is billed to; an id has no blanks around it.
        value: tokens, or US dollars.

    """

    identifier: str
    timestamp: int
    customer: str
    value: Decimal

    @property
    def day(self) -> str:
        """The UTC day that it lies in, ISO."""
        return (_BEGIN + timedelta(seconds=self.timestamp)).date().isoformat()

    def told(self, event_name: str) -> dict[str, Any]:
        """As Stripe takes it; values are text, decimal and without an exponent."""
        return {
            "event_name": event_name,
            "identifier": self.identifier,
            "timestamp": self.timestamp,
            "payload": {"stripe_customer_id": self.customer, "value": f"{self.value:f}"},
        }


@dataclass(frozen=True, slots=True)
class Meter:
    """What is metered, and for whom.

    Attributes:
        event_name: of the meter.
        value: one of `VALUES`.
        customer: one of `CUSTOMERS`: what of an execution names its customer.
        customers: from such a name to the customer's id, where "" is an execution that names
            none; None: the name is the id.
        include: statuses of `UNPAID` that are events too.

    """

    event_name: str
    value: str
    customer: str
    customers: Mapping[str, str] | None = None
    include: frozenset[Status] = frozenset()

    def event(self, line: Execution) -> Event | Why:
        """The event of an execution, the same whenever it is asked for; or why there is none.

        Args:
            line: as the ledger gives it.

        """
        wanted = line.status not in UNPAID or line.status in self.include
        if line.status is Status.OPEN or not wanted:
            return Why(line.status.value)
        value = self._value(line)
        if isinstance(value, Why):
            return value
        name = self.name(line)
        customer = (name if self.customers is None else self.customers.get(name, "")).strip()
        if not customer:
            return Why.NO_CUSTOMER
        if len(value.as_tuple().digits) > MOST_DIGITS:
            return Why.TOO_LONG
        return Event(line.execution_id, line.started // 1000, customer, value)

    def name(self, line: Execution) -> str:
        """What the execution calls its customer; empty where it names none."""
        found: str | None = getattr(line, self.customer)
        return found or ""

    def _value(self, line: Execution) -> Decimal | Why:
        spent = line.spent
        if spent.usage is None:
            return Why.INSIDE if spent.nested else Why.NO_USAGE
        if self.value == "cost":
            # a part of the cost would be a wrong bill
            if spent.cost is None or spent.unpriced:
                return Why.UNPRICED
            return money(spent.cost)
        tokens: int | None = getattr(spent.usage, self.value)
        return Why.NO_USAGE if tokens is None else Decimal(tokens)


def in_range(event: Event, now: int) -> bool:
    """Whether Stripe takes an event now.

    Its rule: "Make sure the timestamp is within the past 35 calendar days and isn't more than
    5 minutes in the future"
    (https://docs.stripe.com/billing/subscriptions/usage-based/recording-usage-api).

    Args:
        event: which.
        now: ms since 1970.

    """
    return now - BACK <= event.timestamp * 1000 <= now + AHEAD


# --- what was sent ---------------------------------------------------------------------------------


class UnreadableError(ValueError):
    """A file of sent events, or a map of customers, cannot be read.

    Attributes:
        at: the number of the line; None where it is about the whole.

    """

    def __init__(self, why: str, at: int | None = None) -> None:
        super().__init__(why if at is None else f"line {at:,}: {why}")
        self.at = at


class Sent(NamedTuple):
    """An event that was sent.

    Attributes:
        at: the number of the line that tells of it.
        event_name: of its meter.
        event: which.

    """

    at: int
    event_name: str
    event: Event


FOREIGN = Event("", 0, "", Decimal(0))  # of another meter, and not read


def customers(text: str) -> dict[str, str]:
    """A map of customers: a JSON object from names to ids.

    Raises:
        UnreadableError: it is none.

    """
    found = _json(text.removeprefix("\ufeff"))
    if not isinstance(found, dict):
        raise UnreadableError("a JSON object from names to customer ids is needed")
    for name, id_ in found.items():
        if not isinstance(id_, str) or not id_.strip():
            raise UnreadableError(
                f"the customer id of {_shown(name, MOST_KEY)} must be a text, not {_shown(id_)}"
            )
        if id_ != id_.strip() or not id_.isprintable():
            raise UnreadableError(
                f"the customer id of {_shown(name, MOST_KEY)} has blanks around it, or a "
                f"control character: {_shown(id_)}"
            )
    return found


def sent(lines: Iterable[str], meter: str | None = None) -> Iterator[Sent]:
    """The events that a file tells of: JSON Lines, or CSV with a head, by what it begins with.

    Args:
        lines: of the file, with their ends.
        meter: the event name that matters; of others, whose payload may have any keys, only the
            name is read. None: all matter.

    Raises:
        UnreadableError: it is neither, or a line cannot be read.

    """
    rest = iter(lines)
    head: list[str] = []
    for line in rest:
        head.append(line.removeprefix("\ufeff") if not head else line)
        if head[-1].strip():
            whole = chain(head, rest)
            found = _objects(whole) if head[-1].lstrip()[0] == "{" else _rows(whole)
            for at, told in found:
                name = told["event_name"]
                foreign = meter is not None and isinstance(name, str) and name not in ("", meter)
                yield Sent(at, name, FOREIGN) if foreign else _sent(told, at)
            return


_Told: TypeAlias = "tuple[int, dict[str, Any]]"  # the line's number, and what stands there


def _objects(lines: Iterable[str]) -> Iterator[_Told]:
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = _json(line, at)
        if not isinstance(found, dict):
            raise UnreadableError("no JSON object", at)
        payload = found.get("payload")
        if not isinstance(payload, dict):
            raise UnreadableError("it has no payload", at)
        yield at, {**{name: payload.get(name) for name in _PAYLOAD}, **_own(found)}


def _own(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found.get(name) for name in _COLUMNS}


def _rows(lines: Iterable[str]) -> Iterator[_Told]:
    reader = csv.reader(lines, strict=True, skipinitialspace=True)
    columns: dict[str, int] | None = None
    at = 1
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                pass
            elif columns is None:
                columns, width = _columns(row, at), len(row)
            elif len(row) != width:
                raise UnreadableError(f"{len(row)} cells under a head of {width}", at)
            else:
                yield at, {name: row[there].strip() for name, there in columns.items()}
            at = reader.line_num + 1
    except csv.Error as error:
        raise UnreadableError(str(error), at) from None


def _columns(head: list[str], at: int) -> dict[str, int]:
    """Where the columns are; those of the payload may say so, as in Stripe's templates."""
    names = [name.strip().removeprefix("payload_") for name in head]
    wanted = (*_COLUMNS, *_PAYLOAD)
    if missing := [name for name in wanted if name not in names]:
        raise UnreadableError(
            f"neither a JSON object nor the head of a CSV table: no column {', '.join(missing)}", at
        )
    if twice := [name for name in wanted if names.count(name) > 1]:
        raise UnreadableError(f"two columns {twice[0]}", at)
    return {name: names.index(name) for name in wanted}


def _sent(found: Mapping[str, Any], at: int) -> Sent:
    texts = [found[name] for name in ("event_name", "identifier", "stripe_customer_id")]
    for name, text in zip(("event_name", "identifier", "stripe_customer_id"), texts, strict=True):
        if not isinstance(text, str) or not text.strip():
            raise UnreadableError(f"{name} must be a text, not {_shown(text)}", at)
    event_name, identifier, customer = texts
    value = _number(found, "value", at)
    event = Event(identifier, _seconds(found, at), customer.strip(), value)
    return Sent(at, event_name, event)


def _number(found: Mapping[str, Any], name: str, at: int) -> Decimal:
    value = found[name]
    text = str(value).strip() if isinstance(value, (str, Decimal)) else ""
    if _NUMBER.fullmatch(text):
        number = Decimal(text)
        if number.adjusted() < _PLACES and int(number.as_tuple().exponent) >= -_PLACES:
            return number
    raise UnreadableError(f"{name} must be a number, not {_shown(value)}", at)


def _seconds(found: Mapping[str, Any], at: int) -> int:
    """A time as the first version of the API has it, or ISO with an offset as the second."""
    value = found["timestamp"]
    if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            moment = None
        if moment is not None and moment.tzinfo is not None and moment >= _BEGIN:
            seconds = (moment - _BEGIN) // timedelta(seconds=1)
            if seconds <= _LAST:  # an offset may lead beyond the calendar
                return seconds
    else:
        number = _number(found, "timestamp", at)
        if 0 <= number <= _LAST and number == int(number):
            return int(number)
    raise UnreadableError(f"timestamp must be whole seconds since 1970, not {_shown(value)}", at)


def _json(text: str, at: int | None = None) -> Any:
    try:
        return json.loads(
            text, parse_float=_decimal, parse_int=_decimal, parse_constant=_refused,
            object_pairs_hook=_once,
        )  # fmt: skip
    except UnreadableError as error:
        raise UnreadableError(str(error), at) from None
    except json.JSONDecodeError as error:
        why = f"no JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        raise UnreadableError(why, error.lineno if at is None else at) from None
    except RecursionError:
        raise UnreadableError("no JSON: it goes too deep", at) from None


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise UnreadableError(f"a number beyond all bounds: {_cut(text)}") from None


def _refused(name: str) -> NoReturn:
    raise UnreadableError(f"no JSON: {name}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; which of two values of one name is meant, nobody can know."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        (name, _), *_ = names.most_common(1)
        raise UnreadableError(f"{_shown(name, MOST_KEY)} stands twice in one object")
    return found


def _shown(value: object, most: int = 40) -> str:
    return _cut(str(value) if isinstance(value, Decimal) else repr(value), most)


def _cut(text: str, most: int = 40) -> str:
    return f"{text[:most]}…" if len(text) > most else text


# --- the two side by side --------------------------------------------------------------------------


@dataclass(slots=True)
class Sums:
    """What one customer, or all of them, came to.

    Attributes:
        expected_events: events of the lines.
        expected: their values.
        sent_events: events that were sent.
        sent: their values.
        missing: what of the lines was not sent.
        double: what was sent again.
        differing: what was sent more, or less, under the identifiers of the lines.
        extra: what was sent and is no event of the lines.

    """

    expected_events: int = 0
    expected: Decimal = _NONE
    sent_events: int = 0
    sent: Decimal = _NONE
    missing: Decimal = _NONE
    double: Decimal = _NONE
    differing: Decimal = _NONE
    extra: Decimal = _NONE
    differs: bool = False  # some event of it is missing, double, differing or extra

    @property
    def difference(self) -> Decimal:
        """What was sent more: -missing + double + differing + extra."""
        return _EXACT.subtract(self.sent, self.expected)

    def add(self, name: str, value: Decimal) -> None:
        """Add to one of the sums, exactly."""
        setattr(self, name, _EXACT.add(getattr(self, name), value))


class Differing(NamedTuple):
    """An event that was sent otherwise than the lines have it."""

    expected: Event
    sent: Sent

    @property
    def fields(self) -> tuple[str, ...]:
        """What differs: `timestamp`, `customer`, `value`."""
        names = ("timestamp", "customer", "value")
        pair = self.expected, self.sent.event
        return tuple(name for name in names if getattr(pair[0], name) != getattr(pair[1], name))


class Extra(NamedTuple):
    """An event that was sent and is none of the lines: why not; None: there is no such line."""

    sent: Sent
    why: Why | None


@dataclass(slots=True)
class Reconciliation:
    """The lines held against what was sent.

    Attributes:
        total: of all customers and days.
        days: by UTC day and customer.
        missing: events of lines that were not sent.
        double: events whose identifier was sent before.
        differing: events that were sent with another customer, value or time.
        extra: events that were sent and are none of the lines.
        without_event: executions that are no events, by why.

    """

    total: Sums = field(default_factory=Sums)
    days: dict[tuple[str, str], Sums] = field(default_factory=dict)
    missing: list[Event] = field(default_factory=list)
    double: list[Sent] = field(default_factory=list)
    differing: list[Differing] = field(default_factory=list)
    extra: list[Extra] = field(default_factory=list)
    without_event: Counter[Why] = field(default_factory=Counter)

    @property
    def equal(self) -> bool:
        """Whether each event of the lines was sent once, and nothing else."""
        return not (self.missing or self.double or self.differing or self.extra)

    def expect(self, event: Event) -> None:
        """Count an event of the lines."""
        for sums in self._both(event):
            sums.expected_events += 1
            sums.add("expected", event.value)

    def got(self, event: Event) -> None:
        """Count an event that was sent."""
        for sums in self._both(event):
            sums.sent_events += 1
            sums.add("sent", event.value)

    def miss(self, event: Event) -> None:
        """Of the lines, and not sent."""
        self.missing.append(event)
        self._differ("missing", event)

    def again(self, one: Sent) -> None:
        """Sent before."""
        self.double.append(one)
        self._differ("double", one.event)

    def change(self, expected: Event, one: Sent) -> None:
        """Sent otherwise."""
        self.differing.append(Differing(expected, one))
        self._differ("differing", expected, minus=True)
        self._differ("differing", one.event)

    def exceed(self, one: Sent, why: Why | None) -> None:
        """Sent, and none of the lines."""
        self.extra.append(Extra(one, why))
        self._differ("extra", one.event)

    def _differ(self, name: str, event: Event, *, minus: bool = False) -> None:
        for sums in self._both(event):
            sums.differs = True
            sums.add(name, event.value.copy_negate() if minus else event.value)

    def _both(self, event: Event) -> tuple[Sums, Sums]:
        return self.total, self.days.setdefault((event.day, event.customer), Sums())


def whole_seconds(start: int, end: int) -> tuple[int, int]:
    """A span of time, in ms, that cuts no second, as timestamps have no parts of one."""
    return start // 1000 * 1000, -(-end // 1000) * 1000


def reconcile(
    meter: Meter,
    lines: Iterable[Execution],
    told: Iterable[Sent],
    span: tuple[int, int],
) -> Reconciliation:
    """Hold the executions of a time against the events that were sent.

    Whether Stripe would take an event today is not asked: it was sent in its own time.

    Args:
        meter: what is metered; events of other names must be left out of what was sent.
        lines: the executions that started in this time.
        told: the events that were sent, in their order. Those that lie outside this time count
            only where a line of it has their identifier.
        span: from when to before when, ms; see `whole_seconds`.

    """
    found = Reconciliation()
    there: dict[str, list[Sent]] = {}
    for one in told:
        there.setdefault(one.event.identifier, []).append(one)
    for line in lines:
        _hold(found, meter.event(line), there.pop(line.execution_id, []))
    for group in there.values():
        inside = [one for one in group if span[0] <= one.event.timestamp * 1000 < span[1]]
        _hold(found, None, inside)
    found.days = dict(sorted(found.days.items()))
    found.double.sort(key=lambda one: one.at)
    found.differing.sort(key=lambda one: one.sent.at)
    found.extra.sort(key=lambda one: one.sent.at)
    return found


def _hold(found: Reconciliation, event: Event | Why | None, group: list[Sent]) -> None:
    """One line, or none, and all that was sent under one identifier."""
    for one in group:
        found.got(one.event)
    if isinstance(event, Event):
        found.expect(event)
        if not group:
            return found.miss(event)
        # of several the one that is right, if any
        first = next((one for one in group if one.event == event), group[0])
        if first.event != event:
            found.change(event, first)
    else:
        if event is not None:
            found.without_event[event] += 1
        if not group:
            return None
        first = group[0]
        found.exceed(first, event)
    for one in group:
        if one is not first:
            found.again(one)
    return None

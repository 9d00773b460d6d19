"""`tail` and `export`: the ledger line by line, live or as a whole.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from idemguard import billing
from idemguard.cli.base import FINE, answer, no_more_interrupts, opened, paper, say, where
from idemguard.cli.output import busy, to_file, writing
from idemguard.cli.reconcile import meter_of, metered
from idemguard.cli.times import When, since_until, span
from idemguard.errors import StoreUnavailableError
from idemguard.ledger import EVER
from idemguard.record import Status
from idemguard.report import details, plain
from idemguard.report.words import TYPED, brief, many, typed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from idemguard.billing import Meter
    from idemguard.cli.base import Place
    from idemguard.record import Execution

BEFORE = 600_000  # ms before its start in which tail looks for executions that are under way
AGAIN = 5_000  # ms that are read again, for lines that came late
GIVEN_UP = 600_000  # ms after its lease, a lost execution is not expected to come back


METERED = "stripe-meter-events"
NAMED = 3  # names without a customer that a sentence tells


# --- export ----------------------------------------------------------------------------------------


@click.command()
@answer(("jsonl", "csv", METERED))
@to_file
@since_until
@partial(metered, required=False)
@click.option(
    "--strict", is_flag=True,
    help="It is an error, exit code 2, where executions cannot become events.",
)  # fmt: skip
@where
def export(
    *,
    form: str,
    path: str | None,
    since: When | None,
    until: When | None,
    strict: bool,
    **options: Any,
) -> int:
    """Every line of the ledger, with all that is known of it.

    Oldest first, as JSON Lines or CSV; or the events of a Stripe meter, as JSON Lines, of the
    executions that were paid for.
    """
    meter = _meter(form, strict=strict, **options)
    with opened() as place:
        now = place.ledger.now()
        start, end = span(since, until, now)
        when = start or 0, EVER if end is None else end
        with writing(path) as file, busy("lines", beside=file) as step:
            lines = _counted(place.ledger.lines(span=when), step)
            left_out = _LeftOut()
            if meter is not None:
                rows = _events(meter, lines, now, left_out)
            elif form == "csv":
                rows = plain.sheet(plain.LINE, map(plain.line, lines))
            else:
                rows = plain.jsonl(lines)
            for row in rows:
                file.write(row)
            if strict and left_out.why:
                raise click.ClickException(left_out.told())
        if left_out.why:
            say(left_out.told())
    return FINE


def _meter(form: str, *, strict: bool, **options: Any) -> Meter | None:
    """The meter that is exported; None for the other formats."""
    if form == METERED:
        for name in ("event_name", "value", "customer"):
            if options[name] is None:
                raise click.UsageError(f"--format {METERED} needs --{name.replace('_', '-')}")
        return meter_of(**options)
    given = [name for name, value in options.items() if value not in (None, ())]
    given += ["strict"] * strict
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} is for --format {METERED}")
    return None


class _LeftOut:
    """The executions that cannot become events though they were paid for, or may have been."""

    def __init__(self) -> None:
        self.why: Counter[billing.Why] = Counter()
        self.names: dict[str, None] = {}  # that have no customer

    def told(self) -> str:
        """In words."""
        kinds = []
        for why in billing.GAPS:
            if number := self.why[why]:
                of = f" ({self._names()})" if why is billing.Why.NO_CUSTOMER else ""
                kinds.append(f"{number:,} {why}{of}")
        return f"{many(self.why.total(), 'execution')} left out: {', '.join(kinds)}"

    def _names(self) -> str:
        looks = [brief(repr(name), TYPED) if name else "none named" for name in self.names]
        return typed(looks, NAMED)


def _events(
    meter: Meter, lines: Iterable[Execution], now: int, left_out: _LeftOut
) -> Iterator[str]:
    write = json.JSONEncoder(separators=(",", ":")).encode
    for line in lines:
        found = meter.event(line)
        if isinstance(found, billing.Event) and not billing.in_range(found, now):
            found = billing.Why.OUT_OF_RANGE
        if isinstance(found, billing.Event):
            yield f"{write(found.told(meter.event_name))}\n"
        elif found in billing.GAPS:
            left_out.why[found] += 1
            if found is billing.Why.NO_CUSTOMER:
                left_out.names[meter.name(line)] = None


def _counted(lines: Iterator[Execution], step: Callable[[], None]) -> Iterator[Execution]:
    for line in lines:
        yield line
        step()


# --- tail ------------------------------------------------------------------------------------------


@click.command()
@click.option("--task-type", metavar="T", help="Of this one alone.")
@click.option(
    "--interval", type=click.FloatRange(0.05, 3600), default=1.0, show_default=True,
    metavar="SECONDS", help="Between two looks.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@where
def tail(task_type: str | None, interval: float, as_json: bool) -> int:
    """Follow executions as they start and end, until Ctrl-C.

    An execution that started and ended between two looks is one line, that of its end.
    """
    if interval != interval:  # noqa: PLR0124 - what is no number passes every range
        raise click.BadParameter("nan is no length of time", param_hint="'--interval'")
    with opened(begun=True) as place, _until_interrupted():
        on = paper()
        follow = Follow(place, task_type)
        there = True
        while True:
            try:
                for line in follow.look():
                    if as_json:
                        click.echo(json.dumps(plain.line(line), separators=(",", ":")))
                    else:
                        details.event(on, line)
            except StoreUnavailableError as error:
                if not follow.began:
                    raise
                if there:
                    say(f"{error} (trying again)")
                there = False
            else:
                if not there:
                    say("the store is back")
                there = True
            time.sleep(interval)
    return FINE


@contextmanager
def _until_interrupted() -> Iterator[None]:
    """Ctrl-C ends it; what follows is not disturbed by another."""
    try:
        yield
    except KeyboardInterrupt:
        no_more_interrupts()


class Follow:
    """Tells which executions have started or ended since it last looked.

    Args:
        place: whose ledger.
        task_type: only this one; None: all.

    Attributes:
        began: whether it has looked.

    """

    def __init__(self, place: Place, task_type: str | None) -> None:
        self._place = place
        self._task_type = task_type
        self._from = 0
        self._seen: dict[str, int] = {}  # when those started that will be read again
        self._watched: dict[str, Execution] = {}  # those that may still end
        self._changed: list[Execution] = []  # also of looks that were cut short
        self.began = False

    def look(self) -> list[Execution]:
        """The executions that have changed, as they are now, in the order of what happened.

        Raises:
            StoreUnavailableError: for now; nothing is passed over by it.

        """
        now = self._place.ledger.now()
        self._look_after(now)
        for line in self._place.ledger.lines(
            span=(self._from if self.began else now - BEFORE, EVER)
        ):
            self._meet(line)
        self._from = now - AGAIN
        self._seen = {id_: at for id_, at in self._seen.items() if at >= self._from}
        self.began = True
        changed, self._changed = self._changed, []
        return sorted(changed, key=details.last_change)

    def _meet(self, line: Execution) -> None:
        id_ = line.execution_id
        if id_ in self._seen or id_ in self._watched:
            return
        self._seen[id_] = line.started
        if self._task_type not in (None, line.task_type):
            return
        if line.status is Status.OPEN:
            self._watched[id_] = line
        if line.status is Status.OPEN or self.began:
            self._changed.append(line)

    def _look_after(self, now: int) -> None:
        """See what has become of those that were under way."""
        for address in {line.claim.address for line in self._watched.values()}:
            record, _ = self._place.ledger.look(address)
            there = {line.execution_id: line for line in record.lines}
            for id_, before in list(self._watched.items()):
                if before.claim.address == address:
                    self._compare(id_, before, there.get(id_), now)

    def _compare(self, id_: str, before: Execution, line: Execution | None, now: int) -> None:
        if line is None:  # its record is over
            del self._watched[id_]
            return
        line = self._watched[id_] = line._replace(status=line.told(now))
        if line.status is not before.status:
            self._changed.append(line)
        waits = line.status is Status.LOST and now < line.until + GIVEN_UP  # it may come back
        if line.status is not Status.OPEN and not waits:
            del self._watched[id_]

"""`show`, `forget` and `resolve`: one task, found by its fingerprint or the beginning of it.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn

import click

from idemguard.api import Task
from idemguard.cli.base import FINE, absent, opened, paper, standard_input, where
from idemguard.cli.times import length
from idemguard.errors import StoreError, StoreUnavailableError
from idemguard.idempotent import Guard
from idemguard.report import details, plain
from idemguard.report.tables import QUIET
from idemguard.report.words import TYPED, brief, harmless, iso, typed
from idemguard.telemetry import FINGERPRINT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemguard.cli.base import Place
    from idemguard.record import Address, Execution, Record

FEWEST, WHOLE = 8, 64  # digits of a fingerprint
SHOWN = 16
MOST_TYPED = 80  # characters of what was typed as a fingerprint: one with a wrong digit is whole
MOST = 10  # places, or fingerprints, that a sentence names


@dataclass(frozen=True)
class _Which:
    """Which records are meant: those of a prefix, in a scope and version or in all."""

    prefix: str
    scope: str | None
    version: str | None

    def at(self, place: Place) -> list[Address]:
        """Where they are, all of one fingerprint.

        Raises:
            ClickException: several fingerprints begin so.

        """
        found = [
            address
            for address in place.ledger.find(self.prefix)
            if self.scope in (None, address.scope)
            and (self.version is None or self.version == (address.version or ""))
        ]
        prints = list(dict.fromkeys(address.fingerprint for address in found))
        if len(prints) > 1:
            digits = next(
                n for n in range(SHOWN, WHOLE + 1) if len({p[:n] for p in prints}) == len(prints)
            )
            raise click.ClickException(
                f"{len(prints)} fingerprints begin with {self.prefix}: "
                f"{typed([p[:digits] for p in prints], MOST)}; give more digits"
            )
        return found

    def missing(self, place: Place) -> int:
        """Say that there are none."""
        where_ = "" if self.scope is None else f", scope {brief(self.scope) or '(none)'}"
        where_ += "" if self.version is None else f", version {brief(self.version) or '(none)'}"
        return absent(
            f"no task of namespace {brief(place.namespace)}{where_} has a fingerprint that begins "
            f"with {self.prefix}"
        )


def _prefix(_: click.Context, __: click.Parameter, value: str) -> str:
    digits = value.strip().lower()
    if set(digits) - set("0123456789abcdef") or len(digits) > WHOLE:
        raise click.BadParameter(
            f"{brief(repr(value), MOST_TYPED)} is no fingerprint: it has 64 hex digits, or the first"
        )
    if len(digits) < FEWEST:
        raise click.BadParameter(f"{value!r} is too short: give {FEWEST} digits or more")
    return digits


def _named(function: Any) -> Any:
    """The argument and the options by which records are named."""
    for option in (
        where,
        click.option("--task-version", metavar="V", help="Only this version; '' is none."),
        click.option("--scope", metavar="S", help="Only this scope; '' is none."),
        click.argument("fingerprint", callback=_prefix),
    ):
        function = option(function)
    return function


# --- show ------------------------------------------------------------------------------------------


@click.command()
@_named
@click.option(
    "--jaeger-url", envvar="IDEMGUARD_JAEGER_URL", metavar="BASE",
    help="For links to traces; else IDEMGUARD_JAEGER_URL.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def show(
    fingerprint: str,
    scope: str | None,
    task_version: str | None,
    jaeger_url: str | None,
    as_json: bool,
) -> int:
    """A task: its executions, their causes, workers and cost.

    FINGERPRINT is the whole of it or its first digits, eight or more. All scopes and versions
    are shown unless one is named.
    """
    which = _Which(fingerprint, scope, task_version)
    with opened() as place:
        addresses = which.at(place)
        if not addresses:
            return which.missing(place)
        found = [(address, *_looked(place, address)) for address in addresses]
        inside = {
            line.execution_id: place.ledger.tree(line)
            for _, record, _ in found
            for line in record.lines
            if line.spent.nested
        }
    if as_json:
        click.echo(plain.dump(_told(found, inside, jaeger_url)), nl=False)
        return FINE
    on = paper()
    kinds = dict.fromkeys(line.task_type for _, record, _ in found for line in record.lines)
    fingerprint = addresses[0].fingerprint
    on.say(f"{details.listed(kinds)}  {fingerprint}", "bold")
    if any(line.trace_id is not None for _, record, _ in found for line in record.lines):
        on.say(f"all its calls in traces: {FINGERPRINT}={fingerprint[:SHOWN]}", QUIET)
    for address, record, now in found:
        details.task(on, address, record, now)
        for line in record.lines:
            details.execution(on, line, inside.get(line.execution_id, ()), now, jaeger_url or None)
    return FINE


def _looked(place: Place, address: Address) -> tuple[Record, int]:
    record, now = place.ledger.look(address)
    lines = sorted(record.lines, key=lambda line: (line.started, line.claim.token))
    return record._replace(lines=tuple(line._replace(status=line.told(now)) for line in lines)), now


def _told(
    found: Sequence[tuple[Address, Record, int]],
    inside: dict[str, list[Execution]],
    jaeger: str | None,
) -> dict[str, Any]:
    return {
        "fingerprint": found[0][0].fingerprint,
        "namespace": found[0][0].namespace,
        "records": [
            {
                "scope": address.scope,
                "version": address.version,
                "runs": record.runs,
                "reused": record.reused,
                "kept_until": iso(record.result.until)
                if record.result is not None and now < record.result.until
                else None,
                "unknown_outcome": record.unknown(now) is not None,
                "executions": [_line(line, inside, jaeger) for line in record.lines],
            }
            for address, record, now in found
        ],
    }


def _line(
    line: Execution, inside: dict[str, list[Execution]], jaeger: str | None
) -> dict[str, Any]:
    told = plain.line(line)
    told["inside"] = [plain.line(one) for one in inside.get(line.execution_id, ())]
    linked = bool(jaeger) and line.trace_id is not None
    told["trace_url"] = details.link(jaeger or "", line.trace_id or "") if linked else None
    return told


# --- forget, resolve ---------------------------------------------------------------------------------


@click.command()
@_named
def forget(fingerprint: str, scope: str | None, task_version: str | None) -> int:
    """Drop a task's result: the next call executes it.

    In all scopes and versions, unless one is named. What it executed stays in the ledger. An
    execution that is under way goes on, but its result will not be kept.
    """
    which = _Which(fingerprint, scope, task_version)
    with opened(writes=True) as place:
        addresses = which.at(place)
        if not addresses:
            return which.missing(place)
        guard = Guard(store=place.store, namespace=place.namespace)
        for address in addresses:
            running = _running(place, address)
            guard.forget(_task(address))
            click.echo(
                f"forgotten: {address.fingerprint[:SHOWN]}, {details.place(address)}{running}"
            )
    return FINE


def _running(place: Place, address: Address) -> str:
    """Whose execution goes on without a claim; a record that cannot be read is dropped unread."""
    try:
        record, now = place.ledger.look(address)
    except StoreUnavailableError:
        raise
    except StoreError:
        return ""
    living = record.living(now)
    return "".join(
        f"; {harmless(line.worker)} is still executing it, for nobody" for line in living
    )


@click.command()
@_named
@click.argument("value", metavar="JSON")
@click.option(
    "--ttl", callback=length, metavar="TIME", help="How long it is reused, as 15m or 7d; else 15m.",
)  # fmt: skip
def resolve(
    fingerprint: str, scope: str | None, task_version: str | None, value: str, ttl: float | None
) -> int:
    """Give a task whose outcome is unknown a result.

    JSON is its text, or - for standard input.

    Callers get it as they would have got the execution's own. Refused while a fresh result is
    kept.
    """
    result = _parsed(value)
    which = _Which(fingerprint, scope, task_version)
    with opened(writes=True) as place:
        addresses = which.at(place)
        if not addresses:
            return which.missing(place)
        if len(addresses) > 1:
            raise click.UsageError(
                f"{addresses[0].fingerprint[:SHOWN]} is in {len(addresses)} places: "
                f"{typed([f'({_typed(one)})' for one in addresses], MOST)}; name one "
                "with --scope and --task-version"
            )
        (address,) = addresses
        record, _ = place.ledger.look(address)
        kind = record.lines[-1].task_type if record.lines else "task"
        Guard(store=place.store, namespace=place.namespace, ttl=ttl).resolve(
            _task(address, kind), result
        )
        click.echo(f"resolved: {address.fingerprint[:SHOWN]}, {details.place(address)}")
    return FINE


def _typed(address: Address) -> str:
    """Its scope and version, to be typed."""
    version = None if address.version is None else brief(harmless(address.version), TYPED)
    scope = brief(harmless(address.scope), TYPED)
    return details.place(address._replace(scope=scope, version=version))


def _task(address: Address, kind: str = "task") -> Task:
    return Task(kind, address.fingerprint, address.scope, address.version)


def _parsed(text: str) -> Any:
    if text == "-":
        try:
            text = standard_input().read()
        except UnicodeDecodeError:
            raise click.BadParameter("JSON: standard input is no UTF-8 text") from None
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"JSON: {str(error) or type(error).__name__}") from None


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"a number beyond all bounds: {brief(text)}")
    if not number and set(text.lower().partition("e")[0]) & set("123456789"):
        raise ValueError(f"a number too small to be told from 0: {brief(text)}")
    return number

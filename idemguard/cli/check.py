"""`check`: whether anything alerts, for cron and CI.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from idemguard import alerts
from idemguard.cli.base import FINE, opened, paper, shown_store, where
from idemguard.cli.output import busy
from idemguard.errors import ConfigurationError
from idemguard.report import alarms, plain, tables
from idemguard.report.limits import TABLE, project_limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemguard.alerts import Limits

ALERT = 1


@click.command()
@click.option(
    "--fail-on", metavar="KINDS",
    help=f"Of {','.join(alerts.KINDS)}, with commas between; else what the project sets, else "
    "duplication.",
)  # fmt: skip
@click.option(
    "--limit", "over", metavar="KIND=NUMBER", multiple=True,
    help="What must be passed, as duplication=3% or drops=0; may be repeated.",
)  # fmt: skip
@click.option(
    "--volume", metavar="[KIND=]NUMBER", multiple=True,
    help="How many there must be, as 20 or fallback=50; may be repeated.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--quiet", is_flag=True, help="Print alerts alone.")
@where
def check(
    *,
    fail_on: str | None,
    over: Sequence[str],
    volume: Sequence[str],
    as_json: bool,
    quiet: bool,
) -> int:
    """Whether a limit was passed in each of the last three windows of five minutes.

    Limits are those of [tool.idemguard] in pyproject.toml, unless an option says otherwise.

    Exit codes: 0 nothing alerts, 1 something does, 2 an error.
    """
    limits = _limits(fail_on, over, volume)
    with opened() as place, busy("reading"):
        found = alarms.check(place.ledger, limits, place.ledger.now())
    store = shown_store()  # a password is not for a log, and whoever gave it has it
    if quiet and not found.alerts:
        return FINE
    if as_json:
        click.echo(plain.dump(plain.checked(found, store=store)), nl=False)
    else:
        tables.checked(paper(), found, store=store)
    return ALERT if found.alerts else FINE


def _limits(fail_on: str | None, over: Sequence[str], volume: Sequence[str]) -> Limits:
    """What the project sets, and the options over it.

    Raises:
        ConfigurationError: the project sets what cannot be, or that nothing is checked.
        click.BadParameter: an option does, or is of a kind that is not checked.

    """
    limits = project_limits()
    of = list[tuple[str, str]]()
    given: list[tuple[str, dict[str, Any]]] = []
    if fail_on is not None:
        names = [name.strip() for name in fail_on.split(",")]
        given.append(("--fail-on", {"fail_on": names}))
    for text in over:
        kind, _, number = text.partition("=")
        given.append(("--limit", {"limits": {kind.strip(): number.strip()}}))
        of.append(("--limit", kind.strip()))
    for text in volume:
        kind, named, number = text.rpartition("=")
        each = [kind.strip()] if named else alerts.KINDS
        of += [("--volume", kind.strip())] if named else []
        given.append(("--volume", {"volume": dict.fromkeys(each, number.strip())}))
    for option, settings in given:
        try:
            limits = alerts.changed(limits, settings)
        except ConfigurationError as error:
            raise click.BadParameter(str(error), param_hint=option) from error
    if not limits.on:
        raise ConfigurationError(
            f"nothing is checked: fail_on is empty in {TABLE}; name kinds there, or by --fail-on"
        )
    for option, kind in of:
        if kind not in limits.on:
            all_ = ",".join(one for one in alerts.KINDS if one in (*limits.on, kind))
            raise click.BadParameter(
                f"{kind} is not checked; add it: --fail-on {all_}", param_hint=option
            )
    return limits

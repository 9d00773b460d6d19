"""`demo`: three workers pay twice for the same documents, and then once.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from idemguard.cli.base import ERROR, given_namespace, given_store
from idemguard.errors import ConfigurationError
from idemguard.stores import without_password

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from idemguard.demo.documents import Found
    from idemguard.demo.plan import Plan
    from idemguard.demo.reading import Figures
    from idemguard.demo.run import Came
    from idemguard.stores import Store

MODES = ("observe", "enforce")


def _share(_: click.Context, __: click.Parameter, value: str) -> float:
    """A share, `0.18` or `18%`, as a fraction."""
    text = value.strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise click.BadParameter(f"{value!r} is no share between 0 and 1, as 0.18 or 18%")
    return share


@click.command()
@click.argument("folder", required=False)
@click.option(
    "--overlap", callback=_share, default="18%", show_default=True, metavar="SHARE",
    help="How many of the tasks two workers are given.",
)  # fmt: skip
@click.option(
    "--delay", type=click.FloatRange(0, 5), default=0.1, show_default=True, metavar="SECONDS",
    help="What a call of the large model takes; of the small one, a tenth.",
)  # fmt: skip
@click.option(
    "--store", metavar="URL",
    help="Keep the ledger there, as sqlite:///demo.db; else it is temporary.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def demo(folder: str | None, overlap: float, delay: float, store: str | None, as_json: bool) -> int:
    """Watch three workers pay twice for the same documents, and then once.

    Three processes get batches of the text files under FOLDER (some that come with idemguard,
    where none is given) that overlap in part of the tasks. They work them off first in observe
    mode, which only counts, then in enforce mode. All figures are read from the ledger.

    Where OTEL_EXPORTER_OTLP_ENDPOINT names an OTLP endpoint (HTTP, port 4318 as a rule), spans and
    metrics of the workers go there by http/protobuf; the other variables of OpenTelemetry count as
    well.
    """
    from idemguard.demo import TEXTS, documents, export, plan, table  # noqa: PLC0415 - loaded when needed
    from idemguard.ledger import ExecutionLedger  # noqa: PLC0415 - loaded when needed
    from idemguard.stores import open_store  # noqa: PLC0415 - loaded when needed

    if given_namespace() is not None:
        raise click.UsageError("--namespace: a demo makes namespaces of its own")
    store = given_store() if store is None else store
    signal.signal(signal.SIGTERM, _end)
    try:
        found = documents.look_through(TEXTS if folder is None else Path(folder), delay)
    except documents.UnusableError as error:
        raise click.ClickException(str(error)) from error
    planned = plan.plan(found.documents, overlap)
    sent = export.endpoints()
    if unspoken := export.unspoken(sent):
        click.echo(f"idemguard: {_other_protocol(unspoken)}", err=True)
        sent = {what: place for what, place in sent.items() if what not in unspoken}
    if sent and not export.installed():
        click.echo(
            "idemguard: sending spans and metrics needs pip install 'idemguard[otlp]'; "
            "the demo goes on without",
            err=True,
        )
        sent = {}
    out = table.console()
    with _store(store) as url, closing(open_store(url)) as shared:
        ExecutionLedger(shared, namespace="demo").totals()  # raises now where it cannot be used
        if not as_json:
            table.introduce(out, planned, len(found.documents), found.skipped)
        passes = _both(
            planned, url, shared, found,
            delay=delay, signals=tuple(sent), out=None if as_json else out,
        )  # fmt: skip
    observed, enforced = (figures for _, figures, _ in passes)
    if as_json:
        click.echo(json.dumps(_told(planned, found, passes, store), indent=2))
    else:
        table.show(out, observed, enforced)
        if store is not None:
            names = " and ".join(namespace for namespace, _, _ in passes)
            table.say(out, f"The ledger stays in {without_password(store)}, namespaces {names}.")
        if arrived := {
            what: place
            for what, place in sent.items()
            if any(what in came.arrived for _, _, came in passes)
        }:
            table.say(out, _where(planned, arrived))
    all_came = [came for _, _, came in passes]
    _missing(all_came, sent)
    return _trouble(all_came)


def _other_protocol(unspoken: dict[str, tuple[str, str]]) -> str:
    """Why some signals are not sent, and what to change."""
    from idemguard.demo import export  # noqa: PLC0415 - loaded when needed
    from idemguard.demo.documents import shown  # noqa: PLC0415 - loaded when needed

    settings = {name: f"{name} (now {shown(protocol)})" for name, protocol in unspoken.values()}
    return (
        f"the demo speaks {export.PROTOCOL} alone and goes on without {' and '.join(unspoken)}; "
        f"to have them sent, set {' and '.join(settings.values())} to {export.PROTOCOL}, and the "
        f"endpoint to a port that takes it, {export.HTTP_PORT} as a rule"
    )


def _missing(all_came: list[Came], sent: dict[str, str]) -> None:
    """Say what did not arrive, and what helps."""
    from idemguard.demo import export  # noqa: PLC0415 - loaded when needed

    unsent = {what: why for came in all_came for what, why in came.unsent.items()}
    for what, why in sorted(unsent.items()):
        some = "some " if any(what in came.arrived for came in all_came) else ""
        told = f"idemguard: {some}{what} did not arrive at {without_password(sent[what])}: {why}"
        advice = export.advice(what, sent[what], unsent)
        click.echo(f"{told}; {advice}" if advice else told, err=True)


def _where(planned: Plan, sent: dict[str, str]) -> str:
    """Where to look for the spans and metrics that arrived."""
    from idemguard.api import Task  # noqa: PLC0415 - loaded when needed
    from idemguard.demo import export  # noqa: PLC0415 - loaded when needed

    if "traces" not in sent:
        return f"Metrics went to {without_password(sent['metrics'])}."
    tags = "idemguard.outcome=reused"
    if planned.doubled:
        call = planned.doubled[0]
        fingerprint = Task.of(call.task_type, {"document": call.document}).fingerprint
        tags = f"{tags}, or idemguard.fingerprint={fingerprint[:16]} for one task and all its calls"
    return f"Traces in Jaeger: {export.jaeger(sent['traces'])}\nSearch there by tag: {tags}."


def _both(
    planned: Plan,
    url: str,
    shared: Store,
    found: Found,
    *,
    delay: float,
    signals: tuple[str, ...],
    out: Console | None,
) -> list[tuple[str, Figures, Came]]:
    """The two passes: of each the namespace, the figures, and what became of the workers."""
    from idemguard.demo import figures, run, table  # noqa: PLC0415 - loaded when needed
    from idemguard.ledger import ExecutionLedger  # noqa: PLC0415 - loaded when needed

    passes = []
    mark = os.urandom(3).hex()  # so that a store that is kept has every run apart
    for mode in MODES:
        namespace = f"demo-{mark}-{mode}"
        ledger = ExecutionLedger(shared, namespace=namespace)
        setting = run.Setting(url, namespace, mode, str(found.folder), delay, signals)
        with ExitStack() as stack:
            told = stack.enter_context(table.bar(out, mode, planned.calls)) if out else lambda: None
            came = run.race(planned.batches, setting, told)
        if not came.done:
            why = "; ".join([*came.died, *came.failed[:1]])
            raise click.ClickException(f"no call came to an end in {mode} mode: {why}")
        passes.append((namespace, figures(ledger), came))
        # where nothing arrived, nobody is there
        signals = tuple(what for what in signals if what in came.arrived or what not in came.unsent)
    return passes


@contextmanager
def _store(url: str | None) -> Iterator[str]:
    """The URL that was given, or of a file that is gone afterwards."""
    if url is None:
        with tempfile.TemporaryDirectory(
            prefix="idemguard-demo-", ignore_cleanup_errors=True
        ) as folder:
            yield f"sqlite:///{Path(folder, 'ledger.db')}"
        return
    if url.startswith("memory:"):
        raise ConfigurationError(
            f"--store {url}: three processes cannot share it; give it a file, sqlite:///demo.db"
        )
    yield url


def _told(
    planned: Plan, found: Found, passes: list[tuple[str, Figures, Came]], store: str | None
) -> dict[str, Any]:
    """All of it, as JSON has it; money is decimal text."""
    from idemguard.demo.documents import shown  # noqa: PLC0415 - loaded when needed

    told: dict[str, Any] = {
        "folder": shown(str(found.folder)),
        "documents": len(found.documents),
        "skipped": [{"file": shown(n), "reason": reason} for n, reason in found.skipped.items()],
        "workers": len(planned.batches),
        "planned": {
            "calls": planned.calls,
            "tasks": planned.tasks,
            "in_two_batches": len(planned.doubled),
        },
        "store": store,
    }
    for mode, (namespace, figures, came) in zip(MODES, passes, strict=True):
        told[mode] = {
            "namespace": namespace,
            "calls": figures.calls,
            "executions": figures.executions,
            "reused": figures.reused,
            "tasks": figures.tasks,
            "doubled": figures.doubled,
            "doubled_share": figures.doubled_share,
            "doubled_types": figures.doubled_types,
            "duplicates": figures.duplicates,
            "duplication_rate": figures.duplication_rate,
            "tokens": figures.tokens,
            "bill": f"{figures.bill:f}",
            "ideal": f"{figures.ideal:f}",
            "against_ideal": figures.against_ideal,
            "currency": "USD",
            "failed": came.failed,
            "died": came.died,
        }
    return told


def _trouble(all_came: list[Came]) -> int:
    """Say what went wrong in the passes, where anything did."""
    for mode, came in zip(MODES, all_came, strict=True):
        for what in came.died:
            click.echo(f"idemguard: {mode}: {what}; the figures are those of the rest", err=True)
        if came.failed:
            click.echo(
                f"idemguard: {mode}: {len(came.failed)} failed, as {came.failed[0]}", err=True
            )
    return ERROR if any(came.died or came.failed for came in all_came) else 0


def _end(*_: object) -> None:
    raise SystemExit(143)  # as an unhandled SIGTERM tells it, but with no process left behind

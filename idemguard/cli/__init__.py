"""The `idemguard` command.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import click
import rich  # noqa: F401 - whoever lacks it is told now, not halfway

from idemguard.cli.base import Program, where
from idemguard.cli.check import check
from idemguard.cli.demo import demo
from idemguard.cli.lines import export, tail
from idemguard.cli.reconcile import reconcile
from idemguard.cli.sums import compare, explain, report
from idemguard.cli.tasks import forget, resolve, show

__all__ = ["command", "main"]


@click.group(
    "idemguard",
    cls=Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@where
@click.version_option(version("idemguard"), prog_name="idemguard")
@click.pass_context
def command(context: click.Context) -> None:
    """Run a task once, however often parallel agents pick it up, and count what runs.

    --store and --namespace may stand before or after a command's name; where they are not
    given, IDEMGUARD_STORE and IDEMGUARD_NAMESPACE count, then the project's own file.

    Exit codes: 0 fine, 1 what was asked for is not there (check: something alerts), 2 an error.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for one in (report, check, show, explain, compare, tail, export, reconcile, forget, resolve, demo):
    command.add_command(one)


def main() -> int:
    """Run the command; every error is one line.

    Returns:
        The exit code.

    """
    if sys.stdout is not None:
        return _run()
    # it was closed before we began
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        return _run()


def _run() -> int:
    code: int = command.main(prog_name="idemguard", standalone_mode=False)
    return code

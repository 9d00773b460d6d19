"""What is asked of a test: marker before command line before ini file, the closest setting first.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MODES = ("error", "warn", "report", "off")
NEAR = ("warn", "error", "off")
SCOPES = ("test", "module", "session")
CHOICES = {"mode": MODES, "near": NEAR, "scope": SCOPES}
COUNTS = ("max_runs", "max_tokens")
KEYS = ("max_runs", "task", "mode", "scope", "max_tokens", "max_cost", "count_failed", "near")


class Rules(NamedTuple):
    """What is asked of one test.

    Attributes:
        mode: what a duplicate does: `error`, `warn`, `report`, `off`.
        near: what a near duplicate does: `warn`, `error`, `off`.
        scope: how far results are shared: `test`, `module`, `session`.
        max_runs: of one task.
        count_failed: whether a run that raised counts.
        max_tokens: of all runs together, or None.
        max_cost: of all runs together, in dollars, or None.
        tasks: what is asked of single task types, apart from all others.

    """

    mode: str = "error"
    near: str = "warn"
    scope: str = "test"
    max_runs: int = 1
    count_failed: bool = False
    max_tokens: int | None = None
    max_cost: Decimal | None = None
    tasks: Mapping[str, Mapping[str, Any]] = {}

    def counts(self) -> bool:
        """Whether anything is to be counted."""
        return self.mode != "off" or any(
            own.get("mode", "off") != "off" for own in self.tasks.values()
        )

    def of(self, task: str) -> Rules:
        """What is asked of one task type."""
        own = self.tasks.get(task)
        return self if own is None else self._replace(**own)


def rules(base: Rules, marks: Iterable[Mapping[str, Any]]) -> Rules:
    """What is asked of a test.

    Args:
        base: what command line and ini file say.
        marks: the keywords of its markers, closest first, checked by `wrong`.

    """
    everywhere: dict[str, Any] = {}
    tasks: dict[str, dict[str, Any]] = {}
    for mark in reversed(list(marks)):
        said = dict(mark)
        if said.get("max_cost") is not None:
            said["max_cost"] = dollars(said["max_cost"])
        task = said.pop("task", None)
        if task is not None:
            tasks.setdefault(task, {}).update(said)
            continue
        everywhere.update(said)
        for own in tasks.values():  # said further away, and of one task: this is closer
            for name in said:
                own.pop(name, None)
    return base._replace(**everywhere, tasks=tasks)


def wrong(args: tuple[Any, ...], said: Mapping[str, Any]) -> str | None:
    """What is wrong with a marker, or None.

    Args:
        args: its positional arguments.
        said: its keywords.

    """
    known = ", ".join(KEYS)
    if args:
        return f"the idemguard marker takes keywords alone ({known}), not {args[0]!r}"
    if unknown := sorted(said.keys() - set(KEYS)):
        return f"the idemguard marker takes no {', '.join(unknown)}; it takes {known}"
    for name, value in said.items():
        if (why := misfit(name, value)) is not None:
            return f"the idemguard marker's {name}= takes {why}, not {value!r}"
    if said.get("task") is not None and "scope" in said:
        return "the idemguard marker's scope= is of a whole test, and not of one task"
    return None


def misfit(name: str, value: object) -> str | None:
    """What a setting takes, where this value is not that."""
    if name in CHOICES:
        return None if value in CHOICES[name] else " or ".join(map(repr, CHOICES[name]))
    if name == "count_failed":
        return None if isinstance(value, bool) else "True or False"
    if name == "task":
        return None if value is None or (isinstance(value, str) and value) else "a task type"
    if name in COUNTS:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return None if fits or (value is None and name != "max_runs") else "a number, 0 or more"
    try:
        dollars(value)
    except ValueError:
        return "an amount in dollars"
    return None


def dollars(value: Any) -> Decimal | None:
    """An amount of money; a float counts as it is written.

    Raises:
        ValueError: it is none.

    """
    if value is None:
        return None
    if isinstance(value, bool):
        raise ValueError(value)  # noqa: TRY004 - one error for all that is no amount
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        raise ValueError(value) from None
    if not amount.is_finite() or amount < 0:
        raise ValueError(value)
    return amount

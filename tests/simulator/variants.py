"""Rules with an edited text: the project's own source, with a passage replaced."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from simulator.rules import Rules

from idemguard import claim, record, windows

MODULES = {"claim.py": claim, "record.py": record, "windows.py": windows}


class Edit(NamedTuple):
    """A passage of a file, which must stand there exactly once, and what stands there instead."""

    file: str
    old: str
    new: str


class Variant(NamedTuple):
    """Edited rules, and edited methods of a record where the edit is among them."""

    rules: Rules
    methods: tuple[tuple[type, str, Any], ...] = ()

    @contextmanager
    def in_force(self) -> Iterator[Rules]:
        """The rules, with the methods in their place meanwhile."""
        kept = [(owner, name, owner.__dict__[name]) for owner, name, _ in self.methods]
        try:
            for owner, name, method in self.methods:
                setattr(owner, name, method)
            yield self.rules
        finally:
            for owner, name, method in kept:
                setattr(owner, name, method)


def variant(*edits: Edit) -> Variant:
    """The rules with these edits.

    Raises:
        LookupError: a passage stands in its file not at all, or more than once.

    """
    rules, methods = Rules(), []
    for file in dict.fromkeys(edit.file for edit in edits):
        edited = _edited(file, [edit for edit in edits if edit.file == file])
        if file == "claim.py":
            rules = rules._replace(
                transition=edited.transition, wakes=edited.wakes, waits=edited.waits
            )
        elif file == "windows.py":
            rules = rules._replace(entries=edited.entries)
        else:
            for owner in (record.Record, record.Execution):
                new = vars(getattr(edited, owner.__name__))
                methods += [(owner, name, new[name]) for name in _functions(owner)]
    return Variant(rules, tuple(methods))


def _edited(file: str, edits: list[Edit]) -> Any:
    module = MODULES[file]
    source = source_of(file)
    for edit in edits:
        if (times := source.count(edit.old)) != 1:
            raise LookupError(f"{file}: stands there {times} times, not once: {edit.old!r}")
        source = source.replace(edit.old, edit.new)
    edited = types.ModuleType(module.__name__)
    exec(compile(source, f"edited {file}", "exec"), edited.__dict__)
    for name in _shared(module):  # the classes stay the project's own, so that they are recognised
        setattr(edited, name, getattr(module, name))
    return edited


@cache
def source_of(file: str) -> str:
    path = MODULES[file].__file__
    assert path is not None
    return Path(path).read_text(encoding="utf-8")


def _shared(module: types.ModuleType) -> list[str]:
    kinds = vars(module)
    names = [one.__name__ for union in ("Command", "Answer") for one in get_args(kinds.get(union))]
    if module is record:
        own = (record.Record, record.Execution)
        names = [name for name, kind in kinds.items() if isinstance(kind, type) and kind not in own]
    return names if module is not windows else []


def _functions(owner: type) -> list[str]:
    return [name for name, kind in vars(owner).items() if isinstance(kind, types.FunctionType)
            and not name.startswith("_")]  # fmt: skip


PLAIN = Variant(Rules())
FEW_LINES = Edit("claim.py", "LINES = 64", "LINES = 3")

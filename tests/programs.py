"""Programs that no package of Python brings: found, else what needs them is skipped, and says so."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# as the run was started: within a test nothing of ours is set
_GIVEN = {name: value for name, value in os.environ.items() if name.startswith("IDEMGUARD_")}


def need(
    name: str,
    marker: str | None = None,
    *,
    others: Sequence[str] = (),
    places: Sequence[Path] = (),
    how: str = "",
) -> str:
    """The path of a program: where `$IDEMGUARD_TEST_<MARKER>` says, on PATH, or in one of `places`.

    Where there is none, the test is skipped; it fails when `$IDEMGUARD_REQUIRE`, markers with
    commas between them, names its marker, or when the variable names what cannot be executed.

    Args:
        name: of the program.
        marker: of the tests that need it; its name, unless given.
        others: names that it has elsewhere.
        places: paths where it may be beside PATH; the first that is there counts.
        how: what to do to have it.

    """
    marker = marker or name
    variable = f"IDEMGUARD_TEST_{marker.upper()}"
    if named := _GIVEN.get(variable):
        # what was asked for by name is not replaced by something else
        if found := shutil.which(named):
            return found
        pytest.fail(f"{variable}={named}: nothing there can be executed", pytrace=False)
    for wanted in (name, *others, *map(str, places)):
        if found := shutil.which(wanted):
            return found
    missing = (
        f"NOT TESTED, {name} IS NOT HERE: {how or 'install it'}, or set {variable} to its path"
    )
    if marker in _GIVEN.get("IDEMGUARD_REQUIRE", "").replace(" ", "").split(","):
        pytest.fail(f"{missing} (IDEMGUARD_REQUIRE names it)", pytrace=False)
    pytest.skip(missing)

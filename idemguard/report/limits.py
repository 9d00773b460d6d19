"""The limits that the project sets which is worked in.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from idemguard.alerts import Limits, changed
from idemguard.errors import ConfigurationError

FILE, TABLE = "pyproject.toml", "[tool.idemguard]"


def project_limits() -> Limits:
    """The limits of the nearest `pyproject.toml` upwards that has `[tool.idemguard]`, else ours.

    Raises:
        ConfigurationError: what it sets cannot be, or it is no TOML; it is named.

    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed, and so is in no project
        return Limits()
    for folder in (here, *here.parents):
        found = _read(folder / FILE)
        if found is not None:
            if not isinstance(found, dict):
                raise ConfigurationError(f"{folder / FILE}: {TABLE} is no table")
            return changed(Limits(), found, f"{folder / FILE} {TABLE}")
    return Limits()


def _read(path: Path) -> object:
    """What stands there under our name; None: nothing."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"{path}: cannot be read: {why}") from error
    try:
        tools = tomllib.loads(text).get("tool", {})
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: no TOML: {error}") from error
    return tools.get("idemguard") if isinstance(tools, dict) else None

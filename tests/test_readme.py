"""The README's code runs, in its order, and prints what the README shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

README = Path(__file__).parent.parent / "README.md"
CODE = re.compile(r"^```python\n(.*?)^```$|^<!-- python\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"^<!-- output -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """Code, shown or in a comment, and the output of the code before it, in their order."""
    found = [(m.start(), "code", m[1] or m[2]) for m in CODE.finditer(text)]
    found += [(m.start(), "output", m[1]) for m in OUTPUT.finditer(text)]
    for _, kind, piece in sorted(found):
        yield kind, piece


def test_the_code_runs_and_prints_what_is_shown(tmp_path: Path) -> None:
    text = README.read_text()
    assert text.count("```python") == len([m for m in CODE.finditer(text) if m[1] is not None])
    expected = [piece for kind, piece in pieces(text) if kind == "output"]
    code = [piece for kind, piece in pieces(text) if kind == "code"]
    assert len(expected) >= 2
    script = tmp_path / "readme.py"
    script.write_text("\n".join(code))
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "".join(expected)


def test_exactly_two_commands_do_all_set_up() -> None:
    commands = re.findall(r"^\$ (uv .*)$", README.read_text(), re.MULTILINE)
    assert commands == ["uv run idemguard demo", "uv run coverage run -m pytest"]


def test_the_first_screen_has_the_limits_link_and_no_strange_words() -> None:
    text = README.read_text()
    assert "## What it cannot promise" in text
    assert not re.search(r"\bcach(e|ed|ing)\b", text, re.IGNORECASE)

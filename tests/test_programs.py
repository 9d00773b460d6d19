"""Tests that need a program meet it, are skipped with words that say what to do, or fail where they must not be."""

from __future__ import annotations

import programs
import pytest


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """As if the run had begun with these variables, and with nothing but `tmp_path` on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def begun(**given: object) -> None:
        monkeypatch.setattr(programs, "_GIVEN", {k: str(v) for k, v in given.items()})

    begun()
    return begun


@pytest.fixture
def put(tmp_path):
    """Puts a program somewhere below `tmp_path`; its path."""

    def put(name: str, mode: int = 0o755) -> str:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        file.chmod(mode)
        return str(file)

    return put


def test_by_its_variable_then_on_path_then_in_a_place(begin, put, tmp_path):
    places = [tmp_path / "old" / "tool", tmp_path / "cache" / "tool"]
    cached = put("cache/tool")
    assert programs.need("tool", places=places) == cached
    other = put("tool-stable")
    assert programs.need("tool", others=["tool-stable"], places=places) == other
    on_path = put("tool")
    assert programs.need("tool", others=["tool-stable"], places=places) == on_path
    begin(IDEMGUARD_TEST_TOOLS=put("named/tool"))
    assert programs.need("tool", "tools", places=places) == str(tmp_path / "named" / "tool")
    assert programs.need("tool", "another") == on_path


def test_where_there_is_none_the_reason_says_what_to_do(begin, put):
    put("tool", mode=0o644)
    begin(IDEMGUARD_REQUIRE="toolbox,jaeger")
    with pytest.raises(
        pytest.skip.Exception, match="NOT TESTED, tool IS NOT HERE: buy one, or set"
    ):
        programs.need("tool", how="buy one")


@pytest.mark.parametrize("required", ["tools", "jaeger,tools", "jaeger, tools"])
def test_where_it_is_required_the_test_fails(begin, required):
    begin(IDEMGUARD_REQUIRE=required)
    with pytest.raises(pytest.fail.Exception, match="IDEMGUARD_TEST_TOOLS to its path"):
        programs.need("tool", "tools")


def test_what_is_asked_for_by_name_is_not_replaced(begin, put, tmp_path):
    put("tool")
    begin(IDEMGUARD_TEST_TOOL=tmp_path / "elsewhere")
    with pytest.raises(pytest.fail.Exception, match="elsewhere: nothing there can be executed"):
        programs.need("tool")

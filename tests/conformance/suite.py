"""The conformance suite: what every store must do.

A store of your own is tested by a class of your tests:

    from conformance.kinds import Kind
    from conformance.suite import Conformance

    def make(folder, clock):
        return MyStore(folder / "my.db", clock=clock)

    class TestMyStore(Conformance):
        kind = Kind("my", make, shared=True)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

CASES = ("commands", "digests", "equivalence", "meanwhile", "reading", "scene", "waiting")
pytest.register_assert_rewrite(*(f"conformance.{name}" for name in CASES))

from conformance.commands import Commands  # noqa: E402 - their asserts are to speak
from conformance.digests import Digests  # noqa: E402
from conformance.equivalence import Equivalence  # noqa: E402
from conformance.kinds import Kind  # noqa: E402
from conformance.parties import Elsewhere  # noqa: E402
from conformance.reading import Reading  # noqa: E402
from conformance.scene import Scene  # noqa: E402
from conformance.waiting import Waiting  # noqa: E402


class Conformance(Commands, Digests, Equivalence, Waiting, Reading):
    """Every case, by both drivers; with two callers also in two processes, where they can share.

    Attributes:
        kind: the store that is tested.

    """

    kind: ClassVar[Kind]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Spread a case over the drivers and the processes of its callers."""
        if not {"driver", "place"} & set(metafunc.fixturenames):
            return
        places = ["one", "two"] if self.kind.shared else ["one"]
        if "place" not in metafunc.fixturenames:
            metafunc.parametrize("driver", ["drive", "adrive"])
        else:
            ways = [(driver, place) for place in places for driver in ("drive", "adrive")]
            ids = [f"{driver}-{place}" for driver, place in ways]
            metafunc.parametrize(("driver", "place"), ways, ids=ids)

    @pytest.fixture(scope="class")
    @classmethod
    def elsewhere(cls) -> Iterator[Elsewhere]:
        """Another process, for all tests of the class."""
        process = Elsewhere()
        yield process
        process.end()

    @pytest.fixture
    def scene(self, tmp_path: Path, driver: str) -> Iterator[Scene]:
        """For cases of one caller."""
        scene = Scene(self.kind, tmp_path, driver)
        yield scene
        scene.close()

    @pytest.fixture
    def pair(self, tmp_path: Path, driver: str, place: str, request) -> Iterator[Scene]:
        """For cases of two callers."""
        elsewhere = request.getfixturevalue("elsewhere") if place == "two" else None
        scene = Scene(self.kind, tmp_path, driver, elsewhere)
        yield scene
        scene.close()

    @pytest.fixture
    def steered(self, scene: Scene) -> Scene:
        """For cases of one caller in which hours pass."""
        return _steerable(scene)

    @pytest.fixture
    def timed(self, pair: Scene) -> Scene:
        """For cases of two callers in which hours pass."""
        return _steerable(pair)


def _steerable(scene: Scene) -> Scene:
    if not scene.kind.steerable:
        pytest.skip(f"{scene.kind.name} goes by a clock of its own")
    return scene

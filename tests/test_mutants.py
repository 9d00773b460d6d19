"""Each deliberate fault in the rules makes the simulator fail."""

from __future__ import annotations

import pytest
from simulator.explorer import explore
from simulator.faults import FAULTS, SOONEST, Fault, hunt
from simulator.scenes import SCENES
from simulator.variants import PLAIN, Edit, variant

from idemguard.record import Record


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault: Fault, record_property) -> None:
    found = hunt(fault)
    record_property("found", found)
    assert found is not None, f"the simulator sees nothing wrong: {fault.name}"


def test_each_fault_is_one_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len({fault.edits for fault in FAULTS})
    assert len(FAULTS) >= 40
    assert set(SOONEST) <= {scene.name for scene in SCENES}
    assert {name for names in SOONEST.values() for name in names} <= {
        fault.name for fault in FAULTS
    }


@pytest.mark.parametrize("old", ["no such passage", "record"], ids=["missing", "many times"])
def test_a_passage_that_does_not_stand_there_once_is_an_error(old: str) -> None:
    with pytest.raises(LookupError):
        variant(Edit("claim.py", old, "pass"))


def test_a_fault_is_over_when_its_hunt_is() -> None:
    living = Record.living
    fault = next(fault for fault in FAULTS if fault.edits[0].file == "record.py")
    assert hunt(fault) is not None
    assert Record.living is living
    assert explore(SCENES[0], PLAIN.rules, 300).broken is None


def test_an_edit_that_changes_nothing_is_not_found() -> None:
    """The hunt itself is able to find nothing: what it finds is the fault's doing."""
    same = Edit("claim.py", "LEAVERS = 8", "LEAVERS = 8 + 0")
    with variant(same).in_force() as rules:
        for scene in SCENES[:5]:
            assert explore(scene, rules, 300).broken is None

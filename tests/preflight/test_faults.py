"""Every fault of the table is found, by the first stage that can, in words that name it and its cure."""

import pytest

from tests.preflight import faults_config, faults_draft, faults_foreign, faults_made
from tests.preflight.faults import Fault

FAULTS = [*faults_config.FAULTS, *faults_made.FAULTS, *faults_foreign.FAULTS, *faults_draft.FAULTS]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.stage}: {f.name}")
def test_a_fault_is_found_at_the_earliest_stage(fault: Fault, healthy, tmp_path):
    stage, finding = fault.found(healthy, tmp_path / "spoilt")
    assert fault.says in finding["message"]
    assert (stage, finding["level"]) == (fault.stage, fault.level)
    assert fault.cure in finding["hint"]

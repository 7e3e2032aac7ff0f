"""A node whose cable is pulled, on nodes in network namespaces of their own: its run goes on without it.

The node works on and hears of nothing, so what it still writes must not count either.
"""

import pytest

from raymega.chaos.faults import ChaosFault, first_of, parse_faults
from raymega.chaos.network import missing
from raymega.chaos.sandbox import sandbox
from tests.chaos.test_matrix import check
from tests.support.drills import IMPATIENT, PATIENT, Drills
from tests.support.fault_matrix import legal_cells

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "it can"),
]


@pytest.fixture(scope="module")
def drills(tmp_path_factory):
    """Drills on one cluster of nodes with one slot and one cable each."""
    with sandbox(num_nodes=2, cpus_per_node=1, has_network=True) as box:
        yield Drills(box, tmp_path_factory.mktemp("links"))


@pytest.mark.wide
def test_node_whose_cable_is_pulled_is_done_without(drills, record_property):
    verdict = drills(parse_faults("link-down@4"), *PATIENT)
    check(verdict, record_property)
    (incident,) = verdict.incidents
    assert incident.source == "memory" and incident.lost_steps <= 1


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "phase"), legal_cells(has_network=True), ids=lambda value: value)
def test_cell(drills, kind, phase, record_property):
    at = 4 if phase in ("step", "snapshot", "upload") else first_of(phase)
    faults, nodes, patience = [ChaosFault(kind=kind, phase=phase, at=at)], 3, PATIENT
    if phase == "restore":
        faults = [ChaosFault(kind="kill-worker", phase="step", at=4), *faults]
    if phase == "replan":
        faults = [ChaosFault(kind="kill-node", phase="step", at=4), *faults]
        nodes, patience = 2, IMPATIENT
    check(drills(faults, *patience, num_nodes=nodes), record_property)

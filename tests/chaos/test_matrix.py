"""Every fault in every phase of a run, and pairs of faults: each time the undisturbed run comes of it.

The right losses (same grid to the bit, another to 1e-9), each sample once in the surviving history, nothing left
behind. `make test-all`.
"""

import os

import pytest

from raymega.chaos.faults import KINDS, START_PHASES, ChaosFault, first_of
from tests.support.drills import IMPATIENT, PATIENT
from tests.support.fault_matrix import covering_pairs, legal_cells

pytestmark = [pytest.mark.matrix, pytest.mark.ray]

SEED = int(os.environ.get("CHAOS_SEED", "2026"))
NUM_PAIRS = 40
NUM_RECOVERIES = 20
MAX_GROWTH = 0.05
LAYOUTS = ("pp2", "dp2")


def settings_for(faults):
    """What some faults need: a database that can fail, steps until a drain is seen, a bound on a start."""
    kinds = {fault.kind for fault in faults}
    more = []
    if "mlflow-down" in kinds:  # it costs a driver seconds to load
        more.append("tracking.mlflow_uri=run")
    if "drain-node" in kinds:
        more.append("run.steps=40")
    if any(fault.kind == "hang" and fault.phase in START_PHASES for fault in faults):
        more.append("elastic.start_timeout_s=45")  # how it is noticed where nobody waits
    return more


def check(verdict, record_property):
    for each in verdict.incidents:
        print(
            f"  {each.injected.fault.describe()}: rank {each.injected.rank}, noticed {each.detection_s:.2f} s, "
            f"recovered {each.recovery_s:.2f} s, {each.lost_steps} steps lost, from {each.source or '-'}"
        )
    record_property("goodput", verdict.sheet.goodput)
    assert verdict.faults == [], "; ".join(verdict.faults)


@pytest.mark.parametrize(
    ("kind", "phase"), legal_cells(), ids=lambda value: value
)  # one cell is one run
def test_cell(drills, kind, phase, record_property, request):
    layout = LAYOUTS[len(request.node.name) % 2]
    at = 4 if phase in ("step", "snapshot", "upload") else first_of(phase)
    faults, nodes, patience = [ChaosFault(kind=kind, phase=phase, at=at)], 3, PATIENT
    if phase == "restore":
        faults = [ChaosFault(kind="kill-worker", phase="step", at=4), *faults]
    if phase == "replan":
        faults = [ChaosFault(kind="kill-node", phase="step", at=4), *faults]
        nodes, patience = 2, IMPATIENT
    verdict = drills(faults, *patience, *settings_for(faults), layout=layout, num_nodes=nodes)
    check(verdict, record_property)


@pytest.mark.parametrize("number", range(NUM_PAIRS))
def test_pair(drills, number, record_property):
    pair = covering_pairs(seed=SEED, size=NUM_PAIRS)[number]
    print(f"seed {SEED}, pair {number}: {', '.join(fault.describe() for fault in pair)}")
    verdict = drills(pair, *PATIENT, *settings_for(pair), layout=LAYOUTS[number % 2])
    check(verdict, record_property)


@pytest.mark.timeout(1000)
def test_memory_threads_and_files_are_flat_over_many_recoveries(drills, record_property):
    faults = [
        ChaosFault(kind="kill-worker" if n % 2 else "raise", phase="step", at=3 + 2 * n)
        for n in range(NUM_RECOVERIES)
    ]
    steps = f"run.steps={2 * NUM_RECOVERIES + 8}"
    verdict = drills(faults, *PATIENT, steps, "elastic.spares=1", timeout_s=900.0)
    check(verdict, record_property)
    assert len(verdict.memory) == NUM_RECOVERIES
    begun, ended = verdict.memory[4], verdict.memory[-1]
    for each in verdict.memory:
        print(
            f"  {each.driver_bytes / 2**20:.1f} MiB, {each.driver_threads} threads, {each.driver_files} files"
        )
    assert ended.driver_bytes <= begun.driver_bytes * (1 + MAX_GROWTH)
    assert ended.driver_threads <= begun.driver_threads + 2
    assert ended.driver_files <= begun.driver_files + 8


def test_every_kind_has_a_cell():
    cells = [*legal_cells(), *legal_cells(has_network=True)]  # these are test_links'
    assert {kind for kind, _ in cells} == set(KINDS)

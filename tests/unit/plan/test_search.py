"""The search for layouts: what it finds is legal, fits, and is no worse than what a user would set."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymega.api import load_job
from raymega.errors import PlanError
from raymega.plan.accelerators import CATALOGUE
from raymega.plan.memory_use import memory_use
from raymega.plan.rules import job_faults
from raymega.plan.run_plan import job_values, make_plan
from raymega.plan.search import candidates, search
from raymega.plan.step_time import step_time

JOBS = Path(__file__).parents[3] / "jobs"
H100 = CATALOGUE["h100"]


@pytest.fixture(scope="module")
def seven_b():
    return load_job(JOBS / "llama-7b-16gpu.yaml")


def test_what_is_found_is_legal_and_fits(seven_b):
    result = search(seven_b, H100, num_devices=16, top=5)
    assert len(result.best) == 5
    for found in result.best:
        assert not job_faults(job_values(found.plan.job))
        assert found.plan.grid.world_size == 16
        assert found.memory.total_bytes <= H100.memory_bytes
    times = [found.time.total_s for found in result.best]
    assert times == sorted(times)
    assert len({found.plan.grid.describe() for found in result.best}) == 5


def test_the_best_is_no_slower_than_the_shipped_layout(seven_b):
    best = search(seven_b, H100, num_devices=16, top=1).best[0]
    assert best.time.total_s <= step_time(make_plan(seven_b), H100).total_s


def test_every_other_candidate_is_accounted_for(seven_b):
    result = search(seven_b, H100, num_devices=16, top=2)
    tried = sum(1 for _ in candidates(seven_b, H100, num_devices=16))
    assert len(result.best) + sum(result.refused.values()) == tried


def test_a_model_that_fits_nowhere_is_refused_with_numbers():
    job = load_job(JOBS / "llama-70b-512gpu.yaml")
    with pytest.raises(PlanError, match="does not fit into memory"):
        search(job, H100, num_devices=8, top=1)


def test_a_full_node_of_a_large_model_needs_model_parallelism():
    job = load_job(JOBS / "llama-70b-512gpu.yaml")
    best = search(job, H100, num_devices=512, top=1).best[0]
    assert best.plan.grid.tp * best.plan.grid.pp > 1
    assert memory_use(best.plan).total_bytes <= H100.memory_bytes

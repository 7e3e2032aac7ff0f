"""The shipped jobs of real size: the published parameter counts, on the grids that they name."""

from pathlib import Path

import pytest

from raymega.config.load import parse_job
from raymega.plan.run_plan import make_plan
from raymega.plan.state_size import count_parameters, rank_state

JOBS = Path(__file__).parents[3] / "jobs"
GPU_BYTES = 80 * 2**30


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_gpus"),
    [("llama-7b-16gpu", 6_738_415_616, 16), ("llama-70b-512gpu", 68_976_648_192, 512)],
)
def test_job_has_the_published_size_and_its_state_fits(name, num_parameters, num_gpus):
    plan = make_plan(parse_job(JOBS / f"{name}.yaml").job())
    job, grid = plan.job, plan.grid
    assert count_parameters(job.model) == num_parameters
    assert grid.world_size == job.cluster.num_workers == num_gpus
    assert grid.tp <= 8, "a tp group fits a node of eight"
    for stage in plan.stages:
        state = rank_state(job, (stage,), grid, tp_rank=0)
        wanted = (6 + 12 / grid.dp) * state.num_parameters
        assert state.total_bytes == pytest.approx(wanted, abs=12)
        assert state.total_bytes < GPU_BYTES / 3, "the larger part is left to activations"
    assert job.data.global_batch_size * job.data.seq_len == 4 * 2**20

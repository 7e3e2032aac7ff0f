"""The shipped jobs of real size: the published parameter counts, on the grids that they name."""

from pathlib import Path

import pytest

from raymega.config.load import parse_job
from raymega.plan.grid import Coords
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.memory.state_bytes import count_parameters, rank_elements, rank_state
from raymega.plan.run_plan import make_plan
from raymega.planner.cost.peak_memory import memory_use
from raymega.planner.cost.simulated_step import played_step
from raymega.planner.search.search import search

JOBS = Path(__file__).parents[3] / "jobs"
GPU_BYTES = 80 * 2**30


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_gpus", "num_tokens", "state_share"),
    [
        ("llama-7b-16gpu", 6_738_415_616, 16, 4 * 2**20, 0.54),
        ("llama-70b-512gpu", 68_976_648_192, 512, 4 * 2**20, 0.34),
        ("gpt-1t-3072gpu", 1_009_349_478_400, 3072, 6 * 2**20, 0.36),
        ("llama-8b-128k-64gpu", 8_030_261_248, 64, 4 * 2**20, 1 / 3),
    ],
)
def test_job_has_the_published_size_and_its_state_fits(
    name, num_parameters, num_gpus, num_tokens, state_share
):
    plan = make_plan(parse_job(JOBS / f"{name}.yaml").job())
    job, grid = plan.job, plan.grid
    assert count_parameters(job.model) == num_parameters
    assert grid.world_size == job.cluster.num_workers == num_gpus
    assert grid.tp <= 8, "a tp group fits a node of eight"
    for pp in range(grid.pp):
        rank = grid.rank(Coords(tp=0, cp=0, dp=0, pp=pp))
        state = rank_state(job, plan.stages_of(rank), grid, tp_rank=0)
        replicas = grid.dp * grid.cp
        sums = 4 / replicas if job.parallel.sharding == "gradients" else 4
        wanted = (2 + sums + 12 / replicas) * state.num_parameters
        above = state.total_bytes - state.fixed_bytes - state.passing_bytes - wanted
        limit = 1e-3 * wanted if sums < 4 else 2 * 12  # two kinds of buckets are rounded up
        assert 0 <= above <= limit
        assert state.total_bytes < state_share * GPU_BYTES, "the larger part is left to activations"
    assert job.data.global_batch_size * job.data.seq_len == num_tokens


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_gpus", "num_tokens"),
    [
        ("mixtral-8x7b-64gpu", 46_702_792_704, 64, 4 * 2**20),
    ],
)
def test_job_with_experts_has_the_published_size_and_its_state_fits(
    name, num_parameters, num_gpus, num_tokens
):
    plan = make_plan(parse_job(JOBS / f"{name}.yaml").job())
    job, grid = plan.job, plan.grid
    assert count_parameters(job.model) == num_parameters
    assert (
        grid.world_size == num_gpus and job.data.global_batch_size * job.data.seq_len == num_tokens
    )
    for pp in range(grid.pp):
        rank = grid.rank(Coords(tp=0, cp=0, dp=0, pp=pp))
        held = rank_elements(job, plan.stages_of(rank), grid)
        state = rank_state(job, plan.stages_of(rank), grid, tp_rank=0)
        layers = sum(stage.num_layers for stage in plan.stages_of(rank))
        own = job.model.moe.num_experts // grid.ep
        assert held.experts == layers * own * 3 * job.model.hidden_size * job.model.ffn_hidden_size
        wanted = (6 + 12 / grid.replicas) * held.dense + (6 + 12 / grid.edp) * held.experts
        wanted += (8 + 8 / grid.replicas) * held.wide
        assert state.total_bytes - state.fixed_bytes == pytest.approx(wanted, rel=1e-6)
        assert state.total_bytes < GPU_BYTES / 2


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_gpus"),
    [
        ("qwen2-57b-a14b-64gpu", 57_408_658_944, 64),
        ("qwen3-30b-a3b-64gpu", 30_532_122_624, 64),
        ("qwen3-next-80b-a3b-64gpu", 79_674_391_296, 64),
        ("deepseek-v2-lite-32gpu", 15_706_484_224, 32),
    ],
)
def test_job_of_a_published_mixture_has_its_size_and_fits_an_h100(name, num_parameters, num_gpus):
    plan = make_plan(parse_job(JOBS / f"{name}.yaml").job())
    assert count_parameters(plan.job.model) == num_parameters
    assert plan.grid.world_size == num_gpus
    assert memory_use(plan).total_bytes < 0.9 * CATALOGUE["h100"].memory_bytes


@pytest.mark.wide
def test_a_trillion_parameters_fit_on_3072_a100s_by_the_fastest_layout():
    """Narayanan et al. 2021 printed 102.6 s: with recompute, and attention that was not fused."""
    job = parse_job(JOBS / "gpt-1t-3072gpu.yaml").job()
    plan, a100 = make_plan(job), CATALOGUE["a100"]
    shipped = played_step(plan, a100).total_s
    assert memory_use(plan).total_bytes < 0.8 * a100.memory_bytes
    fastest = search(job, a100, num_devices=3072, top=2)
    assert [found.plan.grid.describe() for found in fastest.best] == [
        "tp8-pp32-dp12",
        "tp8-pp64-dp6",
    ]
    assert fastest.best[0].plan.job.schedule == job.schedule
    assert fastest.best[0].time.total_s == pytest.approx(shipped)
    assert 55 < shipped < 102.6


RECOMMENDED = sorted(path.name for path in JOBS.glob("*gpu.yaml"))


@pytest.mark.wide
@pytest.mark.timeout(3600)  # 200 s of an idle core for the largest
@pytest.mark.parametrize("name", RECOMMENDED)
def test_shipped_layout_is_within_5_percent_of_the_one_that_the_planner_finds(name):
    """A file that is slower for a reason says so in a comment with the word `slower`, and why."""
    job, device = parse_job(JOBS / name).job(), CATALOGUE["h100"]
    plan = make_plan(job)
    best = search(job, device, num_devices=plan.grid.world_size, top=1).best[0]
    slower = played_step(plan, device).total_s / best.time.total_s - 1
    assert memory_use(plan).total_bytes <= device.memory_bytes
    says_why = "slower" in (JOBS / name).read_text()
    assert slower <= 0.05 or says_why, f"set {' '.join(best.overrides(job))}: {slower:.1%} faster"

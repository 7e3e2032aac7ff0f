"""The search for layouts: what it finds is legal, fits, and is no worse than what a user would set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raymega.api import load_job
from raymega.errors import PlanError
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.memory.activation_bytes import layer_bytes
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.run_plan import job_values, make_plan
from raymega.plan.validation.registry import job_faults
from raymega.planner.cost.peak_memory import memory_use
from raymega.planner.cost.simulated_step import played_step
from raymega.planner.cost.step_time import step_time
from raymega.planner.cost.working_memory import attention_bytes_in_backward
from raymega.planner.search.candidates import Space, candidates, divisors
from raymega.planner.search.search import MEMORY_MARGIN, Judge, fastest, search

JOBS = Path(__file__).parents[4] / "jobs"
H100 = CATALOGUE["h100"]


@pytest.fixture(scope="module")
def seven_b():
    return load_job(JOBS / "llama-7b-16gpu.yaml")


@pytest.fixture(scope="module")
def five(seven_b):
    """The five best layouts, which several tests look at."""
    return search(seven_b, H100, num_devices=16, top=5)


def test_what_is_found_is_legal_and_fits(five):
    result = five
    assert len(result.best) == 5
    for found in result.best:
        assert not job_faults(job_values(found.plan.job))
        assert found.plan.grid.world_size == 16
        assert found.memory.total_bytes <= H100.memory_bytes
    times = [found.time.total_s for found in result.best]
    assert times == sorted(times)
    assert len({found.plan.grid.describe() for found in result.best}) == 5


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_devices", [6, 7, 8])
def test_what_is_fastest_is_the_best_of_the_search(num_devices):
    """Layouts that are not priced could not have been among the best; a job of two kinds of blocks, with experts."""
    changes = [
        "model.moe={num_experts: 8, top_k: 2, intermediate_size: 48}",
        "model.attention={layer_types: [gated_delta_net, full]}",
        "model.linear_attention={num_key_heads: 4, num_value_heads: 8, key_head_dim: 6, value_head_dim: 5}",
        "model.family=qwen3_next",
        "parallel.pp=1",
    ]
    job = load_job(JOBS / "verify.yaml", changes)
    wanted = search(job, H100, num_devices=num_devices, top=2).best[0]
    assert fastest(job, H100, num_devices=num_devices, top=2) == wanted
    other = fastest(
        job, H100, num_devices=num_devices, top=2, fits=lambda grid: grid != wanted.plan.grid
    )
    assert num_devices == 7 or (other is not None and other.plan.grid != wanted.plan.grid)
    assert fastest(job, H100, num_devices=num_devices, top=2, fits=lambda _: False) is None, (
        "of 7 ranks there is one grid"
    )


def test_an_update_that_is_too_large_rules_out_its_own_level_alone():
    """Over gloo the update of sharding=optimizer holds 67 MB, that of sharding=parameters nothing."""
    changes = [
        "model.hidden_size=256", "model.num_layers=96", "model.ffn_hidden_size=1024", "data.seq_len=16",
        "data.global_batch_size=8", "precision.dtype=float32", "schedule.micro_batch_size=1", "parallel.pp=1",
        "model.vocab_size=512", "model.make_vocab_size_divisible_by=8",
    ]  # fmt: skip
    job = load_job(JOBS / "verify.yaml", changes)
    room = replace(H100, memory_bytes=int((2 * 2**30 + 248e6) / (1 - MEMORY_MARGIN)))
    fixed = frozenset(
        {"parallel.tp", "parallel.cp", "schedule.name", "schedule.chunks", "memory.recompute"}
        | {"schedule.micro_batch_size"}
    )
    wanted = search(job, room, num_devices=8, top=2, fixed=fixed).best[0]
    assert (wanted.plan.grid.dp, wanted.plan.job.parallel.sharding) == (8, "parameters")
    assert fastest(job, room, num_devices=8, top=2, fixed=fixed) == wanted


@pytest.mark.parametrize("file", ["llama-7b-16gpu.yaml", "verify.yaml"])
def test_overrides_turn_the_job_into_the_layout(file):
    job = load_job(JOBS / file)
    for found in search(job, H100, num_devices=16, top=5).best:
        changes = found.overrides(job)
        assert load_job(JOBS / file, changes) == found.plan.job
        assert not any(" " in text for text in changes), "one word each in a shell"
        assert found.overrides(found.plan.job) == ()


def test_the_best_is_no_slower_than_the_shipped_layout(seven_b, five):
    best = five.best[0]
    assert best.time.total_s <= step_time(make_plan(seven_b), H100).total_s


@pytest.mark.wide
def test_what_memory_alone_ruled_out_is_what_more_memory_would_bring(seven_b):
    result = search(seven_b, H100, num_devices=16, top=1, margin=0.0)
    assert result.missed is not None
    needed = result.missed.memory.total_bytes
    assert needed > H100.memory_bytes
    for num_bytes, time in ((needed, result.missed.time), (needed - 1, result.best[0].time)):
        roomier = replace(H100, memory_bytes=num_bytes)
        found = search(seven_b, roomier, num_devices=16, top=1, margin=0.0)
        assert found.best[0].time == time
    endless = replace(H100, memory_bytes=2**50)
    assert search(seven_b, endless, num_devices=16, top=1).missed is None


def test_what_is_found_leaves_a_margin_of_memory_unless_nothing_else_fits(seven_b, five):
    best = five.best[0]
    needed = best.memory.total_bytes
    assert needed <= (1 - MEMORY_MARGIN) * H100.memory_bytes
    fullest = search(seven_b, H100, num_devices=16, top=1, margin=0.0).best[0]
    assert fullest.time.total_s <= best.time.total_s
    # the smallest of all layouts, on devices that hold it and hardly more
    judge = Judge(H100, limit_bytes=0.0)
    for candidate in candidates(Space(job=seven_b, device=H100, num_devices=16)):
        judge.verdict(candidate)
    least = min(each.memory.total_bytes for each in judge.missed)
    tight = replace(H100, memory_bytes=least)
    found = search(seven_b, tight, num_devices=16, top=1)
    assert found.best[0].memory.total_bytes == least
    assert found.missed is None or found.missed.memory.total_bytes > least


def test_every_other_candidate_is_accounted_for(seven_b, five):
    result = five
    tried = sum(1 for _ in candidates(Space(job=seven_b, device=H100, num_devices=16)))
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


@pytest.fixture(scope="module")
def hundred():
    """The hundred best layouts of the same model on longer sequences, which cp cuts or not."""
    changes = ["data.seq_len=8192", "model.max_positions=8192", "data.global_batch_size=64"]
    long = load_job(JOBS / "llama-7b-16gpu.yaml", changes)
    return search(long, H100, num_devices=16, top=100).best


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", range(5))
def test_a_shared_count_is_what_a_plan_alone_is_given(first, hundred):
    """All that the search counts once for many layouts, counted for each by itself."""
    assert {found.plan.grid.cp for found in hundred} == {1, 2}
    for found in hundred[first::5]:
        alone = make_plan(found.plan.job)
        assert found.plan == alone
        assert found.time == played_step(alone, H100)
        assert found.memory == memory_use(alone)


@pytest.mark.wide
def test_context_parallelism_is_tried_where_sequences_are_long():
    long = ("data.seq_len=131072", "model.max_positions=131072", "data.global_batch_size=32")
    job = load_job(JOBS / "llama-7b-16gpu.yaml", long)
    tried = list(candidates(Space(job=job, device=H100, num_devices=128)))
    assert {each.parallel.cp for each in tried} == {1, 2, 4, 8, 16, 32}
    assert {each.parallel.cp_method for each in tried} == {"ring", "all_to_all"}
    best = search(job, H100, num_devices=128, top=1).best[0]
    assert best.plan.grid.cp > 1
    alone = search(load_job(JOBS / "llama-7b-16gpu.yaml"), H100, num_devices=16, top=1).best[0]
    assert alone.plan.grid.cp == 1


def test_keys_that_pass_by_take_memory():
    long = ("data.seq_len=65536", "model.max_positions=65536", "parallel.cp=2", "parallel.dp=1",
            "parallel.tp=4", "parallel.pp=2")  # fmt: skip
    jobs = [
        load_job(JOBS / "llama-7b-16gpu.yaml", [*long, f"parallel.cp_method={method}"])
        for method in ("all_to_all", "all_gather")
    ]
    exchanged, gathered = map(activation_shape, jobs)
    kv = 2 * 32768 * 8 * 128  # of a rank, heads cut by tp=4
    passing = 2 * 2 * kv * (2 + 4)
    sums = (kv + kv // 2) * (4 - 2)  # gathered: own gradients of q, k and v are added up in float32
    working = [
        attention_bytes_in_backward(each, has_experts=False) for each in (exchanged, gathered)
    ]
    assert working[1] - working[0] == passing + sums
    outputs = 2 * 32768 * 8 * 128  # exchanged: kept twice, in each layer
    assert layer_bytes(exchanged) - layer_bytes(gathered) == outputs
    # 16 layers keep them, of 2 micro-batches; beside that another moment of the exchange may be fuller
    uses = [memory_use(make_plan(job)).activation_bytes for job in jobs]
    assert uses[1] - uses[0] <= passing + sums - 2 * 16 * outputs


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 200_000])
def test_divisors_are_all_in_ascending_order(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_a_node_of_any_size_has_tensor_parallel_groups_of_whole_heads(seven_b):
    """9e18 devices a node, as a file of an accelerator may say, are not tried one by one."""
    wide = replace(H100, devices_per_node=9 * 10**18)
    space = Space(job=seven_b, device=wide, num_devices=16)
    assert {job.parallel.tp for job in candidates(space)} == {1, 2, 4, 8, 16}

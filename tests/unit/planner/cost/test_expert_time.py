"""What experts cost: products of uneven tiles, travel by links, counts that papers print."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raymega.api import load_job
from raymega.config.load import parse_mapping
from raymega.plan.flops import flops_per_token
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.memory.activation_bytes import expert_bytes, expert_rows, layer_bytes
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import count_parameters, rank_elements
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.planner.cost.block_times import block_times
from raymega.planner.cost.expert_time import expert_time
from raymega.planner.cost.peak_memory import memory_use
from raymega.planner.cost.step_time import step_time
from raymega.planner.kernels.collective_time import GroupSpan, exchange_s
from raymega.planner.kernels.kernel_time import grouped_matmul_s, matmul_s, stream_s
from raymega.planner.kernels.system_traits import RAYMEGA

H100 = CATALOGUE["h100"]
JOBS = Path(__file__).parents[4] / "jobs"
MIXTRAL = {
    "family": "llama", "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8,
    "ffn_hidden_size": 14336, "vocab_size": 32000, "max_positions": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def plan(moe: dict[str, Any] | None = None, *, batch: int = 64, **parallel: Any) -> RunPlan:
    raw = {
        "run": {"name": "experts", "steps": 1},
        "model": {**MIXTRAL, "moe": {"num_experts": 8, "top_k": 2, **(moe or {})}},
        "data": {"path": "synthetic", "seq_len": 4096, "global_batch_size": batch},
        "parallel": {"sharding": "optimizer", **parallel},
        "optimizer": {"lr": 1e-4},
        "precision": {"dtype": "bfloat16"},
    }
    return make_plan(parse_mapping(raw).job())


def test_parameters_and_operations_are_those_that_are_printed_of_mixtral():
    model = plan(dp=8, ep=8).job.model
    assert count_parameters(model) / 1e9 == pytest.approx(46.70, abs=0.01)
    active = flops_per_token(model, seq_len=0) / 6 + model.vocab_size * model.hidden_size
    assert active / 1e9 == pytest.approx(12.88, abs=0.01)


def test_state_is_cut_by_ep_and_etp_and_shared_out_over_edp():
    alone, cut = plan(tp=2, dp=4), plan(tp=2, dp=4, ep=4, etp=1)
    whole, held = (rank_elements(p.job, p.stages, p.grid) for p in (alone, cut))
    assert held.dense == whole.dense and held.wide == whole.wide == 32 * 8 * 4096
    assert held.experts == whole.experts / 4
    both = plan(tp=2, dp=4, ep=2, etp=2)
    assert rank_elements(both.job, both.stages, both.grid).experts == held.experts


def test_a_group_that_does_not_fill_its_tile_costs_a_whole_one():
    few, full = (grouped_matmul_s(H100, (8 * n, 4096, 4096), groups=8) for n in (1000, 1024))
    assert few == full
    one = matmul_s(H100, 8 * 1024, 4096, 4096)
    assert full >= one
    assert grouped_matmul_s(H100, (8 * 4096, 4096, 4096), groups=8) == pytest.approx(
        matmul_s(H100, 8 * 4096, 4096, 4096), rel=1e-6
    )


def test_an_exchange_inside_a_node_takes_its_links_and_between_nodes_the_network():
    far = replace(H100.fitted, link_latency_s=0.0, network_latency_s=0.0)
    device = replace(H100, fitted=far)
    inside = exchange_s(device, GroupSpan(size=8, per_node=8), 8e9)
    assert inside == pytest.approx(7e9 / H100.reached_link_bytes_per_s)
    between = exchange_s(device, GroupSpan(size=16, per_node=8), 16e9)
    assert between == pytest.approx(8e9 / H100.reached_network_bytes_per_s)
    once = exchange_s(device, GroupSpan(size=16, per_node=8), 16e9, outside_share=0.5)
    assert once == pytest.approx(between / 2), "copies are made on the other node"
    assert exchange_s(device, GroupSpan(size=1, per_node=1), 1e9) == 0.0


def test_rows_follow_choices_capacity_and_etp():
    shape = activation_shape(plan(tp=2, dp=4, ep=2).job)
    assert expert_rows(shape) == 4096 / 2 * 2
    assert expert_rows(activation_shape(plan(tp=2, dp=4, ep=2, etp=2).job)) == 4096 / 2 * 2 * 2
    dropping = activation_shape(plan({"capacity_factor": 0.5}, tp=2, dp=4, ep=2).job)
    assert expert_rows(dropping) == expert_rows(shape) / 2
    padded = {"capacity_factor": 1.5, "pad_expert_input_to_capacity": True}
    assert expert_rows(activation_shape(plan(padded, dp=8, ep=2).job)) == 1.5 * 2 * 4096


def test_where_tokens_are_gathered_the_choices_of_all_ranks_are_added_up_on_each():
    exchanged, gathered = (
        activation_shape(plan(dp=8, ep=8, moe_token_dispatcher_type=dispatch).job)
        for dispatch in ("all_to_all", "all_gather")
    )
    more = [
        getattr(expert_time(gathered, H100, shared_s=0.0), name)
        - getattr(expert_time(exchanged, H100, shared_s=0.0), name)
        for name in ("forward_s", "backward_s")
    ]
    rows = (8 - 1) * (2 * 4096 * 2 + 4096)
    wanted = stream_s(H100, rows * 4096 * 2)
    assert more == pytest.approx([wanted, 2 * wanted])


def test_tokens_travel_behind_the_shared_expert():
    shape = activation_shape(plan(dp=8, ep=8).job)
    alone = expert_time(shape, H100, shared_s=0.0)
    assert alone.travel_s > 0
    assert expert_time(shape, H100, shared_s=alone.travel_s / 2).travel_s == pytest.approx(
        alone.travel_s / 2
    )
    assert expert_time(shape, H100, shared_s=1.0).travel_s == 0.0


def test_tokens_travel_behind_another_micro_batch_of_which_a_block_is_kept_too():
    moe = {"num_experts": 8, "top_k": 2}
    alone, beside = (
        plan(moe, dp=8, ep=8, sharding="optimizer", overlap_moe_expert_parallel_comm=is_overlapped)
        for is_overlapped in (False, True)
    )
    times = [step_time(each, H100) for each in (alone, beside)]
    assert times[0].experts_s > times[1].experts_s >= 0.0
    assert times[0].compute_s == pytest.approx(times[1].compute_s)
    kept = [memory_use(each).activation_bytes for each in (alone, beside)]
    block = layer_bytes(activation_shape(beside.job), has_experts=True)
    assert kept[1] == kept[0] + block


def test_a_block_with_experts_is_priced_apart_and_a_dense_model_has_one_kind():
    times = block_times(activation_shape(plan(dp=8, ep=8).job), H100, RAYMEGA)
    assert times.experts.experts_s > 0 and times.dense.experts_s == 0.0
    assert times.experts.forward_s > times.dense.forward_s, "two experts work on each token"
    some = plan({"layer_freq": 2}, dp=8, ep=8)
    assert step_time(some, H100).total_s < step_time(plan(dp=8, ep=8), H100).total_s


def test_folding_is_faster_than_the_same_degrees_of_attention():
    """Tokens that need not be gathered over etp travel less (Liu et al. 2025, table 3)."""
    folded, unfolded = (
        step_time(plan(tp=2, pp=2, dp=4, sequence_parallel=True, **experts), H100).total_s
        for experts in ({"ep": 8, "etp": 1}, {"ep": 4, "etp": 2})
    )
    assert folded < unfolded


def test_memory_of_experts_falls_with_ep():
    uses = [memory_use(plan(tp=1, dp=8, ep=ep)).state_bytes for ep in (1, 2, 8)]
    assert uses == sorted(uses, reverse=True)
    shape = activation_shape(plan(dp=8, ep=8).job)
    assert expert_bytes(shape) > 0


def test_a_model_of_deepseek_v3s_size_is_planned_on_2048_gpus():
    job = load_job(JOBS / "deepseek-v3-2048gpu.yaml")
    made = make_plan(job)
    assert made.grid.world_size == 2048
    without = job.model.model_copy(update={"num_nextn_predict_layers": 0})
    assert count_parameters(without) / 1e9 == pytest.approx(671.0, abs=0.1)
    assert flops_per_token(without, seq_len=4096) / 1e9 == pytest.approx(249.4, rel=0.02)
    assert memory_use(made).total_bytes < H100.memory_bytes
    time = step_time(made, H100)
    assert time.experts_s > time.bubble_s > time.data_parallel_s

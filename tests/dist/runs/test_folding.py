"""Whole runs with experts: any pair of mappings of attention and experts trains the same run."""

from functools import cache

import pytest

from tests.support.jobs import layout_overrides
from tests.support.training import assert_same_run, train

pytestmark = pytest.mark.dist

SMALL = (
    "model.num_layers=2", "data.global_batch_size=8", "schedule.micro_batch_size=2",
    "model.moe.num_experts=8", "model.moe.intermediate_size=24",
)  # fmt: skip
BALANCED = (
    "model.moe.load_balancing_type=micro_batch",
    "model.moe.router_aux_loss_coef=0.1",
    "model.moe.router_z_loss_coef=0.01",
)
MODELS = {
    "plain": SMALL,
    "balanced": (*SMALL, *BALANCED, "model.moe.capacity_factor=1.0"),
    "deepseek": (
        *SMALL, "model.num_layers=3", "model.moe.first_k_dense_replace=1", "model.moe.shared_expert_intermediate_size=16",
        "model.moe.shared_expert_gate=true", "model.moe.router_score_function=sigmoid", "model.moe.expert_bias=true",
        "model.moe.expert_bias_update_rate=0.01", "model.moe.load_balancing_type=global", "model.moe.router_aux_loss_coef=0.1",
        "model.moe.router_jitter_noise=0.1",
    ),
}  # fmt: skip
STEPS = 3


@cache
def _reference(model):
    return train([*MODELS[model], *layout_overrides("tp1")], steps=STEPS)


FOLDED = [
    ("plain", "tp2-ep2"),
    ("plain", "dp2-ep2"),
    ("balanced", "tp4-cp2-ep8"),
    ("deepseek", "tp2-cp2-pp2-ep2-sp"),
    ("balanced", "dp4-etp2-ep2"),
    ("deepseek", "tp2-dp2-pp2-ep4"),
]


WAYS = {
    "zero-bubble": (
        "tp2-cp2-pp2-ep2-sp",
        ["schedule.name=zb_h1", "parallel.moe_token_dispatcher_type=all_gather"],
    ),
    "turns": (
        "tp2-pp2-dp2-ep2",
        [
            "schedule.name=dualpipe_v",
            "schedule.chunks=2",
            "parallel.stages=Et|t|t|L",
            "parallel.overlap_moe_expert_parallel_comm=true",
        ],
    ),
    "turns-of-one-stage": (
        "dp4-etp2-ep2",
        [
            "schedule.micro_batch_size=1",
            "parallel.overlap_moe_expert_parallel_comm=true",
            "memory.recompute=full",
            "parallel.sharding=gradients",
        ],
    ),
    "weights-in-parts": (
        "tp2-dp4-ep2-etp2",
        ["parallel.sharding=parameters", "memory.recompute=full"],
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_folding_goes_with_schedules_recompute_and_every_level_of_sharding(way):
    layout, options = WAYS[way]
    overrides = [*MODELS["deepseek"], *layout_overrides(layout), *options]
    assert_same_run(overrides, _reference("deepseek"))


@pytest.mark.wide
@pytest.mark.slow
def test_all_axes_at_once_on_sixteen_ranks():
    overrides = [*MODELS["balanced"], *layout_overrides("tp2-cp2-pp2-dp2-ep2")]
    assert_same_run(overrides, _reference("balanced"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "layout"), FOLDED)
@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_folded_layout_trains_the_same_run(model, layout, sharding):
    overrides = [*MODELS[model], *layout_overrides(layout), f"parallel.sharding={sharding}"]
    assert_same_run(overrides, _reference(model))

"""Sharded gradients and weights, whole or in hybrid groups: every layout trains the same run."""

from functools import cache

import pytest

from raymega.messages import Requests
from raymega.plan.run_plan import read_plan
from raymega.plan.zero_levels import data_parallel_shard_size
from raymega.train.build import build_parts
from raymega.train.forward_backward import evaluate
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.training import assert_same_run, train

pytestmark = pytest.mark.dist

PACKED = ("data.packing=best_fit", "data.packing_window=64", "data.document_multiple=4")
MODELS = {
    "llama": (),
    "llama-kv2-untied": ("model.num_kv_heads=2", "model.tie_word_embeddings=false"),
    "gpt2-dropout": (
        "model.family=gpt2", "model.num_kv_heads=num_heads", "model.hidden_dropout=0.2",
    ),
    "llama-packed": PACKED,
    "experts": ("model.moe.num_experts=4", "model.moe.top_k=2"),
}  # fmt: skip
FULL = ("memory.recompute=full", "memory.recompute_every=2")
HYBRID = "parallel.data_parallel_shard_degree=2"
CASES = [
    ("llama", "dp3", "gradients", ()),
    ("llama", "dp3", "parameters", ("memory.recompute=full",)),
    ("llama", "dp2", "parameters", FULL),
    ("llama", "pp2-dp2", "gradients", ("schedule.name=zb_v", "schedule.chunks=2")),
    ("llama", "pp2-dp2", "parameters", ("schedule.name=dualpipe_v", "schedule.chunks=2")),
    ("llama", "pp2-dp2", "parameters", ("schedule.name=zb_h1", "memory.recompute=selective")),
    ("llama", "cp2-dp2", "parameters", ("parallel.cp_method=all_to_all", HYBRID)),
    ("llama", "dp4", "optimizer", (HYBRID,)),
    ("llama", "pp2-dp4", "gradients", (HYBRID,)),
    ("llama-kv2-untied", "tp4-dp2-sp", "parameters", ()),
    ("llama-kv2-untied", "pp2-dp2", "parameters", ("schedule.chunks=2",)),
    ("gpt2-dropout", "tp2-pp2-dp2-sp", "parameters", ()),
    ("experts", "dp4", "gradients", ("parallel.ep=2",)),
    ("experts", "dp4", "parameters", ("parallel.ep=2", HYBRID)),
    # Experts have replicas where dense weights have none.
    ("experts", "tp2", "parameters", ()),
    ("experts", "tp2-dp2", "optimizer", ("parallel.ep=2",)),
    (
        "llama-packed",
        "cp2-dp2",
        "parameters",
        ("parallel.dynamic_cp=true", "schedule.micro_batch_size=1"),
    ),
]


@cache
def _reference(model):
    return train([*MODELS[model], *layout_overrides("tp1")])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "layout", "level", "options"),
    CASES,
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_level_trains_the_same_run(model, layout, level, options):
    overrides = [*MODELS[model], *layout_overrides(layout), f"parallel.sharding={level}", *options]
    assert_same_run(overrides, _reference(model))


@pytest.mark.wide
def test_compiled_kernels_use_weights_that_come_and_go():
    overrides = [*layout_overrides("dp2"), "parallel.sharding=parameters", "run.kernels=compile"]
    overrides.append("memory.recompute=full")
    assert_same_run(overrides, _reference("llama"), timeout=300)


def _evaluated(env, plan_json):
    """Held-out losses before and after a step, twice each."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    losses = [evaluate(parts)["eval/loss"] for _ in range(2)]
    train_step(parts, TrainState(), Requests(), is_recording=True)
    return losses + [evaluate(parts)["eval/loss"] for _ in range(2)]


def test_evaluation_between_steps_gathers_what_it_needs():
    overrides = [*layout_overrides("pp2-dp2"), "run.eval_samples=6"]
    found = {}
    for level in ("none", "parameters"):
        plan = make_test_plan(*overrides, f"parallel.sharding={level}")
        sharers = data_parallel_shard_size(plan.job.parallel)
        found[level] = run_grid(_evaluated, plan.grid, plan.to_json(), sharers=sharers)
    for mine, theirs in zip(found["none"], found["parameters"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)
        assert mine[0] == mine[1] > mine[2] == mine[3]

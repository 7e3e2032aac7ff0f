"""Whole runs: every optimizer trains the same run on any layout, matrices cut, fused, stacked or spread."""

from functools import cache

import pytest

from tests.support.jobs import layout_overrides
from tests.support.training import assert_same_run, train

pytestmark = pytest.mark.dist

LION = ("optimizer.name=lion", "optimizer.lr=1e-3", "optimizer.embedding_lr=3e-3")
MUON = ("optimizer.name=muon", "model.num_kv_heads=2", "optimizer.layer_lr_decay=0.9")
EXPERTS = (
    *MUON, "model.moe.num_experts=4", "model.moe.intermediate_size=12", "model.moe.shared_expert_intermediate_size=8",
)  # fmt: skip
EIGHT = (
    "optimizer.state_dtype=8bit",
    "model.hidden_size=64",
    "model.ffn_hidden_size=320",
    "model.num_layers=2",
)
BFLOAT16 = ("optimizer.name=lion", "optimizer.lr=1e-3", "optimizer.state_dtype=bfloat16")
EIGHT_EXPERTS = (*EXPERTS, "optimizer.state_dtype=8bit")
CASES = [
    (EIGHT, "tp2-dp2", "parallel.sharding=parameters"),
    (EIGHT, "pp2-dp3", "parallel.sharding=optimizer"),
    (EIGHT_EXPERTS, "tp2-dp2-etp2", "parallel.sharding=gradients"),
    (BFLOAT16, "tp2-dp2", "parallel.sharding=optimizer"),
    (LION, "tp2-dp2", "parallel.sharding=optimizer"),
    (MUON, "tp4-pp2", "parallel.sharding=none"),
    (MUON, "dp3", "parallel.sharding=none"),
    (MUON, "tp2-dp3", "parallel.sharding=parameters"),
    (EXPERTS, "tp2-dp2-ep2-etp2", "parallel.sharding=gradients"),
    (EXPERTS, "tp2-dp2-etp2", "parallel.sharding=optimizer"),
]


@cache
def _reference(job):
    return train([*job, *layout_overrides("tp1")], steps=3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("job", "layout", "sharding"), CASES)
def test_optimizer_trains_the_same_run(job, layout, sharding):
    assert_same_run([*job, *layout_overrides(layout), sharding], _reference(job))

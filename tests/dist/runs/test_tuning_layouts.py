"""Whole runs with adapters, frozen weights and noise: the same run as one rank, beside every axis."""

from functools import cache

import pytest

from raymega.messages import Requests
from raymega.parallel.data_parallel.coded_bucket import held_bytes
from raymega.plan.memory.state_bytes import rank_elements, state_of
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.training import assert_same_run, train

pytestmark = pytest.mark.dist

LIMIT = 0.03
LORA = ("model.lora={r: 4, use_rslora: true, lora_dropout: 0.1}",)
DORA = ("model.lora={r: 4, use_dora: true, lora_dropout: 0.1}",)
TWO_KV_HEADS = (*LORA, "model.num_kv_heads=2")
PARTS = (
    "model.family=gpt2", "model.num_kv_heads=num_heads", "model.train=['*norm.*']",
    "model.lora={r: 2, target_modules: ['attention.q', 'layers.[13].mlp.*']}",
)  # fmt: skip
SHARED_KV_DORA = (*DORA, "model.num_kv_heads=2")
EXPERTS = (
    "model.moe={num_experts: 4, top_k: 2, intermediate_size: 24, shared_expert_intermediate_size: 16}",
    "model.lora={r: 4, target_modules: ['attention.*', 'moe.*']}",
)
EXPERT_DORA = (
    EXPERTS[0],
    "model.lora={r: 4, use_dora: true, target_modules: ['attention.*', 'moe.*']}",
)
LATENT = (
    "model.num_kv_heads=num_heads", "model.tie_word_embeddings=false", "model.lora={r: 4, lora_dropout: 0.1}",
    "model.mla={kv_lora_rank: 12, q_lora_rank: 10, qk_nope_head_dim: 6, qk_rope_head_dim: 4, v_head_dim: 5}",
)  # fmt: skip
FURTHER = (
    "model.num_nextn_predict_layers=1", "model.lora={r: 4, lora_dropout: 0.3, target_modules: ['*attention.*']}",
)  # fmt: skip
JOINED = (
    "model.num_nextn_predict_layers=1", "model.lora={r: 2, lora_dropout: 0.3, target_modules: ['*join']}",
)  # fmt: skip
# a base in blocks: rows of 32 and 24 are less than a block, those of 160 are cut inside one
NF4 = ("model.lora={r: 4, lora_dropout: 0.1, base_dtype: nf4}", "model.ffn_hidden_size=160")
EXPERTS_NF4 = (
    EXPERTS[0],
    "model.lora={r: 4, base_dtype: nf4, target_modules: ['attention.*', 'moe.*']}",
)
EXPERTS_FP8 = (EXPERTS[0], "model.lora={r: 4, base_dtype: fp8}")
LATENT_NF4 = (*LATENT[:2], "model.lora={r: 4, base_dtype: nf4}", LATENT[3])
FURTHER_NF4 = (FURTHER[0], "model.lora={r: 4, base_dtype: nf4, target_modules: ['*attention.*']}")
FROZEN = ("model.freeze=['layers.[01].*', 'embedding.*']", "model.neftune_noise_alpha=5.0")
CASES = [
    (LORA, "tp2-pp2-dp2-sp", ("parallel.sharding=optimizer",)),
    (LORA, "cp2-dp3", ("parallel.sharding=parameters",)),
    (LORA, "tp2-pp2", ("memory.recompute=full", "schedule.name=zb_h1")),
    (LORA, "tp2-dp2", ("parallel.sharding=parameters", "memory.recompute=selective")),
    (TWO_KV_HEADS, "tp4-sp", ("parallel.sharding=gradients",)),
    (PARTS, "tp4-sp", ("parallel.sharding=gradients",)),
    (PARTS, "cp2-pp2", ("parallel.sharding=parameters",)),
    (EXPERTS, "dp2-tp2-sp", ("parallel.ep=2",)),
    (EXPERTS, "pp2-dp2", ("parallel.ep=2", "parallel.sharding=parameters")),
    (EXPERTS, "tp1", ("memory.recompute=selective",)),
    (LATENT, "tp2-cp2-sp", ()),
    (LORA, "tp2-dp2-sp", ("parallel.tp_comm_overlap=true", "parallel.sharding=gradients")),
    (DORA, "tp2-pp2-dp2-sp", ("parallel.sharding=optimizer",)),
    (DORA, "cp2-dp3", ("parallel.sharding=parameters",)),
    (DORA, "tp2-pp2", ("memory.recompute=full", "schedule.name=zb_h1")),
    (SHARED_KV_DORA, "tp4-sp", ("parallel.sharding=gradients",)),
    (EXPERT_DORA, "dp2-tp2-sp", ("parallel.ep=2",)),
    (EXPERT_DORA, "pp2-dp2", ("parallel.ep=2", "memory.recompute=selective")),
    # recomputation of a further block comes after the forward of other micro-batches
    (FURTHER, "tp1", ("memory.recompute=full", "schedule.name=gpipe")),
    # the join of a further block has its keys on a stage without blocks of the model
    (JOINED, "pp2", ("memory.recompute=full", "parallel.stages=Etttt|L")),
    (NF4, "tp2-pp2-dp2-sp", ("parallel.sharding=optimizer",)),
    (NF4, "cp2-dp3", ("parallel.sharding=parameters",)),
    (NF4, "tp4-dp2-sp", ("parallel.sharding=parameters", "memory.recompute=full")),
    (NF4, "pp2-dp2", ("parallel.sharding=gradients", "schedule.chunks=2")),
    (NF4, "tp2-pp2", ("schedule.name=zb_h1", "memory.recompute=selective")),
    ((*NF4, "model.num_kv_heads=2"), "tp4", ()),
    (EXPERTS_NF4, "pp2-dp2", ("parallel.ep=2", "parallel.sharding=parameters")),
    (EXPERTS_FP8, "tp2-dp2-etp2-sp", ("parallel.sharding=gradients",)),
    (LATENT_NF4, "tp2-cp2-sp", ()),
    (FURTHER_NF4, "dp2-tp2", ("memory.recompute=full", "parallel.sharding=parameters")),
    (FROZEN, "tp2-pp2-sp", ("parallel.sharding=gradients",)),
    (FROZEN, "pp2-dp2", ("parallel.sharding=optimizer", "schedule.chunks=2")),
    (FROZEN, "cp2-dp2", ("parallel.sharding=parameters",)),
]


@cache
def _reference(model):
    return train([*model, *layout_overrides("tp1")])


@pytest.mark.sample(1)
@pytest.mark.parametrize("model, layout, options", CASES)
def test_layout_trains_the_same_run(model, layout, options):
    assert_same_run([*model, *layout_overrides(layout), *options], _reference(model))


def _state_bytes(env, plan_json):
    """Bytes of this rank's weights with codes and scales, gradient sums and optimizer state; what a step leaves of a unit in use."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    buckets = parts.weights._table.buckets
    held = [parts.weights.owned(bucket) for bucket in buckets]
    held += [flat for _, flat in parts.weights.whole()]
    coded = held_bytes([*parts.weights.coded.values()])
    sums = [parts.gradients.owned(bucket) for bucket in buckets if not bucket.is_frozen]
    sums += [part.flat for part in parts.gradients._sums.values()]
    # masters and moments
    state = [block.values for block in parts.optimizer.blocks() if block.tensor.is_trained]
    trained = {span.param.spec.name for b in buckets if not b.is_frozen for span in b.spans}
    assert all("lora_" in name for name in trained), "only adapters have gradients"
    # weights that exist around a use: the most at any use of a step, and none between steps
    passing = [
        flat for flat, bucket in zip(parts.weights._flats, buckets, strict=True) if bucket.is_coded
    ]
    most, wait_for = [0], parts.weights.wait_for

    def watch(module):
        wait_for(module)
        most.append(_num_bytes(passing))

    for module in parts.modules:
        module.before_use = watch
    train_step(parts, TrainState(), Requests(), is_recording=False)
    assert _num_bytes(passing) == 0
    return _num_bytes(held) + coded, _num_bytes(sums), _num_bytes(state), max(most)


def _num_bytes(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("base", ["compute", "nf4", "fp8"])
@pytest.mark.parametrize("level", ["none", "optimizer", "gradients", "parameters"])
def test_state_of_a_frozen_base_is_that_of_the_plan(level, base):
    plan = make_test_plan(
        f"model.lora={{r: 8, base_dtype: {base}}}", "model.hidden_size=128", "model.ffn_hidden_size=256",
        "precision.dtype=bfloat16", *layout_overrides("tp2-dp2"), f"parallel.sharding={level}",
    )  # fmt: skip
    results = run_grid(_state_bytes, plan.grid, plan.to_json())
    held = rank_elements(plan.job, plan.stages_of(0), plan.grid)
    planned = state_of(plan.job, held, plan.grid)
    for weights, sums, state, unit in results:
        assert weights == pytest.approx(planned.weight_bytes, rel=LIMIT)
        assert sums == pytest.approx(planned.gradient_bytes, rel=LIMIT)
        assert state == pytest.approx(planned.moment_bytes + planned.master_bytes, rel=LIMIT)
        assert unit == pytest.approx(held.coded.unit * 2, rel=LIMIT)

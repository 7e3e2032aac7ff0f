"""Whole runs with latent attention and further tokens: the same run as one rank, beside every axis."""

from functools import cache

import numpy as np
import pytest

from raymega.data.rows import Row, later_of
from tests.support.jobs import layout_overrides
from tests.support.training import assert_same_run, train

pytestmark = pytest.mark.dist

LATENT = (
    "model.num_kv_heads=num_heads",
    "model.mla={kv_lora_rank: 12, q_lora_rank: 10, qk_nope_head_dim: 6, qk_rope_head_dim: 4, v_head_dim: 5}",
    "model.num_nextn_predict_layers=2",
)
YARN = (
    "model.rope_scaling=yarn",
    "model.rope_beta_fast=4.0",
    "model.rope_mscale_all_dim=1.0",
    "model.tie_word_embeddings=false",
)
PACKED = ("data.packing=best_fit", "data.packing_window=64", "data.document_multiple=8")
EXPERTS = (
    "model.moe={num_experts: 8, top_k: 2, intermediate_size: 24, first_k_dense_replace: 1, shared_expert_intermediate_size: 16, "
    "router_score_function: sigmoid, n_group: 4, topk_group: 2, group_score: top2, expert_bias: true, "
    "expert_bias_update_rate: 0.01, routed_scaling_factor: 1.5}",
    "model.num_nextn_predict_layers=1",
)
SHARDED = ("parallel.sharding=optimizer",)
PLAIN, WHOLE, DROPPED = LATENT, (*LATENT, *YARN, *PACKED), (*LATENT, "model.hidden_dropout=0.1")
DEEPSEEK = (*LATENT, *EXPERTS)
CASES = [
    (PLAIN, "tp2-pp2-dp2-sp", SHARDED),
    (PLAIN, "cp2-pp2-dp2", ("parallel.sharding=parameters", "memory.recompute=full")),
    (WHOLE, "tp2-dp2", ("parallel.sharding=parameters",)),
    (PLAIN, "cp2-pp2", ("schedule.name=zb_v", "schedule.chunks=2", "memory.recompute=selective")),
    (PLAIN, "tp2-cp4-sp", ("parallel.cp_method=all_to_all",)),
    (WHOLE, "tp2-cp2-pp2", ("memory.recompute=full", *SHARDED)),
    (WHOLE, "cp4-pp2", ("parallel.cp_method=hybrid", "schedule.name=zb_h1")),
    (WHOLE, "cp2-dp2", ("parallel.dynamic_cp=true", "schedule.micro_batch_size=1")),
    (DEEPSEEK, "tp2-pp2-dp2-sp", ("parallel.ep=4", *SHARDED)),
    (DEEPSEEK, "pp2", ("schedule.name=zb_h1",)),
    (DEEPSEEK, "cp2-pp2", ("parallel.ep=2", "memory.recompute=full")),
    (DROPPED, "cp2-pp2", ("parallel.cp_method=all_gather", "schedule.chunks=2")),
]  # fmt: skip


@cache
def _reference(model):
    return train([*model, *layout_overrides("tp1")], steps=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model, layout, options", CASES)
def test_layout_trains_the_same_run(model, layout, options):
    assert_same_run([*model, *layout_overrides(layout), *options], _reference(model))


def test_labels_further_ahead_stay_in_their_document():
    row = Row(
        tokens=np.arange(7),
        labels=np.arange(1, 8),
        mask=np.array([True, True, False, True, True, True, True]),
        documents=(4, 3),
    )
    labels, masks = later_of(row, 2)
    assert labels[0][masks[0]].tolist() == [2, 6, 7] and labels[1][masks[1]].tolist() == [7]
    assert masks.tolist() == [
        [True, False, False, False, True, True, False],
        [False, False, False, False, True, False, False],
    ]

"""Rules of heads, positions and latents, each met by one model that breaks it and told with its numbers."""

import pytest

from raymega.config.attention import AttentionSection, LinearAttentionSection
from raymega.config.mla import MlaSection
from raymega.config.moe import MoeSection
from raymega.plan.validation.attention import (
    block_kind_faults,
    head_width_faults,
    index_length_faults,
    indexer_faults,
    linear_faults,
    linear_head_faults,
    mla_faults,
    mtp_faults,
    position_faults,
    rope_scaling_faults,
    score_scale_faults,
)
from raymega.plan.validation.layers import window_faults

NONE = MlaSection()
LATENT = MlaSection(
    kv_lora_rank=8, q_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3
)
SHARED = "hidden_size / num_heads"


def _one(faults):
    (fault,) = faults
    return str(fault)


def test_heads_share_the_width_out_and_rope_turns_pairs():
    assert head_width_faults(32, 8, SHARED, "llama", NONE) == []
    assert "multiple of model.num_heads=5 (remainder 2); use 30 or 35" in _one(
        head_width_faults(32, 5, SHARED, "llama", NONE)
    )
    assert "model.hidden_size / model.num_heads = 3" in _one(
        head_width_faults(24, 8, SHARED, "llama", NONE)
    )
    assert "model.head_dim=5" in _one(head_width_faults(24, 8, 5, "qwen3", NONE))
    assert head_width_faults(24, 8, SHARED, "gpt2", NONE) == []
    assert head_width_faults(32, 5, SHARED, "llama", LATENT) == []


def test_waves_are_stretched_where_there_are_some():
    assert rope_scaling_faults("none", "gpt2", 4.0, 1.0) == []
    assert rope_scaling_faults("llama3", "llama", 1.0, 4.0, 1.0, 32.0) == []
    assert "has learned positions" in _one(rope_scaling_faults("yarn", "gpt2", 1.0, 4.0, 1.0, 32.0))
    assert "less than model.rope_high_freq_factor=4" in _one(
        rope_scaling_faults("llama3", "llama", 4.0, 4.0, 1.0, 32.0)
    )
    assert rope_scaling_faults("yarn", "llama", 1.0, 4.0, 32.0, 32.0) == []
    assert "at most model.rope_beta_fast=32" in _one(
        rope_scaling_faults("yarn", "llama", 1.0, 4.0, 33.0, 32.0)
    )


def _changed(**fields):
    return LATENT.model_copy(update=fields)


@pytest.mark.parametrize(
    ("mla", "others", "told"),
    [
        (MlaSection(q_lora_rank=6), {}, "model.mla.q_lora_rank=6 with model.mla.kv_lora_rank=0"),
        (LATENT, {"family": "qwen3"}, "model.family=qwen3 with model.mla.kv_lora_rank=8"),
        (LATENT, {"kv_heads": 2}, "model.num_kv_heads=2"),
        (LATENT, {"features": 6}, "model.head_dim=6"),
        (_changed(qk_rope_head_dim=3, qk_nope_head_dim=3), {}, "model.mla.qk_rope_head_dim=3"),
        (_changed(qk_rope_head_dim=0, qk_nope_head_dim=6), {}, "no head knows positions"),
        (_changed(v_head_dim=7), {}, "no wider than keys, nope + rope = 6"),
        (_changed(v_head_dim=0), {}, "use 1 to 6"),
    ],
)
def test_latents_say_themselves_how_wide_heads_are(mla, others, told):
    given = {"family": "llama", "kv_heads": "num_heads", "features": SHARED, **others}
    assert told in _one(mla_faults(mla, given["family"], given["kv_heads"], given["features"]))
    assert mla_faults(LATENT, "llama", "num_heads", SHARED) == []
    assert mla_faults(NONE, "gpt2", 2, 6) == []


def test_whole_scores_are_scaled_in_latent_attention_with_yarn_only():
    assert score_scale_faults(LATENT, "yarn", 0.7) == [] == score_scale_faults(NONE, "none", 0.0)
    for mla, scaling in ((NONE, "yarn"), (LATENT, "llama3")):
        assert "rope_mscale_all_dim=0.7" in _one(score_scale_faults(mla, scaling, 0.7))


def test_the_furthest_token_lies_in_the_row():
    assert mtp_faults(7, 8) == []
    assert (
        "model.num_nextn_predict_layers=8; a row of data.seq_len=8 has no token so far ahead; use at most 7"
        in _one(mtp_faults(8, 8))
    )


DELTA = AttentionSection(layer_types=("gated_delta_net", "full"))
BOTH = AttentionSection(layer_types=("gated_delta_net", "mamba2"))
ONE_PART = AttentionSection(layer_types=("mamba2", "feed_forward"))
EXPERT_BLOCKS = AttentionSection(layer_types=("mamba2", "experts"))
STATES = LinearAttentionSection(
    num_key_heads=4, num_value_heads=8, key_head_dim=6, value_head_dim=5
)


@pytest.mark.parametrize(
    ("attention", "changes", "others", "told"),
    [
        (DELTA, {"key_head_dim": 0}, {}, "model.linear_attention.key_head_dim=0"),
        (AttentionSection(), {}, {}, "model.linear_attention.num_key_heads=4; model.attention"),
        (DELTA, {}, {"num_layers": 0}, "num_layers=0, so it has no effect"),
        (DELTA, {"num_value_heads": 10}, {}, "num_key_heads=4 (remainder 2); use 8"),
        (DELTA, {}, {"family": "bert"}, "a state holds earlier tokens"),
        (DELTA, {}, {"fp8": "rowwise"}, "set precision.fp8=none"),
    ],
)
def test_states_have_sizes_and_layers(attention, changes, others, told):
    rest = {"num_layers": 4, "family": "qwen3_next", "fp8": "none"} | others
    linear = STATES.model_copy(update=changes)
    assert told in _one(linear_faults(attention, linear, *rest.values()))
    assert linear_faults(DELTA, STATES, 4, "qwen3_next", "none") == []
    assert linear_faults(AttentionSection(), LinearAttentionSection(), 4, "llama", "none") == []


def test_ranks_have_whole_key_heads():
    assert linear_head_faults(DELTA, STATES, 2, 2, 1, False) == []
    assert "(remainder 1); use one of 1, 2, 4" in _one(
        linear_head_faults(DELTA, STATES, 3, 1, 1, False)
    )
    assert "parallel.cp=4 with model.linear_attention" in _one(
        linear_head_faults(DELTA, STATES, 2, 4, 1, False)
    )
    assert "parallel.dp * cp=4" in _one(linear_head_faults(DELTA, STATES, 2, 2, 2, True))
    assert linear_head_faults(AttentionSection(), STATES, 3, 1, 1, False) == []


@pytest.mark.parametrize(
    ("attention", "changes", "others", "told"),
    [
        (DELTA, {"time_step_min": 0.1}, {}, "only mamba2 has time steps"),
        (BOTH, {}, {}, "has gated_delta_net and mamba2"),
        (ONE_PART, {}, {}, "each block of qwen3_next has a feed-forward layer or experts already"),
        (
            ONE_PART,
            {},
            {"family": "nemotron_h", "moe": MoeSection(num_experts=4)},
            "moe.num_experts=4",
        ),
        (EXPERT_BLOCKS, {}, {"family": "nemotron_h"}, "such a block has at least one expert"),
        (
            EXPERT_BLOCKS,
            {},
            {"family": "nemotron_h", "moe": MoeSection(num_experts=4, layer_freq=2)},
            "the kinds of layers say which blocks have experts",
        ),
    ],
)
def test_a_model_has_one_kind_of_states_and_its_family_s_blocks(attention, changes, others, told):
    rest = {"num_layers": 4, "family": "qwen3_next", "moe": MoeSection()} | others
    linear = STATES.model_copy(update=changes)
    assert told in _one(block_kind_faults(attention, linear, *rest.values()))
    assert block_kind_faults(DELTA, STATES, 4, "qwen3_next", MoeSection(num_experts=4)) == []
    assert block_kind_faults(ONE_PART, STATES, 4, "nemotron_h", MoeSection()) == []
    experts = MoeSection(num_experts=4)
    assert block_kind_faults(EXPERT_BLOCKS, STATES, 4, "nemotron_h", experts) == []


@pytest.mark.parametrize("field", [{"sinks": True}, {"softcap": 30.0}, {"score_scale": 0.5}])
def test_rules_of_scores_need_layers_with_scores(field):
    alone = AttentionSection(layer_types=("mamba2", "feed_forward"), **field)
    assert "has no attention among" in _one(window_faults(alone, 4))
    beside = AttentionSection(layer_types=("mamba2", "full"), **field)
    assert window_faults(beside, 4) == []
    assert "has no attention among" in _one(window_faults(beside, 1)[:1])


INDEXER = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
           "index_n_heads": 2, "index_head_dim": 6, "index_topk": 16}  # fmt: skip


def test_an_indexer_has_all_its_sizes_and_rows_that_it_would_choose_whole():
    assert indexer_faults(MlaSection(**INDEXER)) == []
    assert "index_topk=0" in _one(indexer_faults(MlaSection(**INDEXER | {"index_topk": 0})))
    assert "q_lora_rank=0" in _one(indexer_faults(MlaSection(**INDEXER | {"q_lora_rank": 0})))
    assert "use 4 or more" in _one(indexer_faults(MlaSection(**INDEXER | {"index_head_dim": 2})))
    assert index_length_faults(MlaSection(**INDEXER), 16) == []
    assert "another function" in _one(index_length_faults(MlaSection(**INDEXER), 17))


def test_relative_positions_bound_no_row():
    assert position_faults(128, 64, "t5") == []
    assert "model.max_positions=64" in _one(position_faults(128, 64, "llama"))

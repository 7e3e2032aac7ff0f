"""config.json: both spellings of RoPE, published configs, and what is refused."""

import copy
import re
from operator import attrgetter

import pytest
from transformers import MiniMaxM2Config

from raymega.config.schema import MoeSection
from raymega.convert.huggingface.config import config_from, model_from
from raymega.errors import ConfigError
from raymega.plan.memory.state_bytes import count_parameters
from tests.unit.convert.folders import make_model

LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 50, "kv_lora_rank": 8, "q_lora_rank": 6,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2,
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


def test_published_configs_give_models_of_the_published_size():
    llama, qwen = model_from(LLAMA31_8B), model_from(QWEN3_06B)
    assert (count_parameters(llama), count_parameters(qwen)) == (8_030_261_248, 596_049_920)
    assert (llama.rope_scaling, llama.rope_theta, llama.rope_factor) == ("llama3", 500000.0, 8.0)
    assert (llama.max_positions, llama.rope_original_positions) == (131072, 8192)
    assert (qwen.head_width, qwen.rope_scaling, qwen.norm_eps) == (128, "none", 1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ["none", "llama3"])
def test_config_gives_back_the_model(family, rope):
    changes = {} if family == "gpt2" else {"rope_scaling": rope, "rope_theta": 12345.0}
    model = make_model(
        family, **changes, initializer_range=0.03, norm_eps=2e-6, tie_word_embeddings=False
    )
    config = config_from(model, dtype="float32", carried={"bos_token_id": 7, "torch_dtype": "x"})
    assert config["bos_token_id"] == 7 and "torch_dtype" not in config
    assert model_from(config).model_copy(update={"make_vocab_size_divisible_by": 8}) == model
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert model_from(old) == model_from(config)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (
            {"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 3, "vocab_size": 90,
             "n_positions": 64, "n_inner": 100, "layer_norm_epsilon": 3e-5},
            {"hidden_size": 48, "num_heads": 4, "num_layers": 3, "vocab_size": 90, "max_positions": 64,
             "ffn_hidden_size": 100, "norm_eps": 3e-5},
        ),
        (
            LLAMA31_8B | {"rope_scaling": {
                "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 2.0, "high_freq_factor": 6.0,
                "original_max_position_embeddings": 4096,
            }},
            {"hidden_size": 4096, "ffn_hidden_size": 14336, "num_layers": 32, "num_kv_heads": 8,
             "rope_factor": 16.0, "rope_low_freq_factor": 2.0, "rope_high_freq_factor": 6.0,
             "rope_original_positions": 4096},
        ),
        (
            DEEPSEEK_V3 | {"routed_scaling_factor": 3.0, "first_k_dense_replace": 1, "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "beta_slow": 2, "beta_fast": 24, "mscale": 0.7,
                "mscale_all_dim": 0.9, "original_max_position_embeddings": 1024,
            }},
            {"rope_factor": 4.0, "rope_beta_slow": 2.0, "rope_beta_fast": 24.0, "rope_mscale": 0.7,
             "rope_mscale_all_dim": 0.9, "rope_original_positions": 1024, "mla.kv_lora_rank": 8,
             "mla.q_lora_rank": 6, "mla.qk_nope_head_dim": 4, "mla.qk_rope_head_dim": 2,
             "mla.v_head_dim": 3, "moe.num_experts": 8, "moe.intermediate_size": 12,
             "moe.first_k_dense_replace": 1, "moe.routed_scaling_factor": 3.0, "moe.n_group": 4,
             "moe.topk_group": 2, "moe.top_k": 2},
        ),
        (
            QWEN3_MOE | {"decoder_sparse_step": 2},
            {"moe.num_experts": 4, "moe.intermediate_size": 12, "moe.layer_freq": 2,
             "moe.norm_topk_prob": True, "moe.top_k": 2},
        ),
    ],
    ids=["gpt2", "llama3", "deepseek", "qwen"],
)  # fmt: skip
def test_each_setting_is_the_field_that_means_it(config, wanted):
    """Written out: reading back what was written cannot tell two names that are exchanged."""
    model = model_from(config)
    assert {name: attrgetter(name)(model) for name in wanted} == wanted


MISTRAL_V03 = {
    "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32768,
}  # fmt: skip
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072,
    "model_type": "kimi_k2", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip


def test_aliases_are_known_networks_of_the_published_size():
    mistral, kimi = model_from(MISTRAL_V03), model_from(KIMI_K2)
    assert mistral == model_from(MISTRAL_V03 | {"model_type": "llama"})
    assert kimi == model_from(KIMI_K2 | {"model_type": "deepseek_v3"})
    assert count_parameters(mistral) == 7_248_023_552
    assert round(count_parameters(kimi) / 1e9) == 1026
    exported = config_from(
        kimi, dtype="bfloat16", carried=KIMI_K2 | {"auto_map": {"AutoModel": "x"}}
    )
    assert exported["model_type"] == "deepseek_v3" and "auto_map" not in exported


@pytest.mark.parametrize(
    ("config", "change", "fact"),
    [
        (MISTRAL_V03, {"mlp_bias": True}, "mlp_bias=True; only nothing or False is built"),
        (KIMI_K2, {"scoring_func": "softmax"}, "scoring_func='softmax'; only 'sigmoid' is built"),
        (KIMI_K2, {"topk_method": None}, "topk_method=None; only 'noaux_tc' is built"),
        (KIMI_K2, {"norm_topk_prob": None}, "has no norm_topk_prob"),
    ],
)  # fmt: skip
def test_an_alias_that_is_another_network_is_refused(config, change, fact):
    with pytest.raises(ConfigError, match=re.escape(fact)):
        model_from(config | change)


def test_mistral_without_the_key_has_its_first_window_and_null_has_none():
    told = {key: value for key, value in MISTRAL_V03.items() if key != "sliding_window"}
    attention = model_from(told).attention
    assert (attention.layer_types, attention.sliding_window) == (("sliding",), 4096)
    assert not model_from(MISTRAL_V03).attention.sliding_window
    heads = {key: value for key, value in MISTRAL_V03.items() if key != "num_key_value_heads"}
    assert model_from(heads).kv_heads == 8
    assert model_from(heads | {"num_key_value_heads": None}).kv_heads == 32


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (
            {"model_type": "bart"},
            "model_type='bart'; the architectures that can be converted",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' is built"),
        ({"attention_bias": True}, "attention_bias=True; only nothing or False is built"),
        ({"quantization_config": {}}, "quantization_config={}"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn with no factor"),
        (
            {"rope_parameters": {"rope_type": "dynamic"}, "rope_scaling": None},
            "rope_type='dynamic'",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": 0}, "gives model.num_layers=0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_networks_are_refused(change, fact):
    with pytest.raises(ConfigError) as caught:
        model_from(LLAMA31_8B | change)
    assert fact in str(caught.value)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"hidden_size": "48"}, "has hidden_size='48'; it is a whole number;"),
        ({"num_hidden_layers": True}, "has num_hidden_layers=True; it is a whole number;"),
        ({"num_attention_heads": 0}, "has num_attention_heads=0; it is a whole number from 1;"),
        ({"rms_norm_eps": "x"}, "has rms_norm_eps='x'; it is a finite number;"),
        ({"rms_norm_eps": 10**400}, "it is a finite number;"),
        ({"rope_parameters": [1]}, "has rope_parameters=[1]; it is an object;"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "8"}}, "has rope_scaling.factor='8';"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": None}}, "has no factor;"),
        ({"layer_types": 5}, "has layer_types=5; it is a list of strings;"),
        ({"layer_types": [[], "x"]}, "it is a list of strings;"),
        ({"model_type": []}, "has model_type=[];"),
        ({"model_type": "qwen2_moe", "mlp_only_layers": 3}, "has mlp_only_layers=3;"),
        ({"model_type": "llama4_text", "no_rope_layers": 3}, "has no_rope_layers=3; it is a list of whole numbers;"),
        ({"model_type": "llama4_text", "no_rope_layers": [1]}, "has no_rope_layers of 1 layer; num_hidden_layers=32;"),
        ({"model_type": "llama4_text", "moe_layers": ["x"]}, "has moe_layers=['x']; it is a list of whole numbers;"),
        ({"model_type": "llama4_text", "no_rope_layer_interval": 0}, "it is a whole number from 1;"),
        ({"model_type": "llama4_text", "use_qk_norm": "no"}, "has use_qk_norm='no'; it is true or false;"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"]}, "has layer_types of 1 layer;"),
        ({"model_type": "gpt_oss", "rope_scaling": {"rope_type": "yarn", "attention_factor": "x"}}, "attention_factor='x';"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "has query_pre_attn_scalar=0; it is a finite number above 0;"),
        ({"model_type": "gemma2", "final_logit_softcapping": "x"}, "has final_logit_softcapping='x';"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": "x"}, "has sliding_window_pattern='x';"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": [1]}, "has rope_local_base_freq=[1];"),
        ({"model_type": "granite", "logits_scaling": "x"}, "has logits_scaling='x';"),
        ({"model_type": "granite", "hidden_size": 3}, "model.head_dim"),
        ({"model_type": "minimax_m2", "rotary_dim": "x"}, "has rotary_dim='x'; it is a whole number;"),
        ({"model_type": "minimax_m2", "head_dim": 0}, "has head_dim=0; it is a whole number from 1;"),
    ],
    ids=str,
)  # fmt: skip
def test_values_of_another_kind_are_named(change, fact):
    with pytest.raises(ConfigError) as caught:
        model_from(LLAMA31_8B | change)
    assert fact in str(caught.value)


MINIMAX_M2 = {
    "model_type": "minimax_m2", "hidden_size": 256, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "change",
    [
        {"rotary_dim": 64}, {"rotary_dim": 64, "partial_rotary_factor": 0.25}, {"rotary_dim": None},
        {"rotary_dim": 64, "rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.25}},
        {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.25}},
        {"rope_theta": 8.0, "rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
    ],
    ids=str,
)  # fmt: skip
def test_of_rope_settings_that_contradict_each_other_those_count_that_transformers_takes(change):
    theirs = MiniMaxM2Config(**copy.deepcopy(change)).rope_parameters
    model = model_from(MINIMAX_M2 | change)
    assert model.attention.partial_rotary_factor == theirs.get("partial_rotary_factor", 1.0)
    assert model.rope_theta == theirs["rope_theta"]
    assert (model.rope_scaling == "yarn") == (theirs["rope_type"] == "yarn")


def test_all_values_of_another_kind_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        model_from(LLAMA31_8B | {"hidden_size": "48", "vocab_size": 1.5})
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        (
            QWEN3_MOE | {"num_experts_per_tok": 1},
            "gives model.moe.top_k=1 with norm_topk_prob=true;",
        ),
        (QWEN3_MOE | {"num_experts_per_tok": 5}, "gives model.moe.top_k=5;"),
        (DEEPSEEK_V3 | {"topk_group": 5}, "gives model.moe.topk_group=5 with n_group=4;"),
        (DEEPSEEK_V3 | {"n_group": 3}, "gives model.moe.n_group=3;"),
        (LLAMA31_8B | {"num_key_value_heads": 5}, "gives model.num_kv_heads=5;"),
    ],
    ids=["one-normalised", "too-many", "groups", "uneven-groups", "kv-heads"],
)
def test_what_a_job_file_would_be_refused_for_is_not_imported(config, fact):
    with pytest.raises(ConfigError) as caught:
        model_from(config)
    assert fact in str(caught.value)


def test_choice_among_all_groups_is_none():
    moe = model_from(DEEPSEEK_V3 | {"topk_group": 4}).moe
    assert (moe.n_group, moe.topk_group, moe.group_score) == (1, 1, "max")


@pytest.mark.parametrize(
    "change", [{"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 3}, {"num_experts": 0}], ids=str
)
def test_experts_in_no_block_are_a_dense_model(change):
    model = model_from(QWEN3_MOE | change)
    assert (model.family, model.moe, model.ffn_hidden_size) == ("qwen3", MoeSection(), 24)


NEMOTRON_H_8B = {
    "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 8192,
    "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4,
    "num_hidden_layers": 52, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip


def test_letters_of_nemotron_h_are_its_blocks():
    """NemotronHForCausalLM of this config.json has 8,100,852,736 parameters."""
    model = model_from(NEMOTRON_H_8B)
    assert (model.num_layers, count_parameters(model)) == (52, 8_100_852_736)
    with pytest.raises(ConfigError, match="blocks of kind X"):
        model_from({**NEMOTRON_H_8B, "hybrid_override_pattern": "MX*-"})
    with pytest.raises(ConfigError, match="moe_latent_size=64"):
        model_from({**NEMOTRON_H_8B, "moe_latent_size": 64})
    mixed = model_from({**NEMOTRON_H_8B, "hybrid_override_pattern": "ME*-"})
    kinds = ("mamba2", "experts", "no_positions", "feed_forward")
    assert (mixed.attention.layer_types, mixed.moe.num_experts) == (kinds, 8)
    assert [mixed.holds_experts(layer) for layer in range(4)] == [False, True, False, False]


def test_nemotron_h_reads_either_list_and_refuses_names_that_would_win():
    listed = {
        **NEMOTRON_H_8B,
        "num_hidden_layers": None,
        "layer_types": ["mamba", "attention", "mlp"],
    }
    assert model_from(listed).attention.layer_types == ("mamba2", "no_positions", "feed_forward")
    with pytest.raises(ConfigError, match=r"mamba_dt_min=0\.5"):
        model_from({**NEMOTRON_H_8B, "mamba_dt_min": 0.5})


def test_nemotron_h_without_states_has_a_config():
    model = model_from({**NEMOTRON_H_8B, "hybrid_override_pattern": "*-"})
    assert model_from(config_from(model, dtype="float32", carried={})) == model


OPENELM = {
    "model_type": "openelm", "model_dim": 48, "vocab_size": 256, "num_transformer_layers": 2, "head_dim": 12,
    "num_query_heads": [8, 4], "num_kv_heads": [4, 2], "ffn_multipliers": [0.5, 1.0], "ffn_dim_divisor": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"num_kv_heads": 4}, "num_kv_heads=4"),
        ({"num_kv_heads": [4, None]}, "num_kv_heads=[4, None]"),
        ({"num_kv_heads": []}, "num_kv_heads of 0 layers"),
        ({"ffn_multipliers": [1.0]}, "ffn_multipliers of 1 layer"),
        ({"num_transformer_layers": 3}, "num_query_heads of 2 layers"),
        ({"num_transformer_layers": 10**18}, "num_transformer_layers=1000000000000000000"),
    ],
    ids=str,
)
def test_lists_of_openelm_have_a_size_for_each_layer(change, fact):
    assert model_from(OPENELM).layer_sizes.num_kv_heads == (4, 2)
    with pytest.raises(ConfigError, match=re.escape(fact)):
        model_from({**OPENELM, **change})


QWEN2_VL = {
    "model_type": "qwen2_vl", "vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "image_token_id": 100,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"rope_scaling": True}, "has no mrope_section"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": 2}}, "mrope_section=2"),
        ({"vision_config": {"spatial_merge_size": [7]}}, "vision_config.spatial_merge_size=[7]"),
        ({"vision_config": {"embed_dim": 0}}, "vision_config.embed_dim=0"),
        ({"image_mean": ["a", 1, 1]}, "image_mean.0='a'"),
        ({"image_std": "b"}, "image_std='b'"),
    ],
    ids=str,
)
def test_settings_of_images_of_another_type_are_named(change, fact):
    assert model_from(QWEN2_VL).vision.mrope_section == (2, 3, 3)
    with pytest.raises(ConfigError, match=re.escape(fact)):
        model_from({**QWEN2_VL, **change})


T5_SMALL = {
    "model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"num_layers": "6"}, "has num_layers='6'; it is a whole number from 1;"),
        ({"num_decoder_layers": [1]}, "has num_decoder_layers=[1]; it is a whole number from 1;"),
        ({"d_kv": {}}, "has d_kv={}; it is a whole number from 1;"),
        ({"num_decoder_layers": 0}, "has num_decoder_layers=0;"),
        ({"relative_attention_num_buckets": 7}, "relative_attention_num_buckets=7"),
        ({"relative_attention_max_distance": 3}, "relative_attention_max_distance=3"),
        ({"dense_act_fn": "silu"}, "dense_act_fn='silu' with feed_forward_proj='relu'; it is 'relu' there"),
        ({"is_gated_act": True}, "is_gated_act=True with feed_forward_proj='relu'; it is False there"),
        ({"scale_decoder_outputs": "yes"}, "has scale_decoder_outputs='yes'; it is true or false;"),
    ],
    ids=str,
)  # fmt: skip
def test_other_encoder_decoders_are_refused(change, fact):
    with pytest.raises(ConfigError) as caught:
        model_from(T5_SMALL | change)
    assert fact in str(caught.value)


def test_a_table_of_rope_by_layer_that_is_none_is_named():
    with pytest.raises(
        ConfigError, match=r"has rope_parameters\.full_attention=3; it is an object"
    ):
        model_from(LLAMA31_8B | {"rope_parameters": {"full_attention": 3}})

"""Checks the type of each setting of config.json, so that a wrong one is reported by name.

Only settings that raymega reads are listed; ``config.py`` decides which values can be built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from raymega.convert.huggingface.architectures import Config
from raymega.errors import Fault

LARGEST = 1e300
"""Bound of finite numbers: an integer in JSON may be too large for a float."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingKind:
    """Type that a setting must have: in words for messages, and as a predicate."""

    words: str
    holds: Callable[[object], bool]


def kind_faults(config: Config) -> list[Fault]:
    """Return the faults of settings of the wrong type, those inside RoPE's tables included.

    Args:
        config: Content of a config.json without keys that are null, which means "left out".
    """
    return [
        Fault(
            fact=f"config.json has {name}={value!r}",
            rule=f"it is {kind.words}",
            remedy="take config.json from the same place as the weights",
        )
        for name, value, kind in _settings(config)
        if not kind.holds(value)
    ]


def _settings(config: Config) -> Iterator[tuple[str, object, SettingKind]]:
    for name, kind in _KINDS.items():
        if name in config:
            yield name, config[name], kind
    for table in ("rope_scaling", "rope_parameters"):
        rope = config.get(table)
        if not isinstance(rope, Mapping):
            continue
        for name, kind in _ROPE_KINDS.items():
            if rope.get(name) is not None:
                yield f"{table}.{name}", rope[name], kind


def _is_whole(value: object) -> bool:
    # In Python a bool is an int.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_divisor(value: object) -> bool:
    return isinstance(value, int) and _is_whole(value) and value > 0


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and _is_number(value) and value > 0


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -LARGEST < value < LARGEST


def _list_of(is_one: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(is_one, value))


def _is_word(value: object) -> bool:
    return isinstance(value, str)


_WHOLE = SettingKind(words="a whole number", holds=_is_whole)
_DIVISOR = SettingKind(words="a whole number from 1", holds=_is_divisor)
_NUMBER = SettingKind(words="a finite number", holds=_is_number)
_POSITIVE = SettingKind(words="a finite number above 0", holds=_is_positive)
_WORD = SettingKind(words="a string", holds=_is_word)
_FLAG = SettingKind(words="true or false", holds=lambda value: isinstance(value, bool))
_TABLE = SettingKind(words="an object", holds=lambda value: isinstance(value, Mapping))
_WORDS = SettingKind(words="a list of strings", holds=_list_of(_is_word))
_MULTIPLIERS = SettingKind(words="a list of finite numbers above 0", holds=_list_of(_is_positive))
_PLACES = SettingKind(words="a list of whole numbers", holds=_list_of(_is_whole))


def _all(kind: SettingKind, names: str) -> dict[str, SettingKind]:
    return dict.fromkeys(names.split(), kind)


# Settings at the top of config.json, then those inside rope_scaling and rope_parameters.
_KINDS = {
    **_all(_WHOLE, "n_embd n_head n_layer n_inner n_positions vocab_size hidden_size"),
    **_all(_WHOLE, "num_hidden_layers num_key_value_heads intermediate_size"),
    **_all(_WHOLE, "max_position_embeddings kv_lora_rank q_lora_rank qk_nope_head_dim"),
    **_all(_WHOLE, "qk_rope_head_dim v_head_dim num_local_experts num_experts n_routed_experts"),
    **_all(_WHOLE, "num_experts_per_tok moe_intermediate_size decoder_sparse_step"),
    **_all(_WHOLE, "shared_expert_intermediate_size first_k_dense_replace n_shared_experts"),
    **_all(
        _WHOLE,
        "n_group topk_group moe_shared_expert_intermediate_size rotary_dim sliding_window attention_chunk_size num_labels",
    ),
    **_all(_DIVISOR, "num_attention_heads head_dim sliding_window_pattern _sliding_window_pattern"),
    **_all(_DIVISOR, "index_n_heads index_head_dim index_topk"),
    **_all(_DIVISOR, "model_dim num_transformer_layers ffn_dim_divisor rope_max_length"),
    **_all(_DIVISOR, "no_rope_layer_interval interleave_moe_layer_step floor_scale"),
    **_all(_DIVISOR, "linear_num_key_heads linear_num_value_heads linear_key_head_dim"),
    **_all(_DIVISOR, "n_groups mamba_num_heads ssm_state_size mamba_head_dim conv_kernel"),
    **_all(_DIVISOR, "linear_value_head_dim linear_conv_kernel_dim full_attention_interval"),
    **_all(_DIVISOR, "d_model d_kv d_ff num_heads num_layers num_decoder_layers"),
    **_all(_DIVISOR, "relative_attention_num_buckets relative_attention_max_distance"),
    **_all(_NUMBER, "initializer_range layer_norm_epsilon rms_norm_eps rope_theta"),
    **_all(_NUMBER, "router_jitter_noise routed_scaling_factor partial_rotary_factor attn_scale"),
    **_all(_NUMBER, "layer_norm_epsilon time_step_min"),
    **_all(
        _NUMBER,
        "rope_freq_constant attn_logit_softcapping final_logit_softcapping embedding_multiplier",
    ),
    **_all(_NUMBER, "residual_multiplier attention_multiplier logits_scaling"),
    **_all(_POSITIVE, "query_pre_attn_scalar rope_local_base_freq"),
    **_all(_FLAG, "tie_word_embeddings norm_topk_prob use_qk_norm attn_temperature_tuning"),
    **_all(_FLAG, "scale_decoder_outputs is_gated_act share_input_output_layers"),
    **_all(_TABLE, "rope_scaling rope_parameters id2label"),
    **_all(_WORD, "topk_method hybrid_override_pattern"),
    **_all(_WORDS, "architectures layer_types layers_block_type mlp_layer_types"),
    **_all(
        SettingKind(words="a list of whole numbers from 1", holds=_list_of(_is_divisor)),
        "num_query_heads num_kv_heads",
    ),
    **_all(_MULTIPLIERS, "ffn_multipliers"),
    **_all(_PLACES, "mlp_only_layers no_rope_layers moe_layers"),
}
_ROPE_KINDS = {
    **_all(_NUMBER, "rope_theta factor low_freq_factor high_freq_factor beta_slow beta_fast"),
    **_all(_NUMBER, "mscale mscale_all_dim partial_rotary_factor attention_factor"),
    **_all(_WHOLE, "original_max_position_embeddings"),
    **_all(_FLAG, "truncate"),
    **_all(_WORD, "rope_type type"),
    **_all(_TABLE, "full_attention sliding_attention"),
}

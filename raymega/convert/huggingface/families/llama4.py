"""Llama 4 (text): chunks, layers without positions, norms after RoPE, experts that weigh their inputs."""

from __future__ import annotations

from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import (
    LLAMA_DEFAULTS,
    NO_BIAS,
    Architecture,
    Config,
    unlike,
)
from raymega.convert.huggingface.families.family import HfFamily, StackedExperts, shortest_period
from raymega.errors import ConfigError
from raymega.plan.layers.layer_pattern import layer_pattern

_DEFAULTS = {
    **LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8,
    "head_dim": 128, "rope_theta": 500000.0, "num_experts_per_tok": 1, "num_local_experts": 16,
    "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
    "use_qk_norm": True, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip
CHUNKED, FULL = "chunked_attention", "full_attention"
_KINDS = {(True, CHUNKED): "chunked", (True, FULL): "full", (False, FULL): "no_positions"}
_NAMES = ("gate", "up", "down")


def _values(config: Config) -> dict[str, Any]:
    layers, every = range(config["num_hidden_layers"]), config["no_rope_layer_interval"]
    # lists win over intervals, as in transformers
    turned = config.get("no_rope_layers") or [(i + 1) % every != 0 for i in layers]
    there = config.get("layer_types") or [CHUNKED if turned[i] else FULL for i in layers]
    # layers with experts: a list of theirs must be every n-th layer
    with_experts, step = config.get("moe_layers"), config["interleave_moe_layer_step"]
    step = 1 + with_experts[0] if with_experts else step
    if with_experts and list(with_experts) != [i for i in layers if (i + 1) % step == 0]:
        raise ConfigError(unlike(f"moe_layers={with_experts}", "every n-th layer has experts"))
    # kind of each layer, by RoPE and chunks
    chunk = config.get("attention_chunk_size") or 0
    pairs = [(bool(turned[i]), there[i] if chunk else FULL) for i in layers]
    if (False, CHUNKED) in pairs:
        raise ConfigError(unlike("chunks in layers without RoPE", "such layers see all tokens"))
    kinds = [_KINDS[pair] for pair in pairs]
    # scores grow with the position only in layers without positions
    floor = (
        config["floor_scale"]
        if config["attn_temperature_tuning"] and "no_positions" in kinds
        else 0
    )
    return {
        "attention": {
            "layer_types": shortest_period(kinds),
            "chunk_size": chunk if "chunked" in kinds else 0,
            "qk_norm": "family" if config["use_qk_norm"] else "none",
            "temperature_floor": floor,
            **({"temperature_scale": config["attn_scale"]} if floor else {}),
        }
    }


def _config(model: ModelSection) -> dict[str, Any]:
    attention, layers = model.attention, [each.attention for each in layer_pattern(model)]
    return {
        "layer_types": [CHUNKED if kind == "chunked" else FULL for kind in layers],
        "no_rope_layers": [int(kind != "no_positions") for kind in layers],
        "attention_chunk_size": attention.chunk_size or None,
        "use_qk_norm": attention.qk_norm == "family",
        "attn_temperature_tuning": attention.temperature_floor > 0,
        "floor_scale": attention.temperature_floor or _DEFAULTS["floor_scale"],
        "attn_scale": attention.temperature_scale,
    }


LLAMA4 = HfFamily(
    architecture=Architecture(
        "Llama4ForCausalLM", "llama4", _DEFAULTS, {**NO_BIAS, "hidden_act": ("silu",)}
    ),
    modules={
        **{f"feed_forward.{name}_proj": (f"mlp.{name}",) for name in _NAMES},
        **{f"feed_forward.shared_expert.{name}_proj": (f"moe.shared.{name}",) for name in _NAMES},
    },
    tensors={"feed_forward.router.weight": "moe.router.weight"},
    experts=StackedExperts(module="feed_forward.experts"),
    renames={
        "intermediate_size_mlp": "intermediate_size",
        "intermediate_size": "moe_intermediate_size",
    },
    values=_values,
    config=_config,
    further_kinds=(CHUNKED,),
)

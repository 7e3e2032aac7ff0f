"""Qwen3-Next: gated delta nets in three of four layers, gated attention, norms with 1 + w, experts.

Rows of its stacked projections alternate key head by key head.
"""

from __future__ import annotations

from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import (
    LLAMA_DEFAULTS,
    NO_BIAS,
    SAME,
    Architecture,
    Config,
    ours,
    theirs,
)
from raymega.convert.huggingface.families.family import HfFamily, shortest_period
from raymega.plan.layers.layer_pattern import DELTA_NET, layer_pattern

FULL, DELTA = "full_attention", "linear_attention"
_KINDS = {FULL: "full", DELTA: DELTA_NET}
_SIZES = {
    "linear_num_key_heads": "num_key_heads",
    "linear_num_value_heads": "num_value_heads",
    "linear_key_head_dim": "key_head_dim",
    "linear_value_head_dim": "value_head_dim",
    "linear_conv_kernel_dim": "conv_kernel_dim",
}
DENSE_DEFAULTS = {
    **LLAMA_DEFAULTS, "max_position_embeddings": 32768, "num_key_value_heads": 2, "head_dim": 256,
    "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
DEFAULTS = {
    **DENSE_DEFAULTS, "decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": True, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
MODULES = {
    "self_attn.q_proj": ("attention.q", "attention.gate"),
    "linear_attn.conv1d": tuple(f"linear_attention.{part}_conv" for part in "qkv"),
    "linear_attn.norm": ("linear_attention.norm",),
    "linear_attn.out_proj": ("linear_attention.out",),
}
TENSORS = {f"linear_attn.{name}": f"linear_attention.{name}" for name in ("A_log", "dt_bias")}


def values_of(config: Config) -> dict[str, Any]:
    """Return the kinds of layers, and the sizes of gated delta nets if there are any."""
    layers, every = range(config["num_hidden_layers"]), config["full_attention_interval"]
    there = config.get("layer_types") or [DELTA if (i + 1) % every else FULL for i in layers]
    kinds = [_KINDS[kind] for kind in there]
    sizes = {"linear_attention": ours(_SIZES, config)} if DELTA_NET in kinds else {}
    return {"attention": {"layer_types": shortest_period(kinds)}, **sizes}


def config_of(model: ModelSection) -> dict[str, Any]:
    """Return the settings with the kinds of layers and the sizes of gated delta nets."""
    layers = [DELTA if each.is_linear else FULL for each in layer_pattern(model)]
    sizes = theirs(_SIZES, model.linear_attention) if DELTA in layers else {}
    return {"layer_types": layers, "attention_bias": False, **sizes}


QWEN3_NEXT = HfFamily(
    architecture=Architecture("Qwen3NextForCausalLM", "qwen3_next", DEFAULTS, {**SAME, **NO_BIAS}),
    modules={
        **MODULES,
        "linear_attn.in_proj_qkvz": tuple(f"linear_attention.{part}" for part in "qkvz"),
        "linear_attn.in_proj_ba": ("linear_attention.b", "linear_attention.a"),
    },
    tensors=TENSORS,
    head_wise=("self_attn.q_proj",),
    key_head_wise=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
    values=values_of,
    config=config_of,
    further_kinds=(DELTA,),
    has_partial_rotary=True,
)

"""Qwen3.5 (text), dense and with experts: Qwen3-Next's parts, with other projections stacked."""

from __future__ import annotations

from dataclasses import replace

from raymega.convert.huggingface.architectures import NO_BIAS, SAME, Architecture
from raymega.convert.huggingface.families.family import HfFamily
from raymega.convert.huggingface.families.qwen3_next import (
    DEFAULTS,
    DELTA,
    DENSE_DEFAULTS,
    MODULES,
    TENSORS,
    config_of,
    values_of,
)

QWEN3_5 = HfFamily(
    architecture=Architecture(
        "Qwen3_5ForCausalLM",
        "qwen3_5",
        {**DENSE_DEFAULTS, "num_key_value_heads": 4},
        {**SAME, **NO_BIAS},
    ),
    modules={
        **MODULES,
        "linear_attn.in_proj_qkv": tuple(f"linear_attention.{part}" for part in "qkv"),
        **{f"linear_attn.in_proj_{part}": (f"linear_attention.{part}",) for part in "zba"},
    },
    tensors=TENSORS,
    head_wise=("self_attn.q_proj",),
    values=values_of,
    config=config_of,
    further_kinds=(DELTA,),
    has_partial_rotary=True,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    # every block has experts, so that no dense width is said
    architecture=Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5",
        {**DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512},
        {
            **SAME,
            **NO_BIAS,
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ((), []),
            "norm_topk_prob": (True,),
        },
    ),
)

"""Qwen3.5 (text): the dense network of Qwen3-Next's parts, with other projections stacked."""

from __future__ import annotations

from raymega.convert.huggingface.architectures import NO_BIAS, SAME, Architecture
from raymega.convert.huggingface.families.family import HfFamily
from raymega.convert.huggingface.families.qwen3_next import (
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

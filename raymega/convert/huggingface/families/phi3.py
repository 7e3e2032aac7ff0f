"""Phi-3 and Phi-4-mini: Llama with stacked projections, a window, and partial RoPE; without LongRoPE."""

from __future__ import annotations

from raymega.convert.huggingface.architectures import LLAMA_DEFAULTS, SAME, Architecture
from raymega.convert.huggingface.families.family import HfFamily

PHI3 = HfFamily(
    architecture=Architecture(
        "Phi3ForCausalLM", "phi3",
        {**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, SAME,
    ),
    modules={
        "self_attn.qkv_proj": ("attention.q", "attention.k", "attention.v"),
        "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
    },
    layer_types=lambda _: ("sliding_attention",),
    writes_layer_types=False,
    has_partial_rotary=True,
    ropes=("default",),
)  # fmt: skip

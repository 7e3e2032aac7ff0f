"""GPT-NeoX and Pythia: parallel attention and feed-forward layer, LayerNorm, biases, partial RoPE."""

from __future__ import annotations

from raymega.convert.huggingface.architectures import Architecture
from raymega.convert.huggingface.families.family import HfFamily

GPT_NEOX = HfFamily(
    architecture=Architecture(
        "GPTNeoXForCausalLM", "gpt_neox",
        {
            "hidden_act": "gelu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "initializer_range": 0.02, "partial_rotary_factor": 0.25,
        },
        {
            "hidden_act": ("gelu",), "use_parallel_residual": (None, True), "attention_bias": (None, True),
        },
    ),
    prefix="gpt_neox.layers",
    outer={
        "gpt_neox.embed_in": ("embedding.tokens",),
        "gpt_neox.final_layer_norm": ("final_norm",),
        "embed_out": ("head",),
    },
    modules={
        "attention.query_key_value": ("attention.q", "attention.k", "attention.v"),
        "attention.dense": ("attention.out",),
        "mlp.dense_h_to_4h": ("mlp.up",),
        "mlp.dense_4h_to_h": ("mlp.down",),
    },
    head_wise=("attention.query_key_value",),
    renames={
        "layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor",
        "rotary_emb_base": "rope_theta",
    },
    config=lambda _: {"hidden_act": "gelu", "use_parallel_residual": True, "attention_bias": True},
    has_partial_rotary=True,
)  # fmt: skip

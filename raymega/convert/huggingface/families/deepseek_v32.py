"""DeepSeek-V3.2: V3 with an indexer in each layer, whose weights are carried; all tokens are attended to."""

from __future__ import annotations

from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import (
    ARCHITECTURES,
    LATENT_SIZES,
    Architecture,
    Config,
    alike,
    ours,
    theirs,
    unlike,
)
from raymega.convert.huggingface.families.family import HfFamily
from raymega.errors import ConfigError

INDEXED = "indexed_attention"
_SIZES = alike("index_n_heads", "index_head_dim", "index_topk")
_V3 = ARCHITECTURES["deepseek_v3"]
_DEFAULTS = {
    **_V3.defaults, "first_k_dense_replace": 3, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
    "max_position_embeddings": 163840, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
}  # fmt: skip


def _blocks(dense: int, count: int) -> list[str]:
    return ["dense" if layer < dense else "sparse" for layer in range(count)]


def _values(config: Config) -> dict[str, Any]:
    dense, count = config["first_k_dense_replace"], config["num_hidden_layers"]
    # a list wins in transformers; ours is the number at the front
    listed = config.get("mlp_layer_types")
    if listed and list(listed) != _blocks(dense, count):
        rule = (
            f"the first first_k_dense_replace={dense} blocks are dense, and all others have experts"
        )
        raise ConfigError(unlike(f"mlp_layer_types={list(listed)}", rule))
    return {"mla": {**ours(LATENT_SIZES, config), **ours(_SIZES, config)}}


def _config(model: ModelSection) -> dict[str, Any]:
    dense = model.moe.first_k_dense_replace if model.moe.num_experts else model.num_layers
    return {
        **theirs(_SIZES, model.mla),
        "layer_types": [INDEXED] * model.num_layers,
        "mlp_layer_types": _blocks(dense, model.num_layers),
    }


DEEPSEEK_V32 = HfFamily(
    architecture=Architecture("DeepseekV32ForCausalLM", "llama", _DEFAULTS, _V3.wanted),
    modules={
        f"self_attn.indexer.{theirs}": (f"attention.indexer.{ours}",)
        for theirs, ours in {
            "wq_b": "q_up", "wk": "k", "k_norm": "k_norm", "weights_proj": "head_weights",
        }.items()
    },
    values=_values,
    config=_config,
    further_kinds=(INDEXED,),
)  # fmt: skip

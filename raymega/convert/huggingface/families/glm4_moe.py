"""GLM-4.5 and 4.6: biases of queries, keys and values, partial RoPE, and experts as in DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import LLAMA_DEFAULTS, SAME, Architecture, Config
from raymega.convert.huggingface.families.family import HfFamily

DEFAULTS = {
    **LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5, "use_qk_norm": False, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
    "attention_bias": False,
}  # fmt: skip


def _values(config: Config) -> dict[str, Any]:
    return {"attention": {"qk_norm": "family" if config["use_qk_norm"] else "none"}}


def _config(model: ModelSection) -> dict[str, Any]:
    return {
        "attention_bias": True,
        "use_qk_norm": model.attention.qk_norm == "family",
        "num_nextn_predict_layers": model.num_nextn_predict_layers,
    }


GLM4_MOE = HfFamily(
    architecture=Architecture(
        "Glm4MoeForCausalLM", "glm4_moe", DEFAULTS, {**SAME, "attention_bias": (True,)}
    ),
    modules={
        f"mlp.shared_experts.{name}_proj": (f"moe.shared.{name}",)
        for name in ("gate", "up", "down")
    },
    values=_values,
    config=_config,
    has_partial_rotary=True,
)

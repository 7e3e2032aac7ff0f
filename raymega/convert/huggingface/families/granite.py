"""Granite 3: Llama with constant factors on embedding, scores, residual sums and logits."""

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
from raymega.convert.huggingface.families.family import HfFamily, scale_of

_FACTORS = {
    "embedding_multiplier": "embedding",
    "residual_multiplier": "residual",
    "logits_scaling": "logits_scaling",
}
_ONES = dict.fromkeys((*_FACTORS, "attention_multiplier"), 1.0)


def _values(config: Config) -> dict[str, Any]:
    # the factor on scores is 1 / sqrt(width) in other families
    width = config["hidden_size"] // config["num_attention_heads"]
    factors = {name: float(value) for name, value in ours(_FACTORS, config).items()}
    scale = scale_of(float(config["attention_multiplier"]), width)
    return {"multipliers": factors, "attention": {"score_scale": scale}}


def _config(model: ModelSection) -> dict[str, Any]:
    scale = model.attention.score_scale or model.head_width**-0.5
    return {**theirs(_FACTORS, model.multipliers), "attention_multiplier": scale}


GRANITE = HfFamily(
    architecture=Architecture(
        "GraniteForCausalLM", "granite", {**LLAMA_DEFAULTS, **_ONES}, {**SAME, **NO_BIAS}
    ),
    values=_values,
    config=_config,
)

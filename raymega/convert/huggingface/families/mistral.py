"""Llama with layers of its own kinds: Mistral's have windows, some of SmolLM3's have no positions."""

from __future__ import annotations

from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import (
    ARCHITECTURES,
    LLAMA_DEFAULTS,
    NO_BIAS,
    SAME,
    Architecture,
    Config,
)
from raymega.convert.huggingface.families.family import HfFamily, shortest_period
from raymega.plan.layers.layer_pattern import layer_pattern

MISTRAL = HfFamily(
    architecture=ARCHITECTURES["mistral"],
    layer_types=lambda _: ("sliding_attention",),
    writes_layer_types=False,
)

_SMOLLM3_DEFAULTS = {
    **LLAMA_DEFAULTS, "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
    "rope_theta": 2000000.0, "no_rope_layer_interval": 4,
}  # fmt: skip


def _values(config: Config) -> dict[str, Any]:
    layers, every = range(config["num_hidden_layers"]), config["no_rope_layer_interval"]
    # a 1 is a layer with RoPE; a list wins over the interval
    turned = config.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in layers]
    kinds = ["full" if each else "no_positions" for each in turned]
    return {"attention": {"layer_types": shortest_period(kinds)}}


def _config(model: ModelSection) -> dict[str, Any]:
    kinds = [each.attention for each in layer_pattern(model)]
    return {"no_rope_layers": [int(kind != "no_positions") for kind in kinds]}


SMOLLM3 = HfFamily(
    architecture=Architecture(
        "SmolLM3ForCausalLM", "llama", _SMOLLM3_DEFAULTS,
        {**SAME, **NO_BIAS, "use_sliding_window": (None, False)},
    ),
    values=_values,
    config=_config,
)  # fmt: skip

"""Refuses a config.json whose layers or experts are too many to be listed, before anything lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raymega.errors import Fault
from raymega.plan.validation.rule import MAX_LISTED

MAX_BLOCKS = 1_000_000
"""Most experts of all layers together: 42 times those of the largest published models."""
LAYERS = (
    "num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "num_encoder_layers",
    "num_transformer_layers", "num_nextn_predict_layers", "depth",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts")
PATTERNS = (
    "sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval", "decoder_sparse_step",
    "no_rope_layer_interval", "interleave_moe_layer_step",
)  # fmt: skip
REMEDY = "take config.json from the same place as the weights"


def listed_size_faults(config: Mapping[str, Any], path: str = "") -> Iterator[Fault]:
    """Yield a fault for each number of layers or experts that is too large to be enumerated.

    Args:
        config: Content of config.json, or a section of it.
        path: Keys of the section, each with a dot behind it.
    """
    for key in (*LAYERS, *EXPERTS, *PATTERNS):
        if _number(config, key) > MAX_LISTED:
            yield Fault(
                fact=f"config.json has {path}{key}={config[key]}",
                rule=f"layers and experts are listed one by one, for at most {MAX_LISTED:,} of them",
                remedy=REMEDY,
            )
    # Neither is too large alone.
    layers, experts = (
        max((_number(config, key) for key in keys), default=0) for keys in (LAYERS, EXPERTS)
    )
    if max(layers, experts) <= MAX_LISTED and layers * experts > MAX_BLOCKS:
        yield Fault(
            fact=f"config.json has {layers} layers of {experts} experts",
            rule=f"experts are listed layer by layer, for at most {MAX_BLOCKS:,} of them",
            remedy=REMEDY,
        )
    for key, section in config.items():
        if isinstance(section, Mapping) and key.endswith("_config"):
            yield from listed_size_faults(section, f"{path}{key}.")


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    # What is of another kind is told by who reads it.
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0

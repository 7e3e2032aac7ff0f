"""OpenELM (Mehta et al. 2024): Qwen3's parts, with numbers of heads and widths that grow with the layer.

transformers has no class for it: its repositories bring their own code, whose names these are.
"""

from __future__ import annotations

from functools import reduce
from math import gcd
from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import Architecture, Config, ours, theirs, unlike
from raymega.convert.huggingface.families.family import HfFamily, shortest_period
from raymega.errors import ConfigError, counted
from raymega.plan.layers.layer_pattern import sized_model

_SETTINGS = {
    "vocab_size": "vocab_size",
    "initializer_range": "initializer_range",
    "model_dim": "hidden_size",
    "num_transformer_layers": "num_layers",
    "head_dim": "head_dim",
    "rope_freq_constant": "rope_theta",
    "rope_max_length": "max_positions",
    "share_input_output_layers": "tie_word_embeddings",
}
_DEFAULTS = {
    "rope_freq_constant": 10000, "rope_max_length": 4096, "share_input_output_layers": True, "initializer_range": 0.02,
    "ffn_dim_divisor": 256, "ffn_with_glu": True, "normalize_qk_projections": True, "activation_fn_name": "swish",
    "normalization_layer_name": "rms_norm",
}  # fmt: skip
_WANTED = {
    "ffn_with_glu": (True,), "normalize_qk_projections": (True,), "activation_fn_name": ("swish",),
    "normalization_layer_name": ("rms_norm",),
}  # fmt: skip
EPS = 1e-6
"""Added to the variance by its norms, whatever config.json says."""


def _width(multiplier: float, width: int, divisor: int) -> int:
    """Return the multiple of ``divisor`` near ``multiplier`` times ``width``, as its code rounds."""
    exact = multiplier * width
    near = max(divisor, int(exact + divisor / 2) // divisor * divisor)
    return near + divisor if near < 0.9 * exact else near


def _values(config: Config) -> dict[str, Any]:
    count = config["num_transformer_layers"]
    faults = [
        unlike(
            f"{name} of {counted(len(config[name]), 'layer')}", f"num_transformer_layers={count}"
        )
        for name in ("ffn_multipliers", "num_query_heads", "num_kv_heads")
        if len(config[name]) != count
    ]
    if faults:
        raise ConfigError(*faults)
    # widths are told as rounded multiples of the model's
    divisor = config["ffn_dim_divisor"]
    widths = [_width(each, config["model_dim"], divisor) for each in config["ffn_multipliers"]]
    listed: dict[str, Any] = {
        "ffn_hidden_size": widths,
        "num_heads": config["num_query_heads"],
        "num_kv_heads": config["num_kv_heads"],
    }
    return {
        **ours(_SETTINGS, config),
        **{name: max(sizes) for name, sizes in listed.items()},
        "layer_sizes": {name: shortest_period(sizes) for name, sizes in listed.items()},
        "norm_eps": EPS,
    }


def _config(model: ModelSection) -> dict[str, Any]:
    layers = [sized_model(model, layer) for layer in range(model.num_layers)]
    # the largest common divisor gives the widths back exactly
    widths = [each.ffn_hidden_size for each in layers]
    return {
        **theirs(_SETTINGS, model),
        "head_dim": model.head_width,
        "num_query_heads": [each.num_heads for each in layers],
        "num_kv_heads": [each.kv_heads for each in layers],
        "ffn_multipliers": [width / model.hidden_size for width in widths],
        "ffn_dim_divisor": reduce(gcd, widths),
        **{name: values[0] for name, values in _WANTED.items()},
    }


OPENELM = HfFamily(
    architecture=Architecture("OpenELMForCausalLM", "qwen3", _DEFAULTS, _WANTED),
    prefix="transformer.layers",
    outer={
        "transformer.token_embeddings": ("embedding.tokens",),
        "transformer.norm": ("final_norm",),
        "lm_head": ("head",),
    },
    modules={
        "attn_norm": ("attention_norm",),
        "attn.qkv_proj": ("attention.q", "attention.k", "attention.v"),
        "attn.q_norm": ("attention.q_norm",),
        "attn.k_norm": ("attention.k_norm",),
        "attn.out_proj": ("attention.out",),
        "ffn_norm": ("mlp_norm",),
        "ffn.proj_1": ("mlp.gate", "mlp.up"),
        "ffn.proj_2": ("mlp.down",),
    },
    values=_values,
    config=_config,
    owns_settings=True,
)

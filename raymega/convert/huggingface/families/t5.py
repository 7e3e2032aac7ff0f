"""T5 and its later form, T5 1.1 with a gate and a head of its own, which Flan-T5 has too: an encoder and a decoder.

Their layers are numbered by side, ours through both. The tables of relative positions belong to each side's first layer there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import (
    Architecture,
    Config,
    alike,
    ours,
    theirs,
    unlike,
)
from raymega.convert.huggingface.families.family import HfFamily, Names
from raymega.errors import ConfigError
from raymega.plan.layers.encoder_decoder import is_decoder_layer

SHARED = "shared.weight"
T5_COPIES: Mapping[str, str] = {
    "encoder.embed_tokens.weight": SHARED,
    "decoder.embed_tokens.weight": SHARED,
}
"""Copies of the token table that old files hold, and the original."""
PUBLISHED_DECODER_LENGTH = 114
"""Tokens of the decoder in the published training, for a job that begins with imported weights."""
_FORMS = {"relu": "t5", "gated-gelu": "t5_v1_1"}
"""Families by the kind of feed-forward layer."""
_ACTIVATIONS = {"relu": "relu", "gated-gelu": "gelu_new"}
"""Nonlinearity of each kind, which newer files say by a key that wins over the kind."""
_SETTINGS = {
    **alike("vocab_size", "tie_word_embeddings", "num_heads"),
    "d_model": "hidden_size",
    "d_ff": "ffn_hidden_size",
    "n_positions": "max_positions",
    "layer_norm_epsilon": "norm_eps",
}
_RELATIVE = alike("relative_attention_num_buckets", "relative_attention_max_distance")
_DEFAULTS = {
    "feed_forward_proj": "relu", "layer_norm_epsilon": 1e-6, "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128, "tie_word_embeddings": True, "d_kv": 64, "n_positions": 2048,
}  # fmt: skip
_WANTED: Mapping[str, tuple[object, ...]] = {
    "feed_forward_proj": tuple(_FORMS),
    "is_encoder_decoder": (None, True),
    "quantization_config": (None,),
}


def _values(config: Config) -> dict[str, Any]:
    kind, encoder = config["feed_forward_proj"], config["num_layers"]
    plain, is_gated = _ACTIVATIONS[kind], kind.startswith("gated")
    for name, value in {"dense_act_fn": plain, "is_gated_act": is_gated}.items():
        if config.get(name, value) != value:
            raise ConfigError(
                unlike(
                    f"{name}={config[name]!r} with feed_forward_proj={kind!r}",
                    f"it is {value!r} there",
                )
            )
    derived = config["d_kv"] * config["num_heads"] == config["d_model"]
    return {
        **ours(_SETTINGS, config),
        # transformers 5 writes true whatever the file's head is, and says by a key of its own which form it is
        "tie_word_embeddings": config.get("scale_decoder_outputs", config["tie_word_embeddings"]),
        "family": _FORMS[kind],
        "head_dim": "hidden_size / num_heads" if derived else config["d_kv"],
        "num_layers": encoder + config.get("num_decoder_layers", encoder),
        "encoder_decoder": {
            **{name: config[name] for name in _RELATIVE},
            "num_encoder_layers": encoder,
            "decoder_seq_len": PUBLISHED_DECODER_LENGTH,
        },
    }


def _config(model: ModelSection) -> dict[str, Any]:
    forms = {family: form for form, family in _FORMS.items()}
    section = model.encoder_decoder
    return {
        **theirs(_SETTINGS, model),
        **{name: getattr(section, name) for name in _RELATIVE},
        "d_kv": model.head_width,
        "feed_forward_proj": forms[model.family],
        "num_layers": section.num_encoder_layers,
        "num_decoder_layers": model.num_layers - section.num_encoder_layers,
        "is_encoder_decoder": True,
        "scale_decoder_outputs": model.tie_word_embeddings,
    }


def _block(model: ModelSection, layer: int) -> Names:
    """Return their names and ours of the modules of block ``layer``."""
    own, at = model.encoder_decoder.num_encoder_layers, f"layers.{layer}"
    if not is_decoder_layer(model, layer):
        names = _part(f"encoder.block.{layer}", 0, "SelfAttention", f"{at}.attention")
        names |= _feed_forward(f"encoder.block.{layer}.layer.1", at, model)
        if layer + 1 == own:
            names["encoder.final_layer_norm"] = (f"{at}.encoder_norm",)
        return names
    there = f"decoder.block.{layer - own}"
    names = _part(there, 0, "SelfAttention", f"{at}.attention")
    names |= _part(there, 1, "EncDecAttention", f"{at}.cross_attention")
    return names | _feed_forward(f"{there}.layer.2", at, model)


def _part(there: str, number: int, kind: str, here: str) -> dict[str, tuple[str, ...]]:
    module = f"{there}.layer.{number}"
    names: dict[str, tuple[str, ...]]
    names = {f"{module}.{kind}.{part}": (f"{here}.{part}",) for part in ("q", "k", "v")}
    names[f"{module}.{kind}.o"] = (f"{here}.out",)
    names[f"{module}.layer_norm"] = (f"{here}_norm",)
    return names


def _feed_forward(there: str, at: str, model: ModelSection) -> dict[str, tuple[str, ...]]:
    inner, is_gated = f"{there}.DenseReluDense", model.family == "t5_v1_1"
    gate = {f"{inner}.wi_0": (f"{at}.mlp.gate",)} if is_gated else {}
    return {
        f"{there}.layer_norm": (f"{at}.mlp_norm",),
        **gate,
        f"{inner}.wi{'_1' if is_gated else ''}": (f"{at}.mlp.up",),
        f"{inner}.wo": (f"{at}.mlp.down",),
    }


T5 = HfFamily(
    architecture=Architecture("T5ForConditionalGeneration", "t5", _DEFAULTS, _WANTED),
    outer={
        "shared": ("embedding.tokens",),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": ("embedding.encoder_positions",),
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias": ("embedding.decoder_positions",),
        "decoder.final_layer_norm": ("final_norm",),
        "lm_head": ("head",),
    },
    blocks=_block,
    values=_values,
    config=_config,
    owns_settings=True,
    tokens={"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
)  # fmt: skip

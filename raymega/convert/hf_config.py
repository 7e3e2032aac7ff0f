"""Hugging Face's config.json and our model section: each from the other, or what is in the way.

What it does not know it refuses: a setting that changes the network must not be dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from raymega.config.schema import ModelSection
from raymega.errors import ConfigError, Fault, raise_faults

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What transformers calls a family, and the settings by which it could differ from ours.

    Attributes:
        name: Of the class with a language-model head.
        defaults: Values that a config.json may leave out.
        wanted: Settings that ours is equal to at these values only; None stands for "left out".
    """

    name: str
    defaults: Config
    wanted: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


_SAME = {"hidden_act": ("silu",), "mlp_bias": (None, False), "quantization_config": (None,)}
_LLAMA_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_QWEN_DEFAULTS = {**_LLAMA_DEFAULTS, "max_position_embeddings": 32768}
_NO_WINDOW = {"use_sliding_window": (None, False)}
ARCHITECTURES = {
    "gpt2": Architecture(
        name="GPT2LMHeadModel",
        defaults={
            "activation_function": "gelu_new",
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
        wanted={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (None, True),
            "scale_attn_by_inverse_layer_idx": (None, False),
            "add_cross_attention": (None, False),
            "quantization_config": (None,),
        },
    ),
    "llama": Architecture(
        name="LlamaForCausalLM",
        defaults=_LLAMA_DEFAULTS,
        wanted={**_SAME, "attention_bias": (None, False)},
    ),
    "qwen2": Architecture(
        name="Qwen2ForCausalLM", defaults=_QWEN_DEFAULTS, wanted={**_SAME, **_NO_WINDOW}
    ),
    "qwen3": Architecture(
        name="Qwen3ForCausalLM",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        wanted={**_SAME, **_NO_WINDOW, "attention_bias": (None, False)},
    ),
}


def model_from(config: Config) -> ModelSection:
    """The model section that builds the network of ``config``.

    Raises:
        ConfigError: With everything about it that ours cannot express.
    """
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise ConfigError(_unknown(config))
    architecture = ARCHITECTURES[family]
    whole = {**architecture.defaults, **{k: v for k, v in config.items() if v is not None}}
    raise_faults(ConfigError, _difference_faults(whole, architecture))
    try:
        values = _gpt2_values(whole) if family == "gpt2" else _llama_values(whole)
        return ModelSection.model_validate({"family": family, **values})
    except KeyError as error:
        raise ConfigError(_incomplete(f"has no {error.args[0]}")) from error
    except ValidationError as error:
        raise ConfigError(
            *[
                _incomplete(f"gives model.{'.'.join(map(str, at['loc']))}={at['input']!r}, but "
                            f"{at['msg'].lower()}")
                for at in error.errors()
            ]
        ) from error  # fmt: skip


def config_from(model: ModelSection, *, dtype: str, carried: Config) -> dict[str, Any]:
    """The config.json of ``model``.

    Args:
        model: The model.
        dtype: Format of its weights.
        carried: The config.json that it came with, or nothing: special tokens and settings that
            are not ours are kept.
    """
    write = _gpt2_config if model.family == "gpt2" else _llama_config
    replaced = {"rope_theta", "rope_scaling", "torch_dtype"}
    kept = {key: value for key, value in carried.items() if key not in replaced}
    return {
        **kept,
        "architectures": [ARCHITECTURES[model.family].name],
        "model_type": model.family,
        "dtype": dtype,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.is_embedding_tied,
        "initializer_range": model.init_std,
        **write(model),
    }


def _gpt2_values(config: Config) -> dict[str, Any]:
    width = config["n_embd"]
    return {
        "num_layers": config["n_layer"],
        "width": width,
        "num_heads": config["n_head"],
        "ffn_width": config.get("n_inner", 4 * width),
        "vocab_size": config["vocab_size"],
        "max_positions": config["n_positions"],
        "is_embedding_tied": config["tie_word_embeddings"],
        "init_std": float(config["initializer_range"]),
        "norm_eps": float(config["layer_norm_epsilon"]),
    }


def _gpt2_config(model: ModelSection) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.width,
        "n_head": model.num_heads,
        "n_inner": None if model.ffn_width == 4 * model.width else model.ffn_width,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new",
    }


def _llama_values(config: Config) -> dict[str, Any]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_width = config.get("head_dim", width // heads)
    is_plain = head_width * heads == width
    return {
        "num_layers": config["num_hidden_layers"],
        "width": width,
        "num_heads": heads,
        "num_kv_heads": "num_heads" if kv_heads == heads else kv_heads,
        "head_features": "width / num_heads" if is_plain else head_width,
        "ffn_width": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "is_embedding_tied": config["tie_word_embeddings"],
        "init_std": float(config["initializer_range"]),
        "norm_eps": float(config["rms_norm_eps"]),
        **_rope_values(_rope_of(config)),
    }


def _llama_config(model: ModelSection) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.width,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "intermediate_size": model.ffn_width,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        **_rope_config(model),
    }


def _rope_of(config: Config) -> dict[str, Any]:
    """RoPE's settings as version 5 writes them; before, they were two keys."""
    scaling = config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **scaling}
    rope |= config.get("rope_parameters") or {}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope


def _rope_values(rope: Config) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_base": float(rope["rope_theta"])}
    if rope["rope_type"] == "llama3":
        values |= {
            "rope_scaling": "llama3",
            "rope_factor": float(rope["factor"]),
            "rope_low_freq_factor": float(rope["low_freq_factor"]),
            "rope_high_freq_factor": float(rope["high_freq_factor"]),
            "rope_original_positions": int(rope["original_max_position_embeddings"]),
        }
    return values


def _rope_config(model: ModelSection) -> dict[str, Any]:
    """Both spellings, so that versions before and after 5 read the same network."""
    if model.rope_scaling == "none":
        rope: dict[str, Any] = {"rope_type": "default"}
        scaling = None
    else:
        rope = {
            "rope_type": "llama3",
            "factor": model.rope_factor,
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_positions,
        }
        scaling = rope
    return {
        "rope_theta": model.rope_base,
        "rope_scaling": scaling,
        "rope_parameters": {**rope, "rope_theta": model.rope_base},
    }


def _difference_faults(config: Config, architecture: Architecture) -> list[Fault]:
    faults = [
        _unlike(f"{key}={config.get(key)!r}", f"only {_names(values)} is built")
        for key, values in architecture.wanted.items()
        if config.get(key) not in values
    ]
    layers = set(config.get("layer_types") or ()) - {"full_attention"}
    if layers:
        faults.append(
            _unlike(f"layer_types has {', '.join(sorted(layers))}", "every layer sees all")
        )
    if architecture.name == "GPT2LMHeadModel":
        return faults
    rope = _rope_of(config)
    if rope["rope_type"] not in ("default", "llama3"):
        faults.append(_unlike(f"rope_type={rope['rope_type']!r}", "RoPE is 'default' or 'llama3'"))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        faults.append(_unlike("partial_rotary_factor", "RoPE turns whole heads"))
    return faults


def _names(values: tuple[object, ...]) -> str:
    return " or ".join("nothing" if value is None else repr(value) for value in values)


def _unlike(fact: str, rule: str) -> Fault:
    return Fault(
        fact=f"config.json has {fact}",
        rule=rule,
        remedy="convert a model without it, or add the feature to raymega/model first",
    )


def _unknown(config: Config) -> Fault:
    return Fault(
        fact=f"config.json has model_type={config.get('model_type')!r}",
        rule=f"the architectures that can be converted are {', '.join(ARCHITECTURES)}",
        remedy="convert one of those; docs/extending.md shows how a family is added",
    )


def _incomplete(fact: str) -> Fault:
    return Fault(
        fact=f"config.json {fact}",
        rule="the sizes of the network must be known",
        remedy="take config.json from the same place as the weights",
    )

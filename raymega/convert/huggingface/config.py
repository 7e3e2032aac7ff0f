"""Hugging Face's config.json and our model section: each from the other, or what is in the way.

What it does not know it refuses: a setting that changes the network must not be dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import (
    ARCHITECTURES,
    Architecture,
    Config,
    architecture_of,
)
from raymega.convert.huggingface.config_types import kind_faults
from raymega.convert.huggingface.moe_config import expert_config, expert_faults, expert_values
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.validation.registry import job_faults


def model_from(config: Config) -> ModelSection:
    """The model section that builds the network of ``config``.

    Raises:
        ConfigError: With everything about it that ours cannot express.
    """
    model = _section_of(config)
    raise_faults(ConfigError, [_unbuilt(fault) for fault in _own_faults(model)])
    return model


def _section_of(config: Config) -> ModelSection:
    """The section, of which a job file may yet be refused."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ConfigError(_unknown(config))
    architecture = ARCHITECTURES[kind]
    whole = {**architecture.defaults, **{k: v for k, v in config.items() if v is not None}}
    raise_faults(ConfigError, kind_faults(whole))
    raise_faults(ConfigError, _difference_faults(whole, architecture))
    try:
        values = _gpt2_values(whole) if kind == "gpt2" else _llama_values(whole)
        return ModelSection.model_validate({"family": architecture.family, **values})
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


def _own_faults(model: ModelSection) -> list[Fault]:
    """Whatever a job file with this section would be refused for, on one rank."""
    return job_faults({**{f"model.{name}": value for name, value in model}, "parallel.tp": 1})


def config_from(model: ModelSection, *, dtype: str, carried: Config) -> dict[str, Any]:
    """The config.json of ``model``.

    Args:
        model: The model.
        dtype: Format of its weights.
        carried: The config.json that it came with, or nothing: special tokens and settings that
            are not ours are kept.

    Raises:
        ConfigError: There is no config.json that says all of it.
    """
    config = _config_of(model, dtype=dtype, carried=carried)
    raise_faults(ConfigError, _unsaid(model, config))
    return config


def _config_of(model: ModelSection, *, dtype: str, carried: Config) -> dict[str, Any]:
    kind = architecture_of(model)
    if kind not in ARCHITECTURES:
        raise ConfigError(_unknown({"model_type": kind}))
    write = _gpt2_config if model.family == "gpt2" else _llama_config
    replaced = {"rope_theta", "rope_scaling", "torch_dtype"}
    kept = {key: value for key, value in carried.items() if key not in replaced}
    return {
        **kept,
        "architectures": [ARCHITECTURES[kind].name],
        "model_type": kind,
        "dtype": dtype,
        **_written(model, _EVERY),
        **write(model),
    }


TRAINING = ("hidden_dropout", "attention_dropout", "label_smoothing", "z_loss", "make_vocab_size_divisible_by",
            "num_nextn_predict_layers", "mtp_loss_scaling_factor", "initializer_range")  # fmt: skip
TRAINING_EXPERTS = ("router_jitter_noise", "router_dtype", "load_balancing_type", "router_aux_loss_coef", "sinkhorn_rounds",
                    "expert_bias_update_rate", "router_z_loss_coef", "capacity_factor", "token_drop_policy",
                    "pad_expert_input_to_capacity")  # fmt: skip
"""Fields that a config.json need not say: they are a matter of training alone, or of tensors."""


def _unsaid(model: ModelSection, config: Config) -> list[Fault]:
    """What a reader of ``config`` would not know of ``model``.

    What only one side has belongs to a part, such as experts, whose size then differs.
    """
    ours, theirs = _function_of(model), _function_of(_section_of(config))
    return [
        Fault(
            fact=f"model.{field}={value!r}",
            rule=f"{config['architectures'][0]} has no such thing: read back, it would be "
            f"{theirs[field]!r}",
            remedy="export it with dcp-export, which keeps raymega's names",
        )
        for field, value in ours.items()
        if field in theirs and theirs[field] != value
    ]


def _function_of(model: ModelSection) -> dict[str, Any]:
    """What decides what the model computes, by dotted path; numbers in place of words."""
    plain = model.model_dump(exclude={*TRAINING, "moe", "mla"})
    plain |= {"num_kv_heads": model.kv_heads, "head_dim": model.head_width}
    experts = model.moe.model_dump(exclude={*TRAINING_EXPERTS})
    experts["intermediate_size"] = model.expert_width
    if not model.moe.num_experts:
        experts = {"num_experts": 0}
    if model.moe.n_group == 1:  # then a group's score chooses nothing
        experts.pop("group_score", None)
    if model.rope_scaling == "none":
        plain = {name: value for name, value in plain.items() if not _is_of_scaling(name)}
    parts = {"moe": experts, "mla": model.mla.model_dump()}
    inner = {f"{part}.{name}": v for part, fields in parts.items() for name, v in fields.items()}
    return plain | inner


def _is_of_scaling(field: str) -> bool:
    return field.startswith("rope_") and field not in ("rope_theta", "rope_scaling")


_EVERY = {
    "vocab_size": "vocab_size", "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}  # fmt: skip
_GPT2 = {
    "n_embd": "hidden_size", "n_layer": "num_layers", "n_head": "num_heads", "n_positions": "max_positions",
    "layer_norm_epsilon": "norm_eps",
}  # fmt: skip
_LLAMA = {
    "hidden_size": "hidden_size", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size", "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
}  # fmt: skip
_LATENT = {
    name: name for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
}
_ROPE = {
    "llama3": {
        "factor": "rope_factor", "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_positions",
    },
    "yarn": {
        "factor": "rope_factor", "beta_slow": "rope_beta_slow", "beta_fast": "rope_beta_fast",
        "original_max_position_embeddings": "rope_original_positions", "mscale": "rope_mscale",
        "mscale_all_dim": "rope_mscale_all_dim",
    },
}  # fmt: skip
"""Their settings that say what ours say."""


def _read(config: Config, names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: config[theirs] for theirs, ours in names.items()}


def _written(section: BaseModel, names: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: getattr(section, ours) for theirs, ours in names.items()}


def _gpt2_values(config: Config) -> dict[str, Any]:
    values = _read(config, _GPT2 | _EVERY)
    return {**values, "ffn_hidden_size": config.get("n_inner", 4 * values["hidden_size"])}


def _gpt2_config(model: ModelSection) -> dict[str, Any]:
    width = model.ffn_hidden_size
    return {
        **_written(model, _GPT2),
        "n_inner": None if width == 4 * model.hidden_size else width,
        "activation_function": "gelu_new",
    }


def _llama_values(config: Config) -> dict[str, Any]:
    values = _read(config, _LLAMA | _EVERY)
    width, heads = values["hidden_size"], values["num_heads"]
    has_latents = "kv_lora_rank" in config
    kv_heads = heads if has_latents else config.get("num_key_value_heads", heads)
    head_width = width // heads if has_latents else config.get("head_dim", width // heads)
    is_plain = head_width * heads == width or has_latents
    return {
        **values,
        "num_kv_heads": "num_heads" if kv_heads == heads else kv_heads,
        "head_dim": "hidden_size / num_heads" if is_plain else head_width,
        **_rope_values(_rope_of(config)),
        **expert_values(config),
        **(_latent_values(config) if has_latents else {}),
    }


def _latent_values(config: Config) -> dict[str, Any]:
    return {"mla": {**_read(config, _LATENT), "q_lora_rank": config.get("q_lora_rank", 0)}}


def _latent_config(model: ModelSection) -> dict[str, Any]:
    return {
        **_written(model.mla, _LATENT),
        "q_lora_rank": model.mla.q_lora_rank or None,
        "head_dim": model.mla.qk_rope_head_dim,
        "num_nextn_predict_layers": model.num_nextn_predict_layers,
    }


def _llama_config(model: ModelSection) -> dict[str, Any]:
    return {
        **_written(model, _LLAMA),
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        **_rope_config(model),
        **expert_config(model),
        **(_latent_config(model) if model.mla.kv_lora_rank else {}),
    }


def _rope_of(config: Config) -> dict[str, Any]:
    """RoPE's settings as version 5 writes them; before, they were two keys."""
    scaling = config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **scaling}
    rope |= config.get("rope_parameters") or {}
    rope = {name: value for name, value in rope.items() if value is not None}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope


def _rope_values(rope: Config) -> dict[str, Any]:
    kind = rope["rope_type"]
    if kind == "yarn":
        has_both = rope.get("mscale") and rope.get("mscale_all_dim")
        rope = {
            **rope,
            "beta_slow": rope.get("beta_slow") or 1,
            "beta_fast": rope.get("beta_fast") or 32,
            "mscale": rope["mscale"] if has_both else 1.0,
            "mscale_all_dim": rope.get("mscale_all_dim") or 0,
        }
    scaling = {"rope_scaling": kind, **_read(rope, _ROPE[kind])} if kind in _ROPE else {}
    return {"rope_theta": rope["rope_theta"], **scaling}


def _rope_config(model: ModelSection) -> dict[str, Any]:
    """Both spellings, so that versions before and after 5 read the same network."""
    kind, rope = model.rope_scaling, {"rope_type": "default"}
    if kind != "none":
        rope = {"rope_type": kind, **_written(model, _ROPE[kind])}
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": None if kind == "none" else rope,
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
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
    if rope["rope_type"] not in ("default", "llama3", "yarn"):
        rule = "RoPE is 'default', 'llama3' or 'yarn'"
        faults.append(_unlike(f"rope_type={rope['rope_type']!r}", rule))
    if rope["rope_type"] == "yarn":
        faults += _yarn_faults(rope, has_latents="kv_lora_rank" in config)
    faults += expert_faults(config, _unlike)
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        faults.append(_unlike("partial_rotary_factor", "RoPE turns whole heads"))
    return faults


def _yarn_faults(rope: Config, *, has_latents: bool) -> list[Fault]:
    """Forms of YaRN that ours has no switch for."""
    scales_all = bool(rope.get("mscale_all_dim"))
    forms = {
        "an attention_factor": rope.get("attention_factor") is not None,
        "no truncation": rope.get("truncate") is False,
        "no factor": rope.get("factor") is None,
        "mscale_all_dim without mscale": scales_all and not rope.get("mscale"),
        "mscale_all_dim without latent attention": scales_all and not has_latents,
    }
    rule = "yarn is as its paper or DeepSeek has it"
    return [_unlike(f"yarn with {form}", rule) for form, is_there in forms.items() if is_there]


def _names(values: tuple[object, ...]) -> str:
    return " or ".join("nothing" if value is None else repr(value) for value in values)


def _unlike(fact: str, rule: str) -> Fault:
    return Fault(
        fact=f"config.json has {fact}",
        rule=rule,
        remedy="convert a model without it, or add the feature to raymega/model first",
    )


def _unbuilt(fault: Fault) -> Fault:
    return replace(
        fault,
        fact=f"config.json gives {fault.fact}",
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

"""Translates between Hugging Face's config.json and the model section, or says why it cannot.

A setting that would change the network and that raymega does not know is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from raymega.config.schema import MlaSection, ModelSection
from raymega.convert.huggingface.architectures import (
    ARCHITECTURES,
    NULL_IS_A_VALUE,
    Architecture,
    Config,
    alike,
    architecture_of,
    ours,
    theirs,
)
from raymega.convert.huggingface.config_types import kind_faults
from raymega.convert.huggingface.moe_config import expert_config, expert_faults, expert_values
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.validation.registry import job_faults

ADD_IT = "convert a model without it, or add the feature to raymega/model first"


def model_from(config: Config) -> ModelSection:
    """Return the model section that builds the network of ``config``.

    Raises:
        ConfigError: Settings cannot be expressed by a model section; all of them are named.
    """
    model = _section_of(config)
    # those for which a job file with this section would be refused on one rank
    own = job_faults({**{f"model.{name}": value for name, value in model}, "parallel.tp": 1})
    raise_faults(
        ConfigError,
        [replace(each, fact=f"config.json gives {each.fact}", remedy=ADD_IT) for each in own],
    )
    return model


def _section_of(config: Config) -> ModelSection:
    """Return the model section of ``config``, before the rules of job files are applied to it."""
    # A known architecture, and only settings of it that raymega reproduces.
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ConfigError(_unknown(config))
    architecture = ARCHITECTURES[kind]
    stated = {k: v for k, v in config.items() if v is not None or k in NULL_IS_A_VALUE}
    whole = {k: v for k, v in {**architecture.defaults, **stated}.items() if v is not None}
    raise_faults(ConfigError, kind_faults(whole))
    raise_faults(ConfigError, _difference_faults(whole, architecture))
    # From here on an alias has its first name.
    whole["model_type"] = kind = architecture.alias_of or kind
    # Values of the fields; what is missing or out of range is told in config.json's words.
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


def config_from(model: ModelSection, *, dtype: str, carried: Config) -> dict[str, Any]:
    """Return the config.json of ``model``.

    Args:
        model: Model section to translate.
        dtype: Number format of the weights.
        carried: Content of the config.json that the model was imported with, or an empty dict. Its
            settings that do not describe the network, such as special tokens, are kept.

    Raises:
        ConfigError: No config.json of these architectures describes the whole model.
    """
    config = _config_of(model, dtype=dtype, carried=carried)
    raise_faults(ConfigError, _unsaid(model, config))
    return config


def _config_of(model: ModelSection, *, dtype: str, carried: Config) -> dict[str, Any]:
    kind = architecture_of(model)
    if kind not in ARCHITECTURES:
        raise ConfigError(_unknown({"model_type": kind}))
    write = _gpt2_config if model.family == "gpt2" else _llama_config
    # Written anew or under another name below, where a carried value could contradict it; and code that
    # the folder does not hold.
    replaced = {"rope_theta", "rope_scaling", "torch_dtype", "auto_map"}
    kept = {key: value for key, value in carried.items() if key not in replaced}
    return {
        **kept,
        "architectures": [ARCHITECTURES[kind].name],
        "model_type": kind,
        "dtype": dtype,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.initializer_range,
        **write(model),
    }


TRAINING = ("hidden_dropout", "attention_dropout", "label_smoothing", "z_loss", "make_vocab_size_divisible_by",
            "num_nextn_predict_layers", "mtp_loss_scaling_factor", "initializer_range")  # fmt: skip
TRAINING_EXPERTS = ("router_jitter_noise", "router_dtype", "load_balancing_type", "router_aux_loss_coef", "sinkhorn_rounds",
                    "expert_bias_update_rate", "router_z_loss_coef", "capacity_factor", "token_drop_policy",
                    "pad_expert_input_to_capacity")  # fmt: skip
"""Fields that a config.json need not express: they affect training only, or are visible in tensors."""


def _unsaid(model: ModelSection, config: Config) -> list[Fault]:
    """Return the faults of fields of ``model`` that are lost when ``config`` is read back."""
    # A field that only one side has belongs to a part, such as experts, whose size then differs.
    mine, read_back = _function_of(model), _function_of(_section_of(config))
    return [
        Fault(
            fact=f"model.{field}={value!r}",
            rule=f"{config['architectures'][0]} has no such thing: read back, it would be "
            f"{read_back[field]!r}",
            remedy="export it with dcp-export, which keeps raymega's names",
        )
        for field, value in mine.items()
        if field in read_back and read_back[field] != value
    ]


def _function_of(model: ModelSection) -> dict[str, Any]:
    """Return the fields that determine what the model computes, by dotted path, in comparable form."""
    # Symbolic values ("num_heads") become numbers; fields without effect are left out.
    plain = model.model_dump(exclude={*TRAINING, "moe", "mla"})
    plain |= {"num_kv_heads": model.kv_heads, "head_dim": model.head_width}
    experts = model.moe.model_dump(exclude={*TRAINING_EXPERTS})
    experts["intermediate_size"] = model.expert_width
    if not model.moe.num_experts:
        experts = {"num_experts": 0}
    if model.moe.n_group == 1:  # with one group its score has no effect
        experts.pop("group_score", None)
    if model.rope_scaling == "none":
        plain = {name: value for name, value in plain.items() if not _is_of_scaling(name)}
    parts = {"moe": experts, "mla": model.mla.model_dump()}
    inner = {f"{part}.{name}": v for part, fields in parts.items() for name, v in fields.items()}
    return plain | inner


def _is_of_scaling(field: str) -> bool:
    return field.startswith("rope_") and field not in ("rope_theta", "rope_scaling")


# Settings of config.json to fields of the model section, by architecture.
_ALL = alike("vocab_size", "tie_word_embeddings", "initializer_range")
_GPT2 = {
    "n_embd": "hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "max_positions",
    "layer_norm_epsilon": "norm_eps",
}
_LLAMA = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
}
_ROPES = {
    "default": {},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_positions",
    },
    "yarn": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original_positions",
        "beta_slow": "rope_beta_slow",
        "beta_fast": "rope_beta_fast",
        "mscale": "rope_mscale",
        "mscale_all_dim": "rope_mscale_all_dim",
    },
}
"""Settings of RoPE's scaling, by ``rope_type``."""


def _gpt2_values(config: Config) -> dict[str, Any]:
    values = ours({**_GPT2, **_ALL}, config)
    return {**values, "ffn_hidden_size": config.get("n_inner", 4 * config["n_embd"])}


def _gpt2_config(model: ModelSection) -> dict[str, Any]:
    is_plain = model.ffn_hidden_size == 4 * model.hidden_size
    return {
        **theirs(_GPT2, model),
        "n_inner": None if is_plain else model.ffn_hidden_size,
        "activation_function": "gelu_new",
    }


def _llama_values(config: Config) -> dict[str, Any]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    # With latents, key-value heads and head width have no meaning of their own: take the defaults.
    has_latents = "kv_lora_rank" in config
    kv_heads = heads if has_latents else config.get("num_key_value_heads", heads)
    head_width = width // heads if has_latents else config.get("head_dim", width // heads)
    is_plain = head_width * heads == width or has_latents
    return {
        **ours({**_LLAMA, **_ALL}, config),
        "num_kv_heads": "num_heads" if kv_heads == heads else kv_heads,
        "head_dim": "hidden_size / num_heads" if is_plain else head_width,
        **_rope_values(_rope_of(config)),
        **expert_values(config),
        **({"mla": ours(alike(*MlaSection.model_fields), config)} if has_latents else {}),
    }


def _llama_config(model: ModelSection) -> dict[str, Any]:
    latents = {
        **model.mla.model_dump(),
        "q_lora_rank": model.mla.q_lora_rank or None,
        "head_dim": model.mla.qk_rope_head_dim,
        "num_nextn_predict_layers": model.num_nextn_predict_layers,
    }
    return {
        **theirs(_LLAMA, model),
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        **_rope_config(model),
        **expert_config(model),
        **(latents if model.mla.kv_lora_rank else {}),
    }


def _rope_of(config: Config) -> dict[str, Any]:
    """Return RoPE's settings in the form of transformers 5, from either form."""
    # Before version 5: rope_theta and rope_scaling. Since then: rope_parameters, which wins.
    scaling = config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **scaling}
    rope |= config.get("rope_parameters") or {}
    rope = {name: value for name, value in rope.items() if value is not None}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope


def _rope_values(rope: Config) -> dict[str, Any]:
    kind = rope["rope_type"]
    # As transformers applies YaRN: 0 or null is the default, and mscale counts only with its partner.
    if kind == "yarn":
        has_both = rope.get("mscale") and rope.get("mscale_all_dim")
        rope = {
            **rope,
            "beta_slow": rope.get("beta_slow") or 1,
            "beta_fast": rope.get("beta_fast") or 32,
            "mscale": rope["mscale"] if has_both else 1.0,
            "mscale_all_dim": rope.get("mscale_all_dim") or 0,
        }
    scaling = {"rope_scaling": kind, **ours(_ROPES[kind], rope)} if _ROPES[kind] else {}
    return {"rope_theta": rope["rope_theta"], **scaling}


def _rope_config(model: ModelSection) -> dict[str, Any]:
    """Return RoPE's settings in both forms, so that transformers before and since 5 agree."""
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    rope = {"rope_type": kind, **theirs(_ROPES[kind], model)}
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if _ROPES[kind] else None,
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
    }


def _difference_faults(config: Config, architecture: Architecture) -> Iterator[Fault]:
    # Settings that every architecture may have.
    for key, values in architecture.wanted.items():
        if config.get(key) not in values:
            yield _unlike(f"{key}={config.get(key)!r}", f"only {_names(values)} is built")
    layers = set(config.get("layer_types") or ()) - {"full_attention"}
    if layers:
        yield _unlike(f"layer_types has {', '.join(sorted(layers))}", "every layer sees all")
    if architecture.name == "GPT2LMHeadModel":
        return
    # RoPE and experts, which GPT-2 does not have.
    rope = _rope_of(config)
    if rope["rope_type"] not in _ROPES:
        rule = "RoPE is 'default', 'llama3' or 'yarn'"
        yield _unlike(f"rope_type={rope['rope_type']!r}", rule)
    if rope["rope_type"] == "yarn":
        yield from _yarn_faults(rope, has_latents="kv_lora_rank" in config)
    yield from expert_faults(config, _unlike)
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        yield _unlike("partial_rotary_factor", "RoPE turns whole heads")


def _yarn_faults(rope: Config, *, has_latents: bool) -> list[Fault]:
    """Return the faults of YaRN settings that no field of the model section expresses."""
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
    return Fault(fact=f"config.json has {fact}", rule=rule, remedy=ADD_IT)


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

"""Translates between Hugging Face's config.json and the model section, or says why it cannot.

A setting that would change the network and that raymega does not know is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from raymega.config.schema import ModelSection
from raymega.config.vision.section import VisionSection
from raymega.convert.huggingface.architectures import (
    ADD_IT,
    LATENT_SIZES,
    NULL_IS_A_VALUE,
    Architecture,
    Config,
    alike,
    architecture_of,
    ours,
    rope_of,
    theirs,
    unlike,
)
from raymega.convert.huggingface.config_types import kind_faults
from raymega.convert.huggingface.families.family import KINDS, HfFamily
from raymega.convert.huggingface.families.images.image_families import (
    IMAGE_FAMILIES,
    image_family_of,
)
from raymega.convert.huggingface.families.table import architecture, hf_family, known_types
from raymega.convert.huggingface.heads import compared_head, head_config, head_values
from raymega.convert.huggingface.listed_sizes import listed_size_faults
from raymega.convert.huggingface.moe_config import expert_config, expert_faults, expert_values
from raymega.convert.huggingface.rope_config import (
    local_rope_of,
    one_of,
    rope_config,
    rope_faults,
    rope_values,
)
from raymega.convert.quantized_weights import quantization_faults
from raymega.errors import ConfigError, Fault, counted, raise_faults
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.layers.layer_pattern import layer_pattern, sized_model
from raymega.plan.validation.registry import job_faults


def model_from(config: Config) -> ModelSection:
    """Return the model section that builds the network of ``config``.

    Raises:
        ConfigError: Settings cannot be expressed by a model section; all of them are named.
    """
    raise_faults(ConfigError, list(listed_size_faults(config)))
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
    family = IMAGE_FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return _text_section_of(config)
    with _in_words_of_config():
        text, vision = family.text_of(config), family.vision_of(config)
    return _text_section_of(text).model_copy(update={"vision": vision})


@contextmanager
def _in_words_of_config() -> Iterator[None]:
    """Tell what is missing or out of range in config.json's words."""
    try:
        yield
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
    # a value of another kind, such as a list for a number
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(_incomplete(f"has a value of another kind ({error})")) from error


def _text_section_of(config: Config) -> ModelSection:
    """Return the model section of a ``config`` without images."""
    # A known architecture, and only settings of it that raymega reproduces.
    kind = config.get("model_type")
    known = architecture(kind) if isinstance(kind, str) else None
    if known is None or not isinstance(kind, str):
        raise ConfigError(_unknown(config))
    family = hf_family(kind)
    config = family.renamed(config) if family else config
    stated = {k: v for k, v in config.items() if v is not None or k in NULL_IS_A_VALUE}
    whole = {k: v for k, v in {**known.defaults, **stated}.items() if v is not None}
    if family and not {"rope_scaling", "rope_parameters"} & stated.keys():
        whole["rope_scaling"] = family.default_rope
    raise_faults(ConfigError, kind_faults(whole))
    raise_faults(ConfigError, _difference_faults(whole, known, family))
    # From here on an alias has its first name.
    whole["model_type"] = kind = known.alias_of or kind
    # Values of the fields; what is missing or out of range is told in config.json's words.
    with _in_words_of_config():
        values = _gpt2_values(whole) if kind == "gpt2" else {}
        if kind != "gpt2" and not (family and family.owns_settings):
            values = _llama_values(whole)
        values |= family_values(whole, family) if family else {}
        values |= head_values(whole)
        return ModelSection.model_validate({"family": known.family, **values})


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
    if model.vision.is_on:
        alone = model.model_copy(update={"vision": VisionSection()})
        text = _config_of(alone, dtype=dtype, carried=carried.get("text_config") or {})
        return {**image_family_of(model.vision).config(model, text, carried), "dtype": dtype}
    kind = architecture_of(model)
    known = architecture(kind)
    if known is None:
        raise ConfigError(_unknown({"model_type": kind}))
    write = _gpt2_config if model.family == "gpt2" else _llama_config
    # Written anew or under another name below, where a carried value could contradict it; and code that
    # the folder does not hold.
    replaced = {"rope_theta", "rope_scaling", "torch_dtype", "auto_map", "quantization_config"}
    replaced |= {"problem_type"} if model.head.is_on else set()
    family = hf_family(kind)
    own = family_config(model, family) if family else {}
    settings = own if family and family.owns_settings else {**write(model), **own}
    kept = {key: value for key, value in carried.items() if key not in replaced}
    return {
        **(family.tokens if family else {}),  # their default may be beyond the vocabulary
        **kept,
        "architectures": [known.name],
        "model_type": kind,
        "dtype": dtype,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.initializer_range,
        **(family.renamed_back(settings) if family else settings),
        **head_config(model, known.name, carried),
    }


TRAINING = ("hidden_dropout", "attention_dropout", "loss", "label_smoothing", "z_loss", "make_vocab_size_divisible_by",
            "num_nextn_predict_layers", "mtp_loss_scaling_factor", "initializer_range", "freeze", "train", "neftune_noise_alpha")  # fmt: skip
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
    parts_apart = {
        "moe", "mla", "attention", "linear_attention", "multipliers", "encoder", "encoder_decoder", "head",
        "layer_sizes", "vision",
    }  # fmt: skip
    plain = model.model_dump(exclude={*TRAINING, *parts_apart})
    plain |= {"num_kv_heads": model.kv_heads, "head_dim": model.head_width}
    if not parts_of(model).is_norm_offset:  # a last norm's weight holds muP's factor on the logits
        plain.pop("mup_base_width")
    experts = model.moe.model_dump(exclude={*TRAINING_EXPERTS})
    experts["intermediate_size"] = model.expert_width
    if not model.moe.num_experts:
        experts = {"num_experts": 0}
    if model.moe.n_group == 1:  # with one group its score has no effect
        experts.pop("group_score", None)
    if model.rope_scaling == "none":
        plain = {name: value for name, value in plain.items() if not _is_of_scaling(name)}
    attention = model.attention.model_dump()
    attention["layer_types"] = [each.attention for each in layer_pattern(model)]
    parts = {
        "moe": experts, "mla": model.mla.model_dump(), "attention": attention,
        "multipliers": model.multipliers.model_dump(),
        "linear_attention": model.linear_attention.model_dump(),
        "head": compared_head(model), "layer_sizes": _sizes_by_layer(model),
        "vision": model.vision.model_dump(exclude={*image_family_of(model.vision).unsaid}),
    }  # fmt: skip
    if not parts_of(model).is_causal:  # what pairs are trained for does not show in the network
        parts["encoder"] = model.encoder.model_dump(exclude={"sentence_loss"})
        parts["encoder"]["has_pairs"] = model.encoder.has_pairs
    if parts_of(model).is_encoder_decoder:  # nor how long the texts are
        parts["encoder_decoder"] = model.encoder_decoder.model_dump(exclude={"decoder_seq_len"})
    inner = {f"{part}.{name}": v for part, fields in parts.items() for name, v in fields.items()}
    return plain | inner


def _sizes_by_layer(model: ModelSection) -> dict[str, list[int]]:
    """Return the sizes of each layer, listed or not, in comparable form."""
    layers = [sized_model(model, layer) for layer in range(model.num_layers)]
    return {
        "ffn_hidden_size": [each.ffn_hidden_size for each in layers],
        "num_heads": [each.num_heads for each in layers],
        "num_kv_heads": [each.kv_heads for each in layers],
    }


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
        **rope_values(rope_of(config)),
        **expert_values(config),
        **({"mla": ours(LATENT_SIZES, config)} if has_latents else {}),
    }


def _llama_config(model: ModelSection) -> dict[str, Any]:
    latents = {
        **theirs(LATENT_SIZES, model.mla),
        "q_lora_rank": model.mla.q_lora_rank or None,
        "head_dim": model.mla.qk_rope_head_dim,
        "num_nextn_predict_layers": model.num_nextn_predict_layers,
    }
    return {
        **theirs(_LLAMA, model),
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        **rope_config(model),
        **expert_config(model),
        **(latents if model.mla.kv_lora_rank else {}),
    }


def family_values(config: Config, family: HfFamily) -> dict[str, Any]:
    """Return the fields of the model section that only some families set."""
    values = dict(family.values(config))
    if family.owns_settings:
        return values
    attention, rope = {**family.windows(config), **values.get("attention", {})}, rope_of(config)
    if family.has_partial_rotary:
        share: Any = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        attention.setdefault("partial_rotary_factor", float(share))
    if family.has_rope_by_type and "sliding_window" in attention:
        local = local_rope_of(config)
        same = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
        attention["sliding_rope_theta"] = 0.0 if local == same else float(local["rope_theta"])
    return {**values, "attention": attention}


def family_config(model: ModelSection, family: HfFamily) -> dict[str, Any]:
    """Return the settings of config.json that only some families have."""
    if family.owns_settings:
        return family.config(model)
    rope = rope_config(model)
    share = {"partial_rotary_factor": model.attention.partial_rotary_factor}
    if family.has_partial_rotary:
        rope = {**rope, **share, "rope_parameters": {**rope["rope_parameters"], **share}}
    if family.has_rope_by_type:
        base = model.attention.sliding_rope_theta
        own = {"rope_type": "default", "rope_theta": base or model.rope_theta}
        local = own if base else rope["rope_parameters"]
        tables = {"full_attention": rope["rope_parameters"], "sliding_attention": local}
        rope = {"rope_parameters": tables, "rope_theta": None, "rope_scaling": None}
    return {**rope, **family.window_config(model), **family.config(model)}


def _difference_faults(
    config: Config, known: Architecture, family: HfFamily | None
) -> Iterator[Fault]:
    # Settings that every architecture may have.
    yield from quantization_faults(config)
    for key, values in known.wanted.items():
        if config.get(key) not in values:
            yield unlike(f"{key}={config.get(key)!r}", f"only {one_of(values)} is built")
    kinds = KINDS if family and family.layer_types else {"full_attention"}
    further = family.further_kinds if family else ()
    layers = set(config.get("layer_types") or ()) - {*kinds, *further}
    if layers:
        yield unlike(f"layer_types has {', '.join(sorted(layers))}", "every layer sees all")
    count = config.get("num_hidden_layers")
    for key in ("layer_types", "no_rope_layers"):
        if not layers and count and config.get(key) and len(config[key]) != count:
            yield unlike(
                f"{key} of {counted(len(config[key]), 'layer')}", f"num_hidden_layers={count}"
            )
    if known.name == "GPT2LMHeadModel" or (family and family.owns_settings):
        return
    # RoPE and experts, which GPT-2 does not have.
    yield from rope_faults(config, family)
    yield from expert_faults(config, unlike)


def _unknown(config: Config) -> Fault:
    return Fault(
        fact=f"config.json has model_type={config.get('model_type')!r}",
        rule=f"the architectures that can be converted are {', '.join((*known_types(), *IMAGE_FAMILIES))}",
        remedy="convert one of those; docs/extending.md shows how a family is added",
    )


def _incomplete(fact: str) -> Fault:
    return Fault(
        fact=f"config.json {fact}",
        rule="the sizes of the network must be known",
        remedy="take config.json from the same place as the weights",
    )

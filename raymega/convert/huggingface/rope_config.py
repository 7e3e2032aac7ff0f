"""Translates RoPE's settings between config.json and the model section, of all layers and of sliding ones."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose, log
from typing import Any

from raymega.config.schema import ModelSection
from raymega.convert.huggingface.architectures import Config, ours, rope_of, theirs, unlike
from raymega.convert.huggingface.families.family import EVERY_ROPE, HfFamily
from raymega.errors import Fault

_ROPES = {
    "default": {},
    "linear": {"factor": "rope_factor"},
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
        "truncate": "rope_truncate",
    },
}
"""Settings of RoPE's scaling, by ``rope_type``."""


def rope_values(rope: Config) -> dict[str, Any]:
    """Return the fields of the model section for RoPE's settings."""
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
            "truncate": rope.get("truncate", True),
        }
    scaling = {"rope_scaling": kind, **ours(_ROPES[kind], rope)} if _ROPES[kind] else {}
    return {"rope_theta": rope["rope_theta"], **scaling}


def rope_config(model: ModelSection) -> dict[str, Any]:
    """Return RoPE's settings in both forms, so that transformers before and since 5 agree."""
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    rope = {"rope_type": kind, **theirs(_ROPES[kind], model)}
    if rope.get("truncate"):
        del rope["truncate"]  # the default
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if _ROPES[kind] else None,
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
    }


def local_rope_of(config: Config) -> dict[str, Any]:
    """Return RoPE's settings in sliding layers, of which files before transformers 5 say the base only."""
    tables = config.get("rope_parameters") or {}
    base = config.get("rope_local_base_freq", config.get("rope_theta", 10000.0))
    return {"rope_type": "default", "rope_theta": base} | (tables.get("sliding_attention") or {})


def _local_rope_faults(config: Config, rope: Config) -> Iterator[Fault]:
    local = local_rope_of(config)
    if local["rope_type"] != "default" and local != rope:
        yield unlike(f"rope_type={local['rope_type']!r} in sliding layers", "RoPE there is plain")


def rope_faults(config: Config, family: HfFamily | None) -> Iterator[Fault]:
    """Return the faults of RoPE's settings that no field of the model section expresses."""
    rope, ropes = rope_of(config), family.ropes if family else EVERY_ROPE
    if rope["rope_type"] not in ropes:
        yield unlike(f"rope_type={rope['rope_type']!r}", f"RoPE is {one_of(ropes)}")
    if rope["rope_type"] == "yarn":
        yield from _yarn_faults(rope, has_latents="kv_lora_rank" in config)
    if family and family.has_rope_by_type:
        yield from _local_rope_faults(config, rope)
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if share != 1.0 and not (family and family.has_partial_rotary):
        yield unlike("partial_rotary_factor", "RoPE turns whole heads")


def _yarn_faults(rope: Config, *, has_latents: bool) -> list[Fault]:
    """Return the faults of YaRN settings that no field of the model section expresses."""
    scales_all = bool(rope.get("mscale_all_dim"))
    forms = {
        "an attention_factor of its own": not _is_plain_factor(rope),
        "no factor": rope.get("factor") is None,
        "mscale_all_dim without mscale": scales_all and not rope.get("mscale"),
        "mscale_all_dim without latent attention": scales_all and not has_latents,
    }
    rule = "yarn is as its paper or DeepSeek has it"
    return [unlike(f"yarn with {form}", rule) for form, is_there in forms.items() if is_there]


def _is_plain_factor(rope: Config) -> bool:
    """Return whether yarn's attention_factor is left out, or that of its paper."""
    factor: Any = rope.get("attention_factor")
    stretch: Any = rope.get("factor")
    return factor is None or (bool(stretch) and isclose(factor, 0.1 * log(stretch) + 1))


def one_of(values: tuple[object, ...]) -> str:
    """Return values as words of a rule."""
    return " or ".join("nothing" if value is None else repr(value) for value in values)

"""Rules of heads: how wide they are, how positions turn them, of what latents they are made."""

from __future__ import annotations

from collections.abc import Callable

from raymega.config.mla import MlaSection
from raymega.errors import Fault


def head_width_faults(
    width: int, heads: int, features: int | str, family: str, mla: MlaSection
) -> list[Fault]:
    """Heads share the width out, and RoPE turns pairs."""
    if mla.kv_lora_rank:
        return []
    is_derived = features == "hidden_size / num_heads"
    if is_derived and width % heads:
        lower = width - width % heads
        return [
            Fault(
                fact=f"model.hidden_size={width}",
                rule=f"it must be a multiple of model.num_heads={heads} (remainder {width % heads})",
                remedy=f"use {lower} or {lower + heads}, or set model.head_dim",
            )
        ]
    size = width // heads if is_derived else int(features)
    if family != "gpt2" and size % 2:
        what = "model.hidden_size / model.num_heads = " if is_derived else "model.head_dim="
        return [
            Fault(
                fact=f"{what}{size}",
                rule=f"RoPE turns pairs of features, so a {family} head's width must be even",
                remedy="change hidden_size or num_heads" if is_derived else f"use {size + 1}",
            )
        ]
    return []


def rope_scaling_faults(scaling: str, family: str, *bounds: float) -> list[Fault]:
    """Waves are stretched where there are waves, short ones less than long ones.

    bounds: low and high of llama3, then of yarn.
    """
    if scaling == "none":
        return []
    if family == "gpt2":
        return [
            Fault(
                fact=f"model.rope_scaling={scaling}",
                rule="model.family=gpt2 has learned positions and no RoPE to scale",
                remedy="set model.rope_scaling=none, or take another family",
            )
        ]
    is_yarn = scaling == "yarn"
    low, high = bounds[2:] if is_yarn else bounds[:2]
    names = ("beta_slow", "beta_fast") if is_yarn else ("low_freq_factor", "high_freq_factor")
    if low < high:
        return []
    return [
        Fault(
            fact=f"model.rope_{names[0]}={low:g}",
            rule=f"it must be less than model.rope_{names[1]}={high:g}",
            remedy="use 1 and 32 as YaRN does" if is_yarn else "use 1 and 4 as Llama 3.1 does",
        )
    ]


def mla_faults(
    mla: MlaSection, family: str, kv_heads: int | str, head_dim: int | str
) -> list[Fault]:
    """Latent attention says itself how wide heads are; without it, its numbers would do nothing."""
    given = {name: number for name, number in mla if number and name != "kv_lora_rank"}
    if not mla.kv_lora_rank:
        return [
            Fault(
                fact=f"model.mla.{name}={number} with model.mla.kv_lora_rank=0",
                rule="without a latent for keys and values attention is the ordinary one",
                remedy=f"set model.mla.kv_lora_rank, or model.mla.{name}=0",
            )
            for name, number in given.items()
        ]
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    rules = (
        (
            family != "llama",
            f"model.family={family}",
            "latents have RoPE and RMSNorm, no biases and no norms of heads",
            "set model.family=llama",
        ),
        (
            kv_heads != "num_heads",
            f"model.num_kv_heads={kv_heads}",
            "every query head has keys and values of its own, made of the latent",
            "leave model.num_kv_heads out",
        ),
        (
            head_dim != "hidden_size / num_heads",
            f"model.head_dim={head_dim}",
            "model.mla says how wide heads are",
            "leave model.head_dim out",
        ),
        (
            not mla.qk_rope_head_dim or mla.qk_rope_head_dim % 2 == 1,
            f"model.mla.qk_rope_head_dim={mla.qk_rope_head_dim}",
            "RoPE turns pairs of features, and without any no head knows positions",
            "use an even number such as 64",
        ),
        (
            not 0 < mla.v_head_dim <= width,
            f"model.mla.v_head_dim={mla.v_head_dim}",
            f"values are at least 1 wide, and no wider than keys, nope + rope = {width}",
            f"use 1 to {width}",
        ),
    )
    return [
        Fault(
            fact=f"{fact} with model.mla.kv_lora_rank={mla.kv_lora_rank}", rule=rule, remedy=remedy
        )
        for is_broken, fact, rule, remedy in rules
        if is_broken
    ]


def score_scale_faults(mla: MlaSection, scaling: str, weight: float) -> list[Fault]:
    """YaRN's factor on whole scores is latent attention's alone."""
    if not weight or (mla.kv_lora_rank and scaling == "yarn"):
        return []
    return [
        Fault(
            fact=f"model.rope_mscale_all_dim={weight:g} with model.mla.kv_lora_rank={mla.kv_lora_rank} and "
            f"model.rope_scaling={scaling}",
            rule="scores of whole heads are scaled in latent attention with yarn only",
            remedy="set model.rope_mscale_all_dim=0",
        )
    ]


def mtp_faults(depth: int, seq_len: int) -> list[Fault]:
    """The furthest token lies in the row."""
    if depth < seq_len:
        return []
    return [
        Fault(
            fact=f"model.num_nextn_predict_layers={depth}",
            rule=f"a row of data.seq_len={seq_len} has no token so far ahead",
            remedy=f"use at most {seq_len - 1}",
        )
    ]


HEAD_CHECKS: tuple[tuple[tuple[str, ...], Callable[..., list[Fault]]], ...] = (
    (
        ("model.hidden_size", "model.num_heads", "model.head_dim", "model.family", "model.mla"),
        head_width_faults,
    ),
    (
        (
            "model.rope_scaling",
            "model.family",
            "model.rope_low_freq_factor",
            "model.rope_high_freq_factor",
            "model.rope_beta_slow",
            "model.rope_beta_fast",
        ),
        rope_scaling_faults,
    ),
    (("model.mla", "model.family", "model.num_kv_heads", "model.head_dim"), mla_faults),
    (("model.mla", "model.rope_scaling", "model.rope_mscale_all_dim"), score_scale_faults),
    (("model.num_nextn_predict_layers", "data.seq_len"), mtp_faults),
)
"""What each check reads, and the check: rows of plan.rules."""

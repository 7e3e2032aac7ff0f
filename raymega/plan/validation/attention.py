"""Rules of heads: how wide they are, how positions turn them, of what latents they are made."""

from __future__ import annotations

from collections.abc import Callable

from raymega.config.mla import MlaSection
from raymega.errors import Fault


def head_width_faults(
    width: int, heads: int, features: int | str, family: str, mla: MlaSection
) -> list[Fault]:
    """Heads share the width out, and RoPE turns pairs."""
    if mla.kv_rank:
        return []
    is_derived = features == "width / num_heads"
    if is_derived and width % heads:
        lower = width - width % heads
        return [
            Fault(
                fact=f"model.width={width}",
                rule=f"it must be a multiple of model.num_heads={heads} (remainder {width % heads})",
                remedy=f"use {lower} or {lower + heads}, or set model.head_features",
            )
        ]
    size = width // heads if is_derived else int(features)
    if family != "gpt2" and size % 2:
        what = "model.width / model.num_heads = " if is_derived else "model.head_features="
        return [
            Fault(
                fact=f"{what}{size}",
                rule=f"RoPE turns pairs of features, so a {family} head's width must be even",
                remedy="change width or num_heads" if is_derived else f"use {size + 1}",
            )
        ]
    return []


def rope_scaling_faults(scaling: str, family: str, low: float, high: float) -> list[Fault]:
    """Waves are stretched where there are waves, short ones less than long ones."""
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
    if low < high:
        return []
    return [
        Fault(
            fact=f"model.rope_low_freq_factor={low:g}",
            rule=f"it must be less than model.rope_high_freq_factor={high:g}",
            remedy="use 1 and 4 as Llama 3.1 does, or 1 and 32 as YaRN",
        )
    ]


def mla_faults(
    mla: MlaSection, family: str, kv_heads: int | str, head_features: int | str
) -> list[Fault]:
    """Latent attention says itself how wide heads are; without it, its numbers would do nothing."""
    given = {name: number for name, number in mla if number and name != "kv_rank"}
    if not mla.kv_rank:
        return [
            Fault(
                fact=f"model.mla.{name}={number} with model.mla.kv_rank=0",
                rule="without a latent for keys and values attention is the ordinary one",
                remedy=f"set model.mla.kv_rank, or model.mla.{name}=0",
            )
            for name, number in given.items()
        ]
    width = mla.nope_features + mla.rope_features
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
            head_features != "width / num_heads",
            f"model.head_features={head_features}",
            "model.mla says how wide heads are",
            "leave model.head_features out",
        ),
        (
            not mla.rope_features or mla.rope_features % 2 == 1,
            f"model.mla.rope_features={mla.rope_features}",
            "RoPE turns pairs of features, and without any no head knows positions",
            "use an even number such as 64",
        ),
        (
            not 0 < mla.value_features <= width,
            f"model.mla.value_features={mla.value_features}",
            f"values are at least 1 wide, and no wider than keys, nope + rope = {width}",
            f"use 1 to {width}",
        ),
    )
    return [
        Fault(fact=f"{fact} with model.mla.kv_rank={mla.kv_rank}", rule=rule, remedy=remedy)
        for is_broken, fact, rule, remedy in rules
        if is_broken
    ]


def score_scale_faults(mla: MlaSection, scaling: str, weight: float) -> list[Fault]:
    """YaRN's factor on whole scores is latent attention's alone."""
    if not weight or (mla.kv_rank and scaling == "yarn"):
        return []
    return [
        Fault(
            fact=f"model.rope_mscale_all_features={weight:g} with model.mla.kv_rank={mla.kv_rank} and "
            f"model.rope_scaling={scaling}",
            rule="scores of whole heads are scaled in latent attention with yarn only",
            remedy="set model.rope_mscale_all_features=0",
        )
    ]


def mtp_faults(depth: int, seq_len: int) -> list[Fault]:
    """The furthest token lies in the row."""
    if depth < seq_len:
        return []
    return [
        Fault(
            fact=f"model.mtp_depth={depth}",
            rule=f"a row of data.seq_len={seq_len} has no token so far ahead",
            remedy=f"use at most {seq_len - 1}",
        )
    ]


HEAD_CHECKS: tuple[tuple[tuple[str, ...], Callable[..., list[Fault]]], ...] = (
    (
        ("model.width", "model.num_heads", "model.head_features", "model.family", "model.mla"),
        head_width_faults,
    ),
    (
        (
            "model.rope_scaling",
            "model.family",
            "model.rope_low_freq_factor",
            "model.rope_high_freq_factor",
        ),
        rope_scaling_faults,
    ),
    (("model.mla", "model.family", "model.num_kv_heads", "model.head_features"), mla_faults),
    (("model.mla", "model.rope_scaling", "model.rope_mscale_all_features"), score_scale_faults),
    (("model.mtp_depth", "data.seq_len"), mtp_faults),
)
"""What each check reads, and the check: rows of plan.rules."""

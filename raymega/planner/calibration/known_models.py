"""Look up what published tables leave out of well-known models, in their public configurations.

A table of runs has columns for the sizes that all models have. Widths of experts, latent attention
and dense first blocks follow from the model's name. The module knows models, no runs and no systems.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GATED = (
    "llama", "mixtral", "mistral", "qwen", "deepseek", "internlm", "gemma", "baichuan", "glm",
    "grok", "dbrx", "olmo", "phi3", "gptoss", "kimi", "moonlight", "vicuna", "alpaca", "codellama",
)  # fmt: skip
"""Parts of the names of models with SwiGLU or GeGLU, without spaces and signs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """Sizes of a model by its public configuration.

    Attributes:
        sizes: Values of columns, for those that a row leaves empty.
        model: Values of fields of the job's section ``model`` that no column has.
        moe: Values of fields of ``model.moe`` that no column has.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    moe: Mapping[str, Any] = field(default_factory=dict)


def _latent(q_lora_rank: int) -> dict[str, Any]:
    """Return latent attention with the head widths that all models of DeepSeek's kind have."""
    widths = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return {"mla": {"kv_lora_rank": 512, "q_lora_rank": q_lora_rank, **widths}}


def _sizes(*values: int) -> dict[str, int]:
    names = ("layers", "hidden", "heads", "kv_heads", "vocab", "experts", "topk")
    return dict(zip(names, values, strict=False))


def _experts(
    width: int, *, shared: int = 0, dense: int = 0, first_dense: int = 0, freq: int = 1
) -> dict[str, int]:
    """Return fields of ``model.moe``, and the width of dense blocks for ``ffn_hidden_size``."""
    found = {"intermediate_size": width, "shared_expert_intermediate_size": shared}
    found |= {"first_k_dense_replace": first_dense, "layer_freq": freq}
    return found | ({"dense": dense} if dense else {})


_KNOWN: tuple[tuple[str, KnownModel], ...] = (
    # DeepSeek-AI, config.json of each model on Hugging Face
    (
        "deepseek(v3|r1)|deepseek671b",
        KnownModel(
            sizes=_sizes(61, 7168, 128, 128, 129280, 256, 8),
            model=_latent(1536),
            moe=_experts(2048, shared=2048, dense=18432, first_dense=3),
        ),
    ),
    (
        "deepseekv2lite",
        KnownModel(
            sizes=_sizes(27, 2048, 16, 16, 102400, 64, 6),
            model=_latent(0),
            moe=_experts(1408, shared=2816, dense=10944, first_dense=1),
        ),
    ),
    (
        "deepseekv2|deepseek236b",
        KnownModel(
            sizes=_sizes(60, 5120, 128, 128, 102400, 160, 6),
            model=_latent(1536),
            moe=_experts(1536, shared=3072, dense=12288, first_dense=1),
        ),
    ),
    (
        "deepseekmoe16b",
        KnownModel(
            sizes=_sizes(28, 2048, 16, 16, 102400, 64, 6),
            moe=_experts(1408, shared=2816, dense=10944, first_dense=1),
        ),
    ),
    # Moonshot AI, of the same kind
    (
        "kimik2",
        KnownModel(
            sizes=_sizes(61, 7168, 64, 64, 163840, 384, 8),
            model=_latent(1536),
            moe=_experts(2048, shared=2048, dense=18432, first_dense=1),
        ),
    ),
    (
        "moonlight",
        KnownModel(
            sizes=_sizes(27, 2048, 16, 16, 163840, 64, 6),
            model=_latent(0),
            moe=_experts(1408, shared=2816, dense=11264, first_dense=1),
        ),
    ),
    # Qwen team
    (
        "qwen257ba14b",
        KnownModel(sizes=_sizes(28, 3584, 28, 4, 151936, 64, 8), moe=_experts(2560, shared=20480)),
    ),
    (
        "qwen15moe|qwenmoea27b",
        KnownModel(sizes=_sizes(24, 2048, 16, 16, 151936, 60, 4), moe=_experts(1408, shared=5632)),
    ),
    (
        "qwen330b",
        KnownModel(
            sizes=_sizes(48, 2048, 32, 4, 151936, 128, 8),
            model={"head_dim": 128},
            moe=_experts(768),
        ),
    ),
    (
        "qwen3235b",
        KnownModel(
            sizes=_sizes(94, 4096, 64, 4, 151936, 128, 8),
            model={"head_dim": 128},
            moe=_experts(1536),
        ),
    ),
    ("qwen3(06b|17b|4b|32b)", KnownModel(model={"head_dim": 128})),
    # Mistral AI
    ("mixtral8x7b", KnownModel(sizes=_sizes(32, 4096, 32, 8, 32000, 8, 2), moe=_experts(14336))),
    ("mixtral8x22bg8t8", KnownModel()),  # cut into finer experts: the row has the width
    ("mixtral8x22b", KnownModel(sizes=_sizes(56, 6144, 48, 8, 32768, 8, 2), moe=_experts(16384))),
    # OpenAI; every second block attends to 128 tokens, which is not counted here
    (
        "gptoss120b",
        KnownModel(
            sizes=_sizes(36, 2880, 64, 8, 201088, 128, 4),
            model={"head_dim": 64},
            moe=_experts(2880),
        ),
    ),
    (
        "gptoss20b",
        KnownModel(
            sizes=_sizes(24, 2880, 64, 8, 201088, 32, 4), model={"head_dim": 64}, moe=_experts(2880)
        ),
    ),
    # Databricks, xAI, Meta, Z.ai
    ("dbrx", KnownModel(sizes=_sizes(40, 6144, 48, 8, 100352, 16, 4), moe=_experts(10752))),
    ("grok1", KnownModel(sizes=_sizes(64, 6144, 48, 8, 131072, 8, 2), moe=_experts(32768))),
    (
        "llama4scout",
        KnownModel(
            sizes=_sizes(48, 5120, 40, 8, 202048, 16, 1),
            model={"head_dim": 128},
            moe=_experts(8192, shared=8192),
        ),
    ),
    (
        "llama4maverick",
        KnownModel(
            sizes=_sizes(48, 5120, 40, 8, 202048, 128, 1),
            model={"head_dim": 128},
            moe=_experts(8192, shared=8192, dense=16384, freq=2),
        ),
    ),
    (
        "glm45air",
        KnownModel(
            sizes=_sizes(46, 4096, 96, 8, 151552, 128, 8),
            model={"head_dim": 128},
            moe=_experts(1408, shared=1408, dense=10944, first_dense=1),
        ),
    ),
    (
        "glm45",
        KnownModel(
            sizes=_sizes(92, 5120, 96, 8, 151552, 160, 8),
            model={"head_dim": 128},
            moe=_experts(1536, shared=1536, dense=12288, first_dense=3),
        ),
    ),
    # dense models, for tables that name them without sizes
    ("llama318b|llama38b", KnownModel(sizes=_sizes(32, 4096, 32, 8, 128256))),
    ("llama3170b|llama370b", KnownModel(sizes=_sizes(80, 8192, 64, 8, 128256))),
    ("llama31405b|llama3405b", KnownModel(sizes=_sizes(126, 16384, 128, 8, 128256))),
    ("nemotron4340b|nemotron340b", KnownModel(sizes=_sizes(96, 18432, 96, 8, 256000))),
)
"""Patterns of names without spaces and signs, the first that matches counts."""
NOTHING_KNOWN = KnownModel()


def plain_name(name: str) -> str:
    """Return a name in lower case, with letters and digits alone."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def known_model(name: str) -> KnownModel:
    """Return what is known of the model ``name``; nothing of an unknown one."""
    plain = plain_name(name)
    found = (known for pattern, known in _KNOWN if re.search(pattern, plain))
    return next(found, NOTHING_KNOWN)


def is_gated(row: Mapping[str, str]) -> bool:
    """Return whether the feed-forward layers of a row's model have a gate.

    The number of parameters decides where the row states it, else the name, else the width: layers
    without a gate have four times the model's width nearly always.
    """
    hidden, ffn = (float(row.get(name) or 0) for name in ("hidden", "ffn"))
    counted = None if row.get("experts") else _gated_by_count(row)
    if counted is not None:
        return counted
    plain = plain_name(row["model"])
    if any(name in plain for name in GATED):
        return True
    return bool(ffn) and ffn != 4 * hidden


def _gated_by_count(row: Mapping[str, str]) -> bool | None:
    """Return whether the stated number of parameters has a gate; None where it does not tell."""
    try:
        stated = 1e9 * float(row.get("params_b") or 0)
        layers, hidden, heads, ffn, vocab = (
            float(row.get(name) or 0) for name in ("layers", "hidden", "heads", "ffn", "vocab")
        )
        kv_heads = float(row.get("kv_heads") or heads)
    except ValueError:
        return None
    if not (stated and layers and hidden and heads and ffn and vocab):
        return None
    attention = 2 * hidden * hidden * (1 + kv_heads / heads)
    # Tied or untied, with a gate or without: the nearest of the four.
    counts = {
        (products, tables): layers * (attention + products * hidden * ffn) + tables * vocab * hidden
        for products in (2, 3)
        for tables in (1, 2)
    }
    off = {gated: min(abs(counts[gated, n] / stated - 1) for n in (1, 2)) for gated in (2, 3)}
    if min(off.values()) > CLEARLY or max(off.values()) < 2 * CLEARLY:
        return None
    return off[3] < off[2]


CLEARLY = 0.04
"""Relative difference of a parameter count that tells one kind of layer from another."""

"""Define the parts of each model family: biases, norms, nonlinearity, residual structure.

A new family of these parts is one entry here, one name in `config/model.py`, and one file in
`convert/huggingface/families/` for its names and settings there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from raymega.config.heads.section import Pooling
from raymega.config.schema import ModelSection
from raymega.plan.layers.norm_kinds import NormKind
from raymega.plugins import code_of


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyParts:
    """Parts of a family's layers; numbers such as windows are fields of the model section.

    Attributes:
        biased: Names of linear layers with a bias.
        has_positions: Whether it has a table of learned positions, and no RoPE.
        has_gate: Whether the feed-forward layer has a gate.
        activation: Nonlinearity of the feed-forward layer, of the gate where there is one: a part of kind
            ``activation``, such as ``silu``, ``gelu``, ``gelu_tanh``, ``relu`` or ``relu2``; or ``clamped_silu``,
            GPT-OSS's, which bounds gate and up.
        norm: Norm of the stream, a part of kind ``norm``: ``layer_norm``, ``rms_norm``, or ``offset_rms_norm``,
            which multiplies by 1 + weight.
        norms: Place of each norm: before attention and feed-forward layer, after them, both, or after
            their sum with the residual stream (BERT's post-norm), which then has no final norm.
        qk_norm: Norms of queries and keys: none, one weight for all heads, or one over all features.
            l2 has no weight, and follows RoPE in layers that have it.
        has_output_gate: Whether attention's output is multiplied by the sigmoid of a further projection.
        has_neighbour_rope: Whether RoPE pairs features 2i and 2i + 1, instead of i and i + K/2.
        is_parallel: Whether attention and feed-forward layer read the same residual stream.
        has_one_part: Whether a block is attention, or a state, or a feed-forward layer alone.
        scales_embedding: Whether embedded tokens are multiplied by sqrt(D).
        is_causal: Whether a token sees no later ones; without it the model is an encoder, which predicts
            masked tokens and has a head with a transform and a bias.
        has_embedding_norm: Whether the sum of embeddings is normalised.
        first_position: Row of the position table that a document's first token has.
        is_encoder_decoder: Whether its first blocks are an encoder and the others a decoder with attention to it,
            with biases of relative positions and no RoPE.
    """

    biased: frozenset[str] = frozenset()
    has_positions: bool = False
    has_gate: bool = True
    activation: str = "silu"
    norm: str = "rms_norm"
    norms: Literal["before", "after", "both", "sum"] = "before"
    qk_norm: Literal["none", "heads", "whole", "l2"] = "none"
    has_output_gate: bool = False
    has_neighbour_rope: bool = False
    is_parallel: bool = False
    has_one_part: bool = False
    scales_embedding: bool = False
    is_causal: bool = True
    has_embedding_norm: bool = False
    first_position: int = 0
    is_encoder_decoder: bool = False

    @property
    def has_rope(self) -> bool:
        """Return whether queries and keys are rotated by their positions."""
        return not (self.has_positions or self.is_encoder_decoder)

    @property
    def has_head_norms(self) -> bool:
        """Return whether queries and keys have norms with weights."""
        return self.qk_norm in ("heads", "whole")

    @property
    def norm_kind(self) -> NormKind:
        """Return what the norm is made of."""
        kind = code_of("norm", self.norm)
        assert isinstance(kind, NormKind), "the job's rules have checked it"
        return kind

    @property
    def is_norm_offset(self) -> bool:
        """Return whether norms, those of heads too, multiply by 1 + weight."""
        return self.norm == "offset_rms_norm"

    @property
    def norm_places(self) -> tuple[str, ...]:
        """Return the names of a layer's norms."""
        if self.has_one_part:
            return ("norm",)
        kinds = {"before": ["norm"], "after": ["post_norm"], "sum": ["sum_norm"]}
        kinds["both"] = kinds["before"] + kinds["after"]
        return tuple(
            f"{part}_{kind}" for kind in kinds[self.norms] for part in ("attention", "mlp")
        )


_QKV = ("attention.q", "attention.k", "attention.v")
_EVERY_BIAS = frozenset((*_QKV, "attention.out", "mlp.up", "mlp.down"))
_BIASED_EXPERTS = frozenset(
    ("mlp.gate", "moe.router", "moe.experts.gate", "moe.experts.up", "moe.experts.down")
)
LINEAR_LAYERS = _EVERY_BIAS | _BIASED_EXPERTS
"""Names of the layers that may have a bias."""
CLAMPED = "clamped_silu"
"""Activation that is of gate and up together, and so no part of kind ``activation``."""
_LLAMA = FamilyParts()
_OLMO = FamilyParts(norms="after", qk_norm="whole")
_BERT = FamilyParts(
    biased=_EVERY_BIAS, has_positions=True, has_gate=False, activation="gelu", norm="layer_norm", norms="sum",
    is_causal=False, has_embedding_norm=True,
)  # fmt: skip
_T5 = FamilyParts(has_gate=False, activation="relu", is_encoder_decoder=True)
_GEMMA2 = FamilyParts(
    activation="gelu_tanh", norm="offset_rms_norm", norms="both", scales_embedding=True
)
_QWEN3_NEXT = FamilyParts(norm="offset_rms_norm", qk_norm="heads", has_output_gate=True)
FAMILY_PARTS: Mapping[str, FamilyParts] = {
    "gpt2": FamilyParts(
        biased=_EVERY_BIAS, has_positions=True, has_gate=False, activation="gelu_tanh", norm="layer_norm"
    ),
    "llama": _LLAMA,
    "qwen2": FamilyParts(biased=frozenset(_QKV)),
    "qwen3": FamilyParts(qk_norm="heads"),
    "phi3": _LLAMA,
    "granite": _LLAMA,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "gpt_neox": FamilyParts(
        biased=_EVERY_BIAS, has_gate=False, activation="gelu", norm="layer_norm", is_parallel=True
    ),
    "gemma2": _GEMMA2,
    "gemma3": replace(_GEMMA2, qk_norm="heads"),
    "glm4_moe": FamilyParts(biased=frozenset(_QKV), qk_norm="heads"),
    "minimax_m2": FamilyParts(qk_norm="whole"),
    "llama4": FamilyParts(qk_norm="l2", has_neighbour_rope=True),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_NEXT,
    "nemotron_h": FamilyParts(has_gate=False, activation="relu2", has_one_part=True),
    "gpt_oss": FamilyParts(biased=_EVERY_BIAS | _BIASED_EXPERTS, activation=CLAMPED),
    "bert": _BERT,
    "megatron_bert": replace(_BERT, norms="before", has_embedding_norm=False),
    "roberta": replace(_BERT, first_position=2),
    "t5": _T5,
    "t5_v1_1": replace(_T5, has_gate=True, activation="gelu_tanh"),
}  # fmt: skip
"""Parts by ``model.family``."""


def family_parts(family: str) -> FamilyParts:
    """Return the parts of ``model.family``, which may be a plug-in's."""
    parts = code_of("family", family)
    assert isinstance(parts, FamilyParts), "the job's rules have checked it"
    return parts


def score_pooling(model: ModelSection) -> Pooling | Literal["none"]:
    """Return the tokens of a document that its scores come from; none where documents have no scores."""
    if model.head.kind in ("language_model", "token_classification", "none"):
        return "none"
    return model.head.pools(is_causal=parts_of(model).is_causal)


def parts_of(model: ModelSection) -> FamilyParts:
    """Return the parts of the model's family, without those that ``model.attention`` leaves out."""
    parts = family_parts(model.family)
    return parts if model.attention.qk_norm == "family" else replace(parts, qk_norm="none")

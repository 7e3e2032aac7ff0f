"""Define the norms of the residual stream: their tensors, what backward keeps, and the place of their code.

A norm of a plug-in declares itself by the same class, so the table of tensors, checkpoints and the planner read both alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class NormTensor:
    """Tensor of a norm, which every tensor-parallel rank holds whole.

    Attributes:
        init: Initial value of each element.
        is_scalar: Whether it is one number, instead of one for each feature.
    """

    init: Literal["ones", "zeros"] = "ones"
    is_scalar: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NormKind:
    """Norm, or another map of each position's features.

    Attributes:
        apply: Place of its code, ``package.module:function``: a function of x [S/sp, B, D], its tensors in the order
            of ``tensors``, and the keyword ``eps``; returns the shape and dtype of x. It sees one rank's positions,
            so each position must be mapped by itself.
        tensors: Tensors by the last part of their names, such as ``weight`` and ``bias``.
        statistics: Numbers a position that backward keeps, in float32 or wider.
        kept: Tensors of the size of x that backward keeps beside x itself.
        is_fusable: Whether the function has the keyword ``is_fused``, of the job's ``kernels``.
    """

    apply: str
    tensors: Mapping[str, NormTensor] = field(default_factory=lambda: {"weight": NormTensor()})
    statistics: int = 0
    kept: int = 0
    is_fusable: bool = False


_CODE = "raymega.model.layers.norms"
NORM_KINDS: Mapping[str, NormKind] = {
    # mean and deviation of each position
    "layer_norm": NormKind(
        apply=f"{_CODE}:apply_layer_norm",
        tensors={"weight": NormTensor(), "bias": NormTensor(init="zeros")},
        statistics=2,
    ),
    "rms_norm": NormKind(apply=f"{_CODE}:apply_rms_norm", statistics=1, is_fusable=True),
    # times 1 + weight (Gemma)
    "offset_rms_norm": NormKind(
        apply=f"{_CODE}:apply_offset_rms_norm",
        tensors={"weight": NormTensor(init="zeros")},
        statistics=1,
        is_fusable=True,
    ),
}
"""Norms by name: parts of kind ``norm``, which ``FamilyParts.norm`` names."""

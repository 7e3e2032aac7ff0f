"""Define the state that an optimizer keeps besides masters, by role of the tensor: kinds and bytes.

The module needs no torch, so that any caller can count bytes. ``raymega.optim.updates`` has the
updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raymega.config.schema import OptimizerSection
from raymega.plan.layers.global_tensor import Role
from raymega.plugins import code_of


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind:
    """Facts of an optimizer that are known without torch.

    Attributes:
        state: State tensors that it keeps, as checkpoints name them; each is shaped like the parameter and zero at the
            start.
        update: Place of its update, ``package.module:attribute``: a function of an ``UpdateGroup`` of
            ``raymega.optim.updates`` and the optimizer section, which changes masters and state in place, element by
            element. Empty for Muon, which has a file of its own.
        width_powers: Powers of the width ratio by which muP scales the learning rates of matrices and of all others.
            AdamW and SGD follow table 8 of Yang and Hu et al. 2022; Lion's update, like AdamW's, has a size that does
            not depend on the gradient's. Muon's has the spectral norm 0.2 sqrt(max(rows, columns)), which must not
            grow.
        fields: Fields of the optimizer section that it reads beside the learning rates and the weight decay.
        temporaries: Tensors of a portion's elements that an update holds at once.
    """

    state: tuple[str, ...]
    update: str = ""
    width_powers: tuple[float, float] = (-1.0, 0.0)
    fields: tuple[str, ...] = ()
    temporaries: int = 1


_UPDATES = "raymega.optim.updates"
KINDS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(
        state=("adam.exp_avg", "adam.exp_avg_sq"), update=f"{_UPDATES}:apply_adamw",
        fields=("beta1", "beta2", "eps"), temporaries=0,
    ),
    "sgd": OptimizerKind(
        state=("sgd.momentum",), update=f"{_UPDATES}:apply_sgd", width_powers=(0.0, 1.0), fields=("momentum",),
        temporaries=0,
    ),
    "lion": OptimizerKind(
        state=("lion.exp_avg",), update=f"{_UPDATES}:apply_lion", fields=("beta1", "beta2")
    ),
    "muon": OptimizerKind(
        state=("muon.momentum",), width_powers=(-0.5, 0.0),
        fields=("beta1", "beta2", "eps", "momentum", "newton_schulz_steps"), temporaries=0,
    ),
}  # fmt: skip
"""Optimizers of the package by ``optimizer.name``."""
PORTION_ELEMENTS = 2**24
"""Owned elements that are updated at once, so that the temporary memory of an update stays small.
"""
Format = Literal["master", "bfloat16", "8bit"]
SHORT_ROLES = ("matrix", "embedding", "head")
"""Roles that ``optimizer.state_dtype`` applies to; the rest is too little to be worth rounding."""
AVERAGE = "ema"
"""Kind of the moving average of the weights, in the masters' format, which is no state of an update."""
CODES, SCALES = ".codes", ".scales"
"""Suffixes of the saved names of 8-bit state."""


def kind_of(name: str) -> OptimizerKind:
    """Return the facts of ``optimizer.name``, which may be a plug-in's."""
    kind = code_of("optimizer", name)
    assert isinstance(kind, OptimizerKind), "the job's rules have checked it"
    return kind


def update_of(name: str, role: Role) -> str:
    """Return the update of tensors of ``role`` under ``optimizer.name``; Muon's is for matrices."""
    return "adamw" if name == "muon" and role != "matrix" else name


def kinds_of(name: str, role: Role) -> tuple[str, ...]:
    """Return the kinds of state that a tensor of ``role`` has under ``optimizer.name``."""
    return kind_of(update_of(name, role)).state


def format_of(optimizer: OptimizerSection, role: Role) -> Format:
    """Return the format in which the state of ``role`` is kept between steps."""
    return optimizer.state_dtype if role in SHORT_ROLES else "master"


def saved_kinds(optimizer: OptimizerSection, role: Role) -> tuple[str, ...]:
    """Return the kinds of state of ``role``, as checkpoints name them."""
    kinds = kinds_of(optimizer.name, role)
    average = (AVERAGE,) * (optimizer.ema_decay > 0)
    if format_of(optimizer, role) != "8bit":
        return kinds + average
    return tuple(f"{kind}{part}" for kind in kinds for part in (CODES, SCALES)) + average


def state_bytes(form: Format, num_elements: int, num_blocks: int, master_bytes: int) -> int:
    """Return the bytes of one kind of state.

    ``num_blocks`` counts blocks of 8-bit state, each of which has a scale of ``master_bytes``.
    """
    match form:
        case "master":
            return num_elements * master_bytes
        case "bfloat16":
            return num_elements * 2
        case "8bit":
            return num_elements + num_blocks * master_bytes

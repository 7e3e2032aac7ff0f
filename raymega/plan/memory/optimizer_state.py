"""Define the state that an optimizer keeps besides masters, by role of the tensor: kinds and bytes.

The module needs no torch, so that any caller can count bytes. ``raymega.optim.updates`` has the
updates.
"""

from __future__ import annotations

from typing import Literal

from raymega.config.schema import OptimizerSection
from raymega.plan.tensor_table import Role

KINDS = {
    "adamw": ("adam.exp_avg", "adam.exp_avg_sq"),
    "sgd": ("sgd.momentum",),
    "lion": ("lion.exp_avg",),
    "muon": ("muon.momentum",),
}
"""State tensors of each update, each shaped like the parameter and zero at the start."""
PORTION_ELEMENTS = 2**24
"""Owned elements that are updated at once, so that the temporary memory of an update stays small.
"""
MOST_KINDS = max(map(len, KINDS.values()))
Format = Literal["master", "bfloat16", "8bit"]
SHORT_ROLES = ("matrix", "embedding", "head")
"""Roles that ``optimizer.state_dtype`` applies to; the rest is too little to be worth rounding."""
CODES, SCALES = ".codes", ".scales"
"""Suffixes of the saved names of 8-bit state."""


def update_of(name: str, role: Role) -> str:
    """Return the update of tensors of ``role`` under ``optimizer.name``; Muon's is for matrices."""
    return "adamw" if name == "muon" and role != "matrix" else name


def kinds_of(name: str, role: Role) -> tuple[str, ...]:
    """Return the kinds of state that a tensor of ``role`` has under ``optimizer.name``."""
    return KINDS[update_of(name, role)]


def format_of(optimizer: OptimizerSection, role: Role) -> Format:
    """Return the format in which the state of ``role`` is kept between steps."""
    return optimizer.state_dtype if role in SHORT_ROLES else "master"


def saved_kinds(optimizer: OptimizerSection, role: Role) -> tuple[str, ...]:
    """Return the kinds of state of ``role``, as checkpoints name them."""
    kinds = kinds_of(optimizer.name, role)
    if format_of(optimizer, role) != "8bit":
        return kinds
    return tuple(f"{kind}{part}" for kind in kinds for part in (CODES, SCALES))


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

"""What an optimizer keeps of a tensor beside its master, by the tensor's role: kinds, and their bytes.

Pure, so that whoever counts bytes knows it without torch. The updates themselves are optim.updates'.
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
"""Owned elements that are updated at once, so that what lasts for the update alone stays small."""
MOST_KINDS = max(map(len, KINDS.values()))
Format = Literal["master", "bfloat16", "8bit"]
SHORT_ROLES = ("matrix", "embedding", "head")
"""Whose state optimizer.state_dtype is about: the rest is too little to be worth rounding."""
CODES, SCALES = ".codes", ".scales"
"""What the saved names of 8-bit state end with."""


def update_of(name: str, role: Role) -> str:
    """Which update moves tensors of ``role`` under ``optimizer.name``: Muon moves matrices only."""
    return "adamw" if name == "muon" and role != "matrix" else name


def kinds_of(name: str, role: Role) -> tuple[str, ...]:
    """Kinds of state that a tensor of ``role`` has under ``optimizer.name``."""
    return KINDS[update_of(name, role)]


def format_of(optimizer: OptimizerSection, role: Role) -> Format:
    """In which format that state is kept between steps."""
    return optimizer.state_dtype if role in SHORT_ROLES else "master"


def saved_kinds(optimizer: OptimizerSection, role: Role) -> tuple[str, ...]:
    """The same kinds as checkpoints name them."""
    kinds = kinds_of(optimizer.name, role)
    if format_of(optimizer, role) != "8bit":
        return kinds
    return tuple(f"{kind}{part}" for kind in kinds for part in (CODES, SCALES))


def state_bytes(form: Format, num_elements: int, num_blocks: int, master_bytes: int) -> int:
    """Bytes of one kind of state of so many elements, in so many blocks of 8-bit state."""
    match form:
        case "master":
            return num_elements * master_bytes
        case "bfloat16":
            return num_elements * 2
        case "8bit":
            return num_elements + num_blocks * master_bytes

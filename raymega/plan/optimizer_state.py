"""What an optimizer keeps of a tensor beside its master, by the tensor's role: kinds, as they are saved.

Pure, so that whoever counts bytes knows it without torch. The updates themselves are optim.updates'.
"""

from __future__ import annotations

from raymega.plan.tensors import Role

KINDS = {
    "adamw": ("adam.exp_avg", "adam.exp_avg_sq"),
    "sgd": ("sgd.momentum",),
    "lion": ("lion.exp_avg",),
    "muon": ("muon.momentum",),
}
"""State tensors of each update, each shaped like the parameter and zero at the start."""
MOST_KINDS = max(map(len, KINDS.values()))


def update_of(name: str, role: Role) -> str:
    """Which update moves tensors of ``role`` under ``optimizer.name``: Muon moves matrices only."""
    return "adamw" if name == "muon" and role != "matrix" else name


def kinds_of(name: str, role: Role) -> tuple[str, ...]:
    """Kinds of state that a tensor of ``role`` has under ``optimizer.name``."""
    return KINDS[update_of(name, role)]

"""Which learning rate and weight decay a tensor has, by its role and its place in the model.

Pure: roles and layers are data of plan.tensors, the numbers the job's. No name is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.config.schema import ModelSection, OptimizerSection
from raymega.plan.memory.optimizer_state import update_of
from raymega.plan.tensor_table import (
    GlobalTensor,
    Role,
    embedding_tensors,
    head_tensors,
    layer_tensors,
)

WIDTH_POWERS = {"adamw": (-1.0, 0.0), "lion": (-1.0, 0.0), "muon": (-0.5, 0.0), "sgd": (0.0, 1.0)}
"""muP: with which power of the width's ratio the rates of matrices, and of all others, grow.

Of AdamW and SGD as in table 8 of Yang and Hu et al. 2022; Lion's update is of one size whatever the
gradient's, as AdamW's is. Muon's has the spectral norm 0.2 sqrt(max(rows, columns)), which must not grow.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """``lr_scale`` times the step's learning rate, and the weight decay."""

    lr_scale: float
    weight_decay: float


def rates_of(tensor: GlobalTensor, optimizer: OptimizerSection, model: ModelSection) -> Rates:
    """The rates of ``tensor`` in a model of ``model``'s depth and width.

    A norm's weights and all biases are never decayed; tables only when the job says so.
    """
    peak = _peak(tensor.role, optimizer)
    layers = optimizer.layer_lr_decay ** _layers_above(tensor, model.num_layers)
    of_matrix, of_other = WIDTH_POWERS[update_of(optimizer.name, tensor.role)]
    width = model.width_ratio ** (of_matrix if tensor.role == "matrix" else of_other)
    return Rates(
        lr_scale=layers * width * (1.0 if peak == "lr" else float(peak) / optimizer.lr),
        weight_decay=optimizer.weight_decay if _is_decayed(tensor.role, optimizer) else 0.0,
    )


def role_rates(optimizer: OptimizerSection, model: ModelSection) -> dict[Role, float]:
    """By role: ``lr_scale`` of tables, head and the last block's tensors; empty where all are 1."""
    last = layer_tensors(model, model.num_layers - 1)
    tensors = [t for t in (*embedding_tensors(model), *head_tensors(model), *last) if t.is_trained]
    scales = {t.role: rates_of(t, optimizer, model).lr_scale for t in tensors}
    return scales if set(scales.values()) != {1.0} else {}


def _peak(role: Role, optimizer: OptimizerSection) -> float | str:
    """The peak learning rate before what layers change of it."""
    match role:
        case "embedding":
            return optimizer.embedding_lr
        case "head":
            return optimizer.head_lr
        case "matrix":
            return "lr"
        case "norm" | "bias":
            return optimizer.norm_lr
        case "state":
            raise AssertionError("no update touches what is not trained")


def _is_decayed(role: Role, optimizer: OptimizerSection) -> bool:
    if role == "embedding":
        return optimizer.is_embedding_decayed
    return role in ("matrix", "head")


def _layers_above(tensor: GlobalTensor, num_layers: int) -> int:
    """How often the rate decays on the way down: never at the top, once at the last block.

    Blocks that predict further ahead lie behind the last one, with the head.
    """
    if tensor.layer >= 0:
        return max(0, num_layers - tensor.layer)
    return num_layers if tensor.role == "embedding" else 0

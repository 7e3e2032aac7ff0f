"""Learning rate and weight decay of each tensor, by its role and its layer.

The module is pure. Roles and layers come from `plan/tensor_table.py`, never from a tensor's name.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.config.schema import ModelSection, OptimizerSection
from raymega.plan.layers.global_tensor import BELOW, GlobalTensor, Role
from raymega.plan.memory.optimizer_state import kind_of, update_of
from raymega.plan.tensor_table import embedding_tensors, head_tensors, layer_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Factor ``lr_scale`` on the step's learning rate, and the weight decay."""

    lr_scale: float
    weight_decay: float


def rates_of(tensor: GlobalTensor, optimizer: OptimizerSection, model: ModelSection) -> Rates:
    """Return the rates of ``tensor`` in a model of ``model``'s depth and width.

    Weights of norms and biases never decay; embeddings decay only if the job says so.
    """
    peak = _peak(tensor.role, optimizer)
    # layer-wise decay, times muP's width factor, times the role's own peak
    layers = optimizer.layer_lr_decay ** _layers_above(tensor, model.num_layers)
    of_matrix, of_other = kind_of(update_of(optimizer.name, tensor.role)).width_powers
    width = model.width_ratio ** (of_matrix if tensor.role == "matrix" else of_other)
    return Rates(
        lr_scale=layers * width * (1.0 if peak == "lr" else float(peak) / optimizer.lr),
        weight_decay=optimizer.weight_decay if _is_decayed(tensor.role, optimizer) else 0.0,
    )


def role_rates(optimizer: OptimizerSection, model: ModelSection) -> dict[Role, float]:
    """Return ``lr_scale`` by role, for embeddings, head and last block; empty where all are 1."""
    last = layer_tensors(model, model.num_layers - 1)
    tensors = [t for t in (*embedding_tensors(model), *head_tensors(model), *last) if t.is_trained]
    scales = {t.role: rates_of(t, optimizer, model).lr_scale for t in tensors}
    return scales if set(scales.values()) != {1.0} else {}


def _peak(role: Role, optimizer: OptimizerSection) -> float | str:
    """Return a role's peak learning rate, before layer-wise decay; "lr" for the common one."""
    match role:
        case "embedding":
            return optimizer.embedding_lr
        case "head":
            return optimizer.head_lr
        case "matrix" | "filter":
            return "lr"
        case "norm" | "bias":
            return optimizer.norm_lr
        case "state":
            raise AssertionError("no update touches what is not trained")


def _is_decayed(role: Role, optimizer: OptimizerSection) -> bool:
    if role == "embedding":
        return optimizer.is_embedding_decayed
    return role in ("matrix", "head", "filter")


def _layers_above(tensor: GlobalTensor, num_layers: int) -> int:
    """Return how many times layer-wise decay applies: 0 for the head, 1 for the last block, and so on.

    Blocks of multi-token prediction count with the head, what lies below the first block counts with it.
    """
    if tensor.layer == BELOW:
        return num_layers
    return max(0, num_layers - tensor.layer) if tensor.layer >= 0 else 0

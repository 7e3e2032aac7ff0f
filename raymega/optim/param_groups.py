"""Which learning rate and weight decay a tensor has, by its role in the model.

Pure: roles are data of plan.tensors, the numbers the job's. No name is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from raymega.config.schema import OptimizerSection
from raymega.plan.tensors import Role

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """``lr_scale`` times the step's learning rate, and the weight decay."""

    lr_scale: float
    weight_decay: float


def rates_of(role: Role, optimizer: OptimizerSection) -> Rates:
    """A norm's weights and all biases are never decayed; tables only when the job says so."""
    decay = optimizer.weight_decay
    match role:
        case "embedding":
            is_decayed = optimizer.is_embedding_decayed
            return Rates(
                lr_scale=optimizer.embedding_lr_scale, weight_decay=decay if is_decayed else 0.0
            )
        case "head":
            return Rates(lr_scale=optimizer.head_lr_scale, weight_decay=decay)
        case "matrix":
            return Rates(lr_scale=1.0, weight_decay=decay)
        case "norm" | "bias":
            return Rates(lr_scale=optimizer.norm_lr_scale, weight_decay=0.0)
        case "state":
            raise AssertionError("no update touches what is not trained")


def group_by_rates(
    things: Iterable[T], role_of: Callable[[T], Role], optimizer: OptimizerSection
) -> dict[Rates, list[T]]:
    """``things`` that are updated alike, in one list each."""
    groups: dict[Rates, list[T]] = {}
    for thing in things:
        groups.setdefault(rates_of(role_of(thing), optimizer), []).append(thing)
    return groups

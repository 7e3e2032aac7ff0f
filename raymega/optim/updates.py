"""The table of updates: what a job's ``optimizer.name`` does to masters, given gradient and state.

An update knows no layout: it is handed flat tensors, some elements of one parameter each. Of Muon
this is the half before a matrix is put together; muon has the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from raymega.config.schema import OptimizerSection
from raymega.parallel.core.sharded_parameter import ShardedParameter


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamState:
    """Some elements of one parameter with what updates them; tensors are flat and alike.

    Attributes:
        param: The parameter.
        master: Its values in float32 or better.
        gradient: Summed over ranks; same dtype.
        state: One tensor for each kind of the update's; same dtype, zero at the start.
        num_steps: Scalar, updates made before this one; a float.
    """

    param: ShardedParameter
    master: torch.Tensor
    gradient: torch.Tensor
    state: tuple[torch.Tensor, ...]
    num_steps: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateGroup:
    """All elements that have one rate and decay, as torch's functions take them: a tensor a slot.

    Attributes:
        masters: Moved in place.
        gradients: Divided by ``divisor`` in place, in the same pass.
        states: By kind of the update's.
        num_steps: Updates made before this one.
        lr: Learning rate.
        weight_decay: Of the masters.
        divisor: A float32 scalar, or None.
    """

    masters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    num_steps: list[torch.Tensor]
    lr: float
    weight_decay: float
    divisor: torch.Tensor | None


def make_update_group(
    slots: Sequence[ParamState], *, lr: float, weight_decay: float, divisor: torch.Tensor | None
) -> UpdateGroup:
    """The group of ``slots``, which have as many kinds of state each."""
    return UpdateGroup(
        masters=[slot.master for slot in slots], gradients=[slot.gradient for slot in slots],
        states=[list(kind) for kind in zip(*(slot.state for slot in slots), strict=True)],
        num_steps=[slot.num_steps for slot in slots], lr=lr, weight_decay=weight_decay, divisor=divisor,
    )  # fmt: skip


def apply_adamw(group: UpdateGroup, section: OptimizerSection) -> None:
    """Loshchilov and Hutter's decoupled weight decay, by torch's fused function."""
    moments, squares = group.states
    # The function, not torch.optim.AdamW: making one imports torch._dynamo, which takes 2 s.
    adamw(
        group.masters, group.gradients, moments, squares, [], group.num_steps,
        fused=True, grad_scale=group.divisor, amsgrad=False, beta1=section.beta1, beta2=section.beta2,
        lr=group.lr, weight_decay=group.weight_decay, eps=section.eps, maximize=False,
    )  # fmt: skip


def apply_sgd(group: UpdateGroup, section: OptimizerSection) -> None:
    """Momentum and, unlike AdamW, the decay as part of the gradient, by torch's fused function.

    A buffer of zeros before the first update makes it the first gradient, as in torch.optim.SGD.
    """
    (momenta,) = group.states
    sgd(
        group.masters, group.gradients, [*momenta], fused=True, grad_scale=group.divisor,
        weight_decay=group.weight_decay, momentum=section.momentum, lr=group.lr, dampening=0.0,
        nesterov=False, maximize=False,
    )  # fmt: skip


def apply_lion(group: UpdateGroup, section: OptimizerSection) -> None:
    """Chen et al. 2023, program 1: the sign of a moment that is older than the one that is kept."""
    masters, gradients, (moments,) = group.masters, group.gradients, group.states
    if group.divisor is not None:
        torch._foreach_div_(gradients, group.divisor)
    directions = torch._foreach_lerp(moments, gradients, 1 - section.beta1)
    torch._foreach_sign_(directions)
    torch._foreach_mul_(masters, 1 - group.lr * group.weight_decay)
    torch._foreach_add_(masters, directions, alpha=-group.lr)
    torch._foreach_lerp_(moments, gradients, 1 - section.beta2)


UPDATES: dict[str, Callable[[UpdateGroup, OptimizerSection], None]] = {
    "adamw": apply_adamw, "sgd": apply_sgd, "lion": apply_lion,
}  # fmt: skip
"""Of all elements by themselves; Muon's, which goes by whole matrices, is optim.muon's."""

"""Element-wise updates by ``optimizer.name``: AdamW, SGD and Lion on flat masters.

An update is independent of the layout: each of its flat tensors holds some elements of one parameter.
`muon.py` has the update that needs whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.optim.sgd import sgd

from raymega.config.schema import OptimizerSection, PluginsSection
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.memory.optimizer_state import kind_of
from raymega.plugins import call_plugin, find


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamState:
    """Elements of one parameter with their gradient and state; flat tensors of one length.

    Attributes:
        param: Parameter of the elements.
        master: Values in float32 or wider.
        gradient: Gradient summed over ranks, in the master's dtype.
        state: State tensors, one for each kind of the update, in the master's dtype; initially zero.
    """

    param: ShardedParameter
    master: torch.Tensor
    gradient: torch.Tensor
    state: tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateGroup:
    """Elements with one learning rate and weight decay, as lists for torch's multi-tensor functions.

    Attributes:
        masters: Masters, updated in place.
        gradients: Gradients, divided by ``divisor`` in place by the same kernel.
        states: State tensors, one list for each kind.
        step: Number of this update, counted from 1; a float32 scalar on the device.
        lr: Learning rate.
        weight_decay: Weight decay of the masters.
        divisor: Divisor of the gradients, a float32 scalar; None divides nothing.
    """

    masters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    step: torch.Tensor
    lr: float
    weight_decay: float
    divisor: torch.Tensor | None


Update = Callable[[UpdateGroup], None]


def make_update_group(
    slots: Sequence[ParamState],
    *,
    step: torch.Tensor,
    lr: float,
    weight_decay: float,
    divisor: torch.Tensor | None,
) -> UpdateGroup:
    """Return the group of ``slots``, which all have the same kinds of state."""
    return UpdateGroup(
        masters=[slot.master for slot in slots], gradients=[slot.gradient for slot in slots],
        states=[list(kind) for kind in zip(*(slot.state for slot in slots), strict=True)],
        step=step, lr=lr, weight_decay=weight_decay, divisor=divisor,
    )  # fmt: skip


def apply_adamw(group: UpdateGroup, section: OptimizerSection) -> None:
    """Apply AdamW (Loshchilov and Hutter) by torch's fused kernel."""
    moments, squares = group.states
    # The kernel, not torch.optim's function around it, which counts the steps of each tensor by itself.
    torch._fused_adamw_(
        group.masters, group.gradients, moments, squares, [], [group.step] * len(group.masters),
        grad_scale=group.divisor, amsgrad=False, beta1=section.beta1, beta2=section.beta2,
        lr=group.lr, weight_decay=group.weight_decay, eps=section.eps, maximize=False,
    )  # fmt: skip


def apply_sgd(group: UpdateGroup, section: OptimizerSection) -> None:
    """Apply SGD with momentum by torch's fused function; the decay is part of the gradient.

    A momentum of zero before the first update makes it the first gradient, as in torch.optim.SGD.
    """
    (momenta,) = group.states
    sgd(
        group.masters, group.gradients, [*momenta], fused=True, grad_scale=group.divisor,
        weight_decay=group.weight_decay, momentum=section.momentum, lr=group.lr, dampening=0.0,
        nesterov=False, maximize=False,
    )  # fmt: skip


def apply_lion(group: UpdateGroup, section: OptimizerSection) -> None:
    """Apply Lion (Chen et al. 2023, program 1): step by the sign of an interpolated moment."""
    masters, gradients, (moments,) = group.masters, group.gradients, group.states
    if group.divisor is not None:
        torch._foreach_div_(gradients, group.divisor)
    # direction: sign of beta1 * moment + (1 - beta1) * gradient
    directions = torch._foreach_lerp(moments, gradients, 1 - section.beta1)
    torch._foreach_sign_(directions)
    torch._foreach_mul_(masters, 1 - group.lr * group.weight_decay)
    torch._foreach_add_(masters, directions, alpha=-group.lr)
    # The stored moment uses beta2, after the step.
    torch._foreach_lerp_(moments, gradients, 1 - section.beta2)


def update_code(section: OptimizerSection, plugins: PluginsSection, name: str) -> Update | None:
    """Return the element-wise update of optimizer ``name``; None for Muon, whose code is in `optim/muon.py`.

    Raises:
        ConfigError: The code of a plug-in is not there; when it is called, that it failed, with its line.
    """
    target = kind_of(name).update
    if not target:
        return None
    row = replace(find("optimizer", name), target=target)
    update = row.with_options(plugins.options.get(name, {}))
    return lambda group: call_plugin(row, lambda: update(group, section))

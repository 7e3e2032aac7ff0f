"""The table of updates: what a job's ``optimizer.name`` does to masters, given gradient and state.

An update knows no layout: it is handed flat tensors, some elements of one parameter each. Of Muon
this is the half before a matrix is put together; muon has the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Apply(Protocol):
    """Moves the masters of ``param_states`` in place."""

    def __call__(
        self,
        param_states: Sequence[ParamState],
        section: OptimizerSection,
        *,
        lr: float,
        weight_decay: float,
        divisor: torch.Tensor | None = None,
    ) -> None:
        """Called once a step for all slots that have this rate and decay.

        Gradients are divided by ``divisor``, a float32 scalar, in place and in the same pass.
        """


def apply_adamw(
    param_states: Sequence[ParamState],
    section: OptimizerSection,
    *,
    lr: float,
    weight_decay: float,
    divisor: torch.Tensor | None = None,
) -> None:
    """Loshchilov and Hutter's decoupled weight decay, by torch's fused function."""
    # The function, not torch.optim.AdamW: making one imports torch._dynamo, which takes 2 s.
    adamw(
        [param_state.master for param_state in param_states],
        [param_state.gradient for param_state in param_states],
        [param_state.state[0] for param_state in param_states],
        [param_state.state[1] for param_state in param_states],
        [],
        [param_state.num_steps for param_state in param_states],
        fused=True,
        grad_scale=divisor,
        amsgrad=False,
        beta1=section.beta1,
        beta2=section.beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=section.eps,
        maximize=False,
    )


def apply_sgd(
    param_states: Sequence[ParamState],
    section: OptimizerSection,
    *,
    lr: float,
    weight_decay: float,
    divisor: torch.Tensor | None = None,
) -> None:
    """Momentum and, unlike AdamW, the decay as part of the gradient, by torch's fused function.

    A buffer of zeros before the first update makes it the first gradient, as in torch.optim.SGD.
    """
    sgd(
        [param_state.master for param_state in param_states],
        [param_state.gradient for param_state in param_states],
        [param_state.state[0] for param_state in param_states],
        fused=True,
        grad_scale=divisor,
        weight_decay=weight_decay,
        momentum=section.momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


def apply_lion(
    param_states: Sequence[ParamState],
    section: OptimizerSection,
    *,
    lr: float,
    weight_decay: float,
    divisor: torch.Tensor | None = None,
) -> None:
    """Chen et al. 2023, program 1: the sign of a moment that is older than the one that is kept."""
    masters, gradients = (
        [param_state.master for param_state in param_states],
        [param_state.gradient for param_state in param_states],
    )
    moments = [param_state.state[0] for param_state in param_states]
    if divisor is not None:
        torch._foreach_div_(gradients, divisor)
    directions = torch._foreach_lerp(moments, gradients, 1 - section.beta1)
    torch._foreach_sign_(directions)
    torch._foreach_mul_(masters, 1 - lr * weight_decay)
    torch._foreach_add_(masters, directions, alpha=-lr)
    torch._foreach_lerp_(moments, gradients, 1 - section.beta2)


UPDATES: dict[str, Apply] = {"adamw": apply_adamw, "sgd": apply_sgd, "lion": apply_lion}
"""Of all elements by themselves; Muon's, which goes by whole matrices, is optim.muon's."""

"""AdamW over float32 (or float64) masters: torch's own update, with state that checkpoints read.

The gradient comes from parallel.grad_buffer; the learning rate and the number of the step from
whoever calls, so that neither is kept twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from raymega.config.schema import OptimizerSection
from raymega.parallel.grad_buffer import GradBuffer
from raymega.parallel.parameter import ShardedParameter


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """One parameter with what updates it; all tensors but ``num_steps`` have its shape."""

    param: ShardedParameter
    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    num_steps: torch.Tensor


class AdamW:
    """Masters, both moments, and the update.

    Masters have the gradients' dtype. A parameter of that dtype is its own master; one of fewer
    bits has a copy, which the update moves and which is then rounded into the parameter.
    """

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        gradients: GradBuffer,
        section: OptimizerSection,
    ) -> None:
        self._section = section
        # torch reads and raises a count per parameter. Views of one vector are set by one write.
        self._num_steps = torch.zeros(len(params), device=params[0].device)
        self._slots = [
            _make_slot(param, gradients.view(param), num_steps)
            for param, num_steps in zip(params, self._num_steps, strict=True)
        ]

    def step(self, *, lr: float, step: int) -> None:
        """Make the update number ``step``, counted from 1, with the gradients in the buffer."""
        self._num_steps.fill_(step - 1)
        for has_decay, weight_decay in ((True, self._section.weight_decay), (False, 0.0)):
            slots = [slot for slot in self._slots if slot.param.spec.has_decay == has_decay]
            self._update(slots, lr=lr, weight_decay=weight_decay)
        self.sync_params()

    def state_tensors(self) -> list[tuple[str, ShardedParameter, torch.Tensor]]:
        """What a checkpoint keeps, as (kind, parameter, tensor of its shape).

        A load fills the tensors and then calls :meth:`sync_params`.
        """
        return [
            item
            for slot in self._slots
            for item in (
                ("model", slot.param, slot.master),
                ("adam.exp_avg", slot.param, slot.exp_avg),
                ("adam.exp_avg_sq", slot.param, slot.exp_avg_sq),
            )
        ]

    @torch.no_grad()
    def sync_params(self) -> None:
        """Round the masters into the parameters that are not their own master."""
        for slot in self._slots:
            if slot.param.dtype != slot.master.dtype:
                slot.param.copy_(slot.master)

    def _update(self, slots: Sequence[_Slot], *, lr: float, weight_decay: float) -> None:
        # The function, not torch.optim.AdamW: making one imports torch._dynamo, which takes 2 s.
        adamw(
            [slot.master for slot in slots],
            [slot.gradient for slot in slots],
            [slot.exp_avg for slot in slots],
            [slot.exp_avg_sq for slot in slots],
            [],
            [slot.num_steps for slot in slots],
            fused=True,
            amsgrad=False,
            beta1=self._section.beta1,
            beta2=self._section.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self._section.eps,
            maximize=False,
        )


def _make_slot(param: ShardedParameter, gradient: torch.Tensor, num_steps: torch.Tensor) -> _Slot:
    master = param.detach().to(gradient.dtype)
    return _Slot(
        param=param,
        master=master,
        gradient=gradient,
        exp_avg=torch.zeros_like(master),
        exp_avg_sq=torch.zeros_like(master),
        num_steps=num_steps,
    )

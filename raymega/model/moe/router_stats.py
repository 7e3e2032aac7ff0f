"""Routers of a rank's blocks: the step's routing statistics, and the updates that follow from them.

`train/step.py` sums the statistics over ranks, in the all-reduce of its totals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from raymega.config.schema import ModelSection
from raymega.model.layers.transformer_block import TransformerBlock
from raymega.model.moe.layer import MoeLayer
from raymega.model.moe.load_balancing import NUM_SUMS, Load, update_expert_bias
from raymega.model.moe.router import Router


@dataclass(kw_only=True, slots=True)
class Routers:
    """Routers of a rank, and their place among those of the whole model.

    Attributes:
        layers: Numbers of all blocks of the model that have a router.
        held: Routers on this rank, by block.
        num_experts: Number of routed experts, E.
        device: Device of the sums.
    """

    layers: Sequence[int]
    held: Mapping[int, Router]
    num_experts: int
    device: torch.device
    _margin: torch.Tensor | None = field(default=None)

    @property
    def smallest_margin(self) -> float:
        """Least margin of any routing decision on this rank's tokens so far; the host waits for it."""
        return torch.inf if self._margin is None else float(self._margin)

    def start_step(self, *, loss_gradient: float) -> None:
        """Reset all records, and set the gradient that the routers' own losses start from.

        The reset drops what a pass of `train/nan_locator.py` added.
        """
        for router in self.held.values():
            router.record.start(loss_gradient=loss_gradient)

    def take_sums(self) -> torch.Tensor:
        """Return and reset this rank's sums by layer, [layers, E + NUM_SUMS] float64.

        Rows of layers on other ranks are zero, so a sum over the world gives every layer's load.
        """
        sums = torch.zeros(
            len(self.layers), self.num_experts + NUM_SUMS, dtype=torch.float64, device=self.device
        )
        for row, layer in enumerate(self.layers):
            if layer in self.held:
                sums[row], margin = self.held[layer].record.drain(self.device)
                before = margin if self._margin is None else self._margin
                self._margin = torch.minimum(before, margin)
        return sums

    def loads(self, sums: torch.Tensor) -> dict[int, Load]:
        """Return the load of each layer from the sums over all ranks, in host memory."""
        return {layer: Load.of(row) for layer, row in zip(self.layers, sums, strict=True)}

    @torch.no_grad()
    def update(self, sums: torch.Tensor) -> None:
        """Update expert biases and keep the step's counts, after a step that updated the weights.

        ``sums`` are those of :meth:`take_sums` over all ranks, on the device.
        """
        for row, layer in enumerate(self.layers):
            if layer not in self.held:
                continue
            router, counts = self.held[layer], sums[row, : self.num_experts]
            if router.bias is not None and router.moe.expert_bias_update_rate:
                update_expert_bias(router.bias, counts, router.moe.expert_bias_update_rate)
            if router.counts is not None:
                router.counts.copy_(counts)


def find_routers(
    model: ModelSection, modules: Sequence[nn.Module], device: torch.device
) -> Routers:
    """Return the routers of a rank's model chunks."""
    held = {
        int(name.rpartition(".")[2]): part.mlp.router
        for module in modules
        for name, part in module.named_modules()
        if isinstance(part, TransformerBlock) and isinstance(part.mlp, MoeLayer)
    }
    layers = [
        i
        for i in range(model.num_layers + model.num_nextn_predict_layers)
        if model.holds_experts(i)
    ]
    return Routers(layers=layers, held=held, num_experts=model.moe.num_experts, device=device)

"""Routers: those of a rank's blocks, what a step's routing was in all of the model, and what follows.

Sums over ranks are made by whoever ends a step, in the one all-reduce that it makes anyway.
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
    """The routers of a rank, among those of the whole model.

    Attributes:
        layers: Numbers of all blocks of the model that have one.
        held: Of those, the ones on this rank.
        num_experts: E.
        device: Where sums are made.
        smallest_margin: By how much the closest choice so far was won, of this rank's tokens.
    """

    layers: Sequence[int]
    held: Mapping[int, Router]
    num_experts: int
    device: torch.device
    smallest_margin: float = field(default=torch.inf)

    def start_step(self, *, loss_gradient: float) -> None:
        """Backward starts from ``loss_gradient``, and so do the routers' own losses.

        What passes before it left is forgotten: a pass that only looks for where numbers go wrong is
        no part of what the next step routed.
        """
        for router in self.held.values():
            router.record.start(loss_gradient=loss_gradient)

    def take_sums(self) -> torch.Tensor:
        """What this rank saw since the last call, by layer: [layers, E + some], float64; forgets it.

        Rows of other ranks' layers are zero, so that the sum over all ranks of the world is every
        layer's.
        """
        sums = torch.zeros(
            len(self.layers), self.num_experts + NUM_SUMS, dtype=torch.float64, device=self.device
        )
        for row, layer in enumerate(self.layers):
            if layer in self.held:
                sums[row], margin = self.held[layer].record.drain(self.device)
                self.smallest_margin = min(self.smallest_margin, float(margin))
        return sums

    def loads(self, sums: torch.Tensor) -> dict[int, Load]:
        """From the sums over all ranks, by layer; equal on all ranks."""
        return {layer: Load.of(row) for layer, row in zip(self.layers, sums, strict=True)}

    @torch.no_grad()
    def update(self, loads: Mapping[int, Load]) -> None:
        """After a step that updated the weights: biases move, and the step's counts are kept."""
        for layer, router in self.held.items():
            counts = loads[layer].counts
            if router.bias is not None and router.moe.expert_bias_update_rate:
                update_expert_bias(router.bias, counts, router.moe.expert_bias_update_rate)
            if router.counts is not None:
                router.counts.copy_(counts)


def find_routers(
    model: ModelSection, modules: Sequence[nn.Module], device: torch.device
) -> Routers:
    """Those of a rank's model chunks."""
    held = {
        int(name.rpartition(".")[2]): part.mlp.router
        for module in modules
        for name, part in module.named_modules()
        if isinstance(part, TransformerBlock) and isinstance(part.mlp, MoeLayer)
    }
    layers = [
        i
        for i in range(model.num_layers + model.num_nextn_predict_layers)
        if model.moe.holds_experts(i)
    ]
    return Routers(layers=layers, held=held, num_experts=model.moe.num_experts, device=device)

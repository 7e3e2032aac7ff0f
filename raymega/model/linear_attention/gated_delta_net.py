"""Gated delta net (Yang et al. 2024, as in Qwen3-Next); `delta_rule.py` computes its states."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from raymega.config.schema import ModelSection
from raymega.model.layers.norms import Norm
from raymega.model.linear_attention.delta_rule import convolve, gated_delta_rule, normalise
from raymega.model.linear_attention.state_layer import StateLayer
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.tensor_parallel.layers import ParameterFactory


class GatedDeltaNet(StateLayer):
    """States that queries read and keys change; a group is a key head with the value heads that read it."""

    def __init__(self, factory: ParameterFactory, name: str, model: ModelSection) -> None:
        sizes = model.linear_attention
        ratio, keys = sizes.num_value_heads // sizes.num_key_heads, sizes.key_head_dim
        values = ratio * sizes.value_head_dim
        projections = {"q": keys, "k": keys, "v": values, "z": values, "b": ratio, "a": ratio}
        super().__init__(factory, name, model, projections, convolved=("q", "k", "v"))
        self.norm = Norm(factory, f"{name}.norm", "rms_norm", model.norm_eps)

    @property
    def state_weights(self) -> tuple[Tensor, ...]:
        """Weights that :meth:`run` reads."""
        return self.filters, self.decay_log, self.step_bias

    @property
    def norm_weights(self) -> tuple[Tensor, ...]:
        """Weights that :meth:`gated` reads."""
        return tuple(self.norm.parameters())

    def run(self, groups: Tensor, token_layout: TokenLayout) -> Tensor:
        """Map groups [N, B, h/cp, 2 K + r V + 2 r] of whole rows to what they read, [N, B, h/cp, r V]."""
        wide = groups.to(torch.promote_types(groups.dtype, torch.float32))
        own, positions = self.own(groups.shape[2], token_layout), token_layout.row_positions
        # convolution of queries, keys and values
        mixed, b, a = wide.split((sum(self.widths), self.ratio, self.ratio), dim=-1)
        filters = self.own_filters(own, wide.dtype)
        q, k, v = silu(convolve(mixed, filters, positions)).split(self.widths, dim=-1)
        # states
        decay_log, step_bias = (
            t.to(wide.dtype).view(self.num_groups, -1)[own] for t in self.state_weights[1:]
        )
        y = gated_delta_rule(
            normalise(q) * self.widths[0] ** -0.5,
            normalise(k),
            v.unflatten(-1, (self.ratio, -1)),
            decay=-decay_log.exp() * softplus(a + step_bias),
            beta=b.sigmoid(),
            positions=positions,
        )
        return y.flatten(3).to(groups.dtype)

    def gated(self, y: Tensor, z: Tensor) -> Tensor:
        """Normalise each value head of y [S/cp, B, h, r V], then multiply by the gates z: [S/cp, B, h * r V]."""
        normal = self.norm(y.flatten(2).unflatten(-1, (self.num_groups * self.ratio, -1)))
        return normal.flatten(2) * silu(z)

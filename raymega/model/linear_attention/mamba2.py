"""Mamba-2 (Dao and Gu 2024, as in Nemotron-H); `delta_rule.py` computes its states."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from raymega.config.schema import ModelSection
from raymega.model.layers.fused_ops import rms_norm
from raymega.model.linear_attention.delta_rule import convolve, scan
from raymega.model.linear_attention.state_layer import StateLayer
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.tensor_parallel.layers import ParameterFactory


class Mamba2(StateLayer):
    """States to which each token adds its value; a group is the heads that share B and C."""

    def __init__(self, factory: ParameterFactory, name: str, model: ModelSection) -> None:
        sizes = model.linear_attention
        ratio, state = sizes.num_value_heads // sizes.num_key_heads, sizes.key_head_dim
        values = ratio * sizes.value_head_dim
        projections = {"z": values, "x": values, "B": state, "C": state, "dt": ratio}
        super().__init__(factory, name, model, projections, convolved=("x", "B", "C"))
        self.filter_biases = factory.make(*(f"{name}.{part}_conv.bias" for part in "xBC"))
        self.skip = factory.make(f"{name}.D")
        self.norm = factory.make(f"{name}.norm.weight")
        self.eps, self.least_step = model.norm_eps, sizes.time_step_min

    @property
    def state_weights(self) -> tuple[Tensor, ...]:
        """Weights that :meth:`run` reads."""
        return self.filters, self.filter_biases, self.decay_log, self.step_bias, self.skip

    @property
    def norm_weights(self) -> tuple[Tensor, ...]:
        """Weights that :meth:`gated` reads."""
        return (self.norm,)

    def run(self, groups: Tensor, token_layout: TokenLayout) -> Tensor:
        """Map groups [N, B, h/cp, r V + 2 K + r] of whole rows to what they read, [N, B, h/cp, r V]."""
        wide = groups.to(torch.promote_types(groups.dtype, torch.float32))
        own, positions = self.own(groups.shape[2], token_layout), token_layout.row_positions
        # convolution of values, B and C
        mixed, dt = wide.split((sum(self.widths), self.ratio), dim=-1)
        biases = self.filter_biases.to(wide.dtype).split(
            [self.num_groups * width for width in self.widths]
        )
        bias = torch.cat([part.view(self.num_groups, -1)[own] for part in biases], dim=1)
        filters = self.own_filters(own, wide.dtype)
        x, k, q = silu(convolve(mixed, filters, positions) + bias).split(self.widths, dim=-1)
        # states
        decay_log, step_bias, skip = (
            t.to(wide.dtype).view(self.num_groups, -1)[own] for t in self.state_weights[2:]
        )
        step = softplus(dt + step_bias).clamp(min=self.least_step)
        x = x.unflatten(-1, (self.ratio, -1))
        decay = -decay_log.exp() * step
        y = scan(q, k, x * step[..., None], decay, positions) + x * skip[..., None]
        return y.flatten(3).to(groups.dtype)

    def gated(self, y: Tensor, z: Tensor) -> Tensor:
        """Multiply y [S/cp, B, h, r V] by the gates z, then normalise each group: [S/cp, B, h * r V]."""
        weights = self.norm.view(self.num_groups, -1)
        gated = y * silu(z).unflatten(-1, (self.num_groups, -1))
        return rms_norm(gated, weights, self.eps).flatten(2)

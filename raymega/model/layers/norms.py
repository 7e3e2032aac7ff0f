"""LayerNorm and RMSNorm over the residual stream's features, and RMSNorm over those of a head.

Torch's kernels compute statistics in fp32 when x is narrower. Every tensor-parallel rank holds the whole
parameters. Under sequence parallelism their gradients are partial sums over its own positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from raymega.model.layers.fused_ops import rms_norm
from raymega.parallel.tensor_parallel.layers import ParameterFactory


class LayerNorm(nn.Module):
    """LayerNorm: (x - mean) / sqrt(variance + eps) * weight + bias."""

    def __init__(self, factory: ParameterFactory, name: str, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = factory.make(f"{name}.weight")
        self.bias = factory.make(f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [S/sp, B, D] over its features."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RmsNorm(nn.Module):
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, factory: ParameterFactory, name: str, eps: float) -> None:
        super().__init__()
        self.eps, self.is_fused = eps, factory.is_fused
        self.weight = factory.make(f"{name}.weight")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [S/sp, B, D] over its features."""
        return rms_norm(x, self.weight, self.eps, is_fused=self.is_fused)


class HeadNorms(nn.Module):
    """RMSNorm of each query and key head; query heads share one weight, key heads another."""

    def __init__(self, factory: ParameterFactory, name: str, eps: float) -> None:
        super().__init__()
        self.eps, self.is_fused = eps, factory.is_fused
        self.q_weight = factory.make(f"{name}.q_norm.weight")
        self.k_weight = factory.make(f"{name}.k_norm.weight")

    def forward(self, qk: Tensor, *, num_heads: int) -> Tensor:
        """Normalise heads [S, B, H/tp + G/tp, K], of which the first ``num_heads`` are queries."""
        # one kernel for both: a weight for each head
        weights = (
            self.q_weight.expand(num_heads, -1),
            self.k_weight.expand(qk.shape[2] - num_heads, -1),
        )
        return rms_norm(qk, torch.cat(weights), self.eps, is_fused=self.is_fused)

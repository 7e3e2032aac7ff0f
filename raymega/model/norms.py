"""LayerNorm and RMSNorm over the features of the residual stream.

Torch's kernels take the statistics in fp32 when x is narrower. The parameters are held whole by
every tensor-parallel rank, and so are their gradients.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from raymega.parallel.tensor import ParameterFactory


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    def __init__(self, factory: ParameterFactory, name: str, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = factory.make(f"{name}.weight")
        self.bias = factory.make(f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        """x: [S, B, D] -> [S, B, D]."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, factory: ParameterFactory, name: str, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = factory.make(f"{name}.weight")

    def forward(self, x: Tensor) -> Tensor:
        """x: [S, B, D] -> [S, B, D]."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)

"""LayerNorm and RMSNorm over the residual stream's features, and RMSNorm of queries and keys.

Torch's kernels compute statistics in fp32 when x is narrower. Every tensor-parallel rank holds the whole
parameters, except those of a norm over all heads. Under sequence parallelism their gradients are partial sums over its own positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from raymega.config.schema import ModelSection
from raymega.model.layers.fused_ops import rms_norm
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.core.linear_map import apply_linear
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
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight, or times 1 + weight with ``is_offset``."""

    def __init__(
        self, factory: ParameterFactory, name: str, eps: float, *, is_offset: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.is_fused, self.is_offset = eps, factory.is_fused, is_offset
        self.weight = factory.make(f"{name}.weight")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [S/sp, B, D] over its features."""
        weight = 1 + self.weight if self.is_offset else self.weight
        return rms_norm(x, weight, self.eps, is_fused=self.is_fused)


class HeadNorms(nn.Module):
    """RMSNorm of each query and key head; query heads share one weight, key heads another."""

    def __init__(
        self, factory: ParameterFactory, name: str, eps: float, *, is_offset: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.is_fused, self.is_offset = eps, factory.is_fused, is_offset
        self.q_weight = factory.make(f"{name}.q_norm.weight")
        self.k_weight = factory.make(f"{name}.k_norm.weight")

    def forward(self, qk: Tensor, *, num_heads: int) -> Tensor:
        """Normalise heads [S, B, H/tp + G/tp, K], of which the first ``num_heads`` are queries."""
        # one kernel for both: a weight for each head
        weights = (
            self.q_weight.expand(num_heads, -1),
            self.k_weight.expand(qk.shape[2] - num_heads, -1),
        )
        weight = 1 + torch.cat(weights) if self.is_offset else torch.cat(weights)
        return rms_norm(qk, weight, self.eps, is_fused=self.is_fused)


class L2Norm(nn.Module):
    """RMSNorm of each query and key head without a weight (Llama 4)."""

    ones: Tensor

    def __init__(self, factory: ParameterFactory, model: ModelSection) -> None:
        super().__init__()
        self.eps, self.is_fused = model.norm_eps, factory.is_fused
        ones = torch.ones(model.head_width, dtype=factory.dtype, device=factory.device)
        self.register_buffer("ones", ones, persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise heads [S, B, h, K] over their features."""
        return rms_norm(heads, self.ones, self.eps, is_fused=self.is_fused)


class WholeNorms(nn.Module):
    """RMSNorm over the features of all query heads together, and of all key heads (OLMo 2).

    A rank has some of the heads, so ranks sum their squares. The weights are cut as the heads are.
    """

    def __init__(
        self, factory: ParameterFactory, name: str, eps: float, *, is_offset: bool = False
    ) -> None:
        super().__init__()
        assert not is_offset, "no family has weights from 0 here"
        self.eps, self.tp = eps, factory.tp
        self.q_weight = factory.make(f"{name}.q_norm.weight")
        self.k_weight = factory.make(f"{name}.k_norm.weight")
        tables = (factory.table[f"{name}.{part}_norm.weight"] for part in ("q", "k"))
        self.sizes = [(table.shape[0], table.sharers(tp=self.tp.size)) for table in tables]

    def forward(self, qk: Tensor, *, num_heads: int) -> Tensor:
        """Normalise heads [S, B, H/tp + G/tp, K], of which the first ``num_heads`` are queries."""
        parts = qk[:, :, :num_heads], qk[:, :, num_heads:]
        weights = self.q_weight, self.k_weight
        return torch.cat(list(map(self._normal, parts, weights, self.sizes)), dim=2)

    def _normal(self, heads: Tensor, weight: Tensor, size: tuple[int, int]) -> Tensor:
        """Normalise heads [S, B, h, K] with the weights of their features, [h K]."""
        num_features, sharers = size
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        squares = self._sum(wide.square().sum((2, 3), keepdim=True), sharers)
        normal = wide * torch.rsqrt(squares / num_features + self.eps)
        return (normal * weight.view(heads.shape[2:])).to(heads.dtype)

    def _sum(self, squares: Tensor, sharers: int) -> Tensor:
        """Sum over tensor-parallel ranks; ``sharers`` neighbours have the same head, which counts once.

        Their gradients of that head are terms of a sum, so backward is the same map.
        """
        if self.tp.size == 1:
            return squares

        def total(x: Tensor) -> Tensor:
            return all_reduce(x.clone(), self.tp) / sharers

        return apply_linear(squares, total, total)

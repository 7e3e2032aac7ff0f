"""LayerNorm and RMSNorm over the residual stream's features, and RMSNorm of queries and keys.

Torch's kernels compute statistics in fp32 when x is narrower. Every tensor-parallel rank holds the whole
parameters, except those of a norm over all heads. Under sequence parallelism their gradients are partial sums over its own positions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from raymega.config.schema import ModelSection
from raymega.errors import ConfigError
from raymega.model.layers.fused_ops import rms_norm
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.core.linear_map import apply_linear
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.plugins import call_plugin, find


class Norm(nn.Module):
    """Norm of the stream's features, of kind ``name`` (`raymega.plan.layers.norm_kinds`).

    Args:
        factory: Factory of its tensors, which the table lists as ``at.TENSOR``.
        at: Begin of its tensors' names.
        name: Name of the kind, a plug-in's too.
        eps: Number that keeps a division finite.
    """

    def __init__(self, factory: ParameterFactory, at: str, name: str, eps: float) -> None:
        super().__init__()
        row = find("norm", name)
        kind = row.load()
        self.row, self.eps = replace(row, target=kind.apply), eps
        self.tensor_names = tuple(kind.tensors)
        for tensor in self.tensor_names:
            setattr(self, tensor, factory.make(f"{at}.{tensor}"))
        self.code = self.row.load()
        if kind.is_fusable:
            self.code = partial(self.code, is_fused=factory.is_fused)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [S/sp, B, D] over its features."""
        tensors = (getattr(self, tensor) for tensor in self.tensor_names)
        y = call_plugin(self.row, lambda: self.code(x, *tensors, eps=self.eps))
        if isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype:
            return y
        raise ConfigError(
            fact=f"norm {self.row.name} returned "
            + (f"{list(y.shape)} {y.dtype}" if isinstance(y, Tensor) else f"{y!r:.60}"),
            rule=f"it maps the stream to one of its shape and dtype, {list(x.shape)} {x.dtype}",
            remedy=f"correct {self.row.target}",
        )


def apply_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias."""
    return layer_norm(x, weight.shape, weight, bias, eps)


def apply_rms_norm(x: Tensor, weight: Tensor, *, eps: float, is_fused: bool = False) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight."""
    return rms_norm(x, weight, eps, is_fused=is_fused)


def apply_offset_rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, is_fused: bool = False
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (1 + weight)."""
    return rms_norm(x, weight, eps, is_fused=is_fused, is_offset=True)


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
        return rms_norm(
            qk, torch.cat(weights), self.eps, is_fused=self.is_fused, is_offset=self.is_offset
        )


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

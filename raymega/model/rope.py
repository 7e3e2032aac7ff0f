"""Rotary position embedding (RoPE), in the rotate-half convention of Llama.

Feature i of a head is paired with feature i + K/2; pair i at position s turns by the angle
s / base^(2i/K), or slower where the wave lengths are scaled. It owns the table of angles, one for
all layers of a stage.
"""

from __future__ import annotations

from math import pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raymega.config.schema import ModelSection

Turns = tuple[Tensor, Tensor]
"""Cosines and sines of angles, [S, B, 1, K/2] or [S, 1, 1, K/2] each."""


class Rope(nn.Module):
    """Turns the feature pairs of each head by its position; no parameters."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelSection, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        positions = torch.arange(model.max_positions, dtype=torch.float64, device=device)
        angles = positions[:, None] * _frequencies(model).to(device)
        wide = torch.promote_types(dtype, torch.float32)
        self.register_buffer("cos", angles.cos().to(wide)[:, None, None], persistent=False)
        self.register_buffer("sin", angles.sin().to(wide)[:, None, None], persistent=False)

    def turns(self, positions: Tensor) -> Turns:
        """Cosines and sines for tokens at ``positions`` [S, B] or [S, 1]; for all layers of a stage."""
        return self.cos[positions, 0], self.sin[positions, 0]

    def forward(self, x: Tensor, turns: Turns | None = None) -> Tensor:
        """x: [S, B, heads, K] -> the same, at ``turns`` or 0 to S - 1; computed in max(fp32, dtype)."""
        cos, sin = turns or (self.cos[: x.shape[0]], self.sin[: x.shape[0]])
        return _Turn.apply(x, cos, sin)


class _Turn(torch.autograd.Function):
    """Backward turns the other way, so nothing of x is kept; autograd's own takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.cos, ctx.sin = cos, sin
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _turn(grad, ctx.cos, -ctx.sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [S, B, heads, K], cos and sin: Turns in the format of the computation."""
    wide = x.to(cos.dtype)
    y = torch.empty_like(wide, memory_format=torch.contiguous_format)
    (a, b), (y_a, y_b) = wide.chunk(2, dim=-1), y.chunk(2, dim=-1)
    torch.mul(a, cos, out=y_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=y_b).addcmul_(a, sin)
    return y.to(x.dtype)


def _frequencies(model: ModelSection) -> Tensor:
    """Angle per position of each pair of features, [K/2], float64."""
    pairs = torch.arange(0, model.head_width, 2, dtype=torch.float64)
    plain = model.rope_base ** (-pairs / model.head_width)
    if model.rope_scaling == "none":
        return plain
    # Llama 3.1: how often a pair turns within the original length decides between plain and slow.
    turns = model.rope_original_positions * plain / (2 * pi)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (share + (1 - share) / model.rope_factor)

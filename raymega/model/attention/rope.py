"""Rotary position embedding (RoPE), by halves as in Llama or by neighbours as in DeepSeek.

Feature i of K turned ones is paired with feature i + K/2, or 2i with 2i + 1; pair i at position s
turns by the angle s / base^(2i/K), or slower where the wave lengths are scaled. It owns the table of
angles, one for all layers of a stage.
"""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raymega.config.schema import ModelSection
from raymega.parallel.core.compile import fused

Turns = tuple[Tensor, Tensor]
"""Cosines and sines of angles, [S, B, 1, K/2] or [S, 1, 1, K/2] each."""
HeadParts = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""


class Rope(nn.Module):
    """Turns the feature pairs of each head by its position; no parameters."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        model: ModelSection,
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_fused: bool = False,
    ) -> None:
        super().__init__()
        self.is_fused = is_fused
        positions = torch.arange(model.max_positions, dtype=torch.float64, device=device)
        angles = positions[:, None] * _frequencies(model).to(device)
        wide = torch.promote_types(dtype, torch.float32)
        scale = _yarn_scale(model, model.rope_mscale) / score_scale(model) ** 0.5
        for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, (table * scale).to(wide)[:, None, None], persistent=False)
        self.is_by_neighbours = model.mla.kv_lora_rank > 0

    def rotations(self, positions: Tensor) -> Turns:
        """Cosines and sines for tokens at ``positions`` [S, B] or [S, 1]; for all layers of a stage."""
        return self.cos[positions, 0], self.sin[positions, 0]

    def forward(self, x: Tensor, rotations: Turns | None = None) -> Tensor:
        """x: [S, B, heads, K] -> the same, at ``rotations`` or 0 to S - 1; computed in max(fp32, dtype)."""
        if self.is_by_neighbours:
            # Queries and keys in another order of features have the same products.
            x = x.unflatten(-1, (-1, 2)).mT.flatten(-2)
        return _Turn.apply(x, rotations or self._first(x.shape[0]), self.is_fused)

    def split(self, qkv: Tensor, rotations: Turns | None, *, sizes: tuple[int, int]) -> HeadParts:
        """Queries, keys and values, the first two turned as in :meth:`forward`.

        Args:
            qkv: [S, B, H + 2 G, K], not kept.
            rotations: See there.
            sizes: H and G.

        Returns:
            [S, B, H, K], and [S, B, G, K] twice.
        """
        return _Split.apply(qkv, rotations or self._first(qkv.shape[0]), sizes, self.is_fused)

    def _first(self, num_positions: int) -> Turns:
        return self.cos[:num_positions], self.sin[:num_positions]


class _Turn(torch.autograd.Function):
    """Backward turns the other way, so nothing of x is kept; autograd's own takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotations: Turns, is_fused: bool) -> Tensor:  # noqa: FBT001
        ctx.rotations, ctx.is_fused = rotations, is_fused
        return _turn_heads(x, *rotations, is_fused=is_fused)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.rotations
        return _turn_heads(grad, cos, -sin, is_fused=ctx.is_fused), None, None


class _Split(torch.autograd.Function):
    """Each part is written once in either direction; autograd's own split would copy gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        rotations: Turns,
        sizes: tuple[int, int],
        is_fused: bool,  # noqa: FBT001
    ) -> HeadParts:
        ctx.rotations, ctx.is_fused = rotations, is_fused
        H, G = sizes
        if is_fused:
            return fused(_split, is_on=True)(qkv.detach(), *rotations, H, G)
        q, k, v = qkv.split((H, G, G), dim=2)
        # A copy of v, or it would keep q and k too as they were before they were turned.
        return _turn_in_steps(q, *rotations), _turn_in_steps(k, *rotations), v.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.rotations
        if ctx.is_fused:
            q, k, v = grads
            return fused(_join, is_on=True)(q, k, v, cos, -sin), None, None, None
        sizes = [grad.shape[2] for grad in grads]
        S, B, _, K = grads[0].shape
        whole = grads[0].new_empty((S, B, sum(sizes), K))
        q, k, v = whole.split(sizes, dim=2)
        _turn_in_steps(grads[0], cos, -sin, out=q)
        _turn_in_steps(grads[1], cos, -sin, out=k)
        v.copy_(grads[2])
        return whole, None, None, None


def _turn_heads(x: Tensor, cos: Tensor, sin: Tensor, *, is_fused: bool) -> Tensor:
    if is_fused:
        return fused(_turn, is_on=True)(x.detach(), cos, sin)
    return _turn_in_steps(x, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [S, B, heads, K], cos and sin: Turns in the format of the computation."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _split(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> HeadParts:
    """See Rope.split."""
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    return _turn(q, cos, sin), _turn(k, cos, sin), v.clone(memory_format=torch.contiguous_format)


def _join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The parts in one tensor, the first two turned."""
    return torch.cat((_turn(q, cos, sin), _turn(k, cos, sin), v), 2)


def _turn_in_steps(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """What _turn does, by the fewest of torch's own kernels; into ``out`` of x's shape and format."""
    wide = x.to(cos.dtype)
    y = out
    if y is None or y.dtype != wide.dtype:
        y = torch.empty_like(wide, memory_format=torch.contiguous_format)
    (a, b), (y_a, y_b) = wide.chunk(2, dim=-1), y.chunk(2, dim=-1)
    torch.mul(a, cos, out=y_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=y_b).addcmul_(a, sin)
    if out is None:
        return y.to(x.dtype)
    return out if y is out else out.copy_(y)


def score_scale(model: ModelSection) -> float:
    """By what YaRN multiplies the scores of whole heads, beside 1 / sqrt(K)."""
    return _yarn_scale(model, model.rope_mscale_all_dim) ** 2


def _yarn_scale(model: ModelSection, mscale: float) -> float:
    """Peng et al. 2023, equation 22, with DeepSeek's weight ``mscale``."""
    if model.rope_scaling != "yarn" or model.rope_factor <= 1:
        return 1.0
    return 1.0 + 0.1 * mscale * log(model.rope_factor)


def _frequencies(model: ModelSection) -> Tensor:
    """Angle per position of each pair of features, [K/2], float64."""
    width = model.turned_width
    plain = model.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if model.rope_scaling == "none":
        return plain
    if model.rope_scaling == "yarn":
        share = _kept_by_yarn(model)
    else:
        # Llama 3.1: how often a pair turns within the original length decides: plain, slow, between.
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        rotations = model.rope_original_positions * plain / (2 * pi)
        share = ((rotations - low) / (high - low)).clamp(0, 1)
    return plain * (share + (1 - share) / model.rope_factor)


def _kept_by_yarn(model: ModelSection) -> Tensor:
    """Share of the plain frequency of each pair, [K/2]: 1 before the first pair that turns less than
    ``rope_beta_fast`` times within the original length, 0 after the last one that turns
    ``rope_beta_slow`` times."""
    width = model.turned_width

    def pair(rotations: float) -> float:
        wave = model.rope_original_positions / (rotations * 2 * pi)
        return width * log(wave) / (2 * log(model.rope_theta))

    first = max(floor(pair(model.rope_beta_fast)), 0)
    last = min(ceil(pair(model.rope_beta_slow)), width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float64)
    # No step function where both are the same pair, as in the authors' code.
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)

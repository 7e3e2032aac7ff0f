"""Rotary position embedding (RoPE), by halves as in Llama or interleaved as in DeepSeek.

Feature i of K rotary features is paired with feature i + K/2, or 2i with 2i + 1. Pair i at position s
rotates by the angle s / base^(2i/K), or less under linear, Llama 3.1 or YaRN scaling. All layers of a
stage share one table of angles; sliding layers may have a base, and so a table, of their own.
"""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raymega.config.schema import ModelSection
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.core.compile import fused
from raymega.plan.layers.family_parts import parts_of

Turns = tuple[Tensor, Tensor]
"""Cosines and sines of angles, [S, B, 1, K/2] or [S, 1, 1, K/2] each."""
HeadParts = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""


class Rope(nn.Module):
    """Rotation of the first feature pairs of each head by the token's position; no parameters.

    ``is_local`` makes the rotation of sliding layers, with a base of their own and without scaling.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        model: ModelSection,
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_fused: bool = False,
        is_local: bool = False,
    ) -> None:
        super().__init__()
        self.is_fused, self.is_local = is_fused, is_local
        base = model.attention.sliding_rope_theta
        self.local: Rope | None = None
        if is_local:
            model = model.model_copy(update={"rope_theta": base, "rope_scaling": "none"})
        elif base:
            self.local = Rope(model, dtype=dtype, device=device, is_fused=is_fused, is_local=True)
        positions = torch.arange(model.num_rope_positions, dtype=torch.float64, device=device)
        angles = positions[:, None] * _frequencies(model).to(device)
        wide = torch.promote_types(dtype, torch.float32)
        scale = _yarn_scale(model, model.rope_mscale) / score_scale(model) ** 0.5
        for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, (table * scale).to(wide)[:, None, None], persistent=False)
        # DeepSeek's latent attention and Llama 4 interleave pairs.
        is_latent = model.mla.kv_lora_rank > 0
        self.is_by_neighbours = is_latent or parts_of(model).has_neighbour_rope

    def rotations(self, positions: Tensor) -> Turns:
        """Return cosines and sines for ``positions`` [S, B] or [S, 1], for all layers of a stage."""
        return self.cos[positions, 0], self.sin[positions, 0]

    def all_rotations(self, positions: Tensor) -> tuple[Turns, Turns | None]:
        """Return :meth:`rotations`, and those of sliding layers that have a base of their own."""
        own = self.rotations(positions)
        return own, None if self.local is None else self.local.rotations(positions)

    def turns_of(self, token_layout: TokenLayout) -> Turns | None:
        """Return the cosines and sines of the tokens, where the stage has made them."""
        return token_layout.local_rotations if self.is_local else token_layout.rotations

    def forward(self, x: Tensor, rotations: Turns | None = None) -> Tensor:
        """Rotate x [S, B, heads, K] by ``rotations``, or by positions 0 to S - 1, in max(fp32, dtype)."""
        if self.is_by_neighbours:
            # Permuting features of queries and keys alike leaves their products as they are.
            x = x.unflatten(-1, (-1, 2)).mT.flatten(-2)
        return _Turn.apply(x, rotations or self._first(x.shape[0]), self.is_fused)

    def split(self, qkv: Tensor, rotations: Turns | None, *, sizes: tuple[int, int]) -> HeadParts:
        """Split into queries, keys and values, the first two rotated as in :meth:`forward`.

        Args:
            qkv: Fused heads, [S, B, H + 2 G, K]; not saved for backward.
            rotations: Cosines and sines, as for :meth:`forward`.
            sizes: Numbers of heads, (H, G).

        Returns:
            Queries [S, B, H, K], keys and values [S, B, G, K].
        """
        return _Split.apply(qkv, rotations or self._first(qkv.shape[0]), sizes, self.is_fused)

    def _first(self, num_positions: int) -> Turns:
        return self.cos[:num_positions], self.sin[:num_positions]


class _Turn(torch.autograd.Function):
    """Rotation whose backward rotates back, so it saves no x; autograd's own takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotations: Turns, is_fused: bool) -> Tensor:  # noqa: FBT001
        ctx.rotations, ctx.is_fused = rotations, is_fused
        return _turn_heads(x, *rotations, is_fused=is_fused)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.rotations
        if ctx.is_fused:
            return fused(_turn_back, is_on=True)(grad, cos, sin), None, None
        return _turn_in_steps(grad, cos, -sin), None, None


class _Split(torch.autograd.Function):
    """Split that writes each part once in either direction; autograd's split would copy gradients."""

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
        # Copy v: a view would keep the unrotated q and k alive with it.
        return _turn_in_steps(q, *rotations), _turn_in_steps(k, *rotations), v.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.rotations
        if ctx.is_fused:
            q, k, v = grads
            return fused(_join, is_on=True)(q, k, v, cos, sin), None, None, None
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
    """Rotate x [S, B, heads, K]; the dtype of ``cos`` is that of the computation."""
    a, b, rest = _parts(x, cos)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, *rest), -1).to(x.dtype)


def _turn_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo :func:`_turn`; a sine that is negated first would be a kernel of its own."""
    a, b, rest = _parts(x, cos)
    return torch.cat((a * cos + b * sin, b * cos - a * sin, *rest), -1).to(x.dtype)


def _parts(x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the halves of the rotated features, and the features behind them if there are any."""
    wide, pairs = x.to(cos.dtype), cos.shape[-1]
    a, b, *rest = wide.split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
    return a, b, rest if x.shape[-1] > 2 * pairs else []


def _split(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> HeadParts:
    """Compute :meth:`Rope.split` in a form that torch.compile fuses into one kernel."""
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    return _turn(q, cos, sin), _turn(k, cos, sin), v.clone(memory_format=torch.contiguous_format)


def _join(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Concatenate the parts [S, B, heads, K], the first two rotated back."""
    return torch.cat((_turn_back(q, cos, sin), _turn_back(k, cos, sin), v), 2)


def _turn_in_steps(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotate as ``_turn`` does in the fewest eager kernels; into ``out`` of x's shape and dtype."""
    wide = x.to(cos.dtype)
    y = out
    if y is None or y.dtype != wide.dtype:
        y = torch.empty_like(wide, memory_format=torch.contiguous_format)
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        y[..., turned:].copy_(wide[..., turned:])
    (a, b), (y_a, y_b) = (part[..., :turned].chunk(2, dim=-1) for part in (wide, y))
    torch.mul(a, cos, out=y_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=y_b).addcmul_(a, sin)
    if out is None:
        return y.to(x.dtype)
    return out if y is out else out.copy_(y)


def score_scale(model: ModelSection) -> float:
    """Return YaRN's factor on attention scores, in addition to 1 / sqrt(K)."""
    return _yarn_scale(model, model.rope_mscale_all_dim) ** 2


def _yarn_scale(model: ModelSection, mscale: float) -> float:
    """Return YaRN's scale (Peng et al. 2023, equation 22), with DeepSeek's weight ``mscale``."""
    if model.rope_scaling != "yarn" or model.rope_factor <= 1:
        return 1.0
    return 1.0 + 0.1 * mscale * log(model.rope_factor)


def _frequencies(model: ModelSection) -> Tensor:
    """Return the angle per position of each feature pair, [K/2] float64."""
    width = model.rope_width
    plain = model.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if model.rope_scaling == "none":
        return plain
    if model.rope_scaling == "linear":
        return plain / model.rope_factor
    if model.rope_scaling == "yarn":
        share = _kept_by_yarn(model)
    else:
        # Llama 3.1: pairs with many turns within the original length keep their frequency, those with
        # few are slowed by the factor, and those between are interpolated.
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        rotations = model.rope_original_positions * plain / (2 * pi)
        share = ((rotations - low) / (high - low)).clamp(0, 1)
    return plain * (share + (1 - share) / model.rope_factor)


def _kept_by_yarn(model: ModelSection) -> Tensor:
    """Return each pair's share of the unscaled frequency, [K/2] in [0, 1], by YaRN's ramp.

    It is 1 up to the pair that turns ``rope_beta_fast`` times within the original length, and 0 from
    the pair that turns ``rope_beta_slow`` times.
    """
    width = model.rope_width

    def pair(rotations: float) -> float:
        wave = model.rope_original_positions / (rotations * 2 * pi)
        return width * log(wave) / (2 * log(model.rope_theta))

    ends = pair(model.rope_beta_fast), pair(model.rope_beta_slow)
    if model.rope_truncate:
        ends = floor(ends[0]), ceil(ends[1])
    first, last = max(ends[0], 0), min(ends[1], width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float64)
    # 0.001 avoids a division by zero where both are the same pair, as in the authors' code.
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)

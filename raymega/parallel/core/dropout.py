"""Keyed dropout: an element is dropped by what it is, never by where or when it is computed.

The mask of (stream, sample, position, feature) is a pure function of these and the seed, so every
layout drops the same elements and a forward that runs again drops them again; there is no generator
whose state anyone keeps. A sample is counted over the run, so its index tells steps apart too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.core import rng

LEVELS = 1 << 16
"""An element is kept or dropped by 16 bits of its own, so rates come in steps of 1 / LEVELS."""
LANES = 4
"""Elements that share one 64-bit word."""

# Words mixed at once: they stay in a CPU's cache; a GPU wants few, large launches.
CPU_CHUNK = 1 << 15
GPU_CHUNK = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenKeys:
    """The keys of a micro-batch's tokens, made once for all layers of a stage.

    Attributes:
        own: [S/(cp*sp), B] int64, those of the positions that this rank holds between layers.
        rows: [S, B] int64, those of all positions, by which attention weights are dropped; None
            where they are not.
    """

    own: Tensor
    rows: Tensor | None


def row_keys(seed: int, samples: Tensor, positions: Tensor) -> Tensor:
    """64 bits for every token of a micro-batch, from which the masks of all its features follow.

    Args:
        seed: Of the run.
        samples: [B] int64, global sample indices; -1 for a slot without a sample. Or one a token,
            [S, B].
        positions: [S, B], or [S, 1] where all samples have the same; int64, in the sample.

    Returns:
        [S, B] int64.
    """
    sample, position = torch.broadcast_tensors(samples, positions)
    counter = (sample & rng.MASK, sample >> 32 & rng.MASK, position, torch.zeros_like(sample))
    high, low, _, _ = rng.philox(counter, rng.key(seed, "dropout", "rows"))
    return high << 32 | low


def place_key(seed: int, place: str) -> int:
    """What tells the masks of one place in the model (layers.3.mlp) from those of all others."""
    return rng.signed(rng.key(seed, "dropout", place))


def dropout(x: Tensor, keys: Tensor, *, rate: float) -> Tensor:
    """``x`` with a share ``rate`` of its elements zero and the others scaled up; the mask is kept.

    Args:
        x: [..., N].
        keys: [...] int64: tokens' keys plus the place's.
        rate: In [0, 1).
    """
    return _Dropout.apply(x, keys, rate)


def keep_mask(keys: Tensor, width: int, *, rate: float) -> Tensor:
    """Which of each row's ``width`` elements stay. keys: [...] int64 -> [..., width] bool.

    Word i of a row is SplitMix64's number i of the stream that starts at the row's key; it decides
    about elements 4 i to 4 i + 3.
    """
    num_words = -(-width // LANES)
    numbers = torch.arange(1, num_words + 1, device=keys.device)
    steps = numbers * rng.signed(rng.GOLDEN_GAMMA)
    rows = keys.reshape(-1, 1)
    kept = torch.empty(rows.shape[0], num_words * LANES, dtype=torch.bool, device=keys.device)
    chunk = CPU_CHUNK if keys.device.type == "cpu" else GPU_CHUNK
    num_rows = max(1, chunk // num_words)
    lowest = _dropped_levels(rate) - LEVELS // 2  # 16 bits read as a signed number
    for start in range(0, rows.shape[0], num_rows):
        words = rng.splitmix(rows[start : start + num_rows] + steps)
        torch.ge(words.view(torch.int16), lowest, out=kept[start : start + num_rows])
    return kept[:, :width].view(*keys.shape, width)


def _dropped_levels(rate: float) -> int:
    return min(round(rate * LEVELS), LEVELS - 1)


def _drop(x: Tensor, kept: Tensor, rate: float) -> Tensor:
    # Zero or x itself first, then one rounding: the same values whatever order tensors come in.
    return (x * kept).mul_(LEVELS / (LEVELS - _dropped_levels(rate)))


class _Dropout(torch.autograd.Function):
    """Keeps one byte an element; making the mask again would cost as much time as making it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, rate: float) -> Tensor:
        kept = keep_mask(keys, x.shape[-1], rate=rate)
        ctx.save_for_backward(kept)
        ctx.rate = rate
        return _drop(x, kept, rate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return _drop(grad, kept, ctx.rate), None, None

"""Keyed dropout: whether an element is dropped depends on its identity, not on rank or time.

The mask of (stream, sample, position, feature) is a pure function of these and the seed. So every
layout drops the same elements, and a recomputed forward drops them again, without generator state.
A sample is counted over the whole run, so its index tells steps apart too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.core import rng

LEVELS = 1 << 16
"""Values of an element's 16 random bits, which decide about it: rates are multiples of 1 / LEVELS."""
LANES = 4
"""Number of elements that share one 64-bit word."""

# Words that are mixed at once: a CPU's chunk stays in its cache, a GPU needs few large launches.
CPU_CHUNK = 1 << 15
GPU_CHUNK = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenKeys:
    """Dropout keys of a micro-batch's tokens, made once for all layers of a stage.

    Attributes:
        own: Keys [S/(cp*sp), B] int64 of the positions that this rank holds between layers.
        everywhere: Keys [S/cp, B] int64 of the positions that its tp group holds together.
        rows: Keys [S, B] int64 of all positions, for the dropout of attention weights; None without it.
    """

    own: Tensor
    everywhere: Tensor
    rows: Tensor | None = None


def row_keys(seed: int, samples: Tensor, positions: Tensor) -> Tensor:
    """Return a 64-bit key for each token of a micro-batch, from which its features' masks derive.

    Args:
        seed: Seed of the run.
        samples: Global sample indices [B] int64, or [S, B] for one a token; -1 in an empty slot.
        positions: Positions in the sample, [S, B] int64, or [S, 1] where all samples have the same.

    Returns:
        Keys [S, B] int64.
    """
    sample, position = torch.broadcast_tensors(samples, positions)
    counter = (sample & rng.MASK, sample >> 32 & rng.MASK, position, torch.zeros_like(sample))
    high, low, _, _ = rng.philox(counter, rng.key(seed, "dropout", "rows"))
    return high << 32 | low


def place_key(seed: int, place: str) -> int:
    """Return the key of one place in the model, such as ``layers.3.mlp``, to add to the tokens' keys."""
    return rng.signed(rng.key(seed, "dropout", place))


def dropout(x: Tensor, keys: Tensor, *, rate: float, first: int = 0) -> Tensor:
    """Return ``x`` with a share ``rate`` of its elements zero and the others scaled up; save the mask.

    Args:
        x: Activations [..., N].
        keys: Sums [...] int64 of each token's key and the place's key.
        rate: Share of elements to drop, in [0, 1).
        first: Number of x's first feature where x is a part of the features.
    """
    return _Dropout.apply(x, keys, rate, first)


def keep_mask(keys: Tensor, width: int, *, rate: float, first: int = 0) -> Tensor:
    """Return the mask of kept elements, from feature ``first`` on. keys: [...] int64 -> [..., width] bool.

    Word i of a row is SplitMix64's i-th number of the stream that starts at the row's key. It decides
    about elements 4 i to 4 i + 3.
    """
    word, skipped = divmod(first, LANES)
    num_words = -(-(skipped + width) // LANES)
    numbers = torch.arange(word + 1, word + num_words + 1, device=keys.device)
    steps = numbers * rng.signed(rng.GOLDEN_GAMMA)
    rows = keys.reshape(-1, 1)
    kept = torch.empty(rows.shape[0], num_words * LANES, dtype=torch.bool, device=keys.device)
    chunk = CPU_CHUNK if keys.device.type == "cpu" else GPU_CHUNK
    num_rows = max(1, chunk // num_words)
    lowest = _dropped_levels(rate) - LEVELS // 2  # 16 bits read as a signed number
    # some rows at a time, which bounds the temporaries
    for start in range(0, rows.shape[0], num_rows):
        words = rng.splitmix(rows[start : start + num_rows] + steps)
        torch.ge(words.view(torch.int16), lowest, out=kept[start : start + num_rows])
    return kept[:, skipped : skipped + width].reshape(*keys.shape, width)


def uniform_noise(keys: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return noise in (-1, 1) of 2^16 even values. keys: [...] int64 -> [..., width], of mean 0.

    Words are numbered as in :func:`keep_mask`.
    """
    num_words = -(-width // LANES)
    numbers = torch.arange(1, num_words + 1, device=keys.device)
    words = rng.splitmix(keys.reshape(-1, 1) + numbers * rng.signed(rng.GOLDEN_GAMMA))
    lanes = words.view(torch.int16)[:, :width].reshape(*keys.shape, width)
    return lanes.to(torch.promote_types(dtype, torch.float32)).add_(0.5).mul_(2 / LEVELS).to(dtype)


def _dropped_levels(rate: float) -> int:
    return min(round(rate * LEVELS), LEVELS - 1)


def _drop(x: Tensor, kept: Tensor, rate: float) -> Tensor:
    # Zero or x itself first, then one multiplication: it rounds once, alike on every layout.
    return (x * kept).mul_(LEVELS / (LEVELS - _dropped_levels(rate)))


class _Dropout(torch.autograd.Function):
    """Dropout that saves its mask, one byte an element: to recompute it would cost as much as forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, rate: float, first: int) -> Tensor:
        kept = keep_mask(keys, x.shape[-1], rate=rate, first=first)
        ctx.save_for_backward(kept)
        ctx.rate = rate
        return _drop(x, kept, rate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (kept,) = ctx.saved_tensors
        return _drop(grad, kept, ctx.rate), None, None, None

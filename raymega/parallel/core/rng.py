"""Counter-based random numbers: an element's value depends only on a key and its global index.

So any block of a tensor equals that block of the whole tensor, on every layout. The module holds no
state.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from math import prod, tau
from typing import Any

import numpy as np
import torch

from raymega.messages import Box
from raymega.plan.flat_boxes import linear_index

# Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; 2011).
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

# SplitMix64 (Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014); its three
# constants and the shifts between them, as signed numbers where torch has no other 64 bits.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
MIX_SHIFTS = (30, 27, 31)

# Elements that are drawn at once, which bounds the temporaries. A CPU's chunk stays in its cache and
# below the size from which torch starts threads; a GPU needs fewer, larger launches.
CPU_CHUNK = 1 << 14
GPU_CHUNK = 1 << 22

Words = tuple[Any, Any, Any, Any]  # tensors, arrays or ints


def key(seed: int, purpose: str, name: str) -> int:
    """Return the 64-bit key of one stream of numbers, such as the initial values of one tensor."""
    digest = blake2b(f"{seed}/{purpose}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def normal(
    key: int,
    box: Box,
    global_shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return a box of a standard normal tensor (Box-Muller), drawn in float64 and rounded to ``dtype``.

    Logarithm and cosine are the device's own: a GPU's float64 may differ from a CPU's in the last
    bit. Rounding to fewer bits nearly always removes the difference.
    """

    values = torch.empty(box.num_elements, dtype=dtype, device=device)
    is_cpu = values.device.type == "cpu"
    first = 0
    for index in _global_indices(
        box, global_shape, values.device, CPU_CHUNK if is_cpu else GPU_CHUNK
    ):
        part = values[first : first + index.numel()]
        first += index.numel()
        # numpy's integers take half of the time of torch's on a CPU
        counter: Any = index.numpy().view(np.uint64) if is_cpu else index
        is_large = prod(global_shape) > MASK
        low, high = (counter & MASK, counter >> 32) if is_large else (counter, 0)
        # four words give two fractions of 53 bits, which give one normal number
        words = philox((low, high, 0, 0), key)
        radius = (1.0 - _fraction(words[0], words[1])).log_().mul_(-2.0).sqrt_()
        angle = _fraction(words[2], words[3]).mul_(tau)
        part.copy_(radius.mul_(angle.cos_()))
    return values.view(box.shape)


def philox(counter: Words, key: int) -> Words:
    """Return four random 32-bit words for a 128-bit counter and a 64-bit key (Philox4x32-10).

    Words are int64 tensors or uint64 arrays with values in [0, 2**32); a word that all counters share may be
    an int. Products wrap as two's complement; bits above 32 are masked before the next product.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & MASK, key >> 32
    for number in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        if number == 0:  # the caller's words stay as they are, later ones are overwritten
            c1, c3 = c1 ^ k0, c3 ^ k1
        else:
            c1 ^= k0
            c3 ^= k1
        c1 ^= p1 >> 32
        c3 ^= p0 >> 32
        c1 &= MASK
        c3 &= MASK
        # an int does not wrap
        c0, c1, c2, c3 = (
            c1,
            p1 & MASK if isinstance(p1, int) else p1,
            c3,
            p0 & MASK if isinstance(p0, int) else p0,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


def uniform(counter: Words, key: int) -> torch.Tensor:
    """Return a uniform number in [0, 1), float64, for each 128-bit counter and a 64-bit key."""
    high, low, _, _ = philox(counter, key)
    return _fraction(high, low)


def signed(word: int) -> int:
    """Return the 64 bits of ``word`` as two's complement, as an int64 tensor holds them."""
    return word - (1 << 64) if word >> 63 else word


def splitmix(state: torch.Tensor) -> torch.Tensor:
    """Overwrite each 64-bit state with SplitMix64's output for it, and return ``state``.

    Args:
        state: States, int64 of any shape; those of one stream are GOLDEN_GAMMA apart.
    """
    shifted = torch.empty_like(state)
    for shift, multiplier in zip(MIX_SHIFTS, (*MIX_MULTIPLIERS, 1), strict=True):
        torch.bitwise_right_shift(state, shift, out=shifted)
        # torch shifts arithmetically; the generator is defined with a logical shift, so mask the sign.
        state.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier != 1:
            state.mul_(multiplier)
    return state


def _fraction(high: Any, low: Any) -> torch.Tensor:
    """Return the first 53 of 64 bits as a float64 in [0, 1)."""
    bits = high << 21
    bits |= low >> 11
    if isinstance(bits, np.ndarray):
        bits = torch.from_numpy(bits.view(np.int64))
    return bits.to(torch.float64).mul_(2.0**-53)


def _global_indices(
    box: Box, global_shape: tuple[int, ...], device: torch.device, limit: int
) -> Iterator[torch.Tensor]:
    """Yield the linear indices in the whole tensor of the box's elements, in order, ``limit`` at a time.

    A box is a list of runs: elements that lie one after the other in the whole tensor too.
    """
    # length of a run: the last dimensions, up to and with the first that is cut
    dim, run = len(box.shape), 1
    while dim and (dim == len(box.shape) or box.shape[dim] == global_shape[dim]):
        dim -= 1
        run *= box.shape[dim]
    # begin of each run
    starts = torch.tensor(linear_index(box.offset, global_shape), device=device)
    for extent, inner in zip(box.shape[:dim], range(1, dim + 1), strict=True):
        stride = prod(global_shape[inner:])
        starts = starts[..., None] + stride * torch.arange(extent, device=device)
    starts = starts.reshape(-1, 1)
    # several runs at a time, or parts of one
    inside = torch.arange(run, device=device)
    rows, columns = max(1, limit // max(1, run)), min(run, limit)
    for first in range(0, len(starts), rows):
        for begin in range(0, run, max(1, columns)):
            yield (starts[first : first + rows] + inside[begin : begin + columns]).reshape(-1)

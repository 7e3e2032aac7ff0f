"""Counter-based random numbers: an element's value depends only on a key and its global index.

So any block of a tensor equals that block of the whole tensor, on every layout. The module holds no
state.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from math import pi, prod
from typing import Protocol

import numpy as np
import torch

from raymega.box import Box
from raymega.plan.flat_boxes import linear_index

# Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; 2011).
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

# Philox4x64-10 of the same paper, which numpy has in C; initial values use it. A block of four words of 64
# bits gives eight elements.
WIDE_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WIDE_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
WIDE_MASK = (1 << 64) - 1
BLOCK_WORDS = 4
BLOCK_ELEMENTS = 8

# SplitMix64 (Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014); its three
# constants and the shifts between them, as signed numbers where torch has no other 64 bits.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
MIX_SHIFTS = (30, 27, 31)

# Elements that are drawn at once, which bounds the temporaries. A CPU's chunk stays in its cache and
# below the size from which torch starts threads; a GPU needs fewer, larger launches.
CPU_CHUNK = 1 << 15
GPU_CHUNK = 1 << 22

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
    """Return a box of a standard normal tensor, drawn in float64 and rounded to ``dtype``.

    Element i of the whole tensor uses word i // 2 of the key's Philox4x64-10 stream, as numpy numbers its
    words. Box-Muller makes two elements of the word's two halves.

    Logarithm, sine and cosine are the device's own: a GPU's float64 may differ from a CPU's in the last
    bit. Rounding to fewer bits nearly always removes the difference.
    """
    values = torch.empty(box.num_elements, dtype=dtype, device=device)
    is_cpu = values.device.type == "cpu"
    words: WordSource = NumpyWords(key) if is_cpu else TensorWords(key, values.device)
    limit, filled = CPU_CHUNK if is_cpu else GPU_CHUNK, 0
    for starts, run in _runs(box, global_shape, limit):
        # whole blocks that cover each run
        blocks, before = starts // BLOCK_ELEMENTS, starts % BLOCK_ELEMENTS
        num_blocks = -(-(int(before.max()) + run) // BLOCK_ELEMENTS)
        drawn = box_muller(words.draw(blocks, num_blocks))
        # the runs' own elements
        part = values[filled : filled + len(starts) * run].view(len(starts), run)
        filled += part.numel()
        if (before == before[0]).all():
            part.copy_(drawn[:, before[0] : before[0] + run])
        else:
            inside = torch.from_numpy(before[:, None] + np.arange(run))
            part.copy_(drawn.gather(1, inside.to(drawn.device)))
    return values.view(box.shape)


def box_muller(words: torch.Tensor) -> torch.Tensor:
    """Return two standard normal numbers for each word (Box and Muller 1958): [rows, 2 * words], float64.

    Args:
        words: Random words of 64 bits: [rows, words], int64. The lower half gives the radius, at most 6.76, and
            the upper half the angle.
    """
    low, high = words.view(torch.int32).view(-1, 2).unbind(1)
    # the middles of 2**32 equal parts of (0, 1); a half is signed
    uniform = low.to(torch.float64).mul_(2.0**-32).add_(0.5 + 2.0**-33)
    radius = uniform.log_().mul_(-2.0).sqrt_()
    angle = high.to(torch.float64).mul_(pi * 2.0**-31)
    normals = torch.empty(len(radius), 2, dtype=torch.float64, device=words.device)
    torch.mul(radius, angle.cos(), out=normals[:, 0])
    torch.mul(radius, angle.sin_(), out=normals[:, 1])
    return normals.view(len(words), -1)


class WordSource(Protocol):
    """The interface of a key's stream of random words."""

    def draw(self, blocks: np.ndarray, num_blocks: int) -> torch.Tensor:
        """Return the words of ``num_blocks`` blocks from each of ``blocks`` on: [rows, words], int64."""


class NumpyWords:
    """The stream of one key by numpy's Philox: 3 ns a word."""

    def __init__(self, key: int) -> None:
        self._source = np.random.Philox(key=key)
        self._next_block = 0

    def draw(self, blocks: np.ndarray, num_blocks: int) -> torch.Tensor:
        """Return the words of each row's blocks; jumps cost 1 us a row."""
        words = np.empty((len(blocks), num_blocks * BLOCK_WORDS), np.uint64)
        for row, block in zip(words, blocks.tolist(), strict=True):
            if block != self._next_block:
                # a counter of 256 bits, which also goes back by wrapping
                self._source.advance((block - self._next_block) % (1 << 256))
            row[:] = self._source.random_raw(len(row))
            self._next_block = block + num_blocks
        return torch.from_numpy(words.view(np.int64))


class TensorWords:
    """The same stream by tensor operations, for a GPU."""

    def __init__(self, key: int, device: torch.device) -> None:
        self._key, self._device = key, device

    def draw(self, blocks: np.ndarray, num_blocks: int) -> torch.Tensor:
        """Return the words of each row's blocks; numpy counts up before it draws, so block 0 has counter 1."""
        first = torch.from_numpy(blocks).to(self._device)
        counter = first[:, None] + torch.arange(1, num_blocks + 1, device=self._device)
        c0, c1, c2, c3 = counter, *(torch.zeros_like(counter) for _ in range(3))
        k0, k1 = self._key, 0
        for _ in range(ROUNDS):
            high0, low0 = _wide_product(c0, WIDE_MULTIPLIERS[0])
            high1, low1 = _wide_product(c2, WIDE_MULTIPLIERS[1])
            c0, c1, c2, c3 = high1 ^ c1 ^ signed(k0), low1, high0 ^ c3 ^ signed(k1), low0
            k0, k1 = (k0 + WIDE_WEYL[0]) & WIDE_MASK, (k1 + WIDE_WEYL[1]) & WIDE_MASK
        return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)


def _wide_product(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and lower 64 bits of unsigned products, by halves of 32 bits."""
    low, high = words & MASK, words >> 32 & MASK
    factor_low, factor_high = factor & MASK, factor >> 32
    middle = high * factor_low + (low * factor_low >> 32 & MASK)
    other = low * factor_high + (middle & MASK)
    return high * factor_high + (middle >> 32 & MASK) + (other >> 32 & MASK), words * signed(factor)


def philox(counter: Words, key: int) -> Words:
    """Return four random 32-bit words for a 128-bit counter and a 64-bit key (Philox4x32-10).

    Words are int64 tensors with values in [0, 2**32), and stay as they are. Products wrap as two's
    complement; bits above 32 are masked before the next product.
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
        c0, c1, c2, c3 = c1, p1, c3, p0
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


def _fraction(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the first 53 of 64 bits as a float64 in [0, 1)."""
    return (high << 21 | low >> 11).to(torch.float64).mul_(2.0**-53)


def _runs(box: Box, global_shape: tuple[int, ...], limit: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the box's elements in order, about ``limit`` at a time, as runs of one length: [rows], length.

    A run is elements that lie one after the other in the whole tensor too; its start is an index there.
    """
    # length of a run: the last dimensions, up to and with the first that is cut
    dim, run = len(box.shape), 1
    while dim and (dim == len(box.shape) or box.shape[dim] == global_shape[dim]):
        dim -= 1
        run *= box.shape[dim]
    # begin of each run
    starts = np.array(linear_index(box.offset, global_shape))
    for extent, inner in zip(box.shape[:dim], range(1, dim + 1), strict=True):
        starts = starts[..., None] + prod(global_shape[inner:]) * np.arange(extent)
    starts = starts.reshape(-1)
    # several runs at a time, or parts of one
    rows, columns = max(1, limit // max(1, run)), min(run, limit)
    for first in range(0, len(starts), rows):
        for begin in range(0, run, max(1, columns)):
            yield starts[first : first + rows] + begin, min(columns, run - begin)

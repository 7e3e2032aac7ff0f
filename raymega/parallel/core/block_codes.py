"""Codes and scales of weights in blocks: NF4 and fp8 with doubly quantised scales, on plain tensors.

The values are those of QLoRA (Dettmers et al. 2023) and of 8-bit dynamic quantisation (Dettmers 2015), computed in
float32. `plan/layers/base_blocks.py` defines the blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from raymega.plan.layers.base_blocks import (
    AT_ONCE,
    BLOCK,
    CODE_BITS,
    MEAN_BITS,
    SCALE_BLOCK,
    dynamic_values,
    format_values,
    row_blocks,
)


class Scales(NamedTuple):
    """Scales of M matrices with n blocks each.

    Attributes:
        codes: Place of each scale's distance from the mean in the 8-bit dynamic map, [M, n] uint8.
        second: Largest distance in each SCALE_BLOCK scales, [M, ceil(n/SCALE_BLOCK)] float32.
        mean: Mean scale of each matrix, [M] float32.
    """

    codes: Tensor
    second: Tensor
    mean: Tensor


@lru_cache(maxsize=16)
def code_values(base_dtype: str, device: torch.device) -> Tensor:
    """Return the values of a format between -1 and 1, ascending: float32, 16 of nf4 and 253 of fp8."""
    return torch.tensor(format_values(base_dtype), dtype=torch.float32, device=device)


@lru_cache(maxsize=4)
def dynamic_map(device: torch.device) -> Tensor:
    """Return the 256 values of the signed 8-bit dynamic map, ascending: float32 between -1 and 1."""
    return torch.tensor(dynamic_values(), dtype=torch.float32, device=device)


def block_maxima(rows: Tensor, first: int) -> Tensor:
    """Return the largest magnitude of each block of ``rows`` [R, N], whose columns begin at ``first`` -> [R, n] float32."""
    before, columns = first % BLOCK, rows.shape[1]
    blocks = row_blocks(before + columns)
    found = torch.empty(rows.shape[0], blocks, dtype=torch.float32, device=rows.device)
    for here in _portions(rows):
        # the first and the last block of a row may be cut: zeros fill them
        whole = pad(rows[here].float().abs(), (before, blocks * BLOCK - before - columns))
        found[here] = whole.view(-1, blocks, BLOCK).amax(-1)
    return found


def encode_scales(maxima: Tensor) -> Scales:
    """Quantise the scales of each matrix once more: [M, n] float32, the largest magnitudes of all its blocks.

    They are positive, so their mean is taken away first (QLoRA, section 3).
    """
    count = maxima.shape[1]
    # an exact sum: integers of at most MEAN_BITS bits, of each matrix for itself, whatever experts are beside it
    exponents = MEAN_BITS - maxima.amax(1, keepdim=True).frexp().exponent
    unit = torch.ldexp(maxima.new_ones(len(maxima), 1).double(), exponents)
    total = (maxima.double() * unit).round().long().sum(1, keepdim=True)
    mean = (total.double() / count / unit).squeeze(1).float()
    # the second level: blocks of scales, in the order of the matrix
    distances = maxima - mean[:, None]
    blocks = -(-count // SCALE_BLOCK)
    padded = pad(distances, (0, blocks * SCALE_BLOCK - count)).view(-1, blocks, SCALE_BLOCK)
    second = padded.abs().amax(-1)
    codes = _nearest(_share(padded, second[..., None]), dynamic_map(maxima.device))
    return Scales(codes.flatten(1)[:, :count].to(torch.uint8), second, mean)


def decode_scales(codes: Tensor, places: Tensor, second: Tensor, mean: Tensor) -> Tensor:
    """Return the scales of blocks of M matrices.

    Args:
        codes: Codes of the blocks, [M, R, n] uint8.
        places: Place of each block's second-level scale in its matrix, [R, n] int64.
        second: Second-level scales, [M, ceil(all blocks/SCALE_BLOCK)] float32.
        mean: Mean scales, [M] float32.

    Returns:
        Scales, [M, R, n] float32.
    """
    values = dynamic_map(codes.device)[codes.int()]
    return values * second[:, places] + mean[:, None, None]


def encode(rows: Tensor, maxima: Tensor, first: int, base_dtype: str) -> Tensor:
    """Return the code of each weight of ``rows`` [R, N] -> [R, N] uint8.

    Args:
        rows: Weights, whose columns begin at ``first`` of their tensor.
        maxima: Largest magnitude of each block of the whole tensor that the rows have a part of, [R, n] float32.
        first: Column of the tensor at which the rows begin.
        base_dtype: Format of the codes.
    """
    values, found = code_values(base_dtype, rows.device), torch.empty_like(rows, dtype=torch.uint8)
    of_column = column_blocks(rows.shape[1], first, rows.device)
    for here in _portions(rows):
        shares = _share(rows[here].float(), maxima[here].index_select(1, of_column))
        found[here] = _nearest(shares, values).to(torch.uint8)
    return found


def decode_into(  # see Args
    out: Tensor, codes: Tensor, scales: Tensor, *, first: int, base_dtype: str, start: int = 0
) -> None:
    """Write the weights of packed codes to ``out`` [R, N]: each format value times its block's scale, in float32.

    Args:
        out: Weights in the compute dtype, of columns from ``first``.
        codes: Packed codes, of which those of ``out`` begin at ``start``, flat uint8.
        scales: Scales of the blocks, [R, n] float32.
        first: Column of the tensor at which the rows begin.
        base_dtype: Format of the codes.
        start: Number of codes before those of ``out``.
    """
    values, columns = code_values(base_dtype, out.device), out.shape[1]
    of_column = column_blocks(columns, first, out.device)
    for here in _portions(out):
        begin, end = (start + row * columns for row in (here.start, here.stop))
        place = unpack(codes, begin, end, base_dtype).view(-1, columns)
        out[here] = values[place] * scales[here].index_select(1, of_column)


def pack(codes: Tensor, base_dtype: str) -> Tensor:
    """Return flat ``codes`` [N] uint8 in as few bytes as they need; of two codes in a byte the first has the high bits."""
    if CODE_BITS[base_dtype] == 8:
        return codes
    # a code more where their number is odd
    pairs = pad(codes, (0, codes.numel() % 2)).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1]


def unpack(packed: Tensor, begin: int, end: int, base_dtype: str) -> Tensor:
    """Return codes ``begin`` to ``end`` of a packed tensor, [end - begin] int32."""
    if CODE_BITS[base_dtype] == 8:
        return packed[begin:end].int()
    # whole bytes, of which the first may hold one code too many
    pairs = packed[begin // 2 : -(-end // 2)].int()
    return torch.stack((pairs >> 4, pairs & 15), 1).view(-1)[begin % 2 :][: end - begin]


def column_blocks(columns: int, first: int, device: torch.device) -> Tensor:
    """Return the block of each of ``columns`` columns that begin at ``first``, counted from the first's: [N] int64."""
    return (torch.arange(columns, device=device) + first % BLOCK) // BLOCK


def through_blocks(matrix: Tensor, base_dtype: str) -> Tensor:
    """Return the weights of a whole tensor [..., out, in] after encoding and decoding, in its dtype."""
    *_, out, columns = matrix.shape
    blocks = row_blocks(columns)
    rows = matrix.reshape(-1, columns)
    maxima = block_maxima(rows, 0)
    scales = encode_scales(maxima.view(-1, out * blocks))
    places = torch.arange(out * blocks, device=matrix.device).view(out, blocks) // SCALE_BLOCK
    decoded = decode_scales(scales.codes.view(-1, out, blocks), places, scales.second, scales.mean)
    found = torch.empty_like(rows)
    # codes are of the scale before its own quantisation, weights of the one after it
    packed = pack(encode(rows, maxima, 0, base_dtype).view(-1), base_dtype)
    decode_into(found, packed, decoded.view(-1, blocks), first=0, base_dtype=base_dtype)
    return found.view(matrix.shape)


def _share(values: Tensor, largest: Tensor) -> Tensor:
    """Return values / largest, and 0 where the largest is 0."""
    return torch.where(largest > 0, values / largest, 0.0)


def _nearest(shares: Tensor, values: Tensor) -> Tensor:
    """Return the place of the nearest of ascending ``values``; halfway the lower one: int32."""
    return torch.bucketize(shares, (values[:-1] + values[1:]) / 2, out_int32=True)


def _portions(rows: Tensor) -> list[slice]:
    """Return slices of rows with about AT_ONCE elements each."""
    step = max(1, AT_ONCE[rows.device.type] // max(1, rows.shape[1]))
    return [slice(at, min(at + step, len(rows))) for at in range(0, len(rows), step)]

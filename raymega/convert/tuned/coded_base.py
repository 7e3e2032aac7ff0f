"""Weights of a base in blocks as a run computed with them, in numpy.

`parallel/core/block_codes.py` computes the same with torch, on parts of a tensor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymega.plan.layers.base_blocks import (
    BLOCK,
    MEAN_BITS,
    SCALE_BLOCK,
    dynamic_values,
    format_values,
    row_blocks,
)

Single = NDArray[np.float32]


def through_blocks(values: NDArray[np.float64], base_dtype: str) -> NDArray[np.float64]:
    """Return weights [..., out, in] after encoding and decoding; each matrix has scales of its own."""
    *_, out, columns = values.shape
    matrices = values.reshape(-1, out, columns).astype(np.float32)
    return (
        np.stack([_matrix(each, base_dtype) for each in matrices])
        .reshape(values.shape)
        .astype(np.float64)
    )


def _matrix(matrix: Single, base_dtype: str) -> Single:
    rows, columns = matrix.shape
    blocks = row_blocks(columns)
    # zeros fill the last block of a row, and change no largest magnitude
    padded = np.pad(matrix, ((0, 0), (0, blocks * BLOCK - columns))).reshape(rows, blocks, BLOCK)
    largest = np.abs(padded).max(-1)
    scales = _double(largest.reshape(-1)).reshape(rows, blocks, 1)
    shares = _share(padded, largest[..., None])
    decoded = _nearest(shares, np.array(format_values(base_dtype), np.float32)) * scales
    return decoded.reshape(rows, -1)[:, :columns]


def _double(largest: Single) -> Single:
    """Return scales [n] after quantisation in 8 bits, less their mean."""
    # the mean of integers, as torch has it
    unit = np.ldexp(1.0, MEAN_BITS - int(np.frexp(largest.max())[1]))
    total = np.rint(largest.astype(np.float64) * unit).astype(np.int64).sum()
    mean = np.float32(float(total) / len(largest) / unit)
    blocks = -(-len(largest) // SCALE_BLOCK)
    padded = np.pad(largest - mean, (0, blocks * SCALE_BLOCK - len(largest))).reshape(
        blocks, SCALE_BLOCK
    )
    most = np.abs(padded).max(-1, keepdims=True)
    values = np.array(dynamic_values(), np.float32)
    found: Single = (_nearest(_share(padded, most), values) * most + mean).reshape(-1)[
        : len(largest)
    ]
    return found


def _share(values: Single, largest: Single) -> Single:
    return np.divide(values, largest, out=np.zeros_like(values), where=largest > 0)


def _nearest(shares: Single, values: Single) -> Single:
    """Return the nearest of ascending ``values``; halfway the lower one."""
    found: Single = values[np.searchsorted((values[:-1] + values[1:]) / 2, shares)]
    return found

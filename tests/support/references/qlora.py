"""QLoRA's quantisation of one matrix as its paper and bitsandbytes describe it, block by block in numpy."""

import numpy as np
import torch

# bitsandbytes' table of NF4, as published with QLoRA
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], dtype=np.float32)  # fmt: skip


def dynamic_map():
    """The values of create_dynamic_map(signed=True) of bitsandbytes."""
    data = [0.0, 1.0]
    for i in range(7):
        # torch's, as theirs: numpy's differs in the last bit
        bounds = torch.linspace(0.1, 1, 2**i + 1)
        means = (bounds[:-1] + bounds[1:]) / 2.0
        data += (10.0 ** (i - 6) * means).tolist() + (-(10.0 ** (i - 6)) * means).tolist()
    return np.sort(np.array(data, dtype=np.float32))


def through_nf4(matrix, block=64, scale_block=256):
    """A matrix [out, in] after 4-bit quantisation with doubly quantised scales, and back: float32 values."""
    rows = np.asarray(matrix, dtype=np.float32)
    starts = [(r, c) for r in range(rows.shape[0]) for c in range(0, rows.shape[1], block)]
    largest = np.array([np.abs(rows[r, c : c + block]).max() for r, c in starts], dtype=np.float32)
    scales = _double(largest, scale_block)
    found = np.empty_like(rows)
    for (r, c), most, scale in zip(starts, largest, scales, strict=True):
        part = rows[r, c : c + block]
        shares = part / most if most else np.zeros_like(part)
        found[r, c : c + block] = NF4[_nearest(shares, NF4)] * scale
    return found


def _double(largest, scale_block):
    """The scales after quantisation in 8 bits, their mean taken away."""
    mean = np.float32(largest.astype(np.float64).mean())
    values, found = dynamic_map(), np.empty_like(largest)
    for at in range(0, len(largest), scale_block):
        part = largest[at : at + scale_block] - mean
        most = np.abs(part).max()
        shares = part / most if most else np.zeros_like(part)
        found[at : at + scale_block] = values[_nearest(shares, values)] * most + mean
    return found


def _nearest(shares, values):
    return np.abs(shares[:, None].astype(np.float64) - values[None].astype(np.float64)).argmin(1)

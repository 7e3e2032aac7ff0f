"""Seconds that one kernel takes on a device: a matrix product, fused attention, element-wise work.

Pure functions of sizes and of the catalogue; what a model is made of is layer_time's.
"""

from __future__ import annotations

from math import ceil

from raymega.plan.hardware.catalog import CATALOGUE, Accelerator

TILE_ROWS = 128
TILE = TILE_ROWS * 128
"""Elements of the result that one core makes at a time."""
BACKWARD_ATTENTION = 2.5
"""Fused attention's backward multiplies five matrices for the forward's two (Dao 2023)."""

STREAM_SHARE = CATALOGUE["a100"].fitted.memory_share
"""Of the memory's bandwidth, by kernels that do one operation: fitted where all were such."""


def matmul_s(
    device: Accelerator,
    rows: float,
    inner: float,
    columns: float,
    *,
    is_8_bit: bool = False,
    element: int = 2,
) -> float:
    """[rows, inner] @ [inner, columns] of numbers with ``element`` bytes, or in 8 bits.

    The share of the peak falls with a short inner dimension and with few tiles for all cores
    (Narayanan et al. 2021, section 5.4.4); below that the memory's bandwidth is a floor.
    """
    fitted = device.fitted
    peak, share = device.peak_flops(element), fitted.matmul_share
    if is_8_bit and device.peak_8_bit_flops:
        peak, share, element = device.peak_8_bit_flops, fitted.matmul_8_bit_share, 1
    waves = rows * columns / (TILE * device.num_cores)
    loss = (1 + fitted.matmul_depth / inner) * (1 + fitted.matmul_waves / waves)
    work_s = 2 * rows * inner * columns / (peak * share) * loss
    moved = element * (rows * inner + inner * columns) + max(2, element) * rows * columns
    return max(work_s, memory_s(device, moved)) + fitted.launch_s


def grouped_matmul_s(
    device: Accelerator,
    sizes: tuple[float, float, float],
    *,
    groups: int,
    is_8_bit: bool = False,
    element: int = 2,
) -> float:
    """[rows, inner] @ [groups, inner, columns], each group of rows with its matrix, in one kernel.

    A tile that a group does not fill is worked through like a full one, and every matrix is read.

    Args:
        device: Where.
        sizes: Rows of all groups together, inner and columns.
        groups: Of equally many rows.
        is_8_bit: In fp8.
        element: Bytes of a number otherwise.
    """
    rows, inner, columns = sizes
    tiled = groups * TILE_ROWS * max(1.0, ceil(rows / groups / TILE_ROWS))
    work = matmul_s(device, tiled, inner, columns, is_8_bit=is_8_bit, element=element)
    moved = element * (groups * inner * columns + rows * (inner + columns))
    return max(work, memory_s(device, moved) + device.fitted.launch_s)


def attention_s(
    device: Accelerator,
    query_rows: float,
    keys: float,
    head_width: float,
    *,
    element: int = 2,
) -> float:
    """Fused causal forward of softmax(q k^T) v; ``query_rows`` are those of all heads and sequences."""
    flops = 4 * query_rows * keys * head_width / 2
    peak = device.peak_flops(element) * device.fitted.attention_share
    return flops / peak + device.fitted.launch_s


def memory_s(device: Accelerator, num_bytes: float) -> float:
    """Reading and writing ``num_bytes`` of the device's memory."""
    return num_bytes / (device.memory_bytes_per_s * device.fitted.memory_share)


def stream_s(device: Accelerator, num_bytes: float) -> float:
    """The same of kernels whose traffic is counted whole, not the least that it could be."""
    return num_bytes / (device.memory_bytes_per_s * STREAM_SHARE)


def host_s(device: Accelerator, num_bytes: float) -> float:
    """To the host's memory or back; both ways go at once."""
    return num_bytes / (device.host_bytes_per_s * device.fitted.link_share)

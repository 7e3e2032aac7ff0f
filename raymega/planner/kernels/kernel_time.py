"""Estimate the seconds of one kernel: a matrix product, fused attention or element-wise work.

The functions depend only on sizes and on a device of the catalogue.
``raymega.planner.cost.layer_time`` defines which kernels a layer has.
"""

from __future__ import annotations

from math import ceil

from raymega.plan.hardware.catalog import Accelerator

TILE_ROWS = 128
TILE = TILE_ROWS * 128
"""Elements of the result that one core computes at a time."""
BACKWARD_ATTENTION = 2.5
"""Backward over forward FLOPs of fused attention: five products for the forward's two (Dao 2023).
"""

STREAM_SHARE = 0.8
"""Share of the memory bandwidth that kernels reach whose traffic is counted in full. It was fitted to
runs on A100 in which all kernels were such."""


def matmul_s(
    device: Accelerator,
    rows: float,
    inner: float,
    columns: float,
    *,
    is_8_bit: bool = False,
    element: int = 2,
) -> float:
    """Return the seconds of the matrix product [rows, inner] @ [inner, columns].

    Numbers have ``element`` bytes, or 1 byte with ``is_8_bit`` on a device that has fp8. The share
    of the peak falls with a short inner dimension and with few tiles for all cores (Narayanan et
    al. 2021, section 5.4.4). The time of the memory traffic is a lower bound.
    """
    fitted = device.fitted
    peak, share = device.peak_flops(element), fitted.matmul_share
    if is_8_bit and device.peak_8_bit_flops:
        peak, share, element = device.peak_8_bit_flops, fitted.matmul_8_bit_share, 1
    # Loss to a short inner size, and to the last wave that is not full.
    waves = rows * columns / (TILE * device.num_cores)
    loss = (1 + fitted.matmul_depth / inner) * (1 + fitted.matmul_waves / waves)
    work_s = 2 * rows * inner * columns / (peak * share) * loss
    moved = element * (rows * inner + inner * columns) + max(2, element) * rows * columns
    return max(work_s, stream_s(device, moved)) + fitted.launch_s


def grouped_matmul_s(
    device: Accelerator,
    sizes: tuple[float, float, float],
    *,
    groups: int,
    is_8_bit: bool = False,
    element: int = 2,
) -> float:
    """Return the seconds of a grouped product, one matrix for each group of rows, in one kernel.

    The product is [rows, inner] @ [groups, inner, columns]. A tile that a group does not fill costs
    as much as a full tile, and every matrix is read.

    Args:
        device: Device that runs the kernel.
        sizes: Rows of all groups together, inner size and columns.
        groups: Number of groups, all with equally many rows.
        is_8_bit: Whether the product runs in fp8.
        element: Bytes of a number where the product does not run in fp8.
    """
    rows, inner, columns = sizes
    tiled = groups * TILE_ROWS * max(1.0, ceil(rows / groups / TILE_ROWS))
    work = matmul_s(device, tiled, inner, columns, is_8_bit=is_8_bit, element=element)
    moved = element * (groups * inner * columns + rows * (inner + columns))
    return max(work, stream_s(device, moved) + device.fitted.launch_s)


def attention_s(
    device: Accelerator,
    query_rows: float,
    keys: float,
    head_width: float,
    *,
    element: int = 2,
) -> float:
    """Return the seconds of the causal forward of fused attention, softmax(q k^T) v.

    ``query_rows`` counts the query rows of all heads and sequences.
    """
    flops = 4 * query_rows * keys * head_width / 2
    peak = device.peak_flops(element) * device.fitted.attention_share
    return flops / peak + device.fitted.launch_s


def memory_s(device: Accelerator, num_bytes: float) -> float:
    """Return the seconds of reading and writing ``num_bytes`` of the device's memory."""
    return num_bytes / (device.memory_bytes_per_s * device.fitted.memory_share)


def stream_s(device: Accelerator, num_bytes: float) -> float:
    """Return the seconds of kernels with ``num_bytes`` of memory traffic, counted in full.

    Callers of :func:`memory_s` count the least traffic possible instead.
    """
    return num_bytes / (device.memory_bytes_per_s * STREAM_SHARE)


def host_s(device: Accelerator, num_bytes: float) -> float:
    """Return the seconds of a copy to the host's memory or back; both directions run concurrently."""
    return num_bytes / (device.host_bytes_per_s * device.fitted.link_share)

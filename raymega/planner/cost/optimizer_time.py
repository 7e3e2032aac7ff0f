"""Estimate the seconds of an update besides its element-wise work.

They are those of Muon's whole matrices, and of maxima of blocks of 8-bit state. Neither overlaps
anything. ``raymega.planner.cost.step_time`` prices the element-wise work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

from raymega.config.schema import Job, ModelSection
from raymega.plan.grid import Grid
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.elements import Elements
from raymega.plan.memory.optimizer_state import format_of, kinds_of
from raymega.plan.memory.state_bytes import DTYPE_BYTES
from raymega.plan.tensor_table import layer_tensors, like_blocks
from raymega.plan.zero_levels import ZeroLevel, dp_shard_ranks, level_of
from raymega.planner.kernels.collective_time import (
    GroupSpan,
    all_reduce_s,
    exchange_s,
    gather_s,
    make_span,
)


class Transfer(NamedTuple):
    """Collective on Muon's matrices.

    Attributes:
        seconds: Function that prices the collective, exchange_s or gather_s.
        size: Number of ranks in the group.
        stride: Distance between neighbouring ranks of the group.
        num_bytes: Bytes on every rank, before an exchange or after a gather.
        times: Number of such collectives in an update.
    """

    seconds: Callable[[Accelerator, GroupSpan, float], float]
    size: int
    stride: int
    num_bytes: float
    times: int


def update_s(job: Job, held: Elements, grid: Grid, device: Accelerator) -> float:
    """Return the seconds of an update on a rank that holds ``held``, without element-wise work."""
    return _muon_s(job, held, grid, device) + _maxima_s(job, held, grid, device)


def newton_schulz_flops(model: ModelSection, layer: int, num_steps: int) -> float:
    """Return the FLOPs of Newton-Schulz on all matrices of a block.

    A step multiplies X X^T, its square, and both times X, for each [m, n] with m <= n.
    """
    total = 0.0
    for tensor in layer_tensors(model, layer):
        if tensor.role == "matrix":
            short, long = sorted(tensor.shape[-2:])
            number = prod(tensor.shape[:-2])
            total += number * num_steps * (4 * short * short * long + 2 * short**3)
    return total


def _muon_s(job: Job, held: Elements, grid: Grid, device: Accelerator) -> float:
    if job.optimizer.name != "muon":
        return 0.0
    moved = 0.0
    for each in transfers(job, held, grid):
        span = make_span(device, size=each.size, stride=each.stride)
        moved += each.times * each.seconds(device, span, each.num_bytes)
    return moved + _orthogonal_s(job, grid, device)


def transfers(job: Job, held: Elements, grid: Grid) -> Iterator[Transfer]:
    """Yield the collectives on dense matrices inside blocks, and on those of experts.

    Ranks of a cut send their parts to the owners and get them back. Ranks that share the state
    exchange parts as well; without sharding each owner's result is gathered by all that hold the
    same.
    """
    if job.optimizer.name != "muon":
        return
    is_shared_out = level_of(job.parallel) > ZeroLevel.NONE
    dense = held.dense - held.small - held.tables + held.wide
    for elements, replicas, cut, stride in (
        (dense, grid.replicas, grid.tp, grid.tp),
        (held.experts, grid.edp, grid.etp, grid.etp * grid.ep),
    ):
        if not elements:
            continue
        ranks = dp_shard_ranks(job.parallel, replicas) if is_shared_out else replicas
        part = elements / ranks * _wide(job)
        # To the owners and back: two exchanges.
        yield Transfer(exchange_s, cut, 1, part, 2)
        if is_shared_out:
            yield Transfer(exchange_s, ranks, stride, part, 2)
        else:
            yield Transfer(gather_s, ranks, stride, part * ranks, 1)


def _orthogonal_s(job: Job, grid: Grid, device: Accelerator) -> float:
    """Return the seconds of Newton-Schulz on a rank.

    Owners are spread evenly over the ranks that have parts of a matrix.
    """
    model, steps = job.model, job.optimizer.newton_schulz_steps
    blocks = like_blocks(model).items()
    flops = sum(n * newton_schulz_flops(model, layer, steps) for layer, n in blocks) / grid.pp
    ranks = dp_shard_ranks(job.parallel, grid.replicas) * grid.tp
    if level_of(job.parallel) == ZeroLevel.NONE:
        ranks = grid.replicas * grid.tp
    return flops / ranks / (device.peak_flops(_wide(job)) * device.fitted.matmul_share)


def _maxima_s(job: Job, held: Elements, grid: Grid, device: Accelerator) -> float:
    """Return the seconds of reducing block maxima over the ranks that share the state.

    Blocks that tp cuts inside a row are not counted.
    """
    if format_of(job.optimizer, "matrix") != "8bit" or level_of(job.parallel) == ZeroLevel.NONE:
        return 0.0
    span = make_span(device, size=dp_shard_ranks(job.parallel, grid.replicas), stride=grid.tp)
    kinds = len(kinds_of(job.optimizer.name, "matrix"))
    return all_reduce_s(device, span, held.blocks * kinds * _wide(job))


def _wide(job: Job) -> int:
    return max(4, DTYPE_BYTES[job.precision.dtype])

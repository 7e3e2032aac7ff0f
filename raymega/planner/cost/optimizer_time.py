"""Seconds of what an update does beside moving its own elements: Muon's whole matrices, and maxima of
blocks of 8-bit state.

Neither hides behind anything. What an update reads and writes is step_time's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from raymega.config.schema import Job, ModelSection
from raymega.plan.grid import Grid
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.optimizer_state import format_of, kinds_of
from raymega.plan.memory.state_bytes import DTYPE_BYTES, Elements
from raymega.plan.tensor_table import layer_tensors
from raymega.plan.zero_levels import ZeroLevel, dp_shard_ranks, level_of
from raymega.planner.kernels.collective_time import all_reduce_s, exchange_s, gather_s, make_span


@dataclass(frozen=True, kw_only=True, slots=True)
class _Field:
    """Matrices of one kind on a rank, and who has other parts of them.

    Attributes:
        elements: Of the rank's blocks.
        ranks: Which share the state out, or hold the same.
        cut: Which hold other blocks.
        stride: How far apart ``ranks`` lie.
    """

    elements: int
    ranks: int
    cut: int
    stride: int


def update_s(job: Job, held: Elements, grid: Grid, device: Accelerator) -> float:
    """Of a rank that holds so much."""
    return _muon_s(job, held, grid, device) + _maxima_s(job, held, grid, device)


def exchanged_bytes(job: Job, held: Elements, grid: Grid) -> float:
    """What a rank sends on the mean so that Muon's matrices come together and go back."""
    if job.optimizer.name != "muon":
        return 0.0
    total, is_shared_out = 0.0, level_of(job.parallel) > ZeroLevel.NONE
    for field in _fields(job, held, grid):
        part = field.elements / field.ranks
        to_owners = part * (field.ranks - 1) / field.ranks if is_shared_out else 0.0
        back = to_owners if is_shared_out else part * (field.ranks - 1)
        total += to_owners + back + 2 * part * (field.cut - 1) / field.cut
    return total * _wide(job)


def newton_schulz_flops(model: ModelSection, layer: int, num_steps: int) -> float:
    """Of all matrices of a block: X X^T, its square, and both times X, for each [m, n] with m <= n."""
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
    moved, is_shared_out = 0.0, level_of(job.parallel) > ZeroLevel.NONE
    for field in _fields(job, held, grid):
        over = make_span(device, size=field.ranks, stride=field.stride)
        cut = make_span(device, size=field.cut, stride=1)
        num_bytes = field.elements / field.ranks * _wide(job)
        moved += 2 * exchange_s(device, cut, num_bytes)
        if is_shared_out:
            moved += 2 * exchange_s(device, over, num_bytes)
        else:
            moved += gather_s(device, over, num_bytes * field.ranks)
    return moved + _orthogonal_s(job, grid, device)


def _orthogonal_s(job: Job, grid: Grid, device: Accelerator) -> float:
    """Owners are spread evenly over the ranks that have parts of a matrix."""
    model, steps = job.model, job.optimizer.newton_schulz_steps
    layers = range(model.num_layers)
    flops = sum(newton_schulz_flops(model, layer, steps) for layer in layers) / grid.pp
    ranks = dp_shard_ranks(job.parallel, grid.replicas) * grid.tp
    if level_of(job.parallel) == ZeroLevel.NONE:
        ranks = grid.replicas * grid.tp
    return flops / ranks / (device.peak_flops(_wide(job)) * device.fitted.matmul_share)


def _maxima_s(job: Job, held: Elements, grid: Grid, device: Accelerator) -> float:
    """Over the ranks that share the state out; where tp cuts a row inside of a block is not asked."""
    if format_of(job.optimizer, "matrix") != "8bit" or level_of(job.parallel) == ZeroLevel.NONE:
        return 0.0
    span = make_span(device, size=dp_shard_ranks(job.parallel, grid.replicas), stride=grid.tp)
    kinds = len(kinds_of(job.optimizer.name, "matrix"))
    return all_reduce_s(device, span, held.blocks * kinds * _wide(job))


def _fields(job: Job, held: Elements, grid: Grid) -> list[_Field]:
    """Matrices inside blocks: dense ones, and experts'."""
    is_shared_out = level_of(job.parallel) > ZeroLevel.NONE

    def ranks(number: int) -> int:
        return dp_shard_ranks(job.parallel, number) if is_shared_out else number

    dense = held.dense - held.small - held.tables + held.wide
    fields = [
        _Field(elements=dense, ranks=ranks(grid.replicas), cut=grid.tp, stride=grid.tp),
        _Field(
            elements=held.experts, ranks=ranks(grid.edp), cut=grid.etp, stride=grid.etp * grid.ep
        ),
    ]
    return [field for field in fields if field.elements]


def _wide(job: Job) -> int:
    return max(4, DTYPE_BYTES[job.precision.dtype])

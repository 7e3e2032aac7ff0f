"""Parameter counts and bytes of training state per rank, from the table of tensors.

They are exact but for the padding of sharded buckets, less than one element a bucket and rank.
Activations and temporary buffers are not counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raymega.config.schema import Job, ModelSection
from raymega.plan.grid import Grid
from raymega.plan.stages import Stage
from raymega.plan.tensors import layer_tensors, model_tensors, stage_tensors

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
NUM_MOMENTS = {"adamw": 2, "sgd": 1}
"""State tensors of an update, each shaped like the parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSize:
    """What one rank holds: elements, and bytes by part.

    ``num_owned`` of the ``num_parameters`` are those that the rank updates. ``master_bytes`` is 0
    when the compute format is already float32 or better, because the optimizer then works on the
    weights themselves.
    """

    num_parameters: int
    num_owned: int
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    moment_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return self.weight_bytes + self.gradient_bytes + self.master_bytes + self.moment_bytes


def count_parameters(model: ModelSection) -> int:
    """Elements of the whole model, a tied table counted once and padded rows not at all."""
    return sum(tensor.num_parameters for tensor in model_tensors(model))


def stage_elements(model: ModelSection, stage: Stage, *, tp: int, tp_rank: int) -> int:
    """Elements that a tensor-parallel rank of ``stage`` holds; all blocks are alike."""
    ends = replace(stage, num_layers=0)
    tables = (stage_tensors(model, ends), 1), (layer_tensors(model, 0), stage.num_layers)
    return sum(
        times * tensor.box(tp=tp, tp_rank=tp_rank).num_elements
        for tensors, times in tables
        for tensor in tensors
    )


def rank_state(job: Job, stages: Sequence[Stage], grid: Grid, *, tp_rank: int) -> StateSize:
    """State of a rank with ``stages``; a tied copy on another rank is real memory and counts.

    With a sharded optimizer each of the dp * cp ranks with the same parameters keeps its part of
    masters and moments, and all of weights and gradients.
    """
    return state_of(job, rank_elements(job.model, stages, grid, tp_rank=tp_rank), grid)


def rank_elements(
    model: ModelSection, stages: Sequence[Stage], grid: Grid, *, tp_rank: int = 0
) -> int:
    """Elements that a rank with ``stages`` holds."""
    ends = sum(
        stage_elements(model, replace(stage, num_layers=0), tp=grid.tp, tp_rank=tp_rank)
        for stage in stages
        if stage.is_first or stage.is_last
    )
    block = sum(t.box(tp=grid.tp, tp_rank=tp_rank).num_elements for t in layer_tensors(model, 0))
    return ends + block * sum(stage.num_layers for stage in stages)


def state_of(job: Job, count: int, grid: Grid) -> StateSize:
    """State of a rank that holds ``count`` elements."""
    owned = -(-count // grid.replicas) if job.parallel.sharding == "optimizer" else count
    compute = DTYPE_BYTES[job.precision.dtype]
    full = max(4, compute)
    return StateSize(
        num_parameters=count,
        num_owned=owned,
        weight_bytes=count * compute,
        gradient_bytes=count * full,
        master_bytes=owned * full if compute < full else 0,
        moment_bytes=owned * full * NUM_MOMENTS[job.optimizer.name],
    )

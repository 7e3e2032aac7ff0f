"""Parameter counts and bytes of training state per rank, from the table of tensors.

They are exact but for the padding of sharded buckets, less than one element a bucket and rank.
Activations and temporary buffers are not counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raymega.config.schema import Job, ModelSection
from raymega.plan.grid import ExpertPlace, Grid
from raymega.plan.stages import Stage
from raymega.plan.tensors import GlobalTensor, layer_tensors, model_tensors, stage_tensors

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """Trained elements that a rank holds, by who else holds them and in which format.

    Attributes:
        dense: Held by all replicas, the dp * cp ranks of equal tp and pp.
        experts: Held by the edp ranks with the same experts.
        wide: Held as ``dense`` are, in float32 or better: routers.
    """

    dense: int = 0
    experts: int = 0
    wide: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts + self.wide

    def plus(self, other: Elements, *, times: int = 1) -> Elements:
        """With ``other``, so many times."""
        return Elements(
            dense=self.dense + times * other.dense,
            experts=self.experts + times * other.experts,
            wide=self.wide + times * other.wide,
        )


def rank_state(job: Job, stages: Sequence[Stage], grid: Grid, *, tp_rank: int) -> StateSize:
    """State of a rank with ``stages``; a tied copy on another rank is real memory and counts.

    With a sharded optimizer each of the ranks with the same parameters keeps its part of masters and
    moments, and all of weights and gradients.
    """
    return state_of(job, rank_elements(job.model, stages, grid, tp_rank=tp_rank), grid)


def rank_elements(
    model: ModelSection, stages: Sequence[Stage], grid: Grid, *, tp_rank: int = 0
) -> Elements:
    """Elements that a rank with ``stages`` holds; blocks of one kind are counted once."""
    found = Elements()
    for stage in stages:
        if stage.is_first or stage.is_last:
            ends = stage_tensors(model, replace(stage, num_layers=0))
            found = found.plus(_elements(ends, grid, tp_rank))
    for layer, times in block_kinds(model, stages).items():
        found = found.plus(_elements(layer_tensors(model, layer), grid, tp_rank), times=times)
    return found


def block_kinds(model: ModelSection, stages: Sequence[Stage]) -> dict[int, int]:
    """One layer of each kind that is there (with experts, without), and how many are like it."""
    first: dict[bool, int] = {}
    counts: Counter[int] = Counter()
    for stage in stages:
        for layer in stage.layers:
            counts[first.setdefault(model.moe.holds_experts(layer), layer)] += 1
    return dict(counts)


def _elements(tensors: Sequence[GlobalTensor], grid: Grid, tp_rank: int) -> Elements:
    place = ExpertPlace(ep=grid.ep, etp=grid.etp)
    found: Counter[str] = Counter()
    for tensor in (tensor for tensor in tensors if tensor.role != "state"):
        kind = "experts" if tensor.is_expert else "wide" if tensor.is_wide else "dense"
        found[kind] += tensor.box(tp=grid.tp, tp_rank=tp_rank, experts=place).num_elements
    return Elements(**found)


def state_of(job: Job, held: Elements, grid: Grid) -> StateSize:
    """State of a rank that holds so many elements."""
    owned, owned_wide = held.dense + held.experts, held.wide
    if job.parallel.sharding == "optimizer":
        owned = -(-held.dense // grid.replicas) + -(-held.experts // grid.edp)
        owned_wide = -(-held.wide // grid.replicas)
    compute = DTYPE_BYTES[job.precision.dtype]
    full = max(4, compute)
    return StateSize(
        num_parameters=held.total,
        num_owned=owned + owned_wide,
        weight_bytes=(held.dense + held.experts) * compute + held.wide * full,
        gradient_bytes=held.total * full,
        master_bytes=owned * full if compute < full else 0,
        moment_bytes=(owned + owned_wide) * full * NUM_MOMENTS[job.optimizer.name],
    )

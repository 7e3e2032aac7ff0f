"""Group the ranks of a pipeline into classes that hold equally much of everything.

Costs of stages and ranks are computed once a class, so that a pipeline of 64 ranks is counted as
three.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from raymega.plan.adapters import tuned_kind
from raymega.plan.layers.layer_pattern import LayerKind, layer_kind
from raymega.plan.memory.activation_shape import ActivationShape, activation_shape
from raymega.plan.memory.elements import Elements
from raymega.plan.memory.state_bytes import rank_elements
from raymega.plan.run_plan import RunPlan
from raymega.plan.stages import Stage

BlockKind = tuple[LayerKind, tuple[object, ...]]
"""Kind of a block, and what of its number decides which of its tensors are trained."""
StageKind = tuple[frozenset[tuple[BlockKind, int]], tuple[int, bool], tuple[int, int], bool, bool]
"""Kind of a stage; stages of one kind cost the same.

It has the number of blocks of each kind, and of the decoder's where there are two sides, with whether the encoder's
last block is there, which has a norm more. Then come the numbers of (dense, expert) blocks that run no product in fp8
where others do, and whether the stage is the first and the last one.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankClass:
    """Ranks of a pipeline whose stages are of the same kinds.

    Attributes:
        pp_ranks: Pipeline ranks, ascending; the first has the most micro-batches in flight.
        stages: Stages of the first rank, by chunk.
        kinds: Kinds of these stages.
        elements: Elements that each rank holds, those of tensor-parallel rank 0.
    """

    pp_ranks: tuple[int, ...]
    stages: tuple[Stage, ...]
    kinds: tuple[StageKind, ...]
    elements: Elements


def stage_kind(shape: ActivationShape, stage: Stage) -> StageKind:
    """Return the kind of one stage."""
    ends = stage.is_first, stage.is_last
    numbers = (*stage.layers, *shape.further(stage))
    model = shape.model
    counts = Counter((layer_kind(model, number), tuned_kind(model, number)) for number in numbers)
    kinds = frozenset(counts.items())
    return kinds, shape.sides(stage), shape.kept_wide(stage), *ends


def rank_kinds(plan: RunPlan) -> tuple[RankClass, ...]:
    """Return the rank classes of a plan, the class of pipeline rank 0 first."""
    shape = activation_shape(plan.job)
    alike: dict[tuple[StageKind, ...], list[int]] = {}
    for pp_rank in range(plan.grid.pp):
        kinds = tuple(stage_kind(shape, stage) for stage in plan.chunks_of(pp_rank))
        alike.setdefault(kinds, []).append(pp_rank)
    return tuple(
        RankClass(
            pp_ranks=tuple(pp_ranks), stages=(stages := plan.chunks_of(pp_ranks[0])), kinds=kinds,
            elements=rank_elements(plan.job, stages, plan.grid),
        )
        for kinds, pp_ranks in alike.items()
    )  # fmt: skip

"""Check the rules of pipelines: layers of each stage, and sizes of the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raymega.config.schema import ParallelSection
from raymega.errors import Fault
from raymega.plan.batch import make_batch
from raymega.plan.stages import EVEN_ONLY, KINDS, layer_counts, make_stages, placement_faults
from raymega.plan.validation.rule import MAX_LISTED, reads
from raymega.plan.validation.unused_fields import default_of
from raymega.schedule.order import make_sizes
from raymega.schedule.table import (
    MOST_PASSES,
    make_placement,
    schedule_faults,
    unused_size_faults,
)

PLACING = ("stages", *EVEN_ONLY)
SCHEDULING = ("microbatch_group_size_per_vp_stage", "max_in_flight_microbatches",
              "wgrad_activation_fraction")  # fmt: skip
BY_STAGES = ", or place layers by parallel.stages"
"""End of a remedy for the job's own layers; a teacher's are spread evenly."""
PIPELINE = "schedule.name, parallel.pp, schedule.chunks"


@reads("model.num_layers num_nextn_predict_layers")
def count_faults(layers: int, further: int) -> Iterator[Fault]:
    """Check that the model's layers are few enough to be listed; other rules list them."""
    yield from listed_faults("num_layers", layers)
    yield from listed_faults("num_nextn_predict_layers", further)


def listed_faults(field: str, layers: int) -> Iterator[Fault]:
    """Check the number of layers that ``field`` of the model section gives."""
    if layers > MAX_LISTED:
        yield Fault(
            fact=f"model.{field}={layers}",
            rule=f"tensors are listed layer by layer, for at most {MAX_LISTED:,} of them",
            remedy=f"use at most {MAX_LISTED}",
        )


@reads("parallel.pp, model.num_layers, parallel.stages")
def layer_faults(pp: int, layers: int, stages: str) -> Iterator[Fault]:
    """Check that there is at least one layer for each rank."""
    if pp > layers and stages in KINDS:
        yield Fault(
            fact=f"parallel.pp={pp}",
            rule=f"every rank needs a layer, and model.num_layers={layers}",
            remedy=f"use parallel.pp of at most {layers}{BY_STAGES}",
        )


@reads("data.global_batch_size, schedule.micro_batch_size chunks, parallel.dp pp")
def pass_faults(batch: int, micro_batch: int, chunks: int, dp: int, pp: int) -> Iterator[Fault]:
    """Check that the passes of a step are few enough to be listed."""
    number, stages = make_batch(
        global_batch_size=batch, micro_batch_size=micro_batch, dp=dp
    ).num_micro_batches, pp * chunks  # fmt: skip
    # faults of the stages alone are reported elsewhere
    if number * stages <= MOST_PASSES or stages > MOST_PASSES:
        return
    least = -(-batch * stages // (MOST_PASSES * dp))
    yield Fault(
        fact=f"data.global_batch_size={batch} with schedule.micro_batch_size={micro_batch} and "
        f"parallel.dp={dp}",
        rule=f"that is {number:,} micro-batches a step through {stages} stages; a schedule lists "
        f"{MOST_PASSES:,} passes at most",
        remedy=f"use --set schedule.micro_batch_size={least} or more, a larger parallel.dp, or a "
        "smaller data.global_batch_size",
    )


@reads(f"{PIPELINE}, schedule.{' '.join(SCHEDULING)}")
def sizes_faults(
    name: str, pp: int, chunks: int, group_size: int | str, *others: int | float | str
) -> Iterator[Fault]:
    """Check the sizes of the schedule, and that it reads all fields that are set."""
    sizes = make_sizes(
        pp=pp, chunks=chunks, microbatch_group_size_per_vp_stage=group_size, num_micro_batches=1
    )
    # fields that are set: only those are reported as unused
    by_field = dict(zip(SCHEDULING, (group_size, *others), strict=True))
    given = {
        field: value
        for field, value in by_field.items()
        if value != default_of(f"schedule.{field}")
    }
    yield from schedule_faults(name, sizes)
    yield from unused_size_faults(name, chunks=chunks, given=given)


@reads(f"{PIPELINE}, model.num_layers, parallel.{' '.join(PLACING)}")
def stage_faults(
    name: str, pp: int, chunks: int, layers: int, *placing: str | int | bool
) -> Iterator[Fault]:
    """Check that the layers can be placed on the stages, and that no rank is left empty."""
    if layers > MAX_LISTED:
        return  # layer_faults reports it
    asked = f"parallel.pp={pp} with schedule.chunks={chunks}"
    if pp * chunks > MAX_LISTED:
        yield Fault(
            fact=asked,
            rule=f"that is {pp * chunks} stages, which are listed one by one: at most "
            f"{MAX_LISTED:,}",
            remedy="use fewer ranks or chunks",
        )
        return
    # placement on stages
    by_field: dict[str, Any] = dict(zip(PLACING, placing, strict=True))
    parallel = ParallelSection(**by_field)
    placement = make_placement(name, pp=pp, chunks=chunks)
    faults = [*placement_faults(parallel, num_layers=layers, num_stages=placement.num_stages)]
    if faults or (pp > layers and parallel.stages in KINDS):
        yield from faults
        return
    # ranks without layer, embedding or head
    stages = make_stages(
        layer_counts(parallel, num_layers=layers, num_stages=placement.num_stages, loss_cost=0.0)
    )
    empty = [
        rank
        for rank in range(pp)
        if not any(stages[placement.stage(rank, c)].has_tensors for c in range(chunks))
    ]
    if empty:
        yield Fault(
            fact=asked,
            rule=f"every rank needs a layer, the embedding or the head, and rank {empty[0]} of the "
            f"pipeline gets none of model.num_layers={layers}",
            remedy="use fewer chunks or ranks, or place layers by parallel.stages",
        )

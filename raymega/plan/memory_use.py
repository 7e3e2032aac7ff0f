"""Bytes that a rank needs at the most: state, activations in flight, and what the device keeps back.

State is state_size's and activations are activations' to count; here they are put together for every
rank of the pipeline, by closed forms that the lists of the schedules agree with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raymega.plan.activations import ActivationShape, activation_shape, stage_activations
from raymega.plan.context_cost import shape_cost
from raymega.plan.run_plan import RunPlan
from raymega.plan.stages import Stage
from raymega.plan.state_size import Elements, rank_elements, state_of

RESERVED_BYTES = 2 * 2**30
"""Of a GPU that no tensor can have: the driver's context and the buffers of communicators."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Of the rank that needs most; ``pp_rank`` says where it is."""

    pp_rank: int
    state_bytes: int
    activation_bytes: int
    reserved_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.state_bytes + self.activation_bytes + self.reserved_bytes


def pipeline_elements(plan: RunPlan) -> tuple[Elements, ...]:
    """Parameters of each rank of the pipeline: those of tensor-parallel rank 0."""
    placement = plan.placement
    return tuple(
        rank_elements(
            plan.job,
            [plan.stages[placement.stage(pp, chunk)] for chunk in range(placement.chunks)],
            plan.grid,
        )
        for pp in range(plan.grid.pp)
    )


def memory_use(plan: RunPlan, elements: Sequence[Elements] = ()) -> MemoryUse:
    """What the fullest rank of ``plan`` needs on a GPU; the arguments are pipeline_memory's."""
    return max(pipeline_memory(plan, elements), key=lambda use: use.total_bytes)


def pipeline_memory(plan: RunPlan, elements: Sequence[Elements] = ()) -> list[MemoryUse]:
    """The same of every rank of the pipeline.

    Args:
        plan: Of which.
        elements: What pipeline_elements gives, when that is known already.
    """
    shape, placement = activation_shape(plan.job), plan.placement
    kept = _kept_by_stage(shape, plan.stages)
    passing = _passing_bytes(shape)
    uses = []
    for pp_rank, held in enumerate(elements or pipeline_elements(plan)):
        chunks = [kept[placement.stage(pp_rank, chunk)] for chunk in range(placement.chunks)]
        in_flight = micro_batches_in_flight(
            plan.job.schedule.name,
            pp=plan.grid.pp,
            pp_rank=pp_rank,
            chunks=placement.chunks,
            num_micro_batches=plan.batch.num_micro_batches,
            max_activations=plan.job.schedule.max_activations,
        )
        mean = sum(each for each, _ in chunks) / len(chunks)
        activations = round(in_flight * mean) + max(again for _, again in chunks) + passing
        uses.append(
            MemoryUse(
                pp_rank=pp_rank, state_bytes=state_of(plan.job, held, plan.grid).total_bytes,
                activation_bytes=activations, reserved_bytes=RESERVED_BYTES,
            )
        )  # fmt: skip
    return uses


def _kept_by_stage(shape: ActivationShape, stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """Bytes for each micro-batch and bytes while blocks run again; like stages are counted once."""
    known: dict[tuple[int, int, bool, bool], tuple[int, int]] = {}
    found = []
    for stage in stages:
        kind = stage.num_layers, shape.blocks_with_experts(stage), stage.is_first, stage.is_last
        if kind not in known:
            kept = stage_activations(shape, stage)
            known[kind] = kept.micro_batch_bytes, kept.rerun_bytes
        found.append(known[kind])
    return found


def _passing_bytes(shape: ActivationShape) -> int:
    """Others' keys, values and gradients while one layer works."""
    if shape.parallel.cp == 1:
        return 0
    return round(shape_cost(shape, shape.parallel.cp_method).passing_bytes)


def micro_batches_in_flight(  # one a size
    schedule: str,
    *,
    pp: int,
    pp_rank: int,
    chunks: int,
    num_micro_batches: int,
    max_activations: int | str = "pp",
) -> int:
    """The most that wait for their backward on one rank, each chunk's counted by itself.

    1F1B holds one for each stage from here to the end (Narayanan et al. 2021, figure 3); its
    interleaved form warms up all chunks but one, and twice the way to the end (figure 4). Zero-bubble
    schedules hold as many on every rank (Qi et al. 2023, 2024), zb_auto what it may.
    """
    after = pp - 1 - pp_rank
    held = {
        "gpipe": num_micro_batches * chunks,
        "zb_h1": pp,
        "zb_auto": pp if max_activations == "pp" else int(max_activations),
        "zb_h2": 2 * pp - 1,
        "zb_v": 2 * pp,
        "dualpipe_v": 2 * pp + 1,
    }
    of_1f1b = after + 1 if chunks == 1 or pp == 1 else 2 * after + 1
    warm = held.get(schedule, of_1f1b + (chunks - 1) * pp)
    return min(num_micro_batches * chunks, warm)

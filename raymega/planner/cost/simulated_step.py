"""A step as its schedule would go: the lists of all ranks, played with the times that are predicted.

step_time's closed forms rank layouts; the few that are shown are played, which knows of uneven stages,
of rounds that are not full and of messages that arrive behind work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raymega.plan.batch import BatchPlan
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.cost.step_time import StepTime, message_time, stage_times, step_time
from raymega.schedule.instructions import Instruction
from raymega.schedule.simulate import Durations, Simulation, simulate
from raymega.schedule.table import make_schedule

MOST_PASSES = 12_000
"""Of all ranks together; what goes on as before for longer is not played."""
LEAST_ROUNDS = 2
"""Micro-batches that are played at least, in pipeline depths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTimes:
    """What the simulation of a step takes for each pass: as predicted, by stage.

    Attributes:
        stages: By pipeline rank and chunk.
        transfer: From a send to its arrival.
        handling: Of a send or receive on its rank.
    """

    stages: Sequence[Sequence[Durations]]
    transfer: float
    handling: float = 0.0

    def of_task(self, rank: int, task: Instruction) -> float:
        """Of one pass."""
        return self.stages[rank][task.chunk].of(task.op)


def played_step(plan: RunPlan, device: Accelerator) -> StepTime:
    """``step_time`` of the plan, with the waiting that its schedule shows when it is played."""
    time = step_time(plan, device)
    if plan.grid.pp == 1 or device.shared_cores:
        return time
    micro_batches = plan.batch.num_micro_batches
    played = _played(plan)
    pipeline_s = play(plan, device, num_micro_batches=played).time
    busy_s = time.compute_s + time.tensor_parallel_s + time.experts_s
    if played < micro_batches:  # the rest goes on at the pace of the closed forms
        few = step_time(replace(plan, batch=_batch(plan, played)), device)
        pipeline_s += time.pipeline_s - time.straggler_s - few.pipeline_s + few.straggler_s
    waiting_s = max(0.0, pipeline_s - busy_s)
    # Messages are what is waited for beyond filling and draining; what the closed forms have not, waits too.
    messages_s = min(time.messages_s, max(0.0, waiting_s - time.bubble_s))
    return replace(time, messages_s=messages_s, bubble_s=waiting_s - messages_s)


def play(plan: RunPlan, device: Accelerator, *, num_micro_batches: int) -> Simulation:
    """The pipeline of a step with so many micro-batches."""
    times = stage_times(plan, device)
    by_rank = [
        [times[stage.index].durations for stage in plan.chunks_of(pp_rank)]
        for pp_rank in range(plan.grid.pp)
    ]
    sizes = plan.sizes(_batch(plan, num_micro_batches))
    program = make_schedule(plan.job.schedule.name, sizes)
    return simulate(program, PlannedTimes(stages=by_rank, transfer=message_time(plan, device)))


def _batch(plan: RunPlan, num_micro_batches: int) -> BatchPlan:
    """The plan's, of so many."""
    batch = plan.batch
    size = num_micro_batches * batch.micro_batch_size * batch.dp
    return replace(batch, num_micro_batches=num_micro_batches, global_batch_size=size)


def _played(plan: RunPlan) -> int:
    """Micro-batches that are played: all, or so many fewer that the last round is as full as it is."""
    pp, whole = plan.grid.pp, plan.batch.num_micro_batches
    rounds = max(LEAST_ROUNDS, MOST_PASSES // (2 * pp * pp * plan.placement.chunks))
    return min(whole, rounds * pp + whole % pp)

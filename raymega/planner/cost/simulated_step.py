"""Predict a step by simulating its schedule: instruction lists of all ranks with predicted times.

The closed forms of ``raymega.planner.cost.step_time`` rank layouts. The few that are shown are
simulated, which includes uneven stages, rounds that are not full, and messages that overlap work.
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
"""Most passes that are simulated, over all ranks; a longer steady state is extrapolated."""
LEAST_ROUNDS = 2
"""Least number of simulated micro-batches, in multiples of the pipeline depth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTimes:
    """Predicted durations of a step for its simulation.

    Attributes:
        stages: Durations of the passes, by pipeline rank and chunk.
        transfer: Seconds from a send to its arrival.
        handling: Seconds that a send or receive occupies its rank.
    """

    stages: Sequence[Sequence[Durations]]
    transfer: float
    handling: float = 0.0

    def of_task(self, rank: int, task: Instruction) -> float:
        """Return the seconds of one pass."""
        return self.stages[rank][task.chunk].of(task.op)


def played_step(plan: RunPlan, device: Accelerator) -> StepTime:
    """Return the step time of a plan, with the waiting time of its simulated schedule."""
    time = step_time(plan, device)
    if plan.grid.pp == 1 or device.shared_cores:
        return time
    micro_batches = plan.batch.num_micro_batches
    played = _played(plan)
    pipeline_s = play(plan, device, num_micro_batches=played).time
    busy_s = time.compute_s + time.tensor_parallel_s + time.experts_s
    if played < micro_batches:  # closed forms extrapolate the rest
        few = step_time(replace(plan, batch=_batch(plan, played)), device)
        pipeline_s += time.pipeline_s - time.straggler_s - few.pipeline_s + few.straggler_s
    waiting_s = max(0.0, pipeline_s - busy_s)
    # Messages take the waiting beyond the closed forms' bubble; all other waiting is bubble.
    messages_s = min(time.messages_s, max(0.0, waiting_s - time.bubble_s))
    return replace(time, messages_s=messages_s, bubble_s=waiting_s - messages_s)


def play(plan: RunPlan, device: Accelerator, *, num_micro_batches: int) -> Simulation:
    """Simulate the pipeline of a step with ``num_micro_batches`` micro-batches."""
    times = stage_times(plan, device)
    by_rank = [
        [times[stage.index].durations for stage in plan.chunks_of(pp_rank)]
        for pp_rank in range(plan.grid.pp)
    ]
    sizes = plan.sizes(_batch(plan, num_micro_batches))
    program = make_schedule(plan.job.schedule.name, sizes)
    return simulate(program, PlannedTimes(stages=by_rank, transfer=message_time(plan, device)))


def _batch(plan: RunPlan, num_micro_batches: int) -> BatchPlan:
    """Return the plan's batch with another number of micro-batches."""
    batch = plan.batch
    size = num_micro_batches * batch.micro_batch_size * batch.dp
    return replace(batch, num_micro_batches=num_micro_batches, global_batch_size=size)


def _played(plan: RunPlan) -> int:
    """Return the number of micro-batches to simulate.

    These are all, or fewer with a last round that is as full.
    """
    pp, whole = plan.grid.pp, plan.batch.num_micro_batches
    rounds = max(LEAST_ROUNDS, MOST_PASSES // (2 * pp * pp * plan.placement.chunks))
    return min(whole, rounds * pp + whole % pp)

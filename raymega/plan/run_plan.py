"""Define RunPlan: everything about a run that can be decided before a process starts.

A plan has plain values, and is sent to the workers as JSON inside a message. It starts nothing and
reads no store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from raymega.config.schema import Job
from raymega.errors import PlanError, raise_faults
from raymega.plan.batch import BatchPlan, RampStage, batch_at, make_batch
from raymega.plan.distillation.teacher import teacher_job
from raymega.plan.flops import layer_costs, loss_cost, pass_times, tower_cost
from raymega.plan.grid import Grid, make_grid
from raymega.plan.stages import Stage, layer_counts, make_stages
from raymega.plan.validation.registry import job_faults
from raymega.schedule.order import Sizes, make_sizes
from raymega.schedule.stage_placement import Placement
from raymega.schedule.table import make_placement

ON_GRID = {"num_workers": "grid"}
"""Values of a job's section ``cluster`` for as many workers as the grid has ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Job and what follows from it; ``batch`` is that of every step after the ``ramp``.

    ``datasets`` has what the driver found of each dataset in an object store, by path: ranks take it from their node.
    """

    job: Job
    grid: Grid
    ramp: tuple[RampStage, ...]
    batch: BatchPlan
    stages: tuple[Stage, ...]
    datasets: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def batches(self) -> tuple[BatchPlan, ...]:
        """All batches of the run, in order."""
        return (*(stage.batch for stage in self.ramp), self.batch)

    def batch_at(self, samples: int) -> BatchPlan:
        """Return the batch of the step that begins when ``samples`` samples are consumed."""
        return batch_at(self.ramp, self.batch, samples)

    @property
    def placement(self) -> Placement:
        """Placement of the pipeline's stages on its ranks."""
        schedule = self.job.schedule
        return make_placement(schedule.name, pp=self.grid.pp, chunks=schedule.chunks)

    def sizes(self, batch: BatchPlan) -> Sizes:
        """Return the sizes for which the training schedule of ``batch`` is made."""
        schedule = self.job.schedule
        sizes = make_sizes(
            pp=self.grid.pp,
            chunks=schedule.chunks,
            num_micro_batches=batch.num_micro_batches,
            microbatch_group_size_per_vp_stage=schedule.microbatch_group_size_per_vp_stage,
            max_in_flight_microbatches=schedule.max_in_flight_microbatches,
            is_paired=self.job.parallel.overlap_moe_expert_parallel_comm,
        )
        times = pass_times(self.job.model, seq_len=self.job.data.seq_len)
        return replace(
            sizes, wgrad_activation_fraction=schedule.wgrad_activation_fraction, times=times
        )

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages that ``rank`` runs, by chunk."""
        return self.chunks_of(self.grid.coords(rank).pp)

    def chunks_of(self, pp_rank: int) -> tuple[Stage, ...]:
        """Return the stages of every rank at ``pp_rank``, by chunk."""
        placement = self.placement
        return tuple(
            self.stages[placement.stage(pp_rank, chunk)] for chunk in range(placement.chunks)
        )

    def to_json(self) -> str:
        """Return the plan as one JSON object; :func:`read_plan` is the inverse."""
        return _ADAPTER.dump_json(self).decode()


def read_plan(text: str) -> RunPlan:
    """Return the plan of a text; the inverse of :meth:`RunPlan.to_json`."""
    return _ADAPTER.validate_json(text)


def make_plan(job: Job) -> RunPlan:
    """Derive the plan of a job.

    Raises:
        PlanError: The job's values break a rule; the error has every rule that they break.
    """
    # rules first: what follows needs legal values
    raise_faults(PlanError, job_faults(job_values(job)))
    return plan_of_legal(job)


def plan_of_legal(job: Job) -> RunPlan:
    """Derive the plan of a job that is known to break no rule; searches know it of many at once."""
    grid, schedule = make_grid(job.parallel), job.schedule
    # stages on ranks, batches, layers on stages
    placement = make_placement(schedule.name, pp=grid.pp, chunks=schedule.chunks)
    ramp, batch = _batches(job, grid)
    stages = _stages(job, placement)
    return RunPlan(job=job, grid=grid, ramp=ramp, batch=batch, stages=stages)


def teacher_plan(plan: RunPlan) -> RunPlan:
    """Return the plan of the live teacher of a run: other layers on the same ranks, none of them trained."""
    job = teacher_job(plan.job)
    frozen = job.with_values(model={"freeze": ("*",)})
    return replace(
        plan, job=frozen, grid=make_grid(job.parallel), stages=_stages(job, plan.placement)
    )


def _stages(job: Job, placement: Placement) -> tuple[Stage, ...]:
    """Return the stages of a job's layers."""
    counts = layer_counts(
        job.parallel,
        num_layers=job.model.num_layers,
        num_stages=placement.num_stages,
        loss_cost=loss_cost(job.model, job.data.seq_len),
        costs=layer_costs(job.model, job.data.seq_len),
        tower_cost=tower_cost(job.model),
    )
    return make_stages(counts, are_ends_together=placement.are_ends_together)


def with_options(plan: RunPlan, job: Job) -> RunPlan:
    """Return the plan of ``job``, which has the grid, the stages and the schedule of ``plan``.

    Searches use it: rules between the job's values are not checked again.
    """
    ramp, batch = _batches(job, plan.grid)
    return replace(plan, job=job, ramp=ramp, batch=batch)


def _batches(job: Job, grid: Grid) -> tuple[tuple[RampStage, ...], BatchPlan]:
    """Return the ramp, and the batch of every step after it."""

    def batch_of(size: int) -> BatchPlan:
        micro_batch_size = job.schedule.micro_batch_size
        return make_batch(global_batch_size=size, micro_batch_size=micro_batch_size, dp=grid.dp)

    ramp = tuple(
        RampStage(until_samples=stage.until_samples, batch=batch_of(stage.global_batch_size))
        for stage in job.data.batch_ramp
    )
    return ramp, batch_of(job.data.global_batch_size)


def job_values(job: Job) -> dict[str, object]:
    """Return the value of every field, by dotted path."""
    return {
        f"{section}.{field}": getattr(getattr(job, section), field)
        for section, info in Job.model_fields.items()
        for field in info.annotation.model_fields  # type: ignore[union-attr]  # all are sections
    }


_ADAPTER: TypeAdapter[RunPlan] = TypeAdapter(RunPlan)

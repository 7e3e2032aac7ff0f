"""Decides whether a run continues from the state in its workers' memory, on which grid, and with which ranks.

Data-parallel replicas hold the same state. When workers are lost, each part of it may still be on a rank
of another replica. The decision is pure; ``checkpoint/load/held_state.py`` takes the state over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from raymega.checkpoint.format.keys import CheckpointId
from raymega.config.schema import Job
from raymega.messages import Requests
from raymega.orchestrate.core.failure_policy import Action, Decision, Failure, FailureKind
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.state import RunState
from raymega.orchestrate.core.worker_group_api import WorkerGroup
from raymega.orchestrate.driver.checkpoint_committer import CheckpointCommitter
from raymega.orchestrate.driver.restore_point import RestorePoint
from raymega.orchestrate.driver.scaling_policy import ScalingPolicy
from raymega.plan.grid import Coords, Grid
from raymega.plan.run_plan import RunPlan
from raymega.plan.zero_levels import dp_shard_ranks, replicas_per_copy
from raymega.planner.search.fallback import with_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """A state that workers hold, and the grid on which they continue from it.

    Attributes:
        step: Completed steps of the state.
        plan: Plan of the next attempt.
        homes: New rank of each rank that holds its part of the state; None where the grid stays.
    """

    step: int
    plan: RunPlan
    homes: Mapping[int, int] | None


def unit_of(job: Job) -> int:
    """Return how many neighbouring replicas hold the state once between them; 0 where the run goes back instead."""
    return replicas_per_copy(job) if job.elastic.on_replica_loss == "continue" else 0


def continuation(
    grids: ScalingPolicy,
    held: Mapping[int, int],
    locations: Sequence[WorkerLocation],
) -> Continuation | None:
    """Return how the run continues from what ``held`` tells; None where a part of the state is lost.

    The job's own grid is taken when the loaded processes suffice for it, else the present one, else one with
    as many replicas as are whole.

    Args:
        grids: Plans of the present grid and of the job's own.
        held: Step of the state that each rank of the last attempt still holds.
        locations: Processes that have loaded.
    """
    job, now, full = grids.full.job, grids.now, grids.full
    unit = unit_of(job)
    if not unit or not _is_cut_alike(now, full):
        return None
    # what is whole in each stage, and the step that all stages share
    whole = [_whole_units(now.grid, stage, unit, held) for stage in range(now.grid.pp)]
    step = _common_step(whole, held)
    if not 0 <= step < job.run.steps:
        return None
    # the grid: as it is, the job's own again, or with fewer replicas
    if grids.fits(now.grid, locations) and (now is full or not grids.can_be_full(locations)):
        return Continuation(step=step, plan=now, homes=None)
    if grids.can_be_full(locations):
        plan: RunPlan | None = full
    else:
        plan = _with_fewer(grids, min(map(len, whole)) * unit)
    if plan is None:
        return None
    homes = _homes(plan.grid, [_ordered(each, held, step) for each in whole], unit)
    return Continuation(step=step, plan=plan, homes=homes)


class ReplicaRecovery:
    """State that the workers of a run hold: whether the next attempt may continue from it, and does."""

    def __init__(self, grids: ScalingPolicy, restore: RestorePoint, group: WorkerGroup) -> None:
        """Begin with nothing held."""
        self._grids, self._restore, self._group = grids, restore, group
        self._may_go_on = self._owes_save = False
        self._reported_step = 0

    def judge(self, failure: Failure, decision: Decision) -> None:
        """Note whether the state outlives ``failure``: an error may be in it, a lost worker is none."""
        is_loss = failure.kind in (FailureKind.DIED, FailureKind.HUNG)
        self._may_go_on = is_loss and decision.action is Action.RESTART

    def regroup(self, committer: CheckpointCommitter) -> bool:
        """Ask the workers to leave at the end of their step with their state; return False where they must save.

        While a save is pending they must: it would be lost with the attempt. So they must on a grid that holds the
        state in other parts than the job's own.
        """
        now, full = self._grids.now, self._grids.full
        if not (unit_of(full.job) and _is_cut_alike(now, full) and committer.is_idle):
            return False
        self._may_go_on = True
        self._group.request(Requests(regroup=True))
        return True

    def find(self, state: RunState, *, saved_every: int, has_restored: bool) -> Continuation | None:
        """Return how the run continues from what the workers hold; None where it has to load a state.

        Args:
            state: State of the run at the end of the attempt.
            saved_every: Number of steps between checkpoints; 0 for none.
            has_restored: Whether every rank of the attempt has reported its state.
        """
        found = None
        # Until then ranks may hold that of an attempt before, which a rollback or a load has gone behind.
        is_of_attempt = has_restored or self._restore.start.source == "replicas"
        if self._may_go_on and is_of_attempt:
            found = continuation(self._grids, self._group.held(), self._group.ready())
        self._may_go_on = False
        # ranks hold what they have saved or more; should a checkpoint be newer, it counts
        if found is None or found.step < state.saved_step:
            return None
        if not self._restore.hold(CheckpointId(attempt=state.attempt, step=found.step)):
            return None
        self._reported_step = state.step
        self._owes_save = (
            saved_every > 0 and found.step // saved_every * saved_every > state.saved_step
        )
        return found

    def begin_attempt(self) -> int:
        """Return the step that the driver has heard of, if the attempt continues from what is held; else -1."""
        self._may_go_on = False
        return self._reported_step if self._restore.start.source == "replicas" else -1

    def take_owed_save(self) -> bool:
        """Return whether a save was lost with the attempt before; once."""
        is_owed, self._owes_save = self._owes_save, False
        return is_owed


def _is_cut_alike(one: RunPlan, other: RunPlan) -> bool:
    """Return whether ranks at equal places hold the same part of the state, whatever the number of replicas."""
    return _cut_of(one) == _cut_of(other)


def _cut_of(plan: RunPlan) -> tuple[object, ...]:
    parallel, is_on_host = plan.job.parallel, "optimizer" in plan.job.memory.offload
    sharers = dp_shard_ranks(parallel, parallel.dp * parallel.cp)
    degrees = parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.dynamic_cp
    return *degrees, plan.stages, sharers, is_on_host


_Units = list[tuple[int, ...]]
"""Ranks of one stage by neighbourhood of replicas, each in the order of their coordinates."""


def _whole_units(grid: Grid, stage: int, unit: int, held: Collection[int]) -> _Units:
    """Return the neighbourhoods of a stage whose ranks are all there."""
    units = [
        tuple(grid.rank(at) for at in _places(grid, stage, first, unit))
        for first in range(0, grid.dp, unit)
    ]
    return [ranks for ranks in units if all(rank in held for rank in ranks)]


def _places(grid: Grid, stage: int, first: int, unit: int) -> list[Coords]:
    return [
        Coords(tp=tp, cp=cp, dp=dp, pp=stage)
        for dp in range(first, first + unit)
        for cp in range(grid.cp)
        for tp in range(grid.tp)
    ]


def _is_at(ranks: tuple[int, ...], held: Mapping[int, int], step: int) -> bool:
    return all(held[rank] == step for rank in ranks)


def _common_step(whole: list[_Units], held: Mapping[int, int]) -> int:
    """Return the newest step that one neighbourhood of each stage holds; -1 for none."""
    steps = {held[ranks[0]] for units in whole for ranks in units}
    shared = [
        step
        for step in steps
        if all(any(_is_at(ranks, held, step) for ranks in units) for units in whole)
    ]
    return max(shared, default=-1)


def _ordered(units: _Units, held: Mapping[int, int], step: int) -> _Units:
    """Return the neighbourhoods that hold ``step`` before those that a replica has to fill."""
    return sorted(units, key=lambda ranks: not _is_at(ranks, held, step))


def _with_fewer(grids: ScalingPolicy, dp: int) -> RunPlan | None:
    """Return the plan with ``dp`` replicas, if the job may become that small."""
    least = grids.full.job.elastic.min_workers
    if least == "grid" or not 0 < dp < grids.now.grid.dp:
        return None
    plan = with_replicas(grids.full.job, dp)
    return plan if plan and plan.grid.world_size >= least else None


def _homes(new: Grid, whole: list[_Units], unit: int) -> dict[int, int]:
    """Return the rank on ``new`` of each rank of the whole neighbourhoods, as far as there is room."""
    homes: dict[int, int] = {}
    for stage, units in enumerate(whole):
        for number, ranks in enumerate(units[: new.dp // unit]):
            places = _places(new, stage, number * unit, unit)
            homes.update({rank: new.rank(at) for rank, at in zip(ranks, places, strict=True)})
    return homes

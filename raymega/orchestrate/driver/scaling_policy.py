"""Which grid the next attempt has: the job's own, or the best one for the workers that are left.

Pure decisions with their numbers. Which processes there are is the group's to say, which grids are
legal plan.fallback's; to act on a decision is the controller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from raymega.orchestrate.core.rank_placement import WorkerLocation, block_size, choose_ranks
from raymega.plan.grid import Grid
from raymega.plan.hardware.catalog import CATALOGUE, Accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.search.fallback import smaller_plan

FIRST_CHANGE_S = 30.0
"""What a change of the grid is taken to cost before this driver has seen a start."""
MIN_STEPS = 3
"""Steps on a grid before their time is trusted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleUpDecision:
    """What going back to the job's own grid would bring, and cost, in seconds."""

    gain_s: float
    cost_s: float

    @property
    def is_worth_it(self) -> bool:
        """Gain outweighs cost."""
        return self.gain_s > self.cost_s

    @property
    def reason(self) -> str:
        """The numbers, for people."""
        return f"it saves {self.gain_s:.0f} s and costs {self.cost_s:.0f} s"


def growth(
    *, steps_left: int, step_s: float, full_step_s: float, change_s: float, horizon_s: float
) -> ScaleUpDecision:
    """Weigh a change to a faster grid.

    Args:
        steps_left: Of the run.
        step_s: Of one step on the present grid.
        full_step_s: Of one step on the job's own.
        change_s: From the last step on one to the first on the other.
        horizon_s: How long the nodes are trusted to stay: gains beyond do not count.
    """
    steps = min(steps_left, horizon_s / step_s) if step_s > 0 else 0
    return ScaleUpDecision(gain_s=steps * (step_s - full_step_s), cost_s=change_s)


class ScalingPolicy:
    """The plan that a run has now, the one that it should have, and how fast each was."""

    def __init__(self, plan: RunPlan, *, num_before: int = 0) -> None:
        """``plan`` is the job's own; a driver that was torn away had ``num_before`` workers, or 0."""
        self.full = self.now = plan
        self._num_before = num_before
        self._step_s: dict[str, list[float]] = {}
        self.change_s = FIRST_CHANGE_S

    @property
    def is_full(self) -> bool:
        """The run has the job's own grid."""
        return self.now is self.full

    def add_step(self, seconds: float) -> None:
        """A step on the present grid; the newest hundred count."""
        times = self._step_s.setdefault(self.now.grid.describe(), [])
        times.append(seconds)
        del times[:-100]

    def steps_s(self) -> tuple[float, ...]:
        """Of the present grid, the newest last."""
        return tuple(self._step_s.get(self.now.grid.describe(), ()))

    def shrink(self, locations: Sequence[WorkerLocation]) -> RunPlan | None:
        """The best plan for the processes in ``locations``; None when no legal one needs so few."""
        least = self.full.job.elastic.min_workers
        if least == "grid":
            return None
        if not locations:
            return self._as_before(least)
        return smaller_plan(
            self.full.job,
            most=len(locations),
            least=least,
            device=_device(locations),
            fits=lambda grid: self._fit(grid, locations),
        )

    def _as_before(self, least: int) -> RunPlan | None:
        """Of a driver without processes yet: as many workers as the run had, where these were fewer."""
        if not least <= self._num_before < self.full.grid.world_size:
            return None
        return smaller_plan(self.full.job, most=self._num_before, least=self._num_before)

    def can_be_full(self, locations: Sequence[WorkerLocation]) -> bool:
        """The run has a smaller grid, and there are workers for the job's own."""
        may_grow = self.full.job.elastic.scale_up and not self.is_full
        return may_grow and self._fit(self.full.grid, locations)

    def reason_to_grow(self, locations: Sequence[WorkerLocation], *, step: int) -> str:
        """Why it is worth to have the job's own grid again; '' when it is not, or cannot be had."""
        found = self.growth(locations, step=step)
        if found is None or not found.is_worth_it:
            return ""
        return f"there are workers for {self.full.grid.describe()} again: {found.reason}"

    def growth(self, locations: Sequence[WorkerLocation], *, step: int) -> ScaleUpDecision | None:
        """What the job's own grid would bring at ``step``; None when it cannot be had, or is."""
        if not self.can_be_full(locations):
            return None
        now = self._step_s.get(self.now.grid.describe(), [])
        if len(now) < MIN_STEPS:
            return None
        step_s = median(now)
        before = self._step_s.get(self.full.grid.describe(), [])
        share = self.now.grid.world_size / self.full.grid.world_size
        return growth(
            steps_left=self.full.job.run.steps - step,
            step_s=step_s,
            full_step_s=median(before) if len(before) >= MIN_STEPS else step_s * share,
            change_s=self.change_s,
            horizon_s=self.full.job.elastic.scale_up_horizon_s,
        )

    def _fit(self, grid: Grid, locations: Sequence[WorkerLocation]) -> bool:
        block, ranks = block_size(grid, self.full.job.parallel), [-1] * len(locations)
        return choose_ranks(locations, ranks, grid, block=block) is not None


def _device(locations: Sequence[WorkerLocation]) -> Accelerator | None:
    """What the workers have, the one with least memory; None when a node does not say it."""
    kinds = {location.accelerator.lower() for location in locations}
    if not kinds <= CATALOGUE.keys():
        return None
    return min((CATALOGUE[kind] for kind in kinds), key=lambda d: d.memory_bytes, default=None)

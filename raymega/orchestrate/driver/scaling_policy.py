"""Decides the grid of the next attempt: the job's own, or the best one for the remaining workers.

The decisions are pure and carry their numbers. The worker group says which processes there are,
``planner/search/fallback.py`` which grids are legal; the controller acts on the decision.
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
"""Assumed cost of a change of the grid before this driver has measured a recovery, in seconds."""
MIN_STEPS = 3
"""Number of steps on a grid from which on their median time is trusted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleUpDecision:
    """Gain and cost of going back to the job's own grid, in seconds."""

    gain_s: float
    cost_s: float

    @property
    def is_worth_it(self) -> bool:
        """True when the gain exceeds the cost."""
        return self.gain_s > self.cost_s

    @property
    def reason(self) -> str:
        """Gain and cost as text, for people."""
        return f"it saves {self.gain_s:.0f} s and costs {self.cost_s:.0f} s"


def growth(
    *, steps_left: int, step_s: float, full_step_s: float, change_s: float, horizon_s: float
) -> ScaleUpDecision:
    """Return the gain and cost of a change to a faster grid.

    Args:
        steps_left: Number of steps left in the run.
        step_s: Time of one step on the present grid, in seconds.
        full_step_s: Time of one step on the job's own grid, in seconds.
        change_s: Time from the last step on one grid to the first on the other, in seconds.
        horizon_s: Time for which the nodes are trusted to stay, in seconds; later gains do not count.
    """
    # steps that the present grid would make within the horizon
    steps = min(steps_left, horizon_s / step_s) if step_s > 0 else 0
    return ScaleUpDecision(gain_s=steps * (step_s - full_step_s), cost_s=change_s)


class ScalingPolicy:
    """The present plan, the job's own plan, and the step times on each grid.

    Attributes:
        full: Plan on the job's own grid.
        now: Plan of the present grid.
        change_s: Cost of a change of the grid in seconds, as last measured.
    """

    def __init__(self, plan: RunPlan, *, num_before: int = 0) -> None:
        """Begin with the job's own ``plan``.

        ``num_before`` is the number of workers of the run under a previous driver that did not end in good
        order, or 0.
        """
        self.full = self.now = plan
        self._num_before = num_before
        self._step_s: dict[str, list[float]] = {}  # by grid, newest last
        self.change_s = FIRST_CHANGE_S
        # the last search for a smaller grid: where the processes were, and the plan
        self._searched: tuple[tuple[WorkerLocation, ...], RunPlan | None] | None = None

    @property
    def is_full(self) -> bool:
        """True when the run has the job's own grid."""
        return self.now is self.full

    def add_step(self, seconds: float) -> None:
        """Add the time of a step on the present grid; the newest hundred are kept."""
        times = self._step_s.setdefault(self.now.grid.describe(), [])
        times.append(seconds)
        del times[:-100]

    def steps_s(self) -> tuple[float, ...]:
        """Return the step times on the present grid in seconds, newest last."""
        return tuple(self._step_s.get(self.now.grid.describe(), ()))

    def shrink(self, locations: Sequence[WorkerLocation]) -> RunPlan | None:
        """Return the best plan for the processes at ``locations``, or None if no legal grid is that small.

        A driver that waits for slots asks at each tick; the search, which takes seconds for large jobs, is
        done once for equal ``locations``.
        """
        key = tuple(locations)
        if self._searched is None or self._searched[0] != key:
            self._searched = key, self._search(locations)
        return self._searched[1]

    def _search(self, locations: Sequence[WorkerLocation]) -> RunPlan | None:
        least = self.full.job.elastic.min_workers
        if least == "grid":
            return None
        # a driver without processes yet resumes with the number of workers that the run had
        if not locations:
            return self._as_before(least)
        return smaller_plan(
            self.full.job,
            most=len(locations),
            least=least,
            device=_device(locations),
            fits=lambda grid: self.fits(grid, locations),
        )

    def _as_before(self, least: int) -> RunPlan | None:
        """Return a plan for the number of workers under the previous driver, if it was a smaller grid."""
        if not least <= self._num_before < self.full.grid.world_size:
            return None
        return smaller_plan(self.full.job, most=self._num_before, least=self._num_before)

    def can_be_full(self, locations: Sequence[WorkerLocation]) -> bool:
        """Return whether the run has a smaller grid and there are workers for the job's own."""
        may_grow = self.full.job.elastic.scale_up and not self.is_full
        return may_grow and self.fits(self.full.grid, locations)

    def reason_to_grow(self, locations: Sequence[WorkerLocation], *, step: int) -> str:
        """Return why going back to the job's own grid is worth it; '' if it is not, or is impossible."""
        found = self.growth(locations, step=step)
        if found is None or not found.is_worth_it:
            return ""
        return f"there are workers for {self.full.grid.describe()} again: {found.reason}"

    def growth(self, locations: Sequence[WorkerLocation], *, step: int) -> ScaleUpDecision | None:
        """Return gain and cost of the job's own grid at ``step``; None if impossible or already in use."""
        if not self.can_be_full(locations):
            return None
        now = self._step_s.get(self.now.grid.describe(), [])
        if len(now) < MIN_STEPS:
            return None
        step_s = median(now)
        # measured on the job's own grid, or estimated as inversely proportional to the workers
        before = self._step_s.get(self.full.grid.describe(), [])
        share = self.now.grid.world_size / self.full.grid.world_size
        return growth(
            steps_left=self.full.job.run.steps - step,
            step_s=step_s,
            full_step_s=median(before) if len(before) >= MIN_STEPS else step_s * share,
            change_s=self.change_s,
            horizon_s=self.full.job.elastic.scale_up_horizon_s,
        )

    def fits(self, grid: Grid, locations: Sequence[WorkerLocation]) -> bool:
        """Return whether the processes at ``locations`` can take the ranks of ``grid``."""
        block, ranks = block_size(grid, self.full.job.parallel), [-1] * len(locations)
        return choose_ranks(locations, ranks, grid, block=block) is not None


def _device(locations: Sequence[WorkerLocation]) -> Accelerator | None:
    """Return the workers' accelerator with the least memory; None if a node's type is unknown."""
    kinds = {location.accelerator.lower() for location in locations}
    if not kinds <= CATALOGUE.keys():
        return None
    return min((CATALOGUE[kind] for kind in kinds), key=lambda d: d.memory_bytes, default=None)

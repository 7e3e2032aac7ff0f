"""Collects what every rank says about the same step, until nobody is missing; names slow ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Generic, TypeVar

from raymega.messages import ExpertsLoaded, MemoryMeasured, TimelineRecorded
from raymega.plan.grid import Grid
from raymega.plan.run_plan import RunPlan
from raymega.schedule.recording import Recording
from raymega.tracking.expert_load import is_collapsed, starved_experts
from raymega.tracking.sink import (
    ExpertsSeen,
    MemoryReady,
    RoutingCollapsed,
    StragglerSeen,
    TimelineReady,
    WorkEvent,
)

T = TypeVar("T")
Found = TimelineReady | MemoryReady | StragglerSeen | ExpertsSeen | RoutingCollapsed
NUM_SAMPLES = 2
"""So many looks in a row make a straggler; one may be a passing disturbance."""


class RankCollector(Generic[T]):
    """One value a rank and step; ranks may come in any order and steps may overlap."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._by_step: dict[int, dict[int, T]] = defaultdict(dict)

    def add(self, *, rank: int, step: int, value: T) -> dict[int, T]:
        """All values of ``step`` by rank when this was the last one missing, else empty."""
        values = self._by_step[step]
        values[rank] = value
        if len(values) < self._world_size:
            return {}
        return dict(sorted(self._by_step.pop(step).items()))


class Stragglers:
    """Ranks of one attempt that are slow: whose own work in a step takes longer than their stage's others'.

    Waits are taken off before, because in a step of collectives all ranks are as slow as the slowest. It
    names; nothing is restarted for it.
    """

    def __init__(self, grid: Grid, *, ratio: float) -> None:
        """``ratio`` is the job's elastic.straggler_ratio, 0 for never."""
        self._grid, self._ratio = grid, ratio
        self._samples: dict[int, int] = {}

    def observe(self, work_s: Mapping[int, float]) -> list[tuple[int, float]]:
        """Ranks that have become stragglers with this look, each with its ratio; each is told once."""
        slow = {rank: ratio for rank, ratio in ratios(work_s, self._grid) if self._is_slow(ratio)}
        self._samples = {rank: self._samples.get(rank, 0) + 1 for rank in slow}
        return [
            (rank, slow[rank]) for rank, samples in self._samples.items() if samples == NUM_SAMPLES
        ]

    def _is_slow(self, ratio: float) -> bool:
        return 0 < self._ratio < ratio


def ratios(work_s: Mapping[int, float], grid: Grid) -> Iterator[tuple[int, float]]:
    """Each rank's work over the median of the other ranks of its pipeline stage, which do the same."""
    for rank, seconds in sorted(work_s.items()):
        stage = grid.coords(rank).pp
        others = [
            other_s
            for other, other_s in work_s.items()
            if other != rank and grid.coords(other).pp == stage
        ]
        if others and median(others) > 0:
            yield rank, seconds / median(others)


class RankReports:
    """What each rank reports for itself, as events of all ranks; of one attempt."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._timelines: RankCollector[tuple[WorkEvent, ...]] = RankCollector(plan.grid.world_size)
        self._memory: RankCollector[dict[str, float]] = RankCollector(plan.grid.world_size)
        self._stragglers = Stragglers(plan.grid, ratio=plan.job.elastic.straggler_ratio)
        self._num_looks = 0
        self._collapsed: set[int] = set()
        self.nodes: Mapping[int, str] = {}
        """Of each rank, once it is known."""

    def add(
        self, report: TimelineRecorded | MemoryMeasured | ExpertsLoaded, *, attempt: int
    ) -> list[Found]:
        """The event of all ranks when this was the last one missing."""
        rank, step = report.rank, report.step
        if isinstance(report, ExpertsLoaded):  # of all ranks already
            seen = ExpertsSeen(attempt=attempt, step=step, tokens=report.tokens)
            return [seen, *self._collapses(seen)]
        if isinstance(report, TimelineRecorded):
            rows = self._timelines.add(rank=rank, step=step, value=report.events)
            return [_timeline(self._plan, rows, attempt=attempt, step=step)] if rows else []
        ranks = self._memory.add(rank=rank, step=step, value=report.metrics)
        return self._measured(ranks, attempt=attempt, step=step) if ranks else []

    def _collapses(self, seen: ExpertsSeen) -> list[RoutingCollapsed]:
        """Of each layer once, until its routing has recovered."""
        before = self._collapsed
        self._collapsed = {layer for layer, counts in seen.tokens.items() if is_collapsed(counts)}
        return [
            RoutingCollapsed(
                attempt=seen.attempt, step=seen.step, layer=layer,
                experts=starved_experts(seen.tokens[layer]),
            )
            for layer in sorted(self._collapsed - before)
        ]  # fmt: skip

    def _measured(
        self, ranks: dict[int, dict[str, float]], *, attempt: int, step: int
    ) -> list[Found]:
        """The first look of an attempt is its first step, in which ranks load and compile."""
        self._num_looks += 1
        work_s = {r: own["worker/work_s"] for r, own in ranks.items() if "worker/work_s" in own}
        slow = self._stragglers.observe(work_s) if self._num_looks > 1 else []
        worst = max((ratio for _, ratio in ratios(work_s, self._plan.grid)), default=0.0)
        told = [
            StragglerSeen(
                attempt=attempt, step=step, rank=rank, node=self.nodes.get(rank, "unknown"),
                work_s=work_s[rank], ratio=ratio,
            )
            for rank, ratio in slow
        ]  # fmt: skip
        return [MemoryReady(attempt=attempt, step=step, ranks=ranks, work_ratio=worst), *told]


def _timeline(
    plan: RunPlan, rows: dict[int, tuple[WorkEvent, ...]], *, attempt: int, step: int
) -> TimelineReady:
    """What the ranks recorded, on one clock."""
    recording = Recording(
        rows=rows,
        pipelines=_groups(plan, "pp"),
        replicas=_groups(plan, ("cp", "dp")),
        placement=plan.placement,
    ).aligned()
    return TimelineReady(
        attempt=attempt,
        step=step,
        events=recording.rows,
        simulated_bubble=recording.simulated().bubble,
        transfers=tuple(recording.transfers()),
    )


def _groups(plan: RunPlan, axes: str | tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Every group of the axes, each once; a pipeline's ranks in the order of its stages."""
    ranks = range(plan.grid.world_size)
    return tuple(dict.fromkeys(tuple(plan.grid.group(axes, rank)) for rank in ranks))

"""Collects the reports of all ranks about one step into one event, and detects stragglers."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from raymega.events import (
    AttemptEvent,
    ExpertLoads,
    Memory,
    RoutingCollapsed,
    StragglerDetected,
    Timeline,
)
from raymega.messages import RankMemory, RankTimeline
from raymega.plan.grid import Grid
from raymega.plan.run_plan import RunPlan
from raymega.schedule.recording import Recording
from raymega.schedule.timeline import EventTuple
from raymega.tracking.expert_load import is_collapsed, starved_experts
from raymega.tracking.timeline_metrics import rank_timeline_metrics, timeline_metrics

T = TypeVar("T")
NUM_SAMPLES = 2
"""Number of slow samples in a row that make a straggler; a single one may be a passing disturbance."""


class RankCollector(Generic[T]):
    """Collector of one value a rank and step; ranks may report in any order, and steps may overlap."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._by_step: dict[int, dict[int, T]] = defaultdict(dict)

    def add(self, *, rank: int, step: int, value: T) -> dict[int, T]:
        """Add a value; return all values of ``step`` by rank if it was the last one missing, else {}."""
        values = self._by_step[step]
        values[rank] = value
        if len(values) < self._world_size:
            return {}
        return dict(sorted(self._by_step.pop(step).items()))


class Stragglers:
    """Detector of ranks whose own work in a step takes longer than that of others of their stage.

    Work is the step's time less the waits for other ranks, because in a step with collectives all ranks take
    as long as the slowest. Stragglers are only reported; nothing is restarted.
    """

    def __init__(self, *, ratio: float) -> None:
        """Report ranks above ``ratio``, the job's elastic.straggler_ratio; 0 reports none."""
        self._ratio = ratio
        self._samples: dict[int, int] = {}  # slow samples in a row, by rank

    def observe(self, found: Mapping[int, float]) -> list[tuple[int, float]]:
        """Return the ranks that become stragglers with this sample, with their ratios; each once.

        ``found`` are the ratios of the step by rank, see :func:`ratios`.
        """
        slow = {rank: ratio for rank, ratio in found.items() if 0 < self._ratio < ratio}
        self._samples = {rank: self._samples.get(rank, 0) + 1 for rank in slow}
        return [
            (rank, slow[rank]) for rank, samples in self._samples.items() if samples == NUM_SAMPLES
        ]


def ratios(work_s: Mapping[int, float], grid: Grid) -> Iterator[tuple[int, float]]:
    """Yield each rank with its work over the median of the other ranks of its stage, which do equal work."""
    stages = {rank: grid.coords(rank).pp for rank in sorted(work_s)}
    by_stage: dict[int, list[float]] = defaultdict(list)
    for rank, stage in stages.items():
        by_stage[stage].append(work_s[rank])
    for times in by_stage.values():
        times.sort()
    # the median of the others is one of the two or three in the middle of all
    for rank, stage in stages.items():
        usual_s = _median_without(by_stage[stage], work_s[rank])
        if usual_s > 0:
            yield rank, work_s[rank] / usual_s


def _median_without(times: Sequence[float], one: float) -> float:
    """Return the median of sorted ``times`` without one that equals ``one``; 0 where there is no other."""
    num_others = len(times) - 1
    if not num_others:
        return 0.0
    place = bisect_left(times, one)
    low, high = (num_others - 1) // 2, num_others // 2
    return (times[low + (low >= place)] + times[high + (high >= place)]) / 2


class RankReports:
    """Reports of single ranks, combined into events of all ranks; for one attempt."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._timelines: RankCollector[tuple[EventTuple, ...]] = RankCollector(plan.grid.world_size)
        self._memory: RankCollector[dict[str, float]] = RankCollector(plan.grid.world_size)
        self._stragglers = Stragglers(ratio=plan.job.elastic.straggler_ratio)
        self._num_looks = 0
        self._collapsed: set[int] = set()
        self.nodes: Mapping[int, str] = {}
        """Node id of each rank, once it is known."""

    def add(self, report: RankTimeline | RankMemory | ExpertLoads) -> list[AttemptEvent]:
        """Add a report, and return the events of all ranks if it was the last one missing."""
        match report:
            case ExpertLoads():  # holds all ranks' tokens already
                return [report, *self._collapses(report)]
            case RankTimeline():
                rows = self._timelines.add(rank=report.rank, step=report.step, value=report.events)
                return [_timeline(self._plan, rows, step=report.step)] if rows else []
            case RankMemory():
                own = self._memory.add(rank=report.rank, step=report.step, value=report.metrics)
                return self._measured(own, step=report.step) if own else []

    def _collapses(self, loads: ExpertLoads) -> list[RoutingCollapsed]:
        """Return an event for each layer whose routing has collapsed since the last report."""
        before = self._collapsed
        self._collapsed = {layer for layer, counts in loads.tokens.items() if is_collapsed(counts)}
        return [
            RoutingCollapsed(
                step=loads.step, layer=layer, experts=starved_experts(loads.tokens[layer])
            )
            for layer in sorted(self._collapsed - before)
        ]

    def _measured(self, ranks: dict[int, dict[str, float]], *, step: int) -> list[AttemptEvent]:
        """Return the events of one sample of memory and work, stragglers included."""
        self._num_looks += 1
        peaks = [own.get("memory/peak_bytes", 0.0) for own in ranks.values()]
        metrics = {"memory/max_peak_bytes": max(peaks)}
        # the first sample of an attempt is its first step, in which ranks load and compile
        work_s = {r: own["worker/work_s"] for r, own in ranks.items() if "worker/work_s" in own}
        found = dict(ratios(work_s, self._plan.grid))
        slow = self._stragglers.observe(found) if self._num_looks > 1 else []
        worst = max(found.values(), default=0.0)
        if worst:
            metrics["worker/max_work_ratio"] = worst
        told = [
            StragglerDetected(
                step=step, rank=rank, node=self.nodes.get(rank, "unknown"), work_s=work_s[rank],
                ratio=ratio,
            )
            for rank, ratio in slow
        ]  # fmt: skip
        return [Memory(step=step, metrics=metrics, ranks=ranks), *told]


def _timeline(plan: RunPlan, rows: dict[int, tuple[EventTuple, ...]], *, step: int) -> Timeline:
    """Return the event of the ranks' recorded timelines, aligned to one clock."""
    recording = Recording(
        rows=rows,
        pipelines=tuple(plan.grid.groups("pp")),
        replicas=tuple(plan.grid.groups(("cp", "dp"))),
        placement=plan.placement,
    ).aligned()
    return Timeline(
        step=step,
        events=recording.rows,
        transfers=tuple(recording.transfers()),
        metrics=timeline_metrics(
            recording.rows.values(), simulated_bubble=recording.simulated().bubble
        ),
        ranks={rank: rank_timeline_metrics(row) for rank, row in recording.rows.items()},
    )

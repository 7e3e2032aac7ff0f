"""Collects what every rank says about the same step, and hands it over when nobody is missing."""

from __future__ import annotations

from collections import defaultdict
from typing import Generic, TypeVar

from raymega.messages import MemoryMeasured, TimelineRecorded
from raymega.tracking.sink import MemoryReady, TimelineReady, WorkEvent

T = TypeVar("T")


class Gather(Generic[T]):
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


class RankReports:
    """What each rank reports for itself, as events of all ranks; of one attempt."""

    def __init__(self, world_size: int) -> None:
        self._timelines: Gather[tuple[WorkEvent, ...]] = Gather(world_size)
        self._memory: Gather[dict[str, float]] = Gather(world_size)

    def take(
        self, report: TimelineRecorded | MemoryMeasured, *, attempt: int
    ) -> list[TimelineReady | MemoryReady]:
        """The event of all ranks when this was the last one missing."""
        rank, step = report.rank, report.step
        if isinstance(report, TimelineRecorded):
            rows = self._timelines.add(rank=rank, step=step, value=report.events)
            return [TimelineReady(attempt=attempt, step=step, events=rows)] if rows else []
        ranks = self._memory.add(rank=rank, step=step, value=report.metrics)
        return [MemoryReady(attempt=attempt, step=step, ranks=ranks)] if ranks else []

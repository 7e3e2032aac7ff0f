"""Ranks that are slow: those whose own work in a step takes longer than that of their stage's others.

Waits are taken off before, because in a step of collectives all ranks are as slow as the slowest. It
names; nothing is restarted for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from raymega.plan.grid import Grid

NUM_SAMPLES = 2
"""So many looks in a row make a straggler; one may be a passing disturbance."""


class Stragglers:
    """What was seen of the ranks of one attempt."""

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

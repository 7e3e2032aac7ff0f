"""Collects what every rank says about the same step, and hands it over when nobody is missing."""

from __future__ import annotations

from collections import defaultdict
from typing import Generic, TypeVar

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

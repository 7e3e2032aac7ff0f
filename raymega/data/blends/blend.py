"""Assigns each sample of a blend to a source, by exact arithmetic on the weights.

Among the first n samples a source of share w has floor(w n) or ceil(w n), for every n: its error is below
one sample. Sample i of a source (from 0) then has a window of positions, floor(i / w) to
ceil((i + 1) / w) - 1, and earliest deadline first keeps all windows (proportionate fairness, Baruah et
al. 1996; the chairman assignment problem, Tijdeman 1980).

Its choice depends on all positions before, so positions are cut into blocks no shorter than any window.
The counts at a border are those that earliest deadline first reaches from one longest window before,
where it begins with counts that are a function of that position alone. A block is a function of the
counts at its two borders, so any position costs the work of one block and two windows, whatever was read
before. That the windows between two such borders can always be kept is Hall's condition: for any
interval, the samples whose windows lie within it are at most its positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import gcd, lcm

import numpy as np
import numpy.typing as npt

LEAST_BLOCK = 1024
"""Least number of samples of a block, so that few blocks are made where windows are short."""
NUM_CACHED = 4

Counts = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Positions of a block: the source of each, [P], and how many before it have that source, [P]."""

    source: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    before: Counts


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the weights as whole numbers in lowest terms; 0.3 counts as 3 / 10, as it is written."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    scaled = [int(weight * scale) for weight in exact]
    common = gcd(*scaled)
    return tuple(weight // common for weight in scaled)


def longest_window(weights: Sequence[float]) -> int:
    """Return the most positions within which the source of the least share has one sample."""
    return _window(whole_weights(weights))


def _window(whole: Sequence[int]) -> int:
    return -(-sum(whole) // min(whole))


class Blend:
    """Order in which the sources of a blend take turns, as a function of the position.

    Attributes:
        weights: Weights as whole numbers in lowest terms, by source.
        total: Sum of the weights.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Take a positive weight for each source; only their ratios count."""
        self.weights = whole_weights(weights)
        self.total = sum(self.weights)
        self._window = _window(self.weights)
        least = max(self._window, LEAST_BLOCK)
        # After ``total`` samples every count is exact, and the order begins anew.
        self._is_periodic = self.total <= least
        self._size = self.total if self._is_periodic else least
        # a loader walks through one block after the other
        self._block = lru_cache(NUM_CACHED)(self._make_block)
        self._border = lru_cache(2 * NUM_CACHED)(self._make_border)

    def place(self, sample: int) -> tuple[int, int]:
        """Return the source of ``sample``, and the number of samples that it has before."""
        number, offset = divmod(sample, self._size)
        block, base = self._find(number)
        source = int(block.source[offset])
        return source, base[source] + int(block.rank[offset])

    def counts(self, num_samples: int) -> Counts:
        """Return how many of the first ``num_samples`` samples each source has."""
        number, offset = divmod(num_samples, self._size)
        block, base = self._find(number)
        inside = np.bincount(block.source[:offset], minlength=len(self.weights))
        return tuple(before + int(count) for before, count in zip(base, inside, strict=True))

    def _find(self, number: int) -> tuple[_Block, Counts]:
        """Return a block, and the counts at its first position."""
        if self._is_periodic:
            return self._block(0), tuple(number * weight for weight in self.weights)
        block = self._block(number)
        return block, block.before

    def _make_block(self, number: int) -> _Block:
        first, before = number * self._size, self._border(number)
        end = self._border(number + 1)
        source = np.array(self._walk(first, self._size, before, end), dtype=np.int32)
        # rank within the source: positions sorted by source, numbered from each source's first
        order = np.argsort(source, kind="stable")
        counts = np.bincount(source, minlength=len(self.weights))
        rank = np.empty(len(source), dtype=np.int32)
        rank[order] = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        return _Block(source=source, rank=rank, before=before)

    def _make_border(self, number: int) -> Counts:
        """Return the counts at the first position of a block."""
        if not number or self._is_periodic:
            return self._first_counts(number * self._size)
        begin = number * self._size - self._window
        counts = list(self._first_counts(begin))
        for source in self._walk(begin, self._window, counts):
            counts[source] += 1
        return tuple(counts)

    def _first_counts(self, position: int) -> Counts:
        """Return counts from which earliest deadline first meets every later deadline.

        All are floor(w n); those whose next sample is due first have one more, until they add up to n.
        """
        counts = [weight * position // self.total for weight in self.weights]
        is_whole = [weight * position % self.total == 0 for weight in self.weights]
        due = sorted(
            (self._deadline(source, count), source)
            for source, count in enumerate(counts)
            if not is_whole[source]
        )
        for _, source in due[: position - sum(counts)]:
            counts[source] += 1
        return tuple(counts)

    def _walk(
        self, first: int, size: int, counts: Sequence[int], end: Counts | None = None
    ) -> list[int]:
        """Return the sources of ``size`` positions from ``first`` on, by earliest deadline first.

        Args:
            first: First position.
            size: Number of positions.
            counts: Samples of each source before them.
            end: Samples of each source after them; None where that is free.
        """
        counts, last, found = list(counts), first + size - 1, []
        ready: list[tuple[int, int]] = []  # (deadline, source), earliest first
        coming: dict[int, list[tuple[int, int]]] = {}  # by the first position of the window

        def offer(source: int, position: int) -> None:
            count = counts[source]
            if end is not None and count >= end[source]:
                return
            opens = count * self.total // self.weights[source]
            # What must lie in these positions is due at the last of them at the latest.
            due = self._deadline(source, count)
            entry = (due if end is None else min(due, last), source)
            if opens <= position:
                heappush(ready, entry)
            else:
                coming.setdefault(opens, []).append(entry)

        for source in range(len(counts)):
            offer(source, first)
        for position in range(first, last + 1):
            for entry in coming.pop(position, ()):
                heappush(ready, entry)
            _, source = heappop(ready)
            found.append(source)
            counts[source] += 1
            offer(source, position + 1)
        return found

    def _deadline(self, source: int, count: int) -> int:
        """Return the last position at which a source with ``count`` samples may have its next one."""
        return -(-(count + 1) * self.total // self.weights[source]) - 1

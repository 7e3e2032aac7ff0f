"""Says which dataset each sample of a run is of: the blend of each stage, as `raymega.data.blends.blend` orders it.

A stage begins at a fixed sample. What the stages before read of each dataset is arithmetic too, so a
dataset continues where it was.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property

from raymega.config.data import DataSection, DataSource
from raymega.data.blends.blend import Blend


class Mixture:
    """Blends of a run, one a stage.

    Attributes:
        datasets: Paths of the datasets in order of appearance.
        names: Short name of each: the end of its path, with its number where another has the same.
        firsts: First sample of each stage.
    """

    def __init__(self, stages: Sequence[tuple[int, Sequence[DataSource]]]) -> None:
        """Take the first sample of each stage in order, the first 0, and its sources."""
        paths = dict.fromkeys(source.path for _, sources in stages for source in sources)
        self.datasets = tuple(paths)
        ends = [re.split("[/:]", path.rstrip("/"))[-1] for path in self.datasets]
        times = Counter(ends)
        numbered = [f"{end}-{index}" for index, end in enumerate(ends)]
        short = [many if times[end] > 1 else end for many, end in zip(numbered, ends, strict=True)]
        # the end of a path may be a name with a number
        self.names = tuple(short if len({*short}) == len(short) else numbered)
        self.firsts = [first for first, _ in stages]
        number = {path: index for index, path in enumerate(self.datasets)}
        self._members = [[number[source.path] for source in sources] for _, sources in stages]
        self._blends = [Blend([source.weight for source in sources]) for _, sources in stages]

    def place(self, sample: int) -> tuple[int, int]:
        """Return the dataset of a global sample, and the number of samples that it has before."""
        stage = bisect_right(self.firsts, sample) - 1
        source, count = self._blends[stage].place(sample - self.firsts[stage])
        dataset = self._members[stage][source]
        return dataset, self._before[stage][dataset] + count

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """Return how many of the run's first ``num_samples`` samples each dataset has."""
        stage = max(bisect_right(self.firsts, num_samples) - 1, 0)
        return tuple(self._after(stage, num_samples, self._before[stage]))

    def shares(self) -> tuple[Fraction, ...]:
        """Return the share of the first stage's samples that each dataset has."""
        blend, shares = self._blends[0], [Fraction(0)] * len(self.datasets)
        for dataset, weight in zip(self._members[0], blend.weights, strict=True):
            shares[dataset] = Fraction(weight, blend.total)
        return tuple(shares)

    @cached_property
    def _before(self) -> list[list[int]]:
        """Samples of each dataset before each stage."""
        before = [[0] * len(self.datasets)]
        for stage, end in enumerate(self.firsts[1:]):
            before.append(self._after(stage, end, before[stage]))
        return before

    def _after(self, stage: int, end: int, before: Sequence[int]) -> list[int]:
        """Return the samples of each dataset before sample ``end`` of a stage."""
        counts = list(before)
        inside = self._blends[stage].counts(end - self.firsts[stage])
        for dataset, count in zip(self._members[stage], inside, strict=True):
            counts[dataset] += count
        return counts


def mixture_of(section: DataSection) -> Mixture:
    """Return the mixture of a job's training data; a stage begins at a whole sample of S tokens."""
    return Mixture([(first_sample(tokens, section), sources) for tokens, sources in section.blends])


def first_sample(tokens: int, section: DataSection) -> int:
    """Return the first sample after ``tokens`` tokens, rounded up; a sample counts S, padding included."""
    return -(-tokens // section.seq_len)

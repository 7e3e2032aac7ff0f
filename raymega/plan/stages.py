"""Which layers each pipeline stage holds, from how many; and the even split.

It knows layer counts only, not costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage in layer order: layers [first_layer, first_layer + num_layers).

    ``are_ends_together`` says that the pipeline's first and last stage lie on one rank, so that a
    tied table is there once.
    """

    index: int
    num_stages: int
    first_layer: int
    num_layers: int
    are_ends_together: bool

    @property
    def is_first(self) -> bool:
        """Holds the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Holds the final norm, the head and the loss."""
        return self.index == self.num_stages - 1

    @property
    def has_tensors(self) -> bool:
        """Holds anything; a stage that does not only passes on what it gets."""
        return self.num_layers > 0 or self.is_first or self.is_last

    @property
    def layers(self) -> range:
        """Global layer numbers."""
        return range(self.first_layer, self.first_layer + self.num_layers)


def make_stages(counts: Sequence[int], *, are_ends_together: bool = False) -> tuple[Stage, ...]:
    """Stages with ``counts`` layers each, in layer order."""
    stages, first = [], 0
    for index, count in enumerate(counts):
        stages.append(
            Stage(
                index=index,
                num_stages=len(counts),
                first_layer=first,
                num_layers=count,
                are_ends_together=are_ends_together or len(counts) == 1,
            )
        )
        first += count
    return tuple(stages)


def even_stages(*, num_layers: int, num_stages: int) -> tuple[Stage, ...]:
    """As many layers for each stage, first and last on different ranks."""
    return make_stages(even_counts(num_layers, num_stages))


def even_counts(total: int, num_stages: int) -> list[int]:
    """Even split; with a remainder the stages nearest the middle get one more.

    The first and the last stage also hold the embedding and the head, so they come last in line.
    """
    if num_stages == 0:
        return []
    base, extra = divmod(total, num_stages)
    middle = (num_stages - 1) / 2
    by_distance = sorted(range(num_stages), key=lambda stage: (abs(stage - middle), stage))
    favoured = set(by_distance[:extra])
    return [base + (stage in favoured) for stage in range(num_stages)]

"""Which layers each pipeline stage holds; the even split, remainder to the middle stages.

It knows layer counts only, not costs.
"""

from __future__ import annotations

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


def make_stages(
    *, num_layers: int, num_stages: int, are_ends_together: bool = False
) -> tuple[Stage, ...]:
    """Even split; with a remainder the stages nearest the middle get one layer more.

    The first and the last stage also hold the embedding and the head, so they come last in line
    for an extra layer.
    """
    base, extra = divmod(num_layers, num_stages)
    middle = (num_stages - 1) / 2
    by_distance = sorted(range(num_stages), key=lambda stage: (abs(stage - middle), stage))
    favoured = set(by_distance[:extra])
    stages, first = [], 0
    for index in range(num_stages):
        count = base + (index in favoured)
        stages.append(
            Stage(
                index=index,
                num_stages=num_stages,
                first_layer=first,
                num_layers=count,
                are_ends_together=are_ends_together or num_stages == 1,
            )
        )
        first += count
    return tuple(stages)

"""Stages of an even split."""

from raymega.plan.stages import Stage, even_counts, make_stages


def even_stages(*, num_layers: int, num_stages: int) -> tuple[Stage, ...]:
    """Return stages of an even split, first and last on different ranks."""
    return make_stages(even_counts(num_layers, num_stages))

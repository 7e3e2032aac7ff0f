"""Shrinks a layout that fails to the smallest that still fails; pure but for the question it asks.

It knows what is simpler, not what fails: that is the caller's ``is_failing``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from raymega.config.schema import Job
from raymega.verify.layout import DEGREES, OPTIONS, Layout
from raymega.verify.legal_layouts import is_legal, reference_layout


def minimise(job: Job, layout: Layout, is_failing: Callable[[Layout], bool]) -> Layout:
    """Take the first simpler layout that fails, again and again, until none does.

    Args:
        job: What runs.
        layout: One that fails.
        is_failing: Runs a layout; asked at most once about each.
    """
    asked = {layout, reference_layout(job)}
    current: Layout | None = layout
    while current is not None:
        layout, current = current, None
        for simpler in simpler_layouts(job, layout):
            if simpler in asked:
                continue
            asked.add(simpler)
            if is_failing(simpler):
                current = simpler
                break
    return layout


def simpler_layouts(job: Job, layout: Layout) -> Iterator[Layout]:
    """Legal layouts that are one change simpler, the boldest change first."""
    for candidate in _changed(job, layout):
        if candidate != layout and is_legal(job, candidate):
            yield candidate


def _changed(job: Job, layout: Layout) -> Iterator[Layout]:
    for axis in DEGREES:
        for degree in range(1, layout.degree(axis)):
            yield layout.with_value(axis, degree)
    for option in OPTIONS:
        yield layout.with_value(option.name, option.simplest)
    whole = -(-job.data.global_batch_size // layout.dp)  # one micro-batch accumulates nothing
    if whole > layout.micro_batch_size:
        yield replace(layout, micro_batch_size=whole)

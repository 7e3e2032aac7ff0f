"""Minimisation of a failing layout: simplify it step by step while it still fails.

The caller's ``is_failing`` runs a layout; this module only decides what is simpler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from raymega.config.schema import Job
from raymega.verify.layout import DEGREES, OPTIONS, Layout
from raymega.verify.legal_layouts import is_legal, reference_layout


def minimise(job: Job, layout: Layout, is_failing: Callable[[Layout], bool]) -> Layout:
    """Return a failing layout of which no simpler one fails, found by greedy descent.

    Args:
        job: Job that runs.
        layout: Layout that fails.
        is_failing: Function that runs a layout; called at most once for each.
    """
    asked = {layout, reference_layout(job)}
    current: Layout | None = layout
    while current is not None:
        layout, current = current, None
        # Take the first simpler layout that fails, and start over from there.
        for simpler in simpler_layouts(job, layout):
            if simpler in asked:
                continue
            asked.add(simpler)
            if is_failing(simpler):
                current = simpler
                break
    return layout


def simpler_layouts(job: Job, layout: Layout) -> Iterator[Layout]:
    """Yield legal layouts that are one change simpler, the largest change first."""
    for candidate in _changed(job, layout):
        if candidate != layout and is_legal(job, candidate):
            yield candidate


def _changed(job: Job, layout: Layout) -> Iterator[Layout]:
    # smaller degrees, then simpler options
    for axis in DEGREES:
        for degree in range(1, layout.degree(axis)):
            yield layout.with_value(axis, degree)
    for option in OPTIONS:
        yield layout.with_value(option.name, option.simplest)
    whole = -(-job.data.global_batch_size // layout.dp)  # one micro-batch accumulates nothing
    if whole > layout.micro_batch_size:
        yield replace(layout, micro_batch_size=whole)

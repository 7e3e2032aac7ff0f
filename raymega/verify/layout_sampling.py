"""Sampling of layouts, so that a few of them cover every axis and option.

It is pure: the same job, count, bound and seed give the same layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from raymega.config.schema import Job
from raymega.plan.stages import CUT, LAYER
from raymega.verify.layout import DEGREES, OPTIONS, Layout, Option
from raymega.verify.legal_layouts import fixed_size, legal_shapes, legality

MICRO_BATCH_SIZES = (1, 2, 3, 4)
SHAPES = 10
"""Number of degree choices that a pick considers: SHAPES with the largest gain, SHAPES at random."""
DRESSES = 3
"""Number of random option sets tried on each choice of degrees."""
WEIGHTS = {
    "axis": 100, "pair": 5, "uneven": 30, "schedule": 5, "micro": 4, "kernels": 12,
    "ep": 20, "etp": 20, "microbatch_group_size_per_vp_stage": 4, "max_in_flight_microbatches": 4, "wgrad_activation_fraction": 4,
}  # fmt: skip
"""Gain of covering a feature for the first time; 1 where none is given. A new axis outweighs any number of
new options. Weights in between favour features that few layouts can have, such as compiled kernels."""


def draw_layouts(
    job: Job, *, own: Layout, count: int, max_ranks: int, seed: int
) -> tuple[Layout, ...]:
    """Return at most ``count`` distinct legal layouts of 2 to ``max_ranks`` ranks.

    ``own``, the layout of the unshrunk job, comes first if it is legal, with its hand-set stages if they
    still fit. Each further pick is the candidate with the largest gain in features not yet covered, by
    WEIGHTS.
    """
    random, shapes, can_run = Random(seed), list(legal_shapes(job, max_ranks)), legality(job)
    # the job's own layout
    own = own if can_run(own) else own.without_stages_by_hand()
    is_own_possible = 1 < own.world_size <= max_ranks and can_run(own)
    chosen = [own] if is_own_possible else []
    # greedy cover of features
    while shapes and len(chosen) < count:
        met = set().union(*map(features, chosen)) if chosen else set()
        random.shuffle(shapes)
        best = sorted(shapes, key=lambda shape: _gain(features(shape) - met), reverse=True)
        some = best[:SHAPES] + shapes[:SHAPES]
        candidates = [_dress(job, shape, random, can_run) for shape in some for _ in range(DRESSES)]
        candidates = [candidate for candidate in candidates if candidate not in chosen]
        if not candidates:
            break
        random.shuffle(candidates)
        chosen.append(max(candidates, key=lambda layout: _gain(features(layout) - met)))
    return tuple(chosen[:count])


def features(layout: Layout) -> frozenset[tuple[object, ...]]:
    """Return the features that a layout covers: axes, pairs of axes, option values."""
    axes = [axis for axis in DEGREES if layout.degree(axis) > 1]
    # axes alone and in pairs, odd degrees, then options with an effect
    found: set[tuple[object, ...]] = {("axis", axis) for axis in axes}
    found |= {("pair", a, b) for a in axes for b in axes if a < b}
    found |= {("uneven", axis) for axis in axes if not is_power_of_two(layout.degree(axis))}
    found.add(("micro", layout.micro_batch_size))
    found |= {_met(option, layout) for option in OPTIONS if option.matters(layout)}
    return frozenset(found)


def is_power_of_two(number: int) -> bool:
    """Return whether ``number``, at least 1, is a power of two."""
    return number & (number - 1) == 0


def _met(option: Option, layout: Layout) -> tuple[object, ...]:
    """Return an option's value as a feature, with the many values of some options merged into few.

    Rank orders are merged by their fastest axis, placements by whether a stage is empty, and numbers in
    place of ``pp`` by whether they are below it.
    """
    value = layout.value(option)
    if option.name == "order":
        value = value.split("-")[0]
    if option.name == "stages" and value not in option.values:
        value = "uneven" if all(LAYER in stage for stage in value.split(CUT)) else "empty"
    if isinstance(value, int) and "pp" in option.values:
        value = "less" if value < layout.pp else "more"
    return (option.name, value)


def _dress(job: Job, shape: Layout, random: Random, can_run: Callable[[Layout], bool]) -> Layout:
    """Return the shape with random options, dropping those that are not legal together."""
    sizes = [size for size in MICRO_BATCH_SIZES if size <= job.data.global_batch_size]
    size = fixed_size(job) or random.choice([*sizes, job.schedule.micro_batch_size])
    dressed = replace(shape, micro_batch_size=size)
    for option in OPTIONS:
        # The draw is made even where it has no effect, so that later draws do not depend on that.
        value = random.choice([*option.values, *option.others(job, dressed)])
        if option.matters(dressed) and value != dressed.value(option):
            candidate = dressed.with_value(option.name, value)
            dressed = candidate if can_run(candidate) else dressed
    return dressed if can_run(dressed) else shape


def _gain(new: frozenset[tuple[object, ...]]) -> int:
    return sum(WEIGHTS.get(str(feature[0]), 1) for feature in new)

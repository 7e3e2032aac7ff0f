"""Measures how far two checkpoints differ, tensor by tensor, whatever the layouts that wrote them.

Overlapping boxes are compared in pairs, so no tensor is ever whole in memory. The caller decides which
difference is too large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.manifest_builder import coverage_faults
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.errors import CheckpointError, raise_faults

BOXES_HELD = 8
"""Number of boxes of one side that stay in memory, as the next box of the other side may overlap them."""

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """Difference between the tensors of one name in two checkpoints, a and b.

    Attributes:
        name: Saved name.
        relative: Largest ``|a - b|`` over the largest magnitude in either tensor; inf where elements
            differ and one of them is not finite.
        elementwise: Largest ``|a - b| / max(|a|, |b|)`` of an element; inf as for ``relative``.
        num_different: Number of elements that are not equal; two NaNs are equal.
        num_elements: Number of elements.
        note: Reason why the tensors cannot be compared, such as different shapes; else empty.
    """

    name: str
    relative: float
    elementwise: float
    num_different: int
    num_elements: int
    note: str = ""


def compare(a: Checkpoint, b: Checkpoint) -> Iterator[TensorDifference]:
    """Yield the difference of every tensor of either checkpoint, in order of names.

    Raises:
        CheckpointError: A manifest does not cover its tensors, or a file's bytes differ from those
            written.
    """
    for side in (a, b):
        raise_faults(CheckpointError, coverage_faults(side.manifest))
    in_a, in_b = a.manifest.tensors(), b.manifest.tensors()
    for name in sorted(in_a.keys() | in_b.keys()):
        if name not in in_a or name not in in_b:
            yield _incomparable(name, f"only in the {'first' if name in in_a else 'second'}")
        elif in_a[name][0].global_shape != in_b[name][0].global_shape:
            shapes = f"{in_a[name][0].global_shape} and {in_b[name][0].global_shape}"
            yield _incomparable(name, f"of shapes {shapes}")
        else:
            yield _difference(name, _pairs(a, in_a[name], b, in_b[name]))


def _pairs(
    a: Checkpoint, boxes_a: Sequence[SavedBox], b: Checkpoint, boxes_b: Sequence[SavedBox]
) -> Iterator[tuple[Array, Array]]:
    """Yield the values of both sides where a box of one overlaps a box of the other."""
    # Boxes of a are read once, in order of offset; the cache spares most repeated reads of b.
    read_b = lru_cache(BOXES_HELD)(lambda index: b.read_box(boxes_b[index]))
    for box_a in sorted(boxes_a, key=lambda saved: saved.box.offset):
        values_a = a.read_box(box_a)
        for index, box_b in enumerate(boxes_b):
            common = box_a.box.intersect(box_b.box)
            if common is not None:
                yield _part(values_a, common, box_a), _part(read_b(index), common, box_b)


def _part(values: Array, common: Box, saved: SavedBox) -> Array:
    return values[common.within(saved.box)].astype(np.float64)


def _difference(name: str, pairs: Iterator[tuple[Array, Array]]) -> TensorDifference:
    largest = furthest = elementwise = 0.0
    num_different = num_elements = 0
    for a, b in pairs:
        # Equal elements, equal NaNs included.
        num_elements += a.size
        is_equal = (a == b) | (np.isnan(a) & np.isnan(b))
        num_different += int(a.size - is_equal.sum())
        # inf - inf is NaN and would warn; is_odd finds such elements below.
        with np.errstate(invalid="ignore"):
            gap = np.where(is_equal, 0.0, np.abs(a - b))
            size = np.maximum(np.abs(a), np.abs(b))
        is_odd = ~is_equal & ~(np.isfinite(a) & np.isfinite(b))
        if is_odd.any():
            furthest = elementwise = inf
            continue
        # Maxima over all pairs; gap > 0 excludes divisions by zero.
        largest = max(largest, _max(size[np.isfinite(size)]))
        furthest = max(furthest, _max(gap))
        elementwise = max(elementwise, _max(gap[gap > 0] / size[gap > 0]))
    relative = furthest / largest if 0.0 < furthest < inf else furthest
    return TensorDifference(
        name=name, relative=relative, elementwise=elementwise, num_different=num_different,
        num_elements=num_elements,
    )  # fmt: skip


def _max(values: Array) -> float:
    return float(values.max()) if values.size else 0.0


def _incomparable(name: str, note: str) -> TensorDifference:
    return TensorDifference(
        name=name, relative=nan, elementwise=nan, num_different=0, num_elements=0, note=note
    )

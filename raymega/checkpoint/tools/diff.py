"""How far two checkpoints differ, tensor by tensor, whatever the layouts that wrote them.

Boxes are read where they meet, so that no tensor is ever whole in memory. Nothing is judged: how
much is too much is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymega.checkpoint.format.manifest_builder import coverage_faults
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.errors import CheckpointError, raise_faults
from raymega.messages import Box, SavedBox

BOXES_HELD = 8
"""Boxes of one side that are kept in case the next box of the other side meets them too."""

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """How far a tensor of one checkpoint is from that of the other.

    Attributes:
        name: Saved name.
        relative: Largest ``|a - b|`` of an element over the tensor's largest magnitude on either side;
            inf where only one of the two elements is a finite number.
        elementwise: Largest ``|a - b| / max(|a|, |b|)``.
        num_different: Elements that are not equal.
        num_elements: All of them.
        note: Why the numbers cannot be given, such as two shapes; empty when they can.
    """

    name: str
    relative: float
    elementwise: float
    num_different: int
    num_elements: int
    note: str = ""


def compare(a: Checkpoint, b: Checkpoint) -> Iterator[TensorDifference]:
    """Every tensor of either checkpoint, in order of names, as it is read.

    Raises:
        CheckpointError: A file of one is not as it was written.
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
    """The values of both where a box of one meets a box of the other."""
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
        num_elements += a.size
        is_equal = (a == b) | (np.isnan(a) & np.isnan(b))
        num_different += int(a.size - is_equal.sum())
        with np.errstate(invalid="ignore"):
            gap = np.where(is_equal, 0.0, np.abs(a - b))
            size = np.maximum(np.abs(a), np.abs(b))
        is_odd = ~is_equal & ~(np.isfinite(a) & np.isfinite(b))
        if is_odd.any():
            furthest = elementwise = inf
            continue
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

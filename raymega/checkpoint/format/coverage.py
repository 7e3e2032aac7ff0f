"""Find the parts of a block that a set of boxes misses or covers more than once.

Every check that a checkpoint is complete uses this arithmetic. It knows boxes only, no tensors or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from raymega.box import Box


def uncovered_cells(outer: Box, boxes: Sequence[Box]) -> Iterator[tuple[Box, int]]:
    """Yield the parts of ``outer`` that ``boxes`` do not cover exactly once, with the count of each.

    The edges of all boxes divide ``outer`` into cells, and a box covers a cell whole or not at all.
    So the cost depends on the number of boxes, not on the number of elements.
    """
    inside = [part for part in map(outer.intersect, boxes) if part is not None]
    # The common case: one box that is the whole block.
    if inside == [outer]:
        return
    # One counter a cell of the grid that the edges of all boxes make.
    edges = [_edges((outer, *inside), dim) for dim in range(len(outer.shape))]
    counts = np.zeros([len(cuts) - 1 for cuts in edges], dtype=np.int64)
    for part in inside:
        counts[_cells_of(part, edges)] += 1
    # Cells missed (0) or covered repeatedly (2 and more), back in the tensor's indices.
    for index in np.argwhere(counts != 1):
        at = list(zip(edges, index, strict=True))
        offset = tuple(int(cuts[i]) for cuts, i in at)
        shape = tuple(int(cuts[i + 1] - cuts[i]) for cuts, i in at)
        yield Box(offset=offset, shape=shape), int(counts[tuple(index)])


def is_partition(
    shape: tuple[int, ...], offsets: NDArray[np.integer], extents: NDArray[np.integer]
) -> bool:
    """Return whether boxes inside a tensor of ``shape`` cover each of its elements exactly once.

    It is :func:`uncovered_cells` for very many boxes, and says yes or no alone.

    Args:
        shape: Extents of the tensor.
        offsets: First index of each box, (boxes, dims).
        extents: Extent of each box, (boxes, dims).
    """
    volume = extents.prod(axis=1, dtype=np.int64).sum()
    if volume != prod(shape):
        return False
    if len(offsets) == 1 or not shape:
        return len(offsets) == 1
    # As many elements as there are, so each once unless two boxes overlap: +1 and -1 at the corners
    # of each box, summed up along every dim, count the boxes of each cell.
    edges = [
        np.unique(np.concatenate([first, first + n]))
        for first, n in zip(offsets.T, extents.T, strict=True)
    ]
    first = [np.searchsorted(cuts, at) for cuts, at in zip(edges, offsets.T, strict=True)]
    after = [
        np.searchsorted(cuts, at) for cuts, at in zip(edges, (offsets + extents).T, strict=True)
    ]
    counts = np.zeros([len(cuts) for cuts in edges], np.int32)
    for corner in np.ndindex(*(2,) * len(shape)):
        place = tuple(after[dim] if end else first[dim] for dim, end in enumerate(corner))
        np.add.at(counts, place, -1 if sum(corner) % 2 else 1)
    for dim in range(len(shape)):
        np.cumsum(counts, axis=dim, out=counts)
    return bool(counts.max() == 1)


def _edges(boxes: Sequence[Box], dim: int) -> np.ndarray:
    starts = [box.offset[dim] for box in boxes]
    ends = [box.offset[dim] + box.shape[dim] for box in boxes]
    return np.unique(starts + ends)


def _cells_of(part: Box, edges: Sequence[np.ndarray]) -> tuple[slice, ...]:
    spans = zip(edges, part.offset, part.shape, strict=True)
    return tuple(slice(*np.searchsorted(cuts, (a, a + extent))) for cuts, a, extent in spans)

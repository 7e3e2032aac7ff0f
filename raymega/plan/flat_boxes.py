"""Split a stretch of a flat array into boxes of its shape."""

from __future__ import annotations

from collections.abc import Iterator

from raymega.box import Box


def boxes_of_range(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """Yield elements [first, last) of a flat array of ``shape`` as boxes, in order.

    A matrix has at most 3 boxes: the end of a row, whole rows, the begin of a row.
    """
    if first >= last:
        return
    if len(shape) == 1:
        yield Box(offset=(first,), shape=(last - first,))
        return
    inner = 1
    for extent in shape[1:]:
        inner *= extent
    top, bottom = -(-first // inner), last // inner
    if top > bottom:  # both ends are in one row
        yield from _in_row(bottom, shape, first - bottom * inner, last - bottom * inner)
        return
    # The end of a row, whole rows, the begin of a row.
    yield from _in_row(top - 1, shape, first - (top - 1) * inner, inner)
    if top < bottom:
        yield Box(offset=(top, *(0 for _ in shape[1:])), shape=(bottom - top, *shape[1:]))
    yield from _in_row(bottom, shape, 0, last - bottom * inner)


def linear_index(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the place of the element at ``offset`` in a flat array of ``shape``."""
    index = 0
    for position, extent in zip(offset, shape, strict=True):
        index = index * extent + position
    return index


def _in_row(row: int, shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], first, last):
        yield Box(offset=(row, *box.offset), shape=(1, *box.shape))

"""Division of a save among the ranks: a pure function that every rank evaluates for itself.

Values that several replicas hold are divided among them; values that one rank holds alone it writes
itself. No messages are exchanged: all replicas of a set of blocks have them in the same order, so
they compute the same division, and each takes its own part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import add

from raymega.checkpoint.format.dtypes import element_type
from raymega.messages import Box
from raymega.plan.flat_boxes import boxes_of_range

MAX_BOX_BYTES = 64 * 2**20
"""Largest box in bytes. A box is read and verified whole, so this bounds what a reader fetches in excess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """Block of a global tensor.

    Attributes:
        tensor: Saved name, ``kind/name``.
        dtype: Element type, numpy's name.
        global_shape: Shape of the whole tensor.
        box: Place of the block in the tensor.
    """

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box

    @property
    def num_bytes(self) -> int:
        """Size of the block in bytes."""
        return self.box.num_elements * element_type(self.dtype).num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBlock(TensorPart):
    """Block that a rank holds.

    Attributes:
        is_primary: Whether this rank saves the block, of all tp ranks and stages that hold it.
        holders: Global ranks that hold the block and are primary: dp * cp ranks for a dense weight,
            edp ranks for an expert, one rank for a sharded tensor.
        replica: Index of this rank in ``holders``.
    """

    is_primary: bool = True
    holders: tuple[int, ...] = (0,)
    replica: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteAssignment(TensorPart):
    """Part of a local block, the one of index ``local_block``, that this rank writes."""

    local_block: int


def share_boxes(
    local_blocks: Sequence[LocalBlock], *, max_box_bytes: int = MAX_BOX_BYTES
) -> tuple[WriteAssignment, ...]:
    """Return the boxes that this rank writes: its share of the blocks that it is primary for.

    Blocks with the same holders are laid end to end and divided into one range of equal bytes per
    holder. A row (all indices but the last dim's) belongs to the range in which it begins. So no share is
    more than one row too large, and fewer blocks are cut than there are holders. A box has at most
    ``max_box_bytes``, itself at most MAX_BOX_BYTES, or is a single row that is longer.
    """
    # Blocks by holders: each set of holders divides its blocks by itself.
    together: dict[tuple[tuple[int, ...], int], list[WriteAssignment]] = defaultdict(list)
    for index, local_block in enumerate(local_blocks):
        if local_block.is_primary:
            together[local_block.holders, local_block.replica].append(_whole(index, local_block))
    max_box_bytes = min(max_box_bytes, MAX_BOX_BYTES)
    assignments: list[WriteAssignment] = []
    # [begin, end) is this rank's range in bytes, relative to the block at hand.
    for (holders, replica), wholes in sorted(together.items(), key=lambda at: -len(at[0][0])):
        total = sum(assignment.num_bytes for assignment in wholes)
        begin, end = (total * place // len(holders) for place in (replica, replica + 1))
        for assignment in wholes:
            assignments += _rows_between(assignment, begin, end, max_box_bytes)
            begin, end = begin - assignment.num_bytes, end - assignment.num_bytes
    return tuple(assignments)


def pack(sizes: Sequence[int], limit: int) -> tuple[slice, ...]:
    """Return slices of ``sizes`` that each sum to at most ``limit``, or are one larger item.

    It packs boxes into files, and files into portions that are copied at once.
    """
    stretches: list[slice] = []
    begin = total = 0
    for index, size in enumerate(sizes):
        if index > begin and total + size > limit:
            stretches.append(slice(begin, index))
            begin, total = index, 0
        total += size
    return (*stretches, slice(begin, len(sizes))) if sizes else ()


def _whole(index: int, local_block: LocalBlock) -> WriteAssignment:
    return WriteAssignment(
        local_block=index,
        tensor=local_block.tensor,
        dtype=local_block.dtype,
        global_shape=local_block.global_shape,
        box=local_block.box,
    )


def _rows_between(
    assignment: WriteAssignment, begin: int, end: int, max_bytes: int
) -> Iterator[WriteAssignment]:
    """Yield the rows that begin in bytes [begin, end) of ``assignment``, in boxes of bounded size.

    In an expert tensor a row is one feature of one expert: a whole expert may exceed a box.
    """
    outer, inner = _rows_of(assignment.box.shape)
    num_rows = prod(outer)
    row_bytes = assignment.num_bytes // num_rows
    # Byte offsets rounded up to rows, and clamped: the range may lie partly or wholly outside.
    first, last = (min(max(-(-byte // row_bytes), 0), num_rows) for byte in (begin, end))
    step = max(1, max_bytes // row_bytes)
    # Where several experts fit into a box, it holds whole ones.
    if step > outer[-1]:
        step -= step % outer[-1]
    # A range of rows as boxes over the outer dims, extended by the inner dim and moved to its place.
    for row in range(first, last, step):
        for box in boxes_of_range(outer, row, min(row + step, last)):
            offset, shape = (*box.offset, *(0 for _ in inner)), (*box.shape, *inner)
            place = tuple(map(add, assignment.box.offset, offset))
            yield replace(assignment, box=Box(offset=place, shape=shape))


def _rows_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split a shape into the dims that count rows and those of one row; a vector's elements are rows."""
    return (shape[:-1], shape[-1:]) if len(shape) > 1 else (shape, ())

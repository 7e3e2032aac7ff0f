"""Who writes which elements: a pure function that every rank evaluates for itself.

Values that several replicas hold are shared out among them; values that one holds alone it writes
itself. No messages are exchanged: replicas whose common holdings are equal, in equal order, find the
same division, and each its own part of it.
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
"""A box is read and verified as a whole, so this bounds a reader's memory and its excess bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBlock:
    """One block of a global tensor that a rank holds.

    Attributes:
        tensor: Saved name, ``kind/name``.
        dtype: Element type, numpy's name.
        global_shape: Shape of the whole tensor.
        box: Which block of it.
        is_primary: Of all tp ranks and stages that hold the block, this one saves it.
        holders: Global ranks that hold it and are primary: dp * cp ranks a dense weight, edp ranks
            an expert, one what is sharded.
        replica: This rank's place among them.
    """

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    is_primary: bool
    holders: tuple[int, ...] = (0,)
    replica: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteAssignment:
    """A part of a holding that one replica writes.

    Attributes:
        local_block: Index of the holding.
        tensor: Saved name, ``kind/name``.
        dtype: Element type.
        global_shape: Shape of the whole tensor.
        box: Which block of it.
    """

    local_block: int
    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return self.box.num_elements * element_type(self.dtype).num_bytes


def share_boxes(
    local_blocks: Sequence[LocalBlock], *, max_box_bytes: int = MAX_BOX_BYTES
) -> tuple[WriteAssignment, ...]:
    """The blocks that a rank writes, of what it holds and is primary for.

    What it holds alone it writes whole. What it holds with the same others, laid end to end, is cut
    into as many stretches of equal bytes as there are of them; a row (all indices but the last dim's)
    belongs to the stretch in which it begins. So no replica has more than one row too many of it, and
    fewer holdings than there are replicas are cut at all. Boxes have at most ``max_box_bytes``, which
    cannot be more than MAX_BOX_BYTES, or one row if that is more.
    """
    together: dict[tuple[tuple[int, ...], int], list[WriteAssignment]] = defaultdict(list)
    for index, local_block in enumerate(local_blocks):
        if local_block.is_primary:
            together[local_block.holders, local_block.replica].append(_whole(index, local_block))
    max_box_bytes = min(max_box_bytes, MAX_BOX_BYTES)
    assignments: list[WriteAssignment] = []
    for (holders, replica), wholes in sorted(together.items(), key=lambda at: -len(at[0][0])):
        total = sum(assignment.num_bytes for assignment in wholes)
        begin, end = (total * place // len(holders) for place in (replica, replica + 1))
        for assignment in wholes:
            assignments += _rows_between(assignment, begin, end, max_box_bytes)
            begin, end = begin - assignment.num_bytes, end - assignment.num_bytes
    return tuple(assignments)


def pack(sizes: Sequence[int], limit: int) -> tuple[slice, ...]:
    """Cut a row of things into stretches of at most ``limit`` together, or one thing if that is more.

    For boxes in files, and for files in what is copied at once.
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
    """Rows that begin in bytes [begin, end) of ``assignment``, in blocks of bounded size.

    Of an expert tensor a row is one feature of one expert: a whole expert may be more than a box.
    """
    outer, inner = _rows_of(assignment.box.shape)
    num_rows = prod(outer)
    row_bytes = assignment.num_bytes // num_rows
    first, last = (min(max(-(-byte // row_bytes), 0), num_rows) for byte in (begin, end))
    step = max(1, max_bytes // row_bytes)
    if step > outer[-1]:
        step -= step % outer[-1]  # whole experts
    for row in range(first, last, step):
        for box in boxes_of_range(outer, row, min(row + step, last)):
            offset, shape = (*box.offset, *(0 for _ in inner)), (*box.shape, *inner)
            place = tuple(map(add, assignment.box.offset, offset))
            yield replace(assignment, box=Box(offset=place, shape=shape))


def _rows_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims by which rows are counted, and those of a row; elements of a vector are rows."""
    return (shape[:-1], shape[-1:]) if len(shape) > 1 else (shape, ())

"""Who writes which elements: a pure function that every rank evaluates for itself.

Values that all data-parallel replicas hold are shared out among them; values that one holds alone it
writes itself. No messages are exchanged: replicas whose common holdings are equal, in equal order,
find the same division, and each its own part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raymega.checkpoint.dtypes import element_type
from raymega.messages import Box

MAX_BOX_BYTES = 64 * 2**20
"""A box is read and verified as a whole, so this bounds a reader's memory and its excess bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """One block of a global tensor that a rank holds.

    Attributes:
        tensor: Saved name, ``kind/name``.
        dtype: Element type, numpy's name.
        global_shape: Shape of the whole tensor.
        box: Which block of it.
        is_primary: Of all tp ranks and stages that hold the block, this one saves it.
        is_replicated: All data-parallel replicas hold it, and not this one alone.
    """

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    is_primary: bool
    is_replicated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A part of a holding that one replica writes.

    Attributes:
        holding: Index of the holding.
        tensor: Saved name, ``kind/name``.
        dtype: Element type.
        global_shape: Shape of the whole tensor.
        box: Which block of it.
    """

    holding: int
    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return self.box.num_elements * element_type(self.dtype).num_bytes


def share_boxes(
    holdings: Sequence[Holding],
    *,
    num_replicas: int,
    replica: int,
    max_box_bytes: int = MAX_BOX_BYTES,
) -> tuple[Share, ...]:
    """The blocks that ``replica`` writes, of what it holds and is primary for.

    What it holds alone it writes whole. What all replicas hold, laid end to end, is cut into
    ``num_replicas`` stretches of equal bytes; a row (an index of dim 0) belongs to the stretch in
    which it begins. So no replica has more than one row too many, and at most num_replicas - 1
    holdings are cut at all. Boxes have at most ``max_box_bytes``, which cannot be more than
    MAX_BOX_BYTES, or one row if that is more.
    """
    primary = [(i, holding) for i, holding in enumerate(holdings) if holding.is_primary]
    replicated = [_whole(i, holding) for i, holding in primary if holding.is_replicated]
    total = sum(share.num_bytes for share in replicated)
    begin, end = (total * index // num_replicas for index in (replica, replica + 1))
    max_box_bytes = min(max_box_bytes, MAX_BOX_BYTES)
    shares: list[Share] = []
    for share in replicated:
        shares += _rows_between(share, begin, end, max_box_bytes)
        begin, end = begin - share.num_bytes, end - share.num_bytes
    for share in (_whole(i, holding) for i, holding in primary if not holding.is_replicated):
        shares += _rows_between(share, 0, share.num_bytes, max_box_bytes)
    return tuple(shares)


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


def _whole(index: int, holding: Holding) -> Share:
    return Share(
        holding=index,
        tensor=holding.tensor,
        dtype=holding.dtype,
        global_shape=holding.global_shape,
        box=holding.box,
    )


def _rows_between(share: Share, begin: int, end: int, max_bytes: int) -> Iterator[Share]:
    """Rows that begin in bytes [begin, end) of ``share``, in blocks of bounded size."""
    num_rows = share.box.shape[0]
    row_bytes = share.num_bytes // num_rows
    first, last = (min(max(-(-byte // row_bytes), 0), num_rows) for byte in (begin, end))
    step = max(1, max_bytes // row_bytes)
    for row in range(first, last, step):
        yield replace(share, box=_rows(share.box, row, min(step, last - row)))


def _rows(block: Box, first: int, count: int) -> Box:
    offset = (block.offset[0] + first, *block.offset[1:])
    return Box(offset=offset, shape=(count, *block.shape[1:]))

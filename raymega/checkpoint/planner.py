"""Who writes which elements: a pure function that every rank evaluates for itself.

Data-parallel replicas hold the same values, so they share the work of saving them. No messages are
exchanged: equal arguments give every replica the same division, and its own part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raymega.checkpoint.dtypes import element_type
from raymega.messages import Box
from raymega.parallel.sharding import ShardSpec

MAX_BOX_BYTES = 64 * 2**20
"""A box is read and verified as a whole, so this bounds a reader's memory and its excess bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """One tensor that a rank holds: a parameter's values or one of its optimizer states.

    Attributes:
        kind: ``model``, ``adam.exp_avg``, ...; the first part of the saved name.
        spec: The parameter's place in the model.
        dtype: Element type, numpy's name.
    """

    kind: str
    spec: ShardSpec
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A block of a holding that one replica writes.

    Attributes:
        holding: Index of the holding.
        tensor: Saved name, ``kind/name``.
        dtype: Element type.
        global_shape: Shape of the whole tensor.
        box: Which block of it.
        local: The same block in the holding's indices.
    """

    holding: int
    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    local: Box

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return self.box.num_elements * element_type(self.dtype).num_bytes


def share_boxes(
    holdings: Sequence[Holding], *, num_replicas: int, replica: int
) -> tuple[Share, ...]:
    """The blocks that ``replica`` writes.

    The primary pieces, laid end to end, are cut into ``num_replicas`` stretches of equal bytes; a
    row (an index of dim 0) belongs to the stretch in which it begins. So no replica has more than
    one row too many, and at most num_replicas - 1 pieces are cut at all.
    """
    pieces = list(_primary_pieces(holdings))
    total = sum(piece.num_bytes for piece in pieces)
    begin, end = (total * index // num_replicas for index in (replica, replica + 1))
    shares: list[Share] = []
    for piece in pieces:
        shares += _rows_between(piece, begin, end)
        begin, end = begin - piece.num_bytes, end - piece.num_bytes
    return tuple(shares)


def _primary_pieces(holdings: Sequence[Holding]) -> Iterator[Share]:
    for index, holding in enumerate(holdings):
        for piece in (piece for piece in holding.spec.pieces if piece.is_primary):
            yield Share(
                holding=index,
                tensor=f"{holding.kind}/{piece.tensor.name}",
                dtype=holding.dtype,
                global_shape=piece.tensor.shape,
                box=piece.box,
                local=piece.local,
            )


def _rows_between(piece: Share, begin: int, end: int) -> Iterator[Share]:
    """Rows that begin in bytes [begin, end) of ``piece``, in blocks of bounded size."""
    num_rows = piece.box.shape[0]
    row_bytes = piece.num_bytes // num_rows
    first, last = (min(max(-(-byte // row_bytes), 0), num_rows) for byte in (begin, end))
    step = max(1, MAX_BOX_BYTES // row_bytes)
    for row in range(first, last, step):
        count = min(step, last - row)
        box, local = (_rows(block, row, count) for block in (piece.box, piece.local))
        yield replace(piece, box=box, local=local)


def _rows(block: Box, first: int, count: int) -> Box:
    offset = (block.offset[0] + first, *block.offset[1:])
    return Box(offset=offset, shape=(count, *block.shape[1:]))

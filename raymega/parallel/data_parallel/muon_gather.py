"""MuonGather: gathers each matrix whole on one rank, and scatters the result of a function of it.

A matrix is a logical one of the model's table: q, k, v, gate and up each by itself, every expert by
itself, whatever is fused or stacked into one parameter. Its parts are on the ranks that shard the
state and, where tp (or etp) cuts it, on those too. `optim` supplies the function; `core/buckets.py`
says which rank owns which elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from raymega.box import Box
from raymega.parallel.comm.collectives import start_exchange
from raymega.parallel.comm.process_groups import Group, Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.core.buckets import Bucket, BucketTable
from raymega.parallel.core.shard_spec import Piece
from raymega.plan.grid import ExpertPlace
from raymega.plan.zero_levels import ZeroLevel

Flats = Mapping[int, torch.Tensor]
"""Flat values of this rank's owned part of each bucket, by the bucket's index."""
Transform = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Function from whole matrices, each [rows, columns], to matrices of the same shapes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Matrix:
    """A matrix of a bucket, and its owner: the rank that gathers it whole.

    Attributes:
        bucket: Bucket that holds this rank's block.
        start: Index in the bucket of the block's first element.
        shape: Shape of the whole matrix.
        boxes: Block of each rank that cuts the matrix, by place in tp or etp.
        row: Place of the owner among the ranks that shard the state.
        column: Place of the owner among the ranks that cut the matrix.
    """

    bucket: Bucket
    start: int
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    row: int = 0
    column: int = 0

    def has_block_of(self, place: int) -> bool:
        """Return whether ``place`` is the one that supplies its block to the owner.

        Several ranks may hold the same block. The owner uses its own copy, else that of the first holder.
        """
        box = self.boxes[place]
        if place == self.column:
            return True
        return box != self.boxes[self.column] and box not in self.boxes[:place]


class MuonGather:
    """Gather and scatter of the matrices of some buckets, with owners balanced over the ranks.

    All ranks that shard a bucket's state, and all that cut its tensors, must call it together.
    """

    def __init__(
        self, table: BucketTable, buckets: Sequence[Bucket], groups: Groups, log: CommLog
    ) -> None:
        self._fields = [
            _Field(table, [b for b in buckets if b.is_expert == is_expert], cut, log)
            for is_expert, cut in ((False, groups.tp), (True, groups.etp))
            if any(b.is_expert == is_expert for b in buckets)
        ]

    def transform(self, flats: Flats, function: Transform) -> None:
        """Replace this rank's elements in ``flats`` by those of ``function`` of the whole matrices."""
        for field in self._fields:
            field.transform(flats, function)


class _Field:
    """The matrices of one set of ranks: dense ones (dp * cp, tp), or experts' (edp, etp)."""

    def __init__(
        self, table: BucketTable, buckets: Sequence[Bucket], cut: Group, log: CommLog
    ) -> None:
        self._table, self._cut, self._log = table, cut, log
        sharing = buckets[0].sharing
        self._is_shared_out = buckets[0].level > ZeroLevel.NONE
        self._sharers = sharing.inside if self._is_shared_out else sharing.whole
        self._nothing = torch.empty(0, dtype=table.dtype, device=buckets[0].spans[0].param.device)
        # Owners form a grid: rows are the ranks that shard the state, columns those that cut the matrix.
        found = [matrix for bucket in buckets for matrix in _matrices_of(bucket, cut)]
        matrices = _spread(found, rows=self._sharers.size, columns=cut.size)
        self._rows = [[m for m in matrices if m.row == i] for i in range(self._sharers.size)]
        self._mine = self._rows[self._sharers.index]
        self._columns = [[m for m in self._mine if m.column == j] for j in range(cut.size)]

    def transform(self, flats: Flats, function: Transform) -> None:
        # first this rank's block of each matrix, over the ranks that shard; then whole ones, over tp
        blocks = self._gather_blocks(flats)
        wholes = self._gather_wholes(dict(zip(self._mine, blocks, strict=True)))
        results = function(wholes) if wholes else []
        # the same two exchanges, back
        self._scatter(self._blocks_back(results), flats)

    def _gather_blocks(self, flats: Flats) -> list[torch.Tensor]:
        """Return this rank's block of each matrix of its row, from the ranks that shard the state."""
        me, places = self._sharers.index, range(self._sharers.size)
        sent = [
            [self._view(flats, m, self._given(m, me, i)) for m in self._rows[i]] for i in places
        ]
        sizes = [[_length(self._given(m, i, me)) for m in self._mine] for i in places]
        received = self._exchange(sent, sizes, self._sharers)
        return [torch.cat(parts) for parts in zip(*received, strict=True)]

    def _gather_wholes(self, blocks: Mapping[_Matrix, torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole matrices that this rank owns, from the ranks that cut them."""
        me, places = self._cut.index, range(self._cut.size)
        mine = self._columns[me]
        sent = [[blocks[m] for m in self._columns[j] if m.has_block_of(me)] for j in places]
        sizes = [[m.boxes[j].num_elements * m.has_block_of(j) for m in mine] for j in places]
        received = self._exchange(sent, sizes, self._cut)
        # An empty part is a block that another place supplies.
        wholes = []
        for m, *parts in zip(mine, *received, strict=True):
            wholes.append(self._nothing.new_empty(m.shape))
            for box, part in zip(m.boxes, parts, strict=True):
                if part.numel():
                    wholes[-1][_place(box)] = part.view(box.shape)
        return wholes

    def _blocks_back(self, results: Sequence[torch.Tensor]) -> dict[_Matrix, torch.Tensor]:
        """Return this rank's block of the result of each matrix of its row."""
        me, places = self._cut.index, range(self._cut.size)
        owned = list(zip(self._columns[me], results, strict=True))
        sent = [[result[_place(m.boxes[j])] for m, result in owned] for j in places]
        sizes = [[m.boxes[me].num_elements for m in self._columns[j]] for j in places]
        received = self._exchange(sent, sizes, self._cut)
        return {
            m: part
            for column, parts in zip(self._columns, received, strict=True)
            for m, part in zip(column, parts, strict=True)
        }

    def _scatter(self, blocks: Mapping[_Matrix, torch.Tensor], flats: Flats) -> None:
        """Send each rank that shards the state its elements of the results, and store this rank's."""
        me, places = self._sharers.index, range(self._sharers.size)
        sent = []
        for i in places:
            held = [(m, self._held(m, i)) for m in self._mine]
            sent.append([blocks[m][begin - m.start : end - m.start] for m, (begin, end) in held])
        sizes = [[_length(self._held(m, me)) for m in self._rows[i]] for i in places]
        received = self._exchange(sent, sizes, self._sharers)
        for row, parts in zip(self._rows, received, strict=True):
            for m, part in zip(row, parts, strict=True):
                self._view(flats, m, self._held(m, me)).copy_(part)

    def _given(self, matrix: _Matrix, source: int, owner: int) -> tuple[int, int]:
        """Return the range that place ``source`` sends to the owner; empty where the owner holds it."""
        # without sharding each rank holds all of the block, so the owner sends it to itself
        held = self._held(matrix, source)
        return held if self._is_shared_out or source == owner else (matrix.start, matrix.start)

    def _held(self, matrix: _Matrix, place: int) -> tuple[int, int]:
        """Return the range of this rank's block that ``place`` holds, as indices of the bucket."""
        begin, end = matrix.start, matrix.start + matrix.boxes[self._cut.index].num_elements
        if not self._is_shared_out:
            return begin, end
        size = matrix.bucket.size // self._sharers.size
        first, last = max(begin, place * size), min(end, (place + 1) * size)
        return (first, last) if first < last else (begin, begin)

    def _view(self, flats: Flats, matrix: _Matrix, held: tuple[int, int]) -> torch.Tensor:
        if held[0] == held[1]:
            return self._nothing
        first = self._table.owned(matrix.bucket).begin
        return flats[matrix.bucket.index][held[0] - first : held[1] - first]

    def _exchange(
        self,
        sent: Sequence[Sequence[torch.Tensor]],
        sizes: Sequence[Sequence[int]],
        group: Group,
    ) -> list[list[torch.Tensor]]:
        """Exchange flat tensors: ``sent`` and the result are lists by place; ``sizes`` are of the result."""
        rows = [[part.reshape(-1) for part in parts] for parts in sent]
        flat = torch.cat([self._nothing, *(part for parts in rows for part in parts)])
        lengths = [sum(part.numel() for part in parts) for parts in rows]
        # one message to each place, which holds all its parts end to end
        received, pending = start_exchange(
            flat, group, sent=lengths, received=[sum(each) for each in sizes]
        )
        leaving = (flat.numel() - lengths[group.index]) * flat.element_size()
        exchange = self._log.track_transfer("matrix_exchange", pending, sent_bytes=leaving)
        exchange.wait(group.timeout_s)
        # apart again, by place and matrix
        parts = torch.split(received, [size for each in sizes for size in each])
        remaining = iter(parts)
        return [[next(remaining) for _ in each] for each in sizes]


def _matrices_of(bucket: Bucket, cut: Group) -> Iterator[_Matrix]:
    """Yield the matrices of a bucket in its order, without owners yet."""
    for param, start in bucket.spans:
        if param.spec.role == "matrix":
            shape, dim = param.spec.shape, param.spec.stack_dim
            for piece in param.spec.pieces:
                first = start + piece.local.offset[dim] * prod(shape[dim + 1 :])
                yield from _matrices_of_piece(piece, bucket, first, prod(shape[1:]), cut)


def _matrices_of_piece(
    piece: Piece, bucket: Bucket, start: int, expert_size: int, cut: Group
) -> Iterator[_Matrix]:
    """Yield the matrix of a piece, or one for each expert; experts are ``expert_size`` elements apart."""
    # dense: cut over tp
    tensor, places = piece.tensor, range(cut.size)
    if not tensor.is_expert:
        boxes = tuple(tensor.box(tp=cut.size, tp_rank=place) for place in places)
        yield _Matrix(bucket=bucket, start=start, shape=tensor.shape, boxes=boxes)
        return
    # experts: each is a matrix, cut over etp; dim 0 of a box is the expert
    cuts = (ExpertPlace(etp=cut.size, etp_rank=place) for place in places)
    whole = (tensor.box(tp=1, tp_rank=0, experts=place) for place in cuts)
    boxes = tuple(Box(offset=box.offset[1:], shape=box.shape[1:]) for box in whole)
    for expert in range(piece.box.shape[0]):
        first = start + expert * expert_size
        yield _Matrix(bucket=bucket, start=first, shape=tensor.shape[1:], boxes=boxes)


def _spread(matrices: Iterable[_Matrix], *, rows: int, columns: int) -> list[_Matrix]:
    """Assign an owner to each matrix: the most expensive first, to the rank with the least work so far."""
    work = [0] * (rows * columns)
    owned = []
    for matrix in sorted(matrices, key=_cost, reverse=True):
        place = work.index(min(work))
        work[place] += _cost(matrix)
        owned.append(replace(matrix, row=place // columns, column=place % columns))
    return owned


def _cost(matrix: _Matrix) -> int:
    """Return the multiplications of a matrix with its transpose, the unit of Newton-Schulz's work."""
    return prod(matrix.shape) * min(matrix.shape)


def _place(box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + n) for begin, n in zip(box.offset, box.shape, strict=True))


def _length(held: tuple[int, int]) -> int:
    return held[1] - held[0]

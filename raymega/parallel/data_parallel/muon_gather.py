"""MuonGather: brings matrices together whole, each on one rank, and takes what becomes of them apart.

A matrix is a logical one, as the model's table has it: q, k, v, gate and up each for itself, every
expert for itself, whatever is fused or stacked into one parameter. Its parts lie on the ranks that
share a copy of the state out and, where it is cut, on those of the tensor axis. What a matrix becomes
is whoever calls; which ranks own which elements is buckets'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from raymega.messages import Box
from raymega.parallel.comm.collectives import start_exchange
from raymega.parallel.comm.process_groups import Group, Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.core.buckets import Bucket, BucketTable
from raymega.parallel.core.shard_spec import Piece
from raymega.plan.grid import ExpertPlace
from raymega.plan.zero_levels import ZeroLevel

Flats = Mapping[int, torch.Tensor]
"""By index of a bucket: values of what this rank owns of it, flat."""
Transform = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""From whole matrices, each [rows, columns], to others of the same shapes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Matrix:
    """One matrix of a bucket.

    Attributes:
        bucket: Where this rank's block lies.
        start: First element of the block in the bucket.
        shape: The whole matrix's.
        boxes: Block of each rank that cuts it, by place.
        row: Of the rank that has it whole, the place among those that share out.
        column: The same among those that cut.
    """

    bucket: Bucket
    start: int
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    row: int = 0
    column: int = 0

    def has_block_of(self, place: int) -> bool:
        """Whether the owner gets its block from ``place``: from one of those that hold it, best itself."""
        box = self.boxes[place]
        if place == self.column:
            return True
        return box != self.boxes[self.column] and box not in self.boxes[:place]


class MuonGather:
    """The matrices of some buckets; owners of whole ones are spread evenly over the ranks.

    All ranks that share a bucket's state out, and all that cut its tensors, call it together.
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
        """Replace this rank's elements of matrices in ``flats`` by those of what they become."""
        for field in self._fields:
            field.transform(flats, function)


class _Field:
    """Matrices whose ranks are the same: dense ones, or experts'."""

    def __init__(
        self, table: BucketTable, buckets: Sequence[Bucket], cut: Group, log: CommLog
    ) -> None:
        self._table, self._cut, self._log = table, cut, log
        sharing = buckets[0].sharing
        self._is_shared_out = buckets[0].level > ZeroLevel.NONE
        self._sharers = sharing.inside if self._is_shared_out else sharing.whole
        self._nothing = torch.empty(0, dtype=table.dtype, device=buckets[0].spans[0].param.device)
        found = [matrix for bucket in buckets for matrix in _matrices_of(bucket, cut)]
        matrices = _spread(found, rows=self._sharers.size, columns=cut.size)
        self._rows = [[m for m in matrices if m.row == i] for i in range(self._sharers.size)]
        self._mine = self._rows[self._sharers.index]
        self._columns = [[m for m in self._mine if m.column == j] for j in range(cut.size)]

    def transform(self, flats: Flats, function: Transform) -> None:
        blocks = self._gather_blocks(flats)
        wholes = self._gather_wholes(dict(zip(self._mine, blocks, strict=True)))
        results = function(wholes) if wholes else []
        self._scatter(self._blocks_back(results), flats)

    def _gather_blocks(self, flats: Flats) -> list[torch.Tensor]:
        """This rank's block of each matrix of its row, from those that share the state out."""
        me, places = self._sharers.index, range(self._sharers.size)
        sent = [
            [self._view(flats, m, self._given(m, me, i)) for m in self._rows[i]] for i in places
        ]
        sizes = [[_length(self._given(m, i, me)) for m in self._mine] for i in places]
        received = self._exchange(sent, sizes, self._sharers)
        return [torch.cat(parts) for parts in zip(*received, strict=True)]

    def _gather_wholes(self, blocks: Mapping[_Matrix, torch.Tensor]) -> list[torch.Tensor]:
        """The matrices that this rank has whole."""
        me, places = self._cut.index, range(self._cut.size)
        mine = self._columns[me]
        sent = [[blocks[m] for m in self._columns[j] if m.has_block_of(me)] for j in places]
        sizes = [[m.boxes[j].num_elements * m.has_block_of(j) for m in mine] for j in places]
        received = self._exchange(sent, sizes, self._cut)
        wholes = []
        for m, *parts in zip(mine, *received, strict=True):
            wholes.append(self._nothing.new_empty(m.shape))
            for box, part in zip(m.boxes, parts, strict=True):
                if part.numel():
                    wholes[-1][_place(box)] = part.view(box.shape)
        return wholes

    def _blocks_back(self, results: Sequence[torch.Tensor]) -> dict[_Matrix, torch.Tensor]:
        """This rank's block of what each matrix of its row became."""
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
        """Each rank's elements go to it."""
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
        """Elements of this rank's block that place ``source`` gives the owner, as :meth:`_held`."""
        held = self._held(matrix, source)
        return held if self._is_shared_out or source == owner else (matrix.start, matrix.start)

    def _held(self, matrix: _Matrix, place: int) -> tuple[int, int]:
        """Elements of this rank's block that the rank at ``place`` holds, counted in the bucket."""
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
        """What each place sent here, flat, of so many elements each; ``sent`` is by place as well."""
        rows = [[part.reshape(-1) for part in parts] for parts in sent]
        flat = torch.cat([self._nothing, *(part for parts in rows for part in parts)])
        lengths = [sum(part.numel() for part in parts) for parts in rows]
        received, pending = start_exchange(
            flat, group, sent=lengths, received=[sum(each) for each in sizes]
        )
        leaving = (flat.numel() - lengths[group.index]) * flat.element_size()
        exchange = self._log.track_transfer("matrix_exchange", pending, sent_bytes=leaving)
        exchange.wait(group.timeout_s)
        parts = torch.split(received, [size for each in sizes for size in each])
        remaining = iter(parts)
        return [[next(remaining) for _ in each] for each in sizes]


def _matrices_of(bucket: Bucket, cut: Group) -> Iterator[_Matrix]:
    """In the order in which they lie there; owners are not chosen yet."""
    for param, start in bucket.spans:
        if param.spec.role == "matrix":
            shape, dim = param.spec.shape, param.spec.stack_dim
            for piece in param.spec.pieces:
                first = start + piece.local.offset[dim] * prod(shape[dim + 1 :])
                yield from _matrices_of_piece(piece, bucket, first, prod(shape[1:]), cut)


def _matrices_of_piece(
    piece: Piece, bucket: Bucket, start: int, expert_size: int, cut: Group
) -> Iterator[_Matrix]:
    """``expert_size`` elements further on, whatever is stacked, lies the next expert."""
    tensor, places = piece.tensor, range(cut.size)
    if not tensor.is_expert:
        boxes = tuple(tensor.box(tp=cut.size, tp_rank=place) for place in places)
        yield _Matrix(bucket=bucket, start=start, shape=tensor.shape, boxes=boxes)
        return
    cuts = (ExpertPlace(etp=cut.size, etp_rank=place) for place in places)
    whole = (tensor.box(tp=1, tp_rank=0, experts=place) for place in cuts)
    boxes = tuple(Box(offset=box.offset[1:], shape=box.shape[1:]) for box in whole)
    for expert in range(piece.box.shape[0]):
        first = start + expert * expert_size
        yield _Matrix(bucket=bucket, start=first, shape=tensor.shape[1:], boxes=boxes)


def _spread(matrices: Iterable[_Matrix], *, rows: int, columns: int) -> list[_Matrix]:
    """Give each an owner: the dearest first, each to the rank that has least work so far."""
    work = [0] * (rows * columns)
    owned = []
    for matrix in sorted(matrices, key=_cost, reverse=True):
        place = work.index(min(work))
        work[place] += _cost(matrix)
        owned.append(replace(matrix, row=place // columns, column=place % columns))
    return owned


def _cost(matrix: _Matrix) -> int:
    """Of a product of it with itself, which is what its owner's work is made of."""
    return prod(matrix.shape) * min(matrix.shape)


def _place(box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + n) for begin, n in zip(box.offset, box.shape, strict=True))


def _length(held: tuple[int, int]) -> int:
    return held[1] - held[0]

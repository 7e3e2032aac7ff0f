"""Buckets: in which portions gradients and weights travel, and which part of each a rank owns.

One table serves the gradients' buffer, the weights' and the optimizer, so that an element has the
same place in all three. It holds no values and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raymega.messages import Box
from raymega.parallel.groups import Group
from raymega.parallel.parameter import ShardedParameter
from raymega.parallel.sharding import Piece

BUCKET_BYTES = 32 * 2**20
"""Gradient bytes from which a bucket is full, if the rank has many more."""
MIN_BUCKETS = 4
"""A rank with fewer bytes has about so many buckets: the last one to fill has no work to hide behind."""


class Span(NamedTuple):
    """Where a whole parameter lies in a bucket, as elements from its begin."""

    param: ShardedParameter
    start: int

    @property
    def stop(self) -> int:
        """First element behind it."""
        return self.start + self.param.numel()


class Extent(NamedTuple):
    """Some elements of one parameter, and where they lie in a bucket.

    ``first`` to ``last`` count elements of the flat parameter; ``at`` is the place of ``first``.
    """

    param: ShardedParameter
    first: int
    last: int
    at: int

    def within(self, begin: int) -> slice:
        """Selects it in a flat tensor that holds the bucket from element ``begin`` on."""
        return slice(self.at - begin, self.at - begin + self.last - self.first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Parameters that travel together.

    Attributes:
        index: Place in the table.
        group: The ranks that hold the same parameters and see other tokens: over them gradients are
            summed, and among them the bucket is shared out. ``size`` is a multiple of their number.
        chunk: Model chunk whose parameters these are.
        spans: The parameters, end to end, the last in the model first: as backward finishes them.
        size: Elements, with padding at the end.
        first_use: Place in the chunk's forward order of the parameter that is used first.
        is_tied: Copies on the first and on the last stage are summed as well.
        is_partial_over_tp: Some pieces are terms of a sum over tp ranks.
        is_expert: The parameters are experts', and ``group`` is edp.
    """

    index: int
    group: Group
    chunk: int
    spans: tuple[Span, ...]
    size: int
    first_use: int
    is_tied: bool
    is_partial_over_tp: bool
    is_expert: bool

    def extents(self, begin: int, end: int) -> Iterator[Extent]:
        """What lies between elements ``begin`` and ``end``, padding left out."""
        for param, start in self.spans:
            first, last = max(begin - start, 0), min(end - start, param.numel())
            if first < last:
                yield Extent(param, first, last, start + first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Elements ``begin`` to ``end`` of a bucket."""

    bucket: Bucket
    begin: int
    end: int

    @property
    def place(self) -> slice:
        """Selects them in the bucket."""
        return slice(self.begin, self.end)

    def extents(self) -> Iterator[Extent]:
        """The parameters' elements in it."""
        return self.bucket.extents(self.begin, self.end)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketTable:
    """All buckets of a rank, and who owns what.

    Attributes:
        buckets: Ordinary ones first, then partial ones, then tied ones; experts' after dense ones.
        is_sharded: A rank keeps optimizer state for its own part only.
        dtype: Of gradients, masters and moments: float32 or better.
    """

    buckets: tuple[Bucket, ...]
    is_sharded: bool
    dtype: torch.dtype

    def share(self, bucket: Bucket) -> Range:
        """This rank's even part of a bucket: what it counts in norms, sharded or not."""
        size, place = bucket.size // bucket.group.size, bucket.group.index
        return Range(bucket=bucket, begin=size * place, end=size * (place + 1))

    def owned(self, bucket: Bucket) -> Range:
        """What this rank updates: its part when sharded, else all."""
        if self.is_sharded:
            return self.share(bucket)
        return Range(bucket=bucket, begin=0, end=bucket.size)

    @property
    def num_elements(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(bucket.size for bucket in self.buckets)


def make_buckets(
    chunks: Sequence[Sequence[ShardedParameter]],
    replicas: Group,
    *,
    edp: Group | None = None,
    is_sharded: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> BucketTable:
    """Lay the parameters of a rank's model chunks into buckets.

    Buckets end between parameters, when ``bucket_bytes`` of gradients are reached, and never hold
    two chunks or two kinds: of one kind are parameters that are summed alike and have one number
    format. So a tied parameter lies alone on both stages that have it, at the same place, and both
    copies are cut alike.

    Args:
        chunks: Parameters of each chunk in forward order.
        replicas: The ranks that hold the same dense parameters.
        edp: Those that hold the same experts, where there are any.
        is_sharded: Each of them keeps optimizer state for its own part only.
        bucket_bytes: Gradient bytes from which a bucket is full.
    """
    dtype = torch.float32
    for param in (param for chunk in chunks for param in chunk):
        dtype = torch.promote_types(dtype, param.dtype)
    buckets: list[Bucket] = []
    for kind in sorted({_kind(param) for chunk in chunks for param in chunk}):
        group = edp if kind.is_expert else replicas
        assert group is not None, "experts are summed over their own replicas"
        for chunk in reversed(range(len(chunks))):
            last_first = reversed(list(enumerate(chunks[chunk])))
            params = [(i, p) for i, p in last_first if _kind(p) == kind]
            for members in _portions(params, max(1, bucket_bytes // dtype.itemsize)):
                spans = _spans(param for _, param in members)
                bucket = Bucket(
                    index=len(buckets), group=group, chunk=chunk, spans=spans,
                    size=-(-spans[-1].stop // group.size) * group.size, first_use=members[-1][0],
                    is_tied=kind.is_tied, is_partial_over_tp=kind.is_partial,
                    is_expert=kind.is_expert,
                )  # fmt: skip
                buckets.append(bucket)
    return BucketTable(buckets=tuple(buckets), is_sharded=is_sharded, dtype=dtype)


def bucket_bytes_for(params: Iterable[ShardedParameter]) -> int:
    """From how many gradient bytes a bucket is full on a rank that holds ``params``."""
    num_bytes = sum(param.numel() * max(4, param.element_size()) for param in params)
    return min(BUCKET_BYTES, -(-num_bytes // MIN_BUCKETS))


def piece_boxes(extent: Extent) -> Iterator[tuple[Piece, Box, int]]:
    """The boxes of global tensors that an extent is made of.

    Yields:
        The piece, the box in global indices, and its first element counted from the extent's. The
        box's elements follow one another there, so a view of it has the box's shape.
    """
    row_size = extent.param[:1].numel()
    for piece in extent.param.spec.pieces:
        start = piece.local.offset[0] * row_size
        first = max(extent.first - start, 0)
        last = min(extent.last - start, piece.local.num_elements)
        for box in boxes_of_range(piece.box.shape, first, last):
            at = start + linear_index(box.offset, piece.box.shape) - extent.first
            offset = tuple(a + b for a, b in zip(piece.box.offset, box.offset, strict=True))
            yield piece, Box(offset=offset, shape=box.shape), at


def boxes_of_range(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """Elements ``first`` to ``last`` of a flat array of ``shape`` as boxes, in order.

    At most 3 boxes for a matrix: the end of a row, whole rows, the begin of a row.
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
    if top > bottom:  # both ends lie in one row
        yield from _in_row(bottom, shape, first - bottom * inner, last - bottom * inner)
        return
    yield from _in_row(top - 1, shape, first - (top - 1) * inner, inner)
    if top < bottom:
        yield Box(offset=(top, *(0 for _ in shape[1:])), shape=(bottom - top, *shape[1:]))
    yield from _in_row(bottom, shape, 0, last - bottom * inner)


def linear_index(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Place of the element at ``offset`` in a flat array of ``shape``."""
    index = 0
    for position, extent in zip(offset, shape, strict=True):
        index = index * extent + position
    return index


def _in_row(row: int, shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], first, last):
        yield Box(offset=(row, *box.offset), shape=(1, *box.shape))


class _Kind(NamedTuple):
    is_tied: bool
    is_partial: bool
    is_expert: bool
    dtype: str


def _kind(param: ShardedParameter) -> _Kind:
    spec = param.spec
    return _Kind(spec.is_tied, spec.is_partial_over_tp, spec.is_expert, str(param.dtype))


def _portions(
    params: Sequence[tuple[int, ShardedParameter]], num_elements: int
) -> Iterator[list[tuple[int, ShardedParameter]]]:
    """Parameters in order, a portion as soon as it has ``num_elements`` or more."""
    members: list[tuple[int, ShardedParameter]] = []
    for numbered in params:
        members.append(numbered)
        if sum(param.numel() for _, param in members) >= num_elements:
            yield members
            members = []
    if members:
        yield members


def _spans(params: Iterable[ShardedParameter]) -> tuple[Span, ...]:
    spans, start = [], 0
    for param in params:
        spans.append(Span(param, start))
        start += param.numel()
    return tuple(spans)

"""Buckets: the portions in which gradients and weights travel, their ranks, and their owned parts.

The gradient buffer, the weight buffer and the optimizer share one table, so that an element has the
same place in all three. The table holds no values and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import NamedTuple, TypeVar

import torch

from raymega.box import Box
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.shard_spec import Piece
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.flat_boxes import boxes_of_range, linear_index
from raymega.plan.layers.base_blocks import CODE_BITS, COMPUTE
from raymega.plan.layers.global_tensor import VECTOR_ROLES
from raymega.plan.zero_levels import BUCKET_BYTES, ZeroLevel, full_bucket_bytes

Item = TypeVar("Item")


class Span(NamedTuple):
    """Place of a whole parameter in a bucket; ``start`` is the index of its first element."""

    param: ShardedParameter
    start: int

    @property
    def stop(self) -> int:
        """Index of the first element after it."""
        return self.start + self.param.numel()


class Extent(NamedTuple):
    """A range of one parameter's elements, and its place in a bucket.

    ``first`` to ``last`` index the flat parameter; ``at`` is the bucket index of ``first``.
    """

    param: ShardedParameter
    first: int
    last: int
    at: int

    def within(self, begin: int) -> slice:
        """Return the slice of these elements in a flat tensor that holds the bucket from ``begin``."""
        return slice(self.at - begin, self.at - begin + self.last - self.first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Ranks that hold the same parameters and see different tokens.

    Attributes:
        whole: All of these ranks, over which gradients are summed: dp * cp, or edp for experts.
        inside: Neighbours that shard one copy of the state; equal to ``whole`` unless sharding is hybrid.
        across: Ranks that own the same part of the other copies; one rank unless sharding is hybrid.
    """

    whole: Group
    inside: Group
    across: Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Parameters whose gradients and weights travel in one collective.

    Attributes:
        index: Place in the table.
        chunk: Index of the model chunk whose parameters these are.
        spans: Parameters end to end, the last of the model first: backward finishes them in that order.
        size: Number of elements, with padding at the end; a multiple of the size of ``sharing.whole``.
        first_use: Place, in the chunk's forward order, of the parameter that is used first.
        is_tied: True where copies on the first and on the last stage are summed as well.
        is_partial_over_tp: True where some pieces are terms of a sum over tp ranks.
        is_expert: True where the parameters are experts'.
        sharing: Ranks that the gradients are summed over, and that shard the bucket.
        level: ZeRO level of the bucket; NONE where a single rank holds it.
        is_frozen: True where the parameters are not trained: they have values, and nothing else.
        base_dtype: Format of frozen weights that are held as codes, or ``compute``.
    """

    index: int
    chunk: int
    spans: tuple[Span, ...]
    size: int
    first_use: int
    is_tied: bool
    is_partial_over_tp: bool
    is_expert: bool
    sharing: Sharing
    level: ZeroLevel
    is_frozen: bool = False
    base_dtype: str = COMPUTE

    @property
    def is_coded(self) -> bool:
        """True where the weights are held as codes, and decoded for a use."""
        return self.base_dtype != COMPUTE

    def extents(self, begin: int, end: int) -> Iterator[Extent]:
        """Yield the extents of the parameters between elements ``begin`` and ``end``, without padding."""
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
        """Slice of these elements in the bucket."""
        return slice(self.begin, self.end)

    def extents(self) -> Iterator[Extent]:
        """Yield the extents of the parameters in the range."""
        return self.bucket.extents(self.begin, self.end)

    def common(self, other: Range) -> Range:
        """Return the elements that another range of the bucket has too; an empty range if none."""
        begin = max(self.begin, other.begin)
        return replace(self, begin=begin, end=max(begin, min(self.end, other.end)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketTable:
    """All buckets of a rank, and which part of each it owns.

    Attributes:
        buckets: All buckets: ordinary, then partial over tp, then tied; among them dense before experts'. Those
            of frozen weights are last.
        dtype: Number format of gradients, masters and moments: float32 or better.
        device: Device of the parameters.
    """

    buckets: tuple[Bucket, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def trained(self) -> BucketTable:
        """The table without frozen weights, which have no gradients and no optimizer state."""
        return replace(self, buckets=tuple(b for b in self.buckets if not b.is_frozen))

    def share(self, bucket: Bucket) -> Range:
        """Return this rank's even part of a bucket, which it counts in norms, sharded or not."""
        sharing = bucket.sharing
        # hybrid: the copies split the owned part once more, so that each element counts once
        begin = bucket.size // sharing.inside.size * sharing.inside.index
        size = bucket.size // sharing.whole.size
        begin += size * sharing.across.index
        return Range(bucket=bucket, begin=begin, end=begin + size)

    def owned(self, bucket: Bucket) -> Range:
        """Return what this rank updates: its part of its copy where the bucket is sharded, else all."""
        if bucket.level == ZeroLevel.NONE:
            return Range(bucket=bucket, begin=0, end=bucket.size)
        inside = bucket.sharing.inside
        size = bucket.size // inside.size
        return Range(bucket=bucket, begin=size * inside.index, end=size * (inside.index + 1))


class _Kind(NamedTuple):
    """Properties that all parameters of a bucket share; the fields' order sorts the table."""

    is_frozen: bool
    is_tied: bool
    is_partial: bool
    is_expert: bool
    is_small: bool
    base_dtype: str
    dtype: str


SMALL_ROLES = (*VECTOR_ROLES, "state")
"""Roles of vectors, convolutions and untrained tensors. From level ``gradients`` on, a rank keeps their weights and
sums whole, and also those of tensors wider than the compute dtype (a router's). They are too small to
be worth collectives of their own."""


def make_buckets(
    chunks: Sequence[Sequence[ShardedParameter]],
    dense: Sharing,
    *,
    experts: Sharing | None = None,
    level: ZeroLevel = ZeroLevel.NONE,
    bucket_bytes: int = BUCKET_BYTES,
    units: Mapping[ShardedParameter, int] | None = None,
) -> BucketTable:
    """Assign the parameters of a rank's model chunks to buckets.

    A bucket ends with a parameter, once it has ``bucket_bytes`` of gradients. It never holds two chunks
    or two kinds: parameters of one kind are summed alike and have one number format. So a tied parameter
    is alone in its bucket on both stages, and both copies are cut alike. From level ``gradients`` on, a
    bucket is one unit's matrices, whatever their bytes. Vectors are then in buckets of level ``optimizer``.

    Args:
        chunks: Parameters of each model chunk in forward order.
        dense: Ranks that hold the same dense parameters.
        experts: Ranks that hold the same experts; None in a model without experts.
        level: ZeRO level of the run.
        bucket_bytes: Number of gradient bytes from which a bucket is full.
        units: Number of the unit of its chunk that uses a parameter: a block, the embedding, the head.
            None makes each parameter a unit.
    """
    # number format of the sums
    dtype = torch.float32
    for param in (param for chunk in chunks for param in chunk if not param.spec.is_frozen):
        dtype = torch.promote_types(dtype, param.dtype)
    unit_of = units or {p: i for chunk in chunks for i, p in enumerate(chunk)}
    buckets: list[Bucket] = []
    # kind by kind, the last chunk first, as backward finishes them
    for kind in sorted({_kind(param, level) for chunk in chunks for param in chunk}):
        sharing = experts if kind.is_expert else dense
        assert sharing is not None, "experts are summed over their own replicas"
        # codes are decoded unit by unit
        by_unit = (level >= ZeroLevel.GRADIENTS and not kind.is_small) or kind.base_dtype != COMPUTE
        for chunk in reversed(range(len(chunks))):
            last_first = reversed(list(enumerate(chunks[chunk])))
            params = [(i, p) for i, p in last_first if _kind(p, level) == kind]
            # one bucket a unit, or as many as fill bucket_bytes
            if by_unit:
                parts = _by_unit(params, unit_of)
            else:
                least = max(1, bucket_bytes // dtype.itemsize)
                parts = portions(params, lambda numbered: numbered[1].numel(), least)
            for members in parts:
                place = {"index": len(buckets), "chunk": chunk}
                buckets.append(_make_bucket(members, kind, sharing, level, **place))
    device = buckets[0].spans[0].param.device
    return BucketTable(buckets=tuple(buckets), dtype=dtype, device=device)


def bucket_bytes_for(params: Iterable[ShardedParameter]) -> int:
    """Return the gradient bytes from which a bucket is full on a rank that holds ``params``."""
    return full_bucket_bytes(sum(param.numel() * max(4, param.element_size()) for param in params))


def piece_boxes(extent: Extent) -> Iterator[tuple[Piece, Box, int]]:
    """Yield the boxes of global tensors that tile an extent.

    Yields:
        The piece, the box in global indices, and the place of its first element in the extent. The
        box's elements are contiguous there, so a view of them has the box's shape.
    """
    spec = extent.param.spec
    # The shape is the spec's: a weight that is not gathered has no storage.
    whole, dim = spec.shape, spec.stack_dim
    row_size, layer_size = prod(whole[dim + 1 :]), prod(whole[dim:])
    # A layer is one index of the dims before stack_dim, such as one expert; pieces tile each.
    for layer in range(extent.first // layer_size, -(-extent.last // layer_size)):
        for piece in spec.pieces:
            size = piece.local.shape[dim] * row_size
            start = layer * layer_size + piece.local.offset[dim] * row_size
            first, last = max(extent.first - start, 0), min(extent.last - start, size)
            before = layer * size
            for box in boxes_of_range(piece.box.shape, before + first, before + last):
                # from the piece's order of elements to the flat parameter's, counted from the extent
                at = start + linear_index(box.offset, piece.box.shape) - before - extent.first
                offset = tuple(a + b for a, b in zip(piece.box.offset, box.offset, strict=True))
                yield piece, Box(offset=offset, shape=box.shape), at


def _make_bucket(  # one an attribute
    members: Sequence[tuple[int, ShardedParameter]],
    kind: _Kind,
    sharing: Sharing,
    level: ZeroLevel,
    *,
    index: int,
    chunk: int,
) -> Bucket:
    spans, ranks = _spans(param for _, param in members), sharing.whole.size
    # whole bytes of codes on each rank
    multiple = ranks * 8 // CODE_BITS.get(kind.base_dtype, 8)
    if kind.is_small:
        level = min(level, ZeroLevel.OPTIMIZER)
    # Only weights that are gathered for a use are sharded where they are frozen.
    if kind.is_frozen and level < ZeroLevel.PARAMETERS:
        level = ZeroLevel.NONE
    return Bucket(
        index=index, chunk=chunk, spans=spans, size=-(-spans[-1].stop // multiple) * multiple,
        first_use=members[-1][0], is_tied=kind.is_tied, is_partial_over_tp=kind.is_partial,
        is_expert=kind.is_expert, sharing=sharing,
        level=level if sharing.inside.size > 1 else ZeroLevel.NONE, is_frozen=kind.is_frozen,
        base_dtype=kind.base_dtype,
    )  # fmt: skip


def _kind(param: ShardedParameter, level: ZeroLevel) -> _Kind:
    spec = param.spec
    is_small = level >= ZeroLevel.GRADIENTS and (spec.role in SMALL_ROLES or spec.is_wide)
    return _Kind(
        is_frozen=spec.is_frozen, is_tied=spec.is_tied, is_partial=spec.is_partial_over_tp, is_expert=spec.is_expert,
        is_small=is_small, base_dtype=spec.base_dtype, dtype=str(param.dtype),
    )  # fmt: skip


def _by_unit(
    params: Sequence[tuple[int, ShardedParameter]], unit_of: Mapping[ShardedParameter, int]
) -> Iterator[list[tuple[int, ShardedParameter]]]:
    """Yield the parameters in order, grouped by unit."""
    for _, members in groupby(params, key=lambda numbered: unit_of[numbered[1]]):
        yield list(members)


def portions(
    items: Iterable[Item], size_of: Callable[[Item], int], least: int
) -> Iterator[list[Item]]:
    """Yield ``items`` in order, in portions whose sizes add up to ``least`` or more; the last may be less."""
    portion, size = list[Item](), 0
    for item in items:
        portion.append(item)
        size += size_of(item)
        if size >= least:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def cut_portions(
    parts: Iterable[Range], size: int, can_cut: Callable[[Bucket], bool]
) -> Iterator[list[Range]]:
    """Yield ``parts`` in order, in portions of ``size`` elements; more where a bucket cannot be cut."""
    portion, room = list[Range](), size
    for part in parts:
        begin = part.begin
        while begin < part.end:
            end = min(part.end, begin + room) if can_cut(part.bucket) else part.end
            portion.append(replace(part, begin=begin, end=end))
            begin, room = end, room - (end - begin)
            if room <= 0:
                yield portion
                portion, room = [], size
    if portion:
        yield portion


def _spans(params: Iterable[ShardedParameter]) -> tuple[Span, ...]:
    spans, start = [], 0
    for param in params:
        spans.append(Span(param, start))
        start += param.numel()
    return tuple(spans)

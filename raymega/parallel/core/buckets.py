"""Buckets: in which portions gradients and weights travel, over which ranks, and who owns which part.

One table serves the gradients' buffer, the weights' and the optimizer, so that an element has the
same place in all three. It holds no values and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple, TypeVar

import torch

from raymega.messages import Box
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.shard_spec import Piece
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.flat_boxes import boxes_of_range, linear_index
from raymega.plan.zero_levels import BUCKET_BYTES, ZeroLevel, full_bucket_bytes

Item = TypeVar("Item")


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
class Sharing:
    """Ranks that hold the same parameters and see different tokens.

    Attributes:
        whole: All of them, over which gradients are summed: the dp * cp ranks, or edp ranks for experts.
        inside: Neighbours that share one copy out; equal to ``whole`` unless sharding is hybrid.
        across: The ranks that own the same part of the other copies; alone unless it is.
    """

    whole: Group
    inside: Group
    across: Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Parameters that travel together.

    Attributes:
        index: Place in the table.
        chunk: Model chunk whose parameters these are.
        spans: The parameters, end to end, the last in the model first: as backward finishes them.
        size: Elements, with padding at the end; a multiple of the number of ranks that hold them.
        first_use: Place in the chunk's forward order of the parameter that is used first.
        is_tied: Copies on the first and on the last stage are summed as well.
        is_partial_over_tp: Some pieces are terms of a sum over tp ranks.
        is_expert: The parameters are experts'.
        sharing: The ranks that gradients are summed over, and that share the bucket out.
        level: What they share out of it; nothing where a rank is alone with it.
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
        dtype: Of gradients, masters and moments: float32 or better.
    """

    buckets: tuple[Bucket, ...]
    dtype: torch.dtype

    def share(self, bucket: Bucket) -> Range:
        """This rank's even part of a bucket: what it counts in norms, sharded or not."""
        sharing = bucket.sharing
        begin = bucket.size // sharing.inside.size * sharing.inside.index
        size = bucket.size // sharing.whole.size
        begin += size * sharing.across.index
        return Range(bucket=bucket, begin=begin, end=begin + size)

    def owned(self, bucket: Bucket) -> Range:
        """What this rank updates: its part of its copy when sharded, else all."""
        if bucket.level == ZeroLevel.NONE:
            return Range(bucket=bucket, begin=0, end=bucket.size)
        inside = bucket.sharing.inside
        size = bucket.size // inside.size
        return Range(bucket=bucket, begin=size * inside.index, end=size * (inside.index + 1))


class _Kind(NamedTuple):
    """What the parameters of a bucket have in common."""

    is_tied: bool
    is_partial: bool
    is_expert: bool
    is_small: bool
    dtype: str


SMALL_ROLES = ("norm", "bias", "state")
"""Vectors, and what is not trained. From level ``gradients`` on a rank keeps their weights and sums
whole, as it does those that are wider than the compute dtype (a router's): to share out so little for
so many collectives would not pay."""


def make_buckets(
    chunks: Sequence[Sequence[ShardedParameter]],
    dense: Sharing,
    *,
    experts: Sharing | None = None,
    level: ZeroLevel = ZeroLevel.NONE,
    bucket_bytes: int = BUCKET_BYTES,
    units: Mapping[ShardedParameter, int] | None = None,
) -> BucketTable:
    """Lay the parameters of a rank's model chunks into buckets.

    Buckets end between parameters, when ``bucket_bytes`` of gradients are reached, and never hold
    two chunks or two kinds: of one kind are parameters that are summed alike and have one number
    format. So a tied parameter lies alone on both stages that have it, at the same place, and both
    copies are cut alike. From level ``gradients`` on a bucket is what one unit of the
    model has, whatever its bytes, and vectors lie apart and are shared out as with ``optimizer``.

    Args:
        chunks: Parameters of each chunk in forward order.
        dense: The ranks that hold the same dense parameters.
        experts: Those that hold the same experts, where there are any.
        level: What these share out.
        bucket_bytes: Gradient bytes from which a bucket is full.
        units: In which unit of its chunk a parameter is used: a block, the embedding, the head. None
            makes each parameter its own.
    """
    dtype = torch.float32
    for param in (param for chunk in chunks for param in chunk):
        dtype = torch.promote_types(dtype, param.dtype)
    unit_of = units or {p: i for chunk in chunks for i, p in enumerate(chunk)}
    buckets: list[Bucket] = []
    for kind in sorted({_kind(param, level) for chunk in chunks for param in chunk}):
        sharing = experts if kind.is_expert else dense
        assert sharing is not None, "experts are summed over their own replicas"
        by_unit = level >= ZeroLevel.GRADIENTS and not kind.is_small
        for chunk in reversed(range(len(chunks))):
            last_first = reversed(list(enumerate(chunks[chunk])))
            params = [(i, p) for i, p in last_first if _kind(p, level) == kind]
            if by_unit:
                parts = _by_unit(params, unit_of)
            else:
                least = max(1, bucket_bytes // dtype.itemsize)
                parts = portions(params, lambda numbered: numbered[1].numel(), least)
            for members in parts:
                place = {"index": len(buckets), "chunk": chunk}
                buckets.append(_make_bucket(members, kind, sharing, level, **place))
    return BucketTable(buckets=tuple(buckets), dtype=dtype)


def bucket_bytes_for(params: Iterable[ShardedParameter]) -> int:
    """From how many gradient bytes a bucket is full on a rank that holds ``params``."""
    return full_bucket_bytes(sum(param.numel() * max(4, param.element_size()) for param in params))


def piece_boxes(extent: Extent) -> Iterator[tuple[Piece, Box, int]]:
    """The boxes of global tensors that an extent is made of.

    Yields:
        The piece, the box in global indices, and its first element counted from the extent's. The
        box's elements follow one another there, so a view of it has the box's shape.
    """
    spec = extent.param.spec
    whole, dim = spec.shape, spec.stack_dim  # a weight that is not gathered has no values
    row_size, layer_size = prod(whole[dim + 1 :]), prod(whole[dim:])
    for layer in range(extent.first // layer_size, -(-extent.last // layer_size)):
        for piece in spec.pieces:
            size = piece.local.shape[dim] * row_size
            start = layer * layer_size + piece.local.offset[dim] * row_size
            first, last = max(extent.first - start, 0), min(extent.last - start, size)
            before = layer * size
            for box in boxes_of_range(piece.box.shape, before + first, before + last):
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
    if kind.is_small:
        level = min(level, ZeroLevel.OPTIMIZER)
    return Bucket(
        index=index, chunk=chunk, spans=spans, size=-(-spans[-1].stop // ranks) * ranks,
        first_use=members[-1][0], is_tied=kind.is_tied, is_partial_over_tp=kind.is_partial,
        is_expert=kind.is_expert, sharing=sharing,
        level=level if sharing.inside.size > 1 else ZeroLevel.NONE,
    )  # fmt: skip


def _kind(param: ShardedParameter, level: ZeroLevel) -> _Kind:
    spec = param.spec
    is_small = level >= ZeroLevel.GRADIENTS and (spec.role in SMALL_ROLES or spec.is_wide)
    return _Kind(
        is_tied=spec.is_tied, is_partial=spec.is_partial_over_tp, is_expert=spec.is_expert,
        is_small=is_small, dtype=str(param.dtype),
    )  # fmt: skip


def _by_unit(
    params: Sequence[tuple[int, ShardedParameter]], unit_of: Mapping[ShardedParameter, int]
) -> Iterator[list[tuple[int, ShardedParameter]]]:
    """Parameters in order, those of a unit together."""
    for _, members in groupby(params, key=lambda numbered: unit_of[numbered[1]]):
        yield list(members)


def portions(
    items: Iterable[Item], size_of: Callable[[Item], int], least: int
) -> Iterator[list[Item]]:
    """``items`` in order, a portion as soon as its sizes add up to ``least`` or more."""
    portion, size = list[Item](), 0
    for item in items:
        portion.append(item)
        size += size_of(item)
        if size >= least:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _spans(params: Iterable[ShardedParameter]) -> tuple[Span, ...]:
    spans, start = [], 0
    for param in params:
        spans.append(Span(param, start))
        start += param.numel()
    return tuple(spans)

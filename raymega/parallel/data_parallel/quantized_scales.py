"""ScaleReducer: the largest magnitude in each block of state, over all ranks that hold a part of one.

Ranks that share a bucket out cut it anywhere, and the tensor axis may cut a row between two multiples of
a block. What the blocks are is quantized_blocks'; what is done with a magnitude is optim's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from raymega.messages import Box
from raymega.parallel.comm.collectives import start_all_reduce
from raymega.parallel.comm.process_groups import Group, Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.core.buckets import Bucket
from raymega.parallel.core.shard_spec import Piece
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.memory.quantized_blocks import BLOCK, scale_boxes, scales_of
from raymega.plan.zero_levels import ZeroLevel

KindsOf = Callable[[ShardedParameter], Sequence[str]]
"""Kinds of state that a parameter keeps in blocks; maybe none."""
Key = tuple[ShardedParameter, str, str]


class _Region(NamedTuple):
    """Where the blocks of a tensor's piece lie: which of the tensor's, and from which number on."""

    box: Box
    first: int


class _Sum(NamedTuple):
    """Numbers that are combined over a group."""

    first: int
    last: int
    group: Group


class ScaleReducer:
    """A number for each block of which this rank's peers hold a part; zero before any is told."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        groups: Groups,
        kinds_of: KindsOf,
        dtype: torch.dtype,
        log: CommLog,
    ) -> None:
        self._log = log
        self._regions: dict[Key, _Region] = {}
        self._sums: list[_Sum] = []
        size = 0
        for is_expert, cut in ((False, groups.tp), (True, groups.etp)):
            alike = [bucket for bucket in buckets if bucket.is_expert == is_expert]
            begin = size
            for is_split in (True, False):
                for key, box in _pieces(alike, kinds_of, is_split=is_split):
                    self._regions[key] = _Region(box, size)
                    size += box.num_elements
                if is_split and cut.size > 1:
                    self._sums.append(_Sum(begin, size, cut))
            if alike and alike[0].level > ZeroLevel.NONE:
                self._sums.append(_Sum(begin, size, alike[0].sharing.inside))
        device = buckets[0].spans[0].param.device
        self._numbers = torch.zeros(size, dtype=dtype, device=device)

    def box(self, param: ShardedParameter, piece: Piece, kind: str) -> Box:
        """Which blocks of the piece's tensor :meth:`view` holds."""
        return self._regions[param, piece.tensor.name, kind].box

    def view(self, param: ShardedParameter, piece: Piece, kind: str) -> torch.Tensor:
        """Its numbers, [*box.shape]: this rank's to fill, and after :meth:`combine` those of all."""
        box, first = self._regions[param, piece.tensor.name, kind]
        return self._numbers[first : first + box.num_elements].view(box.shape)

    def forget(self) -> None:
        """Begin anew."""
        self._numbers.zero_()

    def combine(self) -> None:
        """Take the largest over all ranks that share out or cut the tensors; all call it together."""
        for first, last, group in self._sums:
            if first < last and group.size > 1:
                numbers = self._numbers[first:last]
                pending = start_all_reduce(numbers, group, op="max")
                leaving = 2 * numbers.nbytes * (group.size - 1) // group.size  # by a ring
                log = self._log
                log.track_transfer("scale_reduce", pending, sent_bytes=leaving).wait(
                    group.timeout_s
                )


def _pieces(
    buckets: Sequence[Bucket], kinds_of: KindsOf, *, is_split: bool
) -> Iterator[tuple[Key, Box]]:
    """Pieces whose rows other ranks go on with inside of a block, or all others; with their blocks."""
    for param in (param for bucket in buckets for param, _ in bucket.spans):
        for kind in kinds_of(param):
            for piece in param.spec.pieces:
                if _is_split(piece) == is_split:
                    yield (param, piece.tensor.name, kind), _blocks_of(piece)


def _is_split(piece: Piece) -> bool:
    size, whole = piece.box.shape[-1], piece.tensor.shape[-1]
    return size < whole and size % BLOCK > 0


def _blocks_of(piece: Piece) -> Box:
    """Of rows that are cut inside of a block all blocks, on every rank the same."""
    if not _is_split(piece):
        return scale_boxes(piece.box).all
    columns = scales_of(piece.tensor).shape[-1]
    return Box(offset=(*piece.box.offset[:-1], 0), shape=(*piece.box.shape[:-1], columns))

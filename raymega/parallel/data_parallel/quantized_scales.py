"""ScaleReducer: the largest magnitude of each block of 8-bit state, over all ranks with a part of it.

The ranks that shard a bucket cut it anywhere, and tp may cut a row inside a block.
`plan/memory/quantized_blocks.py` defines the blocks; `raymega/optim` uses the magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from raymega.box import Box
from raymega.parallel.comm.collectives import start_all_reduce
from raymega.parallel.comm.process_groups import Group, Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.core.buckets import Bucket
from raymega.parallel.core.shard_spec import Piece
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.memory.quantized_blocks import BLOCK, scale_boxes, scales_of
from raymega.plan.zero_levels import ZeroLevel

KindsOf = Callable[[ShardedParameter], Sequence[str]]
"""Function that returns the kinds of state that a parameter keeps in blocks; maybe none."""
Key = tuple[ShardedParameter, str, str]


class _Region(NamedTuple):
    """Blocks of a piece: ``box`` in the grid of the tensor's blocks, and their first place in the buffer."""

    box: Box
    first: int


class _Sum(NamedTuple):
    """A range of the buffer that is reduced over a group."""

    first: int
    last: int
    group: Group


class ScaleReducer:
    """A buffer with one number for each block of this rank's pieces; zero until :meth:`view` is filled."""

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
        # Lay out dense blocks, then experts'; in each the split ones first, so that a sum is one range.
        size = 0
        for is_expert, cut in ((False, groups.tp), (True, groups.etp)):
            alike = [bucket for bucket in buckets if bucket.is_expert == is_expert]
            begin = size
            for is_split in (True, False):
                for key, box in _pieces(alike, kinds_of, is_split=is_split):
                    self._regions[key] = _Region(box, size)
                    size += box.num_elements
                # blocks that tp cuts inside: over tp
                if is_split and cut.size > 1:
                    self._sums.append(_Sum(begin, size, cut))
            # all blocks: over the ranks that shard the state
            if alike and alike[0].level > ZeroLevel.NONE:
                self._sums.append(_Sum(begin, size, alike[0].sharing.inside))
        device = buckets[0].spans[0].param.device
        self._numbers = torch.zeros(size, dtype=dtype, device=device)

    def box(self, param: ShardedParameter, piece: Piece, kind: str) -> Box:
        """Return the box of the tensor's blocks that :meth:`view` holds."""
        return self._regions[param, piece.tensor.name, kind].box

    def view(self, param: ShardedParameter, piece: Piece, kind: str) -> torch.Tensor:
        """Return the numbers of a piece, [*box.shape], to fill before :meth:`combine` and to read after it."""
        box, first = self._regions[param, piece.tensor.name, kind]
        return self._numbers[first : first + box.num_elements].view(box.shape)

    def forget(self) -> None:
        """Zero all numbers, for the next update."""
        self._numbers.zero_()

    def combine(self) -> None:
        """Replace each number by its largest over the ranks that hold the block; all must call it together."""
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
    """Yield the pieces that end inside a block (``is_split``), or all others, with their blocks' box."""
    for param in (param for bucket in buckets for param, _ in bucket.spans):
        for kind in kinds_of(param):
            for piece in param.spec.pieces:
                if _is_split(piece) == is_split:
                    yield (param, piece.tensor.name, kind), _blocks_of(piece)


def _is_split(piece: Piece) -> bool:
    size, whole = piece.box.shape[-1], piece.tensor.shape[-1]
    return size < whole and size % BLOCK > 0


def _blocks_of(piece: Piece) -> Box:
    """Return the box of a piece's blocks; for split rows all of the row's blocks, alike on every rank."""
    if not _is_split(piece):
        return scale_boxes(piece.box).all
    columns = scales_of(piece.tensor).shape[-1]
    return Box(offset=(*piece.box.offset[:-1], 0), shape=(*piece.box.shape[:-1], columns))

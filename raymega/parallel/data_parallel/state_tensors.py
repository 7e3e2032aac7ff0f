"""TensorBlock: values of a rank, with the box of the global tensor that they are.

Checkpoints save and load TensorBlocks; any code that assembles whole tensors can read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raymega.box import Box
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.buckets import Extent, Range, piece_boxes
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.zero_levels import ZeroLevel


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBlock:
    """A block of one kind of state, such as weights, masters or a moment.

    Attributes:
        kind: First part of the saved name: ``model``, ``adam.exp_avg``, ...
        tensor: Global tensor that the values belong to.
        box: Block of that tensor, in global indices.
        values: View of the rank's memory, [*box.shape].
        is_primary: True for one of the tp ranks and stages that hold the block: the one that counts.
        holders: Global ranks that hold the same values, this one among them: all replicas, or this rank
            alone where the state is sharded.
        replica: Place of this rank in ``holders``.
    """

    kind: str
    tensor: GlobalTensor
    box: Box
    values: torch.Tensor
    is_primary: bool
    holders: tuple[int, ...] = (0,)
    replica: int = 0

    @property
    def name(self) -> str:
        """Name in the checkpoint, ``kind/tensor``."""
        return f"{self.kind}/{self.tensor.name}"

    @property
    def dtype(self) -> str:
        """Element type by numpy's name, such as ``float32``."""
        return str(self.values.dtype).removeprefix("torch.")

    def at(self, box: Box) -> torch.Tensor:
        """Return a view of the values at ``box``, which must be inside the block."""
        if box == self.box:
            return self.values.detach()
        assert box.intersect(self.box) == box, f"{box} is outside {self.name} at {self.box}"
        return self.values.detach()[box.within(self.box)]


def extent_blocks(
    kind: str, part: Range, extent: Extent, values: torch.Tensor
) -> Iterator[TensorBlock]:
    """Yield the blocks that tile ``extent``.

    All replicas hold the values of a bucket that is not sharded. Of a sharded one only those do that own the
    same part of another copy, which exist with hybrid sharding.

    Args:
        kind: Kind of state of all these blocks.
        part: Range of a bucket that holds the extent.
        extent: Range of one parameter's elements.
        values: Flat values of the extent.
    """
    sharing = part.bucket.sharing
    group = sharing.whole if part.bucket.level == ZeroLevel.NONE else sharing.across
    for piece, box, at in piece_boxes(extent):
        yield TensorBlock(
            kind=kind,
            tensor=piece.tensor,
            box=box,
            values=values[at : at + box.num_elements].view(box.shape),
            is_primary=piece.is_primary,
            holders=group.ranks,
            replica=group.index,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """A tensor that a run keeps besides its weights: no gradient, one format, equal on all replicas.

    Attributes:
        param: Values, which the tensor's owner changes in place.
        group: Ranks that hold the same values.
    """

    param: ShardedParameter
    group: Group

    def blocks(self) -> Iterator[TensorBlock]:
        """Yield its blocks for the checkpoint, of kind ``model``."""
        for piece in self.param.spec.pieces:
            yield TensorBlock(
                kind="model",
                tensor=piece.tensor,
                box=piece.box,
                values=self.param.detach()[piece.place],
                is_primary=piece.is_primary,
                holders=self.group.ranks,
                replica=self.group.index,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenWeights:
    """Part of a bucket of frozen weights that this rank keeps.

    Attributes:
        part: Range of the bucket that the rank keeps.
        values: Flat values of the range.
    """

    part: Range
    values: torch.Tensor

    def blocks(self) -> Iterator[TensorBlock]:
        """Yield its blocks, of kind ``model``."""
        for extent in self.part.extents():
            values = self.values[extent.within(self.part.begin)]
            yield from extent_blocks("model", self.part, extent, values)

"""TensorBlock: some values of a rank that know which box of which global tensor they are.

What checkpoints save and load, and whoever else must put whole tensors together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raymega.messages import Box
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.buckets import Extent, Range, piece_boxes
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.tensor_table import GlobalTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBlock:
    """Values of one kind, such as masters or a moment.

    Attributes:
        kind: ``model``, ``adam.exp_avg``, ...; the first part of the saved name.
        tensor: The global tensor.
        box: Which block of it.
        values: A view of the rank's memory, [*box.shape].
        is_primary: Of all tp ranks and stages that hold the block, this one counts.
        holders: Global ranks that hold the same values, this one among them: all replicas, or of
            what is sharded none but this.
        replica: Its place among them.
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
        """The saved name, ``kind/tensor``."""
        return f"{self.kind}/{self.tensor.name}"

    @property
    def dtype(self) -> str:
        """Element type by numpy's name, such as ``float32``."""
        return str(self.values.dtype).removeprefix("torch.")

    def at(self, box: Box) -> torch.Tensor:
        """A view of the values at ``box``, which lies inside the block."""
        if box == self.box:
            return self.values.detach()
        assert box.intersect(self.box) == box, f"{box} is outside {self.name} at {self.box}"
        return self.values.detach()[box.within(self.box)]


def extent_blocks(
    kind: str, part: Range, extent: Extent, values: torch.Tensor, *, is_replicated: bool
) -> Iterator[TensorBlock]:
    """The blocks that make up ``extent`` of ``part`` of a bucket.

    Args:
        kind: Of all of them.
        part: Elements of a bucket.
        extent: Of one parameter there.
        values: Its values, flat.
        is_replicated: All ranks of the bucket hold the same; else those that own the same part of
            other copies, of which there are several with hybrid sharding.
    """
    sharing = part.bucket.sharing
    group = sharing.whole if is_replicated else sharing.across
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
    """A tensor that a run keeps beside its weights: no gradient, one format, equal on all replicas.

    Attributes:
        param: Its values, which whoever owns it changes in place.
        group: The ranks that hold the same.
    """

    param: ShardedParameter
    group: Group

    def blocks(self) -> Iterator[TensorBlock]:
        """What a checkpoint keeps, beside the weights of the model."""
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

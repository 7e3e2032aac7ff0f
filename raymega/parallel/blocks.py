"""Block: some values of a rank that know which box of which global tensor they are.

What checkpoints save and load, and whoever else must put whole tensors together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raymega.messages import Box
from raymega.parallel.buckets import Range, piece_boxes
from raymega.plan.tensors import GlobalTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Values of one kind, such as masters or a moment.

    Attributes:
        kind: ``model``, ``adam.exp_avg``, ...; the first part of the saved name.
        tensor: The global tensor.
        box: Which block of it.
        values: A view of the rank's memory, [*box.shape].
        is_primary: Of all tp ranks and stages that hold the block, this one counts.
        is_replicated: All data-parallel ranks hold the same values, and not each its own.
    """

    kind: str
    tensor: GlobalTensor
    box: Box
    values: torch.Tensor
    is_primary: bool
    is_replicated: bool

    @property
    def name(self) -> str:
        """The saved name, ``kind/tensor``."""
        return f"{self.kind}/{self.tensor.name}"


def blocks_of(
    kind: str, part: Range, values: torch.Tensor, *, is_replicated: bool
) -> Iterator[Block]:
    """The blocks that make up ``part`` of a bucket.

    Args:
        kind: Of all of them.
        part: Elements of a bucket.
        values: Their values, flat.
        is_replicated: All data-parallel ranks hold the same.
    """
    for extent in part.extents():
        held = values[extent.within(part.begin)]
        for piece, box, at in piece_boxes(extent):
            yield Block(
                kind=kind,
                tensor=piece.tensor,
                box=box,
                values=held[at : at + box.num_elements].view(box.shape),
                is_primary=piece.is_primary,
                is_replicated=is_replicated,
            )

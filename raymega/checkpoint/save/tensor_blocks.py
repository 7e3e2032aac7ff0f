"""What is saved and loaded, as the planner sees it: blocks of global tensors without their values."""

from __future__ import annotations

import torch

from raymega.checkpoint.format.write_plan import LocalBlock
from raymega.messages import Box
from raymega.parallel.data_parallel.state_tensors import TensorBlock


def local_block_of(block: TensorBlock) -> LocalBlock:
    """The block without its values."""
    return LocalBlock(
        tensor=block.name,
        dtype=dtype_name(block.values.dtype),
        global_shape=block.tensor.shape,
        box=block.box,
        is_primary=block.is_primary,
        holders=block.holders,
        replica=block.replica,
    )


def values_at(block: TensorBlock, box: Box) -> torch.Tensor:
    """A view of the values at ``box``, which lies inside the block."""
    if box == block.box:
        return block.values.detach()
    assert box.intersect(block.box) == box, f"{box} is outside {block.name} at {block.box}"
    return block.values.detach()[box.within(block.box)]


def dtype_name(dtype: torch.dtype) -> str:
    """numpy's name, such as ``float32``."""
    return str(dtype).removeprefix("torch.")

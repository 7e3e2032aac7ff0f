"""What is saved and loaded: named tensors that know their place in the model."""

from __future__ import annotations

from typing import Protocol

import torch

from raymega.checkpoint.planner import Holding
from raymega.messages import Box
from raymega.parallel.sharding import ShardSpec


class Sharded(Protocol):
    """A parameter, as far as a checkpoint needs it."""

    @property
    def spec(self) -> ShardSpec:
        """Its place in the model."""


Item = tuple[str, Sharded, torch.Tensor]
"""Kind (``model``, ``adam.exp_avg``), the parameter, and the tensor of that kind, shaped like it."""


def holding_of(item: Item) -> Holding:
    """The item without its values."""
    kind, parameter, tensor = item
    return Holding(kind=kind, spec=parameter.spec, dtype=dtype_name(tensor.dtype))


def block_of(tensor: torch.Tensor, local: Box) -> torch.Tensor:
    """A view of the block at ``local``."""
    whole = Box(offset=(0,) * tensor.ndim, shape=tuple(tensor.shape))
    assert local.intersect(whole) == local, f"block {local} is outside a tensor of {whole.shape}"
    return tensor.detach()[local.within(whole)]


def dtype_name(dtype: torch.dtype) -> str:
    """numpy's name, such as ``float32``."""
    return str(dtype).removeprefix("torch.")

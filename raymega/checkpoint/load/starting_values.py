"""Values at a run's start that its checkpoint does not hold as they are: copied experts, routers, norms of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from raymega.box import Box
from raymega.checkpoint.load.init_from import WEIGHTS
from raymega.parallel.core.sharded_parameter import initial_values, rows_behind
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.plan.upcycling import Upcycling


def finish_upcycling(upcycling: Upcycling, weights: Sequence[TensorBlock], seed: int) -> None:
    """Scale experts that copy a dense layer; give routers equal rows for parts of one copy."""
    for block in weights:
        held = block.values.detach()
        if block.tensor.name in upcycling.sources:
            held.mul_(upcycling.factor(block.tensor.name))
        if block.tensor.name in upcycling.routers:
            # This rank may hold some rows only: draw each by its global number.
            first, *columns = block.box.offset
            for number, row in enumerate(held, first):
                offset = (upcycling.router_row(number), *columns)
                drawn = Box(offset=offset, shape=(1, *row.shape))
                row.copy_(initial_values(block.tensor, drawn, seed=seed, device=row.device)[0])


def begin_magnitudes(
    blocks: Iterable[TensorBlock],
    taken: Iterable[TensorBlock],
    read: Callable[[TensorBlock], object],
) -> None:
    """Set DoRA's magnitudes to the norms of the rows of their weights.

    A rank that holds some columns of a weight reads the others once more, from the checkpoint.

    Args:
        blocks: Blocks of the optimizer, the magnitudes' among them.
        taken: Blocks of the weights that a checkpoint gave; other magnitudes have the norms of initial values.
        read: Function that fills a block of a weight from that checkpoint.
    """
    names = {block.tensor.name for block in taken}
    for block in blocks:
        behind = block.tensor.rows_of
        if block.kind != WEIGHTS or behind is None or behind.name not in names:
            continue
        box = rows_behind(block.tensor, block.box)
        rows = replace(
            block, tensor=behind, box=box, values=block.values.detach().new_empty(box.shape)
        )
        read(rows)
        block.values.detach().copy_(torch.linalg.vector_norm(rows.values, dim=-1))

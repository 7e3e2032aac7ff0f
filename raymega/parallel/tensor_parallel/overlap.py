"""Products and messages of sequence parallelism that overlap, block by block.

A gather fetches the positions of one block of neighbours after another, and the product of a block runs while
the next ones travel. A sum starts with some positions of every rank while the product of further ones runs
(Wang et al., Overlap communication with dependent computation via decomposition in large deep learning models,
ASPLOS 2023; Megatron-LM's tp_comm_overlap).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from raymega.parallel.comm.collectives import start_block_gather, start_reduce_scatter_into
from raymega.parallel.comm.work import Work
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.parallel.workarounds.matmul import (
    product_into,
    project_batches,
    project_into,
)
from raymega.parallel.workarounds.output_cache import CpuOutputCache
from raymega.plan.hardware.tp_overlap import num_blocks


class Block(NamedTuple):
    """Positions of neighbouring ranks that travel together, and their pending gather."""

    positions: slice
    gather: Work


def start_gather_blocks(x: Tensor, sp: SequenceParallel) -> tuple[Tensor, list[Block]]:
    """Start to gather all positions by blocks, without autograd.

    Args:
        x: Positions of this rank, [S/sp, B, D].
        sp: Placement of x on the tensor-parallel ranks.

    Returns:
        All positions [S, B, D], and the blocks in the order in which they come, this rank's first. Read a
        block's positions only after its wait.
    """
    count = num_blocks(sp.degree)
    whole = x.new_empty((x.shape[0] * sp.degree, *x.shape[1:]))
    length = whole.shape[0] // count
    own = sp.tp.index * count // sp.degree
    blocks = []
    for ahead in range(count):
        first = (own + ahead) % count * length
        work = start_block_gather(x, whole, sp.tp, num_blocks=count, ahead=ahead)
        blocks.append(Block(slice(first, first + length), work))
    return whole, blocks


def gather_and_project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sp: SequenceParallel,
    kept: CpuOutputCache | None = None,
) -> Tensor:
    """Return x W^T + b of all positions. x: [S/sp, B, in], weight: [out, in] -> [S, B, out].

    On CPUs the result gets its memory from ``kept``, if it is given.
    """
    whole, blocks = start_gather_blocks(x, sp)
    shape = (*whole.shape[:-1], weight.shape[0])
    is_kept = kept is not None and x.device.type == "cpu"
    y = kept.empty(shape, x.dtype) if kept is not None and is_kept else x.new_empty(shape)
    for positions, gather in blocks:
        gather.wait(sp.tp.timeout_s)
        project_into(y[positions].flatten(0, 1), whole[positions].flatten(0, 1), weight, bias)
    return y


def multiply_blocks(
    whole: Tensor, blocks: list[Block], weight: Tensor, sp: SequenceParallel
) -> Tensor:
    """Return x W of positions that are being gathered into ``whole``: [S, B, out] -> [S, B, in]."""
    y = whole.new_empty((*whole.shape[:-1], weight.shape[1]))
    for positions, gather in blocks:
        gather.wait(sp.tp.timeout_s)
        product_into(y[positions].flatten(0, 1), whole[positions].flatten(0, 1), weight)
    return y


def project_and_sum(x: Tensor, weight: Tensor, sp: SequenceParallel) -> Tensor:
    """Return this rank's positions of the sum over ranks of x W^T.

    Args:
        x: Features of this rank at all positions, [S, B, in/tp].
        weight: Weight [out, in/tp].
        sp: Placement of the result on the tensor-parallel ranks.

    Returns:
        Sum [S/sp, B, out].
    """
    by_rank = x.view(sp.degree, -1, *x.shape[1:])
    total = x.new_empty((*by_rank.shape[1:-1], weight.shape[0]))
    # of every rank as many of its positions, so that each sum gives every rank its own
    parts = zip(
        by_rank.tensor_split(num_blocks(sp.degree), dim=1),
        total.tensor_split(num_blocks(sp.degree)),
        strict=True,
    )
    pending = []
    for rows, own in parts:
        if own.numel():
            terms = project_batches(rows.flatten(1, 2), weight).flatten(0, 1)
            pending.append(start_reduce_scatter_into(own.flatten(0, 1), terms, sp.tp))
    for summing in pending:
        summing.wait(sp.tp.timeout_s)
    return total

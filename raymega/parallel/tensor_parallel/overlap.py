"""Products and messages of sequence parallelism that overlap, block by block.

A gather fetches the positions of one block of neighbours after another, and the product of a block runs while
the next ones travel. A sum starts with some positions of every rank while the product of further ones runs
(Wang et al., Overlap communication with dependent computation via decomposition in large deep learning models,
ASPLOS 2023; Megatron-LM's tp_comm_overlap).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from torch import Tensor

from raymega.parallel.comm.collectives import start_block_gathers, start_reduce_scatter_into
from raymega.parallel.comm.work import Work
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.parallel.workarounds.matmul import batch_product, product_into
from raymega.parallel.workarounds.output_cache import CpuOutputCache
from raymega.plan.hardware.tp_overlap import num_blocks


class Block(NamedTuple):
    """Positions of neighbouring ranks that travel together: their number among the blocks, and their pending gather."""

    number: int
    gather: Work


def start_gather_blocks(x: Tensor, sp: SequenceParallel) -> tuple[Tensor, list[Block]]:
    """Start to gather all positions by blocks, without autograd.

    Args:
        x: Positions of this rank, [S/sp, B, D].
        sp: Placement of x on the tensor-parallel ranks.

    Returns:
        All positions [S, B, D], and their even blocks in the order in which they come, this rank's first. Read
        a block's positions only after its wait.
    """
    count = num_blocks(sp.degree)
    whole = x.new_empty((x.shape[0] * sp.degree, *x.shape[1:]))
    own = sp.tp.index * count // sp.degree
    pending = start_block_gathers(x, whole, sp.tp, num_blocks=count)
    return whole, [Block((own + ahead) % count, work) for ahead, work in enumerate(pending)]


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
    y = x.new_empty(shape) if kept is None or not x.is_cpu else kept.empty(shape, x.dtype)
    _multiply(y, whole, blocks, weight.T, bias, sp)
    return y


def multiply_blocks(
    whole: Tensor, blocks: list[Block], weight: Tensor, sp: SequenceParallel
) -> Tensor:
    """Return x W of positions that are being gathered into ``whole``: [S, B, out] -> [S, B, in]."""
    y = whole.new_empty((*whole.shape[:-1], weight.shape[1]))
    _multiply(y, whole, blocks, weight, None, sp)
    return y


def _multiply(
    y: Tensor, whole: Tensor, blocks: list[Block], matrix: Tensor, bias: Tensor | None, sp: SequenceParallel
) -> None:  # fmt: skip
    """Write the product of each block to ``y`` when it has come."""
    results, rows = (t.view(len(blocks), -1, t.shape[-1]).unbind() for t in (y, whole))
    for number, gather in blocks:
        gather.wait(sp.tp.timeout_s)
        product_into(results[number], rows[number], matrix, bias)


def project_and_sum(x: Tensor, weight: Tensor, sp: SequenceParallel) -> Tensor:
    """Return this rank's positions of the sum over ranks of x W^T.

    Args:
        x: Features of this rank at all positions, [S, B, in/tp].
        weight: Weight [out, in/tp].
        sp: Placement of the result on the tensor-parallel ranks.

    Returns:
        Sum [S/sp, B, out].
    """
    length, num_rows = x.shape[0] // sp.degree, x.shape[1]
    matrix, out = weight.T, weight.shape[0]
    total = x.new_empty((length, num_rows, out))
    # of every rank as many of its positions, so that each sum gives every rank its own
    by_rank = x.reshape(sp.degree, length * num_rows, -1)
    sizes = [len(part) * num_rows for part in _even_parts(length, num_blocks(sp.degree))]
    pending = []
    for rows, own in zip(by_rank.split(sizes, 1), total.view(-1, out).split(sizes), strict=True):
        terms = batch_product(rows, matrix).view(-1, out)
        pending.append(start_reduce_scatter_into(own, terms, sp.tp))
    for summing in pending:
        summing.wait(sp.tp.timeout_s)
    return total


@cache
def _even_parts(length: int, count: int) -> tuple[range, ...]:
    """Return the positions of up to ``count`` even parts, none of which is empty."""
    count = min(count, length)
    ends = [number * length // count for number in range(count + 1)]
    return tuple(map(range, ends, ends[1:]))

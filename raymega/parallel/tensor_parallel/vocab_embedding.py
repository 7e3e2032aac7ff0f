"""The token table cut over tensor-parallel ranks: each looks up its own rows, and the sum is taken.

Shapes: ids [S, B] int64, table [V/tp, D], result [S/sp, B, D].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.weight_grads import accumulate_grad
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel


class VocabParallelEmbedding(nn.Module):
    """Token embedding with the table's rows cut over tp: each rank adds zero for other ranks' tokens."""

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.sp = factory.sp
        self.weight = factory.make(f"{name}.weight")

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens: [S, B] int64 -> [S/sp, B, D]."""
        return vocab_embedding(tokens, self.weight, self.sp)


def vocab_embedding(tokens: Tensor, weight: Tensor, sp: SequenceParallel) -> Tensor:
    """Look up rows of a table cut over tp. tokens: [S, B] int64, weight: [V/tp, D] -> [S/sp, B, D]."""
    if sp.tp.size == 1:
        return _Lookup.apply(tokens, weight)
    # Other ranks' tokens look up row 0 and are then masked, so that the sum has one term for each token.
    rows, is_elsewhere = local_rows(tokens, weight.shape[0], sp.tp)
    found = _Lookup.apply(rows, weight)
    return sp.sum(found.masked_fill_(is_elsewhere.unsqueeze(-1), 0.0))


def local_rows(ids: Tensor, num_rows: int, tp: Group) -> tuple[Tensor, Tensor]:
    """Return the rows of global ``ids`` in this rank's ``num_rows`` rows of a table cut over ``tp``.

    Returns:
        Row numbers, 0 for ids that this rank does not hold; and the mask of those ids.
    """
    rows = ids - num_rows * tp.index
    is_elsewhere = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill_(is_elsewhere, 0), is_elsewhere


class _Rows(NamedTuple):
    """A term of a table's gradient, from the gradient [..., D] of the looked-up ``rows`` [...]."""

    grad: Tensor
    rows: Tensor
    num_rows: int

    def compute(self) -> Tensor:
        # dense, for autograd
        table = self.grad.new_zeros(self.num_rows, self.grad.shape[-1])
        return table.index_add_(0, self.rows.flatten(), self.grad.flatten(0, -2))

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        # Most rows are not looked up, so the first term zeroes the sum instead of overwriting it.
        if is_first:
            total.zero_()
        total.index_add_(0, self.rows.flatten(), self.grad.flatten(0, -2).to(total.dtype))


class _Lookup(torch.autograd.Function):
    """weight[rows], whose backward adds only the looked-up rows to the table's gradient sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.param = weight
        return embedding(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (rows,) = ctx.saved_tensors
        return None, accumulate_grad(ctx.param, _Rows(grad, rows, ctx.param.shape[0]))

"""The token table cut over the tensor-parallel ranks: each looks up its own rows, and the ranks add up.

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
    """Rows of the token table cut: each rank looks up its own tokens and adds zero for others."""

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.sp = factory.sp
        self.weight = factory.make(f"{name}.weight")

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [S, B] int64 -> [S/sp, B, D]."""
        return vocab_embedding(tokens, self.weight, self.sp)


def vocab_embedding(tokens: Tensor, weight: Tensor, sp: SequenceParallel) -> Tensor:
    """Look up rows of a table cut over tp. tokens: [S, B] int64, weight: [V/tp, D] -> [S/sp, B, D]."""
    if sp.tp.size == 1:
        return _Lookup.apply(tokens, weight)
    rows, is_elsewhere = local_rows(tokens, weight.shape[0], sp.tp)
    found = _Lookup.apply(rows, weight)
    return sp.sum(found.masked_fill_(is_elsewhere.unsqueeze(-1), 0.0))


def local_rows(ids: Tensor, num_rows: int, tp: Group) -> tuple[Tensor, Tensor]:
    """Turn global ``ids`` into rows of this rank's ``num_rows`` rows of a table cut over ``tp``.

    Returns:
        Row numbers, 0 where another rank holds the id or nobody does; and that condition.
    """
    rows = ids - num_rows * tp.index
    is_elsewhere = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill_(is_elsewhere, 0), is_elsewhere


class _Rows(NamedTuple):
    """The term of a table's gradient from that of rows looked up. grad: [..., D], rows: [...]."""

    grad: Tensor
    rows: Tensor
    num_rows: int

    def compute(self) -> Tensor:
        table = self.grad.new_zeros(self.num_rows, self.grad.shape[-1])
        return table.index_add_(0, self.rows.flatten(), self.grad.flatten(0, -2))

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        if is_first:
            total.zero_()
        total.index_add_(0, self.rows.flatten(), self.grad.flatten(0, -2).to(total.dtype))


class _Lookup(torch.autograd.Function):
    """weight[rows]; what backward adds to a sum of the table is as many rows as there are tokens."""

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

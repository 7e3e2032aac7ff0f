"""Linear and embedding layers cut over the tensor-parallel ranks, on plain tensors.

It owns how a cut layer computes and which collective it needs. Shapes, cuts and initial values are
plan.tensors'; layers name their tensors and a ParameterFactory makes the local parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, linear

from raymega.parallel.collectives import reduce_from_tp
from raymega.parallel.comm import start_all_reduce
from raymega.parallel.groups import Group
from raymega.parallel.parameter import ShardedParameter, initialise
from raymega.parallel.sharding import make_spec
from raymega.plan.tensors import GlobalTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterFactory:
    """Makes the parameters of one rank's stage, with their initial values.

    Attributes:
        table: The stage's global tensors by name.
        tp: The tensor-parallel ranks.
        dtype: Compute dtype.
        device: Where parameters live.
        seed: Seed of the initial values; equal on all ranks.
        tied: Name of the tensor that another stage holds too, or empty.
        is_tied_copy: This stage's copy of it is the one that does not count.
    """

    table: Mapping[str, GlobalTensor]
    tp: Group
    dtype: torch.dtype
    device: torch.device
    seed: int
    tied: str = ""
    is_tied_copy: bool = False

    def make(self, *names: str) -> ShardedParameter:
        """This rank's blocks of the tensors ``names``, stacked along dim 0."""
        is_tied = self.tied in names
        spec = make_spec(
            tuple(self.table[name] for name in names),
            tp=self.tp.size,
            tp_rank=self.tp.index,
            is_tied=is_tied,
            is_tied_copy=is_tied and self.is_tied_copy,
        )
        values = torch.empty(spec.shape, dtype=self.dtype, device=self.device)
        param = ShardedParameter(values, spec)
        initialise(param, self.seed)
        return param

    def make_if_any(self, *names: str) -> ShardedParameter | None:
        """Like :meth:`make`, or None when the family has no such tensors."""
        return self.make(*names) if names[0] in self.table else None


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features cut: each rank makes its own, from all of x.

    Several names fuse their linears into one GEMM; the outputs lie side by side.
    """

    def __init__(self, factory: ParameterFactory, *names: str) -> None:
        super().__init__()
        self.tp = factory.tp
        self.weight = factory.make(*(f"{name}.weight" for name in names))
        self.bias = factory.make_if_any(*(f"{name}.bias" for name in names))

    def forward(self, x: Tensor) -> Tensor:
        """x: [S, B, in] -> [S, B, out/tp]."""
        return column_linear(x, self.weight, self.bias, self.tp)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the input features cut: each rank adds its term, the bias comes once."""

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.tp = factory.tp
        self.weight = factory.make(f"{name}.weight")
        self.bias = factory.make_if_any(f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        """x: [S, B, in/tp] -> [S, B, out]."""
        y = reduce_from_tp(linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Rows of the token table cut: each rank looks up its own tokens and adds zero for others."""

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.tp = factory.tp
        self.weight = factory.make(f"{name}.weight")

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [S, B] int64 -> [S, B, D]."""
        if self.tp.size == 1:
            return embedding(tokens, self.weight)
        rows, is_elsewhere = local_rows(tokens, self.weight.shape[0], self.tp)
        y = embedding(rows, self.weight).masked_fill_(is_elsewhere.unsqueeze(-1), 0.0)
        return reduce_from_tp(y, self.tp)


def local_rows(ids: Tensor, num_rows: int, tp: Group) -> tuple[Tensor, Tensor]:
    """Where global ``ids`` lie in this rank's ``num_rows`` rows of a table cut over ``tp``.

    Returns:
        Row numbers, 0 where another rank holds the id or nobody does; and that condition.
    """
    rows = ids - num_rows * tp.index
    is_elsewhere = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill_(is_elsewhere, 0), is_elsewhere


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group) -> Tensor:
    """Column-parallel linear: `copy_to_tp` and `linear`, their backward overlapped.

    Args:
        x: [S, B, in], equal on all ranks of ``tp``.
        weight: [out/tp, in].
        bias: [out/tp] or None.
        tp: The tensor-parallel ranks.
    """
    return _ColumnLinear.apply(x, weight, bias, tp)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of W in y = x W^T from that of y. grad: [..., out], x: [..., in] -> [out, in]."""
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.has_bias = tp, bias is not None
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        pending = start_all_reduce(grad_x, ctx.tp)
        grad_weight = weight_gradient(grad, x)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        pending.wait(ctx.tp.timeout_s)
        return grad_x, grad_weight, grad_bias, None

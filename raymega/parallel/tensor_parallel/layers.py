"""Linear layers cut over the tensor-parallel ranks, on plain tensors.

This module says how a cut layer computes and which collective it needs. `plan/tensor_table.py` has
shapes, cuts and initial values: layers name their tensors, and a ParameterFactory makes the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from raymega.parallel.comm.process_groups import Group
from raymega.parallel.comm.work import Work
from raymega.parallel.core.shard_spec import make_spec
from raymega.parallel.core.sharded_parameter import ShardedParameter, initialise
from raymega.parallel.core.weight_grads import (
    WeightGradQueue,
    accumulate_bias_grad,
)
from raymega.parallel.tensor_parallel.fp8_linear import Fp8, Fp8Placement, fp8_linear
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.parallel.workarounds.matmul import add_outer, is_emulated, outer, product, project
from raymega.parallel.workarounds.output_cache import CpuOutputCache
from raymega.plan.grid import ExpertPlace
from raymega.plan.tensor_table import WHOLE_EXPERTS, GlobalTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterFactory:
    """Factory of the parameters of one rank's stage, with their initial values.

    Attributes:
        table: Global tensors of the stage, by name.
        sp: Placement of the residual stream on the tensor-parallel ranks.
        dtype: Compute dtype.
        device: Device of the parameters.
        seed: Seed of the initial values; equal on all ranks.
        tied: Name of the tensor that another stage holds too, or empty.
        is_tied_copy: True where this stage's copy of it does not count in norms and is not saved.
        experts: Place of the rank on the experts' axes, which selects its part of expert tensors.
        grad_queue: Queue for the weight gradients of linear layers, for schedules that defer them.
        is_fused: Compile what layers compute between matrix products (`core/compile.py`).
        fp8: Recipe of linear layers in fp8; None for the compute dtype.
        is_meta: True where WeightBuffer gives trained parameters their memory and initial values.
    """

    table: Mapping[str, GlobalTensor]
    sp: SequenceParallel
    dtype: torch.dtype
    device: torch.device
    seed: int
    tied: str = ""
    is_tied_copy: bool = False
    experts: ExpertPlace = WHOLE_EXPERTS
    grad_queue: WeightGradQueue = field(default_factory=WeightGradQueue)
    is_fused: bool = False
    fp8: Fp8 | None = None
    is_meta: bool = False

    @property
    def tp(self) -> Group:
        """Tensor-parallel ranks."""
        return self.sp.tp

    def make(self, *names: str) -> ShardedParameter:
        """Return a parameter with this rank's blocks of the tensors ``names``, stacked as in ShardSpec."""
        is_tied = self.tied in names
        spec = make_spec(
            tuple(self.table[name] for name in names),
            tp=self.tp.size,
            tp_rank=self.tp.index,
            experts=self.experts,
            is_sequence_parallel=self.sp.is_sequence_parallel,
            is_tied=is_tied,
            is_tied_copy=is_tied and self.is_tied_copy,
        )
        # format: routers and the like are kept in float32 or better
        wide = torch.promote_types(self.dtype, torch.float32)
        dtype = wide if spec.is_wide else self.dtype
        # One element, expanded: the right shape without memory, until WeightBuffer sets ``data``.
        if self.is_meta and spec.is_trained:
            nothing = torch.empty((), dtype=dtype, device=self.device)
            return ShardedParameter(nothing.expand(spec.shape), spec)
        param = ShardedParameter(torch.empty(spec.shape, dtype=dtype, device=self.device), spec)
        initialise(param, self.seed)
        param.requires_grad_(spec.is_trained)
        return param

    def make_if_any(self, *names: str) -> ShardedParameter | None:
        """Return :meth:`make` of the names, or None where the model family has no such tensors."""
        return self.make(*names) if names[0] in self.table else None


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features cut: each rank computes its own, from all positions.

    Several names fuse their linears into one GEMM, with the outputs side by side. Without ``adds_bias``
    the caller adds the bias.
    """

    def __init__(self, factory: ParameterFactory, *names: str, adds_bias: bool = True) -> None:
        super().__init__()
        self.adds_bias = adds_bias
        self.sp, self.grad_queue, self.fp8 = (factory.sp, factory.grad_queue, factory.fp8)
        self.weight = factory.make(*(f"{name}.weight" for name in names))
        self.bias = factory.make_if_any(*(f"{name}.bias" for name in names))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of x: [S/sp, B, in] -> [S, B, out/tp]."""
        bias = self.bias if self.adds_bias else None
        if self.fp8 is not None:
            place = Fp8Placement(fp8=self.fp8, sp=self.sp, outer=self.sp.tp)
            return fp8_linear(x, self.weight, bias, place, self.grad_queue)
        return column_linear(x, self.weight, bias, self.sp, self.grad_queue)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the input features cut: the ranks' terms are summed, then the bias is added."""

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.sp, self.grad_queue, self.fp8 = (factory.sp, factory.grad_queue, factory.fp8)
        self.weight = factory.make(f"{name}.weight")
        self.bias = factory.make_if_any(f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of x: [S, B, in/tp] -> [S/sp, B, out]."""
        if self.fp8 is None:
            return row_linear(x, self.weight, self.bias, self.sp, self.grad_queue)
        place = Fp8Placement(fp8=self.fp8, inner=self.sp.tp)
        # The bias comes after the sum over ranks, once.
        y = self.sp.sum(fp8_linear(x, self.weight, None, place, self.grad_queue))
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(nn.Module):
    """y = x W^T on the residual stream, with the whole weight on every rank.

    With sequence parallelism each rank's weight gradient is a term of a sum, from its own positions.
    Several names fuse their linears into one GEMM.
    """

    def __init__(self, factory: ParameterFactory, *names: str) -> None:
        super().__init__()
        self.grad_queue, self.fp8 = factory.grad_queue, factory.fp8
        self.weight = factory.make(*(f"{name}.weight" for name in names))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of x: [S/sp, B, in] -> [S/sp, B, out]."""
        if self.fp8 is not None:
            return fp8_linear(x, self.weight, None, Fp8Placement(fp8=self.fp8), self.grad_queue)
        return whole_linear(x.contiguous(), self.weight, None, self.grad_queue)


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sp: SequenceParallel,
    grad_queue: WeightGradQueue,
    *,
    kept: CpuOutputCache | None = None,
) -> Tensor:
    """Return a column-parallel linear: `copy_to_tp` or `gather_positions`, then `linear`, with overlap.

    Only the rank's own part of x is saved. Backward gathers it again while the input's gradient is
    computed, and sums that gradient while the weight's is computed.

    Args:
        x: Input [S/sp, B, in].
        weight: Weight [out/tp, in].
        bias: Bias [out/tp] or None.
        sp: Placement of x on the tensor-parallel ranks.
        grad_queue: Queue for the weight's gradient, for schedules that defer it.
        kept: Cache of memory for large outputs on CPUs; None allocates new memory.

    Returns:
        Output [S, B, out/tp].
    """
    if sp.tp.size == 1:
        return whole_linear(x.contiguous(), weight, bias, grad_queue, kept=kept)
    return _ColumnLinear.apply(x.contiguous(), weight, bias, sp, grad_queue, kept)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sp: SequenceParallel,
    grad_queue: WeightGradQueue,
) -> Tensor:
    """Return a row-parallel linear: `linear`, then the sum of all ranks' terms, then the bias once.

    Args:
        x: Input [S, B, in/tp].
        weight: Weight [out, in/tp].
        bias: Bias [out] or None.
        sp: Placement of the result on the tensor-parallel ranks.
        grad_queue: Queue for the weight's gradient, for schedules that defer it.

    Returns:
        Output [S/sp, B, out].
    """
    if sp.tp.size == 1:
        return whole_linear(x, weight, bias, grad_queue)
    return _RowLinear.apply(x, weight, bias, sp, grad_queue)


def whole_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad_queue: WeightGradQueue,
    *,
    kept: CpuOutputCache | None = None,
) -> Tensor:
    """Return a linear on one rank. x: [..., in], weight: [out, in], bias: [out] or None -> [..., out]."""
    # torch sums a bias's gradient in the layer's format; in float16 a sum over tokens may overflow.
    is_narrow = bias is not None and x.dtype == torch.float16
    if grad_queue.leaves_to_autograd(weight) and not is_emulated(x) and not is_narrow:
        return linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, grad_queue, kept)


class LinearWeightGrad(NamedTuple):
    """A term of W's gradient in y = x W^T, from the gradient of y. grad: [..., out], x: [..., in]."""

    grad: Tensor
    x: Tensor

    def compute(self) -> Tensor:
        """Return the term, [out, in]."""
        return outer(self.grad.flatten(0, -2), self.x.flatten(0, -2))

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        """Add the term to ``total`` [out, in]; the first overwrites."""
        add_outer(total, self.grad.flatten(0, -2), self.x.flatten(0, -2), is_first=is_first)


class _Linear(torch.autograd.Function):
    """y = x W^T + b on one rank, with a weight gradient that may be deferred."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad_queue: WeightGradQueue,
        kept: CpuOutputCache | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.param, ctx.bias, ctx.grad_queue = weight, bias, grad_queue
        return project(x, weight, bias, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_weight = ctx.grad_queue.accumulate_or_defer(ctx.param, LinearWeightGrad(grad, x))
        grad_bias = accumulate_bias_grad(ctx.bias, grad)
        return product(grad, weight), grad_weight, grad_bias, None, None


class _GatheredProducts(NamedTuple):
    """A LinearWeightGrad that gathers x from this rank's ``part``; the gather may already be pending."""

    grad: Tensor
    part: Tensor
    sp: SequenceParallel
    gather: tuple[Tensor, Work] | None

    def compute(self) -> Tensor:
        return self._whole().compute()

    def add_to(self, total: Tensor, *, is_first: bool) -> None:
        self._whole().add_to(total, is_first=is_first)

    def _whole(self) -> LinearWeightGrad:
        x, gathering = self.gather or self.sp.start_gather(self.part)
        gathering.wait(self.sp.tp.timeout_s)
        return LinearWeightGrad(self.grad, x)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913  # see column_linear
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sp: SequenceParallel,
        grad_queue: WeightGradQueue, kept: CpuOutputCache | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.param, ctx.bias = weight, bias
        ctx.sp, ctx.grad_queue = sp, grad_queue
        # x is needed whole at once, so this gather is exposed; backward's overlaps
        whole, gathering = sp.start_gather(x)
        gathering.wait(sp.tp.timeout_s)
        return project(whole, weight, bias, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # gather x for the weight's gradient; a deferred gradient gathers later, to keep only a part of x
        gather = None if ctx.grad_queue.is_open else ctx.sp.start_gather(x)
        # gradient of the input, whose sum over tp overlaps with the weight's gradient
        grad_x, summing = ctx.sp.start_sum(product(grad, weight))
        term = _GatheredProducts(grad, x, ctx.sp, gather)
        # gradients of weight and bias
        grad_weight = ctx.grad_queue.accumulate_or_defer(ctx.param, term)
        grad_bias = accumulate_bias_grad(ctx.bias, grad)
        summing.wait(ctx.sp.tp.timeout_s)
        return grad_x, grad_weight, grad_bias, None, None, None


class _RowLinear(torch.autograd.Function):
    """Row-parallel linear: each rank's term of y, their sum, then the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sp: SequenceParallel,
        grad_queue: WeightGradQueue,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.param, ctx.bias = weight, bias
        ctx.sp, ctx.grad_queue = sp, grad_queue
        y, summing = sp.start_sum(project(x, weight, None))
        summing.wait(sp.tp.timeout_s)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        # the gradients of all positions, gathered while the bias's gradient is summed
        whole, gathering = ctx.sp.start_gather(grad.contiguous())
        grad_bias = accumulate_bias_grad(ctx.bias, grad)
        gathering.wait(ctx.sp.tp.timeout_s)
        grad_weight = ctx.grad_queue.accumulate_or_defer(ctx.param, LinearWeightGrad(whole, x))
        return product(whole, weight), grad_weight, grad_bias, None, None

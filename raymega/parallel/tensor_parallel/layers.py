"""Linear layers cut over the tensor-parallel ranks, on plain tensors.

This module says how a cut layer computes and which collective it needs. `plan/tensor_table.py` has
shapes, cuts and initial values: layers name their tensors, and a ParameterFactory makes the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.shard_spec import make_spec
from raymega.parallel.core.sharded_parameter import ShardedParameter, initialise
from raymega.parallel.core.weight_grads import (
    WeightGradQueue,
)
from raymega.parallel.tensor_parallel.adapters import (
    Adapters,
    AdapterSettings,
    LinearPlace,
    make_adapters,
)
from raymega.parallel.tensor_parallel.fp8_linear import Fp8, Fp8Placement, fp8_linear
from raymega.parallel.tensor_parallel.linear import column_linear, row_linear, whole_linear
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import ExpertPlace
from raymega.plan.layers.global_tensor import WHOLE_EXPERTS, GlobalTensor


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
        is_meta: True where WeightBuffer gives weights their memory and initial values.
        adapters: Settings of LoRA's adapters.
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
    adapters: AdapterSettings = field(default_factory=AdapterSettings)

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
        if self.is_meta and (spec.is_trained or spec.is_frozen):
            nothing = torch.empty((), dtype=dtype, device=self.device)
            param = ShardedParameter(nothing.expand(spec.shape), spec)
            param.requires_grad_(spec.is_trained)
            return param
        param = ShardedParameter(torch.empty(spec.shape, dtype=dtype, device=self.device), spec)
        initialise(param, self.seed)
        param.requires_grad_(spec.is_trained)
        return param

    def make_if_any(self, *names: str) -> ShardedParameter | None:
        """Return :meth:`make` of the names, or None where the model family has no such tensors."""
        return self.make(*names) if names[0] in self.table else None

    def make_adapters(
        self, names: Sequence[str], weight: ShardedParameter, place: LinearPlace
    ) -> Adapters | None:
        """Return the adapters of the layers ``names`` that ``weight`` fuses, or None."""
        widths = [piece.box.shape[0] for piece in weight.spec.pieces]
        return make_adapters(self.make, self.table, names, widths, self.adapters, place)


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
        place = LinearPlace(
            first=self._whole, second=self._column, base=self._column, is_stream=True
        )
        self.adapters = factory.make_adapters(names, self.weight, place)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of x: [S/sp, B, in] -> [S, B, out/tp]."""
        bias = self.bias if self.adds_bias else None
        y = self._base(x, bias)
        return y if self.adapters is None else self.adapters(x, y, self.weight, bias)

    def _base(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.fp8 is not None:
            place = Fp8Placement(fp8=self.fp8, sp=self.sp, outer=self.sp.tp)
            return fp8_linear(x, self.weight, bias, place, self.grad_queue)
        return column_linear(x, self.weight, bias, self.sp, self.grad_queue)

    def _whole(self, x: Tensor, weight: Tensor) -> Tensor:
        return whole_linear(x.contiguous(), weight, None, self.grad_queue)

    def _column(self, x: Tensor, weight: Tensor) -> Tensor:
        return column_linear(x, weight, None, self.sp, self.grad_queue)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the input features cut: the ranks' terms are summed, then the bias is added."""

    def __init__(self, factory: ParameterFactory, name: str) -> None:
        super().__init__()
        self.sp, self.grad_queue, self.fp8 = (factory.sp, factory.grad_queue, factory.fp8)
        self.weight = factory.make(f"{name}.weight")
        self.bias = factory.make_if_any(f"{name}.bias")
        place = LinearPlace(
            first=self._row, second=self._whole, base=self._row, is_stream=False, inner=self.sp.tp
        )
        self.adapters = factory.make_adapters([name], self.weight, place)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of x: [S, B, in/tp] -> [S/sp, B, out]."""
        y = self._base(x)
        return y if self.adapters is None else self.adapters(x, y, self.weight, self.bias)

    def _base(self, x: Tensor) -> Tensor:
        if self.fp8 is None:
            return row_linear(x, self.weight, self.bias, self.sp, self.grad_queue)
        place = Fp8Placement(fp8=self.fp8, inner=self.sp.tp)
        # The bias comes after the sum over ranks, once.
        y = self.sp.sum(fp8_linear(x, self.weight, None, place, self.grad_queue))
        return y if self.bias is None else y + self.bias

    def _row(self, x: Tensor, weight: Tensor) -> Tensor:
        return row_linear(x, weight, None, self.sp, self.grad_queue)

    def _whole(self, x: Tensor, weight: Tensor) -> Tensor:
        return whole_linear(x, weight, None, self.grad_queue)


class ReplicatedLinear(nn.Module):
    """y = x W^T + b on the residual stream, with the whole weight and bias on every rank.

    With sequence parallelism each rank's weight gradient is a term of a sum, from its own positions.
    Several names fuse their linears into one GEMM.
    """

    def __init__(self, factory: ParameterFactory, *names: str) -> None:
        super().__init__()
        self.grad_queue, self.fp8 = factory.grad_queue, factory.fp8
        self.weight = factory.make(*(f"{name}.weight" for name in names))
        self.bias = factory.make_if_any(*(f"{name}.bias" for name in names))
        place = LinearPlace(first=self._whole, second=self._whole, base=self._whole, is_stream=True)
        self.adapters = factory.make_adapters(names, self.weight, place)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of x: [S/sp, B, in] -> [S/sp, B, out]."""
        y = self._base(x)
        return y if self.adapters is None else self.adapters(x, y, self.weight, self.bias)

    def _base(self, x: Tensor) -> Tensor:
        if self.fp8 is not None:
            placement = Fp8Placement(fp8=self.fp8)
            return fp8_linear(x, self.weight, self.bias, placement, self.grad_queue)
        return whole_linear(x.contiguous(), self.weight, self.bias, self.grad_queue)

    def _whole(self, x: Tensor, weight: Tensor) -> Tensor:
        return whole_linear(x.contiguous(), weight, None, self.grad_queue)

"""Products of experts in fp8: each row has a scale of its own, and so has each row or column of a weight.

Both recipes multiply experts so. A grouped product in hardware takes scales by row, and one for a whole
micro-batch would have to know the rows that experts on other ranks got. Weights' gradients, whose inner
dimension is the tokens, stay in the compute dtype.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.weight_grads import ComputedTerm, WeightGradQueue
from raymega.parallel.expert_parallel.grouped_gemm import (
    GroupSizes,
    grouped_linear,
    grouped_outer,
    grouped_product,
)
from raymega.parallel.tensor_parallel.fp8_linear import Fp8, Fp8Placement
from raymega.parallel.tensor_parallel.fp8_tensor import FORWARD, MULTIPLE, Fp8Tensor

logger = logging.getLogger(__name__)

CAPABILITY = (9, 0)
"""Of NVIDIA's GPUs whose grouped products torch makes in fp8: Hopper's alone."""


def expert_places(
    fp8: Fp8 | None, etp: Group | None
) -> tuple[Fp8Placement | None, Fp8Placement | None]:
    """How experts multiply going up, whose outputs ``etp`` cuts, and going down, whose inputs it cuts."""
    if fp8 is None:
        return None, None
    by_row = replace(fp8, by_row=True)
    return Fp8Placement(fp8=by_row, outer=etp), Fp8Placement(fp8=by_row, inner=etp)


def expert_linear(
    rows: Tensor,
    weight: Tensor,
    sizes: GroupSizes,
    grad_queue: WeightGradQueue,
    place: Fp8Placement | None,
) -> Tensor:
    """:func:`grouped.grouped_linear`, in fp8 where there is a ``place``.

    Kept for backward are the rows, in the compute dtype.
    """
    if place is None:
        return grouped_linear(rows, weight, sizes, grad_queue)
    return _Fp8GroupedLinear.apply(rows, weight, sizes, grad_queue, place)


class _Fp8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        sizes: GroupSizes,
        grad_queue: WeightGradQueue,
        place: Fp8Placement,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.param, ctx.sizes, ctx.grad_queue, ctx.place = weight, sizes, grad_queue, place
        eight = place.fp8.quantise(rows, place.inner, FORWARD)
        return product_by_expert(eight, place.fp8.rows(weight, place), sizes, rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), sizes, place, grad = ctx.saved_tensors, ctx.sizes, ctx.place, grad.contiguous()
        term = ComputedTerm(lambda: grouped_outer(grad, rows, sizes))
        grad_weight = ctx.grad_queue.accumulate_or_defer(ctx.param, term)
        eight = place.fp8.quantise(grad, place.outer, place.fp8.gradient_format)
        grad_rows = product_by_expert(eight, place.fp8.columns(ctx.param, place), sizes, rows.dtype)
        return grad_rows, grad_weight, None, None, None


def product_by_expert(a: Fp8Tensor, b: Fp8Tensor, sizes: GroupSizes, dtype: torch.dtype) -> Tensor:
    """Rows of a [R, K], each times its expert's b^T of b [E, N, K] -> [R, N] in ``dtype``.

    Sums are float32, or float64 where scales are; the result is rounded once.
    """
    if _has_kernel(a, b, dtype):
        return torch._scaled_grouped_mm(
            a.values, b.values.mT, a.scale[..., 0], b.scale[..., 0],
            offs=sizes.ends, out_dtype=dtype,
        )  # fmt: skip
    wide = a.scale.dtype
    weights = b.values.to(wide).mul_(b.scale)
    return grouped_product(a.values.to(wide), weights.mT, sizes).mul_(a.scale).to(dtype)


def _has_kernel(a: Fp8Tensor, b: Fp8Tensor, dtype: torch.dtype) -> bool:
    device = a.values.device
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    found = torch.cuda.get_device_capability(device)
    is_fit = found == CAPABILITY and not any(size % MULTIPLE for size in b.values.shape[1:])
    if not is_fit:
        _tell()
    return is_fit


@cache
def _tell() -> None:
    """Once in a process."""
    logger.warning(
        "experts' fp8 products are emulated in float32, which is slow: torch makes them on GPUs of "
        "compute capability %d.%d, of sizes that are multiples of %d",
        *CAPABILITY,
        MULTIPLE,
    )

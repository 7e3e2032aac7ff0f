"""Grouped GEMMs of experts in fp8, with a scale for each row, and for each row or column of a weight.

Both fp8 recipes use row scales here. A grouped GEMM in hardware takes scales by row, and one scale for
a whole micro-batch would need the rows that experts on other ranks got. Gradients of weights, whose
inner dimension is the tokens, stay in the compute dtype.
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
"""Compute capability of the GPUs on which torch has a grouped fp8 GEMM: only Hopper's."""


def expert_places(
    fp8: Fp8 | None, etp: Group | None
) -> tuple[Fp8Placement | None, Fp8Placement | None]:
    """Return the placements of the up projection, whose outputs ``etp`` cuts, and the down projection.

    ``etp`` cuts the inputs of the down projection.
    """
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
    """Return :func:`grouped_linear` of the rows, in fp8 where there is a ``place``.

    The rows are saved for backward, in the compute dtype.
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
        return product_by_expert(
            eight, place.fp8.rows(weight, place), sizes, rows.dtype, is_fast=True
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), sizes, place, grad = ctx.saved_tensors, ctx.sizes, ctx.place, grad.contiguous()
        # gradient of the weight: not in fp8; then that of the rows
        term = ComputedTerm(lambda: grouped_outer(grad, rows, sizes))
        grad_weight = ctx.grad_queue.accumulate_or_defer(ctx.param, term)
        eight = place.fp8.quantise(grad, place.outer, place.fp8.gradient_format)
        grad_rows = product_by_expert(eight, place.fp8.columns(ctx.param, place), sizes, rows.dtype)
        return grad_rows, grad_weight, None, None, None


def product_by_expert(
    a: Fp8Tensor, b: Fp8Tensor, sizes: GroupSizes, dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """Multiply the rows of a [R, K] by their expert's b^T, b [E, N, K] -> [R, N] in ``dtype``.

    Sums are in float32, or in float64 where the scales are; the result is rounded once. ``is_fast`` is as in
    :func:`raymega.parallel.tensor_parallel.fp8_tensor.product`.
    """
    if _has_kernel(a, b, dtype):
        return torch._scaled_grouped_mm(
            a.values, b.values.mT, a.scale[..., 0], b.scale[..., 0],
            offs=sizes.ends, out_dtype=dtype, use_fast_accum=is_fast,
        )  # fmt: skip
    # emulation: multiply the 8-bit values in the scales' format, and apply the rows' scales at the end
    wide = a.scale.dtype
    weights = b.values.to(wide).mul_(b.scale)
    return grouped_product(a.values.to(wide), weights.mT, sizes).mul_(a.scale).to(dtype)


def _has_kernel(a: Fp8Tensor, b: Fp8Tensor, dtype: torch.dtype) -> bool:
    # limits of torch's grouped fp8 GEMM
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
    """Log once in a process that experts' fp8 products are emulated."""
    logger.warning(
        "experts' fp8 products are emulated in float32, which is slow: torch makes them on GPUs of "
        "compute capability %d.%d, of sizes that are multiples of %d",
        *CAPABILITY,
        MULTIPLE,
    )

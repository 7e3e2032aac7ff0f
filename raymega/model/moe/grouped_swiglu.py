"""SwiGLU experts on rows sorted by expert, as one autograd node: up, gate and down.

The tensors between two GEMMs have a row for each choice of a token. A CPU's cache holds those of one
expert only, so with many rows each GEMM and its nonlinearity run expert by expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.model.layers.fused_ops import swiglu_gradient, swiglu_values
from raymega.parallel.core.weight_grads import WeightGradQueue
from raymega.parallel.expert_parallel.grouped_gemm import (
    GroupedWeightGrad,
    GroupSizes,
    grouped_product,
)

CACHED_BYTES = 2**23
"""Bytes of a GEMM's output that a CPU's last-level cache keeps until the next operation."""
PART_BYTES = 2**18
"""Bytes of one expert's part from which the overhead of calls for each expert is negligible."""


def gated_experts(
    rows: Tensor, up: Tensor, down: Tensor, sizes: GroupSizes, grad_queue: WeightGradQueue
) -> Tensor:
    """Return down(silu(gate(x)) * up(x)) of each row by its expert.

    Args:
        rows: Tokens sorted by expert, [R, D].
        up: Gate and up weights, [E, 2 F, D], gate first.
        down: Down weights, [E, D, F].
        sizes: Numbers of rows of the experts.
        grad_queue: Queue of deferred weight gradients.

    Returns:
        [R, D].
    """
    return _GatedExperts.apply(rows, up, down, sizes, grad_queue)


def gated_product(rows: Tensor, up: Tensor, sizes: GroupSizes) -> tuple[Tensor, Tensor]:
    """Return gate and up, [R, 2 F], and silu(gate) * up, [R, F], outside autograd."""
    if not _is_long(rows, up.shape[1], sizes):
        gate_up = grouped_product(rows, up.mT, sizes)
        return gate_up, swiglu_values(gate_up)
    gate_up = rows.new_empty(rows.shape[0], up.shape[1])
    inner = rows.new_empty(rows.shape[0], up.shape[1] // 2)
    for part, weight in _parts(sizes, up):
        torch.mm(rows[part], weight.T, out=gate_up[part])
        swiglu_values(gate_up[part], out=inner[part])
    return gate_up, inner


def gated_product_gradient(
    grad: Tensor, down: Tensor, gate_up: Tensor, sizes: GroupSizes
) -> Tensor:
    """Return the gradient of gate and up, [R, 2 F], from the gradient of the output, [R, D]."""
    if not _is_long(grad, gate_up.shape[1], sizes):
        return swiglu_gradient(grouped_product(grad, down, sizes), gate_up)
    grad_gate_up = torch.empty_like(gate_up)
    for part, weight in _parts(sizes, down):
        swiglu_gradient(grad[part] @ weight, gate_up[part], out=grad_gate_up[part])
    return grad_gate_up


class _GatedExperts(torch.autograd.Function):
    """Single node that saves what separate nodes would, but all of it until its backward ends."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        up: Tensor,
        down: Tensor,
        sizes: GroupSizes,
        grad_queue: WeightGradQueue,
    ) -> Tensor:
        gate_up, inner = gated_product(rows, up, sizes)
        ctx.save_for_backward(rows, gate_up, inner, up, down)
        ctx.params, ctx.sizes, ctx.grad_queue = (up, down), sizes, grad_queue
        return grouped_product(inner, down.mT, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate_up, inner, up, down = ctx.saved_tensors
        sizes, accumulate_or_defer, grad = (
            ctx.sizes,
            ctx.grad_queue.accumulate_or_defer,
            grad.contiguous(),
        )
        # down: weight gradient, then back through SwiGLU
        grad_down = accumulate_or_defer(ctx.params[1], GroupedWeightGrad(grad, inner, sizes))
        grad_gate_up = gated_product_gradient(grad, down, gate_up, sizes)
        # up: weight gradient, then the gradient of the rows
        grad_up = accumulate_or_defer(ctx.params[0], GroupedWeightGrad(grad_gate_up, rows, sizes))
        return grouped_product(grad_gate_up, up, sizes), grad_up, grad_down, None, None


def _is_long(rows: Tensor, width: int, sizes: GroupSizes) -> bool:
    num_bytes = rows.shape[0] * width * rows.element_size()
    num_experts = sizes.counts.shape[0]
    is_large = num_bytes >= CACHED_BYTES and num_bytes >= PART_BYTES * num_experts
    return is_large and rows.device.type == "cpu"


def _parts(sizes: GroupSizes, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield each expert's slice of the rows, and its weight."""
    end = 0
    for count, one in zip(sizes.counts.tolist(), weight.unbind(0), strict=True):
        begin, end = end, end + count
        yield slice(begin, end), one

"""Experts without expert parallelism: tokens to weighted sums in one autograd node.

It replaces :mod:`raymega.parallel.expert_parallel.dispatcher` and :mod:`raymega.model.moe.experts` where
no token travels and none is dropped. In small layers each autograd node costs as much as its GEMMs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.model.moe.experts import Experts
from raymega.model.moe.grouped_swiglu import gated_product, gated_product_gradient
from raymega.parallel.core.weight_grads import WeightGradQueue
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups, Routing
from raymega.parallel.expert_parallel.grouped_gemm import (
    GroupedWeightGrad,
    group_sizes,
    grouped_product,
)
from raymega.parallel.expert_parallel.permutation import (
    Permutation,
    count_choices,
    permute,
    rows_of_tokens,
    sum_of_rows,
    weighed_sum,
    weighed_sum_gradients,
)


def is_one_node(experts: Experts, routing: Routing, groups: ExpertGroups) -> bool:
    """Return whether :func:`run_local_experts` can run the layer."""
    is_alone = groups.ep.size == 1 and groups.etp.size == 1
    return is_alone and experts.can_be_one_node and not routing.is_dropping


def run_local_experts(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Return the weighted sum of each token's experts: [T, D] -> [T, D]."""
    chosen = routing.experts
    counts = count_choices(chosen, routing.num_experts)
    arrangement = permute(chosen, counts, num_rows=chosen.numel())
    return _Mix.apply(x, routing.weights, experts.up, experts.down, arrangement, experts.grad_queue)


class _Mix(torch.autograd.Function):
    """Single node that saves what separate nodes of dispatch, experts and combine would."""

    @staticmethod
    def forward(  # noqa: PLR0913  # what the nodes together read
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        arrangement: Permutation,
        grad_queue: WeightGradQueue,
    ) -> Tensor:
        # permute tokens to rows sorted by expert
        rows = rows_of_tokens(x, arrangement)
        sizes = group_sizes(rows, arrangement.counts, inner=down.shape[2])
        # experts
        gate_up, inner = gated_product(rows, up, sizes)
        made = grouped_product(inner, down.mT, sizes)
        ctx.save_for_backward(weights, rows, gate_up, inner, made, up, down)
        ctx.params, ctx.arrangement, ctx.sizes, ctx.grad_queue = (
            (up, down),
            arrangement,
            sizes,
            grad_queue,
        )
        # unpermute and combine
        return weighed_sum(made, weights, arrangement)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, rows, gate_up, inner, made, up, down = ctx.saved_tensors
        sizes, accumulate_or_defer = ctx.sizes, ctx.grad_queue.accumulate_or_defer
        # combine, down, SwiGLU, up, permute: forward in reverse
        grad_made, grad_weights = weighed_sum_gradients(grad, made, weights, ctx.arrangement)
        grad_down = accumulate_or_defer(ctx.params[1], GroupedWeightGrad(grad_made, inner, sizes))
        grad_gate_up = gated_product_gradient(grad_made, down, gate_up, sizes)
        grad_up = accumulate_or_defer(ctx.params[0], GroupedWeightGrad(grad_gate_up, rows, sizes))
        grad_x = sum_of_rows(grouped_product(grad_gate_up, up, sizes), ctx.arrangement)
        return grad_x, grad_weights, grad_up, grad_down, None, None

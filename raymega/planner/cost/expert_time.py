"""Estimate the seconds of one block's experts for one micro-batch on one rank.

They are routing, transfers and matrix products, under an even load.
``raymega.planner.cost.layer_time`` prices the rest of the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.activation_bytes import expert_rows, own_choices
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.planner.kernels.collective_time import all_reduce_s, exchange_s, gather_s, make_span
from raymega.planner.kernels.kernel_time import (
    grouped_matmul_s,
    matmul_s,
    memory_s,
    stream_s,
)

ROUTER_PASSES = 8
"""Reads and writes of a token's scores: logits, softmax, choice, weights, statistics."""
KERNELS_OF_ROUTING = 24
"""Kernel launches of routing in a forward: router, sorts, indices, rows there and back. A backward
counts twice as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTime:
    """Seconds of experts in one forward and one backward.

    The transfers of a backward take as long as those of a forward.

    Attributes:
        forward_s: Seconds of the forward's kernels.
        backward_s: Seconds of the backward's kernels.
        travel_s: Exposed seconds of transfers between ranks in one pass.
    """

    forward_s: float
    backward_s: float
    travel_s: float


def expert_time(
    shape: ActivationShape,
    device: Accelerator,
    *,
    shared_s: float,
    sends_once_a_node: bool = False,
) -> ExpertTime:
    """Return the seconds of one block's experts as ``shape`` cuts them.

    Args:
        shape: Shape of the activations under the layout.
        device: Accelerator of every rank.
        shared_s: Seconds of the shared expert's forward, which overlaps the transfers.
        sends_once_a_node: Whether a token travels to a node once for all its experts there.
    """
    model, parallel, fp8_coverage = shape.model, shape.parallel, shape.fp8_coverage
    num_held = model.moe.num_experts // parallel.ep
    rows, width = expert_rows(shape), model.hidden_size
    inner = model.expert_width / parallel.etp
    up = inner * (2 if shape.family.has_gate else 1)
    grouped_s = partial(
        grouped_matmul_s,
        device,
        groups=num_held,
        is_8_bit=fp8_coverage.experts,
        element=shape.element,
    )
    # Matrix products of the experts.
    forward = backward = 0.0
    for size, columns in ((width, up), (inner, width)):
        forward += grouped_s((rows, size, columns))
        backward += grouped_s((rows, columns, size))
        # Weight gradients: one below the other they are one product with a short inner size.
        backward += matmul_s(
            device,
            size * num_held,
            rows / num_held,
            columns,
            is_8_bit=fp8_coverage.expert_gradients,
            element=shape.element,
        )
    # Routing, and the nonlinearity's memory traffic.
    others = _routing_s(shape, device) + memory_s(device, rows * (up + inner) * shape.element)
    return ExpertTime(
        forward_s=forward + others,
        backward_s=backward + 2 * others,
        travel_s=max(0.0, _travel_s(shape, device, sends_once_a_node=sends_once_a_node) - shared_s),
    )


def _routing_s(shape: ActivationShape, device: Accelerator) -> float:
    """Return the seconds of the router's product and scores, and of moving rows.

    Rows are sorted before they are sent and where they arrive, and summed when they are back.
    """
    model, element = shape.model, shape.element
    tokens = shape.tokens / shape.parallel.tp
    router = matmul_s(device, tokens, model.hidden_size, model.moe.num_experts, element=4)
    scores = memory_s(device, tokens * model.moe.num_experts * 4 * ROUTER_PASSES)
    copies = stream_s(device, _moved_rows(shape) * model.hidden_size * element)
    return router + scores + copies + KERNELS_OF_ROUTING * device.fitted.launch_s


def _moved_rows(shape: ActivationShape) -> float:
    """Return the rows that one forward reads and writes besides those of its products."""
    parallel, moe = shape.parallel, shape.model.moe
    tokens = shape.tokens / parallel.tp
    if _is_gathered(shape):
        # A choice of another rank's expert has no row here, but the sum reads its place too.
        tokens *= parallel.ep * parallel.etp
        return 2 * expert_rows(shape) + 2 * tokens * moe.top_k + tokens
    # Rows are sorted, sent, and summed when they are back.
    moved = 2 * own_choices(shape) + 2 * own_choices(shape) + tokens
    if parallel.ep > 1 and moe.num_experts > parallel.ep:
        moved += 4 * expert_rows(shape)  # sorted by expert, and back by sender
    return moved


def _is_gathered(shape: ActivationShape) -> bool:
    return getattr(shape.parallel, "moe_token_dispatcher_type", "all_to_all") == "all_gather"


def _travel_s(shape: ActivationShape, device: Accelerator, *, sends_once_a_node: bool) -> float:
    """Return the seconds of transfers in one forward, to the experts and back.

    Rows are exchanged over ep, and gathered and reduced over etp. Where the stream is not cut, the
    output is gathered over tp at the end.
    """
    parallel, row_bytes = shape.parallel, shape.model.hidden_size * shape.element
    ep = make_span(device, size=parallel.ep, stride=parallel.etp)
    etp = make_span(device, size=parallel.etp, stride=1)
    # To the experts, by gathers alone or by an exchange over ep.
    gathered = gather_s(device, etp, expert_rows(shape) * row_bytes)
    if _is_gathered(shape):
        whole = shape.tokens / parallel.tp * parallel.ep * parallel.etp * row_bytes
        there = gather_s(device, ep, whole) + gather_s(device, etp, whole / parallel.ep)
    else:
        nodes, choices = ep.size / ep.per_node, shape.model.moe.top_k
        # Expected nodes that hold an expert of a token, over its choices, under an even load.
        share = nodes * (1 - (1 - 1 / nodes) ** choices) / choices if sends_once_a_node else 1.0
        rows = own_choices(shape) * row_bytes
        there = exchange_s(device, ep, rows, outside_share=share) + gathered
    back = 0.0
    if parallel.tp > 1 and not parallel.sequence_parallel:
        tp = make_span(device, size=parallel.tp, stride=1)
        back = gather_s(device, tp, shape.tokens * row_bytes)
    # Largest magnitudes of rows that etp cuts: one number a row, reduced once a pass.
    scales = (
        all_reduce_s(device, etp, expert_rows(shape) * 4) if shape.fp8_coverage.experts else 0.0
    )
    return 2 * there + back + scales

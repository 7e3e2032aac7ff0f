"""Seconds of the experts of one block, for one micro-batch on one rank: routing, travel and products.

The load is taken to be even. What a block has beside its experts is layer_time's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.activation_bytes import ActivationShape, expert_rows, own_choices
from raymega.planner.kernels.collective_time import all_reduce_s, exchange_s, gather_s, make_span
from raymega.planner.kernels.kernel_time import grouped_matmul_s, matmul_s, memory_s

ROUTER_PASSES = 8
"""Reads and writes of a token's scores: logits, softmax, choice, weights, statistics."""
KERNELS_OF_ROUTING = 24
"""Launches of a forward: router, sorts, indices, rows there and back; a backward has as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTime:
    """One forward, and the kernels of one backward; a backward's travel is as long as a forward's.

    Attributes:
        forward_s: Kernels.
        backward_s: Kernels.
        travel_s: Between ranks, that nothing hides.
    """

    forward_s: float
    backward_s: float
    travel_s: float


def expert_time(shape: ActivationShape, device: Accelerator, *, shared_s: float) -> ExpertTime:
    """Of the experts of one block as ``shape`` cuts them.

    Args:
        shape: The layout.
        device: What the ranks are.
        shared_s: Kernels of the shared expert's forward, behind which tokens travel.
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
    forward = backward = 0.0
    for size, columns in ((width, up), (inner, width)):
        forward += grouped_s((rows, size, columns))
        backward += grouped_s((rows, columns, size))
        # Gradients of the matrices: one below the other they are one product of short inner size.
        backward += matmul_s(
            device,
            size * num_held,
            rows / num_held,
            columns,
            is_8_bit=fp8_coverage.expert_gradients,
            element=shape.element,
        )
    others = _routing_s(shape, device) + memory_s(device, rows * (up + inner) * shape.element)
    return ExpertTime(
        forward_s=forward + others,
        backward_s=backward + 2 * others,
        travel_s=max(0.0, _travel_s(shape, device) - shared_s),
    )


def _routing_s(shape: ActivationShape, device: Accelerator) -> float:
    """The router's product and scores; rows put in order before they leave, where they arrive, and
    added up when they are back."""
    model, element = shape.model, shape.element
    tokens = shape.tokens / shape.parallel.tp
    router = matmul_s(device, tokens, model.hidden_size, model.moe.num_experts, element=4)
    scores = memory_s(device, tokens * model.moe.num_experts * 4 * ROUTER_PASSES)
    copies = memory_s(device, _moved_rows(shape) * model.hidden_size * element)
    return router + scores + copies + KERNELS_OF_ROUTING * device.fitted.launch_s


def _moved_rows(shape: ActivationShape) -> float:
    """Rows read and written beside the products of one forward."""
    parallel, moe = shape.parallel, shape.model.moe
    tokens = shape.tokens / parallel.tp
    if _is_gathered(shape):
        # A choice of another rank's experts has no row here, but the sum looks at its place too.
        tokens *= parallel.ep * parallel.etp
        return 2 * expert_rows(shape) + 2 * tokens * moe.top_k + tokens
    moved = 2 * own_choices(shape) + 2 * own_choices(shape) + tokens
    if parallel.ep > 1 and moe.num_experts > parallel.ep:
        moved += 4 * expert_rows(shape)  # by expert, and back to who sent them
    return moved


def _is_gathered(shape: ActivationShape) -> bool:
    return getattr(shape.parallel, "moe_token_dispatcher_type", "all_to_all") == "all_gather"


def _travel_s(shape: ActivationShape, device: Accelerator) -> float:
    """There and back in one forward: over ep, gathered and summed over etp, and over tp at the end
    where the stream is not cut."""
    parallel, row_bytes = shape.parallel, shape.model.hidden_size * shape.element
    ep = make_span(device, size=parallel.ep, stride=parallel.etp)
    etp = make_span(device, size=parallel.etp, stride=1)
    gathered = gather_s(device, etp, expert_rows(shape) * row_bytes)
    if _is_gathered(shape):
        whole = shape.tokens / parallel.tp * parallel.ep * parallel.etp * row_bytes
        there = gather_s(device, ep, whole) + gather_s(device, etp, whole / parallel.ep)
    else:
        there = exchange_s(device, ep, own_choices(shape) * row_bytes) + gathered
    back = 0.0
    if parallel.tp > 1 and not parallel.sequence_parallel:
        tp = make_span(device, size=parallel.tp, stride=1)
        back = gather_s(device, tp, shape.tokens * row_bytes)
    # Of rows that are cut over etp the largest magnitudes: a number each, once a pass.
    scales = (
        all_reduce_s(device, etp, expert_rows(shape) * 4) if shape.fp8_coverage.experts else 0.0
    )
    return 2 * there + back + scales

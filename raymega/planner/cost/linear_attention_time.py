"""Estimate the seconds of a gated delta net between its projections: states by chunks, and their exchange over cp.

No run has fitted these estimates: the form in plain torch is bound by memory traffic, which is counted in full.
"""

from __future__ import annotations

from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.plan.memory.linear_attention_bytes import (
    CHUNK,
    linear_working_bytes,
    projected_features,
    value_features,
)
from raymega.planner.kernels.kernel_time import memory_s

PASSES = 3
"""Times that a forward moves each tensor that it makes: written, and read by what follows."""
BACKWARD_STATES = 3
"""Seconds of a backward over those of a forward: all is computed again first."""


def projections(shape: ActivationShape) -> list[tuple[float, float, float]]:
    """Return rows, inner and columns of the products from the stream and back to it."""
    tokens, width = shape.tokens, shape.model.hidden_size
    return [
        (tokens, width, projected_features(shape)),
        (tokens, value_features(shape), width),
    ]


def states_s(shape: ActivationShape, device: Accelerator) -> tuple[float, float]:
    """Return the seconds of convolution, states, norm and gate, in a forward and in a backward."""
    share = device.peak_flops(shape.wide) * device.fitted.matmul_share
    moved = PASSES * linear_working_bytes(shape)
    forward = chunked_flops(shape) / share + memory_s(device, moved)
    return forward, BACKWARD_STATES * forward


def chunked_flops(shape: ActivationShape) -> float:
    """Return the FLOPs of the chunked form in a forward.

    A token of a value head has three products with the state, a row of the chunk's product of queries and
    keys and of keys, its part of the system's solution, and a row of the sum over updates.
    """
    sizes = shape.model.linear_attention
    keys, values = sizes.key_head_dim, sizes.value_head_dim
    shared = sizes.num_key_heads / sizes.num_value_heads
    by_state = 3 * 2 * keys * values
    inside = CHUNK * (4 * shared * keys + keys + values + 2 * values)
    return shape.tokens * sizes.num_value_heads / shape.parallel.tp * (by_state + inside)


def state_exchange_s(shape: ActivationShape, device: Accelerator) -> float:
    """Return the seconds in which context-parallel ranks exchange tokens for heads and back, in one pass."""
    cp = shape.parallel.cp
    if cp == 1:
        return 0.0
    # all but the gates there, what is read of states back
    features = projected_features(shape)
    sent = shape.tokens * features * shape.element * (cp - 1) / cp
    return sent / device.bytes_per_s(shape.parallel.tp * cp)

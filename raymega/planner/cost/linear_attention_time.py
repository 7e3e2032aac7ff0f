"""Estimate the seconds of layers with states between their projections: states by chunks, and their exchange over cp.

No run has fitted these estimates: the form in plain torch is bound by memory traffic, which is counted in full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.layers.layer_pattern import ALONE, DELTA_NET, STATES, is_mixed, state_kind
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.plan.memory.linear_attention_bytes import (
    CHUNK,
    linear_working_bytes,
    projected_features,
    value_features,
)
from raymega.planner.kernels.kernel_time import memory_s

Time = TypeVar("Time", bound=Any)  # a dataclass of numbers
PASSES = 3
"""Times that a forward moves each tensor that it makes: written, and read by what follows."""
BACKWARD_STATES = 3
"""Seconds of a backward over those of a forward: all is computed again first."""


def mean_over_blocks(
    time_of: Callable[..., Time], shape: ActivationShape, *, has_experts: bool
) -> Time:
    """Return the mean time of the model's blocks with or without experts, of those of each kind.

    ``time_of`` has the shape of a model with such blocks alone, has_experts, and has_states and has_inner, whether
    there are a state in place of attention and a feed-forward layer. Of a block with a feed-forward layer
    alone, the time is that of a block of two parts, less that of its attention.
    """
    model = shape.model
    numbers = [n for n in range(model.num_layers) if model.holds_experts(n) == has_experts]
    if not numbers or not (is_mixed(model) or model.layer_sizes.is_on):
        return time_of(shape, has_experts=has_experts)
    total = len(numbers)
    found: dict[str, float] = defaultdict(float)
    for number, own, _ in shape.blocks(numbers):
        for name, value in asdict(time_of_kind(time_of, own, has_experts=has_experts)).items():
            found[name] += number / total * value
    return replace(time_of(shape, has_experts=has_experts), **found)


def time_of_kind(time_of: Callable[..., Time], own: ActivationShape, *, has_experts: bool) -> Time:
    """Return the time of a block of the one kind that ``own`` has."""
    kind, has_one = own.model.attention.layer_types[0], own.family.has_one_part
    if kind not in ALONE:
        return time_of(
            own, has_experts=has_experts, has_states=kind in STATES, has_inner=not has_one
        )
    whole, mixer = time_of(own, has_experts=has_experts), time_of(own, has_inner=False)
    values = {name: getattr(whole, name) - value for name, value in asdict(mixer).items()}
    return replace(whole, **values)


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

    A token of a value head has two products with the state, a row of the chunk's product of queries and keys,
    and a row of the sum over values. A gated delta net has a third product with the state, a row of the
    product of keys, and its part of a system's solution.
    """
    sizes = shape.model.linear_attention
    keys, values = sizes.key_head_dim, sizes.value_head_dim
    shared = sizes.num_key_heads / sizes.num_value_heads
    by_state, inside = 2 * 2 * keys * values, 2 * shared * keys + 2 * values
    if state_kind(shape.model) == DELTA_NET:
        by_state, inside = 3 * 2 * keys * values, inside + 2 * shared * keys + keys + values
    return shape.tokens * sizes.num_value_heads / shape.parallel.tp * (by_state + CHUNK * inside)


def state_exchange_s(shape: ActivationShape, device: Accelerator) -> float:
    """Return the seconds in which context-parallel ranks exchange tokens for heads and back, in one pass."""
    cp = shape.parallel.cp
    if cp == 1:
        return 0.0
    # all but the gates there, what is read of states back
    features = projected_features(shape)
    sent = shape.tokens * features * shape.element * (cp - 1) / cp
    return sent / device.bytes_per_s(shape.parallel.tp * cp)

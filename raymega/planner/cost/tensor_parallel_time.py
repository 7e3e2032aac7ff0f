"""Estimate the exposed seconds of a block's traffic over tp, with and without overlapping products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.hardware.tp_overlap import num_blocks
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.planner.kernels.collective_time import all_reduce_s, gather_s, make_span
from raymega.planner.kernels.system_traits import Software


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTime:
    """Seconds of a linear layer's products: of its output, its input's gradient and its weight's."""

    forward_s: float
    input_s: float
    weight_s: float


@dataclass(frozen=True, slots=True)
class ProductPair:
    """Products between two places of the residual stream: that of all positions, and that which is summed."""

    column: ProductTime
    row: ProductTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Exposed seconds of traffic over tp in a forward and in a backward."""

    forward_s: float
    backward_s: float


def tensor_parallel_traffic(
    shape: ActivationShape,
    device: Accelerator,
    software: Software,
    *,
    pairs: Sequence[ProductPair],
) -> Traffic:
    """Return the exposed traffic over tp of a block with these pairs of products.

    Each pair has an all-reduce. Sequence parallelism sends as many bytes, as an all-gather before it and a
    reduce-scatter after it. In backward, raymega's column layers sum the gradient of their input while they
    compute that of their weight.
    """
    if shape.parallel.tp == 1:
        return Traffic(forward_s=0.0, backward_s=0.0)
    is_overlapped = shape.is_tp_overlapped and not shape.fp8_coverage.linears
    if software.makes_steps and is_overlapped:
        return _overlapped(shape, device, pairs)
    span = make_span(device, size=shape.parallel.tp, stride=1)
    sent = all_reduce_s(device, span, _stream_bytes(shape))
    # fp8 by row: one number a token, before the product that is cut along its inner size.
    if shape.fp8_coverage.reduces_rows:
        sent += all_reduce_s(device, span, shape.tokens * 4)
    total, share = len(pairs) * sent, 0.5 if shape.parallel.sequence_parallel else 1.0
    hidden = 0.0
    if software.makes_steps:
        hidden = sum(min(share * sent, pair.column.weight_s) for pair in pairs)
    return Traffic(forward_s=total, backward_s=total - hidden)


def _overlapped(
    shape: ActivationShape, device: Accelerator, pairs: Sequence[ProductPair]
) -> Traffic:
    """Return the exposed traffic where messages overlap products block by block.

    In backward a row layer's gather also runs beside the weight's gradient of the row layer behind it, which
    was held back for that.
    """
    span = make_span(device, size=shape.parallel.tp, stride=1)
    message = gather_s(device, span, _stream_bytes(shape))
    count = num_blocks(shape.parallel.tp)
    forward = backward = 0.0
    for place, pair in enumerate(pairs):
        held = pairs[(place + 1) % len(pairs)].row.weight_s
        forward += _exposed_s(message, pair.column.forward_s, count)
        forward += _exposed_s(message, pair.row.forward_s, count)
        backward += _exposed_s(message, pair.row.input_s, count, before=held)
        backward += max(0.0, message - pair.column.weight_s)
    return Traffic(forward_s=forward, backward_s=backward)


def _exposed_s(message_s: float, product_s: float, count: int, *, before: float = 0.0) -> float:
    """Return the exposed seconds of a message in ``count`` blocks, each needed by its block of a product.

    ``before`` is the seconds of a product that needs none. A sum, whose blocks follow their products, takes as
    long.
    """
    first = max(before, message_s / count) + product_s
    last = message_s + product_s / count
    return max(first, last) - before - product_s


def _stream_bytes(shape: ActivationShape) -> float:
    """Return the bytes of the residual stream at all positions."""
    return shape.tokens * shape.model.hidden_size * shape.element

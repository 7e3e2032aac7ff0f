"""Estimate the seconds of what a model's two ends do for one micro-batch: embedding, head, and joins.

``raymega.planner.cost.layer_time`` prices the blocks between them.
"""

from __future__ import annotations

from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.activation_bytes import vocabulary_rows
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.planner.kernels.kernel_time import matmul_s, memory_s


def head_time(shape: ActivationShape, device: Accelerator) -> tuple[float, float]:
    """Return forward and backward seconds of the projection to the vocabulary and the loss."""
    rows = vocabulary_rows(shape)
    width, tokens, element = shape.model.hidden_size, shape.tokens, shape.element
    # The product and the gradients of its input and weight.
    forward = matmul_s(device, tokens, width, rows, element=element)
    backward = matmul_s(device, tokens, rows, width, element=element)
    backward += matmul_s(device, width, tokens, rows, element=element)
    logits = tokens * rows
    # Eager kernels also widen the logits to float32, which the loss and its gradient read.
    wide = 0 if shape.is_fused else 4
    written, read_for_loss, gradient = element + wide, wide or element, element + (wide or element)
    forward += memory_s(device, logits * (written + read_for_loss))
    return forward, backward + memory_s(device, logits * gradient)


def join_time(shape: ActivationShape, device: Accelerator) -> tuple[float, float]:
    """Return forward and backward seconds of the projection before a multi-token prediction block.

    It joins the embedding of a token further ahead to the stream.
    """
    width, tokens, element = shape.model.hidden_size, shape.stream_tokens, shape.element
    forward = matmul_s(device, tokens, 2 * width, width, element=element)
    backward = matmul_s(device, tokens, width, 2 * width, element=element)
    return forward, backward + matmul_s(device, 2 * width, tokens, width, element=element)


def embedding_time(shape: ActivationShape, device: Accelerator) -> tuple[float, float]:
    """Return forward and backward seconds of looking up rows and adding to them."""
    stream = memory_s(device, 2 * shape.stream_bytes)
    return stream, 2 * stream

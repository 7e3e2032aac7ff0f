"""Estimate the seconds of what a model's two ends do for one micro-batch: embedding with its vision tower, head, and joins.

``raymega.planner.cost.layer_time`` prices the blocks between them.
"""

from __future__ import annotations

from raymega.config.vision.section import CHANNELS
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.layers.vision import images_at_once
from raymega.plan.memory.activation_bytes import head_shape, vocabulary_rows
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.plan.tensor_table import is_head_frozen, is_tower_frozen
from raymega.planner.kernels.collective_time import all_reduce_s, make_span
from raymega.planner.kernels.kernel_time import matmul_s, memory_s

TOWER_PASSES = 10
"""Reads and writes of a block's stream beside its products: two norms, two sums, and copies around attention."""


def head_time(shape: ActivationShape, device: Accelerator) -> tuple[float, float]:
    """Return forward and backward seconds of the projection to the vocabulary and the loss."""
    shape, rows = head_shape(shape), vocabulary_rows(shape)
    width, tokens, element = shape.model.hidden_size, shape.tokens, shape.element
    # The product and the gradients of its input and, unless it is frozen, of its weight.
    forward = matmul_s(device, tokens, width, rows, element=element)
    backward = matmul_s(device, tokens, rows, width, element=element)
    if not is_head_frozen(shape.model):
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


def tower_time(shape: ActivationShape, device: Accelerator) -> tuple[float, float]:
    """Return forward and backward seconds of a vision tower and its projector on the busiest rank's share of images.

    Nothing of their gather is counted: features are few beside the tower's work. A tower that tp cuts sums each block's
    stream twice in forward, and its gradient twice in backward; these are taken as exposed.
    """
    model, vision = shape.model, shape.model.vision
    tokens = shape.seq_len * shape.micro_batch_size
    images = images_at_once(model, shape.parallel, tokens=tokens)
    rows, width, element = images * vision.num_positions, vision.hidden_size, shape.element
    inner = vision.ffn_hidden_size
    # a block's products, attention's two among them, and its norms, sums and nonlinearity
    cut = shape.parallel.tp if vision.tensor_parallel else 1
    own, features = width // cut, inner // cut
    sizes = [(width, 3 * own), (own, width), (width, features), (features, width)]
    sizes += 2 * [(vision.num_positions, own)]
    block = sum(matmul_s(device, rows, *each, element=element) for each in sizes)
    block += memory_s(device, rows * (TOWER_PASSES * width + 2 * features) * element)
    patches, wide, merged = images * vision.num_patches, model.hidden_size, vision.merged_size
    between = wide if vision.has_positions else merged
    forward = vision.used_layers * block
    forward += matmul_s(device, rows, CHANNELS * vision.patch_size**2, width, element=element)
    ends = [(merged, between), (between, wide)]
    forward += sum(matmul_s(device, patches, *each, element=element) for each in ends)
    # each product has two in backward, and each sum one
    summed = all_reduce_s(device, make_span(device, size=cut, stride=1), rows * width * element)
    sums = vision.used_layers * 2 * summed
    repeated = forward + sums if shape.memory.recompute == "full" else 0.0
    backward = 0.0 if is_tower_frozen(model) else 2 * forward + sums + repeated
    return forward + sums, backward

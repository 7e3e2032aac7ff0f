"""Compute the bytes of activations that a vision tower keeps."""

from __future__ import annotations

from math import ceil

from raymega.plan.layers.vision import image_elements, images_at_once
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.plan.tensor_table import is_tower_frozen


def image_bytes(shape: ActivationShape) -> int:
    """Return the bytes of a vision tower's activations, and of the features of all images; 0 without one.

    Full recompute keeps each block's input alone. A frozen tower keeps nothing; its projector, little, is counted as nothing.
    """
    model, parallel = shape.model, shape.parallel
    if not model.vision.is_on or is_tower_frozen(model):
        return 0
    ranks = parallel.cp * (1 if model.vision.tensor_parallel else parallel.tp)
    tokens = shape.seq_len * shape.micro_batch_size
    images = images_at_once(model, parallel, tokens=tokens)
    kept = image_elements(model, parallel.tp)
    if shape.memory.recompute == "full":
        kept = model.vision.used_layers * model.vision.num_positions * model.vision.hidden_size
    features = ranks * model.vision.num_patches * model.hidden_size
    return ceil(images * (kept + features)) * shape.element

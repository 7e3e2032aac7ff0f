"""List the tensors of a vision tower and its projector, and count their operations and bytes for one image.

Each rank of a stage's tp and cp holds all of them and works on images of its own, so gradients are terms of a sum.
"""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

from raymega.config.schema import ModelSection, ParallelSection
from raymega.config.vision.section import CHANNELS, VisionSection
from raymega.plan.layers.global_tensor import GlobalTensor, Role

FRAMES = 2
"""Frames of a patch in Qwen2-VL, which sees an image as two that are alike."""
VISION = "vision"
PROJECTOR = f"{VISION}.projector."
"""Begins of the names of all tensors of tower and projector, and of the projector's."""


def vision_tensors(model: ModelSection) -> list[GlobalTensor]:
    """Return the tensors of tower and projector in the order of use; none without ``model.vision``."""
    vision = model.vision
    if not vision.is_on:
        return []
    width, patch, std = vision.hidden_size, vision.patch_size, vision.initializer_range
    # patches, class token, positions
    # colours and frames are one dim: a checkpoint holds tensors of at most four
    inputs = CHANNELS if vision.has_positions else CHANNELS * FRAMES
    shapes: dict[str, tuple[tuple[int, ...], Role]] = {
        "patches.weight": ((width, inputs, patch, patch), "embedding")
    }
    if vision.has_class_token:
        shapes["class_token.weight"] = ((width,), "bias")
    elif vision.has_positions:
        shapes["patches.bias"] = ((width,), "bias")
    if vision.has_positions:
        shapes["positions.weight"] = ((vision.num_positions, width), "embedding")
    # norms and blocks
    if vision.has_class_token:
        shapes |= _norm("pre_norm", width)
    for layer in range(vision.num_layers):
        shapes |= _block(f"layers.{layer}", vision)
    # projector, with a norm before patches are merged
    shapes |= _norm("post_norm" if vision.has_positions else "projector.norm", width)
    inner = model.hidden_size if vision.has_positions else vision.merged_size
    shapes |= _linear("projector.up", inner, vision.merged_size)
    shapes |= _linear("projector.down", model.hidden_size, inner)
    # each rank works on images of its own: its gradient is a term, whatever the stream is cut by; or all on the same ones
    is_cut = vision.tensor_parallel
    return [
        GlobalTensor(
            name=f"{VISION}.{name}", shape=shape, tp_dim=_cut_dim(name) if is_cut else -1, init=_init(name, role),
            initializer_range=std, role=role, serves_tokens=not is_cut,
        )
        for name, (shape, role) in shapes.items()
    ]  # fmt: skip


def _cut_dim(name: str) -> int:
    """Return the dim that tp cuts where it cuts the blocks: heads and features, as those of the decoder."""
    layer, _, kind = name.rpartition(".")
    if not name.startswith("layers.") or "norm" in layer:
        return -1
    if layer.endswith((".out", ".down")):
        return 1 if kind == "weight" else -1
    return 0


def without_unused(tensors: list[GlobalTensor], vision: VisionSection) -> list[GlobalTensor]:
    """Return the tensors with those behind ``feature_layer`` frozen: no gradient reaches them."""
    unused = tuple(
        f"{VISION}.layers.{layer}." for layer in range(vision.used_layers, vision.num_layers)
    )
    behind = (*unused, f"{VISION}.post_norm.")
    return [
        replace(each, is_frozen=True) if each.name.startswith(behind) else each for each in tensors
    ]


def image_flops(model: ModelSection, *, is_mean: bool = False) -> float:
    """Return the forward FLOPs of one image: products with weights, and attention's two over all its tokens.

    Of images of several sizes it is one with the room of the largest, which a tower makes for each; or, with ``is_mean``, the
    mean one without that room.
    """
    vision = model.vision
    if not vision.is_on:
        return 0.0
    count, width = vision.mean_patches if is_mean else vision.num_patches, vision.hidden_size
    num_cut = count * vision.spatial_merge_size**2
    tokens = num_cut + vision.has_class_token
    block = 4 * width**2 + 2 * width * vision.ffn_hidden_size
    inner = model.hidden_size if vision.has_positions else vision.merged_size
    projector = inner * (vision.merged_size + model.hidden_size)
    patches = num_cut * CHANNELS * vision.patch_size**2 * width
    weights = vision.used_layers * tokens * block + count * projector + patches
    return 2.0 * weights + vision.used_layers * 4.0 * tokens**2 * width


def images_at_once(model: ModelSection, parallel: ParallelSection, *, tokens: int) -> float:
    """Return the number of images that the tower of a stage's busiest rank reads of a micro-batch, one at least.

    The cp ranks share the images of a micro-batch, tp ranks too unless they cut the tower, and with ``balance_images`` the dp ranks too. Else a step waits
    for the dp rank with the most: of ``dp`` counts with mean and variance m (Poisson's), about m + sqrt(2 m ln dp).

    Args:
        model: Model section.
        parallel: Degrees of the grid.
        tokens: Tokens of a micro-batch.
    """
    ranks = parallel.cp * (1 if model.vision.tensor_parallel else parallel.tp)
    mean = model.vision.images_per_token * tokens
    spread = 0.0 if parallel.balance_images else sqrt(2 * mean * log(parallel.dp))
    return max(1.0, (mean + spread) / ranks)


def image_elements(model: ModelSection, tp: int = 1) -> int:
    """Return the numbers that a forward keeps of one image for backward, full recompute left out.

    A block keeps the inputs of its norms and products, queries, keys and values, and the feed-forward layer before and
    behind its nonlinearity, of which quick_gelu keeps its sigmoid too. A tower that ``tp`` ranks cut keeps 1/tp of heads and
    features.
    """
    vision = model.vision
    if not vision.is_on:
        return 0
    inner = 3 if vision.activation == "quick_gelu" else 2
    cut = tp if vision.tensor_parallel else 1
    # queries and keys that rotate are kept from before and behind it
    heads = 4 if vision.has_positions else 6
    own = (heads * vision.hidden_size + inner * vision.ffn_hidden_size) // cut
    block = vision.num_positions * (4 * vision.hidden_size + own)
    patches = vision.num_patches * CHANNELS * vision.sizes.square**2
    projected = model.hidden_size if vision.has_positions else vision.merged_size
    ends = vision.num_patches * (vision.merged_size + 2 * projected + model.hidden_size) + patches
    return vision.used_layers * block + ends


def _block(at: str, vision: VisionSection) -> dict[str, tuple[tuple[int, ...], Role]]:
    width, inner = vision.hidden_size, vision.ffn_hidden_size
    shapes = _norm(f"{at}.attention_norm", width)
    for name in ("q", "k", "v", "out"):
        shapes |= _linear(f"{at}.attention.{name}", width, width)
    shapes |= _norm(f"{at}.mlp_norm", width)
    return shapes | _linear(f"{at}.mlp.up", inner, width) | _linear(f"{at}.mlp.down", width, inner)


def _linear(at: str, out: int, inner: int) -> dict[str, tuple[tuple[int, ...], Role]]:
    return {f"{at}.weight": ((out, inner), "matrix"), f"{at}.bias": ((out,), "bias")}


def _norm(at: str, width: int) -> dict[str, tuple[tuple[int, ...], Role]]:
    return {f"{at}.weight": ((width,), "norm"), f"{at}.bias": ((width,), "bias")}


def _init(name: str, role: Role) -> str:
    if role == "norm":
        return "ones"
    return "zeros" if name.endswith(".bias") else "normal"

"""Makes the inputs of images as transformers' LLaVA and Qwen2-VL take them, from pixels of the size that was trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raymega.config.vision.section import VisionSection
from raymega.data.rows import Pixels

WHITE = 255.0
FRAMES = 2


def image_inputs(
    images: Sequence[Pixels], tokens: Tensor, *, vision: VisionSection
) -> dict[str, Tensor]:
    """Return the arguments of a model beside its tokens.

    Args:
        images: Pixels [3, size, size] uint8 of all rows' images, row after row.
        tokens: Tokens of the rows, [B, S].
        vision: Section of the model's tower.
    """
    mean, std = (
        torch.tensor(each, dtype=torch.float32)[:, None, None]
        for each in (vision.image_mean, vision.image_std)
    )
    pixels = (torch.from_numpy(np.stack(images)).float() / WHITE - mean) / std
    if vision.has_positions:
        return {"pixel_values": pixels}
    # one time step: both frames of a patch are the image
    sizes = torch.tensor([[1, vision.grid, vision.grid]] * len(images))
    kinds = (tokens == vision.image_token_id).int()
    return {
        "pixel_values": _patches(pixels, vision), "image_grid_thw": sizes, "mm_token_type_ids": kinds,
    }  # fmt: skip


def _patches(pixels: Tensor, vision: VisionSection) -> Tensor:
    """Return Qwen2-VL's patches, [N * grid^2, 3 * 2 * patch^2]: square after square, both frames alike."""
    edges = (vision.edge, vision.spatial_merge_size, vision.patch_size)
    cut = pixels.unflatten(3, edges).unflatten(2, edges)
    # image, row and column of the square, of the patch inside it, colour, frame, row and column of the pixel
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :].expand(*[-1] * 6, FRAMES, -1, -1)
    return cut.flatten(5).flatten(0, 4)

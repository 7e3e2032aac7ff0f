"""Makes the inputs of images as transformers' LLaVA and Qwen2-VL take them, from pixels of the sizes that were trained on."""

from __future__ import annotations

from collections.abc import Sequence

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
        images: Pixels [3, height, width] uint8 of all rows' images, row after row.
        tokens: Tokens of the rows, [B, S].
        vision: Section of the model's tower.
    """
    mean, std = (
        torch.tensor(each, dtype=torch.float32)[:, None, None]
        for each in (vision.image_mean, vision.image_std)
    )
    pixels = [(torch.from_numpy(image.copy()).float() / WHITE - mean) / std for image in images]
    if vision.has_positions:
        return {"pixel_values": torch.stack(pixels)}
    # one time step: both frames of a patch are the image
    sizes = [[1, *(edge // vision.patch_size for edge in image.shape[1:])] for image in images]
    kinds = (tokens == vision.image_token_id).int()
    return {
        "pixel_values": torch.cat([_patches(image, vision) for image in pixels]),
        "image_grid_thw": torch.tensor(sizes), "mm_token_type_ids": kinds,
    }  # fmt: skip


def _patches(pixels: Tensor, vision: VisionSection) -> Tensor:
    """Return Qwen2-VL's patches of an image, [patches, 3 * 2 * patch^2]: square after square, both frames alike."""
    edges = (-1, vision.spatial_merge_size, vision.patch_size)
    cut = pixels.unflatten(2, edges).unflatten(1, edges)
    # row and column of the square, of the patch inside it, colour, frame, row and column of the pixel
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6)[..., None, :, :].expand(*[-1] * 5, FRAMES, -1, -1)
    return cut.flatten(4).flatten(0, 3)

"""Vision tower of a new job's model: that of the folder, or a small one, and the rows with images that it reads."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

from raymega.config.schema import ModelSection
from raymega.config.vision.section import VisionSection
from raymega.data.format import META_FILE, ImageMeta, read_meta
from raymega.data.streaming.remote_dataset import is_remote
from raymega.errors import ConfigError

BYTES = "bytes"
"""Tokenizer that gets the mark of an image from `raymega data prepare --format images`."""
PATCH_TOKEN = 257
"""Id of that mark, behind the bytes and the end of a document."""
VOCAB_SIZE = PATCH_TOKEN + 1
TUNED = {"freeze": ["vision.*"], "train": ["vision.projector.*"]}
"""Fields of a model section by which a published tower is kept, as in LLaVA's second stage."""


def with_new_tower(model: ModelSection, tower: VisionSection, data: str) -> ModelSection:
    """Return the recipe's own model with a tower, for the images of a dataset that is on this machine."""
    images = _images_of(data)
    sizes: dict[str, Any] = {"image_token_id": images.token_id if images else PATCH_TOKEN}
    if images and images.size:
        sizes |= {"image_size": images.size, "patch_size": images.sizes.square}
    elif images:  # a table of positions is of one size
        sizes |= {"kind": "qwen2_vl", "image_size": 0, "patch_size": images.sizes.square}
        sizes |= {"min_pixels": images.min_pixels, "max_pixels": images.max_pixels}
    vocabulary = {} if data else {"vocab_size": VOCAB_SIZE}
    return model.model_copy(update={"vision": tower.model_copy(update=sizes), **vocabulary})


def _images_of(data: str) -> ImageMeta | None:
    """Return the form of a dataset's images; None without images, and where it is not on this machine."""
    if not data or is_remote(data) or not (Path(data) / META_FILE).is_file():
        return None
    return read_meta(Path(data)).images


def check_tower(model: ModelSection, place: str) -> None:
    """Raise if the model at ``place`` reads no images.

    Raises:
        ConfigError: It has no vision tower.
    """
    if not model.vision.is_on:
        raise ConfigError(
            fact=f"raymega init vision --model {place}: the model reads text alone",
            rule="images need a vision tower, as a LLaVA or Qwen2-VL model has one",
            remedy=f"use raymega init continue --model {quote(place)}, or leave --model out for a small model with a tower",
        )


def set_image_rows(values: dict[str, dict[str, Any]], model: ModelSection, *, longest: int) -> str:
    """Set what rows with images need in a job's values, and return the input of `raymega data prepare`.

    A row has at most ``longest`` tokens.
    """
    data, vision = values["data"], model.vision
    data |= {"packing": "best_fit"}
    data.pop("loss_on", None)  # a row's prompt is no label, and all that follows is
    # an image, and as much text
    if vision.max_pixels:
        most = min(vision.max_pixels, data["seq_len"] // 2 * vision.sizes.square**2)
        fields = ("max_pixels", "min_pixels", "mean_pixels")
        bounds = {name: min(getattr(vision, name), most) for name in fields}
        values["model"]["vision"] |= {name: value for name, value in bounds.items() if value}
        size = f"--max-pixels {most}"
        size += f" --min-pixels {bounds['min_pixels']}" * (bounds["min_pixels"] > 0)
    else:
        data["seq_len"] = min(longest, max(data["seq_len"], 2 * vision.num_patches))
        size = f"--image-size {vision.image_size}"
    return f"my-images.parquet --format images {size} --patch-size {vision.sizes.square}"

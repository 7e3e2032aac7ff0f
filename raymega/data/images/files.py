"""Files of images: their pixels as a model reads them, and the tokens of a text whose marks stand for them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np

from raymega.config.vision.section import CHANNELS
from raymega.config.vision.sizes import ImageSizes
from raymega.data.rows import TEXT, Image, Ints, Pixels
from raymega.extras import import_extra

MARK = "<image>"
"""Text that stands for an image."""
LONGEST_PATH = 4096
"""Characters of a path at most; a longer text is base64."""
LONGEST_TOLD = 255
"""Characters of a path or of base64 that a message has at most."""


class BrokenImageError(Exception):
    """An image cannot be read; the message has its number or path."""


def image_pixels(raw: bytes, sizes: ImageSizes, name: str, *, purpose: str) -> Pixels:
    """Return the pixels of an image, [3, height, width] uint8: upright, in RGB, resized by cubic interpolation.

    Args:
        raw: Content of the image's file.
        sizes: Rule of its size.
        name: Name of the image in messages.
        purpose: Option that needs Pillow, for the message where it is not installed.

    Raises:
        BrokenImageError: No image can be read, or it is too long and narrow.
    """
    pil = import_extra("PIL.Image", extra="images", purpose=purpose)
    ops = import_extra("PIL.ImageOps", extra="images", purpose=purpose)
    try:
        with pil.open(io.BytesIO(raw)) as opened:
            whole = ops.exif_transpose(opened).convert("RGB")
    # of a damaged file Pillow's formats raise whatever their parsers do, RuntimeError and struct.error among them
    except Exception as error:
        raise BrokenImageError(f"{name} is broken: {' '.join(str(error).split())}") from error
    try:
        height, width = sizes.resized(whole.height, whole.width)
    except ValueError as error:
        raise BrokenImageError(f"{name} is too long and narrow: {error}") from error
    resized = whole.resize((width, height), pil.Resampling.BICUBIC)
    pixels = np.asarray(resized, dtype=np.uint8).transpose(2, 0, 1)
    assert pixels.shape == (CHANNELS, height, width), "it is RGB"
    return pixels


def read_image(value: Any, folder: Path, sizes: ImageSizes, *, purpose: str) -> Pixels:
    """Return the pixels of an image that a row or a message names.

    Args:
        value: Path, relative to ``folder``; base64 of a file; or ``{path}`` or ``{bytes}`` with one of these.
        folder: Folder of the file that names it.
        sizes: Rule of its size.
        purpose: Option that reads images, for messages.

    Raises:
        BrokenImageError: There is no such file, or it is no image.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if not isinstance(value, str):
        raise BrokenImageError(f"{value!r:.60} is no path and no base64")
    # a name that is no file may be base64: no path is as long as an image
    is_file = len(value) < LONGEST_PATH and _is_file(folder / value)
    try:
        raw = (folder / value).read_bytes() if is_file else base64.b64decode(value, validate=True)
    except (OSError, ValueError) as error:
        fact = f"{_told(value)} is no file in {str(folder)!r}, and no base64"
        raise BrokenImageError(fact) from error
    return image_pixels(raw, sizes, f"image {_told(value)}", purpose=purpose)


def _told(value: str) -> str:
    """Return a path for a message whole, and the begin of base64."""
    return repr(value) if len(value) <= LONGEST_TOLD else f"{value[:LONGEST_TOLD]!r}..."


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    # base64 of a small image may be longer than a file's name can be
    except (OSError, ValueError):
        return False


def prompt_images(
    prompts: Sequence[str], paths: Sequence[str], sizes: ImageSizes, *, purpose: str
) -> list[list[Pixels]]:
    """Return the pixels of each prompt's images; none at all where no file is given.

    Args:
        prompts: Texts, whose marks stand for the images in order.
        paths: Files of the images of all prompts.
        sizes: Rule of their sizes.
        purpose: Option that reads images, for messages.

    Raises:
        BrokenImageError: There is another number of marks, no such file, or it is no image.
    """
    marks = [text.count(MARK) for text in prompts]
    if sum(marks) != len(paths):
        raise BrokenImageError(f"{len(paths)} images have {sum(marks)} marks {MARK}")
    left = iter(paths)
    found = [
        [read_image(path, Path(), sizes, purpose=purpose) for path in islice(left, count)]
        for count in marks
    ]
    return found if paths else []


def held_image(pixels: Pixels, sizes: ImageSizes) -> Image:
    """Return the image of pixels that are at hand."""
    return Image(partial(np.asarray, pixels), sizes.grid(*pixels.shape[1:]))


def with_patches(
    tokens: Sequence[int], token_id: int, images: Sequence[Pixels], sizes: ImageSizes
) -> list[int]:
    """Return tokens in which each mark, ``token_id``, stands as often as its image has patches.

    Args:
        tokens: Tokens of a text.
        token_id: Token of a mark.
        images: Images of its marks, in order; marks behind the last one have the most patches.
        sizes: Rule of their sizes.
    """
    counts = chain(
        (held_image(image, sizes).num_patches for image in images), repeat(sizes.num_patches)
    )
    return [
        each for token in tokens for each in [token] * (next(counts) if token == token_id else 1)
    ]


def patch_places(tokens: Ints, token_id: int, images: Sequence[Pixels], sizes: ImageSizes) -> Ints:
    """Return the feature of each token of a text with ``images``, [N] int64, as `Row.image_places`."""
    places = np.full(len(tokens), TEXT, dtype=np.int64)
    places[tokens == token_id] = np.concatenate(
        [
            at * sizes.num_patches + np.arange(held_image(image, sizes).num_patches)
            for at, image in enumerate(images)
        ]
        or [places[:0]]
    )
    return places

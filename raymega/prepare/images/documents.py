"""Tokenizes rows with images: the tokens of a document, the byte beside each, and the pixels of its images."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raymega.config.vision.section import CHANNELS
from raymega.config.vision.sizes import ImageSizes
from raymega.data.arrow import MOST_IMAGE_BYTES
from raymega.data.format import CONTEXT, LAST_ANSWER, ImageMeta
from raymega.data.images.files import BrokenImageError, held_image, image_pixels
from raymega.data.images.stored import GRID_BYTES, image_bytes
from raymega.data.rows import Pixels
from raymega.prepare.labels.labelled import Labelled

Encode = Callable[[str], npt.NDArray[np.unsignedinteger]]


def image_document(
    text: str, encode: Encode, images: ImageMeta, *, bos_id: int, eod_id: int
) -> Labelled:
    """Return the document of a row: each mark becomes the tokens of its image's patches, which are no labels.

    Args:
        text: Text of the row, `image_row_text`.
        encode: Function from text to ids, marks included, without tokens around it.
        images: Size of images, and their token.
        bos_id: Id of the token that begins a document; -1 for none.
        eod_id: Id of the token that ends a document.

    Raises:
        BrokenImageError: An image is broken; the message has its number.
    """
    row: dict[str, Any] = json.loads(text)
    prompt, answer = (encode(row[part]).astype(np.int64) for part in ("prompt", "text"))
    begin = [bos_id] if bos_id >= 0 else []
    ids = np.concatenate([begin, prompt, answer, [eod_id]]).astype(np.int64)
    targets = np.full(len(ids), LAST_ANSWER, dtype=np.uint8)
    targets[: len(begin) + len(prompt)] = CONTEXT
    is_image = ids == images.token_id
    targets[is_image] = CONTEXT
    pixels = [*_pixels(row["images"], images.sizes)]
    if np.count_nonzero(is_image) != len(pixels):
        raise BrokenImageError(
            f"{len(pixels)} images have {np.count_nonzero(is_image)} tokens of their mark"
        )
    # each mark as often as its image has patches
    counts = np.ones_like(ids)
    counts[is_image] = [held_image(each, images.sizes).num_patches for each in pixels]
    starts = (np.cumsum(counts) - counts)[is_image]
    stored = (image_bytes(each, images.sizes) for each in pixels)
    return Labelled(
        ids=np.repeat(ids, counts),
        targets=np.repeat(targets, counts),
        images=tuple(zip(starts.tolist(), stored, strict=True)),
        num_text_bytes=len((row["prompt"] + row["text"]).encode()),
    )


def _pixels(coded: Sequence[str], sizes: ImageSizes) -> Iterator[Pixels]:
    """Yield the pixels of a row's images.

    Raises:
        BrokenImageError: One is broken, or they are more than a row holds.
    """
    # of one size they are known before any is decoded
    num_bytes = len(coded) * CHANNELS * sizes.image_size**2
    _check_bytes(num_bytes, len(coded))
    for at, raw in enumerate(coded):
        found = image_pixels(base64.b64decode(raw), sizes, f"image {at}", purpose="--format images")
        if not sizes.image_size:
            num_bytes += GRID_BYTES + found.nbytes
            _check_bytes(num_bytes, at + 1)
        yield found


def _check_bytes(num_bytes: int, count: int) -> None:
    if num_bytes > MOST_IMAGE_BYTES:
        raise BrokenImageError(
            f"its {count} images are {num_bytes:,} bytes of pixels, and a row holds {MOST_IMAGE_BYTES:,}"
        )

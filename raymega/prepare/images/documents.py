"""Tokenizes rows with images: the tokens of a document, the byte beside each, and the pixels of its images."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from raymega.config.vision.section import CHANNELS
from raymega.data.arrow import MOST_IMAGE_BYTES
from raymega.data.format import CONTEXT, LAST_ANSWER, ImageMeta
from raymega.data.images.files import BrokenImageError, image_pixels
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
    # each mark as often as an image has patches
    is_image = ids == images.token_id
    targets[is_image] = CONTEXT
    counts = np.where(is_image, images.num_patches, 1)
    starts = (np.cumsum(counts) - counts)[is_image]
    # before any is decoded
    num_bytes = len(row["images"]) * CHANNELS * images.size**2
    if num_bytes > MOST_IMAGE_BYTES:
        raise BrokenImageError(
            f"its {len(row['images'])} images are {num_bytes:,} bytes of pixels, and a row holds {MOST_IMAGE_BYTES:,}"
        )
    pixels = [
        image_pixels(
            base64.b64decode(raw), images.size, f"image {at}", purpose="--format images"
        ).tobytes()
        for at, raw in enumerate(row["images"])
    ]
    if len(starts) != len(pixels):
        raise BrokenImageError(f"{len(pixels)} images have {len(starts)} tokens of their mark")
    return Labelled(
        ids=np.repeat(ids, counts),
        targets=np.repeat(targets, counts),
        images=tuple(zip(starts.tolist(), pixels, strict=True)),
        num_text_bytes=len((row["prompt"] + row["text"]).encode()),
    )

"""Tokenizes rows with images: the tokens of a document, the byte beside each, and the pixels of its images."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from raymega.config.vision.section import CHANNELS
from raymega.data.format import CONTEXT, LAST_ANSWER, ImageMeta
from raymega.extras import import_extra
from raymega.prepare.labels.labelled import Labelled


class BrokenImageError(Exception):
    """An image of a row cannot be read; the message has its number in the row."""


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
    pixels = [_pixels(raw, at, images.size) for at, raw in enumerate(row["images"])]
    if len(starts) != len(pixels):
        raise BrokenImageError(f"{len(pixels)} images have {len(starts)} tokens of their mark")
    return Labelled(
        ids=np.repeat(ids, counts),
        targets=np.repeat(targets, counts),
        images=tuple(zip(starts.tolist(), pixels, strict=True)),
        num_text_bytes=len((row["prompt"] + row["text"]).encode()),
    )


def _pixels(coded: str, at: int, size: int) -> bytes:
    """Return the pixels of an image as [3, size, size] uint8: upright, in RGB, resized by cubic interpolation."""
    pil = import_extra("PIL.Image", extra="images", purpose="--format images")
    ops = import_extra("PIL.ImageOps", extra="images", purpose="--format images")
    try:
        with pil.open(io.BytesIO(base64.b64decode(coded))) as opened:
            whole = ops.exif_transpose(opened).convert("RGB")
        resized = whole.resize((size, size), pil.Resampling.BICUBIC)
    # of a damaged file Pillow's formats raise whatever their parsers do, RuntimeError and struct.error among them
    except Exception as error:
        raise BrokenImageError(f"image {at} is broken: {' '.join(str(error).split())}") from error
    pixels = np.asarray(resized, dtype=np.uint8).transpose(2, 0, 1)
    assert pixels.shape == (CHANNELS, size, size), "it is RGB"
    return pixels.tobytes()

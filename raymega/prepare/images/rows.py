"""Rows with images: what they must have, and their text for all that follows.

A row's text is its content as JSON, so that readers, held-out splits and origins treat it as any document;
`documents.py` tokenizes it and makes the pixels.

    images    {"text": "... <image> ...", "images": [...], "prompt": "... <image> ..."}

An image is its file's bytes, {"bytes": ...} as of Hugging Face datasets, or base64 in JSON. The prompt is optional, and
no label. The marks of prompt and text, in this order, stand for the images.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from raymega.data.images.files import MARK

IMAGES_FORMAT = "images"
IMAGES, PROMPT = "images", "prompt"
"""Keys of a row beside its text."""
PATCH_TOKENS = (MARK, "<|image_pad|>")
"""Tokens that stand for a patch of an image: LLaVA's, and Qwen2-VL's."""


def image_row_text(row: Mapping[str, Any], key: str) -> tuple[str, str]:
    """Return the text of a row and, if it is no row with images, the reason.

    Args:
        row: Row of a file, with the key of its text.
        key: Key of the text.
    """
    try:
        texts = {"text": _string(row, key), "prompt": _string(row, PROMPT)}
        images = [_bytes(value, at) for at, value in enumerate(row.get(IMAGES) or ())]
    except ValueError as error:
        return "", str(error)
    # a text that spells the mark by chance cannot be told from one with an image
    marks = sum(text.count(MARK) for text in texts.values())
    if marks != len(images):
        return "", f"it has {len(images)} images and {marks} marks {MARK}"
    coded = [base64.b64encode(image).decode() for image in images]
    return json.dumps({**texts, "images": coded}, ensure_ascii=False), ""


def _string(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None and name == PROMPT:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"its {name!r} is a {type(value).__name__}, not a string")
    return value


def _bytes(value: Any, at: int) -> bytes:
    """Return the bytes of an image's file.

    Raises:
        ValueError: The value holds none; the message has its number.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes")
    if isinstance(value, bytes):
        return value
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise ValueError(f"image {at} is no base64 ({error})") from error
    raise ValueError(f"image {at} is a {type(value).__name__}, not the bytes of a file")

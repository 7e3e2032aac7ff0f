"""Images of a prepared dataset: their pixels lie in the shards, beside the first token of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from raymega.config.vision.section import CHANNELS
from raymega.data.format import ImageMeta, shard_fault
from raymega.data.rows import TEXT, Image, Ints, Pixels
from raymega.errors import DataError

Found = Sequence[tuple[int, bytes | memoryview]]
"""First tokens of images in a stream, and the pixels of each."""


class HeldImages(NamedTuple):
    """Images of some tokens of a stream.

    Attributes:
        images: Images that have a patch among them, in order.
        places: Feature of each token, [N] int64, as `Row.image_places`.
        num_patches: Features of an image.
    """

    images: tuple[Image, ...]
    places: Ints
    num_patches: int

    def after(self, count: int) -> Ints:
        """Return the places where ``count`` images of the row come before these."""
        return np.where(self.places == TEXT, TEXT, self.places + count * self.num_patches)


class StoredImages:
    """Images of a split by their tokens' places in its stream."""

    def __init__(self, read: Callable[[int, int, int], Found], meta: ImageMeta) -> None:
        """Take the function that finds the images which begin among tokens [start - before, stop)."""
        self._read, self._meta = read, meta

    def held(self, start: int, stop: int) -> HeldImages:
        """Return the images of tokens [start, stop); the first one may have begun before them."""
        size = self._meta.num_patches
        places, images = np.full(stop - start, TEXT, dtype=np.int64), list[Image]()
        # an image that began up to P - 1 tokens earlier still has patches here
        for first, raw in self._read(start, stop, size - 1):
            here = np.arange(max(first, start), min(first + size, stop))
            places[here - start] = len(images) * size + here - first
            images.append(partial(_pixels, raw, self._meta.size))
        return HeldImages(tuple(images), places, size)


def _pixels(raw: bytes | memoryview, size: int) -> Pixels:
    if len(raw) != CHANNELS * size**2:
        fact = f"an image of a shard has {len(raw)} bytes"
        raise DataError(shard_fault(fact, f"one of {size} pixels has {CHANNELS * size**2}"))
    return np.frombuffer(raw, dtype=np.uint8).reshape(CHANNELS, size, size)

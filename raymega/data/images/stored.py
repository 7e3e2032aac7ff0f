"""Images of a prepared dataset: their pixels lie in the shards, beside the first token of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from raymega.config.vision.section import CHANNELS
from raymega.config.vision.sizes import ImageSizes
from raymega.data.format import ImageMeta, shard_fault
from raymega.data.rows import TEXT, Image, Ints, Pixels
from raymega.errors import DataError

Found = Sequence[tuple[int, bytes | memoryview]]
"""First tokens of images in a stream, and what a shard holds of each."""
GRID = np.dtype("<u4")
"""Type of the rows and columns of tokens before an image's pixels."""
GRID_BYTES = 2 * GRID.itemsize


class HeldImages(NamedTuple):
    """Images of some tokens of a stream.

    Attributes:
        images: Images that have a patch among them, in order.
        places: Feature of each token, [N] int64, as `Row.image_places`.
        num_patches: P, by which ``places`` counts images.
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
        most, sizes = self._meta.num_patches, self._meta.sizes
        places, images = np.full(stop - start, TEXT, dtype=np.int64), list[Image]()
        # an image that began up to P - 1 tokens earlier still has patches here, unless it is smaller
        for first, raw in self._read(start, stop, most - 1):
            image = stored_image(raw, sizes)
            here = np.arange(max(first, start), min(first + image.num_patches, stop))
            if len(here):
                places[here - start] = len(images) * most + here - first
                images.append(image)
        return HeldImages(tuple(images), places, most)


def image_bytes(pixels: Pixels, sizes: ImageSizes) -> bytes:
    """Return what a shard holds of an image: its pixels, behind its grid where images have several sizes."""
    grid = () if sizes.image_size else sizes.grid(*pixels.shape[1:])
    return np.array(grid, dtype=GRID).tobytes() + pixels.tobytes()


def stored_image(raw: bytes | memoryview, sizes: ImageSizes) -> Image:
    """Return the image of :func:`image_bytes`, whose pixels are looked at when they are asked for."""
    if sizes.image_size:
        edge = sizes.image_size
        return Image(partial(_pixels, raw, edge, edge), sizes.grid(edge, edge))
    rows, columns = np.frombuffer(raw[:GRID_BYTES], dtype=GRID).tolist()
    height, width = rows * sizes.square, columns * sizes.square
    return Image(partial(_pixels, raw[GRID_BYTES:], height, width), (rows, columns))


def _pixels(raw: bytes | memoryview, height: int, width: int) -> Pixels:
    count = CHANNELS * height * width
    if len(raw) != count:
        fact = f"an image of a shard has {len(raw)} bytes"
        raise DataError(shard_fault(fact, f"one of {width} x {height} pixels has {count}"))
    return np.frombuffer(raw, dtype=np.uint8).reshape(CHANNELS, height, width)

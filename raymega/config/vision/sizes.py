"""Sizes to which images are resized: all to one square, or each to about its own shape and area.

The second is Qwen2-VL's ``smart_resize`` (Wang et al. 2024, arXiv:2409.12191, and transformers' Qwen2VLImageProcessor).
"""

from __future__ import annotations

from math import ceil, floor, sqrt
from typing import NamedTuple

MOST_RATIO = 200
"""Largest ratio of an image's longer edge to its shorter one."""
Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""


class ImageSizes(NamedTuple):
    """Rule by which images are resized.

    Attributes:
        square: Height and width in pixels of what becomes a token: a patch, or a square of those that are merged.
        image_size: Height and width of all images; 0 where each keeps about its shape.
        min_pixels: Least area of an image; at least that of a token.
        max_pixels: Largest area of an image.
    """

    square: int
    image_size: int = 0
    min_pixels: int = 0
    max_pixels: int = 0

    @property
    def num_patches(self) -> int:
        """P, the most tokens of an image: those of all, where they have one size."""
        square = max(1, self.square)
        return (self.image_size // square) ** 2 if self.image_size else self.max_pixels // square**2

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of an image after it is resized.

        Raises:
            ValueError: The image is too long and narrow; the message has its size.
        """
        if self.image_size:
            return self.image_size, self.image_size
        square, told = self.square, f"it has {width} x {height} pixels, and "
        if max(height, width) > MOST_RATIO * min(height, width):
            raise ValueError(f"{told}its edges differ by a factor of {MOST_RATIO} at most")
        # whole tokens, then an area within the bounds in about the same shape
        rows, columns = round(height / square), round(width / square)
        least = max(self.min_pixels, square**2)
        if rows * columns * square**2 > self.max_pixels:
            # in the order of their operations, whose roundings decide at a border
            beta = sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, floor(edge / beta / square)) for edge in (height, width))
        elif rows * columns * square**2 < least:
            beta = sqrt(least / (height * width))
            rows, columns = (ceil(edge * beta / square) for edge in (height, width))
        # an edge is a token at least, so a thin image may be larger than it should
        if rows * columns > self.num_patches:
            raise ValueError(
                f"{told}would be {rows} x {columns} tokens, of which an image has {self.num_patches} at most"
            )
        return rows * square, columns * square

    def grid(self, height: int, width: int) -> Grid:
        """Return the rows and columns of tokens of a resized image."""
        return height // self.square, width // self.square


NO_IMAGES = ImageSizes(0)

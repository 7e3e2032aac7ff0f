"""Random changes of training images: RandomResizedCrop, RandomHorizontalFlip and ColorJitter as torchvision defines them.

torchvision's transforms of PIL images are calls of Pillow, which are made here too; random numbers are drawn from a
generator that the caller keys, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any

import numpy as np

from raymega.config.vision.augment import AugmentSection
from raymega.data.rows import Pixels
from raymega.extras import import_extra

TRIES = 10
"""Parts that RandomResizedCrop draws before it takes the middle."""
PURPOSE = "data.augment"
HUES = 255
"""Values of Pillow's hue in one turn of the colour wheel, as torchvision counts them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Part of an image in pixels."""

    top: int
    left: int
    height: int
    width: int


def augmented(pixels: Pixels, section: AugmentSection, random: np.random.Generator) -> Pixels:
    """Return an image [3, height, width] uint8 with random changes, of the same size."""
    pil = import_extra("PIL.Image", extra="images", purpose=PURPOSE)
    image = pil.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    if section.crop_scale:
        box = crop_box(image.height, image.width, section, random)
        edges = (box.left, box.top, box.left + box.width, box.top + box.height)
        image = image.crop(edges).resize(image.size, pil.Resampling.BICUBIC)
    # drawn at probability 0, too: below it lies no number
    if random.random() < section.horizontal_flip:
        image = image.transpose(pil.Transpose.FLIP_LEFT_RIGHT)
    image = _jittered(image, section, random)
    return np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)


def crop_box(height: int, width: int, section: AugmentSection, random: np.random.Generator) -> Box:
    """Return the part of an image that RandomResizedCrop keeps.

    Its share of the area is uniform in ``crop_scale``, and the logarithm of its width over its height in that of
    ``crop_ratio``. If none fits in TRIES, it is the largest part in the middle within ``crop_ratio``.
    """
    smallest, largest = section.crop_scale
    least, most = section.crop_ratio
    for _ in range(TRIES):
        area = height * width * random.uniform(smallest, largest)
        ratio = exp(random.uniform(log(least), log(most)))
        own = round(sqrt(area / ratio)), round(sqrt(area * ratio))
        if 0 < own[0] <= height and 0 < own[1] <= width:
            top = int(random.integers(height - own[0] + 1))
            left = int(random.integers(width - own[1] + 1))
            return Box(top=top, left=left, height=own[0], width=own[1])
    # the middle: cut at the sides that are too long
    own = height, width
    if width / height < least:
        own = round(width / least), width
    elif width / height > most:
        own = height, round(height * most)
    return Box(top=(height - own[0]) // 2, left=(width - own[1]) // 2, height=own[0], width=own[1])


def _jittered(image: Any, section: AugmentSection, random: np.random.Generator) -> Any:
    """Return the image with the changes of ColorJitter, in random order."""
    enhance = import_extra("PIL.ImageEnhance", extra="images", purpose=PURPOSE)
    kinds = (
        (enhance.Brightness, section.brightness),
        (enhance.Contrast, section.contrast),
        (enhance.Color, section.saturation),
    )
    # all numbers are drawn, so that one field does not move the others'
    order = random.permutation(len(kinds) + 1)
    factors = [random.uniform(max(0.0, 1 - width), 1 + width) for _, width in kinds]
    shift = random.uniform(-section.hue, section.hue)
    for number in order:
        if number == len(kinds):
            image = _turned(image, shift) if section.hue else image
        elif kinds[number][1]:
            image = kinds[number][0](image).enhance(factors[number])
    return image


def _turned(image: Any, shift: float) -> Any:
    """Return the image with hues shifted by ``shift`` turns."""
    pil = import_extra("PIL.Image", extra="images", purpose=PURPOSE)
    hue, saturation, value = image.convert("HSV").split()
    # modulo 256, as bytes count
    moved = np.asarray(hue, dtype=np.uint8) + np.uint8(int(shift * HUES) % 256)
    return pil.merge("HSV", (pil.fromarray(moved), saturation, value)).convert("RGB")

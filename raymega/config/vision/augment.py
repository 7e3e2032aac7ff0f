"""The job file's data.augment section: random changes of images in training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raymega.config.fields import Fraction, NonNegativeFloat, PositiveFloat, Section

PAIR = Field(min_length=2, max_length=2)
Hue = Annotated[float, Field(ge=0, le=0.5)]


class AugmentSection(Section):
    """Random changes of a training sample's images, as torchvision's transforms of the same names make them.

    Numbers are keyed by run.seed, sample and image: the same on every layout and after a resume, others in each epoch.
    """

    crop_scale: Annotated[tuple[PositiveFloat, ...], Field(max_length=2)] = ()
    """RandomResizedCrop: least and largest share of the image's area that is cut out and resized to the whole; empty
    cuts out nothing."""
    crop_ratio: Annotated[tuple[PositiveFloat, ...], PAIR] = (0.75, 4 / 3)
    """RandomResizedCrop: least and largest width of the part over its height."""
    horizontal_flip: Fraction = 0.0
    """RandomHorizontalFlip: probability that left and right change places. Texts that name sides become wrong."""
    brightness: NonNegativeFloat = 0.0
    """ColorJitter: the factor of all colours is drawn from 1 - brightness, at least 0, to 1 + brightness."""
    contrast: NonNegativeFloat = 0.0
    """ColorJitter: likewise the factor of the difference from the image's mean grey."""
    saturation: NonNegativeFloat = 0.0
    """ColorJitter: likewise the factor of the difference from the pixel's own grey."""
    hue: Hue = 0.0
    """ColorJitter: the shift of hues is drawn from -hue to hue, in turns of the colour wheel."""

    @property
    def is_on(self) -> bool:
        """True where images are changed."""
        colours = self.brightness + self.contrast + self.saturation + self.hue
        return bool(self.crop_scale) or self.horizontal_flip + colours > 0

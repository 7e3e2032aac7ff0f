"""Rows with images: images that a job with built-in tokens draws, and the labels that do not count.

All is drawn by keys of seed, split, sample and document, so every layout and every attempt has the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate, pairwise
from math import isqrt

import numpy as np

from raymega.config.data import is_synthetic
from raymega.config.schema import Job
from raymega.config.vision.augment import AugmentSection
from raymega.config.vision.section import CHANNELS, VisionSection
from raymega.config.vision.sizes import Grid
from raymega.data.images.augment import PURPOSE, augmented
from raymega.data.rows import TEXT, Image, Ints, Pixels, Row
from raymega.extras import import_extra

MOST_DRAWN = 3
"""Most images of a document of built-in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRows:
    """Rule of the rows of a model that reads images.

    Attributes:
        vision: Section of the model.
        name: Seed of the run and name of the split, which begin all keys.
        is_drawn: Whether images are drawn into rows, as for built-in tokens.
        augment: Random changes of images; those of a validation split are off.
    """

    vision: VisionSection
    name: str
    is_drawn: bool
    augment: AugmentSection = field(default_factory=AugmentSection)

    def row(self, row: Row, sample: int) -> Row:
        """Return the row of a sample, with drawn images if it has none of its own; labels of images do not count."""
        if row.image_places is None:
            row = self._drawn(row, sample) if self.is_drawn else without_images(row)
        row = replace(row, images=self.changed(row.images, sample))
        return replace(row, mask=row.mask & (row.labels != self.vision.image_token_id))

    def changed(self, images: Sequence[Image], sample: int) -> tuple[Image, ...]:
        """Return a sample's own images with the changes of ``augment``, which are made when a loader asks."""
        if not self.augment.is_on:
            return tuple(images)
        return tuple(
            image._replace(make=partial(self._augmented, image, sample, at))
            for at, image in enumerate(images)
        )

    def _drawn(self, row: Row, sample: int) -> Row:
        """Return the row with images in the places of text; those of a document lie in its real tokens."""
        # a window is a view of a shard, which other rows read too
        tokens, labels = row.tokens.copy(), row.labels.copy()
        places, images = np.full(len(tokens), TEXT, dtype=np.int64), list[Image]()
        most, token = self.vision.num_patches, self.vision.image_token_id
        for number, (begin, end) in enumerate(pairwise(accumulate(row.documents, initial=0))):
            for at, grid in self._begins(sample, number, end - begin):
                size = grid[0] * grid[1]
                here = slice(begin + at, begin + at + size)
                tokens[here] = token
                # the label of a token is the next one of its document
                labels[max(begin, here.start - 1) : here.stop - 1] = token
                places[here] = len(images) * most + np.arange(size)
                images.append(Image(partial(self._pixels, sample, len(images), grid), grid))
        return replace(row, tokens=tokens, labels=labels, image_places=places, images=tuple(images))

    def _begins(self, sample: int, document: int, length: int) -> Iterator[tuple[int, Grid]]:
        """Yield the first tokens of a document's images, which do not overlap, and the grids of these."""
        random, grids, left = self._random(sample, "places", document), list[Grid](), length
        # text before, between and behind the images: none to all of what is left
        for grid in self._grids(sample, document, int(random.integers(MOST_DRAWN + 1))):
            if grid[0] * grid[1] <= left:
                grids.append(grid)
                left -= grid[0] * grid[1]
        before = accumulate((rows * columns for rows, columns in grids), initial=0)
        gaps = np.sort(random.integers(left + 1, size=len(grids)))
        yield from ((int(gap) + n, grid) for gap, n, grid in zip(gaps, before, grids, strict=False))

    def _grids(self, sample: int, document: int, count: int) -> Iterator[Grid]:
        """Yield the rows and columns of tokens of ``count`` images."""
        most = isqrt(self.vision.num_patches)
        if not self.vision.max_pixels:
            yield from [(most, most)] * count
            return
        # up to twice as long as a square, and of any smaller size
        random = self._random(sample, "grids", document)
        for _ in range(count):
            rows = int(random.integers(min(2 * most, self.vision.num_patches))) + 1
            columns = int(random.integers(min(2 * most, self.vision.num_patches // rows))) + 1
            yield rows, columns

    def _pixels(self, sample: int, image: int, grid: Grid) -> Pixels:
        # made when a loader asks: only the rank whose image it is does
        shape = (CHANNELS, *(edge * self.vision.sizes.square for edge in grid))
        random = self._random(sample, "pixels", image)
        return random.integers(256, size=shape, dtype=np.uint8)

    def _augmented(self, image: Image, sample: int, number: int) -> Pixels:
        return augmented(image(), self.augment, self._random(sample, "augment", number))

    def _random(self, sample: int, purpose: str, number: int) -> np.random.Generator:
        key = f"{self.name}/{purpose}/{sample}/{number}".encode()
        number = int.from_bytes(blake2b(key, digest_size=16).digest(), "little")
        return np.random.Generator(np.random.Philox(key=number))


def without_images(row: Row) -> Row:
    """Return a row of text alone as a row with images, which has none."""
    return replace(row, image_places=no_places(len(row.tokens)))


def no_places(seq_len: int) -> Ints:
    """Return the features of tokens that are all text, [S]."""
    return np.full(seq_len, TEXT, dtype=np.int64)


def image_rows_of(job: Job, split: str) -> ImageRows | None:
    """Return the rule of a job's split; None where the model reads no images."""
    if not job.model.vision.is_on:
        return None
    # validation sets may be built-in tokens where the training data are not
    named = [each.path for each in job.data.validation] if split == "valid" else []
    paths = named or [*job.data.datasets]
    augment = job.data.augment if split == "train" else AugmentSection()
    if augment.is_on:
        import_extra("PIL.Image", extra="images", purpose=PURPOSE)
    return ImageRows(
        vision=job.model.vision,
        name=f"{job.run.seed}/images/{split}",
        is_drawn=all(map(is_synthetic, paths)),
        augment=augment,
    )

"""Images of a micro-batch: the share of a rank of the first stage, made on the loader's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raymega.config.vision.section import CHANNELS, VisionSection
from raymega.data.images.image_rows import no_places
from raymega.data.rows import TEXT, Ints, Row
from raymega.parallel.context_parallel.images import Images, image_axes


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShare:
    """A rank's share of a micro-batch's images.

    Attributes:
        vision: Section of the model.
        index: Place of the rank among those that share the images: its cp coordinate times tp, plus that of tp.
        size: Number of these ranks.
    """

    vision: VisionSection
    index: int
    size: int

    def images(self, rows: Sequence[Row], take: Callable[[Sequence[Ints]], torch.Tensor]) -> Images:
        """Return the images of rows, by the tokens that ``take`` leaves a rank.

        Every rank has one or more, so that each backward has the same gradients in the same order.
        """
        every, places = [image for row in rows for image in row.images], list[Ints]()
        # images of all rows are numbered end to end
        first = 0
        for row in rows:
            # an empty slot has neither
            own = no_places(len(row.tokens)) if row.image_places is None else row.image_places
            places.append(np.where(own == TEXT, TEXT, own + first * self.vision.num_patches))
            first += len(row.images)
        # an equal number for each rank, as features are gathered in blocks of one size
        count = max(1, -(-len(every) // self.size))
        edge = self.vision.image_size
        pixels = np.zeros((count, CHANNELS, edge, edge), dtype=np.uint8)
        for at, image in enumerate(every[self.index * count : (self.index + 1) * count]):
            pixels[at] = image()
        return Images(torch.from_numpy(pixels), take(places))


def row_axes(
    rows: Sequence[Row], take: Callable[[Sequence[Ints]], torch.Tensor], edge: int
) -> torch.Tensor:
    """Return the positions of M-RoPE of rows, [3, B, S/cp], by the tokens that ``take`` leaves a rank."""
    axes = []
    for row in rows:
        # an empty slot has no places
        places = no_places(len(row.tokens)) if row.image_places is None else row.image_places
        axes.append(image_axes(torch.from_numpy(places), row.documents, edge).numpy())
    return torch.stack([take([each[axis] for each in axes]) for axis in range(3)])

"""Images of a micro-batch: the share of a rank of the first stage, made on the loader's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from raymega.config.vision.section import CHANNELS, VisionSection
from raymega.data.images.image_rows import no_places
from raymega.data.rows import TEXT, Image, Ints, Pixels, Row
from raymega.parallel.context_parallel.images import Images, image_axes


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShare:
    """A rank's share of a micro-batch's images.

    Attributes:
        vision: Section of the model.
        index: Place of the rank among those that share the images: its cp coordinate times tp, plus that of tp.
        size: Number of these ranks.
        dp: Number of dp ranks that share images out; 1 where each reads its own.
        dp_rank: Place of the rank among these.
    """

    vision: VisionSection
    index: int
    size: int
    dp: int = 1
    dp_rank: int = 0

    def images(
        self,
        rows: Sequence[Row],
        take: Callable[[Sequence[Ints]], torch.Tensor],
        others: Callable[[int], Sequence[Image]] = lambda _dp_rank: (),
    ) -> Images:
        """Return the images of rows, by the tokens that ``take`` leaves a rank.

        Every rank has one or more, so that each backward has the same gradients in the same order.

        Args:
            rows: Rows of the micro-batch.
            take: Function of arrays [S] to this rank's part of them.
            others: Function of a dp rank to the images of its rows, where these share them out.
        """
        mine = [image for row in rows for image in row.images]
        by_rank = [mine if rank == self.dp_rank else others(rank) for rank in range(self.dp)]
        every = [image for images in by_rank for image in images]
        # an equal number for each rank, of as many tokens as the largest has: features are gathered in blocks of one size
        count = max(1, -(-len(every) // (self.size * self.dp)))
        size, most = canvas_size(every, self.vision), self.vision.num_patches
        # images of all rows are numbered end to end
        places, first = list[Ints](), 0
        for row in rows:
            # an empty slot has neither
            own = no_places(len(row.tokens)) if row.image_places is None else row.image_places
            places.append(np.where(own == TEXT, TEXT, (own // most + first) * size + own % most))
            first += len(row.images)
        begin = (self.dp_rank * self.size + self.index) * count
        pixels, grids = canvas(every[begin : begin + count], count, size, self.vision.sizes.square)
        found = Images(torch.from_numpy(pixels), torch.from_numpy(grids), take(places))
        if self.dp == 1:
            return found
        sent, received = self._routes(by_rank, count)
        return found._replace(sent=sent, received=received)

    def _routes(
        self, by_rank: Sequence[Sequence[Image]], count: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return how many images' features this dp rank sends to each other one, and receives from it.

        The dp ranks' towers read blocks of equal size of all images; tokens of a dp rank read a range of them.
        """
        # blocks that towers read, and ranges that tokens want, of the images of all dp ranks end to end
        size = count * self.size
        blocks = [range(rank * size, (rank + 1) * size) for rank in range(self.dp)]
        ends = [0, *accumulate(map(len, by_rank))]
        wanted = [range(*each) for each in pairwise(ends)]
        return (
            tuple(_common(blocks[self.dp_rank], each) for each in wanted),
            tuple(_common(each, wanted[self.dp_rank]) for each in blocks),
        )


def canvas_size(images: Sequence[Image], vision: VisionSection) -> int:
    """Return the tokens of the largest of images, one at least; where all images have one size, those of any."""
    if not vision.max_pixels:
        return vision.num_patches
    return max((image.num_patches for image in images), default=1)


def canvas(images: Sequence[Image], count: int, size: int, square: int) -> tuple[Pixels, Ints]:
    """Return images in squares, [count, size, 3, square, square], and their grids, [count, 2], as `Images` has them."""
    pixels = np.zeros((count, size, CHANNELS, square, square), dtype=np.uint8)
    # black ones have a token, as attention needs a key
    grids = np.ones((count, 2), dtype=np.int64)
    for at, image in enumerate(images):
        rows, columns = grids[at] = image.grid
        # a view of the image's squares, in its own order of dims
        into = pixels[at, : rows * columns].reshape(rows, columns, CHANNELS, square, square)
        into[...] = (
            image().reshape(CHANNELS, rows, square, columns, square).transpose(1, 3, 0, 2, 4)
        )
    return pixels, grids


def _common(a: range, b: range) -> int:
    return max(0, min(a.stop, b.stop) - max(a.start, b.start))


def row_axes(
    rows: Sequence[Row], take: Callable[[Sequence[Ints]], torch.Tensor], num_patches: int
) -> torch.Tensor:
    """Return the positions of M-RoPE of rows, [3, B, S/cp], by the tokens that ``take`` leaves a rank.

    Args:
        rows: Rows of the micro-batch.
        take: Function of arrays [S] to this rank's part of them.
        num_patches: P, by which places count images.
    """
    axes = []
    for row in rows:
        # an empty slot has no places
        places = no_places(len(row.tokens)) if row.image_places is None else row.image_places
        grids = torch.tensor([image.grid for image in row.images], dtype=torch.int64).view(-1, 2)
        found = image_axes(torch.from_numpy(places), row.documents, grids, num_patches)
        axes.append(found.numpy())
    return torch.stack([take([each[axis] for each in axes]) for axis in range(3)])

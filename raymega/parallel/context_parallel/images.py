"""Images of a micro-batch: the pixels of those that a rank's tower reads, and the tokens that all of them become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Images(NamedTuple):
    """Images of a micro-batch's rows, on a rank of the first stage.

    The images of all rows, row after row, are padded to an equal number for each rank of the stage's tp and cp. With
    parallel.balance_images those of the dp ranks come one rank after the other, and are padded for all ranks of the stage.

    Attributes:
        pixels: Images of this rank in squares, each a token, [N, P, 3, edge, edge] uint8, N >= 1; row after row of
            an image, and black behind its last one. Black images are padding. P is that of the largest image of all
            ranks.
        grids: Rows and columns of each, [N, 2] int64.
        places: Feature of each of this rank's tokens, [B, S/cp] int64: number of the image in the micro-batch times
            P, plus that of the square; -1 of a token of text.
        sent: Numbers of images whose features go to each dp rank, where these share the images out; else empty.
        received: Numbers of images whose features come from each dp rank.
    """

    pixels: Tensor
    grids: Tensor
    places: Tensor
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    @property
    def num_patches(self) -> int:
        """P, the features of an image, of which those behind its last square stand for nothing."""
        return self.pixels.shape[1]


def image_axes(places: Tensor, documents: Sequence[int], grids: Tensor, num_patches: int) -> Tensor:
    """Return the positions of a row's tokens in time, row and column for M-RoPE, [3, S] int64.

    Args:
        places: Feature of each token of the row, [S] int64, as :class:`Images` has them.
        documents: Lengths of the row's documents; positions begin anew with each.
        grids: Rows and columns of each of the row's images, [n, 2]; it may have none.
        num_patches: P, by which ``places`` counts images.
    """
    is_image = places >= 0
    patch = places.clamp(min=0) % num_patches
    # one more for a row of text alone
    rows, columns = pad(grids, (0, 0, 0, 1), value=1)[places.clamp(min=0) // num_patches].unbind(-1)
    # text moves on by one; an image by its longer edge, behind its last patch
    is_last = patch == rows * columns - 1
    step = torch.where(is_image, is_last * torch.maximum(rows, columns), torch.ones_like(places))
    before = step.cumsum(0) - step
    lengths = torch.tensor(documents)
    begin = (before[lengths.cumsum(0) - lengths]).repeat_interleave(lengths)
    time = before - begin
    return torch.stack(
        (time, time + patch // columns * is_image, time + patch % columns * is_image)
    )

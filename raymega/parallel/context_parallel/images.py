"""Images of a micro-batch: the pixels of those that a rank's tower reads, and the tokens that all of them become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Images(NamedTuple):
    """Images of a micro-batch's rows, on a rank of the first stage.

    The images of all rows, row after row, are padded to an equal number for each rank of the stage's tp and cp. With
    parallel.balance_images those of the dp ranks come one rank after the other, and are padded for all ranks of the stage.

    Attributes:
        pixels: Images of this rank, [N, 3, height, width] uint8, N >= 1; black ones are padding.
        places: Feature of each of this rank's tokens, [B, S/cp] int64: number of the image in the micro-batch times
            P, plus that of the patch; -1 of a token of text.
        sent: Numbers of images whose features go to each dp rank, where these share the images out; else empty.
        received: Numbers of images whose features come from each dp rank.
    """

    pixels: Tensor
    places: Tensor
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


def image_axes(places: Tensor, documents: Sequence[int], edge: int) -> Tensor:
    """Return the positions of a row's tokens in time, row and column for M-RoPE, [3, S] int64.

    Args:
        places: Feature of each token of the row, [S] int64, as :class:`Images` has them.
        documents: Lengths of the row's documents; positions begin anew with each.
        edge: Tokens along an edge of an image.
    """
    is_image = places >= 0
    patch = places.clamp(min=0) % edge**2
    # text moves on by one; an image by its edge, behind its last patch
    step = torch.where(is_image, (patch == edge**2 - 1) * edge, torch.ones_like(places))
    before = step.cumsum(0) - step
    lengths = torch.tensor(documents)
    begin = (before[lengths.cumsum(0) - lengths]).repeat_interleave(lengths)
    time = before - begin
    return torch.stack((time, time + patch // edge * is_image, time + patch % edge * is_image))

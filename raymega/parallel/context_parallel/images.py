"""Images of a micro-batch: the pixels of those that a rank's tower reads, and the tokens that all of them become."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Images(NamedTuple):
    """Images of a micro-batch's rows, on a rank of the first stage.

    The images of all rows, row after row, are padded to an equal number for each rank of the stage's tp and cp.

    Attributes:
        pixels: Images of this rank, [N, 3, height, width] uint8, N >= 1; black ones are padding.
        places: Feature of each of this rank's tokens, [B, S/cp] int64: number of the image in the micro-batch times
            P, plus that of the patch; -1 of a token of text.
    """

    pixels: Tensor
    places: Tensor

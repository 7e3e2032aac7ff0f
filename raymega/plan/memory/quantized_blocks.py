"""Blocks of 8-bit optimizer state: which elements of a tensor share a scale.

A block is BLOCK neighbours of a row of the whole tensor, of which the last one of a row may be
shorter. So blocks do not depend on how the tensor is cut; a rank may hold a part of one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from raymega.messages import Box
from raymega.plan.tensor_table import GlobalTensor

BLOCK = 256
"""Elements. Dettmers et al. 2021 use 2048; fewer cost 4 / BLOCK bytes an element and lose less."""


class ScaleBoxes(NamedTuple):
    """The scales of a box's elements, as boxes of the tensor of scales.

    Attributes:
        all: Of every block that has an element in the box.
        begun: Of those whose first element is in it; their number may be 0.
    """

    all: Box
    begun: Box


def scales_of(tensor: GlobalTensor) -> GlobalTensor:
    """The tensor of scales: rows as ``tensor`` has, a column a block."""
    *rows, columns = tensor.shape
    return replace(tensor, shape=(*rows, -(-columns // BLOCK)))


def scale_boxes(box: Box) -> ScaleBoxes:
    """Which scales belong to the elements of ``box``."""
    begin, size = box.offset[-1], box.shape[-1]
    first, begun, last = begin // BLOCK, -(-begin // BLOCK), -(-(begin + size) // BLOCK)
    return ScaleBoxes(_columns(box, first, last), _columns(box, begun, last))


def _columns(box: Box, first: int, last: int) -> Box:
    return Box(offset=(*box.offset[:-1], first), shape=(*box.shape[:-1], last - first))

"""Define the blocks of 8-bit optimizer state: elements of a tensor that share a scale.

A block is BLOCK neighbours of a row of the whole tensor; the last one of a row may be shorter.
Blocks do not depend on how the tensor is cut, and a rank may hold a part of one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from raymega.box import Box
from raymega.plan.layers.global_tensor import GlobalTensor

BLOCK = 256
"""Elements of a block. Dettmers et al. 2021 use 2048; fewer cost 4 / BLOCK bytes an element and
lose less."""


class ScaleBoxes(NamedTuple):
    """Scales of a box's elements, as boxes of the tensor of scales.

    Attributes:
        all: Box of the scales of every block that has an element in the box.
        begun: Box of the scales of blocks whose first element is in the box; their number may be 0.
    """

    all: Box
    begun: Box


def scales_of(tensor: GlobalTensor) -> GlobalTensor:
    """Return the tensor of scales: rows as ``tensor`` has, and a column a block."""
    *rows, columns = tensor.shape
    return replace(tensor, shape=(*rows, -(-columns // BLOCK)))


def scale_boxes(box: Box) -> ScaleBoxes:
    """Return the scales of the elements of ``box``."""
    begin, size = box.offset[-1], box.shape[-1]
    first, begun, last = begin // BLOCK, -(-begin // BLOCK), -(-(begin + size) // BLOCK)
    return ScaleBoxes(_columns(box, first, last), _columns(box, begun, last))


def _columns(box: Box, first: int, last: int) -> Box:
    return Box(offset=(*box.offset[:-1], first), shape=(*box.shape[:-1], last - first))

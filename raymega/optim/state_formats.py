"""Storage formats of optimizer state between steps: the masters' dtype, bfloat16, or 8 bits.

An update reads and writes values of the masters' dtype: ``open`` converts to them, ``close`` back.
`plan/memory/optimizer_state.py` chooses each tensor's format, `plan/memory/quantized_blocks.py` the
elements that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from raymega.box import Box
from raymega.parallel.core.buckets import Extent, Range, piece_boxes
from raymega.parallel.core.shard_spec import Piece
from raymega.parallel.data_parallel.quantized_scales import ScaleReducer
from raymega.parallel.data_parallel.state_tensors import TensorBlock, extent_blocks
from raymega.plan.memory.optimizer_state import CODES, SCALES, Format
from raymega.plan.memory.quantized_blocks import BLOCK, ScaleBoxes, scale_boxes, scales_of

SQUARES = frozenset({"adam.exp_avg_sq"})
"""Kinds of state that are never negative, and by whose root an update divides."""
NUM_EXPONENTS = 7
"""Number of powers of ten in Dettmers' dynamic codes, from 1 down to 10^-6."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePlacement:
    """Range of one parameter's elements in a bucket's owned part; masters have ``dtype``."""

    part: Range
    extent: Extent
    dtype: torch.dtype

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat zero for each element."""
        size, device = self.extent.last - self.extent.first, self.extent.param.device
        return torch.zeros(size, dtype=dtype, device=device)

    def blocks(self, kind: str, values: torch.Tensor) -> Iterator[TensorBlock]:
        """Yield the blocks of a checkpoint for flat ``values``."""
        yield from extent_blocks(kind, self.part, self.extent, values)


def make_state_storage(form: Format, kind: str, place: StatePlacement) -> StateStorage:
    """Return zero state in the format ``form``."""
    match form:
        case "master":
            return FloatState(kind, place, place.dtype)
        case "bfloat16":
            return FloatState(kind, place, torch.bfloat16)
        case "8bit":
            return Int8State(kind, place)


class FloatState:
    """State in a float dtype, rounded to nearest; in the masters' dtype it is updated in place."""

    def __init__(self, kind: str, place: StatePlacement, dtype: torch.dtype) -> None:
        self._kind, self._place, self._values = kind, place, place.zeros(dtype)

    @property
    def memory(self) -> torch.Tensor:
        return self._values

    def open(self) -> torch.Tensor:
        """Return the flat values in the masters' dtype."""
        return self._values.to(self._place.dtype)

    def measure(self, values: torch.Tensor, shared: ScaleReducer) -> None:
        """Do nothing: float state has no scales to share, see :class:`Int8State`."""

    def close(self, values: torch.Tensor, shared: ScaleReducer) -> None:  # noqa: ARG002
        """Store the values, rounded to the storage dtype."""
        if values is not self._values:
            self._values.copy_(values)

    def blocks(self) -> Iterator[TensorBlock]:
        """Yield the blocks of a checkpoint, which a load fills."""
        yield from self._place.blocks(self._kind, self._values)


class _Part(NamedTuple):
    """Box of a place's elements, with its offset in the flat values and its scales."""

    piece: Piece
    box: Box
    at: int
    scale_boxes: ScaleBoxes
    scales: torch.Tensor

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.at : self.at + self.box.num_elements].view(self.box.shape)

    def block_of_columns(self) -> torch.Tensor:
        """Return for each column of the box the index of its block among the part's scales."""
        first, size = self.box.offset[-1], self.box.shape[-1]
        columns = torch.arange(first, first + size, device=self.scales.device)
        return columns // BLOCK - self.scale_boxes.all.offset[-1]


class Int8State:
    """State in block-wise dynamic quantisation (Dettmers et al. 2021): 8-bit codes and block scales.

    A block's scale is its largest magnitude over all ranks that hold a part of it. So an update first
    measures all state, then reduces scales over ranks, then closes.
    """

    def __init__(self, kind: str, place: StatePlacement) -> None:
        self._kind, self._place = kind, place
        self._is_square = kind in SQUARES
        device = place.extent.param.device
        codes = dynamic_codes(is_signed=not self._is_square)
        self._table = codes.to(device, place.dtype)
        # Borders between codes: bucketize against them rounds to nearest.
        self._limits = (self._table[1:] + self._table[:-1]) / 2
        # Every element starts with the code of 0.
        self._codes = place.zeros(torch.uint8) + int((codes == 0).nonzero())
        self._parts = []
        for piece, box, at in piece_boxes(place.extent):
            boxes = scale_boxes(box)
            scales = torch.zeros(boxes.all.shape, dtype=place.dtype, device=device)
            self._parts.append(_Part(piece, box, at, boxes, scales))

    def open(self) -> torch.Tensor:
        values = self._table[self._codes.int()]
        for part in self._parts:
            part.of(values).mul_(part.scales.index_select(-1, part.block_of_columns()))
        return values

    def measure(self, values: torch.Tensor, shared: ScaleReducer) -> None:
        for part in self._parts:
            sizes, columns = part.of(values).abs(), part.block_of_columns()
            # largest magnitude of each block of columns
            largest = torch.zeros_like(part.scales)
            largest.scatter_reduce_(-1, columns.expand(sizes.shape), sizes, "amax")
            self._shared_scales(part, shared).copy_(largest)

    def close(self, values: torch.Tensor, shared: ScaleReducer) -> None:
        for part in self._parts:
            part.scales.copy_(self._shared_scales(part, shared))
            # A block of zeros has a scale of 0.
            divisors = part.scales.clamp(min=torch.finfo(values.dtype).tiny)
            shares = part.of(values) / divisors.index_select(-1, part.block_of_columns())
            codes = torch.bucketize(shares, self._limits, out_int32=True)
            if self._is_square:  # a nonzero square must not become 0: an update divides by its root
                codes = torch.maximum(codes, (shares > 0).int())
            part.of(self._codes).copy_(codes)

    @property
    def memory(self) -> torch.Tensor:
        return self._codes

    def _shared_scales(self, part: _Part, shared: ScaleReducer) -> torch.Tensor:
        at = self._place.extent.param, part.piece, self._kind
        return shared.view(*at)[part.scale_boxes.all.within(shared.box(*at))]

    def blocks(self) -> Iterator[TensorBlock]:
        """Yield codes, then scales: the holder of a block's first element saves its scale, all read it."""
        for block in self._place.blocks(f"{self._kind}{CODES}", self._codes):
            yield block
        # scales: blocks that begin here, and one that began on another rank, which is read only
        for part, block in zip(self._parts, self._place.blocks("", self._codes), strict=True):
            everything, begun = part.scale_boxes
            boxes = [(begun, block.is_primary)]
            if begun != everything:
                one = Box(offset=everything.offset, shape=(*everything.shape[:-1], 1))
                boxes.append((one, False))
            for box, is_primary in boxes:
                if box.num_elements:
                    yield TensorBlock(
                        kind=f"{self._kind}{SCALES}",
                        tensor=scales_of(part.piece.tensor),
                        box=box,
                        values=part.scales[box.within(everything)],
                        is_primary=is_primary,
                        holders=block.holders,
                        replica=block.replica,
                    )


StateStorage = FloatState | Int8State


@cache
def dynamic_codes(*, is_signed: bool) -> torch.Tensor:
    """Return the 256 code values in ascending order, from -1 (signed) or 0 to 1.

    Each power of ten has evenly spaced values up to the next one; smaller powers have fewer (Dettmers et
    al. 2021, section 2.2).
    """
    num_bits = 7 if is_signed else 8
    found = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for exponent in range(NUM_EXPONENTS):
        num_steps = 2 ** (exponent + num_bits - NUM_EXPONENTS)
        edges = torch.linspace(0.1, 1.0, num_steps + 1, dtype=torch.float64)
        values = 10.0 ** (exponent + 1 - NUM_EXPONENTS) * (edges[1:] + edges[:-1]) / 2
        found += [values, -values] if is_signed else [values]
    return torch.cat(found).sort().values

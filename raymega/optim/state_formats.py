"""In which format an optimizer's state is kept between steps: as masters are, or in fewer bits.

An update works on values of the masters' format, which are made here and kept again. Which tensors have
fewer bits is optimizer_state's; which of their elements share a scale quantized_blocks'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from raymega.messages import Box
from raymega.parallel.core.buckets import Extent, Range, piece_boxes
from raymega.parallel.core.shard_spec import Piece
from raymega.parallel.data_parallel.quantized_scales import ScaleReducer
from raymega.parallel.data_parallel.state_tensors import TensorBlock, extent_blocks
from raymega.plan.memory.optimizer_state import CODES, SCALES, Format
from raymega.plan.memory.quantized_blocks import BLOCK, ScaleBoxes, scale_boxes, scales_of
from raymega.plan.zero_levels import ZeroLevel

SQUARES = frozenset({"adam.exp_avg_sq"})
"""State that is never negative, and by whose root an update divides."""
NUM_EXPONENTS = 7
"""Of Dettmers' dynamic codes: the smallest is 10^-6 of those that begin with 0.1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePlacement:
    """Some elements of one parameter, in what a rank owns of a bucket; masters have ``dtype``."""

    part: Range
    extent: Extent
    dtype: torch.dtype

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """One value for each element, flat."""
        size, device = self.extent.last - self.extent.first, self.extent.param.device
        return torch.zeros(size, dtype=dtype, device=device)

    def blocks(self, kind: str, values: torch.Tensor) -> Iterator[TensorBlock]:
        """What a checkpoint keeps of ``values``, flat."""
        is_replicated = self.part.bucket.level == ZeroLevel.NONE
        yield from extent_blocks(kind, self.part, self.extent, values, is_replicated=is_replicated)


def make_state_storage(form: Format, kind: str, place: StatePlacement) -> StateStorage:
    """State that is zero."""
    match form:
        case "master":
            return FloatState(kind, place, place.dtype)
        case "bfloat16":
            return FloatState(kind, place, torch.bfloat16)
        case "8bit":
            return Int8State(kind, place)


class FloatState:
    """Kept in a format of its own, rounded to nearest; in the masters' it is always the same memory."""

    def __init__(self, kind: str, place: StatePlacement, dtype: torch.dtype) -> None:
        self._kind, self._place, self._values = kind, place, place.zeros(dtype)

    @property
    def memory(self) -> torch.Tensor:
        return self._values

    def open(self) -> torch.Tensor:
        """The values, flat, in the masters' format."""
        return self._values.to(self._place.dtype)

    def measure(self, values: torch.Tensor, shared: ScaleReducer) -> None:
        """Tell ``shared`` how large they are, before any is closed: here nothing is shared."""

    def close(self, values: torch.Tensor, shared: ScaleReducer) -> None:  # noqa: ARG002
        """Keep the values, when ``shared`` knows how large those of all ranks are."""
        if values is not self._values:
            self._values.copy_(values)

    def blocks(self) -> Iterator[TensorBlock]:
        """What a checkpoint keeps, and fills."""
        yield from self._place.blocks(self._kind, self._values)


class _Part(NamedTuple):
    """A box of a place's elements: where it lies in the flat values, and the scales of its blocks."""

    piece: Piece
    box: Box
    at: int
    scale_boxes: ScaleBoxes
    scales: torch.Tensor

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.at : self.at + self.box.num_elements].view(self.box.shape)

    def block_of_columns(self) -> torch.Tensor:
        """Of each column, which of the part's blocks it is in."""
        first, size = self.box.offset[-1], self.box.shape[-1]
        columns = torch.arange(first, first + size, device=self.scales.device)
        return columns // BLOCK - self.scale_boxes.all.offset[-1]


class Int8State:
    """Block-wise dynamic quantisation (Dettmers et al. 2021): a code an element, a scale a block.

    A block's scale is its largest magnitude, over all ranks that hold a part of it.
    """

    def __init__(self, kind: str, place: StatePlacement) -> None:
        self._kind, self._place = kind, place
        self._is_square = kind in SQUARES
        device = place.extent.param.device
        self._table = dynamic_codes(is_signed=not self._is_square).to(device, place.dtype)
        self._limits = (self._table[1:] + self._table[:-1]) / 2
        self._codes = place.zeros(torch.uint8) + int((self._table == 0).nonzero())
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
            largest = torch.zeros_like(part.scales)
            largest.scatter_reduce_(-1, columns.expand(sizes.shape), sizes, "amax")
            self._shared_scales(part, shared).copy_(largest)

    def close(self, values: torch.Tensor, shared: ScaleReducer) -> None:
        for part in self._parts:
            part.scales.copy_(self._shared_scales(part, shared))
            divisors = part.scales.clamp(min=torch.finfo(values.dtype).tiny)
            shares = part.of(values) / divisors.index_select(-1, part.block_of_columns())
            codes = torch.bucketize(shares, self._limits, out_int32=True)
            if self._is_square:  # nothing is divided by a zero that was none
                codes = torch.maximum(codes, (shares > 0).int())
            part.of(self._codes).copy_(codes)

    @property
    def memory(self) -> torch.Tensor:
        return self._codes

    def _shared_scales(self, part: _Part, shared: ScaleReducer) -> torch.Tensor:
        at = self._place.extent.param, part.piece, self._kind
        return shared.view(*at)[part.scale_boxes.all.within(shared.box(*at))]

    def blocks(self) -> Iterator[TensorBlock]:
        """Scales of a block are saved by who holds its first element, and read by all who hold some."""
        for block in self._place.blocks(f"{self._kind}{CODES}", self._codes):
            yield block
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
    """[256] values from -1 or 0 to 1, in order: a power of ten, and even steps from it to the next.

    Dettmers et al. 2021, section 2.2: the smaller the power, the fewer the steps.
    """
    num_bits = 7 if is_signed else 8
    found = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for exponent in range(NUM_EXPONENTS):
        num_steps = 2 ** (exponent + num_bits - NUM_EXPONENTS)
        edges = torch.linspace(0.1, 1.0, num_steps + 1, dtype=torch.float64)
        values = 10.0 ** (exponent + 1 - NUM_EXPONENTS) * (edges[1:] + edges[:-1]) / 2
        found += [values, -values] if is_signed else [values]
    return torch.cat(found).sort().values

"""Boxes: blocks of global tensors, in memory and in the files of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, sub


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Block of a global tensor: first index and extent along each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor of ``shape``."""
        return cls(offset=(0,) * len(shape), shape=shape)

    @property
    def num_elements(self) -> int:
        """Product of the extents; 1 for a scalar."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product

    def intersect(self, other: Box) -> Box | None:
        """Return the common block, or None if the two do not overlap."""
        assert len(self.shape) == len(other.shape), f"{self} and {other} are of different tensors"
        offset = tuple(map(max, self.offset, other.offset))
        ends = map(min, map(add, self.offset, self.shape), map(add, other.offset, other.shape))
        shape = tuple(map(sub, ends, offset))
        # A scalar has no dims, and overlaps.
        if min(shape, default=1) <= 0:
            return None
        return Box(offset=offset, shape=shape)

    def rows(self, first: int, count: int) -> Box:
        """Return ``count`` rows of this block, from its row ``first`` on."""
        offset, *others = self.offset
        return Box(offset=(offset + first, *others), shape=(count, *self.shape[1:]))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return slices that select this block in an array that holds ``outer``."""
        pairs = zip(self.offset, outer.offset, self.shape, strict=True)
        return tuple(slice(a - b, a - b + n) for a, b, n in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBox:
    """Block of a global tensor in a file of a checkpoint.

    Attributes:
        tensor: Global name, such as ``model/layers.0.mlp.up.weight``.
        dtype: Element type, numpy's name (``float32``); bytes are little-endian.
        global_shape: Shape of the whole tensor.
        box: Block of the global tensor.
        file: Key of the file, relative to the checkpoint.
        start: First byte of the block in the file.
        num_bytes: Length of the block.
        crc32: ``zlib.crc32`` of those bytes.
    """

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    file: str
    start: int
    num_bytes: int
    crc32: int

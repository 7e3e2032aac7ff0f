"""Memory of large results on CPUs, which is kept for the next one when nobody holds it any more.

The C library gives a block of this size back to the system at once and gets the next one anew, each page
filled with zeros when it is first touched: a third of what the product takes that fills it. GPUs have
torch's allocator for that. Goes when torch's CPU allocator keeps large blocks.
"""

from __future__ import annotations

import weakref
from math import prod

import numpy as np
import torch

LEAST_BYTES = 2**25
"""Smaller blocks glibc keeps by itself, once one of their size was freed (M_MMAP_THRESHOLD of mallopt(3))."""


class CpuOutputCache:
    """Blocks that come back when the last tensor in them is gone, whoever that was.

    It holds as many as were in use at a time, each as large as what was asked for last.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor [*shape] on the CPU whose values nobody has set."""
        num_bytes = prod(shape) * dtype.itemsize
        block = self._take(num_bytes)
        # Torch lets go of the view when the tensor's storage goes, however many tensors shared it.
        view = block[:num_bytes]
        weakref.finalize(view, self._free.append, block).atexit = False
        # Set, not viewed: a view that an autograd function made may not be changed in place.
        storage = torch.from_numpy(view).untyped_storage()
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)

    def _take(self, num_bytes: int) -> np.ndarray:
        while self._free:
            block = self._free.pop()
            if block.nbytes == num_bytes:
                return block
        return torch.empty(num_bytes, dtype=torch.uint8).numpy()

"""Cache of memory for large results on CPUs: a block is reused once no tensor refers to it.

The C library returns blocks of this size to the system at once. A new one is zero-filled page by page at
first touch, which takes a third of the time of the product that fills it. On GPUs torch's caching allocator
does this. Goes when torch's CPU allocator keeps large blocks.
"""

from __future__ import annotations

import weakref
from math import prod

import numpy as np
import torch

LEAST_BYTES = 2**25
"""Size below which glibc itself keeps freed blocks (M_MMAP_THRESHOLD of mallopt(3))."""


class CpuOutputCache:
    """Memory blocks that return to the cache when their last tensor is freed.

    The cache keeps as many blocks as were in use at once, all of the size of the latest request.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [*shape] on the CPU."""
        num_bytes = prod(shape) * dtype.itemsize
        block = self._take(num_bytes)
        # torch releases the numpy view when the storage is freed, however many tensors shared it.
        view = block[:num_bytes]
        weakref.finalize(view, self._free.append, block).atexit = False
        # set_(), not a view: autograd forbids in-place changes of a view that a Function returned.
        storage = torch.from_numpy(view).untyped_storage()
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)

    def _take(self, num_bytes: int) -> np.ndarray:
        while self._free:
            # blocks of another size are dropped
            block = self._free.pop()
            if block.nbytes == num_bytes:
                return block
        return torch.empty(num_bytes, dtype=torch.uint8).numpy()

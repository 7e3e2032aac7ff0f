"""Host memory that a device copies from and to: mapped pages, pinned where the device is a GPU.

Everything that is pinned is pinned here, and all that is large in the size that was asked for. torch's
``pin_memory=True`` rounds it up to a power of two, and pins in the middle of a step.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable
from contextlib import suppress
from weakref import finalize

import torch
from torch import Tensor

log = logging.getLogger(__name__)

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Flags of an anonymous, private mapping, which the system may back with huge pages."""
ALIGNMENT = 64
"""Multiple of bytes at which tensors begin in mapped memory, so that elements of every type are aligned."""
GROWTH_BYTES = 64 * 2**20
"""Least bytes that a pool maps at once when what was reserved is used up."""


def aligned(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def map_memory(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Return ``num_bytes`` of private host memory as a flat tensor of bytes.

    Raises:
        OSError: No host memory is left.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return bytes_of(mmap.mmap(-1, num_bytes, flags=PRIVATE), is_pinned=is_pinned)


def recycled(num_bytes: int) -> Tensor:
    """Return a flat tensor of bytes from torch's allocator of pinned memory, for small buffers of a step.

    The allocator gives the memory away again only after the copies that read it. It rounds the size up to a
    power of two, and pins when it has no such buffer left: in the first steps.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def bytes_of(pages: mmap.mmap, *, is_pinned: bool) -> Tensor:
    """Return mapped pages as a flat tensor of bytes; they stay pinned until the last view of them is gone."""
    # before pinning, which makes all pages: a huge one saves a fault and a TLB entry for each 4 KiB
    with suppress(AttributeError, OSError):  # a system or kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    held = torch.frombuffer(pages, dtype=torch.uint8)
    if is_pinned:
        _pin(pages, held)
    return held


class HostPool:
    """Host memory of one device for tensors of recurring sizes.

    :meth:`reserve` maps it ahead, so that a step maps and pins nothing.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._top = 0
        self._free: dict[int, list[Tensor]] = {}

    def reserve(self, num_bytes: int) -> None:
        """Map ``num_bytes`` for tensors to come; what is left of an earlier chunk is given up."""
        self._chunk, self._top = map_memory(num_bytes, is_pinned=self._is_pinned), 0

    def take(self, num_bytes: int) -> Tensor:
        """Return ``num_bytes`` as a flat tensor of bytes: freed ones of that size, else reserved, else new."""
        if self._free.get(num_bytes):
            return self._free[num_bytes].pop()
        if self._top + num_bytes > self._chunk.numel():
            self.reserve(max(num_bytes, GROWTH_BYTES))
        begin, self._top = self._top, self._top + aligned(num_bytes)
        return self._chunk[begin : begin + num_bytes]

    def give_back(self, memory: Tensor) -> None:
        """Take memory back for the next tensor of its size."""
        self._free.setdefault(memory.numel(), []).append(memory)

    def like(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return tensors of these shapes and formats, together in one chunk of their own."""
        tensors = list(tensors)
        sizes = [aligned(tensor.nbytes) for tensor in tensors]
        chunk = map_memory(sum(sizes), is_pinned=self._is_pinned)
        return [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(chunk.split(sizes), tensors, strict=True)
        ]


def _pin(pages: mmap.mmap, held: Tensor) -> None:
    """Pin pages for asynchronous copies from and to a GPU; without that they take longer."""
    cuda = torch.cuda.cudart()
    begin = held.data_ptr()
    if int(cuda.cudaHostRegister(begin, held.nbytes, 0)):
        log.warning("%d bytes of host memory could not be pinned", held.nbytes)
    else:
        # of the pages, not of a tensor: views of them may outlive the first tensor
        finalize(pages, cuda.cudaHostUnregister, begin)

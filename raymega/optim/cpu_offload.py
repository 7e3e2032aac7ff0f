"""Optimizer offloading: masters and state wait in host memory and visit the device in update chunks.

While one chunk is updated, the next one arrives and the previous one leaves, so a device holds those of
three at most. Eviction resizes a tensor's storage to 0, so that views of it remain valid.
`parallel/core/host_copies.py` makes the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from raymega.parallel.core.host_copies import AsyncCopy, HostMemory


class _Piece:
    """Flat tensor of a device with its copy on the host."""

    def __init__(self, tensor: Tensor, host: Tensor, memory: HostMemory) -> None:
        self.tensor, self.host = tensor, host
        self._memory = memory
        self._moving: AsyncCopy | None = None
        self.evict()

    def prefetch(self) -> None:
        """Allocate the device memory and start the copy to it."""
        self.wait()
        self.tensor.untyped_storage().resize_(self.tensor.nbytes)
        self._moving = self._memory.start_in(self.host, self.tensor)

    def evict(self) -> None:
        """Start the copy to the host, and free the device memory once it is done."""
        self._moving = self._memory.start_out(self.tensor, self.host)
        # The copy's stream still reads the storage; HostMemory keeps it from reuse until then.
        self.tensor.untyped_storage().resize_(0)

    def wait(self, *, on_host: bool = False) -> None:
        """Wait for the pending copy, on the current stream or (``on_host``) on the host."""
        if self._moving is not None:
            self._moving.wait_on_host() if on_host else self._moving.wait()


class HostState:
    """Set of offloaded tensors, in chunks, for updates on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._memory = HostMemory(device)
        self._update_chunks: list[list[_Piece]] = []
        # Keyed by the storage object: its data address is 0 while the tensor is evicted.
        self._pieces: dict[int, _Piece] = {}

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Take a chunk's flat tensors, each of which spans its whole storage, and evict them.

        When it returns the device memory is free, so that chunks can be made one after the other.
        """
        hosts = self._memory.like(tensors)
        some = [_Piece(*pair, self._memory) for pair in zip(tensors, hosts, strict=True)]
        for piece in some:
            piece.wait(on_host=True)
            self._pieces[piece.tensor.untyped_storage()._cdata] = piece
        self._update_chunks.append(some)

    def turns(self) -> Iterator[int]:
        """Yield each chunk's number while its tensors are on the device."""
        for number, some in enumerate(self._update_chunks):
            # fetch the next chunk ahead, and at the start the first one too
            for each in self._update_chunks[number + (number > 0) : number + 2]:
                for piece in each:
                    piece.prefetch()
            for piece in some:
                piece.wait()
            yield number
            for piece in some:
                piece.evict()

    def on_host(self, view: Tensor) -> Tensor:
        """Return ``view`` in the host copy of its tensor; other tensors are returned as they are."""
        piece = self._pieces.get(view.untyped_storage()._cdata)
        if piece is None:
            return view
        piece.wait(on_host=True)
        # as_strided counts from the chunk's first element
        offset = piece.host.storage_offset() + view.storage_offset()
        return piece.host.as_strided(view.shape, view.stride(), int(offset))

    @contextmanager
    def all_here(self) -> Iterator[None]:
        """Hold all tensors on the device in the body, for reading."""
        for piece in self._pieces.values():
            piece.prefetch()
            piece.wait()
        try:
            yield
        finally:
            for piece in self._pieces.values():
                piece.evict()

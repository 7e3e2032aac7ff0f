"""Masters and state that lie in host memory but for while they are updated, a portion after the other.

While one portion is updated the next one comes and the one before leaves, so a device holds those of
three at most. A portion's memory is given back in between; views of it, which updates work on, stay what
they are. The copies themselves are parallel.host_memory's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from raymega.parallel.core.host_copies import AsyncCopy, HostMemory


class _Piece:
    """One flat tensor of a device and its place on the host."""

    def __init__(self, tensor: Tensor, memory: HostMemory) -> None:
        self.tensor, self.host = tensor, memory.empty_like(tensor)
        self._memory = memory
        self._moving: AsyncCopy | None = None
        self.evict()

    def prefetch(self) -> None:
        """Begin to bring it."""
        self.wait()
        self.tensor.untyped_storage().resize_(self.tensor.nbytes)
        self._moving = self._memory.start_in(self.host, self.tensor)

    def evict(self) -> None:
        """Begin to send it away; the device's memory is gone when that is done."""
        self._moving = self._memory.start_out(self.tensor, self.host)
        self.tensor.untyped_storage().resize_(0)

    def wait(self, *, on_host: bool = False) -> None:
        """Let it arrive, wherever it goes."""
        if self._moving is not None:
            self._moving.wait_on_host() if on_host else self._moving.wait()


class HostState:
    """Some portions of flat tensors, each of which is all of its memory; they leave at once.

    Args:
        update_chunks: What is needed together.
        device: Where they are needed.
    """

    def __init__(self, update_chunks: Sequence[Sequence[Tensor]], device: torch.device) -> None:
        memory = HostMemory(device)
        self._update_chunks = [
            [_Piece(tensor, memory) for tensor in some] for some in update_chunks
        ]
        self._pieces = {
            piece.tensor.untyped_storage()._cdata: piece
            for some in self._update_chunks
            for piece in some
        }

    def turns(self) -> Iterator[int]:
        """Numbers of the portions in order, each while its tensors are on the device."""
        for number, some in enumerate(self._update_chunks):
            for each in self._update_chunks[number + (number > 0) : number + 2]:
                for piece in each:
                    piece.prefetch()
            for piece in some:
                piece.wait()
            yield number
            for piece in some:
                piece.evict()

    def on_host(self, view: Tensor) -> Tensor:
        """What ``view``, made before, of one of these tensors is on the host; another tensor is itself."""
        piece = self._pieces.get(view.untyped_storage()._cdata)
        if piece is None:
            return view
        piece.wait(on_host=True)
        return piece.host.as_strided(view.shape, view.stride(), view.storage_offset())

    @contextmanager
    def all_here(self) -> Iterator[None]:
        """All of them on the device at once, for reading."""
        for piece in self._pieces.values():
            piece.prefetch()
            piece.wait()
        try:
            yield
        finally:
            for piece in self._pieces.values():
                piece.evict()

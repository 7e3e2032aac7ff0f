"""HostCopy: a copy of tensors in host memory, in one buffer that is reused between saves.

On a GPU the copy runs on a stream of its own into pinned memory, beside the next step. Only kernels that
change the tensors must wait for it. ``writer.py`` decides which tensors are copied.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from raymega.parallel.comm.world import raise_if_aborted
from raymega.parallel.core.pinned_memory import bytes_of, map_memory
from raymega.storage.shared_memory import SharedMemories, SharedMemory

log = logging.getLogger(__name__)


class HostCopy:
    """Buffer with one copy at a time, which must be written out before the next copy is taken."""

    def __init__(self, shared: SharedMemories | None = None) -> None:
        """Allocate from ``shared`` later; without it, or when it is full, allocate private memory."""
        self._shared = shared
        self._memory: SharedMemory | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._places: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._buffer.numel()

    @property
    def is_shared(self) -> bool:
        """Return whether the buffer is in shared memory."""
        return self._memory is not None

    def reserve(self, num_bytes: int, *, is_pinned: bool) -> None:
        """Grow the buffer to at least ``num_bytes``; no other method allocates host memory.

        Raises:
            RuntimeError, OSError: No host memory is left.
        """
        if self._buffer.numel() < num_bytes:
            # Free the old buffer first, so that the two never exist together.
            self._places.clear()
            self._memory = None
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._memory = self._take_shared(num_bytes)
            self._buffer = (
                bytes_of(self._memory.pages, is_pinned=is_pinned)
                if self._memory
                else map_memory(num_bytes, is_pinned=is_pinned)
            )

    def copy(self, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Copy each tensor to its first byte in the buffer, a multiple of its element's bytes.

        On a GPU this returns before the copy is done: see :meth:`fence` and :meth:`wait`.
        """
        parts = list(parts)
        if not any(values.is_cuda for _, values in parts):
            self._copied = None
            return self._copy(parts)
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types
        # Behind the update that produced the values, beside everything after it.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(parts)
            self._copied = self._stream.record_event()
        return None

    def fence(self) -> None:
        """Make later GPU work of this thread's stream wait for the copy, without blocking the host."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Block until the copy is complete.

        Raises:
            CommunicationError: The world was aborted meanwhile, so the GPU may have updated the state with garbage.
        """
        if self._copied is not None:
            self._copied.synchronize()
            raise_if_aborted("the copy of the state")

    def chunk(self, start: int, num_bytes: int) -> memoryview:
        """Return a view of ``num_bytes`` of the buffer from byte ``start`` on."""
        return memoryview(self._buffer.numpy().data)[start : start + num_bytes]

    def _take_shared(self, num_bytes: int) -> SharedMemory | None:
        if self._shared is None or not num_bytes:
            return None
        try:
            return self._shared.allocate(num_bytes)
        except OSError as error:
            log.warning("no shared memory for %d bytes: %s", num_bytes, error)
            return None

    def _copy(self, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        for start, values in parts:
            self._place(start, values).copy_(values, non_blocking=True)

    def _place(self, start: int, values: torch.Tensor) -> torch.Tensor:
        """Return a view of the buffer at byte ``start`` with shape and dtype of ``values``.

        Views are cached, because each save asks for the same ones.
        """
        key = (start, values.dtype, values.shape)
        if key not in self._places:
            place = self._buffer[start : start + values.nbytes].view(values.dtype)
            self._places[key] = place.view(values.shape)
        return self._places[key]

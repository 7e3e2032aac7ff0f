"""HostCopy: a copy of tensors in host memory, in one buffer that is kept and used again.

It owns the buffer and when the copy is done. On a GPU the copy runs beside the next step on a stream
of its own, into pinned memory; only what changes the tensors has to come behind it. What is copied is
the writer's to say.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable
from contextlib import suppress
from weakref import finalize

import torch

from raymega.storage.shared_memory import SharedMemories, SharedMemory

log = logging.getLogger(__name__)

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Pages of this process alone, which the system may make huge."""


class HostCopy:
    """One copy at a time: it must be written out before the next one is taken."""

    def __init__(self, shared: SharedMemories | None = None) -> None:
        """Take memory from ``shared``, or where that has none, memory of this process alone."""
        self._shared = shared
        self._memory: SharedMemory | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._places: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory that it keeps."""
        return self._buffer.numel()

    @property
    def is_shared(self) -> bool:
        """Its buffer lies in shared memory."""
        return self._memory is not None

    def reserve(self, num_bytes: int, *, is_pinned: bool) -> None:
        """Make the buffer large enough: the only place where host memory is taken.

        Raises:
            RuntimeError, OSError: There is none left.
        """
        if self._buffer.numel() < num_bytes:
            self._places.clear()
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._memory = self._take_shared(num_bytes)
            if self._memory is None and is_pinned:
                self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
                return
            pages = self._memory.pages if self._memory else mmap.mmap(-1, num_bytes, flags=PRIVATE)
            self._buffer = torch.frombuffer(pages, dtype=torch.uint8)
            if is_pinned:
                _pin(self._buffer)
            else:
                _ask_for_huge_pages(pages)

    def copy(self, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Copy each tensor to its first byte in the buffer, a multiple of its element's bytes.

        On a GPU this returns at once: see :meth:`fence` and :meth:`wait`.
        """
        parts = list(parts)
        if not any(values.is_cuda for _, values in parts):
            self._copied = None
            return self._copy(parts)
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(parts)
            self._copied = self._stream.record_event()
        return None

    def fence(self) -> None:
        """Let what this thread gives the GPU from now on come behind the copy; the host goes on."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Block until the copy is whole."""
        if self._copied is not None:
            self._copied.synchronize()

    def chunk(self, start: int, num_bytes: int) -> memoryview:
        """A stretch of the buffer, not copied."""
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
        """The buffer from ``start`` on as a tensor like ``values``; the same ones at every save."""
        key = (start, values.dtype, values.shape)
        if key not in self._places:
            place = self._buffer[start : start + values.nbytes].view(values.dtype)
            self._places[key] = place.view(values.shape)
        return self._places[key]


def _pin(buffer: torch.Tensor) -> None:
    """Let a GPU copy to ``buffer`` by itself; where it may not, copies take longer."""
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types
    begin = buffer.data_ptr()
    if int(cuda.cudaHostRegister(begin, buffer.nbytes, 0)):
        log.warning("%d bytes of shared memory could not be pinned", buffer.nbytes)
    else:
        finalize(buffer, cuda.cudaHostUnregister, begin)


def _ask_for_huge_pages(pages: mmap.mmap) -> None:
    """Where the system gives them to those who ask: a page of 4 KiB is looked up for each 4 KiB."""
    with suppress(AttributeError, OSError):  # a system, or a kernel, without them
        pages.madvise(mmap.MADV_HUGEPAGE)

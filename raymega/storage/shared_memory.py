"""Memory that another process on the same machine can map, and keep after this process ends.

It is a memfd (an anonymous file in memory): the size of /dev/shm does not limit it, and its pages are freed
when the last process that maps it ends. Callers decide what is in it and when others may read it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mmap import PROT_READ, mmap
from pathlib import Path
from weakref import WeakSet, finalize

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRange:
    """Bytes [start, start + num_bytes) of the memfd ``name``, open as ``fd`` in the process ``pid``."""

    pid: int
    fd: int
    name: str
    start: int
    num_bytes: int


class SharedMemory:
    """A zeroed memfd of ``num_bytes``, mapped writable in this process as ``pages``."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate all pages at once.

        Raises:
            OSError: Too little memory is free, or this system has no memfd.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no files in memory")
        # the random name lets ``attach`` recognise the file; pids and fds are reused
        self.name = f"raymega-{secrets.token_hex(16)}"
        self._fd = os.memfd_create(self.name)
        finalize(self, os.close, self._fd)
        # allocate now: a page that is missing at its first write would end the process with SIGBUS
        os.posix_fallocate(self._fd, 0, num_bytes)
        self.pages = mmap(self._fd, num_bytes)
        self._begin = _address(memoryview(self.pages))

    def stretch(self, begin: int, num_bytes: int) -> SharedRange | None:
        """Return the range of ``num_bytes`` from address ``begin`` on, or None if it is outside this memory."""
        start = begin - self._begin
        if start < 0 or start + num_bytes > len(self.pages):
            return None
        return SharedRange(
            pid=os.getpid(), fd=self._fd, name=self.name, start=start, num_bytes=num_bytes
        )


class SharedMemories:
    """The shared memories of one owner, which can be searched for the memory that holds given bytes."""

    def __init__(self) -> None:
        self._memories: WeakSet[SharedMemory] = WeakSet()

    def allocate(self, num_bytes: int) -> SharedMemory:
        """Return a new SharedMemory, which lives as long as the caller holds it; raises as it does."""
        memory = SharedMemory(num_bytes)
        self._memories.add(memory)
        return memory

    def tail_of(self, pieces: Sequence[memoryview]) -> tuple[int, SharedRange | None]:
        """Find the longest tail of ``pieces`` that is contiguous in shared memory.

        Returns:
            Number of pieces before the tail, and the tail's range; all pieces and None when there is no tail.
        """
        # walk backwards over pieces that are adjacent in memory: [begin, end) are addresses
        begin = end = 0
        count = len(pieces)
        for piece in reversed(pieces):
            at = _address(piece)
            if end and at + piece.nbytes != begin:
                break
            begin, end, count = at, end or at + piece.nbytes, count - 1
        # the memory that contains all of them
        for memory in tuple(self._memories):
            if stretch := memory.stretch(begin, end - begin):
                return count, stretch
        return len(pieces), None


def attach(place: Mapping[str, int | str]) -> memoryview:
    """Map a SharedRange, given as its fields, read-only into this process and return its bytes.

    Raises:
        OSError: Its process is not visible from here.
    """
    stretch = SharedRange(**place)  # type: ignore[arg-type]  # a message of another process
    # the name must match: the pid may belong to another process by now, or to another pid namespace
    path = Path(f"/proc/{int(stretch.pid)}/fd/{int(stretch.fd)}")
    if path.readlink().name != f"memfd:{stretch.name} (deleted)":
        raise OSError(f"{path} is not the file {stretch.name}")
    # the mapping stays valid after its file descriptor is closed
    fd = os.open(path, os.O_RDONLY)
    try:
        pages = mmap(fd, stretch.start + stretch.num_bytes, prot=PROT_READ)
    finally:
        os.close(fd)
    return memoryview(pages)[stretch.start :]


def _address(piece: memoryview) -> int:
    return int(np.frombuffer(piece, dtype=np.uint8).__array_interface__["data"][0])

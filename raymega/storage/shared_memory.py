"""Memory of this process that another one on the same machine can look into, also after this one's end.

It is a file without a folder: no mount bounds it, and the system has its pages back when the last process
that maps it is gone. What lies in it, and who may look when, is its users' to say.
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
    """Bytes [start, start + num_bytes) of the file ``name``, open as ``fd`` in the process ``pid``."""

    pid: int
    fd: int
    name: str
    start: int
    num_bytes: int


class SharedMemory:
    """``num_bytes`` of it, zero; ``pages`` are writable here."""

    def __init__(self, num_bytes: int) -> None:
        """Take the memory at once.

        Raises:
            OSError: There is none left, or this system has no such memory.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no files in memory")
        self.name = f"raymega-{secrets.token_hex(16)}"
        self._fd = os.memfd_create(self.name)
        finalize(self, os.close, self._fd)
        os.posix_fallocate(self._fd, 0, num_bytes)
        self.pages = mmap(self._fd, num_bytes)
        self._begin = _address(memoryview(self.pages))

    def stretch(self, begin: int, num_bytes: int) -> SharedRange | None:
        """The bytes from address ``begin`` on; None where they are not its own."""
        start = begin - self._begin
        if start < 0 or start + num_bytes > len(self.pages):
            return None
        return SharedRange(
            pid=os.getpid(), fd=self._fd, name=self.name, start=start, num_bytes=num_bytes
        )


class SharedMemories:
    """All that one user has, and where in them bytes lie."""

    def __init__(self) -> None:
        self._memories: WeakSet[SharedMemory] = WeakSet()

    def allocate(self, num_bytes: int) -> SharedMemory:
        """More, for as long as the caller holds it; raises what SharedMemory does."""
        memory = SharedMemory(num_bytes)
        self._memories.add(memory)
        return memory

    def tail_of(self, pieces: Sequence[memoryview]) -> tuple[int, SharedRange | None]:
        """How many of ``pieces`` come before the last ones that lie end to end in shared memory, and
        where those are."""
        begin = end = 0
        count = len(pieces)
        for piece in reversed(pieces):
            at = _address(piece)
            if end and at + piece.nbytes != begin:
                break
            begin, end, count = at, end or at + piece.nbytes, count - 1
        for memory in tuple(self._memories):
            if stretch := memory.stretch(begin, end - begin):
                return count, stretch
        return len(pieces), None


def attach(place: Mapping[str, int | str]) -> memoryview:
    """The bytes of a SharedRange given as a mapping, in this process; to be read only.

    Raises:
        OSError: Its process is not seen from here.
    """
    stretch = SharedRange(**place)  # type: ignore[arg-type]  # a message of another process
    path = Path(f"/proc/{int(stretch.pid)}/fd/{int(stretch.fd)}")
    if path.readlink().name != f"memfd:{stretch.name} (deleted)":
        raise OSError(f"{path} is not the file {stretch.name}")
    fd = os.open(path, os.O_RDONLY)
    try:
        pages = mmap(fd, stretch.start + stretch.num_bytes, prot=PROT_READ)
    finally:
        os.close(fd)
    return memoryview(pages)[stretch.start :]


def _address(piece: memoryview) -> int:
    return int(np.frombuffer(piece, dtype=np.uint8).__array_interface__["data"][0])

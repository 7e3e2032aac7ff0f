"""A range of a file as a file of its own, whose positions count from the range's first byte."""

from __future__ import annotations

import io
from typing import BinaryIO


class FilePart(io.RawIOBase):
    """The bytes of ``stream`` from ``start`` on.

    A reader sees ``num_bytes`` of them; writing has no limit.
    """

    def __init__(self, stream: BinaryIO, start: int, num_bytes: int = 0) -> None:
        super().__init__()
        self._stream, self._start, self._num_bytes = stream, start, num_bytes
        stream.seek(start)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell() - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        # zipfile seeks from the end to find the directory, and may seek before the first byte.
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._num_bytes}[whence]
        return self._stream.seek(self._start + max(base + offset, 0)) - self._start

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        room = memoryview(buffer)[: max(self._num_bytes - self.tell(), 0)]
        return int(self._stream.readinto(room))  # type: ignore[attr-defined]  # buffered files have it

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        return self._stream.write(data)

"""Some bytes of a file as a file of their own: positions count from the first, none lies before it."""

from __future__ import annotations

import io
from typing import BinaryIO


class FilePart(io.RawIOBase):
    """Bytes of ``stream`` from ``start`` on: ``num_bytes`` to be read, or to be written without an end."""

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
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._num_bytes}[whence]
        return self._stream.seek(self._start + max(base + offset, 0)) - self._start

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        room = memoryview(buffer)[: max(self._num_bytes - self.tell(), 0)]
        return int(self._stream.readinto(room))  # type: ignore[attr-defined]  # buffered files have it

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        return self._stream.write(data)

"""Rows of a file, and a file's bytes with their compression undone, for all readers.

It owns the position up to which a file was read. Formats are read by `lines.py`, `tables.py` and
`web.py`, which `documents.py` chooses from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from raymega.prepare.chat.rows import RowFormat
from raymega.prepare.readers.long_text import LongText
from raymega.prepare.readers.pieces import FilePiece

BLOCK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Row of a file: a line, a record, or a whole text.

    Attributes:
        row: Number of the row in its piece.
        place: Place for messages: a byte of the decompressed file, or a row number of a table.
        text: Text, perhaps empty.
        why: Reason why the row has no text, or empty.
        url: Address of a page, or empty.
        long_text: Text that is too long for a string, in place of ``text``.
    """

    row: int
    place: int | str
    text: str = ""
    why: str = ""
    url: str = ""
    long_text: LongText | None = None


class DamagedError(Exception):
    """A file cannot be read from ``place`` on; the message names the reason."""

    def __init__(self, place: int | str, why: str) -> None:
        super().__init__(place, why)
        self.place, self.why = place, why


class Opened:
    """An open piece of a file, read in blocks of decompressed bytes.

    Attributes:
        piece: The piece.
        text_key: Key or column of the text.
        row_format: Form of a row: a text, or conversations.
        stream: The file's stored bytes, which table readers read at random.
        may_be_long: Whether a long text may stay in UTF-8.
    """

    def __init__(
        self, piece: FilePiece, text_key: str, row_format: RowFormat = "text", *, may_be_long: bool = False,
    ) -> None:  # fmt: skip
        self.piece, self.text_key, self.row_format = piece, text_key, row_format
        self.may_be_long = may_be_long
        self.stream: pa.NativeFile = None
        self._num_read = 0

    def over(self, stream: pa.NativeFile) -> Self:
        """Read from ``stream`` from now on; return self."""
        self.stream = stream
        return self

    @property
    def place(self) -> int | str:
        """Byte of the decompressed file up to which it was read."""
        return self.place_of(self._num_read)

    def place_of(self, offset: int) -> int | str:
        """Return the place of a byte that comes ``offset`` bytes after the piece's start.

        Where a compressed file is cut, that is the byte of its frame, + and the byte in its text.
        """
        if not self.piece.start:
            return offset
        is_compressed = self.piece.file.form.compression
        return f"{self.piece.start}+{offset}" if is_compressed else self.piece.start + offset

    def blocks(self) -> Iterator[bytes]:
        """Yield the decompressed bytes of the piece."""
        if self.piece.file.form.compression and not self.piece.file.num_bytes:
            raise DamagedError(0, "it is empty, and a compressed file never is")
        for block in self._range(self.piece.start, self.piece.end):
            self._num_read += len(block)
            yield block

    def blocks_beyond(self) -> Iterator[bytes]:
        """Yield the decompressed bytes of the file after the piece."""
        yield from self._range(self.piece.end, self.piece.file.num_bytes)

    def read_all(self) -> bytes:
        """Return all decompressed bytes of the piece."""
        return b"".join(self.blocks())

    def gather(self) -> bytearray:
        """Return the same, with no second copy of it on the way."""
        content = bytearray()
        for block in self.blocks():
            content += block
        return content

    def random_access(self) -> pa.NativeFile:
        """Return the file for reading at random; a compressed one is first read into memory."""
        if self.piece.file.form.compression:
            return pa.BufferReader(self.read_all())
        return self.stream

    def _range(self, start: int, end: int) -> Iterator[bytes]:
        if start >= end:
            return
        self.stream.seek(start)
        compression = self.piece.file.form.compression
        if not compression:
            while start < end and (block := self.stream.read(min(BLOCK_BYTES, end - start))):
                start += len(block)
                yield block
            return
        # pyarrow reads all frames of a file, and raises at a truncated one.
        source = (
            self.stream
            if end == self.piece.file.num_bytes
            else _Window(self.stream, start, end).file()
        )
        with pa.CompressedInputStream(source, compression) as stream:
            while block := self._read(stream):
                yield block

    def _read(self, stream: pa.CompressedInputStream) -> bytes:
        try:
            return stream.read(BLOCK_BYTES)
        except OSError as error:
            # The decompressor reads ahead, and keeps what it had made of the last block.
            read = f"{self.stream.tell():,} of the file's {self.piece.file.num_bytes:,} bytes were read"
            raise DamagedError(self.place, f"{str(error).splitlines()[0]}; {read}") from error


class _Window:
    """The bytes [start, end) of a stream as a file that ends there, which a decompressor can read."""

    closed = False

    def __init__(self, stream: pa.NativeFile, start: int, end: int) -> None:
        self._stream, self._at, self._end = stream, start, end

    def file(self) -> pa.PythonFile:
        return pa.PythonFile(self, mode="r")

    def read(self, num_bytes: int = -1) -> bytes:
        left = self._end - self._at
        self._stream.seek(self._at)
        block: bytes = self._stream.read(left if num_bytes < 0 else min(left, num_bytes))
        self._at += len(block)
        return block

    def close(self) -> None:
        """Leave the stream open: it belongs to the reader."""

"""Reader of the files ``run-ID.wandb``: records in LevelDB's log format, behind a header of seven bytes.

Source: https://github.com/google/leveldb/blob/main/doc/log_format.md; wandb's own reader is a program.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32768
PIECE_HEADER = struct.Struct("<IHB")
"""Checksum, length and type of a piece."""
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file, in order; one that a killed process has torn is left out."""
    data = path.read_bytes()
    place, record = FILE_HEADER_BYTES, b""
    while place + PIECE_HEADER.size <= len(data):
        # A block's rest that is too short for a header is padding.
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < PIECE_HEADER.size:
            place += left
            continue
        _, length, kind = PIECE_HEADER.unpack_from(data, place)
        piece = data[place + PIECE_HEADER.size : place + PIECE_HEADER.size + length]
        # a file's end: zeros, or a piece that is not all there
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(piece) < length:
            return
        record = piece if kind in (FULL, FIRST) else record + piece
        if kind in (FULL, LAST):
            yield record
        place += PIECE_HEADER.size + length

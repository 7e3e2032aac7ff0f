"""Finds the frames of compressed files, at which one file can be cut into many tasks.

Frames of Zstandard and blocks of bgzip have their sizes in their headers, and streams of bzip2
begin with a long mark. Members of ordinary gzip tell no size, so that such a file is not cut.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pyarrow as pa

ZSTD_MAGIC = 0xFD2FB528
SKIPPABLE_MAGIC = 0x184D2A50
BZIP2_MARK = b"1AY&SY"
SEARCH_BYTES = 1 << 22


def frame_starts(stream: pa.NativeFile, num_bytes: int, compression: str) -> list[int]:
    """Return the byte at which each frame of a compressed file starts, in order; the first is 0.

    A file that is damaged has the frames up to there: its reader will tell.
    """
    return FINDERS[compression](stream, num_bytes)


def _zstd_frames(stream: pa.NativeFile, num_bytes: int) -> list[int]:
    starts, at = list[int](), 0
    while at < num_bytes:
        stream.seek(at)
        head = stream.read(18)
        if len(head) < 8:
            break
        magic, size = struct.unpack("<II", head[:8])
        # Skippable frames hold no text and belong to the frame after them.
        if magic & 0xFFFFFFF0 == SKIPPABLE_MAGIC:
            at += 8 + size
            continue
        end = _zstd_end(stream, at, head) if magic == ZSTD_MAGIC else 0
        if not end:
            break
        starts.append(at)
        at = end
    return [0, *starts[1:]]


def _zstd_end(stream: pa.NativeFile, start: int, head: bytes) -> int:
    """Return the end of a frame, hopping from block to block; 0 if it does not end."""
    # Header: descriptor, window (unless single segment), dictionary id, content size.
    descriptor = head[4]
    is_single = descriptor >> 5 & 1
    size_bytes = (is_single, 2, 4, 8)[descriptor >> 6]
    at = start + 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
    while True:
        stream.seek(at)
        header = stream.read(3)
        if len(header) < 3:
            return 0
        value = int.from_bytes(header, "little")
        is_last, kind, size = value & 1, value >> 1 & 3, value >> 3
        # A block of type 1 is one repeated byte.
        at += 3 + (1 if kind == 1 else size)
        if is_last:
            return at + 4 * (descriptor >> 2 & 1)


def _bgzip_blocks(stream: pa.NativeFile, num_bytes: int) -> list[int]:
    starts, at = [0], 0
    while at < num_bytes:
        stream.seek(at)
        head = stream.read(18)
        # Extra field BC with the block's size less one; without it the file is ordinary gzip.
        if len(head) < 18 or head[:4] != b"\x1f\x8b\x08\x04" or head[12:16] != b"BC\x02\x00":
            break
        at += struct.unpack("<H", head[16:18])[0] + 1
        starts.append(at)
    return starts[:-1] or [0]


def _bzip2_streams(stream: pa.NativeFile, num_bytes: int) -> list[int]:
    starts, base, tail = list[int](), 0, b""
    stream.seek(0)
    # The mark is "BZh", the block size 1 to 9, and 48 bits that begin every block.
    while block := stream.read(SEARCH_BYTES):
        text = tail + block
        at = text.find(BZIP2_MARK)
        while at >= 0:
            if text[max(at - 4, 0) : at - 1] == b"BZh" and text[at - 1 : at] in b"123456789":
                starts.append(base + at - 4)
            at = text.find(BZIP2_MARK, at + 1)
        tail = text[-9:]
        base += len(text) - len(tail)
    return [0, *sorted(set(starts) - {0})] if num_bytes else [0]


FINDERS: dict[str, Callable[[pa.NativeFile, int], list[int]]] = {
    "zstd": _zstd_frames,
    "gzip": _bgzip_blocks,
    "bz2": _bzip2_streams,
}

"""Reads web pages: HTML files, and the responses of WARC archives, as the text that a reader sees.

It owns the extraction of text, by resiliparse, which is an optional dependency.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pyarrow as pa

from raymega.prepare.readers.entries import DamagedError, Entry, Opened

RECORD_END = b"\r\n\r\n"
CHUNK = re.compile(rb"([0-9A-Fa-f]+)[^\r\n]*\r\n")
"""Size in front of a chunk of HTTP."""
CODECS = {"br": "brotli", "zstd": "zstd"}
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
"""Value by which zlib tells the two by their headers."""


def read_html(opened: Opened) -> Iterator[Entry]:
    """Yield the main text of the page."""
    yield Entry(row=0, place=0, text=_main_text(opened.read_all()))


def read_warc(opened: Opened) -> Iterator[Entry]:
    """Yield the main text of each response that is HTML; its place is the record's byte.

    Raises:
        DamagedError: The archive is truncated or holds no response.
    """
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    stream = _BlockFile(opened)
    row = -1
    # it needs read() and tell() alone
    records = ArchiveIterator(
        cast(Any, stream), record_types=WarcRecordType.response, parse_http=True
    )
    for row, record in enumerate(records):
        # Pictures and the like are rows without a document.
        is_page = "html" in (record.http_content_type or "")
        text = _main_text(_body(record)) if is_page else ""
        url = record.headers.get("WARC-Target-URI") or ""
        yield Entry(row=row, place=record.stream_pos, text=text, url=url)
    # The library takes the end of the file for the end of a record.
    if row < 0:
        raise DamagedError(opened.place, "it holds no response record")
    if stream.last_bytes != RECORD_END:
        raise DamagedError(opened.place, "it ends within a record")


def _body(record: Any) -> bytes:
    """Return the page of a response, as a browser undoes what the transfer did; one that is not as its headers say stays."""
    body: bytes = record.reader.read()
    if "chunked" in (record.http_headers.get("Transfer-Encoding") or "").lower():
        body = _joined_chunks(body)
    for name in reversed((record.http_headers.get("Content-Encoding") or "").lower().split(",")):
        # many archives keep the header of a body that they decoded
        with suppress(zlib.error, OSError):
            body = _decoded(body, name.strip())
    return body


def _joined_chunks(body: bytes) -> bytes:
    at, parts = 0, list[bytes]()
    while found := CHUNK.match(body, at):
        start, size = found.end(), int(found[1], 16)
        parts.append(body[start : start + size])
        at = start + size + len(b"\r\n")
    return b"".join(parts) if parts else body


def _decoded(body: bytes, encoding: str) -> bytes:
    if encoding in ("gzip", "x-gzip", "deflate"):
        # of a page that was cut off the beginning
        return zlib.decompressobj(GZIP_OR_ZLIB).decompress(body)
    if encoding in CODECS:
        with pa.CompressedInputStream(pa.BufferReader(body), CODECS[encoding]) as stream:
            return cast(bytes, stream.read())
    return body


def _main_text(page: bytes) -> str:
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    encoding = detect_encoding(page) or "utf-8"
    text: str = extract_plain_text(bytes_to_str(page, encoding), main_content=True)
    return text


class _BlockFile:
    """A piece's decompressed bytes as a file that is read from its start to its end."""

    def __init__(self, opened: Opened) -> None:
        self._blocks, self._rest, self._at = opened.blocks(), b"", 0
        self.last_bytes = b""

    def tell(self) -> int:
        return self._at

    def read(self, num_bytes: int) -> bytes:
        self._rest = self._rest or next(self._blocks, b"")
        block, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        self._at += len(block)
        self.last_bytes = (self.last_bytes + block)[-len(RECORD_END) :]
        return block

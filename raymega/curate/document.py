"""Document on its way through the steps, and the Parquet in which it is stored between them.

It owns the columns of the output. Steps are in `raymega.curate.steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raymega.prepare.readers.long_text import LONG_BYTES, LongText, Text, long_or_short, utf8_bytes

BATCH_BYTES = 8 << 20
"""Text of a row group; it holds whole documents of this size or a little more."""

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.large_string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("url", pa.string(), nullable=False),
        pa.field("language", pa.string(), nullable=False),
        pa.field("scores", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("reasons", pa.list_(pa.string()), nullable=False),
    ]
)
# Columns, by their paths in Parquet, with few different values, and with values that may be searched.
REPEATED = ["url", "language", "scores.key_value.key", "reasons.list.element"]
SHORT = ["id", "source", "url", "language"]


@dataclass(kw_only=True, slots=True)
class CuratedDocument:
    """Document that steps change in place.

    Attributes:
        id: Digest of the file's name and the document's place in it, 32 hexadecimal digits.
        text: Text; a large one is a :class:`LongText`, which is indexed like a string.
        source: Path of its file and, after ``@``, its place there: a byte or a row number.
        url: Address of the page, if the archive names one.
        language: ISO 639 code, once the step ``language`` has found it.
        scores: Numbers that steps have found, by name.
        reasons: Changes that steps have made, in order.
    """

    id: str
    text: Text
    source: str
    url: str = ""
    language: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


class DocumentWriter:
    """Writer of Parquet in memory, a row group for each 8 MiB of text; used as a context."""

    def __init__(self) -> None:
        self._sink, self._waiting, self._num_bytes = BytesIO(), list[CuratedDocument](), 0
        self._writer = _open_writer(self._sink)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def add(self, document: CuratedDocument) -> None:
        """Append a document."""
        self._waiting.append(document)
        self._num_bytes += utf8_bytes(document.text)
        if self._num_bytes >= BATCH_BYTES:
            self._flush()

    def close(self) -> bytes:
        """Return the bytes of the file."""
        self._flush()
        self._writer.close()
        return self._sink.getvalue()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(_table(self._waiting))
            _release_pages(self._num_bytes)
            self._waiting, self._num_bytes = [], 0


def read_curated(content: bytes) -> Iterator[CuratedDocument]:
    """Yield the documents of a file of :class:`DocumentWriter`, those of a row group in memory at a time."""
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        for index in range(file.num_row_groups):
            # No name refers to a document that is given away: a large one is freed as soon as can be.
            yield from _documents_of(file, index)


def _documents_of(file: pq.ParquetFile, index: int) -> Iterator[CuratedDocument]:
    """Return the documents of a row group; a long text is a part of its buffer."""
    found = list[CuratedDocument]()
    for batch in _read_row_group(file, index).to_batches():
        texts = batch.column("text")
        _, ends, content = texts.buffers()
        ends = np.frombuffer(ends, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
        rows = batch.drop_columns(["text"]).to_pylist()
        for row, start, end in zip(rows, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            text = long_or_short(memoryview(content)[start:end]) if end > start else ""
            found.append(CuratedDocument(**row | {"scores": dict(row["scores"]), "text": text}))
    found.reverse()
    return (found.pop() for _ in range(len(found)))


def join_files(contents: Iterable[bytes]) -> bytes:
    """Return one file with the row groups of several, in order."""
    sink = BytesIO()
    with _open_writer(sink) as writer:
        for content in contents:
            with pq.ParquetFile(pa.BufferReader(content)) as file:
                for index in range(file.num_row_groups):
                    table = _read_row_group(file, index)
                    writer.write_table(table)
                    _release_pages(table.nbytes)
    return sink.getvalue()


def _read_row_group(file: pq.ParquetFile, index: int) -> pa.Table:
    table = file.read_row_group(index)
    _release_pages(table.nbytes)
    return table


def _release_pages(num_bytes: int) -> None:
    """Give what arrow has freed back to the system, if it has just read or written a long text."""
    if num_bytes > LONG_BYTES:
        pa.default_memory_pool().release_unused()


def _open_writer(sink: BytesIO) -> pq.ParquetWriter:
    # Statistics and dictionaries of texts would be copies of them, of which a reader has no use.
    return pq.ParquetWriter(
        sink, SCHEMA, compression="zstd", use_dictionary=REPEATED, write_statistics=SHORT
    )


def _table(documents: Sequence[CuratedDocument]) -> pa.Table:
    columns = {
        name: [getattr(document, name) for document in documents]
        for name in SCHEMA.names
        if name not in ("scores", "text")
    }
    columns["scores"] = [sorted(document.scores.items()) for document in documents]
    columns["text"] = _text_column([document.text for document in documents])
    return pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)


def _text_column(texts: Sequence[Text]) -> Any:
    """Return the column of texts; one long text is not copied."""
    if not any(isinstance(text, LongText) for text in texts):
        return texts
    contents = [text.content if isinstance(text, LongText) else text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, contents)], dtype=np.int64)
    content = contents[0] if len(contents) == 1 else b"".join(contents)
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(content))

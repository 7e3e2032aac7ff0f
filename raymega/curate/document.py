"""Document on its way through the steps, and the Parquet in which it is stored between them.

It owns the columns of the output. Steps are in `raymega.curate.steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

BATCH_BYTES = 8 << 20
"""Text of a row group; it holds whole documents of this size or a little more."""
READ_ROWS = 64

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
        text: Text.
        source: Path of its file and, after ``@``, its place there: a byte or a row number.
        url: Address of the page, if the archive names one.
        language: ISO 639 code, once the step ``language`` has found it.
        scores: Numbers that steps have found, by name.
        reasons: Changes that steps have made, in order.
    """

    id: str
    text: str
    source: str
    url: str = ""
    language: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


def text_bytes(text: str) -> int:
    """Return the size of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


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
        self._num_bytes += text_bytes(document.text)
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
            self._waiting, self._num_bytes = [], 0


def read_curated(content: bytes) -> Iterator[CuratedDocument]:
    """Yield the documents of a file of :class:`DocumentWriter`, a few in memory at a time."""
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        for batch in file.iter_batches(READ_ROWS):
            for row in batch.to_pylist():
                yield CuratedDocument(**row | {"scores": dict(row["scores"])})


def join_files(contents: Iterable[bytes]) -> bytes:
    """Return one file with the row groups of several, in order."""
    sink = BytesIO()
    with _open_writer(sink) as writer:
        for content in contents:
            with pq.ParquetFile(pa.BufferReader(content)) as file:
                for index in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(index))
    return sink.getvalue()


def _open_writer(sink: BytesIO) -> pq.ParquetWriter:
    # Statistics and dictionaries of texts would be copies of them, of which a reader has no use.
    return pq.ParquetWriter(
        sink, SCHEMA, compression="zstd", use_dictionary=REPEATED, write_statistics=SHORT
    )


def _table(documents: Sequence[CuratedDocument]) -> pa.Table:
    columns = {
        name: [getattr(document, name) for document in documents]
        for name in SCHEMA.names
        if name != "scores"
    }
    columns["scores"] = [sorted(document.scores.items()) for document in documents]
    return pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)

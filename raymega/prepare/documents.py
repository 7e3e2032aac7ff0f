"""Reads documents from pieces of files: whole text files, JSON lines, Parquet rows.

It owns the three formats and the replacement of bytes that are not UTF-8; it makes no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from raymega.errors import ConfigError, Fault
from raymega.prepare.sources import FilePiece, ShardGroup, open_root

TEXT_KEY = "text"
REPLACEMENT = "\ufffd"
PARQUET_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Document of the corpus.

    Attributes:
        name: Path of its file, with ``@`` and a byte or row number when the file has several.
        text: Text of the document; never empty in results of :func:`read_documents`.
        num_bytes: Size in bytes of the encoded text.
        num_replaced: Number of replacement characters inserted where bytes were not UTF-8.
    """

    name: str
    text: str
    num_bytes: int
    num_replaced: int


def read_documents(group: ShardGroup) -> Iterator[Document]:
    """Yield the non-empty documents of a group in order.

    Text files and JSON lines are read one document at a time, Parquet files PARQUET_ROWS rows at a
    time.

    Raises:
        ConfigError: A JSON line or a Parquet file has no text field.
    """
    # One file system for each input, as opening one may mean a login.
    systems: dict[str, fs.FileSystem] = {}
    for piece in group.pieces:
        system = systems.setdefault(piece.file.root, open_root(piece.file.root))
        read = READERS.get(PurePosixPath(piece.file.name).suffix, _read_text)
        with system.open_input_file(piece.file.path) as stream:
            yield from (document for document in read(stream, piece) if document.text)


def _read_text(stream: pa.NativeFile, piece: FilePiece) -> Iterator[Document]:
    yield _decode(piece.file.name, stream.read())


def _read_json_lines(stream: pa.NativeFile, piece: FilePiece) -> Iterator[Document]:
    """Yield the lines that begin in the piece, though the last may end beyond it."""
    reader = BufferedReader(stream)
    # A line that began before the piece belongs to the previous piece.
    if piece.start:
        reader.seek(piece.start - 1)
        reader.readline()
    # A blank line is no document. A line is decoded twice: as JSON, then the text inside it.
    while (start := reader.tell()) < piece.end:
        name = f"{piece.file.name}@{start}"
        line = _decode(name, reader.readline())
        if line.text.strip():
            # JSON can hold lone surrogates (\ud800), which become replacement characters.
            raw = _json_text(line).encode("utf-8", "surrogatepass")
            yield _decode(name, raw, num_replaced=line.num_replaced)


def _json_text(line: Document) -> str:
    try:
        text = json.loads(line.text)[TEXT_KEY]
    except (ValueError, KeyError, TypeError) as error:
        raise _no_text(line.name, f"{type(error).__name__}: {error}") from error
    if not isinstance(text, str):
        raise _no_text(line.name, f"its {TEXT_KEY} is a {type(text).__name__}")
    return text


def _read_parquet(stream: pa.NativeFile, piece: FilePiece) -> Iterator[Document]:
    table = pq.ParquetFile(stream)
    if TEXT_KEY not in table.schema_arrow.names:
        raise _no_text(piece.file.name, f"its columns are {', '.join(table.schema_arrow.names)}")
    # Rows are numbered over the whole file; a null is an empty document.
    row = 0
    for batch in table.iter_batches(PARQUET_ROWS, columns=[TEXT_KEY]):
        for text in batch.column(0).to_pylist():
            yield _decode(f"{piece.file.name}@{row}", (text or "").encode())
            row += 1


def _decode(name: str, raw: bytes, *, num_replaced: int = 0) -> Document:
    text = raw.decode("utf-8", "replace")
    # Characters U+FFFD that the source itself holds do not count.
    added = text.count(REPLACEMENT) - raw.count(REPLACEMENT.encode())
    return Document(name=name, text=text, num_bytes=len(raw), num_replaced=num_replaced + added)


def _no_text(where: str, what: str) -> ConfigError:
    fault = Fault(
        fact=f"{where} has no document ({what})",
        rule=f"a .jsonl line is an object with a string {TEXT_KEY!r}, a .parquet file has a string "
        f"column {TEXT_KEY!r}",
        remedy="repair the file, or leave it out with --exclude",
    )
    return ConfigError(fault)


READERS: dict[str, Callable[[pa.NativeFile, FilePiece], Iterator[Document]]] = {
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}

"""Reads tables: Parquet and Arrow files, of which one column has the documents.

It owns the rows of a table and its cuts: row groups of Parquet, record batches of Arrow files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raymega.errors import first_few
from raymega.prepare.chat.rows import OTHER_KEYS, conversation_text
from raymega.prepare.readers.entries import DamagedError, Entry, Opened

BATCH_ROWS = 1024
ARROW_FILE_MAGIC = b"ARROW1"


def read_parquet(opened: Opened) -> Iterator[Entry]:
    """Yield the rows of the piece's row groups; the place of a row is its number in the file.

    Raises:
        DamagedError: The file is no Parquet, or has no column of strings with the key's name.
    """
    try:
        table = pq.ParquetFile(opened.random_access())
    except pa.ArrowException as error:
        # Its description stands at its end.
        raise DamagedError(opened.piece.file.num_bytes, _first_line(error)) from error
    _check_column(table.schema_arrow, opened)
    # A whole file, or some of its row groups.
    groups = (
        range(table.num_row_groups)[opened.piece.start : opened.piece.end]
        if opened.piece.is_cut
        else None
    )
    skipped = range(opened.piece.start if opened.piece.is_cut else 0)
    first = sum(table.metadata.row_group(index).num_rows for index in skipped)
    columns = [name for name in table.schema_arrow.names if name in {opened.text_key, *OTHER_KEYS}]
    if opened.row_format == "text":
        columns = [opened.text_key]
    batches = table.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns)
    yield from _rows(batches, opened, lambda row: first + row)


def read_arrow(opened: Opened) -> Iterator[Entry]:
    """Yield the rows of an Arrow IPC file or stream.

    The place of a row is its number in the file; in a piece behind the first one that of its record batch, + and the
    number from there.

    Raises:
        DamagedError: The file is no Arrow IPC, or has no column of strings with the key's name.
    """
    stream = opened.random_access()
    start = stream.tell()
    is_file = stream.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
    stream.seek(start)
    try:
        table = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
    except pa.ArrowException as error:
        place = opened.piece.file.num_bytes if is_file else 0
        raise DamagedError(place, _first_line(error)) from error
    _check_column(table.schema, opened)
    before = f"{opened.piece.start}+" if opened.piece.is_cut and opened.piece.start else ""
    yield from _rows(_batches(table, opened), opened, lambda row: f"{before}{row}")


def row_groups(stream: pa.NativeFile) -> list[int]:
    """Return the size in bytes of each row group of a Parquet file."""
    metadata = pq.ParquetFile(stream).metadata
    return [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]


def num_record_batches(stream: pa.NativeFile) -> int:
    """Return the number of record batches of an Arrow file; 1 for a stream, which is not cut."""
    if stream.read(len(ARROW_FILE_MAGIC)) != ARROW_FILE_MAGIC:
        return 1
    return int(pa.ipc.open_file(stream).num_record_batches)


def _batches(
    table: pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader, opened: Opened
) -> Iterator[pa.RecordBatch]:
    if isinstance(table, pa.ipc.RecordBatchStreamReader):
        yield from table
        return
    batches = range(table.num_record_batches)
    for index in batches[opened.piece.start : opened.piece.end] if opened.piece.is_cut else batches:
        yield table.get_batch(index)


def _rows(
    batches: Iterator[pa.RecordBatch], opened: Opened, place_of: Callable[[int], int | str]
) -> Iterator[Entry]:
    row, texts_of = 0, _texts if opened.row_format == "text" else _conversations
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for text, why in texts_of(batch.slice(start, BATCH_ROWS), opened):
                    yield Entry(row=row, place=place_of(row), text=text, why=why)
                    row += 1
    except (pa.ArrowException, OSError) as error:
        raise DamagedError(place_of(row), _first_line(error)) from error


def _texts(batch: pa.RecordBatch, opened: Opened) -> Iterator[tuple[str, str]]:
    # As bytes, because strings of a file need not be UTF-8.
    strings = batch.column(opened.text_key)
    if pa.types.is_dictionary(strings.type):
        strings = strings.dictionary_decode()
    yield from map(_text, strings.cast(pa.large_string()).cast(pa.large_binary()).to_pylist())


def _conversations(batch: pa.RecordBatch, opened: Opened) -> Iterator[tuple[str, str]]:
    for row in batch.to_pylist():
        # a column gives every object all keys: one that is absent below is a null there
        kept = {name: _without_nulls(value) for name, value in row.items()}
        yield conversation_text(kept, opened.row_format, opened.text_key)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _text(raw: bytes | None) -> tuple[str, str]:
    # A null is an empty document.
    try:
        return (raw or b"").decode(), ""
    except UnicodeDecodeError as error:
        return "", f"byte {error.start} of the row's text is not UTF-8"


def _check_column(schema: pa.Schema, opened: Opened) -> None:
    column = opened.text_key
    if column not in schema.names:
        names = first_few(schema.names, 8) or "none"
        raise DamagedError(
            0, f"it has no column {column!r}; its columns are {names}; choose one with --text-key"
        )
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if opened.row_format == "text" and not (
        pa.types.is_string(value)
        or pa.types.is_large_string(value)
        or pa.types.is_string_view(value)
    ):
        raise DamagedError(
            0, f"its column {column!r} is of {kind}, not of strings; choose another with --text-key"
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"

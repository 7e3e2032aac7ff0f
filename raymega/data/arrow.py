"""Token shards on disk: Arrow IPC files of one or two unsigned columns and one of images, read through memory maps.

It owns a shard's bytes and the view of many shards as one stream. The shards of a dataset are
listed by `raymega.data.format`; windows are drawn from the stream by `raymega.data.order`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol, Self
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from isal import isal_zlib

from raymega.data.format import LENGTHS_DTYPE, ShardMeta, SplitMeta, shard_fault, wrong_crc32
from raymega.errors import DataError, Fault

COLUMN, TARGETS_COLUMN, IMAGES_COLUMN = "tokens", "targets", "images"
"""Columns of a shard. That of images has pixels beside the first token of an image, and no bytes beside others."""
LENGTHS_KEY = b"document_lengths"
BATCH_TOKENS = 1 << 20
BATCH_IMAGE_BYTES = 1 << 28
"""Bytes of images behind which a batch ends."""
MOST_IMAGE_BYTES = (1 << 31) - 1 - BATCH_IMAGE_BYTES
"""Most bytes of the images of one document: with those of a batch before it Arrow counts them in 32 bits."""
MOST_MAPS = 1 << 12
"""Most shards that a process keeps mapped, of all datasets; Linux allows 65,530 maps in all."""
Tokens = npt.NDArray[np.int64]


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the narrowest column type that holds every token of the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class Files(Protocol):
    """Shards of a dataset by their description, here or in a cache."""

    def table(self, shard: ShardMeta) -> pa.Table:
        """Return the columns of a shard, mapped into memory; may wait until the shard is here."""

    def reader(self, shard: ShardMeta) -> AbstractContextManager[pa.RecordBatchFileReader]:
        """Return a reader of the shard's record batches, with their metadata."""

    def whole(self, file: ShardMeta) -> bytes | bytearray:
        """Return the bytes of a file of a split; their checksum is right."""

    def need(self, shards: Sequence[ShardMeta]) -> None:
        """Take the shards that are read next, the first one first."""

    def drop_damaged(self, shard: ShardMeta) -> bool:
        """Return whether the shard was a damaged copy, which is removed and comes again when it is read."""


class FolderFiles:
    """Shards in a folder."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of a dataset."""
        self._folder = folder

    def table(self, shard: ShardMeta) -> pa.Table:
        """See Files."""
        return _map_shard(self._folder, shard)

    def reader(self, shard: ShardMeta) -> AbstractContextManager[pa.RecordBatchFileReader]:
        """See Files."""
        return open_shard(self._folder / shard.file)

    def whole(self, file: ShardMeta) -> bytes:
        """See Files."""
        path = self._folder / file.file
        try:
            found = path.read_bytes()
        except OSError as error:
            raise DataError(unreadable(path, error)) from error
        if (crc32 := isal_zlib.crc32(found)) != file.crc32:
            raise DataError(wrong_crc32(str(path), crc32, file))
        return found

    def need(self, shards: Sequence[ShardMeta]) -> None:
        """Do nothing: the files are here."""

    def drop_damaged(self, shard: ShardMeta) -> bool:  # noqa: ARG002
        """Return False: the files are no copies."""
        return False


class TokenStream:
    """Tokens of a split in shard order, readable as one array.

    A shard is memory-mapped when it is read, and the MOST_MAPS read last stay mapped. Only pages that
    are read take memory.
    """

    def __init__(self, files: Files | Path, split: SplitMeta) -> None:
        """Take the files of a dataset, or their folder; a shard is looked at when it is first read."""
        self.num_tokens, self.shards = split.num_tokens, split.shards
        self._files = FolderFiles(files) if isinstance(files, Path) else files
        self._shards, self._lengths = split.shards, split.lengths
        self._ends = list(accumulate(shard.num_tokens for shard in split.shards))

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) as int64, across shard borders."""
        if not 0 <= start < stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of a stream of {self.num_tokens}")
        return np.concatenate(list(self._pieces(start, stop, COLUMN)))

    def read_targets(self, start: int, stop: int) -> Tokens:
        """Return what tokens [start, stop) are as labels; the shards must hold it."""
        return np.concatenate(list(self._pieces(start, stop, TARGETS_COLUMN)))

    def read_images(self, start: int, stop: int, before: int = 0) -> list[tuple[int, memoryview]]:
        """Return the images that begin among tokens [start - before, stop): place of the first token, and pixels.

        Pixels are views of the mapped shard, which are read from the disk at their first use.
        Shards before that of ``start`` need not be on this node: a shard has whole images.
        """
        found = list[tuple[int, memoryview]]()
        index = bisect_right(self._ends, start)
        start = max(start - before, self._ends[index] - self._shards[index].num_tokens)
        for at, column in self._columns(start, stop, IMAGES_COLUMN):
            inside = at
            for chunk in column.chunks:
                found += [(inside + place, raw) for place, raw in _filled(chunk)]
                inside += len(chunk)
        return found

    def document_lengths(self) -> npt.NDArray[np.uint32]:
        """Return the number of tokens of each document in stream order, [N].

        They are read from their own file, and where a split has none, from the metadata of all record batches.

        Raises:
            DataError: A file cannot be read, or the numbers do not add up to the stream's length.
        """
        parts: Iterable[npt.NDArray[np.integer]] = map(self._stored_lengths, self._shards)
        if self._lengths is not None:
            found = np.frombuffer(self._files.whole(self._lengths), LENGTHS_DTYPE)
            borders = np.cumsum([shard.num_documents for shard in self._shards])
            parts = np.split(found, borders[:-1])
        kept = []
        for shard, lengths in zip(self._shards, parts, strict=True):
            if int(lengths.sum()) != shard.num_tokens:
                fact = f"the documents of {shard.file} have {int(lengths.sum())} tokens"
                raise DataError(shard_fault(fact, f"dataset.json says {shard.num_tokens}"))
            least, most = int(lengths.min(initial=0)), int(lengths.max(initial=0))
            if least < 0 or most > shard.num_tokens:
                fact = f"documents of {shard.file} have between {least} and {most} tokens"
                raise DataError(shard_fault(fact, f"it has {shard.num_tokens} in all"))
            kept.append(lengths.astype(np.uint32, copy=False))
        return np.concatenate(kept)

    def _stored_lengths(self, shard: ShardMeta) -> npt.NDArray[np.integer]:
        with self._files.reader(shard) as reader:
            return _read_lengths(reader)

    def need(self, shards: Sequence[int]) -> None:
        """Take the numbers of the shards that are read next, the first one first."""
        self._files.need([self._shards[number] for number in shards])

    def drop_damaged(self, start: int, stop: int) -> bool:
        """Return whether a shard of tokens [start, stop) was a damaged copy, which comes again when it is read."""
        first, last = bisect_right(self._ends, start), bisect_right(self._ends, stop - 1)
        return (
            sum(map(self._files.drop_damaged, self._shards[first : last + 1])) > 0
        )  # each of them

    def _pieces(self, start: int, stop: int, name: str) -> Iterator[Tokens]:
        for _, column in self._columns(start, stop, name):
            yield from (_numbers(chunk).astype(np.int64) for chunk in column.chunks)

    def _columns(self, start: int, stop: int, name: str) -> Iterator[tuple[int, pa.ChunkedArray]]:
        """Yield the parts of a column that tokens [start, stop) have in each shard, with their first tokens."""
        index = bisect_right(self._ends, start)
        while start < stop:
            # the part of [start, stop) in this shard
            end = min(stop, self._ends[index])
            base = self._ends[index] - self._shards[index].num_tokens
            table = self._files.table(self._shards[index])
            yield start, table[name].slice(start - base, end - start)
            start, index = end, index + 1


class ShardWriter:
    """Writer of one shard in record batches; the file gets its final name only when complete.

    A batch holds whole documents with BATCH_TOKENS tokens or a little more, so that memory stays
    bounded for shards of any length. Its metadata hold the lengths of its documents.
    """

    def __init__(
        self,
        folder: Path,
        file: str,
        *,
        dtype: str,
        has_targets: bool = False,
        has_images: bool = False,
    ) -> None:
        """Open ``folder/file`` for writing under a temporary name."""
        self._folder, self._file = folder, file
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of its own, as Ray may run a task twice at the same time.
        self._partial = path.with_suffix(f".{uuid4().hex[:8]}.partial")
        columns = [(COLUMN, pa.from_numpy_dtype(np.dtype(dtype)))]
        columns += [(TARGETS_COLUMN, pa.uint8())] * has_targets
        columns += [(IMAGES_COLUMN, pa.binary())] * has_images
        self._schema, self._has_images = pa.schema(columns), has_images
        self._writer = pa.ipc.new_file(str(self._partial), self._schema)
        self._pending: list[npt.NDArray[np.unsignedinteger]] = []
        self._targets: list[npt.NDArray[np.uint8]] = []
        self._images: list[tuple[int, bytes]] = []
        self._num_pending = self._num_tokens = self._num_documents = self._num_image_bytes = 0

    def append(
        self,
        document: npt.NDArray[np.unsignedinteger],
        targets: npt.NDArray[np.uint8] | None = None,
        images: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """Add one document: its tokens, including that of its end, what they are as labels, and its images by token."""
        num_bytes = sum(len(raw) for _, raw in images)
        if num_bytes > MOST_IMAGE_BYTES:
            fact = f"a document has {num_bytes:,} bytes of images"
            raise DataError(shard_fault(fact, f"one holds at most {MOST_IMAGE_BYTES:,}"))
        self._images += [(self._num_pending + place, raw) for place, raw in images]
        self._num_image_bytes += num_bytes
        self._pending.append(document)
        self._targets += [] if targets is None else [targets]
        self._num_pending += len(document)
        self._num_documents += 1
        # Only between documents: a batch holds whole ones.
        if self._num_pending >= BATCH_TOKENS or self._num_image_bytes >= BATCH_IMAGE_BYTES:
            self._flush()

    def close(self) -> ShardMeta:
        """Finish the file, rename it to its final name and return its description."""
        self._flush()
        self._writer.close()
        meta = ShardMeta(
            file=self._file,
            num_documents=self._num_documents,
            num_tokens=self._num_tokens,
            num_bytes=self._partial.stat().st_size,
            crc32=file_crc32(self._partial),
        )
        # rename last: a file with the final name is complete
        self._partial.replace(self._folder / self._file)
        return meta

    def _flush(self) -> None:
        if not self._pending:
            return
        # From its bytes: pa.array would import pandas, half a second of each process.
        found = [np.concatenate(each) for each in (self._pending, self._targets) if each]
        columns = [
            pa.Array.from_buffers(field.type, len(values), [None, pa.py_buffer(values)])
            for field, values in zip(self._schema, found, strict=False)
        ]
        columns += [_sparse(self._images, self._num_pending)] if self._has_images else []
        lengths = b",".join(b"%d" % len(document) for document in self._pending)
        # custom metadata, so that lengths are readable without the tokens
        batch = pa.record_batch(columns, schema=self._schema)
        self._writer.write_batch(batch, custom_metadata={LENGTHS_KEY: lengths})
        self._num_tokens += self._num_pending
        self._pending, self._targets, self._num_pending = [], [], 0
        self._images, self._num_image_bytes = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # on an error: leave no partial file
        if kind is not None:
            self._writer.close()
            self._partial.unlink()


def file_crc32(path: Path) -> int:
    """Return the ``zlib.crc32`` of a whole file, read in pieces of 1 MiB."""
    crc = 0
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            crc = isal_zlib.crc32(piece, crc)
    return crc


def _numbers(column: pa.Array) -> npt.NDArray[np.unsignedinteger]:
    """Return an unsigned column as a view of the shard; Arrow's own would import pandas, 0.3 s of each process."""
    size = column.type.bit_width // 8
    return np.frombuffer(column.buffers()[1], f"<u{size}", len(column), column.offset * size)


def _sparse(values: Sequence[tuple[int, bytes]], size: int) -> pa.Array:
    """Return a binary column of ``size`` entries, of which those of ``values`` by place are filled."""
    # no mask of nulls: an image has bytes, so an empty entry is none
    lengths = np.zeros(size, dtype=np.int64)
    lengths[[place for place, _ in values]] = [len(raw) for _, raw in values]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    content = b"".join(raw for _, raw in values)
    return pa.Array.from_buffers(
        pa.binary(), size, [None, pa.py_buffer(ends), pa.py_buffer(content)]
    )


def _filled(column: pa.Array) -> list[tuple[int, memoryview]]:
    """Return the entries of a binary column that are not empty, by place, as views of the shard."""
    _, ends_buffer, content = column.buffers()
    if content is None:  # all entries are empty
        return []
    # buffers are of the whole record batch, and a slice has an offset; its entries as objects would be copies
    first, count = column.offset, len(column) + 1
    ends = np.frombuffer(ends_buffer, dtype=np.int32)[first : first + count]
    filled, view = np.flatnonzero(np.diff(ends)).tolist(), memoryview(content)
    return [(place, view[ends[place] : ends[place + 1]]) for place in filled]


def shard_documents(path: Path) -> Iterator[tuple[Any, ...]]:
    """Yield the columns of each document of a shard: tokens, targets if any, as views of its memory map, and images by token."""
    with pa.memory_map(str(path)) as mapped:
        reader = pa.ipc.open_file(mapped)
        for index in range(reader.num_record_batches):
            found = reader.get_batch_with_custom_metadata(index)
            batch, at = found.batch, 0
            has_images = IMAGES_COLUMN in batch.schema.names
            plain = [*map(_numbers, batch.columns[: batch.num_columns - has_images])]
            for length in _lengths(found.custom_metadata).tolist():
                columns = [column[at : at + length] for column in plain]
                if has_images:
                    yield (*columns, _filled(batch.column(IMAGES_COLUMN).slice(at, length)))
                else:
                    yield tuple(columns)
                at += length


def shard_lengths(content: bytes) -> Tokens:
    """Return the number of tokens of each document of a shard whose bytes are given, [N]."""
    return _read_lengths(pa.ipc.open_file(content))


def _read_lengths(reader: pa.RecordBatchFileReader) -> Tokens:
    found = map(reader.get_batch_with_custom_metadata, range(reader.num_record_batches))
    return np.concatenate([_lengths(each.custom_metadata) for each in found])


def _lengths(metadata: pa.KeyValueMetadata | None) -> Tokens:
    # parsed at once: a million numbers one by one take 0.2 s
    return np.fromstring((metadata or {}).get(LENGTHS_KEY, b""), dtype=np.int64, sep=",")


@contextmanager
def open_shard(path: Path) -> Iterator[pa.RecordBatchFileReader]:
    """Open a shard's file; errors of reading it are those of a damaged shard.

    Raises:
        DataError: The file is missing or damaged.
    """
    try:
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as reader:
            yield reader
    except (OSError, pa.ArrowInvalid, KeyError, ValueError) as error:
        raise DataError(unreadable(path, error)) from error


@lru_cache(MOST_MAPS)
def _map_shard(folder: Path, shard: ShardMeta) -> pa.Table:
    return map_shard(folder / shard.file, shard)


def map_shard(path: Path, shard: ShardMeta) -> pa.Table:
    """Return the columns of a shard's file, mapped into memory.

    Raises:
        DataError: The file is missing, damaged, or not the shard that is described.
    """
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        num_tokens = len(table[COLUMN])
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise DataError(unreadable(path, error)) from error
    # sizes match dataset.json, or the shard is another one
    if num_tokens != shard.num_tokens:
        fact = f"{path} has {num_tokens} tokens"
        raise DataError(shard_fault(fact, f"dataset.json says {shard.num_tokens}"))
    return table


def unreadable(path: Path, error: Exception) -> Fault:
    """Return the fault of a file of a dataset that cannot be read."""
    return shard_fault(f"{path} cannot be read ({error})", "it must be whole")

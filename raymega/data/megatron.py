"""Megatron's files PREFIX.bin and PREFIX.idx: reads them in place, and writes them byte for byte alike.

    .bin  tokens of all sequences end to end, uint16 or int32
    .idx  b"MMIDIDX\\0\\0", version 1 as uint64, code of the type as uint8, number of sequences and of
          document borders as uint64; lengths of sequences, int32; their offsets in bytes, int64; the
          borders of documents, counted in sequences from 0, int64

Source: megatron/core/datasets/indexed_dataset.py of megatron-core 0.16.1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from struct import Struct
from typing import Literal

import numpy as np
import numpy.typing as npt

from raymega.config.data import CACHE_BYTES, MEGATRON
from raymega.data.format import SHARD_TOKENS, StreamShard
from raymega.data.streaming.bin_parts import PartCache, RemotePair, copied_index, look_at
from raymega.data.streaming.fetcher import Fetcher
from raymega.data.streaming.node_cache import SHARED_DOCUMENTS, Tables, cache_root, shared_tables
from raymega.data.streaming.remote_dataset import is_remote
from raymega.errors import ConfigError, DataError, Fault, StorageError
from raymega.storage.registry import reading_faults

HEADER = Struct("<9sQBQQ")
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Types of tokens by their code; Megatron's other two are no integers."""
UINT16_VOCAB = 65_500
"""Vocabularies from this size on are int32 in Megatron's own tool."""
NUM_PROBES, PROBE_BYTES = 64, 1 << 16

Tokens = npt.NDArray[np.int64]


def is_megatron(path: str) -> bool:
    """Return True if ``path`` names Megatron's files: ``megatron:PREFIX``."""
    return path.startswith(MEGATRON)


def megatron_dtype(vocab_size: int) -> Literal["uint16", "int32"]:
    """Return the type that Megatron's tool gives to tokens of a vocabulary."""
    return "uint16" if vocab_size < UINT16_VOCAB else "int32"


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronIndex:
    """Content of an .idx file; the arrays are memory maps.

    Attributes:
        dtype: Type of the tokens in the .bin file.
        lengths: Tokens of each sequence, [N] int32.
        offsets: First byte of each sequence in the .bin file, [N] int64.
        borders: First sequence of each document, and N, [D + 1] int64.
    """

    dtype: np.dtype[np.integer]
    lengths: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    borders: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronFiles:
    """Pair of files with one prefix.

    Attributes:
        index: The .idx file on this machine: itself, or a copy of that in an object store.
        num_bytes: Size of the .bin file.
        remote: The pair in an object store; None for files of this machine.
    """

    index: Path
    num_bytes: int
    remote: RemotePair | None


def find_files(prefix: str, *, root: Path | None = None, known: str = "") -> MegatronFiles:
    """Find PREFIX.bin and PREFIX.idx; the .idx file of an object store is copied to this node.

    Args:
        prefix: Path or URI of both without .bin and .idx.
        root: Folder of the node for the copy; None for :func:`cache_root`.
        known: Text that tells what the driver found in an object store, see `bin_parts.look_at`; empty to look.

    Raises:
        ConfigError: One of the two files does not exist.
        StorageError: The store cannot be reached.
    """
    if is_remote(prefix):
        try:
            pair = look_at(prefix, known)
        except KeyError as error:
            raise ConfigError(_no_files(f"{error.args[0]} does not exist")) from None
        index = copied_index(pair, root or cache_root())
        return MegatronFiles(index=index, num_bytes=pair.num_bytes, remote=pair)
    for path in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
        if not path.is_file():
            raise ConfigError(_no_files(f"{path} does not exist"))
    return MegatronFiles(index=Path(f"{prefix}.idx"), num_bytes=path.stat().st_size, remote=None)


def read_index(path: Path) -> MegatronIndex:
    """Read the header of an .idx file, and map its arrays.

    Raises:
        DataError: The file is not one of version 1 with integer tokens of text.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise DataError(_no_files(f"{path} has {num_bytes} bytes"))
    magic, version, code, num_sequences, num_borders = HEADER.unpack(head)
    if (magic, version) != (MAGIC, VERSION) or code not in DTYPES:
        raise DataError(_no_files(f"{path} begins with {head[:18].hex()}"))
    wanted = HEADER.size + 12 * num_sequences + 8 * num_borders
    if num_bytes != wanted:
        raise DataError(_no_files(f"{path} has {num_bytes} bytes instead of {wanted}"))
    # three arrays, one after the other
    at, arrays = HEADER.size, []
    for dtype, size in (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_borders)):
        # numpy maps no empty array
        array = np.memmap(path, dtype, "r", at, size) if size else np.empty(0, dtype)
        arrays.append(array)
        at += array.nbytes
    return MegatronIndex(
        dtype=np.dtype(DTYPES[code]), lengths=arrays[0], offsets=arrays[1], borders=arrays[2]
    )


class MegatronStream:
    """Tokens of a .bin file as one array, read in place; see `raymega.data.arrow.TokenStream`.

    Of a file in an object store the parts that are read come to this node, see `streaming.bin_parts`.
    """

    def __init__(self, prefix: str, fetcher: Fetcher | None = None) -> None:
        """Map the files; ``fetcher`` brings those of an object store, None is one of their own.

        Raises:
            ConfigError: One of the two files does not exist.
            DataError: The files are damaged, or the .bin file has another length than the .idx says.
            StorageError: The store cannot be reached.
        """
        self._files = find_files(
            prefix,
            root=fetcher.root if fetcher else None,
            known=fetcher.known.get(f"{MEGATRON}{prefix}", "") if fetcher else "",
        )
        self._prefix, self._fetcher = prefix, fetcher
        self.index = self._index = read_index(self._files.index)
        path, num_bytes, item = f"{prefix}.bin", self._files.num_bytes, self._index.dtype.itemsize
        # Offsets ascend without gaps in what Megatron's tools write, so the last one tells the length.
        lengths, offsets = self._index.lengths, self._index.offsets
        end = int(offsets[-1]) + item * int(lengths[-1]) if len(lengths) else 0
        if num_bytes != end:
            raise DataError(_no_files(f"{path} has {num_bytes} bytes, and its .idx says {end}"))
        self.num_tokens = num_bytes // item
        is_here = num_bytes and self._files.remote is None
        self._tokens = np.memmap(path, self._index.dtype, "r") if is_here else np.empty(0)

    @cached_property
    def _parts(self) -> PartCache | None:
        """Parts of a file in an object store; None for a file of this machine."""
        if self._files.remote is None:
            return None
        fetcher = self._fetcher or Fetcher(limit_bytes=CACHE_BYTES, is_of_run=False)
        return PartCache(self._files.remote, self.shards, self._index.dtype, fetcher)

    @cached_property
    def shards(self) -> tuple[StreamShard, ...]:
        """Parts of the stream, as if it were prepared: each ends with the document that reaches SHARD_TOKENS."""
        if len(self._index.borders) < SHARED_DOCUMENTS:
            found = self._count_parts()
        else:  # counted by one process of the node: it takes 40 bytes of memory a document
            far = self._files.remote
            key = far.key if far else megatron_key(f"{MEGATRON}{self._prefix}")
            found = shared_tables(key, f"parts-{SHARD_TOKENS}", self._count_parts)
        item, sizes = self._index.dtype.itemsize, (found["tokens"], found["documents"])
        return tuple(
            StreamShard(num_tokens=n, num_documents=documents, num_bytes=item * n)
            for n, documents in zip(*(each.tolist() for each in sizes), strict=True)
        )

    def _count_parts(self) -> Tables:
        """Return the tokens and documents of each part."""
        found = self.document_lengths()
        numbers = (np.cumsum(found) - found) // SHARD_TOKENS
        first = np.flatnonzero(np.diff(numbers, prepend=-1))
        tokens = np.add.reduceat(found, first) if len(first) else found
        return {"tokens": tokens, "documents": np.diff(first, append=len(found))}

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(shard.num_tokens for shard in self.shards))

    def need(self, shards: Sequence[int]) -> None:
        """Take the numbers of the parts that are read next, the first one first."""
        if self._parts is not None:
            self._parts.need([self._parts.parts[number] for number in shards])

    def drop_damaged(self, start: int, stop: int) -> bool:  # noqa: ARG002
        """Return False: without checksums nothing tells a damaged part."""
        return False

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) as int64."""
        if not 0 <= start < stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of a stream of {self.num_tokens}")
        if self._parts is None:
            return self._tokens[start:stop].astype(np.int64)
        number, found = bisect_right(self._ends, start), list[Tokens]()
        while start < stop:
            end, first = (
                min(stop, self._ends[number]),
                self._ends[number] - self.shards[number].num_tokens,
            )
            found.append(self._parts.tokens(number)[start - first : end - first].astype(np.int64))
            start, number = end, number + 1
        return np.concatenate(found)

    def document_lengths(self) -> Tokens:
        """Return the number of tokens of each document that has any, in stream order, [N]."""
        ends = np.concatenate([[0], np.cumsum(self._index.lengths, dtype=np.int64)])
        lengths = np.diff(ends[self._index.borders])
        return lengths[lengths > 0]


def megatron_faults(path: str) -> list[Fault]:
    """Return the faults of the files at ``megatron:PREFIX``; reads the whole .idx and no tokens."""
    prefix = path.removeprefix(MEGATRON)
    if is_remote(prefix) and (refusals := reading_faults(prefix, field="megatron:PREFIX")):
        return refusals
    try:
        index = MegatronStream(prefix).index
    except (ConfigError, DataError, StorageError) as error:
        return [fault for fault in error.faults if isinstance(fault, Fault)]
    item = index.dtype.itemsize
    # Files that other tools wrote may skip or repeat parts of the .bin file.
    has_gaps = (np.diff(index.offsets) != item * index.lengths[:-1].astype(np.int64)).any()
    if len(index.offsets) and (has_gaps or index.offsets[0] != 0):
        return [_no_files(f"{prefix}.idx has sequences that do not follow one another")]
    is_sound = len(index.borders) and index.borders[0] == 0
    if (
        not is_sound
        or index.borders[-1] != len(index.lengths)
        or (np.diff(index.borders) < 0).any()
    ):
        return [
            _no_files(f"{prefix}.idx has document borders that are no ascending row to the end")
        ]
    return []


def megatron_identity(path: str) -> str:
    """Return a digest of the .idx file, and of the size and NUM_PROBES pieces of the .bin file.

    Raises:
        ConfigError: One of the files does not exist.
        StorageError: The store cannot be reached.
    """
    prefix = path.removeprefix(MEGATRON)
    files = find_files(prefix)
    read_index(files.index)
    digest = blake2b(digest_size=8)
    with files.index.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    # All of a long .bin file would take hours.
    digest.update(b"%d" % files.num_bytes)
    for number in range(NUM_PROBES):
        start = number * max(0, files.num_bytes - PROBE_BYTES) // (NUM_PROBES - 1)
        digest.update(_probe(prefix, files, start))
    return digest.hexdigest()


def _probe(prefix: str, files: MegatronFiles, start: int) -> bytes:
    if files.remote is not None:
        return files.remote.read("bin", start, PROBE_BYTES)
    with Path(f"{prefix}.bin").open("rb") as file:
        file.seek(start)
        return file.read(PROBE_BYTES)


def megatron_key(path: str, known: str = "") -> str:
    """Return a digest of the .idx file's place, size and time, under which a node shares what it says."""
    prefix = path.removeprefix(MEGATRON)
    if is_remote(prefix):
        return look_at(prefix, known).key
    index = Path(f"{prefix}.idx")
    found = index.stat()
    name = f"{index.absolute()} {found.st_size} {found.st_mtime_ns}"
    return blake2b(name.encode(), digest_size=8).hexdigest()


def _no_files(fact: str) -> Fault:
    return Fault(
        fact=fact,
        rule="megatron:PREFIX is PREFIX.bin and PREFIX.idx as Megatron's tools/preprocess_data.py writes them",
        remedy="give the path of both without .bin and .idx, or write them again",
    )

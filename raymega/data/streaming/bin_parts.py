"""A pair of files PREFIX.bin and PREFIX.idx in an object store: the index is copied to the node, tokens come in parts.

A part is a range of the .bin file. It is fetched, kept and evicted like a shard of a prepared dataset, but has
no checksum. `raymega.data.megatron` knows what the index says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raymega.data.format import NO_CRC32, ShardMeta, StreamShard
from raymega.data.streaming.fetcher import PIECE_BYTES, Fetcher
from raymega.data.streaming.node_cache import TABLES, locked
from raymega.data.streaming.shard_cache import ShardCache
from raymega.errors import StorageError
from raymega.storage.registry import open_store
from raymega.storage.retry import RETRY
from raymega.storage.store import DelegatingStore, Store

NUM_LOOKS, LOOK_BYTES = 8, 1 << 12
"""Places of each file whose bytes are part of the pair's key on a node, and bytes of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemotePair:
    """Two files in a store.

    Attributes:
        store: Store of their folder.
        name: Name of both, without .bin and .idx.
        index_bytes: Size of the .idx file.
        num_bytes: Size of the .bin file.
        key: Digest of their URI, sizes and some of their bytes, under which a node keeps what it has of them.
    """

    store: Store
    name: str
    index_bytes: int
    num_bytes: int
    key: str

    @property
    def known(self) -> str:
        """Text from which :func:`look_at` makes the pair again, without a request."""
        return f"{self.key}-{self.index_bytes}-{self.num_bytes}"

    def read(self, ending: str, start: int, num_bytes: int) -> bytes:
        """Return a range of one of the files; a store that fails is asked again.

        Raises:
            StorageError: The store cannot be reached.
        """
        key = f"{self.name}.{ending}"
        return RETRY.read(lambda: self.store.get(key, start=start, num_bytes=num_bytes))


def look_at(prefix: str, known: str = "") -> RemotePair:
    """Find the files at the URI ``prefix``; asks for nothing where the ``known`` of the pair is given.

    Raises:
        KeyError: A file is missing; its URI is the argument.
        StorageError: The store cannot be reached.
    """
    folder, _, name = prefix.rpartition("/")
    store, sizes = open_store(folder), dict[str, int]()
    if known:
        key, index_bytes, num_bytes = known.split("-")
        return RemotePair(
            store=store, name=name, index_bytes=int(index_bytes), num_bytes=int(num_bytes), key=key
        )
    for ending in ("idx", "bin"):
        try:
            sizes[ending] = store.size(f"{name}.{ending}")
        except KeyError:
            raise KeyError(f"{prefix}.{ending}") from None
    pair = RemotePair(
        store=store, name=name, index_bytes=sizes["idx"], num_bytes=sizes["bin"], key=""
    )
    digest = blake2b(repr((prefix, sizes)).encode(), digest_size=8)
    for ending, size in sizes.items():
        for at in range(NUM_LOOKS):
            start = at * max(0, size - LOOK_BYTES) // (NUM_LOOKS - 1)
            digest.update(pair.read(ending, start, LOOK_BYTES))
    return RemotePair(
        store=store, name=name, index_bytes=sizes["idx"], num_bytes=sizes["bin"], key=digest.hexdigest()
    )  # fmt: skip


def copied_index(pair: RemotePair, root: Path) -> Path:
    """Return a copy of the .idx file below ``root``, which one process of the node makes for all.

    Raises:
        StorageError: The store cannot be reached, or the copy cannot be written.
    """
    folder = root / TABLES / pair.key
    path, partial = folder / "copy.idx", folder / "copy.partial"
    try:
        with locked(folder):
            if path.exists():
                return path
            # rename last: a file with the final name is whole
            with partial.open("wb") as file:
                for start in range(0, pair.index_bytes, PIECE_BYTES):
                    size = min(PIECE_BYTES, pair.index_bytes - start)
                    file.write(_whole(pair.read("idx", start, size), size, pair.name))
            partial.replace(path)
    except OSError as error:
        raise StorageError(
            fact=f"{path} cannot be written: {error.strerror or error}",
            rule="a node keeps a copy of the .idx file of Megatron's files in an object store",
            remedy="free space there, or make ~/.raymega/cache a link to a larger disk",
        ) from error
    return path


class PartCache(ShardCache):
    """Parts of a .bin file on this node; see ShardCache.

    Attributes:
        parts: Description of each part, in order.
    """

    def __init__(
        self,
        pair: RemotePair,
        parts: Sequence[StreamShard],
        dtype: np.dtype[np.integer],
        fetcher: Fetcher,
    ) -> None:
        """Take the pair, its parts in order, the type of its tokens, and what brings them."""
        self.parts = tuple(
            ShardMeta(
                file=f"{number:06d}.bin", num_documents=part.num_documents, num_tokens=part.num_tokens,
                num_bytes=part.num_bytes, crc32=NO_CRC32,
            )
            for number, part in enumerate(parts)
        )  # fmt: skip
        ends = [*accumulate((part.num_bytes for part in parts), initial=0)]
        starts = {part.file: start for part, start in zip(self.parts, ends, strict=False)}
        self._dtype = dtype
        super().__init__(_Ranges(pair, starts), fetcher.root / pair.key, fetcher)

    def tokens(self, number: int) -> npt.NDArray[np.integer]:
        """Return the tokens of a part, mapped into memory; waits until it is here.

        Raises:
            StorageError: The part did not come within the fetcher's timeout, or cannot be written.
        """
        found: npt.NDArray[np.integer] = self.mapped(
            self.parts[number], lambda path, _: np.memmap(path, self._dtype, "r")
        )
        return found


class _Ranges(DelegatingStore):
    """The .bin file as one object a part."""

    def __init__(self, pair: RemotePair, starts: dict[str, int]) -> None:
        super().__init__(pair.store)
        self._key, self._starts = f"{pair.name}.bin", starts

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """See Store; ``num_bytes`` is given."""
        found = self._store.get(self._key, start=self._starts[key] + start, num_bytes=num_bytes)
        return _whole(found, num_bytes, self._key)


def _whole(found: bytes, num_bytes: int, name: str) -> bytes:
    """Return ``found`` if it has the length that was asked for; without a checksum nothing else would tell."""
    if len(found) != num_bytes:
        raise StorageError(
            fact=f"the store sent {len(found)} of {num_bytes} bytes of {name}",
            rule="Megatron's files stay as they are while a run reads them",
            remedy="see whether they are being written anew",
        )
    return found

"""Computes the order of the data: the row of each sample of a dataset, by arithmetic alone.

In each epoch the shards are dealt to blocks, one of each stretch of neighbours to every block; the rows of a
block are permuted among themselves. So a node needs the shards of one block at a time, and those of the next
one soon. It reads no data and does not depend on the grid, so that every layout gets the same rows for the
same samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from math import isqrt

import numpy as np
import numpy.typing as npt

from raymega.data.rows import ShardRows

ROUNDS = 3
LEAST_LOOK, LOOKS_PER_SHARD = 64, 4
"""Samples that are looked at for the order in which a block's shards are needed first."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Epoch:
    """Shards of an epoch in order, [N], within a block by number; its rows after each of them, [N].

    Attributes:
        shards: Number of the shard at each position.
        ends: Rows of the epoch up to the end of each position.
        block_ends: Rows of the epoch up to the end of each block, [blocks].
        borders: Position of each block's first shard, and of the end, [blocks + 1].
    """

    shards: Ints
    ends: Ints
    block_ends: Ints
    borders: Ints


class RowOrder:
    """Order in which a run reads the rows of one dataset.

    Attributes:
        num_rows: Number of rows of an epoch; each is read once.
        num_blocks: Number of blocks of an epoch.
    """

    def __init__(self, shards: ShardRows, *, seed: int, block_bytes: int) -> None:
        """Take the rows and bytes of each shard, and the most bytes of a block.

        All blocks have the same number of shards, or one fewer. A shard that is larger than
        ``block_bytes`` is a block of its own.
        """
        self._rows, self._seed = shards.rows, seed
        self._first_rows = np.cumsum(shards.rows) - shards.rows
        self.num_rows = int(shards.rows.sum())
        self.num_blocks = num_blocks(shards.num_bytes, block_bytes)
        self._epoch = lru_cache(2)(self._make_epoch)

    def row(self, sample: int) -> int:
        """Return the row of sample ``sample`` of the dataset, counted from the start of the run."""
        epoch, index = divmod(sample, self.num_rows)
        if self.num_blocks == 1:
            return permute(index, self.num_rows, key=self._key(epoch, 0))
        # permute within the block, then find the shard at that place
        found = self._epoch(epoch)
        block, start, end = self._block(found, index)
        at = start + permute(index - start, end - start, key=self._key(epoch, block))
        position = int(np.searchsorted(found.ends, at, side="right"))
        shard = int(found.shards[position])
        inside = at - int(found.ends[position]) + int(self._rows[shard])
        return int(self._first_rows[shard]) + inside

    def shard(self, row: int) -> int:
        """Return the shard that a row is of."""
        return int(np.searchsorted(self._first_rows, row, side="right")) - 1

    def place(self, sample: int) -> tuple[int, int, float]:
        """Return epoch and block of a sample, and the share of the block's samples before it."""
        epoch, index = divmod(sample, self.num_rows)
        block, start, end = self._block(self._epoch(epoch), index)
        return epoch, block, (index - start) / (end - start)

    def shards_from(self, sample: int) -> Iterator[int]:
        """Yield the shards of a sample's block: first those that the next samples need, in that order."""
        epoch, index = divmod(sample, self.num_rows)
        found = self._epoch(epoch)
        block, _, end = self._block(found, index)
        shards = found.shards[found.borders[block] : found.borders[block + 1]].tolist()
        look = min(end - index, max(LEAST_LOOK, LOOKS_PER_SHARD * len(shards)))
        first = (self.shard(self.row(each)) for each in range(sample, sample + look))
        yield from dict.fromkeys([*first, *shards])

    def shards_after(self, sample: int, share: float) -> Iterator[int]:
        """Yield the shards of the block after a sample's that are needed first: ``share`` of them, rounded up."""
        epoch, index = divmod(sample, self.num_rows)
        _, _, end = self._block(self._epoch(epoch), index)
        following = epoch * self.num_rows + end
        shards = list(self.shards_from(following))
        yield from islice(shards, -int(-len(shards) * min(share, 1.0) // 1))

    def _block(self, found: _Epoch, index: int) -> tuple[int, int, int]:
        """Return the block of row ``index`` of an epoch, and the block's first row and end."""
        block = int(np.searchsorted(found.block_ends, index, side="right"))
        start = int(found.block_ends[block - 1]) if block else 0
        return block, start, int(found.block_ends[block])

    def _key(self, epoch: int, block: int) -> bytes:
        return f"{self._seed}/{epoch}{f'/{block}' if block else ''}".encode()

    def _make_epoch(self, epoch: int) -> _Epoch:
        count, key = len(self._rows), f"{self._seed}/{epoch}/shards"
        # one of each stretch of neighbours for every block, so that a block has all parts of a sorted corpus
        numbers = np.arange(count)
        stretch, block = numbers // self.num_blocks, np.empty(count, dtype=np.int64)
        shuffled = np.lexsort((_keyed_hashes(key, count), stretch))
        block[shuffled] = numbers - stretch * self.num_blocks
        # the last stretch may be short: drawn blocks get its shards
        drawn = np.argsort(_keyed_hashes(f"{key}/last", self.num_blocks), kind="stable")
        last = count // self.num_blocks * self.num_blocks
        block[last:] = drawn[block[last:]]
        # by number within a block, so that a corpus of one block has its shards in stream order
        shards = np.lexsort((numbers, block))
        borders = np.cumsum([0, *np.bincount(block)])
        ends = np.cumsum(self._rows[shards])
        return _Epoch(shards=shards, ends=ends, block_ends=ends[borders[1:] - 1], borders=borders)


def num_blocks(num_bytes: Ints, block_bytes: int) -> int:
    """Return into how many blocks of at most ``block_bytes`` shards of these sizes are cut."""
    if int(num_bytes.sum()) <= block_bytes:
        return 1
    most = max(1, block_bytes // max(1, int(num_bytes.max())))
    return -(-len(num_bytes) // most)


def two_blocks_bytes(num_bytes: Ints, block_bytes: int) -> int:
    """Return the most bytes of two neighbouring blocks of shards of these sizes."""
    blocks, total = num_blocks(num_bytes, block_bytes), int(num_bytes.sum())
    most = 2 * -(-len(num_bytes) // blocks)
    return total if blocks == 1 else min(total, int(np.sort(num_bytes)[-most:].sum()))


def permute(index: int, size: int, *, key: bytes) -> int:
    """Apply a keyed permutation of range(size) to ``index``, in O(1) expected time and memory.

    The permutation is a generalised Feistel network (Black and Rogaway 2002, section 5) on the
    smallest near-square that contains range(size). Each round moves a row by a hash of the column,
    then a column by a hash of the row, so each round is a bijection. Results outside range(size)
    are permuted again until they are inside (cycle walking). That is rare, as the near-square has
    fewer than isqrt(size) + 1 extra places.
    """
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    # cycle walking ends: the permutation returns to the index inside range(size) at the latest
    while True:
        row, column = divmod(index, columns)
        for round_ in range(ROUNDS):
            row = (row + _hash(key, 2 * round_, column)) % rows
            column = (column + _hash(key, 2 * round_ + 1, row)) % columns
        index = row * columns + column
        if index < size:
            return index


def _hash(key: bytes, round_: int, value: int) -> int:
    digest = blake2b(b"%b/%d/%d" % (key, round_, value), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _keyed_hashes(key: str, count: int) -> npt.NDArray[np.uint64]:
    """Return a hash of each number below ``count``: SplitMix64 (Steele et al. 2014) from a keyed start."""
    start = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

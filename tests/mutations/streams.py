"""Planted mistakes in the order of shards and rows, and in how shards come from a store to a node.

`tests.mutations.outcomes` calls `outcome` with each of them planted.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.mutations.saves import SaveMutation as StreamMutation

ORDER, FETCHER = "data/order.py", "data/streaming/fetcher.py"
STREAM_MUTATIONS = (
    StreamMutation(
        name="a range begins one byte late",
        file=FETCHER,
        old="partial(store.get, shard.file, start=start,",
        new="partial(store.get, shard.file, start=start + 1,",
        caught="streamed: DataError",
    ),
    StreamMutation(
        name="the checksum of what arrives is not looked at",
        file=FETCHER,
        old="if shard.crc32 in (crc, NO_CRC32):",
        new="if True:",
        caught="damaged: read",
    ),
    StreamMutation(
        name="files of another dataset under the same URI are taken",
        file="data/streaming/remote_dataset.py",
        old="folder = fetcher.root / _digest(description)",
        new="folder = fetcher.root / _digest(uri.encode())",
        caught="another dataset: its predecessor's tokens",
    ),
    StreamMutation(
        name="shards that are needed make way",
        file=FETCHER,
        old="if path not in needed and _evict(path):",
        new="if _evict(path):",
        caught="streamed: made way while needed",
    ),
    StreamMutation(
        name="mapped shards make way",
        file=FETCHER,
        old="            if not try_lock(descriptor):\n                return False\n            path.unlink()",
        new="            path.unlink()",
        caught="mapped: evicted",
    ),
    StreamMutation(
        name="the cache has no bound",
        file=FETCHER,
        old="free = self._bound.num_bytes() - sum(size for _, size, _ in found)",
        new="free = self._bound.num_bytes()",
        caught="streamed: above the bound",
    ),
    StreamMutation(
        name="all is fetched that the split has",
        file="data/samples.py",
        old="ahead = order.shards_after(number, 2 * (place[2] + 1) / TOLD_PER_BLOCK)",
        new="ahead = range(40)",
        caught="streamed: fetched too early",
    ),
    StreamMutation(
        name="the rows of a block have the same order in every epoch",
        file=ORDER,
        old="""return f"{self._seed}/{epoch}{""",
        new="""return f"{self._seed}{""",
        caught="order: epochs alike",
    ),
    StreamMutation(
        name="the shards have the same order in every epoch",
        file=ORDER,
        old='f"{self._seed}/{epoch}/shards"',
        new='f"{self._seed}/shards"',
        caught="order: blocks alike",
    ),
    StreamMutation(
        name="the border of two blocks skips a row",
        file=ORDER,
        old="at = start + permute(index - start, end - start, key=self._key(epoch, block))",
        new="at = max(start, 1) - (start > 0) + permute(index - start, end - start, key=b'')",
        caught="order: rows skipped",
    ),
    StreamMutation(
        name="a window reaches into the next shard",
        file="data/streaming/stream_rows.py",
        old="rows = np.maximum(num_tokens - 1, 0) // seq_len",
        new="rows = num_tokens // seq_len",
        caught="windows: of two shards",
    ),
    StreamMutation(
        name="a row without enough room is taken for one with it",
        file="data/row_counts.py",
        old="seen = bits[first[windows] + word] & FROM[place & 63]",
        new="seen = bits[first[windows] + word]",
        caught="packing: other rows",
    ),
    StreamMutation(
        name="the file of lengths is taken as it is",
        file="data/arrow.py",
        old="if (crc32 := isal_zlib.crc32(found)) != file.crc32:",
        new="if (crc32 := isal_zlib.crc32(found)) < 0:",
        caught="lengths: damaged ones read",
    ),
    StreamMutation(
        name="lengths of a store are read from all its shards",
        file="data/arrow.py",
        old="if self._lengths is not None:",
        new="if self._lengths is not None and False:",
        caught="lengths: of shards",
    ),
)
NUM_SHARDS, TOKENS, SEQ_LEN = 40, 40, 8


def outcome(folder: Path) -> str:
    """Return ``sound``, or the first thing that is wrong."""
    stores = (_mapped, _streamed, _replaced, _lengths)
    found = (check(folder / check.__name__) for check in stores)
    return _order() or _windows() or _packing() or next(filter(None, found), "sound")


def _order() -> str:
    import numpy as np

    from raymega.data.order import RowOrder
    from raymega.data.rows import ShardRows

    rows = np.array([4, 0, 5, 1] * 10)
    order = RowOrder(ShardRows(rows=rows, num_bytes=rows), seed=5, block_bytes=40)
    size = int(rows.sum())
    epochs = [[order.row(epoch * size + index) for index in range(size)] for epoch in range(2)]
    if any(sorted(epoch) != list(range(size)) for epoch in epochs):
        return "order: rows skipped"
    blocks = [set(order.shards_from(epoch * size)) for epoch in range(2)]
    if blocks[0] == blocks[1]:
        return "order: blocks alike"
    whole = RowOrder(ShardRows(rows=rows, num_bytes=rows), seed=5, block_bytes=1 << 40)
    if [whole.row(index) for index in range(size)] == [whole.row(size + i) for i in range(size)]:
        return "order: epochs alike"
    return ""


def _windows() -> str:
    from types import SimpleNamespace

    from raymega.data.streaming.stream_rows import StreamSource

    shards = [SimpleNamespace(num_tokens=TOKENS, num_bytes=1) for _ in range(3)]
    stream = SimpleNamespace(shards=shards, num_tokens=3 * TOKENS)
    source = StreamSource(stream, seq_len=SEQ_LEN, vocab_size=9)
    starts = [source._start(index) for index in range(source.num_windows)]
    is_whole = all(start // TOKENS == (start + SEQ_LEN) // TOKENS for start in starts)
    return "" if is_whole else "windows: of two shards"


def _streamed(folder: Path) -> str:
    """Read an epoch with room for one block and a little more: what is needed must stay all the same."""
    from raymega.data.arrow import FolderFiles
    from raymega.errors import DataError
    from tests.unit.data.datasets import samples_of
    from tests.unit.data.streamed import made_way, make_fetcher, samples_on, settle, source_of

    split, store = _dataset(folder, 0)
    size, root = split.shards[0].num_bytes, folder / "cache"
    block = 8 * size
    near = samples_of(source_of(FolderFiles(folder), split), seed=3, block_bytes=block)
    fetcher = make_fetcher(root, limit_bytes=block + 3 * size)
    needed = made_way(fetcher)
    far = samples_on(store, split, fetcher, block_bytes=block)
    for sample in range(4 * NUM_SHARDS):
        try:
            row = far.row(sample)
        except DataError:
            return "streamed: DataError"
        if (row.tokens != near.row(sample).tokens).any():
            return "streamed: other tokens"
        if len(fetcher._all[0].kept) > 16:
            return "streamed: fetched too early"
        # once a block, near its end: more is told than there is room for, so that the threads come to evict
        if sample % 32 == 30:
            settle(fetcher)
    if len(list(root.rglob("*.arrow"))) > 8 + 3 + 1:
        return "streamed: above the bound"
    return "streamed: made way while needed" if needed else ""


def _mapped(folder: Path) -> str:
    """Have one process map a shard, and another one take all the room."""
    from raymega.data.streaming.shard_cache import ShardCache
    from raymega.errors import DataError, StorageError
    from tests.unit.data.streamed import make_fetcher

    split, store = _dataset(folder, 0)
    size, root = split.shards[0].num_bytes, folder / "cache"
    one, two = (
        ShardCache(store, root / "d", make_fetcher(root, limit_bytes=2 * size)) for _ in "ab"
    )
    try:
        one.need(split.shards[:1])
        one.table(split.shards[0])
        os.utime(root / "d" / split.shards[0].file, (0, 0))  # as a process that needs it no more
        for shard in split.shards[1:6]:
            two.need([shard])
            two.table(shard)
    except StorageError:  # not even what arrives was left alone
        return "mapped: evicted"
    except DataError:
        return ""
    return "" if (root / "d" / split.shards[0].file).exists() else "mapped: evicted"


def _replaced(folder: Path) -> str:
    """Put another dataset in the place of the first, then damage a byte of it."""
    from raymega.data.streaming import remote_dataset
    from raymega.errors import DataError
    from tests.unit.data.streamed import make_fetcher

    def read(first: int, root: Path) -> int:
        split, store = _dataset(folder, first)
        remote_dataset.open_store = lambda _: store
        files = remote_dataset.open_files("any://place", make_fetcher(root))[1]
        return files.table(split.shards[0])["tokens"][0].as_py()

    if [read(first, folder / "cache") for first in (0, 100)] != [0, 100]:
        return "another dataset: its predecessor's tokens"
    content = bytearray((folder / "train/000000.arrow").read_bytes())
    content[content.index(b"\x64\x00\x65\x00")] ^= 1
    (folder / "train/000000.arrow").write_bytes(content)
    try:
        files = remote_dataset.open_files("any://place", make_fetcher(folder / "empty"))
        files[1].table(files[0].splits["train"].shards[0])
    except DataError:
        return ""
    return "damaged: read"


def _lengths(folder: Path) -> str:
    """Read lengths from a store, then exchange two in the folder: their sum stays."""
    import numpy as np

    from raymega.data.arrow import TokenStream
    from raymega.data.streaming.shard_cache import ShardCache
    from raymega.errors import DataError
    from tests.unit.data.datasets import with_lengths, write_documents
    from tests.unit.data.streamed import CountingStore, make_fetcher

    old = write_documents(folder, num_shards=2, per_shard=9)
    split, store = with_lengths(folder, old).splits["train"], CountingStore(folder)
    files = ShardCache(store, folder / "cache", make_fetcher(folder / "cache"))
    found = TokenStream(files, split).document_lengths()
    if set(store.num_bytes) != {split.lengths.file}:
        return "lengths: of shards"
    at = int(np.flatnonzero(np.diff(found[:9]))[0])
    changed = found.copy()
    changed[[at, at + 1]] = found[[at + 1, at]]
    (folder / split.lengths.file).write_bytes(changed.tobytes())
    try:
        TokenStream(folder, split).document_lengths()
    except DataError:
        return ""
    return "lengths: damaged ones read"


def _dataset(folder: Path, first: int) -> tuple:
    """Write a dataset whose tokens count on from ``first``; return its split and its store."""
    from tests.unit.data.datasets import write_dataset
    from tests.unit.data.streamed import CountingStore

    sizes = (TOKENS,) * NUM_SHARDS
    meta = write_dataset(folder, train=sizes, vocab_size=1 << 16, first=first)
    return meta.splits["train"], CountingStore(folder)


def _packing() -> str:
    import numpy as np

    from raymega.data.packing import best_fit
    from raymega.data.row_counts import count_rows

    lengths = np.random.default_rng(0).integers(1, 200, (20, 60))
    wanted = [len(best_fit(row, 200)) for row in lengths.tolist()]
    try:
        is_same = count_rows(lengths, 200).tolist() == wanted
    except IndexError:
        is_same = False
    return "" if is_same else "packing: other rows"

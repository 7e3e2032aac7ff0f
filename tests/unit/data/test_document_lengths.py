"""The file with the lengths of a split's documents: what it saves, and how damage of it is told."""

from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest

from raymega.data.arrow import FolderFiles, TokenStream
from raymega.data.checks import data_faults
from raymega.data.format import LENGTHS_DTYPE
from raymega.data.inspect import inspect_dataset
from raymega.data.open_split import Shape, open_split, pack_stream
from raymega.data.rows import SourceSetup
from raymega.data.streaming.shard_cache import ShardCache
from raymega.errors import DataError, StorageError
from tests.unit.data.datasets import samples_of, with_lengths, write_documents
from tests.unit.data.streamed import CountingStore, make_fetcher, samples_of_source

NUM_SHARDS, PER_SHARD, BATCH = 100, 40, 8
SHAPE = Shape(seq_len=64, packing="best_fit", window=16)
FILE = "train/lengths.u32"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder with a corpus of many shards, and its split without and with the file of lengths."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "made"
    old = write_documents(folder, num_shards=NUM_SHARDS, per_shard=PER_SHARD)
    new = with_lengths(folder, old)
    return folder, old.splits["train"], new.splits["train"]


def _packed(files, split, key):
    stream = TokenStream(files, split)
    setup = SourceSetup(path="s3://far", split="train", shape=SHAPE, seed=0, vocab_size=257)
    return pack_stream(stream, setup, labels=None, key=key)


def _streamed(folder, split, root, key):
    store, fetcher = CountingStore(folder), make_fetcher(root)
    source = _packed(ShardCache(store, root / "d", fetcher), split, key)
    block = 10 * max(shard.num_bytes for shard in split.shards)
    return store, samples_of_source(source, block_bytes=block, fetcher=fetcher)


def _same(one, other):
    pairs = ((one.tokens, other.tokens), (one.labels, other.labels), (one.mask, other.mask))
    return one.documents == other.documents and all(np.array_equal(*pair) for pair in pairs)


@pytest.mark.parametrize("first", [0, 1000], ids=["new-run", "resumed"])
def test_packed_rows_need_the_file_and_the_shards_of_their_block(made, tmp_path, first):
    folder, old, new = made
    block = 10 * max(shard.num_bytes for shard in new.shards)
    near = samples_of(_packed(FolderFiles(folder), old, "near"), seed=3, block_bytes=block)
    expected = {"old": {shard.file for shard in old.shards}, "new": {FILE}}
    for split, key in ((old, "old"), (new, "new")):
        store, far = _streamed(folder, split, tmp_path / key, key)
        assert set(store.num_bytes) == expected[key]
        assert all(_same(far.row(s), near.row(s)) for s in range(first, first + BATCH))
        # another process of the node
        again, _ = _streamed(folder, split, tmp_path / key, key)
        assert not again.num_bytes


def test_file_is_read_in_place_of_the_shards_of_a_folder(made):
    folder, old, new = made
    stored = TokenStream(folder, old).document_lengths()
    for shard in new.shards:
        (folder / shard.file).unlink()
    found = TokenStream(folder, new).document_lengths()
    assert found.dtype == np.uint32 and np.array_equal(found, stored)
    assert (folder / FILE).stat().st_size == 4 * NUM_SHARDS * PER_SHARD == new.lengths.num_bytes


def _plant(folder, change):
    path = folder / FILE
    lengths = np.frombuffer(path.read_bytes(), LENGTHS_DTYPE).copy()
    change(lengths)
    path.write_bytes(lengths.tobytes())
    return path.read_bytes()


def _one_more(lengths):
    lengths[3 * PER_SHARD + 5] += 1


def _swapped(lengths):
    # the sum of the shard stays
    at = int(np.flatnonzero(np.diff(lengths[:PER_SHARD]))[0])
    lengths[[at, at + 1]] = lengths[[at + 1, at]]


@pytest.mark.parametrize("change", [_one_more, _swapped])
def test_wrong_length_is_refused(made, tmp_path, change):
    folder, _, new = made
    _plant(folder, change)
    told = rf"{FILE} has crc32 \w+; dataset\.json says {new.lengths.crc32:08x}"
    with pytest.raises(DataError, match=told):
        open_split(str(folder), "train", SHAPE, seed=0)
    with pytest.raises(DataError, match="has crc32"):
        _streamed(folder, new, tmp_path / "far", "damaged")
    with pytest.raises(DataError, match=rf"{FILE} has crc32"):
        inspect_dataset(str(folder), is_verified=True, on_shard=lambda *_: None)


def test_length_that_a_writer_got_wrong_is_refused(made):
    """Its checksum is right, and its shard has another number of tokens."""
    folder, _, new = made
    content = _plant(folder, _one_more)
    wrong = replace(new, lengths=replace(new.lengths, crc32=crc32(content)))
    with pytest.raises(DataError, match=r"the documents of train/000003\.arrow have \d+ tokens"):
        TokenStream(folder, wrong).document_lengths()


def test_file_that_is_damaged_on_its_way_is_read_again(made, tmp_path):
    folder, _, new = made
    store = CountingStore(folder)
    get, torn = store.get, []

    def get_torn(key, **how):
        found = get(key, **how)
        if key == FILE and not torn:
            torn.append(key)
            return found[:-1] + bytes([found[-1] ^ 1])
        return found

    store.get = get_torn
    files = ShardCache(store, tmp_path / "far", make_fetcher(tmp_path))
    stored = TokenStream(folder, new).document_lengths()
    assert np.array_equal(TokenStream(files, new).document_lengths(), stored) and torn


def test_file_that_is_missing_is_refused_before_the_run(made, tmp_path):
    folder, _, new = made
    (folder / FILE).unlink()
    (fault,) = data_faults(str(folder), seq_len=8, vocab_size=257)
    assert fault.fact == f"{folder / FILE} does not exist"
    with pytest.raises(DataError, match=rf"{FILE} cannot be read"):
        TokenStream(folder, new).document_lengths()
    files = ShardCache(CountingStore(folder), tmp_path / "far", make_fetcher(tmp_path))
    with pytest.raises(DataError, match=rf"{FILE} does not exist; dataset\.json names it"):
        TokenStream(files, new).document_lengths()


def test_store_that_is_away_is_no_damage(made, tmp_path):
    folder, _, new = made
    store = CountingStore(folder)
    store.failures = 99
    files = ShardCache(store, tmp_path / "far", make_fetcher(tmp_path))
    with pytest.raises(StorageError, match="is away"):
        TokenStream(files, new).document_lengths()

"""Two thousand shards in a real object store, read through a cache of a twentieth of them."""

from collections import Counter
from uuid import uuid4

import numpy as np
import pytest

from raymega.data.arrow import FolderFiles
from raymega.data.streaming.fetcher import Fetcher
from raymega.data.streaming.remote_dataset import open_files
from raymega.storage.registry import open_store
from tests.support.servers.s3_server import BUCKET
from tests.unit.data.datasets import samples_of, write_dataset
from tests.unit.data.streamed import samples_in, source_of

pytestmark = pytest.mark.wide

NUM_SHARDS, TOKENS, BATCH = 2000, 25, 8
"""A shard has three rows of eight tokens."""


@pytest.fixture(scope="module")
def corpus(ceph, tmp_path_factory):
    """URI of the dataset, its folder and its split."""
    folder, uri = tmp_path_factory.mktemp("made"), f"s3://{BUCKET}/{uuid4().hex}/tokens"
    meta = write_dataset(folder, train=(TOKENS,) * NUM_SHARDS, valid=(), vocab_size=1 << 16)
    store = open_store(uri)
    for path in folder.rglob("*.*"):
        store.put(path.relative_to(folder).as_posix(), [path.read_bytes()], overwrite=False)
    return uri, folder, meta.splits["train"]


def _open(uri, split, root, size):
    block = 50 * size
    fetcher = Fetcher(limit_bytes=2 * block, root=root)
    files = open_files(uri, fetcher)[1]
    return samples_in(files, split, fetcher, block_bytes=block), fetcher


def _idle(fetcher):
    """Wait until all is here that was asked for, as while a step computes."""
    wants = fetcher._all[0]
    with fetcher._changed:
        assert fetcher._changed.wait_for(lambda: not fetcher._next() and not wants.waiting, 300)


def test_epoch_through_a_cache_of_a_twentieth(ceph, corpus, tmp_path, report_rates):
    uri, folder, split = corpus
    size = max(shard.num_bytes for shard in split.shards)
    near = samples_of(source_of(FolderFiles(folder), split), seed=3, block_bytes=50 * size)
    assert near._orders[0].num_blocks == 40
    far, fetcher = _open(uri, split, tmp_path / "one", size)
    waits, read = Counter(), 0
    for step, first in enumerate(range(0, 3 * NUM_SHARDS, BATCH)):
        before = fetcher.use().misses
        for sample in range(first, first + BATCH):
            assert np.array_equal(far.row(sample).tokens, near.row(sample).tokens)
        waits[step < 10] += fetcher.use().misses - before
        _idle(fetcher)
    read = sum(shard.num_bytes for shard in split.shards)
    fetched = fetcher.use().fetched_bytes
    report_rates(f"fetched {fetched / read:.4f} of what was read, waits {dict(waits)}")
    assert waits[False] == 0 and fetched <= 1.05 * read
    # a node in the place of another, in the middle of the second epoch
    again, other = _open(uri, split, tmp_path / "two", size)
    first = 4 * NUM_SHARDS + 3
    for sample in range(first, first + BATCH):
        assert np.array_equal(again.row(sample).tokens, near.row(sample).tokens)
    share = other.use().fetched_bytes / read
    report_rates(f"first step of a new node with {share:.4f} of the bytes")
    # a block, of which the threads may have brought all by now, and an eighth of the next one
    assert share < 0.03


def test_store_that_dies_and_comes_back_is_waited_for(ceph, corpus, tmp_path, outage):
    uri, folder, split = corpus
    size = max(shard.num_bytes for shard in split.shards)
    near = samples_of(source_of(FolderFiles(folder), split), seed=3, block_bytes=50 * size)
    far, fetcher = _open(uri, split, tmp_path / "three", size)
    far.row(0)
    _idle(fetcher)
    outage.begin(ceph.kill_gateway, ceph.start_gateway)
    # on through what is here, and into what the dead store has
    for sample in range(100, 300, 5):
        assert np.array_equal(far.row(sample).tokens, near.row(sample).tokens)

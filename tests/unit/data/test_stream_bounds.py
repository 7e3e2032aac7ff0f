"""Two thousand shards through a cache of a twentieth of them: what a node fetches, and what its first step needs."""

from threading import Condition

import pytest

from raymega.data.arrow import FolderFiles
from tests.unit.data.datasets import samples_of, write_dataset
from tests.unit.data.streamed import (
    CountingStore,
    make_fetcher,
    samples_on,
    settle,
    source_of,
)

NUM_SHARDS, TOKENS, BATCH, ROWS = 2000, 25, 8, 3
"""A shard has three rows of eight tokens; a batch needs eight shards at most."""
BLOCK_SHARDS = NUM_SHARDS // 40
"""Two blocks are a cache of a twentieth."""


class Meagre(CountingStore):
    """Gives out shards until a limit, and the others wait until it is lifted."""

    def __init__(self, folder, limit):
        super().__init__(folder)
        self.limit, self.given, self.changed = limit, set(), Condition()

    def get(self, key, *, start=0, num_bytes=-1):
        with self.changed:
            assert self.changed.wait_for(
                lambda: key in self.given or len(self.given) < self.limit, 200
            )
            self.given.add(key)
        return super().get(key, start=start, num_bytes=num_bytes)

    def lift(self):
        with self.changed:
            self.limit = 10**9
            self.changed.notify_all()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    meta = write_dataset(folder, train=(TOKENS,) * NUM_SHARDS, valid=(), vocab_size=1 << 16)
    split = meta.splits["train"]
    return folder, split, max(shard.num_bytes for shard in split.shards)


def opened(store, split, size, root):
    block = BLOCK_SHARDS * size
    fetcher = make_fetcher(root, limit_bytes=2 * block)
    return samples_on(store, split, fetcher, block_bytes=block), fetcher


@pytest.mark.parametrize("first", [0, 4 * NUM_SHARDS + 3], ids=["new-run", "replaced-node"])
def test_first_step_needs_less_than_a_hundredth_of_the_bytes(corpus, tmp_path, first):
    """A store that gives out no more than 1 % of the shards suffices for the step, in any order of threads."""
    folder, split, size = corpus
    near = samples_of(
        source_of(FolderFiles(folder), split), seed=3, block_bytes=BLOCK_SHARDS * size
    )
    store = Meagre(folder, limit=NUM_SHARDS // 100)
    far, _ = opened(store, split, size, tmp_path)
    try:
        for sample in range(first, first + BATCH):
            assert far.row(sample).tokens.tolist() == near.row(sample).tokens.tolist()
        assert sum(store.num_bytes.values()) <= 0.01 * NUM_SHARDS * size
    finally:
        store.lift()


@pytest.mark.wide
def test_epoch_waits_in_its_first_steps_alone_and_fetches_each_shard_once(corpus, tmp_path, capsys):
    folder, split, size = corpus
    store = CountingStore(folder)
    far, fetcher = opened(store, split, size, tmp_path)
    waits = {True: 0, False: 0}
    for step, first in enumerate(range(0, ROWS * NUM_SHARDS, BATCH)):
        before = fetcher.use().misses
        for sample in range(first, first + BATCH):
            far.row(sample)
        waits[step < 10] += fetcher.use().misses - before
        settle(fetcher)  # as while a step computes
    read = sum(shard.num_bytes for shard in split.shards)
    fetched = sum(store.num_bytes.values())
    with capsys.disabled():
        print(f"\n  fetched {fetched / read:.4f} of what was read; waits {waits}")
    assert waits[False] == 0 and fetched <= 1.05 * read

"""The description of a checkpoint of a 70B model, at 512 to 16,384 ranks: bytes, time, memory and requests.

Reports, the index, the coverage check and the reading are real; the store is in memory.
"""

import pickle
import tracemalloc

import pytest

from raymega.checkpoint.format.manifest import commit, find_restore, read_blocks, read_root
from raymega.checkpoint.format.manifest_builder import assemble, coverage_faults
from raymega.errors import CheckpointError
from tests.scale.checkpoints import rank_blocks, shards_of, with_error
from tests.scale.curves import cpu_s
from tests.support.memory_store import MemoryStore

MB = 10**6
# by ranks: bytes of the root, bytes in all, a rank's memory, CPU seconds of a commit, requests of a restore
BARS = {
    512: (1 * MB, 10 * MB, 5 * MB, 0.3, 2_000),
    4_096: (4 * MB, 40 * MB, 8 * MB, 2.0, 16_000),
    16_384: (8 * MB, 160 * MB, 16 * MB, 8.0, 64_000),
}
WORLDS = [512, *(pytest.param(size, marks=pytest.mark.wide) for size in (4_096, 16_384))]


class CountingStore(MemoryStore):
    """Counts reads."""

    num_reads = 0

    def get(self, key, *, start=0, num_bytes=-1):
        self.num_reads += 1
        return super().get(key, start=start, num_bytes=num_bytes)


def commit_all(shards, store):
    manifest = assemble(
        shards, world_size=len(shards), attempt=1, created="now", job={}, grid={"tp": 8, "pp": 8}
    )
    return commit(store, manifest)


@pytest.mark.parametrize("world_size", WORLDS)
def test_checkpoint_is_described_within_bounds(world_size):
    root_bytes, all_bytes, rank_bytes, commit_s, requests = BARS[world_size]
    shards = shards_of(world_size)
    sent = [pickle.dumps(shard) for shard in shards]
    stores = []

    def trial():
        stores.append(CountingStore())
        return lambda: commit_all([pickle.loads(each) for each in sent], stores[-1])

    # the driver's CPU, from the reports' bytes to the manifest; twice the bar, as load slows a core too
    spent_s = cpu_s(trial, best_of=1)
    assert spent_s < 2 * commit_s
    store = stores[-1]
    (key,) = [key for key in store.list("") if "/manifest-" in key and key.endswith(".json")]
    sizes = {each: store.size(each) for each in store.list("")}
    assert sizes[key] < root_bytes and sum(sizes.values()) < all_bytes
    # a rank of the last stage: the boxes of its blocks and no others, in little memory
    mine = shards[-1].boxes
    store.num_reads = 0
    tracemalloc.start()
    manifest = read_blocks(store, key, rank_blocks(mine))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert set(manifest.boxes) == set(mine)
    assert store.num_reads * world_size < requests
    assert peak < rank_bytes, f"{peak} bytes"
    print(world_size, spent_s, sizes[key], sum(sizes.values()), peak, store.num_reads)


def test_root_alone_finds_the_checkpoint():
    shards, store = shards_of(512), CountingStore()
    key = commit_all(shards, store)
    root = read_root(store, key)
    assert len(root.boxes) == 0 and len(root.shapes) == 1680 and len(root.file_sizes()) == 512
    for file, size in root.file_sizes().items():
        store.put(file, [bytes(size % 7)], overwrite=True)  # of a wrong size
    with pytest.raises(CheckpointError, match="bytes, not"):
        restore = find_restore(store)
        assert restore.manifest is None
        raise CheckpointError(restore.broken[0].fact)


def test_missing_box_of_a_million_is_named():
    shards = shards_of(512)
    shards[300] = with_error(shards[300])
    with pytest.raises(
        CheckpointError, match=r"layers\.\d+\.mlp\.down\.weight has its block .* 0 times"
    ):
        commit_all(shards, MemoryStore())


def test_coverage_check_looks_at_each_way_to_cut_once():
    manifest = assemble(shards_of(512), world_size=512, attempt=1, created="now", job={}, grid={})
    assert coverage_faults(manifest) == []

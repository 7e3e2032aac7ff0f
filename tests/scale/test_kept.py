"""A run that keeps thousands of checkpoints of 16,384 ranks: requests of a search, a pruning and a lease.

The store counts requests as S3 does, 1,000 names each. Data files are not stored but listed.
"""

import math
from dataclasses import replace

import pytest

from raymega.checkpoint.format.catalogue import enter
from raymega.checkpoint.format.commit_log import CommitLog
from raymega.checkpoint.format.epochs import newest_grant
from raymega.checkpoint.format.keys import (
    COMMITTED,
    ROOT,
    CheckpointId,
    checkpoint_of,
    folder_of,
    is_manifest,
    manifest_key,
)
from raymega.checkpoint.format.manifest import (
    commit,
    find_restore,
    list_manifests,
    parse_manifest,
    valid_checkpoints,
)
from raymega.checkpoint.format.manifest_builder import assemble
from raymega.checkpoint.tools.retention import Pruner, RetentionPolicy
from raymega.storage.retry import RetryingStore
from tests.scale.checkpoints import shards_of
from tests.support.memory_store import MemoryStore
from tests.unit.orchestrate.run_store.test_lease import World

NUM_FILES = 16_384
PAGE = 1_000
EVERY = 10
POLICY = RetentionPolicy(last=3, every=EVERY)


class PagedStore(MemoryStore):
    """Every step's folder has a file a rank, which are counted in ``requests`` and never stored."""

    def __init__(self):
        super().__init__()
        self.requests, self.num_deleted, self.sizes_of_step = 0, 0, {}

    def get(self, key, *, start=0, num_bytes=-1):
        self.requests += 1
        return super().get(key, start=start, num_bytes=num_bytes)

    def list(self, prefix):
        found = list(super().list(prefix))
        in_folder = prefix.startswith(f"{ROOT}step-") and "manifest-" not in prefix
        assert prefix != ROOT, "the files of all checkpoints are listed"
        self.requests += math.ceil((len(found) + NUM_FILES * in_folder) / PAGE) or 1
        return iter(found)

    def sizes(self, prefix):
        self.requests += math.ceil(NUM_FILES / PAGE)
        return iter(self.sizes_of_step[prefix].items())

    def folders(self, prefix):
        names = {key.removeprefix(prefix).partition("/")[0] for key in super().list(prefix)}
        self.requests += math.ceil(len(names) / PAGE)
        return iter(sorted(names))

    def delete_many(self, keys):
        self.requests += math.ceil(len(keys) / PAGE)
        self.num_deleted += len(keys)
        for key in keys:
            self.delete(key)


def run_with(num_kept):
    """Return the store of a run that kept ``num_kept`` checkpoints, whose last five can be read."""
    store = PagedStore()
    steps = [EVERY * number for number in range(1, num_kept + 1)]
    for step in steps[:-5]:
        at = CheckpointId(attempt=1, step=step)
        store.put(manifest_key(at), [b"not to be read"], overwrite=False)
        enter(store, at)
    whole = assemble(SHARDS, world_size=len(SHARDS), attempt=1, created="", job={}, grid={})
    for step in steps[-5:]:
        save(store, whole, step)
    store.requests = 0
    return store, whole, steps


def save(store, whole, step):
    manifest = replace(whole, step=step)
    key = commit(store, manifest)
    root = parse_manifest(store._objects[key], key=key)
    parts = {folder_of(step) + part.file: part.num_bytes for part in root.index.parts}
    store.sizes_of_step[folder_of(step)] = root.file_sizes() | parts


SHARDS = shards_of(64)


def requests_of(store, action):
    store.requests = 0
    result = action()
    return store.requests, result


@pytest.mark.parametrize("num_kept", [100, 10_000])
def test_kept_checkpoints_cost_a_line_of_a_listing_each(num_kept):
    store, whole, steps = run_with(num_kept)
    driver = RetryingStore(store)  # as the driver opens it
    lines = 2 * math.ceil(num_kept / PAGE)  # two listings with a line a checkpoint
    files = math.ceil((NUM_FILES + 2) / PAGE)
    # all manifests, as a lease and `checkpoint list` need them
    asked, keys = requests_of(store, lambda: list_manifests(driver))
    assert len(keys) == num_kept and keys[0] == manifest_key(
        CheckpointId(attempt=1, step=steps[-1])
    )
    assert asked <= lines + 3
    # the newest whole one
    asked, found = requests_of(store, lambda: find_restore(driver))
    assert found.key == keys[0] and asked <= lines + files + 5
    # a commit that deletes an older one
    pruner = Pruner(driver, POLICY)
    pruner.prune()
    for number in range(1, 4):
        save(store, whole, steps[-1] + number)
    pruner.prune()
    save(store, whole, steps[-1] + 4)
    asked, gone = requests_of(store, pruner.prune)
    assert {checkpoint_of(key).step for key in gone} == {steps[-1] + 1}
    assert sum(map(is_manifest, gone)) == 1
    # the folders of the newest four and of the one that goes are listed, one new root is read
    assert asked <= 2 * lines + 7 * files
    print(num_kept, asked)
    assert len(list_manifests(driver)) == num_kept + 3


def test_commits_after_the_first_list_no_catalogue_however_many_are_kept():
    asked = {}
    for num_kept in (100, 10_000):
        store, whole, steps = run_with(num_kept)
        pruner = Pruner(RetryingStore(store), POLICY)
        pruner.prune()
        asked[num_kept] = []
        for number in range(1, 8):
            step = steps[-1] + number
            save(store, whole, step)
            pruner.note_save(step)
            saved = CheckpointId(attempt=1, step=step)
            num, gone = requests_of(store, lambda at=saved, one=pruner: one.prune(at))
            asked[num_kept].append(num)
            assert {checkpoint_of(key).step for key in gone} <= {step - 3}
            assert sum(map(is_manifest, gone)) == (number > 3)
        assert len(list_manifests(store)) == num_kept + 3
    print(asked)
    assert asked[100] == asked[10_000]


def test_checkpoints_without_an_entry_are_found_and_entered():
    store, *_ = run_with(20)
    for key in list(store.list(COMMITTED))[3:9]:
        store.delete(key)
    assert len(list_manifests(store)) == 20
    Pruner(store, POLICY).prune()
    assert len(list(store.list(COMMITTED))) == 20


def test_starts_and_grants_list_no_catalogue_however_many_are_kept():
    asked = {}
    for num_kept in (1_500, 10_000):
        store, whole, steps = run_with(num_kept)
        world = World(RetryingStore(store))
        # a driver saves twice, and takes the run again after a loss
        lease = world.taken()
        attempt = lease.begin_attempt()
        log, pruner = CommitLog(world.store, attempt), Pruner(world.store, POLICY)
        for number in (1, 2):
            at = CheckpointId(attempt=attempt, step=steps[-1] + number)
            log.begin(at, pruner.known)
            save(store, replace(whole, attempt=attempt), at.step)
            log.end(at)
            pruner.note_save(at.step)
            pruner.prune(at)
        again, attempt = requests_of(store, lease.begin_attempt)
        # another driver takes over, and finds the newest checkpoint
        start, second = requests_of(store, lambda w=world: w.taken("b", gone=("a",)))
        search, found = requests_of(store, lambda w=world: find_restore(w.store))
        assert found.key == manifest_key(at) and not found.broken and second.epoch == attempt + 1
        assert len(newest_grant(store).checkpoints) < 10
        assert {*valid_checkpoints(store)} == {*map(checkpoint_of, list_manifests(store))}
        files = math.ceil((NUM_FILES + 2) / PAGE)
        assert max(again, start) <= 12 and search <= files + 7
        asked[num_kept] = again, start, search
    print(asked)
    assert asked[1_500] == asked[10_000]

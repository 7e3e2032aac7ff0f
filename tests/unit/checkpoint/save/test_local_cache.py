"""A copy on the node's own disk: used where it is right, passed by where it is not, never relied on."""

import threading
from functools import partial

import pytest

from raymega.checkpoint.format.keys import checkpoint_of
from raymega.checkpoint.format.manifest import find_restore
from raymega.checkpoint.save.local_cache import KEPT_NEAR, CachedReader, LocalCache
from raymega.checkpoint.save.rate_limit import RateLimiter
from raymega.checkpoint.save.writer import SaveLimits
from raymega.errors import StorageError
from raymega.storage.local import LocalStore
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.large import holds_step, keys_of, save_step, write_step


@pytest.fixture
def far():
    return MemoryStore()


@pytest.fixture
def local_cache(tmp_path):
    return LocalStore(tmp_path)


class CountingStore(MemoryStore):
    """Knows what was read from it."""

    def __init__(self):
        super().__init__()
        self.read = set()

    def get(self, key, *, start=0, num_bytes=-1):
        self.read.add(key)
        return super().get(key, start=start, num_bytes=num_bytes)


def _restore(local_cache, far):
    """The newest checkpoint's step, whether its bits are right, and which files were read far."""
    found = find_restore(far).manifest
    reader = CachedReader(local_cache, far, found)
    far.read = set()
    assert holds_step(reader, found)
    return found.step, far.read, reader.num_near


def test_files_are_in_both_and_manifests_in_the_run_s_store_only(local_cache, far):
    manifest = save_step(far, 100, local_cache=LocalCache(local_cache))
    assert set(local_cache.list("")) == set(manifest.file_sizes())
    assert set(far.list("")) == keys_of(manifest)
    assert all(local_cache.get(key) == far.get(key) for key in manifest.file_sizes())


def test_folder_that_holds_checkpoints_loses_none(local_cache):
    """As when checkpoint.local_uri names the run's own store by another path."""
    steps = (100, 200, 300, 400)
    manifests = [
        save_step(local_cache, step, local_cache=LocalCache(local_cache)) for step in steps
    ]
    kept = set(local_cache.list(""))
    assert all(keys_of(manifest) <= kept for manifest in manifests)


def test_restore_reads_near_what_is_whole_there_and_the_rest_far(local_cache):
    far = CountingStore()
    manifest = save_step(far, 100, local_cache=LocalCache(local_cache))
    assert _restore(local_cache, far) == (100, set(), 3)
    first, second, third = sorted(manifest.file_sizes())
    local_cache.delete(first)
    data = bytearray(local_cache.get(second))
    data[-1] ^= 1
    local_cache.put(second, [data], overwrite=True)
    assert _restore(local_cache, far) == (100, {first, second}, 1)
    local_cache.put(third, [local_cache.get(third)[:-1]], overwrite=True)
    assert _restore(local_cache, far) == (100, {first, second, third}, 0)


def test_near_file_that_is_lost_after_it_was_found_whole_is_read_far(local_cache):
    far = CountingStore()
    manifest = save_step(far, 100, local_cache=LocalCache(local_cache))
    first = min(manifest.file_sizes())
    reader = CachedReader(local_cache, far, manifest)
    reader.get(first, num_bytes=8)
    local_cache.delete(first)
    far.read = set()
    assert holds_step(reader, manifest)
    assert far.read == {first} and reader.num_near == 2


def test_near_files_of_another_run_of_that_name_are_not_taken_for_this_one_s(local_cache):
    save_step(MemoryStore(), 100, local_cache=LocalCache(local_cache))
    for key in list(local_cache.list("")):
        local_cache.put(key, [local_cache.get(key)[::-1]], overwrite=True)
    far = CountingStore()
    manifest = save_step(far, 100)
    assert _restore(local_cache, far) == (100, set(manifest.file_sizes()), 0)


def test_near_tier_keeps_the_newest_checkpoints_only(local_cache, far):
    tier = LocalCache(local_cache)
    for step in (100, 200, 300, 400):
        save_step(far, step, local_cache=tier)
    assert KEPT_NEAR == 2
    assert {checkpoint_of(key).step for key in local_cache.list("")} == {300, 400}


class FullStore(MemoryStore):
    num_tries = 0

    def put(self, key, chunks, *, overwrite):
        self.num_tries += 1
        next(iter(chunks))
        raise StorageError("no space left")


def test_near_tier_that_is_full_is_given_up_and_the_save_goes_on_without(far):
    local_cache = FullStore()
    tier = LocalCache(local_cache)
    manifest = save_step(far, 100, local_cache=tier)
    assert find_restore(far).manifest == manifest and holds_step(far, manifest)
    tried = local_cache.num_tries
    save_step(far, 200, local_cache=tier)
    assert local_cache.num_tries == tried <= 2, "two files may have been under way"


def test_far_store_that_fails_fails_the_save_whatever_lies_near(local_cache):
    class Refusing(MemoryStore):
        def put(self, key, chunks, *, overwrite):
            raise StorageError("503")

    assert "503" in write_step(Refusing(), 100, local_cache=LocalCache(local_cache)).error


def test_rate_of_the_job_holds_for_the_run_s_store_and_not_for_the_near_one(
    tmp_path, far, monkeypatch
):
    """Time stands still, so the longest pause is that of all the bytes; near there is none."""
    here, pauses = threading.local(), []

    class Watched(LocalStore):
        def put(self, key, chunks, *, overwrite):
            here.is_near = True
            super().put(key, chunks, overwrite=overwrite)
            here.is_near = False

    def sleep(seconds):
        assert not getattr(here, "is_near", False)
        pauses.append(seconds)

    monkeypatch.setattr(
        "raymega.checkpoint.save.writer.RateLimiter",
        partial(RateLimiter, clock=lambda: 50.0, sleep=sleep),
    )
    limits = SaveLimits(file_bytes=6 << 20, bytes_per_s=4 << 20)
    manifest = save_step(far, 100, local_cache=LocalCache(Watched(tmp_path)), limits=limits)
    sizes = manifest.file_sizes()
    assert set(LocalStore(tmp_path).list("")) == set(sizes)
    assert max(pauses) == pytest.approx(sum(sizes.values()) / (4 << 20))

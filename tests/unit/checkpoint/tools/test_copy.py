"""Copies between stores: verified, whole or absent, and taken up again where they broke off."""

import pytest

from raymega.checkpoint.format.manifest import find_restore, list_manifests
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import SaveLimits
from raymega.checkpoint.tools import copy
from raymega.checkpoint.tools.copy import copy_checkpoint
from raymega.errors import CheckpointError, StorageError
from raymega.storage.local import LocalStore
from tests.support.leases import take_lease
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import MODELS, make_blocks, make_grid, same, save_checkpoint

GRID, MODEL = make_grid("tp2-dp2"), MODELS["llama-tied"]


@pytest.fixture
def source():
    return MemoryStore()


@pytest.fixture
def manifest(source):
    return save_checkpoint(source, MODEL, GRID, attempt=3, limits=SaveLimits(file_bytes=4096))


class BreakingStore(MemoryStore):
    """Takes ``num_puts`` objects and then no more."""

    def __init__(self, num_puts):
        super().__init__()
        self.num_puts = num_puts

    def put(self, key, chunks, *, overwrite):
        data = b"".join(chunks)
        if self.num_puts == 0:
            raise StorageError("no space left")
        self.num_puts -= 1
        super().put(key, [data], overwrite=overwrite)


def test_copy_holds_the_same_bytes_and_can_be_restored(source, manifest, tmp_path):
    target = LocalStore(tmp_path)
    done = copy_checkpoint(source, manifest, target)
    assert (done.num_written, done.num_found) == (len(manifest.file_sizes()), 0)
    assert list(target.list("")) == list(source.list(""))
    assert all(target.get(key) == source.get(key) for key in source.list(""))
    load(
        target,
        find_restore(target).manifest,
        blocks := make_blocks(MODEL, GRID, 1, is_filled=False),
    )
    assert same(blocks, make_blocks(MODEL, GRID, 1))


def test_copy_that_broke_off_shows_nothing_and_goes_on(source, manifest):
    target = BreakingStore(3)
    with pytest.raises(StorageError):
        copy_checkpoint(source, manifest, target)
    assert list_manifests(target) == []
    target.num_puts = -1
    done = copy_checkpoint(source, manifest, target)
    assert done.num_found == 3 and done.num_written == len(manifest.file_sizes()) - 3
    assert find_restore(target).manifest == manifest
    assert copy_checkpoint(source, manifest, target).num_written == 0


def test_file_that_is_there_but_wrong_is_written_again(source, manifest):
    target = MemoryStore()
    copy_checkpoint(source, manifest, target)
    for key in (manifest.key, next(iter(manifest.file_sizes()))):
        data = bytearray(target.get(key))
        data[-1] ^= 1
        target.put(key, [bytes(data)], overwrite=True)
    target.delete(manifest.key)
    assert copy_checkpoint(source, manifest, target).num_written == 1
    assert find_restore(target).manifest == manifest


def test_a_file_of_one_box_is_looked_at_too(source, manifest):
    boxes = manifest.boxes[:1]
    assert copy._is_right(source, manifest, boxes)
    target = MemoryStore()
    data = bytearray(source.get(manifest.file_key(boxes[0])))
    data[boxes[0].start] ^= 1
    target.put(manifest.file_key(boxes[0]), [bytes(data)], overwrite=False)
    assert not copy._is_right(target, manifest, boxes)


def test_flipped_bit_of_the_source_is_not_copied(source, manifest):
    key = manifest.file_key(manifest.boxes[0])
    data = bytearray(source.get(key))
    data[manifest.boxes[0].start] ^= 1
    source.put(key, [bytes(data)], overwrite=True)
    target = MemoryStore()
    with pytest.raises(CheckpointError, match="crc32"):
        copy_checkpoint(source, manifest, target)
    assert list_manifests(target) == [] and key not in list(target.list(""))


def test_another_checkpoint_by_that_name_is_not_overwritten(source, manifest):
    target = MemoryStore()
    other = save_checkpoint(target, MODEL, make_grid("tp4"), attempt=3)
    with pytest.raises(CheckpointError, match="exists already"):
        copy_checkpoint(source, manifest, target)
    assert find_restore(target).manifest in (None, other)


def test_run_that_goes_on_from_a_copy_writes_newer_checkpoints(source, manifest):
    target = MemoryStore()
    copy_checkpoint(source, manifest, target)
    lease = take_lease(target)
    assert lease.begin_attempt() == 4
    assert find_restore(target).manifest == manifest


def test_copy_that_a_run_would_not_count_is_refused(source, manifest):
    target = MemoryStore()
    lease = take_lease(target)
    while lease.epoch < 4:
        lease.begin_attempt()
    with pytest.raises(CheckpointError, match="the run in 'memory:', which is at attempt 4"):
        copy_checkpoint(source, manifest, target)
    assert list(target.list("checkpoints/")) == []

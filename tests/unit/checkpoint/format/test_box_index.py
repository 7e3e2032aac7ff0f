"""A manifest as the root of an index: the same checkpoint, in two levels; and tables of boxes."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from raymega.box import Box, SavedBox
from raymega.checkpoint.format import box_index
from raymega.checkpoint.format import manifest as manifests
from raymega.checkpoint.format.box_table import BoxTable
from raymega.checkpoint.format.keys import checkpoint_of, is_manifest
from raymega.checkpoint.format.manifest import (
    commit,
    find_restore,
    read_blocks,
    read_manifest,
    read_root,
)
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.copy import copy_checkpoint
from raymega.checkpoint.tools.inspection import list_checkpoints, verify_checkpoints
from raymega.checkpoint.tools.retention import Pruner, RetentionPolicy
from raymega.errors import CheckpointError
from raymega.storage.local import LocalStore
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import MODELS, make_blocks, make_grid, same, save_checkpoint

MODEL, GRID = MODELS["llama-untied"], make_grid("tp2-pp2-dp2")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Every checkpoint of these tests has an index of several parts and row groups."""
    monkeypatch.setattr(manifests, "INLINE_BOXES", 8)
    monkeypatch.setattr(box_index, "PART_BOXES", 64)
    monkeypatch.setattr(box_index, "ROW_GROUP_BOXES", 16)


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "run")


def parts_of(store):
    return [key for key in store.list("") if key.endswith(".parquet")]


def test_root_says_what_all_boxes_say(store):
    whole = save_checkpoint(store, MODEL, GRID)
    root = read_root(store, whole.key)
    assert len(root.boxes) == 0 < len(whole.boxes) and len(parts_of(store)) > 2
    assert json.loads(store.get(whole.key))["version"] == 4
    assert root.shapes == whole.shapes and root.total_bytes == whole.total_bytes
    assert root.file_sizes() == whole.file_sizes() and root.header_sizes() == whole.header_sizes()
    again = read_manifest(store, whole.key)
    assert sorted(again.boxes, key=str) == sorted(whole.boxes, key=str)
    assert replace(again, boxes=whole.boxes) == whole


PROBE = """
import sys
import numpy as np
from raymega.checkpoint.format import box_index
box_index.ROW_GROUP_BOXES = 4
rows = np.frombuffer(np.random.default_rng(0).bytes(10 * box_index.ROW.itemsize), box_index.ROW)
found = np.concatenate(list(box_index._row_groups(box_index._to_parquet(rows))))
print((found == rows).all(), "pandas" in sys.modules)
"""


def test_index_is_written_and_read_without_pandas():
    """It takes 0.3 s of a core, in the restore of each rank of a large world."""
    ran = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert ran.stdout == "True False\n"


@pytest.mark.parametrize("layout", ["tp1", "tp4-pp4", "pp2-dp2"])
def test_rank_of_any_grid_reads_its_boxes_and_fills_its_blocks(store, layout):
    key, grid = save_checkpoint(store, MODEL, GRID).key, make_grid(layout)
    names = read_root(store, key).shapes
    for rank in range(grid.world_size):
        blocks = make_blocks(MODEL, grid, rank, is_filled=False)
        places = {}
        for block in blocks:
            places.setdefault(block.name, []).append(block.box)
        mine = read_blocks(store, key, places)
        for box in mine.boxes:
            assert any(box.box.intersect(place) for place in places[box.tensor])
        load(store, mine, blocks, expected=list(names))
        assert same(blocks, make_blocks(MODEL, grid, rank))


def test_parts_are_read_that_have_boxes_of_a_wanted_tensor():
    class Log(MemoryStore):
        read = ()

        def get(self, key, *, start=0, num_bytes=-1):
            self.read = {*self.read, key} if key.endswith(".parquet") else self.read
            return super().get(key, start=start, num_bytes=num_bytes)

    log = Log()
    whole = save_checkpoint(log, MODEL, GRID)
    index = read_root(log, whole.key).index
    folder, held = whole.key.rpartition("/")[0] + "/", {}
    for part in index.parts:
        for box in replace(index, parts=(part,)).read(log, folder, None):
            held.setdefault(box.tensor, set()).add(folder + part.file)
    assert len(index.parts) > 2 and held.keys() == whole.shapes.keys()
    for name, parts in held.items():
        log.read = ()
        place = Box(offset=(0,) * len(whole.shapes[name]), shape=whole.shapes[name])
        assert {box.tensor for box in index.read(log, folder, {name: [place]})} == {name}
        assert log.read == parts


def test_tensor_that_only_the_root_names_is_unexpected(store):
    key = save_checkpoint(store, MODEL, GRID).key
    blocks = make_blocks(MODEL, make_grid("tp1"), 0, is_filled=False)[:3]
    mine = read_blocks(store, key, {block.name: [block.box] for block in blocks})
    with pytest.raises(Exception, match="and nothing in this model"):
        load(store, mine, blocks, expected=[block.name for block in blocks])


@pytest.mark.parametrize("harm", ["missing", "short", "flipped"])
def test_damaged_part_is_named_and_an_older_checkpoint_is_found(store, harm):
    older = save_checkpoint(store, MODEL, GRID, step=100)
    newer = save_checkpoint(store, MODEL, GRID, step=200)
    part = parts_of(store)[-1]
    data = store.get(part)
    store.delete(part)
    if harm != "missing":
        spoilt = data[:-1] if harm == "short" else data[:-1] + bytes([data[-1] ^ 1])
        store.put(part, [spoilt], overwrite=False)
    with pytest.raises(CheckpointError, match=f"{part} (is missing|has)"):
        read_manifest(store, newer.key)
    found = find_restore(store)
    # one flipped bit is found when the part is read: its size is right
    assert found.key == (newer.key if harm == "flipped" else older.key)
    assert [part in fault.fact for fault in found.broken] == [True] * (harm != "flipped")
    summary = verify_checkpoints(f"{store.uri}")[0]
    assert any(part in fault for fault in summary.faults)


def test_commit_again_does_nothing_and_another_manifest_is_refused(store):
    whole = save_checkpoint(store, MODEL, GRID)
    before = {key: store.get(key) for key in store.list("")}
    assert commit(store, whole) == whole.key
    assert {key: store.get(key) for key in store.list("")} == before
    with pytest.raises(CheckpointError, match="exists already"):
        commit(store, replace(whole, created="later"))
    with pytest.raises(CheckpointError, match="exists already"):
        commit(store, replace(whole, boxes=whole.boxes[:-1]))
    assert {key: store.get(key) for key in store.list("")} == before


def test_parts_are_written_before_the_root():
    class Log(MemoryStore):
        def __init__(self):
            super().__init__()
            self.written = []

        def put(self, key, chunks, *, overwrite):
            self.written.append(key)
            super().put(key, chunks, overwrite=overwrite)

    log = Log()
    whole = save_checkpoint(log, MODEL, GRID)
    kinds = [key.rpartition(".")[2] for key in log.written]
    assert kinds == sorted(kinds, key=["safetensors", "parquet", "json"].index)
    assert [*filter(is_manifest, log.written)] == [whole.key] == log.written[-2:-1]


def test_pruning_copying_and_listing_know_the_parts(store, tmp_path):
    for step in (100, 200):
        whole = save_checkpoint(store, MODEL, GRID, step=step)
    target = LocalStore(tmp_path / "copy")
    copy_checkpoint(store, read_manifest(store, whole.key), target)
    assert parts_of(target) and verify_checkpoints(target.uri)[0].faults == ()
    assert [each.total_bytes for each in list_checkpoints(store.uri)] == [whole.total_bytes] * 2
    Pruner(store, RetentionPolicy(last=1)).prune()
    assert {checkpoint_of(key).step for key in store.list("checkpoints/")} == {200}


def boxes(*extents):
    return tuple(
        SavedBox(
            tensor=f"model/t{len(shape)}", dtype="float32", global_shape=(9,) * len(shape),
            box=Box(offset=(1,) * len(shape), shape=shape), file=f"f{len(shape)}", start=8, num_bytes=4,
            crc32=2**32 - 1,
        )
        for shape in extents
    )  # fmt: skip


def test_table_is_a_sequence_of_the_boxes():
    listed = boxes((), (2,), (3, 4), (1, 2, 3), (1, 1, 1, 2))
    table = BoxTable.of(listed)
    assert tuple(table) == listed == table and table[2] == listed[2] and table[-1] == listed[-1]
    assert table[1:3] == listed[1:3] and len(table) == 5 and BoxTable.of(table) is table
    assert pickle.loads(pickle.dumps(table)) == table
    assert BoxTable.joined([table, listed[::-1]]) == (*listed, *listed[::-1])
    assert BoxTable.joined([]) == () and hash(table) == hash(BoxTable.of(listed))
    with pytest.raises(CheckpointError, match="has 5 dims"):
        BoxTable.of(boxes((1,) * 5))

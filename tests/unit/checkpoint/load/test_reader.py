"""The reader: what it reads, and what it refuses before and while it reads."""

from dataclasses import replace

import pytest
import torch

from raymega.checkpoint.format import data_file
from raymega.checkpoint.load import ranged_reads
from raymega.checkpoint.load.reader import load
from raymega.errors import CheckpointError, ConfigError
from raymega.storage.local import LocalStore
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import (
    MODELS,
    make_blocks,
    make_grid,
    make_model,
    same,
    save_checkpoint,
)

MODEL, ALONE = MODELS["llama-untied"], make_grid("tp1")


class CountingStore(MemoryStore):
    def __init__(self):
        super().__init__()
        self.reads = []

    def get(self, key, *, start=0, num_bytes=-1):
        self.reads.append((key, start, num_bytes))
        return super().get(key, start=start, num_bytes=num_bytes)


@pytest.fixture
def store():
    return CountingStore()


def test_what_is_needed_is_read_once_and_nothing_else(store, monkeypatch):
    monkeypatch.setattr(data_file, "MAX_BOX_BYTES", 256)
    monkeypatch.setattr(ranged_reads, "GAP_BYTES", 0)
    manifest = save_checkpoint(store, MODEL, make_grid("dp2"))
    grid = make_grid("tp4-pp4")
    store.reads.clear()
    num_bytes = load(store, manifest, make_blocks(MODEL, grid, 5, is_filled=False))
    assert sum(n for _, _, n in store.reads) == num_bytes < manifest.total_bytes / 4
    read = [
        box
        for key, start, n in store.reads
        for box in manifest.boxes
        if manifest.file_key(box) == key and start <= box.start < start + n
    ]
    assert sum(box.num_bytes for box in read) == num_bytes, "no byte twice, none between boxes"
    assert {box.tensor.split("/")[1].split(".")[1] for box in read} == {"1"}
    assert len(store.reads) < len(read) / 2, "neighbours travel together"


def test_whole_model_costs_every_byte_once(store):
    manifest = save_checkpoint(store, MODEL, make_grid("tp2-pp2"))
    blocks = make_blocks(MODEL, ALONE, 0, is_filled=False)
    assert load(store, manifest, blocks) == manifest.total_bytes
    assert same(blocks, make_blocks(MODEL, ALONE, 0))


def test_every_box_that_was_read_is_a_sign_of_life(store, monkeypatch):
    monkeypatch.setattr(data_file, "MAX_BOX_BYTES", 256)
    manifest = save_checkpoint(store, MODEL, make_grid("tp2"))
    pulses, blocks = [], make_blocks(MODEL, ALONE, 0, is_filled=False)
    load(store, manifest, blocks, progress=lambda: pulses.append(1))
    assert len(pulses) == len(manifest.boxes)


class InPlaceStore(LocalStore):
    """Knows of how many bytes there was no copy."""

    num_bytes = 0

    def read_into(self, key, place, *, start, piece_bytes):
        for piece in super().read_into(key, place, start=start, piece_bytes=piece_bytes):
            self.num_bytes += len(piece)
            yield piece


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Every box is long, and comes in pieces."""
    monkeypatch.setattr(ranged_reads, "DIRECT_BYTES", 1)
    monkeypatch.setattr(ranged_reads, "LOCAL_BYTES", 100)
    return InPlaceStore(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["tp1", "tp2-dp2", "tp4-pp2"])
def test_whole_rows_of_files_come_to_their_place_without_a_copy(folder, layout, dtype):
    manifest = save_checkpoint(folder, MODEL, make_grid("tp2-pp2"), dtype=dtype)
    grid = make_grid(layout)
    for rank in range(grid.world_size):
        folder.num_bytes = 0
        blocks = make_blocks(MODEL, grid, rank, dtype=dtype, is_filled=False)
        num_bytes = load(folder, manifest, blocks)
        assert same(blocks, make_blocks(MODEL, grid, rank, dtype=dtype))
        if layout == "tp2-dp2":
            assert folder.num_bytes == num_bytes
        else:
            assert 0 < folder.num_bytes < num_bytes, "columns are copied"


def test_values_of_another_type_are_not_read_to_their_place(folder):
    manifest = save_checkpoint(folder, MODEL, ALONE)
    blocks = make_blocks(MODEL, ALONE, 0, dtype=torch.float64, is_filled=False)
    load(folder, manifest, blocks)
    assert folder.num_bytes == 0
    narrow = make_blocks(MODEL, ALONE, 0)
    assert same(blocks, [replace(block, values=block.values.double()) for block in narrow])


@pytest.mark.parametrize("damage", ["flipped", "torn", "missing"])
def test_what_came_to_its_place_is_verified(folder, damage):
    manifest = save_checkpoint(folder, MODEL, ALONE)
    (key,) = manifest.file_sizes()
    data = bytearray(folder.get(key))
    data[-1] ^= 0x40
    if damage == "missing":
        folder.delete(key)
    else:
        folder.put(key, [data if damage == "flipped" else data[:-1]], overwrite=True)
    fact = {"flipped": "crc32", "torn": "only .* bytes are there", "missing": "is missing"}
    with pytest.raises(CheckpointError, match=f"{key}.*{fact[damage]}"):
        load(folder, manifest, make_blocks(MODEL, ALONE, 0))


def test_parameter_that_needs_a_gradient_is_filled(store):
    manifest = save_checkpoint(store, MODEL, ALONE)
    blocks = make_blocks(MODEL, ALONE, 0, is_filled=False)
    for block in blocks:
        block.values.requires_grad_()
    load(store, manifest, blocks)
    assert same(blocks, make_blocks(MODEL, ALONE, 0))


def test_every_tensor_that_is_missing_is_named_and_nothing_is_read(store):
    manifest = save_checkpoint(store, make_model("gpt2", is_tied=True), ALONE)
    store.reads.clear()
    with pytest.raises(CheckpointError) as caught:
        load(store, manifest, make_blocks(MODEL, ALONE, 0))
    named = {fault.fact.split()[0] for fault in caught.value.faults}
    layers = {f"layers.{layer}.mlp.gate.weight" for layer in range(4)}
    kinds = ("model", "adam.exp_avg", "adam.exp_avg_sq")
    assert named == {f"{kind}/{name}" for kind in kinds for name in {*layers, "head.weight"}}
    assert store.reads == []


def test_every_tensor_that_nobody_holds_is_named_and_nothing_is_read(store):
    """A shallower model must not go on with half of what was saved."""
    manifest = save_checkpoint(store, MODEL, ALONE)
    store.reads.clear()
    shallow = MODEL.model_copy(update={"num_layers": 3})
    blocks = make_blocks(shallow, ALONE, 0, is_filled=False)
    expected = {block.name for block in blocks}
    with pytest.raises(ConfigError) as caught:
        load(store, manifest, blocks, expected=expected)
    named = {fault.fact.split()[0] for fault in caught.value.faults}
    assert named == {name for name in manifest.tensors() if "/layers.3." in name}
    with pytest.raises(CheckpointError) as caught:
        load(store, manifest, make_blocks(MODELS["gpt2-tied"], ALONE, 0), expected={"model/x"})
    facts = [fault.fact for fault in caught.value.faults]
    assert any("mlp_norm.bias is not in" in fact for fact in facts)
    assert any("head.weight is in" in fact for fact in facts)
    assert store.reads == []


def test_other_shape_is_refused_with_both(store):
    manifest = save_checkpoint(store, MODEL.model_copy(update={"vocab_size": 80}), ALONE)
    with pytest.raises(CheckpointError, match=r"tokens.weight is \(80, 16\) in .* \(40, 16\)"):
        load(store, manifest, make_blocks(MODEL, ALONE, 0))


def test_region_that_no_box_covers_is_named(store):
    manifest = save_checkpoint(store, MODEL, make_grid("tp4"))
    boxes = tuple(
        box
        for box in manifest.boxes
        if (box.tensor, box.box.offset) != ("model/layers.2.mlp.down.weight", (0, 12))
    )
    holed = replace(manifest, boxes=boxes)
    expected = r"model/layers.2.mlp.down.weight has its block \(16, 6\) at \(0, 12\) 0 times"
    with pytest.raises(CheckpointError, match=expected):
        load(store, holed, make_blocks(MODEL, make_grid("tp2"), 1))
    load(store, holed, make_blocks(MODEL, make_grid("tp2"), 0))


@pytest.mark.parametrize("damage", ["flipped", "torn", "missing"])
def test_corrupt_file_is_named(store, damage):
    manifest = save_checkpoint(store, MODEL, make_grid("tp2-dp2"))
    key = sorted(manifest.file_sizes())[2]
    data = bytearray(store.get(key))
    data[-1] ^= 0x40
    if damage == "missing":
        store.delete(key)
    else:
        store.put(key, [data if damage == "flipped" else data[:-1]], overwrite=True)
    with pytest.raises(CheckpointError, match=key):
        load(store, manifest, make_blocks(MODEL, ALONE, 0))


def test_values_widen_without_a_word(store):
    manifest = save_checkpoint(store, MODEL, make_grid("tp2"), dtype=torch.bfloat16)
    blocks = make_blocks(MODEL, ALONE, 0, dtype=torch.float64, is_filled=False)
    load(store, manifest, blocks)
    narrow = make_blocks(MODEL, ALONE, 0, dtype=torch.bfloat16)
    assert same(blocks, [replace(block, values=block.values.double()) for block in narrow])


def test_values_narrow_only_when_told(store):
    manifest = save_checkpoint(store, MODEL, make_grid("tp2"), dtype=torch.float64)
    blocks = make_blocks(MODEL, ALONE, 0, is_filled=False)
    with pytest.raises(ConfigError, match="saved in float64, this run keeps it in float32"):
        load(store, manifest, blocks)
    load(store, manifest, blocks, is_narrowing_allowed=True)
    assert same(blocks, make_blocks(MODEL, ALONE, 0))


def test_type_that_cannot_be_saved_is_refused_by_name(store):
    manifest = save_checkpoint(store, MODEL, ALONE)
    blocks = [replace(b, values=b.values.long()) for b in make_blocks(MODEL, ALONE, 0)]
    with pytest.raises(CheckpointError, match="int64"):
        load(store, manifest, blocks)

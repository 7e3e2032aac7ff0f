"""Differences of two checkpoints, whatever layouts wrote them."""

import math

import pytest
import torch

from raymega.checkpoint.format.manifest import commit
from raymega.checkpoint.format.manifest_builder import assemble
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.checkpoint.tools.diff import compare
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.errors import CheckpointError
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import (
    MODELS,
    QUIET,
    STATE,
    make_blocks,
    make_grid,
    save_checkpoint,
)

MODEL = MODELS["llama-tied"]
NAME = "model/layers.2.mlp.down.weight"


def _save(layout, change=lambda block: None, *, dtype=torch.float64):
    """A checkpoint whose blocks ``change`` has been at."""
    store, grid, shards = MemoryStore(), make_grid(layout), []
    for rank in range(grid.world_size):
        writer = CheckpointWriter(store, rank=rank, attempt=1, report=shards.append, limits=QUIET)
        blocks = make_blocks(MODEL, grid, rank, dtype=dtype)
        for block in blocks:
            change(block)
        writer.save(100, blocks, STATE)
        assert writer.wait()
    manifest = assemble(
        shards, world_size=grid.world_size, attempt=1, created="now", job={}, grid={}
    )
    commit(store, manifest)
    return Checkpoint(store=store, manifest=manifest)


def _set(name, index, value):
    """Give one element of the global tensor ``name`` another value, wherever it lies."""

    def change(block):
        if block.name != name:
            return
        at = [i - offset for i, offset in zip(index, block.box.offset, strict=True)]
        if all(0 <= i < n for i, n in zip(at, block.box.shape, strict=True)):
            block.values[tuple(at)] = value

    return change


@pytest.mark.parametrize("layout", ["tp1", "tp4", "pp2-dp2", "dp3", "tp2-pp2"])
def test_same_values_of_another_layout_do_not_differ(layout):
    found = list(compare(_save("tp2-dp2"), _save(layout)))
    assert len(found) == len(_save("tp1").manifest.tensors())
    assert all((each.relative, each.num_different, each.note) == (0.0, 0, "") for each in found)
    assert all(each.num_elements > 0 for each in found)


def test_one_changed_element_is_found_and_measured():
    a, index = _save("tp2-pp2"), (7, 13)
    largest = 24 * 16 + 1024 * 2**13  # above every known value
    b = _save("dp3", _set(NAME, index, float(largest)))
    found = {each.name: each for each in compare(a, b)}
    worst = found.pop(NAME)
    assert all(each.num_different == 0 for each in found.values())
    (block,) = [each for each in make_blocks(MODEL, make_grid("tp1"), 0, dtype=torch.float64)
                if each.name == NAME]  # fmt: skip
    was = float(block.values[index])
    assert worst.num_different == 1 and worst.num_elements == block.values.numel()
    assert worst.relative == worst.elementwise == (largest - was) / largest


def test_small_element_weighs_little_by_the_tensor_and_much_by_itself():
    a, b = _save("tp1", _set(NAME, (0, 0), 1e-9)), _save("tp2", _set(NAME, (0, 0), 2e-9))
    worst = max(compare(a, b), key=lambda each: each.num_different)
    assert worst.name == NAME and worst.relative < 1e-12
    assert worst.elementwise == pytest.approx(0.5)


def test_number_that_is_not_finite_on_one_side_is_infinitely_far():
    a, b = _save("tp1"), _save("tp2", _set(NAME, (0, 0), math.nan))
    assert {each.name for each in compare(a, b) if each.relative == math.inf} == {NAME}
    assert all(each.num_different == 0 for each in compare(b, b))


def test_formats_may_differ_and_are_compared_by_value():
    a, b = _save("tp1", dtype=torch.float32), _save("tp2", dtype=torch.float64)
    assert all(each.relative == 0.0 for each in compare(a, b))
    c = _save("tp2", dtype=torch.bfloat16)
    assert all(each.relative == 0.0 for each in compare(c, _save("dp2", dtype=torch.bfloat16)))
    assert any(each.relative > 0.0 for each in compare(a, c))


def test_tensors_of_one_side_only_and_of_other_shapes_are_named():
    store = MemoryStore()
    other = save_checkpoint(store, MODELS["llama-untied"], make_grid("tp1"))
    notes = {
        each.name: each.note
        for each in compare(_save("tp1"), Checkpoint(store=store, manifest=other))
    }
    assert notes["model/head.weight"] == "only in the second"
    assert not notes[NAME]


def test_torn_file_is_an_error_and_not_a_difference():
    a = _save("tp1")
    key = a.manifest.file_key(a.manifest.boxes[0])
    a.store.put(key, [a.store.get(key)[:-1]], overwrite=True)
    with pytest.raises(CheckpointError, match="bytes are there"):
        list(compare(a, _save("tp2")))

"""Save on one grid, load on another: equal bit for bit, every axis up and down."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.checkpoint.format import data_file
from raymega.checkpoint.load.reader import load
from raymega.plan.grid import Grid
from raymega.storage.local import LocalStore
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import MODELS, make_blocks, make_grid, same, save_checkpoint

PAIRS = [
    ("tp1", "tp4"),
    ("tp4", "tp1"),
    ("tp1", "pp4"),
    ("pp4", "tp1"),
    ("tp1", "dp4"),
    ("dp4", "tp1"),
    ("tp2-pp2", "pp4"),
    ("tp2-pp2", "tp4"),
    ("tp2-pp2", "tp2-dp2"),
    ("pp2-dp2", "tp2-pp4"),
    ("tp2-pp2-dp2", "pp3-dp3"),
    ("pp3-dp3", "tp4-pp2"),
    ("tp4-pp4", "tp2-pp2-dp2"),
]


def check_load(store, manifest, model, grid, dtype, *, is_sharded=False):
    """Every rank of ``grid`` gets exactly what it should hold."""
    for rank in range(grid.world_size):
        blocks, wanted = (
            make_blocks(model, grid, rank, dtype=dtype, is_filled=is_filled, is_sharded=is_sharded)
            for is_filled in (False, True)
        )
        load(store, manifest, blocks)
        assert same(blocks, wanted), rank


@pytest.mark.sample(8)
@pytest.mark.parametrize("model", ["gpt2-tied", "llama-untied"])
@pytest.mark.parametrize(
    ("saved", "loaded"), PAIRS, ids=[f"{saved}-to-{loaded}" for saved, loaded in PAIRS]
)
def test_checkpoint_loads_on_another_grid(model, saved, loaded):
    store, model = MemoryStore(), MODELS[model]
    manifest = save_checkpoint(store, model, make_grid(saved))
    check_load(store, manifest, model, make_grid(loaded), torch.float32)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("dp3", "tp2-pp2"), ("tp2-pp2", "dp3"), ("tp2-pp2-dp3", "pp4-dp2"), ("dp2", "dp5")],
)
def test_sharded_checkpoint_loads_on_another_grid_and_back(saved, loaded):
    """Sharded where there is data parallelism, in shards that end within rows."""
    store, model = MemoryStore(), MODELS["gpt2-tied"]
    manifest = save_checkpoint(store, model, make_grid(saved), is_sharded="dp" in saved)
    is_sharded = "dp" in loaded
    check_load(store, manifest, model, make_grid(loaded), torch.float32, is_sharded=is_sharded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_checkpoint_keeps_the_bits_of_each_type(dtype, tmp_path):
    store, model = LocalStore(tmp_path), MODELS["gpt2-tied"]
    manifest = save_checkpoint(store, model, make_grid("tp2-pp2"), dtype=dtype)
    check_load(store, manifest, model, make_grid("tp4-dp2"), dtype)


_GRIDS = st.builds(
    Grid,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 4),
    dp=st.integers(1, 3),
    order=st.sampled_from(["tp-cp-ep-dp-pp", "pp-dp-ep-cp-tp"]),
)


@settings(max_examples=3, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)), saved=_GRIDS, loaded=_GRIDS,
    is_saved_sharded=st.booleans(), is_loaded_sharded=st.booleans(),
    max_box_bytes=st.sampled_from([64, 1000, 2**26]),
)  # fmt: skip
def test_any_grid_loads_from_any(
    model, saved, loaded, is_saved_sharded, is_loaded_sharded, max_box_bytes
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_file, "MAX_BOX_BYTES", max_box_bytes)
        store = MemoryStore()
        manifest = save_checkpoint(store, MODELS[model], saved, is_sharded=is_saved_sharded)
    check_load(store, manifest, MODELS[model], loaded, torch.float32, is_sharded=is_loaded_sharded)

"""Save on one grid, load on another: equal bit for bit, every axis up and down."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.checkpoint import planner
from raymega.checkpoint.reader import load
from raymega.plan.grid import Grid
from raymega.storage.local import LocalStore
from raymega.storage.memory import MemoryStore
from tests.unit.checkpoint.support import MODELS, make_grid, make_items, save_checkpoint

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


def check_load(store, manifest, model, grid, dtype):
    """Every rank of ``grid`` gets exactly what it should hold."""
    for rank in range(grid.world_size):
        items = make_items(model, grid, rank, dtype=dtype, is_filled=False)
        load(store, manifest, items)
        for item, wanted in zip(items, make_items(model, grid, rank, dtype=dtype), strict=True):
            assert torch.equal(item[2], wanted[2]), (rank, item[0], item[1].spec.name)


@pytest.mark.parametrize("model", ["gpt2-tied", "llama-untied"])
@pytest.mark.parametrize(
    ("saved", "loaded"), PAIRS, ids=[f"{saved}-to-{loaded}" for saved, loaded in PAIRS]
)
def test_checkpoint_loads_on_another_grid(model, saved, loaded):
    store, model = MemoryStore(), MODELS[model]
    manifest = save_checkpoint(store, model, make_grid(saved))
    check_load(store, manifest, model, make_grid(loaded), torch.float32)


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
    max_box_bytes=st.sampled_from([64, 1000, 2**26]),
)  # fmt: skip
def test_any_grid_loads_from_any(model, saved, loaded, max_box_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "MAX_BOX_BYTES", max_box_bytes)
        store = MemoryStore()
        manifest = save_checkpoint(store, MODELS[model], saved)
    check_load(store, manifest, MODELS[model], loaded, torch.float32)

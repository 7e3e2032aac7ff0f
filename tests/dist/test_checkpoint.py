"""Real ranks save a real model at once and real ranks of another grid load it, bit for bit."""

import os

import pytest
import torch

from raymega.checkpoint.items import block_of
from raymega.checkpoint.manifest import commit, find_restore, read_manifest
from raymega.checkpoint.reader import load
from raymega.checkpoint.writer import CheckpointWriter
from raymega.model.stage import StageModule
from raymega.parallel.comm import barrier
from raymega.plan.stages import make_stages
from raymega.storage.local import PARTIAL_FOLDER, LocalStore
from raymega.storage.open import open_store
from tests.support.ranks import RankFailureError, run_grid, run_ranks
from tests.unit.checkpoint.support import (
    KINDS,
    MODELS,
    STATE,
    assemble_shards,
    block_values,
    make_grid,
    make_items,
)

pytestmark = pytest.mark.dist

SEED = 7


def _items(env, model, *, seed):
    """The items of a model that was built with ``seed``; moments have known values."""
    stage = make_stages(num_layers=model.num_layers, num_stages=env.grid.pp)[env.coords.pp]
    module = StageModule(
        model, stage, groups=env.groups, dtype=torch.float32, device=env.device, seed=seed
    )
    return [
        (kind, param, param if kind == "model" else _moments(kind, param))
        for param in module.parameters()
        for kind in KINDS
    ]


def _moments(kind, param):
    tensor = torch.empty(param.shape)
    for piece in param.spec.pieces:
        name = f"{kind}/{piece.tensor.name}"
        values = block_values(name, piece.tensor.shape, piece.box, torch.float32)
        block_of(tensor, piece.local).copy_(values)
    return tensor


def _save(env, model, uri):
    shards = []
    writer = CheckpointWriter(
        open_store(uri), rank=env.rank, attempt=1, dp=env.grid.dp, report=shards.append
    )
    items = _items(env, MODELS[model], seed=SEED)
    barrier(env.groups.world)
    writer.save(100, items, STATE, dp_rank=env.coords.dp)
    assert writer.wait()
    return shards[0]


def _load(env, model, uri, key):
    """Names of what differs from a model that was built with the seed of the saved one."""
    store = open_store(uri)
    items, wanted = (_items(env, MODELS[model], seed=seed) for seed in (SEED + 1, SEED))
    for kind, _, tensor in items:
        if kind != "model":
            tensor.fill_(torch.nan)
    load(store, read_manifest(store, key), items)
    pairs = zip(items, wanted, strict=True)
    return [a[1].spec.name for a, b in pairs if not torch.equal(a[2], b[2])]


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [
        ("gpt2-tied", "tp2-pp2", "pp4"),
        ("llama-untied", "pp2-dp2", "tp4"),
        ("llama-tied", "tp4", "pp2-dp2"),
    ],
    ids=["tp2-pp2-to-pp4", "pp2-dp2-to-tp4", "tp4-to-pp2-dp2"],
)
def test_ranks_load_what_ranks_of_another_grid_saved(model, saved, loaded, tmp_path):
    grid, store = make_grid(saved), LocalStore(tmp_path)
    manifest = assemble_shards(run_grid(_save, grid, model, str(tmp_path)), grid)
    commit(store, manifest)
    assert len(manifest.file_sizes()) == grid.world_size
    restore = find_restore(store)
    assert restore.manifest == manifest
    differing = run_grid(_load, make_grid(loaded), model, str(tmp_path), restore.key)
    assert differing == [[]] * 4


class _DyingStore(LocalStore):
    """The process is gone in the middle of a file."""

    def put(self, key, chunks, *, overwrite):
        def torn():
            for count, chunk in enumerate(chunks):
                yield chunk
                if count == 3:
                    os._exit(9)

        super().put(key, torn(), overwrite=overwrite)


def _save_and_die(_rank, _world_size, path):
    items = make_items(MODELS["gpt2-tied"], make_grid("tp1"), 0)
    for step, store in ((100, LocalStore(path)), (200, _DyingStore(path))):
        shards = []
        writer = CheckpointWriter(store, rank=0, attempt=1, dp=1, report=shards.append)
        writer.save(step, items, {**STATE, "step": step}, dp_rank=0)
        assert writer.wait()
        commit(store, assemble_shards(shards, make_grid("tp1")))


def test_process_that_dies_in_a_write_leaves_the_older_checkpoint(tmp_path):
    with pytest.raises(RankFailureError, match="exit code 9"):
        run_ranks(_save_and_die, 1, tmp_path)
    store = LocalStore(tmp_path)
    restore = find_restore(store)
    assert restore.manifest.step == 100 and restore.broken == ()
    assert len(list((tmp_path / PARTIAL_FOLDER).iterdir())) == 1
    assert not [key for key in store.list("") if "step-00000200" in key]
    items = make_items(MODELS["gpt2-tied"], make_grid("tp1"), 0, is_filled=False)
    load(store, restore.manifest, items)
    wanted = make_items(MODELS["gpt2-tied"], make_grid("tp1"), 0)
    assert all(torch.equal(a[2], b[2]) for a, b in zip(items, wanted, strict=True))

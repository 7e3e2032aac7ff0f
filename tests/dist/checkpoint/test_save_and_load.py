"""Real ranks save a real model at once and real ranks of another grid load it, bit for bit."""

import os

import pytest
import torch

from raymega.checkpoint.format.manifest import commit, find_restore, read_manifest
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.config.schema import OptimizerSection
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.comm.collectives import barrier
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.zero_levels import ZeroLevel
from raymega.storage.local import PARTIAL_FOLDER, LocalStore
from raymega.storage.registry import open_store
from tests.support.params import make_optimizer
from tests.support.ranks import RankFailureError, run_grid, run_ranks
from tests.support.stages import even_stages
from tests.unit.checkpoint.support import (
    MODELS,
    STATE,
    assemble_shards,
    fill,
    make_blocks,
    make_grid,
    same,
)

pytestmark = pytest.mark.dist

SEED = 7
SECTION = OptimizerSection(lr=1e-2)


def _optimizer(env, model, *, seed, is_sharded):
    """The optimizer of a model that was built with ``seed``; moments have known values."""
    stage = even_stages(num_layers=model.num_layers, num_stages=env.grid.pp)[env.coords.pp]
    module = StageModule(
        model,
        stage,
        sp=SequenceParallel(tp=env.groups.tp),
        dtype=torch.float32,
        device=env.device,
        seed=seed,
    )
    _, weights, optimizer = make_optimizer(
        list(module.parameters()),
        SECTION,
        env.groups,
        level=ZeroLevel(is_sharded),
        bucket_bytes=2000,
    )
    fill(block for block in optimizer.blocks() if block.kind != "model")
    return module, weights, optimizer


def _save(env, model, uri, is_sharded):
    shards = []
    writer = CheckpointWriter(open_store(uri), rank=env.rank, attempt=1, report=shards.append)
    _, _, optimizer = _optimizer(env, MODELS[model], seed=SEED, is_sharded=is_sharded)
    barrier(env.groups.world)
    writer.save(100, list(optimizer.blocks()), STATE)
    assert writer.wait()
    held = sum(block.values.nbytes for block in optimizer.blocks())
    return shards[-1], writer.host_bytes, held // (1 if is_sharded else env.grid.dp)


def _load(env, model, uri, key, is_sharded):
    """Names of what differs from a model that was built with the seed of the saved one."""
    store = open_store(uri)
    module, weights, optimizer = _optimizer(
        env, MODELS[model], seed=SEED + 1, is_sharded=is_sharded
    )
    wanted_module, _, wanted = _optimizer(env, MODELS[model], seed=SEED, is_sharded=is_sharded)
    for block in optimizer.blocks():
        block.values.fill_(torch.nan)
    load(store, read_manifest(store, key), list(optimizer.blocks()))
    optimizer.sync_weights()
    weights.start_gather()
    weights.wait_for_all()
    blocks = zip(optimizer.blocks(), wanted.blocks(), strict=True)
    params = zip(module.named_parameters(), wanted_module.parameters(), strict=True)
    return [a.name for a, b in blocks if not torch.equal(a.values, b.values)] + [
        name for (name, a), b in params if not torch.equal(a, b)
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [
        ("gpt2-tied", "tp2-pp2", "pp4"),
        ("llama-untied", "pp2-dp2", "tp4"),
        ("llama-tied", "tp4", "pp2-dp2"),
        ("gpt2-tied", "dp3", "tp2-pp2"),
        ("gpt2-tied", "tp2-pp2", "dp3"),
        ("llama-tied", "pp2-dp2", "dp4"),
    ],
    ids=lambda name: name,
)
def test_ranks_load_what_ranks_of_another_grid_saved(model, saved, loaded, tmp_path):
    """Every dp axis shards its optimizer; 3 and 4 dp ranks cut these tensors within rows."""
    grid, store = make_grid(saved), LocalStore(tmp_path)
    results = run_grid(_save, grid, model, str(tmp_path), "dp" in saved)
    manifest = assemble_shards([shard for shard, _, _ in results], grid)
    commit(store, manifest)
    assert len(manifest.file_sizes()) == grid.world_size
    assert all(buffer <= held for _, buffer, held in results), "host memory of a save"
    restore = find_restore(store)
    assert restore.manifest == manifest
    grid = make_grid(loaded)
    differing = run_grid(_load, grid, model, str(tmp_path), restore.key, "dp" in loaded)
    assert differing == [[]] * grid.world_size


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
    blocks = make_blocks(MODELS["gpt2-tied"], make_grid("tp1"), 0)
    for step, store in ((100, LocalStore(path)), (200, _DyingStore(path))):
        shards = []
        writer = CheckpointWriter(store, rank=0, attempt=1, report=shards.append)
        writer.save(step, blocks, {**STATE, "step": step})
        assert writer.wait()
        commit(store, assemble_shards(shards[-1:], make_grid("tp1")))


def test_process_that_dies_in_a_write_leaves_the_older_checkpoint(tmp_path):
    with pytest.raises(RankFailureError, match="exit code 9"):
        run_ranks(_save_and_die, 1, tmp_path)
    store = LocalStore(tmp_path)
    restore = find_restore(store)
    assert restore.manifest.step == 100 and restore.broken == ()
    assert len(list((tmp_path / PARTIAL_FOLDER).iterdir())) == 1
    assert not [key for key in store.list("") if "step-00000200" in key]
    blocks = make_blocks(MODELS["gpt2-tied"], make_grid("tp1"), 0, is_filled=False)
    load(store, restore.manifest, blocks)
    wanted = make_blocks(MODELS["gpt2-tied"], make_grid("tp1"), 0)
    assert same(blocks, wanted)

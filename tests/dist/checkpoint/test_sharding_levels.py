"""What one level of sharding saved another one loads, bit for bit, and goes on with the same step."""

import numpy as np
import pytest
import torch

from raymega.checkpoint.format.manifest import commit, read_manifest
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.messages import Requests
from raymega.parallel.comm.process_groups import build_groups
from raymega.plan.run_plan import read_plan
from raymega.plan.zero_levels import data_parallel_shard_size
from raymega.storage.local import LocalStore
from raymega.storage.registry import open_store
from raymega.train.build import build_parts
from raymega.train.state import TrainState, state_from
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.references.plain_models import slices
from tests.unit.checkpoint.support import assemble_shards

pytestmark = pytest.mark.dist

LIMIT = 1e-9
LEVELS = {
    "none": (),
    "optimizer": ("parallel.sharding=optimizer",),
    "gradients": ("parallel.sharding=gradients",),
    "parameters": ("parallel.sharding=parameters",),
    "hybrid": ("parallel.sharding=parameters", "parallel.data_parallel_shard_degree=2"),
}


def _build(env, plan_json):
    """The parts of a job on this world; groups are built anew, since sharers differ."""
    plan = read_plan(plan_json)
    groups = build_groups(
        plan.grid, env.rank, timeout_s=100.0, sharers=data_parallel_shard_size(plan.job.parallel)
    )
    return build_parts(plan, rank=env.rank, groups=groups, device=env.device)


def _step(parts, state):
    outcome = train_step(parts, state, Requests(), is_recording=False)
    return outcome.state, (outcome.loss, outcome.grad_norm)


def _held(parts):
    """Everything that a rank has to save, as it is."""
    return [
        (block.name, block.tensor.shape, block.box, _bits(block.values))
        for block in parts.optimizer.blocks()
    ]


def _bits(values):
    """numpy knows no bfloat16, whose values float32 has all."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy().copy()


def _save(env, plan_json, uri):
    """Two steps, a save, and one step more: what was saved, and that step."""
    parts, state = _build(env, plan_json), TrainState()
    for _ in range(2):
        state, _ = _step(parts, state)
    shards = []
    writer = CheckpointWriter(open_store(uri), rank=env.rank, attempt=1, report=shards.append)
    writer.save(state.step, list(parts.optimizer.blocks()), state.scalars())
    assert writer.wait()
    return shards[-1], _held(parts), _step(parts, state)[1]


def _load(env, plan_jsons, uri, key):
    """By level: what was loaded from one checkpoint, and the step after."""
    found = {}
    for name, plan_json in plan_jsons.items():
        parts, store = _build(env, plan_json), open_store(uri)
        manifest = read_manifest(store, key)
        load(store, manifest, list(parts.optimizer.blocks()))
        parts.optimizer.sync_weights()
        state = state_from(manifest.state, parts.plan.job.precision)
        found[name] = _held(parts), _step(parts, state)[1]
    return found


def _whole(parts_of_ranks):
    """State tensors put together; every element is held by somebody, and alike by all who hold it."""
    whole = {}
    for name, shape, box, values in (held for rank in parts_of_ranks for held in rank):
        target = whole.setdefault(name, np.full(shape, np.nan))
        old = target[slices(box)]
        assert (np.isnan(old) | (old == values)).all(), f"{name}: replicas differ"
        target[slices(box)] = values
    assert all(np.isfinite(values).all() for values in whole.values())
    return whole


def _assert_travels(overrides, saved, loaded, folder):
    """From the layout ``saved`` to each of ``loaded``, both by name."""
    plans = {
        name: make_test_plan(*overrides, *options) for name, options in {**saved, **loaded}.items()
    }
    for name in saved:
        plan, uri = plans[name], str(folder / name)
        results = run_grid(_save, plan.grid, plan.to_json(), uri)
        wanted, step = _whole([held for _, held, _ in results]), results[0][2]
        shards = [shard for shard, _, _ in results]
        key = commit(LocalStore(folder / name), assemble_shards(shards, plan.grid))
        for grid in {plans[other].grid for other in loaded}:
            texts = {o: plans[o].to_json() for o in loaded if plans[o].grid == grid}
            by_rank = run_grid(_load, grid, texts, uri, key)
            for other in texts:
                whole = _whole([found[other][0] for found in by_rank])
                assert whole.keys() == wanted.keys()
                for tensor, values in wanted.items():
                    np.testing.assert_array_equal(whole[tensor], values, f"{other}: {tensor}")
                for found in by_rank:
                    np.testing.assert_allclose(found[other][1], step, rtol=LIMIT, err_msg=other)


@pytest.mark.sample(1)
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_goes_on_from_every_other(level, tmp_path):
    overrides = [*layout_overrides("dp4"), "model.num_layers=2", "data.global_batch_size=8"]
    _assert_travels(overrides, {level: LEVELS[level]}, LEVELS, tmp_path)


FORMATS = {
    "adamw-bfloat16": ("optimizer.state_dtype=bfloat16",),
    "adamw-8bit": ("optimizer.state_dtype=8bit", "model.hidden_size=64", "model.ffn_hidden_size=320"),
    "muon-8bit": ("optimizer.name=muon", "optimizer.state_dtype=8bit", "model.num_kv_heads=4"),
    "lion-8bit-experts": (
        "optimizer.name=lion", "optimizer.lr=1e-3", "optimizer.state_dtype=8bit",
        "model.moe.num_experts=4", "model.moe.intermediate_size=12",
    ),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMATS)
def test_state_in_fewer_bits_goes_on_elsewhere(form, tmp_path):
    """Codes and scales are cut anew, and are the same numbers."""
    saved = {"tp2-dp2": (*layout_overrides("tp2-dp2"), "parallel.sharding=optimizer")}
    loaded = {
        "dp3": (*layout_overrides("dp3"), "parallel.sharding=parameters"),
        "tp4-pp2": tuple(layout_overrides("tp4-pp2")),
    }
    _assert_travels(FORMATS[form], saved, loaded, tmp_path)

"""A run that stops on one layout and goes on on another is the run that never stopped."""

import numpy as np
import pytest

from raymega.checkpoint.format.manifest import commit, find_restore, read_manifest
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.messages import Requests
from raymega.plan.run_plan import read_plan
from raymega.storage.local import LocalStore
from raymega.storage.registry import open_store
from raymega.train.build import build_parts
from raymega.train.state import TrainState, state_from
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.unit.checkpoint.support import assemble_shards

pytestmark = pytest.mark.dist

LIMIT = 1e-9
STEPS, STOP = 6, 3


def _train(env, plan_json, uri, restore, last):
    """The curve from where the run stands to ``last``, and what was saved there."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    state, store = TrainState(), open_store(uri)
    if restore:
        manifest = read_manifest(store, restore)
        load(store, manifest, list(parts.optimizer.blocks()))
        parts.optimizer.sync_weights()
        state = state_from(manifest.state, plan.job.precision)
    curve = []
    while state.step < last:
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.append((outcome.loss, outcome.grad_norm))
    shards = []
    writer = CheckpointWriter(store, rank=env.rank, attempt=1, report=shards.append)
    writer.save(state.step, list(parts.optimizer.blocks()), state.scalars())
    assert writer.wait()
    return curve, shards[-1]


def _plan(layout):
    name, *extras = layout.split("+")
    return make_test_plan(*layout_overrides(name), *extras, "data.global_batch_size=8")


def _run(layout, folder, *, restore="", last=STEPS):
    """Curve of one rank's losses and norms, which all ranks have, and the manifest's key."""
    plan = _plan(layout)
    results = run_grid(_train, plan.grid, plan.to_json(), str(folder), restore, last)
    curves = [curve for curve, _ in results]
    assert all(curve == curves[0] for curve in curves)
    manifest = assemble_shards([shard for _, shard in results], plan.grid)
    return curves[0], commit(LocalStore(folder), manifest)


SHARDED = "+parallel.sharding=optimizer"
CHUNKS = "+schedule.name=interleaved+schedule.chunks=2+schedule.micro_batch_size=1"
EXPERTS = (
    "+model.moe.num_experts=8+model.moe.intermediate_size=16+model.num_layers=2+model.moe.expert_bias=true"
    "+model.moe.expert_bias_update_rate=0.1+model.moe.load_balancing_type=global+model.moe.router_aux_loss_coef=0.1"
)
"""With state of routers beside the weights: a bias, and the last step's load."""
BLEND = (
    "+data.path=none+data.sources=[{path: synthetic:a, weight: 0.6}, {path: synthetic:b, weight: 0.4}]"
    "+data.stages=[{from_tokens: 960, sources: [{path: synthetic:c, weight: 0.7}, {path: synthetic:a}]}]"
)
"""Two datasets, then another two from the middle of step 4 on."""
PACKED = "+data.packing=best_fit+data.document_multiple=4+schedule.micro_batch_size=1"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp1", "tp2-pp2"),
        ("tp2-pp2", f"dp2{SHARDED}"),
        (f"dp3{SHARDED}", "tp2-sp"),
        ("tp2+parallel.cp=2", f"pp2-dp2{SHARDED}"),
        (f"pp2{CHUNKS}", "tp2-dp2"),
        (f"tp2-pp2-sp{CHUNKS}", f"pp2-dp2{SHARDED}"),
        (f"tp2-cp2-dp2-ep8{EXPERTS}", f"tp2-ep2{EXPERTS}{SHARDED}"),
        (f"dp2-ep2{EXPERTS}{SHARDED}", f"tp1{EXPERTS}"),
        (f"tp1{BLEND}", f"pp2-dp3{BLEND}{SHARDED}"),
        (f"dp2-cp2{PACKED}{BLEND}", f"tp2{PACKED}{BLEND}"),
    ],
)
def test_run_goes_on_elsewhere_as_if_nothing_had_happened(tmp_path, before, after):
    whole, _ = _run(before, tmp_path / "whole")
    first, key = _run(before, tmp_path / "parts", last=STOP)
    assert first == whole[:STOP]
    assert find_restore(LocalStore(tmp_path / "parts")).key == key
    rest, _ = _run(after, tmp_path / "parts", restore=key)
    np.testing.assert_allclose(rest, whole[STOP:], rtol=LIMIT)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp2-pp2", f"pp2-dp2{SHARDED}"])
def test_run_goes_on_where_it_was_bit_for_bit(tmp_path, layout):
    whole, end = _run(layout, tmp_path / "whole")
    _, key = _run(layout, tmp_path / "parts", last=STOP)
    rest, again = _run(layout, tmp_path / "parts", restore=key)
    assert rest == whole[STOP:]
    boxes = [
        {(box.tensor, box.box.offset): box.crc32 for box in read_manifest(LocalStore(at), k).boxes}
        for at, k in ((tmp_path / "whole", end), (tmp_path / "parts", again))
    ]
    assert boxes[0] == boxes[1]

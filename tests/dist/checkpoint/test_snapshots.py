"""Real ranks train with a snapshot every step, and real ranks of another grid go on from memory."""

import numpy as np
import pytest

from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.checkpoint.snapshots.copies import SnapshotCopies
from raymega.checkpoint.snapshots.queries import QUESTIONS
from raymega.checkpoint.snapshots.snapshot import find_snapshot
from raymega.checkpoint.snapshots.writer import SnapshotWriter
from raymega.events import StepFinished
from raymega.messages import Replicas
from raymega.plan.run_plan import read_plan
from raymega.plan.snapshot_replicas import copy_nodes, snapshot_cost
from raymega.storage.memory_server import MemoryStoreServer
from raymega.storage.remote_memory_store import RemoteMemoryStore
from raymega.train.build import build_parts
from raymega.train.loop import run_loop
from raymega.train.save_schedule import SaveScheduler
from raymega.train.state import TrainState, state_from
from tests.support.channels import KeptReports
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.memory_store import MemoryStore
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

TOKEN = "token"
STEPS = 6
LIMIT = 1e-9


def plan_of(layout, *overrides):
    return make_test_plan(
        *layout_overrides(layout), f"run.steps={STEPS}", "run.eval_samples=0", "checkpoint.every=0",
        "elastic.snapshot_every=1", *overrides,
    )  # fmt: skip


def _train(env, plan_json, replicas, source):
    """The whole loop; by step its loss and its metrics."""
    plan, channel = read_plan(plan_json), KeptReports()
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    state = TrainState()
    if source:
        holders, manifest, addresses = source
        servers = {address: RemoteMemoryStore(address, TOKEN) for address in addresses}
        copies, blocks = SnapshotCopies(servers, holders), list(parts.optimizer.blocks())
        places = {}
        for block in blocks:
            places.setdefault(block.name, []).append(block.box)
        manifest = copies.read_blocks(manifest.key, places, rank=env.rank, grid=plan.grid)
        load(copies, manifest, blocks)
        parts.optimizer.sync_weights()
        state = state_from(manifest.state, plan.job.precision)
    writer = CheckpointWriter(MemoryStore(), rank=env.rank, attempt=1, report=channel.report)
    snapshots = SnapshotWriter(plan, rank=env.rank, attempt=1, replicas=replicas[env.rank])
    save_scheduler = SaveScheduler(
        parts, channel=channel, writer=writer, snapshots=snapshots, rank=env.rank
    )
    run_loop(parts, state, channel=channel, save_scheduler=save_scheduler, rank=env.rank)
    snapshots.wait()
    steps = [report for report in channel.reports if isinstance(report, StepFinished)]
    return {step.step: step.metrics for step in steps}, snapshots._newest


@pytest.fixture
def servers():
    servers = [MemoryStoreServer("127.0.0.1", TOKEN, questions=QUESTIONS) for _ in range(3)]
    yield servers
    for server in servers:
        server.shutdown()


def replicas_for(plan, servers):
    """Ranks on three nodes, in turn."""
    nodes = [servers[rank % len(servers)].uri for rank in range(plan.grid.world_size)]
    return [
        Replicas(
            token=TOKEN, write_to=homes, num_copies=len(homes), home=homes[0],
            tidies=homes[:1] if nodes.index(homes[0]) == rank else (),
        )
        for rank, homes in enumerate(copy_nodes(nodes))
    ]  # fmt: skip


EXPERTS = (
    "model.moe.num_experts=4",
    "model.moe.load_balancing_type=global",
    "model.moe.router_aux_loss_coef=0.1",
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("saved", "loaded", "sharding", "model"),
    [
        ("tp2-pp1-dp2", "tp2-pp1-dp2", "none", ()),
        ("tp1-pp2-dp2", "tp2-pp1-dp1", "optimizer", ()),
        ("tp2-dp2-ep2", "tp2-ep1", "optimizer", EXPERTS),
    ],
    ids=["same-grid", "other-grid", "experts"],
)
def test_run_goes_on_from_memory_after_a_node_is_lost(servers, saved, loaded, sharding, model):
    plan = plan_of(saved, f"parallel.sharding={sharding}", *model)
    replicas = replicas_for(plan, servers)
    results = run_grid(_train, plan.grid, plan.to_json(), replicas, None)
    curve, _ = results[0]
    assert [curve[step]["checkpoint/snapshot_step"] for step in curve] == list(range(STEPS))

    for rank, (_, newest) in enumerate(results):
        share = snapshot_cost(plan, rank).share_bytes
        assert 0.95 * share < newest.num_bytes < 1.05 * share, "as planned, but for rows"

    lost, *left = servers
    lost.shutdown()
    stores = {server.uri: RemoteMemoryStore(server.uri, TOKEN) for server in left}
    snapshot = find_snapshot(stores, job={}, now="")
    assert snapshot.manifest.step == STEPS - 1, "the last step saves to the store instead"

    plan = plan_of(loaded, f"parallel.sharding={sharding}", f"run.steps={STEPS}", *model)
    source = (snapshot.holders, snapshot.manifest, list(stores))
    after, _ = run_grid(_train, plan.grid, plan.to_json(), replicas_for(plan, left), source)[0]
    assert list(after) == [STEPS]
    wanted, got = curve[STEPS]["train/loss"], after[STEPS]["train/loss"]
    if saved == loaded:
        assert got == wanted
    np.testing.assert_allclose(got, wanted, rtol=LIMIT)

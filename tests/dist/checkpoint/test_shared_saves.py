"""A checkpoint that is written for steps on end is read from the memory of snapshots, or beside them."""

from threading import Event

import pytest

from raymega.checkpoint.format.manifest_builder import assemble
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import CheckpointWriter, SaveLimits
from raymega.checkpoint.snapshots.writer import SnapshotWriter
from raymega.events import StepFinished
from raymega.messages import Progress, Replicas, Requests, ShardSaved
from raymega.plan.run_plan import read_plan
from raymega.plan.save_cost import save_cost
from raymega.storage.memory_server import MemoryStoreServer
from raymega.storage.registry import open_store
from raymega.train.build import build_parts
from raymega.train.loop import run_loop
from raymega.train.save_schedule import SaveScheduler
from raymega.train.state import TrainState, state_from
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

TOKEN = "token"
PAUSE = "elastic.snapshot_during_save=pause"
STEPS, SAVED, WRITTEN = 10, 2, 6
"""The checkpoint of step SAVED is being written until step WRITTEN is reported, and is before the next one is."""


class Reports:
    """A channel that asks for one checkpoint, keeps what is reported, and says when a step was."""

    def __init__(self):
        self.reports, self.step, self.num_asked = [], 0, 0
        self.may_write = Event()
        self.wait_for_snapshot = self.wait_for_checkpoint = lambda: True

    def report(self, report):
        self.reports.append(report)
        if isinstance(report, Progress | StepFinished):
            self.step = report.step
            if (
                self.step > SAVED
            ):  # until then a snapshot may be under way where a step does not wait
                self.wait_for_snapshot()
            if self.step >= WRITTEN:
                self.may_write.set()
            if self.step == WRITTEN + 1 and self.num_asked:
                assert self.wait_for_checkpoint()

    def requests(self):
        is_time = self.step == SAVED - 1
        self.num_asked += is_time
        return Requests(save=is_time)


class HeldStore:
    """A store that takes nothing before ``is_open``."""

    def __init__(self, store, is_open):
        self._store, self._is_open = store, is_open

    def put(self, key, chunks, *, overwrite):
        assert self._is_open.wait(100)
        self._store.put(key, chunks, overwrite=overwrite)


def _train(env, plan_json, addresses, uri, manifest):
    plan, channel = read_plan(plan_json), Reports()
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    store, state = open_store(uri), TrainState()
    if manifest:
        load(store, manifest, list(parts.optimizer.blocks()))
        parts.optimizer.sync_weights()
        state = state_from(manifest.state, plan.job.precision)
    section = plan.job.checkpoint
    writer = CheckpointWriter(
        HeldStore(store, channel.may_write), rank=env.rank, attempt=1, report=channel.report,
        limits=SaveLimits(file_bytes=section.file_bytes, buffer_bytes=section.buffer_bytes),
    )  # fmt: skip
    own, partner = addresses[env.rank], addresses[1 - env.rank]
    replicas = Replicas(token=TOKEN, write_to=(own, partner), num_copies=2, home=own, tidies=(own,))
    snapshots = SnapshotWriter(plan, rank=env.rank, attempt=1, replicas=replicas)
    channel.wait_for_snapshot, channel.wait_for_checkpoint = snapshots.wait, writer.wait
    save_scheduler = SaveScheduler(
        parts, channel=channel, writer=writer, snapshots=snapshots, rank=env.rank
    )
    run_loop(parts, state, channel=channel, save_scheduler=save_scheduler, rank=env.rank)
    steps = {each.step: each.metrics for each in channel.reports if isinstance(each, StepFinished)}
    shards = {each.step: each for each in channel.reports if isinstance(each, ShardSaved)}
    return steps, shards, writer.host_bytes, snapshots._buffers.num_bytes


def plan_of(*settings):
    return make_test_plan(
        *layout_overrides("tp1-pp1-dp2"), f"run.steps={STEPS}", "run.eval_samples=0",
        "checkpoint.every=0", "checkpoint.file_bytes=20000", *settings,
    )  # fmt: skip


def curve_of(steps, name):
    return {step: metrics[name] for step, metrics in steps.items()}


def run(plan, folder, *, manifest=None):
    with (
        MemoryStoreServer("127.0.0.1", TOKEN) as one,
        MemoryStoreServer("127.0.0.1", TOKEN) as other,
    ):
        addresses = [one.uri, other.uri]
        return run_grid(_train, plan.grid, plan.to_json(), addresses, str(folder), manifest)


@pytest.mark.sample(1)
@pytest.mark.parametrize("every", [1, 3], ids=["with-a-snapshot", "without-one"])
@pytest.mark.parametrize(
    ("settings", "is_shared"),
    [
        ((PAUSE,), True),
        ((PAUSE, "elastic.snapshot_backpressure=skip"), True),
        ((), False),
        ((PAUSE, "checkpoint.buffer_bytes=1000000"), False),
    ],
    ids=["pause", "skip", "go-on", "own-buffer"],
)
def test_checkpoint_under_way_is_what_its_step_was(tmp_path, every, settings, is_shared):
    plan = plan_of(f"elastic.snapshot_every={every}", *settings)
    results = run(plan, tmp_path)
    for rank, (_, shards, own_bytes, buffers_bytes) in enumerate(results):
        share = shards[SAVED].num_bytes
        assert [shard.error for shard in shards.values()] == [""] * len(shards)
        assert own_bytes == (0 if is_shared else pytest.approx(share, rel=0.01))
        assert 0.99 < buffers_bytes / share < 2.02, "with room between files"
        assert (save_cost(plan, rank).buffer_bytes == 0) == is_shared
    curve = results[0][0]
    whole = curve_of(curve, "checkpoint/snapshot_step")
    if is_shared:
        newest = SAVED if every == 1 else 0
        assert whole[WRITTEN] == newest == max(whole[step] for step in range(1, WRITTEN))
    else:
        assert whole[WRITTEN] >= WRITTEN - every
    assert whole[STEPS] >= WRITTEN, "they go on when it is written"

    manifests = {
        step: assemble(
            [shards[step] for _, shards, *_ in results], world_size=2, attempt=1,
            created="2026-01-02T03:04:05+00:00", job={}, grid={},
        )
        for step in (SAVED, STEPS)
    }  # fmt: skip
    again = run(plan_of("elastic.snapshot_every=100"), tmp_path, manifest=manifests[SAVED])
    losses = curve_of(curve, "train/loss")
    assert curve_of(again[0][0], "train/loss") == {
        step: loss for step, loss in losses.items() if step > SAVED
    }

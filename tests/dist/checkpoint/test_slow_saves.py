"""A rank whose store is slower than all others' waits for its save, and loses nobody meanwhile."""

import time

import pytest

from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.messages import ShardSaved, Working
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.loop import run_loop
from raymega.train.save_schedule import SaveScheduler
from raymega.train.state import TrainState
from tests.support.channels import KeptReports
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.memory_store import MemoryStore
from tests.support.ranks import run_grid

pytestmark = [pytest.mark.dist, pytest.mark.wide]

# ranks wait a second at a time: the limit leaves a busy machine twenty
COLLECTIVE_S, WRITE_S = 20.0, 25.0


class SlowStore(MemoryStore):
    """Takes long for the first file."""

    pause_s = WRITE_S

    def put(self, key, chunks, *, overwrite):
        pause_s, self.pause_s = self.pause_s, 0.0
        time.sleep(pause_s)
        super().put(key, chunks, overwrite=overwrite)


def _train(env, plan_json):
    plan, channel = read_plan(plan_json), KeptReports()
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    store = MemoryStore() if env.rank else SlowStore()
    writer = CheckpointWriter(store, rank=env.rank, attempt=1, report=channel.report)
    save_scheduler = SaveScheduler(
        parts, channel=channel, writer=writer, snapshots=None, rank=env.rank
    )
    run_loop(parts, TrainState(), channel=channel, save_scheduler=save_scheduler, rank=env.rank)
    shards = {each.step: each for each in channel.reports if isinstance(each, ShardSaved)}
    return shards, sum(isinstance(each, Working) for each in channel.reports)


def test_ranks_wait_together_for_a_save_that_outlasts_a_collective():
    plan = make_test_plan(
        *layout_overrides("tp1-pp1-dp2"), "run.steps=3", "run.eval_samples=0", "checkpoint.every=1",
    )  # fmt: skip
    results = run_grid(_train, plan.grid, plan.to_json(), collective_timeout_s=COLLECTIVE_S)
    for shards, _ in results:
        assert [shards[step].error for step in (1, 2, 3)] == [""] * 3
        assert shards[2].stall_s > COLLECTIVE_S
    assert [num_signs > COLLECTIVE_S for _, num_signs in results] == [True, False]

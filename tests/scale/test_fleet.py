"""A run on a simulated fleet: ranks, nodes, drivers and the store fail at random, and the run's invariants hold.

The engine's control loop works on fakes in virtual time (``tests/scale/fleet``). What happens is drawn from
a seed, which is printed and begins each failure: ``FLEET_SEED=7 pytest tests/scale/test_fleet.py``. `make test` takes
that of its drawn cases, so one commit lives the same lives everywhere; `make test-all` takes a new one.
"""

import os
import random

import pytest

from raymega.checkpoint.format import commit_log
from raymega.config.load import parse_job
from raymega.plan.run_plan import make_plan
from tests.scale.fleet.run import Fleet
from tests.support.jobs import VERIFY


def fleet_of(tmp_path, monkeypatch, *more, tp, dp, num_nodes, gpus, minutes, seed, step_s=60.0):
    """A fleet whose run has ``dp`` replicas of ``tp`` ranks on ``num_nodes`` nodes of ``gpus`` ranks."""
    world = tp * dp
    sets = (
        "model.num_heads=8", "model.num_kv_heads=8", f"parallel.tp={tp}", "parallel.pp=1",
        f"parallel.dp={dp}", f"data.global_batch_size={2 * dp}", "schedule.micro_batch_size=1",
        f"cluster.num_workers={world}", "cluster.device=cuda", "cluster.cpus_per_worker=1",
        "cluster.capacity_timeout_s=1000000", "elastic.max_failures=100000",
        "elastic.hang_timeout_min_s=60", "checkpoint.every=5", "checkpoint.keep_last=3",
        "checkpoint.keep_every=50", *more,
    )  # fmt: skip
    print(f"FLEET_SEED={seed}")
    if seed % 2:  # as in a run with thousands of checkpoints, which are known by the log of commits
        monkeypatch.setattr(commit_log, "FEW_CHECKPOINTS", 0)
    plan = make_plan(parse_job(VERIFY, sets).job())
    return Fleet(
        plan, seed=seed, num_nodes=num_nodes, gpus=gpus, minutes=minutes, step_s=step_s,
        folder=tmp_path, monkeypatch=monkeypatch,
    )  # fmt: skip


def tell(fleet):
    """Print what the run went through."""
    print({**fleet.disturbances.happened}, {**fleet.ends}, {**fleet.sink.counts})
    print(
        f"{fleet.timeline.now_s / 60:.0f} minutes, {fleet.witness.num_steps} steps, "
        f"{len(fleet.witness.committed)} checkpoints, {fleet.witness.num_late} came too late, "
        f"{fleet.witness.num_held} attempts from memory, longest time without a step {fleet.witness.most_recovery_s / 60:.1f} minutes"
    )


@pytest.fixture
def seed(request):
    """``FLEET_SEED``, or that of the drawn cases, or a new one."""
    if given := os.environ.get("FLEET_SEED"):
        return int(given)
    option = request.config.option
    return random.SystemRandom().randrange(10**6) if option.everything else option.sample_seed


SHAPES = {
    "room-for-one-node": ({"tp": 2, "dp": 3, "num_nodes": 4, "gpus": 2}, ()),
    "no-room": ({"tp": 2, "dp": 4, "num_nodes": 4, "gpus": 2}, ("elastic.min_workers=2",)),
    "spares": ({"tp": 2, "dp": 3, "num_nodes": 5, "gpus": 2}, ("elastic.spares=2",)),
    "whole-grid": ({"tp": 1, "dp": 4, "num_nodes": 4, "gpus": 1}, ("elastic.min_workers=grid",)),
    "ramp": (
        {"tp": 1, "dp": 4, "num_nodes": 3, "gpus": 2},
        ("data.batch_ramp=[{until_samples: 1000, global_batch_size: 4}]", "checkpoint.every=7"),
    ),
    "replicas": (
        {"tp": 2, "dp": 4, "num_nodes": 5, "gpus": 2},
        ("elastic.on_replica_loss=continue",),
    ),
    "replicas-no-room": (
        {"tp": 1, "dp": 4, "num_nodes": 4, "gpus": 1},
        ("elastic.on_replica_loss=continue", "elastic.min_workers=1", "checkpoint.every=7"),
    ),
    "monitors": ({"tp": 4, "dp": 17, "num_nodes": 10, "gpus": 8}, ()),
}
"""Fleets: grid, nodes and ranks a node, and what else the job says; above 64 ranks each node has a monitor."""
LONG_LIFE_S = 7200
"""Limit of a long life, whose few CPU minutes are hours on a busy machine."""
SMALL = [each for each in SHAPES if each != "monitors"]


def live(shape, tmp_path, monkeypatch, *, minutes, seed, steps=10**6):
    """A fleet of ``shape`` that has lived for ``minutes``."""
    values, more = SHAPES[shape]
    fleet = fleet_of(
        tmp_path, monkeypatch, f"run.steps={steps}", *more, minutes=minutes, seed=seed, **values
    )
    fleet.run()
    tell(fleet)
    return fleet


def test_a_short_life_with_failures_keeps_every_invariant(tmp_path, monkeypatch, seed):
    shape = random.Random(seed).choice(SMALL)
    fleet = live(shape, tmp_path, monkeypatch, minutes=240, seed=seed)
    assert fleet.witness.num_steps > 30


def test_a_driver_that_waits_for_room_lets_time_pass(tmp_path, monkeypatch):
    # after a release, and on a smaller grid than was asked for, ticks once took no time at all
    fleet = live("no-room", tmp_path, monkeypatch, minutes=40, seed=892092)
    assert fleet.witness.num_steps > 10


def test_a_run_comes_to_its_last_step(tmp_path, monkeypatch, seed):
    fleet = live("room-for-one-node", tmp_path, monkeypatch, minutes=10**4, seed=seed, steps=60)
    assert max(fleet.witness.committed).step == 60


@pytest.mark.wide
@pytest.mark.timeout(LONG_LIFE_S)
@pytest.mark.parametrize("shape", [each for each in SHAPES if each != "monitors"])
def test_ten_thousand_minutes_with_failures_keep_every_invariant(
    shape, tmp_path, monkeypatch, seed
):
    fleet = live(shape, tmp_path, monkeypatch, minutes=10_000, seed=seed)
    assert fleet.witness.num_steps > 2_000


@pytest.mark.wide
@pytest.mark.timeout(LONG_LIFE_S)
def test_a_life_of_a_fleet_that_monitors_watch_keeps_every_invariant(tmp_path, monkeypatch, seed):
    fleet = live("monitors", tmp_path, monkeypatch, minutes=2_000, seed=seed)
    assert fleet.witness.num_steps > 400

from dataclasses import replace

import pytest

from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.driver import scaling_policy
from raymega.orchestrate.driver.scaling_policy import FIRST_CHANGE_S, ScalingPolicy, growth
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.planner.cost.peak_memory import memory_use
from tests.support.jobs import make_test_plan

FULL = (
    "parallel.tp=2",
    "parallel.pp=2",
    "parallel.dp=2",
    "run.steps=1000",
    "data.global_batch_size=16",
)


def locations(*counts):
    return [
        WorkerLocation(node_id=f"n{node}", address="", pid=pid)
        for node, count in enumerate(counts)
        for pid in range(count)
    ]


def memory_of(plan):
    return memory_use(plan).total_bytes


def make(*overrides):
    return ScalingPolicy(make_test_plan(*FULL, *overrides))


def test_shrink_drops_replicas_and_keeps_the_batch():
    grids = make()
    smaller = grids.shrink(locations(4, 3))
    assert smaller.grid.degrees() == grids.full.grid.degrees() | {"dp": 1}
    assert smaller.batch.global_batch_size == grids.full.batch.global_batch_size
    assert smaller.batch.num_micro_batches == 2 * grids.full.batch.num_micro_batches


def test_shrink_cuts_a_replica_anew_when_none_is_left_whole():
    smaller = make().shrink(locations(2))
    assert smaller.grid.world_size == 2
    assert smaller.batch.global_batch_size == 16


def test_shrink_needs_tp_groups_whole_on_a_node():
    assert make().shrink(locations(1, 1, 1, 1)).grid.tp == 1


@pytest.mark.parametrize("least", ["grid", 5])
def test_shrink_keeps_to_min_workers(least):
    assert make(f"elastic.min_workers={least}").shrink(locations(4)) is None


@pytest.mark.parametrize(
    ("num_before", "overrides", "expected"),
    [(4, (), 4), (0, (), None), (8, (), None), (4, ("elastic.min_workers=grid",), None),
     (4, ("elastic.min_workers=5",), None)],
    ids=["smaller", "fresh", "full", "grid", "too-few"],
)  # fmt: skip
def test_driver_without_processes_takes_the_grid_that_the_run_had(num_before, overrides, expected):
    grids = ScalingPolicy(make_test_plan(*FULL, *overrides), num_before=num_before)
    plan = grids.shrink(())
    assert (plan and plan.grid.world_size) == expected


def test_growth_is_weighed_by_what_was_measured():
    grids = make()
    for _ in range(3):
        grids.add_step(1.0)
    grids.now = grids.shrink(locations(4))
    assert grids.growth(locations(4, 4), step=0) is None, "no step on the smaller grid yet"
    for _ in range(3):
        grids.add_step(1.8)
    assert grids.growth(locations(4, 3), step=0) is None, "no room for the job's own grid"
    found = grids.growth(locations(4, 4), step=900)
    assert (found.gain_s, found.cost_s) == (pytest.approx(80.0), FIRST_CHANGE_S)
    assert found.is_worth_it and "saves 80 s and costs 30 s" in found.reason
    assert not grids.growth(locations(4, 4), step=970).is_worth_it
    grids.now = grids.full
    assert grids.growth(locations(4, 4), step=0) is None


def test_growth_can_be_forbidden():
    grids = make("elastic.scale_up=false")
    grids.now = grids.shrink(locations(4))
    for _ in range(3):
        grids.add_step(1.0)
    assert grids.growth(locations(4, 4), step=0) is None


def test_growth_counts_no_gain_beyond_the_horizon():
    weighed = growth(steps_left=10**9, step_s=2.0, full_step_s=1.0, change_s=30.0, horizon_s=50.0)
    assert weighed.gain_s == 25.0 and not weighed.is_worth_it


def test_shrink_passes_over_what_does_not_fit_into_the_devices_memory():
    large = ("model.num_layers=96", "model.hidden_size=12288", "model.ffn_hidden_size=49152", "model.num_heads=96",
             "model.num_kv_heads=8", "parallel.tp=8", "parallel.pp=4", "precision.dtype=bfloat16",
             "parallel.sharding=optimizer")  # fmt: skip
    grids = ScalingPolicy(make_test_plan(*large, "parallel.dp=2"))
    where = locations(*[8] * 7)
    gpus = [replace(location, accelerator="H100") for location in where]
    assert memory_of(grids.shrink(where)) > CATALOGUE["h100"].memory_bytes
    assert memory_of(grids.shrink(gpus)) <= CATALOGUE["h100"].memory_bytes


@pytest.mark.parametrize("here", [(), (2, 1)], ids=["no-process", "some"])
def test_shrink_searches_once_for_equal_processes(here, monkeypatch):
    """A driver that waits for slots asks four times a second, for as long as it waits."""
    num, search = [], scaling_policy.smaller_plan
    monkeypatch.setattr(
        scaling_policy, "smaller_plan", lambda *args, **more: num.append(1) or search(*args, **more)
    )
    policy = ScalingPolicy(make_test_plan(*FULL), num_before=2)
    found = [policy.shrink(locations(*here)) for _ in range(3)]
    assert len(num) == 1 and found[0] is found[2]
    assert policy.shrink(locations(1)).grid.world_size == 1
    assert len(num) == 2

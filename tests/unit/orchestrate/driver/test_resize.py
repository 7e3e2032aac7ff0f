"""The controller changes the grid: smaller when workers are lost, larger when there are workers again."""

import pytest

from raymega.errors import CapacityError
from raymega.events import AttemptFailed, AttemptStarted, Recovered
from raymega.messages import Requests
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.state import State
from raymega.orchestrate.core.worker_group_api import NodeDrain
from raymega.plan.run_plan import read_plan
from tests.support.fakes import FakeWorkers
from tests.unit.orchestrate.driver.test_controller import DATASETS, LACKING, World, lost_run

DP2 = ("parallel.pp=1", "parallel.dp=2", "elastic.replan_after_s=1.0", "run.steps=10000")


def processes(number):
    return [WorkerLocation(node_id="node", address="", pid=pid) for pid in range(number)]


def small_run(*, step, attempt):
    """An attempt of two workers that trains and, when it is asked to, saves and stops."""
    workers = FakeWorkers(2, step=step, attempt=attempt)
    return (
        workers.enter()
        + workers.steps(4, seconds=2.0)
        + workers.save()
        + workers.finish(stopped=True)
    )


@pytest.fixture
def world():
    return World()


def begin(world, *script, lacking=6, overrides=()):
    """A run that loses rank 3 after step 3, and then lacks slots for so many looks."""
    world.drive(lost_run(lambda w: w.die(3)), *script, overrides=(*DP2, *overrides))
    world.tick_until(State.RESTARTING)
    world.group.lacking = [LACKING] * lacking
    world.group.locations = processes(2)


def test_lost_workers_that_do_not_come_back_make_the_grid_smaller(world):
    begin(world, small_run(step=2, attempt=2))
    lost_s = world.clock.now_s
    world.tick_until(State.STARTING)
    (plan,) = world.group.plans
    assert plan.grid.degrees()["dp"] == 1 and plan.batch.num_micro_batches == 8
    told = read_plan(world.group.orders[-1].plan_json)
    assert told.grid.world_size == 2 and told.datasets == plan.datasets == DATASETS
    assert 1.0 <= world.clock.now_s - lost_s <= 2.0
    event = world.sink.of(AttemptStarted)[-1]
    assert event.grid["dp"] == 1 and "re-planned from tp2-dp2 to tp2, 2 workers" in event.reason
    while not world.sink.of(Recovered):
        world.controller.tick()
    assert world.sink.of(Recovered)[0].lost_steps == 1


def test_workers_that_come_back_in_time_keep_the_grid(world):
    begin(world, small_run(step=2, attempt=2), lacking=3)
    world.tick_until(State.STARTING)
    assert world.group.plans == []


@pytest.mark.parametrize(("loads", "waits_s"), [(False, 1.0), (True, 3.0)])
def test_processes_that_load_on_living_nodes_are_waited_for(world, loads, waits_s):
    begin(world, small_run(step=2, attempt=2), lacking=60)
    world.group.loads = loads
    lost_s = world.clock.now_s
    while not world.group.plans:
        world.controller.tick()
    assert waits_s < world.clock.now_s - lost_s <= waits_s + 0.5


def test_min_workers_grid_waits_and_gives_up(world):
    more = ["elastic.min_workers=grid", "cluster.capacity_timeout_s=10.0"]
    begin(world, lacking=1000, overrides=more)
    with pytest.raises(CapacityError):
        world.controller.run()
    assert world.group.plans == []


def test_run_grows_back_at_a_step_boundary_without_losing_a_step(world):
    full = FakeWorkers(4, step=6, attempt=3)
    begin(world, small_run(step=2, attempt=2), full.enter() + full.steps(2))
    world.tick_until(State.STARTING)
    world.tick_until(State.RUNNING)
    world.group.locations = processes(4)
    world.tick_until(State.RESIZING)
    assert world.group.requested[-1] == Requests(stop=True, save=True)
    world.group.lacking = []
    world.tick_until(State.STARTING)
    assert [plan.grid.world_size for plan in world.group.plans] == [2, 4]
    event = world.sink.of(AttemptStarted)[-1]
    assert (event.step, event.grid["dp"], event.source) == (6, 2, "store")
    assert "there are workers for tp2-dp2 again: it saves" in event.reason


def test_run_stays_small_when_growing_is_not_worth_it(world):
    begin(world, small_run(step=2, attempt=2), overrides=["run.steps=6"])
    world.tick_until(State.RUNNING)
    world.group.locations = processes(4)
    while world.controller.state.state is State.RUNNING and world.controller.state.step < 6:
        world.controller.tick()
    assert world.group.requested == []


def test_stop_while_the_grid_changes_ends_preempted(world):
    begin(world, small_run(step=2, attempt=2))
    world.tick_until(State.RUNNING)
    world.group.locations = processes(4)
    world.tick_until(State.RESIZING)
    world.controller.request_stop()
    world.group.lacking = []
    world.tick_until(State.PREEMPTED)


def leaving(seconds, *, is_ready):
    return NodeDrain(seconds=seconds, ranks=(2, 3), is_ready=is_ready)


def staying_run(*, step, attempt):
    """Four workers that train, and when they are asked to, save and stop."""
    workers = FakeWorkers(4, step=step, attempt=attempt)
    return (
        workers.enter() + workers.steps(4) + workers.save() + workers.finish(stopped=True)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("drains", "num_ticks"),
    [
        ([leaving(100, is_ready=False), leaving(99, is_ready=True)], 2),
        ([leaving(100, is_ready=False), leaving(30, is_ready=False)], 2),
        ([leaving(20, is_ready=False)], 1),
    ],
    ids=["somebody is ready", "the margin is reached", "no time"],
)
def test_ranks_whose_nodes_are_taken_away_save_and_go_on_without_a_loss(world, drains, num_ticks):
    full = FakeWorkers(4, step=4, attempt=2)
    world.drive(staying_run(step=0, attempt=1), full.enter() + full.steps(2), overrides=DP2)
    world.tick_until(State.RUNNING)
    world.group.drains = list(drains)
    for _ in range(num_ticks):
        assert world.controller.state.state is State.RUNNING
        world.controller.tick()
    assert world.controller.state.state is State.RESIZING
    assert world.group.requested == [Requests(stop=True, save=True)]
    world.tick_until(State.STARTING)
    event = world.sink.of(AttemptStarted)[-1]
    assert (event.step, event.source, event.grid["dp"]) == (4, "store", 2)
    assert "the nodes of ranks 2, 3 leave in" in event.reason
    assert world.sink.of(AttemptFailed) == [] and world.group.plans == []

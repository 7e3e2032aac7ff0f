"""Whether a run goes on from the state that its workers hold, on which grid, and who takes which rank."""

from types import SimpleNamespace

import pytest

from raymega.events import AttemptStarted, Recovered, StepFinished
from raymega.messages import Requests
from raymega.orchestrate.core.state import State
from raymega.orchestrate.driver.replicas import ReplicaRecovery, continuation, unit_of
from raymega.orchestrate.driver.scaling_policy import ScalingPolicy
from tests.support.fakes import FakeWorkers
from tests.support.jobs import make_test_plan
from tests.unit.orchestrate.driver.test_controller import World, lost_run
from tests.unit.orchestrate.driver.test_resize import processes

CONTINUE = (
    "elastic.on_replica_loss=continue", "run.steps=1000", "data.global_batch_size=24",
    "parallel.tp=1", "parallel.pp=1",
)  # fmt: skip
CUBE = ("parallel.tp=2", "parallel.pp=2", "parallel.dp=2")
"""Ranks 0 to 3 of the first stage are tp 0 and 1 of replica 0, then of replica 1; 4 to 7 of the second stage."""
HYBRID = ("parallel.dp=6", "parallel.sharding=optimizer", "parallel.data_parallel_shard_degree=2")


def go_on(layout, held, *, ready=None, more=()):
    plan = make_test_plan(*CONTINUE, *layout, *more)
    return continuation(ScalingPolicy(plan), held, processes(len(held) if ready is None else ready))


def all_but(number, *lost, step=7):
    return {rank: step for rank in range(number) if rank not in lost}


@pytest.mark.parametrize(
    ("layout", "number", "lost", "left", "homes"),
    [
        (("parallel.dp=2",), 2, (0,), 1, {1: 0}),
        (("parallel.dp=4",), 4, (1,), 3, {0: 0, 2: 1, 3: 2}),
        (("parallel.dp=4",), 4, (0, 1, 3), 1, {2: 0}),
        (CUBE, 8, (1,), 1, {2: 0, 3: 1, 4: 2, 5: 3}),
        (CUBE, 8, (1, 6), 1, {2: 0, 3: 1, 4: 2, 5: 3}),
        (HYBRID, 6, (2,), 4, {0: 0, 1: 1, 4: 2, 5: 3}),
    ],
    ids=["dp2", "dp4", "dp4-three-lost", "cube", "cube-two-replicas-hit", "hybrid"],
)
def test_whole_replicas_go_on_with_equal_places(layout, number, lost, left, homes):
    found = go_on(layout, all_but(number, *lost))
    assert (found.step, found.plan.grid.dp, found.homes) == (7, left, homes)
    old, new = make_test_plan(*CONTINUE, *layout).grid, found.plan.grid
    for before, after in found.homes.items():
        was, now = old.coords(before), new.coords(after)
        assert (was.tp, was.cp, was.pp) == (now.tp, now.cp, now.pp)
    assert found.plan.batch.global_batch_size == 24


@pytest.mark.parametrize(
    ("layout", "number", "lost"),
    [
        (("parallel.dp=2",), 2, (0, 1)),
        (CUBE, 8, (0, 2)),
        (CUBE, 8, (5, 6)),
        (HYBRID, 6, (0, 3, 4)),
        (("parallel.tp=2",), 2, (1,)),
    ],
    ids=["all", "one-part-of-both", "each-replica-of-a-stage", "a-rank-of-each-copy", "no-replica"],
)
def test_state_of_which_a_part_is_lost_is_loaded(layout, number, lost):
    assert go_on(layout, all_but(number, *lost)) is None


def test_newest_step_that_every_stage_holds_is_taken():
    # both stages of one replica made step 8, and the other replica only step 7
    held = {0: 8, 1: 8, 2: 7, 3: 7, 4: 8, 5: 8, 6: 7}
    found = go_on(CUBE, held)
    assert found.step == 8 and found.homes == {0: 0, 1: 1, 4: 2, 5: 3}
    # the whole neighbourhood that is a step behind comes after the one that is not
    behind = {0: 7, 1: 8, 2: 8, 3: 8}
    found = go_on(("parallel.dp=5",), behind)
    assert found.step == 8 and found.homes == {1: 0, 2: 1, 3: 2, 0: 3}


def test_stages_at_different_steps_are_no_state():
    assert go_on(CUBE, {0: 8, 1: 8, 4: 7, 5: 7}) is None
    assert go_on(CUBE, {0: 8, 1: 7, 4: 8, 5: 8}) is None, "nor are ranks of a tp group"


def test_loaded_spares_keep_the_grid():
    found = go_on(CUBE, all_but(8, 1), ready=8)
    assert found.homes is None and found.plan.grid.dp == 2


@pytest.mark.parametrize(
    "more",
    [
        "elastic.on_replica_loss=restart", "elastic.min_workers=grid", "elastic.min_workers=8",
        "run.steps=7",
    ],
)  # fmt: skip
def test_run_that_may_not_or_need_not_go_on_does_not(more):
    assert go_on(CUBE, all_but(8, 1), more=(more,)) is None


@pytest.mark.parametrize(
    ("layout", "unit"),
    [
        (("parallel.dp=4",), 1),
        (("parallel.dp=2", "parallel.cp=2"), 1),
        (HYBRID, 2),
        ((*HYBRID, "parallel.data_parallel_shard_degree=6"), 0),
        ((*HYBRID, "model.moe.num_experts=4"), 0),
        (("parallel.dp=4", "elastic.on_replica_loss=restart"), 0),
    ],
)
def test_unit_is_what_replicas_hold_once_between_them(layout, unit):
    assert unit_of(make_test_plan(*CONTINUE, *layout).job) == unit


@pytest.mark.parametrize(
    ("full", "now"),
    [
        (("parallel.tp=2", "parallel.dp=2"), ("parallel.dp=1",)),
        (("parallel.tp=2", "parallel.dp=2"), ("parallel.dp=3",)),
        (("parallel.pp=2", "parallel.dp=2"), ("parallel.dp=3",)),
        (
            HYBRID,
            ("parallel.dp=5", "parallel.sharding=optimizer", "elastic.on_replica_loss=restart"),
        ),
    ],
    ids=["one-rank", "no-tp", "no-pp", "shared-by-all"],
)
def test_a_grid_that_cuts_the_state_otherwise_saves_before_the_job_has_its_own_again(full, now):
    """A run that came to it by a search, or by a loss that its neighbourhoods do not divide."""
    grids = ScalingPolicy(make_test_plan(*CONTINUE, *full))
    grids.now = make_test_plan(*CONTINUE, *now)
    held = dict.fromkeys(range(grids.now.grid.world_size), 7)
    assert continuation(grids, held, processes(grids.full.grid.world_size)) is None
    recovery = ReplicaRecovery(grids, SimpleNamespace(), SimpleNamespace(request=print))
    assert not recovery.regroup(SimpleNamespace(is_idle=True)), "the workers save"


# The driver.

DP2 = ("parallel.pp=1", "parallel.dp=2", "run.steps=10000", "elastic.on_replica_loss=continue")


@pytest.fixture
def world():
    return World()


def begin(world, *script, held, overrides=()):
    """A run of tp2 dp2 that loses rank 3 after step 3, of which its workers then hold ``held``."""
    world.drive(lost_run(lambda w: w.die(3)), *script, overrides=(*DP2, *overrides))
    world.group.locations, world.group.held_steps = processes(3), held
    world.tick_until(State.RESTARTING)


def test_survivors_go_on_at_once(world):
    small = FakeWorkers(2, step=3, attempt=2)
    begin(world, small.enter() + small.steps(1), held={0: 3, 1: 3, 2: 3})
    lost_s = world.clock.now_s
    world.tick_until(State.STARTING)
    assert world.clock.now_s == lost_s, "nothing is waited for"
    assert world.group.homes == [{0: 0, 1: 1}]
    order = world.group.orders[-1]
    assert order.restore == "checkpoints/step-00000003/manifest-a0001.json"
    assert order.reported_step == 3
    event = world.sink.of(AttemptStarted)[-1]
    assert (event.step, event.source, event.grid["dp"]) == (3, "replicas", 1)
    while not world.sink.of(Recovered):
        world.controller.tick()
    (recovered,) = world.sink.of(Recovered)
    assert (recovered.lost_steps, recovered.restored_step, recovered.step) == (0, 3, 4)


def test_step_that_the_driver_has_not_heard_of_is_no_end_of_the_recovery(world):
    small = FakeWorkers(2, step=3, attempt=2)
    begin(world, small.enter() + small.steps(2), held={0: 4, 1: 4, 2: 4})
    world.tick_until(State.STARTING)
    assert world.group.orders[-1].reported_step == 3
    while not world.sink.of(Recovered):
        world.controller.tick()
    assert world.sink.of(StepFinished)[-1].step == 5, "step 4 was there already"


@pytest.mark.parametrize("held", [{}, {0: 3, 2: 3}, {0: 3, 1: 4}, {0: 1, 1: 1, 2: 1}], ids=str)
def test_what_is_not_held_whole_is_loaded(world, held):
    begin(world, held=held)
    world.tick_until(State.STARTING)
    assert world.sink.of(AttemptStarted)[-1].source == "store"
    assert world.group.orders[-1].reported_step == -1


def test_error_of_a_worker_is_not_gone_on_with(world):
    world.drive(lost_run(lambda w: w.fail(3)), overrides=DP2)
    world.group.locations, world.group.held_steps = processes(4), dict.fromkeys(range(4), 3)
    world.tick_until(State.RESTARTING)
    world.tick_until(State.STARTING)
    assert world.sink.of(AttemptStarted)[-1].source == "store"


@pytest.mark.parametrize("restored", [(), (0, 1, 2)], ids=["none", "three-of-four"])
def test_state_that_a_restart_has_gone_behind_is_not_gone_on_with(world, restored):
    """Ranks that a death stops before they have loaded still hold the steps after an error, or a rollback."""
    again = FakeWorkers(4, step=2, attempt=2)
    (entered,) = again.enter()
    entered = [each for each in entered if each.phase != "restored" or each.rank in restored]
    world.drive(lost_run(lambda w: w.fail(3)), [entered, *again.die(3)], overrides=DP2)
    world.group.locations, world.group.held_steps = processes(4), dict.fromkeys(range(4), 3)
    world.tick_until(State.RESTARTING)
    world.tick_until(State.STARTING)
    world.group.locations, world.group.held_steps = processes(3), dict.fromkeys(range(3), 3)
    world.tick_until(State.RESTARTING)
    world.tick_until(State.STARTING)
    sources = [event.source for event in world.sink.of(AttemptStarted)]
    assert sources == ["nothing", "store", "store"]


def test_state_that_the_workers_could_not_take_over_is_loaded(world):
    small = FakeWorkers(2, step=3, attempt=2)
    entered = [[each for each in small.enter()[0] if each.phase == "rendezvous"]]
    begin(world, entered + small.fail(1, "CheckpointError"), held={0: 3, 1: 3, 2: 3})
    world.tick_until(State.STARTING)
    world.tick_until(State.RESTARTING)
    world.tick_until(State.STARTING)
    assert [event.source for event in world.sink.of(AttemptStarted)] == [
        "nothing", "replicas", "store",
    ]  # fmt: skip


def test_second_loss_while_the_first_is_mended_goes_on_too(world):
    three, two = FakeWorkers(3), FakeWorkers(2, step=3, attempt=2)
    world.drive(
        three.enter() + three.steps(3) + three.die(2), two.die(1),
        overrides=(*DP2, "parallel.tp=1", "parallel.dp=3"),
    )  # fmt: skip
    world.group.locations, world.group.held_steps = processes(2), {0: 3, 1: 3}
    world.tick_until(State.RESTARTING)
    world.tick_until(State.STARTING)
    world.group.locations, world.group.held_steps = processes(1), {0: 3}
    world.tick_until(State.RESTARTING)
    world.tick_until(State.STARTING)
    assert [event.grid["dp"] for event in world.sink.of(AttemptStarted)] == [3, 2, 1]
    assert world.group.orders[-1].restore == "checkpoints/step-00000003/manifest-a0002.json"


def test_what_was_lost_joins_again_without_a_save(world):
    small, full = FakeWorkers(2, step=3, attempt=2), FakeWorkers(4, step=7, attempt=3)
    begin(
        world,
        small.enter() + small.steps(4, seconds=2.0) + small.finish(stopped=True),
        full.enter() + full.steps(1),
        held={0: 3, 1: 3, 2: 3},
    )
    world.tick_until(State.RUNNING)
    world.group.locations, world.group.held_steps = processes(4), {0: 7, 1: 7}
    world.tick_until(State.RESIZING)
    assert world.group.requested[-1] == Requests(regroup=True)
    world.tick_until(State.STARTING)
    event = world.sink.of(AttemptStarted)[-1]
    assert (event.step, event.source, event.grid["dp"]) == (7, "replicas", 2)
    assert world.group.homes[-1] == {0: 0, 1: 1}


def test_save_that_the_loss_cut_off_is_asked_for_again(world):
    small = FakeWorkers(2, step=3, attempt=2)
    # a checkpoint is due each second step; that of step 4 was under way
    begin(world, small.enter() + small.steps(2), held={0: 4, 1: 4, 2: 4})
    world.tick_until(State.RUNNING)
    world.controller.tick()
    assert world.group.requested == [Requests(save=True)]

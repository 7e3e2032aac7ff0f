"""The controller stepped through its states by a fake group; no process, no disk, no waiting."""

import json
from dataclasses import replace

import pytest

from raymega.checkpoint.format.keys import data_file, folder_of
from raymega.checkpoint.format.manifest import list_manifests, read_manifest
from raymega.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    Fault,
    InternalError,
    LeaseError,
    NumericsError,
    PreemptedError,
    WorkerError,
)
from raymega.events import (
    AttemptFailed,
    AttemptStarted,
    BadStep,
    CheckpointCommitted,
    EvaluationFinished,
    Recovered,
    RunFinished,
    RunStarted,
    SaveFailed,
    SaveProgress,
    SaveSkipped,
    StepFinished,
    Timeline,
    WorkersStarted,
)
from raymega.messages import RankMemory, RankSaveProgress, RankTimeline, Requests
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.state import State
from raymega.orchestrate.driver.attempt_monitor import PROGRESS_MARGIN_S
from raymega.orchestrate.driver.controller import Controller
from raymega.orchestrate.driver.run_context import RunContext
from raymega.orchestrate.run_store.journal import read_history, read_record
from tests.support.fakes import (
    FakeClock,
    FakeKeeping,
    FakeWorkerGroup,
    FakeWorkers,
    InlineExecutor,
    MemorySink,
    PatientExecutor,
)
from tests.support.jobs import make_test_plan
from tests.support.leases import take_lease
from tests.support.memory_store import MemoryStore

SMALL = ("run.steps=4", "checkpoint.every=2", "optimizer.lr_warmup_steps=0")
LACKING = Fault(fact="2 slots free", rule="4 needed", remedy="wait")
DATASETS = {"s3://team/tokens": "0123456789abcdef"}
"""What the driver found of the run's datasets in stores."""


class World:
    """Everything around one controller; ``drive`` makes another one on the same store."""

    def __init__(self):
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.sink = MemorySink()
        self.executor = InlineExecutor()
        self.snapshot_manager = FakeKeeping()

    def drive(self, *script, overrides=(), lacking=()):
        plan = make_test_plan("parallel.tp=2", *SMALL, *overrides)
        plan = replace(plan, datasets=DATASETS)
        self.group = FakeWorkerGroup(
            self.clock,
            self.store,
            world_size=plan.grid.world_size,
            script=script,
            lacking=lacking,
            snapshot_manager=self.snapshot_manager,
        )
        self.lease = take_lease(self.store, self.clock)
        self.controller = Controller(
            RunContext(
                plan,
                lease=self.lease,
                group=self.group,
                sink=self.sink,
                clock=self.clock,
                executor=self.executor,
            )
        )
        return self.controller

    def tick_until(self, state, limit=1000):
        for _ in range(limit):
            if self.controller.state.state is state:
                return
            self.controller.tick()
        raise AssertionError(f"still {self.controller.state} after {limit} ticks")

    def steps_seen(self):
        return [event.step for event in self.sink.of(StepFinished)]


@pytest.fixture
def world():
    return World()


def whole_run(attempt=1, step=0, steps=4):
    """Polls of an attempt that goes from ``step`` to the end, saving every second step."""
    workers = FakeWorkers(4, step=step, attempt=attempt)
    polls = workers.enter()
    while workers.step < steps:
        polls += workers.steps(2) + workers.save()
    return polls + workers.finish()


def lost_run(end, *, steps=3, attempt=1, step=0):
    """Polls of an attempt that saves at step 2 and then meets ``end(workers)``."""
    workers = FakeWorkers(4, step=step, attempt=attempt)
    polls = workers.enter() + workers.steps(2) + workers.save() + workers.steps(steps - 2)
    return polls + end(workers)


def test_run_finishes_when_every_step_is_done_and_saved(world):
    ended = world.drive(whole_run()).run()
    assert (ended.status, ended.step) == ("finished", 4)
    assert ended.checkpoint_uri == "memory:/checkpoints/step-00000004/manifest-a0001.json"
    assert world.steps_seen() == [1, 2, 3, 4]
    assert [event.step for event in world.sink.of(CheckpointCommitted)] == [2, 4]
    assert world.group.is_released
    assert type(world.sink.events[0]) is RunStarted and world.sink.events[-1] == ended


def test_run_passes_through_its_states_in_order(world):
    controller, seen = world.drive(whole_run()), []
    while not controller.state.state.is_end:
        if not seen or seen[-1] is not controller.state.state:
            seen.append(controller.state.state)
        controller.tick()
    assert seen == [State.SCHEDULING, State.STARTING, State.RUNNING]
    assert controller.state.state is State.FINISHED


def test_start_gives_workers_a_fresh_run_with_attempt_1(world):
    world.drive(whole_run()).run()
    (order,) = world.group.orders
    assert (order.attempt, order.restore, order.run_uri) == (1, "", "memory:")
    (attempt,) = world.sink.of(AttemptStarted)
    assert (attempt.attempt, attempt.step, attempt.reason) == (1, 0, "first start")
    assert attempt.grid["tp"] == attempt.grid["pp"] == 2
    (workers,) = world.sink.of(WorkersStarted)
    assert workers.pids == {0: 1000, 1: 1001, 2: 1002, 3: 1003}


def test_start_beside_a_copied_checkpoint_says_that_it_goes_on(world):
    world.drive(whole_run()).run()
    copied = World()
    for key in world.store.list("checkpoints/"):
        copied.store.put(key, [world.store.get(key)], overwrite=False)
    copied.drive(whole_run(attempt=2, step=4, steps=6), overrides=("run.steps=6",)).run()
    (attempt,) = copied.sink.of(AttemptStarted)
    assert (attempt.attempt, attempt.step) == (2, 4)
    assert attempt.reason == "resumed from an existing checkpoint"


def test_attempt_is_on_record_before_its_workers_start(world):
    world.drive(whole_run())
    world.tick_until(State.STARTING)
    record = read_record(world.store)
    assert (record.num_attempts, record.status) == (1, "starting")


def test_record_follows_commits_and_the_end(world):
    world.drive(lost_run(nothing_more))
    world.tick_until(State.RUNNING)
    while world.controller.state.saved_step < 2:
        world.controller.tick()
    assert (read_record(world.store).step, read_record(world.store).status) == (2, "running")
    world.drive(whole_run(attempt=2, step=2)).run()
    assert (read_record(world.store).step, read_record(world.store).status) == (4, "finished")


def test_evaluations_and_timelines_are_told(world):
    polls, rows = whole_run(), dict.fromkeys(range(4), (("forward", 0, 0, 0.0, 1.0),))
    polls[-1:-1] = [[EvaluationFinished(step=4, metrics={"eval/loss": 2.0})]]
    polls[-1:-1] = [[RankTimeline(rank=r, step=4, events=rows[r])] for r in rows]
    world.drive(polls).run()
    assert world.sink.of(EvaluationFinished)[0].metrics == {"eval/loss": 2.0}
    assert world.sink.of(Timeline)[0].events == rows


def nothing_more(_workers):
    """An end of ``lost_run``: the workers fall silent."""
    return []


# Capacity.


def test_scheduling_waits_for_slots(world):
    assert world.drive(whole_run(), lacking=[LACKING] * 5).run().status == "finished"


def test_scheduling_gives_up_with_exit_3_when_no_slots_come_in_time(world):
    lacking = [LACKING] * 1000
    controller = world.drive(lacking=lacking, overrides=["cluster.capacity_timeout_s=10.0"])
    with pytest.raises(CapacityError, match="2 slots free") as caught:
        controller.run()
    assert caught.value.exit_code == 3
    assert controller.state.state is State.FAILED
    assert 110.0 < world.clock.now_s < 112.0
    assert world.group.is_released and world.sink.of(RunFinished)[0].status == "failed"


def test_scheduling_gives_up_at_once_when_no_slots_can_come(world):
    with pytest.raises(CapacityError):
        world.drive(lacking=[CapacityError(LACKING)]).run()
    assert world.group.orders == [] and read_record(world.store).num_attempts == 0


# Failures.


def test_death_restarts_from_the_last_commit(world):
    world.drive(lost_run(lambda w: w.die(3)), whole_run(attempt=2, step=2)).run()
    _, second = world.group.orders
    assert (second.attempt, second.restore) == (2, "checkpoints/step-00000002/manifest-a0001.json")
    assert world.steps_seen() == [1, 2, 3, 3, 4]
    assert world.group.releases == [True, False]
    (seen,) = world.sink.of(AttemptFailed)
    assert (seen.attempt, seen.rank, seen.step, seen.cause) == (1, 3, 3, "rank 3 died: SIGKILL")
    assert world.sink.of(AttemptStarted)[1].reason == "rank 3 died, restart 1 of at most 3"


def test_recovery_is_told_when_the_lost_steps_are_made_up_for(world):
    controller = world.drive(lost_run(lambda w: w.die(3), steps=4), whole_run(attempt=2, step=2))
    world.tick_until(State.RESTARTING)
    world.clock.advance(7.0)
    controller.run()
    (recovered,) = world.sink.of(Recovered)
    assert (recovered.attempt, recovered.rank) == (2, 3)
    assert (recovered.step, recovered.restored_step, recovered.lost_steps) == (4, 2, 2)
    assert recovered.recovery_s == 7.0


def test_wait_for_processes_is_a_phase_of_the_recovery(world):
    controller = world.drive(lost_run(lambda w: w.die(3)), whole_run(attempt=2, step=2))
    world.tick_until(State.RESTARTING)
    world.group.lacking = [LACKING] * 3
    controller.run()
    (recovered,) = world.sink.of(Recovered)
    assert 0 < recovered.phases["reserve"] == recovered.recovery_s


def test_detection_is_counted_from_the_last_sign_of_progress(world):
    world.drive(lost_run(lambda w: [[], *w.die(3)]), whole_run(attempt=2, step=2))
    world.tick_until(State.RUNNING)
    while not world.sink.of(AttemptFailed):
        world.clock.advance(0.5)
        world.controller.tick()
    world.controller.run()
    assert world.sink.of(Recovered)[0].detection_s == 1.0


def test_two_failures_in_a_row_are_one_outage(world):
    second = FakeWorkers(4, step=2, attempt=2)
    world.drive(
        lost_run(lambda w: w.die(3)), second.enter() + second.die(1), whole_run(attempt=3, step=2)
    ).run()
    assert [event.rank for event in world.sink.of(AttemptFailed)] == [3, 1]
    (recovered,) = world.sink.of(Recovered)
    assert (recovered.attempt, recovered.rank, recovered.step) == (3, 3, 3)


def test_death_before_the_first_step_starts_afresh(world):
    workers = FakeWorkers(4)
    world.drive(workers.die(-1), whole_run(attempt=2)).run()
    assert [order.restore for order in world.group.orders] == ["", ""]
    assert world.sink.of(Recovered)[0].step == 1


def test_lost_connections_are_not_shown_when_the_cause_is_known(world):
    def end(workers):
        return workers.fail(0, "CommunicationError", is_secondary=True) + workers.die(2)

    world.drive(lost_run(end), whole_run(attempt=2, step=2)).run()
    (seen,) = world.sink.of(AttemptFailed)
    assert seen.cause == "rank 2 died: SIGKILL"


def test_standstill_is_a_failure_after_the_deadline(world):
    world.drive(lost_run(nothing_more), whole_run(attempt=2, step=2)).run()
    (seen,) = world.sink.of(AttemptFailed)
    assert seen.cause.startswith("a worker hung: no step after step 3")
    limit_s = 300.0 + PROGRESS_MARGIN_S
    assert limit_s <= world.sink.of(Recovered)[0].detection_s < limit_s + 1


def test_start_that_does_not_come_is_a_failure_after_the_deadline(world):
    world.drive([], whole_run(attempt=2)).run()
    assert "elastic.start_timeout_s=180" in world.sink.of(AttemptFailed)[0].cause


def test_budget_spent_is_exit_4(world):
    with pytest.raises(WorkerError, match=r"elastic\.max_failures=1") as caught:
        world.drive(
            lost_run(lambda w: w.die(3)),
            lost_run(lambda w: w.die(2), attempt=2, step=2),
            overrides=["elastic.max_failures=1"],
        ).run()
    assert caught.value.exit_code == 4
    assert world.sink.events[-1].status == "failed"
    assert "rank 2 died" in world.sink.events[-1].reason
    assert world.group.is_released


def test_same_error_three_times_stops_before_the_budget(world):
    def attempt(number):
        workers = FakeWorkers(4, attempt=number)
        return workers.enter() + workers.steps(1) + workers.fail(1)

    with pytest.raises(WorkerError, match="3 times in a row"):
        world.drive(*map(attempt, range(1, 9)), overrides=["elastic.max_failures=99"]).run()
    assert len(world.group.orders) == 3


def test_numerics_guard_is_exit_5_without_a_restart(world):
    with pytest.raises(NumericsError) as caught:
        world.drive(lost_run(lambda w: w.fail(0, "NumericsError", exit_code=5))).run()
    assert caught.value.exit_code == 5
    assert len(world.group.orders) == 1


# Numbers that are no good.


def wants_rollback(workers, *, next_sample):
    (report,) = workers.fail(1, "RollbackError", exit_code=5)[0]
    return [[replace(report, next_sample=next_sample)]]


def test_rollback_goes_to_the_checkpoint_and_passes_over_samples_for_good(world):
    """Also for the next driver, and from a checkpoint although memory has a newer state."""
    lost = lost_run(lambda w: wants_rollback(w, next_sample=96))
    world.snapshot_manager.is_begun = True
    world.snapshot_manager.take(3)
    controller = world.drive(lost, whole_run(attempt=2, step=2)[:2])
    world.tick_until(State.RUNNING)
    while len(world.group.orders) < 2:
        controller.tick()
    first, second = world.group.orders
    assert (first.skipped_samples, second.skipped_samples) == ((), ((0, 96),))
    assert second.restore == "checkpoints/step-00000002/manifest-a0001.json"
    (seen,) = world.sink.of(AttemptFailed)
    assert seen.is_rollback and seen.decision == "rollback 1 of at most 5"
    world.snapshot_manager.snapshots.clear()
    world.drive(whole_run(attempt=3, step=2)).run()
    assert world.group.orders[0].skipped_samples == ((0, 96),)


def test_rollback_without_samples_does_the_same_steps_again(world):
    lost = lost_run(lambda w: wants_rollback(w, next_sample=-1))
    world.drive(lost, whole_run(attempt=2, step=2)).run()
    assert [order.skipped_samples for order in world.group.orders] == [(), ()]
    assert world.steps_seen() == [1, 2, 3, 3, 4]


def test_rollbacks_have_a_budget_of_their_own_and_end_with_exit_5(world):
    def attempt(number):
        workers = FakeWorkers(4, attempt=number)
        return workers.enter() + workers.steps(1) + wants_rollback(workers, next_sample=-1)

    with pytest.raises(NumericsError, match="max_bad_steps=2 rollbacks are spent") as caught:
        world.drive(
            *map(attempt, range(1, 9)),
            overrides=["elastic.max_bad_steps=2", "elastic.max_failures=0"],
        ).run()
    assert caught.value.exit_code == 5 and len(world.group.orders) == 3


def test_step_that_was_done_once_more_is_told(world):
    polls = whole_run()
    polls[2:2] = [[BadStep(step=2, kind="spike", fact="loss 9", where="", action="kept")]]
    world.drive(polls).run()
    (bad_step,) = world.sink.of(BadStep)
    assert (bad_step.attempt, bad_step.step, bad_step.action) == (1, 2, "kept")


@pytest.mark.parametrize(
    "reports",
    [
        [StepFinished(step=4, metrics={"train/loss": 1.0, "loss": 1.0})],
        [EvaluationFinished(step=4, metrics={"loss": 1.0})],
        [RankMemory(rank=rank, step=4, metrics={"loss": 1.0}) for rank in range(4)],
    ],
    ids=["step", "evaluation", "memory"],
)
def test_metric_that_is_in_no_table_is_our_mistake(world, reports):
    polls = whole_run()
    polls[-1:-1] = [reports]
    with pytest.raises(InternalError, match=r"names\.py"):
        world.drive(polls).run()


def test_group_is_asked_to_look_before_a_silent_run_is_given_up(world):
    workers = FakeWorkers(4)
    polls = workers.enter() + workers.steps(3, seconds=0.1)
    world.drive(polls, whole_run(attempt=2))
    while not world.sink.of(AttemptFailed):
        world.controller.tick()
        if len(world.group.looks) == 1 and not world.group.orders[1:]:
            break
    assert world.group.looks == [frozenset()]


# Saves.


def test_failed_save_is_told_and_the_one_before_is_kept(world):
    def end(workers):
        return workers.steps(1) + workers.save(errors=[2]) + workers.die(0)

    world.drive(lost_run(end), whole_run(attempt=2, step=2)).run()
    (refused,) = world.sink.of(SaveFailed)
    assert refused.step == 4 and "rank 2 failed: disk full" in refused.reason
    assert world.group.orders[1].restore == "checkpoints/step-00000002/manifest-a0001.json"


def test_run_whose_last_save_failed_ends_and_trains_no_step_again(world):
    def end(workers):
        return workers.steps(1) + workers.save(errors=[2]) + workers.finish()

    with pytest.raises(WorkerError) as caught:
        world.drive(lost_run(end), whole_run(attempt=2, step=2)).run()
    assert len(world.group.orders) == 1 and caught.value.exit_code == 4
    (fault,) = caught.value.faults
    assert "only step 2 is saved: rank 2: disk full" in fault.fact
    assert "checkpoint.last_save_retry_s" in fault.rule and "store room" in fault.remedy


def test_run_is_finished_only_when_its_last_commit_is(world):
    executor = world.executor = PatientExecutor()
    controller = world.drive(whole_run())
    for _ in range(50):
        controller.tick()
    assert controller.state.state is State.RUNNING
    executor.let_go()
    controller.tick()
    assert (controller.state.state, controller.state.saved_step) == (State.FINISHED, 4)


def test_save_that_a_death_cut_short_is_not_committed(world):
    def end(workers):
        (shards,) = workers.steps(1) and workers.save()
        return [shards[:3], *workers.die(3)]

    world.drive(lost_run(end), whole_run(attempt=2, step=2)).run()
    assert [event.step for event in world.sink.of(CheckpointCommitted)] == [2, 4]


def test_checkpoint_that_cannot_be_loaded_is_passed_over(world):
    first = FakeWorkers(4)
    polls = first.enter() + first.steps(1) + first.save() + first.steps(1) + first.save()
    second = FakeWorkers(4, step=2, attempt=2)
    failed = second.enter()[0][:4], second.fail(1, "CheckpointError")[0]
    world.drive(polls + first.die(3), failed, whole_run(attempt=3, step=1, steps=5)).run()
    steps = [order.restore.split("/")[1:2] for order in world.group.orders]
    assert steps == [[], ["step-00000002"], ["step-00000001"]]


def test_checkpoint_that_is_not_read_at_a_first_start_is_a_failure_as_any(world):
    first = FakeWorkers(4)
    failed = first.enter()[0][:4], first.fail(1, "CheckpointError")[0]
    ended = world.drive(failed, whole_run(attempt=2), overrides=["elastic.max_failures=1"]).run()
    assert (ended.status, ended.step) == ("finished", 4)
    (lost,) = world.sink.of(AttemptFailed)
    assert lost.decision == "restart 1 of at most 1"


def restores(world):
    """What each attempt began with: source and step."""
    return [(event.source, event.step) for event in world.sink.of(AttemptStarted)]


def test_newer_of_snapshot_and_checkpoint_is_restored(world):
    def snapshot_and_die(workers):
        world.snapshot_manager.take(3)
        return workers.die(3)

    world.drive(lost_run(snapshot_and_die), whole_run(attempt=2, step=3, steps=5)).run()
    assert restores(world) == [("nothing", 0), ("memory", 3)]
    order = world.group.orders[1]
    assert order.restore.endswith("step-00000003/manifest-a0001.json")
    assert order.holders.of(0) == ("snapshot server",)
    (recovered,) = world.sink.of(Recovered)
    assert (recovered.source, recovered.restored_step, recovered.lost_steps) == ("memory", 3, 0)


@pytest.mark.parametrize(("attempt", "step"), [(1, 1), (0, 9)], ids=["step", "attempt"])
def test_older_snapshot_is_not_restored(world, attempt, step):
    world.snapshot_manager.take(step, attempt=attempt)
    world.drive(lost_run(lambda w: w.die(3)), whole_run(attempt=2, step=2)).run()
    assert restores(world)[1] == ("store", 2)


def test_snapshot_alone_is_restored_and_is_no_checkpoint(world):
    workers = FakeWorkers(4)
    polls = workers.enter() + workers.steps(3) + workers.die(1)
    world.snapshot_manager.take(2)
    overrides = ["checkpoint.every=0"]
    last = FakeWorkers(4, step=2, attempt=2)
    polls_2 = last.enter() + last.steps(2) + last.save() + last.finish()
    ended = world.drive(polls, polls_2, overrides=overrides).run()
    assert restores(world)[-1] == ("memory", 2)
    assert (ended.status, ended.step) == ("finished", 4)


def test_unreadable_snapshot_gives_way_to_the_one_before_and_then_to_the_store(world):
    def snapshots_and_die(workers):
        world.snapshot_manager.take(3)
        world.snapshot_manager.take(4)
        return workers.die(3)

    def unreadable(attempt, step):
        workers = FakeWorkers(4, step=step, attempt=attempt)
        return [workers.enter()[0][:4], workers.fail(1, "CheckpointError")[0]]

    world.drive(
        lost_run(snapshots_and_die), unreadable(2, 4), unreadable(3, 3),
        whole_run(attempt=4, step=2), overrides=["elastic.max_failures=1"],
    ).run()  # fmt: skip
    assert restores(world)[1:] == [("memory", 4), ("memory", 3), ("store", 2)]


def test_nodes_that_an_attempt_left_may_forget_when_it_has_a_whole_snapshot(world):
    polls = whole_run()
    world.drive(polls).run()
    assert world.snapshot_manager.num_settles == 0
    polls = whole_run(attempt=2, step=4, steps=6)
    for poll in polls:
        for report in poll:
            if isinstance(report, StepFinished):
                report.metrics["checkpoint/snapshot_step"] = float(report.step - 5)
    world.drive(polls, overrides=["run.steps=6"]).run()
    assert world.snapshot_manager.num_settles == 1


def test_run_does_not_begin_again_when_no_checkpoint_can_be_restored(world):
    world.drive(lost_run(nothing_more))
    world.tick_until(State.RUNNING)
    while world.controller.state.saved_step < 2:
        world.controller.tick()
    world.store.delete(folder_of(2) + data_file(attempt=1, rank=1))
    with pytest.raises(CheckpointError, match="never begins again from nothing"):
        world.drive(whole_run(attempt=2))


def test_unreadable_checkpoint_costs_nothing_of_the_budget(world):
    first = FakeWorkers(4)
    polls = first.enter() + first.steps(1) + first.save() + first.steps(1) + first.save()
    killed = world.drive(polls + nothing_more(first), overrides=["elastic.max_failures=0"])
    world.tick_until(State.RUNNING)
    while killed.state.saved_step < 2:
        killed.tick()
    second = FakeWorkers(4, step=2, attempt=2)
    failed = second.enter()[0][:4], second.fail(1, "CheckpointError")[0]
    last = whole_run(attempt=3, step=1, steps=5)
    assert world.drive(failed, last, overrides=["elastic.max_failures=0"]).run().step == 5


def test_run_whose_checkpoints_are_gone_does_not_begin_again(world):
    world.drive(whole_run()).run()
    for key in list(world.store.list("checkpoints/")):
        world.store.delete(key)
    with pytest.raises(CheckpointError, match="never begins again from nothing"):
        world.drive(whole_run(attempt=2), overrides=["run.steps=9"])


def test_driver_that_another_one_has_overtaken_commits_nothing_more(world):
    workers = FakeWorkers(4)
    polls = workers.enter() + workers.steps(2) + workers.save() + workers.steps(2)
    old = world.drive(polls + workers.save() + workers.finish())
    world.tick_until(State.RUNNING)
    while old.state.step < 4:
        old.tick()
    take_lease(world.store, world.clock)
    before = sorted(world.store.list(""))
    with pytest.raises(LeaseError, match="was taken by another driver") as caught:
        old.run()
    assert caught.value.exit_code == 6
    assert world.sink.events[-1].status == "superseded"
    assert read_record(world.store).status == "running", "the record is the other driver's"
    manifests = [key for key in world.store.list("checkpoints/") if "manifest" in key]
    assert len(manifests) == 1 and "step-00000002" in manifests[0]
    assert set(before) <= set(world.store.list("")), "nothing of the newer driver was deleted"


# Saves on request.


def test_save_on_request_is_asked_of_the_workers_and_answered_by_the_commit(world):
    world.store.put("requests/a.json", [b"{}"], overwrite=False)
    world.drive(whole_run()).run()
    assert world.group.requested == [Requests(save=True)]
    answer = json.loads(world.store.get("answers/a.json"))
    assert answer["step"] == 2 and answer["uri"].endswith("manifest-a0001.json")


def test_request_outlives_the_attempt_that_did_not_answer_it(world):
    workers = FakeWorkers(4)
    lost = workers.enter() + workers.steps(1) + workers.die(2)
    world.store.put("requests/a.json", [b"{}"], overwrite=False)
    world.drive(lost, whole_run(attempt=2)).run()
    assert world.group.requested == [Requests(save=True)] * 2
    assert json.loads(world.store.get("answers/a.json"))["step"] == 2


def test_what_workers_say_of_saves_is_told(world):
    workers = FakeWorkers(4)
    polls = workers.enter() + workers.steps(2)
    polls += [[SaveSkipped(step=2)], []]
    polls += [
        [RankSaveProgress(rank=rank, step=2, written_bytes=rank, num_bytes=10)] for rank in (1, 2)
    ]
    world.drive(polls + workers.steps(2) + workers.save() + workers.finish())
    world.tick_until(State.RUNNING)
    world.clock.advance(5.0)
    world.controller.run()
    (skipped,) = world.sink.of(SaveSkipped)
    assert skipped.step == 2
    (advanced,) = world.sink.of(SaveProgress)
    assert (advanced.step, advanced.written_bytes, advanced.num_bytes) == (2, 1, 10)


def test_manifest_carries_the_evaluation_of_its_step(world):
    workers = FakeWorkers(4)
    polls = workers.enter() + workers.steps(2)
    polls += [[EvaluationFinished(step=2, metrics={"eval/loss": 1.5})]]
    polls += workers.save() + workers.steps(2) + workers.save() + workers.finish()
    world.drive(polls).run()
    found = [read_manifest(world.store, key) for key in list_manifests(world.store)]
    assert [(each.step, each.metrics) for each in found] == [(4, {}), (2, {"eval/loss": 1.5})]


# Stop.


def test_stop_saves_and_is_exit_75(world):
    workers = FakeWorkers(4)
    polls = workers.enter() + workers.steps(1)
    after = workers.steps(1) + workers.save() + workers.finish(stopped=True)
    controller = world.drive(polls + after)
    world.tick_until(State.RUNNING)
    controller.request_stop()
    with pytest.raises(PreemptedError, match="step 2 of 4 saved") as caught:
        controller.run()
    assert caught.value.exit_code == 75
    assert world.group.requested == [Requests(stop=True, save=True)]
    assert world.sink.events[-1].status == "preempted" and world.group.is_released
    assert read_record(world.store).status == "preempted"


@pytest.mark.parametrize("state", [State.SCHEDULING, State.STARTING, State.RESTARTING])
def test_stop_before_workers_run_stops_at_once(world, state):
    workers = FakeWorkers(4)
    controller = world.drive(workers.enter() + workers.die(0), [])
    world.tick_until(state)
    controller.request_stop()
    with pytest.raises(PreemptedError):
        controller.run()
    assert world.group.requested == [] and world.group.is_released


def test_stop_at_the_last_step_is_a_finished_run(world):
    controller = world.drive(whole_run())
    world.tick_until(State.RUNNING)
    controller.request_stop()
    assert controller.run().status == "finished"


def test_stop_waits_no_longer_than_its_timeout(world):
    controller = world.drive(lost_run(nothing_more), overrides=["elastic.stop_timeout_s=20.0"])
    world.tick_until(State.RUNNING)
    controller.request_stop()
    with pytest.raises(PreemptedError, match=r"elastic\.stop_timeout_s=20"):
        controller.run()
    assert world.clock.now_s < 125.0


def test_death_while_stopping_is_still_a_stop(world):
    controller = world.drive(lost_run(lambda w: w.die(1)))
    world.tick_until(State.RUNNING)
    controller.request_stop()
    with pytest.raises(PreemptedError, match="the last save was lost: rank 1"):
        controller.run()
    assert len(world.group.orders) == 1


def snapshot_and_die(world, workers, step):
    world.snapshot_manager.take(step)
    return workers.die(1)


@pytest.mark.parametrize("state", [State.RESTARTING, State.SCHEDULING, State.STARTING])
def test_stop_while_only_snapshots_hold_the_last_steps_saves_them_first(world, state):
    again = FakeWorkers(4, step=3, attempt=2)
    polls = [[], *again.enter(), *again.steps(1), *again.save(), *again.finish(stopped=True)]
    controller = world.drive(
        lost_run(lambda w: snapshot_and_die(world, w, 3)), polls,
        overrides=["run.steps=9", "elastic.snapshot_every=1"],
    )  # fmt: skip
    world.tick_until(State.RESTARTING)
    world.tick_until(state)
    controller.request_stop()
    with pytest.raises(PreemptedError, match="step 4 of 9 saved"):
        controller.run()
    assert restores(world) == [("nothing", 0), ("memory", 3)]


def test_worker_lost_while_stopping_costs_no_step_that_a_snapshot_holds(world):
    again = FakeWorkers(4, step=3, attempt=2)
    polls = again.enter() + again.steps(1) + again.save() + again.finish(stopped=True)
    controller = world.drive(
        lost_run(lambda w: [[], [], *snapshot_and_die(world, w, 3)]), polls,
        overrides=["run.steps=9", "elastic.snapshot_every=1"],
    )  # fmt: skip
    world.tick_until(State.RUNNING)
    controller.request_stop()
    with pytest.raises(PreemptedError, match="step 4 of 9 saved"):
        controller.run()


def test_stop_waits_for_a_start_no_longer_than_its_timeout(world):
    controller = world.drive(
        lost_run(lambda w: snapshot_and_die(world, w, 3)), [],
        overrides=["run.steps=9", "elastic.snapshot_every=1", "elastic.stop_timeout_s=20.0"],
    )  # fmt: skip
    world.tick_until(State.RESTARTING)
    controller.request_stop()
    begun_s = world.clock.now_s
    with pytest.raises(PreemptedError, match="step 2 of 9 saved"):
        controller.run()
    assert 20.0 <= world.clock.now_s - begun_s < 25.0


# The next driver.


def killed_driver(world):
    """A driver that is gone after step 3; step 2 is saved."""
    world.drive(lost_run(nothing_more))
    world.tick_until(State.RUNNING)
    while world.controller.state.step < 3:
        world.controller.tick()


def test_next_driver_continues_the_run(world):
    killed_driver(world)
    run_id = read_record(world.store).run_id
    world.sink.events.clear()
    ended = world.drive(whole_run(attempt=2, step=2)).run()
    started = world.sink.of(RunStarted)[0]
    assert (started.run_id, started.is_resumed, started.step) == (run_id, True, 2)
    assert world.group.orders[0].attempt == 2
    assert world.steps_seen() == [3, 4] and ended.status == "finished"


def test_next_driver_of_a_killed_one_goes_on_with_its_retry_budget(world):
    first = lost_run(lambda w: w.die(3))
    world.drive(first, [], overrides=["elastic.max_failures=1"])
    world.tick_until(State.RESTARTING)
    world.tick_until(State.STARTING)  # and is killed there
    last = lost_run(lambda w: w.die(2), attempt=3, step=2)
    with pytest.raises(WorkerError, match=r"elastic\.max_failures=1 restarts are spent"):
        world.drive(last, overrides=["elastic.max_failures=1"]).run()
    assert read_history(world.store).failures == (), "a driver that gave up leaves a clean slate"
    again = lost_run(lambda w: w.die(2), attempt=4, step=2), whole_run(attempt=5, step=2)
    assert world.drive(*again, overrides=["elastic.max_failures=1"]).run().status == "finished"


def test_next_driver_of_a_killed_one_takes_the_smaller_grid_that_the_run_had(world):
    wide = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=4"]
    world.drive(lost_run(lambda w: w.die(3)), [], overrides=wide)
    world.tick_until(State.RESTARTING)
    world.group.locations = [WorkerLocation(node_id="n", address="", pid=p) for p in range(2)]
    world.group.lacking = [LACKING] * 40
    world.tick_until(State.STARTING)
    world.group.locations = []
    assert [plan.grid.world_size for plan in world.group.plans] == [2]

    two = FakeWorkers(2, step=2, attempt=3)
    polls = two.enter() + two.steps(2) + two.save() + two.finish()
    overrides = [*wide, "elastic.replan_after_s=5.0"]
    assert world.drive(polls, lacking=[LACKING] * 22, overrides=overrides).run().step == 4
    assert [plan.grid.world_size for plan in world.group.plans] == [2]


def test_journal_says_what_became_of_each_attempt(world):
    world.drive(lost_run(lambda w: w.die(3)), whole_run(attempt=2, step=2)).run()
    first, second = (json.loads(world.store.get(f"journal/{number:06d}.json")) for number in (1, 2))
    assert (first["world_size"], first["grid"]["tp"], first["restored"]) == (4, 2, "")
    assert [turn["state"] for turn in first["turns"]][:3] == ["starting", "running", "restarting"]
    assert first["failures"][0]["message"] == "SIGKILL"
    assert second["restored"] == "checkpoints/step-00000002/manifest-a0001.json"
    assert (second["state"], second["failures"]) == ("finished", [])


def test_snapshot_that_an_older_attempt_finished_late_is_refused(world):
    """Attempt 2 began from step 2; what attempt 1 took of step 3 came to memory after that."""
    second = FakeWorkers(4, step=2, attempt=2)
    polls = second.enter() + second.steps(1) + second.die(0)
    world.drive(lost_run(lambda w: w.die(3)), polls, whole_run(attempt=3, step=2))
    world.tick_until(State.RESTARTING)
    world.tick_until(State.RUNNING)
    world.snapshot_manager.take(3, attempt=1)
    assert world.controller.run().status == "finished"
    assert restores(world) == [("nothing", 0), ("store", 2), ("store", 2)]


def test_next_driver_may_change_the_grid(world):
    killed_driver(world)
    two = FakeWorkers(2, step=2, attempt=2)
    polls = two.enter() + two.steps(2) + two.save() + two.finish()
    grid = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=2"]
    assert world.drive(polls, overrides=grid).run().status == "finished"


def test_finished_run_says_so_and_starts_nothing(world):
    world.drive(whole_run()).run()
    ended = world.drive().run()
    assert (ended.status, ended.step) == ("finished", 4)
    assert "nothing is left to do" in ended.reason
    assert ended.checkpoint_uri.endswith("manifest-a0001.json")
    assert world.group.orders == []


def test_larger_run_steps_continue_a_finished_run(world):
    world.drive(whole_run()).run()
    ended = world.drive(whole_run(attempt=2, step=4, steps=6), overrides=["run.steps=6"]).run()
    assert (ended.status, ended.step) == ("finished", 6)
    assert world.steps_seen() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("change", ["model.hidden_size=64", "run.seed=1", "data.seq_len=16"])
def test_another_model_seed_or_data_is_refused_with_exit_2(world, change):
    world.drive(whole_run()).run()
    with pytest.raises(ConfigError, match=change.partition("=")[0]) as caught:
        world.drive(whole_run(attempt=2), overrides=[change])
    assert caught.value.exit_code == 2
    assert world.group.orders == []


# The way out.


def test_goodput_counts_surviving_steps_over_wall_time(world):
    world.drive(lost_run(lambda w: w.die(3)), whole_run(attempt=2, step=2))
    world.tick_until(State.RUNNING)
    world.clock.advance(40.0)
    ended = world.controller.run()
    assert ended.wall_s == pytest.approx(40.0)
    assert ended.goodput == pytest.approx(4.0 / 40.0)


def test_interrupt_leaves_nothing_behind(world):
    class Interrupted(FakeWorkerGroup):
        def poll(self, timeout_s):
            raise KeyboardInterrupt

    controller = world.drive(whole_run())
    world.group.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        controller.run()
    assert world.group.is_released
    assert world.sink.events[-1].status == "interrupted"
    assert world.sink.events[-1].reason == "interrupted while starting"

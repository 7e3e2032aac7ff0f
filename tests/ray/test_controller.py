"""The whole driver on a real local Ray: real processes, real kills, training stood in for."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raymega.errors import NumericsError, PreemptedError, WorkerError
from raymega.events import (
    AttemptFailed,
    CheckpointCommitted,
    EvaluationFinished,
    Recovered,
    StepFinished,
    WorkersStarted,
)
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.driver.controller import Controller
from raymega.orchestrate.driver.run_context import RunContext
from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup
from raymega.storage.registry import open_store
from tests.support.fakes import MemorySink
from tests.support.jobs import make_test_plan
from tests.support.leases import take_lease
from tests.support.local_ray import leftovers

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

SMALL = (
    "parallel.tp=2",
    "run.steps=12",
    "checkpoint.every=4",
    "optimizer.lr_warmup_steps=0",
    "elastic.start_timeout_s=300.0",
)


class Bench:
    """Drivers of runs in one folder; a run's name places its faults, see tests.support.entries."""

    def __init__(self, folder, executor):
        self.folder, self.executor = folder, executor
        self.sink = MemorySink()

    def controller(self, name, *overrides, clock=None):
        plan = make_test_plan(*SMALL, f"run.name={name}", *overrides)
        store = open_store(str(self.folder / name))
        return Controller(
            RunContext(
                plan,
                lease=take_lease(store),
                group=RayWorkerGroup(
                    plan, log_dir=self.folder, can_grow=False, entry="tests.support.entries"
                ),
                sink=self.sink,
                clock=clock or SystemClock(),
                executor=self.executor,
            )
        )

    def steps(self):
        return [event.step for event in self.sink.of(StepFinished)]


@pytest.fixture
def bench(tmp_path):
    with ThreadPoolExecutor(1) as executor:
        yield Bench(tmp_path, executor)
    assert leftovers() == []


def test_calm_run_finishes(bench):
    ended = bench.controller("calm").run()
    assert (ended.status, ended.step) == ("finished", 12)
    assert bench.steps() == list(range(1, 13))
    assert [event.step for event in bench.sink.of(CheckpointCommitted)] == [4, 8, 12]
    assert len(set(bench.sink.of(WorkersStarted)[0].pids.values())) == 4
    assert bench.sink.of(EvaluationFinished)[0].metrics == {"eval/loss": 0.5}
    assert 0 < ended.goodput < 1


def test_killed_worker_is_detected_and_the_run_goes_on_from_the_commit(bench, record_property):
    ended = bench.controller("x.kill-3-7").run()
    assert (ended.status, ended.step) == ("finished", 12)
    assert bench.steps() == [*range(1, 7), *range(5, 13)]
    (seen,) = bench.sink.of(AttemptFailed)
    assert (seen.rank, seen.attempt) == (3, 1) and "died" in seen.cause
    (recovered,) = bench.sink.of(Recovered)
    record_property("detection_s", recovered.detection_s)
    record_property("recovery_s", recovered.recovery_s)
    assert (recovered.restored_step, recovered.step, recovered.lost_steps) == (4, 6, 2)
    first, second = bench.sink.of(WorkersStarted)
    assert {rank for rank in range(4) if first.pids[rank] == second.pids[rank]} == {0, 1, 2}


def test_kill_of_rank_0_moves_the_rendezvous(bench):
    assert bench.controller("x.kill-0-6").run().status == "finished"
    assert bench.sink.of(AttemptFailed)[0].rank == 0


def test_passing_error_restarts_without_a_new_process(bench):
    assert bench.controller("x.raise-1-6").run().status == "finished"
    assert bench.sink.of(AttemptFailed)[0].cause == "rank 1 raised ValueError: a passing error"
    first, second = bench.sink.of(WorkersStarted)
    assert first.pids == second.pids


class SkippingClock(SystemClock):
    """The machine's clock, as many seconds ahead as the test has skipped."""

    skipped_s = 0.0

    def monotonic(self):
        return super().monotonic() + self.skipped_s


def test_hung_worker_is_replaced_after_the_deadline(bench):
    """Time is skipped only while rank 2 is known to hang, so that no healthy step can be late."""
    clock, log = SkippingClock(), bench.folder / "rank-00002.log"
    controller = bench.controller("x.hang-2-6", "elastic.collective_timeout_s=100.0", clock=clock)
    with ThreadPoolExecutor(1) as runner:
        ended = runner.submit(controller.run)
        while "it hangs" not in (log.read_text() if log.exists() else ""):
            assert not ended.done(), ended.result()
            time.sleep(0.05)
        while not bench.sink.of(AttemptFailed):
            clock.skipped_s += 10.0
            time.sleep(0.1)
        assert ended.result().status == "finished"
    assert "no step after step 5 for 110 s" in bench.sink.of(AttemptFailed)[0].cause
    first, second = bench.sink.of(WorkersStarted)
    assert first.pids[2] != second.pids[2]


@pytest.mark.slow
def test_stopped_worker_is_replaced_long_before_its_collective_times_out(bench):
    controller = bench.controller("x.stop-2-6", "elastic.collective_timeout_s=300.0")
    assert controller.run().status == "finished"
    assert "rank 2 hung: its process is stopped (state T)" in bench.sink.of(AttemptFailed)[0].cause
    first, second = bench.sink.of(WorkersStarted)
    assert first.pids[2] != second.pids[2]


@pytest.mark.wide
def test_mistake_in_the_code_stops_after_three_times_with_exit_4(bench):
    with pytest.raises(WorkerError, match="a mistake in the training code") as caught:
        bench.controller("x.bug-1-3", "elastic.max_failures=50").run()
    assert caught.value.exit_code == 4
    assert len(bench.sink.of(AttemptFailed)) == 3


@pytest.mark.wide
def test_numerics_guard_ends_the_run_with_exit_5(bench):
    with pytest.raises(NumericsError, match="loss=nan") as caught:
        bench.controller("x.nan-1-3").run()
    assert caught.value.exit_code == 5


def test_stop_saves_and_the_next_driver_continues(bench):
    controller = bench.controller("calm", "run.steps=100000", "checkpoint.every=100000")
    emit = bench.sink.emit

    def stop_at_step_5(event):
        emit(event)
        if isinstance(event, StepFinished) and event.step == 5:
            controller.request_stop()

    bench.sink.emit = stop_at_step_5
    with pytest.raises(PreemptedError) as caught:
        controller.run()
    bench.sink.emit = emit
    assert caught.value.exit_code == 75
    saved = controller.state.saved_step
    assert saved >= 5 and bench.steps() == list(range(1, saved + 1))

    grid = ("parallel.tp=1", "parallel.pp=1", "parallel.dp=2")
    ended = bench.controller("calm", f"run.steps={saved + 3}", *grid).run()
    assert (ended.status, ended.step) == ("finished", saved + 3)
    assert bench.steps() == list(range(1, saved + 4))

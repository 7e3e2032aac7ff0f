"""Guards on real workers: bad numbers, flipped bits, hung and slow ranks are seen, named and made good."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import pytest

from raymega.events import (
    AttemptFailed,
    AttemptStarted,
    BadStep,
    StepFinished,
    StragglerDetected,
    WorkersStarted,
)
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.driver.controller import Controller
from raymega.orchestrate.driver.run_context import RunContext
from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup
from raymega.storage.registry import open_store
from raymega.tracking.incidents import IncidentsSink
from raymega.tracking.sink import CompositeSink
from tests.support.fakes import MemorySink
from tests.support.jobs import make_test_plan
from tests.support.leases import take_lease
from tests.support.local_ray import leftovers

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

SMALL = (
    "parallel.tp=1", "parallel.pp=1", "parallel.dp=2", "run.steps=12", "run.eval_samples=0",
    "checkpoint.every=2", "optimizer.lr_decay_steps=100", "tracking.console_every=2",
    "elastic.replica_check_every=2", "elastic.max_failures=5",
)  # fmt: skip


class Stopper(MemorySink):
    """Keeps every event with its time, and stops rank 1 with SIGSTOP after step 9 of attempt 3."""

    def __init__(self):
        super().__init__()
        self.pids, self.at_s, self.stopped_s = {}, {}, 0.0

    def emit(self, event):
        super().emit(event)
        self.at_s[id(event)] = time.monotonic()
        if isinstance(event, WorkersStarted):
            self.pids = event.pids
        if isinstance(event, StepFinished) and (event.attempt, event.step) == (3, 9):
            os.kill(self.pids[1], signal.SIGSTOP)
            self.stopped_s = time.monotonic()

    @property
    def losses(self):
        return {event.step: event.metrics["train/loss"] for event in self.of(StepFinished)}


def run(folder, name, *overrides):
    plan = make_test_plan(*SMALL, f"run.name={name}", *overrides)
    sink, clock = Stopper(), SystemClock()
    incidents = IncidentsSink(folder / name / "incidents", clock=time.time, watcher=MemorySink())
    with ThreadPoolExecutor(1) as executor:
        controller = Controller(
            RunContext(
                plan,
                lease=take_lease(open_store(str(folder / name))),
                group=RayWorkerGroup(
                    plan, log_dir=folder, can_grow=False, entry="tests.support.faulty_entry"
                ),
                sink=CompositeSink([incidents, sink]),
                clock=clock,
                executor=executor,
            )
        )
        assert controller.run().status == "finished"
    assert leftovers() == []
    return sink


@pytest.fixture(scope="module")
def calm(tmp_path_factory, local_ray):
    return run(tmp_path_factory.mktemp("runs"), "calm").losses


@pytest.mark.wide
def test_run_through_all_faults_ends_with_the_bits_of_the_calm_one(tmp_path, calm, record_property):
    name = "all.slow-1-4-1.nan-1-3-1.flip-1-5-1.hang-1-7-2"
    seen = run(tmp_path, name, "elastic.straggler_ratio=100")
    assert seen.losses == calm

    assert {event.rank for event in seen.of(StragglerDetected)} == {1}
    (bad_step,) = seen.of(BadStep)
    assert (bad_step.step, bad_step.kind, bad_step.action) == (3, "nan", "used the second pass")
    flipped, hung, stopped = seen.of(AttemptFailed)
    assert flipped.is_rollback and "one of ranks 0, 1 differs" in flipped.cause
    assert hung.rank == 1 and "faulty_entry.py" in hung.cause, hung.cause
    assert "all_reduce" in hung.whereabouts[0]
    assert stopped.rank == 1 and "state T" in stopped.cause

    usual_s = median(event.metrics["train/step_time_s"] for event in seen.of(StepFinished))
    found_s = seen.at_s[id(stopped)] - seen.stopped_s
    record_property("stop_found_s", found_s)
    record_property("deadline_s", 3 * usual_s + 2)
    pages = sorted((tmp_path / name / "incidents").glob("*.md"))
    assert len(pages) == 3
    text = pages[1].read_text()
    assert (
        "- Cause: rank 1 hung" in text and "| steps |" in text and "it waits for all_reduce" in text
    )


@pytest.mark.wide
def test_bad_batch_is_gone_back_for_and_passed_over_for_good(tmp_path, calm):
    seen = run(tmp_path, "x.bad-1-8-0", "elastic.on_nan=rollback", "elastic.replica_check_every=0")
    (failure,) = seen.of(AttemptFailed)
    assert failure.is_rollback and "rollback 1 of at most 5" in failure.decision
    assert "rank 1 (tp 0, cp 0, pp 0, dp 1)" in failure.cause
    _, again = seen.of(AttemptStarted)
    began = again.step  # 6, but where a busy machine has not yet committed that save
    assert began in (2, 4, 6)
    steps = seen.of(StepFinished)
    assert [event.step for event in steps] == [*range(1, 8), *range(began + 1, 13)]
    size = steps[0].metrics["train/global_batch_size"]
    samples = [event.metrics["train/samples"] / size for event in steps]
    left_out = f"batches {began + 1} to 8 are left out"
    assert samples == [*range(1, 8), *range(9, 9 + 12 - began)], left_out
    assert {step: loss for step, loss in seen.losses.items() if step <= began} == {
        step: calm[step] for step in range(1, began + 1)
    }
    assert list((tmp_path / "x.bad-1-8-0" / "rollbacks").iterdir())

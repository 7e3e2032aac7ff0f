"""Runs whose workers ray.train.TorchTrainer hosts: the same driver, entry, commits and recovery."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray._private.state import actors
from ray.train.v2._internal.state.state_actor import get_state_actor

from raymega.events import AttemptFailed, CheckpointCommitted, StepFinished, WorkersStarted
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.driver.controller import Controller
from raymega.orchestrate.driver.run_context import RunContext
from raymega.orchestrate.ray_train.worker_group import RayTrainGroup
from raymega.storage.registry import open_store
from tests.support.fakes import MemorySink
from tests.support.jobs import make_test_plan
from tests.support.leases import take_lease

pytestmark = [pytest.mark.ray, pytest.mark.wide, pytest.mark.usefixtures("local_ray")]

SMALL = (
    "run.steps=12",
    "checkpoint.every=4",
    "optimizer.lr_warmup_steps=0",
    "elastic.start_timeout_s=300.0",
    "cluster.host=ray_train",
)


OF_RAY_TRAIN = {"TrainStateActor", "_AutoscalingCoordinatorActor", "DatasetManager"}


@pytest.fixture
def drive(tmp_path):
    def run(name, *overrides, entry="tests.support.entries"):
        plan = make_test_plan(*SMALL, f"run.name={name}", *overrides)
        run.sink = MemorySink()
        with ThreadPoolExecutor(1) as executor:
            return Controller(
                RunContext(
                    plan,
                    lease=take_lease(open_store(str(tmp_path / name))),
                    group=RayTrainGroup(
                        plan, folder=tmp_path / "train", can_grow=False, entry=entry
                    ),
                    sink=run.sink,
                    clock=SystemClock(),
                    executor=executor,
                )
            ).run()

    return run


def in_train_tab():
    """By name, how the runs of Ray Train's own list stand, as its dashboard's tab shows them."""
    runs = ray.get(get_state_actor().get_train_runs.remote(), timeout=100)
    return {run.name: run.status.value for run in runs.values()}


def test_killed_worker_is_recovered_from_the_commit_and_trainers_are_gone(drive):
    ended = drive("x.kill-1-7")
    assert (ended.status, ended.step) == ("finished", 12)
    steps = [event.step for event in drive.sink.of(StepFinished)]
    assert steps[-8:] == list(range(5, 13)) and steps[0] == 1
    assert [event.step for event in drive.sink.of(CheckpointCommitted)] == [4, 8, 12]
    first, second = drive.sink.of(WorkersStarted)
    assert len({*first.pids.values(), *second.pids.values()}) == 4, "Train ends all of them"
    assert drive.sink.of(AttemptFailed)[0].attempt == 1
    assert in_train_tab() == {"x.kill-1-7-a1": "ERRORED", "x.kill-1-7-a2": "FINISHED"}
    living = [a["ActorClassName"] for a in actors().values() if a["State"] == "ALIVE"]
    assert set(living) <= OF_RAY_TRAIN, "small processes of Ray Train's own stay"

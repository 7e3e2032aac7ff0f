"""The group of Ray Train on a mailbox that fails, without Ray: the attempt is lost, and the driver lives on."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, OutOfMemoryError

from raymega.config.load import parse_job
from raymega.messages import Progress, Requests, WorkerDied
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.worker_group_api import AttemptSpec
from raymega.orchestrate.ray_train import worker as worker_module
from raymega.orchestrate.ray_train import worker_group
from raymega.orchestrate.ray_train.mailbox import RemoteWorker
from raymega.orchestrate.ray_train.worker_group import RayTrainGroup
from raymega.orchestrate.workers.worker_actor import ReportQueue
from raymega.plan.run_plan import make_plan
from tests.support.jobs import VERIFY

ERRORS = [ActorDiedError(), OutOfMemoryError("the node is low on memory"), GetTimeoutError("late")]
GUARD_S, WAIT_S = 100, 40
"""For what comes, and for a worker's wait that ends before."""


class FakeRay:
    """Ray with one actor, the mailbox, whose calls run in threads as many as its options say.

    Attributes:
        error: Error of all calls from now on; None for none.
        options: Options with which the actor was made.
    """

    def __init__(self):
        self.error, self.options, self.killed = None, {}, []

    def remote(self, made):
        return SimpleNamespace(options=lambda **options: self._class_with(made, options))

    def _class_with(self, made, options):
        self.options = options
        box, pool = made(), ThreadPoolExecutor(options["max_concurrency"])

        class Actor:
            def __getattr__(self, name):
                method = getattr(box, name)
                return SimpleNamespace(remote=lambda *args: pool.submit(method, *args))

        return SimpleNamespace(remote=Actor)

    def get(self, ref, timeout):
        if self.error is not None:
            raise self.error
        try:
            return ref.result(timeout)
        except TimeoutError as error:
            raise GetTimeoutError from error

    def kill(self, actor):
        self.killed.append(actor)

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "ab" * 28)


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setattr(worker_group, "ray", fake)
    monkeypatch.setattr(RayTrainGroup, "_fit", lambda *_: None)
    return fake


def started(tmp_path, dp=2):
    """A group of ``dp`` ranks in an attempt whose trainer has ended in good order."""
    sets = (
        "parallel.tp=1", "parallel.pp=1", f"parallel.dp={dp}", f"data.global_batch_size={dp}",
        f"cluster.num_workers={dp}", "schedule.micro_batch_size=1",
    )  # fmt: skip
    plan = make_plan(parse_job(VERIFY, sets).job())
    group = RayTrainGroup(plan, folder=tmp_path, can_grow=True)
    spec = AttemptSpec(plan_json=plan.to_json(), run_uri="memory:", attempt=1, restore="")
    group.start(spec)
    group._thread.join(GUARD_S)
    return group, spec


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_loss_of_the_mailbox_is_a_death_once_and_the_next_attempt_has_another(error, ray, tmp_path):
    group, spec = started(tmp_path)
    lost, ray.error = group._mailbox, error
    (death,) = group.poll(0.0)
    assert isinstance(death, WorkerDied) and death.rank == -1 and str(error) in death.cause
    assert group.poll(0.0) == []
    group.release(keep_warm=True)
    assert ray.killed == [lost] and group.poll(0.0) == []
    ray.error = None
    group.start(spec)
    assert group.poll(0.0) == [] and group._mailbox is not lost
    group.release(keep_warm=False)


def test_mailbox_is_on_the_drivers_node(ray, tmp_path):
    group, _ = started(tmp_path)
    strategy = ray.options["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == ("ab" * 28, False)
    group.release(keep_warm=False)


def test_driver_is_heard_while_each_of_many_workers_waits_for_its_start(ray, tmp_path):
    """All but one of 96 workers wait; then the last one comes."""
    group, _ = started(tmp_path, dp=96)
    waiting = [group._mailbox.start_of.remote(index, WAIT_S) for index in range(95)]
    try:
        assert group.poll(0.0) == []
        for index in range(96):
            at = WorkerLocation(node_id="n", address="10.0.0.1", pid=index, gpus=(str(index),))
            came = group._mailbox.come.remote(index, RemoteWorker(location=at, rendezvous="h:1"))
            came.result(GUARD_S)
        assert group.poll(0.0) == [] and len(group.members()) == 96
        assert {each.result(GUARD_S).rank for each in waiting} <= {*range(96)}
    finally:
        group.release(keep_warm=False)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_worker_ends_when_the_mailbox_is_gone(error, monkeypatch):
    """Nobody could tell it that the attempt is over, and its GPU would be taken."""
    answers = [Requests(), error]

    def ask(_ref):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(worker_module, "_ask", ask)
    mailbox = SimpleNamespace(exchange=SimpleNamespace(remote=lambda *_: None))
    queue, is_aborted = ReportQueue(), Event()
    queue.report(Progress(rank=0, step=1))
    entry = SimpleNamespace(abort=is_aborted.set)
    thread = Thread(
        target=worker_module._exchange, args=(mailbox, 0, queue, entry, Event()), daemon=True
    )
    thread.start()
    thread.join(GUARD_S)
    assert is_aborted.is_set() and not answers

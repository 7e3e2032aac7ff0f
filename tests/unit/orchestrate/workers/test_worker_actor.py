"""The worker as a plain object; this module is its entry. Ray is not started."""

from threading import Event
from types import SimpleNamespace
from weakref import ref

import pytest

from raymega.errors import CommunicationError, LeaseError, NumericsError
from raymega.events import StepFinished
from raymega.messages import (
    Progress,
    RankMemory,
    RankTimeline,
    Requests,
    StartWorker,
    WorkerFailed,
    Working,
)
from raymega.orchestrate.workers import worker_actor as worker_module
from raymega.orchestrate.workers.worker_actor import ReportQueue, Worker

STUCK, LET_GO = Event(), Event()
GUARD_S, ENDLESS_S = 100, 100_000
"""For what comes, and for what must end a wait that would outlive the test."""
SCRIPT = {}


def warm_up(plan_json, device):
    SCRIPT["warmed up"] = (plan_json, device)


def host_rendezvous(host):
    return f"{host}:1", "handle"


def abort():
    LET_GO.set()


def run_worker(start, channel, rendezvous):
    SCRIPT["run"](start, channel, rendezvous)


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(worker_module, "_write_output_to", lambda *_: None)
    LET_GO.clear()
    STUCK.clear()
    return Worker(__name__)


def start(worker, run, rank=1, attempt=2):
    SCRIPT["run"] = run
    message = StartWorker(
        plan_json="{}",
        run_uri="memory:",
        attempt=attempt,
        rank=rank,
        local_rank=0,
        rendezvous="h:1",
        restore="",
        device="cpu",
    )
    worker.start(message, "unused.log")


def test_reports_of_the_thread_come_out_of_the_long_poll(worker):
    report = StepFinished(step=1, metrics={})
    start(worker, lambda *args: args[1].report(report))
    assert worker.next_reports(GUARD_S) == [report]


def test_rank_0_gets_the_handle_that_it_hosts(worker):
    seen = []
    assert worker.host_rendezvous("10.0.0.1") == "10.0.0.1:1"
    start(worker, lambda *args: seen.append(args[2]), rank=0)
    assert worker.abort(GUARD_S, 2)
    start(worker, lambda *args: seen.append(args[2]))
    assert worker.abort(GUARD_S, 2)
    assert seen == ["handle", None]


@pytest.mark.parametrize(
    ("error", "name", "is_secondary", "exit_code"),
    [
        (ValueError("bad"), "ValueError", False, 1),
        (NumericsError("loss=nan"), "NumericsError", False, 5),
        (CommunicationError("peer is gone"), "CommunicationError", True, 1),
    ],
    ids=lambda value: str(value),
)
def test_an_exception_becomes_one_report(worker, error, name, is_secondary, exit_code):
    def run(_start, channel, _rendezvous):
        channel.report(Progress(rank=1, step=7))
        raise error

    start(worker, run)
    reports = []
    while not any(isinstance(each, WorkerFailed) for each in reports):
        new = worker.next_reports(GUARD_S)
        assert new, "the thread says no more"
        reports += new
    *_, failed = reports
    assert (failed.rank, failed.step, failed.error) == (1, 7, name)
    assert (failed.is_secondary, failed.exit_code) == (is_secondary, exit_code)
    assert failed.message == str(error) and "in run" in failed.traceback


def test_requests_reach_the_loop(worker):
    seen = []

    def run(_start, channel, _rendezvous):
        STUCK.wait(ENDLESS_S)
        seen.append(channel.requests())

    start(worker, run)
    worker.set_requests(Requests(stop=True), 2)
    STUCK.set()
    assert worker.abort(GUARD_S, 2)
    assert seen == [Requests(stop=True)]


def test_abort_frees_a_thread_that_waits_for_others(worker):
    def run(_start, channel, _rendezvous):
        LET_GO.wait(ENDLESS_S)
        channel.report(StepFinished(step=1, metrics={}))

    start(worker, run)
    assert worker.abort(GUARD_S, 2)
    assert worker.next_reports(0.0) == []


def test_what_an_attempt_held_is_freed_and_its_pages_returned_before_its_thread_ends(
    worker, monkeypatch
):
    class Held:
        pass

    held, was_freed = [], []

    def run(*_):
        cycle = Held()
        cycle.itself = cycle
        held.append(ref(cycle))

    monkeypatch.setattr(
        worker_module, "return_freed_memory", lambda: was_freed.append(held[0]() is None)
    )
    start(worker, run)
    worker._thread.join(GUARD_S)
    assert was_freed == [True]


def test_abort_says_no_when_the_thread_does_not_let_go(worker):
    start(worker, lambda *_: STUCK.wait(ENDLESS_S))
    assert not worker.abort(0.0, 2)
    STUCK.set()


def test_reports_of_an_aborted_attempt_do_not_reach_the_next(worker):
    channels = []
    start(worker, lambda *args: channels.append(args[1]))
    assert worker.abort(GUARD_S, 2)
    start(worker, lambda *_: None)
    channels[0].report(StepFinished(step=1, metrics={}))
    assert worker.next_reports(0.0) == []


def test_training_waits_for_a_preload_that_is_under_way(worker):
    loading, events = worker._loading, []

    class Preloading:
        """Ends when training comes to it."""

        def __init__(self):
            self.is_met = Event()

        def __enter__(self):
            self.is_met.set()
            loading.acquire()

        def __exit__(self, *_error):
            loading.release()

    worker._loading = Preloading()
    with loading:
        start(worker, lambda *_: events.append("training"))
        assert worker._loading.is_met.wait(GUARD_S)
        events.append("loaded")
    worker._thread.join(GUARD_S)
    assert events == ["loaded", "training"]


def test_preload_loads_what_the_entry_says(worker):
    worker.preload("{}", "cpu")
    assert SCRIPT["warmed up"] == ("{}", "cpu")


def test_what_an_older_attempt_says_is_refused(worker):
    """Calls into an actor with several threads may come late."""
    seen = []

    def run(_start, channel, _rendezvous):
        STUCK.wait(ENDLESS_S)
        seen.append(channel.requests())

    start(worker, run, attempt=3)
    worker.set_requests(Requests(stop=True), 2)
    assert worker.abort(GUARD_S, 2), "that attempt is gone"
    with pytest.raises(
        LeaseError, match="attempt 2 was to start in a process that serves attempt 3"
    ):
        start(worker, run, attempt=2)
    assert not LET_GO.is_set()
    STUCK.set()
    assert worker.abort(GUARD_S, 3)
    assert seen == [Requests()]


def step(number):
    return StepFinished(step=number, metrics={})


def beat(number):
    return Progress(rank=1, step=number)


def test_take_returns_reports_in_order_and_once():
    queue = ReportQueue()
    for number in (1, 2):
        queue.report(step(number))
    assert queue.drain(0.0) == [step(1), step(2)]
    assert queue.drain(0.0) == []


def test_take_keeps_only_the_newest_progress():
    queue = ReportQueue()
    for number in (1, 2, 3):
        queue.report(beat(number))
    assert queue.drain(0.0) == [beat(3)]


def test_take_has_one_sign_of_life_and_never_instead_of_a_step():
    queue, alive = ReportQueue(), Working(rank=1)
    for report in (alive, alive):
        queue.report(report)
    assert queue.drain(0.0) == [alive] and queue.drain(0.0) == []
    for report in (beat(1), alive):
        queue.report(report)
    assert queue.drain(0.0) == [beat(1)]
    for report in (alive, beat(2)):
        queue.report(report)
    assert queue.drain(0.0) == [beat(2)]


def test_close_drops_later_reports_and_waits_for_nobody():
    queue = ReportQueue()
    queue.close()
    queue.report(step(1))
    assert queue.drain(60.0) == []


def test_requests_are_the_last_ones_set():
    queue = ReportQueue()
    assert queue.requests() == Requests()
    queue.set_requests(Requests(stop=True))
    assert queue.requests().stop


def test_save_is_wished_for_once_and_a_stop_for_good():
    queue = ReportQueue()
    queue.set_requests(Requests(stop=True, save=True))
    assert queue.requests() == Requests(stop=True, save=True)
    assert queue.requests() == Requests(stop=True)


def test_measurements_of_a_rank_are_published_in_its_process_until_it_ends():
    seen = []
    metrics = SimpleNamespace(update=seen.append, close=lambda: seen.append("closed"))
    queue = ReportQueue(metrics)
    queue.report(RankMemory(rank=1, step=2, metrics={"memory/peak_bytes": 3.0}))
    row = (("forward", 0, 0, 0.0, 1.5),)
    queue.report(RankTimeline(rank=1, step=2, events=row))
    queue.report(Progress(rank=1, step=2))
    assert len(queue.drain(0.0)) == 3, "the driver gets them too"
    queue.end_metrics()
    assert seen[0] == {"memory/peak_bytes": 3.0} and seen[1]["worker/forward_s"] == 1.5
    assert seen[2:] == ["closed"]

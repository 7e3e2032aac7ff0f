"""Monitors of nodes without Ray: what wakes the driver, what is kept of heartbeats, and when hearing ends."""

from threading import Event
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from raymega.messages import Entered, Progress, Working
from raymega.orchestrate.workers import node_monitor
from raymega.orchestrate.workers.node_monitor import NodeMailbox, answer_every_s, hear


def test_newest_heartbeat_of_each_rank_is_kept_and_working_replaces_no_progress():
    mailbox = NodeMailbox()
    mailbox.add(0, [Progress(rank=0, step=1)])
    mailbox.add(0, [Progress(rank=0, step=2)])
    mailbox.add(0, [Working(rank=0)])
    mailbox.add(1, [])
    found = mailbox.take(0.0)
    assert sorted(found.heard) == [0, 1] and found.reports == (Progress(rank=0, step=2),)
    empty = mailbox.take(0.0)
    assert (empty.heard, empty.reports, empty.deaths) == ((), (), {})


@pytest.mark.parametrize("kind", ["report", "death"])
def test_report_and_death_are_passed_on_at_once(kind):
    """The call returns although its timeout is an hour."""
    mailbox = NodeMailbox()
    if kind == "report":
        mailbox.add(3, [Entered(rank=3, phase="built", seconds=0.1)])
        assert mailbox.take(3600.0).reports[0].rank == 3
    else:
        mailbox.add_death(3, "killed")
        assert mailbox.take(3600.0).deaths == {3: "killed"}


def test_interval_grows_with_the_nodes_so_that_the_driver_gets_512_answers_a_second():
    assert [answer_every_s(n) for n in (1, 64, 512, 2048)] == [1.0, 1.0, 1.0, 4.0]


class FakeRay:
    """Ray whose calls have all returned."""

    def wait(self, refs, **_more):
        return refs[:1], refs[1:]

    def get(self, ref):
        answer = ref.worker.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Call:
    def __init__(self, worker):
        self.worker = worker


def worker(*answers):
    made = SimpleNamespace(answers=list(answers))
    made.next_reports = SimpleNamespace(remote=lambda _timeout_s: Call(made))
    return made


def test_hearing_ends_with_the_last_process_and_tells_each_death(monkeypatch):
    monkeypatch.setattr(node_monitor, "ray", FakeRay())
    mailbox = NodeMailbox()
    workers = {
        8: worker([Progress(rank=8, step=1)], [], RayActorError()),
        9: worker(RayActorError()),
        10: worker(OutOfMemoryError("the node is low on memory")),
    }
    hear(workers, mailbox, Event())
    found = mailbox.take(0.0)
    assert found.heard == (8,) and found.reports == (Progress(rank=8, step=1),)
    assert found.deaths.keys() == {8, 9, 10}
    assert found.deaths[10] == "the node is low on memory"


def test_hearing_ends_when_the_attempt_is_over(monkeypatch):
    monkeypatch.setattr(node_monitor, "ray", FakeRay())
    stop, mailbox = Event(), NodeMailbox()
    stop.set()
    hear({0: worker([])}, mailbox, stop)
    assert mailbox.take(0.0).heard == ()

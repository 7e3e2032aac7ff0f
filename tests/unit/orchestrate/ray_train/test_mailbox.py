"""The mailbox as a plain object, with workers that come to it; Ray is not started."""

from threading import Thread

from raymega.messages import Progress, Requests, StartWorker
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.ray_train.mailbox import RemoteWorker, WorkerRendezvous

PLACE = WorkerLocation(node_id="n", address="10.0.0.1", pid=7)
GUARD_S, ENDLESS_S = 100, 100_000
"""For what comes, and for what must end a wait that would outlive the test."""


def message(rank):
    return StartWorker(
        plan_json="{}", run_uri="memory:", attempt=1, rank=rank, local_rank=0, rendezvous="h:1",
        restore="", device="cpu",
    )  # fmt: skip


def mailbox(num_workers=2):
    box = WorkerRendezvous()
    for index in range(num_workers):
        box.come(index, RemoteWorker(location=PLACE, rendezvous=f"h:{index}"))
    box.send({index: message(num_workers - 1 - index) for index in range(num_workers)})
    return box


def test_workers_come_and_get_their_messages():
    box = WorkerRendezvous()
    assert box.start_of(0, 0.0) is None and box.is_open()
    box = mailbox()
    assert {index: guest.rendezvous for index, guest in box.remote_workers().items()} == {
        0: "h:0",
        1: "h:1",
    }
    assert box.start_of(0, 0.0) == message(1) and box.start_of(1, 0.0) == message(0)


def test_reports_go_one_way_and_wishes_the_other():
    box, report = mailbox(), Progress(rank=1, step=3)
    assert box.exchange(1, [report]) == Requests()
    assert box.take_reports(0.0) == [report] and box.take_reports(0.0) == []
    box.wish(Requests(stop=True, save=True))
    assert box.exchange(0, []) == Requests(stop=True, save=True)
    assert box.exchange(0, []) == Requests(stop=True), "one wish is one save"
    assert box.exchange(1, []) == Requests(stop=True, save=True)


def test_driver_that_waits_hears_at_once():
    box, heard = mailbox(), []
    thread = Thread(target=lambda: heard.extend(box.take_reports(ENDLESS_S)), daemon=True)
    thread.start()
    box.exchange(0, [Progress(rank=0, step=1)])
    thread.join(GUARD_S)
    assert heard == [Progress(rank=0, step=1)]


def test_closed_mailbox_lets_everybody_go():
    box = WorkerRendezvous()
    waiting = Thread(target=lambda: box.start_of(0, ENDLESS_S), daemon=True)
    waiting.start()
    box.close()
    waiting.join(GUARD_S)
    assert not waiting.is_alive() and not box.is_open()
    box = mailbox()
    box.close()
    assert box.exchange(0, [Progress(rank=0, step=1)]) is None and box.take_reports(ENDLESS_S) == []

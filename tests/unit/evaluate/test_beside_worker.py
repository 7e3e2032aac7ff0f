"""Workers beside a run leave the cores to the ranks that train."""

import os
from threading import Thread, get_native_id

import numpy as np

from raymega.evaluate import beside_worker, scoring, worker
from raymega.evaluate.requests import make_request
from tests.support.jobs import make_test_plan


def _in_thread(work):
    thread = Thread(target=work)
    thread.start()
    thread.join()


def test_scoring_and_the_threads_that_it_starts_yield_to_ordinary_ones(monkeypatch):
    seen = []

    def note():
        seen.append(os.sched_getscheduler(get_native_id()))

    def score(*given):
        seen.append(given)
        note()
        _in_thread(note)

    monkeypatch.setattr(worker, "run_worker", score)
    _in_thread(lambda: beside_worker.run_worker("start", "channel", "rendezvous"))
    assert seen == [("start", "channel", "rendezvous"), os.SCHED_IDLE, os.SCHED_IDLE]
    # a thread of the same process that answers the driver stays as it is
    _in_thread(note)
    assert seen[-1] != os.SCHED_IDLE


def test_workers_beside_a_run_alone_yield(monkeypatch):
    made = []
    monkeypatch.setattr(scoring, "EntryWorkers", lambda _plan, entry, **_: made.append(entry))
    request = make_request(np.arange(8), 2, seq_len=8)
    scoring.ScoringWorkers(make_test_plan(), [request])
    assert made == [beside_worker.__name__]
    assert worker.__name__ == scoring.ENTRY

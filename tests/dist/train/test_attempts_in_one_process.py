"""A process that serves one attempt after the other, as a survivor of deaths does, holds no more after the last."""

import gc
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from raymega.errors import CommunicationError
from raymega.events import StepFinished
from raymega.messages import Requests, StartWorker
from raymega.train import entry
from tests.support.jobs import make_test_plan
from tests.support.ranks import run_alone

pytestmark = pytest.mark.dist

FIRST, LAST = 3, 6
"""Attempts after which is counted: caches fill in those before the first."""

GUARD_S = 60.0
OF_LOCKS = {"<class 'weakref.ReferenceType'>", "<class 'builtin_function_or_method'>"}
"""Types of which Python keeps some, of locks' methods and of ended threads."""


class _LostPeer:
    """Channel that fails as a collective does, after two steps."""

    def report(self, report):
        if isinstance(report, StepFinished) and report.step == 2:
            raise CommunicationError("a peer is gone")

    def requests(self):
        return Requests()


def _is_of_attempt(thread):
    return thread.name.startswith(("checkpoint", "raymega-ahead", "tidy", "attempt", "close-group"))


def _threads_of_system():
    return len([*Path("/proc/self/task").iterdir()])


def _held():
    """Objects by type, Python's threads and the system's, descriptors, and wrappers of the process's last hook."""
    end_s = time.monotonic() + GUARD_S
    # a save may still be written, and the system ends a thread after Python's join has returned
    while time.monotonic() < end_s and (
        any(map(_is_of_attempt, threading.enumerate()))
        or _threads_of_system() > threading.active_count()
    ):
        gc.collect()
        time.sleep(0.01)
    gc.collect()
    objects = Counter(str(type(each)) for each in gc.get_objects())
    numbers = {
        "threads": threading.active_count(),
        "of the system": _threads_of_system(),
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "is torch's hook": int(sys.excepthook is not sys.__excepthook__),
    }
    return numbers, objects


def _serve_attempts(plan_json, folder):
    found = {}
    for attempt in range(1, LAST + 1):
        rendezvous, handle = entry.host_rendezvous("127.0.0.1")
        start = StartWorker(
            plan_json=plan_json, run_uri=folder, attempt=attempt, rank=0, local_rank=0, rendezvous=rendezvous,
            restore="", device="cpu",
        )  # fmt: skip
        errors = []

        def serve(start, handle, errors):
            try:
                entry.run_worker(start, _LostPeer(), handle)
            except CommunicationError as error:
                errors.append(str(error))

        thread = threading.Thread(target=serve, args=(start, handle, errors), name="attempt")
        del handle
        thread.start()
        thread.join()
        assert errors == ["a peer is gone"]
        # the first count fills caches of what counts
        if attempt in (FIRST - 1, FIRST, LAST):
            found[attempt] = _held()
    (numbers, objects), (later, more) = found[FIRST], found[LAST]
    grown = {
        kind: n - objects[kind] for kind, n in more.items() if n - objects[kind] >= LAST - FIRST
    }
    grown = {kind: n for kind, n in grown.items() if kind not in OF_LOCKS}
    return numbers, later, grown


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_nothing_of_an_attempt_that_lost_a_peer_stays_in_its_process(tmp_path):
    plan = make_test_plan(
        "parallel.pp=1", "run.steps=10", "checkpoint.every=1", "elastic.snapshot_every=0"
    )
    before, after, grown = run_alone(_serve_attempts, plan.to_json(), str(tmp_path))
    assert after == before and not grown

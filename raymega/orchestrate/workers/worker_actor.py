"""The Ray actor that hosts one rank: training in a thread, the driver's calls beside it.

It owns the process (its output, its thread, its last words) and knows nothing of training: that is
an entry module, named by string and imported here, with ``host_rendezvous``, ``run_worker`` and
``abort``. It never retries and never decides anything.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from threading import Condition, Event, Lock, Thread
from typing import Protocol, cast

import ray

from raymega.errors import CommunicationError, Fault, LeaseError
from raymega.events import StepFinished
from raymega.messages import (
    Channel,
    Progress,
    Report,
    Requests,
    StartWorker,
    WorkerFailed,
    Working,
)
from raymega.orchestrate.core.rank_placement import ACCELERATOR_LABEL, DOMAIN_LABEL, WorkerLocation
from raymega.orchestrate.core.worker_group_api import ThreadStatus
from raymega.orchestrate.workers.preflight import PreflightCheck, PreflightResult, answer_question
from raymega.orchestrate.workers.thread_status import process_state, thread_status_of

log = logging.getLogger(__name__)

MAX_CONCURRENCY = 5
"""Threads for the driver's calls: one that never ends, a long poll, an abort, and room for short ones."""


class EntryModule(Protocol):
    """What an entry module offers."""

    def warm_up(self, plan_json: str, device: str) -> None:
        """Load what the first step would have to; called before any attempt."""

    def host_rendezvous(self, host: str) -> tuple[str, object]:
        """Open the place where ranks meet; its ``host:port`` and a handle that keeps it open."""

    def run_worker(self, start: StartWorker, channel: Channel, rendezvous: object) -> None:
        """Train; called in a thread of its own. Returns at the end or raises."""

    def abort(self) -> None:
        """Make ``run_worker`` raise if it waits for other ranks; called from another thread."""


class Worker:
    """One process, which may serve several attempts one after the other."""

    def __init__(self, entry: str) -> None:
        self._entry_name = entry
        self._rendezvous: object = None
        self._queue = ReportQueue()
        self._rank = -1
        self._thread = Thread()
        self._loading = Lock()
        self._run_uri = ""
        self._attempt = 0

    def location(self) -> WorkerLocation:
        """Where this process lives."""
        return worker_location()

    def run_uri(self) -> str:
        """Folder of the run that it works for; empty before its first attempt."""
        return self._run_uri

    def hold(self) -> None:
        """Never returns: that the call fails is how the driver learns of this process's end."""
        Event().wait()

    def preload(self, plan_json: str, device: str) -> None:
        """Load all that training takes, for seconds, while the driver is busy with other things."""
        with self._loading:
            gc.disable()  # all that is made now is code, and stays: a tenth of the time goes on looking
            try:
                self._entry().warm_up(plan_json, device)
            finally:
                gc.freeze()  # later looks leave it out too, 0.1 s at the end of an attempt
                gc.enable()

    def answer(self, check: PreflightCheck) -> PreflightResult:
        """What this node says before anything trains on it."""
        return answer_question(check, ray.get_runtime_context().get_node_id())

    def host_rendezvous(self, host: str) -> str:
        """Rank 0 only: open the meeting place of the next attempt and return its address."""
        address, self._rendezvous = self._entry().host_rendezvous(host)
        return address

    def start(self, start: StartWorker, log_path: str) -> None:
        """Begin an attempt; returns at once.

        Raises:
            LeaseError: This process has already served a newer one.
        """
        if self._is_older(start.attempt):
            raise LeaseError(_stale_fault(start.attempt, self._attempt))
        self._attempt = start.attempt
        _write_output_to(Path(log_path), start)
        self._queue, self._run_uri, self._rank = ReportQueue(), start.run_uri, start.rank
        self._thread = Thread(
            target=self._train,
            args=(start, self._queue, self._rendezvous),
            name=f"training-{start.attempt}",
            daemon=True,
        )
        self._rendezvous = None
        self._thread.start()

    def next_reports(self, timeout_s: float) -> list[Report]:
        """The long poll."""
        return self._queue.drain(timeout_s)

    def set_requests(self, requests: Requests, attempt: int) -> None:
        """What the loop of ``attempt`` shall do at its next step boundary; calls may come late."""
        if not self._is_older(attempt):
            self._queue.set_requests(requests)

    def thread_status(self) -> ThreadStatus:
        """Return the stack and state of the training thread."""
        return thread_status_of(self._thread, rank=self._rank, step=self._queue.step)

    def process_status(self, pid: int) -> str:
        """What the kernel says of another process of this node."""
        return process_state(pid)

    def abort(self, timeout_s: float, attempt: int) -> bool:
        """End ``attempt``; whether its training thread is gone, so that the process can go on."""
        if self._is_older(attempt):
            return True
        self._queue.close()
        if self._thread.is_alive():
            self._entry().abort()
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _is_older(self, attempt: int) -> bool:
        if attempt < self._attempt:
            log.warning("refused what attempt %d says: this is %d", attempt, self._attempt)
        return attempt < self._attempt

    def _entry(self) -> EntryModule:
        return cast(EntryModule, importlib.import_module(self._entry_name))

    def _train(self, start: StartWorker, channel: ReportQueue, rendezvous: object) -> None:
        try:
            with self._loading:  # a preload that is under way
                entry = self._entry()
            entry.run_worker(start, channel, rendezvous)
        except BaseException as error:  # the thread's edge: it becomes a value
            log.exception("rank %d failed after step %d", start.rank, channel.step)
            channel.report(last_words(start.rank, channel.step, error))
        gc.collect()  # tensors go, and connections close, which frees ranks that wait for this one


class ReportQueue:
    """A worker's end of the channel of one attempt: reports wait here until the driver fetches them.

    It is a queue between threads of one process; the actor's long poll carries it to the driver.

    Progress and Working are heart beats: only the newest is kept, and it wakes nobody, so that a step
    costs the driver one message and not one a rank. Working, which says less, never replaces Progress.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._reports: list[Report] = []
        self._beat: Progress | Working | None = None
        self._requests = Requests()
        self._is_closed = False
        self.step = 0
        """The last that was reported."""

    def report(self, report: Report) -> None:
        """See Channel. After :meth:`close` the report is dropped: its attempt is over."""
        if isinstance(report, StepFinished | Progress):
            self.step = report.step
        with self._changed:
            if self._is_closed:
                return
            if isinstance(report, Working) and self._beat is not None:
                return
            if isinstance(report, Progress | Working):
                self._beat = report
                return
            self._reports.append(report)
            self._changed.notify_all()

    def requests(self) -> Requests:
        """See Channel."""
        with self._changed:
            requests = self._requests
            self._requests = replace(requests, save=False)
            return requests

    def set_requests(self, requests: Requests) -> None:
        """The driver's wishes from now on."""
        with self._changed:
            self._requests = requests

    def drain(self, timeout_s: float) -> list[Report]:
        """All reports that wait; blocks until there is one beside heart beats, or ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._reports or self._is_closed, timeout_s)
            taken = self._reports
            if self._beat is not None:
                taken = [self._beat, *taken]
            self._reports, self._beat = [], None
            return taken

    def close(self) -> None:
        """Take no more reports and let nobody wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def worker_location() -> WorkerLocation:
    """Where this process lives, as Ray knows it."""
    context = ray.get_runtime_context()
    labels = context.get_node_labels() or {}  # said to be lists, and are texts
    return WorkerLocation(
        node_id=context.get_node_id(),
        address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
        pid=os.getpid(),
        gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
        domain=str(labels.get(DOMAIN_LABEL, "")),
        accelerator=str(labels.get(ACCELERATOR_LABEL, "")),
    )


def _stale_fault(attempt: int, serving: int) -> Fault:
    return Fault(
        fact=f"attempt {attempt} was to start in a process that serves attempt {serving}",
        rule="the number of an attempt is its epoch, and a worker goes by the newest",
        remedy="look for a second driver of this run",
    )


def last_words(rank: int, step: int, error: BaseException) -> WorkerFailed:
    """What the driver hears of an exception that ends a worker's training thread."""
    return WorkerFailed(
        rank=rank,
        step=step,
        error=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        is_secondary=isinstance(error, CommunicationError),
        exit_code=getattr(error, "exit_code", 1),
        next_sample=getattr(error, "next_sample", -1),
    )


def _write_output_to(path: Path, start: StartWorker) -> None:
    """From now on everything that this process says goes to ``path``, native code included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if start.rank == 0 else logging.WARNING,
        format=f"%(asctime)s a{start.attempt} r{start.rank} %(levelname)s %(name)s: %(message)s",
        force=True,
    )

"""The Ray actor that hosts one rank: training in one thread, the driver's calls in others.

It owns the process: its output, its training thread, and the report of an error. It does not know training,
which is an entry module (EntryModule), named by a string and imported here. It never retries and never
decides anything.
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

from raymega.errors import CommunicationError, LeaseError
from raymega.events import StepFinished
from raymega.glibc import return_freed_memory
from raymega.messages import (
    Channel,
    Progress,
    RankMemory,
    RankTimeline,
    Report,
    Requests,
    SnapshotHolders,
    StartWorker,
    WorkerFailed,
    Working,
)
from raymega.orchestrate.core.rank_placement import ACCELERATOR_LABEL, DOMAIN_LABEL, WorkerLocation
from raymega.orchestrate.core.worker_group_api import ThreadStatus
from raymega.orchestrate.workers.preflight import PreflightCheck, PreflightResult, answer_question
from raymega.orchestrate.workers.thread_status import process_state, thread_status_of
from raymega.tracking.ray_metrics import RankMetrics
from raymega.tracking.timeline_metrics import rank_timeline_metrics

log = logging.getLogger(__name__)

MAX_CONCURRENCY = 5
"""Threads for the driver's calls: ``hold``, the long poll, an abort, and two for short calls."""


MOST_LOG_BYTES = 16 * 2**20
"""Size of a rank's log from which on an attempt begins a new one."""


class EntryModule(Protocol):
    """Interface of an entry module."""

    def warm_up(self, plan_json: str, device: str) -> None:
        """Load what the first step would otherwise load; called before any attempt."""

    def host_rendezvous(self, host: str) -> tuple[str, object]:
        """Open a rendezvous; return its ``host:port`` and a handle that keeps it open."""

    def run_worker(self, start: StartWorker, channel: Channel, rendezvous: object) -> None:
        """Train, in a thread of its own; return at the end or raise."""

    def abort(self) -> None:
        """Make ``run_worker`` raise if it waits for other ranks; called from another thread.

        A module that keeps the state of its last step has a function ``held_step``, which returns its number.
        """


class Worker:
    """The actor of a worker's process, which may serve several attempts in succession."""

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
        """Return the location of this process."""
        return worker_location()

    def run_uri(self) -> str:
        """Return the URI of the run's folder; empty before the first attempt."""
        return self._run_uri

    def hold(self) -> None:
        """Block forever; the call fails when this process ends, and so reports its end to the driver."""
        Event().wait()

    def preload(self, plan_json: str, device: str) -> None:
        """Import and load what training needs, which takes seconds, before a rank is known."""
        with self._loading:
            gc.disable()  # imported code stays: collections would take a tenth of the time for nothing
            try:
                self._entry().warm_up(plan_json, device)
            finally:
                gc.freeze()  # later collections skip it too, which saves 0.1 s at the end of an attempt
                gc.enable()

    def answer(self, check: PreflightCheck) -> PreflightResult:
        """Return this node's answer to the preflight check."""
        return answer_question(check, ray.get_runtime_context().get_node_id())

    def host_rendezvous(self, host: str) -> str:
        """Open the rendezvous of the next attempt and return its ``host:port``; for rank 0 only."""
        address, self._rendezvous = self._entry().host_rendezvous(host)
        return address

    def start(
        self,
        start: StartWorker,
        log_path: str,
        holders: SnapshotHolders | None = None,
    ) -> None:
        """Begin an attempt in a new training thread; return at once.

        Args:
            start: Start message of this worker.
            log_path: File for the output of this process.
            holders: Map ``read_from`` of Replicas, which all workers share; None leaves the message's own.

        Raises:
            LeaseError: This process has already served a newer attempt.
        """
        if self._is_older(start.attempt):
            raise LeaseError(
                fact=f"attempt {start.attempt} was to start in a process that serves attempt {self._attempt}",
                rule="the number of an attempt is its epoch, and a worker obeys the newest",
                remedy="look for a second driver of this run",
            )
        self._attempt = start.attempt
        if holders is not None:
            start = replace(start, replicas=replace(start.replicas, read_from=holders))
        _write_output_to(Path(log_path), start)
        # a new queue: late reports of the attempt before stay in the old one
        queue = ReportQueue(rank_metrics_of(start))
        self._queue, self._run_uri, self._rank = queue, start.run_uri, start.rank
        self._thread = Thread(
            target=self._train,
            args=(start, self._queue, self._rendezvous),
            name=f"training-{start.attempt}",
            daemon=True,
        )
        self._rendezvous = None
        self._thread.start()

    def next_reports(self, timeout_s: float) -> list[Report]:
        """Return reports when there are any, or after ``timeout_s`` seconds; the driver's long poll."""
        return self._queue.drain(timeout_s)

    def set_requests(self, requests: Requests, attempt: int) -> None:
        """Set what ``attempt`` is to do at its next step boundary; late calls of older ones are ignored."""
        if not self._is_older(attempt):
            self._queue.set_requests(requests)

    def thread_status(self) -> ThreadStatus:
        """Return the stack and state of the training thread."""
        return thread_status_of(self._thread, rank=self._rank, step=self._queue.step)

    def process_status(self, pid: int) -> str:
        """Return the state letter of another process on this node."""
        return process_state(pid)

    def abort(self, timeout_s: float, attempt: int) -> int | None:
        """End ``attempt``; return None unless its thread ended in ``timeout_s``, so the process can be reused.

        Else return the step of the state that the process still holds, -1 for none.
        """
        if self._is_older(attempt):
            return -1
        # drop reports, then fail the collective or transfer in which the thread waits
        self._queue.close()
        if self._thread.is_alive():
            self._entry().abort()
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        held_step = getattr(self._entry(), "held_step", None)  # only training keeps its state
        return int(held_step()) if held_step else -1

    def _is_older(self, attempt: int) -> bool:
        if attempt < self._attempt:
            log.warning(
                "ignored a call of attempt %d: this process serves attempt %d",
                attempt,
                self._attempt,
            )
        return attempt < self._attempt

    def _entry(self) -> EntryModule:
        return cast(EntryModule, importlib.import_module(self._entry_name))

    def _train(self, start: StartWorker, channel: ReportQueue, rendezvous: object) -> None:
        try:
            with self._loading:  # wait for a preload that is under way
                entry = self._entry()
            entry.run_worker(start, channel, rendezvous)
        except BaseException as error:  # top of the thread: every error becomes a report
            log.exception("rank %d failed after step %d", start.rank, channel.step)
            channel.report(last_words(start.rank, channel.step, error))
        channel.end_metrics()
        gc.collect()  # frees tensors and closes connections, on which ranks that wait for this one fail
        return_freed_memory()  # the next attempt's thread gets another of the process's heaps


class ReportQueue:
    """The worker's end of one attempt's channel: reports wait here for the driver's long poll.

    Progress and Working are heartbeats: only the newest is kept, and it does not wake the long poll, so that
    a step costs the driver one message instead of one a rank. Working never replaces Progress, which says more.
    """

    def __init__(self, metrics: RankMetrics | None = None) -> None:
        """Begin empty; ``metrics`` publishes the rank's own measurements, None leaves that out."""
        self._changed, self._metrics = Condition(), metrics
        self._reports: list[Report] = []
        self._beat: Progress | Working | None = None
        self._requests = Requests()
        self._is_closed = False
        self.step = 0
        """Last reported number of completed steps."""

    def report(self, report: Report) -> None:
        """Queue a report, see Channel; after :meth:`close` it is dropped, as its attempt is over."""
        if isinstance(report, StepFinished | Progress):
            self.step = report.step
        if self._metrics and isinstance(report, RankMemory):
            self._metrics.update(report.metrics)
        if self._metrics and isinstance(report, RankTimeline):
            self._metrics.update(rank_timeline_metrics(report.events))
        with self._changed:
            if self._is_closed:
                return
            # heartbeats do not wake the long poll
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
            # a save is requested once, a stop stays
            requests = self._requests
            self._requests = replace(requests, save=False)
            return requests

    def set_requests(self, requests: Requests) -> None:
        """Set the driver's requests."""
        with self._changed:
            self._requests = requests

    def drain(self, timeout_s: float) -> list[Report]:
        """Return all queued reports; waits up to ``timeout_s`` seconds for one that is no heartbeat."""
        with self._changed:
            self._changed.wait_for(lambda: self._reports or self._is_closed, timeout_s)
            taken = self._reports
            if self._beat is not None:
                taken = [self._beat, *taken]
            self._reports, self._beat = [], None
            return taken

    def end_metrics(self) -> None:
        """Publish no more measurements of this rank, as it has ended."""
        if self._metrics:
            self._metrics.close()

    def close(self) -> None:
        """Drop later reports, wake the long poll, and publish no more metrics."""
        self.end_metrics()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def rank_metrics_of(start: StartWorker) -> RankMetrics:
    """Return the publisher of a worker's own metrics."""
    name = start.run_uri.rstrip("/").rpartition("/")[2]  # a run's folder has its name
    return RankMetrics(run=name, rank=start.rank)


def worker_location() -> WorkerLocation:
    """Return the location of this process according to Ray."""
    context = ray.get_runtime_context()
    labels = context.get_node_labels() or {}  # Ray's annotation says lists; the values are strings
    return WorkerLocation(
        node_id=context.get_node_id(),
        address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
        pid=os.getpid(),
        gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
        domain=str(labels.get(DOMAIN_LABEL, "")),
        accelerator=str(labels.get(ACCELERATOR_LABEL, "")),
    )


def last_words(rank: int, step: int, error: BaseException) -> WorkerFailed:
    """Return the report of an exception that ended a worker's training thread."""
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
    """Redirect this process's output to ``path``, that of native code included, and configure logging."""
    # file descriptors 1 and 2, because NCCL and other libraries write past sys.stdout
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > MOST_LOG_BYTES:  # one older log is kept
        path.replace(path.with_suffix(".old.log"))
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

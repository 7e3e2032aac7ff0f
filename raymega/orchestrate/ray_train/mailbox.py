"""A mailbox actor between the driver and workers that Ray Train has started.

The driver has no actor handles of these workers, so the workers call the mailbox. They register their
location, fetch their StartWorker message, and then exchange reports for requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Condition

from raymega.messages import Report, Requests, StartWorker
from raymega.orchestrate.core.rank_placement import WorkerLocation

DRIVER_CALLS = 8
"""Calls that the actor runs at once beside one of each worker; further calls wait in its queue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteWorker:
    """A registered worker: its location, and the address at which it would host the rendezvous."""

    location: WorkerLocation
    rendezvous: str


class WorkerRendezvous:
    """The mailbox of one attempt; every method may be called from any process."""

    def __init__(self) -> None:
        self._changed = Condition()
        # workers and messages by Train's world rank, requests by raymega's rank
        self._remote_workers: dict[int, RemoteWorker] = {}
        self._starts: dict[int, StartWorker] = {}
        self._requests: dict[int, Requests] = {}
        self._reports: list[Report] = []
        self._is_closed = False

    def is_open(self) -> bool:
        """Return whether the attempt is still under way."""
        return not self._is_closed

    def come(self, index: int, remote_worker: RemoteWorker) -> None:
        """Register a worker; ``index`` is its world rank in Ray Train."""
        with self._changed:
            self._remote_workers[index] = remote_worker
            self._changed.notify_all()

    def remote_workers(self) -> dict[int, RemoteWorker]:
        """Return all registered workers, by their world rank in Ray Train."""
        with self._changed:
            return dict(self._remote_workers)

    def send(self, starts: Mapping[int, StartWorker]) -> None:
        """Deliver the start messages of all workers, by their world rank in Ray Train."""
        with self._changed:
            self._starts = dict(starts)
            self._requests = {start.rank: Requests() for start in starts.values()}
            self._changed.notify_all()

    def start_of(self, index: int, timeout_s: float) -> StartWorker | None:
        """Return a worker's start message, or None if none came in ``timeout_s`` or the attempt is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._starts or self._is_closed, timeout_s)
            return None if self._is_closed else self._starts.get(index)

    def exchange(self, rank: int, reports: list[Report]) -> Requests | None:
        """Take a worker's reports and return the driver's requests; None when the attempt is over."""
        with self._changed:
            if self._is_closed:
                return None
            if reports:
                self._reports += reports
                self._changed.notify_all()
            # a save is requested once, a stop until the end
            requests = self._requests[rank]
            self._requests[rank] = replace(requests, save=False)
            return requests

    def wish(self, requests: Requests) -> None:
        """Set what every worker is to do at its next step boundary."""
        with self._changed:
            self._requests = dict.fromkeys(self._requests, requests)

    def take_reports(self, timeout_s: float) -> list[Report]:
        """Return reports in order of arrival, when the first arrives; none after ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._reports or self._is_closed, timeout_s)
            taken, self._reports = self._reports, []
            return taken

    def close(self) -> None:
        """End the attempt: pending and later calls of workers return None, on which they abort."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

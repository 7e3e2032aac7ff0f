"""A mailbox between a driver and workers that another host has started: one small actor of the driver's.

Workers come to it, for their driver has no handle on them: they say where they live, get their
message, and then exchange reports for requests. It knows nothing of who hosts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Condition

from raymega.messages import Report, Requests, StartWorker
from raymega.orchestrate.core.rank_placement import WorkerLocation

MAX_CONCURRENCY = 64
"""Workers that may be in a call at once, beside the driver's; others wait for a moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteWorker:
    """A worker that has come: its place, and where it would host the rendezvous."""

    location: WorkerLocation
    rendezvous: str


class WorkerRendezvous:
    """All of one attempt; every method may be called from any process."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._remote_workers: dict[int, RemoteWorker] = {}
        self._starts: dict[int, StartWorker] = {}
        self._requests: dict[int, Requests] = {}
        self._reports: list[Report] = []
        self._is_closed = False

    def is_open(self) -> bool:
        """The attempt is not over."""
        return not self._is_closed

    def come(self, index: int, remote_worker: RemoteWorker) -> None:
        """A worker is here; ``index`` is its host's number for it."""
        with self._changed:
            self._remote_workers[index] = remote_worker
            self._changed.notify_all()

    def remote_workers(self) -> dict[int, RemoteWorker]:
        """All that have come."""
        with self._changed:
            return dict(self._remote_workers)

    def send(self, starts: Mapping[int, StartWorker]) -> None:
        """The messages of all workers, by their host's numbers."""
        with self._changed:
            self._starts = dict(starts)
            self._requests = {start.rank: Requests() for start in starts.values()}
            self._changed.notify_all()

    def start_of(self, index: int, timeout_s: float) -> StartWorker | None:
        """A worker's message, or None when there is none yet, or none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._starts or self._is_closed, timeout_s)
            return None if self._is_closed else self._starts.get(index)

    def exchange(self, rank: int, reports: list[Report]) -> Requests | None:
        """Take a worker's reports, give the driver's wishes; None when the attempt is over."""
        with self._changed:
            if self._is_closed:
                return None
            if reports:
                self._reports += reports
                self._changed.notify_all()
            requests = self._requests[rank]
            self._requests[rank] = replace(requests, save=False)
            return requests

    def wish(self, requests: Requests) -> None:
        """What every worker shall do at its next step boundary."""
        with self._changed:
            self._requests = dict.fromkeys(self._requests, requests)

    def take_reports(self, timeout_s: float) -> list[Report]:
        """Reports in order of arrival, as soon as there are any; for the driver."""
        with self._changed:
            self._changed.wait_for(lambda: self._reports or self._is_closed, timeout_s)
            taken, self._reports = self._reports, []
            return taken

    def close(self) -> None:
        """The attempt is over: workers let go."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

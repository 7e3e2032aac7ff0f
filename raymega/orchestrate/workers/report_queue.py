"""A worker's end of the channel: reports wait here until the driver fetches them.

It is a queue between threads of one process; the actor's long poll carries it to the driver.
"""

from __future__ import annotations

from dataclasses import replace
from threading import Condition

from raymega.messages import Progress, Report, Requests, Working


class ReportQueue:
    """The Channel of one attempt.

    Progress and Working are heart beats: only the newest is kept, and it wakes nobody, so that a step
    costs the driver one message and not one a rank. Working, which says less, never replaces Progress.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._reports: list[Report] = []
        self._beat: Progress | Working | None = None
        self._requests = Requests()
        self._is_closed = False

    def report(self, report: Report) -> None:
        """See Channel. After :meth:`close` the report is dropped: its attempt is over."""
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

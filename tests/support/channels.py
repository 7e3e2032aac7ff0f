"""A channel of a worker to its driver that keeps what is reported, and asks for nothing."""

from raymega.messages import Requests


class KeptReports:
    """Keeps reports in order; the driver's side never asks for anything."""

    def __init__(self):
        self.reports = []

    def report(self, report):
        self.reports.append(report)

    def requests(self):
        return Requests()

"""Signs of life: not more than one in a while, and none from whoever is silent."""

from raymega.messages import Working
from raymega.train.entry import INTERVAL_S, ProgressReporter
from tests.support.fakes import FakeClock


class _Channel:
    def __init__(self):
        self.reports = []

    def report(self, report):
        self.reports.append(report)


def test_portions_are_told_at_most_once_in_an_interval():
    clock, channel = FakeClock(), _Channel()
    progress = ProgressReporter(channel, 3, clock=clock.monotonic)
    for _ in range(10):
        progress()
    assert channel.reports == []
    for _ in range(40):
        clock.advance(INTERVAL_S / 4)
        progress()
    assert channel.reports == [Working(rank=3)] * 10

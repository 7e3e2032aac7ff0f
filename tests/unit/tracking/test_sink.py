import logging

from raymega.tracking.sink import CompositeSink
from tests.unit.tracking.events import step_finished


class ListSink:
    def __init__(self):
        self.events = []
        self.timeouts = []

    def emit(self, event):
        self.events.append(event)

    def close(self, timeout_s):
        self.timeouts.append(timeout_s)


class BrokenSink(ListSink):
    def emit(self, event):
        super().emit(event)
        raise OSError("disk is full")

    def close(self, timeout_s):
        super().close(timeout_s)
        raise OSError("disk is full")


def test_composite_lets_a_failing_sink_go_with_one_line(caplog):
    broken, good = BrokenSink(), ListSink()
    sink = CompositeSink([broken, good])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            sink.emit(step_finished(step))
    assert len(broken.events) == 1
    assert [event.step for event in good.events] == [1, 2, 3]
    assert len(caplog.records) == 1
    assert "disk is full" in caplog.text


def test_composite_closes_the_others_when_one_fails_to_close(caplog):
    good = ListSink()
    with caplog.at_level(logging.WARNING):
        CompositeSink([BrokenSink(), good]).close(1.0)
    assert len(good.timeouts) == 1
    assert "BrokenSink" in caplog.text


def test_composite_shares_one_deadline_among_its_sinks():
    times = iter((100.0, 100.0, 104.0, 120.0))
    sinks = [ListSink(), ListSink(), ListSink()]
    CompositeSink(sinks, clock=lambda: next(times)).close(10.0)
    assert [sink.timeouts for sink in sinks] == [[10.0], [6.0], [0.0]]

"""What TrainTabSink does where Ray Train's list cannot be had; that it can is tests/ray's."""

import logging

from raymega.orchestrate.ray_train import dashboard_tab
from raymega.orchestrate.ray_train.dashboard_tab import TrainTabSink
from tests.unit.tracking.events import whole_run


def test_unknown_ray_is_left_alone_with_one_line(caplog):
    with caplog.at_level(logging.WARNING):
        sink = TrainTabSink(clock=lambda: 0.0, version="3.1.0")
        for event in whole_run():
            sink.emit(event)
        sink.close(1.0)
    assert caplog.text.count("unknown in Ray 3.1.0") == 1
    assert sink._events.qsize() <= 1


def test_ray_that_refuses_ends_the_thread_with_one_line(caplog, monkeypatch):
    def refuse(_clock):
        raise ConnectionError("no state actor")

    monkeypatch.setattr(dashboard_tab, "_Tab", refuse)
    with caplog.at_level(logging.WARNING):
        sink = TrainTabSink(clock=lambda: 0.0)
        for event in whole_run():
            sink.emit(event)
        sink.close(5.0)
        assert not sink._thread.is_alive()
    assert caplog.text.count("no state actor") == 1


def test_only_turns_of_the_run_are_shown(monkeypatch):
    shown = []

    class Tab:
        def __init__(self, clock):
            pass

        def show(self, event):
            shown.append(type(event).__name__)

    monkeypatch.setattr(dashboard_tab, "_Tab", Tab)
    sink = TrainTabSink(clock=lambda: 0.0)
    for event in whole_run():
        sink.emit(event)
    sink.close(5.0)
    assert shown == [
        "RunStarted",
        "AttemptStarted",
        "WorkersStarted",
        "FailureSeen",
        "AttemptStarted",
        "RunFinished",
    ]

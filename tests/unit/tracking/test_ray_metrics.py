"""What RayMetricsSink publishes, seen by instruments that write it down; and Ray's without a Ray."""

import logging
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest

from raymega.events import SaveFailed
from raymega.tracking import ray_metrics
from raymega.tracking.names import METRICS, find_metric
from raymega.tracking.ray_metrics import RankMetrics, RayInstruments, RayMetricsSink
from tests.unit.tracking.events import (
    MEMORY,
    TIMELINE,
    attempt_started,
    checkpoint,
    run_started,
    step_finished,
    whole_run,
)

LONG_S = 100_000.0
GUARD_S = 100.0


class Notebook:
    """Remembers the last value of each series, in the order in which they were first shown."""

    def __init__(self):
        self.series = {}

    def publish(self, metric, value, tags):
        self.series[metric.name, tuple(sorted(tags.items()))] = value

    def value(self, name, **tags):
        found = {
            key: value
            for key, value in self.series.items()
            if key[0] == name and set(tags.items()) <= set(key[1])
        }
        assert len(found) == 1, found
        return next(iter(found.values()))


@pytest.fixture
def notebook():
    return Notebook()


@pytest.fixture
def sink(notebook):
    """Publishes when it is closed, and not before."""
    return RayMetricsSink(clock=lambda: 1000.0, instruments=notebook, refresh_s=LONG_S)


def test_whole_run_shows_every_metric_that_something_measures(sink, notebook):
    for event in whole_run():
        sink.emit(event)
        sink._publish()
    sink.close(GUARD_S)
    publish_ranks(notebook)
    rows = {metric.name: metric for metric in METRICS}
    assert rows.keys() - {name for name, _ in notebook.series} == set()
    for name, tags in notebook.series:
        own = [rows[name].part] if rows[name].part else []
        expected = {"run", "rank"} if rows[name].is_per_rank else {"run", "attempt", *own}
        assert dict(tags).keys() == expected, name


def publish_ranks(notebook):
    """What the ranks of TIMELINE and MEMORY publish in their own processes."""
    for event in (TIMELINE, MEMORY):
        for rank, values in event.ranks.items():
            # closed when all is shown: a thread that begins later would show nothing
            shown, is_shown = set(), Event()

            def publish(metric, value, tags, shown=shown, values=values, is_shown=is_shown):
                notebook.publish(metric, value, tags)
                shown.add(metric.name)
                if len(shown) == len(values):
                    is_shown.set()

            instruments = SimpleNamespace(publish=publish)
            metrics = RankMetrics(run="demo", rank=rank, instruments=instruments, refresh_s=LONG_S)
            metrics.update(values)
            assert is_shown.wait(GUARD_S)
            metrics.close()
            metrics._thread.join(GUARD_S)


def test_driver_publishes_as_many_series_however_many_ranks_there_are(sink, notebook):
    """And a rank its own few, which a restart does not multiply."""
    counts = []
    for num_ranks in (2, 4096):
        notebook.series.clear()
        ranks = {rank: dict(MEMORY.ranks[0]) for rank in range(num_ranks)}
        for event in (run_started(), attempt_started(1), replace(MEMORY, ranks=ranks)):
            sink.emit(event)
        sink._publish()
        counts.append(len(notebook.series))
    sink.close(GUARD_S)
    assert counts[0] == counts[1]
    notebook.series.clear()
    for _attempt in (1, 2):
        publish_ranks(notebook)
    of_rank = [tags for _, tags in notebook.series if ("rank", "0") in tags]
    assert len(of_rank) == 6 and {len(tags) for tags in of_rank} == {2}


def test_values_carry_run_attempt_and_rank(sink, notebook):
    for event in whole_run():
        sink.emit(event)
    sink.close(GUARD_S)
    assert notebook.value("train/loss", run="demo", attempt="2") == 10.0 / 4
    assert notebook.value("run/attempt", attempt="2") == 2
    publish_ranks(notebook)
    assert notebook.value("worker/backward_s", rank="0", run="demo") == 2.0
    assert notebook.value("checkpoint/step") == 4
    assert notebook.value("checkpoint/failed_saves") == 1
    assert notebook.value("run/last_step_unix_s") == 1000.0


def test_attempt_begins_without_the_values_of_the_one_before(sink, notebook):
    for event in (run_started(), attempt_started(1), step_finished(3), attempt_started(2, step=2)):
        sink.emit(event)
    sink.close(GUARD_S)
    assert {tags for _, tags in notebook.series} == {(("attempt", "2"), ("run", "demo"))}
    assert "train/loss" not in {name for name, _ in notebook.series}
    assert notebook.value("run/step") == 2


def test_resumed_run_stands_where_its_checkpoint_is(sink, notebook):
    sink.emit(run_started(is_resumed=True, step=3, job={"checkpoint": {"every": 20}}))
    sink.close(GUARD_S)
    assert notebook.value("run/step") == notebook.value("checkpoint/step") == 3
    assert notebook.value("run/total_steps") == 4
    assert notebook.value("checkpoint/every_steps") == 20


def test_failed_saves_are_counted_over_attempts(sink, notebook):
    failed = SaveFailed(attempt=1, step=3, reason="disk is full")
    for event in (run_started(), attempt_started(1), failed, attempt_started(2), failed):
        sink.emit(event)
    sink.close(GUARD_S)
    assert notebook.value("checkpoint/failed_saves") == 2


def test_values_are_shown_again_without_news():
    shown, seen_again = [], Event()

    class Counting(Notebook):
        def publish(self, metric, value, tags):
            shown.append(metric.name)
            if shown.count("checkpoint/bytes") == 3:
                seen_again.set()

    sink = RayMetricsSink(clock=lambda: 0.0, instruments=Counting(), refresh_s=0.001)
    for event in (run_started(), attempt_started(1), checkpoint(2)):
        sink.emit(event)
    assert seen_again.wait(GUARD_S), "a gauge that is not set again fades in Ray"
    sink.close(GUARD_S)


def test_instruments_that_raise_end_the_thread_with_one_line(caplog):
    class Broken:
        def publish(self, metric, value, tags):
            raise ConnectionError("agent is gone")

    sink = RayMetricsSink(clock=lambda: 0.0, instruments=Broken(), refresh_s=0.001)
    with caplog.at_level(logging.WARNING):
        sink.emit(run_started())
        sink._thread.join(GUARD_S)
        sink.emit(step_finished(1))
        sink.close(GUARD_S)
    assert caplog.text.count("agent is gone") == 1


def test_ray_instruments_make_nothing_without_a_ray():
    instruments = RayInstruments()
    instruments.publish(find_metric("train/loss"), 1.0, {"run": "demo", "attempt": "1"})
    assert instruments._gauges == {}


def test_counters_rise_to_the_total_of_their_attempt(monkeypatch):
    increments = []

    class Counter:
        def __init__(self, name, description, tag_keys):
            assert tag_keys == ("run", "attempt")

        def inc(self, value, tags):
            increments.append((tags["attempt"], value))

    monkeypatch.setattr(ray_metrics.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_metrics.ray_metrics, "Counter", Counter)
    instruments, tokens = RayInstruments(), find_metric("train/tokens")
    for attempt, total in (("1", 10.0), ("1", 10.0), ("1", 15.0), ("2", 12.0)):
        instruments.publish(tokens, total, {"run": "demo", "attempt": attempt})
    assert increments == [("1", 10.0), ("1", 5.0), ("2", 12.0)]

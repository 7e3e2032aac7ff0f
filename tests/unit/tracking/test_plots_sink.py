"""Pictures of a run: written at its end, with the ranks' coordinates, and announced."""

import json
import xml.etree.ElementTree as ET

import pytest

from raymega.events import ArtefactWritten, Timeline
from raymega.tracking.jsonl import open_jsonl
from raymega.tracking.plots_sink import PlotsSink
from tests.unit.tracking.events import whole_run


class Watcher:
    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)


@pytest.fixture
def drawn(tmp_path):
    """A folder with the pictures of a run, and what was announced."""
    metrics, watcher = tmp_path / "metrics.jsonl", Watcher()
    lines = open_jsonl(metrics)
    sink = PlotsSink(tmp_path, metrics=metrics, references={"unigrams": 5.0}, watcher=watcher)
    for event in whole_run():
        lines.emit(event)
        sink.emit(event)
    return tmp_path, watcher.events


def test_every_picture_is_written_and_announced(drawn):
    folder, told = drawn
    written = [
        folder / name
        for name in (
            "timeline.svg",
            "trace.json",
            "loss.svg",
            "task_accuracy.svg",
            "task_perplexity.svg",
        )
    ]
    assert [event.path for event in told] == [str(path) for path in written]
    assert all(isinstance(event, ArtefactWritten) for event in told)
    for path in written[::2]:
        ET.parse(path)
    assert json.loads(written[1].read_text())["traceEvents"]
    assert "unigrams 5" in written[2].read_text()


def test_rows_of_the_time_line_are_named_by_coordinates(drawn):
    folder, _ = drawn
    assert any(isinstance(event, Timeline) for event in whole_run())
    picture = (folder / "timeline.svg").read_text()
    assert "0: dp0 tp0 pp0" in picture and "1: dp0 tp1 pp0" in picture
    assert "simulated bubble of the schedule: 0.500" in picture


def test_run_without_steps_has_no_pictures(tmp_path):
    watcher = Watcher()
    sink = PlotsSink(tmp_path, metrics=tmp_path / "metrics.jsonl", references={}, watcher=watcher)
    for event in (whole_run()[0], whole_run()[-1]):
        sink.emit(event)
    assert watcher.events == [] and list(tmp_path.iterdir()) == []

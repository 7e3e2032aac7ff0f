"""Each step once over drivers that die: the story in memory, and mistakes in the recorder that it shows."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from raymega.tracking.jsonl import open_jsonl
from raymega.tracking.sink import Stamped
from raymega.tracking.trackers import series
from tests.unit.tracking.events import attempt_started, run_started, step_finished


class MemoryRows:
    """Rows that outlive a driver; those of ``lost`` never reach it."""

    def __init__(self, written, lost=()):
        self.written, self._lost = written, lost

    def last_steps(self):
        return {name: max(step for step, names in self.written if name in names)
                for _, all_names in self.written for name in all_names}  # fmt: skip

    def open(self, event):
        pass

    def write(self, rows):
        self.written += [(row.step, set(row.metrics)) for row in rows if row.step not in self._lost]

    def close(self, *, has_failed):
        pass


def steps_of(recorder_class, folder):
    """Steps that a tracker has after a failure in the first driver, its death, and a second driver."""
    written, path = [], folder / "metrics.jsonl"
    drivers = (
        # a worker dies after step 4, and step 4 is done again; steps 6 and 7 are lost on their way
        ((run_started(), attempt_started(1), *map(step_finished, (1, 2, 3, 4)),
          attempt_started(2, step=3), *map(step_finished, (4, 5, 6, 7))), (6, 7)),
        # the checkpoint is of step 6
        ((run_started(is_resumed=True, step=6), attempt_started(3, step=6),
          *map(step_finished, (7, 8))), ()),
    )  # fmt: skip
    for events, lost in drivers:
        lines = open_jsonl(path)
        recorder = recorder_class(MemoryRows(written, lost), metrics_file=path)
        for event in events:
            lines.emit(event)
            recorder.record([Stamped(time_s=0.0, event=event)])
        lines.close(0.0)
    return [step for step, names in written if "train/loss" in names]


def test_each_step_is_written_once(tmp_path):
    assert steps_of(series.SeriesRecorder, tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "names",
    [
        ("preference/accuracy", "preference/chosen_reward"),
        ("preference/divergence", "preference/accuracy", "preference/rejected_reward"),
        ("distillation/divergence", "distillation/cross_entropy"),
        ("head/accuracy",),
    ],
)
def test_lost_steps_come_back_under_the_names_that_they_had(tmp_path, names):
    path, written = tmp_path / "metrics.jsonl", []
    metrics = dict.fromkeys((*names, "train/loss"), 1.0)
    lines = open_jsonl(path)
    for event in (run_started(), attempt_started(1), replace(step_finished(1), metrics=metrics)):
        lines.emit(event)
    lines.close(0.0)
    recorder = series.SeriesRecorder(MemoryRows(written), metrics_file=path)
    for event in (run_started(is_resumed=True, step=1), attempt_started(2, step=1)):
        recorder.record([Stamped(time_s=0.0, event=event)])
    assert (1, {*names, "train/loss"}) in written


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("row.step > last_steps.get(n, -1)", "True"),
        ("row.step > last_steps.get(n, -1)", "row.step >= last_steps.get(n, -1)"),
        ("dict(self._store.last_steps())", "{}"),
        ("self._fill_in(event.step, batch[0].time_s)", "pass"),
        ("< at <= step", "< at < step"),
        ("self._last_steps = last_steps\n", "pass\n"),
    ],
)
def test_planted_mistake_is_seen(tmp_path, old, new):
    text = Path(series.__file__).read_text()
    assert text.count(old) == 1
    wrong = ModuleType("wrong_series")
    sys.modules["wrong_series"] = wrong
    try:
        exec(compile(text.replace(old, new), "wrong_series", "exec"), wrong.__dict__)
        assert steps_of(wrong.SeriesRecorder, tmp_path) != [1, 2, 3, 4, 5, 6, 7, 8]
    finally:
        del sys.modules["wrong_series"]

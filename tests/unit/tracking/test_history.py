"""The history that survived: each step once, and each failure with what followed."""

import json

import pytest

from raymega.tracking.history import Series, load_history
from raymega.tracking.jsonl import open_jsonl
from tests.unit.tracking.events import whole_run


@pytest.fixture
def history(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = open_jsonl(path)
    for event in whole_run():
        sink.emit(event)
    sink.close(0.0)
    return load_history(path)


def values(series):
    return dict(zip(series.steps, series.values, strict=True))


def test_each_surviving_step_is_there_once(history):
    assert values(history.steps["loss"]) == {1: 10.0, 2: 5.0, 3: 10.0 / 3, 4: 2.5}
    assert values(history.evaluations["loss"]) == {2: 5.25}
    assert history.restarts == [(2, 3, 2)]
    assert history.step == 4


def test_an_incident_has_its_failure_its_attempt_and_its_recovery(history):
    (incident,) = history.incidents
    assert incident.failures[0]["cause"] == "killed by signal 9"
    assert incident.attempt["attempt"] == 2
    assert incident.recovered["recovery_s"] == 3.0
    assert {sign["event"] for sign in history.signs} == {"bad_step", "straggler", "save_failed"}


def test_memory_is_that_of_the_newest_attempt(history):
    assert history.memory[1]["peak_bytes"] == 96.0
    assert history.end["status"] == "finished"


def test_torn_line_and_steps_of_a_lost_attempt_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [{"event": "step", "step": n, "loss": float(n)} for n in (1, 2, 3)]
    lost = [
        *steps,
        {"event": "evaluation", "step": 3, "loss": 9.0},
        {"event": "step", "step": 4, "loss": None},
    ]
    lines = [json.dumps(line) for line in [*lost, {"event": "attempt", "step": 1}]]
    path.write_text("\n".join(lines) + '\n{"event": "st')
    history = load_history(path)
    assert values(history.steps["loss"]) == {1: 1.0}
    assert values(history.evaluations["loss"]) == {}


def test_next_driver_takes_the_end_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    ended = {"event": "finished", "status": "preempted", "goodput": 1.0, "wall_s": 1.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (ended, {"event": "run"})))
    assert load_history(path).end is None


def test_series_gives_values_by_step():
    series = Series()
    for step in (1, 2, 4):
        series.put(step, step / 2)
    assert (series.at(2), series.at(3)) == (1.0, None)
    series.put(2, 9.0)
    assert values(series) == {1: 0.5, 2: 9.0}

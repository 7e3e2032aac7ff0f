import json

import pytest

from raymega.tracking.jsonl import open_jsonl
from raymega.tracking.loss_plot import LossCurve, draw_curve, load_curve
from tests.unit.tracking.events import whole_run


@pytest.fixture
def metrics_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = open_jsonl(path)
    for event in whole_run():
        sink.emit(event)
    sink.close(0.0)
    return path


def test_curve_holds_each_surviving_step_once(metrics_file):
    curve = load_curve(metrics_file)
    assert curve.train == {1: 10.0, 2: 5.0, 3: 10.0 / 3, 4: 2.5}
    assert curve.evaluation == {2: 5.25}
    assert curve.restarts == [(3, 2)]


def test_curve_forgets_steps_of_a_lost_attempt(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [{"event": "step", "step": n, "loss": float(n)} for n in (1, 2, 3)]
    lost = [*steps, {"event": "evaluation", "step": 3, "loss": 9.0}]
    lines = [json.dumps(line) for line in [*lost, {"event": "attempt", "step": 1}]]
    path.write_text("\n".join(lines) + '\n{"event": "st')
    curve = load_curve(path)
    assert curve.train == {1: 1.0}
    assert curve.evaluation == {}


@pytest.mark.parametrize(("suffix", "head"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_picture_is_written(tmp_path, metrics_file, suffix, head):
    path = tmp_path / f"loss{suffix}"
    references = {"unigram entropy": 5.61}
    draw_curve(load_curve(metrics_file), path, title="demo", references=references)
    assert path.read_bytes().startswith(head)


def test_picture_of_an_empty_run_is_drawn_without_complaint(tmp_path, recwarn):
    draw_curve(LossCurve(), tmp_path / "loss.png", title="demo", references={})
    assert not recwarn.list

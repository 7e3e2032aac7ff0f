"""Curves of evaluation tasks, from metrics.jsonl."""

from dataclasses import replace

from raymega.tracking.jsonl import open_jsonl
from raymega.tracking.tasks_plot import draw_task_curves, is_share, load_task_curves
from tests.unit.tracking.events import TASKS, whole_run


def _curves(folder, *more):
    sink = open_jsonl(folder / "metrics.jsonl")
    for event in (*whole_run(), *more):
        sink.emit(event)
    sink.close(0.0)
    return load_task_curves(folder / "metrics.jsonl")


def test_a_curve_a_metric_and_the_last_value_of_a_step(tmp_path):
    again = replace(
        TASKS, metrics={"eval/task/race/accuracy": 0.75, "eval/task/race/acc_stderr": 0.1}
    )
    later = replace(TASKS, step=4)
    curves = _curves(tmp_path, again, later)
    assert curves["race/accuracy"] == {2: 0.75, 4: 0.5}
    assert curves["lambada/target_perplexity"] == {2: 88.5, 4: 88.5}
    assert set(curves) == {"race/accuracy", "lambada/accuracy", "lambada/target_perplexity"}
    assert is_share("lambada/accuracy_loose") and not is_share("accuracy/loss")


def test_the_picture_has_a_part_for_shares_and_one_for_the_rest(tmp_path, monkeypatch):
    curves = _curves(tmp_path)
    draw_task_curves(curves, tmp_path / "tasks.svg", title="run demo")
    assert (tmp_path / "tasks.svg").read_text().count('id="axes_') == 2
    draw_task_curves({"race/acc": {1: 0.5}}, tmp_path / "one.svg", title="run demo")
    assert (tmp_path / "one.svg").read_text().count('id="axes_') == 1

"""Charts of a run: what it measured has a chart, what it did not has none."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from raymega.events import ExpertLoads
from raymega.tracking.history import load_history
from raymega.tracking.jsonl import open_jsonl
from raymega.tracking.run_charts import (
    ACCURACY,
    EXPERTS,
    LEARNING,
    MOST_EXPERTS,
    PERPLEXITY,
    SPEED,
    charts_of,
    evaluation_charts,
    expert_map,
    is_share,
    loss_chart,
    task_charts,
)
from tests.unit.tracking.events import TASKS, whole_run


def history_of(path, *more):
    sink = open_jsonl(path / "metrics.jsonl")
    for event in (*whole_run(), *more):
        sink.emit(event)
    sink.close(0.0)
    return load_history(path / "metrics.jsonl")


@pytest.fixture
def history(tmp_path):
    return history_of(tmp_path)


def test_loss_curve_has_attempts_tokens_levels_and_learning_rate(history):
    picture = loss_chart(history, title="demo", levels={"unigram entropy": 5.61}, alone=True)
    ET.fromstring(picture)
    for said in ("attempt 2", "tokens", "learning rate", "unigram entropy 5.61", "validation"):
        assert said in picture


def test_metrics_that_the_run_lacks_or_that_stay_constant_have_no_chart(history):
    titles = "".join(charts_of(history, LEARNING))
    assert "Loss scale" not in titles and "Gradient norm" not in titles, "both are constant"
    assert "Tokens/s" in "".join(charts_of(history, SPEED)), "a constant speed is news"
    del history.steps["mfu"]
    assert "MFU" not in "".join(charts_of(history, SPEED))


def test_every_evaluation_metric_has_a_chart(tmp_path):
    history = history_of(tmp_path)
    history.evaluations["further/metric"] = history.evaluations["loss"]
    accuracy, perplexity, *of_heads, further = evaluation_charts(history)
    assert "Accuracy by task" in accuracy and "race/accuracy" in accuracy
    titles = ("Accuracy", "Set accuracy", "Ema accuracy", "Set ema accuracy", "Set ema loss")
    assert len(of_heads) == len(titles)
    assert all(any(title in chart for chart in of_heads) for title in titles)
    assert "Perplexity and loss by task" in perplexity and "lambada" in perplexity
    assert "Further" in further


def test_of_a_step_that_was_evaluated_again_the_last_value_counts(tmp_path):
    again = replace(
        TASKS, metrics={"eval/task/race/accuracy": 0.75, "eval/task/race/acc_stderr": 0.1}
    )
    charts = dict(task_charts(history_of(tmp_path, again, replace(TASKS, step=4))))
    found = {
        curve.label: dict(zip(curve.xs, curve.ys, strict=True)) for curve in charts[ACCURACY].curves
    }
    assert found == {"race/accuracy": {2: 0.75, 4: 0.5}, "lambada/accuracy": {2: 0.25, 4: 0.25}}
    assert [curve.label for curve in charts[PERPLEXITY].curves] == ["lambada/target_perplexity"]
    assert is_share("lambada/accuracy_loose") and not is_share("accuracy/loss")


def test_many_layers_are_three_curves(history):
    series = history.steps.pop("max_load/1")
    history.steps |= {f"max_load/{layer}": series for layer in range(60)}
    series.values[0] = 7.0
    (chart,) = charts_of(history, EXPERTS[:1])
    assert "largest of 60" in chart and "least of 60" in chart


@pytest.mark.parametrize("num_experts", [4, MOST_EXPERTS])
def test_map_of_experts_has_a_row_an_expert_or_of_very_many_a_row_a_layer(tmp_path, num_experts):
    tokens = {layer: [float(n) for n in range(num_experts)] for layer in (0, 1)}
    loads = [ExpertLoads(attempt=2, step=step, tokens=tokens) for step in (3, 4)]
    picture = expert_map(history_of(tmp_path, *loads))
    ET.fromstring(picture)
    assert ("busiest of each layer" in picture) == (num_experts == MOST_EXPERTS)


def test_run_without_experts_has_no_map(history):
    assert expert_map(history) == ""

"""Experts in words, numbers and colours: metrics, the warning of a collapse, the heat map."""

import io
import json

import pytest
import torch

from raymega.events import ExpertLoads, RoutingCollapsed
from raymega.model.moe.load_balancing import Load
from raymega.tracking.console import ConsoleSink
from raymega.tracking.expert_load import (
    collapse_warning,
    is_collapsed,
    load_metrics,
    starved_experts,
)
from raymega.tracking.history import load_history
from raymega.tracking.jsonl import JsonLinesSink
from raymega.tracking.names import check_names
from raymega.tracking.run_charts import expert_map
from raymega.train.train_statistics import expert_loads, expert_metrics

EVEN, PILED = (100.0,) * 4, (390.0, 5.0, 5.0, 0.0)


def _seen(step, **layers):
    return ExpertLoads(attempt=1, step=step, tokens={int(n[1:]): v for n, v in layers.items()})


def test_metrics_of_a_layer():
    metrics = load_metrics(3, (30.0, 10.0, 20.0, 0.0))
    assert metrics == {"moe/max_load/3": 2.0, "moe/min_load/3": 0.0, "moe/starved_share/3": 0.25}
    load = Load(
        counts=torch.tensor([30.0, 10.0]), tokens=20, kept=30, entropy=10.0, balance=4.0, z=2.0
    )
    metrics = expert_metrics({1: load, 2: Load(
        counts=torch.zeros(2), tokens=0, kept=0, entropy=0, balance=0, z=0)})  # fmt: skip
    check_names(metrics)
    assert metrics["moe/drop_rate/1"] == pytest.approx(0.25)
    assert (metrics["moe/router_entropy/1"], metrics["moe/router_loss/1"]) == (0.5, 0.3)
    assert not any(name.endswith("/2") for name in metrics)
    assert expert_loads({1: load}, step=7).tokens == {1: (30.0, 10.0)}


def test_a_collapse_names_layer_and_experts_and_few_tokens_are_none():
    assert not is_collapsed(EVEN) and not is_collapsed((8.0, 0.0, 1.0, 0.0))
    line = collapse_warning(5, starved_experts(PILED), 40)
    assert line.startswith("Routing collapse in layer 5 at step 40: experts 1, 2, 3 get less than")
    line = collapse_warning(0, starved_experts((1000.0, *[0.0] * 31)), 1)
    assert "experts 1, 2, 3, 4, 5, 6, 7, 8 and 23 more get" in line
    assert "at step 9: expert 2 gets less than 10% of the mean load." in collapse_warning(
        3, (2,), 9
    )


def test_every_sink_can_say_which_layer_and_experts():
    event = RoutingCollapsed(attempt=1, step=4, layer=5, experts=(1, 2))
    console, lines = io.StringIO(), io.StringIO()
    ConsoleSink(console, every=1).emit(event)
    JsonLinesSink(lines).emit(event)
    assert "layer 5 at step 4: experts 1, 2 get less" in console.getvalue()
    record = json.loads(lines.getvalue())
    assert (record["event"], record["layer"], record["experts"]) == ("routing_collapsed", 5, [1, 2])


def test_heat_map_is_drawn_from_the_record_and_shows_the_history_that_survived(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as stream:
        sink = JsonLinesSink(stream)
        for step in (1, 2, 3):
            sink.emit(_seen(step, L0=EVEN, L2=PILED))
        stream.write(json.dumps({"event": "attempt", "step": 2}) + "\n")
        sink.emit(_seen(3, L0=PILED, L2=EVEN))
    history = load_history(path)
    loads = history.experts
    assert sorted(loads) == [1, 2, 3]
    assert tuple(loads[3][0]) == PILED and tuple(loads[2][2]) == PILED
    assert "Load of experts" in expert_map(history)

"""The dashboard is what the generator writes, every query is PromQL, every metric is declared."""

import dataclasses
import json
import re
from pathlib import Path

import promql_parser
import pytest
import ray

from dashboards import generate
from raymega.tracking.names import METRICS
from tests.support.servers.prometheus import (
    DASHBOARD,
    dashboard_panels,
    dashboard_queries,
    metric_names,
)

QUERIES = list(dashboard_queries())
RAYS_OWN = re.compile("ray_node_").match


def test_file_is_what_the_generator_writes():
    assert DASHBOARD.read_text() == generate.text(), "run `python -m dashboards.generate`"


@pytest.mark.parametrize(("title", "expr"), QUERIES, ids=[f"{title}: {e}" for title, e in QUERIES])
def test_query_parses(title, expr):
    assert promql_parser.parse(expr) is not None


def test_broken_query_does_not_parse():
    with pytest.raises(ValueError, match="unclosed"):
        promql_parser.parse("max by (run (ray_raymega_train_loss)")


def test_queries_choose_runs_but_for_what_belongs_to_machines():
    for title, expr in dashboard_queries(run="chosen"):
        names = metric_names(expr)
        assert all(map(RAYS_OWN, names)) or expr.count('run=~"chosen"}') == len(names), title


def test_every_metric_of_the_models_parts_has_a_panel_with_a_line_a_part():
    parts = [metric for metric in METRICS if metric.part]
    assert len(parts) >= 8
    for metric in parts:
        found = [expr for _, expr in QUERIES if generate.series(metric) in metric_names(expr)]
        assert found and all(f"by (run, {metric.part})" in expr for expr in found)


def test_names_of_ray_are_those_of_the_installed_ray():
    """Ray's agent declares them in a module that starts nothing when it is read as text."""
    agent = Path(ray.__file__).parent / "dashboard" / "modules" / "reporter" / "reporter_agent.py"
    declared = set(re.findall(r'"(node_\w+)": Gauge', agent.read_text()))
    shown = {name for _, expr in QUERIES for name in metric_names(expr) if RAYS_OWN(name)}
    assert shown and {name.removeprefix("ray_") for name in shown} <= declared


def test_undeclared_metric_makes_no_panel():
    with pytest.raises(KeyError, match="train/lost"):
        generate.curve("Lost", "train/lost")


def test_panels_have_their_own_place_and_number():
    assert len({panel["id"] for panel in dashboard_panels()}) == len([*dashboard_panels()])
    panels = json.loads(DASHBOARD.read_text())["panels"]
    groups = [panels, *(panel["panels"] for panel in panels if panel.get("panels"))]
    for group in groups:
        taken = [cell for panel in group for cell in _cells(panel["gridPos"])]
        assert len(set(taken)) == len(taken)
        assert max(x for x, _ in taken) < generate.GRID_WIDTH


def test_what_is_looked_at_first_is_open_and_the_rest_is_folded():
    """A screen of 1080 pixels shows some 28 grid units; folded rows ask for nothing."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = [panel for panel in panels if panel["type"] == "row"]
    assert [row["title"] for row in rows if not row["collapsed"]] == ["Now", "Learning"]
    assert all(row["panels"] for row in rows if row["collapsed"])
    assert max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) <= 28


def test_time_left_and_machines_are_shown():
    titles = {panel["title"] for panel in dashboard_panels()}
    assert {"Time left", "GPU in use", "GPU memory in use", "Sent", "Received"} <= titles


def test_row_wider_than_the_screen_is_broken_into_lines():
    panel = generate.number("Step", "run/step")
    wide = generate.Row(title="r", panels=(dataclasses.replace(panel, width=16),) * 2)
    (heading,) = generate.make_dashboard([wide])["panels"]
    first, second = heading["panels"]
    assert (first["gridPos"]["x"], second["gridPos"]["x"]) == (0, 0)
    assert second["gridPos"]["y"] == first["gridPos"]["y"] + first["gridPos"]["h"]


def _cells(place):
    rows = range(place["y"], place["y"] + place["h"])
    return [(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in rows]

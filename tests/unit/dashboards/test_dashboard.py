"""The dashboard is what the generator writes, every query is PromQL, every metric is declared."""

import dataclasses
import json

import promql_parser
import pytest

from dashboards import generate
from raymega.tracking.names import METRICS
from tests.support.servers.prometheus import DASHBOARD, dashboard_queries, metric_names

QUERIES = list(dashboard_queries())
RAYS_OWN = {"ray_node_mem_used", "ray_node_cpu_utilization"}


def test_file_is_what_the_generator_writes():
    assert DASHBOARD.read_text() == generate.text(), "run `python dashboards/generate.py`"


@pytest.mark.parametrize(("title", "expr"), QUERIES, ids=[f"{title}: {e}" for title, e in QUERIES])
def test_query_parses(title, expr):
    assert promql_parser.parse(expr) is not None


def test_broken_query_does_not_parse():
    with pytest.raises(ValueError, match="unclosed"):
        promql_parser.parse("max by (run (ray_raymega_train_loss)")


def test_queries_choose_runs_but_for_what_belongs_to_machines():
    for title, expr in dashboard_queries(run="chosen"):
        names = metric_names(expr)
        assert names <= RAYS_OWN or expr.count('run=~"chosen"}') == len(names), title


def test_every_metric_of_the_models_parts_has_a_panel_with_a_line_a_part():
    parts = [metric for metric in METRICS if metric.part]
    assert len(parts) >= 8
    for metric in parts:
        found = [expr for _, expr in QUERIES if generate.series(metric) in metric_names(expr)]
        assert found and all(f"by (run, {metric.part})" in expr for expr in found)


def test_undeclared_metric_makes_no_panel():
    with pytest.raises(KeyError, match="train/lost"):
        generate.curve("Lost", "train/lost")


def test_panels_have_their_own_place_and_number():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [cell for panel in panels for cell in _cells(panel["gridPos"])]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < generate.GRID_WIDTH


def test_row_wider_than_the_screen_is_broken_into_lines():
    panel = generate.number("Step", "run/step")
    wide = generate.Row(title="r", panels=(dataclasses.replace(panel, width=16),) * 2)
    _, first, second = generate.make_dashboard([wide])["panels"]
    assert (first["gridPos"]["x"], second["gridPos"]["x"]) == (0, 0)
    assert second["gridPos"]["y"] == first["gridPos"]["y"] + first["gridPos"]["h"]


def _cells(place):
    rows = range(place["y"], place["y"] + place["h"])
    return [(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in rows]

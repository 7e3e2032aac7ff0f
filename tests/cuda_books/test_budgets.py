"""The budgets without a CUDA build of torch: each layout has one and can be planned, each plant has a layout."""

import json

import pytest

from raymega.config.load import parse_mapping
from raymega.plan.run_plan import make_plan
from tests.cuda_books.__main__ import BUDGETED, BUDGETS, over_budget
from tests.cuda_books.layouts import LAYOUTS, job_of
from tests.cuda_books.plants import PLANTS

budgets = json.loads(BUDGETS.read_text())


def test_each_layout_has_a_budget_and_none_allocates_after_its_first_step():
    assert set(budgets) == set(LAYOUTS)
    assert {budget["mallocs"] for budget in budgets.values()} == {0}


def test_no_step_pins_memory_and_the_plan_knows_each_byte_of_state():
    for name, budget in budgets.items():
        assert (budget["pinned_in_step_bytes"], budget["state_error_bytes"]) == (0, 0), name
    assert budgets["deterministic"]["atomic_sums"] == 0 < budgets["one rank"]["atomic_sums"]


def test_offloaded_state_is_made_portion_by_portion():
    budget, portion = budgets["offload optimizer"], 2**24 * 12
    assert budget["build_peak_bytes"] <= budget["state_bytes"] + portion


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_legal(name):
    job = parse_mapping(job_of(name)).job()
    assert make_plan(job).grid.world_size == job.cluster.num_workers


def test_each_plant_is_in_a_layout_and_shows_in_what_is_looked_at():
    for plant in PLANTS.values():
        assert plant.layout in LAYOUTS and plant.shows_in in (*BUDGETED, "races")


def test_one_more_launch_and_one_race_are_told():
    budget = budgets["one rank"]
    book = {
        **budget,
        "races": [],
        "planned_peak_bytes": budget["peak_bytes"],
        "planned_pinned_bytes": budget.get("pinned_bytes", 0),
    }
    assert over_budget(book, budget) == []
    assert (
        len(over_budget({**book, "launches_per_layer": book["launches_per_layer"] + 1}, budget))
        == 1
    )
    missed = {**book, "planned_peak_bytes": round(0.97 * book["peak_bytes"])}
    assert "more than 2% off" in over_budget(missed, budget)[0]
    assert "1 races" in over_budget({**book, "races": ["mul and send"]}, budget)[0]

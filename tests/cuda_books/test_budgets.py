"""The budgets without a CUDA build of torch: each layout has one and can be planned, each plant has a layout."""

import json

import pytest

from raymega.config.load import parse_mapping
from raymega.plan.run_plan import make_plan
from raymega.schedule.table import SCHEDULES
from tests.cuda_books import budgets as budgets_module
from tests.cuda_books.__main__ import Passed, is_red
from tests.cuda_books.budgets import figures_of, over_budget, read_budgets, write_budgets
from tests.cuda_books.layouts import LAYOUTS, OFF_PLAN, RANKS, WITHOUT_SAVE, job_of
from tests.cuda_books.plants import PLANTS, Plant

budgets = read_budgets()


def book_of(layout):
    figures = dict(budgets[layout])
    launches = figures.pop("launches_per_layer")
    figures.pop("pinned_error_bytes", 0)
    return {
        "layout": layout,
        "launches_per_layer": launches,
        "figures": figures,
        "planned_peak_bytes": figures["peak_bytes"],
        "planned_pinned_bytes": figures["pinned_bytes"],
        "races": [],
    }


def test_each_layout_has_a_budget_and_no_step_allocates_or_pins():
    assert list(budgets) == list(LAYOUTS)
    nothing = (
        "step.mallocs",
        "step.pinned_bytes",
        "recorded.pinned_bytes",
        "communicators_opened_late",
        "communicators_left",
        "communicators_unused",
    )
    assert {budget[name] for budget in budgets.values() for name in nothing} == {0}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_waits_once_and_only_experts_wait_in_its_passes(name):
    budget, model = budgets[name], job_of(name)["model"]
    if "moe" not in model:
        assert (budget["step.syncs_in_passes"], budget["step.syncs"] <= 3) == (0, True)
    assert budget["step.syncs"] - budget["step.syncs_in_passes"] <= 3


def test_the_plan_knows_each_byte_of_state_except_where_it_is_written_down():
    missed = {name for name, budget in budgets.items() if budget["state_error_bytes"]}
    assert missed == {name for name, kinds in OFF_PLAN.items() if "state" in kinds}
    missed = {name for name, budget in budgets.items() if "pinned_error_bytes" in budget}
    assert missed == {name for name, kinds in OFF_PLAN.items() if "pinned" in kinds}
    assert set(OFF_PLAN) <= set(LAYOUTS)


def test_no_layout_may_miss_the_planned_peak():
    assert set().union(*OFF_PLAN.values()) <= {"state", "pinned"}


def test_deterministic_steps_have_no_atomic_sum():
    sums = {name: budget["atomic_sums"] for name, budget in budgets.items()}
    assert sums["ep4 deterministic"] == sums["dp64 deterministic"] == 0 < sums["one rank"]


def test_offloaded_state_is_made_portion_by_portion():
    budget, portion = budgets["offload optimizer"], 2**24 * 12
    assert budget["build_peak_bytes"] <= budget["state_bytes"] + portion


def test_each_schedule_has_a_layout():
    assert {job_of(name).get("schedule", {}).get("name") for name in LAYOUTS} >= set(SCHEDULES)
    assert {*RANKS, *WITHOUT_SAVE} <= set(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_legal(name):
    for num_layers in (None, 2 * job_of(name)["model"]["num_layers"]):
        job = parse_mapping(job_of(name, num_layers=num_layers)).job()
        assert make_plan(job).grid.world_size == job.cluster.num_workers


def test_each_plant_is_in_a_layout_and_shows_in_what_is_looked_at():
    for plant in PLANTS.values():
        assert plant.shows_in in (*budgets[plant.layout], "races")


def test_one_more_launch_one_new_figure_and_one_race_are_told():
    book, budget = book_of("one rank"), budgets["one rank"]
    assert over_budget(book, budget) == []
    # figures: one that grew, one that is new
    more = {**book, "launches_per_layer": book["launches_per_layer"] + 1}
    assert len(over_budget(more, budget)) == 1
    figures = {**book["figures"], "step.all_reduce_calls": 1}
    assert over_budget({**book, "figures": figures}, budget) == [
        "step.all_reduce_calls 1, budget none"
    ]
    # the plan, races, a rank that failed
    missed = {**book, "planned_peak_bytes": round(0.97 * budget["peak_bytes"])}
    assert over_budget(missed, budget) == [
        f"planned peak {missed['planned_peak_bytes'] - budget['peak_bytes']:+} bytes off, not in OFF_PLAN"
    ]
    assert "planned pinned" in over_budget({**book, "planned_pinned_bytes": 0}, budget)[0]
    assert "1 races" in over_budget({**book, "races": ["mul and send"]}, budget)[0]
    assert over_budget({"error": "it fell"}, budget) == ["it failed: it fell"]


def test_budgets_are_written_a_figure_a_line_and_those_of_others_stay(tmp_path, monkeypatch):
    file = tmp_path / "budgets.json"
    monkeypatch.setattr(budgets_module, "BUDGETS", file)
    file.write_text(json.dumps({"gone": {}, "tp8 sp": {"step.syncs": 7}, "packed": {"a": 1}}))
    book = book_of("one rank")
    write_budgets([book, {"layout": "packed", "error": "it fell"}])
    assert list(read_budgets()) == ["one rank", "packed", "tp8 sp"]
    assert read_budgets()["one rank"] == figures_of(book)
    assert read_budgets()["packed"] == {"a": 1}
    assert len(file.read_text().splitlines()) == 2 + 3 * 2 + len(figures_of(book)) + 2


def test_a_plant_is_red_only_where_its_figure_grows_or_a_race_is_seen():
    in_figure = Plant("one rank", "step.syncs", lambda: None)
    book = book_of("one rank")
    more = {**book, "figures": {**book["figures"], "step.syncs": book["figures"]["step.syncs"] + 1}}
    assert not is_red(in_figure, book, budgets) and is_red(in_figure, more, budgets)
    in_races = Plant("one rank", "races", lambda: None)
    assert not is_red(in_races, more, budgets) and is_red(
        in_races, {**book, "races": [""]}, budgets
    )
    assert not is_red(in_races, {"error": "it fell", "races": []}, budgets)


def test_what_has_passed_is_known_to_the_next_session(tmp_path):
    file = tmp_path / "new" / "passed"
    passed = Passed(file)
    assert "one rank" not in passed
    passed.add(["one rank"])
    assert "one rank" in Passed(file) and "packed" not in Passed(file)
    assert "one rank" not in Passed(None)

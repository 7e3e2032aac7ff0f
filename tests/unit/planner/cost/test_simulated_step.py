"""Closed forms of a step against its schedule, played: what ranks layouts against what would happen."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from raymega.api import load_job
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.planner.cost.simulated_step import play, played_step
from raymega.planner.cost.step_time import step_time
from raymega.planner.search.candidates import ORDERS
from raymega.schedule.table import SCHEDULES

H100 = CATALOGUE["h100"]
SEVEN_B = Path(__file__).parents[4] / "jobs" / "llama-7b-16gpu.yaml"
MOST_OFF = 0.03


def piped(**options: object) -> RunPlan:
    sizes = {"parallel.tp": 1, "parallel.dp": 1, "parallel.stages": "auto", **options}
    sets = [f"{path}={value}" for path, value in sizes.items()]
    return make_plan(load_job(SEVEN_B, ["cluster.num_workers=grid", *sets]))


def drawn(number: int) -> RunPlan:
    """One of the pipelines that a search would ask about, by its number."""
    draw = random.Random(number)
    pp, name = draw.choice((2, 4, 8)), ORDERS[number % len(ORDERS)]
    chunks = SCHEDULES[name].least_chunks
    if name == "1f1b":
        chunks = draw.choice([v for v in (1, 2, 3, 4) if pp * v <= 32])
    size = draw.choice((1, 2, 4))
    micro_batches = draw.randint(1, 8 * pp)
    return piped(
        **{
            "parallel.pp": pp, "schedule.name": name, "schedule.chunks": chunks,
            "schedule.micro_batch_size": size, "data.global_batch_size": size * micro_batches,
            "parallel.tp": draw.choice((1, 2, 4)), "memory.recompute": draw.choice(("none", "full")),
            "parallel.sequence_parallel": "false",
        }
    )  # fmt: skip


def off_by(plan: RunPlan) -> float:
    return step_time(plan, H100).total_s / played_step(plan, H100).total_s - 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", range(4))
def test_closed_forms_are_within_3_percent_of_the_simulated_step(first):
    """Each fourth of two hundred numbers has every order."""
    off = {number: off_by(drawn(number)) for number in range(50 * first, 50 * first + 50)}
    assert {number: each for number, each in off.items() if abs(each) > MOST_OFF} == {}


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 7, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_closed_forms_are_as_good_where_a_round_of_the_pipeline_is_not_filled(
    chunks, micro_batches
):
    sizes = {"parallel.pp": 8, "schedule.chunks": chunks, "data.global_batch_size": micro_batches}
    plan = piped(**sizes)
    assert plan.batch.num_micro_batches == micro_batches
    assert abs(off_by(plan)) <= MOST_OFF


def test_what_is_not_played_goes_on_as_what_is(monkeypatch):
    plan = piped(**{"parallel.pp": 4, "schedule.chunks": 2, "data.global_batch_size": 90})
    whole = played_step(plan, H100)
    monkeypatch.setattr("raymega.planner.cost.simulated_step.MOST_PASSES", 1)
    assert played_step(plan, H100).total_s == pytest.approx(whole.total_s, rel=0.01)


def test_parts_of_a_played_step_add_up_to_its_pipeline():
    plan = piped(**{"parallel.pp": 4, "data.global_batch_size": 32})
    time = played_step(plan, H100)
    pipeline_s = play(plan, H100, num_micro_batches=32).time
    assert time.pipeline_s == pytest.approx(pipeline_s)


def test_a_slow_device_is_waited_for_by_all():
    plan = piped(**{"parallel.pp": 4, "data.global_batch_size": 32})
    alike, one_slow = (step_time(plan, replace(H100, straggler=s)) for s in (1.0, 1.25))
    assert alike.straggler_s == 0
    assert one_slow.straggler_s == pytest.approx(0.25 * alike.compute_s)
    assert one_slow.total_s == pytest.approx(alike.total_s + one_slow.straggler_s)

"""The page of a plan: well-formed, whole by itself, and saying what the formulas say."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from raymega.api import load_job
from raymega.cli.plan.predictions import prediction, write_picture
from raymega.errors import ConfigError
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.run_plan import make_plan
from raymega.planner.bill import make_bill
from raymega.planner.cost.peak_memory import memory_use, pipeline_memory
from raymega.planner.cost.step_time import stage_times, step_time
from raymega.planner.cost.teacher_memory import teacher_memory
from raymega.planner.html_report import draw_plan, memory_svg

JOBS = Path(__file__).parents[3] / "jobs"
H100 = CATALOGUE["h100"]
DEGREES = ("parallel.tp=8", "parallel.pp=8", "parallel.dp=8")


@pytest.fixture(scope="module")
def plan():
    layout = ("schedule.name=1f1b", "schedule.chunks=1", "parallel.sequence_parallel=false",
              "parallel.sharding=optimizer", "parallel.stages=even", *DEGREES)  # fmt: skip
    return make_plan(load_job(JOBS / "llama-70b-512gpu.yaml", layout))


def test_the_page_is_one_file_whose_pictures_are_well_formed(plan):
    found = prediction(plan, H100)
    page = draw_plan(found, H100, make_bill(plan, H100, found.time.total_s))
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 3
    for picture in pictures:
        ElementTree.fromstring(picture)
    outside = re.findall(r"(?:src|href)=|<script|@import|url\(http", page)
    assert not outside, "it needs nothing beside it"
    assert "24 of the step's 128 micro-batches" in page and "In 8 of 10 cases" in page
    assert "whole run" in page and "50 days" in page and "binds: " in page
    assert page.isascii()


def test_bars_are_as_long_as_the_memory_of_their_rank(plan):
    uses = [use for use, _ in pipeline_memory(plan)]
    assert max(uses, key=lambda use: use.total_bytes) == memory_use(plan)
    picture = memory_svg(plan, H100)
    for use in uses:
        assert f">{use.total_bytes / 2**30:.3g} GiB</text>" in picture
    assert "h100: 80 GiB" in picture


def test_a_bars_parts_are_the_states_parts(plan):
    hints = re.findall(r"<title>pp 0, (\w+): ([\d.e+]+) GiB", memory_svg(plan, H100))
    shown = {name: float(value) for name, value in hints}
    assert set(shown) == {
        "weights", "gradients", "masters", "moments", "fixed", "activations", "reserved",
    }, "a part of 0 bytes has no block"  # fmt: skip
    assert sum(shown.values()) == pytest.approx(memory_use(plan).total_bytes / 2**30, rel=0.01)


@pytest.mark.parametrize("name", ["dpo", "distill"])
def test_a_reference_and_a_teacher_have_parts_of_their_own(name):
    plan = make_plan(load_job(JOBS / f"{name}.yaml"))
    found = prediction(plan, H100)
    page = draw_plan(found, H100, make_bill(plan, H100, found.time.total_s))
    assert "step, reference: " in page
    weights_gib = teacher_memory(plan, 0).state_bytes / 2**30
    assert (f"pp 0, teacher: {weights_gib:.3g} GiB" in page) is (name == "distill")


def test_stages_of_the_time_line_are_those_of_the_step(plan):
    stages = stage_times(plan, H100)
    time = step_time(plan, H100)
    busiest = max(stage.total_s for stage in stages)
    assert plan.batch.num_micro_batches * busiest == pytest.approx(
        time.compute_s + time.tensor_parallel_s
    )


def test_a_page_that_cannot_be_written_is_refused(plan, tmp_path):
    with pytest.raises(ConfigError, match="--draw"):
        write_picture(plan, H100, tmp_path / "nowhere" / "plan.html")

"""Constants from a run's own steps: read by layout, fitted, and honest about before and after."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raymega.api import load_job
from raymega.cli.main import app
from raymega.errors import ConfigError
from raymega.events import AttemptStarted, RunStarted, StepFinished
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.run_plan import make_plan
from raymega.planner.calibration.measured_run import calibrate_on, read_layouts
from raymega.planner.cost.step_time import step_time
from raymega.tracking.jsonl import JsonLinesSink

JOB = Path(__file__).parents[4] / "jobs" / "llama-7b-16gpu.yaml"
H100 = CATALOGUE["h100"]
SLOW = replace(
    H100, fitted=replace(H100.fitted, matmul_share=0.5, memory_share=0.2, network_share=0.4)
)
GRIDS = ({"tp": 4, "pp": 2, "dp": 2}, {"tp": 2, "pp": 4, "dp": 2})


@pytest.fixture
def run(tmp_path):
    """What a run on slow GPUs leaves: two attempts, each with slow first steps."""
    job = load_job(JOB)
    stream = io.StringIO()
    sink = JsonLinesSink(stream)
    sink.emit(
        RunStarted(
            run_id="r", name="slow", uri="u", is_resumed=False, step=0, total_steps=9,
            job=job.model_dump(mode="json"),
        )
    )  # fmt: skip
    step = 0
    for attempt, degrees in enumerate(GRIDS, start=1):
        sets = [f"parallel.{axis}={degree}" for axis, degree in degrees.items()]
        plan = make_plan(load_job(JOB, sets))
        sink.emit(
            AttemptStarted(attempt=attempt, step=step, grid=plan.grid.degrees(), reason="a test")
        )
        for number in range(6):
            step += 1
            seconds = step_time(plan, SLOW).total_s * (9.0 if number < 2 else 1.0)
            metrics = {"train/step_time_s": seconds}
            sink.emit(StepFinished(attempt=attempt, step=step, metrics=metrics))
    (tmp_path / "metrics.jsonl").write_text(stream.getvalue())
    return tmp_path


def test_layouts_are_read_apart_and_first_steps_left_out(run):
    layouts = read_layouts(run)
    assert [layout.plan.grid.tp for layout in layouts] == [4, 2]
    for layout in layouts:
        assert layout.num_steps == 4
        assert layout.step_s == pytest.approx(step_time(layout.plan, SLOW).total_s)
    assert read_layouts(run / "metrics.jsonl") == layouts


def test_a_line_that_a_killed_driver_tore_is_left_out(run):
    whole, path = read_layouts(run), run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], lines[4][:20], *lines[4:], '{"event": "st']))
    assert read_layouts(run) == whole


def test_the_fitted_constants_meet_the_run_and_say_how_wrong_the_old_ones_were(run):
    done = calibrate_on(read_layouts(run), H100)
    for layout in done.layouts:
        before, after = (step_time(layout.plan, d).total_s for d in (done.before, done.after))
        assert abs(before / layout.step_s - 1) > 0.15
        assert after == pytest.approx(layout.step_s, rel=0.03)
    assert "2 layouts" in done.after.known_error and "% off" in done.after.known_error
    assert done.after.fitted.matmul_share < H100.fitted.matmul_share


def test_the_command_prints_an_accelerator_that_plan_takes(run, tmp_path):
    done = CliRunner().invoke(app, ["plan", "--calibrate", str(run)])
    assert done.exit_code == 0, done.output
    path = tmp_path / "mine.yaml"
    path.write_text(done.output[done.output.index("# Constants fitted") :])
    again = CliRunner().invoke(app, ["plan", str(JOB), "--gpu", str(path)])
    assert again.exit_code == 0 and "Fitted to 8 steps of one run" in again.output


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"(?i)no such file"):
        read_layouts(tmp_path)

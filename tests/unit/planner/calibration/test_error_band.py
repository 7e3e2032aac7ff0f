"""How far a prediction may be off, as it is printed: bands, their words, and the probability of fitting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raymega.api import load_job
from raymega.cli.main import app
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.planner.calibration.accuracy import expected_error
from raymega.planner.calibration.error_band import (
    BANDS,
    RULED_OUT,
    band_of,
    fits_probability,
    format_of_job,
)

JOBS = Path(__file__).parents[4] / "jobs"
TABLE = JOBS.with_name("benchmarks") / "published_runs_2.csv"
H100 = CATALOGUE["h100"]


@pytest.fixture(scope="module")
def job():
    return load_job(JOBS / "llama-7b-16gpu.yaml")


def test_a_band_is_around_the_prediction_and_wider_with_experts_and_without_constants():
    for band in BANDS.values():
        assert 0 < band.low < 1 < band.high
    widths = [BANDS[name].high / BANDS[name].low for name in ("dense", "experts", "borrowed")]
    assert widths == sorted(widths)


@pytest.mark.parametrize("kind", BANDS)
def test_the_pages_state_the_bands_of_the_package(kind):
    band, docs = BANDS[kind], JOBS.with_name("docs")
    words = {
        "dense": "dense models",
        "experts": "models with experts",
        "borrowed": "constants not measured",
    }
    less, more = round(100 * (1 - band.low)), round(100 * (band.high - 1))
    stated = f"| {words[kind]} | {less} % less to {more} % more |"
    assert stated in (docs / "planner.md").read_text()
    rows = (docs / "planner-accuracy.md").read_text().splitlines()
    (row,) = (row for row in rows if row.startswith(f"| {words[kind]} |"))
    low, _, high = row.split("|")[2].strip().partition(" to ")
    assert (float(low), float(high)) == (band.low, band.high)


@pytest.mark.parametrize(
    ("gpu", "changes", "kind"),
    [
        ("h100", (), "dense"), ("a100", (), "dense"), ("gb300", (), "dense"),
        ("h100", ("precision.fp8=rowwise",), "dense"), ("a100", ("precision.fp8=rowwise",), "borrowed"),
        ("h100", ("precision.dtype=float32",), "borrowed"), ("h800", (), "borrowed"),
        ("h200", (), "borrowed"), ("v100", (), "borrowed"), ("cpu", (), "borrowed"),
    ],
)  # fmt: skip
def test_the_band_follows_from_what_was_measured_on_the_device_in_the_format(gpu, changes, kind):
    job = load_job(JOBS / "llama-7b-16gpu.yaml", changes)
    band, device = band_of(job, CATALOGUE[gpu]), CATALOGUE[gpu]
    assert band is BANDS[kind]
    text = expected_error(device, job)
    is_said = f"No constants were measured for {format_of_job(job)} products on {gpu}" in text
    assert is_said != band.is_measured


def test_models_with_experts_have_a_band_of_their_own():
    job = load_job(JOBS / "mixtral-8x7b-64gpu.yaml")
    assert band_of(job, H100) is BANDS["experts"]
    assert band_of(job, H100, number_format="4-bit") is BANDS["borrowed"]


def test_a_device_that_was_calibrated_says_so(job):
    device = replace(H100, name="mine", known_error="Fitted to a run.")
    assert expected_error(device, job) == "Fitted to a run."


def test_fitting_is_a_probability_that_falls_with_what_is_needed():
    size = H100.memory_bytes
    shares = (0.5, 0.9, 1.0, 1.1, 1.5)
    own, others = (
        [fits_probability(share * size, H100, is_own_system=own) for share in shares]
        for own in (True, False)
    )
    for probabilities in (own, others):
        assert probabilities == sorted(probabilities, reverse=True)
        assert probabilities[2] == pytest.approx(0.5)
    assert own[1] > others[1] > 0.75 and own[3] < others[3]
    assert others[3] > RULED_OUT > others[4], "a little too much rules nothing out"


def test_the_interval_is_in_the_text_and_in_the_object_of_a_plan():
    command = ["plan", str(JOBS / "llama-7b-16gpu.yaml"), "--gpu", "h100"]
    text = CliRunner().invoke(app, command).output
    assert "8 of 10 steps within" in text and "with a probability of 100%" in text
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)["prediction"]
    band = BANDS["dense"]
    assert found["step_time_s_low"] == pytest.approx(found["step_time_s"] * band.low)
    assert found["step_time_s_high"] == pytest.approx(found["step_time_s"] * band.high)
    assert found["mfu_low"] == pytest.approx(found["mfu"] / band.high)
    assert found["mfu_high"] == pytest.approx(found["mfu"] / band.low)
    assert found["fits"] and found["fits_probability"] > 0.99 and found["is_measured"]


def test_every_line_of_a_table_has_its_interval_and_says_what_was_not_measured(tmp_path):
    head, *lines = TABLE.read_text().splitlines()
    some = [line for line in lines if "LLAMA3_70B" in line][:4]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([head, *some]))
    command = ["plan", "--runs", str(path)]
    text = CliRunner().invoke(app, command).output
    assert text.count("(constants not measured)") == sum("NVFP4" in line for line in some) == 2
    for line in CliRunner().invoke(app, [*command, "--json"]).output.splitlines():
        found = json.loads(line)
        assert found["predicted_iter_s_low"] < found["predicted_iter_s"]
        assert found["predicted_iter_s"] < found["predicted_iter_s_high"]
        assert 0 <= found["fits_probability"] <= 1 and "skipped" not in found

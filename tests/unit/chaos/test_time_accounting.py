"""Incidents and the time sheet, from lines with times as a driver would have said them."""

import json

import pytest

from raymega.chaos.chaos_run import InjectedFault
from raymega.chaos.driver_process import DriverOutput
from raymega.chaos.experiment import Verdict, verdict_object
from raymega.chaos.faults import ChaosFault
from raymega.chaos.run_comparison import compare_runs
from raymega.chaos.time_accounting import BETWEEN, ENDING, STARTING, STEPPING, incidents, time_sheet

GRID, SMALL = {"tp": 1, "dp": 2}, {"tp": 1, "dp": 1}


def say(at_s, event, **values):
    return DriverOutput(at_s=at_s, event={"event": event, **values})


def step(at_s, number, *, grid=GRID, loss=1.0, samples=None):
    return say(
        at_s, "step", step=number, loss=loss, grid=grid, step_time_s=1.0, attempt=1,
        samples=number * 8 if samples is None else samples, tokens=number * 64,
    )  # fmt: skip


def attempt(at_s, at_step, *, grid=GRID, source="memory"):
    return say(at_s, "attempt", step=at_step, grid=grid, source=source, reason="a reason")


def injected(at_s, kind="kill-worker"):
    fault = ChaosFault(kind=kind, phase="step", at=3)
    return InjectedFault(fault=fault, at_s=at_s, rank=1, step=2)


LOST = (
    attempt(10, 0, source="nothing"), step(12, 1), step(13, 2), step(14, 3),
    say(14.8, "failure", cause="rank 1 died"), attempt(15, 2, grid=SMALL),
    step(17, 3, grid=SMALL), step(18, 4, grid=SMALL), step(19, 5, grid=SMALL),
)  # fmt: skip


def test_incident_is_timed_from_the_fault_to_the_first_new_step():
    (found,) = incidents(LOST, [injected(14.3)], [9.0])
    assert (found.detection_s, found.recovery_s) == (pytest.approx(0.5), pytest.approx(3.7))
    assert (found.lost_steps, found.source, found.cause) == (1, "memory", "rank 1 died")
    assert (found.grid_before, found.grid_after) == (GRID, SMALL)


def test_fault_that_no_attempt_is_lost_by_costs_no_recovery():
    calm = LOST[:4]
    (found,) = incidents(calm, [injected(13.5, "store-slow")], [9.0])
    assert (found.detection_s, found.recovery_s) == (-1.0, -1.0)


def test_driver_that_was_killed_is_noticed_when_it_is_started_again():
    output = [*LOST[:4], attempt(16, 2, source="store"), step(18, 3), step(19, 4)]
    (found,) = incidents(output, [injected(14.2, "kill-driver")], [9.0, 14.5])
    assert (found.detection_s, found.recovery_s) == (pytest.approx(0.3), pytest.approx(4.8))
    assert found.source == "store"


def test_time_sheet_gives_each_second_to_one_cause():
    found = incidents(LOST, [injected(14.3)], [9.0])
    sheet = time_sheet(LOST, found, begun_s=9.0, ended_s=20.0)
    assert sheet.by_cause == {
        STEPPING: 5.0, STARTING: 2.0, ENDING: 1.0, "kill-worker": pytest.approx(1.7),
        BETWEEN: pytest.approx(1.3),
    }  # fmt: skip
    assert sum(sheet.by_cause.values()) == pytest.approx(sheet.wall_s) == pytest.approx(11.0)
    assert sheet.goodput == pytest.approx(5 / 11)


def test_same_run_is_the_same_to_the_bit_and_to_rounding_on_another_grid():
    calm = [step(n, n, loss=1.0) for n in range(1, 6)]
    found = compare_runs(calm, LOST, dtype="float64")
    assert found.faults == [] and (found.num_steps, found.num_equal) == (5, 5)
    close = [*LOST[:-1], step(19, 5, grid=SMALL, loss=1.0 + 1e-12)]
    assert compare_runs(calm, close, dtype="float64").faults == []
    far = [*LOST[:-1], step(19, 5, grid=SMALL, loss=1.0 + 1e-6)]
    assert "step 5 is off" in compare_runs(calm, far, dtype="float64").faults[0]
    near = [step(n, n, loss=1.0 + (1e-15 if n == 4 else 0.0)) for n in range(1, 6)]
    assert "step 4 is off" in compare_runs(calm, near, dtype="float64").faults[0]


def test_a_loss_that_is_no_number_is_null_in_the_report():
    calm, tried = [step(1, 1, loss=2.0)], [step(1, 1, loss=float("nan"))]
    found = compare_runs(calm, tried, dtype="float64")
    verdict = Verdict(
        calm=calm, tried=tried, incidents=[], sheet=time_sheet(tried, [], begun_s=0.0, ended_s=2.0),
        comparison=found, leftovers=[], memory=[], code=0, faults=found.faults, missed=[],
    )  # fmt: skip
    report = verdict_object(verdict, seed=1)
    assert report["loss"]["largest"] is None and json.dumps(report, allow_nan=False)


def test_sample_that_was_seen_twice_or_left_out_is_a_fault():
    calm = [step(n, n) for n in range(1, 5)]
    twice = [step(1, 1), step(2, 2, samples=24), step(3, 3), step(4, 4)]
    assert "24 samples" in compare_runs(calm, twice, dtype="float64").faults[0]
    gap = [step(1, 1), step(3, 3), step(4, 4)]
    assert "not each there once" in compare_runs(calm, gap, dtype="float64").faults[0]


def test_step_that_an_attempt_undid_and_nobody_did_again_is_missing():
    calm = [step(n, n) for n in range(1, 6)]
    skipped = [each for each in LOST if each != step(17, 3, grid=SMALL)]
    assert "not each there once" in compare_runs(calm, skipped, dtype="float64").faults[-1]

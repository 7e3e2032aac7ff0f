"""The time left: the mean of the latest steps, without the first of an attempt."""

import pytest

from raymega.events import StepFinished
from raymega.tracking.time_left import WINDOW, TimeLeft
from tests.unit.tracking.events import attempt_started, run_started


def step(number, seconds):
    return StepFinished(attempt=1, step=number, metrics={"train/step_time_s": seconds})


def told(*events):
    left = TimeLeft()
    for event in events:
        left.observe(event)
    return left.seconds


def test_first_step_of_an_attempt_does_not_count():
    start = run_started(total_steps=100), attempt_started(1)
    assert told(*start, step(1, 60.0)) == 0.0
    assert told(*start, step(1, 60.0), step(2, 2.0)) == pytest.approx(98 * 2.0)
    again = *start, step(1, 60.0), step(2, 2.0), attempt_started(2), step(2, 50.0), step(3, 4.0)
    assert told(*again) == pytest.approx(97 * 3.0)


def test_only_the_latest_steps_count():
    steps = [step(1, 9.0), *(step(n, 8.0) for n in range(2, 50))]
    steps += [step(n, 1.0) for n in range(50, 50 + WINDOW)]
    assert told(run_started(total_steps=100), *steps) == pytest.approx(100 - 49 - WINDOW)


def test_nothing_is_left_at_the_end():
    assert told(run_started(total_steps=3), step(1, 1.0), step(2, 1.0), step(3, 1.0)) == 0.0

"""Thinner: all first steps, then ever fewer, and always the last one before a failure or the end."""

import pytest

from raymega.events import AttemptFailed, ExpertLoads, Memory, StepFinished
from raymega.tracking.queued_sink import Thinner, interval
from tests.unit.tracking.events import run_finished


def step(number):
    return StepFinished(step=number, metrics={})


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, 1),
        (1000, 1),
        (1001, 10),
        (10_000, 10),
        (10_001, 100),
        (100_001, 1000),
        (1_000_001, 10_000),
    ],
)
def test_interval_is_a_share_of_the_step(number, expected):
    assert interval(number) == expected and interval(number, 7) == 7


def test_million_steps_are_a_few_thousand_records():
    numbers = (n for n in range(1, 1_000_001) if n % interval(n) == 0)
    assert sum(1 for _ in numbers) == 1000 + 3 * 900


def test_last_step_before_a_failure_and_the_end_is_recorded():
    thinner = Thinner(10)
    kept = [event for n in range(1, 26) for event in thinner.keep(step(n))]
    assert [event.step for event in kept] == [10, 20]
    failed = AttemptFailed(rank=0, step=25, cause="killed")
    assert thinner.keep(failed) == [step(25), failed]
    assert thinner.keep(run_finished()) == [run_finished()]


def test_values_of_ranks_and_experts_stay_out():
    thinner = Thinner()
    memory = Memory(step=7, metrics={"memory/max_peak_bytes": 1.0}, ranks={0: {}, 1: {}})
    (kept,) = thinner.keep(memory)
    assert not kept.ranks and kept.metrics == memory.metrics
    assert thinner.keep(ExpertLoads(step=7, tokens={0: [1.0]})) == []

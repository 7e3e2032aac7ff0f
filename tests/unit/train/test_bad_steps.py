"""What counts as a step with bad numbers, and what the job has done about it."""

import math

import pytest

from raymega.config.elastic import ElasticSection
from raymega.config.schema import PrecisionSection
from raymega.train.bad_steps import BadStepAction, decide, detect_bad_step
from raymega.train.state import TrainState, state_from

SECTION = ElasticSection(spike_window=4, max_bad_steps=2)
CALM = TrainState(losses=(2.0, 1.0, 3.0, 2.0), grad_norms=(0.5, 0.4, 0.6, 0.5))


def numbers_of(loss=2.0, grad_norm=0.5, state=CALM, **fields):
    section = SECTION.model_copy(update=fields)
    return detect_bad_step(section, state, loss=loss, grad_norm=grad_norm)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, None),
        ({"loss": 4.0}, None),
        ({"loss": 4.1}, "spike"),
        ({"grad_norm": 5.0}, None),
        ({"grad_norm": 5.1}, "spike"),
        ({"loss": math.nan}, "nan"),
        ({"grad_norm": math.inf}, "nan"),
        ({"loss": 99.0, "spike_loss": 0.0}, None),
        ({"loss": 99.0, "state": TrainState(losses=(2.0,) * 3, grad_norms=(0.5,) * 3)}, None),
    ],
    ids=str,
)
def test_bad_is_what_is_not_finite_or_far_above_the_median(values, kind):
    numbers = numbers_of(**values)
    assert (numbers and numbers.kind) == kind


def test_a_bad_step_says_the_number_and_what_it_is_held_against():
    text = "gradient norm 7.5 is 15 times the median 0.5 of the last 4 steps"
    assert numbers_of(grad_norm=7.5).fact == text
    assert numbers_of(loss=math.nan).fact == "loss=nan, gradient norm=0.5"


@pytest.mark.parametrize(
    ("policy", "on_nan", "on_spike"),
    [
        ("stop", BadStepAction.STOP, BadStepAction.STOP),
        ("rerun", BadStepAction.STOP, BadStepAction.KEEP),
        ("skip", BadStepAction.SKIP, BadStepAction.SKIP),
        ("rollback", BadStepAction.ROLL_BACK, BadStepAction.ROLL_BACK),
    ],
)
def test_what_comes_again_is_what_the_policy_says(policy, on_nan, on_spike):
    section = SECTION.model_copy(update={"on_nan": policy, "on_spike": policy})
    nan = detect_bad_step(section, CALM, loss=math.nan, grad_norm=1.0)
    spike = detect_bad_step(section, CALM, loss=50.0, grad_norm=1.0)
    assert (decide(section, CALM, nan), decide(section, CALM, spike)) == (on_nan, on_spike)


def test_no_more_batches_in_a_row_are_left_out_than_the_job_allows():
    section = SECTION.model_copy(update={"on_nan": "skip"})
    numbers = detect_bad_step(section, CALM, loss=math.nan, grad_norm=1.0)
    actions = [decide(section, TrainState(bad_steps=n), numbers) for n in range(4)]
    assert actions == [
        BadStepAction.SKIP,
        BadStepAction.SKIP,
        BadStepAction.STOP,
        BadStepAction.STOP,
    ]


def test_state_remembers_the_newest_steps_and_a_checkpoint_brings_every_bit_back():
    state = TrainState(bad_steps=3)
    for loss in (0.1, 0.2, 0.1 + 0.2):
        state = state.remember(loss=loss, grad_norm=1 / 3, window=2)
    assert (state.losses, state.bad_steps) == ((0.2, 0.1 + 0.2), 0)
    assert state_from(state.scalars(), PrecisionSection()) == state


def test_state_goes_past_ranges_that_touch_and_over_no_other():
    ranges = [(40, 60), (8, 24), (24, 32)]
    places = [TrainState(samples=n).past(ranges).samples for n in (0, 8, 16, 24, 32, 56, 60)]
    assert places == [0, 32, 32, 32, 32, 60, 60]

"""TrainState: what a checkpoint keeps of it comes back, whatever format it is taken up in."""

import pytest

from raymega.config.schema import PrecisionSection
from raymega.optim.loss_scale import LossScale
from raymega.train.state import TrainState, first_state, state_from

HALF, WIDE = PrecisionSection(dtype="float16"), PrecisionSection(dtype="bfloat16")
STATE = TrainState(
    step=9,
    samples=70,
    tokens=2000,
    skipped_steps=2,
    loss_scale=LossScale(factor=4096.0, good_steps=3, overflows=1),
)


def test_scalars_bring_the_state_back():
    assert state_from(STATE.scalars(), HALF) == STATE


def test_a_state_without_loss_scale_comes_back_too():
    state = TrainState(step=3, samples=4, tokens=5)
    assert state_from(state.scalars(), WIDE) == state


def test_updates_are_the_steps_that_were_not_skipped():
    assert STATE.updates == 7
    after = STATE.advance(samples=8, tokens=64, is_skipped=True)
    assert (after.step, after.updates, after.samples, after.skipped_steps) == (10, 7, 78, 3)


def test_run_that_changes_to_float16_begins_with_the_job_s_scale():
    scalars = TrainState(step=3, samples=4, tokens=5).scalars()
    assert state_from(scalars, HALF).loss_scale == first_state(HALF).loss_scale
    assert state_from(STATE.scalars(), WIDE).loss_scale is None


def test_state_from_before_there_were_skipped_steps_has_none():
    assert state_from({"step": 3, "samples": 4, "tokens": 5}, WIDE).skipped_steps == 0


def test_state_that_lacks_its_position_is_refused():
    with pytest.raises(KeyError, match="samples"):
        state_from({"step": 3, "tokens": 5}, WIDE)

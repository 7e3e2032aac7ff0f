"""The learning rate: warm-up, cosine, minimum, as a pure function of the step."""

from itertools import pairwise

import pytest

from raymega.config.schema import OptimizerSection
from raymega.optim.lr_schedule import learning_rate


def _curve(total_steps, **settings):
    section = OptimizerSection(lr=2.0, **settings)
    return [learning_rate(section, total_steps=total_steps, step=s) for s in range(total_steps)]


def test_warmup_grows_by_equal_parts_to_the_peak():
    assert _curve(100, lr_warmup_steps=4)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_minimum():
    rates = _curve(104, lr_warmup_steps=4, min_lr_ratio=0.1)
    assert rates[4 + 50 - 1] == pytest.approx((2.0 + 0.2) / 2)
    assert rates[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(rates[4:]))


def test_minimum_holds_after_the_decay():
    rates = _curve(20, lr_decay_steps=10, min_lr_ratio=0.25)
    assert rates[9:] == [0.5] * 11


def test_a_longer_run_changes_nothing_when_the_decay_is_given():
    settings = {"lr_warmup_steps": 2, "lr_decay_steps": 10}
    assert _curve(30, **settings)[:10] == _curve(10, **settings)


@pytest.mark.parametrize("warmup", [5, 8])
def test_warmup_as_long_as_the_decay_is_not_an_error(warmup):
    rates = _curve(10, lr_warmup_steps=warmup, lr_decay_steps=5, min_lr_ratio=0.5)
    assert rates[warmup - 1] == 2.0
    assert rates[warmup:] == [1.0] * (10 - warmup)

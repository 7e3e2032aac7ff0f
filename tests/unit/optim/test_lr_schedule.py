"""The learning rate: warm-up, each schedule's closed form, minimum, as a pure function."""

from itertools import pairwise
from math import cos, pi, sqrt
from typing import get_args

import pytest

from raymega.config.schema import OptimizerSection
from raymega.optim.lr_schedule import learning_rate
from raymega.plugins import Registry

SHAPES = Registry().names("lr_schedule")


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


# n: number of the update; warm-up 4, end 20, peak 2, minimum 0.5, cool-down 6.
CLOSED_FORMS = {
    "cosine": lambda n: 0.5 + 1.5 * (1 + cos(pi * (n - 4) / 16)) / 2,
    "linear": lambda n: 2.0 - 1.5 * (n - 4) / 16,
    "inverse_sqrt": lambda n: 2.0 * sqrt(4 / n),
    "wsd": lambda n: 2.0 if n <= 14 else 2.0 - 1.5 * (n - 14) / 6,
    "constant": lambda n: 2.0,
}
LIMITS = {"cosine": 0.5, "linear": 0.5, "wsd": 0.5, "inverse_sqrt": 0.5, "constant": 2.0}


@pytest.mark.parametrize("name", SHAPES)
def test_schedule_has_its_closed_form_from_warmup_to_end(name):
    cooldown = {"lr_cooldown_steps": 6} if name == "wsd" else {}
    settings = {"lr_warmup_steps": 4, "lr_decay_steps": 20, "min_lr_ratio": 0.25}
    rates = _curve(200, lr_schedule=name, **settings, **cooldown)
    wanted = [2.0 * n / 4 if n <= 4 else CLOSED_FORMS[name](n) for n in range(1, 21)]
    assert rates[:20] == pytest.approx(wanted, rel=1e-14)
    assert rates[-1] == LIMITS[name]
    assert min(rates[4:]) >= LIMITS[name]


def test_every_schedule_of_the_job_file_is_there():
    field = OptimizerSection.model_fields["lr_schedule"].annotation
    named, _ = get_args(field)
    assert set(get_args(named)) == set(SHAPES)


def test_wsd_is_exactly_the_peak_until_the_cooldown_begins():
    rates = _curve(20, lr_schedule="wsd", lr_cooldown_steps=5, min_lr_ratio=0.3)
    assert rates[:15] == [2.0] * 15 and rates[15] < 2.0 and rates[-1] == 2.0 * 0.3


def test_wsd_of_a_run_that_is_cut_short_cools_down_after_the_warmup():
    rates = _curve(6, lr_schedule="wsd", lr_warmup_steps=2, lr_cooldown_steps=100, min_lr_ratio=0)
    assert rates == pytest.approx([1.0, 2.0, 1.5, 1.0, 0.5, 0.0])


def test_a_longer_wsd_run_keeps_the_stable_part():
    settings = {"lr_schedule": "wsd", "lr_warmup_steps": 2, "lr_cooldown_steps": 4}
    assert _curve(30, **settings)[:16] == _curve(20, **settings)[:16]

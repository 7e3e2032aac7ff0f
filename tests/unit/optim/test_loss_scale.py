"""The loss scale as a pure function: when it doubles, is forgiven, halves, and gives up."""

import pytest

from raymega.config.schema import PrecisionSection
from raymega.errors import NumericsError
from raymega.optim.loss_scale import LossScale, first_loss_scale, next_loss_scale

SECTION = PrecisionSection(
    dtype="float16", loss_scale=64.0, loss_scale_window=3, loss_scale_hysteresis=2
)


def _factors(story, section=SECTION):
    """Factors after each step of ``story``: o is an overflow, anything else a good step."""
    scale, factors = first_loss_scale(section), []
    for letter in story:
        scale = next_loss_scale(scale, section, is_overflow=letter == "o")
        factors.append(scale.factor)
    return factors


@pytest.mark.parametrize(
    ("story", "factors"),
    [
        ("...", [64, 64, 128]),
        ("......", [64, 64, 128, 128, 128, 256]),
        ("oo", [64, 32]),
        ("o.o", [64, 64, 32]),
        ("ooo", [64, 32, 16]),
        ("..o...", [64, 64, 64, 64, 64, 128]),
        ("oo...oo", [64, 32, 32, 32, 64, 64, 32]),
    ],
)
def test_factor_follows_the_story(story, factors):
    assert _factors(story) == factors


def test_hysteresis_1_forgives_nothing():
    section = SECTION.model_copy(update={"loss_scale_hysteresis": 1})
    assert _factors("oo", section) == [32, 16]


def test_factor_doubles_where_a_shorter_window_is_already_over():
    scale = LossScale(factor=64.0, good_steps=7, overflows=1)
    assert next_loss_scale(scale, SECTION, is_overflow=False) == LossScale(factor=128.0)


def test_overflow_at_the_minimum_is_an_error_with_exit_5():
    section = SECTION.model_copy(update={"min_loss_scale": 20.0})
    assert _factors("ooo", section) == [64, 32, 20]
    with pytest.raises(NumericsError, match=r"loss scale 20; .*min_loss_scale=20") as caught:
        _factors("oooo", section)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_other_formats_have_none(dtype):
    section = PrecisionSection(dtype=dtype)
    assert first_loss_scale(section) is None
    assert next_loss_scale(None, section, is_overflow=False) is None


def test_backward_starts_from_the_scale_over_the_tokens_of_a_micro_batch():
    assert LossScale(factor=65536.0).loss_gradient(micro_batch_tokens=2048) == 32.0

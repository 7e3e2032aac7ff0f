"""Losses of scores against their published formulas, number by number."""

from math import exp, log

import pytest
import torch

from raymega.config.preference import PreferenceSection
from raymega.model.heads.score_losses import LOSSES

SCORES = torch.tensor([[1.5, -0.5]], dtype=torch.float64)
NONE = torch.tensor([0])


def _of(kind, scores=SCORES, labels=NONE, **fields):
    loss, statistics = LOSSES[kind](scores, labels, PreferenceSection(**fields))
    return loss.tolist(), statistics[:, 0].tolist()


@pytest.mark.parametrize("kind", ["sequence_classification", "multiple_choice"])
def test_classes_have_cross_entropy_and_are_right_if_the_largest_is_theirs(kind):
    wanted = -log(exp(-0.5) / (exp(1.5) + exp(-0.5)))
    assert _of(kind, labels=torch.tensor([1])) == ([pytest.approx(wanted, rel=1e-14)], [0, 0, 0])
    assert _of(kind, labels=torch.tensor([0]))[1] == [0, 0, 1]


def test_a_value_has_the_squared_error():
    assert _of("regression", SCORES[:, :1], torch.tensor([4]))[0] == [pytest.approx(2.5**2)]


def test_rewards_have_the_loss_of_bradley_terry_with_margin_and_centre():
    plain = log(1 + exp(-2.0))
    assert _of("reward") == ([pytest.approx(plain, rel=1e-14)], [1.5, -0.5, 1])
    moved = log(1 + exp(-(2.0 - 0.7))) + 0.1 * (1.5 - 0.5) ** 2
    fields = {"loss_type": "bradley_terry", "margin": 0.7, "center_rewards_coefficient": 0.1}
    assert _of("reward", **fields)[0] == [pytest.approx(moved, rel=1e-14)]

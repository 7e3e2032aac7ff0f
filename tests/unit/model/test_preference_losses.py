"""Losses of pairs against their published formulas, number by number."""

from math import exp, log, log1p

import pytest
import torch

from raymega.config.preference import PreferenceSection
from raymega.model.preference_losses import LOSSES, Answers, rewards

POLICY, REFERENCE, COUNTS = [[-3.0, -4.5]], [[-2.5, -5.0]], [[4.0, 5.0]]
ANSWERS = Answers(
    policy=torch.tensor(POLICY, dtype=torch.float64),
    reference=torch.tensor(REFERENCE, dtype=torch.float64),
    counts=torch.tensor(COUNTS, dtype=torch.float64),
)
# log(policy / reference) of the chosen answer less that of the rejected one
MARGIN = (-3.0 - -2.5) - (-4.5 - -5.0)
MEAN_MARGIN = (-3.0 - -2.5) / 4 - (-4.5 - -5.0) / 5


def _log_sigmoid(x):
    return -log1p(exp(-x))


def _odds(mean):
    return log(exp(mean) / (1 - exp(mean)))


CASES = {
    "sigmoid": ({}, -_log_sigmoid(0.3 * MARGIN)),
    "smooth": (
        {"label_smoothing": 0.2},
        -0.8 * _log_sigmoid(0.3 * MARGIN) - 0.2 * _log_sigmoid(-0.3 * MARGIN),
    ),
    "mean": ({"length_normalized": True}, -_log_sigmoid(0.3 * MEAN_MARGIN)),
    "hinge": ({"loss_type": "hinge"}, 1 - 0.3 * MARGIN),
    "ipo": ({"loss_type": "ipo"}, (MARGIN - 1 / 0.6) ** 2),
    "ipo-of-trl": (
        {"loss_type": "ipo", "length_normalized": True},
        (MEAN_MARGIN - 1 / 0.6) ** 2,
    ),
    "orpo": (
        {"loss_type": "orpo"},
        3.0 / 4 - 0.3 * _log_sigmoid(_odds(-3.0 / 4) - _odds(-4.5 / 5)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_its_published_formula(case):
    fields, wanted = CASES[case]
    section = PreferenceSection(**{"loss_type": "sigmoid", "beta": 0.3} | fields)
    (found,) = LOSSES[section.loss_type](ANSWERS, section).tolist()
    assert found == pytest.approx(wanted, rel=1e-14)


def test_rewards_are_beta_times_the_log_ratio_of_each_answer():
    section = PreferenceSection(loss_type="sigmoid", beta=0.3)
    assert rewards(ANSWERS, section).tolist() == [[pytest.approx(-0.15), pytest.approx(0.15)]]

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


def test_kto_weighs_answers_by_their_side_of_the_divergence():
    section = PreferenceSection(
        loss_type="kto", beta=0.3, desirable_weight=0.8, undesirable_weight=1.3
    )
    both = Answers(
        policy=torch.tensor(POLICY * 2, dtype=torch.float64),
        reference=torch.tensor(REFERENCE * 2, dtype=torch.float64),
        counts=torch.tensor(COUNTS * 2, dtype=torch.float64),
        is_desirable=torch.tensor([1.0, 0.0], dtype=torch.float64),
        divergence=torch.tensor(0.2, dtype=torch.float64),
    )
    # the log-ratio of the first answer alone: -3.0 - -2.5
    value = 1 / (1 + exp(-0.3 * (-0.5 - 0.2))), 1 / (1 + exp(-0.3 * (0.2 - -0.5)))
    wanted = [0.8 * (1 - value[0]), 1.3 * (1 - value[1])]
    assert LOSSES["kto"](both, section).tolist() == pytest.approx(wanted, rel=1e-14)

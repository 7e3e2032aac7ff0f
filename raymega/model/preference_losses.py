"""Losses of pairs of a chosen and a rejected answer, as functions of their log-probabilities.

They know nothing of ranks: `raymega.model.preference` gives them whole answers, and takes their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from raymega.config.preference import PreferenceSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Log-probabilities of answers, [P, 2] float64 each: of a pair the chosen answer first.

    Attributes:
        policy: Sum over an answer's labels of their log-probabilities by the model that is trained.
        reference: The same by the reference model; 0 where there is none.
        counts: Number of labels of each answer, at least 1.
    """

    policy: Tensor
    reference: Tensor
    counts: Tensor


Loss = Callable[[Answers, PreferenceSection], Tensor]
"""Function from answers to the loss of each pair, [P]."""


def log_ratios(answers: Answers, section: PreferenceSection) -> Tensor:
    """Return log(policy / reference) of each answer, [P, 2]; a mean over its labels if they are normalized."""
    ratios = answers.policy - answers.reference
    return ratios / answers.counts if section.length_normalized else ratios


def rewards(answers: Answers, section: PreferenceSection) -> Tensor:
    """Return the implicit reward of each answer, [P, 2]: beta times its log-ratio, or log-probability for orpo."""
    if section.loss_type == "orpo":
        return section.beta * answers.policy / answers.counts
    return section.beta * log_ratios(answers, section)


def _margin(answers: Answers, section: PreferenceSection) -> Tensor:
    chosen, rejected = log_ratios(answers, section).unbind(1)
    return chosen - rejected


def sigmoid(answers: Answers, section: PreferenceSection) -> Tensor:
    """DPO (Rafailov et al. 2023, equation 7); smoothed, conservative DPO (Mitchell 2023)."""
    logits, share = section.beta * _margin(answers, section), section.label_smoothing
    return -(1 - share) * logsigmoid(logits) - share * logsigmoid(-logits)


def hinge(answers: Answers, section: PreferenceSection) -> Tensor:
    """SLiC's hinge (Zhao et al. 2023) on DPO's rewards (Liu et al. 2024, RSO)."""
    return torch.relu(1 - section.beta * _margin(answers, section))


def ipo(answers: Answers, section: PreferenceSection) -> Tensor:
    """IPO (Azar et al. 2023, equation 17)."""
    return (_margin(answers, section) - 1 / (2 * section.beta)) ** 2


def orpo(answers: Answers, section: PreferenceSection) -> Tensor:
    """ORPO (Hong et al. 2024, equations 3 to 7): mean loss of the chosen answer, and the log odds ratio."""
    # log(p / (1 - p)), where p is the geometric mean over an answer's labels
    means = answers.policy / answers.counts
    log_odds = means - torch.log1p(-means.exp())
    chosen, rejected = log_odds.unbind(1)
    return -means[:, 0] - section.beta * logsigmoid(chosen - rejected)


LOSSES: dict[str, Loss] = {"sigmoid": sigmoid, "hinge": hinge, "ipo": ipo, "orpo": orpo}
"""Losses by ``preference.loss_type``."""

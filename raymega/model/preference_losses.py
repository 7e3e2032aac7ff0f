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
        is_desirable: kto only: 1 where the first answer is desirable, else 0: [P]. The second is that of another prompt.
        divergence: kto only: estimate of the divergence from the reference, a scalar.
    """

    policy: Tensor
    reference: Tensor
    counts: Tensor
    is_desirable: Tensor | None = None
    divergence: Tensor | None = None


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


def kto(answers: Answers, section: PreferenceSection) -> Tensor:
    """KTO (Ethayarajh et al. 2024, equation 7), as TRL's KTOTrainer has it: 1 less the value of each answer."""
    assert answers.is_desirable is not None, "the data have a label an answer"
    good = answers.is_desirable
    weight = good * section.desirable_weight + (1 - good) * section.undesirable_weight
    return weight * (1 - torch.sigmoid(section.beta * kto_margin(answers)))


def kto_margin(answers: Answers) -> Tensor:
    """Return by how much the log-ratio of each pair's first answer is on the side of its label, [P]."""
    assert answers.is_desirable is not None, "the data have a label an answer"
    assert answers.divergence is not None, "a pass before the step estimates it"
    side = torch.where(answers.is_desirable > 0, 1.0, -1.0)
    return side * ((answers.policy - answers.reference)[:, 0] - answers.divergence)


LOSSES: dict[str, Loss] = {"sigmoid": sigmoid, "hinge": hinge, "ipo": ipo, "orpo": orpo, "kto": kto}
"""Losses by ``preference.loss_type``."""

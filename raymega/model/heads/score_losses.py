"""Losses of scores of documents, as functions of whole scores.

They know nothing of ranks: `objective.py` gives them whole documents, and takes their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from raymega.config.preference import PreferenceSection

Loss = Callable[[Tensor, Tensor, PreferenceSection], tuple[Tensor, Tensor]]
"""Function from scores [G, K], labels [G] and the preference section to losses and statistics [3, G] of G groups.

A group is a document with K classes, or K documents. The statistics are those of `preference.STATISTICS`."""


def classes(scores: Tensor, labels: Tensor, _: PreferenceSection) -> tuple[Tensor, Tensor]:
    """Cross entropy of a document's classes, or of a question's choices; right if the label's score is largest."""
    is_right = (scores.argmax(1) == labels).to(scores.dtype)
    nothing = scores.new_zeros(len(labels))
    return cross_entropy(scores, labels, reduction="none"), _stack(nothing, nothing, is_right)


def squares(scores: Tensor, labels: Tensor, _: PreferenceSection) -> tuple[Tensor, Tensor]:
    """Squared error of a document's only score; nothing is right or wrong."""
    nothing = scores.new_zeros(len(labels))
    return (scores[:, 0] - labels) ** 2, _stack(nothing, nothing, nothing)


def bradley_terry(scores: Tensor, _: Tensor, section: PreferenceSection) -> tuple[Tensor, Tensor]:
    """Bradley-Terry (Ouyang et al. 2022, equation 1), with a margin (Llama 2) and centred rewards (Eisenstein et al. 2023).

    The formulas are those of TRL's RewardTrainer.
    """
    chosen, rejected = scores.unbind(1)
    loss = -logsigmoid(chosen - rejected - section.margin)
    loss = loss + section.center_rewards_coefficient * (chosen + rejected) ** 2
    return loss, _stack(chosen, rejected, (chosen > rejected).to(scores.dtype))


def _stack(chosen: Tensor, rejected: Tensor, is_right: Tensor) -> Tensor:
    return torch.stack((chosen, rejected, is_right)).detach()


LOSSES: dict[str, Loss] = {
    "sequence_classification": classes,
    "multiple_choice": classes,
    "regression": squares,
    "reward": bradley_terry,
}
"""Losses by ``model.head.kind``."""

"""Sums over pairs of answers: their loss, its gradient by each label, and what is reported beside it."""

import torch

from raymega.config.preference import PreferenceSection
from raymega.model.preference import own_log_probs, pair_loss_sum
from raymega.model.preference_losses import LOSSES, Answers
from raymega.parallel.context_parallel.context import PairBatch, no_context

BETA, DIVERGENCE = 0.5, 0.25
# three pairs; the last one does not count
OWN = torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0, -9.0], dtype=torch.float64)
REFERENCE = torch.tensor([-1.25, -2.5, -3.25, -1.25, -4.0, -1.0], dtype=torch.float64)
COUNTED = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)


def _pairs(**of_kto):
    return PairBatch(
        answers=torch.tensor([[0, 1, 2, 6], [3, 4, 5, 5]]), counts=torch.ones(6, dtype=torch.float64),
        is_counted=COUNTED, num_counted=2, reference=REFERENCE, **of_kto,
    )  # fmt: skip


def test_log_probabilities_are_summed_over_the_labels_of_an_answer_that_count():
    # [S, B]; the last label of the first row is of no answer, one of the second does not count
    losses = torch.tensor([[1.0, 8.0], [2.0, 16.0], [4.0, 32.0], [128.0, 64.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    found = own_log_probs(losses, mask, _pairs())
    assert found.tolist() == [-1.0, -2.0, -4.0, -8.0, -16.0, -32.0]
    assert found.dtype == torch.float64


def test_a_pair_without_a_preference_is_not_right_and_one_that_does_not_count_adds_nothing():
    section = PreferenceSection(loss_type="sigmoid", beta=BETA)
    own = OWN.clone().requires_grad_()
    loss, statistics = pair_loss_sum(own, _pairs(), section, no_context())
    answers = Answers(
        policy=OWN.view(3, 2)[:2], reference=REFERENCE.view(3, 2)[:2], counts=torch.ones(2, 2)
    )
    assert loss.item() == LOSSES["sigmoid"](answers, section).sum().item()
    # log-ratios 0.25 and 0.5 of the first pair, twice 0.25 of the second
    assert statistics.tolist() == [BETA * (0.25 + 0.25), BETA * (0.5 + 0.25), 0.0, 0.0]
    loss.backward()
    assert own.grad[:4].all() and not own.grad[4:].any()
    assert torch.equal(own.grad[::2], -own.grad[1::2])


def test_an_answer_at_the_divergence_is_on_no_side_and_rewards_are_means_by_label():
    section = PreferenceSection(loss_type="kto", beta=BETA)
    of_kto = {
        "is_desirable": torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64),
        "baseline": torch.tensor([DIVERGENCE, 2.0, 4.0], dtype=torch.float64),
    }
    _, statistics = pair_loss_sum(OWN, _pairs(**of_kto), section, no_context())
    # both first answers have a log-ratio of 0.25
    assert statistics.tolist() == [BETA * 0.25 * 2.0, BETA * 0.25 * 4.0, 0.0, 2 * DIVERGENCE]
    of_kto["baseline"] = torch.tensor([0.125, 2.0, 4.0], dtype=torch.float64)
    _, statistics = pair_loss_sum(OWN, _pairs(**of_kto), section, no_context())
    assert statistics[2] == 1

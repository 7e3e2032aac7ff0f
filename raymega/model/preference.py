"""Loss of preference pairs on ranks that hold parts of their tokens.

A pair's loss is no sum over tokens: it is a function of sums over whole answers. Context-parallel ranks hold
parts of an answer, so they sum over all ranks, compute the same derivatives, and apply them to their own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raymega.config.preference import PreferenceSection
from raymega.model.layers.lm_head import Head
from raymega.model.preference_losses import LOSSES, Answers, kto_margin, rewards
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.context_parallel.context import Context, PairBatch
from raymega.parallel.core.linear_map import with_gradient

STATISTICS = ("chosen_reward", "rejected_reward", "accuracy", "divergence")
"""Means over pairs that are reported beside the loss."""


class PairObjective:
    """Loss of the pairs on a last stage, and the statistics of a step's micro-batches.

    Attributes:
        section: Loss and its parameters.
        sums: Sums of the statistics since they were taken, [4] float64.
    """

    def __init__(self, section: PreferenceSection, device: torch.device) -> None:
        self.section = section
        self.sums = torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)

    def loss_sum(self, losses: Tensor, mask: Tensor, pairs: PairBatch, context: Context) -> Tensor:
        """Return the sum of the pairs' losses; see :func:`pair_loss_sum`."""
        own = own_log_probs(losses, mask, pairs)
        loss, statistics = pair_loss_sum(own, pairs, self.section, context)
        self.sums = self.sums + statistics
        return loss

    def stage_loss(
        self,
        head: object,
        x: Tensor,
        targets: tuple[Tensor, Tensor],
        pairs: object,
        context: Context,
    ) -> Tensor:
        """Return :meth:`loss_sum` of a residual stream x [S/sp, B, D], by the language model's head.

        Args:
            head: Head of the stage.
            x: Residual stream.
            targets: Labels and loss mask, [B, S/cp] each.
            pairs: Pairs of the micro-batch.
            context: Ranks that share the tokens.
        """
        assert isinstance(head, Head), "pairs have log-probabilities"
        assert isinstance(pairs, PairBatch), "a job of this objective reads pairs"
        labels, mask = targets
        return self.loss_sum(head.token_losses(x, labels), mask, pairs, context)

    def take_sums(self) -> Tensor:
        """Return and reset the sums of the statistics."""
        taken, self.sums = self.sums, torch.zeros_like(self.sums)
        return taken


def own_log_probs(losses: Tensor, mask: Tensor, pairs: PairBatch) -> Tensor:
    """Return the sum over this rank's labels of each answer's log-probabilities, [2 P] float64.

    Args:
        losses: Negative log-probability of each label, [S/cp, B].
        mask: Loss mask, [B, S/cp], 0 or 1.
        pairs: Pairs of the micro-batch.
    """
    by_token = -(losses.t() * mask.to(losses.dtype)).double().flatten()
    # one more sum takes what is of no answer
    sums = by_token.new_zeros(len(pairs.counts) + 1)
    return sums.index_add(0, pairs.answers.flatten(), by_token)[:-1]


def sum_over_context(own: Tensor, context: Context) -> Tensor:
    """Return the sums of ``own`` over the context-parallel ranks, without a gradient."""
    return all_reduce(all_reduce(own.detach().clone(), context.inner), context.outer)


def pair_loss_sum(
    own: Tensor, pairs: PairBatch, section: PreferenceSection, context: Context
) -> tuple[Tensor, Tensor]:
    """Return the sum of the pairs' losses, and the sums of their statistics.

    Of context-parallel ranks the first returns them and others 0. The gradient is that of this rank's labels.

    Args:
        own: Sums over this rank's labels, :func:`own_log_probs`.
        pairs: Pairs of the micro-batch.
        section: Loss and its parameters.
        context: Ranks that share the tokens.

    Returns:
        A scalar float64, and [4] float64: rewards of chosen answers, of rejected ones, the number of pairs in
        which the chosen one's is larger, and the divergence that kto estimates.
    """
    whole = sum_over_context(own, context).requires_grad_()
    reference = pairs.reference
    if reference is None:
        assert not section.needs_reference, "a step's pairs have their reference before its passes"
        reference = torch.zeros_like(whole)
    # the loss of whole answers, and its derivative by their log-probabilities
    with torch.enable_grad():
        answers = Answers(
            # any number below 0 where a pair does not count, so that no loss is infinite there
            policy=torch.where(pairs.is_counted[:, None] > 0, whole.view(-1, 2), -1.0),
            reference=reference.view(-1, 2),
            counts=pairs.counts.view(-1, 2).clamp(min=1),
            is_desirable=pairs.is_desirable,
            divergence=None if pairs.baseline is None else pairs.baseline[0],
        )
        by_pair = LOSSES[section.loss_type](answers, section)
        loss = (by_pair * pairs.is_counted).sum()
        (slope,) = torch.autograd.grad(loss, whole)
    # of this rank's tokens: a linear function with the same derivative
    is_first = float(context.index == 0)
    statistics = _statistics(answers, pairs, section) * is_first
    total = loss.detach() * is_first
    return with_gradient(total, (own * slope).sum(), lambda gradient: gradient), statistics


def _statistics(answers: Answers, pairs: PairBatch, section: PreferenceSection) -> Tensor:
    """Return the sums over pairs of STATISTICS; of kto the rewards are scaled to means over answers of their label."""
    counted = pairs.is_counted
    earned = rewards(answers, section).detach() * counted[:, None]
    if pairs.is_desirable is None:
        is_right = (earned[:, 0] > earned[:, 1]).double()
        nothing = torch.zeros_like(is_right)
        return torch.stack((*earned.sum(0), is_right.sum(), nothing.sum()))
    assert pairs.baseline is not None, "a pass before the step estimates it"
    is_right = (kto_margin(answers).detach() > 0).double() * counted
    divergence, of_desirable, of_others = pairs.baseline.unbind()
    good = (earned[:, 0] * pairs.is_desirable).sum() * of_desirable
    bad = (earned[:, 0] * (1 - pairs.is_desirable)).sum() * of_others
    return torch.stack((good, bad, is_right.sum(), divergence * counted.sum()))

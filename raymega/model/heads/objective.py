"""Loss of a head without a vocabulary, on ranks that hold parts of the tokens.

A document's loss is no sum over tokens, as that of pairs of answers in `raymega.model.preference`: context-parallel
ranks sum the scores of their parts, compute the same derivatives, and apply them to their own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from raymega.config.preference import PreferenceSection
from raymega.config.schema import Job, ModelSection
from raymega.model.distillation import DISTILLED
from raymega.model.heads.score_head import ScoreHead
from raymega.model.heads.score_losses import LOSSES
from raymega.model.preference import STATISTICS, sum_over_context
from raymega.parallel.context_parallel.context import Context, ScoreBatch
from raymega.parallel.core.linear_map import with_gradient
from raymega.parallel.tensor_parallel.mappings import reduce_from_tp

ACCURACY = STATISTICS.index("accuracy")


def reported_statistics(job: Job) -> dict[str, int]:
    """Return the statistics that a job reports, by name, each with its place in `preference.STATISTICS`."""
    if job.preference.is_on:
        known = STATISTICS if job.preference.loss_type == "kto" else STATISTICS[:-1]
        return {name: at for at, name in enumerate(known)}
    if job.distillation.is_on:
        return {name: at for at, name in enumerate(DISTILLED)}
    has_right = job.model.head.is_on and job.model.head.kind != "regression"
    return {"accuracy": ACCURACY} if has_right else {}


class ScoreObjective:
    """Loss of the scores on a last stage, and the statistics of a step's micro-batches.

    Attributes:
        sums: Sums of `preference.STATISTICS` since they were taken, float64.
    """

    def __init__(
        self, model: ModelSection, section: PreferenceSection, device: torch.device
    ) -> None:
        self.kind, self.section = model.head.kind, section
        self.sums = torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)

    def stage_loss(  # what a last stage has
        self,
        head: object,
        x: Tensor,
        targets: tuple[Tensor, Tensor],
        scored: object,
        context: Context,
    ) -> Tensor:
        """Return the sum of the losses of a micro-batch's documents, or of its tokens.

        Args:
            head: Head of the stage.
            x: Residual stream, [S/sp, B, D].
            targets: Class of each token and loss mask, [B, S/cp] each; read where tokens have classes.
            scored: Documents with their labels; None where tokens have classes.
            context: Ranks that share the tokens.
        """
        assert isinstance(head, ScoreHead), "the model has a head of this objective"
        if self.kind == "token_classification":
            loss, statistics = _token_loss_sum(head, x, *targets)
        else:
            assert isinstance(scored, ScoreBatch), "a job with such a head reads them"
            sums = head.document_sums(x, scored)
            if self.kind == "embedding":
                loss, statistics = contrast_loss_sum(sums, scored, context)
            else:
                loss, statistics = document_loss_sum(sums, scored, self.kind, self.section, context)
        self.sums = self.sums + statistics
        return loss

    def take_sums(self) -> Tensor:
        """Return and reset the sums of the statistics."""
        taken, self.sums = self.sums, torch.zeros_like(self.sums)
        return taken


def document_loss_sum(
    own: Tensor, scored: ScoreBatch, kind: str, section: PreferenceSection, context: Context
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of a micro-batch's groups of documents, and the sums of their statistics.

    Of context-parallel ranks the first returns them and others 0. The gradient is that of this rank's tokens.

    Args:
        own: Sums over this rank's tokens of each document's scores, [N, C] float64.
        scored: Documents of the micro-batch.
        kind: Kind of the head.
        section: Parameters of the loss of pairs.
        context: Ranks that share the tokens.
    """
    statistics = own.new_zeros(len(STATISTICS)).detach()
    if not len(
        scored.labels
    ):  # no document in any row; backward has the same gradients all the same
        return own.sum(), statistics
    whole = sum_over_context(own, context).requires_grad_()
    # the loss of whole documents, and its derivative by their scores
    with torch.enable_grad():
        scores = whole.view(len(scored.labels), -1)
        losses, found = LOSSES[kind](scores, scored.labels, section)
        loss = (losses * scored.is_counted).sum()
        (slope,) = torch.autograd.grad(loss, whole)
    # of this rank's tokens: a linear function with the same derivative
    is_first = float(context.index == 0)
    statistics[: len(found)] = (found * scored.is_counted).sum(1) * is_first
    total = loss.detach() * is_first
    return with_gradient(total, (own * slope).sum(), lambda gradient: gradient), statistics


def contrast_loss_sum(own: Tensor, scored: ScoreBatch, context: Context) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of a micro-batch's pairs, known already, and the sums of their statistics.

    The gradient is that of the losses of all pairs of the batch by this rank's tokens: in other pairs' losses
    these documents are negatives.

    Args:
        own: Sums over this rank's tokens of each document's states, [N, D] float64.
        scored: Documents of the micro-batch, with their contrast.
        context: Ranks that share the tokens.
    """
    statistics = own.new_zeros(len(STATISTICS)).detach()
    if scored.contrast is None:  # no document in any row
        return own.sum(), statistics
    counts = float(context.index == 0)
    statistics[ACCURACY] = scored.contrast.is_right.sum() * counts
    total = scored.contrast.losses.sum() * counts
    linear = (own * scored.contrast.slopes).sum()
    return with_gradient(total, linear, lambda gradient: gradient), statistics


def _token_loss_sum(
    head: ScoreHead, x: Tensor, labels: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropies of the tokens that have a class, and of the statistics."""
    sp, scores = head.sp, head(x)
    own, counted = labels.t(), mask.t().to(scores.dtype)
    if sp.degree > 1:
        own, counted = sp.own(own), sp.own(counted)
    flat = scores.flatten(0, 1)
    losses = cross_entropy(flat, own.flatten() * counted.flatten().long(), reduction="none")
    is_right = (flat.argmax(1) == own.flatten()) * counted.flatten()
    sums = torch.stack(((losses * counted.flatten()).sum(), is_right.sum().detach())).double()
    sums = reduce_from_tp(sums, sp.tp) if sp.degree > 1 else sums
    statistics = sums.new_zeros(len(STATISTICS)).detach()
    statistics[ACCURACY] = sums[1].detach()
    return sums[0], statistics

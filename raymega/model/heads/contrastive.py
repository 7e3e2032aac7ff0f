"""InfoNCE with in-batch negatives (van den Oord et al. 2018), of whole embeddings.

The formula is sentence-transformers' MultipleNegativesRankingLoss: the cross entropy of an anchor's similarities
with the positives of all pairs, of which its own is right. It knows nothing of ranks: the step gives it the
embeddings of its whole batch (GradCache, Gao et al. 2021), and the loss applies the derivatives to their tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from raymega.config.heads.section import HeadSection
from raymega.parallel.context_parallel.context import Contrast

SCORES_AT_ONCE = 2**24
"""Similarities that are computed at a time, 128 MiB in float64: those of all pairs grow with their square."""


def contrast_losses(sums: Tensor, head: HeadSection) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair [P], and 1 where its own positive is most similar to the anchor, else 0.

    Args:
        sums: Pooled states of the batch's documents, [2 P, D]: an anchor, then its positive.
        head: Temperature, and whether embeddings are normalised.
    """
    return _anchor_losses(*_sides(sums, head), head, first=0)


def contrast_of(sums: Tensor, head: HeadSection) -> Contrast:
    """Return the losses of a whole batch's pairs, and the derivative of their sum by each document's pooled states."""
    with torch.enable_grad():
        held = sums.detach().requires_grad_()
        sides = _sides(held, head)
        anchors, positives = (side.detach().requires_grad_() for side in sides)
        # some anchors with all positives; a positive's slopes are sums over all of them
        slopes, of_positives = torch.empty_like(anchors), torch.zeros_like(positives)
        step, found = max(1, SCORES_AT_ONCE // len(positives)), list[tuple[Tensor, Tensor]]()
        for first in range(0, len(anchors), step):
            here = slice(first, first + step)
            own = anchors[here]
            losses, is_right = _anchor_losses(own, positives, head, first=first)
            slopes[here], more = torch.autograd.grad(losses.sum(), (own, positives))
            of_positives += more
            found.append((losses.detach(), is_right))
        (of_sums,) = torch.autograd.grad(sides, held, (slopes, of_positives))
    losses, is_right = (torch.cat(each) for each in zip(*found, strict=True))
    return Contrast(losses=losses, is_right=is_right, slopes=of_sums)


def _sides(sums: Tensor, head: HeadSection) -> tuple[Tensor, Tensor]:
    """Return the embeddings of anchors and of positives, [P, D] each."""
    embeddings = normalize(sums, dim=-1) if head.normalize else sums
    anchors, positives = embeddings.view(-1, 2, sums.shape[-1]).unbind(1)
    return anchors, positives


def _anchor_losses(
    anchors: Tensor, positives: Tensor, head: HeadSection, *, first: int
) -> tuple[Tensor, Tensor]:
    """Return loss and rightness of ``anchors`` [N, D], of which the first belongs to positive number ``first`` of all."""
    scores = anchors @ positives.T / head.temperature
    labels = torch.arange(first, first + len(scores), device=scores.device)
    losses = cross_entropy(scores, labels, reduction="none")
    return losses, (scores.argmax(1) == labels).to(scores.dtype).detach()

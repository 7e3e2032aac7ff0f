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


def contrast_losses(sums: Tensor, head: HeadSection) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair [P], and 1 where its own positive is most similar to the anchor, else 0.

    Args:
        sums: Pooled states of the batch's documents, [2 P, D]: an anchor, then its positive.
        head: Temperature, and whether embeddings are normalised.
    """
    embeddings = normalize(sums, dim=-1) if head.normalize else sums
    anchors, positives = embeddings.view(-1, 2, sums.shape[-1]).unbind(1)
    scores = anchors @ positives.T / head.temperature
    labels = torch.arange(len(scores), device=scores.device)
    losses = cross_entropy(scores, labels, reduction="none")
    return losses, (scores.argmax(1) == labels).to(scores.dtype).detach()


def contrast_of(sums: Tensor, head: HeadSection) -> Contrast:
    """Return the losses of a whole batch's pairs, and the derivative of their sum by each document's pooled states."""
    with torch.enable_grad():
        held = sums.detach().requires_grad_()
        losses, is_right = contrast_losses(held, head)
        (slopes,) = torch.autograd.grad(losses.sum(), held)
    return Contrast(losses=losses.detach(), is_right=is_right, slopes=slopes)

"""Contrastive losses of whole embeddings: formula, derivative and accuracy."""

import pytest
import torch
from torch.nn.functional import cosine_similarity

from raymega.config.heads.section import HeadSection
from raymega.model.heads import contrastive
from raymega.model.heads.contrastive import contrast_losses, contrast_of


def _sums(num_pairs=4, width=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2 * num_pairs, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("normalize", [True, False])
def test_losses_are_those_of_the_formula(normalize):
    head = HeadSection(kind="embedding", temperature=0.2, normalize=normalize)
    sums = _sums()
    losses, _ = contrast_losses(sums, head)
    for number, loss in enumerate(losses):
        scores = [
            cosine_similarity(sums[2 * number], other, dim=0)
            if normalize
            else sums[2 * number] @ other
            for other in sums[1::2]
        ]
        each = torch.stack(scores) / 0.2
        torch.testing.assert_close(loss, each.logsumexp(0) - each[number])


def test_slopes_are_derivatives_of_the_sum_of_all_losses():
    head, sums = HeadSection(kind="embedding"), _sums()
    found = contrast_of(sums, head)
    step = 1e-6 * _sums(seed=1)
    ahead, behind = (contrast_losses(sums + sign * step, head)[0].sum() for sign in (1, -1))
    torch.testing.assert_close((found.slopes * step).sum(), (ahead - behind) / 2, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.losses, contrast_losses(sums, head)[0])


@pytest.mark.parametrize("normalize", [True, False])
def test_few_similarities_at_a_time_are_those_of_all(normalize, monkeypatch):
    head, sums = HeadSection(kind="embedding", normalize=normalize), _sums(num_pairs=7)
    held = sums.clone().requires_grad_()
    losses, is_right = contrast_losses(held, head)
    (slopes,) = torch.autograd.grad(losses.sum(), held)
    sizes = []
    product = contrastive.cross_entropy
    monkeypatch.setattr(
        contrastive,
        "cross_entropy",
        lambda x, *y, **z: sizes.append(x.numel()) or product(x, *y, **z),
    )
    monkeypatch.setattr(contrastive, "SCORES_AT_ONCE", 22)
    found = contrast_of(sums, head)
    assert sizes == [21, 21, 7]
    torch.testing.assert_close(found.losses, losses.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.slopes, slopes, rtol=1e-10, atol=1e-12)
    assert torch.equal(found.is_right, is_right)


def test_an_anchor_is_right_where_its_own_positive_is_nearest():
    a, b = torch.eye(4, dtype=torch.float64)[:2]
    head = HeadSection(kind="embedding")
    assert contrast_losses(torch.stack([a, a, b, b]), head)[1].tolist() == [1.0, 1.0]
    assert contrast_losses(torch.stack([a, b, b, a]), head)[1].tolist() == [0.0, 0.0]
    # of a single pair there is nothing to tell apart
    assert contrast_losses(torch.stack([a, b]), head)[0].tolist() == [0.0]

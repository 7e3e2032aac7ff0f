"""DoRA's norms and products against their formulas, with torch's own gradients."""

import pytest
import torch

from raymega.parallel.tensor_parallel.magnitudes import rescaled, row_norms

LIMIT = 1e-12


def _drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("experts", [(), (3,)], ids=["dense", "experts"])
def test_norms_are_those_of_the_rows_of_the_sum(experts):
    w, a, b = _drawn(*experts, 7, 5), _drawn(*experts, 2, 5, seed=1), _drawn(*experts, 7, 2, seed=2)
    wanted = (w + 1.5 * b @ a).norm(dim=-1)
    torch.testing.assert_close(row_norms(w, a, b, 1.5, None), wanted, rtol=LIMIT, atol=0)
    # the weights themselves, where B is zero; and never zero
    torch.testing.assert_close(row_norms(w, a, 0 * b, 1.5, None), w.norm(dim=-1))
    assert row_norms(0 * w, a, 0 * b, 1.5, None).min() > 0


def test_narrow_weights_have_norms_in_float32():
    w = _drawn(4, 8).bfloat16()
    norms = row_norms(w, _drawn(2, 8).bfloat16(), torch.zeros(4, 2).bfloat16(), 1.0, None)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms, w.float().norm(dim=-1))
    # magnitudes that are the norms change no bit
    z = _drawn(3, 4).bfloat16()
    assert torch.equal(rescaled(z, norms, norms), z)


@pytest.mark.parametrize("counts", [None, (2, 0, 3)], ids=["dense", "experts"])
def test_gradients_take_the_norms_for_constants(counts):
    shape = (4,) if counts is None else (3, 4)
    z, m = _drawn(5, 4).requires_grad_(), _drawn(*shape, seed=1).requires_grad_()
    norms, grad = _drawn(*shape, seed=2).abs(), _drawn(5, 4, seed=3)
    sizes = None if counts is None else torch.tensor(counts)
    factors = m / norms
    wanted = z * (factors if sizes is None else factors.repeat_interleave(sizes, 0))
    found = rescaled(z, m, norms, counts=sizes)
    torch.testing.assert_close(found, wanted, rtol=LIMIT, atol=LIMIT)
    for ours, theirs in zip(
        torch.autograd.grad(found, (z, m), grad),
        torch.autograd.grad(wanted, (z, m), grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=LIMIT, atol=LIMIT)

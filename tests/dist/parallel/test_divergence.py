"""Divergences over a cut and padded vocabulary equal the formula on the whole one, values and gradients."""

import pytest
import torch

from raymega.parallel.tensor_parallel.divergence import (
    DivergenceTerms,
    divergence_from_top,
    vocab_parallel_divergence,
)
from raymega.plan.grid import Grid
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist
S, B, V, K, LIMIT = 4, 3, 20, 5, 1e-13
TABLES = {"no padding": 20, "some": 24, "ranks with padding only": 64}
FORWARD = DivergenceTerms(vocab_size=V, temperature=1.7)
REVERSE = DivergenceTerms(vocab_size=V, temperature=0.6, is_reverse=True)


def _inputs(columns):
    """Logits of model and teacher, whose padding is largest, and a factor for each token's divergence."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (
        torch.randn(S, B, columns, generator=generator, dtype=torch.float64) * 3 for _ in range(2)
    )
    for each in (logits, teacher):
        each[..., V:] = 50.0
    return logits, teacher, torch.randn(S, B, generator=generator, dtype=torch.float64)


def _top(teacher):
    return teacher[..., :V].topk(K, dim=-1)


def _run(env, columns, kind):
    """Divergences and this rank's columns of the gradient."""
    tp = env.groups.tp
    logits, teacher, factor = _inputs(columns)
    mine = slice(columns // tp.size * tp.index, columns // tp.size * (tp.index + 1))
    own = logits[..., mine].clone().requires_grad_()
    if kind == "top":
        top, ids = _top(teacher)
        found = divergence_from_top(own, ids, top, tp, FORWARD)
    else:
        terms = FORWARD if kind == "forward" else REVERSE
        found = vocab_parallel_divergence(own, teacher[..., mine], tp, terms)
    (found * factor).sum().backward()
    return found.detach(), own.grad


def _formula(columns, kind):
    """The definition: the sum of p (log p - log q) over the tokens, and autograd's derivative."""
    logits, teacher, factor = _inputs(columns)
    logits.requires_grad_()
    terms = REVERSE if kind == "reverse" else FORWARD
    q = (logits[..., :V] / terms.temperature).log_softmax(-1)
    p = (teacher[..., :V] / terms.temperature).log_softmax(-1)
    if kind == "top":
        top, ids = _top(teacher)
        p, q = (top / terms.temperature).log_softmax(-1), q.gather(-1, ids)
    if kind == "reverse":
        p, q = q, p
    found = (p.exp() * (p - q)).sum(-1)
    (found * factor).sum().backward()
    return found.detach(), logits.grad


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.wide), 4])
def test_divergences_are_those_of_the_whole_vocabulary(tp):
    results = run_grid(_run_all, Grid(tp=tp))
    for case, (columns, kind) in enumerate(_cases()):
        values, gradient = _formula(columns, kind)
        parts = [result[case] for result in results]
        for found, _ in parts:
            torch.testing.assert_close(found, values, rtol=LIMIT, atol=LIMIT)
        whole = torch.cat([part for _, part in parts], -1)
        torch.testing.assert_close(whole, gradient, rtol=LIMIT, atol=LIMIT)
        assert not whole[..., V:].any(), "padding has no gradient"


def _cases():
    return [
        (columns, kind) for columns in TABLES.values() for kind in ("forward", "reverse", "top")
    ]


def _run_all(env):
    return [_run(env, *case) for case in _cases()]


def test_narrow_logits_have_a_divergence_in_float32():
    ((found, gradient),) = run_grid(_run_narrow, Grid())
    assert found.dtype == torch.float32 and gradient.dtype == torch.bfloat16


def _run_narrow(env):
    logits, teacher, _ = (each.bfloat16() for each in _inputs(24))
    found = vocab_parallel_divergence(logits.requires_grad_(), teacher, env.groups.tp, FORWARD)
    found.sum().backward()
    return found.detach(), logits.grad


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_gradients_of_unlikely_tokens_outlast_float16(kind):
    """Probabilities of most tokens are near the format's smallest number until the loss scale comes with backward."""
    ((half, wide),) = run_grid(_run_half, Grid(), kind)
    assert half.dtype == torch.float16 and wide.abs().max() < 65504
    torch.testing.assert_close(half.float(), wide, rtol=5e-3, atol=0)


def _run_half(env, kind):
    """Gradients in float16 and float32 of the same logits, for tokens of a probability of 1e-6, scaled by 2^21."""
    terms = DivergenceTerms(vocab_size=9, temperature=1.0, is_reverse=kind == "reverse")
    logits, teacher = torch.full((2, 1, 1, 9), -14.0).half()
    logits[..., 0] = teacher[..., 0] = 0.0
    teacher[..., 1:] -= torch.arange(8) / 8 + 1
    found = []
    for dtype in (torch.float16, torch.float32):
        own = logits.to(dtype, copy=True).requires_grad_()
        one = vocab_parallel_divergence(own, teacher.to(dtype), env.groups.tp, terms)
        (one.sum() * 2.0**21).backward()
        found.append(own.grad[..., 1:])
    return tuple(found)
